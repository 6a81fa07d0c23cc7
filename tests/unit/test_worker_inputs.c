/* SPDX-License-Identifier: Apache-2.0 */
/* The worker: parameters made of several inputs, inputs that wait for each
 * other, tied names. (H4; O-34, O-38, O-40, O-42, O-45.) */
#include "harness/fleet.h"
#include "harness/solo.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "harness/expect.h"

/* ---- steps: O-38, O-40 ---- */

static ferry_status start_part(solo *r, const char *const *names, size_t n)
{
    FERRY_TRY(ferry_worker_start_weight_update(r->worker));
    for (size_t i = 0; i < n; i++)
        FERRY_TRY(ferry_worker_update_weights(r->worker,
                                              solo_update_of(r, names[i])));
    return FERRY_OK;
}

static void o40_a_missing_step_input_is_named(void **state)
{
    const char *name = "model.layers.1.proj.weight";
    solo r;

    (void)state;
    solo_open_kind(&r, "probe", TOY_Q, FERRY_COMMIT_INPLACE);
    ok(start_part(&r, &name, 1));
    assert_string_equal(fleet_status(r.worker, "held_bytes"), "16");
    refused(ferry_worker_finish_weight_update(r.worker, NULL), FERRY_ECOVERAGE,
            "model.layers.1.proj.weight_scale_inv");
    assert_string_equal(fleet_status(r.worker, "held_bytes"), "0");
    /* Nothing was written: the bytes are the poison of before. */
    assert_string_equal(fleet_status(r.worker, "dirty"), "false");
    solo_close(&r);
}

static void o34_a_step_input_that_comes_again_is_no_open_step(void **state)
{
    const char *const names[] = {"model.layers.0.proj.weight",
                                 "model.layers.0.proj.weight_scale_inv",
                                 "model.layers.0.proj.weight"};
    solo r;

    (void)state;
    solo_open_kind(&r, "probe", TOY_Q, FERRY_COMMIT_INPLACE);
    toy_checkpoint_fill(r.checkpoint, 7);
    ok(start_part(&r, names, 3));
    ok(ferry_worker_finish_weight_update(r.worker, NULL));
    assert_null(toy_slot_differs(r.toy, "model.layers.0.proj.weight", 7));
    /* A different value needs the other input again. */
    ok(start_part(&r, names, 2));
    toy_checkpoint_fill(r.checkpoint, 8);
    ok(ferry_worker_update_weights(r.worker, solo_update_of(&r, names[0])));
    refused(ferry_worker_finish_weight_update(r.worker, NULL), FERRY_ECOVERAGE,
            names[1]);
    solo_close(&r);
}

static void o38_held_inputs_are_counted_warned_of_and_capped(void **state)
{
    ferry_worker_options o = FERRY_WORKER_OPTIONS_INIT("probe");
    toy_options t = {.kind = TOY_Q, .n_layers = 32};
    char name[64];
    uint64_t sum;
    solo r;

    (void)state;
    o.held_limit_bytes = 16 * 32 + 40;
    solo_open(&r, &o, &t);
    ok(ferry_worker_init_transfer_engine(r.worker, "{}"));
    toy_checkpoint_fill(r.checkpoint, 2);
    /* All weights, then all scales, then the rest: by kind, not by layer. */
    ok(ferry_worker_start_weight_update(r.worker));
    for (int kind = 0; kind < 6; kind++)
        for (int l = 0; l < 32; l++) {
            static const char *const kinds[] = {
                "proj.weight", "proj.weight_scale_inv", "k_scale", "A", "D",
                "dt"};

            snprintf(name, sizeof(name), "model.layers.%d.%s", l, kinds[kind]);
            ok(ferry_worker_update_weights(r.worker, solo_update_of(&r, name)));
        }
    ok(ferry_worker_finish_weight_update(r.worker, NULL));
    assert_null(toy_differs(r.toy, 2));
    assert_int_equal(solo_warnings(), 1);
    assert_non_null(
        strstr(solo_last_warning(), "model.layers.0.proj.weight.step"));
    assert_string_equal(fleet_status(r.worker, "peak_bytes"), "528");
    solo_close(&r);

    o.held_limit_bytes = 2 * 16;
    o.has_weights = 1;
    solo_open(&r, &o, &t);
    ok(ferry_worker_init_transfer_engine(r.worker, "{}"));
    sum = toy_sum(r.toy);
    ok(ferry_worker_start_weight_update(r.worker));
    for (int l = 0; l < 2; l++) {
        snprintf(name, sizeof(name), "model.layers.%d.proj.weight", l);
        ok(ferry_worker_update_weights(r.worker, solo_update_of(&r, name)));
    }
    refused(ferry_worker_update_weights(
                r.worker, solo_update_of(&r, "model.layers.2.proj.weight")),
            FERRY_ENOMEM, "would take 48 bytes, the limit is 32");
    assert_non_null(strstr(ferry_last_error(),
                           "model.layers.0.proj.weight.step, "
                           "model.layers.1.proj.weight.step"));
    assert_true(toy_sum(r.toy) == sum); /* old weights still served */
    ok(ferry_worker_may_serve(r.worker));
    solo_close(&r);
}

static void o42_a_transform_is_of_the_checkpoint_value_only(void **state)
{
    const char *name = "model.layers.0.dt";
    float x[2] = {0.0f, 1.0f};
    const float *stored;
    solo r;

    (void)state;
    solo_open_kind(&r, "probe", TOY_Q, FERRY_COMMIT_INPLACE);
    memcpy(r.checkpoint->bytes[toy_checkpoint_find(r.checkpoint, name)], x,
           sizeof(x));
    stored = toy_model(r.toy)->params[toy_slot(r.toy, name)].data;
    for (int k = 0; k < 5; k++) {
        ok(start_part(&r, &name, 1));
        ok(ferry_worker_finish_weight_update(r.worker, NULL));
        assert_true(stored[0] == -1.0f);
        assert_true(fabsf(stored[1] + 2.71828f) < 1e-5f);
    }
    solo_close(&r);
}

/* ---- tied: O-45 ---- */

static ferry_status interleave(const ferry_worker_host *host,
                               ferry_worker_context *ctx, void *arg)
{
    toy_checkpoint *c = arg;
    size_t embed = toy_checkpoint_find(c, "model.embed_tokens.weight");
    size_t head = toy_checkpoint_find(c, "lm_head.weight");
    const ferry_param_meta *declared;
    size_t count, e = 0, h = 0;

    declared = host->declared(ctx, &count);
    for (size_t i = 0; i < count; i++) {
        if (strcmp(declared[i].name, "model.embed_tokens.weight") == 0)
            e = i;
        else if (strcmp(declared[i].name, "lm_head.weight") == 0)
            h = i;
        else
            FERRY_TRY(solo_load_one(host, ctx, c, i));
    }
    /* The head's first range comes while the embedding is half there. */
    FERRY_TRY(host->load_range(ctx, e, c->bytes[embed], 0, 0));
    FERRY_TRY(host->load_range(ctx, h, c->bytes[head], 0, 0));
    FERRY_TRY(host->load_range(ctx, e, c->bytes[embed], 0, 32));
    return host->load_range(ctx, h, c->bytes[head], 0, 32);
}

static void o45_tied_names_compare_in_either_order(void **state)
{
    ferry_worker_options o = FERRY_WORKER_OPTIONS_INIT("probe");
    toy_options t = {.kind = TOY_A, .tied = 1};
    const char *const order[2][2] = {
        {"model.embed_tokens.weight", "lm_head.weight"},
        {"lm_head.weight", "model.embed_tokens.weight"}};
    solo r;

    (void)state;
    solo_open(&r, &o, &t);
    ok(ferry_worker_init_transfer_engine(r.worker, "{}"));
    for (int k = 0; k < 2; k++) {
        toy_checkpoint_fill(r.checkpoint, (uint32_t)k + 1);
        ok(start_part(&r, order[k], 2));
        ok(ferry_worker_finish_weight_update(r.worker, NULL));
        assert_null(toy_slot_differs(r.toy, "model.embed_tokens.weight",
                                     (uint32_t)k + 1));
    }
    the_probe.on_receive = interleave;
    ok(solo_round(&r, 5, NULL));
    assert_null(toy_differs(r.toy, 5));
    the_probe.on_receive = solo_load_all;
    for (int k = 0; k < 2; k++) {
        ((char *)r.checkpoint
             ->bytes[toy_checkpoint_find(r.checkpoint, "lm_head.weight")])[0] ^=
            1;
        refused(start_part(&r, order[k], 2), FERRY_EMISMATCH,
                "model.embed_tokens.weight");
        assert_non_null(strstr(ferry_last_error(), "lm_head.weight"));
        toy_checkpoint_fill(r.checkpoint, 5);
    }
    solo_close(&r);
}

/* ---- pieces that interleave ---- */

static int64_t head_flip;

/* The embedding and the head come by turns, half by half, so that the head
 * cannot be compared when it comes. */
static ferry_status by_turns(const ferry_worker_host *host,
                             ferry_worker_context *ctx, void *arg)
{
    toy_checkpoint *c = arg;
    const char *e = c->bytes[toy_checkpoint_find(c, "model.embed_tokens."
                                                    "weight")];
    const char *h = c->bytes[toy_checkpoint_find(c, "lm_head.weight")];
    char copy[2][128];

    host->want_digests(ctx, true);
    for (int64_t half = 0; half < 2; half++) {
        memcpy(copy[half], h + half * 128, 128);
        if (head_flip / 128 == half)
            copy[half][head_flip % 128] ^= 1;
        FERRY_TRY(host->load_range(ctx, 0, e + half * 128, half * 64, 64));
        FERRY_TRY(host->load_range(ctx, 1, copy[half], half * 64, 64));
    }
    return FERRY_OK;
}

static void o45_tied_names_that_come_by_turns_are_compared(void **state)
{
    ferry_worker_options o = FERRY_WORKER_OPTIONS_INIT("probe");
    toy_options t = {.kind = TOY_A, .tied = 1, .vocab = 32};
    char info[256];
    solo r;

    (void)state;
    solo_open(&r, &o, &t);
    ok(ferry_worker_init_transfer_engine(r.worker, "{}"));
    snprintf(info, sizeof(info),
             "{\"names\":[\"model.embed_tokens.weight\",\"lm_head.weight\"],"
             "\"dtype_names\":[\"bfloat16\",\"bfloat16\"],"
             "\"shapes\":[[32,4],[32,4]]}");
    the_probe.on_receive = by_turns;
    head_flip = -1000;
    toy_checkpoint_fill(r.checkpoint, 3);
    ok(ferry_worker_start_weight_update(r.worker));
    ok(ferry_worker_update_weights(r.worker, info));
    assert_string_equal(fleet_status(r.worker, "held_bytes"), "256");
    ok(ferry_worker_finish_weight_update(r.worker, NULL));
    assert_string_equal(fleet_status(r.worker, "held_bytes"), "0");
    assert_null(toy_slot_differs(r.toy, "model.embed_tokens.weight", 3));
    for (head_flip = 3; head_flip < 256; head_flip += 200) {
        ok(ferry_worker_start_weight_update(r.worker));
        ok(ferry_worker_update_weights(r.worker, info));
        refused(ferry_worker_finish_weight_update(r.worker, NULL),
                FERRY_EMISMATCH,
                "parameters model.embed_tokens.weight and lm_head.weight are "
                "tied");
        assert_string_equal(fleet_status(r.worker, "held_bytes"), "0");
    }
    solo_close(&r);
}

/* O-34: the name that landed may land again, until its twin was compared. */
static void o45_a_tied_name_may_come_again_before_its_twin(void **state)
{
    ferry_worker_options o = FERRY_WORKER_OPTIONS_INIT("probe");
    toy_options t = {.kind = TOY_A, .tied = 1};
    const char *const names[] = {"model.embed_tokens.weight", "lm_head.weight"};
    solo r;

    (void)state;
    solo_open(&r, &o, &t);
    ok(ferry_worker_init_transfer_engine(r.worker, "{}"));
    toy_checkpoint_fill(r.checkpoint, 1);
    ok(start_part(&r, names, 1));
    toy_checkpoint_fill(r.checkpoint, 2);
    ok(ferry_worker_update_weights(r.worker, solo_update_of(&r, names[0])));
    ok(ferry_worker_update_weights(r.worker, solo_update_of(&r, names[1])));
    toy_checkpoint_fill(r.checkpoint, 3);
    refused(ferry_worker_update_weights(r.worker, solo_update_of(&r, names[0])),
            FERRY_EMISMATCH, names[1]);
    solo_close(&r);
}

static void o34_a_held_input_may_be_replaced(void **state)
{
    const char *const names[] = {"model.layers.0.proj.weight",
                                 "model.layers.0.proj.weight_scale_inv"};
    solo r;

    (void)state;
    solo_open_kind(&r, "probe", TOY_Q, FERRY_COMMIT_INPLACE);
    toy_checkpoint_fill(r.checkpoint, 1);
    ok(start_part(&r, names, 1));
    toy_checkpoint_fill(r.checkpoint, 2);
    ok(ferry_worker_update_weights(r.worker, solo_update_of(&r, names[0])));
    assert_string_equal(fleet_status(r.worker, "held_bytes"), "16");
    ok(ferry_worker_update_weights(r.worker, solo_update_of(&r, names[1])));
    ok(ferry_worker_finish_weight_update(r.worker, NULL));
    assert_null(toy_slot_differs(r.toy, names[0], 2));
    solo_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(o40_a_missing_step_input_is_named),
        cmocka_unit_test(o34_a_step_input_that_comes_again_is_no_open_step),
        cmocka_unit_test(o38_held_inputs_are_counted_warned_of_and_capped),
        cmocka_unit_test(o42_a_transform_is_of_the_checkpoint_value_only),
        cmocka_unit_test(o45_tied_names_compare_in_either_order),
        cmocka_unit_test(o45_tied_names_that_come_by_turns_are_compared),
        cmocka_unit_test(o45_a_tied_name_may_come_again_before_its_twin),
        cmocka_unit_test(o34_a_held_input_may_be_replaced),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
