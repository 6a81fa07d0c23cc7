/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of the provider `nccl` share. NCCL's calls may block for as
 * long as a peer stays away, so a thread of the communicator's own makes
 * them; the caller waits for it, with the bounds of comm.h.
 * Invariant: what the thread uses belongs to the communicator, which is
 * freed by the last of the two; so a call that cannot be ended is left to
 * the thread. That holds for the bytes of a call too: they lie in buffers of
 * comm_ops.alloc, in device memory, or are copied by the caller. */
#ifndef FERRY_COMM_NCCL_COMM_H
#define FERRY_COMM_NCCL_COMM_H

#include "base/clock.h"
#include "comm/nccl_library.h"
#include "comm/provider.h"
#include "device/memory.h"

#include <pthread.h>

typedef enum nccl__kind {
    NCCL__INIT,
    NCCL__BROADCAST,
    NCCL__ALL_REDUCE,
    NCCL__ALL_GATHER,
    NCCL__SEND,
    NCCL__RECV
} nccl__kind;

typedef struct nccl__job {
    nccl__kind kind;
    const char *name; /* "broadcast", … */
    const void *in;   /* NULL: this rank gives nothing */
    void *out;        /* NULL: it wants nothing */
    size_t in_bytes, out_bytes;
    int64_t count; /* of a sum */
    ferry_dtype dtype;
    ferry__reduce_op op;
    int32_t peer; /* root, destination or source */
    ncclUniqueId id;
} nccl__job;

typedef enum nccl__state { NCCL__IDLE, NCCL__GIVEN, NCCL__DONE } nccl__state;

/* Memory that NCCL can work on, for what is handed over in other memory. */
typedef struct nccl__staging {
    char *memory;
    size_t capacity;
} nccl__staging;

/* A buffer of comm_ops.alloc. */
typedef struct nccl__buffer {
    struct nccl__buffer *next;
    char *memory;
    size_t size_bytes;
} nccl__buffer;

typedef struct nccl__comm {
    ferry__comm base;
    const ferry__nccl_library *lib;
    int64_t no_progress_ms;

    const ferry__memory *memory; /* that NCCL works on */

    /* Of the thread alone. */
    ferry__queue *queue;
    ferry__event *event;
    nccl__staging staged_in, staged_out;

    /* Of the caller between calls, of the thread in one: host memory. */
    nccl__staging copied_in, copied_out;

    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    /* Under the lock. */
    int holders; /* the owner, the thread, an abort under way */
    nccl__state state;
    nccl__job job;
    int64_t job_began_ns;
    uint64_t moved;  /* by jobs before; while one runs see nccl_call.c */
    ncclComm_t comm; /* NULL before its init and after its end */
    bool in_library; /* the thread is in a call with `comm` */
    bool stop, closing, finished;
    bool unfinished; /* the device did not let go of the last job */
    nccl__buffer *buffers, *left; /* in use; left to the thread */
    ferry_status result;          /* of the job */
    char line[1024];
    ferry_status failed; /* for good */
    char failed_line[1024];
} nccl__comm;

/* ---- nccl_thread.c ---- */

ferry_status ferry__nccl_comm_create(const ferry__nccl_library *lib,
                                     const ferry__group *group,
                                     const ferry__memory *memory,
                                     nccl__comm **out);
void ferry__nccl_comm_abort(nccl__comm *c);
void ferry__nccl_comm_close(nccl__comm *c);

/* Under the lock. Stopping ends what is under way, and the first failure is
 * the answer to every later call. */
void ferry__nccl_comm_stop(nccl__comm *c);
ferry_status ferry__nccl_comm_fail(nccl__comm *c, ferry_status status,
                                   const char *line);

/* For the thread: between the two, `*out` may be used, and be ended by an
 * abort of another thread. FERRY_ECANCELED when it was. */
ferry_status ferry__nccl_comm_enter(nccl__comm *c, ncclComm_t *out);
void ferry__nccl_comm_leave(nccl__comm *c);
/* Asks for the error that came after a call, and for the words of one that a
 * call answered; an abort waits for the answer. */
ferry_status ferry__nccl_comm_poll(nccl__comm *c, const char *what);
ferry_status ferry__nccl_comm_explain(nccl__comm *c, const char *what,
                                      ncclResult_t result);
bool ferry__nccl_comm_stopped(nccl__comm *c);
void ferry__nccl_comm_opened(nccl__comm *c, ncclComm_t comm);
/* Aborts `comm` unless another thread does or did. */
void ferry__nccl_comm_end(nccl__comm *c);

/* ---- nccl_call.c ---- */

/* Gives the thread a job and waits for it; every failure ends the group. */
ferry_status ferry__nccl_comm_call(nccl__comm *c, const nccl__job *job,
                                   int64_t timeout_ms);
/* The same with a bound that was armed before. */
ferry_status ferry__nccl_comm_call_until(nccl__comm *c, const nccl__job *job,
                                         const ferry__deadline *until);
uint64_t ferry__nccl_comm_moved(nccl__comm *c); /* comm_ops.moved */

/* ---- nccl_buffers.c ---- */

/* comm_ops.alloc and free. */
ferry_status ferry__nccl_comm_alloc(nccl__comm *c, size_t size_bytes,
                                    void **out);
void ferry__nccl_comm_free(nccl__comm *c, void *memory);
/* Under the lock: puts copies in the place of what may not be left to a call,
 * and takes the result out of them. */
ferry_status ferry__nccl_copy_in(nccl__comm *c, nccl__job *job);
void ferry__nccl_copy_out(const nccl__comm *c, const nccl__job *from,
                          const nccl__job *job);

/* ---- nccl_job.c ---- */

/* Carries a job out, on the communicator's thread. */
ferry_status ferry__nccl_job_run(nccl__comm *c, const nccl__job *job);
/* Frees queue, event and staging. */
void ferry__nccl_job_end(nccl__comm *c);

#endif
