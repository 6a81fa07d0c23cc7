/* SPDX-License-Identifier: Apache-2.0 */
/* The digests of what is sent: XXH3-64 of every box that some worker reads,
 * computed once for all workers that read the same box.
 * Invariant: a box's digest is over its elements in box order, however the
 * parameter was cut into pieces. */
#ifndef FERRY_CORE_DIGESTER_H
#define FERRY_CORE_DIGESTER_H

#include "core/box_lists.h"

typedef struct ferry__digester ferry__digester;

/* One list of boxes per worker, each checked against the parameters. All of
 * it is borrowed until destroy. */
ferry_status ferry__digester_create(const ferry_param_meta *params,
                                    size_t count,
                                    const ferry__box_lists *const *lists,
                                    size_t n_lists, ferry__digester **out);
void ferry__digester_destroy(ferry__digester **digester);
/* Feeds elements [first, first + count) of parameter i, packed at bytes, of
 * any alignment; pieces come in rising order. */
void ferry__digester_feed(ferry__digester *d, size_t i, const void *bytes,
                          int64_t first, int64_t count);
/* Packs elements [first, first + count) of the tensor, parameter i, at out,
 * where somebody reads them next, and feeds them. */
void ferry__digester_pack(ferry__digester *d, size_t i,
                          const ferry_tensor *tensor, int64_t first,
                          int64_t count, void *out);
/* Feeds the whole of parameter i, any strides. */
ferry_status ferry__digester_tensor(ferry__digester *d, size_t i,
                                    const ferry_tensor *tensor);
/* The digest of box number `box` (counted over all parameters) of list
 * number `list`, once its parameter was fed whole. */
uint64_t ferry__digester_value(const ferry__digester *d, size_t list,
                               size_t box);

#endif
