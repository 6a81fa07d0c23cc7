/* SPDX-License-Identifier: Apache-2.0 */
/* A worker that is in a call answers every other call of the control plane
 * with FERRY_EBUSY, and the round goes on as if nobody had asked. */
#include "harness/solo.h"

#include <ferry/ferry.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

static void ok(ferry_status st)
{
    if (st != FERRY_OK)
        fail_msg("%s: %s", ferry_status_name(st), ferry_last_error());
}

typedef struct others {
    solo *r;
    const char *update;
    ferry_status init, shutdown, start, update_weights, drain, prepare, commit,
        finish, load, plan;
} others;

static void *call_all(void *arg)
{
    others *o = arg;
    ferry_worker *w = o->r->worker;
    toy_checkpoint *c = o->r->checkpoint;
    ferry_source source = toy_checkpoint_source(c, 0, c->count);
    char *json = NULL;

    o->init = ferry_worker_init_transfer_engine(w, "{}");
    o->shutdown = ferry_worker_shutdown_transfer_engine(w);
    o->start = ferry_worker_start_weight_update(w);
    o->update_weights = ferry_worker_update_weights(w, o->update);
    o->drain = ferry_worker_drain_pending(w);
    o->prepare = ferry_worker_prepare_weight_update(w);
    o->commit = ferry_worker_commit_weight_update(w, "other");
    o->finish = ferry_worker_finish_weight_update(w, "other");
    o->load = ferry_worker_load_source(w, &source);
    o->plan = ferry_worker_plan(w, c->metas, c->count, &json);
    ferry_free(json);
    ferry_source_close(&source);
    return NULL;
}

static others *asked;

/* In the middle of an update, another thread asks for everything. */
static ferry_status receive(const ferry_worker_host *host,
                            ferry_worker_context *ctx, void *arg)
{
    pthread_t thread;

    if (pthread_create(&thread, NULL, call_all, asked) != 0)
        return FERRY_EINTERNAL;
    pthread_join(thread, NULL);
    return solo_load_all(host, ctx, arg);
}

static void every_call_in_the_middle_of_one_is_busy(void **state)
{
    ferry_worker_options o = FERRY_WORKER_OPTIONS_INIT("probe");
    toy_options t = {.kind = TOY_A};
    others seen = {0};
    solo r;

    (void)state;
    solo_open(&r, &o, &t);
    ok(ferry_worker_init_transfer_engine(r.worker, "{}"));
    toy_checkpoint_fill(r.checkpoint, 4);
    seen.r = &r;
    seen.update = "{}";
    asked = &seen;
    the_probe.on_receive = receive;
    ok(ferry_worker_start_weight_update(r.worker));
    ok(ferry_worker_update_weights(r.worker,
                                   solo_update(&r, 0, r.checkpoint->count)));
    assert_int_equal(seen.init, FERRY_EBUSY);
    assert_int_equal(seen.shutdown, FERRY_EBUSY);
    assert_int_equal(seen.start, FERRY_EBUSY);
    assert_int_equal(seen.update_weights, FERRY_EBUSY);
    assert_int_equal(seen.drain, FERRY_EBUSY);
    assert_int_equal(seen.prepare, FERRY_EBUSY);
    assert_int_equal(seen.commit, FERRY_EBUSY);
    assert_int_equal(seen.finish, FERRY_EBUSY);
    assert_int_equal(seen.load, FERRY_EBUSY);
    assert_int_equal(seen.plan, FERRY_EBUSY);
    ok(ferry_worker_finish_weight_update(r.worker, "mine"));
    assert_null(toy_differs(r.toy, 4));
    solo_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_call_in_the_middle_of_one_is_busy),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
