/* SPDX-License-Identifier: Apache-2.0 */
/* Multiplies weights by the scales that lie beside them. The pair stands
 * where the later of the two stood; the first is held until then, as a copy
 * unless the inner source is stable. Invariant: the product is rounded once
 * to f32 and once to the asked-for dtype, whichever of the two came first. */
#include "base/log.h"
#include "sources/adapter.h"

#include "base/alloc.h"
#include "base/str.h"
#include "core/copy.h"

#include <inttypes.h>
#include <string.h>

/* A weight and its scale. */
typedef struct pair {
    size_t weight, scale; /* inner indices */
    ferry_item first;     /* the one that came first, in a pass */
    void *copy;           /* its bytes, when they had to be copied */
} pair;

typedef struct dequantise_source {
    ferry__adapter base;
    char *suffix;
    ferry_dtype to;
    pair *pairs;
    size_t n_pairs, pairs_capacity;
    size_t *pair_of;       /* by inner index */
    size_t *origin;        /* by shown index: inner index of the later one */
    ferry__scratch result; /* what the caller reads */
    ferry__scratch scales; /* f32 */
    ferry__scratch row;    /* f32, one slice of the weight */
} dequantise_source;

/* ---- plan ---- */

/* Index of the parameter that `name` is a companion of. */
static ferry_status base_of(const dequantise_source *d, const char *name,
                            bool *out_found, size_t *out_index)
{
    size_t n = strlen(name), tail = strlen(d->suffix);
    char *base;

    *out_found = false;
    if (n <= tail || strcmp(name + n - tail, d->suffix) != 0)
        return FERRY_OK;
    base = ferry__strndup(name, n - tail);
    if (!base)
        return FERRY_ENOMEM;
    *out_found = ferry__manifest_find(&d->base.seen, base, out_index);
    ferry__free(base);
    return FERRY_OK;
}

static bool block_scaled(const ferry_param_meta *weight,
                         const ferry_param_meta *scale)
{
    if (weight->ndim != 2 || scale->ndim != 2)
        return false;
    for (int32_t d = 0; d < 2; d++) {
        if (scale->shape[d] == 0 ? weight->shape[d] != 0
                                 : weight->shape[d] % scale->shape[d] != 0)
            return false;
    }
    return true;
}

static ferry_status check_pair(const ferry_param_meta *weight,
                               const ferry_param_meta *scale)
{
    const ferry_param_meta *both[2] = {weight, scale};
    char w[128], s[128];

    for (int i = 0; i < 2; i++) {
        if (!ferry__dtype_is_float(both[i]->dtype))
            return ferry_fail(FERRY_ENOTSUP,
                              "parameter %s: dequantising "
                              "needs floating point, got %s",
                              both[i]->name, ferry_dtype_name(both[i]->dtype));
    }
    if (ferry__meta_numel(scale) == 1 || block_scaled(weight, scale))
        return FERRY_OK;
    return ferry_fail(
        FERRY_EMISMATCH,
        "parameter %s: scales of shape %s do not divide "
        "the shape %s of %s into equal blocks",
        scale->name, ferry__shape_text(s, sizeof(s), scale->ndim, scale->shape),
        ferry__shape_text(w, sizeof(w), weight->ndim, weight->shape),
        weight->name);
}

static ferry_status pair_up(dequantise_source *d, size_t weight, size_t scale)
{
    const ferry_param_meta *params = d->base.seen.params;

    if (d->pair_of[weight] != FERRY__NO_INDEX ||
        d->pair_of[scale] != FERRY__NO_INDEX)
        return ferry_fail(FERRY_ENOTSUP, "parameter %s: scales of scales",
                          params[scale].name);
    FERRY_TRY(check_pair(&params[weight], &params[scale]));
    FERRY_TRY(ferry__grow(&d->pairs, &d->pairs_capacity, d->n_pairs,
                          sizeof(*d->pairs)));
    d->pairs[d->n_pairs] = (pair){.weight = weight, .scale = scale};
    d->pair_of[weight] = d->pair_of[scale] = d->n_pairs++;
    return FERRY_OK;
}

static ferry_status find_pairs(dequantise_source *d)
{
    size_t weight;
    bool found;

    for (size_t i = 0; i < d->base.seen.count; i++)
        d->pair_of[i] = FERRY__NO_INDEX;
    for (size_t i = 0; i < d->base.seen.count; i++) {
        FERRY_TRY(base_of(d, d->base.seen.params[i].name, &found, &weight));
        if (found)
            FERRY_TRY(pair_up(d, weight, i));
    }
    return FERRY_OK;
}

static size_t later(const pair *p)
{
    return p->weight > p->scale ? p->weight : p->scale;
}

static ferry_status dequantise_plan(ferry__adapter *a)
{
    dequantise_source *d = (dequantise_source *)a;

    d->pair_of = ferry__alloc_array(a->seen.count, sizeof(*d->pair_of));
    d->origin = ferry__alloc_array(a->seen.count, sizeof(*d->origin));
    if (!d->pair_of || !d->origin)
        return FERRY_ENOMEM;
    FERRY_TRY(find_pairs(d));
    for (size_t i = 0; i < a->seen.count; i++) {
        ferry_param_meta meta = a->seen.params[i];

        if (d->pair_of[i] != FERRY__NO_INDEX) {
            const pair *p = &d->pairs[d->pair_of[i]];

            if (later(p) != i)
                continue;
            meta = a->seen.params[p->weight];
            meta.dtype = d->to;
        }
        d->origin[a->shown.count] = i;
        FERRY_TRY(ferry__manifest_add(&a->shown, &meta));
    }
    if (d->n_pairs)
        a->ops.flags &= ~FERRY_SOURCE_STABLE;
    return FERRY_OK;
}

static void dequantise_reset(ferry__adapter *a)
{
    dequantise_source *d = (dequantise_source *)a;

    for (size_t i = 0; i < d->n_pairs; i++) {
        ferry__free(d->pairs[i].copy);
        d->pairs[i].copy = NULL;
    }
    ferry__scratch_free(&d->result);
    ferry__scratch_free(&d->scales);
    ferry__scratch_free(&d->row);
}

static void dequantise_unplan(ferry__adapter *a)
{
    dequantise_source *d = (dequantise_source *)a;

    ferry__free(d->pairs);
    ferry__free(d->pair_of);
    ferry__free(d->origin);
    d->pairs = NULL;
    d->pair_of = d->origin = NULL;
    d->n_pairs = d->pairs_capacity = 0;
}

static void dequantise_destroy(ferry__adapter *a)
{
    ferry__free(((dequantise_source *)a)->suffix);
}

static bool dequantise_holds(void *self, const char *name)
{
    dequantise_source *d = self;
    size_t index, origin;
    const pair *p;

    if (!ferry__manifest_find(&d->base.shown, name, &index))
        return false;
    origin = d->origin[index];
    if (d->pair_of[origin] == FERRY__NO_INDEX)
        return ferry__adapter_inner_holds(&d->base, origin);
    p = &d->pairs[d->pair_of[origin]];
    return ferry__adapter_inner_holds(&d->base, p->weight) &&
           ferry__adapter_inner_holds(&d->base, p->scale);
}

/* ---- the product ---- */

static void scale_row(float *row, int64_t n, const float *scales,
                      int64_t n_scales)
{
    int64_t block = n_scales ? n / n_scales : 0;

    for (int64_t b = 0; b < n_scales; b++) {
        for (int64_t i = 0; i < block; i++)
            row[b * block + i] *= scales[b];
    }
}

static ferry_status load_scales(dequantise_source *d, const ferry_tensor *scale)
{
    ferry_param_meta meta = {.dtype = FERRY_DTYPE_F32, .ndim = scale->ndim};
    ferry_tensor f32;

    memcpy(meta.shape, scale->shape, sizeof(meta.shape));
    FERRY_TRY(ferry__scratch_need(&d->scales, ferry__meta_bytes(&meta)));
    FERRY_TRY(ferry__meta_tensor(&meta, d->scales.data, &f32));
    return ferry_tensor_copy(&f32, scale);
}

/* Slice by slice along the first dimension, so that the f32 values in
 * between need one slice of memory. */
static ferry_status multiply(dequantise_source *d, const ferry_tensor *weight,
                             const ferry_tensor *scale,
                             const ferry_tensor *result)
{
    bool rows = weight->ndim >= 2, one = ferry_tensor_numel(scale) == 1;
    int64_t n_slices = rows ? weight->shape[0] : 1;
    int64_t n_cols = one ? 1 : scale->shape[1];
    int64_t n = n_slices ? ferry_tensor_numel(weight) / n_slices : 0;
    size_t elem_bytes = ferry_dtype_bytes(d->to);
    unsigned char *out = ferry_tensor_data(result);
    const float *scales;

    if (n == 0)
        return FERRY_OK;
    FERRY_TRY(load_scales(d, scale));
    FERRY_TRY(ferry__scratch_need(&d->row, (size_t)n * sizeof(float)));
    scales = d->scales.data;
    for (int64_t i = 0; i < n_slices; i++) {
        int64_t block_row = one ? 0 : i / (n_slices / scale->shape[0]);
        ferry_tensor slice = *weight, row;

        if (rows)
            FERRY_TRY(ferry_tensor_select(weight, 0, i, &slice));
        FERRY_TRY(ferry_tensor_init(&row, d->row.data, FERRY_DTYPE_F32,
                                    slice.ndim, slice.shape));
        FERRY_TRY(ferry_tensor_copy(&row, &slice));
        scale_row(d->row.data, n, scales + block_row * n_cols, n_cols);
        ferry__convert(out + (size_t)(i * n) * elem_bytes, d->to, d->row.data,
                       FERRY_DTYPE_F32, n);
    }
    return FERRY_OK;
}

/* ---- the pass ---- */

static ferry_status hold(dequantise_source *d, pair *p, const ferry_item *item,
                         size_t index)
{
    const ferry_param_meta *meta = &d->base.seen.params[index];

    p->first = *item;
    if (!item->tensor.data || ferry__source_is_stable(&d->base.inner))
        return FERRY_OK;
    p->copy = ferry__alloc_raw(ferry__meta_bytes(meta));
    if (!p->copy)
        return FERRY_ENOMEM;
    FERRY_TRY(ferry__item_wait(item));
    p->first.wait = NULL;
    FERRY_TRY(ferry__meta_tensor(meta, p->copy, &p->first.tensor));
    return ferry_tensor_copy(&p->first.tensor, &item->tensor);
}

static ferry_status complete(dequantise_source *d, pair *p,
                             const ferry_item *second, size_t index,
                             ferry_item *out_item)
{
    bool weight_last = index == p->weight;
    const ferry_item *weight = weight_last ? second : &p->first;
    const ferry_item *scale = weight_last ? &p->first : second;
    ferry_param_meta meta = d->base.seen.params[p->weight];
    ferry_item item = {.name = meta.name};

    meta.dtype = d->to;
    if (!weight->tensor.data || !scale->tensor.data) {
        FERRY_TRY(ferry__meta_tensor(&meta, NULL, &item.tensor));
    } else {
        FERRY_TRY(ferry__item_wait(weight));
        FERRY_TRY(ferry__item_wait(scale));
        FERRY_TRY(ferry__scratch_need(&d->result, ferry__meta_bytes(&meta)));
        FERRY_TRY(ferry__meta_tensor(&meta, d->result.data, &item.tensor));
        FERRY_TRY(multiply(d, &weight->tensor, &scale->tensor, &item.tensor));
    }
    ferry__free(p->copy);
    p->copy = NULL;
    *out_item = item;
    return FERRY_OK;
}

static ferry_status dequantise_next(void *self, ferry_item *out_item)
{
    dequantise_source *d = self;
    ferry_item item;
    size_t index;

    for (;;) {
        ferry_status st = ferry__adapter_pull(&d->base, &item, &index);
        pair *p;

        if (st != FERRY_OK)
            return st;
        if (d->pair_of[index] == FERRY__NO_INDEX) {
            *out_item = item;
            return FERRY_OK;
        }
        p = &d->pairs[d->pair_of[index]];
        if (index == later(p))
            return complete(d, p, &item, index, out_item);
        FERRY_TRY(hold(d, p, &item, index));
    }
}

ferry_status ferry_source_dequantise(ferry_source *inner, const char *suffix,
                                     ferry_dtype to, ferry_source *out_source)
{
    FERRY__NEED(out_source);
    dequantise_source *d;

    if (!suffix || !*suffix)
        return ferry_fail(FERRY_EINVAL, "dequantise: the suffix is empty, "
                                        "want for example \"_scale_inv\"");
    if (!ferry__dtype_is_float(to) || ferry_dtype_block(to) != 1)
        return ferry_fail(FERRY_EINVAL,
                          "dequantise: dtype is %s, want a "
                          "floating-point one",
                          ferry_dtype_name(to));
    FERRY_TRY(ferry__adapter_create(sizeof(*d), "dequantise", inner,
                                    dequantise_next, &d));
    d->base.plan = dequantise_plan;
    d->base.unplan = dequantise_unplan;
    d->base.reset = dequantise_reset;
    d->base.destroy = dequantise_destroy;
    d->base.ops.groups = NULL;
    if (d->base.ops.holds)
        d->base.ops.holds = dequantise_holds;
    d->to = to;
    d->suffix = ferry__strdup(suffix);
    if (!d->suffix) {
        ferry__adapter_abandon(&d->base);
        return FERRY_ENOMEM;
    }
    return ferry__adapter_finish(&d->base, inner, out_source);
}
