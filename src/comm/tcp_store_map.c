/* SPDX-License-Identifier: Apache-2.0 */
/* Chained buckets that double; one allocation a key and one a value.
 * Invariant: total_bytes counts the bytes of all keys and values. */
#include "comm/tcp_store_map.h"

#include "base/alloc.h"
#include "base/hash.h"

#include <string.h>

struct ferry__store_entry {
    ferry__store_entry *next;
    unsigned char *value;
    size_t value_bytes;
    uint64_t hash;
    size_t key_bytes;
    unsigned char key[];
};

static ferry__store_entry **place_of(const ferry__store_map *m,
                                     ferry__store_bytes key, uint64_t hash)
{
    ferry__store_entry **at = &m->buckets[hash & (m->n_buckets - 1)];

    while (*at && !((*at)->hash == hash && (*at)->key_bytes == key.size &&
                    memcmp((*at)->key, key.data, key.size) == 0))
        at = &(*at)->next;
    return at;
}

static ferry__store_entry *find(const ferry__store_map *m,
                                ferry__store_bytes key)
{
    if (m->n_buckets == 0)
        return NULL;
    return *place_of(m, key, ferry__xxh3(key.data, key.size));
}

bool ferry__store_map_get(const ferry__store_map *m, ferry__store_bytes key,
                          ferry__store_bytes *out_value)
{
    const ferry__store_entry *e = find(m, key);

    if (!e)
        return false;
    *out_value = (ferry__store_bytes){e->value, e->value_bytes};
    return true;
}

static ferry_status grow(ferry__store_map *m)
{
    size_t n = m->n_buckets ? 2 * m->n_buckets : 64;
    ferry__store_entry **buckets = ferry__alloc_array(n, sizeof(*buckets));

    if (!buckets)
        return FERRY_ENOMEM;
    for (size_t i = 0; i < m->n_buckets; i++) {
        ferry__store_entry *e = m->buckets[i];

        while (e) {
            ferry__store_entry *next = e->next;

            e->next = buckets[e->hash & (n - 1)];
            buckets[e->hash & (n - 1)] = e;
            e = next;
        }
    }
    ferry__free(m->buckets);
    m->buckets = buckets;
    m->n_buckets = n;
    return FERRY_OK;
}

static ferry_status check_room(const ferry__store_map *m, size_t more_bytes)
{
    if (more_bytes > FERRY__STORE_TOTAL_BYTES - m->total_bytes)
        return ferry_fail(FERRY_ENOSPC,
                          "store: %zu bytes more, it holds %zu of %zu",
                          more_bytes, m->total_bytes, FERRY__STORE_TOTAL_BYTES);
    return FERRY_OK;
}

static ferry_status add_entry(ferry__store_map *m, ferry__store_bytes key,
                              ferry__store_entry **out)
{
    uint64_t hash = ferry__xxh3(key.data, key.size);
    ferry__store_entry *e;

    if (m->count >= FERRY__STORE_ENTRIES_MAX)
        return ferry_fail(FERRY_ENOSPC, "store: %zu keys, at most %zu",
                          m->count + 1, FERRY__STORE_ENTRIES_MAX);
    if (m->count >= m->n_buckets)
        FERRY_TRY(grow(m));
    e = ferry__alloc(sizeof(*e) + key.size);
    if (!e)
        return FERRY_ENOMEM;
    e->hash = hash;
    e->key_bytes = key.size;
    if (key.size > 0)
        memcpy(e->key, key.data, key.size);
    e->next = m->buckets[hash & (m->n_buckets - 1)];
    m->buckets[hash & (m->n_buckets - 1)] = e;
    m->count++;
    m->total_bytes += key.size;
    *out = e;
    return FERRY_OK;
}

/* Keeps `kept` bytes of the old value and puts `value` after them. */
static ferry_status write_value(ferry__store_map *m, ferry__store_bytes key,
                                ferry__store_bytes value, bool append)
{
    ferry__store_entry *e = find(m, key);
    size_t kept = append && e ? e->value_bytes : 0;
    size_t freed = e ? e->value_bytes - kept : 0;
    unsigned char *bytes;

    if (kept + value.size > FERRY__STORE_VALUE_BYTES)
        return ferry_fail(FERRY_ENOSPC,
                          "store: a value of %zu bytes, at most %zu",
                          kept + value.size, FERRY__STORE_VALUE_BYTES);
    if (value.size > freed || !e)
        FERRY_TRY(
            check_room(m, e ? value.size - freed : value.size + key.size));
    bytes = ferry__alloc_raw(kept + value.size);
    if (!bytes)
        return FERRY_ENOMEM;
    if (!e) {
        ferry_status status = add_entry(m, key, &e);

        if (status < 0) {
            ferry__free(bytes);
            return status;
        }
    }
    if (kept > 0)
        memcpy(bytes, e->value, kept);
    if (value.size > 0)
        memcpy(bytes + kept, value.data, value.size);
    m->total_bytes = m->total_bytes - freed + value.size;
    ferry__free(e->value);
    e->value = bytes;
    e->value_bytes = kept + value.size;
    return FERRY_OK;
}

ferry_status ferry__store_map_set(ferry__store_map *m, ferry__store_bytes key,
                                  ferry__store_bytes value)
{
    return write_value(m, key, value, false);
}

ferry_status ferry__store_map_append(ferry__store_map *m,
                                     ferry__store_bytes key,
                                     ferry__store_bytes value)
{
    return write_value(m, key, value, true);
}

bool ferry__store_map_delete(ferry__store_map *m, ferry__store_bytes key)
{
    ferry__store_entry **at, *e;

    if (m->n_buckets == 0)
        return false;
    at = place_of(m, key, ferry__xxh3(key.data, key.size));
    e = *at;
    if (!e)
        return false;
    *at = e->next;
    m->count--;
    m->total_bytes -= e->key_bytes + e->value_bytes;
    ferry__free(e->value);
    ferry__free(e);
    return true;
}

void ferry__store_map_free(ferry__store_map *m)
{
    for (size_t i = 0; i < m->n_buckets; i++) {
        ferry__store_entry *e = m->buckets[i];

        while (e) {
            ferry__store_entry *next = e->next;

            ferry__free(e->value);
            ferry__free(e);
            e = next;
        }
    }
    ferry__free(m->buckets);
    *m = (ferry__store_map){0};
}
