/* SPDX-License-Identifier: Apache-2.0 */
/* Several clients as one: each call goes to all of them at the same time.
 * Invariant: a call returns only when it returned everywhere; the first
 * failure by index is the answer, every other one is logged (C3). */
#include "clients/client_ops.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/str.h"
#include "base/thread.h"

#include <stdio.h>
#include <string.h>

#define LINE_BYTES 1024
/* How long the others may go on after one failed in a call during which
 * they wait for bytes that will not come any more. */
#define GRACE_MS     500
#define LEAVE_MS     1000
#define STATUS_BYTES ((size_t)64 << 10)

typedef struct fanout {
    ferry_client_ops ops; /* optional calls that not all have are NULL */
    ferry_client *clients;
    size_t count;
    atomic_int n_calls; /* that are still in call_all */
} fanout;

typedef ferry_status (*call_fn)(const ferry_client *client, void *arg,
                                size_t index);

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
    fanout *f;
    call_fn fn;
    void *arg;
    job *jobs;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    size_t n_running;
    bool failed;
} call;

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

static void cancel_all(fanout *f)
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
            cancel_all(c->f);
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

static ferry_status report(const job *jobs, size_t count)
{
    const job *first = first_failure(jobs, count);

    if (!first)
        return FERRY_OK;
    for (size_t i = 0; i < count; i++) {
        if (jobs[i].status < 0 && &jobs[i] != first)
            ferry__log(FERRY_LOG_ERROR, "replica %zu: %s: %s", i,
                       ferry_status_name(jobs[i].status), jobs[i].line);
    }
    return ferry_fail(first->status, "replica %zu: %s", first->index,
                      first->line);
}

static ferry_status call_all(fanout *f, call_fn fn, void *arg, bool may_starve)
{
    call c = {.f = f, .fn = fn, .arg = arg};
    ferry_status status;

    FERRY_TRY(ferry__cond_init(&c.changed));
    atomic_fetch_add(&f->n_calls, 1);
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
        status = report(c.jobs, f->count);
    }
    ferry__free(c.jobs);
    pthread_mutex_destroy(&c.lock);
    pthread_cond_destroy(&c.changed);
    atomic_fetch_sub(&f->n_calls, 1);
    return status;
}

static ferry_status one_init(const ferry_client *client, void *arg, size_t i)
{
    (void)i;
    return client->ops->init_weight_transfer_engine(client->self, arg);
}

static ferry_status fanout_init(void *self, const char *init_info)
{
    return call_all(self, one_init, (void *)(uintptr_t)init_info, true);
}

static ferry_status one_start(const ferry_client *client, void *arg, size_t i)
{
    (void)arg, (void)i;
    return client->ops->start_weight_update(client->self);
}

static ferry_status fanout_start(void *self)
{
    return call_all(self, one_start, NULL, false);
}

static ferry_status one_update(const ferry_client *client, void *arg, size_t i)
{
    (void)i;
    return client->ops->update_weights(client->self, arg);
}

static ferry_status fanout_update(void *self, const char *update_info)
{
    return call_all(self, one_update, (void *)(uintptr_t)update_info, true);
}

static ferry_status one_finish(const ferry_client *client, void *arg, size_t i)
{
    (void)i;
    return client->ops->finish_weight_update(client->self, arg);
}

static ferry_status fanout_finish(void *self, const char *weight_version)
{
    return call_all(self, one_finish, (void *)(uintptr_t)weight_version, false);
}

static void fanout_cancel(void *self)
{
    cancel_all(self);
}

static ferry_status one_abort(const ferry_client *client, void *arg, size_t i)
{
    (void)arg, (void)i;
    if (!FERRY__CLIENT_HAS(client->ops, abort_weight_update))
        return FERRY_OK; /* its peer learns of it at its own deadline */
    return client->ops->abort_weight_update(client->self);
}

static ferry_status fanout_abort(void *self)
{
    return call_all(self, one_abort, NULL, false);
}

static ferry_status one_start_draft(const ferry_client *client, void *arg,
                                    size_t i)
{
    (void)arg, (void)i;
    return client->ops->start_draft_weight_update(client->self);
}

static ferry_status fanout_start_draft(void *self)
{
    return call_all(self, one_start_draft, NULL, false);
}

typedef struct pause_args {
    const char *mode;
    int clear_cache;
} pause_args;

static ferry_status one_pause(const ferry_client *client, void *arg, size_t i)
{
    const pause_args *p = arg;

    (void)i;
    return client->ops->pause(client->self, p->mode, p->clear_cache);
}

static ferry_status fanout_pause(void *self, const char *mode, int clear_cache)
{
    pause_args p = {mode, clear_cache};

    return call_all(self, one_pause, &p, false);
}

static ferry_status one_resume(const ferry_client *client, void *arg, size_t i)
{
    (void)arg, (void)i;
    return client->ops->resume(client->self);
}

static ferry_status fanout_resume(void *self)
{
    return call_all(self, one_resume, NULL, false);
}

static ferry_status one_prepare(const ferry_client *client, void *arg, size_t i)
{
    (void)arg, (void)i;
    return client->ops->prepare_weight_update(client->self);
}

static ferry_status fanout_prepare(void *self)
{
    return call_all(self, one_prepare, NULL, false);
}

static ferry_status one_commit(const ferry_client *client, void *arg, size_t i)
{
    (void)i;
    return client->ops->commit_weight_update(client->self, arg);
}

static ferry_status fanout_commit(void *self, const char *weight_version)
{
    return call_all(self, one_commit, (void *)(uintptr_t)weight_version, false);
}

static ferry_status one_status(const ferry_client *client, void *arg, size_t i)
{
    char *texts = arg;

    return client->ops->status(client->self, texts + i * STATUS_BYTES,
                               STATUS_BYTES);
}

/* {"replicas": [status of each, in order]} */
static ferry_status fanout_status(void *self, char *buffer, size_t size_bytes)
{
    fanout *f = self;
    char *texts = ferry__alloc_array(f->count, STATUS_BYTES);
    ferry__str all = {0};
    ferry_status status;

    if (!texts)
        return FERRY_ENOMEM;
    status = call_all(f, one_status, texts, false);
    ferry__str_append(&all, "{\"replicas\":[");
    for (size_t i = 0; status == FERRY_OK && i < f->count; i++) {
        ferry__str_append(&all, i ? "," : "");
        ferry__str_append(&all, texts + i * STATUS_BYTES);
    }
    ferry__str_append(&all, "]}");
    if (status == FERRY_OK && all.failed)
        status = ferry_fail(FERRY_ENOMEM, "status: out of memory");
    if (status == FERRY_OK && size_bytes > 0)
        snprintf(buffer, size_bytes, "%s", all.data);
    ferry__str_free(&all);
    ferry__free(texts);
    return status;
}

static void fanout_close(void *self)
{
    fanout *f = self;

    /* Closing ends what a trainer left behind, if it is on its way out. */
    for (size_t i = 0; i < f->count; i++) {
        const ferry_client *client = &f->clients[i];

        if (FERRY__CLIENT_HAS(client->ops, close))
            client->ops->close(client->self);
    }
    for (int i = 0; i < LEAVE_MS && atomic_load(&f->n_calls) > 0; i++)
        ferry__sleep_ms(1);
    ferry__free(f->clients);
    ferry__free(f);
}

/* Offers an optional call where every client can take it. One that only
 * some could take would leave the replicas apart. Cancel and abort only
 * make things end sooner and need not be everywhere. */
static void choose_ops(fanout *f)
{
    bool draft = true, pause = true, resume = true, status = true;
    bool prepare = true, commit = true;

    for (size_t i = 0; i < f->count; i++) {
        const ferry_client_ops *ops = f->clients[i].ops;

        draft &= FERRY__CLIENT_HAS(ops, start_draft_weight_update);
        pause &= FERRY__CLIENT_HAS(ops, pause);
        resume &= FERRY__CLIENT_HAS(ops, resume);
        status &= FERRY__CLIENT_HAS(ops, status);
        prepare &= FERRY__CLIENT_HAS(ops, prepare_weight_update);
        commit &= FERRY__CLIENT_HAS(ops, commit_weight_update);
    }
    f->ops = (ferry_client_ops){
        .size = sizeof(ferry_client_ops),
        .kind = "fanout",
        .init_weight_transfer_engine = fanout_init,
        .start_weight_update = fanout_start,
        .update_weights = fanout_update,
        .finish_weight_update = fanout_finish,
        .cancel = fanout_cancel,
        .abort_weight_update = fanout_abort,
        .start_draft_weight_update = draft ? fanout_start_draft : NULL,
        .pause = pause && resume ? fanout_pause : NULL,
        .resume = pause && resume ? fanout_resume : NULL,
        .status = status ? fanout_status : NULL,
        .prepare_weight_update = prepare && commit ? fanout_prepare : NULL,
        .commit_weight_update = prepare && commit ? fanout_commit : NULL,
        .close = fanout_close,
    };
}

static ferry_status check_clients(const ferry_client *clients, size_t count)
{
    if (count == 0 || !clients)
        return ferry_fail(FERRY_EINVAL, "fanout: needs at least one client");
    for (size_t i = 0; i < count; i++) {
        const ferry_client_ops *ops = clients[i].ops;

        if (!ops || !FERRY__CLIENT_HAS(ops, init_weight_transfer_engine) ||
            !FERRY__CLIENT_HAS(ops, start_weight_update) ||
            !FERRY__CLIENT_HAS(ops, update_weights) ||
            !FERRY__CLIENT_HAS(ops, finish_weight_update))
            return ferry_fail(FERRY_EINVAL,
                              "fanout: client %zu lacks one of the four "
                              "calls",
                              i);
    }
    return FERRY_OK;
}

ferry_status ferry_client_fanout(ferry_client *clients, size_t count,
                                 ferry_client *out_client)
{
    fanout *f;

    FERRY_TRY(check_clients(clients, count));
    f = ferry__alloc(sizeof(*f));
    if (!f)
        return FERRY_ENOMEM;
    f->clients = ferry__alloc_array(count, sizeof(*clients));
    if (!f->clients) {
        ferry__free(f);
        return FERRY_ENOMEM;
    }
    memcpy(f->clients, clients, count * sizeof(*clients));
    memset(clients, 0, count * sizeof(*clients));
    f->count = count;
    choose_ops(f);
    out_client->ops = &f->ops;
    out_client->self = f;
    return FERRY_OK;
}
