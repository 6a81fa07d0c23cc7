/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of libferry_nccl_host share: NCCL's interface over a `tcp`
 * group of host memory. Calls are done on return; streams are ignored.
 * Invariant: every wait ends by the setting nccl_host_timeout_ms, and a call
 * that is not carried out never answers success. */
#ifndef FERRY_NCCL_HOST_H
#define FERRY_NCCL_HOST_H

#include "comm/comm.h"
#include "comm/nccl_abi.h"

#include <pthread.h>

typedef enum ferry__nccl_kind {
    FERRY__NCCL_INIT,
    FERRY__NCCL_BROADCAST,
    FERRY__NCCL_ALL_REDUCE,
    FERRY__NCCL_REDUCE,
    FERRY__NCCL_ALL_GATHER,
    FERRY__NCCL_REDUCE_SCATTER,
    FERRY__NCCL_SEND,
    FERRY__NCCL_RECV
} ferry__nccl_kind;

/* One call, checked; kept by value until its group ends. */
typedef struct ferry__nccl_op {
    ferry__nccl_kind kind;
    ncclComm_t comm;
    const void *send;
    void *recv;
    size_t count;
    ferry_dtype dtype;
    ncclRedOp_t reduction;
    int32_t peer;    /* root, destination or source */
    ncclUniqueId id; /* of an init */
} ferry__nccl_op;

/* A communicator. It lives in a list of all, so that a handle that was
 * destroyed is told from one that lives. */
struct ncclComm {
    struct ncclComm *next;
    int32_t rank, world_size;
    /* Under the list's lock. */
    unsigned users; /* calls under way, and 1 while it is listed */
    bool aborted;
    ferry__comm *group; /* NULL until its init is done */
    ncclResult_t failed;
    char line[512];
    pthread_mutex_t turn; /* of the one call that may use the group */
};

/* ---- nccl_host_comm.c ---- */

ferry_status ferry__nccl_comm_create(int32_t rank, int32_t world_size,
                                     ncclComm_t *out);
/* Holds the communicator: FERRY_EINVAL when it is none (any more). */
ferry_status ferry__nccl_comm_enter(ncclComm_t comm);
/* The last one frees it. */
void ferry__nccl_comm_leave(ncclComm_t comm);
/* Takes the group that its init opened. */
ferry_status ferry__nccl_comm_opened(ncclComm_t comm, ferry__comm *group);
ferry_status ferry__nccl_comm_group(ncclComm_t comm, ferry__comm **out);
/* Ends it: wakes the calls under way and waits until they are out. */
ferry_status ferry__nccl_comm_end(ncclComm_t comm);
/* Keeps the first failure for ncclCommGetAsyncError. Returns the result. */
ncclResult_t ferry__nccl_comm_failed(ncclComm_t comm, ferry_status status);
ncclResult_t ferry__nccl_result(ferry_status status);
/* FERRY_EINVAL when it is none; the line is copied. */
ferry_status ferry__nccl_comm_state(ncclComm_t comm, ncclResult_t *out_failed,
                                    char *out_line, size_t size_bytes);

/* ---- nccl_host_id.c ---- */

/* Serves a store for the ranks of one group and writes how to find it. */
ferry_status ferry__nccl_id_make(ncclUniqueId *out);
/* Meets the other ranks of `id` and opens the group. */
ferry_status ferry__nccl_id_meet(const ncclUniqueId *id, int32_t rank,
                                 int32_t world_size, ferry__comm **out);
int64_t ferry__nccl_timeout_ms(void);

/* ---- nccl_host_run.c ---- */

/* Carries out calls of one communicator, in order; sends and receives that
 * follow each other run at once. */
ncclResult_t ferry__nccl_run(const ferry__nccl_op *ops, size_t n);

/* ---- nccl_host_group.c ---- */

/* Runs a call, or keeps it when this thread has begun a group. */
ncclResult_t ferry__nccl_submit(const ferry__nccl_op *op);
/* A call that was refused ends the group as well. Returns the result. */
ncclResult_t ferry__nccl_refuse(ferry_status status);

#endif
