/* SPDX-License-Identifier: Apache-2.0 */
/* Tensors: making them, their sizes, and the public copy.
 * Invariant: a tensor that ferry_tensor_init made has a byte size that fits
 * size_t and strides that fit int64_t, and so has every view of it. */
#include "base/log.h"
#include "base/alloc.h"
#include "base/str.h"
#include "core/copy.h"
#include <string.h>

static ferry_status check_dims(int32_t ndim, const int64_t *shape)
{
    if (ndim < 0 || ndim > FERRY_MAX_DIMS)
        return ferry_fail(FERRY_EINVAL,
                          "tensor has %d dimensions, at most %d are possible",
                          (int)ndim, FERRY_MAX_DIMS);
    for (int32_t i = 0; i < ndim; i++) {
        if (shape[i] < 0)
            return ferry_fail(FERRY_EINVAL,
                              "tensor dimension %d is %lld, must be >= 0",
                              (int)i, (long long)shape[i]);
    }
    return FERRY_OK;
}

static ferry_status too_large(int32_t ndim, const int64_t *shape,
                              ferry_dtype dtype)
{
    char text[256];
    return ferry_fail(FERRY_EOVERFLOW,
                      "tensor of shape %s and dtype %s is too large",
                      ferry__shape_text(text, sizeof(text), ndim, shape),
                      ferry_dtype_name(dtype));
}

ferry_status ferry_tensor_init(ferry_tensor *out, void *data, ferry_dtype dtype,
                               int32_t ndim, const int64_t *shape)
{
    FERRY__NEED(out);
    if (ndim > 0)
        FERRY__NEED(shape);
    ferry_tensor t;
    int64_t span = 1, bytes;

    if (ferry_dtype_bytes(dtype) == 0)
        return ferry_fail(FERRY_EINVAL, "unknown dtype %d", (int)dtype);
    FERRY_TRY(check_dims(ndim, shape));
    if (dtype == FERRY_DTYPE_Q8_0 && (ndim == 0 || shape[ndim - 1] % 32 != 0))
        return ferry_fail(FERRY_EINVAL,
                          "q8_0 needs a last dimension of whole blocks of "
                          "32, got %lld",
                          ndim == 0 ? 1LL : (long long)shape[ndim - 1]);
    memset(&t, 0, sizeof(t));
    t.data = data;
    t.dtype = dtype;
    t.ndim = ndim;
    /* Empty dimensions count as one, so that strides cannot overflow. */
    for (int32_t i = ndim - 1; i >= 0; i--) {
        t.shape[i] = shape[i];
        t.stride[i] = span;
        if (!ferry__mul64(span, shape[i] > 0 ? shape[i] : 1, &span))
            return too_large(ndim, shape, dtype);
    }
    if (!ferry__mul64(span, (int64_t)ferry_dtype_bytes(dtype), &bytes))
        return too_large(ndim, shape, dtype);
    *out = t;
    return FERRY_OK;
}

int64_t ferry_tensor_numel(const ferry_tensor *t)
{
    if (t == NULL)
        return 0;
    int64_t n = 1;
    for (int32_t i = 0; i < t->ndim; i++) {
        if (t->shape[i] == 0)
            return 0;
        n *= t->shape[i];
    }
    return n;
}

size_t ferry_tensor_bytes(const ferry_tensor *t)
{
    if (t == NULL)
        return 0;
    int64_t block = ferry_dtype_block(t->dtype);
    if (block == 0)
        return 0;
    return (size_t)(ferry_tensor_numel(t) / block) *
           ferry_dtype_bytes(t->dtype);
}

bool ferry_tensor_is_contiguous(const ferry_tensor *t)
{
    if (t == NULL)
        return false;
    int64_t span = 1;
    if (ferry_tensor_numel(t) == 0)
        return true;
    for (int32_t i = t->ndim - 1; i >= 0; i--) {
        if (t->shape[i] == 1)
            continue;
        if (t->stride[i] != span)
            return false;
        span *= t->shape[i];
    }
    return true;
}

void *ferry_tensor_data(const ferry_tensor *t)
{
    if (t == NULL)
        return NULL;
    int64_t block = ferry_dtype_block(t->dtype);
    if (!t->data || block == 0)
        return NULL;
    return (char *)t->data +
           t->offset / block * (int64_t)ferry_dtype_bytes(t->dtype);
}

static ferry_status check_shapes(const ferry_tensor *dst,
                                 const ferry_tensor *src)
{
    char want[256], got[256];
    bool same = dst->ndim == src->ndim;
    for (int32_t i = 0; same && i < dst->ndim; i++)
        same = dst->shape[i] == src->shape[i];
    if (same)
        return FERRY_OK;
    return ferry_fail(
        FERRY_EMISMATCH, "copy: destination has shape %s, source %s",
        ferry__shape_text(want, sizeof(want), dst->ndim, dst->shape),
        ferry__shape_text(got, sizeof(got), src->ndim, src->shape));
}

static ferry_status check_host(const ferry_tensor *t)
{
    if (t->device == 0)
        return FERRY_OK;
    return ferry_fail(FERRY_ENOTSUP,
                      "copy: %s%s is in the memory of device %d; tensors of "
                      "the host are copied here",
                      t->name ? "parameter " : "the tensor",
                      t->name ? t->name : "", (int)t->device - 1);
}

ferry_status ferry_tensor_copy(const ferry_tensor *dst, const ferry_tensor *src)
{
    FERRY__NEED(dst);
    FERRY__NEED(src);
    ferry__copy_op op;

    FERRY_TRY(check_shapes(dst, src));
    if (!ferry__dtype_converts(src->dtype, dst->dtype) ||
        dst->dtype == FERRY_DTYPE_Q8_0)
        return ferry_fail(FERRY_ENOTSUP, "copy: %s does not convert to %s",
                          ferry_dtype_name(src->dtype),
                          ferry_dtype_name(dst->dtype));
    for (int32_t i = 0; i < dst->ndim; i++) {
        if (dst->shape[i] > 1 && dst->stride[i] == 0)
            return ferry_fail(FERRY_EINVAL,
                              "copy: destination dimension %d has stride 0",
                              (int)i);
    }
    ferry__op_between(dst, src, &op);
    ferry__op_sort(&op);
    if (ferry__op_numel(&op) == 0)
        return FERRY_OK;
    FERRY_TRY(check_host(dst));
    FERRY_TRY(check_host(src));
    if (!dst->data || !src->data)
        return ferry_fail(FERRY_EINVAL, "copy: the %s has no data (lazy)",
                          dst->data ? "source" : "destination");
    ferry__copy_run(&op, dst->data, src->data, NULL);
    return FERRY_OK;
}
