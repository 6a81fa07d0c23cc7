/* SPDX-License-Identifier: Apache-2.0 */
/* The copy driver: cuts a box into slabs that fit the cache; each slab is
 * hashed and then copied, so that memory is read once and the digest comes
 * almost free. Invariant: slabs follow the order of the dimensions, which is
 * the digest's order; how they are cut is never visible. */
#include "base/config.h"
#include "core/copy_kernels.h"
#include <string.h>

#define SLAB_BYTES     16384        /* of source, hashed then copied */
#define PLANE_BYTES    (512 * 1024) /* the same where tiles are turned */
#define STEP_BYTES     4096         /* of a long run: hash, then store */
#define STREAM_BYTES   (32 * 1024)  /* of destination: past the cache */
#define EQUAL_ELEMENTS 2048         /* converted, then compared */
#define GATHER_BELOW   512          /* shorter runs are gathered to be hashed */
#define LONG_RUN       1024         /* hashed and stored in steps */

typedef void (*slab_fn)(void *arg, const ferry__copy_op *slab);

/* Elements in one step of dimension d, that is in all dimensions after it. */
static int64_t inner_count(const ferry__copy_op *op, int32_t d)
{
    int64_t n = 1;
    for (int32_t i = d + 1; i < op->ndim; i++)
        n *= op->shape[i];
    return n;
}

/* Calls fn for consecutive parts of at most `limit` elements each: a range of
 * dimension d with all that is inside it, for every index outside it. */
static void each_slab(const ferry__copy_op *op, int64_t limit, slab_fn fn,
                      void *arg)
{
    int64_t index[FERRY_MAX_DIMS] = {0};
    int32_t d = 0;
    while (d + 1 < op->ndim && inner_count(op, d) > limit)
        d++;
    if (op->ndim == 0 || inner_count(op, d) * op->shape[d] <= limit) {
        if (d == 0) {
            fn(arg, op);
            return;
        }
    }
    int64_t step = limit / inner_count(op, d);
    if (step < 1)
        step = 1;
    ferry__copy_op slab = *op;
    slab.ndim = op->ndim - d;
    for (int32_t i = 0; i < slab.ndim; i++) {
        slab.shape[i] = op->shape[d + i];
        slab.src_stride[i] = op->src_stride[d + i];
        slab.dst_stride[i] = op->dst_stride[d + i];
    }
    for (;;) {
        int64_t src = op->src_offset, dst = op->dst_offset;
        for (int32_t i = 0; i < d; i++) {
            src += index[i] * op->src_stride[i];
            dst += index[i] * op->dst_stride[i];
        }
        for (int64_t k = 0; k < op->shape[d]; k += step) {
            slab.shape[0] = op->shape[d] - k < step ? op->shape[d] - k : step;
            slab.src_offset = src + k * op->src_stride[d];
            slab.dst_offset = dst + k * op->dst_stride[d];
            fn(arg, &slab);
        }
        int32_t i = d - 1;
        while (i >= 0 && ++index[i] == op->shape[i])
            index[i--] = 0;
        if (i < 0)
            return;
    }
}

/* ---- the digest ---- */

/* The element at src[i * stride] for i < n, gathered to dst. */
static void gather_run(char *dst, const char *src, int64_t n, int64_t stride,
                       size_t size)
{
    if (stride == 1) {
        memcpy(dst, src, (size_t)n * size);
        return;
    }
    int64_t step = stride * (int64_t)size;
    switch (size) {
    case 1:
        for (int64_t i = 0; i < n; i++)
            dst[i] = src[i * step];
        break;
    case 2:
        for (int64_t i = 0; i < n; i++)
            memcpy(dst + i * 2, src + i * step, 2);
        break;
    case 4:
        for (int64_t i = 0; i < n; i++)
            memcpy(dst + i * 4, src + i * step, 4);
        break;
    default:
        for (int64_t i = 0; i < n; i++)
            memcpy(dst + i * 8, src + i * step, 8);
        break;
    }
}

typedef struct box_walk {
    const ferry__copy_op *op;
    int64_t index[FERRY_MAX_DIMS];
    int64_t src; /* of the run at hand, in elements */
} box_walk;

/* Steps over all dimensions but the last; false after the last run. */
static bool next_run(box_walk *w)
{
    const ferry__copy_op *op = w->op;
    for (int32_t i = op->ndim - 2; i >= 0; i--) {
        w->src += op->src_stride[i];
        if (++w->index[i] < op->shape[i])
            return true;
        w->src -= op->shape[i] * op->src_stride[i];
        w->index[i] = 0;
    }
    return false;
}

/* One slab: at most SLAB_BYTES of source, or one long run. */
static void hash_slab(const ferry__copy_op *op, const char *src,
                      ferry__xxh3_state *digest)
{
    char scratch[SLAB_BYTES];
    size_t size = ferry_dtype_bytes(op->src_dtype), used = 0;
    int64_t n = op->ndim > 0 ? op->shape[op->ndim - 1] : 1;
    int64_t stride = op->ndim > 0 ? op->src_stride[op->ndim - 1] : 1;
    size_t run_bytes = (size_t)n * size;
    box_walk w = {op, {0}, op->src_offset};
    do {
        const char *run = src + w.src * (int64_t)size;
        if (stride == 1 && run_bytes >= GATHER_BELOW) {
            ferry__xxh3_update(digest, run, run_bytes);
        } else {
            gather_run(scratch + used, run, n, stride, size);
            used += run_bytes;
        }
    } while (next_run(&w));
    if (used > 0)
        ferry__xxh3_update(digest, scratch, used);
}

typedef struct hash_job {
    const char *src;
    ferry__xxh3_state *digest;
} hash_job;

static void hash_part(void *arg, const ferry__copy_op *slab)
{
    const hash_job *job = arg;
    hash_slab(slab, job->src, job->digest);
}

static int64_t slab_elements(const ferry__copy_op *op)
{
    return SLAB_BYTES / (int64_t)ferry_dtype_bytes(op->src_dtype);
}

void ferry__copy_digest(const ferry__copy_op *op, const void *src,
                        ferry__xxh3_state *digest)
{
    ferry__copy_op merged = *op;
    hash_job job = {src, digest};
    ferry__op_merge(&merged);
    if (ferry__op_numel(&merged) > 0)
        each_slab(&merged, slab_elements(&merged), hash_part, &job);
}

/* ---- the copy ---- */

static bool want_stream(const ferry__copy_op *op)
{
    size_t bytes =
        (size_t)(ferry__op_numel(op) / ferry_dtype_block(op->dst_dtype)) *
        ferry_dtype_bytes(op->dst_dtype);
    if (bytes < STREAM_BYTES)
        return false;
    const char *mode = ferry__config_get(FERRY__CONFIG_COPY);
    return strcmp(mode, "plain") != 0;
}

typedef struct copy_job {
    char *dst;
    const char *src;
    ferry__xxh3_state *digest;
    bool stream;
} copy_job;

static void copy_part(void *arg, const ferry__copy_op *slab)
{
    const copy_job *job = arg;
    ferry__copy_digest(slab, job->src, job->digest);
    ferry__copy_box(slab, job->dst, job->src, job->stream);
}

/* One long run of equal dtypes. Steps end where the destination's cache
 * lines do, so that none is stored in two parts. */
static void hash_copy_run(const copy_job *job, char *dst, const char *src,
                          size_t n)
{
    size_t step = STEP_BYTES - ((uintptr_t)dst & 63u);
    if (ferry__cpu_fast() &&
        ferry__xxh3_copy(job->digest, dst, src, n, job->stream))
        return;
    for (; n > 0; n -= step, dst += step, src += step, step = STEP_BYTES) {
        if (step > n)
            step = n;
        ferry__xxh3_update(job->digest, src, step);
        if (job->stream)
            ferry__stream_copy(dst, src, step, n > step);
        else
            memcpy(dst, src, step);
        if (step == n)
            return;
    }
}

/* Whether the box is long runs that move as they are. */
static bool is_long_runs(const ferry__copy_op *op)
{
    int32_t last = op->ndim - 1;
    return op->ndim > 0 && op->src_dtype == op->dst_dtype &&
           op->src_stride[last] == 1 && op->dst_stride[last] == 1 &&
           (size_t)op->shape[last] * ferry_dtype_bytes(op->src_dtype) >=
               LONG_RUN;
}

static void hash_copy_runs(const ferry__copy_op *op, const copy_job *job)
{
    int64_t size = (int64_t)ferry_dtype_bytes(op->src_dtype);
    size_t bytes = (size_t)(op->shape[op->ndim - 1] * size);
    ferry__copy_op back = *op; /* walks the destination beside the source */
    memcpy(back.src_stride, op->dst_stride, sizeof(back.src_stride));
    box_walk from = {op, {0}, op->src_offset};
    box_walk to = {&back, {0}, op->dst_offset};
    do {
        hash_copy_run(job, job->dst + to.src * size, job->src + from.src * size,
                      bytes);
    } while (next_run(&from) && next_run(&to));
}

/* Slabs are larger where the innermost dimensions differ, so that whole
 * tiles fit. */
static int64_t copy_elements(const ferry__copy_op *op)
{
    int32_t last = op->ndim - 1;
    bool runs = op->ndim == 0 ||
                (op->src_stride[last] == 1 && op->dst_stride[last] == 1);
    return (runs ? SLAB_BYTES : PLANE_BYTES) /
           (int64_t)ferry_dtype_bytes(op->src_dtype);
}

/* The last dimension along which a q8_0 destination has its blocks. */
static int32_t block_dim(const ferry__copy_op *op)
{
    int32_t d = op->ndim - 1;
    while (d > 0 && op->dst_stride[d] != 1)
        d--;
    return d;
}

/* Slabs must not cut q8_0 blocks. They end on whole indices of one
 * dimension; when that is the block dimension itself, or lies inside it, the
 * hash goes first and the copy runs as a whole. */
static bool slabs_keep_blocks(const ferry__copy_op *op)
{
    if (op->dst_dtype != FERRY_DTYPE_Q8_0)
        return true;
    return block_dim(op) == op->ndim - 1;
}

static void run_merged(const ferry__copy_op *op, const copy_job *job)
{
    if (job->digest && is_long_runs(op)) {
        hash_copy_runs(op, job);
    } else if (job->digest && slabs_keep_blocks(op)) {
        /* A slab has a multiple of 32 elements of every type, so one that is
         * a range of the innermost dimension ends on a block. */
        each_slab(op, copy_elements(op), copy_part, (void *)(uintptr_t)job);
    } else {
        if (job->digest)
            ferry__copy_digest(op, job->src, job->digest);
        ferry__copy_box(op, job->dst, job->src, job->stream);
    }
}

void ferry__copy_run(const ferry__copy_op *op, void *dst, const void *src,
                     ferry__xxh3_state *digest)
{
    ferry__copy_op merged = *op;
    ferry__op_merge(&merged);
    if (ferry__op_numel(&merged) == 0)
        return;
    copy_job job = {dst, src, digest, want_stream(&merged)};
    run_merged(&merged, &job);
    if (job.stream)
        ferry__stream_end();
}

void ferry__copy_hot(const ferry__copy_op *op, void *dst, const void *src,
                     ferry__xxh3_state *digest)
{
    ferry__copy_op merged = *op;
    ferry__op_merge(&merged);
    if (ferry__op_numel(&merged) == 0)
        return;
    copy_job job = {dst, src, digest, false};
    run_merged(&merged, &job);
}

/* ---- comparing ---- */

typedef struct equal_job {
    const char *dst, *src;
    bool equal;
} equal_job;

/* Converts a slab into a packed copy and compares it run by run. */
static void equal_part(void *arg, const ferry__copy_op *slab)
{
    char packed[EQUAL_ELEMENTS * 8];
    equal_job *job = arg;
    if (!job->equal)
        return;
    ferry__copy_op pack = *slab;
    int64_t span = 1;
    for (int32_t i = slab->ndim - 1; i >= 0; i--) {
        pack.dst_stride[i] = span;
        span *= slab->shape[i];
    }
    pack.dst_offset = 0;
    ferry__copy_box(&pack, packed, job->src, false);

    ferry__copy_op back = *slab;
    memcpy(back.src_stride, slab->dst_stride, sizeof(back.src_stride));
    int64_t block = ferry_dtype_block(slab->dst_dtype);
    int64_t size = (int64_t)ferry_dtype_bytes(slab->dst_dtype);
    int64_t n = slab->ndim > 0 ? slab->shape[slab->ndim - 1] : 1;
    int64_t stride = slab->ndim > 0 ? slab->dst_stride[slab->ndim - 1] : 1;
    box_walk w = {&back, {0}, slab->dst_offset};
    const char *want = packed;
    do {
        const char *run = job->dst + w.src / block * size;
        if (stride == 1) {
            size_t bytes = (size_t)(n / block * size);
            job->equal = memcmp(run, want, bytes) == 0;
            want += bytes;
        } else {
            for (int64_t i = 0; job->equal && i < n; i++, want += size)
                job->equal =
                    memcmp(run + i * stride * size, want, (size_t)size) == 0;
        }
    } while (job->equal && next_run(&w));
}

/* The q8_0 block dimension is put last: nothing is hashed, so any order
 * will do. */
static void block_dim_last(ferry__copy_op *op)
{
    int32_t d = block_dim(op);
    int64_t shape = op->shape[d], src = op->src_stride[d],
            dst = op->dst_stride[d];
    for (; d + 1 < op->ndim; d++) {
        op->shape[d] = op->shape[d + 1];
        op->src_stride[d] = op->src_stride[d + 1];
        op->dst_stride[d] = op->dst_stride[d + 1];
    }
    op->shape[d] = shape;
    op->src_stride[d] = src;
    op->dst_stride[d] = dst;
}

bool ferry__copy_equal(const ferry__copy_op *op, const void *dst,
                       const void *src)
{
    ferry__copy_op merged = *op;
    equal_job job = {dst, src, true};
    ferry__op_merge(&merged);
    if (ferry__op_numel(&merged) == 0)
        return true;
    if (merged.dst_dtype == FERRY_DTYPE_Q8_0)
        block_dim_last(&merged);
    each_slab(&merged, EQUAL_ELEMENTS, equal_part, &job);
    return job.equal;
}
