/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels for AVX2 and F16C, chosen at run time (ferry__cpu_fast).
 * Invariant: they give the bytes of the portable forms; FMA is not used,
 * since it would round differently. */
#include "core/copy_kernels.h"

#if FERRY__X86
#include <immintrin.h>
#include <string.h>

#define AVX2 __attribute__((target("avx2,f16c")))

/* Asks for the source this far ahead: measured, a page suits both plain
 * streaming and a hash of each page before it is stored. Asking past the end
 * is harmless. */
#define AHEAD             4096
#define PREFETCH(address) _mm_prefetch((const char *)(address), _MM_HINT_T0)

AVX2 static inline __m256 load_bf16(const char *src)
{
    __m128i half = _mm_loadu_si128((const __m128i *)(const void *)src);
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

AVX2 void ferry__bf16_to_f32_avx2(float *dst, const void *src, int64_t n)
{
    const char *s = src;
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(dst + i, load_bf16(s + i * 2));
    for (; i < n; i++) {
        uint16_t half;
        memcpy(&half, s + i * 2, 2);
        uint32_t bits = (uint32_t)half << 16;
        memcpy(dst + i, &bits, 4);
    }
}

AVX2 void ferry__f16_to_f32_avx2(float *dst, const void *src, int64_t n)
{
    const char *s = src;
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m128i half =
            _mm_loadu_si128((const __m128i *)(const void *)(s + i * 2));
        _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(half));
    }
    for (; i < n; i++) {
        uint16_t half;
        memcpy(&half, s + i * 2, 2);
        dst[i] = ferry__f16_to_f32(half);
    }
}

/* Eight f32 to bf16 in the low halves of eight 32-bit lanes. */
AVX2 static inline __m256i round_bf16(const float *src)
{
    __m256 value = _mm256_loadu_ps(src);
    __m256i bits = _mm256_castps_si256(value);
    __m256i top = _mm256_srli_epi32(bits, 16);
    __m256i odd = _mm256_and_si256(top, _mm256_set1_epi32(1));
    __m256i sum = _mm256_add_epi32(
        _mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    __m256i near = _mm256_srli_epi32(sum, 16);
    __m256i quiet = _mm256_or_si256(top, _mm256_set1_epi32(0x40));
    __m256i nan =
        _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(near, quiet, nan);
}

AVX2 void ferry__f32_to_bf16_avx2(void *dst, const float *src, int64_t n)
{
    char *d = dst;
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        __m256i packed =
            _mm256_packus_epi32(round_bf16(src + i), round_bf16(src + i + 8));
        packed = _mm256_permute4x64_epi64(packed, 0xd8);
        _mm256_storeu_si256((__m256i *)(void *)(d + i * 2), packed);
    }
    for (; i < n; i++) {
        uint16_t bits = ferry__f32_to_bf16(src[i]);
        memcpy(d + i * 2, &bits, 2);
    }
}

AVX2 void ferry__f32_to_f16_avx2(void *dst, const float *src, int64_t n)
{
    char *d = dst;
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m128i half =
            _mm256_cvtps_ph(_mm256_loadu_ps(src + i),
                            _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        _mm_storeu_si128((__m128i *)(void *)(d + i * 2), half);
    }
    for (; i < n; i++) {
        uint16_t bits = ferry__f32_to_f16(src[i]);
        memcpy(d + i * 2, &bits, 2);
    }
}

/* ---- q8_0 ---- */

/* The largest pattern without its sign. Patterns of positive floats order as
 * integers do, and those of infinity and NaN are above all others. */
AVX2 static inline uint32_t largest_of(__m256 a, __m256 b, __m256 c, __m256 e)
{
    const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(INT32_MAX));
    __m256i ab =
        _mm256_max_epi32(_mm256_castps_si256(_mm256_and_ps(a, magnitude)),
                         _mm256_castps_si256(_mm256_and_ps(b, magnitude)));
    __m256i ce =
        _mm256_max_epi32(_mm256_castps_si256(_mm256_and_ps(c, magnitude)),
                         _mm256_castps_si256(_mm256_and_ps(e, magnitude)));
    __m256i all = _mm256_max_epi32(ab, ce);
    __m128i m = _mm_max_epi32(_mm256_castsi256_si128(all),
                              _mm256_extracti128_si256(all, 1));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1));
    return (uint32_t)_mm_cvtsi128_si32(m);
}

/* round half away from zero, as roundf: adding the float just below one half
 * and cutting is exact for every value in range. */
AVX2 static inline __m256i round_away(__m256 x)
{
    const __m256 sign = _mm256_set1_ps(-0.0f);
    const __m256 half = _mm256_set1_ps(0x1.fffffep-2f);
    __m256 nudge = _mm256_or_ps(_mm256_and_ps(x, sign), half);
    return _mm256_cvttps_epi32(_mm256_add_ps(x, nudge));
}

/* The 32 values of a block; false where the portable form must decide: one is
 * infinite or NaN, or all are so tiny that 1 / d is not finite. */
#define TINY_BITS     0x04000000u /* 2^-119 */
#define INFINITE_BITS 0x7f800000u

AVX2 static inline bool quantise_block(unsigned char *block, __m256 a, __m256 b,
                                       __m256 c, __m256 e)
{
    uint32_t bits = largest_of(a, b, c, e);
    float largest, d, id;
    if (bits < TINY_BITS || bits >= INFINITE_BITS)
        return false;
    memcpy(&largest, &bits, 4);
    d = largest / 127.0f;
    id = 1.0f / d;
    uint16_t scale =
        (uint16_t)_cvtss_sh(d, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    memcpy(block, &scale, 2);

    const __m256 mul = _mm256_set1_ps(id);
    __m256i ab = _mm256_packs_epi32(round_away(_mm256_mul_ps(a, mul)),
                                    round_away(_mm256_mul_ps(b, mul)));
    __m256i ce = _mm256_packs_epi32(round_away(_mm256_mul_ps(c, mul)),
                                    round_away(_mm256_mul_ps(e, mul)));
    __m256i all = _mm256_packs_epi16(ab, ce);
    all = _mm256_permutevar8x32_epi32(
        all, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256((__m256i *)(void *)(block + 2), all);
    return true;
}

AVX2 void ferry__quantise_q8_0_avx2(void *dst, const float *src, int64_t n)
{
    unsigned char *block = dst;
    for (int64_t i = 0; i + 32 <= n; i += 32, block += 34) {
        PREFETCH((const char *)(src + i) + AHEAD);
        PREFETCH((const char *)(src + i) + AHEAD + 64);
        __m256 a = _mm256_loadu_ps(src + i);
        __m256 b = _mm256_loadu_ps(src + i + 8);
        __m256 c = _mm256_loadu_ps(src + i + 16);
        __m256 e = _mm256_loadu_ps(src + i + 24);
        if (!quantise_block(block, a, b, c, e))
            ferry__quantise_q8_0_block(block, src + i);
    }
}

AVX2 void ferry__quantise_q8_0_bf16_avx2(void *dst, const void *src, int64_t n)
{
    unsigned char *block = dst;
    const char *s = src;
    float wide[32];
    for (int64_t i = 0; i + 32 <= n; i += 32, block += 34, s += 64) {
        PREFETCH(s + AHEAD);
        __m256 a = load_bf16(s), b = load_bf16(s + 16);
        __m256 c = load_bf16(s + 32), e = load_bf16(s + 48);
        if (quantise_block(block, a, b, c, e))
            continue;
        _mm256_storeu_ps(wide, a);
        _mm256_storeu_ps(wide + 8, b);
        _mm256_storeu_ps(wide + 16, c);
        _mm256_storeu_ps(wide + 24, e);
        ferry__quantise_q8_0_block(block, wide);
    }
}

/* ---- streaming ---- */

AVX2 void ferry__stream_copy_avx2(void *dst, const void *src, size_t n,
                                  bool ahead)
{
    char *d = dst;
    const char *s = src;
    /* Whole cache lines only go past the cache; the ends go through it. */
    size_t head = (size_t)(-(uintptr_t)d & 63u);
    if (head > n)
        head = n;
    memcpy(d, s, head);
    d += head;
    s += head;
    n -= head;
    for (; n >= 128; n -= 128, d += 128, s += 128) {
        if (ahead) {
            PREFETCH(s + AHEAD);
            PREFETCH(s + AHEAD + 64);
        }
        const __m256i *from = (const __m256i *)(const void *)s;
        __m256i *to = (__m256i *)(void *)d;
        __m256i a = _mm256_loadu_si256(from);
        __m256i b = _mm256_loadu_si256(from + 1);
        __m256i c = _mm256_loadu_si256(from + 2);
        __m256i e = _mm256_loadu_si256(from + 3);
        _mm256_stream_si256(to, a);
        _mm256_stream_si256(to + 1, b);
        _mm256_stream_si256(to + 2, c);
        _mm256_stream_si256(to + 3, e);
    }
    memcpy(d, s, n);
}
#endif

void ferry__stream_copy(void *dst, const void *src, size_t n, bool ahead)
{
#if FERRY__X86
    if (ferry__cpu_fast()) {
        ferry__stream_copy_avx2(dst, src, n, ahead);
        return;
    }
#endif
    (void)ahead;
    __builtin_memcpy(dst, src, n);
}

void ferry__stream_end(void)
{
#if FERRY__X86
    _mm_sfence();
#endif
}
