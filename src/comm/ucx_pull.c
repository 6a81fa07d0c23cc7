/* SPDX-License-Identifier: Apache-2.0 */
/* One-sided gets. Where the network does not do them by itself, UCX answers
 * them on the worker of the rank that exposes, which its mover moves.
 * Key: 1. u32 magic  2. u32 0  3. u64 address  4. u64 bytes  5. u64 XXH3-64
 * of what follows  6. UCX's packed key, to the end.
 * Invariant: nothing is asked for outside of what the key says, and UCX is
 * given no key that came damaged. */
#include "comm/ucx_private.h"

#include "base/alloc.h"
#include "base/hash.h"

#include <string.h>

#define MAGIC UINT32_C(0x4b504655) /* "UFPK" */

typedef struct key_head {
    uint32_t magic, zero;
    uint64_t address, size_bytes, digest;
} key_head;

static ucx__net *net_of(ferry__comm *comm)
{
    return ((tcp__comm *)comm)->carrier_state;
}

/* ---- exposing ---- */

static ferry_status pack_key(ucx__net *n, ucp_mem_h memory, void *bytes,
                             size_t size_bytes, void *out_key,
                             size_t *out_key_bytes)
{
    key_head head = {
        .magic = MAGIC, .address = (uintptr_t)bytes, .size_bytes = size_bytes};
    void *packed;
    size_t packed_bytes;
    ucs_status_t answer =
        ucp_rkey_pack(n->context, memory, &packed, &packed_bytes);

    if (answer != UCS_OK)
        return ferry_fail(FERRY_EBACKEND, "expose: key of %zu bytes: %s",
                          size_bytes, ucs_status_string(answer));
    if (packed_bytes > FERRY__PULL_KEY - sizeof(head)) {
        ucp_rkey_buffer_release(packed);
        return ferry_fail(FERRY_EOVERFLOW,
                          "expose: ucx's key has %zu bytes, at most %zu",
                          packed_bytes, FERRY__PULL_KEY - sizeof(head));
    }
    head.digest = ferry__xxh3(packed, packed_bytes);
    memcpy(out_key, &head, sizeof(head));
    memcpy((char *)out_key + sizeof(head), packed, packed_bytes);
    *out_key_bytes = sizeof(head) + packed_bytes;
    ucp_rkey_buffer_release(packed);
    return FERRY_OK;
}

static ferry_status map_memory(ucx__net *n, ucx__exposed *e, size_t size_bytes,
                               void *out_key, size_t *out_key_bytes)
{
    ucp_mem_map_params_t params = {.field_mask =
                                       UCP_MEM_MAP_PARAM_FIELD_ADDRESS |
                                       UCP_MEM_MAP_PARAM_FIELD_LENGTH,
                                   .address = e->bytes,
                                   .length = size_bytes};
    ucs_status_t answer = ucp_mem_map(n->context, &params, &e->memory);
    ferry_status status;

    if (answer != UCS_OK)
        return ferry_fail(FERRY_EBACKEND, "expose: %zu bytes: %s", size_bytes,
                          ucs_status_string(answer));
    status =
        pack_key(n, e->memory, e->bytes, size_bytes, out_key, out_key_bytes);
    if (status < 0)
        ucp_mem_unmap(n->context, e->memory);
    return status;
}

ferry_status ferry__ucx_expose(ferry__comm *comm, void *bytes,
                               size_t size_bytes, void *out_key,
                               size_t *out_key_bytes)
{
    ucx__net *n = net_of(comm);
    ucx__exposed *e;
    ferry_status status;

    if (!bytes || size_bytes == 0)
        return ferry_fail(FERRY_EINVAL, "expose: %zu bytes", size_bytes);
    e = ferry__alloc(sizeof(*e));
    if (!e)
        return FERRY_ENOMEM;
    e->bytes = bytes;
    ferry__ucx_begin_call(n);
    status = map_memory(n, e, size_bytes, out_key, out_key_bytes);
    ferry__ucx_end_call(n);
    if (status < 0) {
        ferry__free(e);
        return status;
    }
    e->next = n->exposed;
    n->exposed = e;
    return FERRY_OK;
}

void ferry__ucx_unexpose(ferry__comm *comm, void *bytes)
{
    ucx__net *n = net_of(comm);

    for (ucx__exposed **at = &n->exposed; *at; at = &(*at)->next) {
        ucx__exposed *e = *at;

        if (e->bytes != bytes)
            continue;
        ferry__ucx_begin_call(n);
        ucp_mem_unmap(n->context, e->memory);
        ferry__ucx_end_call(n);
        *at = e->next;
        ferry__free(e);
        return;
    }
}

/* ---- pulling ---- */

typedef struct pulling {
    ucx__net *n;
    const tcp__call *call;
    int32_t from;
    ucp_rkey_h key;
    uint64_t address;
    char *bytes;
    size_t size_bytes, posted, taken;
} pulling;

static size_t piece_of(const pulling *p, size_t at)
{
    size_t left = p->size_bytes - at;

    return left < UCX__PIECE_BYTES ? left : UCX__PIECE_BYTES;
}

/* The operations lie in the first lane, where drop looks for them. */
static ferry_status turn(pulling *p, bool *out_moved)
{
    ucx__lane *lane = &p->n->lanes[0];
    ucx__peer *peer = &p->n->peers[p->from];

    while (p->posted < p->size_bytes &&
           p->posted - p->taken < UCX__WINDOW * UCX__PIECE_BYTES) {
        ucx__op *op = &lane->ops[p->posted / UCX__PIECE_BYTES % UCX__WINDOW];
        ucp_request_param_t param = ferry__ucx_param(op, false);
        size_t size = piece_of(p, p->posted);

        ferry__ucx_posted(p->n, op,
                          ucp_get_nbx(peer->ep, p->bytes + p->posted, size,
                                      p->address + p->posted, p->key, &param));
        p->posted += size;
    }
    while (p->taken < p->posted) {
        ucx__op *op = &lane->ops[p->taken / UCX__PIECE_BYTES % UCX__WINDOW];

        if (!ferry__ucx_reap(p->n, op))
            break;
        if (op->status != UCS_OK)
            return ferry__ucx_lost(p->n, p->call, p->from, op->status);
        p->taken += piece_of(p, p->taken);
        *out_moved = true;
    }
    return FERRY_OK;
}

static ferry_status get_all(pulling *p)
{
    ucx__wait w = {p->call, ferry__now_ns(), ferry__now_ns()};

    while (p->taken < p->size_bytes) {
        bool moved = ucp_worker_progress(p->n->worker) > 0;

        FERRY_TRY(turn(p, &moved));
        if (p->taken == p->size_bytes)
            break;
        if (atomic_load(&p->n->comm->aborted))
            return ferry__tcp_listen_all(p->n->comm, p->call->name);
        if (moved)
            w.moved_ns = ferry__now_ns();
        if (!moved || ferry__deadline_passed(&p->call->deadline))
            FERRY_TRY(ferry__ucx_await(p->n, &w, p->from, "gave nothing more"));
    }
    return FERRY_OK;
}

static ferry_status get(pulling *p, const void *packed)
{
    ucx__peer *peer = &p->n->peers[p->from];
    ucs_status_t answer;
    ferry_status status;

    if (!peer->ep || peer->failed != UCS_OK)
        return ferry__ucx_lost(p->n, p->call, p->from, peer->failed);
    answer = ucp_ep_rkey_unpack(peer->ep, packed, &p->key);
    if (answer != UCS_OK)
        return ferry_fail(FERRY_EMISMATCH, "pull: the key of rank %d: %s",
                          p->from, ucs_status_string(answer));
    memset(p->n->lanes[0].ops, 0, sizeof(p->n->lanes[0].ops));
    p->n->n_used = 1;
    status = get_all(p);
    /* Gets that are still under way use the key: drop has it next. */
    if (status >= 0)
        ucp_rkey_destroy(p->key);
    else
        p->n->stale_key = p->key;
    return status;
}

static ferry_status check_pull(const ferry__comm *comm, int32_t from,
                               const void *key, size_t key_bytes,
                               uint64_t offset, size_t size_bytes,
                               key_head *out)
{
    if (from < 0 || from >= comm->world_size || from == comm->rank)
        return ferry_fail(FERRY_EINVAL,
                          "pull: peer %d for rank %d in a world of %d", from,
                          comm->rank, comm->world_size);
    if (key_bytes <= sizeof(*out) || key_bytes > FERRY__PULL_KEY)
        return ferry_fail(FERRY_EINVAL, "pull: key of %zu bytes", key_bytes);
    memcpy(out, key, sizeof(*out));
    if (out->magic != MAGIC)
        return ferry_fail(FERRY_EINVAL, "pull: the key is none of this "
                                        "provider");
    if (out->digest !=
        ferry__xxh3((const char *)key + sizeof(*out), key_bytes - sizeof(*out)))
        return ferry_fail(FERRY_EDIGEST, "pull: the key of rank %d is damaged",
                          from);
    if (offset > out->size_bytes || size_bytes > out->size_bytes - offset)
        return ferry_fail(FERRY_EINVAL,
                          "pull: %zu bytes at %llu of rank %d, which exposes "
                          "%llu",
                          size_bytes, (unsigned long long)offset, from,
                          (unsigned long long)out->size_bytes);
    return FERRY_OK;
}

ferry_status ferry__ucx_pull(ferry__comm *comm, void *bytes, size_t size_bytes,
                             int32_t from, const void *key, size_t key_bytes,
                             uint64_t offset, int64_t timeout_ms)
{
    ucx__net *n = net_of(comm);
    tcp__call call;
    pulling p = {.n = n,
                 .call = &call,
                 .from = from,
                 .bytes = bytes,
                 .size_bytes = size_bytes};
    ferry_status status;
    key_head head;

    FERRY_TRY(
        check_pull(comm, from, key, key_bytes, offset, size_bytes, &head));
    FERRY_TRY(ferry__tcp_enter(n->comm, "pull", timeout_ms, &call));
    if (size_bytes == 0)
        return FERRY_OK;
    p.address = head.address + offset;
    ferry__ucx_begin_call(n);
    status = get(&p, (const char *)key + sizeof(head));
    ferry__ucx_end_call(n);
    if (status >= 0)
        return FERRY_OK;
    return ferry__tcp_fail(n->comm, status);
}
