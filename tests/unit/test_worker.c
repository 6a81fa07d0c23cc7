/* SPDX-License-Identifier: Apache-2.0 */
/* The worker: what an update may say, what bytes may land, and when it
 * serves. (E2, E6, E7, H4, H5, J2; O-08, O-21, O-28, O-34, O-43.) */
#include "harness/fleet.h"
#include "harness/solo.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "harness/expect.h"

/* One update in a round of its own, which fails. */
static void update_refused(solo *r, const char *info, ferry_status want,
                           const char *words)
{
    int before = the_probe.n_receive;

    ok(ferry_worker_start_weight_update(r->worker));
    refused(ferry_worker_update_weights(r->worker, info), want, words);
    assert_int_equal(the_probe.n_receive, before);
    assert_string_equal(fleet_status(r->worker, "state"), "failed");
}

/* ---- the dict ---- */

static void o08_malformed_updates_are_refused_by_name(void **state)
{
    uint64_t sum;
    solo r;

    (void)state;
    solo_open_kind(&r, "probe", TOY_A, FERRY_COMMIT_INPLACE);
    sum = toy_sum(r.toy);
    update_refused(&r, NULL, FERRY_EINVAL, "NULL");
    update_refused(&r, "", FERRY_EINVAL, "update info");
    update_refused(&r, "7", FERRY_EINVAL, "not an object");
    update_refused(&r, "{\"names\":[],\"nmaes\":[]}", FERRY_EINVAL, "nmaes");
    update_refused(&r, "{\"names\":\"x\"}", FERRY_EINVAL, "names");
    update_refused(&r,
                   "{\"names\":[\"model.norm.weight\"],\"dtype_names\":[],"
                   "\"shapes\":[[4]]}",
                   FERRY_EINVAL, "dtype_names");
    update_refused(&r, "{\"packed\":true}", FERRY_EINVAL, "field packed ");
    update_refused(&r, "{\"packed_buffer_size_bytes\":128}", FERRY_EINVAL,
                   "packed_buffer_size_bytes is a wire parameter");
    update_refused(&r, "{\"packed_num_buffers\":2}", FERRY_EINVAL,
                   "packed_num_buffers is a wire parameter");
    assert_true(toy_sum(r.toy) == sum);
    ok(solo_round(&r, 2, NULL)); /* recoverable */
    assert_null(toy_differs(r.toy, 2));
    solo_close(&r);
}

static void o28_dtype_names_have_documented_answers(void **state)
{
    static const char *const good[] = {"bfloat16", "torch.bfloat16", "BFLOAT16",
                                       "bf16"};
    static const char *const bad[] = {"", "float13"};
    char info[256];
    solo r;

    (void)state;
    solo_open_kind(&r, "probe", TOY_A, FERRY_COMMIT_INPLACE);
    for (size_t i = 0; i < 4; i++) {
        snprintf(info, sizeof(info),
                 "{\"names\":[\"model.norm.weight\"],\"dtype_names\":"
                 "[\"%s\"],\"shapes\":[[4]]}",
                 good[i]);
        ok(ferry_worker_start_weight_update(r.worker));
        ok(ferry_worker_update_weights(r.worker, info));
        ok(ferry_worker_finish_weight_update(r.worker, NULL));
    }
    for (size_t i = 0; i < 2; i++) {
        snprintf(info, sizeof(info),
                 "{\"names\":[\"model.norm.weight\"],\"dtype_names\":"
                 "[\"%s\"],\"shapes\":[[4]]}",
                 bad[i]);
        ok(ferry_worker_start_weight_update(r.worker));
        assert_true(ferry_worker_update_weights(r.worker, info) < 0);
        assert_non_null(strstr(ferry_last_error(), "model.norm.weight"));
    }
    solo_close(&r);
}

static void e6_is_checkpoint_format_is_taken_as_the_engine_works(void **state)
{
    solo r;

    (void)state;
    solo_open_kind(&r, "probe", TOY_A, FERRY_COMMIT_INPLACE);
    ok(ferry_worker_start_weight_update(r.worker));
    ok(ferry_worker_update_weights(r.worker,
                                   "{\"is_checkpoint_format\":true}"));
    ok(ferry_worker_finish_weight_update(r.worker, NULL));
    update_refused(&r, "{\"is_checkpoint_format\":false}", FERRY_ENOTSUP,
                   "is_checkpoint_format is false");
    update_refused(&r, "{\"is_checkpoint_format\":1}", FERRY_EINVAL,
                   "is_checkpoint_format is not a bool");
    solo_close(&r);
    solo_open_kind(&r, "probe_kernel", TOY_A, FERRY_COMMIT_INPLACE);
    ok(ferry_worker_start_weight_update(r.worker));
    ok(ferry_worker_update_weights(r.worker,
                                   "{\"is_checkpoint_format\":false}"));
    ok(ferry_worker_finish_weight_update(r.worker, NULL));
    update_refused(&r, "{\"is_checkpoint_format\":true}", FERRY_ENOTSUP,
                   "kernel format only");
    solo_close(&r);
}

/* A list has an element for each worker: dp_rank * tp_size + tp_rank. */
static void a_list_picks_the_element_of_this_worker(void **state)
{
    ferry_worker_options o = FERRY_WORKER_OPTIONS_INIT("probe");
    toy_options t = {.kind = TOY_A, .tp_rank = 1, .tp_size = 2};
    char info[1024];
    solo r;

    (void)state;
    o.dp_rank = 1;
    o.dp_size = 2;
    o.tp_rank = 1;
    o.tp_size = 2;
    solo_open(&r, &o, &t);
    ok(ferry_worker_init_transfer_engine(r.worker, "{}"));
    snprintf(info, sizeof(info), "[{\"bad\":0},{\"bad\":1},{\"bad\":2},%s]",
             solo_update_of(&r, "model.norm.weight"));
    ok(ferry_worker_start_weight_update(r.worker));
    ok(ferry_worker_update_weights(r.worker, info));
    ok(ferry_worker_finish_weight_update(r.worker, NULL));
    assert_int_equal(the_probe.n_receive, 1);
    update_refused(&r, "[{},{},{}]", FERRY_EINVAL,
                   "a list of 3 elements; this worker's is number 3");
    update_refused(&r, "[0,0,0,0]", FERRY_EINVAL, "not an object");
    solo_close(&r);
}

static void empty_names_mean_as_last_round(void **state)
{
    solo r;

    (void)state;
    solo_open_kind(&r, "probe", TOY_A, FERRY_COMMIT_INPLACE);
    /* Before a finished round: a no-op. */
    ok(ferry_worker_start_weight_update(r.worker));
    ok(ferry_worker_update_weights(r.worker, "{}"));
    ok(ferry_worker_finish_weight_update(r.worker, "v0"));
    assert_int_equal(the_probe.n_receive, 0);
    assert_string_equal(fleet_status(r.worker, "weight_version"), "null");
    ok(solo_round(&r, 1, "v1"));
    /* After one: the same names, whatever number of updates it had. */
    toy_checkpoint_fill(r.checkpoint, 2);
    ok(ferry_worker_start_weight_update(r.worker));
    ok(ferry_worker_update_weights(
        r.worker, "{\"names\":[],\"dtype_names\":[],\"shapes\":[]}"));
    ok(ferry_worker_finish_weight_update(r.worker, "v2"));
    assert_int_equal(the_probe.n_receive, 2);
    assert_null(toy_differs(r.toy, 2));
    /* A new init forgets them. */
    ok(ferry_worker_init_transfer_engine(r.worker, "{}"));
    ok(ferry_worker_start_weight_update(r.worker));
    ok(ferry_worker_update_weights(r.worker, "{}"));
    ok(ferry_worker_finish_weight_update(r.worker, "v3"));
    assert_int_equal(the_probe.n_receive, 2);
    assert_string_equal(fleet_status(r.worker, "weight_version"), "v2");
    solo_close(&r);
}

/* ---- names ---- */

static void o43_names_and_shapes_are_checked_before_any_write(void **state)
{
    uint64_t sum;
    solo r;

    (void)state;
    solo_open_kind(&r, "probe", TOY_A, FERRY_COMMIT_INPLACE);
    sum = toy_sum(r.toy);
    update_refused(
        &r,
        "{\"names\":[\"model.norm.weight\",\"model.nrom.weight\"],"
        "\"dtype_names\":[\"float32\",\"float32\"],\"shapes\":[[4],[4]]}",
        FERRY_EUNKNOWN, "model.norm.weight");
    update_refused(
        &r,
        "{\"names\":[\"model.norm.weight\",\"model.norm.weight\"],"
        "\"dtype_names\":[\"float32\",\"float32\"],\"shapes\":[[4],[4]]}",
        FERRY_EEXIST, "model.norm.weight");
    update_refused(&r,
                   "{\"names\":[\"lm_head.weight\"],\"dtype_names\":"
                   "[\"float32\"],\"shapes\":[[8,5]]}",
                   FERRY_EMISMATCH, "lm_head.weight");
    update_refused(&r,
                   "{\"names\":[\"model.norm.weight\"],\"dtype_names\":"
                   "[\"int64\"],\"shapes\":[[4]]}",
                   FERRY_ENOTSUP, "model.norm.weight");
    assert_true(toy_sum(r.toy) == sum);
    solo_close(&r);
}

static void o34_a_name_may_come_again_in_a_later_update(void **state)
{
    size_t n;
    solo r;

    (void)state;
    solo_open_kind(&r, "probe", TOY_M, FERRY_COMMIT_INPLACE);
    n = r.checkpoint->count;
    toy_checkpoint_fill(r.checkpoint, 3);
    ok(ferry_worker_start_weight_update(r.worker));
    ok(ferry_worker_update_weights(r.worker, solo_update(&r, 0, n)));
    for (size_t i = 0; i < n; i += 3)
        ok(ferry_worker_update_weights(r.worker, solo_update(&r, i, 1)));
    ok(ferry_worker_finish_weight_update(r.worker, NULL));
    assert_null(toy_differs(r.toy, 3));
    solo_close(&r);
}

/* ---- what an engine may hand over ---- */

static ferry_status bad_handovers(const ferry_worker_host *host,
                                  ferry_worker_context *ctx, void *arg)
{
    toy_checkpoint *c = arg;
    int64_t shape[2] = {8, 4}, wrong[2] = {4, 8};
    float bytes[64] = {0};
    const ferry_box *boxes;
    ferry_tensor t;
    size_t n;

    (void)c;
    ok(ferry_tensor_init(&t, bytes, FERRY_DTYPE_F32, 2, shape));
    refused(host->load(ctx, 0, &t), FERRY_EMISMATCH,
            "declared dtype bfloat16, got float32");
    ok(ferry_tensor_init(&t, bytes, FERRY_DTYPE_BF16, 2, wrong));
    refused(host->load(ctx, 0, &t), FERRY_EMISMATCH,
            "declared shape [8, 4], got [4, 8]");
    ok(ferry_tensor_init(&t, NULL, FERRY_DTYPE_BF16, 2, shape));
    refused(host->load(ctx, 0, &t), FERRY_EINVAL, "without data");
    refused(host->load(ctx, 1, &t), FERRY_EINVAL,
            "index 1 is outside the 1 declared");
    refused(host->boxes(ctx, 1, &boxes, &n), FERRY_EINVAL, "index 1");
    refused(host->load_range(ctx, 0, bytes, 32, 1), FERRY_EMISMATCH,
            "expected element 0 next, got 32");
    refused(host->load_range(ctx, 0, bytes, 0, 31), FERRY_EINVAL,
            "multiple of 32");
    refused(host->load_range(ctx, 0, bytes, 0, 33), FERRY_EMISMATCH,
            "declared 32 elements, got 33");
    refused(host->load_box(ctx, 0, 1, bytes), FERRY_EINVAL,
            "box 1 of 1 does not exist");
    refused(host->expect_digest(ctx, 0, 1, 0), FERRY_EINVAL, "1 boxes here");
    ok(ferry_tensor_init(&t, bytes, FERRY_DTYPE_BF16, 2, shape));
    ok(host->load(ctx, 0, &t));
    refused(host->load(ctx, 0, &t), FERRY_EMISMATCH,
            "model.embed_tokens.weight: came twice in one update");
    refused(host->load_range(ctx, 0, bytes, 0, 32), FERRY_EMISMATCH, "twice");
    refused(host->load_box(ctx, 0, 0, bytes), FERRY_EMISMATCH, "twice");
    return FERRY_OK;
}

static void what_is_handed_over_must_be_what_was_declared(void **state)
{
    solo r;

    (void)state;
    solo_open_kind(&r, "probe", TOY_A, FERRY_COMMIT_INPLACE);
    the_probe.on_receive = bad_handovers;
    ok(ferry_worker_start_weight_update(r.worker));
    ok(ferry_worker_update_weights(r.worker, solo_update(&r, 0, 1)));
    ferry_worker_abort_weight_update(r.worker);
    solo_close(&r);
}

static ferry_status load_nothing(const ferry_worker_host *host,
                                 ferry_worker_context *ctx, void *arg)
{
    (void)host;
    (void)ctx;
    (void)arg;
    return FERRY_OK;
}

static ferry_status load_half(const ferry_worker_host *host,
                              ferry_worker_context *ctx, void *arg)
{
    toy_checkpoint *c = arg;
    size_t at = toy_checkpoint_find(c, "model.rows.weight");

    return host->load_range(ctx, 0, c->bytes[at], 0, 32);
}

/* O-21: an engine that answers success without bytes is no success. */
static void o21_declared_must_be_loaded(void **state)
{
    uint64_t sum;
    solo r;

    (void)state;
    solo_open_kind(&r, "probe", TOY_A, FERRY_COMMIT_INPLACE);
    sum = toy_sum(r.toy);
    the_probe.on_receive = load_nothing;
    ok(ferry_worker_start_weight_update(r.worker));
    refused(ferry_worker_update_weights(r.worker, solo_update(&r, 1, 2)),
            FERRY_ECOVERAGE, "model.layers.0.self_attn.q_proj.weight");
    assert_true(toy_sum(r.toy) == sum);
    solo_close(&r);

    solo_open_kind(&r, "probe", TOY_B, FERRY_COMMIT_INPLACE);
    the_probe.on_receive = load_half;
    ok(ferry_worker_start_weight_update(r.worker));
    refused(ferry_worker_update_weights(r.worker, solo_update(&r, 0, 1)),
            FERRY_ECOVERAGE, "declared 768 elements, only 32 came");
    solo_close(&r);
}

/* ---- digests ---- */

static ferry_status load_with_digests(const ferry_worker_host *host,
                                      ferry_worker_context *ctx, void *arg)
{
    size_t count, n;
    const ferry_box *boxes;

    host->want_digests(ctx, true);
    host->declared(ctx, &count);
    for (size_t i = 0; i < count; i++) {
        FERRY_TRY(solo_load_one(host, ctx, arg, i));
        FERRY_TRY(host->boxes(ctx, i, &boxes, &n));
        for (size_t k = 0; k < n; k++)
            FERRY_TRY(host->expect_digest(ctx, i, k, 12345));
    }
    return FERRY_OK;
}

static void j2_digests_are_compared_at_prepare(void **state)
{
    uint64_t sum;
    solo r;

    (void)state;
    solo_open_kind(&r, "probe", TOY_A, FERRY_COMMIT_STAGED);
    sum = toy_sum(r.toy);
    the_probe.on_receive = load_with_digests;
    ok(ferry_worker_start_weight_update(r.worker));
    ok(ferry_worker_update_weights(r.worker,
                                   solo_update(&r, 0, r.checkpoint->count)));
    refused(ferry_worker_prepare_weight_update(r.worker), FERRY_EDIGEST,
            "parameter model.embed_tokens.weight: box 0 has digest");
    assert_non_null(strstr(ferry_last_error(), "0000000000003039"));
    assert_true(toy_sum(r.toy) == sum);
    solo_close(&r);
}

static ferry_status count_buffers(const ferry_worker_host *host,
                                  ferry_worker_context *ctx, void *arg)
{
    assert_int_equal(host->options(ctx)->tp_size, 1);
    host->count_buffers(ctx, 1000);
    host->count_buffers(ctx, 500);
    host->count_buffers(ctx, -1500);
    host->set_path(ctx, "ring");
    assert_true(host->remaining_ms(ctx) > 1000);
    return solo_load_all(host, ctx, arg);
}

static void e7_peak_counts_what_an_engine_says_it_holds(void **state)
{
    solo r;

    (void)state;
    solo_open_kind(&r, "probe", TOY_A, FERRY_COMMIT_INPLACE);
    the_probe.on_receive = count_buffers;
    ok(solo_round(&r, 1, NULL));
    assert_string_equal(fleet_status(r.worker, "peak_bytes"), "1500");
    assert_string_equal(fleet_status(r.worker, "path"), "ring");
    solo_close(&r);
}

static ferry_status digest_of_the_second(const ferry_worker_host *host,
                                         ferry_worker_context *ctx, void *arg)
{
    host->want_digests(ctx, true);
    FERRY_TRY(solo_load_all(host, ctx, arg));
    return host->expect_digest(ctx, 1, 0, 7);
}

static void j2_a_promised_digest_must_be_there_for_every_box(void **state)
{
    solo r;

    (void)state;
    solo_open_kind(&r, "probe", TOY_A, FERRY_COMMIT_STAGED);
    the_probe.on_receive = digest_of_the_second;
    ok(ferry_worker_start_weight_update(r.worker));
    ok(ferry_worker_update_weights(r.worker, solo_update(&r, 0, 2)));
    refused(ferry_worker_finish_weight_update(r.worker, NULL), FERRY_EDIGEST,
            "parameter model.embed_tokens.weight: the sender stated no "
            "digest for box 0");
    solo_close(&r);
}

/* ---- kernel format: E6 ---- */

static ferry_status write_kernels(const ferry_worker_host *host,
                                  ferry_worker_context *ctx, void *arg)
{
    const ferry_model *m = host->model(ctx);
    int limit = *(int *)arg;
    void *bytes;
    size_t size;

    for (size_t i = 0; i < m->n_params && (int)i < limit; i++) {
        if (m->params[i].flags & FERRY_PARAM_RUNTIME) {
            refused(host->kernel_storage(ctx, i, &bytes, &size), FERRY_EINVAL,
                    "runtime parameter");
            continue;
        }
        FERRY_TRY(host->kernel_storage(ctx, i, &bytes, &size));
        memset(bytes, 0x11, size);
    }
    assert_int_equal(host->kernel_storage(ctx, m->n_params, &bytes, &size),
                     FERRY_EINVAL);
    return limit < 0 ? (host->fail)(FERRY_EPEER, "stopped") : FERRY_OK;
}

static void e6_kernel_format_goes_straight_in_place_or_staged(void **state)
{
    int limit = 1000;
    uint64_t sum;
    solo r;

    (void)state;
    for (int commit = 0; commit < 2; commit++) {
        solo_open_kind(&r, "probe_kernel", TOY_A, (ferry_commit)commit);
        the_probe.on_finish = write_kernels;
        the_probe.arg = &limit;
        limit = 1000;
        assert_int_equal(ferry_worker_may_serve(r.worker), FERRY_ENOTREADY);
        ok(ferry_worker_start_weight_update(r.worker));
        ok(ferry_worker_finish_weight_update(r.worker, "kernel"));
        ok(ferry_worker_may_serve(r.worker));
        assert_string_equal(fleet_status(r.worker, "weight_version"), "kernel");
        assert_int_equal(*(char *)toy_model(r.toy)->params[0].data, 0x11);
        /* Only the first slot: the rest keeps its bytes, staged or not. */
        limit = 1;
        memset(toy_model(r.toy)->params[1].data, 0x22, 4);
        ok(ferry_worker_start_weight_update(r.worker));
        ok(ferry_worker_finish_weight_update(r.worker, NULL));
        assert_int_equal(*(char *)toy_model(r.toy)->params[1].data, 0x22);
        sum = toy_sum(r.toy);
        limit = -1;
        ok(ferry_worker_start_weight_update(r.worker));
        assert_int_equal(ferry_worker_finish_weight_update(r.worker, NULL),
                         FERRY_EPEER);
        assert_true(toy_sum(r.toy) == sum);
        solo_close(&r);
    }
}

/* ---- H4: when it serves ---- */

static int fail_after;

static ferry_status load_then_fail(const ferry_worker_host *host,
                                   ferry_worker_context *ctx, void *arg)
{
    for (int i = 0; i < fail_after; i++)
        FERRY_TRY(solo_load_one(host, ctx, arg, (size_t)i));
    return (host->fail)(FERRY_ECONN, "the trainer went away");
}

static void h4_in_place_refuses_from_first_write_to_full_round(void **state)
{
    solo r;

    (void)state;
    solo_open_kind(&r, "probe", TOY_A, FERRY_COMMIT_INPLACE);
    refused(ferry_worker_may_serve(r.worker), FERRY_ENOTREADY,
            "no weights yet");
    ok(solo_round(&r, 1, "v1"));
    ok(ferry_worker_may_serve(r.worker));

    /* Open, nothing written: the version before is whole. */
    ok(ferry_worker_start_weight_update(r.worker));
    ok(ferry_worker_may_serve(r.worker));
    ok(ferry_worker_update_weights(r.worker,
                                   solo_update_of(&r, "model.norm.weight")));
    refused(ferry_worker_may_serve(r.worker), FERRY_ENOTREADY,
            "a weight update is writing");
    ok(ferry_worker_finish_weight_update(r.worker, NULL));
    ok(ferry_worker_may_serve(r.worker));

    the_probe.on_receive = load_then_fail;
    fail_after = 0;
    assert_int_equal(solo_round(&r, 2, NULL), FERRY_ECONN);
    ok(ferry_worker_may_serve(r.worker));
    assert_null(toy_differs(r.toy, 1));
    fail_after = 2;
    assert_int_equal(solo_round(&r, 2, NULL), FERRY_ECONN);
    refused(ferry_worker_may_serve(r.worker), FERRY_ENOTREADY,
            "failed after its first write; a full one must finish first: "
            "the trainer went away");
    assert_string_equal(fleet_status(r.worker, "dirty"), "true");
    assert_string_equal(fleet_status(r.worker, "serving"), "false");

    /* A partial round does not heal it; a full one does. */
    the_probe.on_receive = solo_load_all;
    ok(ferry_worker_start_weight_update(r.worker));
    ok(ferry_worker_update_weights(r.worker,
                                   solo_update_of(&r, "model.norm.weight")));
    ok(ferry_worker_finish_weight_update(r.worker, NULL));
    refused(ferry_worker_may_serve(r.worker), FERRY_ENOTREADY,
            "an earlier weight update failed");
    ok(solo_round(&r, 3, "v3"));
    ok(ferry_worker_may_serve(r.worker));
    assert_null(toy_differs(r.toy, 3));
    solo_close(&r);
}

static void h4_staged_serves_throughout_and_changes_not_one_byte(void **state)
{
    uint64_t sum;
    solo r;

    (void)state;
    solo_open_kind(&r, "probe", TOY_M, FERRY_COMMIT_STAGED);
    ok(solo_round(&r, 1, "v1"));
    sum = toy_sum(r.toy);
    the_probe.on_receive = load_then_fail;
    for (fail_after = 0; fail_after < (int)r.checkpoint->count;
         fail_after += 5) {
        assert_int_equal(solo_round(&r, 2, "v2"), FERRY_ECONN);
        assert_true(toy_sum(r.toy) == sum);
        ok(ferry_worker_may_serve(r.worker));
    }
    the_probe.on_receive = solo_load_all;
    ok(ferry_worker_start_weight_update(r.worker));
    toy_checkpoint_fill(r.checkpoint, 3);
    ok(ferry_worker_update_weights(r.worker,
                                   solo_update(&r, 0, r.checkpoint->count)));
    ok(ferry_worker_may_serve(r.worker));
    ok(ferry_worker_prepare_weight_update(r.worker));
    assert_true(toy_sum(r.toy) == sum);
    ok(ferry_worker_may_serve(r.worker));
    ok(ferry_worker_commit_weight_update(r.worker, "v3"));
    assert_null(toy_differs(r.toy, 3));
    assert_string_equal(fleet_status(r.worker, "weight_version"), "v3");
    solo_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(o08_malformed_updates_are_refused_by_name),
        cmocka_unit_test(o28_dtype_names_have_documented_answers),
        cmocka_unit_test(e6_is_checkpoint_format_is_taken_as_the_engine_works),
        cmocka_unit_test(a_list_picks_the_element_of_this_worker),
        cmocka_unit_test(empty_names_mean_as_last_round),
        cmocka_unit_test(o43_names_and_shapes_are_checked_before_any_write),
        cmocka_unit_test(o34_a_name_may_come_again_in_a_later_update),
        cmocka_unit_test(what_is_handed_over_must_be_what_was_declared),
        cmocka_unit_test(o21_declared_must_be_loaded),
        cmocka_unit_test(j2_digests_are_compared_at_prepare),
        cmocka_unit_test(e7_peak_counts_what_an_engine_says_it_holds),
        cmocka_unit_test(j2_a_promised_digest_must_be_there_for_every_box),
        cmocka_unit_test(e6_kernel_format_goes_straight_in_place_or_staged),
        cmocka_unit_test(h4_in_place_refuses_from_first_write_to_full_round),
        cmocka_unit_test(h4_staged_serves_throughout_and_changes_not_one_byte),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
