/* SPDX-License-Identifier: Apache-2.0 */
/* How the ranks of a replica are; see server.h.
 * Invariant: a question is on its way to a rank at most once, and its answer
 * is read before the step sockets are given back or the replica is lost. */
#include "base/alloc.h"
#include "base/log.h"
#include "base/thread.h"
#include "serve/server.h"

#include <poll.h>
#include <string.h>

#define ANSWER_MS 30000
#define SLICE_MS  50
/* After so long the others are asked again beside one that does not answer.
 * Not sooner: new questions must not keep a step from its sockets. */
#define STUCK_NS (INT64_C(500) * 1000000)

/* One visit to the step sockets. */
typedef struct visit {
    ferry__replica *r;
    int32_t n;
    uint64_t first; /* the question that it was begun for */
    bool pending[FERRY__TP_MAX];
    uint64_t question[FERRY__TP_MAX];
    int64_t sent_ns[FERRY__TP_MAX];
} visit;

static bool is_up(ferry__replica *r)
{
    bool up;

    pthread_mutex_lock(&r->lock);
    up = r->up;
    pthread_mutex_unlock(&r->lock);
    return up;
}

/* An answer to the newest question answers all before it. */
static uint64_t newest_question(ferry__asker *a)
{
    uint64_t question;

    pthread_mutex_lock(&a->lock);
    question = a->asked;
    pthread_mutex_unlock(&a->lock);
    return question;
}

static ferry_status ask(visit *v, uint64_t question)
{
    ferry__replica *r = v->r;
    ferry__waiter w = {NULL, NULL, ferry__deadline_in(ANSWER_MS), "rank step"};

    for (int32_t i = 0; i < v->n; i++) {
        if (v->pending[i] || v->question[i] == question)
            continue;
        if (ferry__rank_send(r->ranks.step_fds[i], FERRY__RANK_STATUS, NULL, 0,
                             &w) < 0)
            return ferry__fail_prefix(FERRY_ECONN, "replica %d rank %d",
                                      r->index, i);
        v->pending[i] = true;
        v->question[i] = question;
        v->sent_ns[i] = ferry__now_ns();
    }
    return FERRY_OK;
}

static void keep(ferry__asker *a, int32_t rank, json_t *status,
                 uint64_t question)
{
    json_t *old;

    pthread_mutex_lock(&a->lock);
    old = a->said[rank];
    a->said[rank] = status;
    if (question > a->heard[rank])
        a->heard[rank] = question;
    pthread_cond_broadcast(&a->cond);
    pthread_mutex_unlock(&a->lock);
    json_decref(old);
}

static ferry_status hear(visit *v, int32_t rank)
{
    int64_t gone_ms = (ferry__now_ns() - v->sent_ns[rank]) / 1000000;
    ferry__waiter w = {
        NULL, NULL,
        ferry__deadline_in(gone_ms < ANSWER_MS ? ANSWER_MS - gone_ms : 0),
        "rank step"};
    void *body = NULL;
    size_t size = 0;
    ferry_status st = ferry__replica_receive(v->r, rank, &w, &body, &size);
    json_t *status = st < 0 ? NULL : json_loadb(body, size, 0, NULL);

    v->pending[rank] = false;
    ferry__free(body);
    if (status != NULL)
        keep(&v->r->asker, rank, status, v->question[rank]);
    return st == FERRY_ECONN ? st : FERRY_OK;
}

/* Takes the answers that are there, waiting a slice at most for the first.
 * One that is overdue counts as there: receiving it says so. */
static ferry_status hear_some(visit *v)
{
    struct pollfd fds[FERRY__TP_MAX];
    int64_t late_ns = ferry__now_ns() - INT64_C(1000000) * ANSWER_MS;

    for (int32_t i = 0; i < v->n; i++)
        fds[i] = (struct pollfd){v->pending[i] ? v->r->ranks.step_fds[i] : -1,
                                 POLLIN, 0};
    poll(fds, (nfds_t)v->n, SLICE_MS);
    for (int32_t i = 0; i < v->n; i++)
        if (v->pending[i] && (fds[i].revents != 0 || v->sent_ns[i] < late_ns))
            FERRY_TRY(hear(v, i));
    return FERRY_OK;
}

/* How many answers are awaited, and since when one to the first question:
 * later ones do not lengthen the visit. */
static int32_t count_pending(const visit *v, int64_t *out_since_ns)
{
    int32_t n = 0;

    *out_since_ns = INT64_MAX;
    for (int32_t i = 0; i < v->n; i++) {
        n += v->pending[i];
        if (v->pending[i] && v->question[i] == v->first &&
            v->sent_ns[i] < *out_since_ns)
            *out_since_ns = v->sent_ns[i];
    }
    return n;
}

static bool stops(ferry__asker *a)
{
    bool stop;

    pthread_mutex_lock(&a->lock);
    stop = a->stop;
    pthread_mutex_unlock(&a->lock);
    return stop;
}

/* Under step_io. */
static ferry_status visit_ranks(visit *v)
{
    ferry__asker *a = &v->r->asker;
    int64_t since_ns;

    v->first = newest_question(a);
    FERRY_TRY(ask(v, v->first));
    /* A server that stops has no more use for its ranks. */
    while (count_pending(v, &since_ns) > 0 && !stops(a)) {
        FERRY_TRY(hear_some(v));
        if (count_pending(v, &since_ns) > 0 &&
            ferry__now_ns() - since_ns > STUCK_NS)
            FERRY_TRY(ask(v, newest_question(a)));
    }
    return FERRY_OK;
}

/* The question up to which no answer comes any more. One that did not answer
 * for long is asked again, if there were questions meanwhile. */
static uint64_t ask_ranks(ferry__replica *r)
{
    visit v = {.r = r, .n = r->server->options->tp_size};
    uint64_t done;
    ferry_status st;

    if (!is_up(r))
        return newest_question(&r->asker);
    ferry__replica_io_lock(r);
    st = visit_ranks(&v);
    pthread_mutex_unlock(&r->step_io);
    if (st < 0) {
        ferry__replica_lost(r, ferry_last_error());
        return newest_question(&r->asker);
    }
    done = v.question[0];
    for (int32_t i = 1; i < v.n; i++)
        done = v.question[i] < done ? v.question[i] : done;
    return done;
}

static void *run(void *replica)
{
    ferry__replica *r = replica;
    ferry__asker *a = &r->asker;

    pthread_mutex_lock(&a->lock);
    while (!a->stop) {
        uint64_t done;

        if (a->done == a->asked) {
            ferry__cond_wait_until(&a->cond, &a->lock,
                                   ferry__now_ns() + INT64_C(1000000000));
            continue;
        }
        pthread_mutex_unlock(&a->lock);
        done = ask_ranks(r);
        pthread_mutex_lock(&a->lock);
        a->done = done;
        pthread_cond_broadcast(&a->cond);
    }
    pthread_mutex_unlock(&a->lock);
    return NULL;
}

ferry_status ferry__asker_init(ferry__asker *a)
{
    pthread_mutex_init(&a->lock, NULL);
    return ferry__cond_init(&a->cond);
}

ferry_status ferry__asker_start(ferry__replica *r)
{
    FERRY_TRY(ferry__thread_start(&r->asker.thread, "ferry-asker", run, r));
    r->asker.thread_started = true;
    return FERRY_OK;
}

void ferry__asker_destroy(ferry__asker *a)
{
    pthread_mutex_lock(&a->lock);
    a->stop = true;
    pthread_cond_broadcast(&a->cond);
    pthread_mutex_unlock(&a->lock);
    if (a->thread_started)
        pthread_join(a->thread, NULL);
    for (int i = 0; i < FERRY__TP_MAX; i++)
        json_decref(a->said[i]);
    pthread_cond_destroy(&a->cond);
    pthread_mutex_destroy(&a->lock);
}

uint64_t ferry__replica_status_ask(ferry__replica *r)
{
    ferry__asker *a = &r->asker;
    uint64_t question;

    pthread_mutex_lock(&a->lock);
    question = ++a->asked;
    pthread_cond_broadcast(&a->cond);
    pthread_mutex_unlock(&a->lock);
    return question;
}

static bool all_heard(const ferry__asker *a, int32_t n, uint64_t question)
{
    for (int32_t i = 0; i < n; i++)
        if (a->heard[i] < question)
            return false;
    return true;
}

json_t *ferry__replica_status_take(ferry__replica *r, uint64_t question,
                                   const ferry__deadline *until)
{
    int32_t n = r->server->options->tp_size;
    json_t *array = json_array();
    ferry__asker *a = &r->asker;

    pthread_mutex_lock(&a->lock);
    while (!all_heard(a, n, question) && a->done < question && !a->stop &&
           !ferry__deadline_passed(until))
        ferry__cond_wait_until(&a->cond, &a->lock, until->at_ns);
    for (int32_t i = 0; i < n; i++) {
        json_t *o = a->said[i] == NULL ? NULL : json_deep_copy(a->said[i]);

        if (o != NULL) {
            json_object_set_new(o, "pid", json_integer(a->pids[i]));
            json_object_set_new(o, "answered",
                                json_boolean(a->heard[i] >= question));
        }
        json_array_append_new(array, o == NULL ? json_null() : o);
    }
    pthread_mutex_unlock(&a->lock);
    return array;
}

void ferry__replica_status_fresh(ferry__replica *r)
{
    ferry__asker *a = &r->asker;

    pthread_mutex_lock(&a->lock);
    for (int i = 0; i < FERRY__TP_MAX; i++) {
        json_decref(a->said[i]);
        a->said[i] = NULL;
        a->pids[i] = r->ranks.pids[i];
    }
    pthread_mutex_unlock(&a->lock);
}

void ferry__replica_status_said(ferry__replica *r, int32_t rank,
                                const json_t *status)
{
    if (status != NULL)
        keep(&r->asker, rank, json_deep_copy(status), 0);
}
