/* SPDX-License-Identifier: Apache-2.0 */
/* One call to all clients of a fan-out; see fanout_call.h. */
#include "clients/fanout_call.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/str.h"
#include "base/thread.h"
#include "clients/client_ops.h"
#include "clients/fanout_ranks.h"

#include <stdio.h>
#include <string.h>

#define LINE_BYTES 1024
/* How long the others may go on after one failed in a call during which
 * they wait for bytes that will not come any more. */
#define GRACE_MS 500

struct call;

typedef struct job {
    struct call *call;
    size_t index;
    pthread_t thread;
    bool started;
    ferry_status status;
    char line[LINE_BYTES];
} job;

/* One call on its way to all clients. */
typedef struct call {
    ferry__fanout *f;
    ferry__fanout_fn fn;
    void *arg;
    job *jobs;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    size_t n_running;
    bool failed;
} call;

void ferry__fanout_hold(ferry__fanout *f)
{
    atomic_fetch_add(&f->n_holders, 1);
}

void ferry__fanout_release(ferry__fanout *f)
{
    if (atomic_fetch_sub(&f->n_holders, 1) > 1)
        return;
    ferry__free(f->clients);
    ferry__free(f->ranks);
    ferry__free(f);
}

static void *run_job(void *arg)
{
    job *j = arg;
    call *c = j->call;

    ferry__fail_line(FERRY_OK, ""); /* no line of an earlier call */
    j->status = c->fn(&c->f->clients[j->index], c->arg, j->index);
    if (j->status < 0)
        snprintf(j->line, sizeof(j->line), "%s", ferry_last_error());
    pthread_mutex_lock(&c->lock);
    c->n_running--;
    if (j->status < 0)
        c->failed = true;
    pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&c->lock);
    return NULL;
}

void ferry__fanout_cancel(ferry__fanout *f)
{
    for (size_t i = 0; i < f->count; i++) {
        const ferry_client *client = &f->clients[i];

        if (FERRY__CLIENT_HAS(client->ops, cancel))
            client->ops->cancel(client->self);
    }
}

/* Where the others may be waiting for bytes, they are canceled a while
 * after the first failure; else they are waited for. */
static void wait_all(call *c, bool may_starve)
{
    int64_t cancel_at = INT64_MAX;

    pthread_mutex_lock(&c->lock);
    while (c->n_running > 0) {
        int64_t now = ferry__now_ns();

        if (may_starve && c->failed && cancel_at == INT64_MAX)
            cancel_at = now + INT64_C(1000000) * GRACE_MS;
        if (now >= cancel_at) {
            pthread_mutex_unlock(&c->lock);
            ferry__fanout_cancel(c->f);
            pthread_mutex_lock(&c->lock);
            cancel_at = now + INT64_C(1000000) * GRACE_MS;
            continue;
        }
        /* Each client bounds its own call, so this ends; the wait itself is
         * cut short to look again. */
        ferry__cond_wait_until(&c->changed, &c->lock,
                               now + INT64_C(1000000) * 100);
    }
    pthread_mutex_unlock(&c->lock);
}

static void start_job(call *c, size_t i)
{
    job *j = &c->jobs[i];
    ferry_status status;

    j->call = c;
    j->index = i;
    pthread_mutex_lock(&c->lock);
    c->n_running++;
    pthread_mutex_unlock(&c->lock);
    /* From its start on, the job's result is its thread's to write. */
    status = ferry__thread_start(&j->thread, "ferry-fanout", run_job, j);
    j->started = status == FERRY_OK;
    if (j->started)
        return;
    j->status = status;
    snprintf(j->line, sizeof(j->line), "%s", ferry_last_error());
    pthread_mutex_lock(&c->lock);
    c->n_running--;
    c->failed = true;
    pthread_mutex_unlock(&c->lock);
}

/* A client that was canceled because another failed is not the cause. */
static const job *first_failure(const job *jobs, size_t count)
{
    const job *canceled = NULL;

    for (size_t i = 0; i < count; i++) {
        if (jobs[i].status >= 0)
            continue;
        if (jobs[i].status != FERRY_ECANCELED)
            return &jobs[i];
        if (!canceled)
            canceled = &jobs[i];
    }
    return canceled;
}

typedef enum outcome { DID, DID_NOT, NOT_KNOWN } outcome;

/* A call that was given up, or whose answer never came whole, may have done
 * at the server what it asks for. */
static outcome outcome_of(const job *j)
{
    switch (j->status) {
    case FERRY_ECANCELED:
    case FERRY_ETIMEOUT:
    case FERRY_ENOPROGRESS:
    case FERRY_ECONN:
        return NOT_KNOWN;
    default:
        return j->status >= 0 ? DID : DID_NOT;
    }
}

/* "; title: a, b" of the servers with that outcome, nothing where none has. */
static void list_servers(const call *c, outcome which, const char *title,
                         ferry__str *out)
{
    bool any = false;

    for (size_t i = 0; i < c->f->count; i++) {
        const char *name = ferry__client_peer(&c->f->clients[i], 0);

        if (outcome_of(&c->jobs[i]) != which)
            continue;
        if (any)
            ferry__str_append(out, ", ");
        else
            ferry__str_printf(out, "%s%s: ", out->length > 0 ? "; " : "",
                              title);
        any = true;
        if (name)
            ferry__str_append(out, name);
        else
            ferry__str_printf(out, "replica %zu", i);
    }
}

/* The failure behind one that only tells of a rank of another member, unless
 * that member does the same; NULL where there is none. */
static const job *cause_of(const call *c, const job *first)
{
    size_t i = ferry__fanout_ranks_blame(c->f, first->line, first->index);
    const job *cause = i < c->f->count ? &c->jobs[i] : NULL;

    return cause && cause->status < 0 && cause->status != FERRY_ECANCELED &&
                   ferry__fanout_ranks_blame(c->f, cause->line, i) ==
                       c->f->count
               ? cause
               : NULL;
}

/* "replica 1: line", with the server behind each rank. */
static void tell(const call *c, const job *j, ferry__str *out)
{
    ferry__str_printf(out, "replica %zu: ", j->index);
    ferry__fanout_ranks_name(c->f, j->line, out);
}

/* `done` ("committed"), if any, is said where it is half true: who did, who
 * did not, and of whom it is not known. */
static void list_outcomes(const call *c, const char *done, ferry__str *out)
{
    list_servers(c, DID, done, out);
    if (out->length == 0)
        return;
    list_servers(c, DID_NOT, "not", out);
    list_servers(c, NOT_KNOWN, "not known", out);
    ferry__str_append(out, ": ");
}

static void log_others(const call *c, const job *first, const job *cause)
{
    for (size_t i = 0; i < c->f->count; i++) {
        const job *j = &c->jobs[i];
        ferry__str line = {0};

        if (j->status >= 0 || j == first || j == cause)
            continue;
        ferry__fanout_ranks_name(c->f, j->line, &line);
        ferry__log(FERRY_LOG_ERROR, "replica %zu: %s: %s", i,
                   ferry_status_name(j->status),
                   line.failed || !line.data ? j->line : line.data);
        ferry__str_free(&line);
    }
}

static ferry_status report(const call *c, const char *done)
{
    const job *first = first_failure(c->jobs, c->f->count);
    const job *cause = first ? cause_of(c, first) : NULL;
    ferry__str line = {0};
    ferry_status status;

    if (!first)
        return FERRY_OK;
    log_others(c, first, cause);
    if (done)
        list_outcomes(c, done, &line);
    if (cause) {
        tell(c, cause, &line);
        ferry__str_append(&line, "; ");
    }
    tell(c, first, &line);
    status = cause ? cause->status : first->status;
    if (line.failed)
        status =
            ferry_fail(status, "replica %zu: %s", first->index, first->line);
    else
        status = ferry_fail(status, "%s", line.data);
    ferry__str_free(&line);
    return status;
}

ferry_status ferry__fanout_call(ferry__fanout *f, ferry__fanout_fn fn,
                                void *arg, bool may_starve, const char *done)
{
    call c = {.f = f, .fn = fn, .arg = arg};
    ferry_status status;

    FERRY_TRY(ferry__cond_init(&c.changed));
    ferry__fanout_hold(f);
    pthread_mutex_init(&c.lock, NULL);
    c.jobs = ferry__alloc_array(f->count, sizeof(*c.jobs));
    if (!c.jobs) {
        status = FERRY_ENOMEM;
    } else {
        for (size_t i = 0; i < f->count; i++)
            start_job(&c, i);
        wait_all(&c, may_starve);
        for (size_t i = 0; i < f->count; i++) {
            if (c.jobs[i].started)
                pthread_join(c.jobs[i].thread, NULL);
        }
        status = report(&c, done);
    }
    ferry__free(c.jobs);
    pthread_mutex_destroy(&c.lock);
    pthread_cond_destroy(&c.changed);
    ferry__fanout_release(f);
    return status;
}
