/* SPDX-License-Identifier: Apache-2.0 */
/* Quantisation to q8_0, equal bit by bit to ggml's reference.
 * Format: per 32 elements, 2 bytes f16 scale d = amax / 127, little-endian,
 * then 32 int8 round(x / d). Invariant: the portable form below is the
 * specification; the AVX2 form falls back to it where it might differ. */
#include "core/copy_kernels.h"
#include <math.h>
#include <string.h>

#define BLOCK       32
#define BLOCK_BYTES 34

/* As x86 converts: what does not fit int32 becomes the smallest one, whose
 * low byte is 0; then the low byte is kept. Only reached with NaN or
 * infinity in the block. */
static unsigned char low_byte(float rounded)
{
    if (!(rounded > -2147483648.0f && rounded < 2147483648.0f))
        return 0;
    return (unsigned char)(int32_t)rounded;
}

void ferry__quantise_q8_0_block(unsigned char *block, const float *src)
{
    float amax = 0.0f;
    for (int i = 0; i < BLOCK; i++) {
        float a = fabsf(src[i]);
        amax = amax > a ? amax : a; /* the order matters for NaN */
    }
    float d = amax / 127.0f;
    float id = d != 0.0f ? 1.0f / d : 0.0f;
    uint16_t scale = ferry__f32_to_f16(d);
    block[0] = (unsigned char)scale;
    block[1] = (unsigned char)(scale >> 8);
    for (int i = 0; i < BLOCK; i++)
        block[2 + i] = low_byte(roundf(src[i] * id));
}

void ferry__quantise_q8_0(void *dst, const float *src, int64_t n)
{
#if FERRY__X86
    if (ferry__cpu_fast()) {
        ferry__quantise_q8_0_avx2(dst, src, n);
        return;
    }
#endif
    for (int64_t i = 0; i < n / BLOCK; i++)
        ferry__quantise_q8_0_block((unsigned char *)dst + i * BLOCK_BYTES,
                                   src + i * BLOCK);
}

void ferry__quantise_q8_0_bf16(void *dst, const void *src, int64_t n)
{
    float wide[BLOCK];
#if FERRY__X86
    if (ferry__cpu_fast()) {
        ferry__quantise_q8_0_bf16_avx2(dst, src, n);
        return;
    }
#endif
    ferry__to_f32_fn load = ferry__to_f32(FERRY_DTYPE_BF16);
    for (int64_t i = 0; i < n / BLOCK; i++) {
        load(wide, (const char *)src + i * BLOCK * 2, BLOCK);
        ferry__quantise_q8_0_block((unsigned char *)dst + i * BLOCK_BYTES,
                                   wide);
    }
}
