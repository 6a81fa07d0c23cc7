/* SPDX-License-Identifier: Apache-2.0 */
/* A round that fails: whose error surfaces, what is left behind, which bound
 * ended it (D5, J1; O-09, O-12). */
#include "harness/trainer_rig.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "harness/expect.h"

/* ---- failures ---- */

static void o09_the_server_s_own_text_surfaces(void **state)
{
    int64_t from;
    scene s;

    (void)state;
    scene_open(&s, "{\"rank\":0}");
    s.desk.start_status = FERRY_EPEER;
    refused(ferry_trainer_send_weights(s.trainer, NULL), FERRY_EPEER,
            "replica 0: 500 before any byte");
    s.desk.start_status = FERRY_OK;
    s.desk.update_status = FERRY_EPEER;
    from = ferry__now_ns();
    refused(ferry_trainer_send_weights(s.trainer, NULL), FERRY_EPEER,
            "replica 0: tensor 3 is bad");
    assert_true(ferry__now_ns() - from < 2000000000);
    assert_int_equal(hands_ended_with, FERRY_EPEER);
    s.desk.update_status = FERRY_OK;
    ok(ferry_trainer_send_weights(s.trainer, NULL));
    scene_close(&s);
}

static ferry_status lose_the_wire(const ferry_trainer_host *host,
                                  ferry_trainer_context *ctx)
{
    FERRY_TRY(host->update_begin(ctx, "{\"x\":1}"));
    return (host->fail)(FERRY_ECONN, "closed by peer");
}

static void o09_the_wire_breaks_before_the_server_s_text_comes(void **state)
{
    scene s;

    (void)state;
    scene_open(&s, "{\"rank\":0}");
    hands_on_send = lose_the_wire;
    s.desk.update_hangs_ms = 60;
    s.desk.update_status = FERRY_EPEER;
    refused(ferry_trainer_send_weights(s.trainer, NULL), FERRY_EPEER,
            "replica 0: tensor 3 is bad");
    scene_close(&s);
}

static ferry_status own_fault(const ferry_trainer_host *host,
                              ferry_trainer_context *ctx)
{
    FERRY_TRY(host->update_begin(ctx, "{\"x\":1}"));
    return (host->fail)(FERRY_EMISMATCH, "the source lied");
}

static ferry_status own_fault_late(const ferry_trainer_host *host,
                                   ferry_trainer_context *ctx)
{
    FERRY_TRY(host->update_begin(ctx, "{\"x\":1}"));
    ferry__sleep_ms(60);
    return (host->fail)(FERRY_EMISMATCH, "the source lied");
}

/* A cause found on this side stands, whatever the peers say of it. */
static void d5_the_sender_s_own_cause_is_not_masked(void **state)
{
    scene s;

    (void)state;
    scene_open(&s, "{\"rank\":0}");
    hands_on_send = own_fault_late;
    s.desk.update_status = FERRY_EPEER;
    refused(ferry_trainer_send_weights(s.trainer, NULL), FERRY_EMISMATCH,
            "the source lied");
    scene_close(&s);
}

/* D5: no join on a call whose peer is blocked; the call is canceled, the
 * peers are told, the next round works. */
static void d5_an_error_surfaces_at_once_while_the_call_hangs(void **state)
{
    int64_t from;
    scene s;

    (void)state;
    scene_open(&s, "{\"rank\":0}");
    hands_on_send = own_fault;
    s.desk.update_hangs_ms = 20000;
    from = ferry__now_ns();
    refused(ferry_trainer_send_weights(s.trainer, NULL), FERRY_EMISMATCH,
            "the source lied");
    assert_true(ferry__now_ns() - from < 500000000);
    assert_non_null(strchr(s.desk.calls, 'c'));
    assert_string_equal(s.desk.calls + strlen(s.desk.calls) - 1, "a");
    assert_int_equal(hands_ended_with, FERRY_EMISMATCH);
    atomic_store(&s.desk.canceled, false);
    s.desk.update_hangs_ms = 0;
    hands_on_send = hands_drive_and_update;
    ok(ferry_trainer_send_weights(s.trainer, NULL));
    scene_close(&s);
}

static void d5_a_call_that_cannot_be_canceled_is_left_behind(void **state)
{
    ferry_client_ops ops = desk_ops;
    int64_t from;
    scene s;

    (void)state;
    scene_open(&s, NULL);
    ops.cancel = NULL;
    ops.size = offsetof(ferry_client_ops, cancel); /* the four, no more */
    s.client.ops = &ops;
    ok(ferry_trainer_init_dict("hands", "{\"rank\":0}", &s.client, &s.source,
                               &s.trainer));
    hands_on_send = own_fault;
    s.desk.update_hangs_ms = 900;
    from = ferry__now_ns();
    refused(ferry_trainer_send_weights(s.trainer, NULL), FERRY_EMISMATCH,
            "the source lied");
    assert_true(ferry__now_ns() - from < 800000000);
    /* The next round waits for it, as the client takes one call at a time. */
    hands_on_send = hands_drive_and_update;
    ok(ferry_trainer_send_weights(s.trainer, NULL));
    scene_close(&s);
}

static ferry_status wait_for_ever(const ferry_trainer_host *host,
                                  ferry_trainer_context *ctx)
{
    for (;;) {
        FERRY_TRY(host->check(ctx, "waiting for worker 3"));
        ferry__sleep_ms(5);
    }
}

static ferry_status begin_and_wait(const ferry_trainer_host *host,
                                   ferry_trainer_context *ctx)
{
    FERRY_TRY(host->update_begin(ctx, "{\"x\":1}"));
    return wait_for_ever(host, ctx);
}

static void j1_bounds_hold_and_are_named(void **state)
{
    int64_t from = ferry__now_ns();
    scene s;

    (void)state;
    scene_open(&s, "{\"rank\":0,\"no_progress_ms\":100}");
    hands_on_send = wait_for_ever;
    refused(ferry_trainer_send_weights(s.trainer, NULL), FERRY_ENOPROGRESS,
            "no progress for 100 ms while waiting for worker 3");
    scene_close(&s);
    scene_open(&s, "{\"rank\":0,\"deadline_ms\":100}");
    s.desk.update_hangs_ms = 20000;
    refused(ferry_trainer_send_weights(s.trainer, NULL), FERRY_ETIMEOUT,
            "deadline of 100 ms passed while waiting for update_weights");
    scene_close(&s);
    scene_open(&s, "{\"rank\":0}");
    /* The control plane's failure hands_ends a wait of the data plane. */
    hands_on_send = begin_and_wait;
    s.desk.update_hangs_ms = 30;
    s.desk.update_status = FERRY_EPEER;
    refused(ferry_trainer_send_weights(s.trainer, NULL), FERRY_EPEER,
            "tensor 3 is bad");
    scene_close(&s);
    assert_true(ferry__now_ns() - from < 4000000000);
}

static void *cancel_later(void *arg)
{
    ferry__sleep_ms(50);
    ferry_trainer_cancel(arg);
    return NULL;
}

static void cancel_ends_a_round_and_the_next_works(void **state)
{
    pthread_t thread;
    scene s;

    (void)state;
    scene_open(&s, "{\"rank\":0}");
    hands_on_send = wait_for_ever;
    pthread_create(&thread, NULL, cancel_later, s.trainer);
    refused(ferry_trainer_send_weights(s.trainer, NULL), FERRY_ECANCELED,
            "canceled while waiting for worker 3");
    pthread_join(thread, NULL);
    ferry_trainer_cancel(s.trainer); /* nothing runs: no effect later */
    hands_on_send = hands_drive_and_update;
    ok(ferry_trainer_send_weights(s.trainer, NULL));
    scene_close(&s);
}

/* ---- faults ---- */

static void a_forked_child_is_refused_not_hung(void **state)
{
    scene s;
    pid_t child;
    int status;

    (void)state;
    scene_open(&s, "{\"rank\":0}");
    ok(ferry_trainer_send_weights(s.trainer, NULL));
    child = fork();
    if (child == 0) {
        alarm(5);
        ferry_status st = ferry_trainer_send_weights(s.trainer, NULL);

        ferry_trainer_shutdown(&s.trainer);
        _exit(st == FERRY_ENOTSUP ? 0 : 1);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    ok(ferry_trainer_send_weights(s.trainer, NULL));
    scene_close(&s);
}

static void thread_and_memory_failures_are_clean(void **state)
{
    ferry_status st = FERRY_ENOMEM;
    scene s;

    (void)state;
    scene_open(&s, NULL);
    ferry__fault_arm(FERRY__FAULT_THREAD, 1);
    assert_true(ferry_trainer_init_dict("hands", "{\"rank\":0}", &s.client,
                                        &s.source, &s.trainer) < 0);
    ferry__fault_arm(FERRY__FAULT_THREAD, 0);
    for (uint64_t n = 1; st < 0 && n < 500; n++) {
        ferry__fault_arm(FERRY__FAULT_ALLOC, n);
        st = ferry_trainer_init_dict("hands", "{\"rank\":0}", &s.client,
                                     &s.source, &s.trainer);
        if (st == FERRY_OK) {
            st = ferry_trainer_send_weights(s.trainer, NULL);
            ferry_trainer_shutdown(&s.trainer);
        }
        ferry__fault_arm(FERRY__FAULT_ALLOC, 0);
        assert_true(st == FERRY_OK || st == FERRY_ENOMEM);
    }
    assert_int_equal(st, FERRY_OK);
    scene_close(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(o09_the_server_s_own_text_surfaces),
        cmocka_unit_test(o09_the_wire_breaks_before_the_server_s_text_comes),
        cmocka_unit_test(d5_the_sender_s_own_cause_is_not_masked),
        cmocka_unit_test(d5_an_error_surfaces_at_once_while_the_call_hangs),
        cmocka_unit_test(d5_a_call_that_cannot_be_canceled_is_left_behind),
        cmocka_unit_test(j1_bounds_hold_and_are_named),
        cmocka_unit_test(cancel_ends_a_round_and_the_next_works),
        cmocka_unit_test(a_forked_child_is_refused_not_hung),
        cmocka_unit_test(thread_and_memory_failures_are_clean),
    };

    return cmocka_run_group_tests(tests, scene_engines, NULL);
}
