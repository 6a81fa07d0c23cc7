/* SPDX-License-Identifier: Apache-2.0 */
/* The trainer around its engine: the round trip, whose calls, init infos
 * (B4, D1-D4, D6, E4; O-11). */
#include "harness/trainer_rig.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <stdatomic.h>

#include <cmocka.h>

#include "base/clock.h"
#include "harness/expect.h"

/* ---- the good round ---- */

static uint64_t progress_last, progress_total;

static void note_progress(void *arg, uint64_t done, uint64_t total)
{
    (void)arg;
    assert_true(done >= progress_last && done <= total);
    progress_last = done;
    progress_total = total;
}

static void d1_a_round_is_start_update_finish(void **state)
{
    ferry_send_options so = FERRY_SEND_OPTIONS_INIT;
    ferry_round_stats stats = {.size = sizeof(stats)};
    scene s;

    (void)state;
    scene_open(&s, "{\"rank\":0}");
    assert_string_equal(s.desk.calls, "i");
    so.weight_version = "step-1";
    so.stats = &stats;
    so.progress = note_progress;
    progress_last = 0;
    ok(ferry_trainer_send_weights(s.trainer, &so));
    assert_string_equal(s.desk.calls, "isuf");
    assert_string_equal(s.desk.version, "step-1");
    assert_int_equal(stats.round, 1);
    assert_int_equal(stats.n_params, s.checkpoint->count);
    assert_int_equal(stats.n_updates, 1);
    assert_true(stats.bytes_declared > 0);
    assert_true(stats.bytes_sent == stats.bytes_declared);
    assert_true(progress_last == progress_total);
    assert_true(stats.total_ms >= stats.start_ms + stats.finish_ms);
    assert_int_equal(hands_ends, 1);
    assert_int_equal(hands_ended_with, FERRY_OK);
    ok(ferry_trainer_send_weights(s.trainer, NULL));
    assert_string_equal(s.desk.version, "(none)");
    scene_close(&s);
    assert_int_equal(hands_destroyed, 1);
}

/* D3, B4: a rank that is not the sender drives the pass, calls nobody. */
static void d3_other_ranks_only_drive_the_pass(void **state)
{
    scene s;

    (void)state;
    scene_open(&s, "{\"rank\":2}");
    hands_on_send = hands_drive;
    ok(ferry_trainer_send_weights(s.trainer, NULL));
    assert_string_equal(s.desk.calls, "");
    hands_on_send = hands_drive_and_update;
    refused(ferry_trainer_send_weights(s.trainer, NULL), FERRY_EINVAL,
            "rank 2 is not the sender");
    assert_string_equal(s.desk.calls, "");
    scene_close(&s);
}

static void b4_a_pass_that_was_not_driven_is_no_success(void **state)
{
    scene s;

    (void)state;
    scene_open(&s, "{\"rank\":0}");
    hands_on_send = hands_drive_nothing;
    refused(ferry_trainer_send_weights(s.trainer, NULL), FERRY_ECOVERAGE,
            "engine hands ended its round after 0 of");
    assert_null(strchr(s.desk.calls, 'f'));
    scene_close(&s);
}

static _Atomic bool sending, refused_once;

static ferry_status send_until_refused(const ferry_trainer_host *host,
                                       ferry_trainer_context *ctx)
{
    atomic_store(&sending, true);
    for (int ms = 0; ms < 5000 && !atomic_load(&refused_once); ms++)
        ferry__sleep_ms(1);
    return hands_drive_and_update(host, ctx);
}

static void *send_beside(void *arg)
{
    ferry_status *st = ((void **)arg)[1];

    *st = ferry_trainer_send_weights(((void **)arg)[0], NULL);
    return NULL;
}

static void a_second_send_at_once_is_busy(void **state)
{
    ferry_status first = FERRY_EINTERNAL;
    void *args[2];
    pthread_t thread;
    scene s;

    (void)state;
    scene_open(&s, "{\"rank\":0}");
    hands_on_send = send_until_refused;
    atomic_store(&sending, false);
    atomic_store(&refused_once, false);
    args[0] = s.trainer;
    args[1] = &first;
    assert_int_equal(pthread_create(&thread, NULL, send_beside, args), 0);
    for (int ms = 0; ms < 5000 && !atomic_load(&sending); ms++)
        ferry__sleep_ms(1);
    refused(ferry_trainer_send_weights(s.trainer, NULL), FERRY_EBUSY,
            "another send_weights is running");
    atomic_store(&refused_once, true);
    pthread_join(thread, NULL);
    assert_int_equal(first, FERRY_OK);
    hands_on_send = hands_drive_and_update;
    ok(ferry_trainer_send_weights(s.trainer, NULL));
    scene_close(&s);
}

/* Refused options do not leave the trainer busy. */
static void send_options_have_nothing_reserved(void **state)
{
    ferry_send_options so = FERRY_SEND_OPTIONS_INIT;
    scene s;

    (void)state;
    scene_open(&s, "{\"rank\":0}");
    so.reserved = 3;
    refused(ferry_trainer_send_weights(s.trainer, &so), FERRY_EINVAL,
            "send options: reserved is 3, must be 0");
    so.reserved = 0;
    ok(ferry_trainer_send_weights(s.trainer, &so));
    scene_close(&s);
}

/* A start that was refused is nobody's round: it is not aborted. */
static void a_refused_start_is_not_aborted(void **state)
{
    scene s;

    (void)state;
    scene_open(&s, "{\"rank\":0}");
    s.desk.start_status = FERRY_EORDER;
    assert_int_equal(ferry_trainer_send_weights(s.trainer, NULL), FERRY_EORDER);
    assert_string_equal(s.desk.calls, "is");
    s.desk.start_status = FERRY_ECONN; /* it may have arrived */
    assert_int_equal(ferry_trainer_send_weights(s.trainer, NULL), FERRY_ECONN);
    assert_non_null(strchr(s.desk.calls, 'a'));
    scene_close(&s);
}

static ferry_status two_updates(const ferry_trainer_host *host,
                                ferry_trainer_context *ctx)
{
    FERRY_TRY(host->update_begin(ctx, "{\"x\":1}"));
    refused(host->update_begin(ctx, "{\"x\":1}"), FERRY_EBUSY,
            "update_weights is still in flight");
    while (host->update_poll(ctx) == FERRY_EBUSY)
        ferry__sleep_ms(1);
    FERRY_TRY(hands_drive(host, ctx));
    return host->update_begin(ctx, "{\"x\":1}"); /* the host waits for it */
}

static void d4_at_most_one_call_and_none_is_left_in_flight(void **state)
{
    ferry_round_stats stats = {.size = sizeof(stats)};
    ferry_send_options so = FERRY_SEND_OPTIONS_INIT;
    scene s;

    (void)state;
    scene_open(&s, "{\"rank\":0}");
    hands_on_send = two_updates;
    s.desk.update_hangs_ms = 20;
    so.stats = &stats;
    ok(ferry_trainer_send_weights(s.trainer, &so));
    assert_string_equal(s.desk.calls, "isuuf");
    assert_int_equal(stats.n_updates, 2);
    scene_close(&s);
}

/* ---- init ---- */

static ferry_status init_beside(const ferry_trainer_host *host,
                                ferry_trainer_context *ctx)
{
    FERRY_TRY(host->init_peer_begin(ctx, "{}"));
    assert_true(host->remaining_ms(ctx) > 1000);
    return host->update_wait(ctx);
}

static void o11_init_runs_beside_a_client_that_is_slow(void **state)
{
    scene s;

    (void)state;
    scene_open(&s, NULL);
    s.desk.init_delay_ms = 100;
    hands_on_init = init_beside;
    ok(ferry_trainer_init_dict("hands", "{\"rank\":0}", &s.client, &s.source,
                               &s.trainer));
    ferry_trainer_shutdown(&s.trainer);
    s.desk.init_status = FERRY_EPEER;
    refused(ferry_trainer_init_dict("hands", "{\"rank\":0}", &s.client,
                                    &s.source, &s.trainer),
            FERRY_EPEER, "no init today");
    assert_int_equal(hands_destroyed, 2);
    scene_close(&s);
}

static void d2_init_infos_are_checked_by_field(void **state)
{
    ferry_client_ops broken = desk_ops;
    ferry_client odd = {&broken, NULL};
    ferry_client none = {NULL, NULL};
    ferry_trainer *t = NULL;
    scene s;

    (void)state;
    scene_open(&s, NULL);
#define DICT(backend, text, client, source)                                    \
    ferry_trainer_init_dict(backend, text, client, source, &t)
    refused(DICT("hands", "{}", &s.client, &s.source), FERRY_EINVAL, "rank");
    refused(DICT("hands", "{\"rank\":-1}", &s.client, &s.source), FERRY_EINVAL,
            "rank");
    refused(DICT("hands", "{\"rank\":0,\"bad\":1}", &s.client, &s.source),
            FERRY_EINVAL, "bad");
    refused(DICT("nope", "{\"rank\":0}", &s.client, &s.source), FERRY_EUNKNOWN,
            "backend 'nope' is unknown");
    refused(DICT("hands", "{\"rank\":0}", NULL, &s.source), FERRY_EINVAL,
            "client is NULL");
    refused(DICT("hands", "{\"rank\":0}", &none, &s.source), FERRY_EINVAL,
            "no table");
    broken.update_weights = NULL;
    refused(DICT("hands", "{\"rank\":0}", &odd, &s.source), FERRY_EINVAL,
            "client desk has no method update_weights");
    broken.size = 16;
    refused(DICT("hands", "{\"rank\":0}", &odd, &s.source), FERRY_EINVAL,
            "16 bytes");
    refused(DICT("hands", "{\"rank\":0}", &s.client, NULL), FERRY_EINVAL,
            "hands trainer weight transfer requires a WeightSource.");
    refused(DICT("delta", "{\"rank\":0}", &s.client, &s.source), FERRY_EINVAL,
            "delta weight transfer takes no WeightSource");
    refused(DICT(NULL, "{}", &s.client, NULL), FERRY_EINVAL, "backend");
#undef DICT
    assert_null(t);
    scene_close(&s);
}

static void d2_a_typed_info_is_taken_in_any_size(void **state)
{
    hands_init info = {{sizeof(info), &hands_type, 0, 0, 0, 0}, "blue", 9};
    ferry_trainer_init_info bad = {sizeof(bad), NULL, 0, 0, 0, 0};
    scene s;

    (void)state;
    scene_open(&s, NULL);
    ok(ferry_trainer_init(&info.base, &s.client, &s.source, &s.trainer));
    assert_string_equal(hands_info_seen->word, "blue");
    assert_int_equal(hands_info_seen->number, 9);
    assert_ptr_equal(hands_info_seen->base.type, &hands_type);
    ferry_trainer_shutdown(&s.trainer);
    /* J5: compiled when the struct ended earlier. */
    info.base.size = offsetof(hands_init, number);
    ok(ferry_trainer_init(&info.base, &s.client, &s.source, &s.trainer));
    assert_string_equal(hands_info_seen->word, "blue");
    assert_int_equal(hands_info_seen->number, 0);
    ferry_trainer_shutdown(&s.trainer);
    info.base.rank = -3;
    refused(ferry_trainer_init(&info.base, &s.client, &s.source, &s.trainer),
            FERRY_EINVAL, "rank");
    info.base.size = 8;
    refused(ferry_trainer_init(&info.base, &s.client, &s.source, &s.trainer),
            FERRY_EINVAL, "8 bytes");
    refused(ferry_trainer_init(&bad, &s.client, &s.source, &s.trainer),
            FERRY_EINVAL, "no type with a backend name");
    refused(ferry_trainer_init(NULL, &s.client, &s.source, &s.trainer),
            FERRY_EINVAL, "info is NULL");
    scene_close(&s);
}

/* ---- D6 ---- */

static void d6_delta_backends_send_payloads(void **state)
{
    ferry_send_options so = FERRY_SEND_OPTIONS_INIT;
    int patches[3] = {0};
    scene s;

    (void)state;
    scene_open(&s, NULL);
    ok(ferry_trainer_init_dict("delta", "{\"rank\":0}", &s.client, NULL,
                               &s.trainer));
    hands_on_send = hands_drive_nothing;
    ok(ferry_trainer_send_weights(s.trainer, NULL)); /* empty: no call */
    assert_string_equal(s.desk.calls, "");
    so.payload = patches;
    so.payload_count = 3;
    ok(ferry_trainer_send_weights(s.trainer, &so));
    assert_string_equal(s.desk.calls, "sf");
    assert_int_equal(hands_payload_seen, 3);
    hands_on_send = hands_drive; /* there is no source to hands_drive */
    refused(ferry_trainer_send_weights(s.trainer, &so), FERRY_EINVAL,
            "no source");
    so.payload = NULL;
    refused(ferry_trainer_send_weights(s.trainer, &so), FERRY_EINVAL,
            "payload of 3 is NULL");
    ferry_trainer_shutdown(&s.trainer);
    ok(ferry_trainer_init_dict("hands", "{\"rank\":0}", &s.client, &s.source,
                               &s.trainer));
    so.payload = patches;
    refused(ferry_trainer_send_weights(s.trainer, &so), FERRY_EINVAL,
            "takes no payload");
    so.size = 0;
    refused(ferry_trainer_send_weights(s.trainer, &so), FERRY_EINVAL,
            "send options");
    scene_close(&s);
}

static void e4_draft_rounds_are_asked_for_by_an_option(void **state)
{
    ferry_send_options so = FERRY_SEND_OPTIONS_INIT;
    ferry_client_ops ops = desk_ops;
    scene s;

    (void)state;
    scene_open(&s, "{\"rank\":0}");
    so.draft = 1;
    ok(ferry_trainer_send_weights(s.trainer, &so));
    assert_string_equal(s.desk.calls, "iduf");
    ferry_trainer_shutdown(&s.trainer);
    ops.start_draft_weight_update = NULL;
    s.client.ops = &ops;
    ok(ferry_trainer_init_dict("hands", "{\"rank\":0}", &s.client, &s.source,
                               &s.trainer));
    refused(ferry_trainer_send_weights(s.trainer, &so), FERRY_ENOTSUP,
            "client desk has no start_draft_weight_update");
    scene_close(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(d1_a_round_is_start_update_finish),
        cmocka_unit_test(d3_other_ranks_only_drive_the_pass),
        cmocka_unit_test(b4_a_pass_that_was_not_driven_is_no_success),
        cmocka_unit_test(a_second_send_at_once_is_busy),
        cmocka_unit_test(send_options_have_nothing_reserved),
        cmocka_unit_test(a_refused_start_is_not_aborted),
        cmocka_unit_test(d4_at_most_one_call_and_none_is_left_in_flight),
        cmocka_unit_test(o11_init_runs_beside_a_client_that_is_slow),
        cmocka_unit_test(d2_init_infos_are_checked_by_field),
        cmocka_unit_test(d2_a_typed_info_is_taken_in_any_size),
        cmocka_unit_test(d6_delta_backends_send_payloads),
        cmocka_unit_test(e4_draft_rounds_are_asked_for_by_an_option),
    };

    return cmocka_run_group_tests(tests, scene_engines, NULL);
}
