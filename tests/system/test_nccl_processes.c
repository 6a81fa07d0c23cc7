/* SPDX-License-Identifier: Apache-2.0 */
/* nccl between processes that fail, stop and die: bounded errors that name
 * what went wrong, and the next round right with the workers that are left
 * or were replaced.
 * ctest: timeout=180 */
#include "base/clock.h"
#include "base/config.h"
#include "harness/fleet.h"
#include "harness/ipc_rig.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

/* Several buffers of 4000 bytes, and one tensor of many pieces. */
static const rig_param params[] = {
    {"p0", FERRY_DTYPE_U8, 1, {3000}, RIG_WHOLE, false},
    {"p1", FERRY_DTYPE_BF16, 2, {40, 32}, RIG_ROWS, false},
    {"p2", FERRY_DTYPE_BF16, 2, {40, 40}, RIG_COLS, false},
    {"p3", FERRY_DTYPE_F32, 2, {1024, 1100}, RIG_ROWS, false},
    {"p4", FERRY_DTYPE_U8, 1, {3100}, RIG_WHOLE, false},
    {"p5", FERRY_DTYPE_F32, 2, {64, 13}, RIG_COLS, false},
};
#define N_PARAMS (sizeof(params) / sizeof(params[0]))

static double seconds(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static ferry_nccl_trainer_init_info init_info(bool packed)
{
    ferry_nccl_trainer_init_info info = FERRY_NCCL_TRAINER_INIT_INFO(0);

    info.packed = packed;
    info.packed_buffer_size_bytes = 4000;
    info.provider = "tcp";
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

static void open_workers(setup *u, rig_options ro, unsigned flags,
                         size_t trap_at)
{
    memset(u, 0, sizeof(*u));
    memcpy(u->params, params, sizeof(params));
    if (trap_at < N_PARAMS)
        u->params[trap_at].trap = true;
    ro.backend = "nccl";
    ro.params = u->params;
    ro.count = N_PARAMS;
    u->r = rig_open(&ro);
    u->s = rig_source_open(u->params, N_PARAMS, flags);
    rig_source_fill(u->s, 1);
    u->client = rig_client(u->r);
    u->source = rig_source_of(u->s);
}

static void open_setup(setup *u, rig_options ro,
                       ferry_nccl_trainer_init_info info, unsigned flags,
                       size_t trap_at)
{
    open_workers(u, ro, flags, trap_at);
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
    const char *why;

    rig_source_fill(u->s, seed);
    if (ferry_trainer_send_weights(u->t, NULL) != FERRY_OK)
        fail_msg("send: %s", ferry_last_error());
    why = rig_differs(u->r, seed);
    if (why)
        fail_msg("seed %d: %s", (int)seed, why);
}

static void send_bad(setup *u, const char *words, double most)
{
    double began = seconds();
    ferry_status status = ferry_trainer_send_weights(u->t, NULL);

    if (status >= 0 || !strstr(ferry_last_error(), words))
        fail_msg("%s: %s, not %s", ferry_status_name(status),
                 ferry_last_error(), words);
    if (seconds() - began > most)
        fail_msg("%.1f s, at most %.1f: %s", seconds() - began, most,
                 ferry_last_error());
}

/* Every rank of two replicas (O-18), each form of the source, both modes. */
static void ranks_in_processes_get_their_bytes(void **state)
{
    static const unsigned forms[] = {0, RIG_STRIDED, RIG_STREAM, RIG_SHARED};

    (void)state;
    for (int i = 0; i < 8; i++) {
        rig_options ro = {.tp_size = 1 + i % 3, .replicas = 1 + (i == 3)};
        int fds = 0;
        setup u;

        open_setup(&u, ro, init_info(i < 4), forms[i % 4], SIZE_MAX);
        assert_non_null(strstr(rig_status(u.r, 0), "\"path\":\"tcp 127.0.0.1"));
        for (uint64_t seed = 1; seed < 6; seed++) {
            send_good(&u, seed);
            if (seed == 2)
                fds = rig_fds(u.r, 0);
        }
        assert_true(abs(rig_fds(u.r, 0) - fds) <= 1);
        close_setup(&u);
    }
}

/* O-09, O-12 (a) (b): a worker that fails at a tensor, in its own words. */
static void o09_failing_worker_is_named_with_its_words(void **state)
{
    (void)state;
    for (int i = 0; i < 4; i++) {
        rig_options ro = {.tp_size = 2, .action = RIG_FAIL, .action_rank = 1};
        setup u;

        open_setup(&u, ro, init_info(i % 2 == 0), 0, i < 2 ? 0 : 4);
        send_bad(&u, "trap sprung", 3);
        send_bad(&u, "trap sprung", 3);
        close_setup(&u);
    }
}

/* O-12 (c): SIGKILL in the middle, then a new worker in its place. */
static void o12_killed_worker_and_its_replacement(void **state)
{
    (void)state;
#if defined(__SANITIZE_THREAD__)
    skip(); /* it cannot follow a fork beside the trainer's threads */
#endif
    for (int i = 0; i < 2; i++) {
        rig_options ro = {
            .tp_size = 1 + i, .action = RIG_KILL, .action_rank = 0};
        setup u;

        open_setup(&u, ro, init_info(true), 0, 2);
        send_bad(&u, "rank ", 3);
        close_setup(&u);
    }
    for (int i = 0; i < 2; i++) {
        rig_options ro = {.tp_size = 2};
        setup u;

        open_setup(&u, ro, init_info(true), 0, SIZE_MAX);
        send_good(&u, 1);
        rig_restart(u.r, i);
        send_bad(&u, "", 3);
        send_good(&u, 2);
        send_good(&u, 3);
        close_setup(&u);
    }
}

/* A worker that is stopped, with its sockets open: only the bound on silence
 * can tell. Once it goes on, the next round works (J1). */
static void stopped_worker_is_bounded(void **state)
{
    rig_options ro = {.tp_size = 2};
    ferry_nccl_trainer_init_info info = init_info(true);
    setup u;

    (void)state;
    info.base.no_progress_ms = 700;
    open_setup(&u, ro, info, 0, SIZE_MAX);
    send_good(&u, 1);
    kill(rig_pid(u.r, 1), SIGSTOP);
    send_bad(&u, "700 ms", 2.5);
    kill(rig_pid(u.r, 1), SIGCONT);
    send_good(&u, 2);
    close_setup(&u);
}

/* O-13: slow is not silent; silent is told from slow. */
static void o13_progress_decides_not_the_length(void **state)
{
    (void)state;
    for (int i = 0; i < 4; i++) {
        bool silent = i >= 2;
        rig_options ro = {.tp_size = 1,
                          .action = RIG_SLEEP,
                          .action_rank = -1,
                          .trap_ms = silent ? 1500 : 300};
        ferry_nccl_trainer_init_info info = init_info(i % 2);
        setup u;

        info.base.no_progress_ms = 600;
        open_setup(&u, ro, info, 0, 1);
        if (silent)
            send_bad(&u, "no progress", 1.6);
        else
            send_good(&u, 2);
        close_setup(&u);
    }
}

/* Makes the links out of this process slow, and what they hold small. */
static void pace_sockets(unsigned bytes_per_s)
{
    int room = 64 << 10;

    for (int fd = 3; fd < 1024; fd++) {
        int domain = 0, listens = 1;
        socklen_t n = sizeof(domain), m = sizeof(listens);

        if (getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &n) != 0 ||
            (domain != AF_INET && domain != AF_INET6) ||
            getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &m) != 0 ||
            listens)
            continue;
        setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &room, sizeof(room));
        setsockopt(fd, SOL_SOCKET, SO_MAX_PACING_RATE, &bytes_per_s,
                   sizeof(bytes_per_s));
    }
}

/* O-13: what is on its way within one buffer, or one piece of it, is progress
 * at both ends. The bound is shorter than either takes. */
static void o13_a_slow_link_is_not_silent(void **state)
{
    static const char *const providers[] = {"tcp", "nccl"};

    (void)state;
    fleet_host_nccl();
    for (int i = 0; i < 2; i++) {
        ferry_nccl_trainer_init_info info = init_info(true);
        double began;
        setup u;

        info.base.no_progress_ms = 700;
        info.provider = providers[i];
        ferry__config_set("host_name", "far");
        open_workers(&u, (rig_options){.tp_size = 1}, 0, SIZE_MAX);
        ferry__config_set("host_name", "near");
        if (ferry_trainer_init(&info.base, &u.client, &u.source, &u.t) < 0)
            fail_msg("%s: init: %s", providers[i], ferry_last_error());
        pace_sockets(1400000);
        began = seconds();
        send_good(&u, 2);
        if (seconds() - began < 2)
            print_message("the kernel does not pace: %s took %.1f s\n",
                          providers[i], seconds() - began);
        close_setup(&u);
    }
    ferry__config_set("host_name", "");
}

/* O-19: a second trainer takes over, from one that lives and from one that
 * was killed in the middle; descriptors stay as they are. */
static void die_in_the_middle(rig *r)
{
    ferry_nccl_trainer_init_info info = init_info(true);
    rig_source *s = rig_source_open(params, N_PARAMS, 0);
    ferry_client client = rig_client(r);
    ferry_source source = rig_source_of(s);
    ferry_trainer *t = NULL;

    rig_source_fill(s, 3);
    if (ferry_trainer_init(&info.base, &client, &source, &t) < 0)
        _exit(9);
    for (;;)
        ferry_trainer_send_weights(t, NULL);
}

static void o19_killed_trainer_and_the_next_one(void **state)
{
    rig_options ro = {.tp_size = 2};
    ferry_nccl_trainer_init_info info = init_info(true);
    setup u;

    (void)state;
    open_workers(&u, ro, 0, SIZE_MAX);
    for (int turn = 0; turn < 12; turn++) {
        pid_t child = fork();
        int how;

        if (child == 0)
            die_in_the_middle(u.r);
        usleep((useconds_t)(40000 + 3700 * turn));
        kill(child, SIGKILL);
        waitpid(child, &how, 0);
        assert_true(WIFSIGNALED(how));
    }
    if (ferry_trainer_init(&info.base, &u.client, &u.source, &u.t) != FERRY_OK)
        fail_msg("init: %s", ferry_last_error());
    send_good(&u, 9);
    /* One group's, and not thirteen's. */
    assert_true(rig_fds(u.r, 0) < 50);
    close_setup(&u);
}

/* A worker lets go of a group whose trainer left a moment after that. */
static bool comes_down_to(rig *r, int fds)
{
    ferry__deadline until = ferry__deadline_in(5000);

    while (rig_fds(r, 0) > fds && !ferry__deadline_passed(&until))
        ferry__sleep_ms(20);
    return rig_fds(r, 0) <= fds;
}

static void o19_second_trainer_takes_over(void **state)
{
    rig_options ro = {.tp_size = 2};
    ferry_nccl_trainer_init_info info = init_info(true);
    ferry_trainer *other = NULL;
    int fds = 0;
    setup u;

    (void)state;
    open_setup(&u, ro, info, 0, SIZE_MAX);
    send_good(&u, 1);
    for (int i = 0; i < 20; i++) {
        if (ferry_trainer_init(&info.base, &u.client, &u.source, &other) !=
            FERRY_OK)
            fail_msg("init: %s", ferry_last_error());
        rig_source_fill(u.s, 7);
        assert_int_equal(ferry_trainer_send_weights(other, NULL), FERRY_OK);
        assert_null(rig_differs(u.r, 7));
        ferry_trainer_shutdown(&other);
        if (i == 1)
            fds = rig_fds(u.r, 0);
    }
    assert_true(comes_down_to(u.r, fds + 1));
    /* The first one's group is gone: one round fails, the next works. */
    send_bad(&u, "", 3);
    send_good(&u, 8);
    close_setup(&u);
}

/* Regions of shared memory that a process has mapped. */
static int shared_regions(pid_t pid)
{
    char path[64], line[1024];
    FILE *file;
    int n = 0;

    snprintf(path, sizeof(path), "/proc/%d/maps", (int)pid);
    file = fopen(path, "r");
    assert_non_null(file);
    while (fgets(line, sizeof(line), file))
        n += strstr(line, "/memfd:ferry") != NULL;
    fclose(file);
    return n;
}

/* One round, a word to the parent, and then nothing more. */
static void send_one_and_idle(rig *r, int word)
{
    ferry_nccl_trainer_init_info info = init_info(true);
    rig_source *s = rig_source_open(params, N_PARAMS, 0);
    ferry_client client = rig_client(r);
    ferry_source source = rig_source_of(s);
    ferry_trainer *t = NULL;

    rig_source_fill(s, 3);
    if (ferry_trainer_init(&info.base, &client, &source, &t) < 0 ||
        ferry_trainer_send_weights(t, NULL) < 0 || write(word, "r", 1) != 1)
        _exit(9);
    for (;;)
        pause();
}

static pid_t start_idle_trainer(rig *r)
{
    int word[2];
    char byte = 0;
    pid_t child;

    assert_int_equal(pipe(word), 0);
    child = fork();
    if (child == 0)
        send_one_and_idle(r, word[1]);
    close(word[1]);
    assert_int_equal(read(word[0], &byte, 1), 1);
    close(word[0]);
    return child;
}

/* The buffers are shared by all ranks of the host, so each of them holds
 * them; a worker that has nothing to do still lets go. */
static void o19_idle_workers_let_go_of_a_dead_trainer(void **state)
{
    rig_options ro = {.tp_size = 2};
    ferry_nccl_trainer_init_info info = init_info(true);
    int fds[2], regions[2];
    pid_t child;
    setup u;

    (void)state;
    open_workers(&u, ro, 0, SIZE_MAX);
    for (int i = 0; i < 2; i++) {
        fds[i] = rig_fds(u.r, i);
        regions[i] = shared_regions(rig_pid(u.r, i));
    }
    child = start_idle_trainer(u.r);
    assert_true(rig_fds(u.r, 0) > fds[0]);
    assert_true(shared_regions(rig_pid(u.r, 1)) > regions[1]);
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    for (int i = 0; i < 2; i++) {
        double began = seconds();

        /* The watcher's own stays until the next init. */
        while (rig_fds(u.r, i) > fds[i] + 1 ||
               shared_regions(rig_pid(u.r, i)) != regions[i]) {
            if (seconds() - began > 5)
                fail_msg("rank %d: %d descriptors, %d before; %d regions, %d "
                         "before",
                         i, rig_fds(u.r, i), fds[i],
                         shared_regions(rig_pid(u.r, i)), regions[i]);
            usleep(5000);
        }
    }
    assert_int_equal(rig_call(u.r, "start", ""), FERRY_OK);
    /* What it held is not counted any more. */
    if (!strstr(rig_status(u.r, 0), "\"peak_bytes\":0,"))
        fail_msg("%s", rig_status(u.r, 0));
    assert_true(rig_call(u.r, "update",
                         "{\"names\":[\"p0\"],\"dtype_names\":[\"uint8\"],"
                         "\"shapes\":[[3000]]}") < 0);
    assert_non_null(strstr(ferry_last_error(), "its trainer, which left"));
    assert_null(rig_differs(u.r, 3));
    if (ferry_trainer_init(&info.base, &u.client, &u.source, &u.t) != FERRY_OK)
        fail_msg("init: %s", ferry_last_error());
    send_good(&u, 4);
    close_setup(&u);
}

/* A round of which rank 1 is not told. */
static void send_past_one(rig *r)
{
    ferry_nccl_trainer_init_info info = init_info(true);
    rig_source *s = rig_source_open(params, N_PARAMS, 0);
    ferry_client client = rig_client(r);
    ferry_source source = rig_source_of(s);
    ferry_trainer *t = NULL;

    rig_source_fill(s, 3);
    if (ferry_trainer_init(&info.base, &client, &source, &t) < 0)
        _exit(9);
    rig_pass_by(r, 1);
    ferry_trainer_send_weights(t, NULL);
    _exit(8);
}

static void await_status(rig *r, int32_t rank, const char *words)
{
    ferry__deadline until = ferry__deadline_in(20000);

    while (!strstr(rig_status(r, rank), words)) {
        if (ferry__deadline_passed(&until))
            fail_msg("no %s: %s", words, rig_status(r, rank));
        ferry__sleep_ms(10);
    }
}

/* O-12: a rank in a round waits for one that is idle, which sees the trainer
 * die and ends the group. The other hears of the death, and not that its
 * mate left. */
static void o12_the_others_hear_why_an_idle_worker_ends_the_group(void **state)
{
    rig_options ro = {.tp_size = 2};
    pid_t child;
    setup u;
    int how;

    (void)state;
    open_workers(&u, ro, 0, SIZE_MAX);
    child = fork();
    if (child == 0)
        send_past_one(u.r);
    await_status(u.r, 0, "\"state\":\"updating\"");
    ferry__sleep_ms(100); /* it waits for its mate by then */
    kill(child, SIGKILL);
    waitpid(child, &how, 0);
    assert_true(WIFSIGNALED(how));
    await_status(u.r, 0, "\"message\":\"");
    if (!strstr(rig_status(u.r, 0), "rank 0 died or was cut off"))
        fail_msg("%s", rig_status(u.r, 0));
    close_setup(&u);
}

/* O-20: a setting of NCCL that only one end has. */
static void o20_settings_that_differ_are_named(void **state)
{
    ferry_nccl_trainer_init_info info = init_info(true);
    setup u;

    (void)state;
    fleet_host_nccl();
    info.provider = "nccl";
    setenv("NCCL_CUMEM_ENABLE", "0", 1);
    open_workers(&u, (rig_options){.tp_size = 1}, 0, SIZE_MAX);
    setenv("NCCL_CUMEM_ENABLE", "1", 1);
    assert_true(ferry_trainer_init(&info.base, &u.client, &u.source, &u.t) < 0);
    if (!strstr(ferry_last_error(), "NCCL_CUMEM_ENABLE=0") ||
        !strstr(ferry_last_error(), "NCCL_CUMEM_ENABLE=1"))
        fail_msg("%s", ferry_last_error());
    setenv("NCCL_CUMEM_ENABLE", "0", 1);
    if (ferry_trainer_init(&info.base, &u.client, &u.source, &u.t) < 0)
        fail_msg("init: %s", ferry_last_error());
    send_good(&u, 2);
    unsetenv("NCCL_CUMEM_ENABLE");
    close_setup(&u);
}

/* With staged commits a failed round changes not one byte. */
static void staged_failure_changes_nothing(void **state)
{
    rig_options ro = {.tp_size = 2, .commit = FERRY_COMMIT_STAGED};
    setup u;

    (void)state;
    open_setup(&u, ro, init_info(true), 0, SIZE_MAX);
    send_good(&u, 1);
    rig_source_fill(u.s, 2);
    rig_source_misname(u.s, 4);
    assert_int_equal(ferry_trainer_send_weights(u.t, NULL), FERRY_EMISMATCH);
    assert_null(rig_differs(u.r, 1));
    rig_source_misname(u.s, SIZE_MAX);
    send_good(&u, 3);
    close_setup(&u);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranks_in_processes_get_their_bytes),
        cmocka_unit_test(o09_failing_worker_is_named_with_its_words),
        cmocka_unit_test(o12_killed_worker_and_its_replacement),
        cmocka_unit_test(stopped_worker_is_bounded),
        cmocka_unit_test(o13_progress_decides_not_the_length),
        cmocka_unit_test(o13_a_slow_link_is_not_silent),
        cmocka_unit_test(o19_killed_trainer_and_the_next_one),
        cmocka_unit_test(o19_second_trainer_takes_over),
        cmocka_unit_test(o19_idle_workers_let_go_of_a_dead_trainer),
        cmocka_unit_test(o12_the_others_hear_why_an_idle_worker_ends_the_group),
        cmocka_unit_test(o20_settings_that_differ_are_named),
        cmocka_unit_test(staged_failure_changes_nothing),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
