/* SPDX-License-Identifier: Apache-2.0 */
/* The copy loops against an element-by-element loop: random boxes, dtypes,
 * digests, comparing; fast and portable kernels alike. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "base/config.h"
#include "core/copy_kernels.h"
#include "harness/naive.h"
#include <stdlib.h>
#include <string.h>

#define ROOM (1u << 20)

static unsigned char *src_bytes, *dst_bytes, *want_bytes;

static int set_up(void **state)
{
    (void)state;
    uint64_t rng = 11;
    src_bytes = malloc(ROOM);
    dst_bytes = malloc(ROOM);
    want_bytes = malloc(ROOM);
    for (size_t i = 0; i < ROOM; i++)
        src_bytes[i] = (unsigned char)naive_random(&rng);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    free(src_bytes);
    free(dst_bytes);
    free(want_bytes);
    return 0;
}

/* A random op whose destination is a box in falling strides, permuted. */
static void random_op(uint64_t *rng, int64_t most, ferry__copy_op *op)
{
    int32_t order[FERRY_MAX_DIMS];
    int64_t room[FERRY_MAX_DIMS];
    memset(op, 0, sizeof(*op));
    op->ndim = (int32_t)naive_between(rng, 0, 4);
    int64_t left = most;
    for (int32_t i = 0; i < op->ndim; i++) {
        op->shape[i] = naive_between(rng, 1, left < 40 ? left : 40);
        left /= op->shape[i];
        order[i] = i;
    }
    for (int32_t side = 0; side < 2; side++) {
        int64_t *stride = side ? op->dst_stride : op->src_stride;
        int64_t span = naive_between(rng, 0, 3) == 0 ? 2 : 1;
        for (int32_t i = op->ndim - 1; i > 0; i--) {
            int32_t j = (int32_t)naive_between(rng, 0, i), old = order[i];
            if (naive_between(rng, 0, 2) == 0) {
                order[i] = order[j];
                order[j] = old;
            }
        }
        for (int32_t i = op->ndim - 1; i >= 0; i--) {
            stride[order[i]] = span;
            room[i] = op->shape[order[i]] + naive_between(rng, 0, 1);
            span *= room[i];
        }
    }
    op->src_offset = naive_between(rng, 0, 9);
    op->dst_offset = naive_between(rng, 0, 9);
    for (int32_t i = 0; i < op->ndim; i++) {
        int64_t what = naive_between(rng, 0, 11);
        if (what == 0) { /* backwards (O-22) */
            op->src_offset += (op->shape[i] - 1) * op->src_stride[i];
            op->src_stride[i] = -op->src_stride[i];
        } else if (what == 1) {
            op->src_stride[i] = 0;
        }
    }
}

/* Elements one by one, in order: the reference. `wire` takes the source
 * bytes in box order. */
static size_t by_element(const ferry__copy_op *op, unsigned char *dst,
                         const unsigned char *src, unsigned char *wire)
{
    size_t n = 1, ss = ferry_dtype_bytes(op->src_dtype),
           ds = ferry_dtype_bytes(op->dst_dtype);
    for (int32_t i = 0; i < op->ndim; i++)
        n *= (size_t)op->shape[i];
    for (size_t k = 0; k < n; k++) {
        size_t rest = k;
        int64_t from = op->src_offset, to = op->dst_offset;
        for (int32_t i = op->ndim - 1; i >= 0; i--) {
            int64_t at = (int64_t)(rest % (size_t)op->shape[i]);
            rest /= (size_t)op->shape[i];
            from += at * op->src_stride[i];
            to += at * op->dst_stride[i];
        }
        memcpy(wire + k * ss, src + from * (int64_t)ss, ss);
        ferry__convert(dst + to * (int64_t)ds, op->dst_dtype,
                       src + from * (int64_t)ss, op->src_dtype, 1);
    }
    return n * ss;
}

static void check_op(const ferry__copy_op *op, size_t room)
{
    unsigned char *wire = malloc(room);
    ferry__xxh3_state *digest = ferry__xxh3_create();
    memset(dst_bytes, 0x7f, room);
    memset(want_bytes, 0x7f, room);
    size_t wire_bytes = by_element(op, want_bytes, src_bytes, wire);
    uint64_t want = ferry__xxh3(wire, wire_bytes);

    ferry__copy_run(op, dst_bytes, src_bytes, NULL);
    assert_memory_equal(dst_bytes, want_bytes, room);
    assert_true(ferry__copy_equal(op, dst_bytes, src_bytes));

    memset(dst_bytes, 0x7f, room);
    ferry__copy_run(op, dst_bytes, src_bytes, digest);
    assert_memory_equal(dst_bytes, want_bytes, room);
    assert_true(ferry__xxh3_value(digest) == want);

    ferry__xxh3_reset(digest);
    ferry__copy_digest(op, src_bytes, digest);
    assert_true(ferry__xxh3_value(digest) == want);

    /* One changed element is seen. */
    int64_t last = op->dst_offset;
    for (int32_t i = 0; i < op->ndim; i++)
        last += (op->shape[i] - 1) * op->dst_stride[i];
    dst_bytes[(size_t)last * ferry_dtype_bytes(op->dst_dtype)] ^= 1;
    assert_false(ferry__copy_equal(op, dst_bytes, src_bytes));
    ferry__xxh3_destroy(digest);
    free(wire);
}

static const ferry_dtype plain[] = {
    FERRY_DTYPE_F64,     FERRY_DTYPE_F32,     FERRY_DTYPE_F16, FERRY_DTYPE_BF16,
    FERRY_DTYPE_F8_E4M3, FERRY_DTYPE_F8_E5M2, FERRY_DTYPE_I64, FERRY_DTYPE_I32,
    FERRY_DTYPE_I16,     FERRY_DTYPE_U8};

static void run_random(uint64_t seeds, int64_t most)
{
    for (uint64_t seed = 1; seed <= seeds; seed++) {
        uint64_t rng = seed * 104729;
        ferry__copy_op op;
        random_op(&rng, most, &op);
        op.src_dtype = plain[naive_between(&rng, 0, 9)];
        op.dst_dtype = op.src_dtype;
        if (ferry__dtype_is_float(op.src_dtype) && naive_between(&rng, 0, 1))
            op.dst_dtype = plain[naive_between(&rng, 0, 5)];
        check_op(&op, (size_t)most * 24 * 8 + 2048);
    }
}

static void random_boxes_equal_the_element_loop(void **state)
{
    (void)state;
    run_random(1500, 400);
    ferry__cpu_limit(true);
    run_random(500, 400);
    ferry__cpu_limit(false);
}

static void boxes_beyond_one_slab_equal_the_element_loop(void **state)
{
    (void)state;
    run_random(12, 5000);
    /* Two dimensions that make slabs of many rows, and rows longer than a
     * slab; straight and turned. */
    ferry__copy_op op = {.ndim = 2,
                         .shape = {300, 70},
                         .src_stride = {80, 1},
                         .dst_stride = {70, 1},
                         .src_dtype = FERRY_DTYPE_BF16,
                         .dst_dtype = FERRY_DTYPE_F32};
    check_op(&op, 300 * 80 * 4);
    op.dst_stride[0] = 1;
    op.dst_stride[1] = 300;
    check_op(&op, 300 * 80 * 4);
    op.dst_dtype = FERRY_DTYPE_BF16;
    check_op(&op, 300 * 80 * 4);
    op.shape[0] = 3;
    op.shape[1] = 20001;
    op.src_stride[0] = 20003;
    op.dst_stride[0] = 20001;
    op.dst_stride[1] = 1;
    check_op(&op, 3 * 20003 * 2);
    op.dst_dtype = FERRY_DTYPE_F64;
    check_op(&op, 3 * 20003 * 8);
}

static void large_copies_stream_at_any_alignment(void **state)
{
    (void)state;
    const char *modes[] = {"auto", "stream", "plain"};
    for (size_t m = 0; m < 3; m++) {
        assert_int_equal(ferry__config_set("copy", modes[m]), FERRY_OK);
        for (int64_t shift = 0; shift < 70; shift += 23) {
            ferry__copy_op op = {.ndim = 1,
                                 .shape = {300001},
                                 .src_stride = {1},
                                 .dst_stride = {1},
                                 .src_offset = shift,
                                 .dst_offset = 70 - shift,
                                 .src_dtype = FERRY_DTYPE_U8,
                                 .dst_dtype = FERRY_DTYPE_U8};
            check_op(&op, 300200);
            op.src_dtype = FERRY_DTYPE_F32;
            op.dst_dtype = FERRY_DTYPE_BF16;
            op.shape[0] = 150001;
            check_op(&op, 700000);
        }
        ferry__cpu_limit(true);
        ferry__copy_op op = {.ndim = 1,
                             .shape = {300001},
                             .src_stride = {1},
                             .dst_stride = {1},
                             .src_dtype = FERRY_DTYPE_U8,
                             .dst_dtype = FERRY_DTYPE_U8};
        check_op(&op, 300200);
        ferry__cpu_limit(false);
    }
    assert_int_equal(ferry__config_set("copy", "auto"), FERRY_OK);
}

static void nothing_is_copied_of_an_empty_box(void **state)
{
    (void)state;
    ferry__copy_op op = {.ndim = 2,
                         .shape = {3, 0},
                         .src_stride = {0, 1},
                         .dst_stride = {0, 1},
                         .src_dtype = FERRY_DTYPE_F32,
                         .dst_dtype = FERRY_DTYPE_F32};
    ferry__xxh3_state *digest = ferry__xxh3_create();
    unsigned char before = dst_bytes[0];
    ferry__copy_run(&op, dst_bytes, src_bytes, digest);
    ferry__copy_digest(&op, src_bytes, digest);
    assert_true(ferry__copy_equal(&op, dst_bytes, src_bytes));
    assert_int_equal(dst_bytes[0], before);
    assert_true(ferry__xxh3_value(digest) == ferry__xxh3("", 0));
    ferry__xxh3_destroy(digest);
}

static void nan_payloads_survive_equal_dtypes(void **state)
{
    (void)state;
    /* Signalling and quiet NaN with payloads, both signs. */
    const uint16_t in[] = {0x7f81, 0xffa5, 0x7fc1, 0xff80, 0x7fff, 1};
    uint16_t out[6] = {0};
    ferry__copy_op op = {.ndim = 1,
                         .shape = {6},
                         .src_stride = {1},
                         .dst_stride = {1},
                         .src_dtype = FERRY_DTYPE_BF16,
                         .dst_dtype = FERRY_DTYPE_BF16};
    ferry__copy_run(&op, out, in, NULL);
    assert_memory_equal(out, in, sizeof(in));
    op.src_stride[0] = -1;
    op.src_offset = 5;
    ferry__copy_run(&op, out, in, NULL);
    for (int i = 0; i < 6; i++)
        assert_int_equal(out[i], in[5 - i]);
}

static void merging_keeps_order_and_joins_runs(void **state)
{
    (void)state;
    ferry__copy_op op = {.ndim = 4,
                         .shape = {2, 1, 3, 4},
                         .src_stride = {12, 99, 4, 1},
                         .dst_stride = {20, 7, 4, 1}};
    ferry__op_merge(&op);
    assert_int_equal(op.ndim, 2);
    assert_int_equal(op.shape[0], 2);
    assert_int_equal(op.shape[1], 12);
    assert_int_equal(op.src_stride[0], 12);
    assert_int_equal(op.dst_stride[0], 20);
    assert_int_equal(ferry__op_numel(&op), 24);
    ferry__copy_op turned = {.ndim = 3,
                             .shape = {4, 3, 2},
                             .src_stride = {1, -4, 12},
                             .dst_stride = {6, 2, 1}};
    ferry__op_sort(&turned);
    assert_int_equal(turned.ndim, 3);
    assert_int_equal(turned.src_stride[0], 12);
    assert_int_equal(turned.src_stride[1], -4);
    assert_int_equal(turned.src_stride[2], 1);
    assert_int_equal(turned.shape[0], 2);
    assert_int_equal(turned.dst_stride[0], 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_boxes_equal_the_element_loop),
        cmocka_unit_test(boxes_beyond_one_slab_equal_the_element_loop),
        cmocka_unit_test(large_copies_stream_at_any_alignment),
        cmocka_unit_test(nothing_is_copied_of_an_empty_box),
        cmocka_unit_test(nan_payloads_survive_equal_dtypes),
        cmocka_unit_test(merging_keeps_order_and_joins_runs),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
