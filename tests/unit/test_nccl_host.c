/* SPDX-License-Identifier: Apache-2.0 */
/* libferry_nccl_host: ranks as threads and as processes, through the names
 * that a program which speaks NCCL would call. */
#include "harness/nccl_table.h"

#include "base/clock.h"
#include "base/config.h"
#include "base/thread.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#define WORLD_MAX 4

static nccl_table n;

/* 0, or the line of the first check that failed. */
#define CHECK(expr)                                                            \
    do {                                                                       \
        if (!(expr)) {                                                         \
            fprintf(stderr, "%s:%d: %s: %s\n", __func__, __LINE__, #expr,      \
                    n.ncclGetLastError(NULL));                                 \
            return __LINE__;                                                   \
        }                                                                      \
    } while (0)
#define GOOD(expr) CHECK((expr) == ncclSuccess)

typedef struct seat {
    int rank, world;
    ncclUniqueId id;
    int (*body)(ncclComm_t comm, int rank, int world);
    int rc;
} seat;

static void *sit(void *arg)
{
    seat *s = arg;
    ncclComm_t comm;

    s->rc = 1;
    if (n.ncclCommInitRank(&comm, s->world, s->id, s->rank) != ncclSuccess) {
        fprintf(stderr, "rank %d: %s\n", s->rank, n.ncclGetLastError(NULL));
        return NULL;
    }
    s->rc = s->body(comm, s->rank, s->world);
    if (s->rc >= 0)
        n.ncclCommDestroy(comm);
    else
        s->rc = 0; /* the body ended it */
    return NULL;
}

static void run(int world, int (*body)(ncclComm_t comm, int rank, int world))
{
    pthread_t threads[WORLD_MAX];
    seat seats[WORLD_MAX];
    ncclUniqueId id;

    assert_int_equal(n.ncclGetUniqueId(&id), ncclSuccess);
    for (int r = 0; r < world; r++) {
        seats[r] = (seat){r, world, id, body, 1};
        assert_int_equal(
            ferry__thread_start(&threads[r], "rank", sit, &seats[r]), FERRY_OK);
    }
    for (int r = 0; r < world; r++) {
        pthread_join(threads[r], NULL);
        assert_int_equal(seats[r].rc, 0);
    }
}

/* ---- what is carried ---- */

static int broadcast_body(ncclComm_t c, int rank, int world)
{
    static const size_t sizes[] = {0, 1, 1000, 300001};

    for (int root = 0; root < world; root++) {
        for (size_t s = 0; s < 4; s++) {
            unsigned char *b = calloc(1, sizes[s] + 1);

            for (size_t i = 0; rank == root && i < sizes[s]; i++)
                b[i] = (unsigned char)(i * 7 + (size_t)root);
            /* As vLLM calls it: receivers pass no send buffer. */
            GOOD(n.ncclBroadcast(rank == root ? b : NULL, b, sizes[s],
                                 ncclUint8, root, c, NULL));
            for (size_t i = 0; i < sizes[s]; i++)
                CHECK(b[i] == (unsigned char)(i * 7 + (size_t)root));
            CHECK(b[sizes[s]] == 0);
            free(b);
        }
    }
    return 0;
}

static void broadcast_reaches_every_rank(void **state)
{
    (void)state;
    for (int world = 1; world <= WORLD_MAX; world++)
        run(world, broadcast_body);
}

static int broadcast_apart_body(ncclComm_t c, int rank, int world)
{
    float give[3] = {1, 2, 3}, take[3] = {0};

    (void)world;
    GOOD(n.ncclBroadcast(rank == 0 ? give : NULL, take, 3, ncclFloat32, 0, c,
                         NULL));
    CHECK(take[2] == 3);
    /* The root may do without a receive buffer. */
    GOOD(n.ncclBroadcast(rank == 0 ? give : NULL, rank == 0 ? NULL : take, 3,
                         ncclFloat32, 0, c, NULL));
    return 0;
}

static void root_may_use_two_buffers_or_one(void **state)
{
    (void)state;
    run(2, broadcast_apart_body);
}

static int reduce_body(ncclComm_t c, int rank, int world)
{
    float f = (float)rank + 0.5f, fs = -1, all = 0;
    int64_t i = rank, is = -1;
    double d = -rank, ds = -1;

    GOOD(n.ncclAllReduce(&f, &fs, 1, ncclFloat32, ncclSum, c, NULL));
    for (int r = 0; r < world; r++)
        all += (float)r + 0.5f;
    CHECK(fs == all && f == (float)rank + 0.5f);
    GOOD(n.ncclAllReduce(&f, &f, 1, ncclFloat32, ncclAvg, c, NULL));
    CHECK(f == all / (float)world);
    GOOD(n.ncclAllReduce(&i, &is, 1, ncclInt64, ncclMax, c, NULL));
    CHECK(is == world - 1);
    GOOD(n.ncclReduce(&d, rank == world - 1 ? &ds : NULL, 1, ncclFloat64,
                      ncclSum, world - 1, c, NULL));
    CHECK(ds == (rank == world - 1 ? -world * (world - 1) / 2.0 : -1));
    GOOD(n.ncclAllReduce(NULL, NULL, 0, ncclFloat32, ncclSum, c, NULL));
    return 0;
}

static int scatter_body(ncclComm_t c, int rank, int world)
{
    int32_t give[WORLD_MAX * 2], take[2] = {-1, -1}, all[WORLD_MAX * 2];

    for (int k = 0; k < world * 2; k++)
        give[k] = rank * 100 + k;
    GOOD(n.ncclReduceScatter(give, take, 2, ncclInt32, ncclSum, c, NULL));
    for (int k = 0; k < 2; k++)
        CHECK(take[k] ==
              100 * world * (world - 1) / 2 + world * (rank * 2 + k));
    GOOD(n.ncclAllGather(take, all, 2, ncclInt32, c, NULL));
    for (int k = 0; k < world * 2; k++)
        CHECK(all[k] == 100 * world * (world - 1) / 2 + world * k);
    /* In place, as NCCL has it. */
    all[rank * 2] = -rank;
    GOOD(n.ncclAllGather(&all[rank * 2], all, 2, ncclInt32, c, NULL));
    for (int r = 0; r < world; r++)
        CHECK(all[r * 2] == -r);
    return 0;
}

static float of_bf16(uint16_t bits)
{
    uint32_t wide = (uint32_t)bits << 16;
    float f;

    memcpy(&f, &wide, sizeof(f));
    return f;
}

/* 1, 2, 3 … and small fractions that a sum in bfloat16 would lose. */
static int narrow_body(ncclComm_t c, int rank, int world)
{
    static const uint16_t ones[] = {0x3f80, 0x4000, 0x4040, 0x4080};
    uint16_t h = 0x3c00, b[3] = {ones[rank], 0x3b80, 0x4380};
    float want = 0;

    /* 1/256 of each rank beside 256: 256 + 4/256 rounds to 256. */
    GOOD(n.ncclAllReduce(b, b, 3, ncclBfloat16, ncclSum, c, NULL));
    for (int r = 0; r < world; r++)
        want += (float)(r + 1);
    CHECK(of_bf16(b[0]) == want);
    CHECK(of_bf16(b[1]) == (float)world / 256);
    CHECK(of_bf16(b[2]) == 256.0f * (float)world);
    GOOD(n.ncclAllReduce(&h, &h, 1, ncclFloat16, ncclMax, c, NULL));
    CHECK(h == 0x3c00);
    return 0;
}

static void sums_are_exact(void **state)
{
    (void)state;
    for (int world = 1; world <= WORLD_MAX; world++) {
        run(world, reduce_body);
        run(world, scatter_body);
    }
    run(2, narrow_body);
    run(4, narrow_body);
}

/* ---- groups ---- */

#define BIG 200000

/* All send before they receive: only a group can do that. */
static int swap_body(ncclComm_t c, int rank, int world)
{
    int32_t *give = malloc(BIG * sizeof(*give));
    int32_t *take = calloc((size_t)world * BIG, sizeof(*take));

    for (int i = 0; i < BIG; i++)
        give[i] = rank * 1000003 + i;
    GOOD(n.ncclGroupStart());
    for (int r = 0; r < world; r++) {
        GOOD(n.ncclSend(give, BIG, ncclInt32, r, c, NULL));
        GOOD(n.ncclRecv(take + (size_t)r * BIG, BIG, ncclInt32, r, c, NULL));
    }
    GOOD(n.ncclGroupEnd());
    for (int r = 0; r < world; r++) {
        for (int i = 0; i < BIG; i++)
            CHECK(take[(size_t)r * BIG + (size_t)i] == r * 1000003 + i);
    }
    free(give);
    free(take);
    return 0;
}

/* A group on one side, single calls in another order on the other. */
static int uneven_body(ncclComm_t c, int rank, int world)
{
    int32_t a = rank, b = rank + 10, x = -1, y = -1;

    (void)world;
    if (rank == 1) {
        GOOD(n.ncclGroupStart());
        GOOD(n.ncclRecv(&x, 1, ncclInt32, 0, c, NULL));
        GOOD(n.ncclRecv(&y, 1, ncclInt32, 0, c, NULL));
        GOOD(n.ncclSend(&a, 1, ncclInt32, 0, c, NULL));
        GOOD(n.ncclSend(&b, 1, ncclInt32, 0, c, NULL));
        GOOD(n.ncclGroupEnd());
    } else {
        GOOD(n.ncclRecv(&x, 1, ncclInt32, 1, c, NULL));
        GOOD(n.ncclSend(&a, 1, ncclInt32, 1, c, NULL));
        GOOD(n.ncclSend(&b, 1, ncclInt32, 1, c, NULL));
        GOOD(n.ncclRecv(&y, 1, ncclInt32, 1, c, NULL));
    }
    CHECK(x == 1 - rank && y == 11 - rank);
    return 0;
}

static int mixed_group_body(ncclComm_t c, int rank, int world)
{
    float f = 1, g = 2;
    int32_t root = rank == 0 ? 77 : 0;

    GOOD(n.ncclGroupStart());
    GOOD(n.ncclGroupStart());
    GOOD(n.ncclAllReduce(&f, &f, 1, ncclFloat32, ncclSum, c, NULL));
    GOOD(n.ncclGroupEnd());
    CHECK(f == 1); /* kept until the outer end */
    GOOD(n.ncclBroadcast(&root, &root, 1, ncclInt32, 0, c, NULL));
    GOOD(n.ncclAllReduce(&g, &g, 1, ncclFloat32, ncclSum, c, NULL));
    GOOD(n.ncclGroupEnd());
    CHECK(f == (float)world && g == 2 * (float)world && root == 77);
    return 0;
}

static void groups_do_not_lock_up(void **state)
{
    (void)state;
    for (int world = 1; world <= WORLD_MAX; world++)
        run(world, swap_body);
    run(2, uneven_body);
    run(3, mixed_group_body);
    assert_int_equal(n.ncclGroupEnd(), ncclInvalidUsage);
}

static void one_thread_may_hold_all_ranks(void **state)
{
    ncclComm_t comms[3];
    float x[3] = {1, 2, 4};
    ncclUniqueId id;

    (void)state;
    assert_int_equal(n.ncclGetUniqueId(&id), ncclSuccess);
    assert_int_equal(n.ncclGroupStart(), ncclSuccess);
    for (int r = 0; r < 3; r++)
        assert_int_equal(n.ncclCommInitRank(&comms[r], 3, id, r), ncclSuccess);
    assert_int_equal(n.ncclGroupEnd(), ncclSuccess);
    assert_int_equal(n.ncclGroupStart(), ncclSuccess);
    for (int r = 0; r < 3; r++)
        assert_int_equal(n.ncclAllReduce(&x[r], &x[r], 1, ncclFloat32, ncclSum,
                                         comms[r], NULL),
                         ncclSuccess);
    assert_int_equal(n.ncclGroupEnd(), ncclSuccess);
    for (int r = 0; r < 3; r++) {
        assert_true(x[r] == 7);
        assert_int_equal(n.ncclCommDestroy(comms[r]), ncclSuccess);
    }
}

/* ---- what is refused ---- */

static int refusals_body(ncclComm_t c, int rank, int world)
{
    float x = 0;
    int v = -1;
    ncclWindow_t win = NULL;

    CHECK(n.ncclBroadcast(&x, &x, 1, (ncclDataType_t)12, 0, c, NULL) ==
          ncclInvalidArgument);
    CHECK(n.ncclBroadcast(&x, &x, 1, ncclFloat32, 5, c, NULL) ==
          ncclInvalidArgument);
    CHECK(strstr(n.ncclGetLastError(c), "root 5 in a world of 2"));
    CHECK(n.ncclBroadcast(NULL, NULL, 1, ncclFloat32, rank, c, NULL) ==
          ncclInvalidArgument);
    CHECK(strstr(n.ncclGetLastError(NULL), "sendbuff is NULL"));
    CHECK(n.ncclBroadcast(&x, NULL, 1, ncclFloat32, 1 - rank, c, NULL) ==
          ncclInvalidArgument);
    CHECK(n.ncclSend(&x, 1, ncclFloat32, -1, c, NULL) == ncclInvalidArgument);
    CHECK(n.ncclSend(&x, 1, ncclFloat32, 0, NULL, NULL) == ncclInvalidArgument);
    CHECK(n.ncclAllReduce(&x, &x, 1, ncclFloat32, (ncclRedOp_t)5, c, NULL) ==
          ncclInvalidArgument);
    CHECK(n.ncclAllReduce(&x, &x, 1, ncclFloat32, ncclProd, c, NULL) ==
          ncclInvalidUsage);
    CHECK(strstr(n.ncclGetLastError(NULL), "not by prod"));
    CHECK(n.ncclAllReduce(&x, &x, 1, ncclUint8, ncclSum, c, NULL) ==
          ncclInvalidUsage);
    CHECK(n.ncclCommSuspend(c, 0) == ncclInvalidUsage);
    CHECK(n.ncclCommResume(c) == ncclInvalidUsage);
    CHECK(n.ncclCommWindowRegister(c, &x, 4, &win, 0) == ncclInvalidUsage);
    CHECK(n.ncclCommWindowDeregister(c, win) == ncclInvalidUsage);
    CHECK(n.ncclCommCuDevice(c, &v) == ncclInvalidUsage);
    CHECK(strstr(n.ncclGetLastError(NULL), "does not offer ncclCommCuDevice"));
    /* One refused call ends its group before anything is carried out. */
    GOOD(n.ncclGroupStart());
    GOOD(n.ncclAllReduce(&x, &x, 1, ncclFloat32, ncclSum, c, NULL));
    CHECK(n.ncclSend(&x, 1, ncclFloat32, 9, c, NULL) == ncclInvalidArgument);
    CHECK(n.ncclGroupEnd() == ncclInvalidArgument);
    /* None of this broke the communicator. */
    x = 1;
    GOOD(n.ncclAllReduce(&x, &x, 1, ncclFloat32, ncclSum, c, NULL));
    CHECK(x == (float)world);
    GOOD(n.ncclCommCount(c, &v));
    CHECK(v == world);
    GOOD(n.ncclCommUserRank(c, &v));
    CHECK(v == rank);
    CHECK(n.ncclCommCount(c, NULL) == ncclInvalidArgument);
    return 0;
}

static void wrong_calls_are_refused_and_break_nothing(void **state)
{
    (void)state;
    run(2, refusals_body);
}

static void wrong_ids_and_worlds_are_refused(void **state)
{
    ncclComm_t comm = NULL;
    ncclUniqueId id;

    (void)state;
    assert_int_equal(n.ncclGetUniqueId(NULL), ncclInvalidArgument);
    assert_int_equal(n.ncclGetVersion(NULL), ncclInvalidArgument);
    assert_int_equal(n.ncclGetUniqueId(&id), ncclSuccess);
    assert_int_equal(n.ncclCommInitRank(NULL, 1, id, 0), ncclInvalidArgument);
    assert_int_equal(n.ncclCommInitRank(&comm, 0, id, 0), ncclInvalidArgument);
    assert_int_equal(n.ncclCommInitRank(&comm, 2, id, 2), ncclInvalidArgument);
    assert_int_equal(n.ncclCommInitRank(&comm, 129, id, 0),
                     ncclInvalidArgument);
    id.internal[8] ^= 2; /* version */
    assert_int_equal(n.ncclCommInitRank(&comm, 1, id, 0), ncclInvalidArgument);
    assert_non_null(strstr(n.ncclGetLastError(NULL), "has version 3"));
    id.internal[8] ^= 2;
    id.internal[12] = 5; /* the address's kind */
    assert_int_equal(n.ncclCommInitRank(&comm, 1, id, 0), ncclInvalidArgument);
    memset(&id, 0, sizeof(id));
    assert_int_equal(n.ncclCommInitRank(&comm, 1, id, 0), ncclInvalidArgument);
    assert_non_null(
        strstr(n.ncclGetLastError(NULL), "was not made by libferry_nccl_host"));
    assert_null(comm);
}

static void addresses_are_chosen_by_the_setting(void **state)
{
    static const char *const wrong[] = {"0.0.0.0", "::", "host", "1.2.3"};
    ncclUniqueId id;
    ncclComm_t comm;

    (void)state;
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        ferry__config_set("nccl_host_address", wrong[i]);
        assert_int_equal(n.ncclGetUniqueId(&id), ncclInvalidArgument);
        assert_non_null(strstr(n.ncclGetLastError(NULL), wrong[i]));
    }
    ferry__config_set("nccl_host_address", "::1");
    assert_int_equal(n.ncclGetUniqueId(&id), ncclSuccess);
    assert_int_equal(id.internal[12], 6);
    assert_int_equal(n.ncclCommInitRank(&comm, 1, id, 0), ncclSuccess);
    assert_int_equal(n.ncclCommDestroy(comm), ncclSuccess);
    assert_int_equal(n.ncclCommDestroy(comm), ncclInvalidArgument);
    run(2, broadcast_body);
    ferry__config_set("nccl_host_address", "127.0.0.1");
}

static void results_have_texts(void **state)
{
    int version = 0;

    (void)state;
    for (int i = 0; i < 10; i++)
        assert_non_null(n.ncclGetErrorString((ncclResult_t)i));
    assert_string_equal(n.ncclGetErrorString(ncclSuccess), "no error");
    assert_int_equal(n.ncclGetVersion(&version), ncclSuccess);
    assert_int_equal(version, 22703);
}

/* ---- never hang ---- */

static ncclComm_t shared; /* rank 0's */

static void *abort_soon(void *arg)
{
    (void)arg;
    ferry__sleep_ms(100);
    return n.ncclCommAbort(shared) == ncclSuccess ? NULL : &shared;
}

static int abort_body(ncclComm_t c, int rank, int world)
{
    int64_t began = ferry__now_ns();
    pthread_t thread;
    float x = 1;
    void *rc;

    (void)world;
    if (rank == 1) {
        /* Late: it finds the others gone. */
        ferry__sleep_ms(300);
        CHECK(n.ncclAllReduce(&x, &x, 1, ncclFloat32, ncclSum, c, NULL) ==
              ncclRemoteError);
        return 0;
    }
    shared = c;
    CHECK(ferry__thread_start(&thread, "abort", abort_soon, NULL) == FERRY_OK);
    CHECK(n.ncclAllReduce(&x, &x, 1, ncclFloat32, ncclSum, c, NULL) ==
          ncclRemoteError);
    CHECK(ferry__now_ns() - began < INT64_C(2000000000));
    pthread_join(thread, &rc);
    CHECK(rc == NULL);
    CHECK(n.ncclAllReduce(&x, &x, 1, ncclFloat32, ncclSum, c, NULL) ==
          ncclInvalidArgument);
    return -1;
}

static void abort_wakes_a_call_of_another_thread(void **state)
{
    (void)state;
    run(2, abort_body);
}

static int stuck_body(ncclComm_t c, int rank, int world)
{
    ncclResult_t failed = ncclSuccess;
    float x = 1;

    (void)world;
    GOOD(n.ncclCommGetAsyncError(c, &failed));
    CHECK(failed == ncclSuccess);
    if (rank == 1) {
        ferry__sleep_ms(700);
        return 0;
    }
    CHECK(n.ncclAllReduce(&x, &x, 1, ncclFloat32, ncclSum, c, NULL) ==
          ncclRemoteError);
    CHECK(strstr(n.ncclGetLastError(c), "rank 1 did not come within 300 ms"));
    GOOD(n.ncclCommGetAsyncError(c, &failed));
    CHECK(failed == ncclRemoteError);
    return 0;
}

static void waits_end_by_the_setting(void **state)
{
    int64_t began = ferry__now_ns();
    ncclComm_t comm;
    ncclUniqueId id;

    (void)state;
    ferry__config_set("nccl_host_timeout_ms", "300");
    run(2, stuck_body);
    assert_int_equal(n.ncclGetUniqueId(&id), ncclSuccess);
    assert_int_equal(n.ncclCommInitRank(&comm, 3, id, 1), ncclRemoteError);
    assert_int_equal(n.ncclCommInitRank(&comm, 3, id, 0), ncclRemoteError);
    assert_non_null(strstr(n.ncclGetLastError(NULL), "rank 1, 2 did not come"));
    assert_true(ferry__now_ns() - began < INT64_C(5000000000));
    ferry__config_set("nccl_host_timeout_ms", "300000");
}

/* Ranks as processes; rank 1 dies in the middle. */
static int process_rank(const ncclUniqueId *id, int rank)
{
    ncclComm_t comm;
    float x[64] = {0};
    ncclResult_t result = ncclSuccess;

    alarm(30);
    GOOD(n.ncclCommInitRank(&comm, 3, *id, rank));
    for (int i = 0; i < 10; i++)
        GOOD(n.ncclAllReduce(x, x, 64, ncclFloat32, ncclSum, comm, NULL));
    if (rank == 1)
        raise(SIGKILL);
    while (result == ncclSuccess)
        result = n.ncclAllReduce(x, x, 64, ncclFloat32, ncclSum, comm, NULL);
    CHECK(result == ncclRemoteError);
    CHECK(strstr(n.ncclGetLastError(comm), "rank 1 ") ||
          strstr(n.ncclGetLastError(comm), "failed before"));
    GOOD(n.ncclCommAbort(comm));
    return 0;
}

static void dead_rank_is_named(void **state)
{
    ncclUniqueId id;
    pid_t pids[3];
    int pipes[2];

    (void)state;
    assert_int_equal(pipe(pipes), 0);
    for (int r = 0; r < 3; r++) {
        pids[r] = fork();
        if (pids[r] != 0)
            continue;
        /* The store must be served by a rank: rank 0 tells the others. */
        if (r == 0) {
            if (n.ncclGetUniqueId(&id) != ncclSuccess ||
                write(pipes[1], &id, sizeof(id)) != sizeof(id) ||
                write(pipes[1], &id, sizeof(id)) != sizeof(id))
                _exit(9);
        } else if (read(pipes[0], &id, sizeof(id)) != sizeof(id)) {
            _exit(9);
        }
        _exit(process_rank(&id, r) != 0);
    }
    close(pipes[0]);
    close(pipes[1]);
    for (int r = 0; r < 3; r++) {
        int how;

        waitpid(pids[r], &how, 0);
        if (r == 1)
            assert_true(WIFSIGNALED(how));
        else
            assert_int_equal(how, 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(dead_rank_is_named),
        cmocka_unit_test(broadcast_reaches_every_rank),
        cmocka_unit_test(root_may_use_two_buffers_or_one),
        cmocka_unit_test(sums_are_exact),
        cmocka_unit_test(groups_do_not_lock_up),
        cmocka_unit_test(one_thread_may_hold_all_ranks),
        cmocka_unit_test(wrong_calls_are_refused_and_break_nothing),
        cmocka_unit_test(wrong_ids_and_worlds_are_refused),
        cmocka_unit_test(addresses_are_chosen_by_the_setting),
        cmocka_unit_test(results_have_texts),
        cmocka_unit_test(abort_wakes_a_call_of_another_thread),
        cmocka_unit_test(waits_end_by_the_setting),
    };

    nccl_table_open(&n, nccl_host_path());
    return cmocka_run_group_tests(tests, NULL, NULL);
}
