/* SPDX-License-Identifier: Apache-2.0 */
/* A library that speaks NCCL, bound at run time: libferry_nccl_host of the
 * build, or another. */
#ifndef FERRY_TESTS_NCCL_TABLE_H
#define FERRY_TESTS_NCCL_TABLE_H

#include "comm/nccl_abi.h"

#define NCCL_TABLE(X)                                                          \
    X(ncclGetErrorString)                                                      \
    X(ncclGetVersion)                                                          \
    X(ncclGetUniqueId)                                                         \
    X(ncclCommInitRank)                                                        \
    X(ncclAllReduce)                                                           \
    X(ncclReduce)                                                              \
    X(ncclAllGather)                                                           \
    X(ncclReduceScatter)                                                       \
    X(ncclSend)                                                                \
    X(ncclRecv)                                                                \
    X(ncclBroadcast)                                                           \
    X(ncclCommDestroy)                                                         \
    X(ncclCommAbort)                                                           \
    X(ncclCommSuspend)                                                         \
    X(ncclCommResume)                                                          \
    X(ncclGroupStart)                                                          \
    X(ncclGroupEnd)                                                            \
    X(ncclCommWindowRegister)                                                  \
    X(ncclCommWindowDeregister)                                                \
    X(ncclGetLastError)                                                        \
    X(ncclCommGetAsyncError)                                                   \
    X(ncclCommCount)                                                           \
    X(ncclCommUserRank)                                                        \
    X(ncclCommCuDevice)

typedef struct nccl_table {
#define NCCL_MEMBER(name) __typeof__(name) *name;
    NCCL_TABLE(NCCL_MEMBER)
#undef NCCL_MEMBER
} nccl_table;

/* The build's own; static memory. */
const char *nccl_host_path(void);
/* Aborts the test when a name is missing. */
void nccl_table_open(nccl_table *out, const char *path);

#endif
