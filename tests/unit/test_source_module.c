/* SPDX-License-Identifier: Apache-2.0 */
/* A trainer's own tensors as a source: B1, B2, B5 and its refusals. */
#include "base/alloc.h"
#include "harness/source_pass.h"

#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <cmocka.h>
#include <string.h>

static float grid[6] = {0, 1, 2, 3, 4, 5};
static uint16_t half = 0x3C00;

static ferry_tensor tensor(void *data, ferry_dtype dtype, int32_t ndim,
                           const int64_t *shape)
{
    ferry_tensor t;

    assert_int_equal(ferry_tensor_init(&t, data, dtype, ndim, shape), FERRY_OK);
    return t;
}

static void b2_any_number_of_passes_with_any_strides(void **state)
{
    const int64_t shape[2] = {2, 3};
    const float turned[6] = {0, 3, 1, 4, 2, 5}, last[2] = {5, 4};
    const char *names[4] = {"w", "w.turned", "scalar", "w.back"};
    const expected_param want[4] = {
        {"w", FERRY_DTYPE_F32, 2, {2, 3}, grid},
        {"w.turned", FERRY_DTYPE_F32, 2, {3, 2}, turned},
        {"scalar", FERRY_DTYPE_BF16, 0, {0}, &half},
        {"w.back", FERRY_DTYPE_F32, 1, {2}, last},
    };
    ferry_tensor tensors[4];
    ferry_source source = {0};

    (void)state;
    tensors[0] = tensor(grid, FERRY_DTYPE_F32, 2, shape);
    assert_int_equal(ferry_tensor_transpose(&tensors[0], 0, 1, &tensors[1]),
                     FERRY_OK);
    tensors[2] = tensor(&half, FERRY_DTYPE_BF16, 0, NULL);
    tensors[3] = tensor(grid, FERRY_DTYPE_F32, 1, shape);
    tensors[3].offset = 5;
    tensors[3].stride[0] = -1;
    assert_int_equal(ferry_source_module(names, tensors, 4, &source), FERRY_OK);
    assert_true(source.ops->flags & FERRY_SOURCE_STABLE);
    /* The source keeps its own copy of views and names. */
    memset(tensors, 0, sizeof(tensors));
    names[0] = "gone";
    for (int pass = 0; pass < 3; pass++)
        expect_pass(&source, want, 4);
    /* A pass that stops early does not disturb the next one. */
    assert_int_equal(source.ops->begin(source.self), FERRY_OK);
    source.ops->end(source.self);
    source.ops->end(source.self);
    expect_pass(&source, want, 4);
    ferry_source_close(&source);
    assert_null(source.ops);
    ferry_source_close(&source);
    ferry_source_close(NULL);
}

/* B2: the tensors are read where they lie, so a round sends new values. */
static void b2_bytes_stay_the_callers(void **state)
{
    const int64_t shape[1] = {2};
    const char *name = "w";
    float values[2] = {1, 2};
    const expected_param want = {"w", FERRY_DTYPE_F32, 1, {2}, values};
    ferry_tensor t = tensor(values, FERRY_DTYPE_F32, 1, shape);
    ferry_source source = {0};

    (void)state;
    assert_int_equal(ferry_source_module(&name, &t, 1, &source), FERRY_OK);
    expect_pass(&source, &want, 1);
    values[1] = 7;
    expect_pass(&source, &want, 1);
    ferry_source_close(&source);
}

static void b5_tied_names_are_both_sent(void **state)
{
    const int64_t shape[2] = {2, 3};
    const char *names[2] = {"model.embed_tokens.weight", "lm_head.weight"};
    const expected_param want[2] = {
        {names[0], FERRY_DTYPE_F32, 2, {2, 3}, grid},
        {names[1], FERRY_DTYPE_F32, 2, {2, 3}, grid},
    };
    ferry_tensor tensors[2];
    ferry_source source = {0};
    ferry_item item;
    const void *first;

    (void)state;
    tensors[0] = tensors[1] = tensor(grid, FERRY_DTYPE_F32, 2, shape);
    assert_int_equal(ferry_source_module(names, tensors, 2, &source), FERRY_OK);
    expect_pass(&source, want, 2);
    assert_int_equal(source.ops->begin(source.self), FERRY_OK);
    assert_int_equal(source.ops->next(source.self, &item), FERRY_OK);
    first = item.tensor.data;
    assert_int_equal(source.ops->next(source.self, &item), FERRY_OK);
    assert_ptr_equal(item.tensor.data, first);
    ferry_source_close(&source);
}

static void wrong_entries_are_refused_by_name(void **state)
{
    const int64_t shape[2] = {2, 3};
    const char *names[2] = {"a", "a"}, *empty = "", *none = NULL;
    ferry_tensor tensors[2], t;
    ferry_source source = {0};

    (void)state;
    tensors[0] = tensors[1] = tensor(grid, FERRY_DTYPE_F32, 2, shape);
    expect_error(ferry_source_module(names, tensors, 2, &source), FERRY_EEXIST,
                 "parameter a");
    expect_error(ferry_source_module(&empty, tensors, 1, &source), FERRY_EINVAL,
                 "position 0: its name is empty");
    expect_error(ferry_source_module(&none, tensors, 1, &source), FERRY_EINVAL,
                 "position 0: its name is NULL");
    expect_error(ferry_source_module(NULL, tensors, 1, &source), FERRY_EINVAL,
                 "NULL for 1");
    t = tensors[0];
    t.data = NULL;
    expect_error(ferry_source_module(names, &t, 1, &source), FERRY_EINVAL,
                 "parameter a: data is NULL");
    t = tensors[0];
    t.ndim = 9;
    expect_error(ferry_source_module(names, &t, 1, &source), FERRY_EINVAL,
                 "parameter a: 9 dimensions");
    t = tensors[0];
    t.shape[1] = -1;
    expect_error(ferry_source_module(names, &t, 1, &source), FERRY_EINVAL,
                 "parameter a");
    t = tensors[0];
    t.dtype = FERRY_DTYPE_Q8_0;
    expect_error(ferry_source_module(names, &t, 1, &source), FERRY_EINVAL,
                 "q8_0");
    t = tensors[0];
    t.device = -1;
    expect_error(ferry_source_module(names, &t, 1, &source), FERRY_EINVAL,
                 "parameter a: device -1");
    assert_null(source.ops);
}

static void calls_out_of_order_are_refused(void **state)
{
    ferry_source source = {0};
    ferry_item item;

    (void)state;
    assert_int_equal(ferry_source_module(NULL, NULL, 0, &source), FERRY_OK);
    expect_error(source.ops->next(source.self, &item), FERRY_EORDER,
                 "begin must come first");
    assert_int_equal(source.ops->begin(source.self), FERRY_OK);
    expect_error(source.ops->begin(source.self), FERRY_EORDER,
                 "end must come first");
    assert_int_equal(source.ops->next(source.self, &item), FERRY_DONE);
    source.ops->end(source.self);
    expect_pass(&source, NULL, 0);
    ferry_source_close(&source);
}

static void every_allocation_may_fail(void **state)
{
    const int64_t shape[2] = {2, 3};
    const char *names[2] = {"a", "b"};
    ferry_status st = FERRY_ENOMEM;
    ferry_source source = {0};
    ferry_tensor tensors[2];
    uint64_t n = 0;

    (void)state;
    tensors[0] = tensors[1] = tensor(grid, FERRY_DTYPE_F32, 2, shape);
    while (st != FERRY_OK) {
        assert_null(source.ops);
        ferry__fault_arm(FERRY__FAULT_ALLOC, ++n);
        st = ferry_source_module(names, tensors, 2, &source);
        assert_true(st == FERRY_OK || st == FERRY_ENOMEM);
        assert_true(n < 100);
    }
    ferry__fault_arm(FERRY__FAULT_ALLOC, 0);
    assert_true(n > 4);
    ferry_source_close(&source);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(b2_any_number_of_passes_with_any_strides),
        cmocka_unit_test(b2_bytes_stay_the_callers),
        cmocka_unit_test(b5_tied_names_are_both_sent),
        cmocka_unit_test(wrong_entries_are_refused_by_name),
        cmocka_unit_test(calls_out_of_order_are_refused),
        cmocka_unit_test(every_allocation_may_fail),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
