/* SPDX-License-Identifier: Apache-2.0 */
/* The control plane's calls around a round: init, start, prepare, commit,
 * finish, abort, shutdown. The update itself is in worker_update.c.
 * Invariant: whatever fails inside an open round ends it, the engine is told,
 * and the next start is accepted. */
#include "core/worker_state.h"

#include "base/alloc.h"
#include "base/log.h"

#include <string.h>

static double ms_since(int64_t from_ns)
{
    return (double)(ferry__now_ns() - from_ns) / 1e6;
}

ferry_status ferry__worker_configured(const ferry_worker *w)
{
    if (w->ops == NULL)
        return ferry_fail(FERRY_ENOTSUP,
                          "Weight transfer not configured. Please set "
                          "weight_transfer_config to enable weight "
                          "transfer.");
    return FERRY_OK;
}

void ferry__worker_set_dirty(ferry__target *t, bool dirty)
{
    pthread_mutex_lock(&t->worker->round.lock);
    t->dirty = dirty;
    pthread_mutex_unlock(&t->worker->round.lock);
}

/* What a round held is released, whichever way it ended. */
static void release_round(ferry_worker *w)
{
    ferry__loading_end(w->target->loading);
    ferry__manifest_clear(&w->target->next_last);
    w->engine_started = false;
    w->reload_open = false;
}

ferry_status ferry__worker_fail_round(ferry_worker *w, ferry_status st)
{
    char line[FERRY__LINE_MAX];

    ferry__round_fail(&w->round, st);
    memcpy(line, w->round.failure_line, sizeof(line));
    if (w->engine_started && w->ops->abort_weight_update != NULL)
        w->ops->abort_weight_update(w->self);
    release_round(w);
    ferry__log(FERRY_LOG_WARN, "weight update failed: %s", line);
    return ferry__fail_line(st, line);
}

ferry_status ferry__worker_leave(ferry_worker *w, ferry_status st)
{
    while (ferry__round_leave(&w->round)) {
        st = ferry_fail(FERRY_ECANCELED, "the weight update was aborted");
        st = ferry__worker_fail_round(w, st);
    }
    return st;
}

void ferry__worker_reap(ferry_worker *w)
{
    ferry__bounds bounds;

    if (!ferry__round_active(&w->round))
        return;
    pthread_mutex_lock(&w->round.lock);
    bounds = w->round.bounds;
    pthread_mutex_unlock(&w->round.lock);
    bounds.progress_at_ns = ferry__now_ns();
    if (ferry__bounds_check(&bounds, "waiting for the next call of the round",
                            NULL) < 0)
        ferry__worker_fail_round(w, FERRY_ETIMEOUT);
}

/* ---- init and shutdown ---- */

void ferry__worker_shutdown_engine(ferry_worker *w)
{
    if (w->inited)
        w->ops->shutdown(w->self);
    w->inited = false;
    ferry_info_free(w->init_info);
    w->init_info = NULL;
    for (size_t i = 0; i < w->n_targets; i++) {
        ferry__manifest_clear(&w->targets[i].last);
        w->targets[i].has_last = false;
    }
    pthread_mutex_lock(&w->round.lock);
    w->path[0] = '\0';
    pthread_mutex_unlock(&w->round.lock);
}

/* A second init while a round is open means that the trainer was replaced:
 * its round will never be finished. Before any init there was no trainer, and
 * a round that was started early goes on. */
static void end_orphan(ferry_worker *w)
{
    if (!w->inited || !ferry__round_active(&w->round))
        return;
    ferry_fail(FERRY_ECANCELED, "init_weight_transfer_engine was called "
                                "during a weight update, which it ended");
    ferry__worker_fail_round(w, FERRY_ECANCELED);
}

/* The fields of another backend are refused one by one: that the trainer
 * sends by another one than this worker has is what must be said. */
static ferry_status parse_init(const ferry_worker *w, const char *init_info,
                               void **out_info)
{
    ferry_status st = ferry_info_parse(w->ops->init_info, init_info, out_info);
    char line[FERRY__LINE_MAX];

    if (st != FERRY_EINVAL)
        return st;
    line[0] = 0;
    strncat(line, ferry_last_error(), sizeof(line) - 1);
    return ferry_fail(st, "%s; this worker's backend is %s", line, w->backend);
}

static ferry_status init_engine(ferry_worker *w, const char *init_info)
{
    void *info;
    ferry_status st;

    FERRY_TRY(parse_init(w, init_info, &info));
    end_orphan(w);
    ferry__worker_shutdown_engine(w);
    ferry__round_set_bounds(&w->round, 0, 0);
    if (!ferry__round_active(&w->round))
        ferry__round_arm(&w->round);
    w->init_info = info;
    st = w->ops->init_transfer_engine(w->self, info);
    if (st < 0) {
        char line[FERRY__LINE_MAX];

        line[0] = 0;
        strncat(line, ferry_last_error(), sizeof(line) - 1);
        w->ops->shutdown(w->self);
        ferry_info_free(info);
        w->init_info = NULL;
        return ferry__fail_line(st, line);
    }
    w->inited = true;
    return FERRY_OK;
}

ferry_status ferry_worker_init_transfer_engine(ferry_worker *w,
                                               const char *init_info)
{
    FERRY__NEED_AS(w, "worker");
    ferry_status st;

    FERRY_TRY(ferry__worker_configured(w));
    if (init_info == NULL)
        return ferry_fail(FERRY_EINVAL, "init_info is NULL");
    FERRY_TRY(ferry__round_enter(&w->round));
    ferry__worker_reap(w);
    st = init_engine(w, init_info);
    return ferry__worker_leave(w, st);
}

ferry_status ferry_worker_shutdown_transfer_engine(ferry_worker *w)
{
    FERRY__NEED_AS(w, "worker");
    FERRY_TRY(ferry__round_enter(&w->round));
    ferry__worker_reap(w);
    if (ferry__round_active(&w->round))
        return ferry__worker_leave(
            w, ferry_fail(FERRY_EORDER,
                          "Cannot release a trainer connection during a "
                          "weight update"));
    ferry__worker_shutdown_engine(w);
    return ferry__worker_leave(w, FERRY_OK);
}

/* ---- start ---- */

ferry_status ferry__worker_engine_start(ferry_worker *w)
{
    if (!w->inited || w->engine_started)
        return FERRY_OK;
    w->engine_started = true;
    return w->ops->start_weight_update(w->self);
}

static ferry_status check_draft(const ferry_worker *w)
{
    if (w->ops->flags & FERRY_WORKER_NO_DRAFT)
        return ferry_fail(FERRY_ENOTSUP,
                          "%s does not support draft model weight updates.",
                          w->backend);
    if (w->n_targets < 2)
        return ferry_fail(FERRY_ENOTSUP,
                          "Draft model weight update requested, but no draft "
                          "model is configured.");
    return FERRY_OK;
}

static ferry_status start_round(ferry_worker *w)
{
    ferry__target *t = w->target;

    if (ferry__worker_is_staged(w))
        FERRY_TRY(ferry__staging_open(&t->staging, &t->model));
    ferry__loading_begin(t->loading,
                         ferry__worker_is_staged(w) ? &t->staging : NULL);
    FERRY_TRY(ferry__loading_set_format(t->loading,
                                        ferry__worker_engine_is_kernel(w)));
    t->was_dirty = t->dirty;
    return ferry__worker_engine_start(w);
}

static ferry_status start(ferry_worker *w, bool draft)
{
    int64_t from_ns = ferry__now_ns();
    ferry_status st;

    FERRY_TRY(ferry__worker_configured(w));
    if (draft)
        FERRY_TRY(check_draft(w));
    FERRY_TRY(ferry__round_enter(&w->round));
    ferry__worker_reap(w);
    st = ferry__round_open(&w->round, draft);
    if (st == FERRY_OK) {
        pthread_mutex_lock(&w->round.lock);
        w->target = &w->targets[draft ? 1 : 0];
        pthread_mutex_unlock(&w->round.lock);
        st = start_round(w);
        if (st < 0)
            st = ferry__worker_fail_round(w, st);
    }
    pthread_mutex_lock(&w->round.lock);
    if (st == FERRY_OK)
        w->round.phases.start_ms = ms_since(from_ns);
    pthread_mutex_unlock(&w->round.lock);
    return ferry__worker_leave(w, st);
}

ferry_status ferry_worker_start_weight_update(ferry_worker *w)
{
    FERRY__NEED_AS(w, "worker");
    return start(w, false);
}

ferry_status ferry_worker_start_draft_weight_update(ferry_worker *w)
{
    FERRY__NEED_AS(w, "worker");
    return start(w, true);
}

/* ---- update ---- */

ferry_status ferry_worker_update_weights(ferry_worker *w,
                                         const char *update_info)
{
    FERRY__NEED_AS(w, "worker");
    int64_t from_ns = ferry__now_ns();
    ferry_status st;

    FERRY_TRY(ferry__worker_configured(w));
    FERRY_TRY(ferry__round_enter(&w->round));
    st = ferry__round_to_updating(&w->round);
    if (st < 0)
        return ferry__worker_leave(w, st);
    st = ferry__worker_receive(w, update_info);
    if (st < 0)
        st = ferry__worker_fail_round(w, st);
    else
        ferry__round_updated(&w->round, ms_since(from_ns));
    return ferry__worker_leave(w, st);
}

/* ---- finish ---- */

/* The engine's queues first: they feed the conversions. */
static ferry_status drain(ferry_worker *w)
{
    if (w->engine_started && w->ops->drain_pending != NULL)
        FERRY_TRY(w->ops->drain_pending(w->self));
    ferry__loading_drain(w->target->loading);
    return FERRY_OK;
}

ferry_status ferry_worker_drain_pending(ferry_worker *w)
{
    FERRY__NEED_AS(w, "worker");
    ferry_status st;

    FERRY_TRY(ferry__round_enter(&w->round));
    st = drain(w);
    if (st < 0 && ferry__round_active(&w->round))
        st = ferry__worker_fail_round(w, st);
    return ferry__worker_leave(w, st);
}

static ferry_status finish_engine(ferry_worker *w)
{
    FERRY_TRY(ferry__round_check(&w->round, "finishing", NULL));
    FERRY_TRY(ferry__worker_engine_start(w));
    FERRY_TRY(drain(w));
    if (w->engine_started)
        FERRY_TRY(w->ops->finish_weight_update(w->self));
    ferry__loading_drain(w->target->loading);
    if (w->reload_open)
        return ferry_fail(FERRY_EINTERNAL,
                          "engine %s began a reload and never finalised it",
                          w->backend);
    return FERRY_OK;
}

static ferry_status prepare_inside(ferry_worker *w)
{
    ferry__target *t = w->target;
    bool full;

    FERRY_TRY(finish_engine(w));
    full = w->options.require_full && !ferry__loading_is_empty(t->loading);
    FERRY_TRY(ferry__loading_check(t->loading, full));
    ferry__manifest_clear(&t->next_last);
    return ferry__loading_names(t->loading, &t->next_last);
}

static ferry_status prepare(ferry_worker *w)
{
    int64_t from_ns = ferry__now_ns();
    ferry_status st;

    FERRY_TRY(ferry__round_to_finishing(&w->round));
    st = prepare_inside(w);
    if (st < 0)
        return ferry__worker_fail_round(w, st);
    ferry__round_prepared(&w->round, ms_since(from_ns));
    return FERRY_OK;
}

/* The one place where a round takes effect: bytes, flags, label (O-56). */
static void take_effect(ferry_worker *w, char *version)
{
    ferry__target *t = w->target;
    bool full = ferry__loading_is_full(t->loading);
    char *old = NULL;

    if (ferry__worker_is_staged(w)) {
        ferry__worker_set_dirty(t, true);
        ferry__loading_commit(t->loading);
    }
    pthread_mutex_lock(&w->round.lock);
    t->dirty = t->was_dirty && !full;
    t->synced = t->synced || full;
    t->n_untouched = ferry__loading_untouched(t->loading, t->untouched,
                                              FERRY__UNTOUCHED_MAX);
    if (version != NULL) {
        old = w->version;
        w->version = version;
    }
    pthread_mutex_unlock(&w->round.lock);
    ferry__free(old);
    if (w->inited) {
        ferry__manifest_clear(&t->last);
        t->last = t->next_last;
        memset(&t->next_last, 0, sizeof(t->next_last));
        t->has_last = true;
        t->last_kernel = ferry__loading_in_kernel_format(t->loading);
    }
}

static ferry_status commit(ferry_worker *w, const char *weight_version)
{
    int64_t from_ns = ferry__now_ns();
    char *version = NULL;

    FERRY_TRY(ferry__round_to_commit(&w->round));
    if (!ferry__loading_is_empty(w->target->loading)) {
        if (weight_version != NULL) {
            version = ferry__strdup(weight_version);
            if (version == NULL)
                return FERRY_ENOMEM;
        }
        take_effect(w, version);
    }
    release_round(w);
    ferry__round_committed(&w->round, ms_since(from_ns));
    return FERRY_OK;
}

ferry_status ferry_worker_prepare_weight_update(ferry_worker *w)
{
    FERRY__NEED_AS(w, "worker");
    FERRY_TRY(ferry__worker_configured(w));
    FERRY_TRY(ferry__round_enter(&w->round));
    return ferry__worker_leave(w, prepare(w));
}

ferry_status ferry__worker_prepare_or_end(ferry_worker *w, bool *out_ended)
{
    bool ends = false;
    ferry_status st;

    FERRY_TRY(ferry__worker_configured(w));
    FERRY_TRY(ferry__round_enter(&w->round));
    st = prepare(w);
    if (st == FERRY_OK && ferry__loading_is_empty(w->target->loading)) {
        ends = true;
        st = commit(w, NULL);
        if (st < 0)
            st = ferry__worker_fail_round(w, st);
    }
    st = ferry__worker_leave(w, st);
    if (st == FERRY_OK)
        *out_ended = ends;
    return st;
}

ferry_status ferry_worker_commit_weight_update(ferry_worker *w,
                                               const char *weight_version)
{
    FERRY__NEED_AS(w, "worker");
    FERRY_TRY(ferry__worker_configured(w));
    FERRY_TRY(ferry__round_enter(&w->round));
    return ferry__worker_leave(w, commit(w, weight_version));
}

ferry_status ferry_worker_finish_weight_update(ferry_worker *w,
                                               const char *weight_version)
{
    FERRY__NEED_AS(w, "worker");
    ferry_status st;

    FERRY_TRY(ferry__worker_configured(w));
    FERRY_TRY(ferry__round_enter(&w->round));
    st = prepare(w);
    if (st == FERRY_OK) {
        st = commit(w, weight_version);
        if (st < 0)
            st = ferry__worker_fail_round(w, st);
    }
    return ferry__worker_leave(w, st);
}

void ferry_worker_abort_weight_update(ferry_worker *w)
{
    if (w == NULL)
        return;
    if (ferry__round_cancel(&w->round))
        ferry__worker_leave(w, FERRY_OK);
}
