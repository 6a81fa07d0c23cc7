/* SPDX-License-Identifier: Apache-2.0 */
/* Copies one strided box. Three shapes of loop: runs (both sides contiguous
 * in the innermost dimension), tiles (the sides are contiguous in different
 * dimensions: a transpose), and single elements.
 * Invariant: every element is read once; equal dtypes move as bytes. */
#include "core/copy_kernels.h"
#include <string.h>

#define TILE       32
#define RUN_STAGE  4096  /* bytes converted at once before streaming */
#define STREAM_RUN 1024  /* shorter runs go through the cache */
#define AHEAD_RUN  16384 /* longer ones are worth asking ahead for */

typedef struct box {
    const ferry__copy_op *op;
    char *dst;
    const char *src;
    int64_t src_size, dst_size, dst_block; /* bytes, bytes, elements */
    bool same, stream;
} box;

static char *dst_at(const box *b, int64_t offset)
{
    return b->dst + offset / b->dst_block * b->dst_size;
}

static const char *src_at(const box *b, int64_t offset)
{
    return b->src + offset * b->src_size;
}

/* ---- runs ---- */

/* Converts through a small buffer in the cache and streams that out. */
static void convert_stream(const box *b, char *dst, const char *src, int64_t n)
{
    char stage[RUN_STAGE];
    int64_t step = RUN_STAGE / b->dst_size;
    for (int64_t i = 0; i < n; i += step) {
        int64_t part = n - i < step ? n - i : step;
        ferry__convert(stage, b->op->dst_dtype, src + i * b->src_size,
                       b->op->src_dtype, part);
        ferry__stream_copy(dst + i * b->dst_size, stage,
                           (size_t)(part * b->dst_size), false);
    }
}

static void copy_one_run(const box *b, int64_t dst_offset, int64_t src_offset,
                         int64_t n)
{
    char *dst = dst_at(b, dst_offset);
    const char *src = src_at(b, src_offset);
    bool stream = b->stream && n * b->src_size >= STREAM_RUN;
    if (b->same && stream)
        ferry__stream_copy(dst, src, (size_t)(n * b->src_size),
                           n * b->src_size >= AHEAD_RUN);
    else if (b->same)
        memcpy(dst, src, (size_t)(n * b->src_size));
    else if (stream && b->dst_block == 1)
        convert_stream(b, dst, src, n);
    else
        ferry__convert(dst, b->op->dst_dtype, src, b->op->src_dtype, n);
}

/* Calls fn(b, dst, src, arg) for each index of the dimensions that are not
 * in `skip` (a bit mask). */
typedef void (*inner_fn)(const box *b, int64_t dst_offset, int64_t src_offset,
                         const void *arg);

static void each_outer(const box *b, uint32_t skip, inner_fn fn,
                       const void *arg)
{
    const ferry__copy_op *op = b->op;
    int64_t index[FERRY_MAX_DIMS] = {0};
    int64_t dst = op->dst_offset, src = op->src_offset;
    for (;;) {
        fn(b, dst, src, arg);
        int32_t i = op->ndim - 1;
        for (; i >= 0; i--) {
            if (skip & (1u << i))
                continue;
            dst += op->dst_stride[i];
            src += op->src_stride[i];
            if (++index[i] < op->shape[i])
                break;
            dst -= op->shape[i] * op->dst_stride[i];
            src -= op->shape[i] * op->src_stride[i];
            index[i] = 0;
        }
        if (i < 0)
            return;
    }
}

static void inner_run(const box *b, int64_t dst, int64_t src, const void *arg)
{
    copy_one_run(b, dst, src, *(const int64_t *)arg);
}

/* ---- tiles and elements ---- */

/* Gathers n elements `stride` apart into a packed run. */
static void gather(char *out, const char *src, int64_t n, int64_t stride,
                   int64_t size)
{
    int64_t step = stride * size;
    switch (size) {
    case 1:
        for (int64_t i = 0; i < n; i++)
            out[i] = src[i * step];
        break;
    case 2:
        for (int64_t i = 0; i < n; i++)
            memcpy(out + i * 2, src + i * step, 2);
        break;
    case 4:
        for (int64_t i = 0; i < n; i++)
            memcpy(out + i * 4, src + i * step, 4);
        break;
    default:
        for (int64_t i = 0; i < n; i++)
            memcpy(out + i * 8, src + i * step, 8);
        break;
    }
}

static void scatter(char *dst, const char *in, int64_t n, int64_t stride,
                    int64_t size)
{
    for (int64_t i = 0; i < n; i++)
        memcpy(dst + i * stride * size, in + i * size, (size_t)size);
}

/* Stores n packed source elements, converting, dst_stride apart. */
static void put_line(const box *b, char *dst, int64_t dst_stride,
                     const char *wire, int64_t n)
{
    char stored[TILE * 8];
    if (b->same) {
        scatter(dst, wire, n, dst_stride, b->dst_size);
    } else if (dst_stride == 1) {
        ferry__convert(dst, b->op->dst_dtype, wire, b->op->src_dtype, n);
    } else {
        ferry__convert(stored, b->op->dst_dtype, wire, b->op->src_dtype, n);
        scatter(dst, stored, n, dst_stride, b->dst_size);
    }
}

/* n elements along one dimension of the destination: gather, then put. */
static void copy_line(const box *b, int64_t dst_offset, int64_t dst_stride,
                      int64_t src_offset, int64_t src_stride, int64_t n)
{
    char wire[TILE * 8];
    char *dst = dst_at(b, dst_offset);
    bool direct = b->same && dst_stride == 1;
    gather(direct ? dst : wire, src_at(b, src_offset), n, src_stride,
           b->src_size);
    if (!direct)
        put_line(b, dst, dst_stride, wire, n);
}

typedef struct plane {
    int32_t d; /* dimension in which the destination is closest together */
    int32_t s; /* the same for the source; may be d */
} plane;

/* A tile whose source rows are contiguous: they are read once, whole, into
 * the cache, and turned there. Reading columns instead would touch each row
 * once per element and, with strides of a power of two, evict it between. */
static void turn_tile(const box *b, int64_t dst, int64_t dst_step,
                      int64_t dst_row, int64_t src, int64_t src_row, int64_t n,
                      int64_t m)
{
    char rows[TILE * TILE * 8], wire[TILE * 8];
    int64_t size = b->src_size;
    for (int64_t i = 0; i < n; i++)
        memcpy(rows + i * TILE * size, src_at(b, src + i * src_row),
               (size_t)(m * size));
    for (int64_t j = 0; j < m; j++) {
        char *line = dst_at(b, dst + j * dst_row);
        bool direct = b->same && dst_step == 1;
        gather(direct ? line : wire, rows + j * size, n, TILE, size);
        if (!direct)
            put_line(b, line, dst_step, wire, n);
    }
}

static void inner_plane(const box *b, int64_t dst, int64_t src, const void *arg)
{
    const plane *p = arg;
    const ferry__copy_op *op = b->op;
    int64_t n = op->shape[p->d], m = p->s == p->d ? 1 : op->shape[p->s];
    int64_t di = op->dst_stride[p->d], dj = op->dst_stride[p->s];
    int64_t si = op->src_stride[p->d], sj = op->src_stride[p->s];
    for (int64_t j0 = 0; j0 < m; j0 += TILE) {
        int64_t rows = m - j0 < TILE ? m - j0 : TILE;
        for (int64_t i = 0; i < n; i += TILE) {
            int64_t part = n - i < TILE ? n - i : TILE;
            int64_t to = dst + i * di + j0 * dj;
            int64_t from = src + i * si + j0 * sj;
            if (sj == 1 && rows > 1) {
                turn_tile(b, to, di, dj, from, si, part, rows);
                continue;
            }
            for (int64_t j = 0; j < rows; j++)
                copy_line(b, to + j * dj, di, from + j * sj, si, part);
        }
    }
}

static int64_t magnitude(int64_t value)
{
    return value < 0 ? -value : value;
}

static plane pick_plane(const ferry__copy_op *op)
{
    plane p = {0, 0};
    for (int32_t i = 1; i < op->ndim; i++) {
        if (magnitude(op->dst_stride[i]) <= magnitude(op->dst_stride[p.d]))
            p.d = i;
        if (magnitude(op->src_stride[i]) <= magnitude(op->src_stride[p.s]))
            p.s = i;
    }
    return p;
}

void ferry__copy_box(const ferry__copy_op *op, char *dst, const char *src,
                     bool stream)
{
    box b = {op,
             dst,
             src,
             (int64_t)ferry_dtype_bytes(op->src_dtype),
             (int64_t)ferry_dtype_bytes(op->dst_dtype),
             ferry_dtype_block(op->dst_dtype),
             op->src_dtype == op->dst_dtype,
             stream};
    if (op->ndim == 0) {
        copy_one_run(&b, op->dst_offset, op->src_offset, 1);
        return;
    }
    plane p = pick_plane(op);
    if (op->dst_stride[p.d] == 1 && op->src_stride[p.d] == 1) {
        int64_t n = op->shape[p.d];
        each_outer(&b, 1u << p.d, inner_run, &n);
    } else {
        each_outer(&b, 1u << p.d | 1u << p.s, inner_plane, &p);
    }
}
