/* SPDX-License-Identifier: Apache-2.0 */
/* A stretch of a tensor's logical order as packed bytes.
 * Invariant: what is written is the same whatever the tensor's strides. */
#include "core/load_plan.h"

#include <string.h>

typedef struct range {
    int64_t first;
    ferry__op_fn fn;
    void *arg;
} range;

/* The logical order of the tensor is the clip's source; the copy goes the
 * other way, from the tensor's strides to a packed piece. */
static void turn_part(void *arg, const ferry__copy_op *op)
{
    const range *r = arg;
    ferry__copy_op copy = *op;

    for (int32_t d = 0; d < op->ndim; d++) {
        copy.src_stride[d] = op->dst_stride[d];
        copy.dst_stride[d] = op->src_stride[d];
    }
    copy.src_offset = op->dst_offset;
    copy.dst_offset = op->src_offset - r->first;
    r->fn(r->arg, &copy);
}

void ferry__range_ops(const ferry_tensor *tensor, int64_t first, int64_t count,
                      ferry__op_fn fn, void *arg)
{
    range r = {first, fn, arg};
    ferry__copy_op op;
    int64_t stride = 1;

    if (count == 0)
        return;
    memset(&op, 0, sizeof(op));
    op.src_dtype = op.dst_dtype = tensor->dtype;
    if (ferry_tensor_is_contiguous(tensor)) {
        op.ndim = 1;
        op.shape[0] = count;
        op.src_stride[0] = op.dst_stride[0] = 1;
        op.src_offset = first;
        fn(arg, &op);
        return;
    }
    op.ndim = tensor->ndim;
    for (int32_t d = tensor->ndim - 1; d >= 0; d--) {
        op.shape[d] = tensor->shape[d];
        op.src_stride[d] = stride;
        op.dst_stride[d] = tensor->stride[d];
        stride *= tensor->shape[d];
    }
    ferry__op_clip(&op, first, count, turn_part, &r);
}

typedef struct range_copy {
    const void *data;
    void *out;
    void (*copy)(const ferry__copy_op *op, void *dst, const void *src,
                 ferry__xxh3_state *digest);
} range_copy;

static void copy_part(void *arg, const ferry__copy_op *op)
{
    const range_copy *r = arg;

    r->copy(op, r->out, r->data, NULL);
}

void ferry__copy_range(const ferry_tensor *tensor, int64_t first, int64_t count,
                       void *out)
{
    range_copy r = {ferry_tensor_data(tensor), out, ferry__copy_run};

    ferry__range_ops(tensor, first, count, copy_part, &r);
}

void ferry__copy_range_hot(const ferry_tensor *tensor, int64_t first,
                           int64_t count, void *out)
{
    range_copy r = {ferry_tensor_data(tensor), out, ferry__copy_hot};

    ferry__range_ops(tensor, first, count, copy_part, &r);
}
