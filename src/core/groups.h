/* SPDX-License-Identifier: Apache-2.0 */
/* Layerwise gather groups (B9): runs of metadata that belong to one layer.
 * Invariant: a name's key is the (prefix, index) of its outermost all-digit
 * segment; runs of names without one are groups of their own. */
#ifndef FERRY_CORE_GROUPS_H
#define FERRY_CORE_GROUPS_H

#include <ferry/source.h>

/* Prefix length (with its dot) and index of the outermost index segment;
 * false when the name has none. */
bool ferry__layer_key(const char *name, size_t *out_prefix_length,
                      int64_t *out_index);

/* Lengths of consecutive groups. FERRY_EINVAL names the parameter whose layer
 * comes back after another group. *out_lengths is owned (ferry__free). */
ferry_status ferry__layerwise_groups(const ferry_param_meta *params,
                                     size_t count, size_t **out_lengths,
                                     size_t *out_groups);

#endif
