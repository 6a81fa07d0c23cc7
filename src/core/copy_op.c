/* SPDX-License-Identifier: Apache-2.0 */
/* Copy operations as data: made between views, sorted, merged.
 * Invariant: merging keeps the order of the elements; sorting changes it to
 * that of the source's memory, so it is done when an op is made, never when
 * it is replayed. */
#include "core/copy.h"
#include <string.h>

int64_t ferry__op_numel(const ferry__copy_op *op)
{
    int64_t n = 1;
    for (int32_t i = 0; i < op->ndim; i++)
        n *= op->shape[i];
    return n;
}

static void set_empty(ferry__copy_op *op)
{
    memset(op->shape, 0, sizeof(op->shape));
    memset(op->src_stride, 0, sizeof(op->src_stride));
    memset(op->dst_stride, 0, sizeof(op->dst_stride));
    op->ndim = 1;
}

static void clear_tail(ferry__copy_op *op, int32_t from)
{
    for (int32_t i = from; i < FERRY_MAX_DIMS; i++) {
        op->shape[i] = 0;
        op->src_stride[i] = 0;
        op->dst_stride[i] = 0;
    }
}

void ferry__op_merge(ferry__copy_op *op)
{
    int32_t n = 0;
    for (int32_t i = 0; i < op->ndim; i++) {
        int64_t extent = op->shape[i];
        if (extent == 0) {
            set_empty(op);
            return;
        }
        if (extent == 1)
            continue;
        int64_t src = op->src_stride[i], dst = op->dst_stride[i];
        if (n > 0 && op->src_stride[n - 1] == extent * src &&
            op->dst_stride[n - 1] == extent * dst) {
            op->shape[n - 1] *= extent;
            op->src_stride[n - 1] = src;
            op->dst_stride[n - 1] = dst;
            continue;
        }
        op->shape[n] = extent;
        op->src_stride[n] = src;
        op->dst_stride[n] = dst;
        n++;
    }
    op->ndim = n;
    clear_tail(op, n);
}

static int64_t magnitude(int64_t value)
{
    return value < 0 ? -value : value;
}

static void swap_dims(ferry__copy_op *op, int32_t a, int32_t b)
{
    int64_t shape = op->shape[a], src = op->src_stride[a],
            dst = op->dst_stride[a];
    op->shape[a] = op->shape[b];
    op->src_stride[a] = op->src_stride[b];
    op->dst_stride[a] = op->dst_stride[b];
    op->shape[b] = shape;
    op->src_stride[b] = src;
    op->dst_stride[b] = dst;
}

void ferry__op_sort(ferry__copy_op *op)
{
    /* At most eight dimensions: insertion sort, which is stable. */
    for (int32_t i = 1; i < op->ndim; i++) {
        for (int32_t j = i; j > 0 && magnitude(op->src_stride[j - 1]) <
                                         magnitude(op->src_stride[j]);
             j--)
            swap_dims(op, j - 1, j);
    }
    ferry__op_merge(op);
}

void ferry__op_between(const ferry_tensor *dst, const ferry_tensor *src,
                       ferry__copy_op *out)
{
    memset(out, 0, sizeof(*out));
    out->ndim = src->ndim;
    for (int32_t i = 0; i < src->ndim; i++) {
        out->shape[i] = src->shape[i];
        out->src_stride[i] = src->stride[i];
        out->dst_stride[i] = dst->stride[i];
    }
    out->src_offset = src->offset;
    out->dst_offset = dst->offset;
    out->src_dtype = src->dtype;
    out->dst_dtype = dst->dtype;
}
