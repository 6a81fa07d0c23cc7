/* SPDX-License-Identifier: Apache-2.0 */
/* XXH3's long loops for AVX2: about twice as fast as SSE2 where the bytes
 * are in the cache. Invariant: run only where the processor has AVX2. */
#include "base/hash_kernels.h"

#if FERRY__HASH_AVX2
/* Headers of the system come first: what follows the pragma is compiled for
 * AVX2, and only XXH3 shall be. */
#include <assert.h>
#include <immintrin.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2"))),                  \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2")
#endif

/* The lanes go between the state and the stack as they are used there, by
 * 32 bytes: a load that spans two stores waits until all stores before them
 * have left the core, and where the bytes are copied between two calls those
 * are many. */
static inline void *move(void *to, const void *from, size_t n)
{
    if (__builtin_constant_p(n) && n == 64) {
        const __m256i *s = from;
        __m256i a = _mm256_loadu_si256(s), b = _mm256_loadu_si256(s + 1);

        _mm256_storeu_si256(to, a);
        _mm256_storeu_si256((__m256i *)to + 1, b);
        return to;
    }
    return __builtin_memcpy(to, from, n);
}

#define memcpy move
#define XXH_INLINE_ALL
#define XXH_VECTOR XXH_AVX2
#include <xxhash.h>
#undef memcpy

uint64_t ferry__xxh3_avx2(const void *bytes, size_t size_bytes)
{
    return XXH3_64bits(bytes, size_bytes);
}

void ferry__xxh3_update_avx2(void *state, const void *bytes, size_t size_bytes)
{
    XXH3_64bits_update(state, bytes, size_bytes);
}

/* ---- hashing and copying in one pass ---- */

/* The parts of XXH3's state that the loop below steps over itself are those
 * of these versions. */
#if XXH_VERSION_NUMBER >= 801 && XXH_VERSION_NUMBER <= 803
#define FUSED 1
#else
#define FUSED 0
#endif

#if FUSED
#define STRIPE   64
#define LEAST    1024 /* bytes for which the preparations pay */
#define AHEAD    4096 /* as in the copy loops */
#define KEY_STEP 8    /* of the secret, per stripe */

typedef struct lanes {
    __m256i a, b;
} lanes;

static inline __m256i load(const void *p)
{
    return _mm256_loadu_si256(p);
}

/* A lane of 64 bits takes its neighbour's data and the product of the two
 * halves of its own, mixed with the secret. */
static inline __m256i mix(__m256i acc, __m256i data, __m256i key)
{
    __m256i keyed = _mm256_xor_si256(data, key);
    __m256i high = _mm256_shuffle_epi32(keyed, 0x31);
    __m256i swapped = _mm256_shuffle_epi32(data, 0x4e);

    return _mm256_add_epi64(_mm256_add_epi64(acc, swapped),
                            _mm256_mul_epu32(keyed, high));
}

/* At the end of a block: 64-bit products from two of 32 by 32 bits. */
static inline __m256i scramble(__m256i acc, __m256i key)
{
    const __m256i prime = _mm256_set1_epi32((int)0x9e3779b1u);
    __m256i x = _mm256_xor_si256(acc, _mm256_srli_epi64(acc, 47));
    __m256i high;

    x = _mm256_xor_si256(x, key);
    high = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(x, prime),
                            _mm256_slli_epi64(high, 32));
}

typedef enum store { STORE_NONE, STORE_NEAR, STORE_PAST } store;

/* n stripes within one block; `how` is a constant where this is inlined. */
static inline __attribute__((always_inline)) lanes
stripes(lanes l, const char *secret, const char *from, char *to, size_t n,
        store how)
{
    for (size_t i = 0; i < n; i++, from += STRIPE, secret += KEY_STEP) {
        __m256i x = load(from), y = load(from + 32);

        if (how != STORE_NONE)
            _mm_prefetch(from + AHEAD, _MM_HINT_T0);
        if (how == STORE_NEAR) {
            _mm256_storeu_si256((void *)to, x);
            _mm256_storeu_si256((void *)(to + 32), y);
        } else if (how == STORE_PAST) {
            _mm256_stream_si256((void *)to, x);
            _mm256_stream_si256((void *)(to + 32), y);
        }
        l.a = mix(l.a, x, load(secret));
        l.b = mix(l.b, y, load(secret + 32));
        to += how == STORE_NONE ? 0 : STRIPE;
    }
    return l;
}

/* n stripes, with what ends each block. */
static inline __attribute__((always_inline)) lanes
blocks(lanes l, XXH3_state_t *s, const char *from, char *to, size_t n,
       store how)
{
    const char *secret =
        (const char *)(s->extSecret ? s->extSecret : s->customSecret);
    const char *last = secret + s->secretLimit;

    while (n > 0) {
        size_t left = s->nbStripesPerBlock - s->nbStripesSoFar;
        size_t step = n < left ? n : left;

        l = stripes(l, secret + s->nbStripesSoFar * KEY_STEP, from, to, step,
                    how);
        from += step * STRIPE;
        to += how == STORE_NONE ? 0 : step * STRIPE;
        n -= step;
        s->nbStripesSoFar += step;
        if (s->nbStripesSoFar < s->nbStripesPerBlock)
            continue;
        l.a = scramble(l.a, load(last));
        l.b = scramble(l.b, load(last + 32));
        s->nbStripesSoFar = 0;
    }
    return l;
}

/* XXH3 always keeps back the last byte at least, and the stripe before what
 * it keeps: its last stripe is the last 64 bytes of all. */
bool ferry__xxh3_copy_avx2(void *state, void *dst, const void *src,
                           size_t size_bytes, bool past_cache)
{
    XXH3_state_t *s = state;
    size_t n = size_bytes < LEAST ? 0 : (size_bytes - 1) / STRIPE;
    size_t done = n * STRIPE, rest = size_bytes - done;
    const char *from = src;
    lanes l;

    if (n == 0 || s->bufferedSize % STRIPE != 0 ||
        (past_cache && (uintptr_t)dst % STRIPE != 0))
        return false;
    l = (lanes){load(s->acc), load(s->acc + 4)};
    l = blocks(l, s, (const char *)s->buffer, NULL, s->bufferedSize / STRIPE,
               STORE_NONE);
    l = past_cache ? blocks(l, s, from, dst, n, STORE_PAST)
                   : blocks(l, s, from, dst, n, STORE_NEAR);
    _mm256_storeu_si256((void *)s->acc, l.a);
    _mm256_storeu_si256((void *)(s->acc + 4), l.b);
    __builtin_memcpy((char *)dst + done, from + done, rest);
    __builtin_memcpy(s->buffer, from + done, rest);
    __builtin_memcpy(s->buffer + sizeof(s->buffer) - STRIPE,
                     from + done - STRIPE, STRIPE);
    s->bufferedSize = (XXH32_hash_t)rest;
    s->totalLen += size_bytes;
    return true;
}
#else
bool ferry__xxh3_copy_avx2(void *state, void *dst, const void *src,
                           size_t size_bytes, bool past_cache)
{
    (void)state, (void)dst, (void)src, (void)size_bytes, (void)past_cache;
    return false;
}
#endif

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
