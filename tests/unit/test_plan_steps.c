/* SPDX-License-Identifier: Apache-2.0 */
/* Steps as loaders state them: each input once, the same step the same way
 * each time, views checked like those of copies (O-35, O-42). */
#include "core/load_plan.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

static uint16_t storage[2][8];

static ferry_param slots[2] = {
    {"first", FERRY_DTYPE_BF16, 2, {2, 4}, storage[0], 0, 0, 0},
    {"second", FERRY_DTYPE_BF16, 2, {2, 4}, storage[1], 0, 0, 0},
};

static ferry_status run_step(void *arg, const ferry_tensor *dst,
                             const ferry_tensor *inputs, int32_t n_inputs)
{
    (void)arg;
    (void)dst;
    (void)inputs;
    (void)n_inputs;
    return FERRY_OK;
}

static ferry_status run_other(void *arg, const ferry_tensor *dst,
                              const ferry_tensor *inputs, int32_t n_inputs)
{
    return run_step(arg, dst, inputs, n_inputs);
}

/* What the loader does with "b"; "a" is always stated well. */
static const char *mode;

static bool is(const char *text)
{
    return strcmp(mode, text) == 0;
}

static ferry_status load_b(ferry_loader *l, const ferry_tensor *t)
{
    static int other_arg;
    ferry_step step = {"mix", run_step, NULL, 2};
    ferry_tensor dst, src = *t;
    int32_t input = 1;

    FERRY_TRY(ferry_loader_slot(l, is("slot") ? 1 : 0, &dst));
    if (is("function"))
        step.fn = run_other;
    else if (is("argument"))
        step.arg = &other_arg;
    else if (is("count"))
        step.n_inputs = 3;
    else if (is("place"))
        ferry_tensor_narrow(&dst, 0, 1, 1, &dst);
    else if (is("length"))
        ferry_tensor_narrow(&dst, 0, 0, 1, &dst);
    else if (is("stride"))
        ferry_tensor_transpose(&dst, 0, 1, &dst);
    else if (is("dimensions"))
        ferry_tensor_select(&dst, 0, 0, &dst);
    else if (is("nowhere"))
        ferry_tensor_narrow(&dst, 0, 0, 0, &dst);
    else if (is("no box"))
        dst.stride[1] = 0;
    else if (is("input before the first"))
        input = -1;
    else if (is("real source"))
        src.data = storage[1];
    else if (is("real destination"))
        dst.data = storage[1];
    else if (is("destination dimensions"))
        dst.ndim = 9;
    if (is("twice"))
        FERRY_TRY(ferry_load_step(l, &step, &dst, input, &src));
    return ferry_load_step(l, &step, &dst, input, &src);
}

static ferry_status load(void *self, ferry_loader *l, const char *name,
                         const ferry_tensor *t)
{
    ferry_step step = {"mix", run_step, NULL, 2};
    ferry_tensor dst;

    (void)self;
    if (strcmp(name, "b") == 0)
        return load_b(l, t);
    FERRY_TRY(ferry_loader_slot(l, 0, &dst));
    return ferry_load_step(l, &step, &dst, 0, t);
}

static const ferry_model model = {.size = sizeof(ferry_model),
                                  .name = "steps",
                                  .params = slots,
                                  .n_params = 2,
                                  .load = load};

static ferry_status bake(ferry__plan *plan, const char *name, size_t *out_id)
{
    ferry_param_meta meta = {name, FERRY_DTYPE_BF16, 2, {2, 4}};

    return ferry__plan_bake(plan, &meta, out_id);
}

static void a_step_is_stated_the_same_way_by_all_its_inputs(void **state)
{
    static const char *const others[] = {"function", "argument",  "count",
                                         "slot",     "place",     "length",
                                         "stride",   "dimensions"};
    ferry__plan *plan;
    size_t id;

    (void)state;
    for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++) {
        mode = others[i];
        assert_int_equal(ferry__plan_create(&model, &plan), FERRY_OK);
        assert_int_equal(bake(plan, "a", &id), FERRY_OK);
        if (bake(plan, "b", &id) != FERRY_EINVAL ||
            strstr(ferry_last_error(), "parameter b: step mix was stated with "
                                       "another") == NULL)
            fail_msg("%s: %s", mode, ferry_last_error());
        /* What was refused is not remembered. */
        mode = "";
        assert_int_equal(bake(plan, "b", &id), FERRY_OK);
        ferry__plan_destroy(&plan);
    }
}

static void faulty_statements_are_refused_by_parameter(void **state)
{
    static const char *const wrong[][2] = {
        {"twice", "input 1 of step mix stated twice"},
        {"input before the first", "input -1 of step mix, which has 2"},
        {"no box", "parameter b"},
        {"real source", "parameter b"},
        {"real destination", "parameter b"},
        {"destination dimensions", "parameter b"},
    };
    ferry__plan *plan;
    size_t id;

    (void)state;
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        mode = wrong[i][0];
        assert_int_equal(ferry__plan_create(&model, &plan), FERRY_OK);
        assert_int_equal(bake(plan, "a", &id), FERRY_OK);
        if (bake(plan, "b", &id) >= 0 ||
            strstr(ferry_last_error(), wrong[i][1]) == NULL)
            fail_msg("%s: %s", mode, ferry_last_error());
        ferry__plan_destroy(&plan);
    }
}

static void a_step_that_writes_nothing_is_nothing(void **state)
{
    ferry__plan *plan;
    size_t id, count;

    (void)state;
    mode = "nowhere";
    assert_int_equal(ferry__plan_create(&model, &plan), FERRY_OK);
    assert_int_equal(bake(plan, "b", &id), FERRY_OK);
    (void)ferry__plan_entries(plan, id, &count);
    assert_int_equal(count, 0);
    ferry__plan_destroy(&plan);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_step_is_stated_the_same_way_by_all_its_inputs),
        cmocka_unit_test(faulty_statements_are_refused_by_parameter),
        cmocka_unit_test(a_step_that_writes_nothing_is_nothing),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
