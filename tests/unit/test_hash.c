/* SPDX-License-Identifier: Apache-2.0 */
/* XXH3-64 and the string table. */
#include "base/hash.h"

#include "base/alloc.h"
#include "base/hash_kernels.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* Digests as the xxhsum program prints them. */
static void known_digests(void **state)
{
    (void)state;
    assert_true(ferry__xxh3("", 0) == UINT64_C(0x2D06800538D394C2));
    assert_true(ferry__xxh3("abc", 3) == UINT64_C(0x78AF5F94892F3950));
}

static void digest_does_not_depend_on_the_cuts(void **state)
{
    ferry__xxh3_state *s = ferry__xxh3_create();
    unsigned char bytes[5000];
    unsigned seed = 7;

    (void)state;
    assert_non_null(s);
    for (size_t i = 0; i < sizeof(bytes); i++)
        bytes[i] = (unsigned char)rand_r(&seed);
    for (int trial = 0; trial < 50; trial++) {
        size_t size = (size_t)rand_r(&seed) % sizeof(bytes), done = 0;

        ferry__xxh3_reset(s);
        while (done < size) {
            size_t n = 1 + (size_t)rand_r(&seed) % 700;

            n = n < size - done ? n : size - done;
            ferry__xxh3_update(s, bytes + done, n);
            done += n;
        }
        assert_true(ferry__xxh3_value(s) == ferry__xxh3(bytes, size));
    }
    ferry__xxh3_destroy(s);
    ferry__xxh3_destroy(NULL);
    ferry__fault_arm(FERRY__FAULT_ALLOC, 1);
    assert_null(ferry__xxh3_create());
}

/* What the processor was chosen for gives what the plain code gives. */
static void digest_does_not_depend_on_the_processor(void **state)
{
    unsigned char bytes[4200];
    unsigned seed = 11;

    (void)state;
    for (size_t i = 0; i < sizeof(bytes); i++)
        bytes[i] = (unsigned char)rand_r(&seed);
    for (size_t size = 0; size <= 4100; size += size < 300 ? 1 : 37)
        assert_true(ferry__xxh3(bytes + size % 64, size) ==
                    ferry__xxh3_portable(bytes + size % 64, size));
}

#define N_KEYS 3000

/* Parts of any size at any address, copied and hashed or, where that is
 * refused, hashed as ever. */
static void copying_gives_the_bytes_and_the_digest(void **state)
{
    static unsigned char bytes[70000], room[70000 + 64 + 64];
    ferry__xxh3_state *s = ferry__xxh3_create();
    unsigned char *to = room + (64 - (uintptr_t)room % 64);
    unsigned seed = 5, taken = 0;

    (void)state;
    for (size_t i = 0; i < sizeof(bytes); i++)
        bytes[i] = (unsigned char)rand_r(&seed);
    for (int trial = 0; trial < 300; trial++) {
        size_t size = (size_t)rand_r(&seed) % (sizeof(bytes) - 63), done = 0;
        size_t grain = trial % 3 == 0 ? 1 : 64, at = trial % 2 ? 0 : 7;
        bool past = trial % 5 == 0;

        ferry__xxh3_reset(s);
        memset(room, 0, sizeof(room));
        while (done < size) {
            size_t n = (1 + (size_t)rand_r(&seed) % 9000) * grain;

            n = n < size - done ? n : size - done;
            if (ferry__xxh3_copy(s, to + at + done, bytes + done, n, past)) {
                taken++;
            } else {
                ferry__xxh3_update(s, bytes + done, n);
                memcpy(to + at + done, bytes + done, n);
            }
            done += n;
        }
        assert_true(ferry__xxh3_value(s) == ferry__xxh3(bytes, size));
        assert_memory_equal(to + at, bytes, size);
        for (size_t i = at + size; i < sizeof(bytes); i++)
            assert_int_equal(to[i], 0);
    }
#if FERRY__HASH_AVX2
    if (__builtin_cpu_supports("avx2"))
        assert_true(taken > 100);
#endif
    ferry__xxh3_destroy(s);
}

static void table_finds_every_key_and_no_other(void **state)
{
    static char keys[N_KEYS][24];
    ferry__table t = {0};
    size_t value = 99;

    (void)state;
    assert_false(ferry__table_get(&t, "x", &value));
    for (size_t i = 0; i < N_KEYS; i++) {
        snprintf(keys[i], sizeof(keys[i]), "layers.%zu.w", i);
        assert_int_equal(ferry__table_add(&t, keys[i], i * 3, NULL), FERRY_OK);
    }
    assert_int_equal(t.count, N_KEYS);
    for (size_t i = 0; i < N_KEYS; i++) {
        assert_true(ferry__table_get(&t, keys[i], &value));
        assert_int_equal(value, i * 3);
    }
    assert_false(ferry__table_get(&t, "layers.3000.w", &value));
    assert_true(ferry__table_get(&t, keys[1], NULL));
    ferry_fail(FERRY_OK, "before");
    assert_int_equal(ferry__table_add(&t, "layers.5.w", 1, &value),
                     FERRY_EEXIST);
    assert_int_equal(value, 15);
    assert_string_equal(ferry_last_error(), "before");
    assert_int_equal(t.count, N_KEYS);
    ferry__table_free(&t);
    assert_int_equal(t.capacity, 0);
}

static void table_survives_every_failing_allocation(void **state)
{
    static char keys[40][8];
    bool failed = true;

    (void)state;
    for (size_t i = 0; i < 40; i++)
        snprintf(keys[i], sizeof(keys[i]), "k%zu", i);
    for (uint64_t n = 1; failed; n++) {
        ferry__table t = {0};
        size_t added = 0, value;

        failed = false;
        ferry__fault_arm(FERRY__FAULT_ALLOC, n);
        for (size_t i = 0; i < 40; i++) {
            ferry_status status = ferry__table_add(&t, keys[i], i, NULL);

            if (status == FERRY_OK) {
                added++;
                continue;
            }
            assert_int_equal(status, FERRY_ENOMEM);
            failed = true;
            break;
        }
        ferry__fault_arm(FERRY__FAULT_ALLOC, 0);
        for (size_t i = 0; i < added; i++)
            assert_true(ferry__table_get(&t, keys[i], &value) && value == i);
        ferry__table_free(&t);
        assert_true(n < 100);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(known_digests),
        cmocka_unit_test(digest_does_not_depend_on_the_cuts),
        cmocka_unit_test(digest_does_not_depend_on_the_processor),
        cmocka_unit_test(copying_gives_the_bytes_and_the_digest),
        cmocka_unit_test(table_finds_every_key_and_no_other),
        cmocka_unit_test(table_survives_every_failing_allocation),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
