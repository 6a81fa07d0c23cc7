/* SPDX-License-Identifier: Apache-2.0 */
/* Conversions between floating-point types, portable form, and the choice of
 * the fast one. Every pair goes through f32, which holds all narrower types
 * exactly; f64 goes there rounded to odd, so that the second rounding gives
 * what one rounding would. Invariant: equal dtypes are never interpreted. */
#include "core/copy_kernels.h"
#include <math.h>
#include <stdatomic.h>
#include <string.h>

#define STAGE 512 /* elements of f32 on the stack */

static uint32_t f32_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

static float f32_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

/* ---- CPU ---- */

static atomic_bool cpu_portable;

bool ferry__cpu_fast(void)
{
#if FERRY__X86
    /* Every processor with AVX2 has F16C, which clang 14 cannot ask for. */
    return !atomic_load_explicit(&cpu_portable, memory_order_relaxed) &&
           __builtin_cpu_supports("avx2");
#else
    return false;
#endif
}

void ferry__cpu_limit(bool portable_only)
{
    atomic_store_explicit(&cpu_portable, portable_only, memory_order_relaxed);
}

/* ---- one element ---- */

uint16_t ferry__f32_to_bf16(float value)
{
    uint32_t bits = f32_bits(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) /* NaN: quiet, payload kept */
        return (uint16_t)((bits >> 16) | 0x40u);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

/* Rounds a positive f32 pattern to a narrower float whose exponent bias is
 * `bias` and which has `mant` mantissa bits; also below its normal range.
 * The caller has dealt with NaN and with what is too large. */
static uint32_t narrow_bits(uint32_t bits, int bias, int mant)
{
    int exponent = (int)(bits >> 23) - 127 + bias;
    uint32_t m = (bits & 0x7fffffu) | ((bits >> 23) != 0 ? 0x800000u : 0u);
    int shift = 23 - mant;
    if (exponent < 1) {
        shift += 1 - exponent;
        exponent = 1;
        if (shift > 24)
            return 0; /* less than half of the smallest value */
    }
    uint32_t low = m & ((1u << shift) - 1u), half = 1u << (shift - 1);
    uint32_t out = m >> shift;
    out += low > half || (low == half && (out & 1u));
    /* The hidden bit, where there is one, carries into the exponent. */
    return ((uint32_t)(exponent - 1) << mant) + out;
}

uint16_t ferry__f32_to_f16(float value)
{
    uint32_t bits = f32_bits(value);
    uint32_t sign = (bits >> 16) & 0x8000u;
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00u | ((bits >> 13) & 0x1ffu));
    if (bits >= 0x47800000u) /* 65536 and more, infinity */
        return (uint16_t)(sign | 0x7c00u);
    return (uint16_t)(sign | narrow_bits(bits, 15, 10));
}

uint8_t ferry__f32_to_e4m3(float value)
{
    uint32_t bits = f32_bits(value);
    uint32_t sign = (bits >> 24) & 0x80u;
    bits &= 0x7fffffffu;
    if (bits >= 0x43f00000u) /* 480 and more, infinity, NaN */
        return (uint8_t)(sign | 0x7fu);
    return (uint8_t)(sign | narrow_bits(bits, 7, 3));
}

uint8_t ferry__f32_to_e5m2(float value)
{
    uint32_t bits = f32_bits(value);
    uint32_t sign = (bits >> 24) & 0x80u;
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u)
        return (uint8_t)(sign | 0x7fu);
    if (bits >= 0x47800000u)
        return (uint8_t)(sign | 0x7cu);
    return (uint8_t)(sign | narrow_bits(bits, 15, 2));
}

/* Widens a narrow float's bits without its sign: exact for every value. */
static uint32_t widen_bits(uint32_t bits, int bias, int mant)
{
    uint32_t exponent = bits >> mant, m = bits & ((1u << mant) - 1u);
    if (exponent == 0) {
        float value = (float)m; /* times the smallest subnormal */
        return f32_bits(ldexpf(value, 1 - bias - mant));
    }
    return ((exponent + 127u - (uint32_t)bias) << 23) | (m << (23 - mant));
}

float ferry__f16_to_f32(uint16_t bits)
{
    uint32_t sign = (uint32_t)(bits & 0x8000u) << 16, low = bits & 0x7fffu;
    if (low > 0x7c00u)
        return f32_of(sign | 0x7fc00000u | ((low & 0x3ffu) << 13));
    if (low == 0x7c00u)
        return f32_of(sign | 0x7f800000u);
    return f32_of(sign | widen_bits(low, 15, 10));
}

static float e4m3_to_f32(uint8_t bits)
{
    uint32_t sign = (uint32_t)(bits & 0x80u) << 24, low = bits & 0x7fu;
    if (low == 0x7fu)
        return f32_of(sign | 0x7fc00000u);
    return f32_of(sign | widen_bits(low, 7, 3));
}

static float e5m2_to_f32(uint8_t bits)
{
    return ferry__f16_to_f32((uint16_t)(bits << 8));
}

/* Rounds to odd: where the value is not exact, the neighbour whose last bit
 * is set, so that a later rounding to fewer bits sees that something was
 * cut off. Too large becomes the largest finite value, which the narrower
 * types round on as they would the original. */
static float f64_to_f32_odd(double value)
{
    float near = (float)value;
    if ((double)near == value || value != value)
        return near;
    uint32_t bits = f32_bits(near);
    if ((bits & 0x7fffffffu) == 0x7f800000u) /* rounded up to infinity */
        return f32_of(bits - 1u);
    /* The neighbour on the other side of the value. */
    if (!(bits & 1u)) {
        bool above = fabs((double)near) > fabs(value);
        bits = above ? bits - 1u : bits + 1u;
    }
    return f32_of(bits);
}

/* ---- runs ---- */

static void f64_to_f32(float *dst, const void *src, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        double value;
        memcpy(&value, (const char *)src + i * 8, 8);
        dst[i] = f64_to_f32_odd(value);
    }
}

static void f32_to_f32(float *dst, const void *src, int64_t n)
{
    memcpy(dst, src, (size_t)n * sizeof(*dst));
}

static void f16_to_f32(float *dst, const void *src, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        uint16_t bits;
        memcpy(&bits, (const char *)src + i * 2, 2);
        dst[i] = ferry__f16_to_f32(bits);
    }
}

static void bf16_to_f32(float *dst, const void *src, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        uint16_t bits;
        memcpy(&bits, (const char *)src + i * 2, 2);
        dst[i] = f32_of((uint32_t)bits << 16);
    }
}

static void e4m3_run_to_f32(float *dst, const void *src, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        dst[i] = e4m3_to_f32(((const uint8_t *)src)[i]);
}

static void e5m2_run_to_f32(float *dst, const void *src, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        dst[i] = e5m2_to_f32(((const uint8_t *)src)[i]);
}

static void f32_to_f64(void *dst, const float *src, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        double value = (double)src[i];
        memcpy((char *)dst + i * 8, &value, 8);
    }
}

static void f32_out_f32(void *dst, const float *src, int64_t n)
{
    memcpy(dst, src, (size_t)n * sizeof(*src));
}

static void f32_to_f16(void *dst, const float *src, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        uint16_t bits = ferry__f32_to_f16(src[i]);
        memcpy((char *)dst + i * 2, &bits, 2);
    }
}

static void f32_to_bf16(void *dst, const float *src, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        uint16_t bits = ferry__f32_to_bf16(src[i]);
        memcpy((char *)dst + i * 2, &bits, 2);
    }
}

static void f32_run_to_e4m3(void *dst, const float *src, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        ((uint8_t *)dst)[i] = ferry__f32_to_e4m3(src[i]);
}

static void f32_run_to_e5m2(void *dst, const float *src, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        ((uint8_t *)dst)[i] = ferry__f32_to_e5m2(src[i]);
}

#if FERRY__X86
#define FAST(fast, portable) (ferry__cpu_fast() ? (fast) : (portable))
#else
#define FAST(fast, portable) (portable)
#endif

ferry__to_f32_fn ferry__to_f32(ferry_dtype from)
{
    switch (from) {
    case FERRY_DTYPE_F64:
        return f64_to_f32;
    case FERRY_DTYPE_F32:
        return f32_to_f32;
    case FERRY_DTYPE_F16:
        return FAST(ferry__f16_to_f32_avx2, f16_to_f32);
    case FERRY_DTYPE_BF16:
        return FAST(ferry__bf16_to_f32_avx2, bf16_to_f32);
    case FERRY_DTYPE_F8_E4M3:
        return e4m3_run_to_f32;
    case FERRY_DTYPE_F8_E5M2:
        return e5m2_run_to_f32;
    default:
        return NULL;
    }
}

ferry__from_f32_fn ferry__from_f32(ferry_dtype to)
{
    switch (to) {
    case FERRY_DTYPE_F64:
        return f32_to_f64;
    case FERRY_DTYPE_F32:
        return f32_out_f32;
    case FERRY_DTYPE_F16:
        return FAST(ferry__f32_to_f16_avx2, f32_to_f16);
    case FERRY_DTYPE_BF16:
        return FAST(ferry__f32_to_bf16_avx2, f32_to_bf16);
    case FERRY_DTYPE_F8_E4M3:
        return f32_run_to_e4m3;
    case FERRY_DTYPE_F8_E5M2:
        return f32_run_to_e5m2;
    case FERRY_DTYPE_Q8_0:
        return ferry__quantise_q8_0;
    default:
        return NULL;
    }
}

/* To f32 there is one rounding only, so it is the plain one. */
static void f64_to_f32_nearest(void *dst, const void *src, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        double value;
        memcpy(&value, (const char *)src + i * 8, 8);
        float out = (float)value;
        memcpy((char *)dst + i * 4, &out, 4);
    }
}

static void convert_staged(char *dst, ferry_dtype to, const char *src,
                           ferry_dtype from, int64_t n)
{
    float stage[STAGE];
    ferry__to_f32_fn load = ferry__to_f32(from);
    ferry__from_f32_fn store = ferry__from_f32(to);
    int64_t src_bytes = (int64_t)ferry_dtype_bytes(from);
    int64_t dst_bytes = (int64_t)ferry_dtype_bytes(to);
    int64_t block = ferry_dtype_block(to);
    for (int64_t i = 0; i < n; i += STAGE) {
        int64_t part = n - i < STAGE ? n - i : STAGE;
        load(stage, src + i * src_bytes, part);
        store(dst + i / block * dst_bytes, stage, part);
    }
}

void ferry__convert(void *dst, ferry_dtype to, const void *src,
                    ferry_dtype from, int64_t n)
{
    if (from == to)
        memcpy(dst, src, (size_t)n * ferry_dtype_bytes(from));
    else if (from == FERRY_DTYPE_F64 && to == FERRY_DTYPE_F32)
        f64_to_f32_nearest(dst, src, n);
    else if (from == FERRY_DTYPE_BF16 && to == FERRY_DTYPE_Q8_0)
        ferry__quantise_q8_0_bf16(dst, src, n);
    else
        convert_staged(dst, to, src, from, n);
}
