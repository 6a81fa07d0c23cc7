/* SPDX-License-Identifier: Apache-2.0 */
/* The adapters, alone and composed (B7), over tensors in memory and over a
 * stream that reuses its buffer, fills it late and holds only some names. */
#include "base/alloc.h"
#include "harness/source_pass.h"

#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define F32 FERRY_DTYPE_F32
#define BF16 FERRY_DTYPE_BF16
#define E4M3 FERRY_DTYPE_F8_E4M3

/* ---- a stream: one buffer, bytes there only after its event ---- */

typedef struct stream {
    const expected_param *params; /* what it yields; NULL bytes: not held */
    ferry_param_meta meta[16];
    size_t declared, yielded, position;
    unsigned char *buffer;
    bool filled, late; /* late: the event comes at the second asking */
    int asked;
    size_t group_lengths[2];
    bool opened;
} stream;

static size_t bytes_of(const expected_param *p)
{
    size_t n = ferry_dtype_bytes(p->dtype);

    for (int32_t d = 0; d < p->ndim; d++)
        n *= (size_t)p->shape[d];
    return n;
}

static ferry_status stream_metadata(void *self, const ferry_param_meta **out,
                                    size_t *out_count)
{
    stream *s = self;

    *out = s->meta;
    *out_count = s->declared;
    return FERRY_OK;
}

static ferry_status stream_begin(void *self)
{
    stream *s = self;

    assert_false(s->opened);
    s->opened = true;
    s->position = 0;
    return FERRY_OK;
}

static ferry_status stream_wait(void *arg, int64_t timeout_ms)
{
    stream *s = arg;
    const expected_param *p = &s->params[s->position - 1];

    assert_true(timeout_ms > 0);
    if (s->late && s->asked++ == 0)
        return ferry_fail(FERRY_ETIMEOUT, "not yet");
    assert_false(s->filled);
    s->filled = true;
    memcpy(s->buffer, p->bytes, bytes_of(p));
    return FERRY_OK;
}

static ferry_status stream_next(void *self, ferry_item *out)
{
    stream *s = self;
    const expected_param *p = &s->params[s->position];

    free(s->buffer);
    s->buffer = NULL;
    if (s->position == s->yielded)
        return FERRY_DONE;
    s->position++;
    *out = (ferry_item){.name = p->name};
    if (!p->bytes)
        return FERRY_OK;
    s->buffer = malloc(bytes_of(p) + 1);
    memset(s->buffer, 0xEE, bytes_of(p));
    s->filled = false;
    s->asked = 0;
    out->wait = stream_wait;
    out->wait_arg = s;
    return ferry_tensor_init(&out->tensor, s->buffer, p->dtype, p->ndim,
                             p->shape);
}

static void stream_end(void *self)
{
    stream *s = self;

    assert_true(s->opened);
    s->opened = false;
    free(s->buffer);
    s->buffer = NULL;
}

static bool stream_holds(void *self, const char *name)
{
    stream *s = self;

    for (size_t i = 0; i < s->declared; i++) {
        if (strcmp(s->meta[i].name, name) == 0)
            return s->params[i].bytes != NULL;
    }
    return false;
}

static ferry_status stream_groups(void *self, const size_t **out,
                                  size_t *out_count)
{
    stream *s = self;

    s->group_lengths[0] = 1;
    s->group_lengths[1] = s->declared - 1;
    *out = s->group_lengths;
    *out_count = 2;
    return FERRY_OK;
}

static const ferry_source_ops STREAM_OPS = {
    .size = sizeof(ferry_source_ops),
    .kind = "stream",
    .metadata = stream_metadata,
    .begin = stream_begin,
    .next = stream_next,
    .end = stream_end,
    .holds = stream_holds,
    .groups = stream_groups,
};

static ferry_source stream_of(stream *s, const expected_param *params,
                              size_t count)
{
    *s = (stream){.params = params, .declared = count, .yielded = count};
    assert_true(count <= 16);
    for (size_t i = 0; i < count; i++) {
        s->meta[i].name = params[i].name;
        s->meta[i].dtype = params[i].dtype;
        s->meta[i].ndim = params[i].ndim;
        memcpy(s->meta[i].shape, params[i].shape, sizeof(params[i].shape));
    }
    return (ferry_source){&STREAM_OPS, s};
}

static ferry_source module_of(const expected_param *params, size_t count)
{
    const char *names[16];
    ferry_tensor tensors[16];
    ferry_source source = {0};

    assert_true(count <= 16);
    for (size_t i = 0; i < count; i++) {
        names[i] = params[i].name;
        assert_int_equal(ferry_tensor_init(&tensors[i],
                                           (void *)params[i].bytes,
                                           params[i].dtype, params[i].ndim,
                                           params[i].shape),
                         FERRY_OK);
    }
    assert_int_equal(ferry_source_module(names, tensors, count, &source),
                     FERRY_OK);
    return source;
}

static bool is_stable(const ferry_source *source)
{
    return (source->ops->flags & FERRY_SOURCE_STABLE) != 0;
}

/* Values that f32 and bf16 hold exactly, and their bf16 bits. */
static const float f32_values[12] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};
static const uint16_t bf16_values[12] = {
    0x0000, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0,
    0x40C0, 0x40E0, 0x4100, 0x4110, 0x4120, 0x4130};

static const expected_param plain[4] = {
    {"model.embed.weight", F32, 2, {2, 2}, f32_values},
    {"model.layers.0.a", F32, 1, {3}, f32_values + 4},
    {"model.layers.1.a", F32, 1, {3}, f32_values + 7},
    {"step", FERRY_DTYPE_I64, 0, {0}, f32_values + 10},
};

/* ---- rename ---- */

static void b7_rename_by_prefix_and_template(void **state)
{
    const char *from[3] = {"model.layers.*.a", "model.", "model.embed"};
    const char *to[3] = {"blk.*.attn", "m.", "unused"};
    expected_param want[4];
    ferry_source source = module_of(plain, 4), renamed = {0};

    (void)state;
    memcpy(want, plain, sizeof(want));
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
    ferry_source source = module_of(plain, 4), out = {0};

    (void)state;
    expect_error(ferry_source_rename(&source, both, same, 2, &out),
                 FERRY_EEXIST, "parameters model.layers.0.a and "
                 "model.layers.1.a would both be named one.a");
    assert_null(out.ops);
    to[0] = "one";
    expect_error(ferry_source_rename(&source, from, to, 1, &out),
                 FERRY_EINVAL, "both have a '*' or neither");
    from[0] = "a*b*";
    expect_error(ferry_source_rename(&source, from, to, 1, &out),
                 FERRY_EINVAL, "more than one '*'");
    expect_error(ferry_source_rename(NULL, both, same, 2, &out),
                 FERRY_EINVAL, "no source");
    /* After a failure the inner source is whole and the caller's. */
    expect_pass(&source, plain, 4);
    ferry_source_close(&source);
}

/* ---- filter ---- */

static void b7_filter_keeps_or_drops(void **state)
{
    const char *patterns[2] = {"model.layers.*", "step"};
    ferry_source source = module_of(plain, 4), out = {0};

    (void)state;
    assert_int_equal(ferry_source_filter(&source, patterns, 2, 1, &out),
                     FERRY_OK);
    expect_pass(&out, plain + 1, 3);
    ferry_source_close(&out);
    source = module_of(plain, 4);
    assert_int_equal(ferry_source_filter(&source, patterns, 2, 0, &out),
                     FERRY_OK);
    assert_true(is_stable(&out));
    expect_pass(&out, plain, 1);
    expect_pass(&out, plain, 1);
    ferry_source_close(&out);
    source = module_of(plain, 4);
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
        plain[3],
    };
    const expected_param part[4] = {plain[0], want[1], want[2], plain[3]};
    ferry_source source = module_of(plain, 4), out = {0};
    stream s;

    (void)state;
    assert_int_equal(ferry_source_cast(&source, BF16, NULL, &out), FERRY_OK);
    assert_false(is_stable(&out));
    expect_pass(&out, want, 4);
    expect_pass(&out, want, 4);
    ferry_source_close(&out);
    source = stream_of(&s, plain, 4);
    assert_int_equal(ferry_source_cast(&source, BF16, "model.layers.*.a",
                                       &out), FERRY_OK);
    expect_pass(&out, part, 4);
    ferry_source_close(&out);
    /* Nothing to cast: what was stable stays so. */
    source = module_of(plain, 4);
    assert_int_equal(ferry_source_cast(&source, F32, NULL, &out), FERRY_OK);
    assert_true(is_stable(&out));
    expect_pass(&out, plain, 4);
    ferry_source_close(&out);
    source = module_of(plain, 4);
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
    const uint16_t want_bits[6] = {0x3F80, 0x4000, 0x3F82, 0x4040, 0x3F80,
                                   0xBF80};
    const expected_param want = {"w", BF16, 2, {3, 2}, want_bits};
    const char *name = "w";
    ferry_source source = {0};
    ferry_tensor t;

    (void)state;
    assert_int_equal(ferry_tensor_init(&t, values, F32, 2, shape), FERRY_OK);
    assert_int_equal(ferry_tensor_transpose(&t, 0, 1, &t), FERRY_OK);
    assert_int_equal(ferry_source_module(&name, &t, 1, &source), FERRY_OK);
    assert_int_equal(ferry_source_cast(&source, BF16, NULL, &source),
                     FERRY_OK);
    expect_pass(&source, &want, 1);
    ferry_source_close(&source);
}

/* O-42's cousin: an event that has not come is asked for again. */
static void b7_cast_converts_after_the_event(void **state)
{
    ferry_source source = {0};
    ferry_item item;
    uint16_t got[4];
    stream s;

    (void)state;
    source = stream_of(&s, plain, 1);
    s.late = true;
    assert_int_equal(ferry_source_cast(&source, BF16, NULL, &source),
                     FERRY_OK);
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
    static const char *const given[] = {
        "lm_head.weight", "h.10.a", "h.2.a", "visual.blocks.1.w", "h.2.b",
        "visual.merger", "h.10.b", "visual.blocks.0.experts.7.w", "norm"};
    static const char *const sorted[] = {
        "lm_head.weight", "h.2.a", "h.2.b", "h.10.a", "h.10.b",
        "visual.blocks.0.experts.7.w", "visual.blocks.1.w", "visual.merger",
        "norm"};
    enum { N = 9 };
    expected_param in[N], want[N];
    ferry_source source = {0}, out = {0};
    stream s;

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
    const expected_param whole[2] = {
        {"l.0.qkv", F32, 2, {4, 3}, f32_values}, plain[3]};
    const float left[8] = {0, 1, 3, 4, 6, 7, 9, 10};
    const float right[4] = {2, 5, 8, 11};
    const expected_param rows[4] = {
        {"l.0.q", F32, 2, {2, 3}, f32_values},
        {"l.0.k", F32, 2, {1, 3}, f32_values + 6},
        {"l.0.v", F32, 2, {1, 3}, f32_values + 9}, plain[3]};
    const expected_param cols[3] = {
        {"l.0.x", F32, 2, {4, 2}, left}, {"l.0.y", F32, 2, {4, 1}, right},
        plain[3]};
    const char *qkv[3] = {"l.*.q", "l.*.k", "l.*.v"};
    const char *xy[2] = {"l.0.x", "l.0.y"};
    const int64_t sizes[3] = {2, 1, 1}, widths[2] = {2, 1};
    ferry_source source = module_of(whole, 2), out = {0};
    ferry_item item;
    stream s;

    (void)state;
    assert_int_equal(ferry_source_split(&source, "l.*.qkv", 0, qkv, sizes, 3,
                                        &out), FERRY_OK);
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
    assert_int_equal(ferry_source_split(&source, "l.0.qkv", -1, xy, widths,
                                        2, &out), FERRY_OK);
    expect_pass(&out, cols, 3);
    ferry_source_close(&out);
}

static void b7_split_refusals(void **state)
{
    const char *qk[2] = {"l.*.q", "l.*.k"}, *taken[2] = {"step", "k"};
    const char *qk0[2] = {"q", "k"};
    int64_t sizes[2] = {2, 1};
    const expected_param whole[2] = {
        {"l.0.qkv", F32, 2, {4, 3}, f32_values}, plain[3]};
    ferry_source source = module_of(whole, 2), out = {0};

    (void)state;
    expect_error(ferry_source_split(&source, "l.*.qkv", 0, qk, sizes, 2,
                                    &out),
                 FERRY_EINVAL, "extent 4, the sizes of the parts add up to "
                 "less");
    sizes[0] = INT64_MAX;
    expect_error(ferry_source_split(&source, "l.*.qkv", 0, qk, sizes, 2,
                                    &out), FERRY_EINVAL, "more");
    sizes[0] = -1;
    expect_error(ferry_source_split(&source, "l.*.qkv", 0, qk, sizes, 2,
                                    &out), FERRY_EINVAL, "size -1");
    sizes[0] = 3;
    expect_error(ferry_source_split(&source, "l.*.qkv", 2, qk, sizes, 2,
                                    &out), FERRY_EINVAL, "dimension 2");
    expect_error(ferry_source_split(&source, "l.*.kv", 0, qk, sizes, 2,
                                    &out), FERRY_EUNKNOWN, "l.*.kv");
    expect_error(ferry_source_split(&source, "l.*.qkv", 0, qk0, sizes, 2,
                                    &out), FERRY_EINVAL, "or neither");
    expect_error(ferry_source_split(&source, "l.0.qkv", 0, taken, sizes, 2,
                                    &out), FERRY_EEXIST, "step");
    expect_error(ferry_source_split(&source, "l.0.qkv", 0, NULL, NULL, 0,
                                    &out), FERRY_EINVAL, "no parts");
    expect_pass(&source, whole, 2);
    ferry_source_close(&source);
}

/* ---- fuse ---- */

static void b7_fuse_stands_where_the_last_part_stood(void **state)
{
    const float by_col[6] = {0, 1, 4, 2, 3, 5};
    const expected_param in[5] = {
        {"l.0.k", F32, 2, {2, 2}, f32_values}, plain[3],
        {"l.1.k", F32, 2, {1, 2}, f32_values + 6},
        {"l.1.q", F32, 2, {1, 2}, f32_values + 8},
        {"l.0.q", F32, 2, {1, 2}, f32_values + 4}};
    const float fused0[6] = {4, 5, 0, 1, 2, 3}, fused1[4] = {8, 9, 6, 7};
    const expected_param want[3] = {
        plain[3], {"l.1.qk", F32, 2, {2, 2}, fused1},
        {"l.0.qk", F32, 2, {3, 2}, fused0}};
    const expected_param cols[2] = {
        {"a", F32, 2, {2, 2}, f32_values}, {"b", F32, 2, {2, 1},
                                            f32_values + 4}};
    const expected_param wide = {"ab", F32, 2, {2, 3}, by_col};
    const char *parts[2] = {"l.*.q", "l.*.k"}, *ab[2] = {"a", "b"};
    ferry_source source, out = {0};
    stream s;

    (void)state;
    for (int kind = 0; kind < 2; kind++) {
        source = kind ? stream_of(&s, in, 5) : module_of(in, 5);
        assert_int_equal(ferry_source_fuse(&source, "l.*.qk", 0, parts, 2,
                                           &out), FERRY_OK);
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
    const expected_param in[4] = {
        {"l.0.q", F32, 2, {2, 2}, f32_values},
        {"l.0.k", BF16, 2, {2, 2}, bf16_values},
        {"l.0.v", F32, 2, {2, 3}, f32_values},
        {"l.1.q", F32, 2, {2, 2}, f32_values}};
    const char *qk[2] = {"l.0.q", "l.0.k"}, *qv[2] = {"l.0.q", "l.0.v"};
    const char *stars[2] = {"l.*.q", "l.*.v"}, *none[1] = {"x"};
    ferry_source source = module_of(in, 4), out = {0};

    (void)state;
    expect_error(ferry_source_fuse(&source, "f", 0, qk, 2, &out),
                 FERRY_EMISMATCH, "part l.0.q is float32, part l.0.k is "
                 "bfloat16");
    expect_error(ferry_source_fuse(&source, "f", 0, qv, 2, &out),
                 FERRY_EMISMATCH, "parts l.0.q and l.0.v");
    expect_error(ferry_source_fuse(&source, "f", 2, qv, 2, &out),
                 FERRY_EINVAL, "dimension 2");
    expect_error(ferry_source_fuse(&source, "l.*.f", 1, stars, 2, &out),
                 FERRY_EUNKNOWN, "parameter l.1.f: its part l.*.v is "
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
    const expected_param in[5] = {
        {"w.a_scale_inv", F32, 2, {2, 2}, scales},
        {"w.a", E4M3, 2, {2, 4}, fp8},
        {"w.b", E4M3, 1, {8}, fp8},
        {"k_scale", F32, 0, {0}, one_scale},
        {"w.b_scale_inv", F32, 0, {0}, one_scale}};
    const float b_f32[8] = {0.5f, 1, 1.5f, 2, -0.5f, -1, 0.25f, 4};
    const expected_param want[3] = {
        {"w.a", F32, 2, {2, 4}, blocks_f32}, in[3],
        {"w.b", F32, 1, {8}, b_f32}};
    const expected_param tensor[2] = {
        {"w", E4M3, 2, {2, 4}, fp8},
        {"w_scale", F32, 1, {1}, one_scale}};
    const expected_param in_bf16 = {"w", BF16, 2, {2, 4}, half_bf16};
    ferry_source source, out = {0};
    stream s;

    (void)state;
    for (int kind = 0; kind < 2; kind++) {
        source = kind ? stream_of(&s, in, 5) : module_of(in, 5);
        assert_int_equal(ferry_source_dequantise(&source, "_scale_inv", F32,
                                                 &out), FERRY_OK);
        assert_false(is_stable(&out));
        expect_pass(&out, want, 3);
        expect_pass(&out, want, 3);
        ferry_source_close(&out);
        source = kind ? stream_of(&s, tensor, 2) : module_of(tensor, 2);
        assert_int_equal(ferry_source_dequantise(&source, "_scale", BF16,
                                                 &out), FERRY_OK);
        expect_pass(&out, &in_bf16, 1);
        ferry_source_close(&out);
    }
    /* No pair at all: everything passes as it is. */
    source = module_of(plain, 4);
    assert_int_equal(ferry_source_dequantise(&source, "_scale", BF16, &out),
                     FERRY_OK);
    assert_true(is_stable(&out));
    expect_pass(&out, plain, 4);
    ferry_source_close(&out);
}

static void b7_dequantise_refusals(void **state)
{
    expected_param in[3] = {
        {"w", E4M3, 2, {2, 4}, fp8}, {"w_s", F32, 2, {2, 3}, f32_values},
        {"w_s_s", F32, 0, {0}, one_scale}};
    ferry_source source = module_of(in, 2), out = {0};

    (void)state;
    expect_error(ferry_source_dequantise(&source, "_s", F32, &out),
                 FERRY_EMISMATCH, "parameter w_s: scales of shape [2, 3] do "
                 "not divide the shape [2, 4] of w");
    expect_error(ferry_source_dequantise(&source, "", F32, &out),
                 FERRY_EINVAL, "suffix is empty");
    expect_error(ferry_source_dequantise(&source, "_s", FERRY_DTYPE_I8,
                                         &out), FERRY_EINVAL, "int8");
    ferry_source_close(&source);
    in[1].shape[1] = 2;
    source = module_of(in, 3);
    expect_error(ferry_source_dequantise(&source, "_s", F32, &out),
                 FERRY_ENOTSUP, "scales of scales");
    ferry_source_close(&source);
    in[0].dtype = FERRY_DTYPE_I8;
    source = module_of(in, 2);
    expect_error(ferry_source_dequantise(&source, "_s", F32, &out),
                 FERRY_ENOTSUP, "parameter w: dequantising needs floating "
                 "point, got int8");
    ferry_source_close(&source);
}

/* ---- all of them ---- */

/* B8: a name that a rank does not hold passes through every adapter. */
static void b8_names_that_are_not_held_pass_through(void **state)
{
    const expected_param in[5] = {
        {"q", F32, 2, {2, 2}, NULL}, {"k", F32, 2, {2, 2}, f32_values},
        {"ab", F32, 2, {2, 2}, NULL}, {"w", E4M3, 2, {2, 4}, fp8},
        {"w_scale", F32, 0, {0}, NULL}};
    const expected_param want[4] = {
        {"m.qk", BF16, 2, {4, 2}, NULL}, {"m.a", BF16, 2, {1, 2}, NULL},
        {"m.b", BF16, 2, {1, 2}, NULL}, {"m.w", BF16, 2, {2, 4}, NULL}};
    const char *qk[2] = {"q", "k"}, *ab[2] = {"a", "b"};
    const char *from[1] = {""}, *to[1] = {"m."};
    const int64_t sizes[2] = {1, 1};
    ferry_source source;
    stream s;

    (void)state;
    source = stream_of(&s, in, 5);
    assert_int_equal(ferry_source_fuse(&source, "qk", 0, qk, 2, &source),
                     FERRY_OK);
    assert_int_equal(ferry_source_split(&source, "ab", 0, ab, sizes, 2,
                                        &source), FERRY_OK);
    assert_int_equal(ferry_source_dequantise(&source, "_scale", F32,
                                             &source), FERRY_OK);
    assert_int_equal(ferry_source_cast(&source, BF16, NULL, &source),
                     FERRY_OK);
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
    assert_int_equal(ferry_source_filter(&source, ab, 1, 1, &source),
                     FERRY_OK);
    expect_pass(&source, in + 2, 1);
    assert_false(source.ops->holds(source.self, "ab"));
    assert_false(source.ops->holds(source.self, "k"));
    ferry_source_close(&source);
    source = stream_of(&s, in, 5);
    assert_int_equal(ferry_source_cast(&source, BF16, NULL, &source),
                     FERRY_OK);
    assert_true(source.ops->holds(source.self, "k"));
    ferry_source_close(&source);
    source = module_of(plain, 4);
    assert_int_equal(ferry_source_cast(&source, BF16, NULL, &source),
                     FERRY_OK);
    assert_null(source.ops->holds);
    ferry_source_close(&source);
}

static void b10_groups_pass_where_order_and_count_are_kept(void **state)
{
    const char *from[1] = {""}, *to[1] = {"m."};
    const size_t *lengths;
    ferry_source source;
    size_t count;
    stream s;

    (void)state;
    source = stream_of(&s, plain, 4);
    assert_int_equal(ferry_source_rename(&source, from, to, 1, &source),
                     FERRY_OK);
    assert_int_equal(source.ops->groups(source.self, &lengths, &count),
                     FERRY_OK);
    assert_int_equal(count, 2);
    assert_int_equal(lengths[1], 3);
    to[0] = "m.step";
    assert_int_equal(ferry_source_filter(&source, to, 1, 0, &source),
                     FERRY_OK);
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
    assert_int_equal(ferry_source_split(&source, "decoder.layers.*.qkv."
                                        "weight", 0, parts, sizes, 3,
                                        &source), FERRY_OK);
    assert_int_equal(ferry_source_rename(&source, from, to, 3, &source),
                     FERRY_OK);
    assert_int_equal(ferry_source_reorder(&source, &source), FERRY_OK);
    assert_int_equal(ferry_source_cast(&source, BF16, NULL, &source),
                     FERRY_OK);
    for (int pass = 0; pass < 3; pass++)
        expect_pass(&source, want, 8);
    ferry_source_close(&source);
}

/* B1: metadata that changed between rounds is read anew; B3: a pass that is
 * not what the inner metadata said fails by name. */
static void b1_changes_and_b3_divergence(void **state)
{
    const expected_param grown[2] = {
        {"m.a", BF16, 1, {2}, bf16_values}, {"m.b", BF16, 1, {2},
                                             bf16_values + 2}};
    const expected_param in[2] = {{"a", F32, 1, {2}, f32_values},
                                  {"b", F32, 1, {2}, f32_values + 2}};
    const char *from[1] = {""}, *to[1] = {"m."};
    ferry_source source;
    stream s;

    (void)state;
    source = stream_of(&s, in, 2);
    s.declared = s.yielded = 1;
    assert_int_equal(ferry_source_cast(&source, BF16, NULL, &source),
                     FERRY_OK);
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
    ferry_source source = module_of(plain, 4);
    ferry_item item;

    (void)state;
    assert_int_equal(ferry_source_cast(&source, BF16, NULL, &source),
                     FERRY_OK);
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
    const expected_param in[6] = {
        {"q.0", F32, 2, {2, 2}, f32_values},
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
