/* SPDX-License-Identifier: Apache-2.0 */
/* nccl for as long as its cases ask; the suite has shorter forms of them.
 * ctest: labels=deep,no_asan,no_tsan timeout=600 (the one holds freed memory
 * back, the other cannot follow a fork beside threads) */
#include "harness/ipc_rig.h"
#include "harness/trainer_ranks.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#define MANY  20
#define INITS 50
#define WARM  10

static rig_param many[MANY];
static char names[MANY][8];

static int name_all(void **state)
{
    (void)state;
    for (int i = 0; i < MANY; i++) {
        snprintf(names[i], sizeof(names[i]), "p%d", i);
        many[i] = (rig_param){names[i], FERRY_DTYPE_F32, 2,
                              {64, 64}, RIG_ROWS,        false};
    }
    return 0;
}

static ferry_nccl_trainer_init_info init_info(uint64_t limit)
{
    ferry_nccl_trainer_init_info info = FERRY_NCCL_TRAINER_INIT_INFO(0);

    info.packed_buffer_size_bytes = limit;
    info.provider = "tcp";
    return info;
}

/* O-10 */
static void o10_hundred_rounds_of_four_trainer_ranks(void **state)
{
    ferry_nccl_trainer_init_info info = init_info(1);
    rig *r = rig_open(&(rig_options){
        .backend = "nccl", .params = many, .count = MANY, .tp_size = 2});
    ferry_client client = rig_client(r);
    const char *why;

    (void)state;
    why = trainer_ranks_run(&(trainer_ranks){.n = 4,
                                             .client = &client,
                                             .info = &info,
                                             .params = many,
                                             .count = MANY,
                                             .turns = 100});
    assert_string_equal(why, "");
    assert_null(rig_differs(r, 100));
    rig_close(r);
}

/* ---- O-19 ---- */

static long private_kib(pid_t pid)
{
    char path[64], line[256];
    long sum = 0, kib;
    FILE *file;

    snprintf(path, sizeof(path), "/proc/%d/smaps_rollup", (int)pid);
    file = fopen(path, "r");
    assert_non_null(file);
    while (fgets(line, sizeof(line), file)) {
        if (sscanf(line, "Private_Clean: %ld", &kib) == 1 ||
            sscanf(line, "Private_Dirty: %ld", &kib) == 1)
            sum += kib;
    }
    fclose(file);
    return sum;
}

/* Sends until it is killed, or one good round. */
static ferry_status train(rig *r, bool for_ever)
{
    ferry_nccl_trainer_init_info info = init_info(20000);
    rig_source *s = rig_source_open(many, MANY, 0);
    ferry_client client = rig_client(r);
    ferry_source source = rig_source_of(s);
    ferry_trainer *t = NULL;
    ferry_status status;

    rig_source_fill(s, 3);
    status = ferry_trainer_init(&info.base, &client, &source, &t);
    do {
        if (status >= 0)
            status = ferry_trainer_send_weights(t, NULL);
    } while (for_ever && status >= 0);
    ferry_trainer_shutdown(&t);
    rig_source_close(s);
    return status;
}

static void kill_one(rig *r, int turn)
{
    pid_t child = fork();
    int how;

    if (child == 0)
        _exit(train(r, true) < 0 ? 9 : 0);
    usleep((useconds_t)(20000 + 1700 * (turn % 23)));
    kill(child, SIGKILL);
    waitpid(child, &how, 0);
    assert_true(WIFSIGNALED(how));
}

static void o19_fifty_trainers_die_and_are_followed(void **state)
{
    rig *r = rig_open(&(rig_options){
        .backend = "nccl", .params = many, .count = MANY, .tp_size = 2});
    int fds[2] = {0, 0};
    long kib[2] = {0, 0};

    (void)state;
    for (int turn = 0; turn < INITS; turn++) {
        kill_one(r, turn);
        if (train(r, false) < 0)
            fail_msg("turn %d: %s", turn, ferry_last_error());
        assert_null(rig_differs(r, 3));
        for (int i = 0; i < 2 && turn == WARM; i++) {
            fds[i] = rig_fds(r, i);
            kib[i] = private_kib(rig_pid(r, i));
        }
    }
    for (int i = 0; i < 2; i++) {
        long now = private_kib(rig_pid(r, i));

        if (rig_fds(r, i) > fds[i] + 1 || now > kib[i] + kib[i] / 100 + 128)
            fail_msg("rank %d: %d descriptors became %d, %ld KiB %ld", i,
                     fds[i], rig_fds(r, i), kib[i], now);
    }
    rig_close(r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(o10_hundred_rounds_of_four_trainer_ranks),
        cmocka_unit_test(o19_fifty_trainers_die_and_are_followed),
    };

    return cmocka_run_group_tests(tests, name_all, NULL);
}
