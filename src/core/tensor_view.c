/* SPDX-License-Identifier: Apache-2.0 */
/* The view algebra: narrow, select, transpose, permute, chunk, view, flatten,
 * unsqueeze, squeeze. Invariant: a view never reaches outside the elements
 * of the tensor it was taken of, and no byte is read. */
#include "base/log.h"
#include "base/alloc.h"
#include "base/str.h"
#include <ferry/tensor.h>
#include <string.h>

/* "narrow of model.norm.weight", for messages. */
static const char *op_text(char *buffer, size_t size, const char *op,
                           const ferry_tensor *t)
{
    size_t n = strlen(op);
    if (n >= size)
        n = size - 1;
    memcpy(buffer, op, n);
    buffer[n] = '\0';
    if (t->name && n + 5 < size) {
        memcpy(buffer + n, " of ", 5);
        n += 4;
        size_t m = strlen(t->name);
        if (m >= size - n)
            m = size - n - 1;
        memcpy(buffer + n, t->name, m);
        buffer[n + m] = '\0';
    }
    return buffer;
}

#define OP_TEXT(op, t) op_text((char[512]){0}, 512, op, t)

/* Resolves a negative dimension. `ndim` is how many there are to choose. */
static ferry_status pick_dim(const char *op, const ferry_tensor *t, int32_t dim,
                             int32_t ndim, int32_t *out_dim)
{
    if (dim < -ndim || dim >= ndim)
        return ferry_fail(FERRY_EINVAL,
                          "%s: dimension %d of a tensor of %d dimensions",
                          OP_TEXT(op, t), (int)dim, (int)t->ndim);
    *out_dim = dim < 0 ? dim + ndim : dim;
    return FERRY_OK;
}

static void remove_dim(ferry_tensor *t, int32_t dim)
{
    for (int32_t i = dim; i + 1 < t->ndim; i++) {
        t->shape[i] = t->shape[i + 1];
        t->stride[i] = t->stride[i + 1];
    }
    t->ndim--;
    t->shape[t->ndim] = 0;
    t->stride[t->ndim] = 0;
}

ferry_status ferry_tensor_narrow(const ferry_tensor *t, int32_t dim,
                                 int64_t start, int64_t length,
                                 ferry_tensor *out)
{
    FERRY__NEED(t);
    FERRY__NEED(out);
    ferry_tensor v = *t;
    int32_t d = 0;
    FERRY_TRY(pick_dim("narrow", t, dim, t->ndim, &d));
    if (start < 0 || length < 0 || start > t->shape[d] ||
        length > t->shape[d] - start)
        return ferry_fail(FERRY_EINVAL,
                          "%s: start %lld and length %lld in dimension %d "
                          "of extent %lld",
                          OP_TEXT("narrow", t), (long long)start,
                          (long long)length, (int)d, (long long)t->shape[d]);
    /* An empty view keeps its old offset: there is nothing to point at. */
    if (length > 0)
        v.offset += start * t->stride[d];
    v.shape[d] = length;
    *out = v;
    return FERRY_OK;
}

ferry_status ferry_tensor_select(const ferry_tensor *t, int32_t dim,
                                 int64_t index, ferry_tensor *out)
{
    FERRY__NEED(t);
    FERRY__NEED(out);
    ferry_tensor v = *t;
    int32_t d = 0;
    FERRY_TRY(pick_dim("select", t, dim, t->ndim, &d));
    int64_t n = t->shape[d];
    if (index < -n || index >= n)
        return ferry_fail(
            FERRY_EINVAL, "%s: index %lld in dimension %d of extent %lld",
            OP_TEXT("select", t), (long long)index, (int)d, (long long)n);
    v.offset += (index < 0 ? index + n : index) * t->stride[d];
    remove_dim(&v, d);
    *out = v;
    return FERRY_OK;
}

ferry_status ferry_tensor_transpose(const ferry_tensor *t, int32_t dim0,
                                    int32_t dim1, ferry_tensor *out)
{
    FERRY__NEED(t);
    FERRY__NEED(out);
    ferry_tensor v = *t;
    int32_t a = 0, b = 0;
    FERRY_TRY(pick_dim("transpose", t, dim0, t->ndim, &a));
    FERRY_TRY(pick_dim("transpose", t, dim1, t->ndim, &b));
    v.shape[a] = t->shape[b];
    v.stride[a] = t->stride[b];
    v.shape[b] = t->shape[a];
    v.stride[b] = t->stride[a];
    *out = v;
    return FERRY_OK;
}

ferry_status ferry_tensor_permute(const ferry_tensor *t, const int32_t *dims,
                                  ferry_tensor *out)
{
    FERRY__NEED(t);
    FERRY__NEED(out);
    if (t->ndim > 0)
        FERRY__NEED(dims);
    ferry_tensor v = *t;
    bool used[FERRY_MAX_DIMS] = {false};
    for (int32_t i = 0; i < t->ndim; i++) {
        int32_t d = 0;
        FERRY_TRY(pick_dim("permute", t, dims[i], t->ndim, &d));
        if (used[d])
            return ferry_fail(FERRY_EINVAL, "%s: dimension %d comes twice",
                              OP_TEXT("permute", t), (int)d);
        used[d] = true;
        v.shape[i] = t->shape[d];
        v.stride[i] = t->stride[d];
    }
    *out = v;
    return FERRY_OK;
}

ferry_status ferry_tensor_chunk(const ferry_tensor *t, int64_t chunks,
                                int32_t dim, int64_t index, ferry_tensor *out)
{
    FERRY__NEED(t);
    FERRY__NEED(out);
    int32_t d = 0;
    FERRY_TRY(pick_dim("chunk", t, dim, t->ndim, &d));
    if (chunks <= 0 || index < 0 || index >= chunks)
        return ferry_fail(FERRY_EINVAL, "%s: chunk %lld of %lld",
                          OP_TEXT("chunk", t), (long long)index,
                          (long long)chunks);
    int64_t n = t->shape[d];
    int64_t each = n / chunks + (n % chunks != 0);
    /* index * each could pass int64_t only where the start is past n. */
    int64_t start = each > 0 && index > n / each ? n : index * each;
    if (start > n)
        start = n;
    int64_t length = n - start < each ? n - start : each;
    return ferry_tensor_narrow(t, d, start, length, out);
}

/* Fills in the one -1 and checks that the number of elements is the same. */
static ferry_status resolve_shape(const ferry_tensor *t, int32_t ndim,
                                  const int64_t *shape, int64_t *out_shape)
{
    char from[256], to[256];
    int64_t numel = ferry_tensor_numel(t), known = 1;
    int32_t free_dim = -1;
    bool good = true;
    for (int32_t i = 0; good && i < ndim; i++) {
        out_shape[i] = shape[i];
        if (shape[i] == -1 && free_dim < 0)
            free_dim = i;
        else
            good = shape[i] >= 0 && ferry__mul64(known, shape[i], &known);
    }
    if (good && free_dim >= 0) {
        good = known > 0 && numel % known == 0;
        if (good)
            out_shape[free_dim] = numel / known;
    } else if (good) {
        good = known == numel;
    }
    if (good)
        return FERRY_OK;
    return ferry_fail(FERRY_EINVAL, "%s: shape %s as %s", OP_TEXT("view", t),
                      ferry__shape_text(from, sizeof(from), t->ndim, t->shape),
                      ferry__shape_text(to, sizeof(to), ndim, shape));
}

/* Strides of the new shape over the old one, from the last dimension on: each
 * run of old dimensions that is one regular run takes new dimensions until
 * it is used up. False when one new dimension would need two runs. */
static bool view_strides(const ferry_tensor *t, int32_t ndim,
                         const int64_t *shape, int64_t *out_stride)
{
    int32_t next = ndim - 1;
    int64_t run_stride = t->ndim > 0 ? t->stride[t->ndim - 1] : 1;
    int64_t run = 1, taken = 1;

    for (int32_t i = t->ndim - 1; i >= 0; i--) {
        run *= t->shape[i];
        bool joined = i > 0 && (t->shape[i - 1] == 1 ||
                                t->stride[i - 1] == run * run_stride);
        if (joined)
            continue;
        while (next >= 0 && (taken < run || shape[next] == 1)) {
            out_stride[next] = taken * run_stride;
            taken *= shape[next];
            next--;
        }
        if (taken != run)
            return false;
        if (i > 0) {
            run_stride = t->stride[i - 1];
            run = 1;
            taken = 1;
        }
    }
    for (; next >= 0; next--) /* only extents of 1 are left */
        out_stride[next] = taken * run_stride;
    return true;
}

static void plain_strides(int32_t ndim, const int64_t *shape,
                          int64_t *out_stride)
{
    int64_t span = 1;
    for (int32_t i = ndim - 1; i >= 0; i--) {
        out_stride[i] = span;
        span *= shape[i] > 0 ? shape[i] : 1;
    }
}

ferry_status ferry_tensor_view(const ferry_tensor *t, int32_t ndim,
                               const int64_t *shape, ferry_tensor *out)
{
    FERRY__NEED(t);
    FERRY__NEED(out);
    if (ndim > 0)
        FERRY__NEED(shape);
    ferry_tensor v = *t;
    if (ndim < 0 || ndim > FERRY_MAX_DIMS)
        return ferry_fail(FERRY_EINVAL, "%s: %d dimensions, at most %d",
                          OP_TEXT("view", t), (int)ndim, FERRY_MAX_DIMS);
    memset(v.shape, 0, sizeof(v.shape));
    memset(v.stride, 0, sizeof(v.stride));
    v.ndim = ndim;
    FERRY_TRY(resolve_shape(t, ndim, shape, v.shape));
    if (ferry_tensor_numel(t) == 0) {
        plain_strides(ndim, v.shape, v.stride);
    } else if (!view_strides(t, ndim, v.shape, v.stride)) {
        char text[256];
        return ferry_fail(FERRY_ENOTSUP, "%s: shape %s would need a copy",
                          OP_TEXT("view", t),
                          ferry__shape_text(text, sizeof(text), ndim, v.shape));
    }
    *out = v;
    return FERRY_OK;
}

ferry_status ferry_tensor_flatten(const ferry_tensor *t, int32_t first,
                                  int32_t last, ferry_tensor *out)
{
    FERRY__NEED(t);
    FERRY__NEED(out);
    int64_t shape[FERRY_MAX_DIMS];
    int32_t a = 0, b = 0, n = 0, ndim = t->ndim > 0 ? t->ndim : 1;
    FERRY_TRY(pick_dim("flatten", t, first, ndim, &a));
    FERRY_TRY(pick_dim("flatten", t, last, ndim, &b));
    if (a > b)
        return ferry_fail(FERRY_EINVAL, "%s: from dimension %d back to %d",
                          OP_TEXT("flatten", t), (int)a, (int)b);
    int64_t merged = 1;
    for (int32_t i = a; i <= b && i < t->ndim; i++)
        merged *= t->shape[i];
    for (int32_t i = 0; i < a; i++)
        shape[n++] = t->shape[i];
    shape[n++] = merged;
    for (int32_t i = b + 1; i < t->ndim; i++)
        shape[n++] = t->shape[i];
    return ferry_tensor_view(t, n, shape, out);
}

ferry_status ferry_tensor_unsqueeze(const ferry_tensor *t, int32_t dim,
                                    ferry_tensor *out)
{
    FERRY__NEED(t);
    FERRY__NEED(out);
    ferry_tensor v = *t;
    int32_t d = 0;
    FERRY_TRY(pick_dim("unsqueeze", t, dim, t->ndim + 1, &d));
    if (t->ndim == FERRY_MAX_DIMS)
        return ferry_fail(FERRY_EINVAL,
                          "%s: the tensor has %d dimensions already",
                          OP_TEXT("unsqueeze", t), FERRY_MAX_DIMS);
    for (int32_t i = t->ndim; i > d; i--) {
        v.shape[i] = v.shape[i - 1];
        v.stride[i] = v.stride[i - 1];
    }
    v.shape[d] = 1;
    v.stride[d] = d < t->ndim ? t->shape[d] * t->stride[d] : 1;
    v.ndim = t->ndim + 1;
    *out = v;
    return FERRY_OK;
}

ferry_status ferry_tensor_squeeze(const ferry_tensor *t, int32_t dim,
                                  ferry_tensor *out)
{
    FERRY__NEED(t);
    FERRY__NEED(out);
    ferry_tensor v = *t;
    int32_t d = 0;
    FERRY_TRY(pick_dim("squeeze", t, dim, t->ndim, &d));
    if (t->shape[d] != 1)
        return ferry_fail(
            FERRY_EINVAL, "%s: dimension %d has extent %lld, not 1",
            OP_TEXT("squeeze", t), (int)d, (long long)t->shape[d]);
    remove_dim(&v, d);
    *out = v;
    return FERRY_OK;
}
