/* SPDX-License-Identifier: Apache-2.0 */
/* What a worker reads of each parameter of an update, as it travels to the
 * one that hashes what it sends: a list of boxes per parameter.
 * Bytes: u32 n_params, then for each parameter u32 n_boxes and for each box
 * i64 offset, u32 ndim, ndim × (i64 shape, i64 stride); little-endian, no
 * padding. Invariant: lists that came from outside are checked before use. */
#ifndef FERRY_CORE_BOX_LISTS_H
#define FERRY_CORE_BOX_LISTS_H

#include "base/bytes.h"
#include <ferry/backend.h>

typedef struct ferry__box_lists {
    size_t n_params;
    size_t *first;    /* n_params + 1; owned */
    ferry_box *boxes; /* owned */
} ferry__box_lists;

/* All boxes of the declared parameters of the update at hand. */
ferry_status ferry__box_lists_gather(const ferry_worker_host *host,
                                     ferry_worker_context *ctx, size_t n_params,
                                     ferry__box_lists *out);
void ferry__box_lists_put(ferry__str *s, const ferry__box_lists *v);
/* Reads on from r; what does not fit its form makes the reader bad. On a
 * failure nothing is left to free. */
ferry_status ferry__box_lists_get(ferry__reader *r, ferry__box_lists *out);
/* XXH3-64 of the lists as they travel. */
ferry_status ferry__box_lists_digest(const ferry__box_lists *v,
                                     uint64_t *out_digest);
/* FERRY_EPEER unless there is a list for each parameter and every box lies
 * in its own. */
ferry_status ferry__box_lists_check(const ferry__box_lists *v,
                                    const ferry_param_meta *params,
                                    size_t count);
void ferry__box_lists_free(ferry__box_lists *v);

#endif
