/* SPDX-License-Identifier: Apache-2.0 */
/* Coverage by set of boxes (O-35), sets of boxes against a grid of cells. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "base/alloc.h"
#include "core/boxes.h"
#include "core/coverage.h"
#include "harness/naive.h"
#include <stdlib.h>
#include <string.h>
#include <time.h>

static ferry_param slots[4] = {
    {"stack", FERRY_DTYPE_BF16, 3, {3000, 8, 4}, NULL, 0, 0, 0},
    {"padded", FERRY_DTYPE_F32, 2, {10, 4}, NULL, 0, 0, 7},
    {"table", FERRY_DTYPE_F32, 1, {4}, NULL, FERRY_PARAM_RUNTIME, 0, 0},
    {"scalar", FERRY_DTYPE_F32, 0, {0}, NULL, 0, 0, 0},
};
static const ferry_model model = {
    .size = sizeof(ferry_model), .params = slots, .n_params = 4};

static ferry__coverage *made(void)
{
    ferry__coverage *c = NULL;
    assert_int_equal(ferry__coverage_create(&model, &c), FERRY_OK);
    return c;
}

static void mark(ferry__coverage *c, size_t slot, const int64_t *start,
                 const int64_t *count)
{
    assert_int_equal(ferry__coverage_mark(c, slot, start, count), FERRY_OK);
}

static void o35_a_box_written_twice_counts_once(void **state)
{
    (void)state;
    ferry__coverage *c = made();
    int64_t covered, wanted;
    const int64_t a[] = {0, 0}, ac[] = {3, 4}, b[] = {3, 0}, bc[] = {4, 4};
    assert_int_equal(ferry__coverage_of(c, 1), FERRY__COVERED_NONE);
    for (int k = 0; k < 5; k++)
        mark(c, 1, a, ac);
    assert_int_equal(ferry__coverage_of(c, 1), FERRY__COVERED_PART);
    ferry__coverage_count(c, 1, &covered, &wanted);
    assert_int_equal(covered, 12);
    assert_int_equal(wanted, 28); /* seven valid rows of four */
    mark(c, 1, b, bc);
    assert_int_equal(ferry__coverage_of(c, 1), FERRY__COVERED_FULL);
    ferry__coverage_count(c, 1, &covered, &wanted);
    assert_int_equal(covered, 28);
    ferry__coverage_reset(c);
    assert_int_equal(ferry__coverage_of(c, 1), FERRY__COVERED_NONE);
    ferry__coverage_count(c, 1, &covered, &wanted);
    assert_int_equal(covered, 0);
    ferry__coverage_destroy(&c);
    assert_null(c);
    ferry__coverage_destroy(&c);
    ferry__coverage_destroy(NULL);
}

static void overlapping_boxes_do_not_add_up_to_the_whole(void **state)
{
    (void)state;
    ferry__coverage *c = made();
    int64_t covered, wanted;
    /* 16 + 16 elements of 28, but rows 2 and 3 twice. */
    const int64_t a[] = {0, 0}, b[] = {2, 0}, n[] = {4, 4};
    mark(c, 1, a, n);
    mark(c, 1, b, n);
    assert_int_equal(ferry__coverage_of(c, 1), FERRY__COVERED_PART);
    ferry__coverage_count(c, 1, &covered, &wanted);
    assert_int_equal(covered, 24);
    ferry__coverage_destroy(&c);
}

static void padding_run_time_and_scalar_slots(void **state)
{
    (void)state;
    ferry__coverage *c = made();
    const int64_t whole[] = {0, 0}, all[] = {10, 4};
    const int64_t pad[] = {8, 0}, rest[] = {2, 4};
    mark(c, 1, pad, rest); /* outside coverage */
    assert_int_equal(ferry__coverage_of(c, 1), FERRY__COVERED_NONE);
    mark(c, 1, whole, all);
    assert_int_equal(ferry__coverage_of(c, 1), FERRY__COVERED_FULL);
    assert_int_equal(ferry__coverage_of(c, 2), FERRY__COVERED_FULL); /* O-36 */
    assert_int_equal(ferry__coverage_of(c, 3), FERRY__COVERED_NONE);
    mark(c, 3, whole, whole); /* O-23 */
    assert_int_equal(ferry__coverage_of(c, 3), FERRY__COVERED_FULL);
    ferry__coverage_destroy(&c);
}

static void thousands_of_boxes_in_any_order(void **state)
{
    (void)state;
    ferry__coverage *c = made();
    uint64_t rng = 4;
    enum { N = 6000 };
    static int order[N];
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < N; i++)
            order[i] = i;
        for (int i = N - 1; i > 0; i--) {
            int j = (int)naive_between(&rng, 0, i), old = order[i];
            order[i] = order[j];
            order[j] = old;
        }
        clock_t t0 = clock();
        for (int i = 0; i < N; i++) {
            /* Each expert's upper and lower half. */
            int64_t start[] = {order[i] / 2, order[i] % 2 * 4, 0};
            int64_t count[] = {1, 4, 4};
            assert_int_equal(ferry__coverage_of(c, 0),
                             i == 0 ? FERRY__COVERED_NONE
                                    : FERRY__COVERED_PART);
            mark(c, 0, start, count);
            mark(c, 0, start, count);
        }
        assert_int_equal(ferry__coverage_of(c, 0), FERRY__COVERED_FULL);
        assert_true(clock() - t0 < 2 * CLOCKS_PER_SEC);
        ferry__coverage_reset(c);
    }
    ferry__coverage_destroy(&c);
}

/* ---- sets of boxes ---- */

#define CELLS 24
#define SIDE  7

typedef struct random_set {
    int64_t start[CELLS][3], count[CELLS][3];
    ferry__cell cells[CELLS];
    size_t n;
    int64_t covered; /* by counting unit cells */
    bool overlap;
} random_set;

static void random_cells(uint64_t *rng, int32_t ndim, random_set *s)
{
    int hits[SIDE][SIDE][SIDE] = {{{0}}};
    s->n = (size_t)naive_between(rng, 0, CELLS - 1);
    s->covered = 0;
    s->overlap = false;
    for (size_t i = 0; i < s->n; i++) {
        for (int32_t d = 0; d < 3; d++) {
            s->start[i][d] = d < ndim ? naive_between(rng, 0, SIDE - 1) : 0;
            int64_t most = SIDE - s->start[i][d];
            s->count[i][d] =
                d < ndim ? naive_between(rng, 1, most < 3 ? most : 3) : 1;
        }
        s->cells[i].start = s->start[i];
        s->cells[i].count = s->count[i];
        s->cells[i].owner = &s->cells[i];
        for (int64_t x = 0; x < s->count[i][0]; x++)
            for (int64_t y = 0; y < s->count[i][1]; y++)
                for (int64_t z = 0; z < s->count[i][2]; z++)
                    hits[s->start[i][0] + x][s->start[i][1] + y]
                        [s->start[i][2] + z]++;
    }
    for (int k = 0; k < SIDE * SIDE * SIDE; k++) {
        s->covered += (&hits[0][0][0])[k] > 0;
        s->overlap |= (&hits[0][0][0])[k] > 1;
    }
}

static void unions_and_overlaps_equal_counting(void **state)
{
    (void)state;
    static random_set s;
    for (uint64_t seed = 1; seed <= 4000; seed++) {
        uint64_t rng = seed;
        const void *a = NULL, *b = NULL;
        int64_t got = -1;
        random_cells(&rng, (int32_t)(seed % 4), &s);
        assert_int_equal(
            ferry__cells_union(s.cells, s.n, (int32_t)(seed % 4), &got),
            FERRY_OK);
        assert_int_equal(got, s.covered);
        assert_int_equal(
            ferry__cells_overlap(s.cells, s.n, (int32_t)(seed % 4), &a, &b),
            s.overlap);
        if (s.overlap)
            assert_ptr_not_equal(a, b);
    }
}

static void a_pinwheel_is_no_overlap(void **state)
{
    (void)state;
    /* No plane splits these four, and they do not touch. */
    int64_t start[4][2] = {{0, 0}, {0, 2}, {1, 0}, {2, 1}};
    int64_t count[4][2] = {{1, 2}, {2, 1}, {2, 1}, {1, 2}}, got = 0;
    const void *a = NULL, *b = NULL;
    ferry__cell cells[4];
    for (int i = 0; i < 4; i++) {
        cells[i].start = start[i];
        cells[i].count = count[i];
        cells[i].owner = start[i];
    }
    assert_false(ferry__cells_overlap(cells, 4, 2, &a, &b));
    assert_int_equal(ferry__cells_union(cells, 4, 2, &got), FERRY_OK);
    assert_int_equal(got, 8);
}

static void memory_running_out_never_claims_the_whole(void **state)
{
    (void)state;
    const int64_t zero[] = {0, 0}, all[] = {7, 4}, most[] = {7, 3};
    for (uint64_t k = 1; k < 40; k++) {
        ferry__coverage *c = NULL;
        ferry__fault_arm(FERRY__FAULT_ALLOC, k);
        ferry_status st = ferry__coverage_create(&model, &c);
        for (int64_t i = 0; st == FERRY_OK && i < 12; i++) {
            const int64_t at[] = {i % 7, i / 7}, one[] = {1, 1};
            st = ferry__coverage_mark(c, 1, at, one);
        }
        if (st == FERRY_OK)
            st = ferry__coverage_mark(c, 1, zero, most);
        if (st == FERRY_OK)
            st = ferry__coverage_mark(c, 1, zero, all);
        if (st == FERRY_OK)
            (void)ferry__coverage_of(c, 1);
        ferry__fault_arm(FERRY__FAULT_ALLOC, 0);
        if (st == FERRY_OK)
            assert_int_equal(ferry__coverage_of(c, 1), FERRY__COVERED_FULL);
        else
            assert_int_equal(st, FERRY_ENOMEM);
        ferry__coverage_destroy(&c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(o35_a_box_written_twice_counts_once),
        cmocka_unit_test(overlapping_boxes_do_not_add_up_to_the_whole),
        cmocka_unit_test(padding_run_time_and_scalar_slots),
        cmocka_unit_test(thousands_of_boxes_in_any_order),
        cmocka_unit_test(unions_and_overlaps_equal_counting),
        cmocka_unit_test(a_pinwheel_is_no_overlap),
        cmocka_unit_test(memory_running_out_never_claims_the_whole),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
