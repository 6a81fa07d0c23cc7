/* SPDX-License-Identifier: Apache-2.0 */
/* Conversions against values worked out by hand, against exact arithmetic
 * over whole ranges, and fast kernels against portable ones (O-60). */
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

static uint32_t bits_of(float f)
{
    uint32_t b;
    memcpy(&b, &f, 4);
    return b;
}

static float float_of(uint32_t b)
{
    float f;
    memcpy(&f, &b, 4);
    return f;
}

static uint64_t convert(ferry_dtype to, ferry_dtype from, const void *in)
{
    uint64_t out = 0;
    ferry__convert(&out, to, in, from, 1);
    return out;
}

static uint64_t from_f32(ferry_dtype to, float f)
{
    return convert(to, FERRY_DTYPE_F32, &f);
}

static uint64_t from_f64(ferry_dtype to, double f)
{
    return convert(to, FERRY_DTYPE_F64, &f);
}

static void o60_f32_to_bf16_rounds_to_nearest_even(void **state)
{
    (void)state;
    const ferry_dtype bf16 = FERRY_DTYPE_BF16;
    assert_int_equal(from_f32(bf16, 1.0f), 0x3f80);
    assert_int_equal(from_f32(bf16, 2.0f), 0x4000);
    assert_int_equal(from_f32(bf16, 3.0f), 0x4040);
    assert_int_equal(from_f32(bf16, 4.0f), 0x4080);
    /* 1 + 2^-8: half way between 1 and 1 + 2^-7; even is 1. */
    assert_int_equal(from_f32(bf16, 1.00390625f), 0x3f80);
    assert_int_equal(from_f32(bf16, 1.01171875f), 0x3f82); /* 1 + 3 * 2^-8 */
    assert_int_equal(from_f32(bf16, 1.00390637f), 0x3f81); /* just above */
    assert_int_equal(from_f32(bf16, -0.0f), 0x8000);
    assert_int_equal(from_f32(bf16, 3.4e38f), 0x7f80); /* rounds up to inf */
    assert_int_equal(from_f32(bf16, float_of(1)), 0);
    assert_int_equal(from_f32(bf16, float_of(0x7f800001)), 0x7fc0);
    assert_int_equal(from_f32(bf16, float_of(0xffc12345)), 0xffc1);
}

static void f32_to_f16_has_every_kind_of_value(void **state)
{
    (void)state;
    const ferry_dtype f16 = FERRY_DTYPE_F16;
    for (int fast = 0; fast < 2; fast++) {
        ferry__cpu_limit(!fast);
        assert_int_equal(from_f32(f16, 1.0f), 0x3c00);
        assert_int_equal(from_f32(f16, 65504.0f), 0x7bff);
        assert_int_equal(from_f32(f16, 65519.0f), 0x7bff);
        assert_int_equal(from_f32(f16, 65520.0f), 0x7c00);
        assert_int_equal(from_f32(f16, 1e9f), 0x7c00);
        assert_int_equal(from_f32(f16, -INFINITY), 0xfc00);
        assert_int_equal(from_f32(f16, 0x1p-24f), 1);
        assert_int_equal(from_f32(f16, 0x1p-25f), 0); /* tie to even */
        assert_int_equal(from_f32(f16, 0x1.8p-24f), 2);
        assert_int_equal(from_f32(f16, 0x1.000002p-25f), 1);
        assert_int_equal(from_f32(f16, 0x1p-14f), 0x400);
        assert_int_equal(from_f32(f16, 0x1.ff8p-15f), 0x3ff);
        assert_int_equal(from_f32(f16, 0x1.ffcp-15f), 0x400);    /* tie */
        assert_int_equal(from_f32(f16, 1.00048828125f), 0x3c00); /* tie */
        assert_int_equal(from_f32(f16, -1.00146484375f), 0xbc02);
    }
}

static void fp8_follows_torch_beyond_its_range(void **state)
{
    (void)state;
    const ferry_dtype e4 = FERRY_DTYPE_F8_E4M3, e5 = FERRY_DTYPE_F8_E5M2;
    assert_int_equal(from_f32(e4, 1.0f), 0x38);
    assert_int_equal(from_f32(e4, 448.0f), 0x7e);
    assert_int_equal(from_f32(e4, 464.0f), 0x7e); /* tie, to even */
    assert_int_equal(from_f32(e4, 465.0f), 0x7f); /* no infinity: NaN */
    assert_int_equal(from_f32(e4, -480.0f), 0xff);
    assert_int_equal(from_f32(e4, INFINITY), 0x7f);
    assert_int_equal(from_f32(e4, NAN), 0x7f);
    assert_int_equal(from_f32(e4, 0x1p-9f), 1);
    assert_int_equal(from_f32(e4, 0x1p-10f), 0);
    assert_int_equal(from_f32(e4, 0x1.8p-9f), 2);
    assert_int_equal(from_f32(e5, 1.0f), 0x3c);
    assert_int_equal(from_f32(e5, 57344.0f), 0x7b);
    assert_int_equal(from_f32(e5, 61440.0f), 0x7c); /* tie: inf is even */
    assert_int_equal(from_f32(e5, 61439.0f), 0x7b);
    assert_int_equal(from_f32(e5, 1e6f), 0x7c);
    assert_int_equal(from_f32(e5, -INFINITY), 0xfc);
    assert_int_equal(from_f32(e5, NAN), 0x7f);
    assert_int_equal(from_f32(e5, 0x1p-16f), 1);
}

static void wide_f64_is_rounded_once(void **state)
{
    (void)state;
    /* 1 + 2^-8 + 2^-40: through f32 it would become the tie 1 + 2^-8 and then
     * fall to 1; one rounding goes up. */
    double above = 1.0 + 0x1p-8 + 0x1p-40;
    assert_int_equal(from_f64(FERRY_DTYPE_BF16, above), 0x3f81);
    assert_int_equal(from_f64(FERRY_DTYPE_BF16, -above), 0xbf81);
    double below = 1.0 + 0x1p-7 + 0x1p-8 - 0x1p-40; /* tie would go to 82 */
    assert_int_equal(from_f64(FERRY_DTYPE_BF16, below), 0x3f81);
    assert_int_equal(from_f64(FERRY_DTYPE_F16, 1.0 + 0x1p-11 + 0x1p-50),
                     0x3c01);
    assert_int_equal(from_f64(FERRY_DTYPE_F16, 1.0 + 0x1p-11), 0x3c00);
    assert_int_equal(from_f64(FERRY_DTYPE_F8_E4M3, 1.0 + 0x1p-4 + 0x1p-45),
                     0x39);
    assert_int_equal(from_f64(FERRY_DTYPE_F32, 1.0 + 0x1p-24), 0x3f800000);
    assert_int_equal(from_f64(FERRY_DTYPE_F32, 1.0 + 0x1p-24 + 0x1p-50),
                     0x3f800001);
    assert_int_equal(from_f64(FERRY_DTYPE_BF16, 1e300), 0x7f80);
    assert_int_equal(from_f64(FERRY_DTYPE_BF16, -1e300), 0xff80);
    assert_int_equal(from_f64(FERRY_DTYPE_BF16, 1e-300), 0);
    assert_int_equal(from_f64(FERRY_DTYPE_BF16, -1e-300), 0x8000);
    assert_int_equal(from_f64(FERRY_DTYPE_BF16, INFINITY), 0x7f80);
    assert_int_equal(from_f64(FERRY_DTYPE_BF16, (double)NAN) & 0x7fff, 0x7fc0);
}

/* Every narrow pattern widens to the value that its fields say. */
static double field_value(uint32_t bits, int exp_bits, int mant)
{
    int bias = (1 << (exp_bits - 1)) - 1;
    int sign = (int)(bits >> (exp_bits + mant)) & 1;
    int e = (int)(bits >> mant) & ((1 << exp_bits) - 1);
    double m = (double)(bits & ((1u << mant) - 1u)) / (double)(1 << mant);
    double v = e == 0 ? ldexp(m, 1 - bias) : ldexp(1.0 + m, e - bias);
    return sign ? -v : v;
}

static void every_narrow_value_widens_exactly(void **state)
{
    (void)state;
    for (int fast = 0; fast < 2; fast++) {
        ferry__cpu_limit(!fast);
        for (uint32_t i = 0; i < 0x10000; i++) {
            uint16_t half = (uint16_t)i;
            double v;
            uint64_t w = convert(FERRY_DTYPE_F64, FERRY_DTYPE_F16, &half);
            memcpy(&v, &w, 8);
            if ((i & 0x7c00) != 0x7c00)
                assert_true(v == field_value(i, 5, 10));
            else
                assert_true((i & 0x3ff) ? v != v : isinf(v));
            w = convert(FERRY_DTYPE_F32, FERRY_DTYPE_BF16, &half);
            assert_int_equal(w, i << 16);
        }
        for (uint32_t i = 0; i < 0x100; i++) {
            uint8_t byte = (uint8_t)i;
            float v = float_of(
                (uint32_t)convert(FERRY_DTYPE_F32, FERRY_DTYPE_F8_E4M3, &byte));
            if ((i & 0x7f) == 0x7f)
                assert_true(v != v);
            else
                assert_true((double)v == field_value(i, 4, 3));
            v = float_of(
                (uint32_t)convert(FERRY_DTYPE_F32, FERRY_DTYPE_F8_E5M2, &byte));
            if ((i & 0x7c) != 0x7c)
                assert_true((double)v == field_value(i, 5, 2));
            else
                assert_true((i & 3) ? v != v : isinf(v));
        }
    }
}

static void narrow_values_come_back_unchanged(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < 0x10000; i++) {
        uint16_t half = (uint16_t)i;
        float f = ferry__f16_to_f32(half);
        if (f == f)
            assert_int_equal(ferry__f32_to_f16(f), i);
        f = float_of(i << 16);
        if (f == f)
            assert_int_equal(ferry__f32_to_bf16(f), i);
    }
    for (uint32_t i = 0; i < 0x100; i++) {
        uint8_t byte = (uint8_t)i;
        uint32_t wide =
            (uint32_t)convert(FERRY_DTYPE_F32, FERRY_DTYPE_F8_E4M3, &byte);
        assert_int_equal(ferry__f32_to_e4m3(float_of(wide)), i);
    }
}

/* Each rounded value is the nearest of its two neighbours, ties to even. */
static void f16_rounding_is_nearest_for_random_values(void **state)
{
    (void)state;
    uint64_t rng = 5;
    for (int k = 0; k < 200000; k++) {
        uint32_t b = (uint32_t)naive_random(&rng);
        b = (b & 0x807fffffu) | (uint32_t)naive_between(&rng, 100, 142) << 23;
        float f = float_of(b);
        uint16_t h = ferry__f32_to_f16(f);
        double got = (double)ferry__f16_to_f32(h), x = (double)f;
        if (isinf(got))
            continue;
        double up = (double)ferry__f16_to_f32((uint16_t)(h + 1));
        double down =
            (h & 0x7fff) ? (double)ferry__f16_to_f32((uint16_t)(h - 1)) : -up;
        double error = fabs(got - x);
        double other =
            fmin(isinf(up) ? 65536.0 - fabs(x) : fabs(up - x), fabs(down - x));
        assert_true(error < other || (error == other && !(h & 1)));
    }
}

static void fast_kernels_equal_portable_ones(void **state)
{
    (void)state;
    enum { N = 4096 + 13 };
    float *in = malloc(N * sizeof(*in));
    unsigned char *a = malloc(N * 8), *b = malloc(N * 8);
    uint64_t rng = 9;
    const ferry_dtype narrow[] = {FERRY_DTYPE_F16, FERRY_DTYPE_BF16};
    for (int i = 0; i < N; i++)
        in[i] = float_of((uint32_t)naive_random(&rng)); /* also NaN */
    for (int k = 0; k < 2; k++) {
        ferry__convert(a, narrow[k], in, FERRY_DTYPE_F32, N);
        ferry__cpu_limit(true);
        ferry__convert(b, narrow[k], in, FERRY_DTYPE_F32, N);
        ferry__cpu_limit(false);
        assert_memory_equal(a, b, N * 2);
        ferry__convert(a, FERRY_DTYPE_F32, in, narrow[k], N);
        ferry__cpu_limit(true);
        ferry__convert(b, FERRY_DTYPE_F32, in, narrow[k], N);
        ferry__cpu_limit(false);
        assert_memory_equal(a, b, N * 4);
    }
    assert_int_equal(bits_of(in[0]), bits_of(in[0]));
    free(in);
    free(a);
    free(b);
}

static void unknown_types_have_no_kernels(void **state)
{
    (void)state;
    assert_null(ferry__to_f32(FERRY_DTYPE_I32));
    assert_null(ferry__from_f32(FERRY_DTYPE_I32));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(o60_f32_to_bf16_rounds_to_nearest_even),
        cmocka_unit_test(f32_to_f16_has_every_kind_of_value),
        cmocka_unit_test(fp8_follows_torch_beyond_its_range),
        cmocka_unit_test(wide_f64_is_rounded_once),
        cmocka_unit_test(every_narrow_value_widens_exactly),
        cmocka_unit_test(narrow_values_come_back_unchanged),
        cmocka_unit_test(f16_rounding_is_nearest_for_random_values),
        cmocka_unit_test(fast_kernels_equal_portable_ones),
        cmocka_unit_test(unknown_types_have_no_kernels),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
