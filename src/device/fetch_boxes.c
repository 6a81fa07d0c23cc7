/* SPDX-License-Identifier: Apache-2.0 */
/* Boxes of a device's memory as copies of rows, and the box that a strided
 * tensor is best fetched by.
 * Invariant: between two waits the queue of a device holds a bounded number
 * of copies and bytes, so that a cancel and the bounds are seen soon. (A
 * driver may wait for a copy to pageable memory in the call that asks it.) */
#include "device/fetch_private.h"

#include <string.h>

/* What is put on a queue between two waits. */
#define BATCH_BYTES  ((size_t)16 << 20)
#define BATCH_COPIES 512
#define BATCH_ROWS   ((int64_t)65536)
/* Shorter runs cost more than their bytes: what lies between them comes too,
 * up to so many times the bytes that are wanted. */
#define SHORT_RUN 512
#define WASTE     8

/* ---- boxes as copies of rows ---- */

typedef struct issue {
    ferry__fetcher *f;
    char *dst; /* destination offset 0 */
    const char *src;
    bool to_host;
    size_t bytes; /* since the last wait */
    int copies;
} issue;

/* The two inner dimensions of a box; bytes. */
typedef struct plane {
    int64_t width, rows, src_pitch, dst_pitch;
} plane;

static ferry_status count_copy(issue *s, size_t bytes)
{
    s->f->lane->busy = true;
    s->bytes += bytes;
    s->copies++;
    if (s->bytes < BATCH_BYTES && s->copies < BATCH_COPIES)
        return FERRY_OK;
    s->bytes = 0;
    s->copies = 0;
    return ferry__fetch_drain(s->f);
}

static ferry_status put_run(issue *s, char *dst, const char *src, size_t size)
{
    const ferry__lane *lane = s->f->lane;

    for (size_t at = 0; at < size; at += BATCH_BYTES) {
        size_t n = size - at < BATCH_BYTES ? size - at : BATCH_BYTES;

        FERRY_TRY(ferry__fetch_named(
            s->f, lane->memory->copy(lane->queue, dst + at, src + at, n)));
        FERRY_TRY(count_copy(s, n));
    }
    return FERRY_OK;
}

static bool is_pitch(int64_t pitch, int64_t width)
{
    return pitch >= width && (uint64_t)pitch <= FERRY__PITCH_MOST;
}

static ferry_status put_plane(issue *s, char *dst, const char *src,
                              const plane *p)
{
    const ferry__lane *lane = s->f->lane;
    bool together = p->rows > 1 && is_pitch(p->src_pitch, p->width) &&
                    is_pitch(p->dst_pitch, p->width);
    int64_t step = together ? (int64_t)BATCH_BYTES / p->width : 1;

    if (step > BATCH_ROWS)
        step = BATCH_ROWS;
    if (step < 1)
        step = 1;
    for (int64_t r = 0; r < p->rows; r += step) {
        ferry__rows rows = {.dst = dst + r * p->dst_pitch,
                            .src = src + r * p->src_pitch,
                            .dst_pitch = (size_t)p->dst_pitch,
                            .src_pitch = (size_t)p->src_pitch,
                            .width = (size_t)p->width,
                            .dst_is_host = s->to_host};

        if (step == 1) {
            FERRY_TRY(put_run(s, rows.dst, rows.src, rows.width));
            continue;
        }
        rows.rows = (size_t)(p->rows - r < step ? p->rows - r : step);
        FERRY_TRY(ferry__fetch_named(
            s->f, lane->memory->copy_rows(lane->queue, &rows)));
        FERRY_TRY(count_copy(s, rows.width * rows.rows));
    }
    return FERRY_OK;
}

/* Takes the two inner dimensions off the op. */
static plane take_plane(ferry__copy_op *op)
{
    int64_t elem = (int64_t)ferry_dtype_bytes(op->src_dtype);
    plane p = {elem, 1, elem, elem};
    int32_t last = op->ndim - 1;

    if (last >= 0 && op->src_stride[last] == 1 && op->dst_stride[last] == 1)
        p.width = op->shape[last--] * elem;
    if (last >= 0) {
        p.rows = op->shape[last];
        p.src_pitch = op->src_stride[last] * elem;
        p.dst_pitch = op->dst_stride[last--] * elem;
    }
    op->ndim = last + 1;
    return p;
}

static ferry_status put_box(issue *s, ferry__copy_op op)
{
    int64_t elem = (int64_t)ferry_dtype_bytes(op.src_dtype);
    int64_t index[FERRY_MAX_DIMS] = {0};
    char *dst = s->dst + op.dst_offset * elem;
    const char *src = s->src + op.src_offset * elem;
    plane p;
    int32_t d;

    ferry__op_merge(&op);
    if (ferry__op_numel(&op) == 0)
        return FERRY_OK;
    p = take_plane(&op);
    do {
        FERRY_TRY(put_plane(s, dst, src, &p));
        for (d = op.ndim - 1; d >= 0; d--) {
            dst += op.dst_stride[d] * elem;
            src += op.src_stride[d] * elem;
            if (++index[d] < op.shape[d])
                break;
            dst -= op.shape[d] * op.dst_stride[d] * elem;
            src -= op.shape[d] * op.src_stride[d] * elem;
            index[d] = 0;
        }
    } while (d >= 0);
    return FERRY_OK;
}

ferry_status ferry__fetch_box(ferry__fetcher *f, const ferry__copy_op *op,
                              void *dst, const void *src, bool to_host)
{
    issue s = {.f = f, .dst = dst, .src = src, .to_host = to_host};

    return put_box(&s, *op);
}

/* ---- strided tensors, whole ---- */

/* A hull that is being made. */
typedef struct sorted {
    ferry__copy_op *op;
    int64_t low;
    int32_t dim[FERRY_MAX_DIMS]; /* of the tensor, by the op's */
} sorted;

static int64_t magnitude(int64_t value)
{
    return value < 0 ? -value : value;
}

/* Dimensions by falling stride; those that repeat the same bytes are out. */
static void sort_dims(const ferry_tensor *t, sorted *h)
{
    ferry__copy_op *op = h->op;

    for (int32_t d = 0; d < t->ndim; d++) {
        int64_t stride = magnitude(t->stride[d]);
        int32_t at = op->ndim;

        if (t->shape[d] == 1 || stride == 0)
            continue;
        if (t->stride[d] < 0)
            h->low += (t->shape[d] - 1) * t->stride[d];
        for (; at > 0 && op->src_stride[at - 1] < stride; at--) {
            op->src_stride[at] = op->src_stride[at - 1];
            op->shape[at] = op->shape[at - 1];
            h->dim[at] = h->dim[at - 1];
        }
        op->src_stride[at] = stride;
        op->shape[at] = t->shape[d];
        h->dim[at] = d;
        op->ndim++;
    }
}

/* Inner dimensions that are one stretch of memory, or nearly, become a run;
 * those around it keep their order and lose their gaps. Gives the strides of
 * the tensor on the host. */
static int64_t make_hull(const ferry_tensor *t, sorted *h, ferry_tensor *view)
{
    int64_t elem = (int64_t)ferry_dtype_bytes(t->dtype);
    int64_t run = 1, wanted = 1, span;
    ferry__copy_op *op = h->op;
    int32_t k;

    op->src_dtype = op->dst_dtype = t->dtype;
    sort_dims(t, h);
    for (k = op->ndim - 1; k >= 0; k--) {
        int64_t reach = (op->shape[k] - 1) * op->src_stride[k] + run;

        wanted *= op->shape[k];
        if (reach > wanted &&
            (run * elem >= SHORT_RUN || reach > WASTE * wanted))
            break;
        run = reach;
        view->stride[h->dim[k]] = op->src_stride[k];
    }
    span = run;
    for (int32_t d = k; d >= 0; d--) {
        op->dst_stride[d] = view->stride[h->dim[d]] = span;
        span *= op->shape[d];
    }
    op->ndim = k + 1;
    if (run > 1) { /* else all dimensions may be in use */
        op->shape[op->ndim] = run;
        op->src_stride[op->ndim] = op->dst_stride[op->ndim] = 1;
        op->ndim++;
    }
    return span;
}

void ferry__fetch_lay_out(const ferry_tensor *t, ferry__fetch_hull *out_hull,
                          ferry_tensor *out_view)
{
    sorted s = {.op = &out_hull->op};

    memset(out_hull, 0, sizeof(*out_hull));
    *out_view = *t;
    out_view->data = NULL;
    out_view->device = 0;
    out_view->offset = 0;
    memset(out_view->stride, 0, sizeof(out_view->stride));
    out_hull->numel = make_hull(t, &s, out_view);
    out_hull->low = s.low;
    for (int32_t d = 0; d < t->ndim; d++) {
        if (t->stride[d] < 0) {
            out_view->stride[d] = -out_view->stride[d];
            out_view->offset -= (t->shape[d] - 1) * out_view->stride[d];
        }
    }
}
