/* SPDX-License-Identifier: Apache-2.0 */
/* What is asked of a worker outside a round: its status, the plan, every
 * stored byte, loading a checkpoint from disk; and how it is made. */
#include "harness/fleet.h"
#include "harness/solo.h"

#include <jansson.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/alloc.h"
#include "harness/expect.h"

static void open_kind(solo *r, toy_kind kind, ferry_commit commit)
{
    ferry_worker_options o = FERRY_WORKER_OPTIONS_INIT("probe");
    toy_options t = {.kind = kind};

    o.commit = commit;
    solo_open(r, &o, &t);
    ok(ferry_worker_init_transfer_engine(r->worker, "{}"));
}

/* ---- status ---- */

static void j6_status_is_one_json_object_with_every_key(void **state)
{
    static const char *const keys[] = {
        "state",      "round", "target",  "weight_version", "serving",
        "reason",     "dirty", "failure", "counters",       "held_bytes",
        "peak_bytes", "path",  "phases",  "not_updated",    "commit",
        "backend",    "model", "spans"};
    char text[8192], cut[16];
    json_t *status;
    size_t need;
    solo r;

    (void)state;
    open_kind(&r, TOY_A, FERRY_COMMIT_INPLACE);
    ok(solo_round(&r, 1, "label \"one\""));
    need = ferry_worker_status(r.worker, text, sizeof(text));
    assert_int_equal(need, strlen(text));
    assert_int_equal(ferry_worker_status(r.worker, NULL, 0), need);
    ferry_worker_status(r.worker, cut, sizeof(cut));
    assert_int_equal(strlen(cut), sizeof(cut) - 1);
    assert_memory_equal(cut, text, sizeof(cut) - 1);
    status = json_loads(text, 0, NULL);
    assert_non_null(status);
    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++)
        if (json_object_get(status, keys[i]) == NULL)
            fail_msg("no %s in %s", keys[i], text);
    assert_int_equal(json_object_size(status), sizeof(keys) / sizeof(keys[0]));
    assert_string_equal(
        json_string_value(json_object_get(status, "weight_version")),
        "label \"one\"");
    json_decref(status);
    /* J2: declared = loaded, and the number of parameters. */
    {
        char want[256];
        uint64_t bytes = 0;

        for (size_t i = 0; i < r.checkpoint->count; i++)
            bytes += toy_bytes(&r.checkpoint->metas[i]);
        snprintf(want, sizeof(want),
                 "{\"bytes_declared\":%llu,\"bytes_received\":0,"
                 "\"bytes_loaded\":%llu,\"n_params\":%zu}",
                 (unsigned long long)bytes, (unsigned long long)bytes,
                 r.checkpoint->count);
        assert_string_equal(fleet_status(r.worker, "counters"), want);
    }
    solo_close(&r);
}

static void set_weight_version_only_sets_the_label(void **state)
{
    uint64_t sum;
    solo r;

    (void)state;
    open_kind(&r, TOY_A, FERRY_COMMIT_INPLACE);
    sum = toy_sum(r.toy);
    ok(ferry_worker_set_weight_version(r.worker, "x"));
    ok(ferry_worker_set_weight_version(r.worker, "y"));
    assert_string_equal(fleet_status(r.worker, "weight_version"), "y");
    assert_string_equal(fleet_status(r.worker, "state"), "idle");
    assert_true(toy_sum(r.toy) == sum);
    refused(ferry_worker_set_weight_version(r.worker, NULL), FERRY_EINVAL,
            "NULL");
    solo_close(&r);
}

/* ---- plan, bytes ---- */

static void the_plan_is_shown_without_touching_storage(void **state)
{
    ferry_param_meta bad = {.name = "no.such.weight", .dtype = FERRY_DTYPE_F32};
    json_t *plan;
    uint64_t sum;
    char *text;
    solo r;

    (void)state;
    open_kind(&r, TOY_M, FERRY_COMMIT_INPLACE);
    sum = toy_sum(r.toy);
    ok(ferry_worker_plan(r.worker, r.checkpoint->metas, r.checkpoint->count,
                         &text));
    plan = json_loads(text, 0, NULL);
    assert_non_null(plan);
    assert_non_null(strstr(text, "model.layers.1.mlp.experts.w13_weight"));
    json_decref(plan);
    ferry_free(text);
    refused(ferry_worker_plan(r.worker, &bad, 1, &text), FERRY_EUNKNOWN,
            "no.such.weight");
    refused(ferry_worker_plan(r.worker, NULL, 1, &text), FERRY_EINVAL, "NULL");
    assert_true(toy_sum(r.toy) == sum);
    solo_close(&r);
}

typedef struct seen {
    size_t n, bytes;
    char first[80], last[80];
} seen;

static void see(void *arg, const char *name, const void *bytes, size_t size)
{
    seen *s = arg;

    assert_non_null(bytes);
    if (s->n++ == 0)
        snprintf(s->first, sizeof(s->first), "%s", name);
    snprintf(s->last, sizeof(s->last), "%s", name);
    s->bytes += size;
}

static void every_stored_parameter_is_shown_in_order(void **state)
{
    seen s = {0};
    solo r;

    (void)state;
    open_kind(&r, TOY_A, FERRY_COMMIT_INPLACE);
    ok(ferry_worker_each_param(r.worker, see, &s));
    assert_int_equal(s.n, toy_model(r.toy)->n_params);
    assert_string_equal(s.first, "model.embed_tokens.weight");
    assert_string_equal(s.last, "lm_head.weight");
    ok(ferry_worker_start_weight_update(r.worker));
    refused(ferry_worker_each_param(r.worker, see, &s), FERRY_EBUSY,
            "in place");
    solo_close(&r);
    open_kind(&r, TOY_A, FERRY_COMMIT_STAGED);
    ok(ferry_worker_start_weight_update(r.worker));
    ok(ferry_worker_each_param(r.worker, see, &s));
    solo_close(&r);
}

/* ---- loading from disk ---- */

static void load_source_covers_everything_or_fails_by_name(void **state)
{
    ferry_source source;
    solo r;

    (void)state;
    open_kind(&r, TOY_A, FERRY_COMMIT_STAGED);
    toy_checkpoint_fill(r.checkpoint, 4);
    source = toy_checkpoint_source(r.checkpoint, 0, r.checkpoint->count - 1);
    refused(ferry_worker_load_source(r.worker, &source), FERRY_ECOVERAGE,
            "missing lm_head.weight");
    refused(ferry_worker_may_serve(r.worker), FERRY_ENOTREADY, "a full");
    ferry_source_close(&source);
    ferry_source_close(&source); /* a cleared one is fine */
    ferry_source_close(NULL);
    refused(ferry_worker_load_source(r.worker, &source), FERRY_EINVAL,
            "no table");
    refused(ferry_worker_load_source(r.worker, NULL), FERRY_EINVAL, "NULL");

    source = toy_checkpoint_source(r.checkpoint, 0, r.checkpoint->count);
    ok(ferry_worker_start_weight_update(r.worker));
    refused(ferry_worker_load_source(r.worker, &source), FERRY_EBUSY,
            "a weight update is open");
    ferry_worker_abort_weight_update(r.worker);
    ok(ferry_worker_load_source(r.worker, &source));
    ok(ferry_worker_may_serve(r.worker));
    assert_null(toy_differs(r.toy, 4));
    assert_string_equal(fleet_status(r.worker, "weight_version"), "null");
    /* A respawned rank of a fleet has bytes, but not the version. */
    ferry_worker_require_sync(r.worker);
    assert_int_equal(ferry_worker_may_serve(r.worker), FERRY_ENOTREADY);
    ok(solo_round(&r, 5, "v5"));
    ok(ferry_worker_may_serve(r.worker));
    ferry_source_close(&source);
    solo_close(&r);
}

/* ---- making ---- */

static void make_refused(const ferry_worker_options *o, const ferry_model *m,
                         ferry_status want, const char *words)
{
    ferry_worker *w = NULL;

    refused(ferry_worker_create(o, m, NULL, &w), want, words);
    assert_null(w);
}

static void options_and_models_are_checked(void **state)
{
    ferry_worker_options good = FERRY_WORKER_OPTIONS_INIT("probe"), o;
    toy_options to = {.kind = TOY_A};
    ferry_param params[2];
    ferry_worker *w = NULL;
    ferry_model m;
    toy *t;

    (void)state;
    probe_reset();
    t = toy_create(&to);
    m = *toy_model(t);
    make_refused(NULL, &m, FERRY_EINVAL, "options is NULL");
    make_refused(&good, NULL, FERRY_EINVAL, "model is NULL");
#define OPTION(change, status, words)                                          \
    o = good;                                                                  \
    change;                                                                    \
    make_refused(&o, &m, status, words)
    OPTION(o.size = 4, FERRY_EINVAL, "worker options of 4 bytes");
    OPTION(o.backend = "nope", FERRY_EUNKNOWN, "backend 'nope' is unknown");
    OPTION(o.tp_rank = 2; o.tp_size = 2, FERRY_EINVAL, "tp_rank 2");
    OPTION(o.dp_rank = -1, FERRY_EINVAL, "dp_rank -1");
    OPTION(o.deadline_ms = -1, FERRY_EINVAL, "deadline_ms is -1");
    OPTION(o.commit = (ferry_commit)7, FERRY_EINVAL, "commit is 7");
#undef OPTION
#define MODEL(change, words)                                                   \
    m = *toy_model(t);                                                         \
    memcpy(params, m.params, sizeof(params));                                  \
    m.params = params;                                                         \
    m.n_params = 2;                                                            \
    change;                                                                    \
    make_refused(&good, &m, FERRY_EINVAL, words)
    MODEL(m.size = 8, "model table of 8 bytes");
    MODEL(m.load = NULL, "has no loader");
    MODEL(m.params = NULL, "at NULL");
    MODEL(params[1].name = "", "stored parameter 1 has no name");
    MODEL(params[0].dtype = (ferry_dtype)99, "unknown dtype 99");
    MODEL(params[0].ndim = 9, "9 dimensions");
    MODEL(params[0].shape[0] = -1, "dimension 0 is -1");
    MODEL(params[0].data = NULL, "no storage");
    MODEL(params[0].valid_rows = 100, "100 valid rows");
#undef MODEL
    /* J5: structs of an older size; what they lack is zero. */
    o = good;
    o.size = offsetof(ferry_worker_options, commit);
    m = *toy_model(t);
    m.size = offsetof(ferry_model, checkpoint_name);
    ok(ferry_worker_create(&o, &m, NULL, &w));
    ok(ferry_worker_init_transfer_engine(w, "{}"));
    ferry_worker_destroy(&w);
    ferry_worker_destroy(&w);
    toy_free(t);
}

static void without_a_backend_the_calls_are_refused_in_words(void **state)
{
    ferry_worker_options o = FERRY_WORKER_OPTIONS_INIT(NULL);
    toy_options to = {.kind = TOY_A};
    const char *words = "Weight transfer not configured. Please set "
                        "weight_transfer_config to enable weight transfer.";
    solo r;

    (void)state;
    solo_open(&r, &o, &to);
    refused(ferry_worker_init_transfer_engine(r.worker, "{}"), FERRY_ENOTSUP,
            words);
    refused(ferry_worker_start_weight_update(r.worker), FERRY_ENOTSUP, words);
    refused(ferry_worker_start_draft_weight_update(r.worker), FERRY_ENOTSUP,
            words);
    refused(ferry_worker_update_weights(r.worker, "{}"), FERRY_ENOTSUP, words);
    refused(ferry_worker_prepare_weight_update(r.worker), FERRY_ENOTSUP, words);
    refused(ferry_worker_commit_weight_update(r.worker, NULL), FERRY_ENOTSUP,
            words);
    refused(ferry_worker_finish_weight_update(r.worker, NULL), FERRY_ENOTSUP,
            words);
    ok(ferry_worker_drain_pending(r.worker));
    ok(ferry_worker_shutdown_transfer_engine(r.worker));
    assert_false(ferry_worker_defers_processing(r.worker));
    assert_string_equal(fleet_status(r.worker, "backend"), "null");
    solo_close(&r);
}

/* ---- planted failures ---- */

/* Each allocation of a whole life fails once; what is left is always a worker
 * that takes the next round. */
static ferry_status life(ferry_commit commit, toy_kind kind, bool *worked)
{
    ferry_worker_options o = FERRY_WORKER_OPTIONS_INIT("probe");
    toy_options to = {.kind = kind};
    toy *t = toy_create(&to);
    toy_checkpoint *c = toy_checkpoint_create(&to);
    solo r = {t, c, NULL};
    ferry_status st;

    *worked = true;
    o.commit = commit;
    the_probe.on_receive = solo_load_all;
    the_probe.arg = c;
    st = ferry_worker_create(&o, toy_model(t), NULL, &r.worker);
    if (st == FERRY_OK)
        st = ferry_worker_init_transfer_engine(r.worker, "{}");
    if (st == FERRY_OK)
        st = solo_round(&r, 1, "v1");
    ferry__fault_arm(FERRY__FAULT_ALLOC, 0);
    ferry__fault_arm(FERRY__FAULT_MMAP, 0);
    if (r.worker != NULL) {
        if (ferry_worker_init_transfer_engine(r.worker, "{}") < 0 ||
            solo_round(&r, 2, "v2") < 0 || toy_differs(t, 2) != NULL)
            *worked = false;
        ferry_worker_destroy(&r.worker);
    }
    toy_free(t);
    toy_checkpoint_free(c);
    return st;
}

static void the_nth_allocation_fails_cleanly(void **state)
{
    (void)state;
    probe_reset();
    for (int commit = 0; commit < 2; commit++)
        for (int kind = TOY_A; kind <= TOY_B; kind++) {
            ferry_status st = FERRY_ENOMEM;
            uint64_t n = 0;

            while (st < 0) {
                bool worked;

                ferry__fault_arm(FERRY__FAULT_ALLOC, ++n);
                st = life((ferry_commit)commit, (toy_kind)kind, &worked);
                if (st < 0)
                    assert_int_equal(st, FERRY_ENOMEM);
                if (!worked)
                    fail_msg("allocation %d: the next round: %s", (int)n,
                             ferry_last_error());
                assert_true(n < 5000);
            }
            assert_true(n > 20);
        }
}

static void a_failing_mmap_of_the_staged_copy_is_clean(void **state)
{
    bool worked;

    (void)state;
    probe_reset();
    ferry__fault_arm(FERRY__FAULT_MMAP, 1);
    assert_int_equal(life(FERRY_COMMIT_STAGED, TOY_A, &worked), FERRY_ENOMEM);
    assert_true(worked);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(j6_status_is_one_json_object_with_every_key),
        cmocka_unit_test(set_weight_version_only_sets_the_label),
        cmocka_unit_test(the_plan_is_shown_without_touching_storage),
        cmocka_unit_test(every_stored_parameter_is_shown_in_order),
        cmocka_unit_test(load_source_covers_everything_or_fails_by_name),
        cmocka_unit_test(options_and_models_are_checked),
        cmocka_unit_test(without_a_backend_the_calls_are_refused_in_words),
        cmocka_unit_test(the_nth_allocation_fails_cleanly),
        cmocka_unit_test(a_failing_mmap_of_the_staged_copy_is_clean),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
