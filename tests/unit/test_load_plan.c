/* SPDX-License-Identifier: Apache-2.0 */
/* Baking through a toy model's loader: entries, name maps and suggestions
 * (O-43), tied (O-45), steps (O-42), refusals, overlap, growth, rebakes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "base/alloc.h"
#include "core/load_plan.h"
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { EMBED, QKV, DOWN, NORM, TABLE, STACK, Q8, SLOTS };

static ferry_param slots[SLOTS] = {
    {"embed.weight", FERRY_DTYPE_BF16, 2, {8, 4}, NULL, 0, 0, 6},
    {"qkv_proj.weight", FERRY_DTYPE_F32, 2, {6, 4}, NULL, 0, 0, 0},
    {"down_proj.weight", FERRY_DTYPE_BF16, 2, {4, 3}, NULL, 0, 0, 0},
    {"norm.weight", FERRY_DTYPE_F32, 1, {4}, NULL, 0, 0, 0},
    {"cos_cache", FERRY_DTYPE_F32, 1, {4}, NULL, FERRY_PARAM_RUNTIME, 0, 0},
    {"experts.w", FERRY_DTYPE_BF16, 3, {200000, 2, 2}, NULL, 0, 0, 0},
    {"q8.weight", FERRY_DTYPE_Q8_0, 2, {4, 64}, NULL, 0, 0, 0},
};

typedef struct toy {
    int calls;
    const char *mode; /* which fault the loader has */
    ferry_step step;
} toy;

static ferry_status run_step(void *arg, const ferry_tensor *dst,
                             const ferry_tensor *inputs, int32_t n_inputs)
{
    (void)arg;
    (void)dst;
    (void)inputs;
    (void)n_inputs;
    return FERRY_OK;
}

/* Rank 1 of 2: the second half of each of q, k, v under one another. */
static ferry_status load_qkv(ferry_loader *l, int64_t part,
                             const ferry_tensor *t)
{
    const int64_t shape[] = {4, 4};
    ferry_tensor src, dst;
    FERRY_TRY(ferry_loader_expect(l, t, 2, shape));
    FERRY_TRY(ferry_loader_slot(l, QKV, &dst));
    FERRY_TRY(ferry_tensor_narrow(&dst, 0, 2 * part, 2, &dst));
    FERRY_TRY(ferry_tensor_chunk(t, 2, 0, 1, &src));
    return ferry_load_copy(l, &dst, &src);
}

static ferry_status load_step(toy *self, ferry_loader *l, int32_t input,
                              const ferry_tensor *t)
{
    ferry_tensor dst;
    FERRY_TRY(ferry_loader_slot(l, NORM, &dst));
    return ferry_load_step(l, &self->step, &dst, input, t);
}

static ferry_status load_expert(ferry_loader *l, int64_t i,
                                const ferry_tensor *t)
{
    ferry_tensor dst;
    FERRY_TRY(ferry_loader_slot(l, STACK, &dst));
    FERRY_TRY(ferry_tensor_select(&dst, 0, i, &dst));
    return ferry_load_copy(l, &dst, t);
}

/* Loaders with one fault each, to see it refused. */
static ferry_status load_bad(toy *self, ferry_loader *l, const ferry_tensor *t)
{
    ferry_tensor dst, src = *t;
    const char *m = self->mode;
    int64_t shape[] = {4, 3}, four[] = {2, 2, 3};
    const int32_t turned[] = {1, 0, 2};
    FERRY_TRY(ferry_loader_slot(l, DOWN, &dst));
    if (strcmp(m, "runtime slot") == 0)
        return ferry_loader_slot(l, TABLE, &dst);
    if (strcmp(m, "no slot") == 0)
        return ferry_loader_slot(l, SLOTS, &dst);
    if (strcmp(m, "foreign source") == 0)
        ferry_tensor_init(&src, NULL, t->dtype, 2, shape);
    else if (strcmp(m, "real source") == 0)
        src.data = shape;
    else if (strcmp(m, "source outside") == 0)
        src.offset = 1;
    else if (strcmp(m, "source before") == 0)
        src.offset = -1;
    else if (strcmp(m, "source overlaps") == 0)
        src.stride[0] = 2;
    else if (strcmp(m, "source backwards") == 0)
        src.stride[0] = -3;
    else if (strcmp(m, "source dtype") == 0)
        src.dtype = FERRY_DTYPE_F32;
    else if (strcmp(m, "source dims") == 0)
        src.ndim = 9;
    else if (strcmp(m, "source huge") == 0)
        src.stride[0] = INT64_MAX;
    else if (strcmp(m, "destination is the source") == 0)
        dst = *t;
    else if (strcmp(m, "destination dtype") == 0)
        dst.dtype = FERRY_DTYPE_F32;
    else if (strcmp(m, "destination slot") == 0)
        dst.slot = SLOTS;
    else if (strcmp(m, "shapes") == 0)
        ferry_tensor_narrow(&dst, 0, 0, 2, &dst);
    else if (strcmp(m, "destination stride 0") == 0)
        dst.stride[0] = 0;
    else if (strcmp(m, "destination outside") == 0)
        dst.offset = 99;
    else if (strcmp(m, "no box") == 0) {
        ferry_tensor_view(&dst, 3, four, &dst);
        ferry_tensor_narrow(&dst, 1, 0, 1, &dst);
        ferry_tensor_view(&src, 3, four, &src);
        ferry_tensor_narrow(&src, 1, 0, 1, &src);
    } else if (strcmp(m, "padding rows") == 0) {
        ferry_loader_slot(l, EMBED, &dst);
        ferry_tensor_narrow(&dst, 0, 5, 2, &dst);
        ferry_tensor_narrow(&dst, 1, 0, 3, &dst);
        ferry_tensor_narrow(&src, 0, 0, 2, &src);
    } else if (strcmp(m, "ignored failure") == 0) {
        ferry_tensor_narrow(&dst, 0, 0, 2, &dst);
        (void)ferry_load_copy(l, &dst, &src);
        return FERRY_OK;
    } else if (strcmp(m, "split rows") == 0) {
        /* A legal one: the rows 0 1 2 3 written as 0 2 1 3. */
        ferry_tensor_view(&src, 3, four, &src);
        ferry_tensor_permute(&src, turned, &src);
        ferry_tensor_view(&dst, 3, four, &dst);
    } else if (strcmp(m, "own failure") == 0) {
        return ferry_fail(FERRY_EINTERNAL, "the toy is out of order");
    }
    return ferry_load_copy(l, &dst, &src);
}

static ferry_status load_q8(toy *self, ferry_loader *l, const ferry_tensor *t)
{
    ferry_tensor dst, src = *t;
    const char *m = self->mode;
    const int32_t turn[] = {0, 2, 1};
    const int64_t split[] = {4, 2, 32}, narrow[] = {4, 4, 16};
    FERRY_TRY(ferry_loader_slot(l, Q8, &dst));
    if (strcmp(m, "half block") == 0) {
        ferry_tensor_narrow(&dst, 1, 16, 32, &dst);
        ferry_tensor_narrow(&src, 1, 16, 32, &src);
    } else if (strcmp(m, "blocks turned") == 0) {
        /* Blocks keep their elements together: legal. */
        ferry_tensor_view(&dst, 3, split, &dst);
        ferry_tensor_view(&src, 3, split, &src);
    } else if (strcmp(m, "blocks of two runs") == 0) {
        ferry_tensor_view(&dst, 3, narrow, &dst);
        ferry_tensor_view(&src, 3, narrow, &src);
        ferry_tensor_permute(&dst, turn, &dst);
        const int64_t back[] = {4, 16, 4};
        src = *t;
        ferry_tensor_view(&src, 3, back, &src);
    }
    return ferry_load_copy(l, &dst, &src);
}

static ferry_status load(void *self_ptr, ferry_loader *l, const char *name,
                         const ferry_tensor *t)
{
    toy *self = self_ptr;
    ferry_tensor dst, src = *t;
    long i;
    self->calls++;
    assert_null(t->data);
    assert_ptr_equal(t->name, name);
    if (strcmp(name, "model.q") == 0)
        return load_qkv(l, 0, t);
    if (strcmp(name, "model.k") == 0)
        return load_qkv(l, 1, t);
    if (strcmp(name, "model.v") == 0)
        return load_qkv(l, 2, t);
    if (strcmp(name, "model.down") == 0) { /* columns 3, 4, 5 of [4, 6] */
        FERRY_TRY(ferry_loader_slot(l, DOWN, &dst));
        FERRY_TRY(ferry_tensor_narrow(t, 1, 3, 3, &src));
        return ferry_load_copy(l, &dst, &src);
    }
    if (strcmp(name, "model.down_t") == 0) { /* another form, [6, 4] */
        FERRY_TRY(ferry_loader_slot(l, DOWN, &dst));
        FERRY_TRY(ferry_tensor_transpose(t, 0, 1, &src));
        FERRY_TRY(ferry_tensor_narrow(&src, 1, 3, 3, &src));
        return ferry_load_copy(l, &dst, &src);
    }
    if (strcmp(name, "model.embed") == 0 || strcmp(name, "head") == 0) {
        FERRY_TRY(ferry_loader_slot(l, EMBED, &dst));
        FERRY_TRY(ferry_tensor_narrow(&dst, 0, 0, t->shape[0], &dst));
        return ferry_load_tied(l, &dst, t);
    }
    if (strcmp(name, "model.elsewhere") == 0)
        return FERRY_OK;
    if (strcmp(name, "model.empty") == 0) {
        FERRY_TRY(ferry_loader_slot(l, EMBED, &dst));
        FERRY_TRY(ferry_tensor_narrow(&dst, 0, 0, 0, &dst));
        return ferry_load_copy(l, &dst, t);
    }
    if (strcmp(name, "model.a_log") == 0)
        return load_step(self, l, 0, t);
    if (strcmp(name, "model.scale") == 0)
        return load_step(self, l, 1, t);
    if (strcmp(name, "model.bad") == 0)
        return load_bad(self, l, t);
    if (strcmp(name, "model.q8") == 0)
        return load_q8(self, l, t);
    if (sscanf(name, "model.experts.%ld.w", &i) == 1)
        return load_expert(l, i, t);
    return FERRY_EUNKNOWN;
}

static const char *const known[] = {
    "model.q", "model.k",     "model.v",           "model.down",
    "head",    "model.embed", "model.norm.weight", NULL};

static const char *checkpoint_name(void *self, size_t i)
{
    (void)self;
    return known[i];
}

static const ferry_name_map maps[] = {{"model.language_model.", "model."}};

static toy self;
static ferry_model model;

static ferry__plan *made(void)
{
    ferry__plan *plan = NULL;
    memset(&self, 0, sizeof(self));
    self.mode = "";
    self.step.name = "negate_exp";
    self.step.fn = run_step;
    self.step.n_inputs = 2;
    memset(&model, 0, sizeof(model));
    model.size = sizeof(model);
    model.name = "Toy";
    model.self = &self;
    model.params = slots;
    model.n_params = SLOTS;
    model.load = load;
    model.checkpoint_name = checkpoint_name;
    assert_int_equal(ferry__plan_create(&model, &plan), FERRY_OK);
    return plan;
}

static ferry_param_meta meta(const char *name, ferry_dtype dtype, int32_t ndim,
                             int64_t a, int64_t b)
{
    ferry_param_meta m = {name, dtype, ndim, {a, b}};
    return m;
}

static size_t baked(ferry__plan *plan, const char *name, int64_t a, int64_t b)
{
    ferry_param_meta m = meta(name, FERRY_DTYPE_BF16, 2, a, b);
    size_t id = 99;
    assert_int_equal(ferry__plan_bake(plan, &m, &id), FERRY_OK);
    return id;
}

static const ferry__entry *only_entry(const ferry__plan *plan, size_t id)
{
    size_t n = 0;
    const ferry__entry *e = ferry__plan_entries(plan, id, &n);
    assert_int_equal(n, 1);
    return e;
}

static void a_fused_shard_is_one_strided_box(void **state)
{
    (void)state;
    ferry__plan *plan = made();
    const ferry__entry *e = only_entry(plan, baked(plan, "model.k", 4, 4));
    assert_int_equal(e->kind, FERRY__ENTRY_COPY);
    assert_int_equal(e->slot, QKV);
    assert_int_equal(e->box.offset, 8); /* rows 2 and 3 of the source */
    assert_int_equal(e->box.ndim, 1);
    assert_int_equal(e->box.shape[0], 8);
    assert_int_equal(e->box.stride[0], 1);
    assert_int_equal(e->op.dst_offset, 8);
    assert_int_equal(e->dst_start[0], 2);
    assert_int_equal(e->dst_count[0], 2);
    assert_int_equal(e->dst_count[1], 4);
    assert_int_equal(e->op.src_dtype, FERRY_DTYPE_BF16);
    assert_int_equal(e->op.dst_dtype, FERRY_DTYPE_F32);
    e = only_entry(plan, baked(plan, "model.down", 4, 6));
    assert_int_equal(e->box.offset, 3);
    assert_int_equal(e->box.ndim, 2);
    assert_int_equal(e->box.shape[0], 4);
    assert_int_equal(e->box.stride[0], 6);
    assert_int_equal(e->box.shape[1], 3);
    assert_int_equal(e->op.dst_stride[0], 3);
    e = only_entry(plan, baked(plan, "model.down_t", 6, 4));
    assert_int_equal(e->box.offset, 12);
    assert_int_equal(e->box.ndim, 2);
    assert_int_equal(e->op.src_stride[0], 4);
    assert_int_equal(e->op.dst_stride[0], 1);
    assert_int_equal(e->op.dst_stride[1], 3);
    ferry__plan_destroy(&plan);
    assert_null(plan);
    ferry__plan_destroy(&plan);
    ferry__plan_destroy(NULL);
}

static void names_without_bytes_here_are_known(void **state)
{
    (void)state;
    ferry__plan *plan = made();
    size_t n = 9, id = baked(plan, "model.elsewhere", 3, 3);
    ferry__plan_entries(plan, id, &n);
    assert_int_equal(n, 0);
    id = baked(plan, "model.empty", 0, 4); /* O-24 */
    ferry__plan_entries(plan, id, &n);
    assert_int_equal(n, 0);
    assert_string_equal(ferry__plan_baked(plan, id)->meta.name, "model.empty");
    ferry__plan_destroy(&plan);
}

static void a_baked_name_is_found_again_without_its_loader(void **state)
{
    (void)state;
    ferry__plan *plan = made();
    size_t id = baked(plan, "model.q", 4, 4);
    assert_int_equal(self.calls, 1);
    assert_int_equal(baked(plan, "model.q", 4, 4), id);
    assert_int_equal(self.calls, 1);
    ferry__plan_destroy(&plan);
}

static ferry_status bake_status(ferry__plan *plan, const char *name, int64_t a,
                                int64_t b)
{
    ferry_param_meta m = meta(name, FERRY_DTYPE_BF16, 2, a, b);
    size_t id;
    return ferry__plan_bake(plan, &m, &id);
}

static void o43_maps_apply_and_unknown_names_get_a_suggestion(void **state)
{
    (void)state;
    ferry__plan *plan = made();
    ferry__plan_destroy(&plan);
    model.maps = maps;
    model.n_maps = 1;
    assert_int_equal(ferry__plan_create(&model, &plan), FERRY_OK);
    const ferry__entry *e =
        only_entry(plan, baked(plan, "model.language_model.q", 4, 4));
    assert_int_equal(e->slot, QKV);
    assert_int_equal(bake_status(plan, "model.q", 4, 4), FERRY_EUNKNOWN);
    assert_non_null(strstr(ferry_last_error(), "parameter model.q"));
    assert_non_null(strstr(ferry_last_error(),
                           "nearest known name is model.language_model."));
    baked(plan, "head", 6, 4); /* no prefix of the table: as it is */
    ferry__plan_destroy(&plan);
    const ferry_name_map both[] = {{"model.language_model.", "model."},
                                   {"model.", "model."}};
    model.maps = both;
    model.n_maps = 2;
    assert_int_equal(ferry__plan_create(&model, &plan), FERRY_OK);
    baked(plan, "model.language_model.q", 4, 4);
    baked(plan, "model.q", 4, 4);
    ferry__plan_destroy(&plan);
}

static void the_nearest_known_name_is_suggested(void **state)
{
    (void)state;
    ferry__plan *plan = made();
    assert_int_equal(bake_status(plan, "model.nrom.weight", 4, 4),
                     FERRY_EUNKNOWN);
    assert_string_equal(ferry_last_error(),
                        "parameter model.nrom.weight: not known to Toy; the "
                        "nearest known name is model.norm.weight");
    assert_int_equal(bake_status(plan, "zzz", 4, 4), FERRY_EUNKNOWN);
    assert_string_equal(ferry_last_error(), "parameter zzz: not known to Toy");
    /* Known to the table but not to load: the same name is suggested. */
    assert_int_equal(bake_status(plan, "model.norm.weight", 4, 4),
                     FERRY_EUNKNOWN);
    ferry__plan_destroy(&plan);
    model.checkpoint_name = NULL;
    model.name = NULL;
    assert_int_equal(ferry__plan_create(&model, &plan), FERRY_OK);
    assert_int_equal(bake_status(plan, "model.nrom", 4, 4), FERRY_EUNKNOWN);
    assert_string_equal(ferry_last_error(),
                        "parameter model.nrom: not known to the model");
    ferry__plan_destroy(&plan);
}

static void a_wrong_shape_names_both(void **state)
{
    (void)state;
    ferry__plan *plan = made();
    assert_int_equal(bake_status(plan, "model.q", 4, 5), FERRY_EMISMATCH);
    assert_string_equal(ferry_last_error(),
                        "parameter model.q: shape [4, 4] expected, got "
                        "[4, 5]");
    assert_int_equal(bake_status(plan, "model.q", 1 + INT64_MAX / 2, 4),
                     FERRY_EOVERFLOW);
    assert_non_null(strstr(ferry_last_error(), "parameter model.q"));
    ferry_param_meta m = meta("", FERRY_DTYPE_BF16, 1, 1, 0);
    size_t id;
    assert_int_equal(ferry__plan_bake(plan, &m, &id), FERRY_EINVAL);
    m.name = NULL;
    assert_int_equal(ferry__plan_bake(plan, &m, &id), FERRY_EINVAL);
    m = meta("model.q", FERRY_DTYPE_Q8_0, 1, 32, 0);
    assert_int_equal(ferry__plan_bake(plan, &m, &id), FERRY_EINVAL);
    ferry__plan_destroy(&plan);
}

static void integers_are_not_stored_as_floats(void **state)
{
    (void)state;
    ferry__plan *plan = made();
    ferry_param_meta m = meta("model.q", FERRY_DTYPE_I32, 2, 4, 4);
    size_t id;
    assert_int_equal(ferry__plan_bake(plan, &m, &id), FERRY_ENOTSUP);
    assert_string_equal(ferry_last_error(),
                        "parameter model.q: int32 is not stored as float32 "
                        "(slot qkv_proj.weight)");
    ferry__plan_destroy(&plan);
}

static void faulty_loaders_are_refused_by_parameter(void **state)
{
    (void)state;
    static const struct {
        const char *mode;
        ferry_status status;
        const char *text;
    } cases[] = {
        {"runtime slot", FERRY_EINVAL, "cos_cache"},
        {"no slot", FERRY_EINVAL, "slot 7 of 7"},
        {"foreign source", FERRY_EINVAL, "not a view of it"},
        {"real source", FERRY_EINVAL, "not a view of it"},
        {"source outside", FERRY_EINVAL, "not a view of it"},
        {"source before", FERRY_EINVAL, "not a view of it"},
        {"source overlaps", FERRY_EINVAL, "not a view of it"},
        {"source backwards", FERRY_EINVAL, "not a view of it"},
        {"source dtype", FERRY_EINVAL, "not a view of it"},
        {"source dims", FERRY_EINVAL, "not a view of it"},
        {"source huge", FERRY_EINVAL, "not a view of it"},
        {"destination is the source", FERRY_EINVAL, "not a view of a slot"},
        {"destination dtype", FERRY_EINVAL, "not a view of a slot"},
        {"destination slot", FERRY_EINVAL, "not a view of a slot"},
        {"destination stride 0", FERRY_ENOTSUP, "not a box"},
        {"destination outside", FERRY_ENOTSUP, "not a box"},
        {"shapes", FERRY_EMISMATCH, "shape [2, 3] expected, got [4, 3]"},
        {"no box", FERRY_ENOTSUP, "not a box of slot down_proj.weight"},
        {"padding rows", FERRY_EINVAL, "row 6 of slot embed.weight"},
        {"ignored failure", FERRY_EMISMATCH, "expected"},
        {"own failure", FERRY_EINTERNAL, "out of order"},
    };
    ferry__plan *plan = made();
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        self.mode = cases[i].mode;
        assert_int_equal(bake_status(plan, "model.bad", 4, 3), cases[i].status);
        assert_non_null(strstr(ferry_last_error(), cases[i].text));
        if (cases[i].status != FERRY_EINTERNAL)
            assert_non_null(strstr(ferry_last_error(), "parameter model.bad"));
    }
    self.mode = "split rows";
    const ferry__entry *e = only_entry(plan, baked(plan, "model.bad", 4, 3));
    assert_int_equal(e->dst_count[0], 4);
    assert_int_equal(e->op.ndim, 3);
    ferry__plan_destroy(&plan);
}

static void q8_0_destinations_are_whole_blocks(void **state)
{
    (void)state;
    ferry__plan *plan = made();
    self.mode = "half block";
    assert_int_equal(bake_status(plan, "model.q8", 4, 64), FERRY_EINVAL);
    assert_non_null(strstr(ferry_last_error(), "columns 16 to 48"));
    self.mode = "blocks of two runs";
    assert_int_equal(bake_status(plan, "model.q8", 4, 64), FERRY_ENOTSUP);
    self.mode = "blocks turned";
    const ferry__entry *e = only_entry(plan, baked(plan, "model.q8", 4, 64));
    assert_int_equal(e->op.dst_dtype, FERRY_DTYPE_Q8_0);
    assert_int_equal(e->op.shape[e->op.ndim - 1] % 32, 0);
    ferry__plan_destroy(&plan);
}

static void o45_tied_names_write_one_slot(void **state)
{
    (void)state;
    ferry__plan *plan = made();
    size_t ids[] = {baked(plan, "model.embed", 6, 4),
                    baked(plan, "head", 6, 4)};
    assert_int_equal(only_entry(plan, ids[0])->kind, FERRY__ENTRY_TIED);
    assert_int_equal(only_entry(plan, ids[1])->slot, EMBED);
    assert_int_equal(ferry__plan_check_overlap(plan, ids, 2), FERRY_OK);
    ferry__plan_destroy(&plan);
}

static void o42_steps_take_whole_packed_inputs(void **state)
{
    (void)state;
    ferry__plan *plan = made();
    size_t ids[] = {baked(plan, "model.a_log", 1, 4),
                    baked(plan, "model.scale", 2, 3)};
    const ferry__entry *e = only_entry(plan, ids[1]);
    assert_int_equal(e->kind, FERRY__ENTRY_STEP);
    assert_int_equal(e->input, 1);
    assert_int_equal(e->input_ndim, 2);
    assert_int_equal(e->input_shape[1], 3);
    assert_int_equal(e->op.dst_dtype, FERRY_DTYPE_BF16);
    assert_int_equal(e->op.ndim, 1);
    assert_int_equal(ferry__plan_n_steps(plan), 1);
    const ferry__plan_step *s = ferry__plan_step_at(plan, e->step);
    assert_string_equal(s->step.name, "negate_exp");
    assert_ptr_not_equal(s->step.name, self.step.name);
    assert_int_equal(s->slot, NORM);
    assert_int_equal(s->dst_count[0], 4);
    assert_int_equal(ferry__plan_check_overlap(plan, ids, 2), FERRY_OK);
    ferry__plan_destroy(&plan);
}

static void steps_are_checked(void **state)
{
    (void)state;
    ferry__plan *plan = made();
    self.step.n_inputs = 17;
    assert_int_equal(bake_status(plan, "model.scale", 2, 3), FERRY_EINVAL);
    self.step.n_inputs = 0;
    assert_int_equal(bake_status(plan, "model.scale", 2, 3), FERRY_EINVAL);
    self.step.n_inputs = 1;
    assert_int_equal(bake_status(plan, "model.scale", 2, 3), FERRY_EINVAL);
    assert_non_null(strstr(ferry_last_error(), "input 1 of step negate_exp"));
    self.step.n_inputs = 2;
    assert_int_equal(bake_status(plan, "model.scale", 0, 3), FERRY_EINVAL);
    assert_non_null(strstr(ferry_last_error(), "is empty"));
    self.step.fn = NULL;
    assert_int_equal(bake_status(plan, "model.scale", 2, 3), FERRY_EINVAL);
    self.step.fn = run_step;
    self.step.name = NULL;
    assert_int_equal(bake_status(plan, "model.scale", 2, 3), FERRY_EINVAL);
    self.step.name = "";
    assert_int_equal(bake_status(plan, "model.scale", 2, 3), FERRY_EINVAL);
    self.step.name = "negate_exp";
    baked(plan, "model.a_log", 1, 4);
    self.step.n_inputs = 3;
    assert_int_equal(bake_status(plan, "model.scale", 2, 3), FERRY_EINVAL);
    assert_non_null(strstr(ferry_last_error(), "another function"));
    /* When its only input is stated anew, so may the step be. */
    baked(plan, "model.a_log", 2, 4);
    baked(plan, "model.scale", 2, 3);
    self.step.n_inputs = 2;
    assert_int_equal(bake_status(plan, "model.a_log", 3, 4), FERRY_EINVAL);
    self.step.n_inputs = 3;
    size_t id = baked(plan, "model.a_log", 2, 4);
    assert_int_equal(only_entry(plan, id)->input_shape[0], 2);
    ferry__plan_destroy(&plan);
}

static void overlapping_parameters_are_both_named(void **state)
{
    (void)state;
    ferry__plan *plan = made();
    size_t good[] = {baked(plan, "model.q", 4, 4), baked(plan, "model.k", 4, 4),
                     baked(plan, "model.v", 4, 4),
                     baked(plan, "model.down", 4, 6)};
    assert_int_equal(ferry__plan_check_overlap(plan, good, 4), FERRY_OK);
    assert_int_equal(ferry__plan_check_overlap(plan, good, 0), FERRY_OK);
    size_t twice[] = {good[0], good[0]};
    assert_int_equal(ferry__plan_check_overlap(plan, twice, 2), FERRY_OK);
    size_t both[] = {baked(plan, "model.down_t", 6, 4), good[0], good[3]};
    assert_int_equal(ferry__plan_check_overlap(plan, both, 3), FERRY_EMISMATCH);
    assert_string_equal(ferry_last_error(),
                        "parameters model.down and model.down_t write the "
                        "same elements of slot down_proj.weight");
    ferry__plan_destroy(&plan);
}

static void a_changed_meta_replaces_the_entry(void **state)
{
    (void)state;
    ferry__plan *plan = made();
    size_t q = baked(plan, "model.q", 4, 4), n = 0;
    size_t id = baked(plan, "head", 6, 4);
    for (int i = 0; i < 5000; i++)
        assert_int_equal(baked(plan, "head", 1 + i % 6, 4), id);
    assert_int_equal(ferry__plan_baked(plan, id)->meta.shape[0], 1 + 4999 % 6);
    assert_int_equal(only_entry(plan, id)->dst_count[0], 1 + 4999 % 6);
    assert_int_equal(only_entry(plan, q)->slot, QKV);
    /* Back to a bad one: the good one stays. */
    assert_int_equal(bake_status(plan, "model.q", 4, 5), FERRY_EMISMATCH);
    assert_int_equal(baked(plan, "model.q", 4, 4), q);
    assert_int_equal(only_entry(plan, q)->slot, QKV);
    /* To nothing at all. */
    baked(plan, "head", 0, 4);
    ferry__plan_entries(plan, id, &n);
    assert_int_equal(n, 0);
    ferry__plan_destroy(&plan);
}

/* CPU time, so that a busy machine does not count. */
static clock_t bake_experts(ferry__plan *plan, size_t n, size_t *ids)
{
    char name[64];
    clock_t t0 = clock();
    for (size_t i = 0; i < n; i++) {
        snprintf(name, sizeof(name), "model.experts.%zu.w", i);
        ids[i] = baked(plan, name, 2, 2);
    }
    assert_int_equal(ferry__plan_check_overlap(plan, ids, n), FERRY_OK);
    return clock() - t0;
}

static void many_names_bake_linearly(void **state)
{
    (void)state;
    enum { SMALL = 10000, LARGE = 160000 };
    size_t *ids = malloc(LARGE * sizeof(*ids));
    ferry__plan *plan = made();
    clock_t small = bake_experts(plan, SMALL, ids);
    ferry__plan_destroy(&plan);
    plan = made();
    clock_t large = bake_experts(plan, LARGE, ids);
    ferry__plan_destroy(&plan);
    /* Sixteen times the names; n log n and cold caches allowed for. */
    assert_true(large < 16 * 6 * small);
    free(ids);
}

static void the_plan_reads_as_json(void **state)
{
    (void)state;
    ferry__plan *plan = made();
    char *text = NULL;
    size_t ids[] = {baked(plan, "model.down", 4, 6),
                    baked(plan, "model.a_log", 1, 4), baked(plan, "head", 6, 4),
                    baked(plan, "model.elsewhere", 1, 1)};
    assert_int_equal(ferry__plan_to_json(plan, ids, 4, &text), FERRY_OK);
    json_t *root = json_loads(text, 0, NULL);
    assert_non_null(root);
    json_t *params = json_object_get(root, "params");
    assert_string_equal(json_string_value(json_object_get(root, "model")),
                        "Toy");
    assert_int_equal(json_array_size(params), 4);
    char *first = json_dumps(json_array_get(params, 0), JSON_COMPACT);
    assert_string_equal(
        first,
        "{\"name\":\"model.down\",\"dtype\":\"bfloat16\",\"shape\":[4,6],"
        "\"entries\":[{\"kind\":\"copy\",\"slot\":\"down_proj.weight\","
        "\"slot_dtype\":\"bfloat16\",\"source\":{\"offset\":3,"
        "\"shape\":[4,3],\"stride\":[6,1]},\"start\":[0,0],"
        "\"count\":[4,3]}]}");
    free(first);
    json_t *step = json_array_get(
        json_object_get(json_array_get(params, 1), "entries"), 0);
    assert_string_equal(json_string_value(json_object_get(step, "step")),
                        "negate_exp");
    assert_int_equal(json_integer_value(json_object_get(step, "input")), 0);
    json_t *tied = json_array_get(
        json_object_get(json_array_get(params, 2), "entries"), 0);
    assert_string_equal(json_string_value(json_object_get(tied, "kind")),
                        "tied");
    json_decref(root);
    ferry__free(text);
    ferry__plan_destroy(&plan);
}

static void tables_of_an_older_size_are_accepted(void **state)
{
    (void)state;
    ferry__plan *plan = made();
    ferry__plan_destroy(&plan);
    model.size = offsetof(ferry_model, checkpoint_name);
    assert_int_equal(ferry__plan_create(&model, &plan), FERRY_OK);
    assert_int_equal(bake_status(plan, "model.nrom", 4, 4), FERRY_EUNKNOWN);
    assert_string_equal(ferry_last_error(),
                        "parameter model.nrom: not known to Toy");
    ferry__plan_destroy(&plan);
    model.size = sizeof(model) + 64;
    assert_int_equal(ferry__plan_create(&model, &plan), FERRY_OK);
    ferry__plan_destroy(&plan);
    model.size = 16;
    assert_int_equal(ferry__plan_create(&model, &plan), FERRY_EINVAL);
    model.size = sizeof(model);
    model.load = NULL;
    assert_int_equal(ferry__plan_create(&model, &plan), FERRY_EINVAL);
    model.name = NULL;
    assert_int_equal(ferry__plan_create(&model, &plan), FERRY_EINVAL);
}

static void slots_know_what_a_checkpoint_covers(void **state)
{
    (void)state;
    assert_int_equal(ferry__slot_numel(&slots[EMBED]), 24);
    assert_int_equal(ferry__slot_bytes(&slots[EMBED]), 64);
    assert_int_equal(ferry__slot_numel(&slots[TABLE]), 0);
    assert_int_equal(ferry__slot_bytes(&slots[TABLE]), 16);
    assert_int_equal(ferry__slot_bytes(&slots[Q8]), 4 * 2 * 34);
    ferry_param unknown = {"x", FERRY_DTYPE_NONE, 1, {4}, NULL, 0, 0, 0};
    assert_int_equal(ferry__slot_bytes(&unknown), 0);
}

static ferry_status bake_all(ferry__plan *plan)
{
    static const char *const names[] = {"model.q", "head", "model.a_log",
                                        "model.scale", "model.k"};
    size_t ids[5];
    for (size_t i = 0; i < 5; i++) {
        ferry_param_meta m = meta(names[i], FERRY_DTYPE_BF16, 2, 4, 4);
        FERRY_TRY(ferry__plan_bake(plan, &m, &ids[i]));
    }
    return ferry__plan_check_overlap(plan, ids, 5);
}

static void memory_running_out_leaves_a_plan_that_bakes(void **state)
{
    (void)state;
    for (uint64_t k = 1; k < 200; k++) {
        ferry__plan *plan = made();
        ferry__fault_arm(FERRY__FAULT_ALLOC, k);
        ferry_status st = bake_all(plan);
        ferry__fault_arm(FERRY__FAULT_ALLOC, 0);
        if (st < 0)
            assert_int_equal(st, FERRY_ENOMEM);
        assert_int_equal(bake_all(plan), FERRY_OK);
        ferry__plan_destroy(&plan);
        if (st == FERRY_OK) {
            assert_true(k > 10);
            break;
        }
    }
    ferry__plan *plan = NULL;
    ferry__fault_arm(FERRY__FAULT_ALLOC, 1);
    assert_int_equal(ferry__plan_create(&model, &plan), FERRY_ENOMEM);
    ferry__fault_arm(FERRY__FAULT_ALLOC, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_fused_shard_is_one_strided_box),
        cmocka_unit_test(names_without_bytes_here_are_known),
        cmocka_unit_test(a_baked_name_is_found_again_without_its_loader),
        cmocka_unit_test(o43_maps_apply_and_unknown_names_get_a_suggestion),
        cmocka_unit_test(the_nearest_known_name_is_suggested),
        cmocka_unit_test(a_wrong_shape_names_both),
        cmocka_unit_test(integers_are_not_stored_as_floats),
        cmocka_unit_test(faulty_loaders_are_refused_by_parameter),
        cmocka_unit_test(q8_0_destinations_are_whole_blocks),
        cmocka_unit_test(o45_tied_names_write_one_slot),
        cmocka_unit_test(o42_steps_take_whole_packed_inputs),
        cmocka_unit_test(steps_are_checked),
        cmocka_unit_test(overlapping_parameters_are_both_named),
        cmocka_unit_test(a_changed_meta_replaces_the_entry),
        cmocka_unit_test(many_names_bake_linearly),
        cmocka_unit_test(the_plan_reads_as_json),
        cmocka_unit_test(tables_of_an_older_size_are_accepted),
        cmocka_unit_test(slots_know_what_a_checkpoint_covers),
        cmocka_unit_test(memory_running_out_leaves_a_plan_that_bakes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
