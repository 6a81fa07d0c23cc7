/* SPDX-License-Identifier: Apache-2.0 */
/* The worker: its making, its end, and the questions that any thread asks.
 * Invariant: an options or model struct of an older, smaller size is
 * accepted; what it lacks is zero. */
#include "core/worker_state.h"

#include "base/alloc.h"
#include "base/log.h"
#include "core/deferral.h"
#include <ferry/registry.h>

#include <string.h>

/* The last field that a caller's struct must reach. */
#define OPTIONS_SIZE_MIN                                                       \
    (offsetof(ferry_worker_options, backend) + sizeof(char *))
#define MODEL_SIZE_MIN (offsetof(ferry_model, load) + sizeof(void (*)(void)))

static ferry_status check_param(const ferry_model *m, size_t i)
{
    const ferry_param *p = &m->params[i];

    if (p->name == NULL || p->name[0] == '\0')
        return ferry_fail(FERRY_EINVAL,
                          "model %s: stored parameter %zu has no name", m->name,
                          i);
    if (ferry_dtype_bytes(p->dtype) == 0)
        return ferry_fail(FERRY_EINVAL, "parameter %s: unknown dtype %d",
                          p->name, (int)p->dtype);
    if (p->ndim < 0 || p->ndim > FERRY_MAX_DIMS)
        return ferry_fail(FERRY_EINVAL,
                          "parameter %s: %d dimensions, at most %d are "
                          "possible",
                          p->name, (int)p->ndim, FERRY_MAX_DIMS);
    for (int32_t d = 0; d < p->ndim; d++)
        if (p->shape[d] < 0)
            return ferry_fail(FERRY_EINVAL,
                              "parameter %s: dimension %d is %lld", p->name,
                              (int)d, (long long)p->shape[d]);
    if (p->valid_rows < 0 ||
        (p->valid_rows > 0 && (p->ndim == 0 || p->valid_rows > p->shape[0])))
        return ferry_fail(FERRY_EINVAL,
                          "parameter %s: %lld valid rows are more than it "
                          "has",
                          p->name, (long long)p->valid_rows);
    if (p->data == NULL && ferry__slot_bytes(p) > 0)
        return ferry_fail(FERRY_EINVAL, "parameter %s: no storage", p->name);
    return FERRY_OK;
}

static ferry_status copy_model(const ferry_model *model, ferry_model *out)
{
    size_t size = model->size < sizeof(*out) ? model->size : sizeof(*out);

    if (model->size < MODEL_SIZE_MIN)
        return ferry_fail(FERRY_EINVAL,
                          "model table of %zu bytes; at least %zu are needed",
                          model->size, MODEL_SIZE_MIN);
    memset(out, 0, sizeof(*out));
    memcpy(out, model, size);
    if (out->name == NULL)
        out->name = "model";
    if (out->load == NULL)
        return ferry_fail(FERRY_EINVAL, "model %s has no loader", out->name);
    if (out->params == NULL && out->n_params > 0)
        return ferry_fail(FERRY_EINVAL, "model %s: %zu parameters at NULL",
                          out->name, out->n_params);
    for (size_t i = 0; i < out->n_params; i++)
        FERRY_TRY(check_param(out, i));
    return FERRY_OK;
}

static ferry_status copy_options(const ferry_worker_options *options,
                                 ferry_worker *w)
{
    ferry_worker_options *o = &w->options;
    size_t size = options->size < sizeof(*o) ? options->size : sizeof(*o);

    if (options->size < OPTIONS_SIZE_MIN)
        return ferry_fail(FERRY_EINVAL,
                          "worker options of %zu bytes; at least %zu are "
                          "needed",
                          options->size, OPTIONS_SIZE_MIN);
    memcpy(o, options, size);
    o->size = sizeof(*o);
    if (o->tp_size == 0)
        o->tp_size = 1;
    if (o->dp_size == 0)
        o->dp_size = 1;
    if (o->commit != FERRY_COMMIT_INPLACE && o->commit != FERRY_COMMIT_STAGED)
        return ferry_fail(FERRY_EINVAL, "commit is %d, known are 0 and 1",
                          (int)o->commit);
    if (o->tp_rank < 0 || o->tp_rank >= o->tp_size)
        return ferry_fail(FERRY_EINVAL, "tp_rank %d is outside tp_size %d",
                          (int)o->tp_rank, (int)o->tp_size);
    if (o->dp_rank < 0 || o->dp_rank >= o->dp_size)
        return ferry_fail(FERRY_EINVAL, "dp_rank %d is outside dp_size %d",
                          (int)o->dp_rank, (int)o->dp_size);
    if (o->deadline_ms < 0 || o->no_progress_ms < 0)
        return ferry_fail(FERRY_EINVAL,
                          "deadline_ms is %lld and no_progress_ms %lld; both "
                          "must be 0 or more",
                          (long long)o->deadline_ms,
                          (long long)o->no_progress_ms);
    if (o->defer_threads < 0 || o->defer_threads > FERRY__DEFERRAL_MAX)
        return ferry_fail(FERRY_EINVAL,
                          "defer_threads is %d, possible are 0 "
                          "to %d",
                          (int)o->defer_threads, FERRY__DEFERRAL_MAX);
    if (o->backend == NULL)
        return FERRY_OK;
    w->backend = ferry__strdup(o->backend);
    o->backend = w->backend;
    return w->backend != NULL ? FERRY_OK : FERRY_ENOMEM;
}

static void live_write(void *arg)
{
    ferry__worker_set_dirty(arg, true);
}

static ferry_status target_open(ferry_worker *w, const ferry_model *model,
                                const char *label)
{
    ferry__target *t = &w->targets[w->n_targets];
    ferry__loading_options lo = {0};

    FERRY_TRY(copy_model(model, &t->model));
    t->worker = w;
    t->label = label;
    t->synced = w->options.has_weights != 0;
    w->n_targets++;
    FERRY_TRY(ferry__plan_create(&t->model, &t->plan));
    lo.model = &t->model;
    lo.plan = t->plan;
    lo.held_limit_bytes = w->options.held_limit_bytes;
    lo.defer_threads = w->options.defer_threads;
    lo.before_live_write = live_write;
    lo.arg = t;
    return ferry__loading_create(&lo, &t->loading);
}

static void target_close(ferry__target *t)
{
    ferry__loading_destroy(&t->loading);
    ferry__plan_destroy(&t->plan);
    ferry__staging_close(&t->staging);
    ferry__manifest_clear(&t->last);
    ferry__manifest_clear(&t->next_last);
}

static ferry_status engine_create(ferry_worker *w)
{
    if (w->backend == NULL)
        return FERRY_OK;
    FERRY_TRY(ferry_worker_find(w->backend, &w->ops));
    return w->ops->create(ferry__worker_host(), (ferry_worker_context *)w,
                          &w->self);
}

static void worker_free(ferry_worker *w)
{
    if (w->self != NULL)
        w->ops->destroy(w->self);
    for (size_t i = 0; i < w->n_targets; i++)
        target_close(&w->targets[i]);
    ferry_info_free(w->init_info);
    ferry__free(w->backend);
    ferry__free(w->version);
    ferry__round_destroy(&w->round);
    ferry__free(w);
}

ferry_status ferry_worker_create(const ferry_worker_options *options,
                                 const ferry_model *model,
                                 const ferry_model *draft,
                                 ferry_worker **out_worker)
{
    ferry_worker *w;
    ferry_status st;

    if (options == NULL || model == NULL || out_worker == NULL)
        return ferry_fail(FERRY_EINVAL, "%s is NULL",
                          options == NULL ? "options"
                          : model == NULL ? "model"
                                          : "out_worker");
    w = ferry__alloc(sizeof(*w));
    if (w == NULL)
        return FERRY_ENOMEM;
    /* The caller's struct may be shorter: only the copy has all fields. */
    st = copy_options(options, w);
    if (st == FERRY_OK)
        st = ferry__round_init(&w->round, w->options.deadline_ms,
                               w->options.no_progress_ms);
    if (st < 0) {
        ferry__free(w->backend);
        ferry__free(w);
        return st;
    }
    st = target_open(w, model, "target");
    if (st == FERRY_OK && draft != NULL)
        st = target_open(w, draft, "draft");
    w->target = &w->targets[0];
    if (st == FERRY_OK)
        st = engine_create(w);
    if (st < 0) {
        worker_free(w);
        return st;
    }
    *out_worker = w;
    return FERRY_OK;
}

void ferry_worker_destroy(ferry_worker **worker)
{
    ferry_worker *w;

    if (worker == NULL || *worker == NULL)
        return;
    w = *worker;
    ferry_worker_abort_weight_update(w);
    if (ferry__round_enter(&w->round) < 0)
        ferry__log(FERRY_LOG_ERROR,
                   "worker destroyed while a call was running in it");
    ferry__worker_shutdown_engine(w);
    worker_free(w);
    *worker = NULL;
}

bool ferry_worker_defers_processing(const ferry_worker *w)
{
    if (w == NULL)
        return false;
    return w->options.defer_threads > 0 || ferry__worker_engine_defers(w);
}

ferry_status ferry_worker_set_weight_version(ferry_worker *w,
                                             const char *weight_version)
{
    FERRY__NEED_AS(w, "worker");
    char *copy, *old;

    if (weight_version == NULL)
        return ferry_fail(FERRY_EINVAL, "weight_version is NULL");
    copy = ferry__strdup(weight_version);
    if (copy == NULL)
        return FERRY_ENOMEM;
    pthread_mutex_lock(&w->round.lock);
    old = w->version;
    w->version = copy;
    pthread_mutex_unlock(&w->round.lock);
    ferry__free(old);
    return FERRY_OK;
}
