/* SPDX-License-Identifier: Apache-2.0 */
/* A rig for transfers on one host: worker processes (or workers of this
 * process) that store row- and column-cut parameters, a client that reaches
 * them over a plain relay, and a source whose bytes are a function of (seed,
 * parameter, byte). Expected bytes are computed here by index arithmetic; no
 * view, plan or loader of the library has a part in it. */
#ifndef FERRY_TESTS_HARNESS_IPC_RIG_H
#define FERRY_TESTS_HARNESS_IPC_RIG_H

#include <ferry/trainer.h>
#include <ferry/worker.h>
#include <sys/types.h>

#define RIG_RANKS_MAX 4

typedef enum rig_cut { RIG_WHOLE, RIG_ROWS, RIG_COLS } rig_cut;

typedef struct rig_param {
    const char *name;
    ferry_dtype dtype;
    int32_t ndim;
    int64_t shape[3];
    rig_cut cut;
    bool trap; /* loaded by a step that does what the rig's trap says */
} rig_param;

typedef enum rig_action {
    RIG_NOTHING,
    RIG_SLEEP, /* trap_ms, each time */
    RIG_FAIL,  /* "trap sprung" */
    RIG_KILL   /* SIGKILL to the worker's own process */
} rig_action;

typedef struct rig_options {
    const char *backend; /* NULL: "ipc" */
    const rig_param *params;
    size_t count;
    int32_t tp_size;   /* 0 = 1 */
    int32_t replicas;  /* 0 = 1 */
    bool local;        /* workers of this process, else forked ones */
    bool same_replica; /* every worker says that it is of replica 0 */
    ferry_commit commit;
    rig_action action;
    int32_t action_rank; /* only there; -1: on all */
    int trap_ms;
    int64_t no_progress_ms;
} rig_options;

typedef struct rig rig;

rig *rig_open(const rig_options *options);
void rig_close(rig *r);
/* Knows what the workers are and how many, except of local ones. */
ferry_client rig_client(rig *r);
pid_t rig_pid(const rig *r, int32_t rank);
/* Kills a worker process and starts a new one in its place. */
void rig_restart(rig *r, int32_t rank);
/* The client's update calls no longer reach this rank. */
void rig_pass_by(rig *r, int32_t rank);
/* NULL when every rank stores the bytes of `seed`, else what differs. */
const char *rig_differs(rig *r, uint64_t seed);
/* ferry_worker_status of a rank. Static buffer. */
const char *rig_status(rig *r, int32_t rank);
/* One call on every rank without a trainer ("update", text, …). */
ferry_status rig_call(rig *r, const char *call, const char *text);
/* Number of open descriptors of a rank's process. */
int rig_fds(const rig *r, int32_t rank);

/* ---- the source ---- */

#define RIG_SHARED  0x1u  /* bytes in one ferry_shared_alloc arena */
#define RIG_STREAM  0x2u  /* not stable: one reused buffer */
#define RIG_STRIDED 0x4u  /* 2-D parameters are stored transposed */
#define RIG_MIXED   0x8u  /* every other parameter in the arena */
#define RIG_DEVICE  0x10u /* in memory of devices (device_use) by turns */

typedef struct rig_source rig_source;
rig_source *rig_source_open(const rig_param *params, size_t count,
                            unsigned flags);
void rig_source_close(rig_source *s);
void rig_source_fill(rig_source *s, uint64_t seed);
ferry_source rig_source_of(rig_source *s);
/* The arena of RIG_SHARED, where parameters lie one after another. */
const char *rig_source_arena(const rig_source *s);
/* Where parameter i lies, unless it streams. */
const char *rig_source_bytes(const rig_source *s, size_t i);
/* Item `at` (from 0) is called another name; SIZE_MAX: none. */
void rig_source_misname(rig_source *s, size_t at);

/* Entries of a folder, "." and ".." not counted. */
int rig_count_entries(const char *path);

#endif
