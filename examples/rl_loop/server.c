/* SPDX-License-Identifier: Apache-2.0 */
/* Starting and ending `ferry serve`; see server.h. */
#include "server.h"

#include <jansson.h>

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define START_TIMEOUT_MS 60000
#define STOP_TIMEOUT_MS  15000

static void sleep_ms(long ms)
{
    struct timespec t = {ms / 1000, ms % 1000 * 1000000};

    nanosleep(&t, NULL);
}

/* build/examples/rl_loop finds build/bin/ferry; an installed one is found
 * by PATH. */
static void find_program(const char *given, char *out, size_t size)
{
    char self[3072];
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);

    if (given != NULL) {
        snprintf(out, size, "%s", given);
        return;
    }
    snprintf(out, size, "ferry");
    if (n > 0) {
        char *slash;
        char path[4096];

        self[n] = '\0';
        slash = strrchr(self, '/');
        *slash = '\0';
        snprintf(path, sizeof path, "%s/../bin/ferry", self);
        if (access(path, X_OK) == 0)
            snprintf(out, size, "%s", path);
    }
}

/* Becomes the server. Runs between fork and exec: no locks, no allocation. */
static void become(const char *const *argv, const char *log_path, pid_t parent)
{
    int log = open(log_path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);

    if (log < 0)
        _exit(126);
    dup2(log, STDOUT_FILENO);
    dup2(log, STDERR_FILENO);
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() != parent) /* it died before the line above */
        _exit(126);
    execvp(argv[0], (char *const *)(uintptr_t)argv); /* it writes nothing */
    _exit(127);
}

static bool read_port(const char *path, int *out)
{
    FILE *f = fopen(path, "r");
    bool good = f != NULL && fscanf(f, "%d", out) == 1 && *out > 0;

    if (f != NULL)
        fclose(f);
    return good;
}

static ferry_status wait_port(pid_t pid, const char *port_path,
                              const char *log_path, int *out_port)
{
    for (int ms = 0; ms < START_TIMEOUT_MS; ms += 20) {
        int status;

        if (read_port(port_path, out_port))
            return FERRY_OK;
        if (waitpid(pid, &status, WNOHANG) == pid)
            return ferry_fail(FERRY_EPEER,
                              "the server ended while starting (status %d), "
                              "see %s",
                              WIFEXITED(status) ? WEXITSTATUS(status)
                                                : 128 + WTERMSIG(status),
                              log_path);
        sleep_ms(20);
    }
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    return ferry_fail(FERRY_ETIMEOUT,
                      "the server did not start within %d s, "
                      "see %s",
                      START_TIMEOUT_MS / 1000, log_path);
}

ferry_status server_start(const server_options *o, server *out)
{
    char program[4096], model[4096], log_path[4096], port_path[4096];
    char tp[16], dp[16];
    const char *argv[] = {program,
                          "serve",
                          model,
                          "--load-format",
                          "dummy",
                          "--kernel-format",
                          "f32",
                          "--tensor-parallel-size",
                          tp,
                          "--data-parallel-size",
                          dp,
                          "--commit",
                          o->staged ? "staged" : "inplace",
                          "--max-num-seqs",
                          "64",
                          "--max-model-len",
                          "32",
                          "--threads",
                          "1",
                          "--host",
                          "127.0.0.1",
                          "--port",
                          "0",
                          "--port-file",
                          port_path,
                          "--weight-transfer-config",
                          "{\"backend\":\"ipc\"}",
                          NULL};
    pid_t self = getpid(), pid;
    int port = 0;

    find_program(o->program, program, sizeof program);
    snprintf(model, sizeof model, "%s/model", o->folder);
    snprintf(log_path, sizeof log_path, "%s/server.log", o->folder);
    snprintf(port_path, sizeof port_path, "%s/server.port", o->folder);
    snprintf(tp, sizeof tp, "%d", (int)o->tp);
    snprintf(dp, sizeof dp, "%d", (int)o->dp);
    unlink(port_path);
    pid = fork();
    if (pid < 0)
        return ferry_fail(FERRY_EIO, "cannot fork: %s", strerror(errno));
    if (pid == 0)
        become(argv, log_path, self);
    FERRY_TRY(wait_port(pid, port_path, log_path, &port));
    out->pid = pid;
    snprintf(out->url, sizeof out->url, "http://127.0.0.1:%d", port);
    return FERRY_OK;
}

ferry_status server_stop(server *s)
{
    pid_t pid = s->pid;
    int status = 0;

    if (pid == 0)
        return FERRY_OK;
    s->pid = 0;
    kill(pid, SIGTERM);
    for (int ms = 0; ms < STOP_TIMEOUT_MS; ms += 10) {
        if (waitpid(pid, &status, WNOHANG) == pid) {
            if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
                return FERRY_OK;
            return ferry_fail(FERRY_EPEER, "the server ended with status %d",
                              WIFEXITED(status) ? WEXITSTATUS(status)
                                                : 128 + WTERMSIG(status));
        }
        sleep_ms(10);
    }
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    return ferry_fail(FERRY_ETIMEOUT, "the server did not end within %d s",
                      STOP_TIMEOUT_MS / 1000);
}

double server_stop_ms(const char *status_json)
{
    json_t *o = json_loads(status_json, 0, NULL);
    json_t *ms = json_object_get(o, "last_stop_ms");
    double value = json_is_number(ms) ? json_number_value(ms) : -1;

    json_decref(o);
    return value;
}
