/* SPDX-License-Identifier: Apache-2.0 */
/* XXH3-64, one-shot and streaming, and the string table.
 * Invariant: the digest of bytes does not depend on how they were cut. */
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/hash.h"

#include "base/alloc.h"
#include "base/hash_kernels.h"

#include <pthread.h>
#include <string.h>
#include <sys/random.h>

uint64_t ferry__xxh3_portable(const void *bytes, size_t size_bytes)
{
    return XXH3_64bits(bytes, size_bytes);
}

void ferry__xxh3_update_portable(void *state, const void *bytes,
                                 size_t size_bytes)
{
    XXH3_64bits_update(state, bytes, size_bytes);
}

#if FERRY__HASH_AVX2
#define KERNEL(name)                                                           \
    (__builtin_cpu_supports("avx2") ? name##_avx2 : name##_portable)
#else
#define KERNEL(name) name##_portable
#endif

uint64_t ferry__xxh3(const void *bytes, size_t size_bytes)
{
    return KERNEL(ferry__xxh3)(bytes, size_bytes);
}

#define STATE_ALIGN 64

struct ferry__xxh3_state {
    XXH3_state_t state; /* first: it asks for 64-byte alignment */
    void *block;        /* what to free */
};

ferry__xxh3_state *ferry__xxh3_create(void)
{
    unsigned char *block =
        ferry__alloc(sizeof(ferry__xxh3_state) + STATE_ALIGN);
    ferry__xxh3_state *s;
    size_t past;

    if (!block)
        return NULL;
    past = (uintptr_t)block % STATE_ALIGN;
    s = (void *)(block + (past ? STATE_ALIGN - past : 0));
    s->block = block;
    ferry__xxh3_reset(s);
    return s;
}

void ferry__xxh3_destroy(ferry__xxh3_state *state)
{
    if (state)
        ferry__free(state->block);
}

void ferry__xxh3_reset(ferry__xxh3_state *state)
{
    XXH3_64bits_reset(&state->state);
}

void ferry__xxh3_update(ferry__xxh3_state *state, const void *bytes,
                        size_t size_bytes)
{
    KERNEL(ferry__xxh3_update)(&state->state, bytes, size_bytes);
}

bool ferry__xxh3_copy(ferry__xxh3_state *state, void *dst, const void *src,
                      size_t size_bytes, bool past_cache)
{
#if FERRY__HASH_AVX2
    if (__builtin_cpu_supports("avx2"))
        return ferry__xxh3_copy_avx2(&state->state, dst, src, size_bytes,
                                     past_cache);
#endif
    (void)state, (void)dst, (void)src, (void)size_bytes, (void)past_cache;
    return false;
}

uint64_t ferry__xxh3_value(const ferry__xxh3_state *state)
{
    return XXH3_64bits_digest(&state->state);
}

/* Names come from outside: with a seed of this process alone nobody can
 * prepare names that all fall on one slot. */
static uint64_t table_seed;
static pthread_once_t table_once = PTHREAD_ONCE_INIT;

static void make_seed(void)
{
    if (getrandom(&table_seed, sizeof(table_seed), GRND_NONBLOCK) !=
        (ssize_t)sizeof(table_seed))
        table_seed = (uint64_t)(uintptr_t)&table_seed * 0x9E3779B97F4A7C15u;
}

static size_t first_slot(const char *key, size_t capacity)
{
    pthread_once(&table_once, make_seed);
    return (size_t)XXH3_64bits_withSeed(key, strlen(key), table_seed) &
           (capacity - 1);
}

/* The slot of the key, or the free slot where it belongs. */
static size_t find_slot(const char **keys, size_t capacity, const char *key)
{
    size_t i = first_slot(key, capacity);

    while (keys[i] && strcmp(keys[i], key) != 0)
        i = (i + 1) & (capacity - 1);
    return i;
}

static ferry_status table_double(ferry__table *t)
{
    size_t capacity = t->capacity ? 0 : 16;
    const char **keys;
    size_t *values;

    if (!capacity && !ferry__mul(t->capacity, 2, &capacity))
        return ferry_fail(FERRY_EOVERFLOW, "table of %zu names", t->count);
    keys = ferry__alloc_array(capacity, sizeof(*keys));
    if (!keys)
        return FERRY_ENOMEM;
    values = ferry__alloc_array(capacity, sizeof(*values));
    if (!values) {
        ferry__free(keys);
        return FERRY_ENOMEM;
    }
    for (size_t i = 0; i < t->capacity; i++) {
        size_t slot;

        if (!t->keys[i])
            continue;
        slot = find_slot(keys, capacity, t->keys[i]);
        keys[slot] = t->keys[i];
        values[slot] = t->values[i];
    }
    ferry__free(t->keys);
    ferry__free(t->values);
    t->keys = keys;
    t->values = values;
    t->capacity = capacity;
    return FERRY_OK;
}

ferry_status ferry__table_add(ferry__table *t, const char *key, size_t value,
                              size_t *out_old)
{
    size_t slot;

    if (t->count + 1 > t->capacity / 4 * 3)
        FERRY_TRY(table_double(t));
    slot = find_slot(t->keys, t->capacity, key);
    if (t->keys[slot]) {
        if (out_old)
            *out_old = t->values[slot];
        return FERRY_EEXIST;
    }
    t->keys[slot] = key;
    t->values[slot] = value;
    t->count++;
    return FERRY_OK;
}

bool ferry__table_get(const ferry__table *t, const char *key, size_t *out_value)
{
    size_t slot;

    if (t->count == 0)
        return false;
    slot = find_slot(t->keys, t->capacity, key);
    if (!t->keys[slot])
        return false;
    if (out_value)
        *out_value = t->values[slot];
    return true;
}

void ferry__table_free(ferry__table *t)
{
    ferry__free(t->keys);
    ferry__free(t->values);
    memset(t, 0, sizeof(*t));
}
