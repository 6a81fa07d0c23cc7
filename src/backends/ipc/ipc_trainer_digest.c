/* SPDX-License-Identifier: Apache-2.0 */
/* The digests of what is sent: XXH3-64 of every box that some worker reads,
 * computed once for all workers that read the same box.
 * Invariant: a box's digest is over its elements in box order, however the
 * parameter was cut into pieces. */
#include "backends/ipc/ipc_trainer_state.h"

#include "base/alloc.h"
#include "core/load_plan.h"

#include <string.h>

typedef struct unique {
    ferry__copy_op op;
    uint64_t value;
} unique;

struct ipc__digester {
    ipc__trainer *t;
    const ipc__chunk *chunk;
    size_t *first; /* per parameter, into uniques; count + 1 */
    unique *uniques;
    size_t n_uniques, capacity;
    uint32_t **index; /* per peer, per box of its list: number of the unique */
    ferry__xxh3_state **states; /* as many as one parameter has uniques */
    size_t n_states;
    size_t current; /* parameter that the states are of */
    ferry_dtype dtype;
    /* of the piece at hand */
    const char *bytes;
    int64_t piece_first;
    ferry__xxh3_state *state;
};

static ferry__copy_op op_of(const ferry_box *box, ferry_dtype dtype)
{
    ferry__copy_op op;
    int64_t stride = 1;

    memset(&op, 0, sizeof(op));
    op.ndim = box->ndim;
    op.src_offset = box->offset;
    op.src_dtype = op.dst_dtype = dtype;
    for (int32_t d = box->ndim - 1; d >= 0; d--) {
        op.shape[d] = box->shape[d];
        op.src_stride[d] = box->stride[d];
        op.dst_stride[d] = stride;
        stride *= box->shape[d];
    }
    return op;
}

static bool same_box(const ferry__copy_op *a, const ferry__copy_op *b)
{
    bool same = a->ndim == b->ndim && a->src_offset == b->src_offset;

    for (int32_t d = 0; same && d < a->ndim; d++)
        same =
            a->shape[d] == b->shape[d] && a->src_stride[d] == b->src_stride[d];
    return same;
}

/* Number of the box among the uniques of the parameter being added. */
static ferry_status add_box(ipc__digester *d, size_t from, const ferry_box *box,
                            ferry_dtype dtype, uint32_t *out)
{
    ferry__copy_op op = op_of(box, dtype);
    size_t i = from;

    while (i < d->n_uniques && !same_box(&d->uniques[i].op, &op))
        i++;
    if (i == d->n_uniques) {
        FERRY_TRY(ferry__grow(&d->uniques, &d->capacity, d->n_uniques,
                              sizeof(*d->uniques)));
        d->uniques[d->n_uniques++] = (unique){op, 0};
    }
    *out = (uint32_t)i;
    return FERRY_OK;
}

static ferry_status add_param(ipc__digester *d, size_t param)
{
    size_t from = d->n_uniques;

    d->first[param] = from;
    for (size_t p = 0; p < d->t->n_peers; p++) {
        const ferry__ipc_boxes *list = d->t->peers[p].boxes;

        for (size_t b = list->first[param]; b < list->first[param + 1]; b++)
            FERRY_TRY(add_box(d, from, &list->boxes[b],
                              d->chunk->params[param].dtype, &d->index[p][b]));
    }
    d->first[param + 1] = d->n_uniques;
    if (d->n_uniques - from > d->n_states)
        d->n_states = d->n_uniques - from;
    return FERRY_OK;
}

static ferry_status fill(ipc__digester *d)
{
    d->first = ferry__alloc_array(d->chunk->count + 1, sizeof(*d->first));
    d->index = ferry__alloc_array(d->t->n_peers, sizeof(*d->index));
    if (!d->first || !d->index)
        return FERRY_ENOMEM;
    for (size_t p = 0; p < d->t->n_peers; p++) {
        const ferry__ipc_boxes *list = d->t->peers[p].boxes;

        d->index[p] =
            ferry__alloc_array(list->first[list->n_params], sizeof(**d->index));
        if (!d->index[p])
            return FERRY_ENOMEM;
    }
    for (size_t i = 0; i < d->chunk->count; i++)
        FERRY_TRY(add_param(d, i));
    d->states = ferry__alloc_array(d->n_states, sizeof(*d->states));
    if (!d->states)
        return FERRY_ENOMEM;
    for (size_t i = 0; i < d->n_states; i++) {
        d->states[i] = ferry__xxh3_create();
        if (!d->states[i])
            return FERRY_ENOMEM;
    }
    return FERRY_OK;
}

ferry_status ipc__digester_create(ipc__trainer *t, const ipc__chunk *chunk,
                                  ipc__digester **out)
{
    ipc__digester *d = ferry__alloc(sizeof(*d));
    ferry_status status;

    if (!d)
        return FERRY_ENOMEM;
    d->t = t;
    d->chunk = chunk;
    status = fill(d);
    if (status < 0)
        ipc__digester_destroy(&d);
    else
        *out = d;
    return status;
}

void ipc__digester_destroy(ipc__digester **digester)
{
    ipc__digester *d = *digester;

    if (!d)
        return;
    for (size_t p = 0; d->index && p < d->t->n_peers; p++)
        ferry__free(d->index[p]);
    for (size_t i = 0; d->states && i < d->n_states; i++)
        ferry__xxh3_destroy(d->states[i]);
    ferry__free(d->index);
    ferry__free(d->states);
    ferry__free(d->uniques);
    ferry__free(d->first);
    ferry__free(d);
    *digester = NULL;
}

static void feed_part(void *arg, const ferry__copy_op *op)
{
    ipc__digester *d = arg;
    ferry__copy_op part = *op;

    part.src_offset -= d->piece_first;
    ferry__copy_digest(&part, d->bytes, d->state);
}

void ipc__digester_feed(ipc__digester *d, size_t i, const void *bytes,
                        int64_t first, int64_t count)
{
    int64_t numel = ferry__meta_numel(&d->chunk->params[i]);
    int64_t began = d->t->host->now_ns();
    size_t n = d->first[i + 1] - d->first[i];

    d->bytes = bytes;
    d->piece_first = first;
    for (size_t u = 0; u < n; u++) {
        unique *box = &d->uniques[d->first[i] + u];

        d->state = d->states[u];
        if (first == 0)
            ferry__xxh3_reset(d->state);
        if (count > 0)
            ferry__op_clip(&box->op, first, count, feed_part, d);
        if (first + count == numel)
            box->value = ferry__xxh3_value(d->state);
    }
    d->t->host->stats(d->t->ctx)->digest_ms +=
        (double)(d->t->host->now_ns() - began) / 1e6;
    FERRY_HOST_SPAN(d->t->host, d->t->ctx, "digest", began);
}

#define SCRATCH_BYTES ((size_t)256 << 10)

/* A strided tensor is put in order piece by piece. */
static ferry_status feed_strided(ipc__digester *d, size_t i,
                                 const ferry_tensor *tensor)
{
    int64_t numel = ferry_tensor_numel(tensor);
    int64_t step = (int64_t)(SCRATCH_BYTES / ferry_dtype_bytes(tensor->dtype));
    char *scratch = ferry__alloc_raw(SCRATCH_BYTES);

    if (!scratch)
        return FERRY_ENOMEM;
    for (int64_t at = 0; at < numel; at += step) {
        int64_t count = numel - at < step ? numel - at : step;

        ipc__copy_range(tensor, at, count, scratch);
        ipc__digester_feed(d, i, scratch, at, count);
    }
    ferry__free(scratch);
    return FERRY_OK;
}

ferry_status ipc__digester_tensor(ipc__digester *d, size_t i,
                                  const ferry_tensor *tensor)
{
    int64_t numel = ferry_tensor_numel(tensor);

    if (numel == 0 || ferry_tensor_is_contiguous(tensor)) {
        ipc__digester_feed(d, i, ferry_tensor_data(tensor), 0, numel);
        return FERRY_OK;
    }
    return feed_strided(d, i, tensor);
}

static ferry_status send_to(ipc__digester *d, size_t p)
{
    const ferry__ipc_boxes *list = d->t->peers[p].boxes;
    ferry__ipc_digests v = {d->t->update, list->first[list->n_params], NULL};
    ferry__str s = {0};

    v.items = ferry__alloc_array(v.count, sizeof(*v.items));
    if (!v.items)
        return FERRY_ENOMEM;
    for (size_t i = 0; i < list->n_params; i++) {
        for (size_t b = list->first[i]; b < list->first[i + 1]; b++)
            v.items[b] =
                (ferry__ipc_digest){(uint32_t)i, (uint32_t)(b - list->first[i]),
                                    d->uniques[d->index[p][b]].value};
    }
    ferry__ipc_put_digests(&s, &v);
    ferry__free(v.items);
    return ipc__peer_send(d->t, &d->t->peers[p], &s, -1, "sending digests");
}

ferry_status ipc__digester_send(ipc__digester *d)
{
    for (size_t p = 0; p < d->t->n_peers; p++)
        FERRY_TRY(send_to(d, p));
    return FERRY_OK;
}
