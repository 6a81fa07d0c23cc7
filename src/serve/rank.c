/* SPDX-License-Identifier: Apache-2.0 */
/* The rank process; see rank.h. */
#include "serve/rank.h"

#include "base/alloc.h"
#include "base/log.h"
#include "base/str.h"
#include "base/thread.h"
#include "core/worker_state.h"
#include "model/model.h"
#include "serve/checksum.h"
#include "serve/rank_share.h"
#include "serve/rank_step.h"
#include "serve/rank_wire.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define STATUS_BYTES ((size_t)4096)

typedef struct rank {
    const ferry__rank_start *start;
    ferry__comm *comm;
    ferry__model *model;
    ferry_worker *worker;
    bool ended; /* at prepare: the round was empty */
} rank;

/* Waits between messages have no natural bound: a rank lives until its API
 * process closes the socket, which ends the wait. One message is bounded. */
static ferry__waiter idle_waiter(const char *what)
{
    ferry__waiter w = {NULL, NULL, ferry__deadline_in(INT64_C(1) << 40), what};

    return w;
}

static ferry__waiter reply_waiter(void)
{
    ferry__waiter w = {NULL, NULL, ferry__deadline_in(60000), "rank reply"};

    return w;
}

static ferry_status load_weights(rank *r)
{
    const ferry__serve_options *o = r->start->options;
    ferry_source source = {0};
    ferry_status st;

    if (o->join != NULL)
        return FERRY_OK; /* a worker without weights is not ready */
    if (o->load_format == FERRY__LOAD_DUMMY)
        FERRY_TRY(
            ferry__model_dummy_source(r->start->config, o->seed, &source));
    else if (o->load_format == FERRY__LOAD_GGUF)
        FERRY_TRY(ferry_source_gguf(o->model, &source));
    else if (o->load_format == FERRY__LOAD_SAFETENSORS)
        FERRY_TRY(ferry_source_safetensors(o->model, &source));
    else
        FERRY_TRY(ferry_source_open(o->model, &source));
    st = ferry_worker_load_source(r->worker, &source);
    ferry_source_close(&source);
    if (st == FERRY_OK &&
        (r->start->unsynced ||
         (o->load_format == FERRY__LOAD_DUMMY && !o->serve_unsynced)))
        ferry_worker_require_sync(r->worker);
    return st;
}

static ferry_status rank_open(rank *r)
{
    const ferry__serve_options *o = r->start->options;
    ferry__model_options mo = {.config = r->start->config,
                               .kernel = o->kernel,
                               .tp_rank = r->start->tp_rank,
                               .tp_size = o->tp_size,
                               .max_seqs = o->max_seqs,
                               .max_len = o->max_len,
                               .n_threads = o->threads};
    ferry_worker_options wo = FERRY_WORKER_OPTIONS_INIT(o->backend);

    if (o->tp_size > 1) {
        FERRY_TRY(ferry__comm_local_open(r->start->comm_fd, r->start->tp_rank,
                                         &r->comm));
        mo.comm = r->comm;
    }
    FERRY_TRY(ferry__model_create(&mo, &r->model));
    wo.commit = o->commit;
    wo.require_full = o->require_full;
    wo.tp_rank = r->start->tp_rank;
    wo.tp_size = o->tp_size;
    wo.dp_rank = r->start->dp_rank;
    wo.dp_size = o->dp_size;
    wo.deadline_ms = o->deadline_ms;
    wo.no_progress_ms = o->no_progress_ms;
    wo.defer_threads = o->defer_threads;
    FERRY_TRY(ferry_worker_create(&wo, ferry__model_table(r->model), NULL,
                                  &r->worker));
    return load_weights(r);
}

static void rank_close(rank *r)
{
    ferry_worker_destroy(&r->worker);
    ferry__model_destroy(&r->model);
    ferry__comm_close(&r->comm);
}

/* The plan of this shard for the checkpoint's own names. */
static ferry_status rank_plan(rank *r, char **out)
{
    const ferry_model *m = ferry__model_table(r->model);
    ferry_param_meta *metas = NULL;
    size_t n = 0, capacity = 0;
    ferry_status st = FERRY_OK;

    while (m->checkpoint_name(m->self, n) != NULL) {
        st = ferry__grow(&metas, &capacity, n, sizeof *metas);
        if (st == FERRY_OK)
            st = m->checkpoint_meta(m->self, n, &metas[n]);
        if (st != FERRY_OK)
            break;
        n++;
    }
    if (st == FERRY_OK)
        st = ferry_worker_plan(r->worker, metas, n, out);
    ferry__free(metas);
    return st;
}

static ferry_status rank_reset(rank *r)
{
    const ferry_model *m = ferry__model_table(r->model);

    for (size_t i = 0; i < m->n_params; i++) {
        const ferry_param *p = &m->params[i];
        int64_t numel = 1;

        for (int32_t d = 0; d < p->ndim; d++)
            numel *= p->shape[d];
        if (!(p->flags & FERRY_PARAM_RUNTIME))
            memset(p->data, 0,
                   (size_t)(numel / ferry_dtype_block(p->dtype)) *
                       ferry_dtype_bytes(p->dtype));
    }
    return FERRY_OK;
}

static ferry_status worker_status_body(rank *r, char **out)
{
    size_t size = STATUS_BYTES;

    /* Again with more room when it was cut; it may grow meanwhile. */
    for (int i = 0; i < 3; i++) {
        char *text = ferry__alloc_raw(size);
        size_t length;

        if (text == NULL)
            return FERRY_ENOMEM;
        length = ferry_worker_status(r->worker, text, size);
        if (length < size) {
            *out = text;
            return FERRY_OK;
        }
        ferry__free(text);
        size = length + STATUS_BYTES;
    }
    return ferry_fail(FERRY_EBUSY, "status grew while it was read");
}

/* The status rides on the answer and saves asking for it. The call itself
 * has succeeded, so an answer without one is no failure. */
static ferry_status with_status(rank *r, char **out)
{
    if (worker_status_body(r, out) < 0)
        *out = NULL;
    return FERRY_OK;
}

static ferry_status rank_prepare(rank *r, const char *body, char **out)
{
    r->ended = false;
    if (strcmp(body, FERRY__RANK_END_EMPTY) != 0)
        return ferry_worker_prepare_weight_update(r->worker);
    FERRY_TRY(ferry__worker_prepare_or_end(r->worker, &r->ended));
    if (r->ended)
        *out = ferry__strdup(FERRY__RANK_ENDED);
    return FERRY_OK;
}

/* What was written to this rank is a whole version, under this label. */
static ferry_status rank_adopt(rank *r, const char *version)
{
    ferry__worker_adopt(r->worker);
    return version[0] != '\0'
               ? ferry_worker_set_weight_version(r->worker, version)
               : FERRY_OK;
}

static ferry_status control_call(rank *r, uint32_t kind, const char *body,
                                 size_t size_bytes, char **out_body)
{
    switch (kind) {
    case FERRY__RANK_INIT:
        return ferry_worker_init_transfer_engine(r->worker, body);
    case FERRY__RANK_START:
        return ferry_worker_start_weight_update(r->worker);
    case FERRY__RANK_START_DRAFT:
        return ferry_worker_start_draft_weight_update(r->worker);
    case FERRY__RANK_UPDATE:
        return ferry_worker_update_weights(r->worker, body);
    case FERRY__RANK_PREPARE:
        return rank_prepare(r, body, out_body);
    case FERRY__RANK_COMMIT:
        if (!r->ended)
            FERRY_TRY(ferry_worker_commit_weight_update(r->worker,
                                                        body[0] ? body : NULL));
        r->ended = false;
        return with_status(r, out_body);
    case FERRY__RANK_SHUTDOWN:
        return ferry_worker_shutdown_transfer_engine(r->worker);
    case FERRY__RANK_CHECKSUM:
        return ferry__checksum_json(r->worker, out_body);
    case FERRY__RANK_RESET:
        return rank_reset(r);
    case FERRY__RANK_PLAN:
        return rank_plan(r, out_body);
    case FERRY__RANK_WRITE:
        return ferry__rank_write(ferry__model_table(r->model), body,
                                 size_bytes);
    case FERRY__RANK_ADOPT:
        return rank_adopt(r, body);
    default:
        return ferry_fail(FERRY_EINTERNAL, "unknown control message %u", kind);
    }
}

static void *control_loop(void *arg)
{
    rank *r = arg;
    ferry__waiter idle = idle_waiter("control message");

    for (;;) {
        void *frame = NULL;
        size_t size = 0;
        char *body = NULL;
        uint32_t kind;
        ferry_status st;
        ferry__waiter w;

        if (ferry__recv_frame(r->start->control_fd, FERRY__RANK_FRAME_MAX,
                              &frame, &size, &idle) < 0)
            return NULL;
        if (size < 8) {
            ferry__free(frame);
            return NULL;
        }
        memcpy(&kind, frame, sizeof kind);
        st = control_call(r, kind, (char *)frame + 8, size - 8, &body);
        ferry__free(frame);
        w = reply_waiter();
        st = ferry__rank_reply(r->start->control_fd, st, body,
                               body == NULL ? 0 : strlen(body), &w);
        ferry_free(body);
        if (st < 0)
            return NULL;
    }
}

static void step_loop(rank *r)
{
    ferry__waiter idle = idle_waiter("step message");

    for (;;) {
        void *frame = NULL;
        void *body = NULL;
        size_t size = 0, body_size = 0;
        uint32_t kind = 0;
        ferry_status st;
        ferry__waiter w;

        if (ferry__recv_frame(r->start->step_fd, FERRY__RANK_FRAME_MAX, &frame,
                              &size, &idle) < 0)
            return;
        if (size >= 8)
            memcpy(&kind, frame, sizeof kind);
        if (kind == FERRY__RANK_STEP) {
            st = ferry__rank_step(r->model, r->start->config->vocab_size,
                                  (char *)frame + 8, size - 8, &body,
                                  &body_size);
        } else if (kind == FERRY__RANK_ABORT) {
            ferry_worker_abort_weight_update(r->worker);
            st = FERRY_OK;
        } else if (kind == FERRY__RANK_SET_VERSION) {
            st = ferry_worker_set_weight_version(r->worker, (char *)frame + 8);
        } else if (kind == FERRY__RANK_STATUS) {
            char *text = NULL;

            st = worker_status_body(r, &text);
            body = text;
            body_size = text == NULL ? 0 : strlen(text);
        } else if (kind == FERRY__RANK_LAYOUT) {
            char *text = NULL;

            st = ferry__rank_layout(ferry__model_table(r->model), &text);
            body = text;
            body_size = text == NULL ? 0 : strlen(text);
        } else if (kind == FERRY__RANK_READ) {
            /* Before and after, so that nothing was written meanwhile. */
            st = ferry_worker_may_serve(r->worker);
            if (st == FERRY_OK)
                st = ferry__rank_read(ferry__model_table(r->model),
                                      (char *)frame + 8, size - 8, &body,
                                      &body_size);
            if (st == FERRY_OK)
                st = ferry_worker_may_serve(r->worker);
        } else {
            st = ferry_fail(FERRY_EINTERNAL, "unknown step message %u", kind);
        }
        ferry__free(frame);
        w = reply_waiter();
        st = ferry__rank_reply(r->start->step_fd, st, body, body_size, &w);
        ferry__free(body);
        if (st < 0)
            return;
    }
}

int ferry__rank_main(const ferry__rank_start *start)
{
    rank r = {.start = start};
    pthread_t control;
    ferry__waiter w = reply_waiter();
    ferry_status st = rank_open(&r);

    if (ferry__rank_reply(start->control_fd, st, NULL, 0, &w) < 0 || st < 0) {
        rank_close(&r);
        return 1;
    }
    st = ferry__thread_start(&control, "ferry-control", control_loop, &r);
    if (st < 0) {
        rank_close(&r);
        return 1;
    }
    step_loop(&r);
    /* The API process is gone or wants us gone: a running update must not
     * outlive it. */
    ferry_worker_abort_weight_update(r.worker);
    pthread_join(control, NULL);
    rank_close(&r);
    return 0;
}
