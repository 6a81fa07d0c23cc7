/* SPDX-License-Identifier: Apache-2.0 */
/* A worker that is in a call answers every other call of the control plane
 * with FERRY_EBUSY, and the round goes on as if nobody had asked. A round in
 * which nothing came is over once it is prepared. */
#include "core/worker_state.h"
#include "harness/fleet.h"
#include "harness/solo.h"

#include <ferry/ferry.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "harness/expect.h"

/* Each call on a thread of its own: each waits a while for the one that runs,
 * which could be on its way out. */
typedef ferry_status (*call_fn)(solo *r);

static ferry_status init(solo *r)
{
    return ferry_worker_init_transfer_engine(r->worker, "{}");
}

static ferry_status shutdown_engine(solo *r)
{
    return ferry_worker_shutdown_transfer_engine(r->worker);
}

static ferry_status start(solo *r)
{
    return ferry_worker_start_weight_update(r->worker);
}

static ferry_status update(solo *r)
{
    return ferry_worker_update_weights(r->worker, "{}");
}

static ferry_status drain(solo *r)
{
    return ferry_worker_drain_pending(r->worker);
}

static ferry_status prepare(solo *r)
{
    return ferry_worker_prepare_weight_update(r->worker);
}

static ferry_status commit(solo *r)
{
    return ferry_worker_commit_weight_update(r->worker, "other");
}

static ferry_status finish(solo *r)
{
    return ferry_worker_finish_weight_update(r->worker, "other");
}

static ferry_status load_source(solo *r)
{
    toy_checkpoint *c = r->checkpoint;
    ferry_source source = toy_checkpoint_source(c, 0, c->count);
    ferry_status st = ferry_worker_load_source(r->worker, &source);

    ferry_source_close(&source);
    return st;
}

static ferry_status plan(solo *r)
{
    toy_checkpoint *c = r->checkpoint;
    char *json = NULL;
    ferry_status st = ferry_worker_plan(r->worker, c->metas, c->count, &json);

    ferry_free(json);
    return st;
}

static const struct {
    const char *name;
    call_fn call;
} calls[] = {
    {"init", init},        {"shutdown", shutdown_engine},
    {"start", start},      {"update", update},
    {"drain", drain},      {"prepare", prepare},
    {"commit", commit},    {"finish", finish},
    {"load", load_source}, {"plan", plan},
};
#define N_CALLS (sizeof(calls) / sizeof(calls[0]))

typedef struct asker {
    solo *r;
    call_fn call;
    ferry_status status;
} asker;

static asker askers[N_CALLS];

static void *ask(void *arg)
{
    asker *a = arg;

    a->status = a->call(a->r);
    return NULL;
}

/* In the middle of an update, other threads ask for everything. */
static ferry_status receive(const ferry_worker_host *host,
                            ferry_worker_context *ctx, void *arg)
{
    pthread_t threads[N_CALLS];

    for (size_t i = 0; i < N_CALLS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, ask, &askers[i]), 0);
    for (size_t i = 0; i < N_CALLS; i++)
        pthread_join(threads[i], NULL);
    return solo_load_all(host, ctx, arg);
}

static void every_call_in_the_middle_of_one_is_busy(void **state)
{
    ferry_worker_options o = FERRY_WORKER_OPTIONS_INIT("probe");
    toy_options t = {.kind = TOY_A};
    solo r;

    (void)state;
    solo_open(&r, &o, &t);
    ok(ferry_worker_init_transfer_engine(r.worker, "{}"));
    toy_checkpoint_fill(r.checkpoint, 4);
    for (size_t i = 0; i < N_CALLS; i++)
        askers[i] = (asker){&r, calls[i].call, FERRY_OK};
    the_probe.on_receive = receive;
    ok(ferry_worker_start_weight_update(r.worker));
    ok(ferry_worker_update_weights(r.worker,
                                   solo_update(&r, 0, r.checkpoint->count)));
    for (size_t i = 0; i < N_CALLS; i++)
        if (askers[i].status != FERRY_EBUSY)
            fail_msg("%s answers %s", calls[i].name,
                     ferry_status_name(askers[i].status));
    ok(ferry_worker_finish_weight_update(r.worker, "mine"));
    assert_null(toy_differs(r.toy, 4));
    solo_close(&r);
}

/* H5: what a server of several ranks calls in place of prepare. */
static void an_empty_round_ends_at_prepare(void **state)
{
    ferry_worker_options o = FERRY_WORKER_OPTIONS_INIT("probe");
    toy_options t = {.kind = TOY_A};
    bool ended = false;
    solo r;

    (void)state;
    solo_open(&r, &o, &t);
    ok(ferry_worker_init_transfer_engine(r.worker, "{}"));
    ok(solo_round(&r, 1, "v1"));
    ok(ferry_worker_start_weight_update(r.worker));
    ok(ferry__worker_prepare_or_end(r.worker, &ended));
    assert_true(ended);
    assert_string_equal(fleet_status(r.worker, "weight_version"), "v1");
    assert_int_equal(ferry_worker_commit_weight_update(r.worker, "v2"),
                     FERRY_EORDER);
    assert_null(toy_differs(r.toy, 1));

    toy_checkpoint_fill(r.checkpoint, 2);
    ok(ferry_worker_start_weight_update(r.worker));
    ok(ferry_worker_update_weights(r.worker,
                                   solo_update(&r, 0, r.checkpoint->count)));
    ok(ferry__worker_prepare_or_end(r.worker, &ended));
    assert_false(ended);
    ok(ferry_worker_commit_weight_update(r.worker, "v2"));
    assert_string_equal(fleet_status(r.worker, "weight_version"), "v2");
    assert_null(toy_differs(r.toy, 2));

    /* A round of which a part is missing fails there, too. */
    ok(ferry_worker_start_weight_update(r.worker));
    ok(ferry_worker_update_weights(
        r.worker,
        solo_update_of(&r, "model.layers.0.self_attn.q_proj.weight")));
    assert_true(ferry__worker_prepare_or_end(r.worker, &ended) < 0);
    assert_non_null(strstr(ferry_last_error(), "qkv_proj"));
    solo_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_call_in_the_middle_of_one_is_busy),
        cmocka_unit_test(an_empty_round_ends_at_prepare),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
