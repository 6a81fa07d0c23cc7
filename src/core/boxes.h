/* SPDX-License-Identifier: Apache-2.0 */
/* Sets of boxes: do two overlap, and how many elements do they cover.
 * Both split the set along planes that cut no box, so grids and stacks, which
 * is what loaders make, cost O(n log n).
 * Invariant: a box has start >= 0 and count > 0 in every dimension. */
#ifndef FERRY_CORE_BOXES_H
#define FERRY_CORE_BOXES_H

#include <ferry/tensor.h>

typedef struct ferry__cell {
    const int64_t *start; /* ndim each; borrowed */
    const int64_t *count;
    const void *owner; /* the caller's */
} ferry__cell;

/* Sorts the cells; true when two overlap, then *out_a and *out_b are their
 * owners. */
bool ferry__cells_overlap(ferry__cell *cells, size_t n, int32_t ndim,
                          const void **out_a, const void **out_b);

/* Elements covered by at least one cell. Sorts the cells. FERRY_ENOMEM. */
ferry_status ferry__cells_union(ferry__cell *cells, size_t n, int32_t ndim,
                                int64_t *out_elements);

#endif
