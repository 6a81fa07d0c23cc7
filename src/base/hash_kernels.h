/* SPDX-License-Identifier: Apache-2.0 */
/* XXH3's long loops, portable and for AVX2, for hash.c to choose from at run
 * time. Invariant: both give the same digests and share one state layout. */
#ifndef FERRY_BASE_HASH_KERNELS_H
#define FERRY_BASE_HASH_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define FERRY__HASH_AVX2 1
#else
#define FERRY__HASH_AVX2 0
#endif

uint64_t ferry__xxh3_portable(const void *bytes, size_t size_bytes);
/* The state is an XXH3_state_t, which each file includes for itself. */
void ferry__xxh3_update_portable(void *state, const void *bytes,
                                 size_t size_bytes);
#if FERRY__HASH_AVX2
uint64_t ferry__xxh3_avx2(const void *bytes, size_t size_bytes);
void ferry__xxh3_update_avx2(void *state, const void *bytes, size_t size_bytes);
bool ferry__xxh3_copy_avx2(void *state, void *dst, const void *src,
                           size_t size_bytes, bool past_cache);
#endif

#endif
