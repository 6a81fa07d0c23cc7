/* SPDX-License-Identifier: Apache-2.0 */
/* A library that has most of NCCL's names but not ncclAllGather. */
#include "comm/nccl_abi.h"

const char *ncclGetErrorString(ncclResult_t result)
{
    (void)result;
    return "";
}

ncclResult_t ncclGetVersion(int *version)
{
    *version = 22703;
    return ncclSuccess;
}

#define NOTHING                                                                \
    {                                                                          \
        return ncclInternalError;                                              \
    }

ncclResult_t ncclGetUniqueId(ncclUniqueId *uniqueId
                             __attribute__((unused))) NOTHING ncclResult_t
    ncclCommInitRank(ncclComm_t *comm __attribute__((unused)),
                     int nranks __attribute__((unused)),
                     ncclUniqueId commId __attribute__((unused)),
                     int rank __attribute__((unused))) NOTHING ncclResult_t
    ncclCommDestroy(ncclComm_t comm
                    __attribute__((unused))) NOTHING ncclResult_t
    ncclCommAbort(ncclComm_t comm __attribute__((unused))) NOTHING ncclResult_t
    ncclCommGetAsyncError(ncclComm_t comm __attribute__((unused)),
                          ncclResult_t *e
                          __attribute__((unused))) NOTHING ncclResult_t
    ncclBroadcast(const void *s __attribute__((unused)),
                  void *r __attribute__((unused)),
                  size_t n __attribute__((unused)),
                  ncclDataType_t d __attribute__((unused)),
                  int root __attribute__((unused)),
                  ncclComm_t comm __attribute__((unused)),
                  cudaStream_t stream
                  __attribute__((unused))) NOTHING ncclResult_t
    ncclAllReduce(const void *s __attribute__((unused)),
                  void *r __attribute__((unused)),
                  size_t n __attribute__((unused)),
                  ncclDataType_t d __attribute__((unused)),
                  ncclRedOp_t op __attribute__((unused)),
                  ncclComm_t comm __attribute__((unused)),
                  cudaStream_t stream __attribute__((unused))) NOTHING
