/* SPDX-License-Identifier: Apache-2.0 */
/* What the workers can hold their bytes against: the boxes that each of them
 * reads come in, the digests of those boxes go out.
 * Invariant: a worker's lists are checked against the declared parameters
 * before anything is hashed by them. */
#include "backends/nccl/nccl_trainer_state.h"

#include "base/alloc.h"
#include "base/hash.h"
#include "base/log.h"

struct nccl__proofs {
    nccl__trainer *t;
    const ferry__box_lists **lists; /* of each worker, rank 1 first */
    ferry__digester *digester;
};

static size_t n_workers(const nccl__trainer *t)
{
    return (size_t)t->world_size - 1;
}

void nccl__peers_free(nccl__trainer *t)
{
    for (int32_t r = 0; t->peers && r < t->world_size; r++) {
        for (size_t i = 0; i < t->peers[r].n_lists; i++)
            ferry__box_lists_free(&t->peers[r].lists[i].lists);
        ferry__free(t->peers[r].lists);
    }
    ferry__free(t->peers);
    t->peers = NULL;
}

/* ---- boxes ---- */

static ferry_status read_list(const void *bytes, size_t size_bytes,
                              int32_t rank, nccl__list *out)
{
    ferry__reader r = {bytes, size_bytes, false};

    if (ferry__xxh3(bytes, size_bytes) != out->digest)
        return ferry_fail(FERRY_EPEER,
                          "rank %d: its boxes have another digest than it "
                          "stated",
                          rank);
    FERRY_TRY(ferry__box_lists_get(&r, &out->lists));
    if (!r.bad && r.left == 0)
        return FERRY_OK;
    ferry__box_lists_free(&out->lists);
    return ferry_fail(FERRY_EPEER, "rank %d: its boxes are not readable", rank);
}

/* A worker names old lists again, so that models of few manifests send each
 * list once. */
static ferry_status keep_list(nccl__peer *peer, const nccl__list *list)
{
    while (peer->n_lists > 0 &&
           !ferry__nccl_list_fits(peer->n_lists, peer->list_bytes,
                                  list->size_bytes)) {
        nccl__list *last = &peer->lists[--peer->n_lists];

        peer->list_bytes -= last->size_bytes;
        ferry__box_lists_free(&last->lists);
    }
    FERRY_TRY(ferry__grow(&peer->lists, &peer->capacity, peer->n_lists,
                          sizeof(*peer->lists)));
    peer->lists[peer->n_lists++] = *list;
    peer->list_bytes += list->size_bytes;
    return FERRY_OK;
}

static ferry_status take_list(nccl__trainer *t, int32_t rank,
                              const ferry__nccl_head *head)
{
    ferry__comm *c = t->group.comm;
    size_t size = (size_t)head->list_bytes;
    nccl__list list = {.digest = head->digest, .size_bytes = size};
    void *bytes = ferry__alloc_raw(size);
    ferry_status status;

    if (!bytes)
        return FERRY_ENOMEM;
    status = c->ops->recv(c, bytes, size, rank, t->host->remaining_ms(t->ctx));
    if (status >= 0)
        status = read_list(bytes, size, rank, &list);
    ferry__free(bytes);
    FERRY_TRY(status);
    status = keep_list(&t->peers[rank], &list);
    if (status < 0)
        ferry__box_lists_free(&list.lists);
    return status;
}

static const ferry__box_lists *find_list(const nccl__peer *peer,
                                         uint64_t digest)
{
    for (size_t i = 0; i < peer->n_lists; i++) {
        if (peer->lists[i].digest == digest)
            return &peer->lists[i].lists;
    }
    return NULL;
}

static ferry_status take_boxes_of(nccl__proofs *p, int32_t rank,
                                  const char *bytes,
                                  const ferry_param_meta *params, size_t count)
{
    nccl__trainer *t = p->t;
    const ferry__box_lists *lists;
    ferry__nccl_head head;

    FERRY_TRY(ferry__nccl_get_head(bytes, FERRY__NCCL_HEAD_BYTES, &head));
    if (head.list_bytes > 0)
        FERRY_TRY(take_list(t, rank, &head));
    lists = find_list(&t->peers[rank], head.digest);
    if (!lists)
        return ferry_fail(FERRY_EPEER,
                          "rank %d names boxes that it never listed", rank);
    if (ferry__box_lists_check(lists, params, count) < 0)
        return ferry__fail_prefix(FERRY_EPEER, "rank %d", rank);
    p->lists[rank - 1] = lists;
    return FERRY_OK;
}

static ferry_status take_boxes(nccl__proofs *p, const ferry_param_meta *params,
                               size_t count)
{
    ferry__comm *c = p->t->group.comm;
    char mine[FERRY__NCCL_HEAD_BYTES] = {0};
    char *heads =
        ferry__alloc_array((size_t)c->world_size, FERRY__NCCL_HEAD_BYTES);
    ferry_status status;

    if (!heads)
        return FERRY_ENOMEM;
    status = c->ops->all_gather(c, mine, sizeof(mine), heads,
                                p->t->host->remaining_ms(p->t->ctx));
    for (int32_t r = 1; r < c->world_size && status >= 0; r++)
        status = take_boxes_of(p, r, heads + (size_t)r * FERRY__NCCL_HEAD_BYTES,
                               params, count);
    ferry__free(heads);
    return status;
}

ferry_status nccl__proofs_open(nccl__trainer *t, const ferry_param_meta *params,
                               size_t count, nccl__proofs **out)
{
    nccl__proofs *p = ferry__alloc(sizeof(*p));
    ferry_status status = FERRY_ENOMEM;

    if (!p)
        return FERRY_ENOMEM;
    p->t = t;
    p->lists = ferry__alloc_array(n_workers(t), sizeof(*p->lists));
    if (p->lists)
        status = take_boxes(p, params, count);
    if (status >= 0)
        status = ferry__digester_create(params, count, p->lists, n_workers(t),
                                        &p->digester);
    if (status < 0)
        nccl__proofs_close(&p);
    else
        *out = p;
    return status;
}

void nccl__proofs_close(nccl__proofs **proofs)
{
    if (!*proofs)
        return;
    ferry__digester_destroy(&(*proofs)->digester);
    ferry__free((*proofs)->lists);
    ferry__free(*proofs);
    *proofs = NULL;
}

/* ---- digests ---- */

void nccl__proofs_feed(nccl__proofs *p, size_t i, const void *bytes,
                       int64_t first, int64_t count)
{
    nccl__trainer *t = p->t;
    int64_t began = t->host->now_ns();

    ferry__digester_feed(p->digester, i, bytes, first, count);
    t->host->stats(t->ctx)->digest_ms +=
        (double)(t->host->now_ns() - began) / 1e6;
    FERRY_HOST_SPAN(t->host, t->ctx, "digest", began);
}

void nccl__proofs_pack(nccl__proofs *p, size_t i, const ferry_tensor *tensor,
                       int64_t first, int64_t count, void *out)
{
    ferry__digester_pack(p->digester, i, tensor, first, count, out);
}

static ferry_status send_to(nccl__proofs *p, size_t worker)
{
    const ferry__box_lists *lists = p->lists[worker];
    size_t n = lists->n_params > 0 ? lists->first[lists->n_params] : 0;
    ferry__comm *c = p->t->group.comm;
    ferry__str s = {0};
    ferry_status status = FERRY_ENOMEM;

    if (n == 0)
        return FERRY_OK;
    for (size_t b = 0; b < n; b++)
        ferry__put_u64(&s, ferry__digester_value(p->digester, worker, b));
    if (!s.failed)
        status = c->ops->send(c, s.data, s.length, (int32_t)worker + 1,
                              p->t->host->remaining_ms(p->t->ctx));
    ferry__str_free(&s);
    return status;
}

ferry_status nccl__proofs_send(nccl__proofs *p)
{
    for (size_t w = 0; w < n_workers(p->t); w++)
        FERRY_TRY(send_to(p, w));
    return FERRY_OK;
}
