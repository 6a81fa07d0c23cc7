/* SPDX-License-Identifier: Apache-2.0 */
/* The rank-forking process; see spawner.h. */
#include "serve/spawner.h"

#include "base/alloc.h"
#include "base/log.h"
#include "base/socket.h"
#include "comm/comm.h"
#include "serve/rank.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#define SPAWN_TIMEOUT_MS 30000

typedef struct spawn_call {
    int32_t dp_rank, unsynced;
} spawn_call;

typedef struct spawn_reply {
    int32_t status;
    int32_t pids[FERRY__TP_MAX];
    char line[256];
} spawn_reply;

/* The spawner's own state, in its process. */
typedef struct nursery {
    const ferry__serve_options *options;
    const ferry__model_config *config;
    int fd;
    int32_t *pids; /* dp_size × tp_size; 0 = none */
} nursery;

static ferry__waiter bounded(const char *what)
{
    ferry__waiter w = {NULL, NULL, ferry__deadline_in(SPAWN_TIMEOUT_MS), what};

    return w;
}

static void kill_replica(nursery *n, int32_t dp_rank)
{
    int32_t tp = n->options->tp_size;
    int32_t *pids = n->pids + (size_t)dp_rank * (size_t)tp;

    for (int32_t i = 0; i < tp; i++)
        if (pids[i] > 0)
            kill(pids[i], SIGKILL);
    for (int32_t i = 0; i < tp; i++) {
        if (pids[i] > 0)
            while (waitpid(pids[i], NULL, 0) < 0 && errno == EINTR)
                continue;
        pids[i] = 0;
    }
}

static void rank_child(nursery *n, const spawn_call *call, int32_t tp_rank,
                       int comm_fd, int control_fd, int step_fd, pid_t parent)
{
    ferry__rank_start start = {
        n->options, n->config,  call->dp_rank, tp_rank,
        comm_fd,    control_fd, step_fd,       call->unsynced != 0};

    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent)
        _exit(1);
    prctl(PR_SET_NAME, "ferry-rank");
    /* Signals to the whole group: the API process decides when to end. */
    signal(SIGINT, SIG_IGN);
    signal(SIGTERM, SIG_IGN);
    close(n->fd);
    _exit(ferry__rank_main(&start));
}

static void close_all(const int *fds, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (fds[i] >= 0)
            close(fds[i]);
}

/* Forks the ranks of one replica; fds take the API process's ends, control
 * then step for each rank. */
static ferry_status spawn(nursery *n, const spawn_call *call, int *fds,
                          int32_t *pids)
{
    int32_t tp = n->options->tp_size;
    int comm_fd = -1;
    pid_t self = getpid();
    ferry_status st = FERRY_OK;

    kill_replica(n, call->dp_rank);
    if (tp > 1)
        st = ferry__comm_local_create(tp, 0, &comm_fd);
    for (int32_t i = 0; i < tp && st == FERRY_OK; i++) {
        int control[2] = {-1, -1}, step[2] = {-1, -1};

        st = ferry__socket_pair(control);
        if (st == FERRY_OK)
            st = ferry__socket_pair(step);
        if (st == FERRY_OK) {
            pid_t pid = fork();

            if (pid == 0) {
                close_all(fds, 2 * (size_t)i);
                close(control[0]);
                close(step[0]);
                rank_child(n, call, i, comm_fd, control[1], step[1], self);
            }
            if (pid < 0)
                st = ferry_fail(FERRY_EINTERNAL, "fork: %s", strerror(errno));
            else
                pids[i] = n->pids[call->dp_rank * tp + i] = pid;
        }
        close_all(&control[1], 1);
        close_all(&step[1], 1);
        fds[2 * i] = control[0];
        fds[2 * i + 1] = step[0];
    }
    close_all(&comm_fd, 1);
    if (st != FERRY_OK)
        kill_replica(n, call->dp_rank);
    return st;
}

static int nursery_main(nursery *n)
{
    size_t world = (size_t)n->options->dp_size * (size_t)n->options->tp_size;
    ferry_status st = FERRY_OK;

    n->pids = ferry__alloc_array(world, sizeof *n->pids);
    while (n->pids != NULL && st == FERRY_OK) {
        /* The API process closing its end is what ends this wait. */
        ferry__waiter idle = {NULL, NULL, ferry__deadline_in(INT64_C(1) << 40),
                              "spawn"};
        ferry__waiter w;
        spawn_call call;
        spawn_reply reply = {0};
        int fds[2 * FERRY__TP_MAX];
        size_t n_fds = 2 * (size_t)n->options->tp_size;

        if (ferry__recv_all(n->fd, &call, sizeof call, &idle) < 0)
            break;
        memset(fds, -1, sizeof fds);
        reply.status = spawn(n, &call, fds, reply.pids);
        if (reply.status < 0) {
            strncpy(reply.line, ferry_last_error(), sizeof reply.line - 1);
            close_all(fds, n_fds);
            n_fds = 0;
        }
        w = bounded("spawn reply");
        st = ferry__send_fds(n->fd, &reply, sizeof reply, fds, n_fds, &w);
        close_all(fds, n_fds);
    }
    for (int32_t i = 0; n->pids != NULL && i < n->options->dp_size; i++)
        kill_replica(n, i);
    ferry__free(n->pids);
    return 0;
}

ferry_status ferry__spawner_start(const ferry__serve_options *options,
                                  const ferry__model_config *config,
                                  ferry__spawner *out)
{
    int fds[2];
    pid_t self = getpid();
    pid_t pid;

    FERRY_TRY(ferry__socket_pair(fds));
    pid = fork();
    if (pid < 0) {
        close_all(fds, 2);
        return ferry_fail(FERRY_EINTERNAL, "fork: %s", strerror(errno));
    }
    if (pid == 0) {
        nursery n = {options, config, fds[1], NULL};

        close(fds[0]);
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != self)
            _exit(1);
        prctl(PR_SET_NAME, "ferry-spawner");
        signal(SIGINT, SIG_IGN);
        signal(SIGTERM, SIG_IGN);
        _exit(nursery_main(&n));
    }
    close(fds[1]);
    out->fd = fds[0];
    out->pid = pid;
    return FERRY_OK;
}

ferry_status ferry__spawner_spawn(ferry__spawner *spawner, int32_t dp_rank,
                                  bool unsynced, int32_t tp_size,
                                  ferry__rank_ends *out)
{
    spawn_call call = {dp_rank, unsynced};
    spawn_reply reply;
    int fds[2 * FERRY__TP_MAX];
    size_t n_fds = 0;
    ferry__waiter w = bounded("spawning ranks");

    FERRY_TRY(ferry__send_all(spawner->fd, &call, sizeof call, &w));
    FERRY_TRY(ferry__recv_fds(spawner->fd, &reply, sizeof reply, fds,
                              2 * FERRY__TP_MAX, &n_fds, &w));
    if (reply.status < 0)
        return ferry__fail_line((ferry_status)reply.status, reply.line);
    if (n_fds != 2 * (size_t)tp_size) {
        close_all(fds, n_fds);
        return ferry_fail(FERRY_EINTERNAL,
                          "spawner gave %zu sockets for %d "
                          "ranks",
                          n_fds, tp_size);
    }
    for (int32_t i = 0; i < tp_size; i++) {
        out->control_fds[i] = fds[2 * i];
        out->step_fds[i] = fds[2 * i + 1];
        out->pids[i] = reply.pids[i];
    }
    return FERRY_OK;
}

void ferry__spawner_stop(ferry__spawner *spawner)
{
    ferry__deadline d = ferry__deadline_in(10000);

    if (spawner->fd < 0)
        return;
    close(spawner->fd);
    spawner->fd = -1;
    while (waitpid(spawner->pid, NULL, WNOHANG) == 0) {
        if (ferry__deadline_passed(&d)) {
            kill(spawner->pid, SIGKILL);
            waitpid(spawner->pid, NULL, 0);
            return;
        }
        ferry__sleep_ms(5);
    }
}
