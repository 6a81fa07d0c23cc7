/* SPDX-License-Identifier: Apache-2.0 */
/* The store's keys and values: byte strings, hashed.
 * Invariant: keys, values and their count stay within the limits below. */
#ifndef FERRY_COMM_TCP_STORE_MAP_H
#define FERRY_COMM_TCP_STORE_MAP_H

#include "comm/tcp_store_wire.h"

#define FERRY__STORE_ENTRIES_MAX ((size_t)1 << 16)
#define FERRY__STORE_TOTAL_BYTES ((size_t)128 << 20)

typedef struct ferry__store_entry ferry__store_entry;

typedef struct ferry__store_map {
    ferry__store_entry **buckets;
    size_t n_buckets, count, total_bytes;
} ferry__store_map;

/* False when the key is absent. */
bool ferry__store_map_get(const ferry__store_map *m, ferry__store_bytes key,
                          ferry__store_bytes *out_value);
/* FERRY_ENOSPC: a limit, named. */
ferry_status ferry__store_map_set(ferry__store_map *m, ferry__store_bytes key,
                                  ferry__store_bytes value);
ferry_status ferry__store_map_append(ferry__store_map *m,
                                     ferry__store_bytes key,
                                     ferry__store_bytes value);
/* True when the key was there. */
bool ferry__store_map_delete(ferry__store_map *m, ferry__store_bytes key);
void ferry__store_map_free(ferry__store_map *m);

#endif
