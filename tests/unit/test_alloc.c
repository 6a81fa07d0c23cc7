/* SPDX-License-Identifier: Apache-2.0 */
/* Memory, checked sizes, planted failures. */
#include "base/alloc.h"

#include <ferry/worker.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static void memory_is_zeroed_and_size_0_is_a_block(void **state)
{
    unsigned char *p = ferry__alloc(4096), *q = ferry__alloc(0);

    (void)state;
    assert_non_null(p);
    for (int i = 0; i < 4096; i++)
        assert_int_equal(p[i], 0);
    assert_non_null(q);
    ferry__free(p);
    ferry_free(q);
    ferry_free(NULL);
    ferry__free(NULL);
}

static void the_nth_allocation_fails_once_with_a_line(void **state)
{
    void *a, *b, *c;

    (void)state;
    ferry_fail(FERRY_OK, "%s", "");
    ferry__fault_arm(FERRY__FAULT_ALLOC, 2);
    a = ferry__alloc(8);
    b = ferry__alloc(77);
    assert_string_equal(ferry_last_error(), "out of memory: 77 bytes");
    c = ferry__alloc(8);
    assert_non_null(a);
    assert_null(b);
    assert_non_null(c);
    ferry__free(a);
    ferry__free(c);
    ferry__fault_arm(FERRY__FAULT_ALLOC, 1);
    ferry__fault_arm(FERRY__FAULT_ALLOC, 0); /* disarmed */
    a = ferry__alloc_raw(8);
    assert_non_null(a);
    ferry__free(a);
}

static void realloc_failure_leaves_the_old_block(void **state)
{
    char *p = ferry__strdup("keep"), *grown;

    (void)state;
    ferry__fault_arm(FERRY__FAULT_ALLOC, 1);
    assert_null(ferry__realloc(p, 100));
    assert_string_equal(p, "keep");
    grown = ferry__realloc(p, 100);
    assert_string_equal(grown, "keep");
    ferry__free(grown);
}

static void arrays_that_do_not_fit_are_refused(void **state)
{
    (void)state;
    assert_null(ferry__alloc_array(SIZE_MAX / 4, 8));
    assert_non_null(strstr(ferry_last_error(), "array of"));
}

static void strings_are_copied_to_their_length(void **state)
{
    char *a = ferry__strndup("hello", 3), *b = ferry__strndup("hi", 9);

    (void)state;
    assert_string_equal(a, "hel");
    assert_string_equal(b, "hi");
    ferry__free(a);
    ferry__free(b);
}

static void grow_doubles_and_fails_cleanly(void **state)
{
    int *items = NULL;
    size_t capacity = 0, steps = 0;

    (void)state;
    for (size_t count = 0; count < 10000; count++) {
        size_t before = capacity;

        assert_int_equal(ferry__grow(&items, &capacity, count, sizeof(*items)),
                         FERRY_OK);
        assert_true(capacity > count);
        items[count] = (int)count;
        steps += capacity != before;
    }
    assert_true(steps < 16);
    for (int i = 0; i < 10000; i++)
        assert_int_equal(items[i], i);
    ferry__fault_arm(FERRY__FAULT_ALLOC, 1);
    assert_int_equal(ferry__grow(&items, &capacity, capacity, sizeof(*items)),
                     FERRY_ENOMEM);
    assert_int_equal(items[9999], 9999);
    assert_int_equal(
        ferry__grow(&items, &capacity, SIZE_MAX / 2, sizeof(*items)),
        FERRY_EOVERFLOW);
    assert_int_equal(ferry__grow(&items, &capacity, SIZE_MAX, 1),
                     FERRY_EOVERFLOW);
    ferry__free(items);
}

static void arithmetic_is_checked(void **state)
{
    size_t n = 5;
    int64_t i = 5;

    (void)state;
    assert_true(ferry__mul(3, 4, &n));
    assert_int_equal(n, 12);
    assert_false(ferry__mul(SIZE_MAX, 2, &n));
    assert_int_equal(n, 12);
    assert_true(ferry__add(SIZE_MAX - 1, 1, &n));
    assert_true(n == SIZE_MAX);
    assert_false(ferry__add(SIZE_MAX, 1, &n));
    assert_true(ferry__mul64(-3, 4, &i));
    assert_int_equal(i, -12);
    assert_false(ferry__mul64(INT64_MIN, -1, &i));
    assert_int_equal(i, -12);
}

static void mapped_memory_is_zero_and_can_fail(void **state)
{
    unsigned char *p = ferry__map_anonymous(1 << 16);

    (void)state;
    assert_non_null(p);
    assert_int_equal((uintptr_t)p % 4096, 0);
    assert_int_equal(p[0] | p[65535], 0);
    p[65535] = 1;
    ferry__unmap(p, 1 << 16);
    ferry__unmap(NULL, 4096);
    ferry__fault_arm(FERRY__FAULT_MMAP, 1);
    assert_null(ferry__map_anonymous(4096));
    assert_non_null(strstr(ferry_last_error(), "4096 bytes"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(memory_is_zeroed_and_size_0_is_a_block),
        cmocka_unit_test(the_nth_allocation_fails_once_with_a_line),
        cmocka_unit_test(realloc_failure_leaves_the_old_block),
        cmocka_unit_test(arrays_that_do_not_fit_are_refused),
        cmocka_unit_test(strings_are_copied_to_their_length),
        cmocka_unit_test(grow_doubles_and_fails_cleanly),
        cmocka_unit_test(arithmetic_is_checked),
        cmocka_unit_test(mapped_memory_is_zero_and_can_fail),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
