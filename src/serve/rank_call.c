/* SPDX-License-Identifier: Apache-2.0 */
/* Weight calls on all ranks; see rank_call.h. */
#include "serve/rank_call.h"

#include "base/alloc.h"
#include "base/log.h"

#include <poll.h>
#include <stdio.h>
#include <string.h>

#define REPLICA_UP_MS       60000
#define DEFAULT_DEADLINE_MS 300000
#define DEADLINE_SLACK_MS   5000
#define ABORT_TIMEOUT_MS    5000
#define ASK_WAIT_MS         60000
#define SLICE_MS            200

int32_t ferry__rank_world(const ferry__server *s)
{
    return s->options->dp_size * s->options->tp_size;
}

ferry_status ferry__answers_open(const ferry__server *s, ferry__answers *out)
{
    size_t n = (size_t)ferry__rank_world(s);

    out->bodies = ferry__alloc_array(n, sizeof *out->bodies);
    out->sizes = ferry__alloc_array(n, sizeof *out->sizes);
    out->statuses = ferry__alloc_array(n, sizeof *out->statuses);
    return out->bodies == NULL || out->sizes == NULL || out->statuses == NULL
               ? FERRY_ENOMEM
               : FERRY_OK;
}

void ferry__answers_close(const ferry__server *s, ferry__answers *a)
{
    for (int32_t i = 0; a->bodies != NULL && i < ferry__rank_world(s); i++)
        ferry__free(a->bodies[i]);
    ferry__free(a->bodies);
    ferry__free(a->sizes);
    ferry__free(a->statuses);
}

/* Who holds `control`. One without a name only looks (the reaper, an abort),
 * or is about to write its name or to let go: waited for, as a question is. */
static const char *running_call(ferry__server *s, bool *out_waits)
{
    const char *running;

    pthread_mutex_lock(&s->lock);
    running = s->running;
    *out_waits = s->asking || running == NULL;
    pthread_mutex_unlock(&s->lock);
    return running == NULL ? "another weight call" : running;
}

static ferry_status begin(ferry__server *s, const char *what, bool asking)
{
    ferry__deadline d = ferry__deadline_in(ASK_WAIT_MS);

    while (pthread_mutex_trylock(&s->control) != 0) {
        bool waits;
        const char *running = running_call(s, &waits);

        if (!waits || ferry__deadline_passed(&d))
            return ferry_fail(FERRY_EBUSY, "%s refused: %s is running", what,
                              running);
        ferry__sleep_ms(2);
    }
    pthread_mutex_lock(&s->lock);
    s->running = what;
    s->asking = asking;
    pthread_mutex_unlock(&s->lock);
    return FERRY_OK;
}

ferry_status ferry__rank_call_begin(ferry__server *s, const char *what)
{
    return begin(s, what, false);
}

ferry_status ferry__rank_ask_begin(ferry__server *s, const char *what)
{
    return begin(s, what, true);
}

void ferry__rank_call_end(ferry__server *s)
{
    pthread_mutex_lock(&s->lock);
    s->running = NULL;
    s->asking = false;
    pthread_mutex_unlock(&s->lock);
    pthread_mutex_unlock(&s->control);
}

int64_t ferry__rank_bound_ms(const ferry__server *s)
{
    return s->options->deadline_ms > 0 ? s->options->deadline_ms
                                       : DEFAULT_DEADLINE_MS;
}

static int64_t call_bound_ms(const ferry__server *s)
{
    return ferry__rank_bound_ms(s) + DEADLINE_SLACK_MS;
}

static void note(ferry__answers *a, ferry_status st)
{
    if (a->first == FERRY_OK) {
        a->first = st;
        snprintf(a->line, sizeof a->line, "%s", ferry_last_error());
    } else {
        ferry__log(FERRY_LOG_WARN, "also: %s", ferry_last_error());
    }
}

static bool is_up(ferry__replica *r, char *reason, size_t size)
{
    bool up;

    pthread_mutex_lock(&r->lock);
    up = r->up;
    snprintf(reason, size, "%s", r->reason);
    pthread_mutex_unlock(&r->lock);
    return up;
}

/* Tells the ranks of all replicas to end their round; they answer even while
 * an update runs. One that does not is taken for lost. */
void ferry__rank_call_abort(ferry__server *s)
{
    char reason[512];

    for (int32_t i = 0; i < s->options->dp_size; i++)
        if (is_up(&s->replicas[i], reason, sizeof reason))
            (void)ferry__replica_exchange(&s->replicas[i], FERRY__RANK_ABORT,
                                          NULL, 0, ABORT_TIMEOUT_MS, NULL,
                                          NULL);
}

static ferry_status receive_one(ferry__server *s, int32_t i, ferry__answers *a,
                                const ferry__waiter *w)
{
    ferry__replica *r = &s->replicas[i / s->options->tp_size];
    int32_t rank = i % s->options->tp_size;
    ferry_status status = FERRY_OK;
    ferry_status st =
        ferry__rank_receive(r->ranks.control_fds[rank], w, &status,
                            a->bodies == NULL ? NULL : &a->bodies[i],
                            a->sizes == NULL ? NULL : &a->sizes[i]);

    if (st == FERRY_OK && status < 0)
        return ferry__fail_prefix(status, "replica %d rank %d", r->index, rank);
    if (st < 0) {
        ferry__fail_prefix(st, "replica %d rank %d (pid %d)", r->index, rank,
                           r->ranks.pids[rank]);
        ferry__replica_lost(r, ferry_last_error());
        return FERRY_EPEER;
    }
    return st;
}

/* Waits for an answer, at most one slice. Where the first failure ends the
 * others, for whichever comes first; else for one rank's, since the others'
 * are then there too and need no waking of their own. */
static void await_answer(struct pollfd *fds, int32_t n, bool any)
{
    int32_t first = 0;

    while (!any && first + 1 < n && fds[first].fd < 0)
        first++;
    if (!any)
        poll(&fds[first], 1, SLICE_MS);
    poll(fds, (nfds_t)n, any ? SLICE_MS : 0);
}

/* Collects the answers as they come, so that the first failure can end the
 * others at once. A replica that is lost meanwhile answers no more. */
static void collect(ferry__server *s, bool *pending, ferry__answers *a,
                    bool abort_on_failure)
{
    ferry__waiter w = {NULL, NULL, ferry__deadline_in(call_bound_ms(s)),
                       "rank answer"};
    int32_t left = 0;
    struct pollfd *fds =
        ferry__alloc_array((size_t)ferry__rank_world(s), sizeof *fds);

    for (int32_t i = 0; i < ferry__rank_world(s); i++) {
        ferry__replica *r = &s->replicas[i / s->options->tp_size];

        left += pending[i];
        if (fds != NULL)
            fds[i] = (struct pollfd){
                pending[i] ? r->ranks.control_fds[i % s->options->tp_size] : -1,
                POLLIN, 0};
    }
    while (left > 0) {
        if (fds != NULL)
            await_answer(fds, ferry__rank_world(s), abort_on_failure);
        for (int32_t i = 0; i < ferry__rank_world(s); i++) {
            ferry__replica *r = &s->replicas[i / s->options->tp_size];
            char reason[512];
            bool waits = fds != NULL && fds[i].revents == 0 &&
                         !ferry__deadline_passed(&w.deadline);
            ferry_status st;

            if (!pending[i] || (waits && is_up(r, reason, sizeof reason)))
                continue;
            st = waits ? ferry_fail(FERRY_EPEER, "replica %d rank %d: %s",
                                    r->index, i % s->options->tp_size, reason)
                       : receive_one(s, i, a, &w);
            ferry__history_answer(&s->history, i);
            pending[i] = false;
            if (a->statuses != NULL)
                a->statuses[i] = st;
            if (fds != NULL)
                fds[i].fd = -1;
            left--;
            if (st < 0) {
                bool first = a->first == FERRY_OK;

                note(a, st);
                if (first && abort_on_failure)
                    ferry__rank_call_abort(s);
            }
        }
    }
    ferry__free(fds);
}

/* One call on every rank; waits for all. Under `control`. */
ferry_status ferry__rank_call(ferry__server *s, ferry__rank_kind kind,
                              const char *body, ferry__answers *a)
{
    ferry__waiter w = {NULL, NULL, ferry__deadline_in(30000), "rank call"};
    ferry__answers own = {0};
    bool *pending =
        ferry__alloc_array((size_t)ferry__rank_world(s), sizeof *pending);

    if (pending == NULL)
        return FERRY_ENOMEM;
    if (a == NULL)
        a = &own;
    pthread_mutex_lock(&s->calls);
    ferry__history_call(&s->history, kind);
    for (int32_t i = 0; i < ferry__rank_world(s); i++) {
        ferry__replica *r = &s->replicas[i / s->options->tp_size];
        int32_t rank = i % s->options->tp_size;
        ferry_status st =
            ferry__rank_send(r->ranks.control_fds[rank], kind, body,
                             body == NULL ? 0 : strlen(body) + 1, &w);

        pending[i] = st == FERRY_OK;
        if (st < 0) {
            ferry__fail_prefix(st, "replica %d rank %d (pid %d)", r->index,
                               rank, r->ranks.pids[rank]);
            note(a, FERRY_EPEER);
            if (a->statuses != NULL)
                a->statuses[i] = FERRY_EPEER;
            ferry__replica_lost(r, a->line);
        }
    }
    /* In both the ranks may wait for one another. */
    collect(s, pending, a,
            kind == FERRY__RANK_UPDATE || kind == FERRY__RANK_INIT);
    ferry__history_called(&s->history);
    pthread_mutex_unlock(&s->calls);
    ferry__free(pending);
    if (a->first < 0)
        return ferry__fail_line(a->first, a->line);
    return FERRY_OK;
}

ferry_status ferry__rank_call_wait_up(ferry__server *s)
{
    for (int32_t i = 0; i < s->options->dp_size; i++)
        FERRY_TRY(ferry__replica_wait_up(&s->replicas[i], REPLICA_UP_MS));
    return FERRY_OK;
}
