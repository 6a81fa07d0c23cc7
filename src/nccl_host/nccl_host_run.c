/* SPDX-License-Identifier: Apache-2.0 */
/* Carrying calls out over the comm table. float16 and bfloat16 are summed as
 * float32, in rank order, and rounded once; so all ranks get the same bits.
 * Invariant: a communicator runs one call at a time, and its first failure
 * is the answer to every later one. */
#include "nccl_host/nccl_host.h"

#include "base/alloc.h"
#include "base/log.h"
#include "comm/reduce.h"
#include "comm/tcp.h"

#include <string.h>

/* Elements that are widened at a time. */
#define WIDE_ELEMS ((size_t)1 << 20)

static void copy_bytes(void *dst, const void *src, size_t size_bytes)
{
    if (size_bytes > 0 && dst != src)
        memmove(dst, src, size_bytes);
}

static ferry_status bytes_of(const ferry__nccl_op *op, size_t times,
                             size_t *out)
{
    size_t all;

    if (!ferry__mul(op->count, times, &all) ||
        !ferry__mul(all, ferry_dtype_bytes(op->dtype), out))
        return ferry_fail(FERRY_EOVERFLOW, "%zu elements of %s are too many",
                          op->count, ferry_dtype_name(op->dtype));
    return FERRY_OK;
}

/* ---- sums ---- */

static void divide(void *data, size_t count, ferry_dtype dtype, int32_t by)
{
    for (size_t i = 0; i < count; i++) {
        if (dtype == FERRY_DTYPE_F64)
            ((double *)data)[i] /= by;
        else
            ((float *)data)[i] /= (float)by;
    }
}

/* In place. */
static ferry_status reduce_plain(ferry__comm *g, const ferry__nccl_op *op,
                                 void *data, size_t count, ferry_dtype dtype)
{
    ferry__reduce_op how =
        op->reduction == ncclMax ? FERRY__REDUCE_MAX : FERRY__REDUCE_SUM;

    FERRY_TRY(g->ops->all_reduce(g, data, (int64_t)count, dtype, how,
                                 ferry__nccl_timeout_ms()));
    if (op->reduction == ncclAvg)
        divide(data, count, dtype, g->world_size);
    return FERRY_OK;
}

static ferry_status convert(void *dst, ferry_dtype to, const void *src,
                            ferry_dtype from, size_t count)
{
    int64_t shape = (int64_t)count;
    ferry_tensor d, s;

    FERRY_TRY(ferry_tensor_init(&d, dst, to, 1, &shape));
    FERRY_TRY(ferry_tensor_init(&s, (void *)(uintptr_t)src, from, 1, &shape));
    return ferry_tensor_copy(&d, &s);
}

static ferry_status reduce_wide(ferry__comm *g, const ferry__nccl_op *op,
                                char *data, size_t count)
{
    size_t most = count < WIDE_ELEMS ? count : WIDE_ELEMS;
    float *wide = ferry__alloc_array(most, sizeof(*wide));
    ferry_status status = wide ? FERRY_OK : FERRY_ENOMEM;

    for (size_t at = 0; at < count && status >= 0; at += most) {
        size_t n = count - at < most ? count - at : most;
        char *part = data + at * ferry_dtype_bytes(op->dtype);

        status = convert(wide, FERRY_DTYPE_F32, part, op->dtype, n);
        if (status >= 0)
            status = reduce_plain(g, op, wide, n, FERRY_DTYPE_F32);
        if (status >= 0)
            status = convert(part, op->dtype, wide, FERRY_DTYPE_F32, n);
    }
    ferry__free(wide);
    return status;
}

static ferry_status reduce_in_place(ferry__comm *g, const ferry__nccl_op *op,
                                    void *data, size_t count)
{
    if (count == 0)
        return FERRY_OK;
    return ferry__reduce_takes(op->dtype)
               ? reduce_plain(g, op, data, count, op->dtype)
               : reduce_wide(g, op, data, count);
}

static ferry_status all_reduce(ferry__comm *g, const ferry__nccl_op *op)
{
    size_t size_bytes;

    FERRY_TRY(bytes_of(op, 1, &size_bytes));
    copy_bytes(op->recv, op->send, size_bytes);
    return reduce_in_place(g, op, op->recv, op->count);
}

/* Sums `times` × count elements aside; `first` and `size_bytes` say which
 * bytes of the sum this rank wants. */
static ferry_status reduce_aside(ferry__comm *g, const ferry__nccl_op *op,
                                 size_t times, size_t first, size_t wanted)
{
    ferry_status status;
    size_t all_bytes;
    char *sum;

    FERRY_TRY(bytes_of(op, times, &all_bytes));
    sum = ferry__alloc_raw(all_bytes);
    if (!sum)
        return FERRY_ENOMEM;
    copy_bytes(sum, op->send, all_bytes);
    status = reduce_in_place(g, op, sum, op->count * times);
    if (status >= 0)
        copy_bytes(op->recv, sum + first, wanted);
    ferry__free(sum);
    return status;
}

static ferry_status reduce_scatter(ferry__comm *g, const ferry__nccl_op *op)
{
    size_t each;

    FERRY_TRY(bytes_of(op, 1, &each));
    return reduce_aside(g, op, (size_t)g->world_size, each * (size_t)g->rank,
                        each);
}

/* ---- copies ---- */

static ferry_status broadcast(ferry__comm *g, const ferry__nccl_op *op)
{
    void *bytes = op->recv;
    size_t size_bytes;

    FERRY_TRY(bytes_of(op, 1, &size_bytes));
    if (size_bytes == 0)
        return FERRY_OK;
    if (op->peer == g->rank) {
        if (bytes)
            copy_bytes(bytes, op->send, size_bytes);
        else
            bytes = (void *)(uintptr_t)op->send;
    }
    return g->ops->broadcast(g, bytes, size_bytes, op->peer,
                             ferry__nccl_timeout_ms());
}

static ferry_status all_gather(ferry__comm *g, const ferry__nccl_op *op)
{
    size_t size_bytes;

    FERRY_TRY(bytes_of(op, 1, &size_bytes));
    if (size_bytes == 0)
        return FERRY_OK;
    return g->ops->all_gather(g, op->send, size_bytes, op->recv,
                              ferry__nccl_timeout_ms());
}

/* ---- sends and receives ---- */

static bool is_pairwise(const ferry__nccl_op *op)
{
    return op->kind == FERRY__NCCL_SEND || op->kind == FERRY__NCCL_RECV;
}

/* The k-th send to this rank itself goes into the k-th receive from it. */
static ferry_status to_itself(ferry__comm *g, const ferry__nccl_op *ops,
                              size_t n)
{
    size_t r = 0;

    for (size_t s = 0; s < n; s++) {
        size_t give, take;

        if (ops[s].peer != g->rank || ops[s].kind != FERRY__NCCL_SEND)
            continue;
        while (r < n &&
               (ops[r].peer != g->rank || ops[r].kind != FERRY__NCCL_RECV))
            r++;
        if (r == n)
            return ferry_fail(FERRY_EORDER,
                              "rank %d sends to itself and does not receive "
                              "it in the same group",
                              g->rank);
        FERRY_TRY(bytes_of(&ops[s], 1, &give));
        FERRY_TRY(bytes_of(&ops[r], 1, &take));
        if (give != take)
            return ferry_fail(FERRY_EMISMATCH,
                              "rank %d sends itself %zu bytes and receives "
                              "%zu",
                              g->rank, give, take);
        copy_bytes(ops[r++].recv, ops[s].send, give);
    }
    for (; r < n; r++) {
        if (ops[r].peer == g->rank && ops[r].kind == FERRY__NCCL_RECV)
            return ferry_fail(FERRY_EORDER,
                              "rank %d receives from itself and does not send "
                              "it in the same group",
                              g->rank);
    }
    return FERRY_OK;
}

static ferry_status pairwise(ferry__comm *g, const ferry__nccl_op *ops,
                             size_t n)
{
    ferry__comm_tcp_item *items = ferry__alloc_array(n, sizeof(*items));
    ferry_status status = items ? to_itself(g, ops, n) : FERRY_ENOMEM;
    size_t k = 0;

    for (size_t i = 0; i < n && status >= 0; i++) {
        bool out = ops[i].kind == FERRY__NCCL_SEND;

        if (ops[i].peer == g->rank)
            continue;
        items[k] = (ferry__comm_tcp_item){
            .bytes = out ? (void *)(uintptr_t)ops[i].send : ops[i].recv,
            .peer = ops[i].peer,
            .out = out};
        status = bytes_of(&ops[i], 1, &items[k++].size_bytes);
    }
    if (status >= 0 && k > 0)
        status =
            ferry__comm_tcp_exchange(g, items, k, ferry__nccl_timeout_ms());
    ferry__free(items);
    return status;
}

/* ---- one communicator's calls ---- */

static ferry_status init(const ferry__nccl_op *op)
{
    ferry__comm *group;

    FERRY_TRY(ferry__nccl_id_meet(&op->id, op->comm->rank, op->comm->world_size,
                                  &group));
    return ferry__nccl_comm_opened(op->comm, group);
}

static ferry_status collective(ferry__comm *g, const ferry__nccl_op *op)
{
    size_t size_bytes = 0;

    switch (op->kind) {
    case FERRY__NCCL_BROADCAST:
        return broadcast(g, op);
    case FERRY__NCCL_ALL_REDUCE:
        return all_reduce(g, op);
    case FERRY__NCCL_REDUCE:
        FERRY_TRY(bytes_of(op, 1, &size_bytes));
        return reduce_aside(g, op, 1, 0, op->peer == g->rank ? size_bytes : 0);
    case FERRY__NCCL_ALL_GATHER:
        return all_gather(g, op);
    default:
        return reduce_scatter(g, op);
    }
}

/* The calls from ops[0] on that run at once. */
static size_t batch_of(const ferry__nccl_op *ops, size_t n)
{
    size_t k = 1;

    while (is_pairwise(&ops[0]) && k < n && is_pairwise(&ops[k]))
        k++;
    return k;
}

static ferry_status run_batch(ncclComm_t comm, const ferry__nccl_op *ops,
                              size_t n)
{
    ncclResult_t failed;
    ferry__comm *g;
    char line[sizeof(comm->line)];

    if (ops[0].kind == FERRY__NCCL_INIT)
        return init(&ops[0]);
    if (ferry__nccl_comm_state(comm, &failed, line, sizeof(line)) >= 0 &&
        failed != ncclSuccess)
        return ferry_fail(FERRY_EPEER, "the communicator failed before: %s",
                          line);
    FERRY_TRY(ferry__nccl_comm_group(comm, &g));
    return is_pairwise(&ops[0]) ? pairwise(g, ops, n) : collective(g, &ops[0]);
}

ncclResult_t ferry__nccl_run(const ferry__nccl_op *ops, size_t n)
{
    ncclComm_t comm = ops[0].comm;
    ferry_status status = ferry__nccl_comm_enter(comm);
    ncclResult_t result = ncclSuccess;

    if (status < 0)
        return ferry__nccl_result(status);
    pthread_mutex_lock(&comm->turn);
    for (size_t at = 0; at < n && status >= 0;) {
        size_t k = batch_of(ops + at, n - at);

        status = run_batch(comm, ops + at, k);
        at += k;
    }
    pthread_mutex_unlock(&comm->turn);
    if (status < 0)
        result = ferry__nccl_comm_failed(comm, status);
    ferry__nccl_comm_leave(comm);
    return result;
}
