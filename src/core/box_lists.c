/* SPDX-License-Identifier: Apache-2.0 */
/* Lists of boxes: gathered, written, read, checked.
 * Invariant: no memory is taken on the word of a peer that the bytes at hand
 * do not bear out. */
#include "core/box_lists.h"

#include "base/alloc.h"
#include "base/hash.h"

#include <string.h>

ferry_status ferry__box_lists_gather(const ferry_worker_host *host,
                                     ferry_worker_context *ctx, size_t n_params,
                                     ferry__box_lists *out)
{
    ferry__box_lists v = {.n_params = n_params};
    size_t used = 0, capacity = 0, n;
    ferry_status status = FERRY_OK;
    const ferry_box *boxes;

    v.first = ferry__alloc_array(n_params + 1, sizeof(*v.first));
    if (!v.first)
        return FERRY_ENOMEM;
    for (size_t i = 0; i < n_params && status >= 0; i++) {
        status = host->boxes(ctx, i, &boxes, &n);
        for (size_t b = 0; status >= 0 && b < n; b++) {
            status = ferry__grow(&v.boxes, &capacity, used, sizeof(*v.boxes));
            if (status >= 0)
                v.boxes[used++] = boxes[b];
        }
        v.first[i + 1] = used;
    }
    if (status < 0)
        ferry__box_lists_free(&v);
    else
        *out = v;
    return status;
}

void ferry__box_lists_put(ferry__str *s, const ferry__box_lists *v)
{
    ferry__put_u32(s, (uint32_t)v->n_params);
    for (size_t p = 0; p < v->n_params; p++) {
        ferry__put_u32(s, (uint32_t)(v->first[p + 1] - v->first[p]));
        for (size_t b = v->first[p]; b < v->first[p + 1]; b++) {
            const ferry_box *box = &v->boxes[b];

            ferry__put_u64(s, (uint64_t)box->offset);
            ferry__put_u32(s, (uint32_t)box->ndim);
            for (int32_t d = 0; d < box->ndim; d++) {
                ferry__put_u64(s, (uint64_t)box->shape[d]);
                ferry__put_u64(s, (uint64_t)box->stride[d]);
            }
        }
    }
}

ferry_status ferry__box_lists_digest(const ferry__box_lists *v,
                                     uint64_t *out_digest)
{
    ferry__str s = {0};

    ferry__box_lists_put(&s, v);
    if (s.failed) {
        ferry__str_free(&s);
        return ferry_fail(FERRY_ENOMEM, "lists of boxes: out of memory");
    }
    *out_digest = ferry__xxh3(s.data, s.length);
    ferry__str_free(&s);
    return FERRY_OK;
}

static void get_box(ferry__reader *r, ferry_box *box)
{
    uint32_t ndim;

    memset(box, 0, sizeof(*box));
    box->offset = (int64_t)ferry__get_u64(r);
    ndim = ferry__get_u32(r);
    if (ndim > FERRY_MAX_DIMS) {
        r->bad = true;
        return;
    }
    box->ndim = (int32_t)ndim;
    for (uint32_t d = 0; d < ndim; d++) {
        box->shape[d] = (int64_t)ferry__get_u64(r);
        box->stride[d] = (int64_t)ferry__get_u64(r);
    }
}

static ferry_status get_lists(ferry__reader *r, ferry__box_lists *v)
{
    size_t used = 0, capacity = 0, n;

    if (!ferry__get_count(r, 4, &v->n_params))
        return FERRY_OK;
    v->first = ferry__alloc_array(v->n_params + 1, sizeof(*v->first));
    if (!v->first)
        return FERRY_ENOMEM;
    for (size_t p = 0; p < v->n_params && ferry__get_count(r, 12, &n); p++) {
        for (size_t b = 0; b < n && !r->bad; b++) {
            FERRY_TRY(
                ferry__grow(&v->boxes, &capacity, used, sizeof(*v->boxes)));
            get_box(r, &v->boxes[used++]);
        }
        v->first[p + 1] = used;
    }
    return FERRY_OK;
}

ferry_status ferry__box_lists_get(ferry__reader *r, ferry__box_lists *out)
{
    ferry__box_lists v = {0};
    ferry_status status = get_lists(r, &v);

    if (status < 0 || r->bad)
        ferry__box_lists_free(&v);
    *out = v;
    return status;
}

/* A stride of 0 names an element many times, which costs whoever hashes it
 * that many steps: so many are taken whatever the parameter has. */
#define REPEATS_MOST ((int64_t)1 << 24)

/* The product of the extents, those that are 0 left out. */
static bool count_of(const ferry_box *box, int64_t *out)
{
    int64_t n = 1;

    for (int32_t d = 0; d < box->ndim; d++) {
        if (box->shape[d] < 0 ||
            (box->shape[d] > 0 && !ferry__mul64(n, box->shape[d], &n)))
            return false;
    }
    *out = n;
    return true;
}

static bool is_empty(const ferry_box *box)
{
    for (int32_t d = 0; d < box->ndim; d++) {
        if (box->shape[d] == 0)
            return true;
    }
    return false;
}

static bool box_fits(const ferry_box *box, int64_t numel)
{
    int64_t last = box->offset, span, n;

    if (!count_of(box, &n))
        return false;
    /* A box without elements reads nothing, wherever it is. */
    if (numel == 0 || is_empty(box))
        return true;
    if (n > numel && n > REPEATS_MOST)
        return false;
    if (box->offset < 0 || box->offset >= numel)
        return false;
    for (int32_t d = 0; d < box->ndim; d++) {
        if (box->stride[d] < 0 ||
            !ferry__mul64(box->shape[d] - 1, box->stride[d], &span) ||
            span >= numel - last)
            return false;
        last += span;
    }
    return true;
}

static int64_t numel_of(const ferry_param_meta *param)
{
    int64_t n = 1;

    for (int32_t d = 0; d < param->ndim; d++)
        n *= param->shape[d];
    return n;
}

ferry_status ferry__box_lists_check(const ferry__box_lists *v,
                                    const ferry_param_meta *params,
                                    size_t count)
{
    if (v->n_params != count)
        return ferry_fail(FERRY_EPEER,
                          "lists of boxes: %zu parameters, %zu were declared",
                          v->n_params, count);
    for (size_t p = 0; p < count; p++) {
        int64_t numel = numel_of(&params[p]);

        for (size_t b = v->first[p]; b < v->first[p + 1]; b++) {
            if (!box_fits(&v->boxes[b], numel))
                return ferry_fail(FERRY_EPEER,
                                  "lists of boxes: parameter %s: a box outside "
                                  "its %lld elements",
                                  params[p].name, (long long)numel);
        }
    }
    return FERRY_OK;
}

void ferry__box_lists_free(ferry__box_lists *v)
{
    ferry__free(v->first);
    ferry__free(v->boxes);
    *v = (ferry__box_lists){0};
}
