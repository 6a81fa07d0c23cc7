/* SPDX-License-Identifier: Apache-2.0 */
/* The worker's half of the `fault` wrapper: a table for each engine that was
 * asked for as "fault:NAME". Invariant: the tables differ from the inner ones
 * by the wrapped calls alone: info types, flags and optional methods stay. */
#include "backends/fault/fault_worker_state.h"

#include "base/alloc.h"

#include <pthread.h>
#include <string.h>

#define WRAPPED_MAX 8

typedef struct wrapped {
    char name[64];
    const ferry_worker_engine_ops *inner;
    ferry_worker_engine_ops ops;
} wrapped;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static wrapped all[WRAPPED_MAX];
static size_t n_all;

static const ferry_worker_engine_ops *inner_of(const char *backend)
{
    const ferry_worker_engine_ops *found = NULL;

    pthread_mutex_lock(&lock);
    for (size_t i = 0; backend != NULL && i < n_all; i++)
        if (strcmp(all[i].name, backend) == 0)
            found = all[i].inner;
    pthread_mutex_unlock(&lock);
    return found;
}

static ferry_status check(void *arg, const char *what)
{
    fault__worker *w = arg;

    return w->host->check(w->ctx, what);
}

/* The rules for the round that begins, none when another rank is meant. */
static ferry_status plan_round(fault__worker *w)
{
    const ferry_worker_options *o = w->host->options(w->ctx);
    fault__plan *p = &w->plan;

    FERRY_TRY(fault__plan_read(p));
    if ((p->rank >= 0 && p->rank != o->tp_rank) ||
        (p->replica >= 0 && p->replica != o->dp_rank) ||
        (p->round > 0 && (uint64_t)p->round != w->round))
        p->n = 0;
    w->bytes = w->digests = 0;
    w->cut = false;
    w->kernel = NULL;
    return FERRY_OK;
}

static ferry_status strike_phase(fault__worker *w, fault__where where,
                                 const char *what)
{
    return fault__strike(&w->plan, &w->ground, where, 0, 0, what, "");
}

static void worker_destroy(void *self)
{
    fault__worker *w = self;

    if (w == NULL)
        return;
    if (w->self != NULL)
        w->inner->destroy(w->self);
    ferry__free(w);
}

static ferry_status worker_create(const ferry_worker_host *host,
                                  ferry_worker_context *ctx, void **out_self)
{
    const char *backend = host->options(ctx)->backend;
    const ferry_worker_engine_ops *inner = inner_of(backend);
    fault__worker *w;
    ferry_status st;

    if (inner == NULL)
        return host->fail(FERRY_EUNKNOWN, "backend '%s' wraps no engine",
                          backend != NULL ? backend : "");
    w = ferry__alloc(sizeof(*w));
    if (w == NULL)
        return FERRY_ENOMEM;
    w->inner = inner;
    w->host = host;
    w->ctx = ctx;
    w->ground = (fault__ground){"worker", host->fail, host->log, check, w};
    st = plan_round(w);
    if (st == FERRY_OK)
        st = inner->create(fault__worker_host(), (ferry_worker_context *)w,
                           &w->self);
    if (st < 0) {
        ferry__free(w);
        return st;
    }
    *out_self = w;
    return FERRY_OK;
}

static ferry_status worker_init(void *self, const void *init_info)
{
    fault__worker *w = self;

    FERRY_TRY(plan_round(w));
    FERRY_TRY(strike_phase(w, FAULT__INIT, "initialising"));
    return w->inner->init_transfer_engine(w->self, init_info);
}

static ferry_status worker_start(void *self)
{
    fault__worker *w = self;

    w->round++;
    FERRY_TRY(plan_round(w));
    FERRY_TRY(strike_phase(w, FAULT__START, "starting the round"));
    return w->inner->start_weight_update(w->self);
}

/* Bytes that went into the storage without a hand-over change afterwards. */
static void corrupt_kernel(fault__worker *w)
{
    const fault__rule *r;

    if (w->kernel == NULL)
        return;
    r = fault__plan_take(&w->plan, FAULT__CORRUPT, FAULT__BYTE, 0,
                         w->kernel_bytes);
    if (r != NULL)
        fault__flip(&w->plan, r, w->kernel + r->at);
}

static ferry_status worker_receive(void *self, const void *update_info)
{
    fault__worker *w = self;
    ferry_status st = w->inner->receive_weights(w->self, update_info);

    corrupt_kernel(w);
    return st;
}

static ferry_status worker_finish(void *self)
{
    fault__worker *w = self;

    FERRY_TRY(strike_phase(w, FAULT__FINISH, "finishing the round"));
    return w->inner->finish_weight_update(w->self);
}

static void worker_abort(void *self)
{
    fault__worker *w = self;

    w->inner->abort_weight_update(w->self);
}

static ferry_status worker_drain(void *self)
{
    fault__worker *w = self;

    return w->inner->drain_pending(w->self);
}

static void worker_shutdown(void *self)
{
    fault__worker *w = self;

    w->inner->shutdown(w->self);
}

static void fill(wrapped *e, const ferry_worker_engine_ops *inner)
{
    ferry_worker_engine_ops *o = &e->ops;

    e->inner = inner;
    *o = (ferry_worker_engine_ops){
        .size = sizeof(*o),
        .abi = inner->abi,
        .flags = inner->flags,
        .backend = e->name,
        .init_info = inner->init_info,
        .update_info = inner->update_info,
        .create = worker_create,
        .init_transfer_engine = worker_init,
        .start_weight_update = worker_start,
        .receive_weights = worker_receive,
        .finish_weight_update = worker_finish,
        .shutdown = worker_shutdown,
        .destroy = worker_destroy,
    };
    if (inner->abort_weight_update != NULL)
        o->abort_weight_update = worker_abort;
    if (inner->drain_pending != NULL)
        o->drain_pending = worker_drain;
}

ferry_status ferry_worker_wrap(const char *name, const void *inner,
                               const void **out_ops);

/* What the registry calls for "fault:NAME". The answer lives for ever. */
ferry_status ferry_worker_wrap(const char *name, const void *inner,
                               const void **out_ops)
{
    wrapped *e = NULL;

    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < n_all; i++)
        if (strcmp(all[i].name, name) == 0)
            e = &all[i];
    if (e == NULL && n_all < WRAPPED_MAX && strlen(name) < sizeof(e->name)) {
        e = &all[n_all++];
        memcpy(e->name, name, strlen(name) + 1);
        fill(e, inner);
    }
    pthread_mutex_unlock(&lock);
    if (e == NULL)
        return ferry_fail(FERRY_EOVERFLOW,
                          "backend '%s': at most %d engines can be wrapped",
                          name, WRAPPED_MAX);
    *out_ops = &e->ops;
    return FERRY_OK;
}
