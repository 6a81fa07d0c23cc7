/* SPDX-License-Identifier: Apache-2.0 */
/* The helper thread of the control plane: results cross with their line, a
 * stuck call is walked away from, nothing leaks (D5, O-09). */
#include "core/control_call.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/alloc.h"
#include "base/clock.h"

static _Atomic int sleep_ms, entered, left, canceled;
static _Atomic int answer; /* a ferry_status */
static char seen[64];

static ferry_status common(const char *text)
{
    snprintf(seen, sizeof(seen), "%s", text != NULL ? text : "(null)");
    atomic_fetch_add(&entered, 1);
    for (int ms = 0; ms < atomic_load(&sleep_ms) && !atomic_load(&canceled);
         ms += 2)
        ferry__sleep_ms(2);
    atomic_fetch_add(&left, 1);
    if (atomic_load(&answer) < 0)
        return ferry_fail((ferry_status)atomic_load(&answer),
                          "replica 1: it said no");
    return FERRY_OK;
}

static ferry_status with_text(void *self, const char *text)
{
    (void)self;
    return common(text);
}

static ferry_status plain(void *self)
{
    (void)self;
    return common("plain");
}

static void cancel(void *self)
{
    (void)self;
    atomic_store(&canceled, 1);
}

static const ferry_client_ops ops = {
    .size = sizeof(ferry_client_ops),
    .kind = "slow",
    .init_weight_transfer_engine = with_text,
    .start_weight_update = plain,
    .update_weights = with_text,
    .finish_weight_update = with_text,
    .cancel = cancel,
    .abort_weight_update = plain,
};

static ferry__control_call *make(void)
{
    ferry_client client = {&ops, NULL};
    ferry__control_call *c;

    atomic_store(&sleep_ms, 0);
    atomic_store(&entered, 0);
    atomic_store(&left, 0);
    atomic_store(&canceled, 0);
    answer = FERRY_OK;
    assert_int_equal(ferry__control_call_create(&client, "test", &c), 0);
    return c;
}

static void results_cross_the_thread_with_their_line(void **state)
{
    ferry__control_call *c = make();
    char text[16] = "{\"a\":1}";

    (void)state;
    assert_false(ferry__control_call_in_flight(c));
    assert_int_equal(ferry__control_call_poll(c), FERRY_OK);
    assert_int_equal(ferry__control_call_begin(c, FERRY__CALL_UPDATE, text), 0);
    memset(text, 'x', sizeof(text)); /* it was copied */
    assert_true(ferry__control_call_wait(c, 2000));
    assert_string_equal(seen, "{\"a\":1}");
    assert_true(ferry__control_call_in_flight(c)); /* not taken yet */
    assert_int_equal(ferry__control_call_begin(c, FERRY__CALL_UPDATE, "{}"),
                     FERRY_EBUSY);
    assert_int_equal(ferry__control_call_poll(c), FERRY_OK);
    assert_false(ferry__control_call_in_flight(c));

    answer = FERRY_EMISMATCH;
    assert_int_equal(ferry__control_call_begin(c, FERRY__CALL_FINISH, NULL), 0);
    assert_true(ferry__control_call_wait(c, 2000));
    assert_string_equal(seen, "(null)");
    ferry_fail(FERRY_EINVAL, "something else");
    assert_int_equal(ferry__control_call_peek(c), FERRY_EMISMATCH);
    assert_string_equal(ferry_last_error(), "replica 1: it said no");
    assert_int_equal(ferry__control_call_poll(c), FERRY_EMISMATCH);
    assert_int_equal(ferry__control_call_poll(c), FERRY_OK);

    /* What says "it still runs" is never a result. */
    answer = FERRY_EBUSY;
    assert_int_equal(ferry__control_call_begin(c, FERRY__CALL_START, NULL), 0);
    assert_true(ferry__control_call_wait(c, 2000));
    assert_int_equal(ferry__control_call_poll(c), FERRY_EPEER);
    ferry__control_call_destroy(&c);
    assert_null(c);
    ferry__control_call_destroy(&c);
}

static void a_running_call_is_told_apart_and_canceled(void **state)
{
    ferry__control_call *c = make();
    int64_t from = ferry__now_ns();

    (void)state;
    atomic_store(&sleep_ms, 20000);
    assert_int_equal(ferry__control_call_begin(c, FERRY__CALL_UPDATE, "{}"), 0);
    assert_false(ferry__control_call_wait(c, 20));
    assert_true(ferry__control_call_running(c));
    assert_int_equal(ferry__control_call_kind_of(c), FERRY__CALL_UPDATE);
    assert_int_equal(ferry__control_call_poll(c), FERRY_EBUSY);
    assert_int_equal(ferry__control_call_peek(c), FERRY_EBUSY);
    ferry__control_call_cancel(c);
    assert_true(ferry__control_call_wait(c, 2000));
    assert_true(ferry__now_ns() - from < 1500000000);
    ferry__control_call_destroy(&c);
}

/* D5: the owner goes, the call ends later, the last of the two frees. */
static void destroy_never_waits_for_a_stuck_call(void **state)
{
    ferry__control_call *c = make();
    int64_t from;

    (void)state;
    atomic_store(&sleep_ms, 300);
    assert_int_equal(ferry__control_call_begin(c, FERRY__CALL_UPDATE, "{}"), 0);
    while (atomic_load(&entered) == 0)
        ferry__sleep_ms(1);
    from = ferry__now_ns();
    ferry__control_call_destroy(&c);
    assert_true(ferry__now_ns() - from < 200000000);
    assert_int_equal(atomic_load(&left), 0);
    while (atomic_load(&left) == 0)
        ferry__sleep_ms(1);
    ferry__sleep_ms(20); /* the thread frees what it had */
}

static void what_a_client_lacks_is_said(void **state)
{
    ferry__control_call *c = make();

    (void)state;
    assert_int_equal(
        ferry__control_call_begin(c, FERRY__CALL_START_DRAFT, NULL), 0);
    assert_true(ferry__control_call_wait(c, 2000));
    assert_int_equal(ferry__control_call_poll(c), FERRY_ENOTSUP);
    assert_non_null(strstr(ferry_last_error(),
                           "client slow has no start_draft_weight_update"));
    ferry__control_call_destroy(&c);
}

static void a_failing_thread_or_allocation_is_clean(void **state)
{
    ferry__control_call *c = make();

    (void)state;
    ferry__fault_arm(FERRY__FAULT_THREAD, 1);
    assert_true(ferry__control_call_begin(c, FERRY__CALL_START, NULL) < 0);
    ferry__fault_arm(FERRY__FAULT_THREAD, 0);
    assert_false(ferry__control_call_in_flight(c));
    ferry__fault_arm(FERRY__FAULT_ALLOC, 1);
    assert_int_equal(ferry__control_call_begin(c, FERRY__CALL_UPDATE, "{}"),
                     FERRY_ENOMEM);
    ferry__fault_arm(FERRY__FAULT_ALLOC, 0);
    assert_int_equal(ferry__control_call_begin(c, FERRY__CALL_START, NULL), 0);
    assert_true(ferry__control_call_wait(c, 2000));
    assert_int_equal(ferry__control_call_poll(c), FERRY_OK);
    ferry__control_call_destroy(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(results_cross_the_thread_with_their_line),
        cmocka_unit_test(a_running_call_is_told_apart_and_canceled),
        cmocka_unit_test(destroy_never_waits_for_a_stuck_call),
        cmocka_unit_test(what_a_client_lacks_is_said),
        cmocka_unit_test(a_failing_thread_or_allocation_is_clean),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
