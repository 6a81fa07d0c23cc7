/* SPDX-License-Identifier: Apache-2.0 */
/* One replica's sockets, life and gate; see server.h. */
#include "base/alloc.h"
#include "base/log.h"
#include "base/thread.h"
#include "serve/server.h"

#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define LOAD_TIMEOUT_MS 1800000
#define ASK_MS          30000

static void clear_ends(ferry__rank_ends *e)
{
    for (int i = 0; i < FERRY__TP_MAX; i++)
        e->control_fds[i] = e->step_fds[i] = -1;
}

static void close_ends(ferry__rank_ends *e)
{
    for (int i = 0; i < FERRY__TP_MAX; i++) {
        if (e->control_fds[i] >= 0)
            close(e->control_fds[i]);
        if (e->step_fds[i] >= 0)
            close(e->step_fds[i]);
    }
    clear_ends(e);
}

ferry_status ferry__replica_init(ferry__replica *r, ferry__server *server,
                                 int32_t index)
{
    memset(r, 0, sizeof *r);
    r->server = server;
    r->index = index;
    r->queue_tail = &r->queue;
    clear_ends(&r->ranks);
    pthread_mutex_init(&r->lock, NULL);
    pthread_mutex_init(&r->step_io, NULL);
    pthread_mutex_init(&r->step_turn, NULL);
    FERRY_TRY(ferry__cond_init(&r->cond));
    FERRY_TRY(ferry__asker_init(&r->asker));
    snprintf(r->reason, sizeof r->reason, "replica %d is starting", index);
    r->active = ferry__alloc_array((size_t)server->options->max_seqs,
                                   sizeof *r->active);
    return r->active == NULL ? FERRY_ENOMEM : FERRY_OK;
}

void ferry__replica_destroy(ferry__replica *r)
{
    if (r->server == NULL)
        return;
    if (r->thread_started) {
        pthread_mutex_lock(&r->lock);
        r->stop = true;
        pthread_cond_broadcast(&r->cond);
        pthread_mutex_unlock(&r->lock);
        pthread_join(r->thread, NULL);
    }
    ferry__asker_destroy(&r->asker);
    close_ends(&r->ranks);
    ferry__free(r->active);
    pthread_cond_destroy(&r->cond);
    pthread_mutex_destroy(&r->lock);
    pthread_mutex_destroy(&r->step_io);
    pthread_mutex_destroy(&r->step_turn);
    r->server = NULL;
}

static bool stopping(void *arg)
{
    ferry__server *s = arg;
    bool stop;

    pthread_mutex_lock(&s->lock);
    stop = s->stopping;
    pthread_mutex_unlock(&s->lock);
    return stop;
}

static ferry_status load_check(void *arg)
{
    if (stopping(arg))
        return ferry_fail(FERRY_ECANCELED, "the server is stopping");
    return FERRY_OK;
}

static ferry_status wait_loaded(ferry__replica *r, const ferry__rank_ends *ends)
{
    ferry__waiter w = {load_check, r->server,
                       ferry__deadline_in(LOAD_TIMEOUT_MS),
                       "ranks to load the model"};

    for (int32_t i = 0; i < r->server->options->tp_size; i++) {
        ferry_status status = FERRY_OK;
        ferry_status st =
            ferry__rank_receive(ends->control_fds[i], &w, &status, NULL, NULL);

        if (st == FERRY_OK)
            st = status;
        if (st < 0)
            return ferry__fail_prefix(st, "replica %d rank %d (pid %d)",
                                      r->index, i, ends->pids[i]);
    }
    return FERRY_OK;
}

ferry_status ferry__replica_start(ferry__replica *r)
{
    ferry__server *s = r->server;
    ferry__rank_ends ends;
    ferry_status st;

    clear_ends(&ends);
    pthread_mutex_lock(&s->spawner_lock);
    st = ferry__spawner_spawn(&s->spawner, r->index, r->unsynced,
                              s->options->tp_size, &ends);
    pthread_mutex_unlock(&s->spawner_lock);
    if (st == FERRY_OK)
        st = wait_loaded(r, &ends);
    /* A call that still reads the old sockets ends first, since their ranks
     * are dead. */
    pthread_mutex_lock(&s->calls);
    pthread_mutex_lock(&r->step_io);
    close_ends(&r->ranks);
    r->ranks = ends;
    ferry__replica_status_fresh(r);
    pthread_mutex_unlock(&r->step_io);
    pthread_mutex_unlock(&s->calls);
    pthread_mutex_lock(&r->lock);
    r->up = st == FERRY_OK;
    snprintf(r->reason, sizeof r->reason, "%s",
             st < 0 ? ferry_last_error() : "");
    pthread_cond_broadcast(&r->cond);
    pthread_mutex_unlock(&r->lock);
    if (st == FERRY_OK)
        ferry__replica_refresh(r);
    return st;
}

void ferry__replica_fail_requests(ferry__replica *r, ferry_status status,
                                  const char *line)
{
    for (int32_t i = 0; i < r->server->options->max_seqs; i++) {
        if (r->active[i] != NULL)
            ferry__request_fail(r->active[i], status, line);
        r->active[i] = NULL;
    }
    r->n_active = 0;
    while (r->queue != NULL) {
        ferry__request *q = r->queue;

        r->queue = q->next;
        ferry__request_fail(q, status, line);
    }
    r->queue_tail = &r->queue;
    r->n_queued = 0;
}

void ferry__replica_lost(ferry__replica *r, const char *line)
{
    pthread_mutex_lock(&r->lock);
    if (r->up) {
        bool changed, stopping;

        pthread_mutex_lock(&r->server->lock);
        changed = r->server->rounds_finished > 0 || r->server->prepared ||
                  r->server->options->join != NULL;
        r->server->content++;
        stopping = r->server->stopping;
        pthread_mutex_unlock(&r->server->lock);
        ferry__log(stopping ? FERRY_LOG_DEBUG : FERRY_LOG_ERROR,
                   "replica %d lost: %s", r->index, line);
        r->up = false;
        r->serving = false;
        /* What it served came over the wire and is gone with it. */
        r->unsynced = r->unsynced || changed;
        r->n_restarts++;
        snprintf(r->reason, sizeof r->reason, "%s", line);
        ferry__replica_fail_requests(r, FERRY_EPEER, line);
        pthread_cond_broadcast(&r->cond);
    }
    pthread_mutex_unlock(&r->lock);
}

ferry_status ferry__replica_wait_up(ferry__replica *r, int64_t timeout_ms)
{
    ferry__deadline d = ferry__deadline_in(timeout_ms);
    char reason[512];
    bool up;

    pthread_mutex_lock(&r->lock);
    while (!r->up && !r->stop && !ferry__deadline_passed(&d))
        ferry__cond_wait_until(&r->cond, &r->lock, d.at_ns);
    up = r->up;
    memcpy(reason, r->reason, sizeof reason);
    pthread_mutex_unlock(&r->lock);
    if (!up)
        return ferry_fail(FERRY_ENOTREADY, "replica %d is not up: %s", r->index,
                          reason);
    return FERRY_OK;
}

void ferry__replica_gate_close(ferry__replica *r)
{
    pthread_mutex_lock(&r->lock);
    r->gates++;
    /* A step is bounded by its own timeout, so this wait is too. */
    while (r->stepping || r->readers > 0)
        ferry__cond_wait_until(&r->cond, &r->lock, ferry__now_ns() + 100000000);
    pthread_mutex_unlock(&r->lock);
}

void ferry__replica_gate_open(ferry__replica *r)
{
    bool work;

    pthread_mutex_lock(&r->lock);
    work = --r->gates == 0 && (r->queue != NULL || r->n_active > 0);
    pthread_mutex_unlock(&r->lock);
    /* Unlocked: who wakes under the lock only waits for it again. */
    if (work)
        pthread_cond_broadcast(&r->cond);
}

/* A scheduler that takes the sockets again as soon as it let go of them would
 * keep everybody else waiting; so the next one is settled beforehand. */
void ferry__replica_io_lock(ferry__replica *r)
{
    pthread_mutex_lock(&r->step_turn);
    pthread_mutex_lock(&r->step_io);
    pthread_mutex_unlock(&r->step_turn);
}

ferry_status ferry__replica_receive(ferry__replica *r, int32_t rank,
                                    const ferry__waiter *w, void **out_body,
                                    size_t *out_size)
{
    ferry_status status = FERRY_OK;
    ferry_status st = ferry__rank_receive(r->ranks.step_fds[rank], w, &status,
                                          out_body, out_size);

    if (st < 0) {
        ferry__fail_prefix(st, "replica %d rank %d (pid %d)", r->index, rank,
                           r->ranks.pids[rank]);
        return FERRY_ECONN;
    }
    return status < 0 ? ferry__fail_prefix(status, "replica %d rank %d",
                                           r->index, rank)
                      : FERRY_OK;
}

ferry_status ferry__replica_exchange(ferry__replica *r, int32_t kind,
                                     const void *body, size_t size_bytes,
                                     int64_t timeout_ms, void **bodies,
                                     size_t *sizes)
{
    ferry__waiter w = {NULL, NULL, ferry__deadline_in(timeout_ms), "rank step"};
    int32_t tp = r->server->options->tp_size;
    ferry_status first = FERRY_OK;
    char line[1024] = "";

    ferry__replica_io_lock(r);
    for (int32_t i = 0; i < tp && first == FERRY_OK; i++)
        first = ferry__rank_send(r->ranks.step_fds[i], (ferry__rank_kind)kind,
                                 body, size_bytes, &w);
    if (first < 0) {
        ferry__fail_prefix(first, "replica %d", r->index);
        first = FERRY_ECONN;
    }
    for (int32_t i = 0; i < tp && first != FERRY_ECONN; i++) {
        size_t size = 0;
        ferry_status st = ferry__replica_receive(
            r, i, &w, bodies ? &bodies[i] : NULL, sizes ? &sizes[i] : &size);

        if (st < 0 && (first == FERRY_OK || st == FERRY_ECONN)) {
            first = st;
            snprintf(line, sizeof line, "%s", ferry_last_error());
        }
    }
    pthread_mutex_unlock(&r->step_io);
    if (first < 0 && line[0])
        ferry__fail_line(first, line);
    if (first == FERRY_ECONN)
        ferry__replica_lost(r, ferry_last_error());
    return first;
}

/* Whether all ranks may serve; else why not is in `reason`. */
static bool ranks_serve(const ferry__replica *r, json_t *const *statuses,
                        char *reason, size_t size)
{
    for (int32_t i = 0; i < r->server->options->tp_size; i++) {
        const char *why;

        if (json_is_true(json_object_get(statuses[i], "serving")))
            continue;
        why = json_string_value(json_object_get(statuses[i], "reason"));
        snprintf(reason, size, "replica %d rank %d: %s", r->index, i,
                 why == NULL ? "not serving" : why);
        return false;
    }
    return true;
}

static void set_serving(ferry__replica *r, bool serving, const char *reason)
{
    bool changed = false;

    pthread_mutex_lock(&r->lock);
    if (r->up) {
        changed = r->serving != serving;
        r->serving = serving;
        snprintf(r->reason, sizeof r->reason, "%s", reason);
        if (serving)
            r->unsynced = false;
    }
    pthread_mutex_unlock(&r->lock);
    if (changed)
        pthread_cond_broadcast(&r->cond);
}

static void take(ferry__replica *r, json_t **statuses)
{
    int32_t tp = r->server->options->tp_size;
    char reason[512] = "";
    bool serving = ranks_serve(r, statuses, reason, sizeof reason);

    for (int32_t i = 0; i < tp; i++)
        ferry__replica_status_said(r, i, statuses[i]);
    for (int32_t i = 0; i < tp; i++)
        ferry__history_rank(&r->server->history, r->index * tp + i,
                            statuses[i]);
    set_serving(r, serving, reason);
}

ferry_status ferry__replica_ask(ferry__replica *r, int32_t rank, int32_t kind,
                                const void *body, size_t size_bytes,
                                void **out_body, size_t *out_size)
{
    ferry__waiter w = {NULL, NULL, ferry__deadline_in(ASK_MS), "rank answer"};
    ferry_status st;

    ferry__replica_io_lock(r);
    st = ferry__rank_send(r->ranks.step_fds[rank], (ferry__rank_kind)kind, body,
                          size_bytes, &w);
    if (st < 0) {
        ferry__fail_prefix(st, "replica %d rank %d", r->index, rank);
        st = FERRY_ECONN;
    } else {
        st = ferry__replica_receive(r, rank, &w, out_body, out_size);
    }
    pthread_mutex_unlock(&r->step_io);
    if (st == FERRY_ECONN)
        ferry__replica_lost(r, ferry_last_error());
    if (st < 0) {
        ferry__free(*out_body);
        *out_body = NULL;
    }
    return st;
}

void ferry__replica_refresh(ferry__replica *r)
{
    void *bodies[FERRY__TP_MAX] = {0};
    size_t sizes[FERRY__TP_MAX] = {0};
    json_t *statuses[FERRY__TP_MAX] = {0};
    ferry_status st = ferry__replica_exchange(r, FERRY__RANK_STATUS, NULL, 0,
                                              30000, bodies, sizes);

    if (st < 0)
        set_serving(r, false, ferry_last_error());
    for (int32_t i = 0; i < r->server->options->tp_size; i++) {
        if (bodies[i] != NULL)
            statuses[i] = json_loadb(bodies[i], sizes[i], 0, NULL);
        ferry__free(bodies[i]);
    }
    if (st == FERRY_OK)
        take(r, statuses);
    else
        for (int32_t i = 0; i < r->server->options->tp_size; i++)
            json_decref(statuses[i]);
}

void ferry__replica_take_statuses(ferry__replica *r, json_t **statuses)
{
    int32_t tp = r->server->options->tp_size, n = 0;

    for (int32_t i = 0; i < tp; i++)
        n += statuses[i] != NULL;
    if (n == tp) {
        take(r, statuses);
        return;
    }
    for (int32_t i = 0; i < tp; i++)
        json_decref(statuses[i]);
    ferry__replica_refresh(r);
}
