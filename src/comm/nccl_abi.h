/* SPDX-License-Identifier: Apache-2.0 */
/* As much of NCCL's binary interface as Ferry calls (provider `nccl`) and
 * offers (libferry_nccl_host), in declarations of our own: neither needs
 * NCCL or CUDA to be built. A test compiles them against NCCL's header.
 * Invariant: values and prototypes are NCCL's of 2.18 and later. */
#ifndef FERRY_COMM_NCCL_ABI_H
#define FERRY_COMM_NCCL_ABI_H

#include <stddef.h>
#include <stdint.h>

#define FERRY__NCCL_ID_BYTES 128

/* X(name, value): what crosses the boundary as a number. */
#define FERRY__NCCL_RESULTS(X)                                                 \
    X(ncclSuccess, 0)                                                          \
    X(ncclUnhandledCudaError, 1)                                               \
    X(ncclSystemError, 2)                                                      \
    X(ncclInternalError, 3)                                                    \
    X(ncclInvalidArgument, 4)                                                  \
    X(ncclInvalidUsage, 5)                                                     \
    X(ncclRemoteError, 6)                                                      \
    X(ncclInProgress, 7)
#define FERRY__NCCL_DTYPES(X)                                                  \
    X(ncclInt8, 0)                                                             \
    X(ncclUint8, 1)                                                            \
    X(ncclInt32, 2)                                                            \
    X(ncclUint32, 3)                                                           \
    X(ncclInt64, 4)                                                            \
    X(ncclUint64, 5)                                                           \
    X(ncclFloat16, 6)                                                          \
    X(ncclFloat32, 7)                                                          \
    X(ncclFloat64, 8)                                                          \
    X(ncclBfloat16, 9)                                                         \
    X(ncclFloat8e4m3, 10)                                                      \
    X(ncclFloat8e5m2, 11)
#define FERRY__NCCL_OPS(X)                                                     \
    X(ncclSum, 0)                                                              \
    X(ncclProd, 1)                                                             \
    X(ncclMax, 2)                                                              \
    X(ncclMin, 3)                                                              \
    X(ncclAvg, 4)

/* Defined where NCCL's header was read before this one: then only the
 * prototypes below are read, and the compiler compares them. */
#ifndef FERRY__NCCL_TYPES_GIVEN
#define FERRY__NCCL_ENUM(name, value) name = (value),
typedef enum { FERRY__NCCL_RESULTS(FERRY__NCCL_ENUM) } ncclResult_t;
typedef enum {
    FERRY__NCCL_DTYPES(FERRY__NCCL_ENUM) ncclNumTypes = 12
} ncclDataType_t;
typedef enum {
    FERRY__NCCL_OPS(FERRY__NCCL_ENUM) ncclNumOps = 5,
    ncclMaxRedOp = 0x7fffffff
} ncclRedOp_t;
#undef FERRY__NCCL_ENUM

typedef struct ncclComm *ncclComm_t;
typedef struct ncclWindow_vidmem *ncclWindow_t;
typedef struct CUstream_st *cudaStream_t;
typedef struct {
    char internal[FERRY__NCCL_ID_BYTES];
} ncclUniqueId;
#endif

/* ---- what vLLM's loader demands ---- */

const char *ncclGetErrorString(ncclResult_t result);
ncclResult_t ncclGetVersion(int *version);
ncclResult_t ncclGetUniqueId(ncclUniqueId *uniqueId);
ncclResult_t ncclCommInitRank(ncclComm_t *comm, int nranks, ncclUniqueId commId,
                              int rank);
ncclResult_t ncclAllReduce(const void *sendbuff, void *recvbuff, size_t count,
                           ncclDataType_t datatype, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclReduce(const void *sendbuff, void *recvbuff, size_t count,
                        ncclDataType_t datatype, ncclRedOp_t op, int root,
                        ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclAllGather(const void *sendbuff, void *recvbuff,
                           size_t sendcount, ncclDataType_t datatype,
                           ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclReduceScatter(const void *sendbuff, void *recvbuff,
                               size_t recvcount, ncclDataType_t datatype,
                               ncclRedOp_t op, ncclComm_t comm,
                               cudaStream_t stream);
ncclResult_t ncclSend(const void *sendbuff, size_t count,
                      ncclDataType_t datatype, int peer, ncclComm_t comm,
                      cudaStream_t stream);
ncclResult_t ncclRecv(void *recvbuff, size_t count, ncclDataType_t datatype,
                      int peer, ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclBroadcast(const void *sendbuff, void *recvbuff, size_t count,
                           ncclDataType_t datatype, int root, ncclComm_t comm,
                           cudaStream_t stream);
ncclResult_t ncclCommDestroy(ncclComm_t comm);
ncclResult_t ncclCommAbort(ncclComm_t comm);
ncclResult_t ncclCommSuspend(ncclComm_t comm, int flags);
ncclResult_t ncclCommResume(ncclComm_t comm);
ncclResult_t ncclGroupStart(void);
ncclResult_t ncclGroupEnd(void);
ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void *buff, size_t size,
                                    ncclWindow_t *win, int winFlags);
ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t win);

/* ---- what programs ask beside it ---- */

const char *ncclGetLastError(ncclComm_t comm);
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *asyncError);
ncclResult_t ncclCommCount(const ncclComm_t comm, int *count);
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank);
ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *device);

/* Only libferry_nccl_host has it: buffers are host memory, streams are
 * ignored, calls are done on return. The text is Ferry's version. */
const char *ferry_nccl_host_version(void);
/* A count that grows as bytes of the communicator's calls move, for who waits
 * for one; 0 when it is none. Any thread. */
uint64_t ferry_nccl_host_moved(ncclComm_t comm);

#endif
