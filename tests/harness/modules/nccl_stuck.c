/* SPDX-License-Identifier: Apache-2.0 */
/* A library that speaks NCCL over host memory and does not come back: the
 * meeting of rank 1 never, a broadcast of root 0 when it is aborted, one of
 * root 1 when the test lets it go, whatever was aborted, and then it writes.
 * A broadcast of 13 bytes fails at once, and its words are long in coming. */
#include "comm/nccl_abi.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct ncclComm {
    atomic_bool aborted;
};

static atomic_bool free_to_go;
static atomic_int late_writes, questions_to_dead;

void nccl_stuck_let_go(int on);
int nccl_stuck_late_writes(void);
int nccl_stuck_questions_to_dead(void);

void nccl_stuck_let_go(int on)
{
    atomic_store(&free_to_go, on != 0);
}

int nccl_stuck_late_writes(void)
{
    return atomic_load(&late_writes);
}

/* Communicators that were asked while or after they were aborted. */
int nccl_stuck_questions_to_dead(void)
{
    return atomic_load(&questions_to_dead);
}

const char *ferry_nccl_host_version(void)
{
    return "stuck";
}

const char *ncclGetErrorString(ncclResult_t result)
{
    return result == ncclRemoteError ? "remote error" : "error";
}

ncclResult_t ncclGetVersion(int *version)
{
    *version = 22703;
    return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *uniqueId)
{
    *uniqueId = (ncclUniqueId){{1, 2, 3}};
    return ncclSuccess;
}

static void never(void)
{
    for (;;)
        pause();
}

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int nranks, ncclUniqueId commId,
                              int rank)
{
    (void)nranks;
    (void)commId;
    if (rank == 1)
        never();
    *comm = calloc(1, sizeof(**comm));
    return *comm ? ncclSuccess : ncclSystemError;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
    free(comm);
    return ncclSuccess;
}

/* The memory stays: a call may still look at it. */
ncclResult_t ncclCommAbort(ncclComm_t comm)
{
    static _Atomic(ncclComm_t) kept[64];
    static atomic_uint n;

    atomic_store(&kept[atomic_fetch_add(&n, 1) % 64], comm);
    atomic_store(&comm->aborted, true);
    return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *asyncError)
{
    (void)comm;
    *asyncError = ncclSuccess;
    return ncclSuccess;
}

const char *ncclGetLastError(ncclComm_t comm)
{
    if (comm) {
        usleep(300000);
        if (atomic_load(&comm->aborted))
            atomic_fetch_add(&questions_to_dead, 1);
    }
    return "";
}

static ncclResult_t write_late(char *out, size_t size)
{
    while (!atomic_load(&free_to_go))
        usleep(1000);
    memset(out, 0xee, size);
    atomic_fetch_add(&late_writes, 1);
    return ncclSuccess;
}

ncclResult_t ncclBroadcast(const void *sendbuff, void *recvbuff, size_t count,
                           ncclDataType_t datatype, int root, ncclComm_t comm,
                           cudaStream_t stream)
{
    (void)sendbuff;
    (void)datatype;
    (void)stream;
    if (root == 1)
        return write_late(recvbuff, count);
    if (count == 13)
        return ncclSystemError;
    while (!atomic_load(&comm->aborted))
        usleep(1000);
    return ncclRemoteError;
}

ncclResult_t ncclAllReduce(const void *sendbuff, void *recvbuff, size_t count,
                           ncclDataType_t datatype, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream)
{
    (void)sendbuff;
    (void)recvbuff;
    (void)count;
    (void)datatype;
    (void)op;
    (void)comm;
    (void)stream;
    return ncclSuccess;
}

ncclResult_t ncclAllGather(const void *sendbuff, void *recvbuff,
                           size_t sendcount, ncclDataType_t datatype,
                           ncclComm_t comm, cudaStream_t stream)
{
    (void)sendbuff;
    (void)recvbuff;
    (void)sendcount;
    (void)datatype;
    (void)comm;
    (void)stream;
    return ncclSuccess;
}

ncclResult_t ncclSend(const void *sendbuff, size_t count,
                      ncclDataType_t datatype, int peer, ncclComm_t comm,
                      cudaStream_t stream)
{
    (void)sendbuff;
    (void)count;
    (void)datatype;
    (void)peer;
    (void)comm;
    (void)stream;
    return ncclSuccess;
}

ncclResult_t ncclRecv(void *recvbuff, size_t count, ncclDataType_t datatype,
                      int peer, ncclComm_t comm, cudaStream_t stream)
{
    (void)recvbuff;
    (void)count;
    (void)datatype;
    (void)peer;
    (void)comm;
    (void)stream;
    return ncclSuccess;
}
