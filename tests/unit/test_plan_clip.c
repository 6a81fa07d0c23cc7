/* SPDX-License-Identifier: Apache-2.0 */
/* Clipping an op to a range of the flat source, replaying it over a strided
 * tensor, and decoding views into boxes: each against explicit lists of
 * indices. Digests do not depend on the cuts. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "core/plan_private.h"
#include "harness/naive.h"
#include <stdlib.h>
#include <string.h>

#define ROOM 4096

typedef struct replay {
    const uint16_t *src; /* the whole source */
    uint16_t *dst;
    ferry__xxh3_state *digest;
    int64_t last; /* source element handed over before */
    int64_t parts, elements;
} replay;

static void run_part(void *arg, const ferry__copy_op *op)
{
    replay *r = arg;
    ferry__copy_run(op, r->dst, r->src, r->digest);
    assert_true(op->src_offset >= r->last);
    r->last = op->src_offset;
    r->parts++;
    r->elements += ferry__op_numel(op);
}

/* A random view of a whole tensor, and a packed or permuted destination. */
static void random_op(uint64_t *rng, ferry_tensor *whole, ferry__copy_op *op)
{
    static naive_view v;
    ferry_tensor src, dst;
    naive_tensor(rng, FERRY_DTYPE_U16, 1200, whole, &v);
    src = *whole;
    for (int64_t k = naive_between(rng, 0, 5); k > 0; k--)
        naive_step(rng, &src, &v);
    assert_int_equal(
        ferry_tensor_init(&dst, NULL, src.dtype, src.ndim, src.shape), 0);
    ferry__op_between(&dst, &src, op);
    ferry__op_sort(op);
}

static void clipped_parts_are_the_whole_in_source_order(void **state)
{
    (void)state;
    static uint16_t src[ROOM], got[ROOM], want[ROOM];
    for (uint64_t seed = 1; seed <= 2500; seed++) {
        uint64_t rng = seed * 31;
        ferry_tensor whole;
        ferry__copy_op op;
        random_op(&rng, &whole, &op);
        int64_t n = ferry_tensor_numel(&whole);
        for (int i = 0; i < ROOM; i++)
            src[i] = (uint16_t)naive_random(&rng);
        ferry__xxh3_state *one = ferry__xxh3_create();
        ferry__xxh3_state *cut = ferry__xxh3_create();
        memset(want, 0x7f, sizeof(want));
        memset(got, 0x7f, sizeof(got));
        ferry__copy_run(&op, want, src, one);
        replay r = {src, got, cut, INT64_MIN, 0, 0};
        for (int64_t at = 0; at < n;) {
            int64_t count = naive_between(&rng, 1, 1 + n / 3), before;
            before = r.parts;
            /* The last range reaches past the end of the source. */
            ferry__op_clip(&op, at, count, run_part, &r);
            assert_true(r.parts - before <= 2 * FERRY_MAX_DIMS + 1);
            at += count;
        }
        assert_int_equal(r.elements, ferry__op_numel(&op));
        assert_memory_equal(got, want, sizeof(want));
        assert_true(ferry__xxh3_value(one) == ferry__xxh3_value(cut));
        ferry__xxh3_destroy(one);
        ferry__xxh3_destroy(cut);
    }
}

/* The elements of one range alone, element by element. */
static void one_range_holds_exactly_its_elements(void **state)
{
    (void)state;
    static uint16_t src[ROOM], got[ROOM], want[ROOM];
    for (int i = 0; i < ROOM; i++)
        src[i] = (uint16_t)i;
    for (uint64_t seed = 1; seed <= 1500; seed++) {
        uint64_t rng = seed * 17;
        ferry_tensor whole;
        ferry__copy_op op;
        random_op(&rng, &whole, &op);
        int64_t n = ferry_tensor_numel(&whole);
        int64_t first = naive_between(&rng, 0, n);
        int64_t count = naive_between(&rng, 0, n - first);
        memset(want, 0xff, sizeof(want));
        memset(got, 0xff, sizeof(got));
        ferry__copy_run(&op, want, src, NULL);
        for (int i = 0; i < ROOM; i++) {
            if (want[i] < first || want[i] >= first + count)
                want[i] = 0xffff;
        }
        replay r = {src, got, NULL, INT64_MIN, 0, 0};
        ferry__op_clip(&op, first, count, run_part, &r);
        assert_memory_equal(got, want, sizeof(want));
    }
}

static void count_part(void *arg, const ferry__copy_op *op)
{
    int64_t *counted = arg;
    counted[0]++;
    counted[1] += ferry__op_numel(op);
}

static void clipping_costs_by_parts_not_by_runs(void **state)
{
    (void)state;
    ferry__copy_op op = {.ndim = 2,
                         .shape = {1000000, 7},
                         .src_stride = {64, 3},
                         .dst_stride = {7, 1},
                         .src_dtype = FERRY_DTYPE_U16,
                         .dst_dtype = FERRY_DTYPE_U16};
    int64_t counted[2] = {0, 0};
    /* From the fourth element of one row into another, far away: part of a
     * row, all the rows between in one, part of a row. */
    ferry__op_clip(&op, 64 * 10 + 9, 64 * 900000, count_part, counted);
    assert_int_equal(counted[0], 3);
    assert_int_equal(counted[1], 7 * 900000);
    counted[0] = 0;
    ferry__op_clip(&op, 3, 0, count_part, counted);
    ferry__op_clip(&op, 100000000, 32, count_part, counted);
    op.shape[1] = 0;
    ferry__op_clip(&op, 0, 100, count_part, counted);
    assert_int_equal(counted[0], 0);
}

static void o23_a_scalar_is_in_the_range_or_not(void **state)
{
    (void)state;
    ferry__copy_op scalar = {.ndim = 0,
                             .src_offset = 5,
                             .src_dtype = FERRY_DTYPE_U16,
                             .dst_dtype = FERRY_DTYPE_U16};
    const uint16_t src[8] = {0, 0, 0, 0, 0, 77};
    uint16_t dst[1] = {0};
    replay r = {src, dst, NULL, INT64_MIN, 0, 0};
    ferry__op_clip(&scalar, 0, 5, run_part, &r);
    assert_int_equal(r.parts, 0);
    ferry__op_clip(&scalar, 5, 1, run_part, &r);
    assert_int_equal(dst[0], 77);
}

static void a_broadcast_source_clips_whole(void **state)
{
    (void)state;
    /* Each of 3 elements four times. */
    ferry__copy_op op = {.ndim = 2,
                         .shape = {3, 4},
                         .src_stride = {1, 0},
                         .dst_stride = {4, 1},
                         .src_dtype = FERRY_DTYPE_U16,
                         .dst_dtype = FERRY_DTYPE_U16};
    const uint16_t src[3] = {1, 2, 3};
    uint16_t dst[12] = {0};
    const uint16_t want[12] = {0, 0, 0, 0, 2, 2, 2, 2, 3, 3, 3, 3};
    replay r = {src, dst, NULL, INT64_MIN, 0, 0};
    ferry__op_clip(&op, 1, 2, run_part, &r);
    assert_memory_equal(dst, want, sizeof(want));
}

static void q8_0_is_clipped_only_on_whole_blocks(void **state)
{
    (void)state;
    ferry__copy_op op = {.ndim = 2,
                         .shape = {4, 64},
                         .src_stride = {128, 1},
                         .dst_stride = {64, 1},
                         .src_offset = 32,
                         .src_dtype = FERRY_DTYPE_F32,
                         .dst_dtype = FERRY_DTYPE_Q8_0};
    assert_true(ferry__op_can_clip(&op));
    op.src_offset = 16;
    assert_false(ferry__op_can_clip(&op));
    op.src_offset = 0;
    op.src_stride[0] = 80;
    assert_false(ferry__op_can_clip(&op));
    op.src_stride[0] = 1; /* turned */
    op.src_stride[1] = 32;
    assert_false(ferry__op_can_clip(&op));
    op.dst_dtype = FERRY_DTYPE_F32;
    assert_true(ferry__op_can_clip(&op));
}

/* ---- over a strided tensor ---- */

/* t with the same shape as `whole` but other strides over `room`. */
static void random_strides(uint64_t *rng, const ferry_tensor *whole,
                           ferry_tensor *t)
{
    int32_t order[FERRY_MAX_DIMS];
    int64_t span = naive_between(rng, 0, 2) == 0 ? 2 : 1;
    *t = *whole;
    t->offset = naive_between(rng, 0, 5);
    for (int32_t i = 0; i < t->ndim; i++)
        order[i] = i;
    for (int32_t i = t->ndim - 1; i > 0; i--) {
        int32_t j = (int32_t)naive_between(rng, 0, i), old = order[i];
        order[i] = order[j];
        order[j] = old;
    }
    for (int32_t i = t->ndim - 1; i >= 0; i--) {
        int32_t d = order[i];
        int64_t what = naive_between(rng, 0, 9);
        t->stride[d] = span;
        span *= t->shape[d] + naive_between(rng, 0, 1);
        if (what == 0) {
            t->offset += (t->shape[d] - 1) * t->stride[d];
            t->stride[d] = -t->stride[d];
        } else if (what == 1) {
            t->stride[d] = 0;
        }
    }
}

static void o22_replay_over_strides_equals_replay_over_a_copy(void **state)
{
    (void)state;
    static uint16_t room[40000], packed[ROOM], got[ROOM], want[ROOM];
    int translated = 0, refused = 0;
    uint64_t fill = 6;
    for (size_t i = 0; i < sizeof(room) / sizeof(room[0]); i++)
        room[i] = (uint16_t)naive_random(&fill);
    for (uint64_t seed = 1; seed <= 4000; seed++) {
        uint64_t rng = seed * 131;
        ferry_tensor whole, t;
        ferry__copy_op op, over;
        random_op(&rng, &whole, &op);
        random_strides(&rng, &whole, &t);
        whole.data = packed;
        t.data = room;
        assert_int_equal(ferry_tensor_copy(&whole, &t), FERRY_OK);
        if (ferry__op_over_tensor(&op, &t, &over) < 0) {
            refused++;
            continue;
        }
        translated++;
        ferry__xxh3_state *a = ferry__xxh3_create();
        ferry__xxh3_state *b = ferry__xxh3_create();
        memset(want, 0x7f, sizeof(want));
        memset(got, 0x7f, sizeof(got));
        ferry__copy_run(&op, want, packed, a);
        ferry__copy_run(&over, got, room, b);
        assert_memory_equal(got, want, sizeof(want));
        assert_true(ferry__xxh3_value(a) == ferry__xxh3_value(b));
        ferry__xxh3_destroy(a);
        ferry__xxh3_destroy(b);
    }
    assert_true(translated > 20 * refused);
}

static void what_is_no_strided_box_is_refused(void **state)
{
    (void)state;
    /* Elements 1..4 of a turned [2, 3] are no box of it. */
    int64_t shape[] = {2, 3};
    ferry_tensor t;
    ferry__copy_op out, op = {.ndim = 1,
                              .shape = {4},
                              .src_stride = {1},
                              .dst_stride = {1},
                              .src_offset = 1,
                              .src_dtype = FERRY_DTYPE_U16,
                              .dst_dtype = FERRY_DTYPE_U16};
    ferry_tensor_init(&t, NULL, FERRY_DTYPE_U16, 2, shape);
    t.stride[0] = 1;
    t.stride[1] = 2;
    assert_int_equal(ferry__op_over_tensor(&op, &t, &out), FERRY_ENOTSUP);
    op.src_offset = 6; /* outside */
    assert_int_equal(ferry__op_over_tensor(&op, &t, &out), FERRY_ENOTSUP);
    /* A stride of 0 stays one. */
    op.src_offset = 2;
    op.src_stride[0] = 0;
    assert_int_equal(ferry__op_over_tensor(&op, &t, &out), FERRY_OK);
    assert_int_equal(out.src_stride[0], 0);
    assert_int_equal(out.src_offset, 4);
}

/* ---- boxes ---- */

static void decoded_boxes_hold_the_view_s_elements(void **state)
{
    (void)state;
    static naive_view v, box;
    int boxes = 0;
    for (uint64_t seed = 1; seed <= 4000; seed++) {
        uint64_t rng = seed * 53;
        ferry_tensor whole, t;
        int64_t start[FERRY_MAX_DIMS], count[FERRY_MAX_DIMS];
        static unsigned char in_view[ROOM], in_box[ROOM];
        naive_tensor(&rng, FERRY_DTYPE_F32, 1000, &whole, &v);
        t = whole;
        for (int k = 0; k < 4; k++)
            naive_step(&rng, &t, &v);
        if (v.count == 0)
            continue;
        bool good =
            ferry__box_decode(whole.ndim, whole.shape, &t, start, count);
        /* The bounding box of the view has as many elements exactly when
         * the view is a box. */
        naive_whole(&box, whole.ndim, whole.shape);
        memset(in_view, 0, sizeof(in_view));
        memset(in_box, 0, sizeof(in_box));
        for (size_t i = 0; i < v.count; i++)
            in_view[v.index[i]] = 1;
        if (good) {
            boxes++;
            for (int32_t i = 0; i < whole.ndim; i++)
                naive_narrow(&box, i, start[i], count[i]);
            for (size_t i = 0; i < box.count; i++)
                in_box[box.index[i]] = 1;
            assert_memory_equal(in_view, in_box, sizeof(in_box));
            continue;
        }
        int64_t low[FERRY_MAX_DIMS], high[FERRY_MAX_DIMS], volume = 1;
        for (int32_t i = 0; i < whole.ndim; i++) {
            low[i] = INT64_MAX;
            high[i] = -1;
        }
        for (size_t k = 0; k < v.count; k++) {
            int64_t rest = v.index[k];
            for (int32_t i = 0; i < whole.ndim; i++) {
                int64_t at = rest / whole.stride[i];
                rest %= whole.stride[i];
                low[i] = at < low[i] ? at : low[i];
                high[i] = at > high[i] ? at : high[i];
            }
        }
        for (int32_t i = 0; i < whole.ndim; i++)
            volume *= high[i] - low[i] + 1;
        assert_true(volume != (int64_t)v.count);
    }
    assert_true(boxes > 1000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(clipped_parts_are_the_whole_in_source_order),
        cmocka_unit_test(one_range_holds_exactly_its_elements),
        cmocka_unit_test(clipping_costs_by_parts_not_by_runs),
        cmocka_unit_test(o23_a_scalar_is_in_the_range_or_not),
        cmocka_unit_test(a_broadcast_source_clips_whole),
        cmocka_unit_test(q8_0_is_clipped_only_on_whole_blocks),
        cmocka_unit_test(o22_replay_over_strides_equals_replay_over_a_copy),
        cmocka_unit_test(what_is_no_strided_box_is_refused),
        cmocka_unit_test(decoded_boxes_hold_the_view_s_elements),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
