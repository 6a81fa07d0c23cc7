/* SPDX-License-Identifier: Apache-2.0 */
/* What goes beside the buffers of a Ferry trainer: the header that must say
 * what the control plane said, this worker's boxes, and their digests.
 * Invariant: a header that disagrees ends the round before the first write
 * (O-26). */
#include "backends/nccl/nccl_worker_state.h"

#include "base/alloc.h"
#include "base/hash.h"
#include "core/manifest.h"

/* ---- header ---- */

ferry_status nccl__worker_take_header(nccl__worker *w,
                                      const ferry_param_meta *params,
                                      size_t count, const ferry__cuts *cuts)
{
    ferry__comm *c = w->group.comm;
    char bytes[FERRY__NCCL_HEADER_BYTES];
    ferry__nccl_header v;

    FERRY_TRY(c->ops->broadcast(c, bytes, sizeof(bytes), 0,
                                w->host->remaining_ms(w->ctx)));
    FERRY_TRY(ferry__nccl_get_header(bytes, sizeof(bytes), &v));
    if (v.round <= w->round)
        return ferry_fail(
            FERRY_EORDER, "nccl header: round %llu came, %llu was before",
            (unsigned long long)v.round, (unsigned long long)w->round);
    if (v.manifest_digest != ferry__manifest_digest(params, count))
        return ferry_fail(FERRY_EMISMATCH,
                          "round %llu: the %zu parameters of the update are "
                          "not those that the trainer sends",
                          (unsigned long long)v.round, count);
    if (v.cuts_digest != cuts->digest || v.n_buffers != cuts->n_buffers)
        return ferry_fail(FERRY_EMISMATCH,
                          "round %llu: the trainer cuts %llu buffers, this "
                          "worker %zu, of other sizes",
                          (unsigned long long)v.round,
                          (unsigned long long)v.n_buffers, cuts->n_buffers);
    if ((v.digest != 0) != w->digest)
        return ferry_fail(
            FERRY_EMISMATCH, "round %llu: digests are %s, init said otherwise",
            (unsigned long long)v.round, v.digest ? "sent" : "not sent");
    w->round = v.round;
    return FERRY_OK;
}

/* ---- boxes ---- */

static bool knows_list(const nccl__worker *w, uint64_t digest)
{
    for (size_t i = 0; i < w->n_lists; i++) {
        if (w->lists[i].digest == digest)
            return true;
    }
    return false;
}

/* Keeps in step with the trainer, so that a list it has dropped is sent
 * again. */
static ferry_status keep_list(nccl__worker *w, uint64_t digest, size_t size)
{
    while (w->n_lists > 0 &&
           !ferry__nccl_list_fits(w->n_lists, w->list_bytes, size))
        w->list_bytes -= w->lists[--w->n_lists].size_bytes;
    FERRY_TRY(ferry__grow(&w->lists, &w->lists_capacity, w->n_lists,
                          sizeof(*w->lists)));
    w->lists[w->n_lists++] = (nccl__known){digest, size};
    w->list_bytes += size;
    return FERRY_OK;
}

/* Heads of all ranks are gathered; here they are of no use. */
static ferry_status give_head(nccl__worker *w, const ferry__nccl_head *head)
{
    ferry__comm *c = w->group.comm;
    ferry__str s = {0};
    ferry_status status = FERRY_ENOMEM;

    ferry__nccl_put_head(&s, head);
    if (!s.failed)
        status = c->ops->all_gather(c, s.data, s.length, NULL,
                                    w->host->remaining_ms(w->ctx));
    ferry__str_free(&s);
    return status;
}

static ferry_status give_list(nccl__worker *w, const ferry__str *list,
                              ferry__nccl_head *head)
{
    ferry__comm *c = w->group.comm;
    bool known = knows_list(w, head->digest);

    if (list->length > FERRY__NCCL_LIST_MAX)
        return ferry_fail(FERRY_EOVERFLOW, "boxes of %zu bytes", list->length);
    head->list_bytes = known ? 0 : list->length;
    FERRY_TRY(give_head(w, head));
    if (known)
        return FERRY_OK;
    FERRY_TRY(c->ops->send(c, list->data, list->length, 0,
                           w->host->remaining_ms(w->ctx)));
    return keep_list(w, head->digest, list->length);
}

ferry_status nccl__worker_send_boxes(nccl__worker *w, size_t n_params,
                                     size_t *out_boxes)
{
    ferry__box_lists lists = {0};
    ferry__nccl_head head = {0};
    ferry__str s = {0};
    ferry_status status =
        ferry__box_lists_gather(w->host, w->ctx, n_params, &lists);

    FERRY_TRY(status);
    ferry__box_lists_put(&s, &lists);
    *out_boxes = lists.first[n_params];
    ferry__box_lists_free(&lists);
    if (s.failed) {
        status = FERRY_ENOMEM;
    } else {
        head.digest = ferry__xxh3(s.data, s.length);
        status = give_list(w, &s, &head);
    }
    ferry__str_free(&s);
    return status;
}

/* ---- digests ---- */

static ferry_status expect(nccl__worker *w, size_t n_params, const char *bytes,
                           size_t size_bytes)
{
    ferry__reader r = {(const unsigned char *)bytes, size_bytes, false};
    const ferry_box *boxes;
    size_t n;

    for (size_t i = 0; i < n_params; i++) {
        FERRY_TRY(w->host->boxes(w->ctx, i, &boxes, &n));
        for (size_t b = 0; b < n; b++)
            FERRY_TRY(w->host->expect_digest(w->ctx, i, b, ferry__get_u64(&r)));
    }
    return FERRY_OK;
}

ferry_status nccl__worker_take_digests(nccl__worker *w, size_t n_params,
                                       size_t n_boxes)
{
    ferry__comm *c = w->group.comm;
    size_t size = n_boxes * sizeof(uint64_t);
    ferry_status status;
    char *bytes;

    if (n_boxes == 0)
        return FERRY_OK;
    bytes = ferry__alloc_raw(size);
    if (!bytes)
        return FERRY_ENOMEM;
    status = c->ops->recv(c, bytes, size, 0, w->host->remaining_ms(w->ctx));
    if (status >= 0)
        status = expect(w, n_params, bytes, size);
    ferry__free(bytes);
    return status;
}
