/* SPDX-License-Identifier: Apache-2.0 */
/* Views as lists of indices; see naive.h. */
#include "harness/naive.h"
#include <assert.h>
#include <string.h>

uint64_t naive_random(uint64_t *state)
{
    uint64_t z = (*state += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

int64_t naive_between(uint64_t *state, int64_t low, int64_t high)
{
    return low + (int64_t)(naive_random(state) % (uint64_t)(high - low + 1));
}

static size_t product(int32_t ndim, const int64_t *shape)
{
    size_t n = 1;
    for (int32_t i = 0; i < ndim; i++)
        n *= (size_t)shape[i];
    return n;
}

void naive_whole(naive_view *v, int32_t ndim, const int64_t *shape)
{
    memset(v, 0, sizeof(*v));
    v->ndim = ndim;
    memcpy(v->shape, shape, (size_t)ndim * sizeof(*shape));
    v->count = product(ndim, shape);
    assert(v->count <= NAIVE_MAX);
    for (size_t i = 0; i < v->count; i++)
        v->index[i] = (int64_t)i;
}

/* Coordinates of the k-th element of a shape. */
static void coords(int32_t ndim, const int64_t *shape, size_t k, int64_t *at)
{
    for (int32_t i = ndim - 1; i >= 0; i--) {
        at[i] = (int64_t)(k % (size_t)shape[i]);
        k /= (size_t)shape[i];
    }
}

static size_t position(int32_t ndim, const int64_t *shape, const int64_t *at)
{
    size_t k = 0;
    for (int32_t i = 0; i < ndim; i++)
        k = k * (size_t)shape[i] + (size_t)at[i];
    return k;
}

void naive_narrow(naive_view *v, int32_t dim, int64_t start, int64_t length)
{
    naive_view old = *v;
    int64_t at[FERRY_MAX_DIMS];
    v->shape[dim] = length;
    v->count = product(v->ndim, v->shape);
    for (size_t k = 0; k < v->count; k++) {
        coords(v->ndim, v->shape, k, at);
        at[dim] += start;
        v->index[k] = old.index[position(old.ndim, old.shape, at)];
    }
}

void naive_select(naive_view *v, int32_t dim, int64_t index)
{
    naive_narrow(v, dim, index, 1);
    for (int32_t i = dim; i + 1 < v->ndim; i++)
        v->shape[i] = v->shape[i + 1];
    v->ndim--;
}

void naive_permute(naive_view *v, const int32_t *dims)
{
    naive_view old = *v;
    int64_t at[FERRY_MAX_DIMS], from[FERRY_MAX_DIMS];
    for (int32_t i = 0; i < v->ndim; i++)
        v->shape[i] = old.shape[dims[i]];
    for (size_t k = 0; k < v->count; k++) {
        coords(v->ndim, v->shape, k, at);
        for (int32_t i = 0; i < v->ndim; i++)
            from[dims[i]] = at[i];
        v->index[k] = old.index[position(old.ndim, old.shape, from)];
    }
}

void naive_reshape(naive_view *v, int32_t ndim, const int64_t *shape)
{
    assert(product(ndim, shape) == v->count);
    v->ndim = ndim;
    memcpy(v->shape, shape, (size_t)ndim * sizeof(*shape));
}

void naive_of(const ferry_tensor *t, naive_view *out)
{
    int64_t at[FERRY_MAX_DIMS];
    memset(out, 0, sizeof(*out));
    out->ndim = t->ndim;
    memcpy(out->shape, t->shape, sizeof(out->shape));
    out->count = product(t->ndim, t->shape);
    assert(out->count <= NAIVE_MAX);
    for (size_t k = 0; k < out->count; k++) {
        coords(t->ndim, t->shape, k, at);
        out->index[k] = t->offset;
        for (int32_t i = 0; i < t->ndim; i++)
            out->index[k] += at[i] * t->stride[i];
    }
}

static void step_dim(uint64_t *state, ferry_tensor *t, naive_view *v,
                     int64_t what)
{
    int32_t dim = (int32_t)naive_between(state, 0, t->ndim - 1);
    int64_t n = t->shape[dim];
    ferry_status st = FERRY_OK;
    if (what == 0) {
        int64_t start = naive_between(state, 0, n);
        int64_t length = naive_between(state, start < n, n - start);
        st = ferry_tensor_narrow(t, dim, start, length, t);
        naive_narrow(v, dim, start, length);
    } else if (what == 1 && n > 0) {
        int64_t index = naive_between(state, 0, n - 1);
        st = ferry_tensor_select(t, dim, index, t);
        naive_select(v, dim, index);
    } else if (what == 2) {
        int64_t chunks = naive_between(state, 1, 4);
        int64_t index = naive_between(state, 0, chunks - 1);
        int64_t each = (n + chunks - 1) / chunks;
        int64_t start = index * each < n ? index * each : n;
        int64_t length = n - start < each ? n - start : each;
        st = ferry_tensor_chunk(t, chunks, dim, index, t);
        naive_narrow(v, dim, start, length);
    }
    assert(st == FERRY_OK);
}

static void step_order(uint64_t *state, ferry_tensor *t, naive_view *v)
{
    int32_t dims[FERRY_MAX_DIMS];
    for (int32_t i = 0; i < t->ndim; i++)
        dims[i] = i;
    for (int32_t i = t->ndim - 1; i > 0; i--) {
        int32_t j = (int32_t)naive_between(state, 0, i), old = dims[i];
        dims[i] = dims[j];
        dims[j] = old;
    }
    ferry_status st = ferry_tensor_permute(t, dims, t);
    assert(st == FERRY_OK);
    (void)st;
    naive_permute(v, dims);
}

/* Splits a dimension in two where it divides, or merges two neighbours. */
static void step_shape(uint64_t *state, ferry_tensor *t, naive_view *v)
{
    int64_t shape[FERRY_MAX_DIMS];
    int32_t n = 0, dim = (int32_t)naive_between(state, 0, t->ndim - 1);
    bool split = naive_between(state, 0, 1) && t->ndim < FERRY_MAX_DIMS;
    int64_t by = naive_between(state, 1, 3);
    if (split && (t->shape[dim] % by != 0))
        return;
    for (int32_t i = 0; i < t->ndim; i++) {
        if (i == dim && split) {
            shape[n++] = by;
            shape[n++] = t->shape[i] / by;
        } else if (i == dim && i + 1 < t->ndim) {
            shape[n++] = t->shape[i] * t->shape[i + 1];
            i++;
        } else {
            shape[n++] = t->shape[i];
        }
    }
    if (ferry_tensor_view(t, n, shape, t) == FERRY_OK)
        naive_reshape(v, n, shape);
}

void naive_step(uint64_t *state, ferry_tensor *t, naive_view *v)
{
    int64_t what = naive_between(state, 0, 5);
    if (t->ndim == 0)
        return;
    if (what <= 2)
        step_dim(state, t, v, what);
    else if (what <= 4)
        step_order(state, t, v);
    else
        step_shape(state, t, v);
}

void naive_tensor(uint64_t *state, ferry_dtype dtype, int64_t most,
                  ferry_tensor *t, naive_view *v)
{
    int64_t shape[FERRY_MAX_DIMS], left = most;
    int32_t ndim = (int32_t)naive_between(state, 0, 4);
    for (int32_t i = 0; i < ndim; i++) {
        int64_t high = left < 12 ? left : 12;
        shape[i] = naive_between(state, 1, high);
        left /= shape[i];
    }
    ferry_status st = ferry_tensor_init(t, NULL, dtype, ndim, shape);
    assert(st == FERRY_OK);
    (void)st;
    naive_whole(v, ndim, shape);
}
