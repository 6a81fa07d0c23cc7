/* SPDX-License-Identifier: Apache-2.0 */
/* The library that speaks NCCL, bound on first need from one list of names:
 * the one that the setting nccl_library says, NCCL itself or
 * libferry_nccl_host. Never linked.
 * Invariant: a library is bound whole or not at all, and never let go. */
#ifndef FERRY_COMM_NCCL_LIBRARY_H
#define FERRY_COMM_NCCL_LIBRARY_H

#include "comm/nccl_abi.h"

#include <ferry/status.h>
#include <stdbool.h>

#define FERRY__NCCL_SYMBOLS(X)                                                 \
    X(ncclGetErrorString)                                                      \
    X(ncclGetVersion)                                                          \
    X(ncclGetUniqueId)                                                         \
    X(ncclCommInitRank)                                                        \
    X(ncclCommDestroy)                                                         \
    X(ncclCommAbort)                                                           \
    X(ncclCommGetAsyncError)                                                   \
    X(ncclBroadcast)                                                           \
    X(ncclAllReduce)                                                           \
    X(ncclAllGather)                                                           \
    X(ncclSend)                                                                \
    X(ncclRecv)

typedef struct ferry__nccl_library {
    struct ferry__nccl_library *next;
    char *name;    /* as the setting gives it */
    char text[48]; /* "2.27.3", or "2.27.3 host" */
    bool host;     /* libferry_nccl_host: buffers are host memory */
#define FERRY__NCCL_MEMBER(symbol) __typeof__(symbol) *symbol;
    FERRY__NCCL_SYMBOLS(FERRY__NCCL_MEMBER)
#undef FERRY__NCCL_MEMBER
    __typeof__(ncclGetLastError) *ncclGetLastError; /* may be NULL */
    __typeof__(ferry_nccl_host_moved) *moved;       /* NULL: it does not tell */
} ferry__nccl_library;

/* FERRY_EBACKEND: the library or a symbol is not there, or NCCL is older
 * than what Ferry calls. */
ferry_status ferry__nccl_library_open(const ferry__nccl_library **out);
/* A failed call in words: "WHAT: unhandled cuda error: …". */
ferry_status ferry__nccl_library_fail(const ferry__nccl_library *l,
                                      const char *what, ncclComm_t comm,
                                      ncclResult_t result);

#endif
