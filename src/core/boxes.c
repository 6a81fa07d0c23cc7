/* SPDX-License-Identifier: Apache-2.0 */
/* Overlap and union of boxes by splitting along planes that cut none.
 * Invariant: recursion is only into the smaller parts, so its depth is
 * logarithmic whatever the boxes are. */
#include "core/boxes.h"
#include "base/alloc.h"
#include <stdlib.h>
#include <string.h>

static int by_start(const void *a, const void *b, void *arg)
{
    int32_t d = *(const int32_t *)arg;
    int64_t x = ((const ferry__cell *)a)->start[d];
    int64_t y = ((const ferry__cell *)b)->start[d];
    return (x > y) - (x < y);
}

static int64_t end_of(const ferry__cell *c, int32_t d)
{
    return c->start[d] + c->count[d];
}

/* A part of a set: cells [at, at + n). */
typedef struct part {
    size_t at, n;
} part;

/* The part that begins at `at` when sorted along d: it ends where a plane
 * cuts no cell. */
static size_t part_end(const ferry__cell *cells, size_t at, size_t n, int32_t d)
{
    int64_t reach = end_of(&cells[at], d);
    size_t i = at + 1;
    for (; i < n && cells[i].start[d] < reach; i++) {
        if (end_of(&cells[i], d) > reach)
            reach = end_of(&cells[i], d);
    }
    return i;
}

/* Sorts along a dimension that splits the set; -1 when none does. */
static int32_t split_dim(ferry__cell *cells, size_t n, int32_t ndim)
{
    for (int32_t d = 0; d < ndim; d++) {
        qsort_r(cells, n, sizeof(*cells), by_start, &d);
        if (part_end(cells, 0, n, d) < n)
            return d;
    }
    return -1;
}

/* Calls itself for every part but the largest, which it answers. */
typedef bool (*part_fn)(ferry__cell *cells, size_t n, int32_t ndim, void *arg);

static bool visit_smaller(ferry__cell *cells, size_t n, int32_t d, int32_t ndim,
                          part_fn fn, void *arg, part *largest)
{
    largest->n = 0;
    for (size_t at = 0; at < n;) {
        size_t end = part_end(cells, at, n, d);
        if (end - at > largest->n) {
            largest->at = at;
            largest->n = end - at;
        }
        at = end;
    }
    for (size_t at = 0; at < n;) {
        size_t end = part_end(cells, at, n, d);
        if (at != largest->at && fn(cells + at, end - at, ndim, arg))
            return true;
        at = end;
    }
    return false;
}

/* ---- overlap ---- */

typedef struct pair {
    const void *a, *b;
} pair;

static bool meet(const ferry__cell *a, const ferry__cell *b, int32_t ndim)
{
    for (int32_t d = 0; d < ndim; d++) {
        if (a->start[d] >= end_of(b, d) || b->start[d] >= end_of(a, d))
            return false;
    }
    return true;
}

/* No plane splits these: compare those that share a coordinate. */
static bool sweep(ferry__cell *cells, size_t n, int32_t ndim, pair *out)
{
    int32_t d = 0;
    if (ndim > 0)
        qsort_r(cells, n, sizeof(*cells), by_start, &d);
    for (size_t i = 0; i < n; i++) {
        for (size_t j = i + 1; j < n; j++) {
            if (ndim > 0 && cells[j].start[0] >= end_of(&cells[i], 0))
                break;
            if (meet(&cells[i], &cells[j], ndim)) {
                out->a = cells[i].owner;
                out->b = cells[j].owner;
                return true;
            }
        }
    }
    return false;
}

static bool overlap_part(ferry__cell *cells, size_t n, int32_t ndim, void *arg)
{
    while (n > 1) {
        part largest = {0, 0};
        int32_t d = split_dim(cells, n, ndim);
        if (d < 0)
            return sweep(cells, n, ndim, arg);
        if (visit_smaller(cells, n, d, ndim, overlap_part, arg, &largest))
            return true;
        cells += largest.at;
        n = largest.n;
    }
    return false;
}

bool ferry__cells_overlap(ferry__cell *cells, size_t n, int32_t ndim,
                          const void **out_a, const void **out_b)
{
    pair found = {NULL, NULL};
    if (!overlap_part(cells, n, ndim, &found))
        return false;
    *out_a = found.a;
    *out_b = found.b;
    return true;
}

/* ---- union ---- */

typedef struct total {
    int64_t elements;
    ferry_status status;
} total;

static ferry_status union_from(const ferry__cell *const *cells, size_t n,
                               int32_t d, int32_t ndim, int64_t *out);

static int by_value(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

/* Between two neighbouring coordinates the cross-section is the same. */
static ferry_status union_slices(const ferry__cell *const *cells, size_t n,
                                 int32_t d, int32_t ndim, int64_t *cut,
                                 const ferry__cell **inside, int64_t *out)
{
    int64_t sum = 0;
    for (size_t i = 0; i < n; i++) {
        cut[2 * i] = cells[i]->start[d];
        cut[2 * i + 1] = end_of(cells[i], d);
    }
    qsort(cut, 2 * n, sizeof(*cut), by_value);
    for (size_t k = 0; k + 1 < 2 * n; k++) {
        int64_t area = 0;
        size_t m = 0;
        if (cut[k] == cut[k + 1])
            continue;
        for (size_t i = 0; i < n; i++) {
            if (cells[i]->start[d] <= cut[k] && end_of(cells[i], d) > cut[k])
                inside[m++] = cells[i];
        }
        FERRY_TRY(union_from(inside, m, d + 1, ndim, &area));
        sum += area * (cut[k + 1] - cut[k]);
    }
    *out = sum;
    return FERRY_OK;
}

static ferry_status union_from(const ferry__cell *const *cells, size_t n,
                               int32_t d, int32_t ndim, int64_t *out)
{
    if (n == 0 || d == ndim) {
        *out = n > 0;
        return FERRY_OK;
    }
    int64_t *cut = ferry__alloc_array(2 * n, sizeof(*cut));
    const ferry__cell **inside = ferry__alloc_array(n, sizeof(*inside));
    ferry_status st = FERRY_ENOMEM;
    if (cut && inside)
        st = union_slices(cells, n, d, ndim, cut, inside, out);
    ferry__free(cut);
    ferry__free(inside);
    return st;
}

static int64_t volume(const ferry__cell *c, int32_t ndim)
{
    int64_t v = 1;
    for (int32_t d = 0; d < ndim; d++)
        v *= c->count[d];
    return v;
}

static bool union_part(ferry__cell *cells, size_t n, int32_t ndim, void *arg)
{
    total *t = arg;
    while (n > 1) {
        part largest = {0, 0};
        int32_t d = split_dim(cells, n, ndim);
        if (d < 0)
            break;
        if (visit_smaller(cells, n, d, ndim, union_part, arg, &largest))
            return true;
        cells += largest.at;
        n = largest.n;
    }
    if (n == 1) {
        t->elements += volume(cells, ndim);
        return false;
    }
    int64_t elements = 0;
    const ferry__cell **refs = ferry__alloc_array(n, sizeof(*refs));
    t->status = FERRY_ENOMEM;
    if (refs) {
        for (size_t i = 0; i < n; i++)
            refs[i] = &cells[i];
        t->status = union_from(refs, n, 0, ndim, &elements);
    }
    ferry__free(refs);
    t->elements += elements;
    return t->status < 0;
}

ferry_status ferry__cells_union(ferry__cell *cells, size_t n, int32_t ndim,
                                int64_t *out_elements)
{
    total t = {0, FERRY_OK};
    if (n > 0)
        union_part(cells, n, ndim, &t);
    FERRY_TRY(t.status);
    *out_elements = t.elements;
    return FERRY_OK;
}
