/* SPDX-License-Identifier: Apache-2.0 */
/* An owned, ordered list of declared parameters with O(1) lookup.
 * Invariant: names are unique and not empty, shapes have no negative
 * dimension, dtypes are plain wire types. */
#ifndef FERRY_CORE_MANIFEST_H
#define FERRY_CORE_MANIFEST_H

#include "base/hash.h"
#include <ferry/backend.h>

typedef struct ferry__manifest {
    ferry_param_meta *params; /* names owned */
    size_t count, capacity;
    ferry__table by_name;
    uint64_t total_bytes;
} ferry__manifest;

/* Copies one entry in. FERRY_EEXIST: the name is there; FERRY_EINVAL. */
ferry_status ferry__manifest_add(ferry__manifest *m,
                                 const ferry_param_meta *meta);
ferry_status ferry__manifest_copy(ferry__manifest *m,
                                  const ferry_param_meta *params, size_t count);
/* Whether the list is exactly `params`: cheaper than to build it anew. */
bool ferry__manifest_is(const ferry__manifest *m,
                        const ferry_param_meta *params, size_t count);
bool ferry__manifest_find(const ferry__manifest *m, const char *name,
                          size_t *out_index);
void ferry__manifest_clear(ferry__manifest *m);
/* XXH3-64 of the canonical text (docs/protocol.md): one line a parameter,
 * "name dtype d0,d1,…\n". */
uint64_t ferry__manifest_digest(const ferry_param_meta *params, size_t count);
/* From the three lists of an update info; every error names the field and
 * the parameter. */
ferry_status ferry__manifest_from_lists(ferry__manifest *m,
                                        const ferry_strs *names,
                                        const ferry_strs *dtype_names,
                                        const ferry_shapes *shapes);
/* Appends "names":[…],"dtype_names":[…],"shapes":[…] (no braces) to JSON. */
struct ferry__str;
void ferry__manifest_to_json(const ferry_param_meta *params, size_t count,
                             struct ferry__str *out);

/* Same name, dtype, shape; else FERRY_EMISMATCH naming the parameter and
 * both values ("declared …, got …"). `index` is for the message. */
ferry_status ferry__meta_check(const ferry_param_meta *declared, size_t index,
                               const char *name, const ferry_tensor *got);
uint64_t ferry__meta_bytes(const ferry_param_meta *meta);
int64_t ferry__meta_numel(const ferry_param_meta *meta);

#endif
