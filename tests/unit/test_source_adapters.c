/* SPDX-License-Identifier: Apache-2.0 */
/* Each adapter alone (B7), over tensors in memory and over a stream. */
#include "harness/source_stream.h"

#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <cmocka.h>
#include <string.h>

#define F32  FERRY_DTYPE_F32
#define BF16 FERRY_DTYPE_BF16

/* ---- rename ---- */

static void b7_rename_by_prefix_and_template(void **state)
{
    const char *from[3] = {"model.layers.*.a", "model.", "model.embed"};
    const char *to[3] = {"blk.*.attn", "m.", "unused"};
    expected_param want[4];
    ferry_source source = module_of(plain_params, 4), renamed = {0};

    (void)state;
    memcpy(want, plain_params, sizeof(want));
    want[0].name = "m.embed.weight";
    want[1].name = "blk.0.attn";
    want[2].name = "blk.1.attn";
    assert_int_equal(ferry_source_rename(&source, from, to, 3, &renamed),
                     FERRY_OK);
    assert_null(source.ops);
    assert_true(is_stable(&renamed));
    expect_pass(&renamed, want, 4);
    expect_pass(&renamed, want, 4);
    /* One variable may be both. */
    from[0] = "";
    to[0] = "x.";
    assert_int_equal(ferry_source_rename(&renamed, from, to, 1, &renamed),
                     FERRY_OK);
    want[0].name = "x.m.embed.weight";
    want[1].name = "x.blk.0.attn";
    want[2].name = "x.blk.1.attn";
    want[3].name = "x.step";
    expect_pass(&renamed, want, 4);
    ferry_source_close(&renamed);
}

static void b7_rename_names_all_three_of_a_collision(void **state)
{
    const char *from[1] = {"model.layers.*.a"}, *to[1] = {"one*"};
    const char *both[2] = {"model.layers.0", "model.layers.1"};
    const char *same[2] = {"one", "one"};
    ferry_source source = module_of(plain_params, 4), out = {0};

    (void)state;
    expect_error(ferry_source_rename(&source, both, same, 2, &out),
                 FERRY_EEXIST,
                 "parameters model.layers.0.a and "
                 "model.layers.1.a would both be named one.a");
    assert_null(out.ops);
    to[0] = "one";
    expect_error(ferry_source_rename(&source, from, to, 1, &out), FERRY_EINVAL,
                 "both have a '*' or neither");
    from[0] = "a*b*";
    expect_error(ferry_source_rename(&source, from, to, 1, &out), FERRY_EINVAL,
                 "more than one '*'");
    expect_error(ferry_source_rename(NULL, both, same, 2, &out), FERRY_EINVAL,
                 "no source");
    /* After a failure the inner source is whole and the caller's. */
    expect_pass(&source, plain_params, 4);
    ferry_source_close(&source);
}

/* ---- filter ---- */

static void b7_filter_keeps_or_drops(void **state)
{
    const char *patterns[2] = {"model.layers.*", "step"};
    ferry_source source = module_of(plain_params, 4), out = {0};

    (void)state;
    assert_int_equal(ferry_source_filter(&source, patterns, 2, 1, &out),
                     FERRY_OK);
    expect_pass(&out, plain_params + 1, 3);
    ferry_source_close(&out);
    source = module_of(plain_params, 4);
    assert_int_equal(ferry_source_filter(&source, patterns, 2, 0, &out),
                     FERRY_OK);
    assert_true(is_stable(&out));
    expect_pass(&out, plain_params, 1);
    expect_pass(&out, plain_params, 1);
    ferry_source_close(&out);
    source = module_of(plain_params, 4);
    patterns[1] = "lm_head*";
    expect_error(ferry_source_filter(&source, patterns, 2, 0, &out),
                 FERRY_EUNKNOWN, "pattern lm_head* matches none of the 4");
    ferry_source_close(&source);
}

/* ---- cast ---- */

static void b7_cast_floats_alone(void **state)
{
    const expected_param want[4] = {
        {"model.embed.weight", BF16, 2, {2, 2}, bf16_values},
        {"model.layers.0.a", BF16, 1, {3}, bf16_values + 4},
        {"model.layers.1.a", BF16, 1, {3}, bf16_values + 7},
        plain_params[3],
    };
    const expected_param part[4] = {plain_params[0], want[1], want[2],
                                    plain_params[3]};
    ferry_source source = module_of(plain_params, 4), out = {0};
    source_stream s;

    (void)state;
    assert_int_equal(ferry_source_cast(&source, BF16, NULL, &out), FERRY_OK);
    assert_false(is_stable(&out));
    expect_pass(&out, want, 4);
    expect_pass(&out, want, 4);
    ferry_source_close(&out);
    source = stream_of(&s, plain_params, 4);
    assert_int_equal(ferry_source_cast(&source, BF16, "model.layers.*.a", &out),
                     FERRY_OK);
    expect_pass(&out, part, 4);
    ferry_source_close(&out);
    /* Nothing to cast: what was stable stays so. */
    source = module_of(plain_params, 4);
    assert_int_equal(ferry_source_cast(&source, F32, NULL, &out), FERRY_OK);
    assert_true(is_stable(&out));
    expect_pass(&out, plain_params, 4);
    ferry_source_close(&out);
    source = module_of(plain_params, 4);
    expect_error(ferry_source_cast(&source, FERRY_DTYPE_I8, NULL, &out),
                 FERRY_EINVAL, "dtype is int8");
    expect_error(ferry_source_cast(&source, FERRY_DTYPE_Q8_0, NULL, &out),
                 FERRY_EINVAL, "dtype is q8_0");
    ferry_source_close(&source);
}

/* Round to nearest even, and strides. */
static void b7_cast_rounds_and_honours_strides(void **state)
{
    float values[6] = {1.00390625f, 1.01171875f, 1.0f, 2.0f, 3.0f, -1.0f};
    const int64_t shape[2] = {2, 3};
    const uint16_t want_bits[6] = {0x3F80, 0x4000, 0x3F82,
                                   0x4040, 0x3F80, 0xBF80};
    const expected_param want = {"w", BF16, 2, {3, 2}, want_bits};
    const char *name = "w";
    ferry_source source = {0};
    ferry_tensor t;

    (void)state;
    assert_int_equal(ferry_tensor_init(&t, values, F32, 2, shape), FERRY_OK);
    assert_int_equal(ferry_tensor_transpose(&t, 0, 1, &t), FERRY_OK);
    assert_int_equal(ferry_source_module(&name, &t, 1, &source), FERRY_OK);
    assert_int_equal(ferry_source_cast(&source, BF16, NULL, &source), FERRY_OK);
    expect_pass(&source, &want, 1);
    ferry_source_close(&source);
}

/* O-42's cousin: an event that has not come is asked for again. */
static void b7_cast_converts_after_the_event(void **state)
{
    ferry_source source = {0};
    ferry_item item;
    uint16_t got[4];
    source_stream s;

    (void)state;
    source = stream_of(&s, plain_params, 1);
    s.late = true;
    assert_int_equal(ferry_source_cast(&source, BF16, NULL, &source), FERRY_OK);
    assert_int_equal(source.ops->begin(source.self), FERRY_OK);
    assert_int_equal(source.ops->next(source.self, &item), FERRY_OK);
    assert_non_null(item.wait);
    assert_int_equal(item.wait(item.wait_arg, 1), FERRY_ETIMEOUT);
    assert_int_equal(item.wait(item.wait_arg, 1), FERRY_OK);
    assert_int_equal(item.wait(item.wait_arg, 1), FERRY_OK);
    tensor_gather(&item.tensor, got);
    assert_memory_equal(got, bf16_values, sizeof(got));
    source.ops->end(source.self);
    ferry_source_close(&source);
}

/* ---- reorder ---- */

static void b9_reorder_makes_layers_contiguous(void **state)
{
    static const char *const given[] = {"lm_head.weight",
                                        "h.10.a",
                                        "h.2.a",
                                        "visual.blocks.1.w",
                                        "h.2.b",
                                        "visual.merger",
                                        "h.10.b",
                                        "visual.blocks.0.experts.7.w",
                                        "norm"};
    static const char *const sorted[] = {"lm_head.weight",
                                         "h.2.a",
                                         "h.2.b",
                                         "h.10.a",
                                         "h.10.b",
                                         "visual.blocks.0.experts.7.w",
                                         "visual.blocks.1.w",
                                         "visual.merger",
                                         "norm"};
    enum { N = 9 };
    expected_param in[N], want[N];
    ferry_source source = {0}, out = {0};
    source_stream s;

    (void)state;
    for (int i = 0; i < N; i++) {
        in[i] = (expected_param){given[i], F32, 1, {1}, f32_values + i};
        for (int j = 0; j < N; j++) {
            if (strcmp(sorted[j], given[i]) == 0)
                want[j] = in[i];
        }
    }
    source = module_of(in, N);
    assert_int_equal(ferry_source_reorder(&source, &out), FERRY_OK);
    expect_pass(&out, want, N);
    expect_pass(&out, want, N);
    ferry_source_close(&out);
    source = stream_of(&s, in, N);
    expect_error(ferry_source_reorder(&source, &out), FERRY_ENOTSUP,
                 "stream source is not stable");
    ferry_source_close(&source);
}

/* ---- split ---- */

static void b7_split_gives_views(void **state)
{
    const expected_param whole[2] = {{"l.0.qkv", F32, 2, {4, 3}, f32_values},
                                     plain_params[3]};
    const float left[8] = {0, 1, 3, 4, 6, 7, 9, 10};
    const float right[4] = {2, 5, 8, 11};
    const expected_param rows[4] = {{"l.0.q", F32, 2, {2, 3}, f32_values},
                                    {"l.0.k", F32, 2, {1, 3}, f32_values + 6},
                                    {"l.0.v", F32, 2, {1, 3}, f32_values + 9},
                                    plain_params[3]};
    const expected_param cols[3] = {{"l.0.x", F32, 2, {4, 2}, left},
                                    {"l.0.y", F32, 2, {4, 1}, right},
                                    plain_params[3]};
    const char *qkv[3] = {"l.*.q", "l.*.k", "l.*.v"};
    const char *xy[2] = {"l.0.x", "l.0.y"};
    const int64_t sizes[3] = {2, 1, 1}, widths[2] = {2, 1};
    ferry_source source = module_of(whole, 2), out = {0};
    ferry_item item;
    source_stream s;

    (void)state;
    assert_int_equal(
        ferry_source_split(&source, "l.*.qkv", 0, qkv, sizes, 3, &out),
        FERRY_OK);
    assert_true(is_stable(&out));
    expect_pass(&out, rows, 4);
    assert_int_equal(out.ops->begin(out.self), FERRY_OK);
    assert_int_equal(out.ops->next(out.self, &item), FERRY_OK);
    assert_int_equal(out.ops->next(out.self, &item), FERRY_OK);
    assert_ptr_equal(ferry_tensor_data(&item.tensor), f32_values + 6);
    out.ops->end(out.self);
    expect_pass(&out, rows, 4);
    ferry_source_close(&out);
    /* Over a stream the one event serves every part. */
    source = stream_of(&s, whole, 2);
    assert_int_equal(
        ferry_source_split(&source, "l.0.qkv", -1, xy, widths, 2, &out),
        FERRY_OK);
    expect_pass(&out, cols, 3);
    ferry_source_close(&out);
}

static void b7_split_refusals(void **state)
{
    const char *qk[2] = {"l.*.q", "l.*.k"}, *taken[2] = {"step", "k"};
    const char *qk0[2] = {"q", "k"};
    int64_t sizes[2] = {2, 1};
    const expected_param whole[2] = {{"l.0.qkv", F32, 2, {4, 3}, f32_values},
                                     plain_params[3]};
    ferry_source source = module_of(whole, 2), out = {0};

    (void)state;
    expect_error(ferry_source_split(&source, "l.*.qkv", 0, qk, sizes, 2, &out),
                 FERRY_EINVAL,
                 "extent 4, the sizes of the parts add up to "
                 "less");
    sizes[0] = INT64_MAX;
    expect_error(ferry_source_split(&source, "l.*.qkv", 0, qk, sizes, 2, &out),
                 FERRY_EINVAL, "more");
    sizes[0] = -1;
    expect_error(ferry_source_split(&source, "l.*.qkv", 0, qk, sizes, 2, &out),
                 FERRY_EINVAL, "size -1");
    sizes[0] = 3;
    expect_error(ferry_source_split(&source, "l.*.qkv", 2, qk, sizes, 2, &out),
                 FERRY_EINVAL, "dimension 2");
    expect_error(ferry_source_split(&source, "l.*.kv", 0, qk, sizes, 2, &out),
                 FERRY_EUNKNOWN, "l.*.kv");
    expect_error(ferry_source_split(&source, "l.*.qkv", 0, qk0, sizes, 2, &out),
                 FERRY_EINVAL, "or neither");
    expect_error(
        ferry_source_split(&source, "l.0.qkv", 0, taken, sizes, 2, &out),
        FERRY_EEXIST, "step");
    expect_error(ferry_source_split(&source, "l.0.qkv", 0, NULL, NULL, 0, &out),
                 FERRY_EINVAL, "no parts");
    expect_pass(&source, whole, 2);
    ferry_source_close(&source);
}

/* ---- fuse ---- */

static void b7_fuse_stands_where_the_last_part_stood(void **state)
{
    const float by_col[6] = {0, 1, 4, 2, 3, 5};
    const expected_param in[5] = {{"l.0.k", F32, 2, {2, 2}, f32_values},
                                  plain_params[3],
                                  {"l.1.k", F32, 2, {1, 2}, f32_values + 6},
                                  {"l.1.q", F32, 2, {1, 2}, f32_values + 8},
                                  {"l.0.q", F32, 2, {1, 2}, f32_values + 4}};
    const float fused0[6] = {4, 5, 0, 1, 2, 3}, fused1[4] = {8, 9, 6, 7};
    const expected_param want[3] = {plain_params[3],
                                    {"l.1.qk", F32, 2, {2, 2}, fused1},
                                    {"l.0.qk", F32, 2, {3, 2}, fused0}};
    const expected_param cols[2] = {{"a", F32, 2, {2, 2}, f32_values},
                                    {"b", F32, 2, {2, 1}, f32_values + 4}};
    const expected_param wide = {"ab", F32, 2, {2, 3}, by_col};
    const char *parts[2] = {"l.*.q", "l.*.k"}, *ab[2] = {"a", "b"};
    ferry_source source, out = {0};
    source_stream s;

    (void)state;
    for (int kind = 0; kind < 2; kind++) {
        source = kind ? stream_of(&s, in, 5) : module_of(in, 5);
        assert_int_equal(
            ferry_source_fuse(&source, "l.*.qk", 0, parts, 2, &out), FERRY_OK);
        assert_false(is_stable(&out));
        expect_pass(&out, want, 3);
        expect_pass(&out, want, 3);
        ferry_source_close(&out);
        source = kind ? stream_of(&s, cols, 2) : module_of(cols, 2);
        assert_int_equal(ferry_source_fuse(&source, "ab", -1, ab, 2, &out),
                         FERRY_OK);
        expect_pass(&out, &wide, 1);
        ferry_source_close(&out);
    }
}

static void b7_fuse_refusals(void **state)
{
    const expected_param in[4] = {{"l.0.q", F32, 2, {2, 2}, f32_values},
                                  {"l.0.k", BF16, 2, {2, 2}, bf16_values},
                                  {"l.0.v", F32, 2, {2, 3}, f32_values},
                                  {"l.1.q", F32, 2, {2, 2}, f32_values}};
    const char *qk[2] = {"l.0.q", "l.0.k"}, *qv[2] = {"l.0.q", "l.0.v"};
    const char *stars[2] = {"l.*.q", "l.*.v"}, *none[1] = {"x"};
    ferry_source source = module_of(in, 4), out = {0};

    (void)state;
    expect_error(ferry_source_fuse(&source, "f", 0, qk, 2, &out),
                 FERRY_EMISMATCH,
                 "part l.0.q is float32, part l.0.k is "
                 "bfloat16");
    expect_error(ferry_source_fuse(&source, "f", 0, qv, 2, &out),
                 FERRY_EMISMATCH, "parts l.0.q and l.0.v");
    expect_error(ferry_source_fuse(&source, "f", 2, qv, 2, &out), FERRY_EINVAL,
                 "dimension 2");
    expect_error(ferry_source_fuse(&source, "l.*.f", 1, stars, 2, &out),
                 FERRY_EUNKNOWN,
                 "parameter l.1.f: its part l.*.v is "
                 "missing");
    expect_error(ferry_source_fuse(&source, "f", 0, none, 1, &out),
                 FERRY_EUNKNOWN, "none of its parts");
    expect_error(ferry_source_fuse(&source, "l.1.q", 1, qv, 2, &out),
                 FERRY_EEXIST, "l.1.q");
    expect_error(ferry_source_fuse(&source, "l.*", 1, qv, 2, &out),
                 FERRY_EINVAL, "or neither");
    expect_pass(&source, in, 4);
    ferry_source_close(&source);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(b7_rename_by_prefix_and_template),
        cmocka_unit_test(b7_rename_names_all_three_of_a_collision),
        cmocka_unit_test(b7_filter_keeps_or_drops),
        cmocka_unit_test(b7_cast_floats_alone),
        cmocka_unit_test(b7_cast_rounds_and_honours_strides),
        cmocka_unit_test(b7_cast_converts_after_the_event),
        cmocka_unit_test(b9_reorder_makes_layers_contiguous),
        cmocka_unit_test(b7_split_gives_views),
        cmocka_unit_test(b7_split_refusals),
        cmocka_unit_test(b7_fuse_stands_where_the_last_part_stood),
        cmocka_unit_test(b7_fuse_refusals),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
