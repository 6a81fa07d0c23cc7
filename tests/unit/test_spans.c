/* SPDX-License-Identifier: Apache-2.0 */
/* Stretches of work: bounded, in order, and no time lost. */
#include "core/spans.h"

#include "base/clock.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

static ferry__spans spans;
static ferry__span out[FERRY__SPANS_MAX];

static void short_pauses_do_not_end_a_stretch(void **state)
{
    (void)state;
    ferry__spans_init(&spans, 32);
    ferry__spans_put(&spans, FERRY__SPAN_LOAD, 1000, 2000);
    ferry__spans_put(&spans, FERRY__SPAN_STEP, 2000, 2500);
    ferry__spans_put(&spans, FERRY__SPAN_LOAD, 2500, 4000);
    ferry__spans_put(&spans, FERRY__SPAN_LOAD, 9000000, 9000100);
    assert_int_equal(ferry__spans_copy(&spans, out, FERRY__SPANS_MAX), 3);
    assert_int_equal(out[0].kind, FERRY__SPAN_LOAD);
    assert_int_equal(out[0].begin_ns, 1000);
    assert_int_equal(out[0].end_ns, 4000);
    assert_int_equal(out[0].busy_ns, 2500);
    assert_int_equal(out[0].count, 2);
    assert_int_equal(out[1].kind, FERRY__SPAN_STEP);
    assert_int_equal(out[2].begin_ns, 9000000);
    ferry__spans_clear(&spans);
    assert_int_equal(ferry__spans_copy(&spans, out, FERRY__SPANS_MAX), 0);
    ferry__spans_destroy(&spans);
}

/* A million pieces with pauses of every length stay within the bound, and
 * their busy times add up. */
static void a_full_list_joins_its_nearest(void **state)
{
    int64_t at = 0, busy[FERRY__SPAN_KINDS] = {0}, sums[FERRY__SPAN_KINDS];
    uint64_t seed = 7, counts = 0;
    size_t n;

    (void)state;
    ferry__spans_init(&spans, 32);
    for (int i = 0; i < 1000000; i++) {
        int kind = i % FERRY__SPAN_KINDS;
        int64_t length;

        seed = seed * 6364136223846793005u + 1442695040888963407u;
        length = (int64_t)(seed >> 44);
        at += (int64_t)((seed >> 20) & 0xFFFFF) * (i % 97 == 0 ? 1000 : 1);
        ferry__spans_put(&spans, (ferry__span_kind)kind, at, at + length);
        at += length;
        busy[kind] += length;
    }
    n = ferry__spans_copy(&spans, out, FERRY__SPANS_MAX);
    assert_in_range(n, FERRY__SPAN_KINDS, 32);
    memset(sums, 0, sizeof(sums));
    for (size_t i = 0; i < n; i++) {
        sums[out[i].kind] += out[i].busy_ns;
        counts += out[i].count;
        assert_true(out[i].busy_ns <= out[i].end_ns - out[i].begin_ns);
        assert_true(i == 0 || out[i].begin_ns >= out[i - 1].begin_ns);
    }
    assert_int_equal(counts, 1000000);
    assert_memory_equal(sums, busy, sizeof(sums));
    ferry__spans_destroy(&spans);
}

static void work_that_ended_late_joins_all_the_same(void **state)
{
    (void)state;
    ferry__spans_init(&spans, 32);
    ferry__spans_put(&spans, FERRY__SPAN_LOAD, 5000, 6000);
    ferry__spans_put(&spans, FERRY__SPAN_LOAD, 1000, 5500);
    assert_int_equal(ferry__spans_copy(&spans, out, FERRY__SPANS_MAX), 1);
    assert_int_equal(out[0].begin_ns, 1000);
    assert_int_equal(out[0].end_ns, 6000);
    ferry__spans_destroy(&spans);
}

/* As many waits as of a long round: each of the first peers has its own
 * stretches, all others share one kind, and no time is lost. */
static void waits_are_told_apart_by_peer(void **state)
{
    int64_t sums[FERRY__SPANS_PEERS + 1] = {0};
    uint32_t counts[FERRY__SPANS_PEERS + 1] = {0};
    size_t n, limit = 2 * (FERRY__SPAN_KINDS + FERRY__SPANS_PEERS);

    (void)state;
    ferry__spans_init(&spans, limit);
    for (int i = 0; i < 24000; i++) {
        char address[32];

        snprintf(address, sizeof(address), "10.0.0.%d", i % 12);
        ferry__spans_put(&spans, FERRY__SPAN_LOAD, i * INT64_C(1000000),
                         i * INT64_C(1000000) + 1);
        ferry__spans_wait(&spans, i % 12, address, ferry__now_ns() - 2000000);
    }
    ferry__spans_wait(&spans, -1, "", ferry__now_ns() - 2000000);
    n = ferry__spans_copy(&spans, out, FERRY__SPANS_MAX);
    assert_in_range(n, FERRY__SPANS_PEERS + 2, limit);
    for (size_t i = 0; i < n; i++) {
        char address[32] = "";

        if (out[i].kind != FERRY__SPAN_WAIT)
            continue;
        assert_in_range(out[i].peer + 1, 0, FERRY__SPANS_PEERS);
        if (out[i].peer >= 0)
            snprintf(address, sizeof(address), "10.0.0.%d", out[i].peer);
        assert_string_equal(out[i].address, address);
        sums[out[i].peer + 1] += out[i].busy_ns;
        counts[out[i].peer + 1] += out[i].count;
    }
    for (int i = 0; i <= FERRY__SPANS_PEERS; i++) {
        assert_int_equal(counts[i], i == 0 ? 4 * 2000 + 1 : 2000);
        assert_true(sums[i] >= (int64_t)counts[i] * 2000000);
    }
    ferry__spans_destroy(&spans);
}

static void wall_times_are_of_now(void **state)
{
    int64_t now =
        (ferry__now_ns() + ferry__spans_wall_offset_ns()) / INT64_C(1000000000);

    (void)state;
    assert_in_range(now, time(NULL) - 1, time(NULL) + 1);
    for (int i = 0; i < FERRY__SPAN_KINDS; i++)
        assert_true(strlen(ferry__span_name((ferry__span_kind)i)) > 3);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(short_pauses_do_not_end_a_stretch),
        cmocka_unit_test(a_full_list_joins_its_nearest),
        cmocka_unit_test(work_that_ended_late_joins_all_the_same),
        cmocka_unit_test(waits_are_told_apart_by_peer),
        cmocka_unit_test(wall_times_are_of_now),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
