/* SPDX-License-Identifier: Apache-2.0 */
/* Views against explicit lists of indices, and the public copy: O-22
 * (strides of any sign), O-23 (0-d), O-24 (zero extents), O-60. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "harness/naive.h"
#include <stdlib.h>
#include <string.h>

static ferry_tensor made(void *data, ferry_dtype dtype, int32_t ndim,
                         const int64_t *shape)
{
    ferry_tensor t;
    assert_int_equal(ferry_tensor_init(&t, data, dtype, ndim, shape), FERRY_OK);
    return t;
}

static void assert_same_view(const ferry_tensor *t, const naive_view *want)
{
    static naive_view got;
    assert_int_equal(t->ndim, want->ndim);
    for (int32_t i = 0; i < t->ndim; i++)
        assert_int_equal(t->shape[i], want->shape[i]);
    assert_int_equal(ferry_tensor_numel(t), want->count);
    naive_of(t, &got);
    assert_memory_equal(got.index, want->index,
                        want->count * sizeof(*want->index));
}

static void random_views_equal_explicit_lists(void **state)
{
    (void)state;
    static naive_view v;
    for (uint64_t seed = 1; seed <= 3000; seed++) {
        uint64_t rng = seed;
        ferry_tensor t;
        naive_tensor(&rng, FERRY_DTYPE_F32, 1500, &t, &v);
        for (int k = 0; k < 6; k++) {
            naive_step(&rng, &t, &v);
            assert_same_view(&t, &v);
        }
    }
}

static void init_checks_every_bound(void **state)
{
    (void)state;
    ferry_tensor t;
    int64_t negative[] = {2, -1}, huge[] = {INT64_MAX / 2, 4};
    int64_t wide[] = {INT64_MAX / 4}, odd[] = {3, 33}, blocks[] = {3, 64};
    int64_t nine[9] = {1, 1, 1, 1, 1, 1, 1, 1, 1};
    int64_t hollow[] = {0, INT64_MAX, INT64_MAX};
    assert_int_equal(ferry_tensor_init(&t, NULL, FERRY_DTYPE_NONE, 0, NULL),
                     FERRY_EINVAL);
    assert_int_equal(ferry_tensor_init(&t, NULL, FERRY_DTYPE_F32, -1, nine),
                     FERRY_EINVAL);
    assert_int_equal(ferry_tensor_init(&t, NULL, FERRY_DTYPE_F32, 9, nine),
                     FERRY_EINVAL);
    assert_int_equal(ferry_tensor_init(&t, NULL, FERRY_DTYPE_F32, 2, negative),
                     FERRY_EINVAL);
    assert_int_equal(ferry_tensor_init(&t, NULL, FERRY_DTYPE_F32, 2, huge),
                     FERRY_EOVERFLOW);
    assert_int_equal(ferry_tensor_init(&t, NULL, FERRY_DTYPE_F64, 1, wide),
                     FERRY_EOVERFLOW);
    assert_int_equal(ferry_tensor_init(&t, NULL, FERRY_DTYPE_F64, 3, hollow),
                     FERRY_EOVERFLOW);
    assert_int_equal(ferry_tensor_init(&t, NULL, FERRY_DTYPE_Q8_0, 2, odd),
                     FERRY_EINVAL);
    assert_int_equal(ferry_tensor_init(&t, NULL, FERRY_DTYPE_Q8_0, 0, NULL),
                     FERRY_EINVAL);
    t = made(NULL, FERRY_DTYPE_Q8_0, 2, blocks);
    assert_int_equal(ferry_tensor_bytes(&t), 3 * 2 * 34);
    assert_null(ferry_tensor_data(&t));
}

static void data_is_the_first_element_of_a_view(void **state)
{
    (void)state;
    char bytes[512];
    int64_t shape[] = {3, 64}, flat[] = {4, 2};
    ferry_tensor q = made(bytes, FERRY_DTYPE_Q8_0, 2, shape);
    assert_int_equal(ferry_tensor_narrow(&q, 0, 1, 2, &q), FERRY_OK);
    assert_int_equal(ferry_tensor_narrow(&q, 1, 32, 32, &q), FERRY_OK);
    assert_ptr_equal(ferry_tensor_data(&q), bytes + 3 * 34);
    ferry_tensor t = made(bytes, FERRY_DTYPE_F32, 2, flat);
    assert_true(ferry_tensor_is_contiguous(&t));
    assert_int_equal(ferry_tensor_select(&t, 0, -1, &t), FERRY_OK);
    assert_ptr_equal(ferry_tensor_data(&t), bytes + 6 * 4);
    t.dtype = FERRY_DTYPE_NONE;
    assert_int_equal(ferry_tensor_bytes(&t), 0);
    assert_null(ferry_tensor_data(&t));
}

static void contiguity_ignores_extents_of_one_and_nothing(void **state)
{
    (void)state;
    int64_t shape[] = {2, 3, 1}, empty[] = {0, 4};
    ferry_tensor t = made(NULL, FERRY_DTYPE_F32, 3, shape), u;
    t.stride[2] = 77;
    assert_true(ferry_tensor_is_contiguous(&t));
    assert_int_equal(ferry_tensor_transpose(&t, 0, 1, &u), FERRY_OK);
    assert_false(ferry_tensor_is_contiguous(&u));
    u = made(NULL, FERRY_DTYPE_F32, 2, empty);
    assert_int_equal(ferry_tensor_transpose(&u, 0, 1, &u), FERRY_OK);
    assert_true(ferry_tensor_is_contiguous(&u));
}

static void bad_views_name_operation_and_values(void **state)
{
    (void)state;
    int64_t shape[] = {2, 3};
    int32_t twice[] = {0, 0}, far[] = {0, 2};
    ferry_tensor t = made(NULL, FERRY_DTYPE_F32, 2, shape), out, old;
    t.name = "model.norm.weight";
    memset(&out, 0x5a, sizeof(out));
    old = out;
    assert_int_equal(ferry_tensor_narrow(&t, 2, 0, 1, &out), FERRY_EINVAL);
    assert_non_null(strstr(ferry_last_error(), "narrow of model.norm"));
    assert_int_equal(ferry_tensor_narrow(&t, 1, 2, 2, &out), FERRY_EINVAL);
    assert_non_null(strstr(ferry_last_error(), "extent 3"));
    assert_int_equal(ferry_tensor_narrow(&t, 1, -1, 1, &out), FERRY_EINVAL);
    assert_int_equal(ferry_tensor_narrow(&t, 1, 4, 0, &out), FERRY_EINVAL);
    assert_int_equal(ferry_tensor_narrow(&t, 1, 0, -1, &out), FERRY_EINVAL);
    assert_int_equal(ferry_tensor_select(&t, 0, 2, &out), FERRY_EINVAL);
    assert_int_equal(ferry_tensor_select(&t, 0, -3, &out), FERRY_EINVAL);
    assert_int_equal(ferry_tensor_select(&t, 5, 0, &out), FERRY_EINVAL);
    assert_int_equal(ferry_tensor_transpose(&t, 0, 2, &out), FERRY_EINVAL);
    assert_int_equal(ferry_tensor_transpose(&t, -3, 0, &out), FERRY_EINVAL);
    assert_int_equal(ferry_tensor_permute(&t, twice, &out), FERRY_EINVAL);
    assert_int_equal(ferry_tensor_permute(&t, far, &out), FERRY_EINVAL);
    assert_int_equal(ferry_tensor_chunk(&t, 0, 0, 0, &out), FERRY_EINVAL);
    assert_int_equal(ferry_tensor_chunk(&t, 2, 0, 2, &out), FERRY_EINVAL);
    assert_int_equal(ferry_tensor_chunk(&t, 2, 0, -1, &out), FERRY_EINVAL);
    assert_int_equal(ferry_tensor_chunk(&t, 2, 3, 0, &out), FERRY_EINVAL);
    assert_int_equal(ferry_tensor_flatten(&t, 1, 0, &out), FERRY_EINVAL);
    assert_int_equal(ferry_tensor_flatten(&t, 0, 2, &out), FERRY_EINVAL);
    assert_int_equal(ferry_tensor_flatten(&t, 3, 0, &out), FERRY_EINVAL);
    assert_int_equal(ferry_tensor_squeeze(&t, 0, &out), FERRY_EINVAL);
    assert_int_equal(ferry_tensor_squeeze(&t, 9, &out), FERRY_EINVAL);
    assert_int_equal(ferry_tensor_unsqueeze(&t, 4, &out), FERRY_EINVAL);
    assert_memory_equal(&out, &old, sizeof(out));
}

static void a_reshape_that_copies_is_refused(void **state)
{
    (void)state;
    int64_t shape[] = {2, 3}, six[] = {6}, five[] = {5}, any[] = {-1, 2};
    int64_t two_any[] = {-1, -1}, none[] = {-1, 0}, minus[] = {-2, 3};
    int64_t uneven[] = {-1, 4}, nine[9] = {1, 1, 1, 1, 1, 1, 1, 6, 1};
    ferry_tensor t = made(NULL, FERRY_DTYPE_F32, 2, shape), u, out;
    assert_int_equal(ferry_tensor_transpose(&t, 0, 1, &u), FERRY_OK);
    assert_int_equal(ferry_tensor_view(&u, 1, six, &out), FERRY_ENOTSUP);
    assert_int_equal(ferry_tensor_flatten(&u, 0, 1, &out), FERRY_ENOTSUP);
    assert_int_equal(ferry_tensor_view(&t, 1, five, &out), FERRY_EINVAL);
    assert_int_equal(ferry_tensor_view(&t, 2, two_any, &out), FERRY_EINVAL);
    assert_int_equal(ferry_tensor_view(&t, 2, none, &out), FERRY_EINVAL);
    assert_int_equal(ferry_tensor_view(&t, 2, minus, &out), FERRY_EINVAL);
    assert_int_equal(ferry_tensor_view(&t, 2, uneven, &out), FERRY_EINVAL);
    assert_int_equal(ferry_tensor_view(&t, 9, nine, &out), FERRY_EINVAL);
    assert_int_equal(ferry_tensor_view(&t, -1, nine, &out), FERRY_EINVAL);
    assert_int_equal(ferry_tensor_view(&t, 2, any, &out), FERRY_OK);
    assert_int_equal(out.shape[0], 3);
}

static void scalars_and_empty_tensors_can_be_viewed(void **state)
{
    (void)state;
    int64_t one[] = {1, 1}, none[] = {0, 4}, other[] = {2, 0, 3};
    ferry_tensor t = made(NULL, FERRY_DTYPE_F32, 0, NULL), out;
    assert_int_equal(ferry_tensor_numel(&t), 1); /* O-23 */
    assert_int_equal(ferry_tensor_flatten(&t, 0, 0, &out), FERRY_OK);
    assert_int_equal(out.ndim, 1);
    assert_int_equal(ferry_tensor_view(&t, 2, one, &out), FERRY_OK);
    assert_int_equal(ferry_tensor_unsqueeze(&t, 0, &out), FERRY_OK);
    assert_int_equal(out.shape[0], 1);
    assert_int_equal(ferry_tensor_squeeze(&out, 0, &out), FERRY_OK);
    assert_int_equal(out.ndim, 0);
    t = made(NULL, FERRY_DTYPE_F32, 2, none);
    assert_int_equal(ferry_tensor_view(&t, 3, other, &out), FERRY_OK);
    assert_int_equal(ferry_tensor_numel(&out), 0);
    int64_t eight[] = {1, 1, 1, 1, 1, 1, 1, 1};
    t = made(NULL, FERRY_DTYPE_F32, 8, eight);
    assert_int_equal(ferry_tensor_unsqueeze(&t, 0, &out), FERRY_EINVAL);
}

static void unsqueeze_and_squeeze_undo_each_other(void **state)
{
    (void)state;
    int64_t shape[] = {2, 3};
    ferry_tensor t = made(NULL, FERRY_DTYPE_F32, 2, shape), out;
    for (int32_t d = -3; d <= 2; d++) {
        assert_int_equal(ferry_tensor_unsqueeze(&t, d, &out), FERRY_OK);
        assert_int_equal(out.ndim, 3);
        assert_true(ferry_tensor_is_contiguous(&out));
        assert_int_equal(ferry_tensor_squeeze(&out, d, &out), FERRY_OK);
        assert_memory_equal(&out, &t, sizeof(t));
    }
}

static void chunks_cut_as_torch_does(void **state)
{
    (void)state;
    int64_t shape[] = {10}, want[] = {3, 3, 3, 1, 0, 0};
    ferry_tensor t = made(NULL, FERRY_DTYPE_F32, 1, shape), out;
    for (int64_t i = 0; i < 4; i++) {
        assert_int_equal(ferry_tensor_chunk(&t, 4, 0, i, &out), FERRY_OK);
        assert_int_equal(out.shape[0], want[i]);
        assert_int_equal(out.offset, 3 * i);
    }
    shape[0] = 4; /* ceil(4 / 3) = 2: 2, 2, 0 */
    t = made(NULL, FERRY_DTYPE_F32, 1, shape);
    assert_int_equal(ferry_tensor_chunk(&t, 3, 0, 2, &out), FERRY_OK);
    assert_int_equal(out.shape[0], 0);
    assert_int_equal(ferry_tensor_chunk(&t, INT64_MAX, 0, INT64_MAX - 1, &out),
                     FERRY_OK);
    assert_int_equal(out.shape[0], 0);
}

/* ---- copies ---- */

static void o22_strides_are_honoured(void **state)
{
    (void)state;
    int32_t every[] = {10, -1, 20, -1}, got[2] = {0, 0};
    int64_t two[] = {2};
    ferry_tensor src = made(every, FERRY_DTYPE_I32, 1, two);
    ferry_tensor dst = made(got, FERRY_DTYPE_I32, 1, two);
    src.stride[0] = 2;
    assert_int_equal(ferry_tensor_copy(&dst, &src), FERRY_OK);
    assert_int_equal(got[0], 10);
    assert_int_equal(got[1], 20);
    src.stride[0] = -1; /* backwards from the last */
    src.offset = 3;
    assert_int_equal(ferry_tensor_copy(&dst, &src), FERRY_OK);
    assert_int_equal(got[0], -1);
    assert_int_equal(got[1], 20);
    src.stride[0] = 0; /* one element twice */
    src.offset = 2;
    assert_int_equal(ferry_tensor_copy(&dst, &src), FERRY_OK);
    assert_int_equal(got[0], 20);
    assert_int_equal(got[1], 20);
    dst.stride[0] = 0;
    assert_int_equal(ferry_tensor_copy(&dst, &src), FERRY_EINVAL);
}

static void o22_a_transposed_matrix_is_copied_by_value(void **state)
{
    (void)state;
    int16_t m[] = {1, 2, 3, 4, 5, 6}, got[6], want[] = {1, 4, 2, 5, 3, 6};
    int64_t shape[] = {2, 3}, turned[] = {3, 2};
    ferry_tensor src = made(m, FERRY_DTYPE_I16, 2, shape);
    ferry_tensor dst = made(got, FERRY_DTYPE_I16, 2, turned);
    assert_int_equal(ferry_tensor_transpose(&src, 0, 1, &src), FERRY_OK);
    assert_int_equal(ferry_tensor_copy(&dst, &src), FERRY_OK);
    assert_memory_equal(got, want, sizeof(want));
}

static void copies_are_refused_in_words(void **state)
{
    (void)state;
    float a[4] = {0};
    int64_t four[] = {4}, two[] = {2, 2}, none[] = {0, 4}, b32[] = {32};
    ferry_tensor dst = made(a, FERRY_DTYPE_F32, 1, four);
    ferry_tensor src = made(a, FERRY_DTYPE_F32, 2, two);
    assert_int_equal(ferry_tensor_copy(&dst, &src), FERRY_EMISMATCH);
    assert_non_null(strstr(ferry_last_error(), "[2, 2]"));
    src = made(a, FERRY_DTYPE_I32, 1, four);
    assert_int_equal(ferry_tensor_copy(&dst, &src), FERRY_ENOTSUP);
    src = made(NULL, FERRY_DTYPE_F32, 1, four);
    assert_int_equal(ferry_tensor_copy(&dst, &src), FERRY_EINVAL);
    assert_int_equal(ferry_tensor_copy(&src, &dst), FERRY_EINVAL);
    dst = made(a, FERRY_DTYPE_Q8_0, 1, b32);
    src = made(a, FERRY_DTYPE_F32, 1, b32);
    assert_int_equal(ferry_tensor_copy(&dst, &src), FERRY_ENOTSUP);
    dst = made(NULL, FERRY_DTYPE_F32, 2, none); /* O-24: [0, 4] */
    src = made(NULL, FERRY_DTYPE_F32, 2, none);
    assert_int_equal(ferry_tensor_copy(&dst, &src), FERRY_OK);
}

static void random_copies_equal_the_element_loop(void **state)
{
    (void)state;
    static naive_view from, to;
    for (uint64_t seed = 1; seed <= 1500; seed++) {
        uint64_t rng = seed * 7919;
        uint32_t in[3200], out[3200], want[3200];
        ferry_tensor src, dst;
        naive_tensor(&rng, FERRY_DTYPE_U32, 1500, &src, &from);
        for (int k = 0; k < 4; k++)
            naive_step(&rng, &src, &from);
        /* Into a box of the same shape inside something larger, permuted. */
        int64_t roomy[FERRY_MAX_DIMS];
        int64_t n = 1;
        for (int32_t i = 0; i < src.ndim; i++) {
            roomy[i] = src.shape[i] + (n < 100 ? naive_between(&rng, 0, 1) : 0);
            n *= roomy[i] > 0 ? roomy[i] : 1;
        }
        if (n > 3200)
            continue;
        dst = made(out, FERRY_DTYPE_U32, src.ndim, roomy);
        for (int32_t i = 0; i < src.ndim; i++)
            assert_int_equal(ferry_tensor_narrow(&dst, i,
                                                 roomy[i] - src.shape[i],
                                                 src.shape[i], &dst),
                             FERRY_OK);
        naive_of(&dst, &to);
        for (size_t i = 0; i < 3200; i++) {
            in[i] = (uint32_t)naive_random(&rng);
            want[i] = out[i] = 0x7f7f7f7fu;
        }
        for (size_t i = 0; i < from.count; i++)
            want[to.index[i]] = in[from.index[i]];
        src.data = in;
        assert_int_equal(ferry_tensor_copy(&dst, &src), FERRY_OK);
        assert_memory_equal(out, want, sizeof(out));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_views_equal_explicit_lists),
        cmocka_unit_test(init_checks_every_bound),
        cmocka_unit_test(data_is_the_first_element_of_a_view),
        cmocka_unit_test(contiguity_ignores_extents_of_one_and_nothing),
        cmocka_unit_test(bad_views_name_operation_and_values),
        cmocka_unit_test(a_reshape_that_copies_is_refused),
        cmocka_unit_test(scalars_and_empty_tensors_can_be_viewed),
        cmocka_unit_test(unsqueeze_and_squeeze_undo_each_other),
        cmocka_unit_test(chunks_cut_as_torch_does),
        cmocka_unit_test(o22_strides_are_honoured),
        cmocka_unit_test(o22_a_transposed_matrix_is_copied_by_value),
        cmocka_unit_test(copies_are_refused_in_words),
        cmocka_unit_test(random_copies_equal_the_element_loop),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
