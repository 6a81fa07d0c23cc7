/* SPDX-License-Identifier: Apache-2.0 */
/* q8_0 blocks against hand-made ones and against a quantiser written here
 * from the format's definition; fast form against portable form. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "core/copy_kernels.h"
#include "harness/naive.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define N 4096

static void by_definition(const float *src, unsigned char *block)
{
    float amax = 0;
    for (int i = 0; i < 32; i++)
        amax = fabsf(src[i]) > amax ? fabsf(src[i]) : amax;
    float d = amax / 127.0f, id = d != 0.0f ? 1.0f / d : 0.0f;
    uint16_t scale = ferry__f32_to_f16(d);
    memcpy(block, &scale, 2);
    for (int i = 0; i < 32; i++)
        block[2 + i] = (unsigned char)(signed char)lroundf(src[i] * id);
}

static void a_hand_made_block_is_right(void **state)
{
    (void)state;
    float in[32] = {127.0f, -127.0f, 1.0f, 0.5f, -0.5f, 1.5f, 2.5f, -2.5f};
    unsigned char got[34];
    const signed char want[8] = {127, -127, 1, 1, -1, 2, 3, -3};
    for (int fast = 0; fast < 2; fast++) {
        ferry__cpu_limit(!fast);
        memset(got, 0x7f, sizeof(got));
        ferry__convert(got, FERRY_DTYPE_Q8_0, in, FERRY_DTYPE_F32, 32);
        assert_int_equal(got[0], 0x00); /* d = 1.0: 0x3c00 */
        assert_int_equal(got[1], 0x3c);
        assert_memory_equal(got + 2, want, 8);
        for (int i = 10; i < 34; i++)
            assert_int_equal(got[i], 0);
    }
}

static void fill(float *in, uint64_t seed, int kind)
{
    uint64_t rng = seed;
    for (int i = 0; i < N; i++) {
        double u = (double)(naive_random(&rng) >> 11) * 0x1p-53 - 0.5;
        if (kind == 0)
            in[i] = (float)(u * 0.1);
        else if (kind == 1)
            in[i] = (float)ldexp(u, (int)naive_between(&rng, -140, 120));
        else
            in[i] = (float)naive_between(&rng, -254, 254) * 0.5f;
    }
}

static void random_blocks_follow_the_definition(void **state)
{
    (void)state;
    static float in[N];
    static unsigned char want[N / 32 * 34], got[N / 32 * 34];
    for (uint64_t seed = 1; seed <= 60; seed++) {
        fill(in, seed, (int)(seed % 3));
        if (seed % 3 == 1) { /* whole blocks of tiny values too */
            for (int i = 0; i < 64; i++)
                in[i] = ldexpf(1.0f + (float)i, -130);
        }
        for (int i = 0; i < N / 32; i++)
            ferry__quantise_q8_0_block(want + i * 34, in + i * 32);
        for (int i = 4; i < N / 32; i++) {
            unsigned char defined[34];
            by_definition(in + i * 32, defined);
            assert_memory_equal(defined, want + i * 34, 34);
        }
        for (int fast = 0; fast < 2; fast++) {
            ferry__cpu_limit(!fast);
            ferry__convert(got, FERRY_DTYPE_Q8_0, in, FERRY_DTYPE_F32, N);
            assert_memory_equal(got, want, sizeof(want));
        }
    }
}

static void bf16_and_f16_sources_are_widened_first(void **state)
{
    (void)state;
    static float in[N], wide[N];
    static uint16_t half[N];
    static unsigned char want[N / 32 * 34], got[N / 32 * 34];
    const ferry_dtype narrow[] = {FERRY_DTYPE_BF16, FERRY_DTYPE_F16};
    fill(in, 77, 0);
    in[5] = 0;
    for (int i = 0; i < 32; i++)
        in[64 + i] = 0; /* a block of zeros */
    for (int k = 0; k < 2; k++) {
        ferry__convert(half, narrow[k], in, FERRY_DTYPE_F32, N);
        ferry__convert(wide, FERRY_DTYPE_F32, half, narrow[k], N);
        for (int i = 0; i < N / 32; i++)
            ferry__quantise_q8_0_block(want + i * 34, wide + i * 32);
        for (int fast = 0; fast < 2; fast++) {
            ferry__cpu_limit(!fast);
            memset(got, 0x7f, sizeof(got));
            ferry__convert(got, FERRY_DTYPE_Q8_0, half, narrow[k], N);
            assert_memory_equal(got, want, sizeof(want));
        }
    }
}

static void odd_values_give_the_same_bytes_on_both_paths(void **state)
{
    (void)state;
    static float in[32 * 6];
    unsigned char want[6 * 34], got[6 * 34];
    uint16_t half[32 * 6];
    for (int i = 0; i < 32 * 6; i++)
        in[i] = (float)(i % 32) - 16.0f;
    in[3] = NAN;
    in[32 + 31] = INFINITY;
    in[64] = -INFINITY;
    in[64 + 1] = NAN;
    in[96 + 31] = NAN;
    in[128] = 3e38f;
    ferry__cpu_limit(true);
    ferry__convert(want, FERRY_DTYPE_Q8_0, in, FERRY_DTYPE_F32, 32 * 6);
    ferry__cpu_limit(false);
    ferry__convert(got, FERRY_DTYPE_Q8_0, in, FERRY_DTYPE_F32, 32 * 6);
    assert_memory_equal(got, want, sizeof(want));
    ferry__convert(half, FERRY_DTYPE_BF16, in, FERRY_DTYPE_F32, 32 * 6);
    ferry__convert(got, FERRY_DTYPE_Q8_0, half, FERRY_DTYPE_BF16, 32 * 6);
    ferry__cpu_limit(true);
    ferry__convert(want, FERRY_DTYPE_Q8_0, half, FERRY_DTYPE_BF16, 32 * 6);
    ferry__cpu_limit(false);
    assert_memory_equal(got, want, sizeof(want));
}

/* A box of blocks inside a q8_0 slot; its source straight or turned. */
static void boxes_of_blocks_land_in_place(void **state)
{
    (void)state;
    enum { ROWS = 5, COLS = 96, SLOT_COLS = 160, SLOT_ROWS = 7 };
    static float in[ROWS * COLS], row[COLS];
    static unsigned char got[SLOT_ROWS * SLOT_COLS / 32 * 34];
    static unsigned char want[sizeof(got)];
    uint64_t rng = 3;
    for (int i = 0; i < ROWS * COLS; i++)
        in[i] = (float)naive_between(&rng, -1000, 1000);
    for (int turned = 0; turned < 2; turned++) {
        ferry__copy_op op = {.ndim = 2,
                             .src_dtype = FERRY_DTYPE_F32,
                             .dst_dtype = FERRY_DTYPE_Q8_0,
                             .dst_offset = 1 * SLOT_COLS + 32};
        int r = turned ? 1 : 0, c = turned ? 0 : 1;
        op.shape[r] = ROWS;
        op.dst_stride[r] = SLOT_COLS;
        op.src_stride[r] = turned ? 1 : COLS;
        op.shape[c] = COLS;
        op.dst_stride[c] = 1;
        op.src_stride[c] = turned ? ROWS : 1;
        memset(got, 0x7f, sizeof(got));
        memset(want, 0x7f, sizeof(want));
        for (int i = 0; i < ROWS; i++) {
            for (int j = 0; j < COLS; j++)
                row[j] = in[i * op.src_stride[r] + j * op.src_stride[c]];
            for (int j = 0; j < COLS / 32; j++)
                ferry__quantise_q8_0_block(
                    want + ((1 + i) * SLOT_COLS / 32 + 1 + j) * 34,
                    row + j * 32);
        }
        ferry__xxh3_state *digest = ferry__xxh3_create();
        ferry__copy_run(&op, got, in, digest);
        assert_memory_equal(got, want, sizeof(want));
        assert_true(ferry__xxh3_value(digest) == ferry__xxh3(in, sizeof(in)));
        assert_true(ferry__copy_equal(&op, got, in));
        got[(SLOT_COLS / 32 + 2) * 34 + 7] ^= 1;
        assert_false(ferry__copy_equal(&op, got, in));
        memset(got, 0x7f, sizeof(got));
        ferry__copy_run(&op, got, in, NULL);
        assert_memory_equal(got, want, sizeof(want));
        ferry__xxh3_destroy(digest);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_hand_made_block_is_right),
        cmocka_unit_test(random_blocks_follow_the_definition),
        cmocka_unit_test(bf16_and_f16_sources_are_widened_first),
        cmocka_unit_test(odd_values_give_the_same_bytes_on_both_paths),
        cmocka_unit_test(boxes_of_blocks_land_in_place),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
