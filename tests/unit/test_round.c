/* SPDX-License-Identifier: Apache-2.0 */
/* The round: order of calls, abort, bounds, who may be inside, and what a
 * failure leaves (D, E, J1; O-01, O-12, O-13, O-64). */
#include "harness/fleet.h"
#include "harness/solo.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "base/clock.h"
#include "core/round.h"
#include "harness/expect.h"

#define START_TWICE                                                            \
    "start_weight_update called while a weight update is already active. "     \
    "Call finish_weight_update first."

static void open_rig(solo *r, const char *backend, ferry_commit commit)
{
    ferry_worker_options o = FERRY_WORKER_OPTIONS_INIT(backend);
    toy_options t = {.kind = TOY_A};

    o.commit = commit;
    o.has_weights = 1;
    solo_open(r, &o, &t);
}

static const char *state_of(const solo *r)
{
    return fleet_status(r->worker, "state");
}

static void wrong_orders_are_refused_in_vllm_s_words(void **state)
{
    solo r;

    (void)state;
    open_rig(&r, "probe", FERRY_COMMIT_INPLACE);
    ok(ferry_worker_init_transfer_engine(r.worker, "{}"));
    refused(ferry_worker_update_weights(r.worker, "{}"), FERRY_EORDER,
            "start_weight_update must be called before update_weights.");
    refused(ferry_worker_finish_weight_update(r.worker, NULL), FERRY_EORDER,
            "finish_weight_update called without a matching "
            "start_weight_update.");
    refused(ferry_worker_prepare_weight_update(r.worker), FERRY_EORDER,
            "without a matching start_weight_update.");
    refused(ferry_worker_commit_weight_update(r.worker, NULL), FERRY_EORDER,
            "prepare_weight_update must be called before "
            "commit_weight_update.");
    assert_string_equal(state_of(&r), "idle");
    ok(ferry_worker_start_weight_update(r.worker));
    assert_string_equal(state_of(&r), "open");
    refused(ferry_worker_start_weight_update(r.worker), FERRY_EORDER,
            START_TWICE);
    refused(ferry_worker_shutdown_transfer_engine(r.worker), FERRY_EORDER,
            "Cannot release a trainer connection during a weight update");
    ok(ferry_worker_prepare_weight_update(r.worker));
    assert_string_equal(state_of(&r), "prepared");
    refused(ferry_worker_update_weights(r.worker, "{}"), FERRY_EORDER,
            "commit or abort first");
    refused(ferry_worker_finish_weight_update(r.worker, NULL), FERRY_EORDER,
            "commit_weight_update or abort_weight_update");
    refused(ferry_worker_start_weight_update(r.worker), FERRY_EORDER,
            START_TWICE);
    ok(ferry_worker_commit_weight_update(r.worker, NULL));
    assert_string_equal(state_of(&r), "idle");
    assert_int_equal(the_probe.n_start, 1);
    assert_int_equal(the_probe.n_finish, 1);
    solo_close(&r);
    assert_int_equal(the_probe.n_destroy, 1);
}

/* DESIGN, last table: start before init is legal, update before it is not. */
static void start_before_init_is_legal_update_is_not(void **state)
{
    solo r;

    (void)state;
    open_rig(&r, "probe", FERRY_COMMIT_INPLACE);
    ok(ferry_worker_start_weight_update(r.worker));
    ok(ferry_worker_finish_weight_update(r.worker, "v1"));
    assert_string_equal(fleet_status(r.worker, "weight_version"), "null");
    assert_int_equal(the_probe.n_start, 0);

    ok(ferry_worker_start_weight_update(r.worker));
    refused(ferry_worker_update_weights(r.worker, solo_update(&r, 0, 1)),
            FERRY_EORDER,
            "init_weight_transfer_engine must be called before "
            "update_weights.");
    assert_string_equal(state_of(&r), "failed");
    assert_int_equal(the_probe.n_receive, 0);

    /* Started early, initialised then: the round goes on. */
    ok(ferry_worker_start_weight_update(r.worker));
    ok(ferry_worker_init_transfer_engine(r.worker, "{}"));
    assert_string_equal(state_of(&r), "open");
    toy_checkpoint_fill(r.checkpoint, 3);
    ok(ferry_worker_update_weights(r.worker,
                                   solo_update(&r, 0, r.checkpoint->count)));
    ok(ferry_worker_finish_weight_update(r.worker, NULL));
    assert_int_equal(the_probe.n_start, 1);
    assert_null(toy_differs(r.toy, 3));
    solo_close(&r);
}

static ferry_status fail_receive(const ferry_worker_host *host,
                                 ferry_worker_context *ctx, void *arg)
{
    (void)ctx;
    (void)arg;
    return (host->fail)(FERRY_EPEER, "the real reason");
}

static void o01_failed_update_ends_the_round_and_the_next_works(void **state)
{
    solo r;

    (void)state;
    open_rig(&r, "probe", FERRY_COMMIT_INPLACE);
    ok(ferry_worker_init_transfer_engine(r.worker, "{}"));
    ok(ferry_worker_start_weight_update(r.worker));
    the_probe.on_receive = fail_receive;
    refused(ferry_worker_update_weights(r.worker, solo_update(&r, 0, 1)),
            FERRY_EPEER, "the real reason");
    assert_int_equal(the_probe.n_abort, 1);
    assert_string_equal(state_of(&r), "failed");
    assert_string_equal(
        fleet_status(r.worker, "failure"),
        "{\"status\":\"EPEER\",\"message\":\"the real reason\"}");
    refused(ferry_worker_finish_weight_update(r.worker, NULL), FERRY_EORDER,
            "The last round failed: the real reason");
    refused(ferry_worker_update_weights(r.worker, "{}"), FERRY_EORDER,
            "The last round failed: the real reason");
    /* Nothing was written, so it still serves the version before. */
    ok(ferry_worker_may_serve(r.worker));

    the_probe.on_receive = solo_load_all;
    ok(solo_round(&r, 2, "v2"));
    assert_null(toy_differs(r.toy, 2));
    assert_string_equal(fleet_status(r.worker, "failure"), "null");
    assert_int_equal(the_probe.n_abort, 1);
    solo_close(&r);
}

static ferry_status fail_finish(const ferry_worker_host *host,
                                ferry_worker_context *ctx, void *arg)
{
    (void)ctx;
    (void)arg;
    return (host->fail)(FERRY_EINTERNAL, "finish went wrong");
}

static void a_failing_start_or_finish_ends_the_round(void **state)
{
    solo r;

    (void)state;
    open_rig(&r, "probe", FERRY_COMMIT_INPLACE);
    ok(ferry_worker_init_transfer_engine(r.worker, "{}"));
    the_probe.on_finish = fail_finish;
    assert_int_equal(solo_round(&r, 1, "v1"), FERRY_EINTERNAL);
    assert_string_equal(state_of(&r), "failed");
    the_probe.on_finish = NULL;
    the_probe.on_start = fail_finish;
    assert_int_equal(solo_round(&r, 1, "v1"), FERRY_EINTERNAL);
    assert_string_equal(state_of(&r), "failed");
    the_probe.on_start = NULL;
    ok(solo_round(&r, 2, "v2"));
    assert_null(toy_differs(r.toy, 2));
    solo_close(&r);
}

static void abort_is_idempotent_and_ends_any_open_round(void **state)
{
    solo r;
    uint64_t sum;

    (void)state;
    open_rig(&r, "probe", FERRY_COMMIT_STAGED);
    ok(ferry_worker_init_transfer_engine(r.worker, "{}"));
    ferry_worker_abort_weight_update(r.worker); /* nothing to end */
    assert_string_equal(state_of(&r), "idle");
    ok(ferry_worker_start_weight_update(r.worker));
    ferry_worker_abort_weight_update(r.worker);
    ferry_worker_abort_weight_update(r.worker);
    assert_string_equal(state_of(&r), "failed");
    assert_int_equal(the_probe.n_abort, 1);

    sum = toy_sum(r.toy);
    toy_checkpoint_fill(r.checkpoint, 5);
    ok(ferry_worker_start_weight_update(r.worker));
    ok(ferry_worker_update_weights(r.worker,
                                   solo_update(&r, 0, r.checkpoint->count)));
    ok(ferry_worker_prepare_weight_update(r.worker));
    ferry_worker_abort_weight_update(r.worker);
    refused(ferry_worker_commit_weight_update(r.worker, "v"), FERRY_EORDER,
            "The last round failed: the weight update was aborted");
    assert_true(toy_sum(r.toy) == sum); /* staged: not one byte */
    ok(ferry_worker_may_serve(r.worker));
    ok(solo_round(&r, 6, NULL));
    assert_null(toy_differs(r.toy, 6));
    solo_close(&r);
}

/* ---- waits ---- */

static ferry_status wait_for_ever(const ferry_worker_host *host,
                                  ferry_worker_context *ctx, void *arg)
{
    struct timespec slice = {0, 5000000};

    (void)arg;
    for (;;) {
        FERRY_TRY(host->check(ctx, "waiting for the trainer"));
        nanosleep(&slice, NULL);
    }
}

static void *abort_later(void *arg)
{
    ferry__sleep_ms(50);
    ferry_worker_abort_weight_update(arg);
    return NULL;
}

static void abort_from_another_thread_ends_a_running_update(void **state)
{
    pthread_t thread;
    int64_t from;
    solo r;

    (void)state;
    open_rig(&r, "probe", FERRY_COMMIT_INPLACE);
    ok(ferry_worker_init_transfer_engine(r.worker, "{}"));
    the_probe.on_receive = wait_for_ever;
    ok(ferry_worker_start_weight_update(r.worker));
    from = ferry__now_ns();
    pthread_create(&thread, NULL, abort_later, r.worker);
    refused(ferry_worker_update_weights(r.worker, solo_update(&r, 0, 1)),
            FERRY_ECANCELED, "canceled while waiting for the trainer");
    pthread_join(thread, NULL);
    assert_true(ferry__now_ns() - from < 1000000000);
    assert_string_equal(state_of(&r), "failed");

    /* An init that hangs is ended the same way. */
    the_probe.on_init = wait_for_ever;
    pthread_create(&thread, NULL, abort_later, r.worker);
    refused(ferry_worker_init_transfer_engine(r.worker, "{}"), FERRY_ECANCELED,
            "canceled");
    pthread_join(thread, NULL);
    the_probe.on_init = NULL;
    the_probe.on_receive = solo_load_all;
    ok(ferry_worker_init_transfer_engine(r.worker, "{}"));
    ok(solo_round(&r, 1, NULL));
    solo_close(&r);
}

static ferry_status ignore_abort(const ferry_worker_host *host,
                                 ferry_worker_context *ctx, void *arg)
{
    ferry__sleep_ms(120);
    return solo_load_all(host, ctx, arg);
}

static void abort_during_an_update_that_succeeds_still_ends_it(void **state)
{
    pthread_t thread;
    solo r;

    (void)state;
    open_rig(&r, "probe", FERRY_COMMIT_INPLACE);
    ok(ferry_worker_init_transfer_engine(r.worker, "{}"));
    the_probe.on_receive = ignore_abort;
    ok(ferry_worker_start_weight_update(r.worker));
    pthread_create(&thread, NULL, abort_later, r.worker);
    refused(ferry_worker_update_weights(r.worker, solo_update(&r, 0, 1)),
            FERRY_ECANCELED, "the weight update was aborted");
    pthread_join(thread, NULL);
    assert_string_equal(state_of(&r), "failed");
    solo_close(&r);
}

typedef struct meanwhile {
    solo *r;
    ferry_status start, param;
    char state[32];
} meanwhile;

static void ignore_bytes(void *arg, const char *name, const void *bytes,
                         size_t size)
{
    (void)arg;
    (void)name;
    (void)bytes;
    (void)size;
}

static void *ask_meanwhile(void *arg)
{
    meanwhile *m = arg;

    ferry__sleep_ms(30);
    strcpy(m->state, state_of(m->r));
    m->start = ferry_worker_start_weight_update(m->r->worker);
    m->param = ferry_worker_each_param(m->r->worker, ignore_bytes, NULL);
    ferry_worker_abort_weight_update(m->r->worker);
    return NULL;
}

static void a_second_call_at_once_is_busy_and_status_answers(void **state)
{
    meanwhile m;
    pthread_t thread;
    solo r;

    (void)state;
    open_rig(&r, "probe", FERRY_COMMIT_INPLACE);
    ok(ferry_worker_init_transfer_engine(r.worker, "{}"));
    the_probe.on_receive = wait_for_ever;
    ok(ferry_worker_start_weight_update(r.worker));
    m.r = &r;
    pthread_create(&thread, NULL, ask_meanwhile, &m);
    assert_int_equal(
        ferry_worker_update_weights(r.worker, solo_update(&r, 0, 1)),
        FERRY_ECANCELED);
    pthread_join(thread, NULL);
    assert_string_equal(m.state, "updating");
    assert_int_equal(m.start, FERRY_EBUSY);
    assert_int_equal(m.param, FERRY_EBUSY);
    solo_close(&r);
}

/* O-13: the bound of init info, smaller than the worker's own, is armed; the
 * error names what was waited for, the parameter and the bound. */
static void o13_no_progress_and_deadline_are_bounded_and_named(void **state)
{
    int64_t from;
    solo r;

    (void)state;
    open_rig(&r, "probe", FERRY_COMMIT_INPLACE);
    ok(ferry_worker_init_transfer_engine(
        r.worker, "{\"no_progress_ms\":150,\"deadline_ms\":30000}"));
    the_probe.on_receive = wait_for_ever;
    ok(ferry_worker_start_weight_update(r.worker));
    from = ferry__now_ns();
    refused(ferry_worker_update_weights(r.worker, solo_update(&r, 0, 1)),
            FERRY_ENOPROGRESS,
            "no progress for 150 ms while waiting for the trainer");
    assert_true(ferry__now_ns() - from < 1000000000);

    ok(ferry_worker_init_transfer_engine(
        r.worker, "{\"no_progress_ms\":30000,\"deadline_ms\":150}"));
    ok(ferry_worker_start_weight_update(r.worker));
    refused(ferry_worker_update_weights(r.worker, solo_update(&r, 0, 1)),
            FERRY_ETIMEOUT,
            "deadline of 150 ms passed while waiting for the trainer");
    solo_close(&r);
}

static ferry_status slow_but_alive(const ferry_worker_host *host,
                                   ferry_worker_context *ctx, void *arg)
{
    for (int i = 0; i < 4; i++) {
        ferry__sleep_ms(100);
        FERRY_TRY(host->check(ctx, "receiving"));
        host->progress(ctx, 1);
    }
    return solo_load_all(host, ctx, arg);
}

static void o13_progress_keeps_a_long_update_alive(void **state)
{
    solo r;

    (void)state;
    open_rig(&r, "probe", FERRY_COMMIT_INPLACE);
    ok(ferry_worker_init_transfer_engine(r.worker, "{\"no_progress_ms\":200}"));
    the_probe.on_receive = slow_but_alive;
    ok(solo_round(&r, 1, NULL));
    solo_close(&r);
}

static void
o12_a_round_whose_trainer_died_is_reaped_at_its_deadline(void **state)
{
    solo r;

    (void)state;
    open_rig(&r, "probe", FERRY_COMMIT_INPLACE);
    ok(ferry_worker_init_transfer_engine(r.worker, "{\"deadline_ms\":60}"));
    ok(ferry_worker_start_weight_update(r.worker));
    ferry__sleep_ms(80);
    refused(ferry_worker_update_weights(r.worker, solo_update(&r, 0, 1)),
            FERRY_ETIMEOUT, "deadline of 60 ms");
    ok(ferry_worker_start_weight_update(r.worker));
    ferry__sleep_ms(80);
    ok(ferry_worker_start_weight_update(r.worker));
    assert_int_equal(the_probe.n_abort, 2);
    ferry__sleep_ms(80);
    ok(ferry_worker_shutdown_transfer_engine(r.worker));
    assert_int_equal(the_probe.n_abort, 3);
    solo_close(&r);
}

/* O-19: a new trainer replaces one that died in the middle of its round. */
static void o19_init_ends_the_round_of_a_trainer_that_is_gone(void **state)
{
    solo r;

    (void)state;
    open_rig(&r, "probe", FERRY_COMMIT_INPLACE);
    ok(ferry_worker_init_transfer_engine(r.worker, "{}"));
    ok(ferry_worker_start_weight_update(r.worker));
    /* A malformed init touches nothing (E2). */
    refused(ferry_worker_init_transfer_engine(r.worker, "{\"x\":1}"),
            FERRY_EINVAL, "x");
    assert_string_equal(state_of(&r), "open");
    assert_int_equal(the_probe.n_shutdown, 0);
    ok(ferry_worker_init_transfer_engine(r.worker, "{}"));
    assert_string_equal(state_of(&r), "failed");
    assert_int_equal(the_probe.n_abort, 1);
    assert_int_equal(the_probe.n_shutdown, 1);
    ok(solo_round(&r, 1, NULL));
    solo_close(&r);
    assert_int_equal(the_probe.n_shutdown, 2);
}

static void a_failed_init_leaves_no_channel(void **state)
{
    solo r;

    (void)state;
    open_rig(&r, "probe", FERRY_COMMIT_INPLACE);
    the_probe.on_init = fail_finish;
    refused(ferry_worker_init_transfer_engine(r.worker, "{}"), FERRY_EINTERNAL,
            "finish went wrong");
    assert_int_equal(the_probe.n_shutdown, 1);
    ok(ferry_worker_start_weight_update(r.worker));
    assert_int_equal(
        ferry_worker_update_weights(r.worker, solo_update(&r, 0, 1)),
        FERRY_EORDER);
    assert_int_equal(ferry_worker_init_transfer_engine(r.worker, NULL),
                     FERRY_EINVAL);
    solo_close(&r);
    assert_int_equal(the_probe.n_shutdown, 1);
}

/* ---- E5 ---- */

static ferry_status queue_only(const ferry_worker_host *host,
                               ferry_worker_context *ctx, void *arg)
{
    (void)host;
    (void)ctx;
    (void)arg;
    return FERRY_OK;
}

static ferry_status drain_once(const ferry_worker_host *host,
                               ferry_worker_context *ctx, void *arg)
{
    if (the_probe.n_drain > 1)
        return FERRY_OK;
    return solo_load_all(host, ctx, arg);
}

static int n_queued;

static ferry_status queue_update(const ferry_worker_host *host,
                                 ferry_worker_context *ctx, void *arg)
{
    (void)host;
    (void)ctx;
    (void)arg;
    n_queued++;
    return FERRY_OK;
}

static ferry_status drain_queue(const ferry_worker_host *host,
                                ferry_worker_context *ctx, void *arg)
{
    if (n_queued == 0)
        return FERRY_OK;
    n_queued--;
    return solo_load_all(host, ctx, arg);
}

/* What was queued of one update is handed over before the next is declared,
 * since the indices are then the next one's. */
static void e5_each_update_is_processed_under_its_own_names(void **state)
{
    size_t half;
    solo r;

    (void)state;
    open_rig(&r, "probe_deferred", FERRY_COMMIT_INPLACE);
    ok(ferry_worker_init_transfer_engine(r.worker, "{}"));
    the_probe.on_receive = queue_update;
    the_probe.on_drain = drain_queue;
    n_queued = 0;
    half = r.checkpoint->count / 2;
    toy_checkpoint_fill(r.checkpoint, 7);
    ok(ferry_worker_start_weight_update(r.worker));
    ok(ferry_worker_update_weights(r.worker, solo_update(&r, 0, half)));
    ok(ferry_worker_update_weights(
        r.worker, solo_update(&r, half, r.checkpoint->count - half)));
    ok(ferry_worker_finish_weight_update(r.worker, NULL));
    assert_null(toy_differs(r.toy, 7));
    solo_close(&r);
}

static void e5_deferred_processing_is_complete_at_finish(void **state)
{
    solo r;

    (void)state;
    open_rig(&r, "probe_deferred", FERRY_COMMIT_INPLACE);
    assert_true(ferry_worker_defers_processing(r.worker));
    ok(ferry_worker_init_transfer_engine(r.worker, "{}"));
    the_probe.on_receive = queue_only;
    the_probe.on_drain = drain_once;
    ok(solo_round(&r, 4, NULL));
    assert_null(toy_differs(r.toy, 4));
    assert_int_equal(the_probe.n_drain, 1);

    /* A caller may drive the tail itself. */
    the_probe.n_drain = 0;
    toy_checkpoint_fill(r.checkpoint, 5);
    ok(ferry_worker_start_weight_update(r.worker));
    ok(ferry_worker_update_weights(r.worker,
                                   solo_update(&r, 0, r.checkpoint->count)));
    ok(ferry_worker_drain_pending(r.worker));
    ok(ferry_worker_drain_pending(r.worker));
    ok(ferry_worker_finish_weight_update(r.worker, NULL));
    assert_null(toy_differs(r.toy, 5));

    /* What was never processed is missed at finish. */
    the_probe.on_drain = NULL;
    assert_int_equal(solo_round(&r, 6, NULL), FERRY_ECOVERAGE);
    /* A failing drain ends the round. */
    the_probe.on_drain = fail_finish;
    ok(ferry_worker_start_weight_update(r.worker));
    assert_int_equal(ferry_worker_drain_pending(r.worker), FERRY_EINTERNAL);
    assert_string_equal(state_of(&r), "failed");
    ok(ferry_worker_drain_pending(r.worker)); /* outside a round: nothing */
    solo_close(&r);
}

/* ---- E1 ---- */

static ferry_status begin_reload(const ferry_worker_host *host,
                                 ferry_worker_context *ctx, void *arg)
{
    (void)arg;
    FERRY_TRY(host->reload_begin(ctx));
    assert_int_equal(host->reload_begin(ctx), FERRY_EORDER);
    return FERRY_OK;
}

static ferry_status end_reload(const ferry_worker_host *host,
                               ferry_worker_context *ctx, void *arg)
{
    (void)arg;
    FERRY_TRY(host->reload_finalise(ctx));
    assert_int_equal(host->reload_finalise(ctx), FERRY_EORDER);
    return FERRY_OK;
}

static void e1_reload_begin_and_finalise_must_pair(void **state)
{
    solo r;

    (void)state;
    open_rig(&r, "probe", FERRY_COMMIT_INPLACE);
    ok(ferry_worker_init_transfer_engine(r.worker, "{}"));
    the_probe.on_start = begin_reload;
    the_probe.on_finish = end_reload;
    ok(solo_round(&r, 1, NULL));
    the_probe.on_finish = NULL;
    refused(solo_round(&r, 1, NULL), FERRY_EINTERNAL, "never finalised");
    the_probe.on_start = NULL;
    the_probe.on_finish = end_reload;
    refused(solo_round(&r, 1, NULL), FERRY_EORDER,
            "without a matching reload_begin");
    solo_close(&r);
}

static ferry_status load_in_init(const ferry_worker_host *host,
                                 ferry_worker_context *ctx, void *arg)
{
    ferry_param_meta meta = {.name = "model.norm.weight",
                             .dtype = FERRY_DTYPE_F32,
                             .ndim = 1,
                             .shape = {4}};
    void *bytes;
    size_t size;

    (void)arg;
    assert_int_equal(host->declare(ctx, &meta, 1), FERRY_EORDER);
    assert_int_equal(host->load(ctx, 0, NULL), FERRY_EORDER);
    assert_int_equal(host->load_range(ctx, 0, NULL, 0, 1), FERRY_EORDER);
    assert_int_equal(host->load_box(ctx, 0, 0, NULL), FERRY_EORDER);
    assert_int_equal(host->kernel_storage(ctx, 0, &bytes, &size), FERRY_EORDER);
    assert_int_equal(host->reload_begin(ctx), FERRY_EORDER);
    return FERRY_OK;
}

static void an_engine_cannot_write_outside_a_round(void **state)
{
    solo r;

    (void)state;
    open_rig(&r, "probe", FERRY_COMMIT_INPLACE);
    the_probe.on_init = load_in_init;
    ok(ferry_worker_init_transfer_engine(r.worker, "{}"));
    solo_close(&r);
}

/* ---- E4, O-64 ---- */

static void o64_draft_rounds_are_refused_in_words(void **state)
{
    solo r;

    (void)state;
    open_rig(&r, "probe", FERRY_COMMIT_INPLACE);
    refused(ferry_worker_start_draft_weight_update(r.worker), FERRY_ENOTSUP,
            "Draft model weight update requested, but no draft model is "
            "configured.");
    solo_close(&r);
    open_rig(&r, "probe_no_draft", FERRY_COMMIT_INPLACE);
    refused(ferry_worker_start_draft_weight_update(r.worker), FERRY_ENOTSUP,
            "does not support draft model weight updates.");
    solo_close(&r);
}

static ferry_status check_model_is_draft(const ferry_worker_host *host,
                                         ferry_worker_context *ctx, void *arg)
{
    assert_string_equal(host->model(ctx)->params[0].name,
                        "model.layers.0.proj.weight");
    return solo_load_all(host, ctx, arg);
}

static void e4_a_draft_round_aims_at_the_draft(void **state)
{
    ferry_worker_options o = FERRY_WORKER_OPTIONS_INIT("probe");
    toy_options to = {.kind = TOY_A}, td = {.kind = TOY_Q};
    toy *target, *draft;
    toy_checkpoint *c;
    ferry_worker *w;
    uint64_t sum;
    solo r;

    (void)state;
    probe_reset();
    o.has_weights = 1;
    target = toy_create(&to);
    draft = toy_create(&td);
    c = toy_checkpoint_create(&td);
    ok(ferry_worker_create(&o, toy_model(target), toy_model(draft), &w));
    r.toy = draft;
    r.checkpoint = c;
    r.worker = w;
    the_probe.arg = c;
    the_probe.on_receive = check_model_is_draft;
    ok(ferry_worker_init_transfer_engine(w, "{}"));
    sum = toy_sum(target);
    toy_checkpoint_fill(c, 2);
    ok(ferry_worker_start_draft_weight_update(w));
    assert_string_equal(fleet_status(w, "target"), "draft");
    ok(ferry_worker_update_weights(w, solo_update(&r, 0, c->count)));
    ok(ferry_worker_finish_weight_update(w, NULL));
    assert_null(toy_differs(draft, 2));
    assert_true(toy_sum(target) == sum);
    /* "As last round" is per model: the target has had none. */
    the_probe.n_receive = 0;
    ok(ferry_worker_start_weight_update(w));
    assert_string_equal(fleet_status(w, "target"), "target");
    ok(ferry_worker_update_weights(w, "{}"));
    assert_int_equal(the_probe.n_receive, 0);
    ok(ferry_worker_finish_weight_update(w, NULL));
    toy_checkpoint_fill(c, 3);
    ok(ferry_worker_start_draft_weight_update(w));
    ok(ferry_worker_update_weights(w, "{}"));
    ok(ferry_worker_finish_weight_update(w, NULL));
    assert_null(toy_differs(draft, 3));
    ferry_worker_destroy(&w);
    toy_free(target);
    toy_free(draft);
    toy_checkpoint_free(c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(wrong_orders_are_refused_in_vllm_s_words),
        cmocka_unit_test(start_before_init_is_legal_update_is_not),
        cmocka_unit_test(o01_failed_update_ends_the_round_and_the_next_works),
        cmocka_unit_test(a_failing_start_or_finish_ends_the_round),
        cmocka_unit_test(abort_is_idempotent_and_ends_any_open_round),
        cmocka_unit_test(abort_from_another_thread_ends_a_running_update),
        cmocka_unit_test(abort_during_an_update_that_succeeds_still_ends_it),
        cmocka_unit_test(a_second_call_at_once_is_busy_and_status_answers),
        cmocka_unit_test(o13_no_progress_and_deadline_are_bounded_and_named),
        cmocka_unit_test(o13_progress_keeps_a_long_update_alive),
        cmocka_unit_test(
            o12_a_round_whose_trainer_died_is_reaped_at_its_deadline),
        cmocka_unit_test(o19_init_ends_the_round_of_a_trainer_that_is_gone),
        cmocka_unit_test(a_failed_init_leaves_no_channel),
        cmocka_unit_test(e5_deferred_processing_is_complete_at_finish),
        cmocka_unit_test(e5_each_update_is_processed_under_its_own_names),
        cmocka_unit_test(e1_reload_begin_and_finalise_must_pair),
        cmocka_unit_test(an_engine_cannot_write_outside_a_round),
        cmocka_unit_test(o64_draft_rounds_are_refused_in_words),
        cmocka_unit_test(e4_a_draft_round_aims_at_the_draft),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
