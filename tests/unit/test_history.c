/* SPDX-License-Identifier: Apache-2.0 */
/* The record of rounds: what is kept of each, and how much.
 * ctest: link=worker */
#include "serve/history.h"

#include "base/clock.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

static ferry__history h;

static int open_history(void **state)
{
    (void)state;
    return ferry__history_init(&h, 2, 1) == FERRY_OK ? 0 : -1;
}

static int close_history(void **state)
{
    (void)state;
    ferry__history_free(&h);
    return 0;
}

static void one_call(ferry__rank_kind kind, int32_t n_answers)
{
    ferry__history_call(&h, kind);
    for (int32_t i = 0; i < n_answers; i++)
        ferry__history_answer(&h, i);
    ferry__history_called(&h);
}

/* The last round that ended; borrowed from *out_all, which is owned. */
static json_t *last_round(json_t **out_all)
{
    *out_all = ferry__history_rounds(&h, 100, true);
    return json_array_get(*out_all, json_array_size(*out_all) - 1);
}

static double number(json_t *o, const char *key)
{
    json_t *value = json_object_get(o, key);

    assert_true(json_is_number(value));
    return json_number_value(value);
}

static void later_updates_join_so_that_a_round_stays_small(void **state)
{
    ferry__round_sums sums;
    json_t *all, *calls, *call;
    size_t i, updates = 0;
    json_int_t counted = 0;
    double ms = 0;

    (void)state;
    ferry__history_begin(&h);
    one_call(FERRY__RANK_START, 2);
    for (int k = 0; k < 1000; k++)
        one_call(FERRY__RANK_UPDATE, 2);
    one_call(FERRY__RANK_PREPARE, 2);
    one_call(FERRY__RANK_COMMIT, 2);
    ferry__history_end(&h, true, "v", NULL, &sums);
    calls = json_object_get(last_round(&all), "calls");
    assert_true(json_array_size(calls) <= FERRY__HISTORY_CALLS);
    json_array_foreach(calls, i, call)
    {
        const char *phase = json_string_value(json_object_get(call, "phase"));

        if (phase[0] != 'u')
            continue;
        updates++;
        counted += json_integer_value(json_object_get(call, "count"));
        ms += number(call, "ms");
    }
    assert_true(updates > 1);
    assert_int_equal(counted, 1000);
    assert_true(fabs(ms * 1e-3 - sums.phase_seconds[FERRY__PHASE_UPDATE]) <
                1e-9);
    json_decref(all);
}

static void a_rank_that_did_not_answer_is_null(void **state)
{
    ferry__round_sums sums;
    json_t *all, *o, *call, *ranks;
    json_t *status =
        json_pack("{s:{s:i,s:i,s:i},s:s}", "counters", "bytes_declared", 10,
                  "bytes_received", 7, "bytes_loaded", 5, "path", "ring");

    (void)state;
    ferry__history_begin(&h);
    one_call(FERRY__RANK_UPDATE, 1);
    ferry__history_rank(&h, 0, status);
    ferry__history_end(&h, false, NULL, "rank 1 died", &sums);
    o = last_round(&all);
    assert_string_equal(json_string_value(json_object_get(o, "result")),
                        "failed");
    assert_string_equal(json_string_value(json_object_get(o, "error")),
                        "rank 1 died");
    assert_string_equal(json_string_value(json_object_get(o, "path")), "ring");
    assert_true(json_is_null(json_object_get(o, "version")));
    call = json_array_get(json_object_get(o, "calls"), 0);
    ranks = json_object_get(call, "ranks_ms");
    assert_true(json_is_real(json_array_get(ranks, 0)));
    assert_true(json_is_null(json_array_get(ranks, 1)));
    ranks = json_object_get(o, "ranks");
    assert_true(
        json_is_true(json_object_get(json_array_get(ranks, 0), "answered")));
    assert_true(
        json_is_false(json_object_get(json_array_get(ranks, 1), "answered")));
    assert_int_equal(sums.bytes_declared, 10);
    assert_int_equal(sums.bytes_received, 7);
    assert_int_equal(sums.bytes_loaded, 5);
    json_decref(all);
}

static void a_stop_is_counted_once_and_up_to_the_end(void **state)
{
    ferry__round_sums sums;
    json_t *running;

    (void)state;
    ferry__history_begin(&h);
    ferry__history_stop(&h, true);
    ferry__sleep_ms(2);
    ferry__history_stop(&h, true);
    running = ferry__history_running(&h);
    assert_true(json_is_true(json_object_get(running, "stopped")));
    assert_true(number(running, "stop_ms") >= 2);
    json_decref(running);
    ferry__history_stop(&h, false);
    ferry__history_stop(&h, true);
    ferry__sleep_ms(2);
    ferry__history_end(&h, true, NULL, NULL, &sums);
    ferry__history_stop(&h, false);
    assert_true(sums.stop_seconds >= 4e-3);
    /* Nothing of it is left for the next round. */
    ferry__history_begin(&h);
    ferry__history_end(&h, true, NULL, NULL, &sums);
    assert_true(sums.stop_seconds == 0);
}

static void calls_outside_a_round_leave_no_trace(void **state)
{
    ferry__round_sums sums;
    json_t *all, *running;

    (void)state;
    one_call(FERRY__RANK_UPDATE, 2);
    ferry__history_begin(&h);
    one_call(FERRY__RANK_CHECKSUM, 2);
    running = ferry__history_running(&h);
    assert_int_equal(json_array_size(json_object_get(running, "calls")), 0);
    json_decref(running);
    ferry__history_forget(&h);
    ferry__history_end(&h, true, NULL, NULL, &sums);
    all = ferry__history_rounds(&h, 100, true);
    assert_int_equal(json_array_size(all), 0);
    json_decref(all);
    assert_false(ferry__history_is_open(&h));
    running = ferry__history_running(&h);
    assert_true(json_is_null(running));
    json_decref(running);
    /* A round that was none takes no number. */
    ferry__history_begin(&h);
    running = ferry__history_running(&h);
    assert_int_equal(number(running, "number"), 1);
    json_decref(running);
}

static void only_the_last_rounds_are_kept(void **state)
{
    ferry__round_sums sums;
    json_t *all, *o;

    (void)state;
    for (int i = 0; i < FERRY__HISTORY_ROUNDS + 3; i++) {
        ferry__history_begin(&h);
        ferry__history_end(&h, true, NULL, NULL, &sums);
    }
    o = last_round(&all);
    assert_int_equal(json_array_size(all), FERRY__HISTORY_ROUNDS);
    assert_int_equal(number(o, "number"), FERRY__HISTORY_ROUNDS + 3);
    assert_int_equal(number(json_array_get(all, 0), "number"), 4);
    assert_non_null(json_object_get(o, "ranks"));
    json_decref(all);
    all = ferry__history_rounds(&h, 2, false);
    assert_int_equal(json_array_size(all), 2);
    o = json_array_get(all, 1);
    assert_int_equal(number(o, "number"), FERRY__HISTORY_ROUNDS + 3);
    assert_null(json_object_get(o, "ranks"));
    assert_null(json_object_get(o, "calls"));
    json_decref(all);
    /* The short copies left the record whole. */
    o = last_round(&all);
    assert_non_null(json_object_get(o, "calls"));
    json_decref(all);
}

#define TEST(name)                                                             \
    cmocka_unit_test_setup_teardown(name, open_history, close_history)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(later_updates_join_so_that_a_round_stays_small),
        TEST(a_rank_that_did_not_answer_is_null),
        TEST(a_stop_is_counted_once_and_up_to_the_end),
        TEST(calls_outside_a_round_leave_no_trace),
        TEST(only_the_last_rounds_are_kept),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
