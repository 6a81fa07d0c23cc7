/* SPDX-License-Identifier: Apache-2.0 */
/* The trainer's half of the `fault` wrapper: a table for each engine that
 * was asked for as "fault:NAME". Invariant: the tables differ from the inner
 * ones by the wrapped calls alone: the init info's fields and flags stay. */
#include "backends/fault/fault_trainer_state.h"

#include "base/alloc.h"

#include <pthread.h>
#include <string.h>

#define WRAPPED_MAX 8

typedef struct wrapped {
    char name[64];
    const ferry_trainer_engine_ops *inner;
    ferry_trainer_init_type type;
    ferry_trainer_engine_ops ops;
} wrapped;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static wrapped all[WRAPPED_MAX];
static size_t n_all;

static const ferry_trainer_engine_ops *
inner_of(const ferry_trainer_init_type *type)
{
    const ferry_trainer_engine_ops *found = NULL;

    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < n_all; i++)
        if (&all[i].type == type)
            found = all[i].inner;
    pthread_mutex_unlock(&lock);
    return found;
}

static ferry_status check(void *arg, const char *what)
{
    fault__trainer *t = arg;

    return t->host->check(t->ctx, what);
}

/* The rules for the round that begins, none when another rank is meant. */
static ferry_status plan_round(fault__trainer *t)
{
    fault__plan *p = &t->plan;

    FERRY_TRY(fault__plan_read(p));
    if ((p->rank >= 0 && p->rank != t->rank) || p->replica >= 0 ||
        (p->round > 0 && (uint64_t)p->round != t->round))
        p->n = 0;
    t->declared = t->yielded = t->sent = t->text = 0;
    t->ended = false;
    t->pending = FERRY_OK;
    t->torn = NULL;
    t->torn_by = NULL;
    t->torn_ns = 0;
    t->n_used = 0;
    return FERRY_OK;
}

static ferry_status strike_phase(fault__trainer *t, fault__where where,
                                 const char *what)
{
    return fault__strike(&t->plan, &t->ground, where, 0, 0, what, "");
}

static void trainer_destroy(void *self)
{
    fault__trainer *t = self;

    if (t == NULL)
        return;
    if (t->self != NULL)
        t->inner->destroy(t->self);
    for (size_t i = 0; i < t->n_held; i++)
        ferry_shared_free(t->held[i].memory);
    ferry__free(t->held);
    ferry__free(t);
}

static ferry_status trainer_create(const ferry_trainer_host *host,
                                   ferry_trainer_context *ctx, const void *info,
                                   bool is_sender, void **out_self)
{
    const ferry_trainer_init_info *head = info;
    const ferry_trainer_engine_ops *inner = inner_of(head->type);
    fault__trainer *t;
    ferry_status st;

    if (inner == NULL)
        return host->fail(FERRY_EUNKNOWN, "backend '%s' wraps no engine",
                          head->type->backend);
    t = ferry__alloc(sizeof(*t));
    if (t == NULL)
        return FERRY_ENOMEM;
    t->inner = inner;
    t->host = host;
    t->ctx = ctx;
    t->rank = head->rank;
    t->ground = (fault__ground){"trainer", host->fail, host->log, check, t};
    st = plan_round(t);
    if (st == FERRY_OK)
        st = inner->create(fault__trainer_host(), (ferry_trainer_context *)t,
                           info, is_sender, &t->self);
    if (st < 0) {
        ferry__free(t);
        return st;
    }
    *out_self = t;
    return FERRY_OK;
}

static ferry_status trainer_init(void *self)
{
    fault__trainer *t = self;

    FERRY_TRY(plan_round(t));
    FERRY_TRY(strike_phase(t, FAULT__INIT, "initialising"));
    return t->inner->init != NULL ? t->inner->init(t->self) : FERRY_OK;
}

static ferry_status trainer_send(void *self, const void *payload,
                                 size_t payload_count)
{
    fault__trainer *t = self;

    t->round++;
    FERRY_TRY(plan_round(t));
    FERRY_TRY(strike_phase(t, FAULT__START, "starting the round"));
    FERRY_TRY(t->inner->send(t->self, payload, payload_count));
    FERRY_TRY(t->pending);
    return strike_phase(t, FAULT__FINISH, "ending the round");
}

static void trainer_round_end(void *self, ferry_status result)
{
    fault__trainer *t = self;

    if (t->inner->round_end != NULL)
        t->inner->round_end(t->self, result);
}

static void fill(wrapped *e, const ferry_trainer_engine_ops *inner)
{
    e->inner = inner;
    e->type = *inner->init_type;
    e->type.backend = e->name;
    e->ops = (ferry_trainer_engine_ops){
        .size = sizeof(e->ops),
        .abi = inner->abi,
        .flags = inner->flags,
        .init_type = &e->type,
        .create = trainer_create,
        .init = trainer_init,
        .send = trainer_send,
        .round_end = trainer_round_end,
        .destroy = trainer_destroy,
    };
}

ferry_status ferry_trainer_wrap(const char *name, const void *inner,
                                const void **out_ops);

/* What the registry calls for "fault:NAME". The answer lives for ever. */
ferry_status ferry_trainer_wrap(const char *name, const void *inner,
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
