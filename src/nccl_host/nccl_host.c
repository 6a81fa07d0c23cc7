/* SPDX-License-Identifier: Apache-2.0 */
/* NCCL's functions: each checks its arguments, then hands a call on. What is
 * not offered answers ncclInvalidUsage and says so.
 * Invariant: nothing that was not carried out answers success. */
#include "nccl_host/nccl_host.h"

#include <stdio.h>

/* 2.27.3: the oldest whose interface has all that vLLM's loader asks for. */
#define NCCL_VERSION 22703

const char *ferry_nccl_host_version(void)
{
    return ferry_version_text();
}

uint64_t ferry_nccl_host_moved(ncclComm_t comm)
{
    ferry__comm *group;
    uint64_t moved = 0;

    if (ferry__nccl_comm_enter(comm) < 0)
        return 0;
    if (ferry__nccl_comm_group(comm, &group) >= 0)
        moved = group->ops->moved(group);
    ferry__nccl_comm_leave(comm);
    return moved;
}

const char *ncclGetErrorString(ncclResult_t result)
{
    switch (result) {
    case ncclSuccess:
        return "no error";
    case ncclUnhandledCudaError:
        return "a call of CUDA failed";
    case ncclSystemError:
        return "a call of the system failed";
    case ncclInternalError:
        return "internal error";
    case ncclInvalidArgument:
        return "invalid argument";
    case ncclInvalidUsage:
        return "invalid usage, or not offered by libferry_nccl_host";
    case ncclRemoteError:
        return "a peer failed, left or did not come in time";
    case ncclInProgress:
        return "in progress";
    default:
        return "unknown result";
    }
}

/* The communicator's failure, else the last of this thread. */
const char *ncclGetLastError(ncclComm_t comm)
{
    static _Thread_local char line[512];
    ncclResult_t failed = ncclSuccess;
    char last[sizeof(line)];

    snprintf(last, sizeof(last), "%s", ferry_last_error());
    if (!comm ||
        ferry__nccl_comm_state(comm, &failed, line, sizeof(line)) < 0 ||
        failed == ncclSuccess)
        snprintf(line, sizeof(line), "%s", last);
    return line;
}

/* ---- checks ---- */

static ferry_status need(const void *pointer, const char *name)
{
    if (!pointer)
        return ferry_fail(FERRY_EINVAL, "%s is NULL", name);
    return FERRY_OK;
}

static ferry_status read_dtype(ncclDataType_t dtype, ferry_dtype *out)
{
    static const ferry_dtype dtypes[ncclNumTypes] = {
        [ncclInt8] = FERRY_DTYPE_I8,
        [ncclUint8] = FERRY_DTYPE_U8,
        [ncclInt32] = FERRY_DTYPE_I32,
        [ncclUint32] = FERRY_DTYPE_U32,
        [ncclInt64] = FERRY_DTYPE_I64,
        [ncclUint64] = FERRY_DTYPE_U64,
        [ncclFloat16] = FERRY_DTYPE_F16,
        [ncclFloat32] = FERRY_DTYPE_F32,
        [ncclFloat64] = FERRY_DTYPE_F64,
        [ncclBfloat16] = FERRY_DTYPE_BF16,
        [ncclFloat8e4m3] = FERRY_DTYPE_F8_E4M3,
        [ncclFloat8e5m2] = FERRY_DTYPE_F8_E5M2,
    };

    if ((unsigned)dtype >= ncclNumTypes)
        return ferry_fail(FERRY_EINVAL, "datatype %d is none of NCCL's 0 to %d",
                          (int)dtype, ncclNumTypes - 1);
    *out = dtypes[dtype];
    return FERRY_OK;
}

static bool is_float(ferry_dtype dtype)
{
    return dtype == FERRY_DTYPE_F16 || dtype == FERRY_DTYPE_BF16 ||
           dtype == FERRY_DTYPE_F32 || dtype == FERRY_DTYPE_F64;
}

static ferry_status check_reduction(ncclRedOp_t op, ferry_dtype dtype)
{
    static const char *const names[ncclNumOps] = {"sum", "prod", "max", "min",
                                                  "avg"};

    if ((unsigned)op >= ncclNumOps)
        return ferry_fail(FERRY_EINVAL, "operator %d is none of NCCL's 0 to %d",
                          (int)op, ncclNumOps - 1);
    if (op == ncclProd || op == ncclMin)
        return ferry_fail(FERRY_ENOTSUP,
                          "libferry_nccl_host reduces by sum, max and avg, not "
                          "by %s",
                          names[op]);
    if (!is_float(dtype) && (op == ncclAvg || (dtype != FERRY_DTYPE_I32 &&
                                               dtype != FERRY_DTYPE_I64)))
        return ferry_fail(FERRY_ENOTSUP,
                          "libferry_nccl_host does not reduce %s by %s",
                          ferry_dtype_name(dtype), names[op]);
    return FERRY_OK;
}

/* Checks all that does not need the communicator's group. */
static ferry_status check(ferry__nccl_op *op, ncclDataType_t dtype,
                          const char *peer_name)
{
    int32_t world_size;

    FERRY_TRY(read_dtype(dtype, &op->dtype));
    if (op->kind == FERRY__NCCL_ALL_REDUCE || op->kind == FERRY__NCCL_REDUCE ||
        op->kind == FERRY__NCCL_REDUCE_SCATTER)
        FERRY_TRY(check_reduction(op->reduction, op->dtype));
    FERRY_TRY(ferry__nccl_comm_enter(op->comm));
    world_size = op->comm->world_size;
    ferry__nccl_comm_leave(op->comm);
    if (peer_name && (op->peer < 0 || op->peer >= world_size))
        return ferry_fail(FERRY_EINVAL, "%s %d in a world of %d", peer_name,
                          op->peer, world_size);
    return FERRY_OK;
}

/* Whether this rank is `peer`: it then needs other buffers than the rest. */
static bool is_own_rank(const ferry__nccl_op *op)
{
    bool own = false;

    if (ferry__nccl_comm_enter(op->comm) >= 0) {
        own = op->comm->rank == op->peer;
        ferry__nccl_comm_leave(op->comm);
    }
    return own;
}

static ferry_status check_buffers(const ferry__nccl_op *op, bool send,
                                  bool recv)
{
    if (op->count > 0 && send)
        FERRY_TRY(need(op->send, "sendbuff"));
    if (op->count > 0 && recv)
        FERRY_TRY(need(op->recv, "recvbuff"));
    return FERRY_OK;
}

static ncclResult_t submit(const ferry__nccl_op *op, ferry_status status)
{
    return status < 0 ? ferry__nccl_refuse(status) : ferry__nccl_submit(op);
}

static ncclResult_t not_offered(const char *name)
{
    return ferry__nccl_refuse(ferry_fail(
        FERRY_ENOTSUP, "libferry_nccl_host does not offer %s", name));
}

/* ---- beginning and end ---- */

ncclResult_t ncclGetVersion(int *version)
{
    ferry_status status = need(version, "version");

    if (status < 0)
        return ferry__nccl_refuse(status);
    *version = NCCL_VERSION;
    return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *uniqueId)
{
    ferry_status status = need(uniqueId, "uniqueId");

    if (status >= 0)
        status = ferry__nccl_id_make(uniqueId);
    return status < 0 ? ferry__nccl_refuse(status) : ncclSuccess;
}

static ferry_status check_init(const ncclComm_t *comm, int nranks, int rank)
{
    FERRY_TRY(need(comm, "comm"));
    if (nranks < 1 || rank < 0 || rank >= nranks)
        return ferry_fail(FERRY_EINVAL, "rank %d of a world of %d", rank,
                          nranks);
    return FERRY_OK;
}

/* In a group the handle is given at once and good when the group has ended
 * well. */
ncclResult_t ncclCommInitRank(ncclComm_t *comm, int nranks, ncclUniqueId commId,
                              int rank)
{
    ferry__nccl_op op = {.kind = FERRY__NCCL_INIT, .id = commId};
    ferry_status status = check_init(comm, nranks, rank);
    ncclResult_t result;

    if (status >= 0)
        status = ferry__nccl_comm_create(rank, nranks, &op.comm);
    if (status < 0)
        return ferry__nccl_refuse(status);
    result = ferry__nccl_submit(&op);
    if (result != ncclSuccess) {
        ferry__nccl_comm_end(op.comm);
        return result;
    }
    *comm = op.comm;
    return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
    return ferry__nccl_result(ferry__nccl_comm_end(comm));
}

ncclResult_t ncclCommAbort(ncclComm_t comm)
{
    return ferry__nccl_result(ferry__nccl_comm_end(comm));
}

/* ---- questions ---- */

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *asyncError)
{
    char line[8];
    ferry_status status = need(asyncError, "asyncError");

    if (status >= 0)
        status = ferry__nccl_comm_state(comm, asyncError, line, sizeof(line));
    return ferry__nccl_result(status);
}

static ncclResult_t ask(ncclComm_t comm, int *out, bool rank)
{
    ferry_status status = need(out, rank ? "rank" : "count");

    if (status >= 0)
        status = ferry__nccl_comm_enter(comm);
    if (status < 0)
        return ferry__nccl_result(status);
    *out = rank ? comm->rank : comm->world_size;
    ferry__nccl_comm_leave(comm);
    return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int *count)
{
    return ask(comm, count, false);
}

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank)
{
    return ask(comm, rank, true);
}

/* Host memory is of no device. */
ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *device)
{
    (void)comm;
    (void)device;
    return not_offered("ncclCommCuDevice: its memory is the host's");
}

/* ---- collectives ---- */

ncclResult_t ncclBroadcast(const void *sendbuff, void *recvbuff, size_t count,
                           ncclDataType_t datatype, int root, ncclComm_t comm,
                           cudaStream_t stream)
{
    ferry__nccl_op op = {.kind = FERRY__NCCL_BROADCAST,
                         .comm = comm,
                         .send = sendbuff,
                         .recv = recvbuff,
                         .count = count,
                         .peer = root};
    ferry_status status = check(&op, datatype, "root");

    (void)stream;
    if (status >= 0)
        status = check_buffers(&op, is_own_rank(&op), !is_own_rank(&op));
    return submit(&op, status);
}

ncclResult_t ncclAllReduce(const void *sendbuff, void *recvbuff, size_t count,
                           ncclDataType_t datatype, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream)
{
    ferry__nccl_op o = {.kind = FERRY__NCCL_ALL_REDUCE,
                        .comm = comm,
                        .send = sendbuff,
                        .recv = recvbuff,
                        .count = count,
                        .reduction = op};
    ferry_status status = check(&o, datatype, NULL);

    (void)stream;
    if (status >= 0)
        status = check_buffers(&o, true, true);
    return submit(&o, status);
}

ncclResult_t ncclReduce(const void *sendbuff, void *recvbuff, size_t count,
                        ncclDataType_t datatype, ncclRedOp_t op, int root,
                        ncclComm_t comm, cudaStream_t stream)
{
    ferry__nccl_op o = {.kind = FERRY__NCCL_REDUCE,
                        .comm = comm,
                        .send = sendbuff,
                        .recv = recvbuff,
                        .count = count,
                        .reduction = op,
                        .peer = root};
    ferry_status status = check(&o, datatype, "root");

    (void)stream;
    if (status >= 0)
        status = check_buffers(&o, true, is_own_rank(&o));
    return submit(&o, status);
}

ncclResult_t ncclAllGather(const void *sendbuff, void *recvbuff,
                           size_t sendcount, ncclDataType_t datatype,
                           ncclComm_t comm, cudaStream_t stream)
{
    ferry__nccl_op op = {.kind = FERRY__NCCL_ALL_GATHER,
                         .comm = comm,
                         .send = sendbuff,
                         .recv = recvbuff,
                         .count = sendcount};
    ferry_status status = check(&op, datatype, NULL);

    (void)stream;
    if (status >= 0)
        status = check_buffers(&op, true, true);
    return submit(&op, status);
}

ncclResult_t ncclReduceScatter(const void *sendbuff, void *recvbuff,
                               size_t recvcount, ncclDataType_t datatype,
                               ncclRedOp_t op, ncclComm_t comm,
                               cudaStream_t stream)
{
    ferry__nccl_op o = {.kind = FERRY__NCCL_REDUCE_SCATTER,
                        .comm = comm,
                        .send = sendbuff,
                        .recv = recvbuff,
                        .count = recvcount,
                        .reduction = op};
    ferry_status status = check(&o, datatype, NULL);

    (void)stream;
    if (status >= 0)
        status = check_buffers(&o, true, true);
    return submit(&o, status);
}

/* ---- between two ---- */

ncclResult_t ncclSend(const void *sendbuff, size_t count,
                      ncclDataType_t datatype, int peer, ncclComm_t comm,
                      cudaStream_t stream)
{
    ferry__nccl_op op = {.kind = FERRY__NCCL_SEND,
                         .comm = comm,
                         .send = sendbuff,
                         .count = count,
                         .peer = peer};
    ferry_status status = check(&op, datatype, "peer");

    (void)stream;
    if (status >= 0)
        status = check_buffers(&op, true, false);
    return submit(&op, status);
}

ncclResult_t ncclRecv(void *recvbuff, size_t count, ncclDataType_t datatype,
                      int peer, ncclComm_t comm, cudaStream_t stream)
{
    ferry__nccl_op op = {.kind = FERRY__NCCL_RECV,
                         .comm = comm,
                         .recv = recvbuff,
                         .count = count,
                         .peer = peer};
    ferry_status status = check(&op, datatype, "peer");

    (void)stream;
    if (status >= 0)
        status = check_buffers(&op, false, true);
    return submit(&op, status);
}

/* ---- not offered ---- */

ncclResult_t ncclCommSuspend(ncclComm_t comm, int flags)
{
    (void)comm;
    (void)flags;
    return not_offered("ncclCommSuspend");
}

ncclResult_t ncclCommResume(ncclComm_t comm)
{
    (void)comm;
    return not_offered("ncclCommResume");
}

ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void *buff, size_t size,
                                    ncclWindow_t *win, int winFlags)
{
    (void)comm;
    (void)buff;
    (void)size;
    (void)win;
    (void)winFlags;
    return not_offered("ncclCommWindowRegister");
}

ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t win)
{
    (void)comm;
    (void)win;
    return not_offered("ncclCommWindowDeregister");
}
