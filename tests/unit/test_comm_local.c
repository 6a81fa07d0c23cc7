/* SPDX-License-Identifier: Apache-2.0 */
/* The local group: the cases of every provider, and what only it has. */
#include "harness/comm_cases.h"

#include "base/alloc.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#define T 10000

static ferry_status make(comm_group *g, int32_t world_size, size_t slot_bytes)
{
    g->world_size = world_size;
    return ferry__comm_local_create(world_size, slot_bytes, &g->fds[0]);
}

static ferry_status open_rank(comm_group *g, int32_t rank, ferry__comm **out)
{
    return ferry__comm_local_open(g->fds[0], rank, out);
}

static void drop(comm_group *g)
{
    close(g->fds[0]);
}

/* The segment knows process ids. */
static void killed_root_is_named_by_pid(void **state)
{
    ferry__comm *c = NULL;
    comm_group g;
    int64_t x = 0;
    pid_t child;

    (void)state;
    assert_int_equal(make(&g, 2, 4096), FERRY_OK);
    child = fork();
    if (child == 0) {
        ferry__comm_local_open(g.fds[0], 0, &c);
        _exit(0);
    }
    waitpid(child, NULL, 0);
    assert_int_equal(open_rank(&g, 1, &c), FERRY_OK);
    assert_int_equal(c->ops->broadcast(c, &x, sizeof(x), 0, T), FERRY_EPEER);
    assert_non_null(strstr(ferry_last_error(), "rank 0 (pid"));
    ferry__comm_close(&c);
    drop(&g);
}

static void taken_rank_names_both_and_a_dead_one_is_replaced(void **state)
{
    ferry__comm *a = NULL, *b = NULL, *again = NULL;
    pid_t child;
    char pid[32];
    int fd, how;

    (void)state;
    assert_int_equal(ferry__comm_local_create(2, 0, &fd), FERRY_OK);
    assert_int_equal(ferry__comm_local_open(fd, 0, &a), FERRY_OK);
    assert_int_equal(ferry__comm_local_open(fd, 0, &b), FERRY_EEXIST);
    snprintf(pid, sizeof(pid), "pid %d", (int)getpid());
    assert_non_null(strstr(ferry_last_error(), pid));
    assert_int_equal(ferry__comm_local_open(fd, 2, &b), FERRY_EINVAL);
    assert_null(b);
    child = fork();
    if (child == 0)
        _exit(ferry__comm_local_open(fd, 1, &b) == FERRY_OK ? 0 : 1);
    waitpid(child, &how, 0);
    assert_int_equal(how, 0);
    /* It died before the group began: the rank is free again. */
    assert_int_equal(ferry__comm_local_open(fd, 1, &b), FERRY_OK);
    assert_int_equal(a->ops->barrier(a, 0), FERRY_EINVAL);
    assert_int_equal(a->ops->broadcast(a, NULL, 0, 0, T), FERRY_OK);
    ferry__comm_close(&b);
    /* After it has begun, a rank that went is missed for good. */
    assert_int_equal(ferry__comm_local_open(fd, 1, &again), FERRY_EPEER);
    assert_int_equal(a->ops->barrier(a, T), FERRY_EPEER);
    assert_non_null(strstr(ferry_last_error(), "rank 1"));
    ferry__comm_close(&a);
    ferry__comm_close(&a);
    close(fd);
}

static void odd_arguments_are_refused(void **state)
{
    ferry__comm *c = NULL;
    int fd, pipes[2];

    (void)state;
    assert_int_equal(ferry__comm_local_create(0, 0, &fd), FERRY_EINVAL);
    assert_int_equal(ferry__comm_local_create(2, 3, &fd), FERRY_EINVAL);
    assert_int_equal(ferry__comm_local_create(2, SIZE_MAX / 2, &fd),
                     FERRY_EOVERFLOW);
    assert_int_equal(pipe(pipes), 0);
    assert_int_equal(ferry__comm_local_open(pipes[0], 0, &c), FERRY_EINVAL);
    assert_int_equal(ferry__comm_local_open(-1, 0, &c), FERRY_EIO);
    assert_null(c);
    close(pipes[0]);
    close(pipes[1]);
}

int main(void)
{
    static const comm_maker maker = {
        .name = "local", .make = make, .open = open_rank, .drop = drop};
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(killed_root_is_named_by_pid),
        cmocka_unit_test(taken_rank_names_both_and_a_dead_one_is_replaced),
        cmocka_unit_test(odd_arguments_are_refused),
    };
    int failed = comm_cases_run(&maker);

    return failed + cmocka_run_group_tests(tests, NULL, NULL);
}
