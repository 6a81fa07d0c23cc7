/* SPDX-License-Identifier: Apache-2.0 */
/* The shared segment of a local group and how its ranks wait for each other.
 * Layout, native byte order (all ranks are processes of one host):
 *   1. header, one page: magic, version, world size, sizes, abort flag
 *   2. one local__rank per rank
 *   3. one local__pair per ordered pair (from * world_size + to)
 *   4. page aligned: per rank two slots of slot_bytes, for even and odd steps
 *   5. per ordered pair two pieces of pair_bytes
 * Invariant: a slot is written only when every rank has finished the step
 * two before, and read only between the writer's post and the reader's done;
 * so a small all-reduce costs one exchange. */
#ifndef FERRY_COMM_LOCAL_SEGMENT_H
#define FERRY_COMM_LOCAL_SEGMENT_H

#include "base/clock.h"
#include "comm/comm.h"
#include "device/gate.h"

typedef struct local__header {
    uint32_t magic, version;
    int32_t world_size;
    uint32_t reserved;
    uint64_t slot_bytes, pair_bytes, total_bytes;
    uint64_t generation;      /* of the group: random */
    _Atomic uint32_t aborted; /* 1 + the aborting rank */
} local__header;

typedef enum local__state {
    LOCAL__FREE,
    LOCAL__JOINED,
    LOCAL__FAILED, /* its own call failed: it takes part in nothing more */
    LOCAL__LEFT
} local__state;

/* What a rank is doing in a step, so that ranks that call different things
 * are told so instead of exchanging bytes. */
typedef struct local__tag {
    uint64_t what; /* operation, root, dtype, operator */
    uint64_t size_bytes;
} local__tag;

/* Memory of its own that a rank lets the others read. */
#define LOCAL__EXPOSED 64

typedef struct local__exposed {
    _Atomic uint64_t serial; /* 0: none; never the same again */
    _Atomic uint64_t address, size_bytes;
} local__exposed;

typedef struct local__rank {
    ferry__gate posted; /* steps whose slot is filled */
    ferry__gate done;   /* steps that this rank needs no slot of any more */
    _Alignas(64) _Atomic uint32_t state;
    _Atomic uint32_t owner; /* grows with each process that takes the rank */
    _Atomic int32_t pid;
    _Atomic uint64_t started; /* of the process, so that a reused pid is not
                                 taken for it */
    local__tag tags[2];
    local__exposed exposed[LOCAL__EXPOSED];
} local__rank;

typedef struct local__pair {
    ferry__gate sent, taken;             /* pieces */
    _Alignas(64) uint64_t size_bytes[2]; /* of the message a piece is of */
} local__pair;

typedef struct local__comm {
    ferry__comm base;
    int fd;
    size_t total_bytes;
    local__header *header;
    local__rank *ranks;
    local__pair *pairs;
    char *slots, *pieces;
    size_t slot_bytes, pair_bytes;
    uint32_t step;
    uint32_t owner;
    uint64_t serial;     /* of the last memory that was exposed */
    ferry_status failed; /* of this rank, for good */
    char line[1024];
} local__comm;

/* One call's view of the wait: for messages and the bound. */
typedef struct local__call {
    const char *name;
    ferry__deadline deadline;
} local__call;

char *ferry__local_slot(const local__comm *c, int32_t rank, uint32_t step);
char *ferry__local_piece(const local__comm *c, int32_t from, int32_t to,
                         uint32_t count);

/* FERRY_OK when this rank may start a call; else the failure it had before,
 * an abort, or its rank being taken by another process. */
ferry_status ferry__local_enter(local__comm *c, const char *name,
                                int64_t timeout_ms, local__call *out_call);
/* Waits until `gate`, which `peer` raises, has reached `want`. */
ferry_status ferry__local_await(local__comm *c, const local__call *call,
                                ferry__gate *gate, uint32_t want, int32_t peer);
/* Records a failure for good and tells the others. Returns status. */
ferry_status ferry__local_break(local__comm *c, ferry_status status);
void ferry__local_wake_all(local__comm *c);
/* FERRY_OK to go on waiting for `peer`; else that it is gone, that the group
 * was aborted, or what the owner's check says. */
ferry_status ferry__local_ask(local__comm *c, const local__call *call,
                              int32_t peer);

/* ---- local_pull.c ---- */

ferry_status ferry__local_expose(ferry__comm *comm, void *bytes,
                                 size_t size_bytes, void *out_key,
                                 size_t *out_key_bytes);
void ferry__local_unexpose(ferry__comm *comm, void *bytes);
ferry_status ferry__local_pull(ferry__comm *comm, void *bytes,
                               size_t size_bytes, int32_t from, const void *key,
                               size_t key_bytes, uint64_t offset,
                               int64_t timeout_ms);
void ferry__local_unexpose_all(local__comm *c);

/* The table of local groups (local.c). */
extern const ferry__comm_ops ferry__local_ops;

#endif
