/* SPDX-License-Identifier: Apache-2.0 */
/* Collectives between the ranks of a group, behind one table.
 * `local` (processes of one host over shared memory) is the specification;
 * other providers must behave the same. Collectives are called by all ranks
 * in the same order. Invariant: every call is bounded by its timeout, and
 * after one failure or abort every later call on that rank fails. */
#ifndef FERRY_COMM_COMM_H
#define FERRY_COMM_COMM_H

#include <ferry/tensor.h>
#include <stdbool.h>

typedef enum ferry__reduce_op {
    FERRY__REDUCE_SUM,
    FERRY__REDUCE_MAX
} ferry__reduce_op;

typedef struct ferry__comm ferry__comm;
struct ferry__memory;
struct ferry__stream;
struct ferry__stream_options;

/* Every method blocks the caller until its own part is done: a buffer may be
 * reused on return. timeout_ms > 0. FERRY_ETIMEOUT names the operation, the
 * rank waited for and the bound; FERRY_ECANCELED after abort; FERRY_EPEER
 * names a rank that died. Optional methods may be NULL: FERRY_ENOTSUP. */
typedef struct ferry__comm_ops {
    size_t size;
    const char *provider; /* "local", … */
    ferry_status (*broadcast)(ferry__comm *c, void *bytes, size_t size_bytes,
                              int32_t root, int64_t timeout_ms);
    /* Element-wise over f32 (or f64, i32, i64); in place; the result is
     * bit-equal on all ranks (ranks are added in rank order). */
    ferry_status (*all_reduce)(ferry__comm *c, void *data, int64_t count,
                               ferry_dtype dtype, ferry__reduce_op op,
                               int64_t timeout_ms);
    /* Each rank gives size_bytes; out takes world_size × size_bytes in rank
     * order. out NULL is legal on ranks that do not want the result. */
    ferry_status (*all_gather)(ferry__comm *c, const void *bytes,
                               size_t size_bytes, void *out,
                               int64_t timeout_ms);
    ferry_status (*barrier)(ferry__comm *c, int64_t timeout_ms);
    ferry_status (*send)(ferry__comm *c, const void *bytes, size_t size_bytes,
                         int32_t to, int64_t timeout_ms);
    ferry_status (*recv)(ferry__comm *c, void *bytes, size_t size_bytes,
                         int32_t from, int64_t timeout_ms);
    /* Wakes all ranks of this group with FERRY_ECANCELED. Any thread. */
    void (*abort)(ferry__comm *c);
    void (*close)(ferry__comm *c); /* never blocks on peers */

    /* ---- optional ---- */

    /* Makes [bytes, bytes + size_bytes) readable by `pull`; writes the key
     * that a puller gives (at most FERRY__PULL_KEY bytes), which the caller
     * carries there. The memory must stay until unexpose or close. */
    ferry_status (*expose)(ferry__comm *c, void *bytes, size_t size_bytes,
                           void *out_key, size_t *out_key_bytes);
    void (*unexpose)(ferry__comm *c, void *bytes);
    /* One-sided get of size_bytes from `offset` in memory that rank `from`
     * exposed, without a call on that rank. */
    ferry_status (*pull)(ferry__comm *c, void *bytes, size_t size_bytes,
                         int32_t from, const void *key, size_t key_bytes,
                         uint64_t offset, int64_t timeout_ms);
    /* The provider's own way to stream (stream.h). NULL: whole buffers by
     * broadcast. */
    ferry_status (*stream_open)(ferry__comm *c,
                                const struct ferry__stream_options *options,
                                struct ferry__stream **out);
    /* How bytes go, in words, for status and logs: "tcp 10.0.0.2:4411",
     * "ucx rc_mlx5". NULL: the provider's name says it. */
    void (*describe)(ferry__comm *c, char *out, size_t size_bytes);
    /* Ends the group as abort does, but the others' calls fail with this
     * rank's words: "rank 2 failed before: …". NULL: abort. Any thread. */
    void (*fail)(ferry__comm *c, ferry_status status, const char *line);
    /* Waits until the connection of rank `peer` has ended; FERRY_DONE: until
     * stop_fd could be read. It reads nothing of the connection, so a thread
     * may be in it beside the owner's calls; it must be back before close.
     * NULL: nothing tells between calls that a rank is gone. */
    ferry_status (*watch)(ferry__comm *c, int32_t peer, int stop_fd);
    /* Why that connection has ended, asked after watch by the thread that may
     * use the group: FERRY_OK when the rank left in order, else what became
     * of it, in its own words if it told any. NULL with watch. */
    ferry_status (*why_ended)(ferry__comm *c, int32_t peer);
    /* Memory of the group's kind for large buffers that calls are given in
     * place: where a call cannot be ended and may still write, free leaves
     * the memory to it. NULL: any memory is as good. */
    ferry_status (*alloc)(ferry__comm *c, size_t size_bytes, void **out);
    void (*free)(ferry__comm *c, void *memory);
    /* A count that grows as bytes of calls and streams move, within a large
     * buffer too, and a little later than they do. Any thread. NULL: nothing
     * tells before a call is done. */
    uint64_t (*moved)(ferry__comm *c);
} ferry__comm_ops;

#define FERRY__PULL_KEY 512
#define FERRY__WAIT_NS  INT64_C(1000000)

struct ferry__comm {
    const ferry__comm_ops *ops;
    int32_t rank, world_size;
    /* Asked in every wait, at least every 100 ms, by the thread that waits
     * and by none other; a failure ends the call (and the group) with it.
     * Set by the owner between calls; NULL: only timeouts bound. */
    ferry_status (*check)(void *arg, const char *what);
    void *check_arg;
    /* Told, with check_arg, of each wait of more than FERRY__WAIT_NS within a
     * call or a stream, once it is over: rank `peer` (-1: which is not known)
     * at `address` ("": not known) was waited for from `from_ns` until now.
     * By the thread that waited. NULL: nobody wants to know. */
    void (*waited)(void *arg, int32_t peer, const char *address,
                   int64_t from_ns);
    /* The memory that buffers must be of; NULL: the host's. */
    const struct ferry__memory *memory;
    /* A call in which nothing moves for the bound of the group ends by
     * itself, however long its own timeout is. */
    bool bounds_silence;
};

/* Makes the shared segment of a local group: one descriptor (memfd, sealed
 * against shrinking) that the creator hands to every rank (by fork or over a
 * socket). `slot_bytes` is the piece size of pipelined operations, 0 = 1 MiB.
 * A generation number in it makes a stale rank fail. */
ferry_status ferry__comm_local_create(int32_t world_size, size_t slot_bytes,
                                      int *out_fd);
/* Joins as `rank`; duplicates the descriptor. FERRY_EEXIST: the rank is
 * taken by a living process, naming both pids. */
ferry_status ferry__comm_local_open(int fd, int32_t rank, ferry__comm **out);
void ferry__comm_close(ferry__comm **comm);
/* When a wait of a provider begins: 0 where nobody wants to know. */
int64_t ferry__comm_wait_ns(const ferry__comm *c);
/* Tells of a wait since then, if it was long. */
void ferry__comm_waited(ferry__comm *c, int32_t peer, const char *address,
                        int64_t from_ns);

#endif
