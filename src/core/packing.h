/* SPDX-License-Identifier: Apache-2.0 */
/* Where a stream of whole tensors is cut into buffers.
 * Rules, all pure functions of sizes and the agreed limit: `exceed` (vLLM's
 * broadcast) appends, then flushes when the size is strictly greater than the
 * limit; `fit` (IPC) flushes before a tensor that would overflow; `each`
 * gives every tensor a buffer of its own, whatever the limit. */
#ifndef FERRY_CORE_PACKING_H
#define FERRY_CORE_PACKING_H

#include <ferry/source.h>

typedef enum ferry__cut_rule {
    FERRY__CUT_EXCEED,
    FERRY__CUT_FIT,
    FERRY__CUT_EACH
} ferry__cut_rule;

typedef struct ferry__cuts {
    size_t *counts;  /* tensors per buffer */
    uint64_t *bytes; /* bytes per buffer */
    size_t n_buffers;
    uint64_t peak_bytes; /* largest buffer */
    uint64_t digest;     /* XXH3-64 over the cut sequence */
} ferry__cuts;

/* limit_bytes > 0; not used by `each`. Logs one warning naming the first
 * tensor that alone exceeds the limit. */
ferry_status ferry__cuts_make(ferry__cut_rule rule,
                              const ferry_param_meta *params, size_t count,
                              uint64_t limit_bytes, ferry__cuts *out);
/* The same without the warning: for rounds after the first, and for the end
 * that only follows. */
ferry_status ferry__cuts_again(ferry__cut_rule rule,
                               const ferry_param_meta *params, size_t count,
                               uint64_t limit_bytes, ferry__cuts *out);
void ferry__cuts_free(ferry__cuts *cuts);

#endif
