/* SPDX-License-Identifier: Apache-2.0 */
/* What else runs over the plan: loading a whole source, showing the plan,
 * and looking at every stored parameter.
 * Invariant: a source that was not loaded whole leaves the worker refusing
 * to serve. */
#include "base/log.h"
#include "core/worker_state.h"

#include "base/alloc.h"
#include "core/pass.h"

static ferry_status check_loading(void *arg, const char *what)
{
    ferry__target *t = arg;

    return ferry__round_check(&t->worker->round, what,
                              ferry__loading_current(t->loading));
}

static ferry_status load_items(ferry__target *t, const ferry_source *source)
{
    ferry__pass pass = {0};
    ferry_item item;
    ferry_status st;

    pass.source = source;
    pass.declared = ferry__loading_declared(t->loading, &pass.count);
    pass.need_data = true;
    pass.check = check_loading;
    pass.arg = t;
    st = ferry__pass_begin(&pass);
    while (st == FERRY_OK) {
        st = ferry__pass_next(&pass, &item);
        if (st == FERRY_OK)
            st = ferry__loading_load(t->loading, pass.index - 1, &item.tensor);
        if (st == FERRY_OK)
            ferry__round_progress(&t->worker->round);
    }
    ferry__pass_end(&pass);
    return st == FERRY_DONE ? FERRY_OK : st;
}

static ferry_status load_whole(ferry__target *t, const ferry_source *source)
{
    const ferry_param_meta *params;
    size_t count;

    FERRY_TRY(source->ops->metadata(source->self, &params, &count));
    FERRY_TRY(ferry__loading_declare(t->loading, params, count));
    FERRY_TRY(load_items(t, source));
    ferry__loading_drain(t->loading);
    return ferry__loading_check(t->loading, true);
}

ferry_status ferry_worker_load_source(ferry_worker *w,
                                      const ferry_source *source)
{
    FERRY__NEED_AS(w, "worker");
    ferry__target *t = &w->targets[0];
    ferry_source_ops ops;
    ferry_source adopted;
    ferry_status st;

    if (source == NULL)
        return ferry_fail(FERRY_EINVAL, "source is NULL");
    FERRY_TRY(ferry__source_adopt(source, &ops, &adopted));
    FERRY_TRY(ferry__round_enter(&w->round));
    if (ferry__round_active(&w->round))
        return ferry__worker_leave(
            w, ferry_fail(FERRY_EBUSY, "a weight update is open"));
    ferry__round_arm(&w->round);
    ferry__loading_begin(t->loading, NULL);
    st = load_whole(t, &adopted);
    ferry__loading_end(t->loading);
    if (st == FERRY_OK) {
        pthread_mutex_lock(&w->round.lock);
        t->dirty = false;
        t->synced = true;
        t->n_untouched = 0;
        pthread_mutex_unlock(&w->round.lock);
    }
    return ferry__worker_leave(w, st);
}

void ferry__worker_adopt(ferry_worker *w)
{
    pthread_mutex_lock(&w->round.lock);
    w->targets[0].dirty = false;
    w->targets[0].synced = true;
    pthread_mutex_unlock(&w->round.lock);
}

void ferry_worker_require_sync(ferry_worker *w)
{
    if (w == NULL)
        return;
    pthread_mutex_lock(&w->round.lock);
    w->targets[0].synced = false;
    pthread_mutex_unlock(&w->round.lock);
}

static ferry_status bake_all(ferry__plan *plan, const ferry_param_meta *params,
                             size_t count, size_t *ids)
{
    for (size_t i = 0; i < count; i++)
        FERRY_TRY(ferry__plan_bake(plan, &params[i], &ids[i]));
    return FERRY_OK;
}

ferry_status ferry_worker_plan(ferry_worker *w, const ferry_param_meta *params,
                               size_t count, char **out_json)
{
    FERRY__NEED_AS(w, "worker");
    FERRY__NEED(out_json);
    ferry__plan *plan = w->targets[0].plan;
    size_t *ids;
    ferry_status st;

    if (params == NULL && count > 0)
        return ferry_fail(FERRY_EINVAL, "params is NULL");
    FERRY_TRY(ferry__round_enter(&w->round));
    ids = ferry__alloc_array(count, sizeof(*ids));
    st = ids != NULL ? bake_all(plan, params, count, ids) : FERRY_ENOMEM;
    if (st == FERRY_OK)
        st = ferry__plan_to_json(plan, ids, count, out_json);
    ferry__free(ids);
    return ferry__worker_leave(w, st);
}

ferry_status ferry_worker_each_param(ferry_worker *w, ferry_bytes_fn fn,
                                     void *arg)
{
    FERRY__NEED_AS(w, "worker");
    FERRY__NEED(fn);
    const ferry_model *m = &w->targets[0].model;

    FERRY_TRY(ferry__round_enter(&w->round));
    if (ferry__round_active(&w->round) && !ferry__worker_is_staged(w))
        return ferry__worker_leave(
            w, ferry_fail(FERRY_EBUSY, "a weight update is writing in place"));
    for (size_t i = 0; i < m->n_params; i++)
        fn(arg, m->params[i].name, m->params[i].data,
           ferry__slot_bytes(&m->params[i]));
    return ferry__worker_leave(w, FERRY_OK);
}
