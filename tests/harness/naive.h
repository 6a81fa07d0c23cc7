/* SPDX-License-Identifier: Apache-2.0 */
/* The slow, obvious way: a view as an explicit list of element indices, and
 * a seeded random source. Tests compare the library against these.
 * Invariant: nothing here calls the code under test, but for random views,
 * which are checked against the lists first. */
#ifndef FERRY_TESTS_NAIVE_H
#define FERRY_TESTS_NAIVE_H

#include <ferry/tensor.h>

#define NAIVE_MAX 4096

typedef struct naive_view {
    int32_t ndim;
    int64_t shape[FERRY_MAX_DIMS];
    size_t count;
    int64_t index[NAIVE_MAX]; /* flat element of the base, row-major */
} naive_view;

uint64_t naive_random(uint64_t *state);
/* In [low, high]. */
int64_t naive_between(uint64_t *state, int64_t low, int64_t high);

void naive_whole(naive_view *v, int32_t ndim, const int64_t *shape);
void naive_narrow(naive_view *v, int32_t dim, int64_t start, int64_t length);
void naive_select(naive_view *v, int32_t dim, int64_t index);
void naive_permute(naive_view *v, const int32_t *dims);
/* Same elements under another shape. */
void naive_reshape(naive_view *v, int32_t ndim, const int64_t *shape);
/* The indices that strides and offset say, row-major. */
void naive_of(const ferry_tensor *t, naive_view *out);

/* One random operation of the view algebra, on both forms. */
void naive_step(uint64_t *state, ferry_tensor *t, naive_view *v);
/* A random whole tensor of at most `most` elements, lazy, and its list. */
void naive_tensor(uint64_t *state, ferry_dtype dtype, int64_t most,
                  ferry_tensor *t, naive_view *v);

#endif
