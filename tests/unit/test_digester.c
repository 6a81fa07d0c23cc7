/* SPDX-License-Identifier: Apache-2.0 */
/* Digests of boxes do not depend on how a parameter was cut or lay in
 * memory; expected bytes are gathered here element by element. */
#include "core/digester.h"

#include "base/hash.h"
#include "core/copy.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#define ROWS 8
#define COLS 12

static void box_digest_is_of_its_elements_in_order(void **state)
{
    /* Columns 3 to 6 of every second row; two workers read it, one of them
     * the whole parameter too. */
    ferry_box boxes[2] = {{3, 2, 0, {4, 4}, {24, 1}},
                          {0, 1, 0, {ROWS * COLS}, {1}}};
    size_t one[2] = {0, 1}, two[2] = {0, 2};
    ferry__box_lists a = {1, one, boxes}, b = {1, two, boxes};
    const ferry__box_lists *lists[2] = {&a, &b};
    ferry_param_meta meta = {"w", FERRY_DTYPE_U8, 2, {ROWS, COLS}};
    unsigned char bytes[ROWS * COLS], want[16];
    ferry__digester *d;
    size_t n = 0;

    (void)state;
    for (size_t i = 0; i < sizeof(bytes); i++)
        bytes[i] = (unsigned char)(i * 7 + 1);
    for (size_t r = 0; r < ROWS; r += 2)
        for (size_t c = 3; c < 7; c++)
            want[n++] = bytes[r * COLS + c];
    assert_int_equal(ferry__box_lists_check(&b, &meta, 1), FERRY_OK);
    assert_int_equal(ferry__digester_create(&meta, 1, lists, 2, &d), FERRY_OK);
    for (int64_t at = 0; at < ROWS * COLS; at += 32)
        ferry__digester_feed(d, 0, bytes + at, at, 32);
    assert_true(ferry__digester_value(d, 0, 0) ==
                ferry__xxh3(want, sizeof(want)));
    assert_true(ferry__digester_value(d, 1, 0) ==
                ferry__xxh3(want, sizeof(want)));
    assert_true(ferry__digester_value(d, 1, 1) ==
                ferry__xxh3(bytes, sizeof(bytes)));
    ferry__digester_destroy(&d);
}

#define TALL 300
#define WIDE 517

/* Expected digests and bytes of a tensor packed in pieces of `step`, its
 * elements laid out with the given strides. */
static void check_pack(int64_t row, int64_t col, bool half, int64_t step)
{
    static uint16_t source[TALL * WIDE], packed[TALL * WIDE], out[TALL * WIDE];
    ferry_box boxes[2] = {{0, 1, 0, {TALL * WIDE}, {1}},
                          {100 * WIDE, 2, 0, {100, WIDE}, {WIDE, 1}}};
    size_t first[2] = {0, half ? 2 : 1};
    ferry__box_lists list = {1, first, boxes};
    const ferry__box_lists *lists[1] = {&list};
    ferry_param_meta meta = {"w", FERRY_DTYPE_BF16, 2, {TALL, WIDE}};
    int64_t numel = (int64_t)TALL * WIDE;
    ferry__digester *d;
    ferry_tensor t;

    for (int64_t r = 0; r < TALL; r++)
        for (int64_t c = 0; c < WIDE; c++) {
            uint16_t v = (uint16_t)((r * WIDE + c) * 40503u >> 3);

            source[r * row + c * col] = packed[r * WIDE + c] = v;
        }
    memset(out, 0, sizeof(out));
    assert_int_equal(ferry_tensor_init(&t, source, meta.dtype, 2, meta.shape),
                     FERRY_OK);
    t.stride[0] = row;
    t.stride[1] = col;
    assert_int_equal(ferry__digester_create(&meta, 1, lists, 1, &d), FERRY_OK);
    for (int64_t at = 0; at < numel; at += step)
        ferry__digester_pack(d, 0, &t, at,
                             numel - at < step ? numel - at : step, out + at);
    assert_memory_equal(out, packed, sizeof(out));
    assert_true(ferry__digester_value(d, 0, 0) ==
                ferry__xxh3(packed, sizeof(packed)));
    if (half)
        assert_true(ferry__digester_value(d, 0, 1) ==
                    ferry__xxh3(packed + 100 * WIDE, 2 * 100 * WIDE));
    ferry__digester_destroy(&d);
}

static void packing_hashes_what_it_packs(void **state)
{
    static const int64_t steps[] = {(int64_t)TALL * WIDE, 131072, 1024, 32};

    (void)state;
    for (size_t i = 0; i < sizeof(steps) / sizeof(steps[0]); i++) {
        check_pack(WIDE, 1, false, steps[i]);
        check_pack(WIDE, 1, true, steps[i]);
        check_pack(1, TALL, false, steps[i]);
        check_pack(1, TALL, true, steps[i]);
    }
}

static void copy_range_packs_any_strides(void **state)
{
    unsigned char turned[ROWS * COLS], out[ROWS * COLS];
    int64_t shape[2] = {COLS, ROWS};
    ferry_tensor t;

    (void)state;
    for (size_t i = 0; i < sizeof(turned); i++)
        turned[i] = (unsigned char)i;
    assert_int_equal(ferry_tensor_init(&t, turned, FERRY_DTYPE_U8, 2, shape),
                     FERRY_OK);
    assert_int_equal(ferry_tensor_transpose(&t, 0, 1, &t), FERRY_OK);
    ferry__copy_range(&t, 5, 60, out);
    for (size_t k = 0; k < 60; k++)
        assert_int_equal(out[k],
                         turned[(k + 5) % COLS * ROWS + (k + 5) / COLS]);
}

/* J1: a worker cannot make the trainer hash without end, nor count beyond
 * what a number holds. */
static void boxes_that_cost_too_much_are_refused(void **state)
{
    const int64_t much = (int64_t)1 << 62;
    ferry_box bad[] = {
        {0, 1, 0, {much}, {0}},
        {0, 2, 0, {much, much}, {0, 0}},
        {0, 3, 0, {much, much, 0}, {0, 0, 0}},
        {0, 1, 0, {-1}, {1}},
        {0, 3, 0, {1 << 10, 1 << 10, 1 << 10}, {0, 0, 0}},
    };
    ferry_box good = {5, 2, 0, {1000, 2}, {0, 1}};
    ferry_param_meta meta = {"w", FERRY_DTYPE_U8, 2, {ROWS, COLS}};
    ferry_param_meta none = {"n", FERRY_DTYPE_U8, 2, {0, COLS}};
    size_t first[2] = {0, 1};
    ferry__box_lists v = {1, first, &good};

    (void)state;
    assert_int_equal(ferry__box_lists_check(&v, &meta, 1), FERRY_OK);
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        v.boxes = &bad[i];
        assert_int_equal(ferry__box_lists_check(&v, &meta, 1), FERRY_EPEER);
    }
    v.boxes = &bad[1];
    assert_int_equal(ferry__box_lists_check(&v, &none, 1), FERRY_EPEER);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(boxes_that_cost_too_much_are_refused),
        cmocka_unit_test(box_digest_is_of_its_elements_in_order),
        cmocka_unit_test(packing_hashes_what_it_packs),
        cmocka_unit_test(copy_range_packs_any_strides),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
