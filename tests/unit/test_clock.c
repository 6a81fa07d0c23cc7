/* SPDX-License-Identifier: Apache-2.0 */
/* Monotonic time and deadlines. */
#include "base/clock.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>

#include <cmocka.h>
#include <signal.h>
#include <sys/time.h>

static void deadlines_count_down_and_pass(void **state)
{
    ferry__deadline d = ferry__deadline_in(30);
    ferry__deadline now = ferry__deadline_in(0);
    ferry__deadline past = ferry__deadline_in(-5);

    (void)state;
    assert_int_equal(d.bound_ms, 30);
    assert_in_range(ferry__deadline_left_ms(&d), 1, 30);
    assert_true(ferry__deadline_passed(&now));
    assert_true(ferry__deadline_passed(&past));
    assert_int_equal(ferry__deadline_left_ms(&past), 0);
    ferry__sleep_ms(35);
    assert_true(ferry__deadline_passed(&d));
    assert_int_equal(ferry__deadline_left_ms(&d), 0);
}

static void what_is_left_is_rounded_up(void **state)
{
    ferry__deadline d = {ferry__now_ns() + 900000000, 900};

    (void)state;
    d.at_ns += 1; /* never a whole number of milliseconds for long */
    assert_in_range(ferry__deadline_left_ms(&d), 1, 901);
    d.at_ns = ferry__now_ns() + 400000;
    assert_in_range(ferry__deadline_left_ms(&d), 0, 1);
}

static void a_far_deadline_does_not_overflow(void **state)
{
    ferry__deadline d = ferry__deadline_in(INT64_MAX);

    (void)state;
    assert_true(d.at_ns == INT64_MAX);
    assert_false(ferry__deadline_passed(&d));
    assert_true(ferry__deadline_left_ms(&d) > 0);
}

static void timespecs_hold_the_same_time(void **state)
{
    struct timespec t = ferry__timespec_at(INT64_C(5000000007));

    (void)state;
    assert_int_equal(t.tv_sec, 5);
    assert_int_equal(t.tv_nsec, 7);
}

static void on_alarm(int signal)
{
    (void)signal;
}

static void sleep_survives_signals(void **state)
{
    struct sigaction action = {.sa_handler = on_alarm};
    struct itimerval often = {{0, 3000}, {0, 3000}}, never = {{0, 0}, {0, 0}};
    int64_t before;

    (void)state;
    sigaction(SIGALRM, &action, NULL);
    setitimer(ITIMER_REAL, &often, NULL);
    before = ferry__now_ns();
    ferry__sleep_ms(40);
    setitimer(ITIMER_REAL, &never, NULL);
    assert_true(ferry__now_ns() - before >= 40000000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(deadlines_count_down_and_pass),
        cmocka_unit_test(what_is_left_is_rounded_up),
        cmocka_unit_test(a_far_deadline_does_not_overflow),
        cmocka_unit_test(timespecs_hold_the_same_time),
        cmocka_unit_test(sleep_survives_signals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
