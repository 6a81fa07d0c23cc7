/* SPDX-License-Identifier: Apache-2.0 */
/* Replaying an op over less, or over something else, than the contiguous
 * whole parameter it was baked for: a range of its flat elements, or a tensor
 * with strides of its own. Also the decoding of a view into a box.
 * Invariant: the order of the elements, and so the digest, stays. */
#include "core/plan_private.h"
#include <string.h>

/* ---- a view as a box ---- */

static bool decode_offset(int32_t ndim, const int64_t *shape, int64_t offset,
                          int64_t *out_stride, int64_t *out_start)
{
    int64_t span = 1;
    for (int32_t i = ndim - 1; i >= 0; i--) {
        out_stride[i] = span;
        span *= shape[i];
    }
    if (offset < 0 || offset >= span)
        return false;
    for (int32_t i = 0; i < ndim; i++) {
        out_start[i] = offset / out_stride[i];
        offset %= out_stride[i];
    }
    return true;
}

/* Spreads one run (extent, stride) over the dimensions that it fills, from
 * the innermost outwards. */
static bool spread_run(int32_t ndim, const int64_t *shape,
                       const int64_t *stride, int64_t extent, int64_t step,
                       int64_t *start, int64_t *count)
{
    int32_t j = ndim - 1;
    while (j >= 0 && (shape[j] == 1 || stride[j] != step))
        j--;
    while (j >= 0 && count[j] == 1) {
        if (start[j] + extent <= shape[j]) {
            count[j] = extent;
            return true;
        }
        if (start[j] != 0 || extent % shape[j] != 0)
            return false;
        count[j] = shape[j];
        extent /= shape[j];
        j--;
        while (j >= 0 && shape[j] == 1)
            j--;
    }
    return false;
}

bool ferry__box_decode(int32_t ndim, const int64_t *shape,
                       const ferry_tensor *view, int64_t *out_start,
                       int64_t *out_count)
{
    int64_t stride[FERRY_MAX_DIMS], start[FERRY_MAX_DIMS] = {0},
                                    count[FERRY_MAX_DIMS] = {0};
    ferry__copy_op op;

    if (!decode_offset(ndim, shape, view->offset, stride, start))
        return false;
    for (int32_t i = 0; i < ndim; i++)
        count[i] = 1;
    ferry__op_between(view, view, &op);
    ferry__op_sort(&op);
    for (int32_t i = 0; i < op.ndim; i++) {
        if (op.src_stride[i] <= 0 ||
            !spread_run(ndim, shape, stride, op.shape[i], op.src_stride[i],
                        start, count))
            return false;
    }
    memcpy(out_start, start, sizeof(start));
    memcpy(out_count, count, sizeof(count));
    return true;
}

/* ---- a range of the flat source ---- */

typedef struct clipper {
    const ferry__copy_op *op;
    int64_t span[FERRY_MAX_DIMS + 1]; /* reach of dimensions i and inner */
    int64_t first, end;
    ferry__op_fn fn;
    void *arg;
} clipper;

/* Hands over indices [from, to) of dimension d with all that is inside. */
static void emit(const clipper *c, int32_t d, int64_t src, int64_t dst,
                 int64_t from, int64_t to)
{
    const ferry__copy_op *op = c->op;
    ferry__copy_op part;
    memset(&part, 0, sizeof(part));
    part.src_dtype = op->src_dtype;
    part.dst_dtype = op->dst_dtype;
    part.src_offset = src;
    part.dst_offset = dst;
    part.ndim = op->ndim - d;
    for (int32_t i = 0; i < part.ndim; i++) {
        part.shape[i] = op->shape[d + i];
        part.src_stride[i] = op->src_stride[d + i];
        part.dst_stride[i] = op->dst_stride[d + i];
    }
    if (part.ndim > 0) {
        part.shape[0] = to - from;
        part.src_offset += from * part.src_stride[0];
        part.dst_offset += from * part.dst_stride[0];
    }
    c->fn(c->arg, &part);
}

static int64_t clamp(int64_t value, int64_t low, int64_t high)
{
    return value < low ? low : value > high ? high : value;
}

/* Rounds towards minus infinity; b > 0. */
static int64_t floor_div(int64_t a, int64_t b)
{
    return a / b - (a % b < 0);
}

static void clip_dim(const clipper *c, int32_t d, int64_t src, int64_t dst)
{
    const ferry__copy_op *op = c->op;
    if (src >= c->end || src + c->span[d] <= c->first)
        return;
    int64_t n = d < op->ndim ? op->shape[d] : 1;
    if (src >= c->first && src + c->span[d] <= c->end) {
        emit(c, d, src, dst, 0, n);
        return;
    }
    /* Only here when the range cuts through, so the stride is not 0. Some of
     * it is in the range for indices [low, high), all of it for [in, out):
     * since dimensions nest, one index at each end is cut. */
    int64_t stride = op->src_stride[d], inner = c->span[d + 1];
    int64_t low = clamp(floor_div(c->first - inner - src, stride) + 1, 0, n);
    int64_t high = clamp(-floor_div(src - c->end, stride), low, n);
    int64_t in = clamp(-floor_div(src - c->first, stride), low, high);
    int64_t out = clamp(floor_div(c->end - inner - src, stride) + 1, in, high);
    for (int64_t k = low; k < in; k++)
        clip_dim(c, d + 1, src + k * stride, dst + k * op->dst_stride[d]);
    if (out > in)
        emit(c, d, src, dst, in, out);
    for (int64_t k = out; k < high; k++)
        clip_dim(c, d + 1, src + k * stride, dst + k * op->dst_stride[d]);
}

void ferry__op_clip(const ferry__copy_op *op, int64_t first, int64_t count,
                    ferry__op_fn fn, void *arg)
{
    clipper c = {op, {0}, first, first + count, fn, arg};
    if (count <= 0 || ferry__op_numel(op) == 0)
        return;
    c.span[op->ndim] = 1;
    for (int32_t i = op->ndim - 1; i >= 0; i--)
        c.span[i] = c.span[i + 1] + (op->shape[i] - 1) * op->src_stride[i];
    clip_dim(&c, 0, op->src_offset, op->dst_offset);
}

bool ferry__op_can_clip(const ferry__copy_op *op)
{
    if (op->dst_dtype != FERRY_DTYPE_Q8_0)
        return true;
    if (op->src_offset % 32 != 0)
        return false;
    bool along = false;
    for (int32_t i = 0; i < op->ndim; i++) {
        if (op->dst_stride[i] == 1)
            along = op->src_stride[i] == 1;
        else if (op->src_stride[i] % 32 != 0)
            return false;
    }
    return along;
}

/* ---- over a tensor with strides ---- */

typedef struct spread {
    const ferry_tensor *t;
    int64_t stride[FERRY_MAX_DIMS]; /* as if t were contiguous */
    int64_t room[FERRY_MAX_DIMS];   /* last coordinate reached so far */
    ferry__copy_op *out;
} spread;

static bool put_dim(ferry__copy_op *out, int64_t extent, int64_t src,
                    int64_t dst)
{
    if (out->ndim == FERRY_MAX_DIMS)
        return false;
    out->shape[out->ndim] = extent;
    out->src_stride[out->ndim] = src;
    out->dst_stride[out->ndim] = dst;
    out->ndim++;
    return true;
}

/* The dimension of t in which steps of `step` elements go: the outermost
 * whose stride divides it. */
static int32_t step_dim(const spread *s, int64_t step)
{
    for (int32_t j = 0; j < s->t->ndim; j++) {
        if (s->t->shape[j] > 1 && s->stride[j] <= step &&
            step % s->stride[j] == 0)
            return j;
    }
    return -1;
}

/* Puts `extent` steps of m along dimension j of t, and outwards where the
 * run goes on there. Outer parts come first, so it calls itself for them. */
static bool spread_dim(spread *s, int32_t j, int64_t extent, int64_t m,
                       int64_t dst_stride)
{
    const ferry_tensor *t = s->t;
    while (j >= 0 && t->shape[j] == 1)
        j--;
    if (j < 0)
        return extent == 1;
    if (s->room[j] + (extent - 1) * m < t->shape[j]) {
        s->room[j] += (extent - 1) * m;
        return put_dim(s->out, extent, m * t->stride[j], dst_stride);
    }
    /* The run leaves the dimension: only regular if it fills it. */
    if (t->shape[j] % m != 0 || s->room[j] >= m)
        return false;
    int64_t per = t->shape[j] / m;
    if (extent % per != 0 ||
        !spread_dim(s, j - 1, extent / per, 1, dst_stride * per))
        return false;
    s->room[j] += (per - 1) * m;
    return put_dim(s->out, per, m * t->stride[j], dst_stride);
}

ferry_status ferry__op_over_tensor(const ferry__copy_op *op,
                                   const ferry_tensor *t, ferry__copy_op *out)
{
    spread s;
    ferry__copy_op made = *op;

    if (ferry_tensor_is_contiguous(t)) {
        made.src_offset += t->offset;
        *out = made;
        return FERRY_OK;
    }
    memset(&s, 0, sizeof(s));
    s.t = t;
    s.out = &made;
    if (!decode_offset(t->ndim, t->shape, op->src_offset, s.stride, s.room))
        return FERRY_ENOTSUP;
    made.ndim = 0;
    made.src_offset = t->offset;
    for (int32_t i = 0; i < t->ndim; i++)
        made.src_offset += s.room[i] * t->stride[i];
    /* room grows as dimensions are put: two of them that share one of t's
     * must not carry into the next. */
    for (int32_t i = 0; i < op->ndim; i++) {
        int64_t step = op->src_stride[i];
        if (step == 0) {
            if (!put_dim(&made, op->shape[i], 0, op->dst_stride[i]))
                return FERRY_ENOTSUP;
            continue;
        }
        int32_t j = step_dim(&s, step);
        if (j < 0 || !spread_dim(&s, j, op->shape[i], step / s.stride[j],
                                 op->dst_stride[i]))
            return FERRY_ENOTSUP;
    }
    ferry__op_merge(&made);
    *out = made;
    return FERRY_OK;
}
