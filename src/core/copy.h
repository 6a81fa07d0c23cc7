/* SPDX-License-Identifier: Apache-2.0 */
/* The copy loops: strided boxes, dtype conversion, digests in the same pass.
 * Invariant: a box's digest is over its wire-dtype bytes in box order, and
 * does not depend on how the box was cut into calls. */
#ifndef FERRY_CORE_COPY_H
#define FERRY_CORE_COPY_H

#include "base/hash.h"
#include <ferry/backend.h>

/* Whether bytes of `from` can be stored as `to`. */
bool ferry__dtype_converts(ferry_dtype from, ferry_dtype to);
bool ferry__dtype_is_float(ferry_dtype d);

/* Converts n contiguous elements; any alignment. to == Q8_0 needs n % 32 ==
 * 0 and gives ggml's reference blocks. Rounds once, to nearest even; NaN
 * stays NaN (made quiet). Beyond the range: infinity, except float8_e4m3fn,
 * which has none and gets NaN, as in torch. Equal dtypes move bytes. */
void ferry__convert(void *dst, ferry_dtype to, const void *src,
                    ferry_dtype from, int64_t n);

/* dst/src base addresses of element offset 0; offsets and strides in
 * elements; `ndim` dims sorted by falling source stride. `digest` may be
 * NULL. Large runs are stored past the cache (setting `copy`). */
typedef struct ferry__copy_op {
    int32_t ndim;
    int64_t shape[FERRY_MAX_DIMS];
    int64_t src_stride[FERRY_MAX_DIMS];
    int64_t dst_stride[FERRY_MAX_DIMS];
    int64_t src_offset, dst_offset;
    ferry_dtype src_dtype, dst_dtype;
} ferry__copy_op;
/* Elements; 1 without dimensions. */
int64_t ferry__op_numel(const ferry__copy_op *op);
/* Drops dimensions of extent 1 and merges neighbours that are one run on
 * both sides; the order of the elements stays. No element: shape [0]. */
void ferry__op_merge(ferry__copy_op *op);
/* Sorts by falling |source stride|, then merges. */
void ferry__op_sort(ferry__copy_op *op);
/* The op, as it stands, between two views of equal shape; not sorted. */
void ferry__op_between(const ferry_tensor *dst, const ferry_tensor *src,
                       ferry__copy_op *out);

/* The order of the dimensions is the order of the digest, whatever the
 * strides are; any sign is legal. With a q8_0 destination the dimension of
 * destination stride 1 has whole blocks. */
void ferry__copy_run(const ferry__copy_op *op, void *dst, const void *src,
                     ferry__xxh3_state *digest);
/* The same into memory that somebody reads next: never past the cache. */
void ferry__copy_hot(const ferry__copy_op *op, void *dst, const void *src,
                     ferry__xxh3_state *digest);
/* Packs elements [first, first + count) of the tensor's logical order at
 * `out`, of any alignment. */
void ferry__copy_range(const ferry_tensor *tensor, int64_t first, int64_t count,
                       void *out);
void ferry__copy_range_hot(const ferry_tensor *tensor, int64_t first,
                           int64_t count, void *out);
/* Only hashes the box. */
void ferry__copy_digest(const ferry__copy_op *op, const void *src,
                        ferry__xxh3_state *digest);
/* Compares; false at the first difference (bytes after conversion). */
bool ferry__copy_equal(const ferry__copy_op *op, const void *dst,
                       const void *src);

#endif
