/* SPDX-License-Identifier: Apache-2.0 */
/* `ferry serve` from its flags to its end. The order matters: the spawner is
 * forked before the first thread, replicas load before the port opens. */
#include "serve/server.h"

#include "base/alloc.h"
#include "base/config.h"
#include "base/log.h"
#include "base/socket.h"
#include "base/thread.h"
#include "serve/http.h"
#include "serve/join.h"

#include <errno.h>
#include <ferry/registry.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

char *ferry__server_version(ferry__server *s)
{
    char *copy;

    pthread_mutex_lock(&s->lock);
    copy = ferry__strdup(s->version);
    pthread_mutex_unlock(&s->lock);
    return copy;
}

/* Fills what depends on the model and the machine, and refuses what cannot
 * be before anything is started. */
static ferry_status settle(ferry__serve_options *o, ferry__model_config *config)
{
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    int32_t ranks = o->tp_size * o->dp_size;
    bool known = false;
    ferry_backend_info info = {.size = sizeof info};

    FERRY_TRY(ferry__model_config_open(o->model, config));
    FERRY_TRY(ferry__model_config_check(config, o->tp_size, o->kernel));
    if (o->threads == 0)
        o->threads = cores > ranks ? (int32_t)(cores / ranks) : 1;
    if (o->max_len == 0)
        o->max_len = config->max_positions > 0 && config->max_positions < 2048
                         ? (int32_t)config->max_positions
                         : 2048;
    if (config->max_positions > 0 && o->max_len > config->max_positions)
        return ferry_fail(FERRY_EINVAL,
                          "--max-model-len %d is beyond the model's %lld",
                          o->max_len, (long long)config->max_positions);
    for (size_t i = 0; o->backend != NULL && !known &&
                       ferry_worker_list(i, &info) == FERRY_OK;
         i++)
        known = strcmp(info.name, o->backend) == 0;
    if (o->backend != NULL && !known) {
        const struct ferry_worker_engine_ops *ops;

        return ferry_worker_find(o->backend, &ops); /* names the known */
    }
    if (o->backend != NULL && !info.available)
        return ferry_fail(FERRY_EBACKEND, "backend %s: %s", o->backend,
                          info.reason);
    return FERRY_OK;
}

static ferry_status open_tokenizer(ferry__server *s)
{
    ferry_status st = ferry__tokenizer_open(s->options->model, &s->tokenizer);

    if (st == FERRY_EUNKNOWN) {
        ferry__log(FERRY_LOG_WARN, "no tokenizer: %s; token ids only",
                   ferry_last_error());
        return FERRY_OK;
    }
    return st;
}

static ferry_status start_replicas(ferry__server *s)
{
    for (int32_t i = 0; i < s->options->dp_size; i++)
        FERRY_TRY(ferry__replica_start(&s->replicas[i]));
    for (int32_t i = 0; i < s->options->dp_size; i++) {
        ferry__replica *r = &s->replicas[i];

        FERRY_TRY(ferry__thread_start(&r->thread, "ferry-sched",
                                      ferry__scheduler_run, r));
        r->thread_started = true;
        FERRY_TRY(ferry__asker_start(r));
    }
    return FERRY_OK;
}

static ferry_status server_init(ferry__server *s)
{
    pthread_mutex_init(&s->control, NULL);
    pthread_mutex_init(&s->calls, NULL);
    pthread_mutex_init(&s->ending, NULL);
    pthread_mutex_init(&s->lock, NULL);
    pthread_mutex_init(&s->spawner_lock, NULL);
    ferry__metrics_init(&s->metrics);
    FERRY_TRY(ferry__random_hex(s->instance, 16));
    FERRY_TRY(ferry__history_init(&s->history, s->options->tp_size,
                                  s->options->dp_size));
    s->version = ferry__strdup("default");
    s->replicas =
        ferry__alloc_array((size_t)s->options->dp_size, sizeof *s->replicas);
    if (s->version == NULL || s->replicas == NULL)
        return FERRY_ENOMEM;
    for (int32_t i = 0; i < s->options->dp_size; i++)
        FERRY_TRY(ferry__replica_init(&s->replicas[i], s, i));
    return FERRY_OK;
}

static void server_free(ferry__server *s)
{
    pthread_mutex_lock(&s->lock);
    s->stopping = true;
    pthread_mutex_unlock(&s->lock);
    for (int32_t i = 0; s->replicas != NULL && i < s->options->dp_size; i++)
        ferry__replica_destroy(&s->replicas[i]);
    ferry__spawner_stop(&s->spawner);
    ferry__history_free(&s->history);
    ferry__free(s->replicas);
    ferry__free(s->version);
    ferry__free(s->last_failure);
    ferry__tokenizer_close(&s->tokenizer);
}

static bool write_number(const char *path, int32_t number)
{
    FILE *f = fopen(path, "we");
    bool written;
    int error;

    if (f == NULL)
        return false;
    written = fprintf(f, "%d\n", number) > 0;
    error = errno;
    if (fclose(f) != 0)
        return false;
    errno = error;
    return written;
}

/* Who waits for the file finds the port in it: it takes its name whole. What
 * is no plain file, as a pipe or a link, is written into. */
static ferry_status write_port(const ferry__server *s)
{
    const char *path = s->options->port_file;
    char whole[4096];
    struct stat info;
    bool written, named;
    int error;

    if (path == NULL)
        return FERRY_OK;
    named = lstat(path, &info) == 0 && !S_ISREG(info.st_mode);
    if (!named && snprintf(whole, sizeof whole, "%s.%d", path, getpid()) >=
                      (int)sizeof whole)
        return ferry_fail(FERRY_EINVAL,
                          "--port-file: the path is longer than "
                          "%zu bytes",
                          sizeof whole);
    written = write_number(named ? path : whole, s->port) &&
              (named || rename(whole, path) == 0);
    error = errno;
    if (!written && !named)
        unlink(whole);
    return written ? FERRY_OK
                   : ferry_fail(FERRY_EIO, "cannot write the port to %s: %s",
                                path, strerror(error));
}

static void announce(const ferry__server *s)
{
    const char *host = s->options->host;
    bool v6 = strchr(host, ':') != NULL;

    printf("ferry: serving %s on %s://%s%s%s:%d\n", s->options->served_name,
           s->tls_cert != NULL ? "https" : "http", v6 ? "[" : "", host,
           v6 ? "]" : "", s->port);
    fflush(stdout);
}

/* Answers requests that wait for generation, so that the HTTP threads end. */
static void release_requests(ferry__server *s)
{
    pthread_mutex_lock(&s->lock);
    s->stopping = true;
    pthread_mutex_unlock(&s->lock);
    for (int32_t i = 0; i < s->options->dp_size; i++) {
        ferry__replica *r = &s->replicas[i];

        pthread_mutex_lock(&r->lock);
        r->stop = true;
        pthread_cond_broadcast(&r->cond);
        pthread_mutex_unlock(&r->lock);
    }
}

/* Until a signal comes, joining failed, or the spawner is gone, without which
 * no rank can be started again; meanwhile, looks for rounds that were left
 * open. A server that joins says that it serves once it has the weights. */
static ferry_status wait_for_end(ferry__server *s, ferry__join *join,
                                 const sigset_t *ends)
{
    const struct timespec slice = {0, 500000000};
    bool announced = false;
    int number;

    do {
        FERRY_TRY(ferry__join_check(join));
        if (ferry__socket_hung_up(s->spawner.fd))
            return ferry_fail(FERRY_EPEER,
                              "the spawner (pid %d) is gone: no rank can be "
                              "started without it",
                              s->spawner.pid);
        if (!announced && ferry__join_done(join)) {
            announce(s);
            announced = true;
        }
        ferry__control_reap(s);
        number = sigtimedwait(ends, NULL, &slice);
    } while (number < 0);
    ferry__log(FERRY_LOG_INFO, "signal %d: stopping", number);
    return FERRY_OK;
}

static ferry_status serve(ferry__server *s, const sigset_t *ends)
{
    struct MHD_Daemon *daemon = NULL;
    ferry__join join = {0};
    char line[1024];
    ferry_status st;

    FERRY_TRY(server_init(s));
    FERRY_TRY(open_tokenizer(s));
    FERRY_TRY(start_replicas(s));
    st = ferry__http_start(s, &daemon, &s->port);
    if (st == FERRY_OK)
        st = write_port(s);
    if (st == FERRY_OK)
        st = ferry__join_begin(&join, s);
    if (st < 0) {
        ferry__http_stop(s, daemon);
        return st;
    }
    st = wait_for_end(s, &join, ends);
    if (st < 0)
        snprintf(line, sizeof line, "%s", ferry_last_error());
    release_requests(s);
    ferry__join_end(&join);
    (void)ferry__control_abort(s);
    ferry__http_stop(s, daemon);
    return st < 0 ? ferry__fail_line(st, line) : FERRY_OK;
}

int ferry__serve_main(int argc, char **argv)
{
    ferry__serve_options options;
    ferry__model_config config = {0};
    ferry__server s = {
        .options = &options, .config = &config, .spawner = {.fd = -1}};
    sigset_t ends;
    ferry_status st = ferry__serve_options_read(argc, argv, &options);

    if (st < 0) {
        fprintf(stderr, "ferry serve: %s\n", ferry_last_error());
        return 2;
    }
    if (options.help) {
        fputs(ferry__serve_usage(), stdout);
        ferry__serve_options_free(&options);
        return 0;
    }
    signal(SIGPIPE, SIG_IGN);
    sigemptyset(&ends);
    sigaddset(&ends, SIGTERM);
    sigaddset(&ends, SIGINT);
    st = settle(&options, &config);
    if (st == FERRY_OK)
        st = ferry__spawner_start(&options, &config, &s.spawner);
    /* Blocked only after the fork: the ranks take the default. */
    pthread_sigmask(SIG_BLOCK, &ends, NULL);
    if (st == FERRY_OK)
        st = serve(&s, &ends);
    if (st < 0)
        fprintf(stderr, "ferry serve: %s\n", ferry_last_error());
    server_free(&s);
    ferry__serve_options_free(&options);
    return st < 0 ? 1 : 0;
}
