/* SPDX-License-Identifier: Apache-2.0 */
/* Boxes that several workers read are kept once; a parameter's boxes are
 * hashed side by side, piece after piece.
 * Invariant: pieces of a parameter come in rising order, one parameter at a
 * time. */
#include "core/digester.h"

#include "base/alloc.h"
#include "base/hash.h"
#include "core/load_plan.h"

#include <string.h>
#include <sys/random.h>

typedef struct unique {
    ferry__copy_op op;
    bool whole; /* all elements in their order */
    uint64_t value;
} unique;

struct ferry__digester {
    const ferry_param_meta *params;
    size_t count;
    const ferry__box_lists *const *lists;
    size_t n_lists;
    size_t *first; /* per parameter, into uniques; count + 1 */
    unique *uniques;
    size_t n_uniques, capacity;
    uint32_t **index; /* per list, per box of it: number of the unique */
    ferry__xxh3_state **states; /* as many as one parameter has uniques */
    size_t n_states;
    /* Uniques of the parameter being added, + 1, by their hash; the workers'
     * boxes are many where they choose, so nothing is searched in a row, and
     * the salt keeps them from choosing what meets. */
    uint32_t *places;
    size_t n_places, places_capacity;
    uint64_t salt;
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

static bool is_whole(const ferry__copy_op *op, const ferry_param_meta *meta)
{
    ferry__copy_op merged = *op;

    ferry__op_merge(&merged);
    return merged.src_offset == 0 &&
           ferry__op_numel(&merged) == ferry__meta_numel(meta) &&
           (merged.ndim == 0 ||
            (merged.ndim == 1 && merged.src_stride[0] == 1));
}

static bool same_box(const ferry__copy_op *a, const ferry__copy_op *b)
{
    bool same = a->ndim == b->ndim && a->src_offset == b->src_offset;

    for (int32_t d = 0; same && d < a->ndim; d++)
        same =
            a->shape[d] == b->shape[d] && a->src_stride[d] == b->src_stride[d];
    return same;
}

/* Room for twice as many uniques as the parameter can have, all of it free. */
static ferry_status clear_places(ferry__digester *d, size_t param)
{
    size_t boxes = 0, n = 8;

    for (size_t p = 0; p < d->n_lists; p++)
        boxes += d->lists[p]->first[param + 1] - d->lists[p]->first[param];
    if (boxes > UINT32_MAX / 4)
        return ferry_fail(FERRY_EOVERFLOW, "parameter %s: %zu boxes",
                          d->params[param].name, boxes);
    while (n < 2 * boxes)
        n *= 2;
    if (n > d->places_capacity) {
        ferry__free(d->places);
        d->places = ferry__alloc_array(n, sizeof(*d->places));
        d->places_capacity = d->places ? n : 0;
        if (!d->places)
            return FERRY_ENOMEM;
    }
    memset(d->places, 0, n * sizeof(*d->places));
    d->n_places = n;
    return FERRY_OK;
}

/* Where the box is, or would be. */
static uint32_t *place_of(const ferry__digester *d, const ferry__copy_op *op)
{
    struct {
        uint64_t salt;
        ferry__copy_op op;
    } key;
    size_t at;

    memset(&key, 0, sizeof(key));
    key.salt = d->salt;
    memcpy(&key.op, op, sizeof(key.op));
    at = (size_t)ferry__xxh3(&key, sizeof(key));
    while (d->places[at &= d->n_places - 1] != 0 &&
           !same_box(&d->uniques[d->places[at] - 1].op, op))
        at++;
    return &d->places[at];
}

/* Number of the box among the uniques of the parameter being added. */
static ferry_status add_box(ferry__digester *d, const ferry_box *box,
                            const ferry_param_meta *meta, uint32_t *out)
{
    ferry__copy_op op = op_of(box, meta->dtype);
    uint32_t *place = place_of(d, &op);

    if (*place == 0) {
        if (d->n_uniques >= UINT32_MAX - 1)
            return ferry_fail(FERRY_EOVERFLOW, "%zu boxes", d->n_uniques);
        FERRY_TRY(ferry__grow(&d->uniques, &d->capacity, d->n_uniques,
                              sizeof(*d->uniques)));
        d->uniques[d->n_uniques++] = (unique){op, is_whole(&op, meta), 0};
        *place = (uint32_t)d->n_uniques;
    }
    *out = *place - 1;
    return FERRY_OK;
}

static ferry_status add_param(ferry__digester *d, size_t param)
{
    size_t from = d->n_uniques;

    d->first[param] = from;
    FERRY_TRY(clear_places(d, param));
    for (size_t p = 0; p < d->n_lists; p++) {
        const ferry__box_lists *list = d->lists[p];

        for (size_t b = list->first[param]; b < list->first[param + 1]; b++)
            FERRY_TRY(add_box(d, &list->boxes[b], &d->params[param],
                              &d->index[p][b]));
    }
    d->first[param + 1] = d->n_uniques;
    if (d->n_uniques - from > d->n_states)
        d->n_states = d->n_uniques - from;
    return FERRY_OK;
}

static ferry_status fill(ferry__digester *d)
{
    d->first = ferry__alloc_array(d->count + 1, sizeof(*d->first));
    d->index = ferry__alloc_array(d->n_lists, sizeof(*d->index));
    if (!d->first || !d->index)
        return FERRY_ENOMEM;
    for (size_t p = 0; p < d->n_lists; p++) {
        const ferry__box_lists *list = d->lists[p];

        d->index[p] =
            ferry__alloc_array(list->first[list->n_params], sizeof(**d->index));
        if (!d->index[p])
            return FERRY_ENOMEM;
    }
    for (size_t i = 0; i < d->count; i++)
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

ferry_status ferry__digester_create(const ferry_param_meta *params,
                                    size_t count,
                                    const ferry__box_lists *const *lists,
                                    size_t n_lists, ferry__digester **out)
{
    ferry__digester *d = ferry__alloc(sizeof(*d));
    ferry_status status;

    if (!d)
        return FERRY_ENOMEM;
    d->params = params;
    d->count = count;
    d->lists = lists;
    d->n_lists = n_lists;
    if (getrandom(&d->salt, sizeof(d->salt), 0) != sizeof(d->salt))
        d->salt = (uintptr_t)d;
    status = fill(d);
    ferry__free(d->places);
    d->places = NULL;
    if (status < 0)
        ferry__digester_destroy(&d);
    else
        *out = d;
    return status;
}

void ferry__digester_destroy(ferry__digester **digester)
{
    ferry__digester *d = *digester;

    if (!d)
        return;
    for (size_t p = 0; d->index && p < d->n_lists; p++)
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
    ferry__digester *d = arg;
    ferry__copy_op part = *op;

    part.src_offset -= d->piece_first;
    ferry__copy_digest(&part, d->bytes, d->state);
}

void ferry__digester_feed(ferry__digester *d, size_t i, const void *bytes,
                          int64_t first, int64_t count)
{
    int64_t numel = ferry__meta_numel(&d->params[i]);
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
}

/* ---- packing and hashing in one pass ---- */

/* Small enough to be hashed while the copy left it in the nearest cache. */
#define STEP_BYTES ((int64_t)16 << 10)

static void copy_whole(ferry__digester *d, size_t i, const void *bytes,
                       int64_t first, int64_t count, void *out)
{
    const ferry_param_meta *meta = &d->params[i];
    ferry__copy_op op = {.ndim = 1,
                         .shape = {count},
                         .src_stride = {1},
                         .dst_stride = {1},
                         .src_dtype = meta->dtype,
                         .dst_dtype = meta->dtype};

    if (first == 0)
        ferry__xxh3_reset(d->states[0]);
    ferry__copy_hot(&op, out, bytes, d->states[0]);
    if (first + count == ferry__meta_numel(meta))
        d->uniques[d->first[i]].value = ferry__xxh3_value(d->states[0]);
}

void ferry__digester_pack(ferry__digester *d, size_t i,
                          const ferry_tensor *tensor, int64_t first,
                          int64_t count, void *out)
{
    int64_t elem = (int64_t)ferry_dtype_bytes(tensor->dtype);
    int64_t step = STEP_BYTES / elem;
    bool contiguous = ferry_tensor_is_contiguous(tensor);
    const char *from = ferry_tensor_data(tensor);
    size_t u = d->first[i];

    if (contiguous && d->first[i + 1] - u == 1 && d->uniques[u].whole) {
        copy_whole(d, i, from + first * elem, first, count, out);
        return;
    }
    for (int64_t at = 0; at < count; at += step) {
        int64_t n = count - at < step ? count - at : step;
        char *to = (char *)out + at * elem;

        ferry__copy_range_hot(tensor, first + at, n, to);
        ferry__digester_feed(d, i, contiguous ? from + (first + at) * elem : to,
                             first + at, n);
    }
}

#define SCRATCH_BYTES ((size_t)256 << 10)

/* A strided tensor is put in order piece by piece. */
static ferry_status feed_strided(ferry__digester *d, size_t i,
                                 const ferry_tensor *tensor)
{
    int64_t numel = ferry_tensor_numel(tensor);
    int64_t step = (int64_t)(SCRATCH_BYTES / ferry_dtype_bytes(tensor->dtype));
    char *scratch = ferry__alloc_raw(SCRATCH_BYTES);

    if (!scratch)
        return FERRY_ENOMEM;
    for (int64_t at = 0; at < numel; at += step) {
        int64_t count = numel - at < step ? numel - at : step;

        ferry__copy_range(tensor, at, count, scratch);
        ferry__digester_feed(d, i, scratch, at, count);
    }
    ferry__free(scratch);
    return FERRY_OK;
}

ferry_status ferry__digester_tensor(ferry__digester *d, size_t i,
                                    const ferry_tensor *tensor)
{
    int64_t numel = ferry_tensor_numel(tensor);

    if (numel == 0 || ferry_tensor_is_contiguous(tensor)) {
        ferry__digester_feed(d, i, ferry_tensor_data(tensor), 0, numel);
        return FERRY_OK;
    }
    return feed_strided(d, i, tensor);
}

uint64_t ferry__digester_value(const ferry__digester *d, size_t list,
                               size_t box)
{
    return d->uniques[d->index[list][box]].value;
}
