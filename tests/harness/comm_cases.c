/* SPDX-License-Identifier: Apache-2.0 */
/* What every provider of the comm table must do, with real processes.
 * Invariant: no wait here may need its bound of ten seconds. */
#include "harness/comm_cases.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "base/thread.h"
#include "harness/together.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#define T         10000 /* ms: no wait here may need it */
#define WORLD_MAX COMM_WORLD_MAX

typedef int (*body_fn)(ferry__comm *c);

/* 0, or the line of the first check that failed. */
#define CHECK(expr)                                                            \
    do {                                                                       \
        if (!(expr)) {                                                         \
            fprintf(stderr, "rank %d: %s: %s\n", c->rank, #expr,               \
                    ferry_last_error());                                       \
            return __LINE__ % 250 + 1;                                         \
        }                                                                      \
    } while (0)

static const comm_maker *maker;

/* Runs body in `world` forked ranks; answers 0 when all returned 0. A rank
 * that was killed counts as good if `may_die`. */
static int run_ranks(int32_t world, size_t slot_bytes, body_fn body,
                     int may_die)
{
    pid_t pids[WORLD_MAX];
    comm_group group;
    int bad = 0;

    assert_int_equal(maker->make(&group, world, slot_bytes), FERRY_OK);
    together_begin();
    for (int32_t r = 0; r < world; r++) {
        pids[r] = fork();
        if (pids[r] == 0) {
            ferry__comm *c = NULL;
            int rc = 251;

            alarm(30);
            if (maker->open(&group, r, &c) == FERRY_OK)
                rc = body(c);
            else
                fprintf(stderr, "rank %d: %s\n", r, ferry_last_error());
            ferry__comm_close(&c);
            _exit(rc);
        }
    }
    maker->drop(&group);
    for (int32_t r = 0; r < world; r++) {
        int how;

        waitpid(pids[r], &how, 0);
        if (WIFSIGNALED(how) && may_die)
            continue;
        if (how != 0) {
            print_message("rank %d ended with %d\n", r, how);
            bad = 1;
        }
    }
    return bad;
}

static unsigned char byte_of(uint64_t seed, size_t i)
{
    uint64_t x = (seed + 1) * 0x9e3779b97f4a7c15u + i * 0xbf58476d1ce4e5b9u;

    x ^= x >> 29;
    x *= 0x94d049bb133111ebu;
    return (unsigned char)(x >> 56);
}

static int broadcast_body(ferry__comm *c)
{
    static const size_t sizes[] = {0, 1, 63, 64, 4096, 4097, 100000};

    for (size_t s = 0; s < sizeof(sizes) / sizeof(sizes[0]); s++) {
        for (int32_t root = 0; root < c->world_size; root++) {
            size_t n = sizes[s];
            unsigned char *bytes = calloc(1, n + 1);

            if (c->rank == root) {
                for (size_t i = 0; i < n; i++)
                    bytes[i] = byte_of((uint64_t)root, i);
            }
            CHECK(c->ops->broadcast(c, bytes, n, root, T) == FERRY_OK);
            for (size_t i = 0; i < n; i++)
                CHECK(bytes[i] == byte_of((uint64_t)root, i));
            CHECK(bytes[n] == 0);
            free(bytes);
        }
    }
    return 0;
}

static float value_of(int32_t rank, int64_t i)
{
    return (float)((int)byte_of((uint64_t)rank, (size_t)i) - 100) * 0.013f;
}

static int reduce_f32(ferry__comm *c, int64_t n)
{
    float *data = malloc((size_t)n * sizeof(float) + 4);

    for (int64_t i = 0; i < n; i++)
        data[i] = value_of(c->rank, i);
    CHECK(c->ops->all_reduce(c, data, n, FERRY_DTYPE_F32, FERRY__REDUCE_SUM,
                             T) == FERRY_OK);
    for (int64_t i = 0; i < n; i++) {
        float want = value_of(0, i);

        for (int32_t r = 1; r < c->world_size; r++)
            want += value_of(r, i);
        /* Added in rank order, so equal to the last bit. */
        CHECK(memcmp(&want, &data[i], sizeof(want)) == 0);
    }
    free(data);
    return 0;
}

static int reduce_body(ferry__comm *c)
{
    static const int64_t counts[] = {0, 1, 2, 7, 16, 576, 9000, 20001, 60000};
    int64_t big[3] = {c->rank, -c->rank, INT64_C(1) << 40};
    double d = c->rank == 1 ? 2.5 : -1;
    int32_t small = 1 << c->rank;

    for (size_t s = 0; s < sizeof(counts) / sizeof(counts[0]); s++) {
        int rc = reduce_f32(c, counts[s]);

        if (rc)
            return rc;
    }
    CHECK(c->ops->all_reduce(c, big, 3, FERRY_DTYPE_I64, FERRY__REDUCE_MAX,
                             T) == FERRY_OK);
    CHECK(big[0] == c->world_size - 1 && big[1] == 0);
    CHECK(c->ops->all_reduce(c, &d, 1, FERRY_DTYPE_F64, FERRY__REDUCE_MAX, T) ==
          FERRY_OK);
    CHECK(d == (c->world_size > 1 ? 2.5 : -1));
    CHECK(c->ops->all_reduce(c, &small, 1, FERRY_DTYPE_I32, FERRY__REDUCE_SUM,
                             T) == FERRY_OK);
    CHECK(small == (1 << c->world_size) - 1);
    CHECK(c->ops->all_reduce(c, &small, 1, FERRY_DTYPE_BF16, FERRY__REDUCE_SUM,
                             T) == FERRY_ENOTSUP);
    CHECK(c->ops->barrier(c, T) == FERRY_OK);
    return 0;
}

static int gather_body(ferry__comm *c)
{
    static const size_t sizes[] = {0, 1, 100, 4096, 30001};

    for (size_t s = 0; s < sizeof(sizes) / sizeof(sizes[0]); s++) {
        size_t n = sizes[s];
        unsigned char *mine = malloc(n + 1);
        unsigned char *all = malloc(n * WORLD_MAX + 1);

        for (size_t i = 0; i < n; i++)
            mine[i] = byte_of((uint64_t)c->rank, i);
        /* The last rank does not want the result. */
        CHECK(c->ops->all_gather(c, mine, n,
                                 c->rank + 1 == c->world_size ? NULL : all,
                                 T) == FERRY_OK);
        for (int32_t r = 0; r < c->world_size; r++) {
            for (size_t i = 0; c->rank + 1 < c->world_size && i < n; i++)
                CHECK(all[(size_t)r * n + i] == byte_of((uint64_t)r, i));
        }
        free(mine);
        free(all);
    }
    return 0;
}

static int send_body(ferry__comm *c)
{
    static const size_t sizes[] = {0, 5, 4096, 50000};
    unsigned char *bytes = malloc(50000);

    for (size_t s = 0; s < sizeof(sizes) / sizeof(sizes[0]); s++) {
        size_t n = sizes[s];

        /* A ring: all but rank 0 receive first. */
        for (int turn = 0; turn < 2; turn++) {
            if ((turn == 0) == (c->rank == 0)) {
                int32_t to = (c->rank + 1) % c->world_size;

                for (size_t i = 0; i < n; i++)
                    bytes[i] = byte_of((uint64_t)c->rank, i);
                CHECK(c->ops->send(c, bytes, n, to, T) == FERRY_OK);
            } else {
                int32_t from = (c->rank + c->world_size - 1) % c->world_size;

                CHECK(c->ops->recv(c, bytes, n, from, T) == FERRY_OK);
                for (size_t i = 0; i < n; i++)
                    CHECK(bytes[i] == byte_of((uint64_t)from, i));
            }
        }
    }
    CHECK(c->ops->send(c, bytes, 1, c->rank, T) == FERRY_EINVAL);
    CHECK(c->ops->recv(c, bytes, 1, 99, T) == FERRY_EINVAL);
    free(bytes);
    return 0;
}

/* A stream of mixed operations with random sizes and random delays. */
static int mixed_body(ferry__comm *c)
{
    for (uint64_t i = 0; i < 300; i++) {
        uint64_t pick = byte_of(i, 1);
        int64_t n = (int64_t)byte_of(i, 2) * (pick & 1 ? 1 : 40);
        int32_t root = (int32_t)(byte_of(i, 3) % (unsigned)c->world_size);
        int rc = 0;

        if (byte_of(i, 4 + (size_t)c->rank) < 8)
            usleep(500);
        if (pick < 100) {
            rc = reduce_f32(c, n);
        } else if (pick < 180) {
            int64_t got = c->rank == root ? n : -1;

            CHECK(c->ops->broadcast(c, &got, sizeof(got), root, T) == FERRY_OK);
            CHECK(got == n);
        } else if (pick < 220) {
            int32_t all[WORLD_MAX] = {0}, mine = c->rank * 7;

            CHECK(c->ops->all_gather(c, &mine, sizeof(mine), all, T) ==
                  FERRY_OK);
            for (int32_t r = 0; r < c->world_size; r++)
                CHECK(all[r] == r * 7);
        } else {
            CHECK(c->ops->barrier(c, T) == FERRY_OK);
        }
        if (rc)
            return rc;
    }
    return 0;
}

static void bodies_hold_at_every_world_size(void **state)
{
    static const body_fn bodies[] = {broadcast_body, reduce_body, gather_body,
                                     mixed_body};

    (void)state;
    for (size_t b = 0; b < sizeof(bodies) / sizeof(bodies[0]); b++) {
        for (int32_t world = 1; world <= WORLD_MAX; world++)
            assert_int_equal(run_ranks(world, 4096, bodies[b], 0), 0);
    }
    assert_int_equal(run_ranks(3, 0, reduce_body, 0), 0);
    for (int32_t world = 2; world <= WORLD_MAX; world++)
        assert_int_equal(run_ranks(world, 4096, send_body, 0), 0);
}

/* The largest shares still go in two steps with default slots. */
static int big_reduce_body(ferry__comm *c)
{
    return reduce_f32(c, 700001);
}

static void large_all_reduce_is_exact(void **state)
{
    (void)state;
    assert_int_equal(run_ranks(3, 0, big_reduce_body, 0), 0);
    assert_int_equal(run_ranks(4, 0, big_reduce_body, 0), 0);
}

static int killed_body(ferry__comm *c)
{
    int64_t began;
    ferry_status status = FERRY_OK;
    float x[64] = {0};

    for (int i = 0; i < 20; i++)
        CHECK(c->ops->all_reduce(c, x, 64, FERRY_DTYPE_F32, FERRY__REDUCE_SUM,
                                 T) == FERRY_OK);
    if (c->rank == 1)
        raise(SIGKILL);
    began = ferry__now_ns();
    while (status == FERRY_OK)
        status =
            c->ops->all_reduce(c, x, 64, FERRY_DTYPE_F32, FERRY__REDUCE_SUM, T);
    CHECK(status == FERRY_EPEER);
    CHECK(ferry__now_ns() - began < INT64_C(2000000000));
    /* Either the dead rank is named, or one that failed for its sake. */
    CHECK(strstr(ferry_last_error(), "rank ") != NULL);
    /* Every later call fails too, at once. */
    CHECK(c->ops->barrier(c, T) == FERRY_EPEER);
    return 0;
}

static void killed_rank_is_named_and_ends_the_group(void **state)
{
    (void)state;
    for (int32_t world = 2; world <= WORLD_MAX; world++)
        assert_int_equal(run_ranks(world, 0, killed_body, 1), 0);
}

static int killed_root_body(ferry__comm *c)
{
    char *bytes = calloc(1, 1 << 20);

    if (c->rank == 0)
        raise(SIGKILL);
    CHECK(c->ops->broadcast(c, bytes, 1 << 20, 0, T) == FERRY_EPEER);
    CHECK(strstr(ferry_last_error(), "rank 0 ") != NULL);
    free(bytes);
    return 0;
}

static void killed_root_is_named(void **state)
{
    (void)state;
    assert_int_equal(run_ranks(3, 4096, killed_root_body, 1), 0);
}

static int late_body(ferry__comm *c)
{
    int64_t began = ferry__now_ns();

    if (c->rank == 0) {
        together_await(c->world_size - 1);
        /* The others have given up; this is told, not waited for. */
        CHECK(c->ops->barrier(c, T) == FERRY_EPEER);
        together_end(c->world_size);
        return 0;
    }
    CHECK(c->ops->barrier(c, 200) < 0);
    CHECK(ferry__now_ns() - began < INT64_C(590000000));
    if (c->rank == 1 && c->world_size == 2) {
        CHECK(strstr(ferry_last_error(), "rank 0") != NULL);
        CHECK(strstr(ferry_last_error(), "200 ms") != NULL);
        CHECK(c->ops->barrier(c, T) == FERRY_ETIMEOUT);
    }
    together_end(c->world_size); /* alive while rank 0 calls */
    return 0;
}

static void timeout_names_operation_rank_and_bound(void **state)
{
    (void)state;
    assert_int_equal(run_ranks(2, 0, late_body, 0), 0);
    assert_int_equal(run_ranks(3, 0, late_body, 0), 0);
}

/* ---- waits ---- */

static void add_wait(void *arg, int32_t peer, const char *address,
                     int64_t from_ns)
{
    int64_t *waits = arg;

    if (peer >= 0 && peer < WORLD_MAX && address)
        waits[peer] += ferry__now_ns() - from_ns;
}

/* The last rank comes late: to all at once, then to each. */
static int waited_body(ferry__comm *c)
{
    int32_t late = c->world_size - 1;
    int64_t waits[WORLD_MAX] = {0};
    char x = 1;

    CHECK(c->ops->barrier(c, T) == FERRY_OK);
    c->check_arg = waits;
    c->waited = add_wait;
    if (c->rank == late)
        usleep(200000);
    for (int32_t r = 0; c->rank == late && r < late; r++)
        CHECK(c->ops->send(c, &x, 1, r, T) == FERRY_OK);
    if (c->rank != late) {
        CHECK(c->ops->recv(c, &x, 1, late, T) == FERRY_OK);
        CHECK(waits[late] > INT64_C(100000000));
        for (int32_t r = 0; r < late; r++)
            CHECK(waits[r] == 0);
    }
    c->waited = NULL;
    CHECK(c->ops->barrier(c, T) == FERRY_OK);
    c->waited = add_wait;
    waits[late] = 0;
    if (c->rank == late)
        usleep(200000);
    CHECK(c->ops->barrier(c, T) == FERRY_OK);
    if (c->world_size == 2)
        CHECK(c->rank == late || waits[late] > INT64_C(100000000));
    return 0;
}

static void a_rank_that_is_late_is_told_of(void **state)
{
    (void)state;
    assert_int_equal(run_ranks(2, 0, waited_body, 0), 0);
    assert_int_equal(run_ranks(3, 0, waited_body, 0), 0);
}

static int abort_body(ferry__comm *c)
{
    int64_t began = ferry__now_ns();

    if (c->rank == 0) {
        usleep(50000); /* the others wait for it by then */
        c->ops->abort(c);
        CHECK(c->ops->barrier(c, T) == FERRY_ECANCELED);
        together_end(c->world_size);
        return 0;
    }
    CHECK(c->ops->barrier(c, T) == FERRY_ECANCELED ||
          strstr(ferry_last_error(), "failed before"));
    CHECK(ferry__now_ns() - began < INT64_C(1000000000));
    together_end(c->world_size);
    return 0;
}

static void abort_wakes_all(void **state)
{
    (void)state;
    assert_int_equal(run_ranks(2, 0, abort_body, 0), 0);
    assert_int_equal(run_ranks(4, 0, abort_body, 0), 0);
}

static int mismatch_body(ferry__comm *c)
{
    int64_t x = 1;
    ferry_status status;

    if (c->rank == 0)
        status =
            c->ops->all_reduce(c, &x, 1, FERRY_DTYPE_I64, FERRY__REDUCE_SUM, T);
    else
        status = c->ops->barrier(c, T);
    CHECK(status == FERRY_EMISMATCH || status == FERRY_EPEER);
    together_end(c->world_size);
    return 0;
}

static void different_operations_are_refused(void **state)
{
    (void)state;
    assert_int_equal(run_ranks(2, 0, mismatch_body, 0), 0);
}

/* ---- pull ---- */

#define PULL_BYTES ((size_t)3 << 20)

typedef struct pull_key {
    size_t bytes;
    unsigned char key[FERRY__PULL_KEY];
} pull_key;

/* The key goes from rank 0 to all others. */
static ferry_status share_key(ferry__comm *c, void *bytes, size_t size,
                              pull_key *key)
{
    memset(key, 0, sizeof(*key));
    if (c->rank == 0)
        FERRY_TRY(c->ops->expose(c, bytes, size, key->key, &key->bytes));
    return c->ops->broadcast(c, key, sizeof(*key), 0, T);
}

static bool pulled_right(const unsigned char *got, size_t from, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (got[i] != byte_of(77, from + i))
            return false;
    }
    return true;
}

/* Rank 0 is in no call while the others pull; they all pull at once. */
static int pull_body(ferry__comm *c)
{
    static const size_t parts[][2] = {
        {0, PULL_BYTES}, {0, 1}, {4097, 100001}, {PULL_BYTES - 1, 1}, {9, 0}};
    unsigned char *bytes = malloc(PULL_BYTES);
    pull_key key;

    for (size_t i = 0; i < PULL_BYTES; i++)
        bytes[i] = c->rank == 0 ? byte_of(77, i) : 0;
    CHECK(share_key(c, bytes, PULL_BYTES, &key) == FERRY_OK);
    if (c->rank == 0)
        together_await(c->world_size - 1);
    for (size_t p = 0; c->rank > 0 && p < sizeof(parts) / sizeof(*parts); p++) {
        CHECK(c->ops->pull(c, bytes, parts[p][1], 0, key.key, key.bytes,
                           parts[p][0], T) == FERRY_OK);
        CHECK(pulled_right(bytes, parts[p][0], parts[p][1]));
    }
    together_end(c->world_size);
    CHECK(c->ops->barrier(c, T) == FERRY_OK);
    if (c->rank == 0)
        c->ops->unexpose(c, bytes);
    CHECK(c->ops->barrier(c, T) == FERRY_OK);
    free(bytes);
    return 0;
}

static void exposed_memory_is_pulled_without_a_call(void **state)
{
    (void)state;
    if (maker->no_pull)
        skip();
    for (int32_t world = 2; world <= WORLD_MAX; world++)
        assert_int_equal(run_ranks(world, 4096, pull_body, 0), 0);
}

/* What cannot be right is refused before a byte moves, and the group lives. */
static int wrong_pull_body(ferry__comm *c)
{
    unsigned char bytes[100] = {0}, before[100] = {0};
    pull_key key;

    CHECK(c->ops->expose(c, NULL, 4, key.key, &key.bytes) == FERRY_EINVAL);
    CHECK(share_key(c, bytes, sizeof(bytes), &key) == FERRY_OK);
    if (c->rank > 0) {
        CHECK(c->ops->pull(c, bytes, 1, c->rank, key.key, key.bytes, 0, T) ==
              FERRY_EINVAL);
        CHECK(c->ops->pull(c, bytes, 1, 99, key.key, key.bytes, 0, T) ==
              FERRY_EINVAL);
        CHECK(c->ops->pull(c, bytes, 1, 0, key.key, 3, 0, T) == FERRY_EINVAL);
        CHECK(c->ops->pull(c, bytes, 1, 0, bytes, key.bytes, 0, T) ==
              FERRY_EINVAL);
        CHECK(c->ops->pull(c, bytes, 101, 0, key.key, key.bytes, 0, T) ==
              FERRY_EINVAL);
        CHECK(strstr(ferry_last_error(), "exposes 100"));
        CHECK(c->ops->pull(c, bytes, 2, 0, key.key, key.bytes, UINT64_MAX, T) ==
              FERRY_EINVAL);
        CHECK(c->ops->pull(c, bytes, 1, 0, key.key, key.bytes, 0, 0) ==
              FERRY_EINVAL);
        CHECK(memcmp(bytes, before, sizeof(bytes)) == 0);
    }
    CHECK(c->ops->barrier(c, T) == FERRY_OK);
    return 0;
}

static void wrong_pulls_are_refused(void **state)
{
    (void)state;
    if (maker->no_pull)
        skip();
    assert_int_equal(run_ranks(3, 4096, wrong_pull_body, 0), 0);
}

static int killed_pull_body(ferry__comm *c)
{
    size_t size = (size_t)1 << 20;
    unsigned char *bytes = calloc(1, size);
    int64_t began = ferry__now_ns();
    ferry_status status = FERRY_OK;
    pull_key key;

    CHECK(share_key(c, bytes, size, &key) == FERRY_OK);
    if (c->rank == 0) {
        usleep(50000);
        raise(SIGKILL);
    }
    while (status == FERRY_OK)
        status = c->ops->pull(c, bytes, size, 0, key.key, key.bytes, 0, T);
    CHECK(status == FERRY_EPEER);
    CHECK(strstr(ferry_last_error(), "rank 0"));
    CHECK(ferry__now_ns() - began < INT64_C(2000000000));
    CHECK(c->ops->barrier(c, T) == FERRY_EPEER);
    free(bytes);
    return 0;
}

static void killed_exposer_is_named(void **state)
{
    (void)state;
    if (maker->no_pull)
        skip();
    assert_int_equal(run_ranks(2, 4096, killed_pull_body, 1), 0);
}

/* Ranks may be threads of one process as well. */
typedef struct threaded {
    comm_group *group;
    int32_t rank;
    int rc;
} threaded;

static void *thread_rank(void *arg)
{
    threaded *t = arg;
    ferry__comm *c = NULL;

    t->rc = 1;
    if (maker->open(t->group, t->rank, &c) == FERRY_OK)
        t->rc = mixed_body(c);
    if (t->rc == 0 && !maker->no_pull)
        t->rc = pull_body(c);
    ferry__comm_close(&c);
    return NULL;
}

static void ranks_may_be_threads(void **state)
{
    pthread_t threads[3];
    threaded t[3];
    comm_group group;

    (void)state;
    assert_int_equal(maker->make(&group, 3, 4096), FERRY_OK);
    together_begin();
    for (int32_t i = 0; i < 3; i++) {
        t[i] = (threaded){&group, i, 1};
        assert_int_equal(
            ferry__thread_start(&threads[i], "rank", thread_rank, &t[i]),
            FERRY_OK);
    }
    for (int i = 0; i < 3; i++) {
        pthread_join(threads[i], NULL);
        assert_int_equal(t[i].rc, 0);
    }
    maker->drop(&group);
}

/* Not a bound, a figure: what one decode step pays per layer. */
static int latency_body(ferry__comm *c)
{
    static float x[576];
    int64_t began = ferry__now_ns();
    double us;

    for (int i = 0; i < 2000; i++)
        CHECK(c->ops->all_reduce(c, x, 576, FERRY_DTYPE_F32, FERRY__REDUCE_SUM,
                                 T) == FERRY_OK);
    us = (double)(ferry__now_ns() - began) / 2000 / 1000;
    if (c->rank == 0)
        printf("all-reduce of 2304 bytes, %d ranks: %.1f us\n", c->world_size,
               us);
    return 0;
}

static void small_all_reduce_is_quick(void **state)
{
    (void)state;
    assert_int_equal(run_ranks(2, 0, latency_body, 0), 0);
    assert_int_equal(run_ranks(3, 0, latency_body, 0), 0);
}

int comm_cases_run(const comm_maker *m)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bodies_hold_at_every_world_size),
        cmocka_unit_test(large_all_reduce_is_exact),
        cmocka_unit_test(killed_rank_is_named_and_ends_the_group),
        cmocka_unit_test(killed_root_is_named),
        cmocka_unit_test(timeout_names_operation_rank_and_bound),
        cmocka_unit_test(a_rank_that_is_late_is_told_of),
        cmocka_unit_test(abort_wakes_all),
        cmocka_unit_test(different_operations_are_refused),
        cmocka_unit_test(exposed_memory_is_pulled_without_a_call),
        cmocka_unit_test(wrong_pulls_are_refused),
        cmocka_unit_test(killed_exposer_is_named),
        cmocka_unit_test(ranks_may_be_threads),
        cmocka_unit_test(small_all_reduce_is_quick),
    };

    const struct CMUnitTest moves[] = {
        cmocka_unit_test(bodies_hold_at_every_world_size),
        cmocka_unit_test(large_all_reduce_is_exact),
        cmocka_unit_test(exposed_memory_is_pulled_without_a_call),
    };

    maker = m;
    if (m->moves_only)
        return cmocka_run_group_tests_name(m->name, moves, NULL, NULL);
    return cmocka_run_group_tests_name(m->name, tests, NULL, NULL);
}
