/* SPDX-License-Identifier: Apache-2.0 */
/* ctest: timeout=120 */
/* Groups that do wrong as they are told: each rule over each provider, and
 * that what no rule touches is as it is without the wrapper. Ranks are
 * processes, each with the same setting, as in a real run. */
#include "comm/comm_fault_rules.h"

#include "base/clock.h"
#include "base/config.h"
#include "comm/stream.h"
#include "harness/stream_cases.h"
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

#define T     5000
#define SOON  120 /* a bound that a lost message runs into */
#define BYTES 100000

/* ---- groups ---- */

static const comm_maker *const makers[] = {&stream_group_local,
                                           &stream_group_own_hosts};
#define N_MAKERS (sizeof(makers) / sizeof(makers[0]))

/* ---- ranks as processes ---- */

typedef int (*body_fn)(ferry__comm *c);

static int rank_main(const comm_maker *m, comm_group *g, int32_t rank,
                     const char *fault, body_fn body)
{
    ferry__comm *c = NULL;
    int rc = 251;

    alarm(30);
    if (ferry__config_set("fault", fault) == FERRY_OK &&
        m->open(g, rank, &c) == FERRY_OK &&
        ferry__comm_fault_wrap(&c) == FERRY_OK)
        rc = body(c);
    else
        fprintf(stderr, "rank %d: %s\n", (int)rank, ferry_last_error());
    ferry__comm_close(&c);
    return rc;
}

/* Every rank ends well, but the one that is to be killed. */
static void run_over(const comm_maker *m, int32_t world, const char *fault,
                     body_fn body, int32_t killed)
{
    pid_t pids[COMM_WORLD_MAX];
    comm_group g = {0};
    int bad = 0;

    assert_int_equal(m->make(&g, world, 4096), FERRY_OK);
    together_begin();
    for (int32_t r = 0; r < world; r++) {
        pids[r] = fork();
        if (pids[r] == 0)
            _exit(rank_main(m, &g, r, fault, body));
    }
    m->drop(&g);
    for (int32_t r = 0; r < world; r++) {
        int how;

        waitpid(pids[r], &how, 0);
        if (r == killed ? !WIFSIGNALED(how) || WTERMSIG(how) != SIGKILL
                        : how != 0) {
            print_error("%s: %s: rank %d ended with %#x\n", m->name, fault,
                        (int)r, (unsigned)how);
            bad++;
        }
    }
    assert_int_equal(bad, 0);
}

static void run(int32_t world, const char *fault, body_fn body, int32_t killed)
{
    for (size_t i = 0; i < N_MAKERS; i++)
        run_over(makers[i], world, fault, body, killed);
}

/* The exit code is the line that did not hold. */
#define HOLD(condition)                                                        \
    do {                                                                       \
        if (!(condition)) {                                                    \
            fprintf(stderr, "line %d: %s: %s\n", __LINE__, #condition,         \
                    ferry_last_error());                                       \
            return 1;                                                          \
        }                                                                      \
    } while (0)

static unsigned char byte_at(size_t i)
{
    return (unsigned char)(i * 31 + (i >> 8));
}

static void fill(unsigned char *bytes, size_t n)
{
    for (size_t i = 0; i < n; i++)
        bytes[i] = byte_at(i);
}

/* Places that differ; *out_at is the first, *out_bits what differs there. */
static size_t differences(const unsigned char *bytes, size_t n, size_t *out_at,
                          int *out_bits)
{
    size_t count = 0;

    for (size_t i = n; i-- > 0;) {
        if (bytes[i] == byte_at(i))
            continue;
        *out_at = i;
        *out_bits = __builtin_popcount(bytes[i] ^ byte_at(i));
        count++;
    }
    return count;
}

/* ---- reading ---- */

static void rules_are_read_and_what_is_none_is_named(void **state)
{
    static const char *const good[] = {
        "comm:0->1:delay=5ms",     "comm:*->*:stall@0=1s",
        "comm:1->0:corrupt@7",     "comm:0->*:drop@sent:4096",
        "comm:12->3:short@1",      "comm:0->1:cut@0",
        "comm:0->1:fail@sent:0",   "comm:*->2:die@99999999999",
        "seed=7,comm:0->1:stop@1", "corrupt@5,delay=1"};
    static const char *const bad[] = {"comm:0->1",
                                      "comm:0-1:drop@1",
                                      "comm:->1:drop@1",
                                      "comm:0->1:drop",
                                      "comm:0->1:delay@1=5",
                                      "comm:0->1:delay",
                                      "comm:0->1:drop@1=5",
                                      "comm:0->1:lose@1",
                                      "comm:0->1:drop@x",
                                      "comm:0->1:die@?",
                                      "comm:0->1:stall@1",
                                      "comm:-1->1:drop@1",
                                      "comm:0->1:tear@1=5",
                                      "comm:x",
                                      "comm:0->1:drop@recv:1"};
    ferry__comm_rules rules;

    (void)state;
    for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++) {
        assert_int_equal(ferry__comm_rules_parse(good[i], &rules), FERRY_OK);
        assert_int_equal(rules.n, strstr(good[i], "comm:") != NULL);
    }
    assert_int_equal(
        ferry__comm_rules_parse("seed=9,comm:3->*:stall@sent:12=2s", &rules),
        FERRY_OK);
    assert_int_equal(rules.seed, 9);
    assert_int_equal(rules.rules[0].kind, FERRY__COMM_STALL);
    assert_int_equal(rules.rules[0].from, 3);
    assert_int_equal(rules.rules[0].to, FERRY__ANY_RANK);
    assert_true(rules.rules[0].sent);
    assert_int_equal(rules.rules[0].at, 12);
    assert_int_equal(rules.rules[0].ms, 2000);
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        assert_int_equal(ferry__comm_rules_parse(bad[i], &rules), FERRY_EINVAL);
        assert_non_null(strstr(ferry_last_error(), bad[i]));
    }
}

static void without_rules_a_group_is_what_it_was(void **state)
{
    ferry__comm *c = NULL, *before;
    comm_group g = {0};

    (void)state;
    assert_int_equal(makers[0]->make(&g, 1, 4096), FERRY_OK);
    assert_int_equal(makers[0]->open(&g, 0, &c), FERRY_OK);
    before = c;
    assert_int_equal(ferry__config_set("fault", "corrupt@1"), FERRY_OK);
    assert_int_equal(ferry__comm_fault_wrap(&c), FERRY_OK);
    assert_ptr_equal(c, before);
    assert_int_equal(ferry__config_set("fault", "comm:0->1:x@1"), FERRY_OK);
    assert_int_equal(ferry__comm_fault_wrap(&c), FERRY_EINVAL);
    assert_ptr_equal(c, before);
    assert_int_equal(ferry__config_set("fault", ""), FERRY_OK);
    ferry__comm_close(&c);
    makers[0]->drop(&g);
}

/* ---- corrupt ---- */

/* At the receiver: its own copy alone. */
static int corrupt_at_one(ferry__comm *c)
{
    static unsigned char bytes[BYTES];
    size_t at = 0;
    int bits = 0;

    if (c->rank == 0)
        fill(bytes, BYTES);
    HOLD(c->ops->broadcast(c, bytes, BYTES, 0, T) == FERRY_OK);
    if (c->rank != 1) {
        HOLD(differences(bytes, BYTES, &at, &bits) == 0);
        return 0;
    }
    HOLD(differences(bytes, BYTES, &at, &bits) == 1);
    HOLD(at == 77777 && bits == 1);
    return 0;
}

static void a_bit_flips_at_one_receiver(void **state)
{
    (void)state;
    run(3, "comm:0->1:corrupt@77777", corrupt_at_one, -1);
}

/* At the sender: what it holds stays right, all receivers get it wrong. */
static int corrupt_for_all(ferry__comm *c)
{
    static unsigned char bytes[BYTES];
    size_t at = 0, n;
    int bits = 0;

    if (c->rank == 0)
        fill(bytes, BYTES);
    HOLD(c->ops->broadcast(c, bytes, BYTES, 0, T) == FERRY_OK);
    n = differences(bytes, BYTES, &at, &bits);
    HOLD(n == (c->rank == 0 ? 0 : 1));
    HOLD(c->rank == 0 || (at == 5 && bits == 1));
    /* Once: the next one is right. */
    if (c->rank == 0)
        HOLD(c->ops->send(c, bytes, BYTES, 1, T) == FERRY_OK);
    else if (c->rank == 1)
        HOLD(c->ops->recv(c, bytes, BYTES, 0, T) == FERRY_OK);
    HOLD(c->rank == 2 || differences(bytes, BYTES, &at, &bits) == 0);
    return 0;
}

static void a_bit_flips_at_the_sender(void **state)
{
    (void)state;
    run(3, "comm:0->*:corrupt@sent:5", corrupt_for_all, -1);
}

static int corrupt_a_send(ferry__comm *c)
{
    static unsigned char bytes[64];
    size_t at = 0;
    int bits = 0;

    if (c->rank == 0) {
        fill(bytes, 64);
        HOLD(c->ops->send(c, bytes, 40, 1, T) == FERRY_OK);
        HOLD(c->ops->send(c, bytes + 40, 24, 1, T) == FERRY_OK);
        HOLD(differences(bytes, 64, &at, &bits) == 0);
        return 0;
    }
    HOLD(c->ops->recv(c, bytes, 40, 0, T) == FERRY_OK);
    HOLD(c->ops->recv(c, bytes + 40, 24, 0, T) == FERRY_OK);
    HOLD(differences(bytes, 64, &at, &bits) == 1);
    HOLD(at == 50 && bits == 1);
    return 0;
}

/* Places go on from one message of the pair to the next. */
static void places_count_over_messages(void **state)
{
    (void)state;
    run(2, "comm:0->1:corrupt@50", corrupt_a_send, -1);
    run(2, "comm:0->1:corrupt@sent:50", corrupt_a_send, -1);
}

/* ---- lost ---- */

static bool in_bound(int64_t from_ns)
{
    int64_t ms = (ferry__now_ns() - from_ns) / 1000000;

    return ms >= SOON - 20 && ms < SOON + 2000;
}

static int lose_a_send(ferry__comm *c)
{
    int64_t x = 7, from_ns = ferry__now_ns();

    if (c->rank == 0) {
        HOLD(c->ops->send(c, &x, sizeof(x), 1, T) == FERRY_OK);
        together_end(c->world_size); /* alive until the bound is met */
        return 0;
    }
    HOLD(c->ops->recv(c, &x, sizeof(x), 0, SOON) == FERRY_ETIMEOUT);
    HOLD(in_bound(from_ns));
    HOLD(strstr(ferry_last_error(), "rank 0"));
    together_end(c->world_size);
    return 0;
}

static void a_lost_message_meets_the_others_bound(void **state)
{
    (void)state;
    run(2, "comm:0->1:drop@3", lose_a_send, -1);
    run(2, "comm:0->1:drop@sent:3", lose_a_send, -1);
}

static int lose_a_broadcast(ferry__comm *c)
{
    int64_t x = 7, from_ns = ferry__now_ns();

    if (c->rank == 0) {
        HOLD(c->ops->broadcast(c, &x, sizeof(x), 0, T) == FERRY_OK);
        together_end(c->world_size);
        return 0;
    }
    HOLD(c->ops->broadcast(c, &x, sizeof(x), 0, SOON) == FERRY_ETIMEOUT);
    HOLD(in_bound(from_ns));
    together_end(c->world_size);
    return 0;
}

static void a_lost_broadcast_meets_the_others_bound(void **state)
{
    (void)state;
    run(3, "comm:0->*:drop@sent:0", lose_a_broadcast, -1);
}

/* After a failure no later call works. */
static int cut_the_pair(ferry__comm *c)
{
    int64_t x = c->rank, from_ns;

    if (c->rank == 0) {
        HOLD(c->ops->send(c, &x, sizeof(x), 1, T) == FERRY_OK);
        HOLD(c->ops->send(c, &x, sizeof(x), 1, T) == FERRY_OK);
        together_end(c->world_size);
        return 0;
    }
    HOLD(c->ops->recv(c, &x, sizeof(x), 0, T) == FERRY_OK);
    from_ns = ferry__now_ns();
    HOLD(c->ops->recv(c, &x, sizeof(x), 0, SOON) == FERRY_ETIMEOUT);
    HOLD(in_bound(from_ns));
    HOLD(c->ops->recv(c, &x, sizeof(x), 0, SOON) == FERRY_ECANCELED);
    together_end(c->world_size);
    return 0;
}

static void a_cut_pair_stays_cut(void **state)
{
    (void)state;
    run(2, "comm:0->1:cut@8", cut_the_pair, -1);
}

/* The other direction of the pair is gone as well; the third rank is not
 * concerned. */
static int cut_both_ways(ferry__comm *c)
{
    int64_t x = c->rank;

    if (c->rank == 1) {
        HOLD(c->ops->send(c, &x, sizeof(x), 0, T) == FERRY_OK); /* lost */
        HOLD(c->ops->send(c, &x, sizeof(x), 2, T) == FERRY_OK);
    } else if (c->rank == 0) {
        HOLD(c->ops->recv(c, &x, sizeof(x), 1, SOON) == FERRY_ETIMEOUT);
    } else {
        HOLD(c->ops->recv(c, &x, sizeof(x), 1, T) == FERRY_OK && x == 1);
    }
    together_end(c->world_size);
    return 0;
}

static void a_cut_is_of_one_pair_and_both_ways(void **state)
{
    (void)state;
    run(3, "comm:1->0:cut@0", cut_both_ways, -1);
    run(3, "comm:1->0:cut@sent:0", cut_both_ways, -1);
}

static int lose_the_end(ferry__comm *c)
{
    static unsigned char bytes[64];
    size_t at = 0;
    int bits = 0;

    if (c->rank == 0)
        fill(bytes, 64);
    HOLD(c->ops->broadcast(c, bytes, 64, 0, T) == FERRY_OK);
    if (c->rank == 2)
        HOLD(differences(bytes, 40, &at, &bits) == 0 && bytes[40] == 0 &&
             bytes[63] == 0);
    else
        HOLD(differences(bytes, 64, &at, &bits) == 0);
    return 0;
}

static void a_short_message_lacks_its_end(void **state)
{
    (void)state;
    run(3, "comm:0->2:short@40", lose_the_end, -1);
}

static int miss_a_barrier(ferry__comm *c)
{
    int64_t from_ns = ferry__now_ns();

    HOLD(c->ops->barrier(c, SOON) == FERRY_ETIMEOUT);
    HOLD(in_bound(from_ns));
    together_end(c->world_size);
    return 0;
}

static void a_rank_that_is_cut_off_fails_a_barrier_for_all(void **state)
{
    (void)state;
    run(3, "comm:1->*:cut@sent:0", miss_a_barrier, -1);
}

/* ---- acts ---- */

static int meet_a_death(ferry__comm *c)
{
    static unsigned char bytes[BYTES];
    int64_t from_ns = ferry__now_ns();
    ferry_status st = FERRY_OK;

    for (int i = 0; st == FERRY_OK && i < 10; i++)
        st = c->ops->broadcast(c, bytes, BYTES, 0, T);
    for (int i = 0; st == FERRY_OK && i < 10; i++)
        st = c->ops->barrier(c, T);
    HOLD(st < 0);
    HOLD(ferry__now_ns() - from_ns < INT64_C(8000000000));
    return 0;
}

static void a_rank_dies_at_its_byte(void **state)
{
    (void)state;
    run(3, "comm:0->1:die@350000", meet_a_death, 1);
    run(3, "comm:0->*:die@sent:350000", meet_a_death, 0);
}

static int fail_once(ferry__comm *c)
{
    int64_t x = 1;

    if (c->rank == 0) {
        HOLD(c->ops->send(c, &x, sizeof(x), 1, T) == FERRY_OK);
        together_end(c->world_size);
        return 0;
    }
    HOLD(c->ops->recv(c, &x, sizeof(x), 0, T) == FERRY_EIO);
    together_end(c->world_size);
    HOLD(strcmp(ferry_last_error(),
                "fault: rank 1 fails while it receives in recv") == 0);
    return 0;
}

static void a_rank_fails_in_words(void **state)
{
    (void)state;
    run(2, "comm:0->1:fail@0", fail_once, -1);
}

static ferry_status give_up(void *arg, const char *what)
{
    const ferry__deadline *d = arg;

    if (ferry__deadline_passed(d))
        return ferry_fail(FERRY_ENOPROGRESS, "enough of %s", what);
    return FERRY_OK;
}

/* J1: who waits looks at its bounds meanwhile. */
static int stall_within_bounds(ferry__comm *c)
{
    ferry__deadline d = ferry__deadline_in(SOON);
    int64_t x = 1, from_ns = ferry__now_ns();

    if (c->rank == 0) {
        HOLD(c->ops->send(c, &x, sizeof(x), 1, T) == FERRY_OK);
        together_end(c->world_size);
        return 0;
    }
    c->check = give_up;
    c->check_arg = &d;
    HOLD(c->ops->recv(c, &x, sizeof(x), 0, T) == FERRY_ENOPROGRESS);
    HOLD(in_bound(from_ns));
    HOLD(strcmp(ferry_last_error(), "enough of recv") == 0);
    together_end(c->world_size);
    return 0;
}

static void j1_a_stall_is_ended_by_the_owners_check(void **state)
{
    (void)state;
    run(2, "comm:0->1:stall@0=20s", stall_within_bounds, -1);
    run(2, "comm:0->1:drop@0", stall_within_bounds, -1);
}

static int take_longer(ferry__comm *c)
{
    int64_t x = 1, from_ns = ferry__now_ns();

    for (int i = 0; i < 3; i++)
        HOLD(c->ops->broadcast(c, &x, sizeof(x), 0, T) == FERRY_OK);
    HOLD(ferry__now_ns() - from_ns >= INT64_C(280000000) || c->rank != 1);
    return 0;
}

static void a_delay_is_before_every_message(void **state)
{
    (void)state;
    run(2, "comm:0->1:delay=100", take_longer, -1);
}

/* ---- streams ---- */

static const uint64_t sizes[] = {30000, 0, 50000, 20000};

static ferry_status stream_out(ferry__stream *s)
{
    size_t at = 0;

    while (at < BYTES) {
        void *room;
        size_t n;

        FERRY_TRY(s->ops->reserve(s, &room, &n));
        for (size_t i = 0; i < n; i++)
            ((unsigned char *)room)[i] = byte_at(at + i);
        FERRY_TRY(s->ops->commit(s, n));
        at += n;
    }
    return s->ops->end(s);
}

static ferry_status stream_in(ferry__stream *s, unsigned char *bytes)
{
    size_t at = 0;

    while (at < BYTES) {
        const void *piece;
        size_t n;

        FERRY_TRY(s->ops->peek(s, &piece, &n));
        n = n < 7000 ? n : 7000; /* pieces are used up in parts */
        memcpy(bytes + at, piece, n);
        FERRY_TRY(s->ops->release(s, n));
        at += n;
    }
    return s->ops->end(s);
}

static ferry_status run_stream(ferry__comm *c, unsigned char *bytes)
{
    ferry__stream_options o = {.n_buffers = 2,
                               .buffer_bytes = 50000,
                               .timeout_ms = T,
                               .no_progress_ms = 300};
    ferry__stream *s = NULL;
    ferry_status st;

    FERRY_TRY(ferry__stream_open(c, &o, &s));
    st = s->ops->begin(s, sizes, sizeof(sizes) / sizeof(sizes[0]));
    if (st == FERRY_OK)
        st = c->rank == 0 ? stream_out(s) : stream_in(s, bytes);
    ferry__stream_close(&s);
    return st;
}

static int stream_with_a_bit(ferry__comm *c)
{
    static unsigned char bytes[BYTES];
    size_t at = 0;
    int bits = 0;

    HOLD(run_stream(c, bytes) == FERRY_OK);
    if (c->rank == 1) {
        HOLD(differences(bytes, BYTES, &at, &bits) == 1);
        HOLD(at == 44444 && bits == 1);
    } else if (c->rank == 2) {
        HOLD(differences(bytes, BYTES, &at, &bits) == 0);
    }
    return 0;
}

/* Pieces are shared by the ranks of a host: only one sees the wrong bit. */
static void a_bit_of_a_stream_flips_at_one_receiver(void **state)
{
    (void)state;
    run(3, "comm:0->1:corrupt@44444", stream_with_a_bit, -1);
}

static int stream_that_ends(ferry__comm *c)
{
    static unsigned char bytes[BYTES];
    int64_t from_ns = ferry__now_ns();

    /* A provider that cannot know what arrived says that it has left. */
    HOLD(run_stream(c, bytes) < 0 || c->rank == 0);
    HOLD(ferry__now_ns() - from_ns < INT64_C(8000000000));
    return 0;
}

static void a_stream_that_loses_bytes_ends_within_the_bound(void **state)
{
    (void)state;
    run(3, "comm:0->*:drop@sent:44444", stream_that_ends, -1);
    run(3, "comm:0->*:short@sent:44444", stream_that_ends, -1);
}

/* The whole stream fits its buffers: where a host shares its pieces the third
 * rank may have had them all before the second one died. */
static int stream_that_one_leaves(ferry__comm *c)
{
    static unsigned char bytes[BYTES];
    int64_t from_ns = ferry__now_ns();
    ferry_status st = run_stream(c, bytes);
    size_t at = 0;
    int bits = 0;

    HOLD(ferry__now_ns() - from_ns < INT64_C(8000000000));
    HOLD(st < 0 || c->rank == 0 || differences(bytes, BYTES, &at, &bits) == 0);
    return 0;
}

static void a_stream_of_which_a_rank_dies_is_whole_or_fails(void **state)
{
    (void)state;
    run(3, "comm:0->1:die@44444", stream_that_one_leaves, 1);
}

/* ---- rules from a file ---- */

static char path[64];

static void write_rules(const char *text)
{
    FILE *f = fopen(path, "w");

    assert_non_null(f);
    assert_true(fputs(text, f) >= 0);
    fclose(f);
}

/* One process is both ranks, a send at a time: the rules come and go. */
static void rules_come_and_go_with_their_file(void **state)
{
    ferry__comm *a = NULL, *b = NULL;
    int64_t x = 0, sent = 0x1122334455667788;
    comm_group g = {0};
    char setting[80];

    (void)state;
    snprintf(path, sizeof(path), "fault-%d.txt", (int)getpid());
    snprintf(setting, sizeof(setting), "@%s", path);
    assert_int_equal(ferry__config_set("fault", setting), FERRY_OK);
    assert_int_equal(makers[0]->make(&g, 2, 4096), FERRY_OK);
    assert_int_equal(makers[0]->open(&g, 0, &a), FERRY_OK);
    assert_int_equal(makers[0]->open(&g, 1, &b), FERRY_OK);
    assert_int_equal(ferry__comm_fault_wrap(&b), FERRY_OK);
    for (int i = 0; i < 4; i++) {
        if (i == 1 || i == 3)
            write_rules("comm:0->1:corrupt@2");
        if (i == 2)
            write_rules("");
        assert_int_equal(a->ops->send(a, &sent, sizeof(sent), 1, T), FERRY_OK);
        assert_int_equal(b->ops->recv(b, &x, sizeof(x), 0, T), FERRY_OK);
        if (i == 1 || i == 3)
            assert_int_equal(__builtin_popcountll((uint64_t)(x ^ sent)), 1);
        else
            assert_int_equal(x, sent);
    }
    unlink(path);
    assert_int_equal(ferry__config_set("fault", ""), FERRY_OK);
    ferry__comm_close(&a);
    ferry__comm_close(&b);
    makers[0]->drop(&g);
}

/* ---- what no rule touches ---- */

static ferry_status open_wrapped(const comm_maker *m, comm_group *g,
                                 int32_t rank, ferry__comm **out)
{
    FERRY_TRY(ferry__config_set("fault", "comm:99->98:drop@0"));
    FERRY_TRY(m->open(g, rank, out));
    return ferry__comm_fault_wrap(out);
}

static ferry_status open_wrapped_local(comm_group *g, int32_t rank,
                                       ferry__comm **out)
{
    return open_wrapped(makers[0], g, rank, out);
}

static ferry_status open_wrapped_tcp(comm_group *g, int32_t rank,
                                     ferry__comm **out)
{
    return open_wrapped(makers[1], g, rank, out);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rules_are_read_and_what_is_none_is_named),
        cmocka_unit_test(without_rules_a_group_is_what_it_was),
        cmocka_unit_test(a_bit_flips_at_one_receiver),
        cmocka_unit_test(a_bit_flips_at_the_sender),
        cmocka_unit_test(places_count_over_messages),
        cmocka_unit_test(a_lost_message_meets_the_others_bound),
        cmocka_unit_test(a_lost_broadcast_meets_the_others_bound),
        cmocka_unit_test(a_cut_pair_stays_cut),
        cmocka_unit_test(a_cut_is_of_one_pair_and_both_ways),
        cmocka_unit_test(a_short_message_lacks_its_end),
        cmocka_unit_test(a_rank_that_is_cut_off_fails_a_barrier_for_all),
        cmocka_unit_test(a_rank_dies_at_its_byte),
        cmocka_unit_test(a_rank_fails_in_words),
        cmocka_unit_test(j1_a_stall_is_ended_by_the_owners_check),
        cmocka_unit_test(a_delay_is_before_every_message),
        cmocka_unit_test(a_bit_of_a_stream_flips_at_one_receiver),
        cmocka_unit_test(a_stream_that_loses_bytes_ends_within_the_bound),
        cmocka_unit_test(a_stream_of_which_a_rank_dies_is_whole_or_fails),
        cmocka_unit_test(rules_come_and_go_with_their_file),
    };
    comm_maker local = stream_group_local, tcp = stream_group_own_hosts;
    int failed = cmocka_run_group_tests(tests, NULL, NULL);

    local.name = "local, wrapped";
    local.open = open_wrapped_local;
    tcp.name = "tcp, wrapped";
    tcp.open = open_wrapped_tcp;
    tcp.moves_only = true;
    failed += comm_cases_run(&local);
    return failed + comm_cases_run(&tcp);
}
