/* SPDX-License-Identifier: Apache-2.0 */
/* NCCL as it is on a device: hands calls on to libferry_nccl_host once what is
 * on their stream before them is done, and refuses buffers that are not of a
 * device that cuda_host.c plays, and calls without a stream. */
#include "harness/modules/cuda_host.h"
#include "harness/nccl_table.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static pthread_once_t once = PTHREAD_ONCE_INIT;
static nccl_table host;
static __typeof__(cuPointerGetAttribute) *attribute_of;
static __typeof__(cuda_host_reach) *reach;
static __typeof__(cuda_host_flush) *flush;

static void *look(const char *path, const char *name)
{
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    void *found = library ? dlsym(library, name) : NULL;

    if (!found)
        abort();
    return found;
}

static void bind(void)
{
    char path[4096];
    void *found;

    snprintf(path, sizeof(path), "%s/cuda_host.so",
             getenv("FERRY_TEST_MODULES"));
    found = look(path, "cuPointerGetAttribute");
    memcpy(&attribute_of, &found, sizeof(found));
    found = look(path, "cuda_host_reach");
    memcpy(&reach, &found, sizeof(found));
    found = look(path, "cuda_host_flush");
    memcpy(&flush, &found, sizeof(found));
    snprintf(path, sizeof(path), "%s/lib/libferry_nccl_host.so",
             getenv("FERRY_BUILD_DIR"));
#define BIND(symbol)                                                           \
    found = look(path, #symbol);                                               \
    memcpy(&host.symbol, &found, sizeof(found));
    NCCL_TABLE(BIND)
#undef BIND
}

static nccl_table *bound(void)
{
    pthread_once(&once, bind);
    return &host;
}

static bool is_device(const void *memory)
{
    unsigned int type = 0;

    return !memory ||
           (attribute_of(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                         (CUdeviceptr)(uintptr_t)memory) == CUDA_SUCCESS &&
            type == FERRY__CU_MEMORY_DEVICE);
}

/* Whether a call may go on; then its buffers are given by the addresses where
 * the host reaches them. */
static bool enter(const void **send, void **recv, cudaStream_t stream)
{
    const void *none = NULL;
    void *nowhere = NULL;

    bound();
    send = send ? send : &none;
    recv = recv ? recv : &nowhere;
    if (!stream || !is_device(*send) || !is_device(*recv))
        return false;
    flush((CUstream)stream);
    *send = *send ? reach(*send) : NULL;
    *recv = *recv ? reach(*recv) : NULL;
    return true;
}

const char *ncclGetErrorString(ncclResult_t result)
{
    return bound()->ncclGetErrorString(result);
}

const char *ncclGetLastError(ncclComm_t comm)
{
    return bound()->ncclGetLastError(comm);
}

ncclResult_t ncclGetVersion(int *version)
{
    return bound()->ncclGetVersion(version);
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *uniqueId)
{
    return bound()->ncclGetUniqueId(uniqueId);
}

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int nranks, ncclUniqueId commId,
                              int rank)
{
    return bound()->ncclCommInitRank(comm, nranks, commId, rank);
}

ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
    return bound()->ncclCommDestroy(comm);
}

ncclResult_t ncclCommAbort(ncclComm_t comm)
{
    return bound()->ncclCommAbort(comm);
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *asyncError)
{
    return bound()->ncclCommGetAsyncError(comm, asyncError);
}

ncclResult_t ncclBroadcast(const void *sendbuff, void *recvbuff, size_t count,
                           ncclDataType_t datatype, int root, ncclComm_t comm,
                           cudaStream_t stream)
{
    if (!enter(&sendbuff, &recvbuff, stream))
        return ncclInvalidArgument;
    return host.ncclBroadcast(sendbuff, recvbuff, count, datatype, root, comm,
                              stream);
}

ncclResult_t ncclAllReduce(const void *sendbuff, void *recvbuff, size_t count,
                           ncclDataType_t datatype, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream)
{
    if (!enter(&sendbuff, &recvbuff, stream))
        return ncclInvalidArgument;
    return host.ncclAllReduce(sendbuff, recvbuff, count, datatype, op, comm,
                              stream);
}

ncclResult_t ncclAllGather(const void *sendbuff, void *recvbuff,
                           size_t sendcount, ncclDataType_t datatype,
                           ncclComm_t comm, cudaStream_t stream)
{
    if (!enter(&sendbuff, &recvbuff, stream))
        return ncclInvalidArgument;
    return host.ncclAllGather(sendbuff, recvbuff, sendcount, datatype, comm,
                              stream);
}

ncclResult_t ncclSend(const void *sendbuff, size_t count,
                      ncclDataType_t datatype, int peer, ncclComm_t comm,
                      cudaStream_t stream)
{
    if (!enter(&sendbuff, NULL, stream))
        return ncclInvalidArgument;
    return host.ncclSend(sendbuff, count, datatype, peer, comm, stream);
}

ncclResult_t ncclRecv(void *recvbuff, size_t count, ncclDataType_t datatype,
                      int peer, ncclComm_t comm, cudaStream_t stream)
{
    if (!enter(NULL, &recvbuff, stream))
        return ncclInvalidArgument;
    return host.ncclRecv(recvbuff, count, datatype, peer, comm, stream);
}
