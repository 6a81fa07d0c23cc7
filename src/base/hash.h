/* SPDX-License-Identifier: Apache-2.0 */
/* XXH3-64, one-shot and streaming, and the string table.
 * Invariant: the digest of bytes does not depend on how they were cut. */
#ifndef FERRY_BASE_HASH_H
#define FERRY_BASE_HASH_H

#include <ferry/status.h>
#include <stdbool.h>

uint64_t ferry__xxh3(const void *bytes, size_t size_bytes);

/* Streaming state, 64-byte aligned, about 576 bytes, one allocation. */
typedef struct ferry__xxh3_state ferry__xxh3_state;
ferry__xxh3_state *ferry__xxh3_create(void);
void ferry__xxh3_destroy(ferry__xxh3_state *state);
void ferry__xxh3_reset(ferry__xxh3_state *state);
void ferry__xxh3_update(ferry__xxh3_state *state, const void *bytes,
                        size_t size_bytes);
/* Hashes the bytes and copies them in one pass, so that the hash goes on while
 * the stores wait for memory. `past_cache`: by stores that the caller fences,
 * and only where dst is a multiple of 64. False: nothing was done, since this
 * processor or these addresses do not suit. */
bool ferry__xxh3_copy(ferry__xxh3_state *state, void *dst, const void *src,
                      size_t size_bytes, bool past_cache);
uint64_t ferry__xxh3_value(const ferry__xxh3_state *state);

/* String -> index, open addressing, O(1). Keys are borrowed and must outlive
 * the table. */
typedef struct ferry__table {
    const char **keys;
    size_t *values;
    size_t count, capacity;
} ferry__table;
/* FERRY_EEXIST (no line) if the key is there; *out_old is then its value. */
ferry_status ferry__table_add(ferry__table *t, const char *key, size_t value,
                              size_t *out_old);
bool ferry__table_get(const ferry__table *t, const char *key,
                      size_t *out_value);
void ferry__table_free(ferry__table *t);

#endif
