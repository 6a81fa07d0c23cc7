/* SPDX-License-Identifier: Apache-2.0 */
/* The declared list: what it refuses and how it says so, its digest, its
 * JSON; B3's comparison of declaration and data; O-28, O-63. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "base/alloc.h"
#include "base/str.h"
#include "core/manifest.h"
#include <stdio.h>
#include <string.h>

static ferry_param_meta meta(const char *name, ferry_dtype dtype, int32_t ndim,
                             int64_t a, int64_t b)
{
    ferry_param_meta m = {name, dtype, ndim, {a, b}};
    return m;
}

static void entries_are_found_by_name(void **state)
{
    (void)state;
    ferry__manifest m = {0};
    char name[32];
    for (int i = 0; i < 1000; i++) {
        snprintf(name, sizeof(name), "p%d", i);
        ferry_param_meta e = meta(name, FERRY_DTYPE_BF16, 2, i, 3);
        assert_int_equal(ferry__manifest_add(&m, &e), FERRY_OK);
    }
    size_t at = 0;
    assert_int_equal(m.count, 1000);
    assert_true(ferry__manifest_find(&m, "p731", &at));
    assert_int_equal(at, 731);
    assert_string_equal(m.params[at].name, "p731");
    assert_false(ferry__manifest_find(&m, "p1000", &at));
    assert_int_equal(m.total_bytes, 999 * 1000 / 2 * 3 * 2);
    ferry__manifest_clear(&m);
    assert_int_equal(m.count, 0);
    assert_false(ferry__manifest_find(&m, "p731", &at));
}

static void refuse(const ferry_param_meta *e, ferry_status want, const char *a,
                   const char *b)
{
    ferry__manifest m = {0};
    assert_int_equal(ferry__manifest_add(&m, e), want);
    assert_non_null(strstr(ferry_last_error(), a));
    assert_non_null(strstr(ferry_last_error(), b));
    assert_int_equal(m.count, 0);
    ferry__manifest_clear(&m);
}

static void bad_entries_are_refused_by_name(void **state)
{
    (void)state;
    ferry_param_meta e = meta("w", FERRY_DTYPE_F32, 2, 2, -3);
    refuse(&e, FERRY_EINVAL, "parameter w", "-3");
    e = meta("w", FERRY_DTYPE_F32, 9, 1, 1);
    refuse(&e, FERRY_EINVAL, "parameter w", "9 dimensions");
    e = meta("w", FERRY_DTYPE_F32, -1, 1, 1);
    refuse(&e, FERRY_EINVAL, "parameter w", "-1 dimensions");
    e = meta("w", FERRY_DTYPE_F32, 2, INT64_MAX / 2, 3);
    refuse(&e, FERRY_EOVERFLOW, "parameter w", "[4611686018427387903, 3]");
    e = meta("w", FERRY_DTYPE_F64, 2, 0, INT64_MAX / 4);
    refuse(&e, FERRY_EOVERFLOW, "parameter w", "float64");
    e = meta("w", FERRY_DTYPE_Q8_0, 1, 32, 0);
    refuse(&e, FERRY_EINVAL, "parameter w", "q8_0");
    e = meta("w", FERRY_DTYPE_NONE, 1, 32, 0);
    refuse(&e, FERRY_EINVAL, "parameter w", "none");
    e = meta("", FERRY_DTYPE_F32, 1, 32, 0);
    refuse(&e, FERRY_EINVAL, "names[0]", "empty");
    e = meta(NULL, FERRY_DTYPE_F32, 1, 32, 0);
    refuse(&e, FERRY_EINVAL, "names[0]", "empty");
}

static void a_repeated_name_is_refused_with_both_places(void **state)
{
    (void)state;
    ferry__manifest m = {0};
    const ferry_param_meta list[] = {meta("a", FERRY_DTYPE_F32, 1, 2, 0),
                                     meta("b", FERRY_DTYPE_F32, 1, 2, 0),
                                     meta("a", FERRY_DTYPE_BF16, 1, 2, 0)};
    assert_int_equal(ferry__manifest_copy(&m, list, 3), FERRY_EEXIST);
    assert_string_equal(ferry_last_error(),
                        "parameter a: named twice, at 0 and 2");
    assert_int_equal(m.count, 2);
    ferry__manifest_clear(&m);
}

static void the_whole_may_not_overflow(void **state)
{
    (void)state;
    ferry__manifest m = {0};
    const ferry_param_meta list[] = {meta("a", FERRY_DTYPE_U8, 1, INT64_MAX, 0),
                                     meta("b", FERRY_DTYPE_U8, 1, INT64_MAX, 0),
                                     meta("c", FERRY_DTYPE_U8, 1, 2, 0)};
    assert_int_equal(ferry__manifest_copy(&m, list, 3), FERRY_EOVERFLOW);
    assert_non_null(strstr(ferry_last_error(), "parameter c"));
    ferry__manifest_clear(&m);
}

static void the_digest_is_that_of_the_canonical_text(void **state)
{
    (void)state;
    const ferry_param_meta list[] = {
        meta("model.norm.weight", FERRY_DTYPE_BF16, 1, 4, 0),
        meta("s", FERRY_DTYPE_F32, 0, 0, 0),
        meta("w", FERRY_DTYPE_F8_E4M3, 2, 12, 7)};
    const char text[] = "model.norm.weight bfloat16 4\ns float32 \n"
                        "w float8_e4m3fn 12,7\n";
    assert_true(ferry__manifest_digest(list, 3) ==
                ferry__xxh3(text, strlen(text)));
    assert_true(ferry__manifest_digest(NULL, 0) == ferry__xxh3("", 0));
    /* Names longer than the buffer it is fed through. */
    static char name[10000], line[10100];
    memset(name, 'n', sizeof(name) - 1);
    const ferry_param_meta big = meta(name, FERRY_DTYPE_F32, 1, 1, 0);
    snprintf(line, sizeof(line), "%s float32 1\n", name);
    assert_true(ferry__manifest_digest(&big, 1) ==
                ferry__xxh3(line, strlen(line)));
}

typedef struct lists {
    const char *names[2], *dtypes[2];
    ferry_shape shapes[2];
} lists;

static ferry_status from_lists(ferry__manifest *m, lists *l, size_t n,
                               size_t n_dtypes, size_t n_shapes)
{
    ferry_strs names = {l->names, n}, dtypes = {l->dtypes, n_dtypes};
    ferry_shapes shapes = {l->shapes, n_shapes};
    return ferry__manifest_from_lists(m, &names, &dtypes, &shapes);
}

static lists good_lists(void)
{
    lists l = {{"a", "b"},
               {"bfloat16", "torch.float32"},
               {{2, 0, {3, 4}}, {0, 0, {0}}}};
    return l;
}

static void lists_of_an_update_become_entries(void **state)
{
    (void)state;
    ferry__manifest m = {0};
    ferry__str json = {0};
    lists l = good_lists();
    assert_int_equal(from_lists(&m, &l, 2, 2, 2), FERRY_OK);
    assert_int_equal(m.params[0].dtype, FERRY_DTYPE_BF16);
    assert_int_equal(m.params[1].ndim, 0);
    assert_int_equal(m.total_bytes, 24 + 4);
    ferry__manifest_to_json(m.params, m.count, &json);
    assert_string_equal(json.data,
                        "\"names\":[\"a\",\"b\"],\"dtype_names\":"
                        "[\"bfloat16\",\"float32\"],\"shapes\":[[3,4],[]]");
    ferry__str_free(&json);
    ferry__manifest_clear(&m);
}

static void lists_name_field_and_parameter_when_wrong(void **state)
{
    (void)state;
    ferry__manifest m = {0};
    lists l = good_lists();
    assert_int_equal(from_lists(&m, &l, 2, 1, 2), FERRY_EINVAL);
    assert_string_equal(ferry_last_error(),
                        "`dtype_names` should be of the same size as "
                        "`names`: got 1 and 2");
    assert_int_equal(from_lists(&m, &l, 2, 2, 1), FERRY_EINVAL);
    assert_non_null(strstr(ferry_last_error(), "`shapes` should be"));
    l.dtypes[1] = "float13"; /* O-28 */
    assert_int_equal(from_lists(&m, &l, 2, 2, 2), FERRY_EINVAL);
    assert_non_null(strstr(ferry_last_error(), "dtype_names[1]"));
    assert_non_null(strstr(ferry_last_error(), "parameter b"));
    assert_non_null(strstr(ferry_last_error(), "bfloat16"));
    ferry__manifest_clear(&m);
    l = good_lists();
    l.shapes[1].ndim = 9;
    assert_int_equal(from_lists(&m, &l, 2, 2, 2), FERRY_EINVAL);
    assert_non_null(strstr(ferry_last_error(), "shapes[1], parameter b"));
    ferry__manifest_clear(&m);
    l = good_lists();
    l.shapes[0].dims[1] = -4;
    assert_int_equal(from_lists(&m, &l, 2, 2, 2), FERRY_EINVAL);
    assert_non_null(strstr(ferry_last_error(), "shapes[0], parameter a"));
    l = good_lists();
    l.names[0] = "";
    assert_int_equal(from_lists(&m, &l, 2, 2, 2), FERRY_EINVAL);
    assert_non_null(strstr(ferry_last_error(), "names[0] is empty"));
    l.names[0] = "b";
    assert_int_equal(from_lists(&m, &l, 2, 2, 2), FERRY_EEXIST);
    ferry__manifest_clear(&m);
}

static void b3_declared_and_got_are_compared(void **state)
{
    (void)state;
    const ferry_param_meta want = meta("a", FERRY_DTYPE_F32, 2, 2, 3);
    int64_t shape[] = {2, 3}, other[] = {3, 2}, flat[] = {6};
    ferry_tensor t;
    ferry_tensor_init(&t, NULL, FERRY_DTYPE_F32, 2, shape);
    assert_int_equal(ferry__meta_check(&want, 7, "a", &t), FERRY_OK);
    assert_int_equal(ferry__meta_check(&want, 7, "b", &t), FERRY_EMISMATCH);
    assert_string_equal(ferry_last_error(), "parameter 7: declared a, got b");
    assert_int_equal(ferry__meta_check(&want, 7, NULL, &t), FERRY_EMISMATCH);
    ferry_tensor_init(&t, NULL, FERRY_DTYPE_BF16, 2, shape);
    assert_int_equal(ferry__meta_check(&want, 7, "a", &t), FERRY_EMISMATCH);
    assert_string_equal(ferry_last_error(),
                        "parameter a (7): declared dtype float32, got "
                        "bfloat16");
    ferry_tensor_init(&t, NULL, FERRY_DTYPE_F32, 2, other);
    assert_int_equal(ferry__meta_check(&want, 7, "a", &t), FERRY_EMISMATCH);
    assert_string_equal(ferry_last_error(),
                        "parameter a (7): declared shape [2, 3], got "
                        "[3, 2]");
    ferry_tensor_init(&t, NULL, FERRY_DTYPE_F32, 1, flat);
    assert_int_equal(ferry__meta_check(&want, 7, "a", &t), FERRY_EMISMATCH);
}

static void sizes_count_scalars_and_nothing(void **state)
{
    (void)state;
    ferry_param_meta s = meta("s", FERRY_DTYPE_F32, 0, 0, 0); /* O-23 */
    assert_int_equal(ferry__meta_numel(&s), 1);
    assert_int_equal(ferry__meta_bytes(&s), 4);
    s = meta("s", FERRY_DTYPE_F32, 2, 0, 4); /* O-24 */
    assert_int_equal(ferry__meta_bytes(&s), 0);
}

static void memory_running_out_leaves_a_usable_list(void **state)
{
    (void)state;
    const ferry_param_meta a = meta("a", FERRY_DTYPE_F32, 1, 2, 0);
    for (uint64_t n = 1;; n++) {
        ferry__manifest m = {0};
        ferry__fault_arm(FERRY__FAULT_ALLOC, n);
        ferry_status st = ferry__manifest_add(&m, &a);
        ferry__fault_arm(FERRY__FAULT_ALLOC, 0);
        if (st == FERRY_OK) {
            assert_true(n > 2);
            ferry__manifest_clear(&m);
            break;
        }
        assert_int_equal(st, FERRY_ENOMEM);
        assert_int_equal(m.count, 0);
        assert_int_equal(ferry__manifest_add(&m, &a), FERRY_OK);
        ferry__manifest_clear(&m);
    }
    ferry__fault_arm(FERRY__FAULT_ALLOC, 1);
    assert_true(ferry__manifest_digest(&a, 1) == 0);
    ferry__fault_arm(FERRY__FAULT_ALLOC, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(entries_are_found_by_name),
        cmocka_unit_test(bad_entries_are_refused_by_name),
        cmocka_unit_test(a_repeated_name_is_refused_with_both_places),
        cmocka_unit_test(the_whole_may_not_overflow),
        cmocka_unit_test(the_digest_is_that_of_the_canonical_text),
        cmocka_unit_test(lists_of_an_update_become_entries),
        cmocka_unit_test(lists_name_field_and_parameter_when_wrong),
        cmocka_unit_test(b3_declared_and_got_are_compared),
        cmocka_unit_test(sizes_count_scalars_and_nothing),
        cmocka_unit_test(memory_running_out_leaves_a_usable_list),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
