/* SPDX-License-Identifier: Apache-2.0 */
/* The pool of a host: what a reader that went mad, or was made to, writes
 * into the memory that it shares must not reach the writer. */
#include "comm/tcp_stream_pool.h"

#include "base/alloc.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#define KEY         "0123456789abcdef0123456789abcdef"
#define BOUND_BYTES ((uint64_t)64 << 10)
#define SLICE_MS    20

typedef struct both {
    tcp__pool writer, reader;
    tcp__cursor at;
} both;

static int open_both(void **state)
{
    static both b;

    memset(&b, 0, sizeof(b));
    assert_int_equal(ferry__pool_create(&b.writer, BOUND_BYTES, KEY), FERRY_OK);
    b.writer.readers[b.writer.n_readers++] = 1;
    assert_int_equal(ferry__pool_map(&b.reader, b.writer.fd, KEY), FERRY_OK);
    b.at.reader = 1;
    *state = &b;
    return 0;
}

static int close_both(void **state)
{
    both *b = *state;

    ferry__pool_close(&b->reader);
    ferry__pool_close(&b->writer);
    return 0;
}

static void make_piece(both *b, char fill)
{
    assert_int_equal(ferry__pool_acquire(&b->writer, SLICE_MS), FERRY_OK);
    memset(ferry__pool_slot(&b->writer), fill, b->writer.slot_bytes);
    ferry__pool_commit(&b->writer, b->writer.slot_bytes);
}

static void take_piece(both *b, char want)
{
    const char *bytes;
    size_t size;

    assert_int_equal(
        ferry__pool_peek(&b->reader, &b->at, SLICE_MS, &bytes, &size),
        FERRY_OK);
    assert_int_equal(size, b->writer.slot_bytes);
    for (size_t i = 0; i < size; i++)
        assert_int_equal(bytes[i], want);
    ferry__pool_release(&b->reader, &b->at, size);
}

static void slots_come_back_and_go_out_again(void **state)
{
    both *b = *state;

    for (int i = 0; i < 100; i++) {
        make_piece(b, (char)i);
        take_piece(b, (char)i);
    }
    assert_true(b->writer.n_touched <= 2);
}

/* J3: the writer keeps what it must rely on to itself. */
static void numbers_of_the_head_are_the_writers_own(void **state)
{
    both *b = *state;
    tcp__pool_head *shared = b->reader.head;

    make_piece(b, 1);
    shared->slot_bytes = UINT32_MAX;
    shared->n_slots = UINT32_MAX;
    shared->n_entries = 0;
    shared->data_at = UINT64_MAX / 2;
    for (uint32_t i = 0; i < b->writer.n_entries; i++)
        shared->entries[i] = (tcp__pool_entry){UINT32_MAX, UINT32_MAX};
    /* Released by hand: a reader sees no piece in those entries. */
    ferry__gate_raise(&shared->readers[1].released, 1);
    b->at.seq = 1;
    for (int i = 0; i < 100; i++) {
        make_piece(b, (char)i);
        take_piece(b, (char)i);
    }
    assert_true(b->writer.n_touched <= 2);
}

/* J1, J3: neither a count that runs ahead nor one that falls back makes the
 * writer hand out slots that it does not have. */
static void counts_that_cannot_be_are_refused(void **state)
{
    static const uint32_t wrong[] = {3, 1000, UINT32_MAX, UINT32_MAX / 2};
    both *b = *state;
    ferry__gate *released = &b->reader.head->readers[1].released;

    make_piece(b, 1);
    make_piece(b, 2);
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        ferry__gate_raise(released, wrong[i]);
        assert_int_equal(ferry__pool_acquire(&b->writer, SLICE_MS),
                         FERRY_EPEER);
        assert_non_null(strstr(ferry_last_error(), "reader 1"));
    }
    ferry__gate_raise(released, 2);
    make_piece(b, 3);
    ferry__gate_raise(released, 1);
    assert_int_equal(ferry__pool_acquire(&b->writer, SLICE_MS), FERRY_EPEER);
}

/* J3: a reader looks at nothing outside of what it mapped. */
static void heads_that_lie_are_not_mapped(void **state)
{
    both *b = *state;
    tcp__pool_head *h = b->writer.head;
    uint64_t data_at = h->data_at;
    uint32_t slot_bytes = h->slot_bytes, n_entries = h->n_entries;
    tcp__pool p;

    h->data_at = data_at + 8;
    assert_int_equal(ferry__pool_map(&p, b->writer.fd, KEY), FERRY_EPEER);
    h->data_at = UINT64_MAX - 4095;
    assert_int_equal(ferry__pool_map(&p, b->writer.fd, KEY), FERRY_EPEER);
    h->data_at = data_at;
    h->slot_bytes = slot_bytes + 1;
    assert_int_equal(ferry__pool_map(&p, b->writer.fd, KEY), FERRY_EPEER);
    h->slot_bytes = slot_bytes;
    h->n_entries = (uint32_t)1 << 31;
    assert_int_equal(ferry__pool_map(&p, b->writer.fd, KEY), FERRY_EPEER);
    h->n_entries = n_entries;
    assert_int_equal(ferry__pool_map(&p, b->writer.fd,
                                     "another key of 32 "
                                     "characters...."),
                     FERRY_EPEER);
}

/* A piece that the head's entries put outside of the slots. */
static void pieces_outside_are_refused(void **state)
{
    both *b = *state;
    const char *bytes;
    size_t size;

    make_piece(b, 1);
    b->writer.head->entries[0].slot = b->writer.n_slots;
    assert_int_equal(
        ferry__pool_peek(&b->reader, &b->at, SLICE_MS, &bytes, &size),
        FERRY_EPEER);
    b->writer.head->entries[0] = (tcp__pool_entry){0, b->writer.slot_bytes + 1};
    assert_int_equal(
        ferry__pool_peek(&b->reader, &b->at, SLICE_MS, &bytes, &size),
        FERRY_EPEER);
}

/* ---- memory that runs out ---- */

/* The slots that are there go round; nothing fails for want of more. */
static void memory_that_runs_out_leaves_fewer_slots(void **state)
{
    both *b = *state;

    assert_int_equal(b->writer.n_slots, 4);
    ferry__fault_arm(FERRY__FAULT_RESERVE, 3);
    make_piece(b, 1);
    make_piece(b, 2);
    assert_int_equal(ferry__pool_acquire(&b->writer, SLICE_MS), FERRY_DONE);
    take_piece(b, 1);
    make_piece(b, 3);
    assert_int_equal(ferry__pool_acquire(&b->writer, SLICE_MS), FERRY_DONE);
    take_piece(b, 2);
    take_piece(b, 3);
    for (int i = 0; i < 100; i++) {
        make_piece(b, (char)i);
        make_piece(b, (char)(i + 1));
        take_piece(b, (char)i);
        take_piece(b, (char)(i + 1));
    }
    assert_int_equal(b->writer.n_touched, 2);
    ferry__fault_arm(FERRY__FAULT_RESERVE, 0);
}

/* One slot could not be filled while it is read: both sizes are said. */
static void memory_for_one_slot_is_too_little(void **state)
{
    both *b = *state;
    char words[128];

    ferry__fault_arm(FERRY__FAULT_RESERVE, 2);
    make_piece(b, 1);
    assert_int_equal(ferry__pool_acquire(&b->writer, SLICE_MS), FERRY_ENOSPC);
    snprintf(words, sizeof(words),
             "stream: %u bytes of buffers could be had, at least %u are "
             "needed: ",
             b->writer.slot_bytes, 2 * b->writer.slot_bytes);
    assert_non_null(strstr(ferry_last_error(), words));
    ferry__fault_arm(FERRY__FAULT_RESERVE, 0);
}

#define CASE(f) cmocka_unit_test_setup_teardown(f, open_both, close_both)

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASE(slots_come_back_and_go_out_again),
        CASE(numbers_of_the_head_are_the_writers_own),
        CASE(counts_that_cannot_be_are_refused),
        CASE(heads_that_lie_are_not_mapped),
        CASE(pieces_outside_are_refused),
        CASE(memory_that_runs_out_leaves_fewer_slots),
        CASE(memory_for_one_slot_is_too_little),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
