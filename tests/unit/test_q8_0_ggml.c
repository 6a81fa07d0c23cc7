/* SPDX-License-Identifier: Apache-2.0 */
/* q8_0 blocks equal those of ggml's own reference, bit by bit.
 * ctest: link=worker */
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

/* ggml declares it in a header that it does not install. */
void quantize_row_q8_0_ref(const float *x, void *y, int64_t k);

#define N ((int64_t)1 << 20)

static float *values;
static unsigned char *want, *got;

static int set_up(void **state)
{
    (void)state;
    values = malloc((size_t)N * sizeof(*values));
    want = malloc((size_t)N / 32 * 34);
    got = malloc((size_t)N / 32 * 34);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    free(values);
    free(want);
    free(got);
    return 0;
}

static void check(void)
{
    quantize_row_q8_0_ref(values, want, N);
    for (int fast = 0; fast < 2; fast++) {
        ferry__cpu_limit(!fast);
        ferry__convert(got, FERRY_DTYPE_Q8_0, values, FERRY_DTYPE_F32, N);
        assert_memory_equal(got, want, (size_t)N / 32 * 34);
    }
    ferry__cpu_limit(false);
}

static void weights_quantise_as_in_ggml(void **state)
{
    (void)state;
    uint64_t rng = 21;
    for (int64_t i = 0; i < N; i++)
        values[i] = (float)naive_between(&rng, -100000, 100000) * 1e-6f *
                    (float)(1 + i / 32 % 77);
    check();
}

static void ties_quantise_as_in_ggml(void **state)
{
    (void)state;
    uint64_t rng = 22;
    for (int64_t i = 0; i < N; i++)
        values[i] =
            i % 32 == 0 ? 127.0f : (float)naive_between(&rng, -254, 254) * 0.5f;
    check();
}

static void any_finite_bits_quantise_as_in_ggml(void **state)
{
    (void)state;
    uint64_t rng = 23;
    for (int64_t i = 0; i < N; i++) {
        uint32_t bits = (uint32_t)naive_random(&rng);
        if ((bits & 0x7f800000u) == 0x7f800000u)
            bits &= ~0x40000000u;
        if (i / 32 % 2) /* blocks of tiny values and subnormals */
            bits &= ~0x78000000u;
        memcpy(&values[i], &bits, 4);
    }
    check();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(weights_quantise_as_in_ggml),
        cmocka_unit_test(ties_quantise_as_in_ggml),
        cmocka_unit_test(any_finite_bits_quantise_as_in_ggml),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
