/* SPDX-License-Identifier: Apache-2.0 */
/* Stored bytes of a rank as they are, out and in: what --join copies.
 * Invariant: whole kernel storage, so both ends must store alike, which
 * comparing the layouts shows. */
#ifndef FERRY_SERVE_RANK_SHARE_H
#define FERRY_SERVE_RANK_SHARE_H

#include <ferry/model.h>

/* `size_bytes` from `offset` of a stored parameter on, running on into the
 * ones after it; head of a READ and of a WRITE, whose bytes follow it. */
typedef struct ferry__share_span {
    uint64_t param, offset, size_bytes;
} ferry__share_span;

#define FERRY__SHARE_SPAN_MAX ((uint64_t)8 << 20)

/* [{"name", "dtype", "shape", "bytes"}, …] of the stored parameters, in
 * order; 0 bytes for those that no checkpoint has. Owned, ferry__free. */
ferry_status ferry__rank_layout(const ferry_model *model, char **out_json);
/* *out_bytes is owned, ferry__free. */
ferry_status ferry__rank_read(const ferry_model *model, const void *body,
                              size_t body_size, void **out_bytes,
                              size_t *out_size);
ferry_status ferry__rank_write(const ferry_model *model, const void *body,
                               size_t body_size);

#endif
