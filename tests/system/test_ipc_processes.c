/* SPDX-License-Identifier: Apache-2.0 */
/* ipc between processes that fail, sleep and die: bounded errors that name
 * the peer, nothing left behind, and the next round right.
 * ctest: timeout=180 */
#include "harness/ipc_rig.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

/* Five chunks in packed mode with a buffer of 4000 bytes; the traps are in
 * the first and in the fourth. */
static const rig_param params[] = {
    {"p0", FERRY_DTYPE_U8, 1, {3000}, RIG_WHOLE, false},
    {"p1", FERRY_DTYPE_BF16, 2, {40, 32}, RIG_ROWS, false},
    {"p2", FERRY_DTYPE_BF16, 2, {40, 40}, RIG_COLS, false},
    {"p3", FERRY_DTYPE_U8, 1, {3100}, RIG_WHOLE, false},
    {"p4", FERRY_DTYPE_F32, 2, {64, 13}, RIG_ROWS, false},
};
#define N_PARAMS (sizeof(params) / sizeof(params[0]))

static double seconds(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void with_trap(rig_param *out, size_t at)
{
    memcpy(out, params, sizeof(params));
    if (at < N_PARAMS)
        out[at].trap = true;
}

static ferry_ipc_trainer_init_info packed_info(const char *path)
{
    ferry_ipc_trainer_init_info info = FERRY_IPC_TRAINER_INIT_INFO(0);

    info.packed = 1;
    info.packed_buffer_size_bytes = 4000;
    info.path = path;
    return info;
}

typedef struct setup {
    rig_param params[N_PARAMS];
    rig *r;
    rig_source *s;
    ferry_client client;
    ferry_source source;
    ferry_trainer *t;
} setup;

static void open_setup(setup *u, rig_options ro,
                       ferry_ipc_trainer_init_info info, unsigned flags,
                       size_t trap_at)
{
    memset(u, 0, sizeof(*u));
    with_trap(u->params, trap_at);
    ro.params = u->params;
    ro.count = N_PARAMS;
    u->r = rig_open(&ro);
    u->s = rig_source_open(u->params, N_PARAMS, flags);
    rig_source_fill(u->s, 1);
    u->client = rig_client(u->r);
    u->source = rig_source_of(u->s);
    if (ferry_trainer_init(&info.base, &u->client, &u->source, &u->t) !=
        FERRY_OK)
        fail_msg("init: %s", ferry_last_error());
}

static void close_setup(setup *u)
{
    ferry_trainer_shutdown(&u->t);
    rig_close(u->r);
    rig_source_close(u->s);
}

static void send_good(setup *u, uint64_t seed)
{
    rig_source_fill(u->s, seed);
    if (ferry_trainer_send_weights(u->t, NULL) != FERRY_OK)
        fail_msg("send: %s", ferry_last_error());
    if (rig_differs(u->r, seed))
        fail_msg("seed %d: %s", (int)seed, rig_differs(u->r, seed));
}

static void ranks_in_processes_get_their_bytes(void **state)
{
    static const unsigned forms[] = {0, RIG_SHARED, RIG_STREAM, RIG_MIXED};
    static const char *const paths[] = {NULL, NULL, "ring", "cma"};
    int shm = rig_count_entries("/dev/shm");

    (void)state;
    for (int i = 0; i < 8; i++) {
        rig_options ro = {.tp_size = 1 + i % 3, .replicas = 1 + (i == 3)};
        ferry_ipc_trainer_init_info one = FERRY_IPC_TRAINER_INIT_INFO(0);
        setup u;
        int fds[2] = {0, 0};

        one.path = paths[i % 4];
        open_setup(&u, ro, i < 4 ? one : packed_info(paths[i % 4]),
                   forms[i % 4], SIZE_MAX);
        for (uint64_t seed = 1; seed < 6; seed++) {
            send_good(&u, seed);
            fds[seed % 2] = rig_fds(u.r, 0);
        }
        assert_true(abs(fds[0] - fds[1]) <= 1);
        close_setup(&u);
    }
    assert_int_equal(rig_count_entries("/dev/shm"), shm);
}

/* O-12 (a) (b): a worker that fails at chunk 1 or 4. */
static void o12_failing_worker_is_named_with_its_words(void **state)
{
    static const char *const paths[] = {NULL, "ring", "cma"};

    (void)state;
    for (int i = 0; i < 6; i++) {
        rig_options ro = {.tp_size = 2, .action = RIG_FAIL, .action_rank = 1};
        double began;
        setup u;

        open_setup(&u, ro, packed_info(paths[i % 3]), 0, i < 3 ? 0 : 3);
        began = seconds();
        assert_true(ferry_trainer_send_weights(u.t, NULL) < 0);
        assert_true(seconds() - began < 3);
        assert_non_null(strstr(ferry_last_error(), "trap sprung"));
        /* And again, without init: the sockets live. */
        assert_true(ferry_trainer_send_weights(u.t, NULL) < 0);
        assert_non_null(strstr(ferry_last_error(), "trap sprung"));
        close_setup(&u);
    }
}

/* O-12 (c): SIGKILL in the middle; the worker is named, and after a new one
 * came the same trainer reaches it. */
static void o12_killed_worker_is_named(void **state)
{
    static const char *const paths[] = {NULL, "ring"};

    (void)state;
    for (int i = 0; i < 4; i++) {
        rig_options ro = {
            .tp_size = 1 + i / 2, .action = RIG_KILL, .action_rank = 0};
        ferry_status status;
        double began;
        setup u;

        open_setup(&u, ro, packed_info(paths[i % 2]), 0, 2);
        began = seconds();
        status = ferry_trainer_send_weights(u.t, NULL);
        assert_true(status < 0);
        assert_true(seconds() - began < 3);
        assert_true(strstr(ferry_last_error(), "ipc worker dp0 tp0") ||
                    strstr(ferry_last_error(), "rank 0 closed"));
        close_setup(&u);
    }
}

/* O-12 (d): init is accepted, but no worker ever connects. */
static ferry_status accept_all(void *self, const char *text)
{
    (void)self;
    (void)text;
    return FERRY_OK;
}

static void o12_no_peer_at_all(void **state)
{
    rig_options ro = {.params = params, .count = N_PARAMS};
    rig *r = rig_open(&ro);
    rig_source *s = rig_source_open(params, N_PARAMS, 0);
    ferry_client inner = rig_client(r);
    ferry_client_ops ops = *inner.ops;
    ferry_client client = {&ops, inner.self};
    ferry_source source = rig_source_of(s);
    ferry_ipc_trainer_init_info info = FERRY_IPC_TRAINER_INIT_INFO(0);
    ferry_trainer *t = NULL;

    (void)state;
    ops.init_weight_transfer_engine = accept_all;
    assert_int_equal(ferry_trainer_init(&info.base, &client, &source, &t),
                     FERRY_EPEER);
    assert_non_null(strstr(ferry_last_error(), "no worker connected"));
    assert_null(t);
    rig_close(r);
    rig_source_close(s);
}

/* O-13: slow is not silent; silent is told from slow. */
static void o13_progress_decides_not_the_length(void **state)
{
    static const char *const paths[] = {NULL, "ring"};

    (void)state;
    for (int i = 0; i < 4; i++) {
        bool silent = i >= 2;
        rig_options ro = {.tp_size = 1,
                          .action = RIG_SLEEP,
                          .action_rank = -1,
                          .trap_ms = silent ? 1500 : 300};
        ferry_ipc_trainer_init_info info = FERRY_IPC_TRAINER_INIT_INFO(0);
        double began;
        setup u;

        info.path = paths[i % 2];
        info.base.no_progress_ms = 600;
        open_setup(&u, ro, info, i % 2 ? 0 : RIG_SHARED, 1);
        if (!silent) {
            send_good(&u, 2);
        } else {
            began = seconds();
            assert_true(ferry_trainer_send_weights(u.t, NULL) < 0);
            assert_non_null(strstr(ferry_last_error(), "no progress"));
            assert_true(seconds() - began < 1.6);
        }
        close_setup(&u);
    }
}

/* A worker that was replaced: one round fails by name, the next opens a new
 * session by itself and is right. */
static void replaced_worker_is_reached_again(void **state)
{
    rig_options ro = {.tp_size = 2};
    ferry_ipc_trainer_init_info info = FERRY_IPC_TRAINER_INIT_INFO(0);
    setup u;

    (void)state;
#if defined(__SANITIZE_THREAD__)
    skip(); /* it cannot follow a fork beside the trainer's threads */
#endif
    open_setup(&u, ro, info, RIG_SHARED, SIZE_MAX);
    send_good(&u, 1);
    rig_restart(u.r, 1);
    assert_true(ferry_trainer_send_weights(u.t, NULL) < 0);
    send_good(&u, 2);
    send_good(&u, 3);
    close_setup(&u);
}

/* A second trainer takes over from one that was shut down, and from one that
 * still lives. */
static void second_trainer_takes_over(void **state)
{
    rig_options ro = {.tp_size = 2};
    ferry_ipc_trainer_init_info info = FERRY_IPC_TRAINER_INIT_INFO(0);
    ferry_trainer *other = NULL;
    int fds;
    setup u;

    (void)state;
    open_setup(&u, ro, info, 0, SIZE_MAX);
    send_good(&u, 1);
    fds = rig_fds(u.r, 0);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(
            ferry_trainer_init(&info.base, &u.client, &u.source, &other),
            FERRY_OK);
        rig_source_fill(u.s, 7);
        assert_int_equal(ferry_trainer_send_weights(other, NULL), FERRY_OK);
        assert_null(rig_differs(u.r, 7));
        ferry_trainer_shutdown(&other);
    }
    assert_true(rig_fds(u.r, 0) <= fds + 1);
    close_setup(&u);
}

/* O-50: the trainer dies in the middle of a round, again and again. */
static void die_in_the_middle(rig *r, int turn)
{
    ferry_ipc_trainer_init_info info =
        packed_info(turn % 3 == 0 ? "ring" : NULL);
    rig_source *s =
        rig_source_open(params, N_PARAMS, turn % 2 ? RIG_SHARED : 0);
    ferry_client client = rig_client(r);
    ferry_source source = rig_source_of(s);
    ferry_trainer *t = NULL;

    rig_source_fill(s, 3);
    if (ferry_trainer_init(&info.base, &client, &source, &t) < 0)
        _exit(9);
    for (;;)
        ferry_trainer_send_weights(t, NULL);
}

static void o50_killed_trainer_leaves_nothing(void **state)
{
    rig_options ro = {.params = params,
                      .count = N_PARAMS,
                      .tp_size = 2,
                      .action = RIG_NOTHING};
    ferry_ipc_trainer_init_info info = FERRY_IPC_TRAINER_INIT_INFO(0);
    rig *r = rig_open(&ro);
    rig_source *s = rig_source_open(params, N_PARAMS, RIG_SHARED);
    ferry_client client = rig_client(r);
    ferry_source source = rig_source_of(s);
    int shm = rig_count_entries("/dev/shm"), fds = 0;
    ferry_trainer *t = NULL;

    (void)state;
    for (int turn = 0; turn < 20; turn++) {
        pid_t child = fork();
        int how;

        if (child == 0)
            die_in_the_middle(r, turn);
        usleep((useconds_t)(25000 + 1700 * turn));
        kill(child, SIGKILL);
        waitpid(child, &how, 0);
        assert_true(WIFSIGNALED(how));
        if (turn == 4) {
            usleep(400000);
            fds = rig_fds(r, 0);
        }
    }
    usleep(400000);
    assert_int_equal(rig_count_entries("/dev/shm"), shm);
    assert_true(rig_fds(r, 0) <= fds + 2);
    rig_source_fill(s, 9);
    if (ferry_trainer_init(&info.base, &client, &source, &t) != FERRY_OK)
        fail_msg("init: %s", ferry_last_error());
    if (ferry_trainer_send_weights(t, NULL) != FERRY_OK)
        fail_msg("send: %s", ferry_last_error());
    assert_null(rig_differs(r, 9));
    ferry_trainer_shutdown(&t);
    rig_close(r);
    rig_source_close(s);
}

/* The memory of a dead trainer is let go although nobody calls the worker. */
static size_t mapped_memfds(pid_t pid)
{
    char path[64], line[512];
    size_t n = 0;
    FILE *file;

    snprintf(path, sizeof(path), "/proc/%d/maps", (int)pid);
    file = fopen(path, "r");
    while (file && fgets(line, sizeof(line), file)) {
        if (strstr(line, "memfd:ferry-arena") ||
            strstr(line, "memfd:ferry-ipc"))
            n++;
    }
    if (file)
        fclose(file);
    return n;
}

static void idle_worker_lets_go_of_a_gone_trainer(void **state)
{
    rig_options ro = {.tp_size = 1};
    ferry_ipc_trainer_init_info info = FERRY_IPC_TRAINER_INIT_INFO(0);
    size_t held = 1;
    setup u;

    (void)state;
    open_setup(&u, ro, info, RIG_SHARED, SIZE_MAX);
    send_good(&u, 1);
    assert_int_equal(mapped_memfds(rig_pid(u.r, 0)), 2);
    ferry_trainer_shutdown(&u.t);
    for (int i = 0; i < 100 && held; i++) {
        usleep(20000);
        held = mapped_memfds(rig_pid(u.r, 0));
    }
    assert_int_equal(held, 0);
    close_setup(&u);
}

/* O-32 and E7: many rounds through two tiny buffers. */
static void o32_reused_buffers_never_mix(void **state)
{
    rig_options ro = {.tp_size = 2, .commit = FERRY_COMMIT_STAGED};
    setup u;

    (void)state;
    open_setup(&u, ro, packed_info(NULL), RIG_STREAM, SIZE_MAX);
    for (uint64_t seed = 1; seed <= 25; seed++)
        send_good(&u, seed);
    close_setup(&u);
}

/* With staged commits a failed round changes not one byte. */
static void staged_failure_changes_nothing(void **state)
{
    rig_options ro = {.tp_size = 2, .commit = FERRY_COMMIT_STAGED};
    setup u;

    (void)state;
    open_setup(&u, ro, packed_info(NULL), 0, SIZE_MAX);
    send_good(&u, 1);
    rig_source_fill(u.s, 2);
    rig_source_misname(u.s, 4);
    assert_int_equal(ferry_trainer_send_weights(u.t, NULL), FERRY_EMISMATCH);
    assert_null(rig_differs(u.r, 1));
    rig_source_misname(u.s, SIZE_MAX);
    send_good(&u, 3);
    close_setup(&u);
}

/* A system without room for the session says so; no signal. */
static void no_space_is_an_error(void **state)
{
    pid_t child;
    int how;

    (void)state;
    child = fork();
    if (child == 0) {
        struct rlimit small = {65536, 65536};
        rig_options ro = {.params = params, .count = N_PARAMS, .local = true};
        rig *r = rig_open(&ro);
        rig_source *s = rig_source_open(params, N_PARAMS, 0);
        ferry_client client = rig_client(r);
        ferry_source source = rig_source_of(s);
        ferry_ipc_trainer_init_info info = FERRY_IPC_TRAINER_INIT_INFO(0);
        ferry_trainer *t = NULL;

        setrlimit(RLIMIT_FSIZE, &small);
        _exit(ferry_trainer_init(&info.base, &client, &source, &t) ==
                      FERRY_ENOSPC
                  ? 0
                  : 1);
    }
    waitpid(child, &how, 0);
    assert_int_equal(how, 0);
}

/* The system denies cross-memory reads: that is found at init, said, and the
 * ring is taken. Another user, since root may read everything. */
static char told[4096];

static void take_line(ferry_log_level level, const char *line, void *arg)
{
    (void)arg;
    if (level <= FERRY_LOG_WARN &&
        strlen(told) + strlen(line) + 2 < sizeof(told))
        strcat(told, line);
}

static int denied_round(void)
{
    ferry_ipc_trainer_init_info info = FERRY_IPC_TRAINER_INIT_INFO(0);
    ferry_send_options so = FERRY_SEND_OPTIONS_INIT;
    ferry_round_stats stats = {.size = sizeof(stats)};
    rig_options ro = {.tp_size = 2};
    setup u;

    info.path = "cma";
    so.stats = &stats;
    ferry_log_set(take_line, NULL);
    open_setup(&u, ro, info, 0, SIZE_MAX);
    if (ferry_trainer_send_weights(u.t, &so) != FERRY_OK)
        return 2;
    if (strcmp(stats.path, "ring") != 0)
        return 3;
    if (!strstr(told, "may not read this process's memory"))
        return 4;
    if (rig_differs(u.r, 1))
        return 5;
    close_setup(&u);
    return 0;
}

static void denied_cma_is_said_and_the_ring_taken(void **state)
{
    pid_t child;
    int how;

    (void)state;
    child = fork();
    if (child == 0) {
        if (geteuid() == 0 && setresuid(65534, 65534, 65534) != 0)
            _exit(77);
        prctl(PR_SET_DUMPABLE, 0);
        _exit(denied_round());
    }
    waitpid(child, &how, 0);
    assert_true(WIFEXITED(how));
    if (WEXITSTATUS(how) == 77)
        skip();
    assert_int_equal(WEXITSTATUS(how), 0);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(ranks_in_processes_get_their_bytes),
    cmocka_unit_test(o12_failing_worker_is_named_with_its_words),
    cmocka_unit_test(o12_killed_worker_is_named),
    cmocka_unit_test(o12_no_peer_at_all),
    cmocka_unit_test(o13_progress_decides_not_the_length),
    cmocka_unit_test(replaced_worker_is_reached_again),
    cmocka_unit_test(second_trainer_takes_over),
    cmocka_unit_test(o50_killed_trainer_leaves_nothing),
    cmocka_unit_test(idle_worker_lets_go_of_a_gone_trainer),
    cmocka_unit_test(o32_reused_buffers_never_mix),
    cmocka_unit_test(staged_failure_changes_nothing),
    cmocka_unit_test(no_space_is_an_error),
    cmocka_unit_test(denied_cma_is_said_and_the_ring_taken),
};

/* Each test is a process of its own, which has no threads yet when it forks
 * its workers. */
static int run_alone(const char *name)
{
    pid_t child = fork();
    int how;

    if (child == 0) {
        execl("/proc/self/exe", "test_ipc_processes", name, (char *)NULL);
        _exit(127);
    }
    if (waitpid(child, &how, 0) != child || how != 0) {
        print_message("%s ended with %d\n", name, how);
        return 1;
    }
    return 0;
}

int main(int argc, char **argv)
{
    int failed = 0;

    signal(SIGPIPE, SIG_IGN);
    if (argc > 1) {
        cmocka_set_test_filter(argv[1]);
        return cmocka_run_group_tests(tests, NULL, NULL);
    }
    for (size_t i = 0; i < sizeof(tests) / sizeof(tests[0]); i++)
        failed += run_alone(tests[i].name);
    print_message("%d of %zu failed\n", failed,
                  sizeof(tests) / sizeof(tests[0]));
    return failed ? 1 : 0;
}
