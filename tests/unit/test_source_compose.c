/* SPDX-License-Identifier: Apache-2.0 */
/* Dequantising, and adapters composed as a producer needs them (B7): names
 * that are not held, groups, changes between rounds, failures of memory. */
#include "base/alloc.h"
#include "harness/source_stream.h"

#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <cmocka.h>
#include <string.h>

#define F32  FERRY_DTYPE_F32
#define BF16 FERRY_DTYPE_BF16
#define E4M3 FERRY_DTYPE_F8_E4M3

/* ---- dequantise ---- */

/* E4M3 bits of 1, 2, 3, 4, -1, -2, 0.5, 8. */
static const unsigned char fp8[8] = {0x38, 0x40, 0x44, 0x48,
                                     0xB8, 0xC0, 0x30, 0x50};
static const float scales[4] = {2, 4, 8, 16}, one_scale[1] = {0.5f};
static const float blocks_f32[8] = {2, 4, 12, 16, -8, -16, 8, 128};
static const uint16_t half_bf16[8] = {0x3F00, 0x3F80, 0x3FC0, 0x4000,
                                      0xBF00, 0xBF80, 0x3E80, 0x4080};

static void b7_dequantise_blocks_and_tensors_either_order(void **state)
{
    const expected_param in[5] = {{"w.a_scale_inv", F32, 2, {2, 2}, scales},
                                  {"w.a", E4M3, 2, {2, 4}, fp8},
                                  {"w.b", E4M3, 1, {8}, fp8},
                                  {"k_scale", F32, 0, {0}, one_scale},
                                  {"w.b_scale_inv", F32, 0, {0}, one_scale}};
    const float b_f32[8] = {0.5f, 1, 1.5f, 2, -0.5f, -1, 0.25f, 4};
    const expected_param want[3] = {{"w.a", F32, 2, {2, 4}, blocks_f32},
                                    in[3],
                                    {"w.b", F32, 1, {8}, b_f32}};
    const expected_param tensor[2] = {{"w", E4M3, 2, {2, 4}, fp8},
                                      {"w_scale", F32, 1, {1}, one_scale}};
    const expected_param in_bf16 = {"w", BF16, 2, {2, 4}, half_bf16};
    ferry_source source, out = {0};
    source_stream s;

    (void)state;
    for (int kind = 0; kind < 2; kind++) {
        source = kind ? stream_of(&s, in, 5) : module_of(in, 5);
        assert_int_equal(
            ferry_source_dequantise(&source, "_scale_inv", F32, &out),
            FERRY_OK);
        assert_false(is_stable(&out));
        expect_pass(&out, want, 3);
        expect_pass(&out, want, 3);
        ferry_source_close(&out);
        source = kind ? stream_of(&s, tensor, 2) : module_of(tensor, 2);
        assert_int_equal(ferry_source_dequantise(&source, "_scale", BF16, &out),
                         FERRY_OK);
        expect_pass(&out, &in_bf16, 1);
        ferry_source_close(&out);
    }
    /* No pair at all: everything passes as it is. */
    source = module_of(plain_params, 4);
    assert_int_equal(ferry_source_dequantise(&source, "_scale", BF16, &out),
                     FERRY_OK);
    assert_true(is_stable(&out));
    expect_pass(&out, plain_params, 4);
    ferry_source_close(&out);
}

static void b7_dequantise_refusals(void **state)
{
    expected_param in[3] = {{"w", E4M3, 2, {2, 4}, fp8},
                            {"w_s", F32, 2, {2, 3}, f32_values},
                            {"w_s_s", F32, 0, {0}, one_scale}};
    ferry_source source = module_of(in, 2), out = {0};

    (void)state;
    expect_error(ferry_source_dequantise(&source, "_s", F32, &out),
                 FERRY_EMISMATCH,
                 "parameter w_s: scales of shape [2, 3] do "
                 "not divide the shape [2, 4] of w");
    expect_error(ferry_source_dequantise(&source, "", F32, &out), FERRY_EINVAL,
                 "suffix is empty");
    expect_error(ferry_source_dequantise(&source, "_s", FERRY_DTYPE_I8, &out),
                 FERRY_EINVAL, "int8");
    ferry_source_close(&source);
    in[1].shape[1] = 2;
    source = module_of(in, 3);
    expect_error(ferry_source_dequantise(&source, "_s", F32, &out),
                 FERRY_ENOTSUP, "scales of scales");
    ferry_source_close(&source);
    in[0].dtype = FERRY_DTYPE_I8;
    source = module_of(in, 2);
    expect_error(ferry_source_dequantise(&source, "_s", F32, &out),
                 FERRY_ENOTSUP,
                 "parameter w: dequantising needs floating "
                 "point, got int8");
    ferry_source_close(&source);
}

/* ---- all of them ---- */

/* B8: a name that a rank does not hold passes through every adapter. */
static void b8_names_that_are_not_held_pass_through(void **state)
{
    const expected_param in[5] = {{"q", F32, 2, {2, 2}, NULL},
                                  {"k", F32, 2, {2, 2}, f32_values},
                                  {"ab", F32, 2, {2, 2}, NULL},
                                  {"w", E4M3, 2, {2, 4}, fp8},
                                  {"w_scale", F32, 0, {0}, NULL}};
    const expected_param want[4] = {{"m.qk", BF16, 2, {4, 2}, NULL},
                                    {"m.a", BF16, 2, {1, 2}, NULL},
                                    {"m.b", BF16, 2, {1, 2}, NULL},
                                    {"m.w", BF16, 2, {2, 4}, NULL}};
    const char *qk[2] = {"q", "k"}, *ab[2] = {"a", "b"};
    const char *from[1] = {""}, *to[1] = {"m."};
    const int64_t sizes[2] = {1, 1};
    ferry_source source;
    source_stream s;

    (void)state;
    source = stream_of(&s, in, 5);
    assert_int_equal(ferry_source_fuse(&source, "qk", 0, qk, 2, &source),
                     FERRY_OK);
    assert_int_equal(
        ferry_source_split(&source, "ab", 0, ab, sizes, 2, &source), FERRY_OK);
    assert_int_equal(ferry_source_dequantise(&source, "_scale", F32, &source),
                     FERRY_OK);
    assert_int_equal(ferry_source_cast(&source, BF16, NULL, &source), FERRY_OK);
    assert_int_equal(ferry_source_rename(&source, from, to, 1, &source),
                     FERRY_OK);
    expect_pass(&source, want, 4);
    assert_non_null(source.ops->holds);
    for (int i = 0; i < 4; i++)
        assert_false(source.ops->holds(source.self, want[i].name));
    assert_false(source.ops->holds(source.self, "nowhere"));
    ferry_source_close(&source);
    /* The filter, and names that are held. */
    source = stream_of(&s, in, 5);
    assert_int_equal(ferry_source_filter(&source, ab, 1, 1, &source), FERRY_OK);
    expect_pass(&source, in + 2, 1);
    assert_false(source.ops->holds(source.self, "ab"));
    assert_false(source.ops->holds(source.self, "k"));
    ferry_source_close(&source);
    source = stream_of(&s, in, 5);
    assert_int_equal(ferry_source_cast(&source, BF16, NULL, &source), FERRY_OK);
    assert_true(source.ops->holds(source.self, "k"));
    ferry_source_close(&source);
    source = module_of(plain_params, 4);
    assert_int_equal(ferry_source_cast(&source, BF16, NULL, &source), FERRY_OK);
    assert_null(source.ops->holds);
    ferry_source_close(&source);
}

static void b10_groups_pass_where_order_and_count_are_kept(void **state)
{
    const char *from[1] = {""}, *to[1] = {"m."};
    const size_t *lengths;
    ferry_source source;
    size_t count;
    source_stream s;

    (void)state;
    source = stream_of(&s, plain_params, 4);
    assert_int_equal(ferry_source_rename(&source, from, to, 1, &source),
                     FERRY_OK);
    assert_int_equal(source.ops->groups(source.self, &lengths, &count),
                     FERRY_OK);
    assert_int_equal(count, 2);
    assert_int_equal(lengths[1], 3);
    to[0] = "m.step";
    assert_int_equal(ferry_source_filter(&source, to, 1, 0, &source), FERRY_OK);
    assert_null(source.ops->groups);
    ferry_source_close(&source);
}

/* B7: fused attention of two layers, out of order, split, renamed, put in
 * order and cast: what a Megatron-like trainer needs. */
static void b7_megatron_like_composition(void **state)
{
    const expected_param in[4] = {
        {"decoder.layers.1.qkv.weight", F32, 2, {4, 1}, f32_values + 4},
        {"decoder.layers.0.qkv.weight", F32, 2, {4, 1}, f32_values},
        {"decoder.layers.1.norm", F32, 1, {1}, f32_values + 9},
        {"output.weight", F32, 1, {1}, f32_values + 10}};
    const char *parts[3] = {"decoder.layers.*.q", "decoder.layers.*.k",
                            "decoder.layers.*.v"};
    const char *from[3] = {"decoder.layers.*.norm", "decoder.", "output."};
    const char *to[3] = {"model.layers.*.input_layernorm.weight", "model.",
                         "lm_head."};
    const int64_t sizes[3] = {2, 1, 1};
    const uint16_t *v = bf16_values;
    const expected_param want[8] = {
        {"model.layers.0.q", BF16, 2, {2, 1}, v},
        {"model.layers.0.k", BF16, 2, {1, 1}, v + 2},
        {"model.layers.0.v", BF16, 2, {1, 1}, v + 3},
        {"model.layers.1.q", BF16, 2, {2, 1}, v + 4},
        {"model.layers.1.k", BF16, 2, {1, 1}, v + 6},
        {"model.layers.1.v", BF16, 2, {1, 1}, v + 7},
        {"model.layers.1.input_layernorm.weight", BF16, 1, {1}, v + 9},
        {"lm_head.weight", BF16, 1, {1}, v + 10}};
    ferry_source source = module_of(in, 4);

    (void)state;
    assert_int_equal(ferry_source_split(&source,
                                        "decoder.layers.*.qkv."
                                        "weight",
                                        0, parts, sizes, 3, &source),
                     FERRY_OK);
    assert_int_equal(ferry_source_rename(&source, from, to, 3, &source),
                     FERRY_OK);
    assert_int_equal(ferry_source_reorder(&source, &source), FERRY_OK);
    assert_int_equal(ferry_source_cast(&source, BF16, NULL, &source), FERRY_OK);
    for (int pass = 0; pass < 3; pass++)
        expect_pass(&source, want, 8);
    ferry_source_close(&source);
}

/* B1: metadata that changed between rounds is read anew; B3: a pass that is
 * not what the inner metadata said fails by name. */
static void b1_changes_and_b3_divergence(void **state)
{
    const expected_param grown[2] = {{"m.a", BF16, 1, {2}, bf16_values},
                                     {"m.b", BF16, 1, {2}, bf16_values + 2}};
    const expected_param in[2] = {{"a", F32, 1, {2}, f32_values},
                                  {"b", F32, 1, {2}, f32_values + 2}};
    const char *from[1] = {""}, *to[1] = {"m."};
    ferry_source source;
    source_stream s;

    (void)state;
    source = stream_of(&s, in, 2);
    s.declared = s.yielded = 1;
    assert_int_equal(ferry_source_cast(&source, BF16, NULL, &source), FERRY_OK);
    assert_int_equal(ferry_source_rename(&source, from, to, 1, &source),
                     FERRY_OK);
    expect_pass(&source, grown, 1);
    s.yielded = 2;
    expect_error(drive_pass(&source), FERRY_EMISMATCH,
                 "parameter b: came after all 1");
    s.declared = 2;
    expect_pass(&source, grown, 2);
    s.yielded = 1;
    expect_error(drive_pass(&source), FERRY_EMISMATCH,
                 "parameter b: declared at position 1, but the pass ended");
    s.yielded = 2;
    s.params = grown;
    expect_error(drive_pass(&source), FERRY_EMISMATCH, "parameter a:");
    ferry_source_close(&source);
}

static void orders_of_calls_are_checked(void **state)
{
    ferry_source source = module_of(plain_params, 4);
    ferry_item item;

    (void)state;
    assert_int_equal(ferry_source_cast(&source, BF16, NULL, &source), FERRY_OK);
    source.ops->end(source.self);
    expect_error(source.ops->next(source.self, &item), FERRY_EORDER,
                 "cast source: next outside a pass");
    assert_int_equal(source.ops->begin(source.self), FERRY_OK);
    expect_error(source.ops->begin(source.self), FERRY_EORDER,
                 "cast source: begin during a pass");
    /* Closed in the middle of a pass, the inner pass is ended too. */
    ferry_source_close(&source);
}

/* Builds the whole chain; on failure the last whole source is closed. */
static ferry_status build_chain(ferry_source *source)
{
    const char *qk[2] = {"q.*", "k.*"}, *ab[2] = {"a", "b"};
    const char *from[1] = {""}, *to[1] = {"m."}, *drop[1] = {"m.none"};
    const int64_t sizes[2] = {1, 1};

    FERRY_TRY(ferry_source_split(source, "ab", 0, ab, sizes, 2, source));
    FERRY_TRY(ferry_source_reorder(source, source));
    FERRY_TRY(ferry_source_fuse(source, "qk.*", 0, qk, 2, source));
    FERRY_TRY(ferry_source_dequantise(source, "_scale", F32, source));
    FERRY_TRY(ferry_source_cast(source, BF16, NULL, source));
    FERRY_TRY(ferry_source_rename(source, from, to, 1, source));
    FERRY_TRY(ferry_source_filter(source, drop, 1, 0, source));
    return drive_pass(source);
}

static void every_allocation_may_fail(void **state)
{
    const expected_param in[6] = {{"q.0", F32, 2, {2, 2}, f32_values},
                                  {"k.0", F32, 2, {2, 2}, f32_values},
                                  {"ab", F32, 2, {2, 2}, f32_values},
                                  {"w", E4M3, 2, {2, 4}, fp8},
                                  {"w_scale", F32, 2, {2, 2}, scales},
                                  {"none", F32, 1, {0}, f32_values}};
    ferry_status st = FERRY_ENOMEM;
    uint64_t n = 0;

    (void)state;
    while (st != FERRY_DONE) {
        ferry_source source = module_of(in, 6);

        assert_true(n < 2000);
        ferry__fault_arm(FERRY__FAULT_ALLOC, ++n);
        st = build_chain(&source);
        ferry__fault_arm(FERRY__FAULT_ALLOC, 0);
        assert_true(st == FERRY_DONE || st == FERRY_ENOMEM);
        assert_non_null(source.ops);
        ferry_source_close(&source);
    }
    assert_true(n > 50);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(b7_dequantise_blocks_and_tensors_either_order),
        cmocka_unit_test(b7_dequantise_refusals),
        cmocka_unit_test(b8_names_that_are_not_held_pass_through),
        cmocka_unit_test(b10_groups_pass_where_order_and_count_are_kept),
        cmocka_unit_test(b7_megatron_like_composition),
        cmocka_unit_test(b1_changes_and_b3_divergence),
        cmocka_unit_test(orders_of_calls_are_checked),
        cmocka_unit_test(every_allocation_may_fail),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
