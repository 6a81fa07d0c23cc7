/* SPDX-License-Identifier: Apache-2.0 */
/* What every stream must do, with real processes. Bytes are checked against
 * a function of round, buffer and place alone.
 * Invariant: no wait here may need its bound of ten seconds. */
#include "harness/stream_cases.h"

#include "base/clock.h"
#include "harness/together.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#define T 10000 /* ms: no wait here may need it */

typedef int (*body_fn)(ferry__comm *c, ferry__stream *s);

/* 0, or the line of the first check that failed. */
#define CHECK(expr)                                                            \
    do {                                                                       \
        if (!(expr)) {                                                         \
            fprintf(stderr, "rank %d: %s: %s\n", c->rank, #expr,               \
                    ferry_last_error());                                       \
            return __LINE__ % 250 + 1;                                         \
        }                                                                      \
    } while (0)

static const stream_maker *maker;
static ferry__stream_options options;
static int32_t victim; /* the rank that dies or gives up */
static int64_t silence_ms;

/* In memory of all ranks: when the victim's deed was done. */
static _Atomic int64_t *deed_ns;

static int run_one(comm_group *group, int32_t rank, body_fn body)
{
    ferry__comm *c = NULL;
    ferry__stream *s = NULL;
    int rc = 251;

    if (maker->group->open(group, rank, &c) == FERRY_OK &&
        maker->open(c, &options, &s) == FERRY_OK)
        rc = body(c, s);
    else
        fprintf(stderr, "rank %d: %s\n", rank, ferry_last_error());
    ferry__stream_close(&s);
    ferry__comm_close(&c);
    return rc;
}

/* Answers 0 when all returned 0. A rank that was killed counts as good. */
static int run_ranks(int32_t world, body_fn body)
{
    pid_t pids[COMM_WORLD_MAX];
    comm_group group;
    int bad = 0;

    assert_int_equal(maker->group->make(&group, world, 4096), FERRY_OK);
    together_begin();
    *deed_ns = 0;
    for (int32_t r = 0; r < world; r++) {
        pids[r] = fork();
        if (pids[r] == 0) {
            alarm(30);
            _exit(run_one(&group, r, body));
        }
    }
    maker->group->drop(&group);
    for (int32_t r = 0; r < world; r++) {
        int how;

        waitpid(pids[r], &how, 0);
        if (WIFSIGNALED(how) && WTERMSIG(how) == SIGKILL)
            continue;
        if (how != 0) {
            print_message("%s: rank %d of %d ended with %d\n", maker->name, r,
                          world, how);
            bad = 1;
        }
    }
    return bad;
}

static void wish(int32_t root, int32_t n_buffers, uint64_t buffer_bytes)
{
    options = (ferry__stream_options){.root = root,
                                      .n_buffers = n_buffers,
                                      .buffer_bytes = buffer_bytes,
                                      .timeout_ms = T,
                                      .no_progress_ms = silence_ms};
}

static int32_t smallest_world(void)
{
    return maker->world_min > 1 ? maker->world_min : 1;
}

/* ---- bytes ---- */

static unsigned char byte_of(uint64_t round, uint64_t buffer, size_t i)
{
    uint64_t x = (round * 1000 + buffer + 1) * 0x9e3779b97f4a7c15u +
                 i * 0xbf58476d1ce4e5b9u;

    return (unsigned char)(x >> 56 ^ x >> 23);
}

/* Sizes that are the same on all ranks: pieces of a step that fits nothing. */
static size_t step_of(size_t i, size_t most)
{
    static const size_t steps[] = {1, 97, 4096, 70001, 1 << 20, 333333};
    size_t step = steps[i % (sizeof(steps) / sizeof(steps[0]))];

    return step < most ? step : most;
}

static int make_round(ferry__comm *c, ferry__stream *s, uint64_t round,
                      const uint64_t *sizes, size_t n)
{
    size_t turns = round;

    CHECK(s->ops->begin(s, sizes, n) == FERRY_OK);
    for (size_t k = 0; k < n; k++) {
        for (size_t at = 0; at < sizes[k];) {
            size_t room = 0, step;
            void *out = NULL, *again = NULL;

            CHECK(s->ops->reserve(s, &out, &room) == FERRY_OK);
            CHECK(room >= 1 && room <= sizes[k] - at);
            CHECK(s->ops->reserve(s, &again, &room) == FERRY_OK);
            CHECK(again == out);
            step = step_of(turns++, room);
            for (size_t i = 0; i < step; i++)
                ((unsigned char *)out)[i] = byte_of(round, k, at + i);
            CHECK(s->ops->commit(s, 0) == FERRY_OK);
            CHECK(s->ops->commit(s, step) == FERRY_OK);
            at += step;
        }
    }
    CHECK(s->ops->end(s) == FERRY_OK);
    return 0;
}

static int use_round(ferry__comm *c, ferry__stream *s, uint64_t round,
                     const uint64_t *sizes, size_t n)
{
    size_t turns = round + (size_t)c->rank;

    CHECK(s->ops->begin(s, sizes, n) == FERRY_OK);
    for (size_t k = 0; k < n; k++) {
        for (size_t at = 0; at < sizes[k];) {
            const void *bytes = NULL;
            size_t there = 0, step;

            CHECK(s->ops->peek(s, &bytes, &there) == FERRY_OK);
            CHECK(there >= 1 && there <= sizes[k] - at);
            step = step_of(turns++, there);
            for (size_t i = 0; i < step; i++)
                CHECK(((const unsigned char *)bytes)[i] ==
                      byte_of(round, k, at + i));
            CHECK(s->ops->release(s, step) == FERRY_OK);
            at += step;
        }
    }
    CHECK(s->ops->end(s) == FERRY_OK);
    return 0;
}

static int one_round(ferry__comm *c, ferry__stream *s, uint64_t round,
                     const uint64_t *sizes, size_t n)
{
    return c->rank == options.root ? make_round(c, s, round, sizes, n)
                                   : use_round(c, s, round, sizes, n);
}

/* Empty buffers at every place, buffers of one byte and of the bound. */
static int rounds_body(ferry__comm *c, ferry__stream *s)
{
    uint64_t most = options.buffer_bytes, total = 0;
    const uint64_t sizes[] = {0,    most, 1, 0, 0,        most - 1,
                              4097, 33,   0, 5, most / 2, 0};
    const uint64_t empty[] = {0, 0, 0};

    if (maker->path)
        CHECK(c->world_size == 1 || strcmp(s->path, maker->path) == 0);
    for (uint64_t round = 0; round < 6; round++) {
        int rc = one_round(c, s, round, sizes, 12 - (size_t)(round & 3));

        if (rc)
            return rc;
        CHECK(one_round(c, s, 0, empty, 3) == 0);
        CHECK(one_round(c, s, 0, NULL, 0) == 0);
        CHECK(c->ops->barrier(c, T) == FERRY_OK);
        for (size_t i = 0; i < 12 - (round & 3); i++)
            total += sizes[i];
    }
    CHECK(s->bytes == total);
    CHECK(s->peak_bytes <= (uint64_t)options.n_buffers * (most + 4096));
    return 0;
}

static void every_byte_arrives_in_every_round(void **state)
{
    (void)state;
    for (int32_t world = smallest_world(); world <= COMM_WORLD_MAX; world++) {
        for (int32_t root = 0; root < world; root += 1 + world / 3) {
            wish(root, 2, 100000);
            assert_int_equal(run_ranks(world, rounds_body), 0);
        }
        wish(0, 1, 1200000);
        assert_int_equal(run_ranks(world, rounds_body), 0);
        wish(world - 1, 3, 5000);
        assert_int_equal(run_ranks(world, rounds_body), 0);
    }
}

/* Many small rounds, one after the other, with a rank that lags. */
static int many_body(ferry__comm *c, ferry__stream *s)
{
    for (uint64_t round = 0; round < 200; round++) {
        const uint64_t sizes[] = {round % 7, 1 + round * 13 % 900, round % 2};
        int rc;

        if (round % 16 == (uint64_t)c->rank)
            usleep(700);
        rc = one_round(c, s, round, sizes, 3);
        if (rc)
            return rc;
    }
    return 0;
}

static void a_stream_lasts_for_many_rounds(void **state)
{
    (void)state;
    wish(0, 2, 1000);
    for (int32_t world = smallest_world(); world <= COMM_WORLD_MAX; world++)
        assert_int_equal(run_ranks(world, many_body), 0);
}

/* ---- failures ---- */

static ferry_status refuse_after(void *arg, const char *what)
{
    const int64_t *at_ns = arg;

    if (ferry__now_ns() < *at_ns)
        return FERRY_OK;
    *deed_ns = ferry__now_ns();
    return ferry_fail(FERRY_ETIMEOUT, "the owner had enough of %s", what);
}

/* Streams pieces for ever; in its `deadly` piece the rank is killed. */
static ferry_status stream_on(ferry__comm *c, ferry__stream *s, int deadly)
{
    const uint64_t sizes[] = {60000, 60000, 60000, 60000};

    for (;;) {
        ferry_status status = s->ops->begin(s, sizes, 4);
        size_t left = 240000;

        while (status >= 0 && left > 0) {
            bool root = c->rank == options.root;
            const void *in;
            size_t n = 0;
            void *out;

            status =
                root ? s->ops->reserve(s, &out, &n) : s->ops->peek(s, &in, &n);
            if (status >= 0 && --deadly == 0) {
                *deed_ns = ferry__now_ns();
                raise(SIGKILL);
            }
            if (status >= 0)
                status = root ? s->ops->commit(s, n) : s->ops->release(s, n);
            left -= n;
        }
        if (status >= 0)
            status = s->ops->end(s);
        if (status < 0)
            return status;
    }
}

/* Says what a failure after the deed must be like. */
static int check_failure(ferry__comm *c, ferry__stream *s, ferry_status status,
                         int64_t bound_ms)
{
    int64_t now = ferry__now_ns();
    const uint64_t sizes[] = {1};

    CHECK(status < 0);
    CHECK(*deed_ns != 0);
    if (now - *deed_ns >= bound_ms * 1000000)
        fprintf(stderr, "rank %d took %.1f ms: %s\n", c->rank,
                (double)(now - *deed_ns) / 1e6, ferry_last_error());
    CHECK(now - *deed_ns < bound_ms * 1000000);
    /* Every later call fails alike. */
    CHECK(s->ops->begin(s, sizes, 1) == status);
    CHECK(s->ops->end(s) == status);
    return 0;
}

/* One rank says nothing until the others are through; the owner of another,
 * which waits for it, has enough. That ends it for all. */
static int check_body(ferry__comm *c, ferry__stream *s)
{
    int64_t at_ns = ferry__now_ns() + INT64_C(50000000);
    int32_t silent =
        victim == options.root ? (victim + 1) % c->world_size : options.root;
    ferry_status status;
    int rc;

    if (c->rank == victim) {
        c->check = refuse_after;
        c->check_arg = &at_ns;
    } else if (c->rank == silent) {
        together_await(c->world_size - 1);
    }
    status = stream_on(c, s, 0);
    rc = check_failure(c, s, status, c->rank == silent ? 4000 : 3000);
    if (c->rank == victim)
        CHECK(strstr(ferry_last_error(), "the owner had enough"));
    together_end(c->world_size);
    return rc;
}

/* As above with no owner that asks: the bound on silence ends it. */
static int silent_body(ferry__comm *c, ferry__stream *s)
{
    int64_t began = ferry__now_ns();
    ferry_status status;

    *deed_ns = began;
    if (c->rank == victim)
        together_await(c->world_size - 1);
    status = stream_on(c, s, 0);
    CHECK(status == FERRY_ENOPROGRESS || status == FERRY_ETIMEOUT ||
          status == FERRY_EPEER || status == FERRY_ECANCELED);
    CHECK(strstr(ferry_last_error(), "rank "));
    CHECK(c->rank == victim || ferry__now_ns() - began < INT64_C(1100000000));
    together_end(c->world_size);
    return 0;
}

static int killed_body(ferry__comm *c, ferry__stream *s)
{
    ferry_status status = stream_on(c, s, c->rank == victim ? 55 : 0);
    char name[24];
    int rc;

    snprintf(name, sizeof(name), "rank %d ", victim);
    CHECK(status == FERRY_EPEER);
    CHECK(strstr(ferry_last_error(), maker->names_the_first ? "rank " : name));
    rc = check_failure(c, s, status, maker->death_ms);
    together_end(c->world_size - 1);
    return rc;
}

static int abort_body(ferry__comm *c, ferry__stream *s)
{
    ferry_status status;
    int rc;

    if (c->rank == victim) {
        usleep(30000);
        *deed_ns = ferry__now_ns();
        c->ops->abort(c);
    }
    status = stream_on(c, s, 0);
    CHECK(status == FERRY_ECANCELED || status == FERRY_EPEER);
    rc = check_failure(c, s, status, 3000);
    together_end(c->world_size);
    return rc;
}

static int left_body(ferry__comm *c, ferry__stream *s)
{
    const uint64_t sizes[] = {5000, 5000};
    ferry_status status;

    CHECK(one_round(c, s, 7, sizes, 2) == 0);
    CHECK(c->ops->barrier(c, T) == FERRY_OK);
    *deed_ns = ferry__now_ns();
    if (c->rank == victim) {
        usleep(20000); /* the others wait for it by then */
        CHECK(s->ops->begin(s, sizes, 2) == FERRY_OK);
        return 0; /* and closes in the middle of the round */
    }
    status = stream_on(c, s, 0);
    return check_failure(c, s, status, 4000);
}

static void fail_in_all_places(body_fn body)
{
    for (int32_t world = 2; world <= COMM_WORLD_MAX; world++) {
        if (world < maker->world_min ||
            (maker->fails_in > 0 && world != maker->fails_in))
            continue;
        for (victim = 0; victim<world; victim += world> 2 ? 2 : 1) {
            wish(world == 4 ? 1 : 0, 2, 60000);
            assert_int_equal(run_ranks(world, body), 0);
        }
    }
}

static void an_owner_that_gives_up_ends_it_for_all(void **state)
{
    (void)state;
    fail_in_all_places(check_body);
}

static void a_silent_rank_is_not_waited_for(void **state)
{
    (void)state;
    silence_ms = 100;
    fail_in_all_places(silent_body);
    silence_ms = 0;
}

static void a_killed_rank_is_named_by_all(void **state)
{
    (void)state;
    fail_in_all_places(killed_body);
}

static void an_abort_ends_it_for_all(void **state)
{
    (void)state;
    fail_in_all_places(abort_body);
}

static void closing_within_a_round_ends_it_for_all(void **state)
{
    (void)state;
    fail_in_all_places(left_body);
}

/* ---- waits ---- */

static void add_wait(void *arg, int32_t peer, const char *address,
                     int64_t from_ns)
{
    int64_t *waits = arg;

    if (peer >= 0 && peer < COMM_WORLD_MAX && address)
        waits[peer] += ferry__now_ns() - from_ns;
}

/* More than sockets and buffers hold between two ranks. */
#define LONG_BUFFERS 64
#define LONG_BYTES   ((size_t)512 << 10)

static int one_long_round(ferry__comm *c, ferry__stream *s)
{
    size_t left = LONG_BUFFERS * LONG_BYTES;
    uint64_t sizes[LONG_BUFFERS];

    for (size_t i = 0; i < LONG_BUFFERS; i++)
        sizes[i] = LONG_BYTES;
    CHECK(s->ops->begin(s, sizes, LONG_BUFFERS) == FERRY_OK);
    while (left > 0) {
        const void *in;
        size_t n = 0;
        void *out;

        if (c->rank == victim && left == LONG_BUFFERS * LONG_BYTES)
            usleep(300000);
        if (c->rank == options.root) {
            CHECK(s->ops->reserve(s, &out, &n) == FERRY_OK);
            memset(out, 1, n);
            CHECK(s->ops->commit(s, n) == FERRY_OK);
        } else {
            CHECK(s->ops->peek(s, &in, &n) == FERRY_OK);
            CHECK(s->ops->release(s, n) == FERRY_OK);
        }
        left -= n;
    }
    CHECK(s->ops->end(s) == FERRY_OK);
    return 0;
}

/* The root and rank 1 are next to each other wherever ranks are. */
static int waited_body(ferry__comm *c, ferry__stream *s)
{
    int64_t waits[COMM_WORLD_MAX] = {0};
    int rc;

    CHECK(c->ops->barrier(c, T) == FERRY_OK);
    c->check_arg = waits;
    c->waited = add_wait;
    rc = one_long_round(c, s);
    c->waited = NULL;
    CHECK(rc == 0);
    if (c->rank == 1 - victim)
        CHECK(waits[victim] > INT64_C(100000000));
    return 0;
}

static void a_slow_rank_is_told_of(void **state)
{
    int32_t world = smallest_world() < 2 ? 2 : smallest_world();

    (void)state;
    wish(0, 2, LONG_BYTES);
    for (victim = 0; victim < 2; victim++)
        assert_int_equal(run_ranks(world, waited_body), 0);
}

/* ---- misuse ---- */

static int misuse_body(ferry__comm *c, ferry__stream *s)
{
    const uint64_t sizes[] = {100}, large[] = {5, 101};
    const void *in = NULL;
    void *out = NULL;
    size_t n = 0;

    CHECK(s->ops->begin(s, large, 2) == FERRY_EINVAL);
    CHECK(s->ops->end(s) == FERRY_EORDER);
    CHECK(s->ops->begin(s, sizes, 1) == FERRY_OK);
    CHECK(s->ops->begin(s, sizes, 1) == FERRY_EORDER);
    CHECK(s->ops->end(s) == FERRY_EORDER);
    if (c->rank == options.root) {
        CHECK(s->ops->peek(s, &in, &n) == FERRY_EORDER);
        CHECK(s->ops->reserve(s, &out, &n) == FERRY_OK);
        CHECK(s->ops->commit(s, n + 1) == FERRY_EINVAL);
        memset(out, 3, 100);
        CHECK(s->ops->commit(s, 100) == FERRY_OK);
        CHECK(s->ops->reserve(s, &out, &n) == FERRY_EORDER);
    } else {
        CHECK(s->ops->reserve(s, &out, &n) == FERRY_EORDER);
        CHECK(s->ops->peek(s, &in, &n) == FERRY_OK);
        CHECK(s->ops->release(s, n + 1) == FERRY_EINVAL);
        CHECK(s->ops->release(s, n) == FERRY_OK);
        CHECK(s->ops->peek(s, &in, &n) == FERRY_EORDER);
    }
    CHECK(s->ops->end(s) == FERRY_OK);
    return 0;
}

static int refused_body(ferry__comm *c, ferry__stream *s)
{
    ferry__stream_options o = options;
    ferry__stream *other = NULL;

    (void)s;
    o.root = c->world_size;
    CHECK(ferry__stream_open(c, &o, &other) == FERRY_EINVAL);
    o = options;
    o.n_buffers = 0;
    CHECK(ferry__stream_open(c, &o, &other) == FERRY_EINVAL);
    o = options;
    o.buffer_bytes = UINT64_MAX;
    CHECK(ferry__stream_open(c, &o, &other) == FERRY_EOVERFLOW);
    return 0;
}

static void misuse_is_refused_and_harms_nothing(void **state)
{
    (void)state;
    wish(0, 2, 100);
    assert_int_equal(
        run_ranks(smallest_world() < 2 ? 2 : smallest_world(), misuse_body), 0);
    assert_int_equal(run_ranks(smallest_world(), refused_body), 0);
}

int stream_cases_run(const stream_maker *m)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_byte_arrives_in_every_round),
        cmocka_unit_test(a_stream_lasts_for_many_rounds),
        cmocka_unit_test(an_owner_that_gives_up_ends_it_for_all),
        cmocka_unit_test(a_silent_rank_is_not_waited_for),
        cmocka_unit_test(a_killed_rank_is_named_by_all),
        cmocka_unit_test(an_abort_ends_it_for_all),
        cmocka_unit_test(closing_within_a_round_ends_it_for_all),
        cmocka_unit_test(a_slow_rank_is_told_of),
        cmocka_unit_test(misuse_is_refused_and_harms_nothing),
    };

    maker = m;
    deed_ns = mmap(NULL, sizeof(*deed_ns), PROT_READ | PROT_WRITE,
                   MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (deed_ns == MAP_FAILED)
        return 1;
    print_message("streams: %s\n", m->name);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
