/* SPDX-License-Identifier: Apache-2.0 */
/* One helper thread, one job at a time, two references: the owner's and the
 * thread's. The last of them to go frees the object. */
#include "core/control_call.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/thread.h"
#include "core/peers.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define LINE_MAX_BYTES 1024

typedef enum job_state { JOB_NONE, JOB_RUNNING, JOB_ENDED } job_state;

struct ferry__control_call {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    ferry_client_ops ops;
    ferry_client client;
    char thread_name[16];
    int refs;
    pid_t pid; /* of the process that started the thread */
    pthread_t thread;
    bool started, stop;
    job_state state;
    ferry__call_kind kind;
    char *text;
    ferry_status result;
    char line[LINE_MAX_BYTES];
    /* Written by the call that runs, read when it has ended. */
    char *status;
    int32_t workers;
};

const char *ferry__call_name(ferry__call_kind kind)
{
    static const char *const names[] = {
        "init_weight_transfer_engine", "start_weight_update",
        "start_draft_weight_update",   "update_weights",
        "finish_weight_update",        "prepare_weight_update",
        "commit_weight_update",        "status",
        "abort_weight_update",         "world_size"};

    return names[kind];
}

static ferry_status adopt(const ferry_client *client, ferry__control_call *c)
{
    const ferry_client_ops *from = client->ops;
    const char *missing;

    if (from == NULL)
        return ferry_fail(FERRY_EINVAL, "client has no table");
    if (from->size < offsetof(ferry_client_ops, cancel))
        return ferry_fail(FERRY_EINVAL,
                          "client table of %zu bytes; at least %zu are "
                          "needed",
                          from->size, offsetof(ferry_client_ops, cancel));
    memcpy(&c->ops, from,
           from->size < sizeof(c->ops) ? from->size : sizeof(c->ops));
    missing = c->ops.init_weight_transfer_engine == NULL
                  ? "init_weight_transfer_engine"
              : c->ops.start_weight_update == NULL  ? "start_weight_update"
              : c->ops.update_weights == NULL       ? "update_weights"
              : c->ops.finish_weight_update == NULL ? "finish_weight_update"
                                                    : NULL;
    if (missing != NULL)
        return ferry_fail(FERRY_EINVAL, "client %s has no method %s",
                          c->ops.kind != NULL ? c->ops.kind : "?", missing);
    c->client.ops = &c->ops;
    c->client.self = client->self;
    return FERRY_OK;
}

ferry_status ferry__control_call_create(const ferry_client *client,
                                        const char *thread_name,
                                        ferry__control_call **out)
{
    ferry__control_call *c = ferry__alloc(sizeof(*c));
    ferry_status st;

    if (c == NULL)
        return FERRY_ENOMEM;
    st = adopt(client, c);
    if (st < 0) {
        ferry__free(c);
        return st;
    }
    snprintf(c->thread_name, sizeof(c->thread_name), "%s", thread_name);
    c->refs = 1;
    pthread_mutex_init(&c->lock, NULL);
    if (ferry__cond_init(&c->changed) < 0) {
        pthread_mutex_destroy(&c->lock);
        ferry__free(c);
        return ferry_fail(FERRY_ENOMEM, "no condition for a control call");
    }
    *out = c;
    return FERRY_OK;
}

const ferry_client *ferry__control_call_client(const ferry__control_call *c)
{
    return &c->client;
}

static void drop_ref(ferry__control_call *c)
{
    int left;

    pthread_mutex_lock(&c->lock);
    left = --c->refs;
    pthread_mutex_unlock(&c->lock);
    if (left > 0)
        return;
    pthread_cond_destroy(&c->changed);
    pthread_mutex_destroy(&c->lock);
    ferry__free(c->text);
    ferry__free(c->status);
    ferry__free(c);
}

static ferry_status not_offered(const ferry__control_call *c,
                                ferry__call_kind kind)
{
    return ferry_fail(FERRY_ENOTSUP, "client %s has no %s",
                      c->ops.kind != NULL ? c->ops.kind : "?",
                      ferry__call_name(kind));
}

static ferry_status ask_status(ferry__control_call *c)
{
    ferry__free(c->status);
    c->status = NULL;
    return ferry__peers_status(&c->client, &c->status);
}

static ferry_status call_optional(ferry__control_call *c, ferry__call_kind kind,
                                  const char *text)
{
    const ferry_client_ops *o = c->client.ops;
    void *self = c->client.self;

    if (kind == FERRY__CALL_START_DRAFT && o->start_draft_weight_update != NULL)
        return o->start_draft_weight_update(self);
    if (kind == FERRY__CALL_PREPARE && o->prepare_weight_update != NULL)
        return o->prepare_weight_update(self);
    if (kind == FERRY__CALL_COMMIT && o->commit_weight_update != NULL)
        return o->commit_weight_update(self, text);
    if (kind == FERRY__CALL_STATUS && o->status != NULL)
        return ask_status(c);
    if (kind == FERRY__CALL_ABORT && o->abort_weight_update != NULL)
        return o->abort_weight_update(self);
    if (kind == FERRY__CALL_WORLD_SIZE && o->world_size != NULL)
        return o->world_size(self, &c->workers);
    return not_offered(c, kind);
}

static ferry_status call_client(ferry__control_call *c, ferry__call_kind kind,
                                const char *text)
{
    const ferry_client_ops *o = c->client.ops;
    void *self = c->client.self;

    switch (kind) {
    case FERRY__CALL_INIT:
        return o->init_weight_transfer_engine(self, text);
    case FERRY__CALL_START:
        return o->start_weight_update(self);
    case FERRY__CALL_UPDATE:
        return o->update_weights(self, text);
    case FERRY__CALL_FINISH:
        return o->finish_weight_update(self, text);
    default:
        return call_optional(c, kind, text);
    }
}

/* Runs the job that is there. Called and returns with the lock held. */
static void run_job(ferry__control_call *c)
{
    ferry__call_kind kind = c->kind;
    char *text = c->text;
    ferry_status st;

    c->text = NULL;
    pthread_mutex_unlock(&c->lock);
    st = call_client(c, kind, text);
    ferry__free(text);
    pthread_mutex_lock(&c->lock);
    /* EBUSY is what poll says of a call that runs. */
    c->result = st == FERRY_EBUSY ? FERRY_EPEER : st;
    snprintf(c->line, sizeof(c->line), "%s", st < 0 ? ferry_last_error() : "");
    c->state = JOB_ENDED;
    pthread_cond_broadcast(&c->changed);
}

static void *helper(void *arg)
{
    ferry__control_call *c = arg;

    pthread_mutex_lock(&c->lock);
    while (!c->stop) {
        if (c->state == JOB_RUNNING)
            run_job(c);
        else
            ferry__cond_wait_until(&c->changed, &c->lock,
                                   ferry__now_ns() + INT64_C(1000000000));
    }
    pthread_mutex_unlock(&c->lock);
    drop_ref(c);
    return NULL;
}

static ferry_status start_thread(ferry__control_call *c)
{
    ferry_status st;

    if (c->started)
        return FERRY_OK;
    c->refs++;
    st = ferry__thread_start(&c->thread, c->thread_name, helper, c);
    if (st < 0) {
        c->refs--;
        return st;
    }
    c->pid = getpid();
    c->started = true;
    return FERRY_OK;
}

ferry_status ferry__control_call_begin(ferry__control_call *c,
                                       ferry__call_kind kind, const char *text)
{
    char *copy = NULL;
    ferry_status st = FERRY_OK;

    if (text != NULL) {
        copy = ferry__strdup(text);
        if (copy == NULL)
            return FERRY_ENOMEM;
    }
    pthread_mutex_lock(&c->lock);
    if (c->state != JOB_NONE)
        st = ferry_fail(FERRY_EBUSY, "%s is still in flight",
                        ferry__call_name(c->kind));
    else
        st = start_thread(c);
    if (st == FERRY_OK) {
        c->kind = kind;
        c->text = copy;
        copy = NULL;
        c->state = JOB_RUNNING;
        pthread_cond_broadcast(&c->changed);
    }
    pthread_mutex_unlock(&c->lock);
    ferry__free(copy);
    return st;
}

static job_state state_of(ferry__control_call *c)
{
    job_state state;

    pthread_mutex_lock(&c->lock);
    state = c->state;
    pthread_mutex_unlock(&c->lock);
    return state;
}

bool ferry__control_call_in_flight(ferry__control_call *c)
{
    return state_of(c) != JOB_NONE;
}

bool ferry__control_call_running(ferry__control_call *c)
{
    return state_of(c) == JOB_RUNNING;
}

ferry__call_kind ferry__control_call_kind_of(ferry__control_call *c)
{
    ferry__call_kind kind;

    pthread_mutex_lock(&c->lock);
    kind = c->kind;
    pthread_mutex_unlock(&c->lock);
    return kind;
}

static ferry_status answer(ferry__control_call *c, bool take)
{
    char line[LINE_MAX_BYTES];
    ferry_status st = FERRY_OK;
    job_state state;

    pthread_mutex_lock(&c->lock);
    state = c->state;
    if (state == JOB_ENDED) {
        st = c->result;
        memcpy(line, c->line, sizeof(line));
        if (take)
            c->state = JOB_NONE;
    }
    pthread_mutex_unlock(&c->lock);
    if (state == JOB_RUNNING)
        return FERRY_EBUSY;
    return st < 0 ? ferry__fail_line(st, line) : FERRY_OK;
}

ferry_status ferry__control_call_peek(ferry__control_call *c)
{
    return answer(c, false);
}

ferry_status ferry__control_call_poll(ferry__control_call *c)
{
    return answer(c, true);
}

const char *ferry__control_call_status(const ferry__control_call *c)
{
    return c->status;
}

int32_t ferry__control_call_workers(const ferry__control_call *c)
{
    return c->workers;
}

bool ferry__control_call_wait(ferry__control_call *c, int64_t timeout_ms)
{
    int64_t until_ns = ferry__now_ns() + timeout_ms * 1000000;
    bool ended;

    pthread_mutex_lock(&c->lock);
    while (c->state == JOB_RUNNING && ferry__now_ns() < until_ns)
        ferry__cond_wait_until(&c->changed, &c->lock, until_ns);
    ended = c->state != JOB_RUNNING;
    pthread_mutex_unlock(&c->lock);
    return ended;
}

void ferry__control_call_cancel(ferry__control_call *c)
{
    if (c->ops.cancel != NULL && ferry__control_call_running(c))
        c->ops.cancel(c->client.self);
}

/* In a forked child the thread is not there, and the lock may be as it left
 * it: nothing is waited for. */
static void forget(ferry__control_call *c)
{
    ferry__free(c->text);
    ferry__free(c->status);
    ferry__free(c);
}

void ferry__control_call_destroy(ferry__control_call **call)
{
    ferry__control_call *c = *call;
    bool running;

    if (c == NULL)
        return;
    *call = NULL;
    if (c->started && c->pid != getpid()) {
        forget(c);
        return;
    }
    pthread_mutex_lock(&c->lock);
    c->stop = true;
    running = c->state == JOB_RUNNING;
    pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&c->lock);
    if (c->started && running)
        pthread_detach(c->thread);
    else if (c->started)
        pthread_join(c->thread, NULL);
    drop_ref(c);
}
