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

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
