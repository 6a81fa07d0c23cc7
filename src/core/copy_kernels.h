/* SPDX-License-Identifier: Apache-2.0 */
/* What the copy loops are made of: runs, conversions, CPU choices.
 * Invariant: the fast and the portable form of a kernel give equal bytes;
 * addresses may have any alignment. */
#ifndef FERRY_CORE_COPY_KERNELS_H
#define FERRY_CORE_COPY_KERNELS_H

#include "core/copy.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define FERRY__X86 1
#else
#define FERRY__X86 0
#endif

/* Whether the kernels for AVX2 and F16C may run. Tests can turn them off. */
bool ferry__cpu_fast(void);
void ferry__cpu_limit(bool portable_only);

/* Moves n bytes past the cache; call ferry__stream_end after the last.
 * `ahead`: the source goes on after them and is asked for in advance. */
void ferry__stream_copy(void *dst, const void *src, size_t n, bool ahead);
void ferry__stream_end(void);

/* Contiguous conversions through f32; n elements. */
typedef void (*ferry__to_f32_fn)(float *dst, const void *src, int64_t n);
typedef void (*ferry__from_f32_fn)(void *dst, const float *src, int64_t n);
ferry__to_f32_fn ferry__to_f32(ferry_dtype from);
ferry__from_f32_fn ferry__from_f32(ferry_dtype to);

/* The portable forms, which the fast ones must equal. */
uint16_t ferry__f32_to_bf16(float value);
uint16_t ferry__f32_to_f16(float value);
float ferry__f16_to_f32(uint16_t bits);
uint8_t ferry__f32_to_e4m3(float value);
uint8_t ferry__f32_to_e5m2(float value);

/* ggml's reference quantiser: n % 32 == 0, blocks of {f16 scale, 32 int8}. */
void ferry__quantise_q8_0(void *dst, const float *src, int64_t n);
void ferry__quantise_q8_0_bf16(void *dst, const void *src, int64_t n);
void ferry__quantise_q8_0_block(unsigned char *block, const float *src);

#if FERRY__X86
void ferry__bf16_to_f32_avx2(float *dst, const void *src, int64_t n);
void ferry__f16_to_f32_avx2(float *dst, const void *src, int64_t n);
void ferry__f32_to_bf16_avx2(void *dst, const float *src, int64_t n);
void ferry__f32_to_f16_avx2(void *dst, const float *src, int64_t n);
void ferry__quantise_q8_0_avx2(void *dst, const float *src, int64_t n);
void ferry__quantise_q8_0_bf16_avx2(void *dst, const void *src, int64_t n);
void ferry__stream_copy_avx2(void *dst, const void *src, size_t n, bool ahead);
#endif

/* Copies one box without a digest; the op is merged and not empty. */
void ferry__copy_box(const ferry__copy_op *op, char *dst, const char *src,
                     bool stream);

#endif
