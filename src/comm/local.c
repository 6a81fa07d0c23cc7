/* SPDX-License-Identifier: Apache-2.0 */
/* The collectives of a local group, in steps. In each step a rank may fill
 * its slot and post it, and reads the slots that it needs.
 * Invariant: all ranks count the same steps in the same order, whatever they
 * give or take in them, and sums are made in rank order. */
#include "comm/local_segment.h"
#include "comm/reduce.h"

#include "base/alloc.h"
#include "base/log.h"
#include "device/shared.h"

#include <string.h>
#include <unistd.h>

/* Below this an all-reduce reads every rank's slot at once; above, each rank
 * reduces its share and the shares are exchanged in a second step, which
 * reads 2 × rather than world_size × the bytes. */
#define ONE_STEP_BYTES ((size_t)32 << 10)

enum { OP_BROADCAST = 1, OP_REDUCE, OP_SHARE, OP_GATHER, OP_BARRIER };

static local__comm *local_of(ferry__comm *c)
{
    return (local__comm *)c;
}

static uint64_t tag_what(uint64_t op, uint64_t detail)
{
    return op << 32 | detail;
}

/* Waits until the slot of this step is free on this rank. */
static ferry_status slot_free(local__comm *c, const local__call *call)
{
    for (int32_t r = 0; r < c->base.world_size; r++) {
        if (r != c->base.rank)
            FERRY_TRY(
                ferry__local_await(c, call, &c->ranks[r].done, c->step - 1, r));
    }
    return FERRY_OK;
}

static void post(local__comm *c, uint64_t what, size_t size_bytes)
{
    local__rank *mine = &c->ranks[c->base.rank];

    mine->tags[c->step & 1] = (local__tag){what, size_bytes};
    ferry__gate_raise(&mine->posted, c->step + 1);
}

static void step_done(local__comm *c)
{
    c->step++;
    ferry__gate_raise(&c->ranks[c->base.rank].done, c->step);
}

/* Waits for the slot of `rank` and checks that it holds what is wanted. */
static ferry_status await_slot(local__comm *c, const local__call *call,
                               int32_t rank, uint64_t what, size_t size_bytes)
{
    local__rank *other = &c->ranks[rank];
    local__tag tag;

    FERRY_TRY(ferry__local_await(c, call, &other->posted, c->step + 1, rank));
    tag = other->tags[c->step & 1];
    if (tag.what != what || tag.size_bytes != size_bytes)
        return ferry_fail(FERRY_EMISMATCH,
                          "%s of %zu bytes: rank %d called another operation "
                          "or gave %llu bytes",
                          call->name, size_bytes, rank,
                          (unsigned long long)tag.size_bytes);
    return FERRY_OK;
}

static size_t piece_of(size_t left, size_t limit)
{
    return left < limit ? left : limit;
}

/* memcpy may not be given NULL, not even for no bytes. */
static void copy_bytes(void *dst, const void *src, size_t size_bytes)
{
    if (size_bytes > 0)
        memcpy(dst, src, size_bytes);
}

static ferry_status broadcast_step(local__comm *c, const local__call *call,
                                   char *bytes, size_t piece, size_t total,
                                   int32_t root)
{
    uint64_t what = tag_what(OP_BROADCAST, (uint64_t)root);

    if (c->base.rank == root) {
        FERRY_TRY(slot_free(c, call));
        copy_bytes(ferry__local_slot(c, root, c->step), bytes, piece);
        post(c, what, total);
    } else {
        FERRY_TRY(await_slot(c, call, root, what, total));
        copy_bytes(bytes, ferry__local_slot(c, root, c->step), piece);
    }
    step_done(c);
    return FERRY_OK;
}

static ferry_status broadcast_all(local__comm *c, const local__call *call,
                                  char *bytes, size_t size_bytes, int32_t root)
{
    size_t at = 0;

    do {
        size_t piece = piece_of(size_bytes - at, c->slot_bytes);

        FERRY_TRY(broadcast_step(c, call, bytes ? bytes + at : NULL, piece,
                                 size_bytes, root));
        at += piece;
    } while (at < size_bytes);
    return FERRY_OK;
}

static ferry_status local_broadcast(ferry__comm *comm, void *bytes,
                                    size_t size_bytes, int32_t root,
                                    int64_t timeout_ms)
{
    local__comm *c = local_of(comm);
    ferry_status status;
    local__call call;

    if (root < 0 || root >= comm->world_size)
        return ferry_fail(FERRY_EINVAL, "broadcast: root %d of a world of %d",
                          root, comm->world_size);
    FERRY_TRY(ferry__local_enter(c, "broadcast", timeout_ms, &call));
    status = broadcast_all(c, &call, bytes, size_bytes, root);
    return status < 0 ? ferry__local_break(c, status) : FERRY_OK;
}

typedef struct reduction {
    ferry_dtype dtype;
    ferry__reduce_op op;
    size_t elem_bytes;
    uint64_t detail; /* for tags */
} reduction;

/* Reduces [at, at + size) of all ranks' slots of this step into out. */
static void reduce_slots(const local__comm *c, const reduction *r, void *out,
                         size_t at, size_t size_bytes)
{
    copy_bytes(out, ferry__local_slot(c, 0, c->step) + at, size_bytes);
    for (int32_t q = 1; q < c->base.world_size; q++)
        ferry__reduce_into(out, ferry__local_slot(c, q, c->step) + at,
                           size_bytes / r->elem_bytes, r->dtype, r->op);
}

/* Fills and posts this rank's slot and waits for all others' of this step. */
static ferry_status exchange(local__comm *c, const local__call *call,
                             const void *bytes, size_t size_bytes,
                             uint64_t what)
{
    FERRY_TRY(slot_free(c, call));
    copy_bytes(ferry__local_slot(c, c->base.rank, c->step), bytes, size_bytes);
    post(c, what, size_bytes);
    for (int32_t q = 0; q < c->base.world_size; q++) {
        if (q != c->base.rank)
            FERRY_TRY(await_slot(c, call, q, what, size_bytes));
    }
    return FERRY_OK;
}

/* Bytes [*at, *at + size) that rank `q` reduces of a piece. */
static size_t share_of(const local__comm *c, const reduction *r, int32_t q,
                       size_t piece, size_t *out_at)
{
    size_t world = (size_t)c->base.world_size;
    size_t count = piece / r->elem_bytes;
    size_t each = (count + world - 1) / world;
    size_t first = each * (size_t)q < count ? each * (size_t)q : count;
    size_t last = first + each < count ? first + each : count;

    *out_at = first * r->elem_bytes;
    return (last - first) * r->elem_bytes;
}

/* Two steps: every rank reduces its share, then all take all shares. */
static ferry_status reduce_shares(local__comm *c, const local__call *call,
                                  const reduction *r, char *data, size_t piece)
{
    size_t at, size = share_of(c, r, c->base.rank, piece, &at);

    FERRY_TRY(exchange(c, call, data, piece, tag_what(OP_REDUCE, r->detail)));
    reduce_slots(c, r, data + at, at, size);
    step_done(c);

    FERRY_TRY(slot_free(c, call));
    copy_bytes(ferry__local_slot(c, c->base.rank, c->step), data + at, size);
    post(c, tag_what(OP_SHARE, r->detail), piece);
    for (int32_t q = 0; q < c->base.world_size; q++) {
        if (q == c->base.rank)
            continue;
        FERRY_TRY(await_slot(c, call, q, tag_what(OP_SHARE, r->detail), piece));
        size = share_of(c, r, q, piece, &at);
        copy_bytes(data + at, ferry__local_slot(c, q, c->step), size);
    }
    step_done(c);
    return FERRY_OK;
}

static ferry_status reduce_all(local__comm *c, const local__call *call,
                               const reduction *r, char *data,
                               size_t size_bytes)
{
    size_t limit = c->slot_bytes / r->elem_bytes * r->elem_bytes, at = 0;

    do {
        size_t piece = piece_of(size_bytes - at, limit);

        if (piece > ONE_STEP_BYTES && c->base.world_size > 2) {
            FERRY_TRY(reduce_shares(c, call, r, data + at, piece));
        } else {
            char *out = data ? data + at : NULL;

            FERRY_TRY(
                exchange(c, call, out, piece, tag_what(OP_REDUCE, r->detail)));
            reduce_slots(c, r, out, 0, piece);
            step_done(c);
        }
        at += piece;
    } while (at < size_bytes);
    return FERRY_OK;
}

static ferry_status local_all_reduce(ferry__comm *comm, void *data,
                                     int64_t count, ferry_dtype dtype,
                                     ferry__reduce_op op, int64_t timeout_ms)
{
    local__comm *c = local_of(comm);
    reduction r = {dtype, op, ferry_dtype_bytes(dtype),
                   (uint64_t)dtype << 8 | (uint64_t)op};
    ferry_status status;
    local__call call;
    size_t size_bytes;

    if (dtype != FERRY_DTYPE_F32 && dtype != FERRY_DTYPE_F64 &&
        dtype != FERRY_DTYPE_I32 && dtype != FERRY_DTYPE_I64)
        return ferry_fail(FERRY_ENOTSUP,
                          "all-reduce: dtype %s, wants float32, float64, "
                          "int32 or int64",
                          ferry_dtype_name(dtype));
    if (count < 0 || !ferry__mul((size_t)count, r.elem_bytes, &size_bytes))
        return ferry_fail(FERRY_EINVAL, "all-reduce: %lld elements",
                          (long long)count);
    FERRY_TRY(ferry__local_enter(c, "all-reduce", timeout_ms, &call));
    status = reduce_all(c, &call, &r, data, size_bytes);
    return status < 0 ? ferry__local_break(c, status) : FERRY_OK;
}

static ferry_status gather_all(local__comm *c, const local__call *call,
                               const char *bytes, size_t size_bytes, char *out)
{
    size_t at = 0;

    do {
        size_t piece = piece_of(size_bytes - at, c->slot_bytes);

        FERRY_TRY(exchange(c, call, bytes ? bytes + at : NULL, piece,
                           tag_what(OP_GATHER, 0)));
        for (int32_t q = 0; out && q < c->base.world_size; q++)
            copy_bytes(out + (size_t)q * size_bytes + at,
                       ferry__local_slot(c, q, c->step), piece);
        step_done(c);
        at += piece;
    } while (at < size_bytes);
    return FERRY_OK;
}

static ferry_status local_all_gather(ferry__comm *comm, const void *bytes,
                                     size_t size_bytes, void *out,
                                     int64_t timeout_ms)
{
    local__comm *c = local_of(comm);
    ferry_status status;
    local__call call;
    size_t all_bytes;

    if (!ferry__mul(size_bytes, (size_t)comm->world_size, &all_bytes))
        return ferry_fail(FERRY_EOVERFLOW, "all-gather: %zu bytes × %d ranks",
                          size_bytes, comm->world_size);
    FERRY_TRY(ferry__local_enter(c, "all-gather", timeout_ms, &call));
    status = gather_all(c, &call, bytes, size_bytes, out);
    return status < 0 ? ferry__local_break(c, status) : FERRY_OK;
}

static ferry_status local_barrier(ferry__comm *comm, int64_t timeout_ms)
{
    local__comm *c = local_of(comm);
    ferry_status status;
    local__call call;

    FERRY_TRY(ferry__local_enter(c, "barrier", timeout_ms, &call));
    status = exchange(c, &call, NULL, 0, tag_what(OP_BARRIER, 0));
    if (status < 0)
        return ferry__local_break(c, status);
    step_done(c);
    return FERRY_OK;
}

static local__pair *pair_of(const local__comm *c, int32_t from, int32_t to)
{
    return &c->pairs[(size_t)from * (size_t)c->base.world_size + (size_t)to];
}

static ferry_status check_peer(const ferry__comm *comm, const char *name,
                               int32_t peer)
{
    if (peer < 0 || peer >= comm->world_size || peer == comm->rank)
        return ferry_fail(FERRY_EINVAL,
                          "%s: peer %d for rank %d in a world of %d", name,
                          peer, comm->rank, comm->world_size);
    return FERRY_OK;
}

static ferry_status send_pieces(local__comm *c, const local__call *call,
                                const char *bytes, size_t size_bytes,
                                int32_t to)
{
    local__pair *pair = pair_of(c, c->base.rank, to);
    size_t at = 0;

    do {
        size_t piece = piece_of(size_bytes - at, c->pair_bytes);
        uint32_t n = ferry__gate_value(&pair->sent);

        FERRY_TRY(ferry__local_await(c, call, &pair->taken, n - 1, to));
        pair->size_bytes[n & 1] = size_bytes;
        copy_bytes(ferry__local_piece(c, c->base.rank, to, n), bytes + at,
                   piece);
        ferry__gate_raise(&pair->sent, n + 1);
        at += piece;
    } while (at < size_bytes);
    return FERRY_OK;
}

static ferry_status local_send(ferry__comm *comm, const void *bytes,
                               size_t size_bytes, int32_t to,
                               int64_t timeout_ms)
{
    local__comm *c = local_of(comm);
    ferry_status status;
    local__call call;

    FERRY_TRY(check_peer(comm, "send", to));
    FERRY_TRY(ferry__local_enter(c, "send", timeout_ms, &call));
    status = send_pieces(c, &call, bytes, size_bytes, to);
    return status < 0 ? ferry__local_break(c, status) : FERRY_OK;
}

static ferry_status recv_pieces(local__comm *c, const local__call *call,
                                char *bytes, size_t size_bytes, int32_t from)
{
    local__pair *pair = pair_of(c, from, c->base.rank);
    size_t at = 0;

    do {
        size_t piece = piece_of(size_bytes - at, c->pair_bytes);
        uint32_t n = ferry__gate_value(&pair->taken);

        FERRY_TRY(ferry__local_await(c, call, &pair->sent, n + 1, from));
        if (pair->size_bytes[n & 1] != size_bytes)
            return ferry_fail(FERRY_EMISMATCH,
                              "receive: %zu bytes wanted, rank %d sends %llu",
                              size_bytes, from,
                              (unsigned long long)pair->size_bytes[n & 1]);
        copy_bytes(bytes + at, ferry__local_piece(c, from, c->base.rank, n),
                   piece);
        ferry__gate_raise(&pair->taken, n + 1);
        at += piece;
    } while (at < size_bytes);
    return FERRY_OK;
}

static ferry_status local_recv(ferry__comm *comm, void *bytes,
                               size_t size_bytes, int32_t from,
                               int64_t timeout_ms)
{
    local__comm *c = local_of(comm);
    ferry_status status;
    local__call call;

    FERRY_TRY(check_peer(comm, "receive", from));
    FERRY_TRY(ferry__local_enter(c, "receive", timeout_ms, &call));
    status = recv_pieces(c, &call, bytes, size_bytes, from);
    return status < 0 ? ferry__local_break(c, status) : FERRY_OK;
}

static void local_abort(ferry__comm *comm)
{
    local__comm *c = local_of(comm);
    uint32_t none = 0;

    atomic_compare_exchange_strong(&c->header->aborted, &none,
                                   (uint32_t)comm->rank + 1);
    ferry__local_wake_all(c);
}

static void local_close(ferry__comm *comm)
{
    local__comm *c = local_of(comm);
    local__rank *mine = &c->ranks[comm->rank];

    ferry__local_unexpose_all(c);
    if (atomic_load(&mine->owner) == c->owner)
        atomic_store(&mine->state, LOCAL__LEFT);
    ferry__local_wake_all(c);
    ferry__shared_unmap(c->header, c->total_bytes);
    close(c->fd);
    ferry__free(c);
}

const ferry__comm_ops ferry__local_ops = {
    .size = sizeof(ferry__comm_ops),
    .provider = "local",
    .broadcast = local_broadcast,
    .all_reduce = local_all_reduce,
    .all_gather = local_all_gather,
    .barrier = local_barrier,
    .send = local_send,
    .recv = local_recv,
    .abort = local_abort,
    .close = local_close,
    .expose = ferry__local_expose,
    .unexpose = ferry__local_unexpose,
    .pull = ferry__local_pull,
};
