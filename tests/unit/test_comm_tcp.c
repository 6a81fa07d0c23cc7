/* SPDX-License-Identifier: Apache-2.0 */
/* The tcp group: the cases of every provider, and what only it has. */
#include "comm/tcp.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "base/thread.h"
#include "comm/tcp_tree.h"
#include "harness/tcp_seats.h"

#include <dirent.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#define T TCP_SEATS_MS

static ferry_status open_rank(comm_group *g, int32_t rank, ferry__comm **out)
{
    static const tcp_wishes w = {.hosts = 0};

    return tcp_seats_open(g, rank, &w, out);
}

static ferry_status open_on_two_hosts(comm_group *g, int32_t rank,
                                      ferry__comm **out)
{
    static const tcp_wishes w = {.hosts = 0x6}; /* 0 and 3, 1 and 2 */

    return tcp_seats_open(g, rank, &w, out);
}

/* ---- the tree ---- */

static int depth_of(const ferry__tree *trees, int32_t r)
{
    int d = 0;

    while (trees[r].parent >= 0 && d <= 64) {
        r = trees[r].parent;
        d++;
    }
    return d;
}

/* Every rank is reached once from the root, every other host is entered
 * once, and in a chain the root feeds at most one host besides its own. */
static void check_trees(int32_t world, int32_t root, const uint64_t *hosts,
                        bool chain)
{
    ferry__tree trees[24];
    int entered[24] = {0};

    for (int32_t r = 0; r < world; r++)
        ferry__tree_make(r, world, root, hosts, chain, &trees[r]);
    assert_int_equal(trees[root].parent, -1);
    for (int32_t r = 0; r < world; r++) {
        int remote = 0, local = 0;

        assert_true(depth_of(trees, r) <= world);
        for (int32_t i = 0; i < trees[r].n_children; i++) {
            int32_t child = trees[r].children[i];

            assert_int_equal(trees[child].parent, r);
            if (hosts[child] != hosts[r])
                remote++;
            else
                local++;
        }
        if (chain)
            assert_true(remote <= 1 && local <= 1);
        if (r == root)
            continue;
        assert_true(trees[r].parent >= 0);
        if (hosts[trees[r].parent] != hosts[r])
            entered[hosts[r]]++;
        if (!chain)
            assert_true(depth_of(trees, r) <= 10);
    }
    for (int32_t r = 0; r < world; r++)
        assert_int_equal(entered[hosts[r]], hosts[r] != hosts[root]);
}

static void trees_reach_all_and_enter_each_host_once(void **state)
{
    (void)state;
    for (int32_t world = 1; world <= 24; world++) {
        for (int32_t hosts = 1; hosts <= world; hosts += 1 + hosts / 3) {
            uint64_t ids[24];

            for (int32_t r = 0; r < world; r++)
                ids[r] = (uint64_t)((r * 7 + r / 3) % hosts);
            for (int32_t root = 0; root < world; root += 1 + world / 5) {
                check_trees(world, root, ids, true);
                check_trees(world, root, ids, false);
            }
        }
    }
}

/* ---- bounds ---- */

/* Ranks 0, 2 and 3 are processes that report by their exit; 1 is stopped in
 * the middle of a large broadcast. */
static int broadcast_past_a_stopped_rank(comm_group *g, int32_t rank,
                                         int64_t no_progress_ms, int64_t bound)
{
    tcp_wishes w = {.no_progress_ms = no_progress_ms};
    size_t n = (size_t)24 << 20;
    char *bytes = calloc(1, n);
    ferry__comm *c = NULL;
    ferry_status status;
    int64_t began;

    if (tcp_seats_open(g, rank, &w, &c) < 0)
        return 1;
    if (rank == 1)
        raise(SIGSTOP);
    began = ferry__now_ns();
    status = c->ops->broadcast(c, bytes, n, 0, bound);
    if (ferry__now_ns() - began > INT64_C(2500000000))
        return 2;
    if (rank == 1)
        return 0;
    /* The last in the chain may hear it from the one before. */
    if (status != FERRY_EPEER &&
        status != (no_progress_ms ? FERRY_ENOPROGRESS : FERRY_ETIMEOUT))
        return 3;
    if (!strstr(ferry_last_error(), "rank 1 ")) {
        fprintf(stderr, "rank %d: %s\n", rank, ferry_last_error());
        return 4;
    }
    ferry__comm_close(&c);
    free(bytes);
    return 0;
}

static void stop_one(int64_t no_progress_ms, int64_t bound)
{
    pid_t pids[4];
    comm_group g;

    assert_int_equal(tcp_seats_make(&g, 4, 0), FERRY_OK);
    for (int32_t r = 0; r < 4; r++) {
        pids[r] = fork();
        if (pids[r] == 0) {
            alarm(20);
            _exit(broadcast_past_a_stopped_rank(&g, r, no_progress_ms, bound));
        }
    }
    tcp_seats_drop(&g);
    for (int32_t r = 0; r < 4; r++) {
        int how;

        if (r == 1)
            continue;
        waitpid(pids[r], &how, 0);
        assert_int_equal(how, 0);
    }
    kill(pids[1], SIGKILL);
    waitpid(pids[1], NULL, 0);
}

static void stopped_rank_is_named_within_the_bound(void **state)
{
    (void)state;
    stop_one(0, 500);
}

static void no_progress_ends_a_call_before_its_deadline(void **state)
{
    (void)state;
    stop_one(400, T);
}

static int open_descriptors(void)
{
    DIR *d = opendir("/proc/self/fd");
    int n = 0;

    while (readdir(d))
        n++;
    closedir(d);
    return n;
}

/* O-19: a new group over the old listeners, whose peer never says goodbye. */
static void o19_fifty_groups_one_after_the_other(void **state)
{
    int before = 0;
    comm_group g;

    (void)state;
    assert_int_equal(tcp_seats_make(&g, 2, 0), FERRY_OK);
    for (uint64_t i = 1; i <= 50; i++) {
        tcp_seat seats[2] = {{.rank = 0, .group = &g, .w.generation = i},
                             {.rank = 1, .group = &g, .w.generation = i}};
        char byte = (char)i;

        tcp_sit_down(seats, 2);
        assert_int_equal(seats[0].status, FERRY_OK);
        assert_int_equal(seats[1].status, FERRY_OK);
        assert_int_equal(seats[0].c->ops->broadcast(seats[0].c, &byte, 1, 0, T),
                         FERRY_OK);
        byte = 0;
        assert_int_equal(seats[1].c->ops->broadcast(seats[1].c, &byte, 1, 0, T),
                         FERRY_OK);
        assert_int_equal(byte, (char)i);
        ferry__comm_close(&seats[0].c);
        ferry__comm_close(&seats[1].c);
        if (i == 1)
            before = open_descriptors();
    }
    assert_int_equal(open_descriptors(), before);
    tcp_seats_drop(&g);
}

/* What was sent before a rank left is still received. */
static void bytes_sent_before_leaving_arrive(void **state)
{
    tcp_seat seats[2] = {{.rank = 0}, {.rank = 1}};
    char got[1000] = {0};
    comm_group g;

    (void)state;
    assert_int_equal(tcp_seats_make(&g, 2, 0), FERRY_OK);
    seats[0].group = seats[1].group = &g;
    tcp_sit_down(seats, 2);
    memset(got, 7, sizeof(got));
    assert_int_equal(
        seats[0].c->ops->broadcast(seats[0].c, got, sizeof(got), 0, T),
        FERRY_OK);
    ferry__comm_close(&seats[0].c);
    memset(got, 0, sizeof(got));
    assert_int_equal(
        seats[1].c->ops->broadcast(seats[1].c, got, sizeof(got), 0, T),
        FERRY_OK);
    assert_int_equal(got[999], 7);
    assert_int_equal(seats[1].c->ops->barrier(seats[1].c, T), FERRY_EPEER);
    assert_non_null(strstr(ferry_last_error(), "rank 0 left"));
    ferry__comm_close(&seats[1].c);
    tcp_seats_drop(&g);
}

static ferry_status enough(void *arg, const char *what)
{
    const int64_t *at_ns = arg;

    if (ferry__now_ns() < *at_ns)
        return FERRY_OK;
    return ferry_fail(FERRY_EPEER, "the owner had enough of %s", what);
}

/* Whatever its status, the owner's word ends a call, and the group. */
static void an_owner_that_gives_up_ends_a_call(void **state)
{
    tcp_seat seats[2] = {{.rank = 0}, {.rank = 1}};
    int64_t began = ferry__now_ns(), at_ns = began + INT64_C(150000000);
    comm_group g;

    (void)state;
    assert_int_equal(tcp_seats_make(&g, 2, 0), FERRY_OK);
    seats[0].group = seats[1].group = &g;
    tcp_sit_down(seats, 2);
    seats[0].c->check = enough;
    seats[0].c->check_arg = &at_ns;
    assert_int_equal(seats[0].c->ops->barrier(seats[0].c, T), FERRY_EPEER);
    assert_string_equal(ferry_last_error(), "the owner had enough of barrier");
    assert_true(ferry__now_ns() - began < INT64_C(1000000000));
    assert_int_equal(seats[0].c->ops->barrier(seats[0].c, T), FERRY_EPEER);
    assert_int_equal(seats[1].c->ops->barrier(seats[1].c, T), FERRY_EPEER);
    assert_non_null(strstr(ferry_last_error(), "the owner had enough"));
    ferry__comm_close(&seats[0].c);
    ferry__comm_close(&seats[1].c);
    tcp_seats_drop(&g);
}

static void odd_arguments_are_refused(void **state)
{
    ferry__comm *c = NULL;
    comm_group g;

    (void)state;
    assert_int_equal(tcp_seats_make(&g, 1, 0), FERRY_OK);
    assert_int_equal(tcp_seats_open(&g, 0, &(tcp_wishes){.secret = ""}, &c),
                     FERRY_EINVAL);
    assert_int_equal(
        tcp_seats_open(&g, 0, &(tcp_wishes){.world_size = 129}, &c),
        FERRY_EINVAL);
    assert_int_equal(open_rank(&g, 0, &c), FERRY_OK);
    assert_int_equal(c->ops->barrier(c, 0), FERRY_EINVAL);
    assert_int_equal(c->ops->broadcast(c, NULL, 0, 1, T), FERRY_EINVAL);
    assert_int_equal(c->ops->broadcast(c, NULL, 0, 0, T), FERRY_OK);
    ferry__comm_close(&c);
    tcp_seats_drop(&g);
}

int main(void)
{
    static const comm_maker one_host = {.name = "tcp",
                                        .make = tcp_seats_make,
                                        .open = open_rank,
                                        .drop = tcp_seats_drop};
    static const comm_maker two_hosts = {.name = "tcp, two hosts",
                                         .make = tcp_seats_make,
                                         .open = open_on_two_hosts,
                                         .moves_only = true,
                                         .drop = tcp_seats_drop};
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(trees_reach_all_and_enter_each_host_once),
        cmocka_unit_test(stopped_rank_is_named_within_the_bound),
        cmocka_unit_test(no_progress_ends_a_call_before_its_deadline),
        cmocka_unit_test(o19_fifty_groups_one_after_the_other),
        cmocka_unit_test(bytes_sent_before_leaving_arrive),
        cmocka_unit_test(an_owner_that_gives_up_ends_a_call),
        cmocka_unit_test(odd_arguments_are_refused),
    };
    int failed = comm_cases_run(&one_host);

    failed += comm_cases_run(&two_hosts);
    return failed + cmocka_run_group_tests(tests, NULL, NULL);
}
