/* SPDX-License-Identifier: Apache-2.0 */
/* Golden bytes of the ipc backend: frames, handles and the ring's layout as
 * docs/protocol.md has them. The bytes are written out by hand. */
#include "backends/ipc/ipc_wire.h"

#include "base/alloc.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* Compares a frame with bytes given as hex, blanks ignored; frees it. */
static void expect_bytes(ferry__str *s, const char *hex)
{
    size_t n = 0;

    for (const char *p = hex; *p;) {
        unsigned value;

        if (*p == ' ') {
            p++;
            continue;
        }
        assert_int_equal(sscanf(p, "%2x", &value), 1);
        assert_true(n < s->length);
        if ((unsigned char)s->data[n] != value)
            fail_msg("byte %zu: 0x%02x, golden 0x%02x", n,
                     (unsigned char)s->data[n], value);
        n++;
        p += 2;
    }
    assert_int_equal(n, s->length);
    ferry__str_free(s);
}

#define HEX32 "30313233343536373839616263646566"
#define SECRET                                                                 \
    "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"

static void hello_bytes(void **state)
{
    ferry__ipc_hello v = {FERRY__IPC_MAGIC, 1, 1, 2, 3, 4, 0x1234, SECRET};
    ferry__ipc_hello got;
    ferry__str s = {0};

    (void)state;
    ferry__ipc_put_hello(&s, &v);
    assert_int_equal(ferry__ipc_get_hello(s.data, s.length, &got), FERRY_OK);
    assert_int_equal(got.tp_rank, 1);
    assert_int_equal(got.tp_size, 2);
    assert_int_equal(got.dp_rank, 3);
    assert_int_equal(got.dp_size, 4);
    assert_int_equal(got.pid, 0x1234);
    assert_string_equal(got.secret, SECRET);
    expect_bytes(&s, "01000000 46495043 01000000 01000000 02000000 03000000 "
                     "04000000 34120000 " HEX32 HEX32 HEX32 HEX32);
}

static void welcome_and_ready_bytes(void **state)
{
    ferry__ipc_welcome v = {FERRY__IPC_MAGIC, 1, 3, 7, 0x123456, 0x7f0011223344,
                            "0123456789abcde"};
    ferry__ipc_ready r = {1, 13}, got_ready;
    ferry__ipc_welcome got;
    ferry__str s = {0};

    (void)state;
    v.probe[15] = 'f';
    ferry__ipc_put_welcome(&s, &v);
    assert_int_equal(ferry__ipc_get_welcome(s.data, s.length, &got), FERRY_OK);
    assert_int_equal(got.reader, 7);
    assert_true(got.probe_address == 0x7f0011223344);
    expect_bytes(&s, "02000000 46495043 01000000 03000000 07000000 "
                     "5634120000000000 44332211007f0000 " HEX32);
    ferry__ipc_put_ready(&s, &r);
    assert_int_equal(ferry__ipc_get_ready(s.data, s.length, &got_ready),
                     FERRY_OK);
    assert_int_equal(got_ready.error, 13);
    expect_bytes(&s, "03000000 01000000 0d000000");
}

static void failure_bytes(void **state)
{
    ferry__ipc_failure v = {5, FERRY_EMISMATCH, "no"}, got;
    ferry__str s = {0};

    (void)state;
    ferry__ipc_put_failure(&s, &v);
    assert_int_equal(ferry__ipc_get_failure(s.data, s.length, &got), FERRY_OK);
    assert_int_equal(got.status, FERRY_EMISMATCH);
    assert_string_equal(got.text, "no");
    expect_bytes(&s, "04000000 0500000000000000 f6ffffff 6e6f");
    /* Whoever reports a failure has failed, whatever number he gives. */
    v.status = 0;
    ferry__ipc_put_failure(&s, &v);
    assert_int_equal(ferry__ipc_get_failure(s.data, s.length, &got), FERRY_OK);
    assert_int_equal(got.status, FERRY_EPEER);
    ferry__str_free(&s);
}

static void memory_frames_bytes(void **state)
{
    ferry__ipc_segment v = {6, 4096}, got;
    ferry__ipc_range items[2] = {{0x1000, 16}, {0x2000, 1}};
    ferry__ipc_ranges ranges = {9, 2, items}, got_ranges;
    uint64_t id;
    ferry__str s = {0};

    (void)state;
    ferry__ipc_put_segment(&s, &v);
    assert_int_equal(ferry__ipc_get_segment(s.data, s.length, &got), FERRY_OK);
    assert_int_equal(got.size_bytes, 4096);
    expect_bytes(&s, "05000000 0600000000000000 0010000000000000");
    ferry__ipc_put_drop(&s, 6);
    assert_int_equal(ferry__ipc_get_drop(s.data, s.length, &id), FERRY_OK);
    assert_int_equal(id, 6);
    expect_bytes(&s, "06000000 0600000000000000");
    ferry__ipc_put_ranges(&s, &ranges);
    assert_int_equal(ferry__ipc_get_ranges(s.data, s.length, &got_ranges),
                     FERRY_OK);
    assert_int_equal(got_ranges.count, 2);
    assert_int_equal(got_ranges.items[1].address, 0x2000);
    ferry__free(got_ranges.items);
    expect_bytes(&s, "07000000 0900000000000000 02000000 "
                     "0010000000000000 1000000000000000 "
                     "0020000000000000 0100000000000000");
}

static void update_and_done_bytes(void **state)
{
    ferry__ipc_update v = {2, 0x1122334455667788, 0x99aabbccddeeff00, 17, 0};
    ferry__ipc_update got;
    ferry__ipc_done done = {2, 300}, got_done;
    ferry__str s = {0};

    (void)state;
    ferry__ipc_put_update(&s, &v);
    assert_int_equal(ferry__ipc_get_update(s.data, s.length, &got), FERRY_OK);
    assert_int_equal(got.ring_first, 17);
    expect_bytes(&s, "08000000 0200000000000000 8877665544332211 "
                     "00ffeeddccbbaa99 11000000 00000000");
    ferry__ipc_put_done(&s, &done);
    assert_int_equal(ferry__ipc_get_done(s.data, s.length, &got_done),
                     FERRY_OK);
    assert_int_equal(got_done.bytes, 300);
    expect_bytes(&s, "0b000000 0200000000000000 2c01000000000000");
}

static void boxes_and_digests_bytes(void **state)
{
    ferry_box boxes[1] = {{4, 2, 0, {3, 2}, {8, 1}}};
    size_t first[3] = {0, 0, 1};
    ferry__ipc_boxes v = {2, 0, true, {2, first, boxes}}, got;
    ferry_param_meta params[2] = {{"a", FERRY_DTYPE_F32, 1, {5}},
                                  {"b", FERRY_DTYPE_F32, 2, {3, 8}}};
    ferry__ipc_digest items[1] = {{1, 0, 0x0102030405060708}};
    ferry__ipc_digests d = {2, 1, items}, got_d;
    ferry__str s = {0};
    char want[512];

    (void)state;
    assert_int_equal(ferry__box_lists_digest(&v.lists, &v.digest), FERRY_OK);
    ferry__ipc_put_boxes(&s, &v);
    assert_int_equal(ferry__ipc_get_boxes(s.data, s.length, &got), FERRY_OK);
    assert_int_equal(got.lists.n_params, 2);
    assert_int_equal(got.lists.boxes[0].stride[0], 8);
    assert_int_equal(ferry__box_lists_check(&got.lists, params, 2), FERRY_OK);
    assert_int_equal(ferry__box_lists_check(&got.lists, params, 1),
                     FERRY_EPEER);
    params[1].shape[0] = 2; /* its last row would be outside */
    assert_int_equal(ferry__box_lists_check(&got.lists, params, 2),
                     FERRY_EPEER);
    assert_non_null(strstr(ferry_last_error(), "b"));
    ferry__box_lists_free(&got.lists);
    s.data[s.length - 1] ^= 1;
    assert_int_equal(ferry__ipc_get_boxes(s.data, s.length, &got), FERRY_EPEER);
    s.data[s.length - 1] ^= 1;
    snprintf(want, sizeof(want),
             "09000000 0200000000000000 %02x%02x%02x%02x%02x%02x%02x%02x "
             "01000000 02000000 00000000 01000000 0400000000000000 02000000 "
             "0300000000000000 0800000000000000 0200000000000000 "
             "0100000000000000",
             (unsigned)(v.digest & 255), (unsigned)(v.digest >> 8 & 255),
             (unsigned)(v.digest >> 16 & 255), (unsigned)(v.digest >> 24 & 255),
             (unsigned)(v.digest >> 32 & 255), (unsigned)(v.digest >> 40 & 255),
             (unsigned)(v.digest >> 48 & 255), (unsigned)(v.digest >> 56));
    expect_bytes(&s, want);
    ferry__ipc_put_digests(&s, &d);
    assert_int_equal(ferry__ipc_get_digests(s.data, s.length, &got_d),
                     FERRY_OK);
    assert_int_equal(got_d.items[0].param, 1);
    ferry__free(got_d.items);
    expect_bytes(&s, "0a000000 0200000000000000 01000000 01000000 00000000 "
                     "0807060504030201");
}

/* Every frame, cut at every length, and with a byte too many, is refused. */
static void torn_frames_are_refused(void **state)
{
    ferry__ipc_range items[1] = {{1, 2}};
    ferry__ipc_ranges v = {9, 1, items}, got;
    ferry__str s = {0};

    (void)state;
    ferry__ipc_put_ranges(&s, &v);
    for (size_t n = 0; n < s.length; n++)
        assert_int_equal(ferry__ipc_get_ranges(s.data, n, &got), FERRY_EPEER);
    ferry__str_append_n(&s, "x", 1);
    assert_int_equal(ferry__ipc_get_ranges(s.data, s.length, &got),
                     FERRY_EPEER);
    /* A count that the frame cannot hold takes no memory. */
    memset(s.data + 12, 0xff, 4);
    assert_int_equal(ferry__ipc_get_ranges(s.data, s.length, &got),
                     FERRY_EPEER);
    assert_int_equal(ferry__ipc_frame_type(s.data, 3), 0);
    ferry__str_free(&s);
}

static const ferry_param_meta metas[4] = {
    {"w", FERRY_DTYPE_BF16, 2, {4, 3}},
    {"t", FERRY_DTYPE_F32, 2, {2, 5}},
    {"s", FERRY_DTYPE_F32, 0, {0}},
    {"e", FERRY_DTYPE_F32, 1, {0}},
};

static void handles_text(void **state)
{
    ferry__ipc_handle v[4] = {{FERRY__IPC_RING, false, 0, 0, {0}},
                              {FERRY__IPC_SHARED, true, 2, 64, {1, 2}},
                              {FERRY__IPC_CMA, false, 1, 4, {0}},
                              {FERRY__IPC_EMPTY, false, 0, 0, {0}}};
    const char *golden = "[{\"ring\":true},"
                         "{\"segment\":2,\"offset\":64,\"strides\":[1,2]},"
                         "{\"range\":1,\"offset\":4},{\"empty\":true}]";
    ferry__ipc_handle *got;
    ferry__str s = {0};

    (void)state;
    ferry__ipc_put_handles(&s, v, metas, 4);
    assert_string_equal(s.data, golden);
    ferry__str_free(&s);
    assert_int_equal(ferry__ipc_get_handles(golden, metas, 4, &got), FERRY_OK);
    assert_true(ferry__ipc_handles_digest(got, metas, 4) ==
                ferry__ipc_handles_digest(v, metas, 4));
    got[1].stride[0] = 3;
    assert_false(ferry__ipc_handles_digest(got, metas, 4) ==
                 ferry__ipc_handles_digest(v, metas, 4));
    ferry__free(got);
}

static void bad_handles_name_the_parameter(void **state)
{
    static const char *const bad[] = {
        "{}",
        "[]",
        "[1,2,3,4]",
        "nothing",
        "[{\"ring\":1},{\"ring\":true},{\"ring\":true},{\"ring\":true}]",
        "[{\"ring\":true,\"x\":1},{\"ring\":true},{\"ring\":true},"
        "{\"ring\":true}]",
        "[{\"segment\":-1,\"offset\":0},{\"ring\":true},{\"ring\":true},"
        "{\"ring\":true}]",
        "[{\"segment\":1.5,\"offset\":0},{\"ring\":true},{\"ring\":true},"
        "{\"ring\":true}]",
        "[{\"segment\":1},{\"ring\":true},{\"ring\":true},{\"ring\":true}]",
        "[{\"segment\":1,\"offset\":0,\"strides\":[1]},{\"ring\":true},"
        "{\"ring\":true},{\"ring\":true}]",
        "[{\"segment\":1,\"offset\":0,\"strides\":[1,\"2\"]},{\"ring\":true},"
        "{\"ring\":true},{\"ring\":true}]",
        "[{\"segment\":1,\"range\":1,\"offset\":0},{\"ring\":true},"
        "{\"ring\":true},{\"ring\":true}]",
        "[{\"segment\":1,\"offset\":0,\"pointer\":4096},{\"ring\":true},"
        "{\"ring\":true},{\"ring\":true}]",
    };
    ferry__ipc_handle *got = NULL;

    (void)state;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        assert_int_equal(ferry__ipc_get_handles(bad[i], metas, 4, &got),
                         FERRY_EINVAL);
        assert_non_null(strstr(ferry_last_error(), "handles"));
        assert_null(got);
        if (i >= 4)
            assert_non_null(strstr(ferry_last_error(), "parameter w"));
    }
}

static ferry_status check(size_t meta, bool strided, uint64_t offset,
                          int64_t s0, int64_t s1, uint64_t size)
{
    ferry__ipc_handle h = {FERRY__IPC_SHARED, strided, 1, offset, {s0, s1}};

    return ferry__ipc_handle_check(&h, &metas[meta], size);
}

/* Whatever strides say, no element outside the segment is reached. */
static void handles_stay_inside(void **state)
{
    (void)state;
    assert_int_equal(check(0, false, 0, 0, 0, 24), FERRY_OK);
    assert_int_equal(check(0, false, 0, 0, 0, 23), FERRY_EINVAL);
    assert_int_equal(check(0, false, 2, 0, 0, 24), FERRY_EINVAL);
    assert_int_equal(check(0, false, 1, 0, 0, 100), FERRY_EINVAL);
    assert_int_equal(check(0, false, UINT64_MAX - 1, 0, 0, 24), FERRY_EINVAL);
    assert_int_equal(check(0, false, (uint64_t)INT64_MAX - 1, 0, 0, 24),
                     FERRY_EINVAL);
    /* [4, 3] transposed: strides 1, 4. */
    assert_int_equal(check(0, true, 0, 1, 4, 24), FERRY_OK);
    assert_int_equal(check(0, true, 0, 1, 4, 22), FERRY_EINVAL);
    /* Backwards from the last element. */
    assert_int_equal(check(0, true, 22, -3, -1, 24), FERRY_OK);
    assert_int_equal(check(0, true, 20, -3, -1, 24), FERRY_EINVAL);
    assert_int_equal(check(0, true, 0, 0, 0, 2), FERRY_OK);
    assert_int_equal(check(0, true, 0, INT64_MAX, 1, 24), FERRY_EINVAL);
    assert_int_equal(check(0, true, 0, INT64_MIN, 1, 24), FERRY_EINVAL);
    assert_int_equal(check(0, true, 0, INT64_MAX / 3, INT64_MAX / 2, 24),
                     FERRY_EINVAL);
    assert_int_equal(check(2, false, 4, 0, 0, 8), FERRY_OK);
    assert_int_equal(check(2, false, 8, 0, 0, 8), FERRY_EINVAL);
    assert_int_equal(check(3, false, 4096, 0, 0, 0), FERRY_OK);
}

static void ring_layout(void **state)
{
    uint64_t bytes = ferry__ipc_ring_bytes(4, 1 << 20), slot_bytes;
    ferry__ipc_ring *ring = aligned_alloc(4096, bytes);
    uint32_t n_slots;

    (void)state;
    memset(ring, 0, bytes);
    assert_int_equal(offsetof(ferry__ipc_ring, published), 64);
    assert_int_equal(offsetof(ferry__ipc_ring, readers), 128);
    assert_int_equal(sizeof(ferry__ipc_reader), 128);
    assert_int_equal(offsetof(ferry__ipc_reader, taken_update), 64);
    assert_int_equal(sizeof(ferry__ipc_record), 32);
    assert_int_equal(offsetof(ferry__ipc_slot, records), 16);
    /* 128 + 256 × 128 = 32896 bytes, padded to 36864; then 4 heads. */
    assert_int_equal(bytes, 36864 + 4 * (8192 + (1 << 20)));
    ferry__ipc_ring_init(ring, 4, 1 << 20);
    assert_int_equal(ferry__ipc_ring_check(ring, bytes, &n_slots, &slot_bytes),
                     FERRY_OK);
    assert_ptr_equal(ferry__ipc_ring_slot(ring, 4, 5),
                     (char *)ring + 36864 + 8192);
    assert_ptr_equal(ferry__ipc_ring_data(ring, 4, 1 << 20, 6),
                     (char *)ring + 36864 + 4 * 8192 + 2 * (1 << 20));
    assert_int_equal(
        ferry__ipc_ring_check(ring, bytes - 1, &n_slots, &slot_bytes),
        FERRY_EPEER);
    ring->n_slots = 5;
    assert_int_equal(ferry__ipc_ring_check(ring, bytes, &n_slots, &slot_bytes),
                     FERRY_EPEER);
    free(ring);
}

/* The init info that a Ferry trainer sends, and vLLM's own. */
static void init_info_fields(void **state)
{
    ferry__ipc_init_info *info;
    void *parsed;

    (void)state;
    assert_int_equal(
        ferry_info_parse(&ferry__ipc_init_type,
                         "{\"packed\":true,\"packed_buffer_size_bytes\":64,"
                         "\"packed_num_buffers\":3,\"transport\":\"ferry\","
                         "\"protocol_version\":1,\"socket\":\"ferry-ipc-x\","
                         "\"secret\":\"00\",\"deadline_ms\":5,"
                         "\"no_progress_ms\":6,\"digest\":true}",
                         &parsed),
        FERRY_OK);
    info = parsed;
    assert_int_equal(info->packed_buffer_size_bytes, 64);
    assert_string_equal(info->socket, "ferry-ipc-x");
    assert_int_equal(info->digest, 1);
    ferry_info_free(parsed);
    assert_int_equal(
        ferry_info_parse(&ferry__ipc_init_type, "{\"packed\":false}", &parsed),
        FERRY_OK);
    info = parsed;
    assert_int_equal(info->packed_buffer_size_bytes, 1 << 30);
    assert_null(info->socket);
    ferry_info_free(parsed);
    assert_int_equal(
        ferry_info_parse(&ferry__ipc_init_type, "{\"socket\":\"x\"}", &parsed),
        FERRY_EINVAL);
    assert_non_null(strstr(ferry_last_error(), "transport"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(hello_bytes),
        cmocka_unit_test(welcome_and_ready_bytes),
        cmocka_unit_test(failure_bytes),
        cmocka_unit_test(memory_frames_bytes),
        cmocka_unit_test(update_and_done_bytes),
        cmocka_unit_test(boxes_and_digests_bytes),
        cmocka_unit_test(torn_frames_are_refused),
        cmocka_unit_test(handles_text),
        cmocka_unit_test(bad_handles_name_the_parameter),
        cmocka_unit_test(handles_stay_inside),
        cmocka_unit_test(ring_layout),
        cmocka_unit_test(init_info_fields),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
