/* SPDX-License-Identifier: Apache-2.0 */
/* The trainer: making it from an init info, and its end. Rounds are in
 * trainer_round.c. Invariant: the info that an engine sees was parsed by the
 * engine's own type, whichever way it came, so both ways are checked alike. */
#include "core/trainer_state.h"

#include "base/alloc.h"
#include "base/log.h"
#include <ferry/registry.h>

#include <string.h>
#include <unistd.h>

/* ---- the init info ---- */

/* A typed struct of any size, old or new, as the dict that its own type
 * says. */
static ferry_status info_to_json(const ferry_trainer_init_info *info,
                                 char **out_json)
{
    const ferry_info_type *type = &info->type->info;
    void *whole;
    ferry_status st;

    if (info->size < sizeof(*info) || type->struct_size < sizeof(*info))
        return ferry_fail(FERRY_EINVAL,
                          "%s of %zu bytes; at least %zu are needed",
                          type->name, info->size, sizeof(*info));
    if (info->reserved != 0)
        return ferry_fail(FERRY_EINVAL, "%s: reserved is %d, must be 0",
                          type->name, (int)info->reserved);
    whole = ferry__alloc(type->struct_size);
    if (whole == NULL)
        return FERRY_ENOMEM;
    memcpy(whole, info,
           info->size < type->struct_size ? info->size : type->struct_size);
    st = ferry_info_format(type, whole, out_json);
    ferry__free(whole);
    return st;
}

static ferry_status parse_info(const ferry_trainer_engine_ops *ops,
                               const char *json, ferry_trainer_init_info **out)
{
    const ferry_info_type *type = &ops->init_type->info;
    ferry_trainer_init_info *info;
    void *parsed;

    if (type->struct_size < sizeof(*info))
        return ferry_fail(FERRY_EINVAL,
                          "%s does not begin with an init info head",
                          type->name);
    FERRY_TRY(ferry_info_parse(type, json, &parsed));
    info = parsed;
    info->size = type->struct_size;
    info->type = ops->init_type;
    *out = info;
    return FERRY_OK;
}

/* ---- making ---- */

/* Each kind of backend says in words what it takes (D6). */
static ferry_status check_source(const ferry_trainer_engine_ops *ops,
                                 const char *backend,
                                 const ferry_source *source)
{
    bool given = source != NULL && source->ops != NULL;

    if ((ops->flags & FERRY_TRAINER_FULL_RESYNC) && !given)
        return ferry_fail(FERRY_EINVAL,
                          "%s trainer weight transfer requires a "
                          "WeightSource.",
                          backend);
    if ((ops->flags & FERRY_TRAINER_DELTA) && given)
        return ferry_fail(FERRY_EINVAL,
                          "%s weight transfer takes no WeightSource; pass "
                          "each round's payload to send_weights instead.",
                          backend);
    return FERRY_OK;
}

static void arm(ferry_trainer *t)
{
    int64_t deadline_ms = t->info->deadline_ms, idle = t->info->no_progress_ms;

    atomic_store(&t->canceled, false);
    pthread_mutex_lock(&t->lock);
    ferry__bounds_arm(&t->bounds,
                      deadline_ms > 0 ? deadline_ms : FERRY__DEADLINE_MS,
                      idle > 0 ? idle : FERRY__NO_PROGRESS_MS);
    pthread_mutex_unlock(&t->lock);
}

static ferry_status open_channel(ferry_trainer *t)
{
    FERRY_TRY(t->ops->create(ferry__trainer_host(), (ferry_trainer_context *)t,
                             t->info, t->is_sender, &t->self));
    if (t->ops->init == NULL)
        return FERRY_OK;
    return t->ops->init(t->self);
}

static ferry_status fill(ferry_trainer *t, const ferry_client *client,
                         const ferry_source *source)
{
    if (client == NULL)
        return ferry_fail(FERRY_EINVAL, "client is NULL");
    FERRY_TRY(check_source(t->ops, t->backend, source));
    if (source != NULL && source->ops != NULL)
        FERRY_TRY(ferry__source_adopt(source, &t->source_ops, &t->source));
    FERRY_TRY(ferry__control_call_create(client, "ferry-call", &t->call));
    FERRY_TRY(ferry__control_call_create(client, "ferry-abort", &t->ending));
    arm(t);
    return open_channel(t);
}

static void trainer_free(ferry_trainer *t)
{
    ferry__pass_end(&t->pass);
    if (t->call != NULL && t->pid == getpid()) {
        /* A call that cannot be canceled is left to its own time-out. */
        ferry__control_call_cancel(t->call);
        if (!ferry__control_call_wait(t->call, 1000))
            ferry__log(FERRY_LOG_WARN,
                       "%s is still in flight; it is left to its client",
                       ferry__call_name(ferry__control_call_kind_of(t->call)));
    }
    if (t->self != NULL)
        t->ops->destroy(t->self);
    ferry__control_call_destroy(&t->call);
    ferry__control_call_destroy(&t->ending);
    ferry__manifest_clear(&t->declared);
    ferry_info_free(t->info);
    ferry__spans_destroy(&t->spans);
    pthread_mutex_destroy(&t->lock);
    ferry__free(t);
}

/* Takes `info` whatever happens. */
static ferry_status
trainer_open(const ferry_trainer_engine_ops *ops, const char *backend,
             ferry_trainer_init_info *info, const ferry_client *client,
             const ferry_source *source, ferry_trainer **out_trainer)
{
    ferry_trainer *t = ferry__alloc(sizeof(*t));
    char line[FERRY__LINE_MAX];
    ferry_status st;

    if (t == NULL) {
        ferry_info_free(info);
        return FERRY_ENOMEM;
    }
    pthread_mutex_init(&t->lock, NULL);
    ferry__spans_init(&t->spans, FERRY__SPANS_MAX);
    t->ops = ops;
    t->backend = backend;
    t->info = info;
    t->is_sender = info->rank == 0;
    t->pid = getpid();
    st = fill(t, client, source);
    if (st < 0) {
        st = ferry__trainer_fail(t, st, line);
        trainer_free(t);
        return ferry__fail_line(st, line);
    }
    *out_trainer = t;
    return FERRY_OK;
}

static ferry_status open_from_json(const char *backend, const char *json,
                                   const ferry_client *client,
                                   const ferry_source *source,
                                   ferry_trainer **out_trainer)
{
    const ferry_trainer_engine_ops *ops;
    ferry_trainer_init_info *info;

    FERRY_TRY(ferry_trainer_find(backend, &ops));
    FERRY_TRY(parse_info(ops, json, &info));
    return trainer_open(ops, ops->init_type->backend, info, client, source,
                        out_trainer);
}

ferry_status ferry_trainer_init(const ferry_trainer_init_info *info,
                                const ferry_client *client,
                                const ferry_source *source,
                                ferry_trainer **out_trainer)
{
    char *json;
    ferry_status st;

    if (info == NULL || out_trainer == NULL)
        return ferry_fail(FERRY_EINVAL, "%s is NULL",
                          info == NULL ? "info" : "out_trainer");
    if (info->type == NULL || info->type->backend == NULL ||
        info->type->backend[0] == '\0')
        return ferry_fail(FERRY_EINVAL,
                          "init info has no type with a backend name; fill "
                          "it with its type's macro");
    FERRY_TRY(info_to_json(info, &json));
    st = open_from_json(info->type->backend, json, client, source, out_trainer);
    ferry_free(json);
    return st;
}

ferry_status ferry_trainer_init_dict(const char *backend, const char *init_info,
                                     const ferry_client *client,
                                     const ferry_source *source,
                                     ferry_trainer **out_trainer)
{
    if (backend == NULL || init_info == NULL || out_trainer == NULL)
        return ferry_fail(FERRY_EINVAL, "%s is NULL",
                          backend == NULL     ? "backend"
                          : init_info == NULL ? "init_info"
                                              : "out_trainer");
    return open_from_json(backend, init_info, client, source, out_trainer);
}

void ferry_trainer_cancel(ferry_trainer *trainer)
{
    if (trainer == NULL)
        return;
    atomic_store(&trainer->canceled, true);
}

void ferry_trainer_shutdown(ferry_trainer **trainer)
{
    if (trainer == NULL || *trainer == NULL)
        return;
    trainer_free(*trainer);
    *trainer = NULL;
}

size_t ferry__trainer_spans(ferry_trainer *t, ferry__span *out, size_t capacity)
{
    return ferry__spans_copy(&t->spans, out, capacity);
}
