/* SPDX-License-Identifier: Apache-2.0 */
/* The local client, and the `memory` engine over it with planted faults:
 * O-05, O-09, O-12, O-13, O-47 as far as one process shows them. */
#include "harness/fleet.h"
#include "harness/solo.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/clock.h"
#include "harness/expect.h"

static void open_memory(fleet *f, const char *init, ferry_commit commit)
{
    fleet_options o = {.backend = "memory", .init = init, .commit = commit};

    o.has_weights = 1;
    fleet_open(f, &o);
    ok(fleet_connect(f, NULL));
}

static void every_call_reaches_the_worker(void **state)
{
    ferry_worker_options o = FERRY_WORKER_OPTIONS_INIT("probe");
    toy_options t = {.kind = TOY_A};
    const ferry_client_ops *ops;
    ferry_client client;
    char text[4096];
    solo r;

    (void)state;
    solo_open(&r, &o, &t);
    assert_int_equal(ferry_client_local(NULL, &client), FERRY_EINVAL);
    assert_int_equal(ferry_client_local(r.worker, NULL), FERRY_EINVAL);
    ok(ferry_client_local(r.worker, &client));
    ops = client.ops;
    assert_string_equal(ops->kind, "local");
    ok(ops->init_weight_transfer_engine(client.self, "{}"));
    toy_checkpoint_fill(r.checkpoint, 1);
    ok(ops->start_weight_update(client.self));
    ok(ops->update_weights(client.self,
                           solo_update(&r, 0, r.checkpoint->count)));
    ok(ops->finish_weight_update(client.self, "v1"));
    assert_null(toy_differs(r.toy, 1));
    ok(ops->start_weight_update(client.self));
    ok(ops->prepare_weight_update(client.self));
    ok(ops->commit_weight_update(client.self, "v2"));
    ok(ops->start_weight_update(client.self));
    ok(ops->abort_weight_update(client.self));
    ok(ops->abort_weight_update(client.self));
    ops->cancel(client.self);
    assert_int_equal(ops->start_draft_weight_update(client.self),
                     FERRY_ENOTSUP);
    ok(ops->status(client.self, text, sizeof(text)));
    assert_non_null(strstr(text, "\"weight_version\":\"v1\""));
    ferry_client_close(&client);
    assert_null(client.ops);
    solo_close(&r);
}

static void o09_the_worker_s_error_reaches_the_sender(void **state)
{
    int64_t from;
    fleet f;

    (void)state;
    open_memory(&f, "\"fail_at\":3", FERRY_COMMIT_STAGED);
    from = ferry__now_ns();
    refused(fleet_send(&f, 1, NULL), FERRY_EPEER,
            "memory: planted failure at "
            "model.layers.0.self_attn.v_proj.weight");
    assert_true(ferry__now_ns() - from < 2000000000);
    assert_string_equal(fleet_status(f.workers[0], "state"), "failed");
    ok(ferry_worker_may_serve(f.workers[0]));
    fleet_close(&f);
}

static void o12_a_sender_that_fails_leaves_the_worker_free(void **state)
{
    uint64_t sum;
    fleet f;

    (void)state;
    for (int at = 0; at <= 6; at += 3) {
        char init[64];

        snprintf(init, sizeof(init), "\"send_fails_at\":%d,\"per_update\":2",
                 at);
        open_memory(&f, init, FERRY_COMMIT_STAGED);
        sum = toy_sum(f.toys[0]);
        refused(fleet_send(&f, 1, NULL), FERRY_EIO, "planted failure of send");
        assert_string_equal(fleet_status(f.workers[0], "state"), "failed");
        assert_true(toy_sum(f.toys[0]) == sum);
        ok(ferry_worker_start_weight_update(f.workers[0]));
        fleet_close(&f);
    }
}

static void o21_a_worker_that_skips_a_parameter_is_no_success(void **state)
{
    fleet f;

    (void)state;
    open_memory(&f, "\"skip_at\":2", FERRY_COMMIT_STAGED);
    refused(fleet_send(&f, 1, NULL), FERRY_ECOVERAGE,
            "model.layers.0.self_attn.k_proj.weight");
    fleet_close(&f);
}

/* J2: one flipped bit on the way, by each way of handing over. */
static void j2_a_flipped_bit_is_named_before_commit(void **state)
{
    static const char *const modes[] = {"load", "range", "box", "strided"};
    uint64_t sum;
    char init[64];
    fleet f;

    (void)state;
    for (size_t i = 0; i < 4; i++) {
        snprintf(init, sizeof(init), "\"mode\":\"%s\",\"corrupt_at\":5",
                 modes[i]);
        open_memory(&f, init, FERRY_COMMIT_STAGED);
        sum = toy_sum(f.toys[0]);
        refused(fleet_send(&f, 1, "v"), FERRY_EDIGEST,
                "parameter model.layers.0.mlp.gate_proj.weight: box 0");
        assert_true(toy_sum(f.toys[0]) == sum);
        assert_string_equal(fleet_status(f.workers[0], "weight_version"),
                            "null");
        fleet_close(&f);
    }
}

/* O-13 in small: slow parameters within the idle bound succeed, one beyond it
 * fails at about the bound, and says which parameter it waited for. */
static void o13_idle_bound_counts_from_the_last_byte(void **state)
{
    int64_t from;
    fleet f;

    (void)state;
    open_memory(&f, "\"sleep_ms\":20,\"worker_no_progress_ms\":300",
                FERRY_COMMIT_INPLACE);
    ok(fleet_send(&f, 1, NULL));
    assert_null(fleet_differs(&f, 1));
    fleet_close(&f);
    open_memory(&f, "\"sleep_ms\":3000,\"worker_no_progress_ms\":200",
                FERRY_COMMIT_INPLACE);
    from = ferry__now_ns();
    refused(fleet_send(&f, 1, NULL), FERRY_ENOPROGRESS,
            "no progress for 200 ms");
    assert_true(ferry__now_ns() - from < 1500000000);
    fleet_close(&f);
}

static void o05_o59_many_rounds_stay_steady(void **state)
{
    int fds = 0;
    fleet f;

    (void)state;
    open_memory(&f, "\"per_update\":4", FERRY_COMMIT_INPLACE);
    for (uint32_t k = 0; k < 200; k++) {
        ok(fleet_send(&f, k, NULL));
        if (k == 20)
            fds = fleet_open_fds();
    }
    assert_int_equal(fleet_open_fds(), fds);
    assert_null(fleet_differs(&f, 199));
    assert_string_equal(fleet_status(f.workers[0], "held_bytes"), "0");
    assert_string_equal(fleet_status(f.workers[0], "round"), "200");
    fleet_close(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_call_reaches_the_worker),
        cmocka_unit_test(o09_the_worker_s_error_reaches_the_sender),
        cmocka_unit_test(o12_a_sender_that_fails_leaves_the_worker_free),
        cmocka_unit_test(o21_a_worker_that_skips_a_parameter_is_no_success),
        cmocka_unit_test(j2_a_flipped_bit_is_named_before_commit),
        cmocka_unit_test(o13_idle_bound_counts_from_the_last_byte),
        cmocka_unit_test(o05_o59_many_rounds_stay_steady),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
