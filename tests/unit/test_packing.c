/* SPDX-License-Identifier: Apache-2.0 */
/* Cuts of a stream of tensors: O-26 and O-27 by hand, and the sequences that
 * a live vLLM produced. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "base/alloc.h"
#include "base/hash.h"
#include "core/packing.h"
#include <stdio.h>
#include <string.h>

#define MOST 32

static char warning[1024];
static int warnings;

static void keep_warning(ferry_log_level level, const char *line, void *arg)
{
    (void)arg;
    if (level == FERRY_LOG_WARN) {
        warnings++;
        snprintf(warning, sizeof(warning), "%s", line);
    }
}

static int set_up(void **state)
{
    (void)state;
    ferry_log_set(keep_warning, NULL);
    warnings = 0;
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    ferry_log_set(NULL, NULL);
    return 0;
}

/* Parameters of the given sizes in bytes, named t0, t1, … */
static size_t sized(const int64_t *sizes, size_t n, ferry_param_meta *out)
{
    static char names[MOST][24];
    for (size_t i = 0; i < n; i++) {
        snprintf(names[i], sizeof(names[i]), "t%zu", i);
        ferry_param_meta m = {names[i], FERRY_DTYPE_U8, 1, {sizes[i]}};
        out[i] = m;
    }
    return n;
}

static void check(ferry__cut_rule rule, uint64_t limit, const int64_t *sizes,
                  size_t n, const size_t *counts, const uint64_t *bytes,
                  size_t n_buffers)
{
    ferry_param_meta m[MOST];
    ferry__cuts cuts;
    unsigned char text[16 * MOST];
    uint64_t peak = 0;
    sized(sizes, n, m);
    assert_int_equal(ferry__cuts_make(rule, m, n, limit, &cuts), FERRY_OK);
    assert_int_equal(cuts.n_buffers, n_buffers);
    for (size_t i = 0; i < n_buffers; i++) {
        if (counts)
            assert_int_equal(cuts.counts[i], counts[i]);
        assert_int_equal(cuts.bytes[i], bytes[i]);
        peak = bytes[i] > peak ? bytes[i] : peak;
        for (int k = 0; k < 8; k++) {
            text[i * 16 + k] = (unsigned char)(cuts.counts[i] >> (8 * k));
            text[i * 16 + 8 + k] = (unsigned char)(bytes[i] >> (8 * k));
        }
    }
    assert_int_equal(cuts.peak_bytes, peak);
    assert_true(cuts.digest == ferry__xxh3(text, 16 * n_buffers));
    ferry__cuts_free(&cuts);
    assert_null(cuts.counts);
}

static void o26_append_then_flush_above_the_limit(void **state)
{
    (void)state;
    const int64_t sizes[] = {4, 4, 4, 11, 0, 1};
    const size_t counts[] = {3, 1, 2};
    const uint64_t bytes[] = {12, 11, 1};
    check(FERRY__CUT_EXCEED, 10, sizes, 6, counts, bytes, 3);
}

static void o26_another_limit_gives_another_digest(void **state)
{
    (void)state;
    const int64_t sizes[] = {4, 4, 4, 11, 0, 1};
    ferry_param_meta m[MOST];
    ferry__cuts a, b;
    sized(sizes, 6, m);
    assert_int_equal(ferry__cuts_make(FERRY__CUT_EXCEED, m, 6, 10, &a), 0);
    assert_int_equal(ferry__cuts_make(FERRY__CUT_EXCEED, m, 6, 5, &b), 0);
    assert_true(a.digest != b.digest);
    ferry__cuts_free(&a);
    ferry__cuts_free(&b);
    assert_int_equal(ferry__cuts_make(FERRY__CUT_FIT, m, 6, 0, &a),
                     FERRY_EINVAL);
}

static void o27_peak_is_limit_plus_largest_and_is_warned_about(void **state)
{
    (void)state;
    const int64_t sizes[] = {15, 100, 100};
    const size_t counts[] = {2, 1};
    const uint64_t bytes[] = {115, 100};
    warnings = 0;
    check(FERRY__CUT_EXCEED, 16, sizes, 3, counts, bytes, 2);
    assert_int_equal(warnings, 1);
    assert_non_null(strstr(warning, "parameter t1"));
    assert_non_null(strstr(warning, "100"));
    assert_non_null(strstr(warning, "16"));
}

static void a_limit_that_is_just_reached_does_not_flush(void **state)
{
    (void)state;
    const int64_t sizes[] = {5, 5, 1};
    const uint64_t one[] = {11}, two[] = {10, 1};
    const size_t all[] = {3}, split[] = {2, 1};
    check(FERRY__CUT_EXCEED, 10, sizes, 3, all, one, 1);
    check(FERRY__CUT_FIT, 10, sizes, 3, split, two, 2);
}

static void fit_never_passes_the_limit_but_for_one_tensor_alone(void **state)
{
    (void)state;
    const int64_t sizes[] = {4, 4, 4, 11, 0, 1, 10, 0};
    const size_t counts[] = {2, 1, 1, 2, 2};
    const uint64_t bytes[] = {8, 4, 11, 1, 10};
    check(FERRY__CUT_FIT, 10, sizes, 8, counts, bytes, 5);
    const int64_t big[] = {0, 11, 3}; /* nothing to flush before it */
    const size_t big_counts[] = {2, 1};
    const uint64_t big_bytes[] = {11, 3};
    check(FERRY__CUT_FIT, 10, big, 3, big_counts, big_bytes, 2);
}

static void nothing_makes_no_buffers(void **state)
{
    (void)state;
    const int64_t zeros[] = {0, 0};
    const size_t counts[] = {2};
    const uint64_t bytes[] = {0};
    check(FERRY__CUT_EXCEED, 10, NULL, 0, NULL, NULL, 0);
    check(FERRY__CUT_EXCEED, 10, zeros, 2, counts, bytes, 1); /* O-24 */
}

/* The checkpoint of the live runs, in named_parameters order. */
static void cuts_equal_those_of_a_live_vllm(void **state)
{
    (void)state;
    const int64_t sizes[] = {40960, 8192,  4096,  4096, 8192, 16384, 16384,
                             16384, 128,   128,   8192, 4096, 4096,  8192,
                             16384, 16384, 16384, 128,  128,  128,   40960};
    const uint64_t at40000[] = {40960, 40960, 41216, 49152, 57728};
    const uint64_t at70000[] = {81920, 73984, 74112};
    const uint64_t whole[] = {230016};
    check(FERRY__CUT_EXCEED, 40000, sizes, 21, NULL, at40000, 5);
    check(FERRY__CUT_EXCEED, 70000, sizes, 21, NULL, at70000, 3);
    check(FERRY__CUT_EXCEED, 1u << 30, sizes, 21, NULL, whole, 1);
    /* In safetensors order: lm_head, embed, then each layer by name. */
    const int64_t by_name[] = {40960, 40960, 128,  16384, 16384, 16384, 128,
                               4096,  8192,  8192, 4096,  128,   16384, 16384,
                               16384, 128,   4096, 8192,  8192,  4096,  128};
    const uint64_t named[] = {40960, 40960, 49280, 41216, 45184, 12416};
    check(FERRY__CUT_EXCEED, 40000, by_name, 21, NULL, named, 6);
}

static void totals_beyond_64_bits_are_refused(void **state)
{
    (void)state;
    ferry_param_meta m[3];
    ferry__cuts cuts;
    for (int i = 0; i < 3; i++) {
        ferry_param_meta one = {"t", FERRY_DTYPE_U8, 1, {INT64_MAX}};
        m[i] = one;
    }
    assert_int_equal(
        ferry__cuts_make(FERRY__CUT_EXCEED, m, 3, UINT64_MAX, &cuts),
        FERRY_EOVERFLOW);
}

static void memory_running_out_leaks_nothing(void **state)
{
    (void)state;
    const int64_t sizes[] = {4, 4, 4, 11, 0, 1};
    ferry_param_meta m[MOST];
    ferry__cuts cuts;
    for (int rule = 0; rule < 2; rule++) {
        sized(sizes, 6, m);
        for (uint64_t k = 1; k < 50; k++) {
            ferry__fault_arm(FERRY__FAULT_ALLOC, k);
            ferry_status st =
                ferry__cuts_make((ferry__cut_rule)rule, m, 6, 5, &cuts);
            ferry__fault_arm(FERRY__FAULT_ALLOC, 0);
            if (st == FERRY_OK) {
                assert_true(k > 2);
                ferry__cuts_free(&cuts);
                break;
            }
            assert_int_equal(st, FERRY_ENOMEM);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(o26_append_then_flush_above_the_limit),
        cmocka_unit_test(o26_another_limit_gives_another_digest),
        cmocka_unit_test(o27_peak_is_limit_plus_largest_and_is_warned_about),
        cmocka_unit_test(a_limit_that_is_just_reached_does_not_flush),
        cmocka_unit_test(fit_never_passes_the_limit_but_for_one_tensor_alone),
        cmocka_unit_test(nothing_makes_no_buffers),
        cmocka_unit_test(cuts_equal_those_of_a_live_vllm),
        cmocka_unit_test(totals_beyond_64_bits_are_refused),
        cmocka_unit_test(memory_running_out_leaks_nothing),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
