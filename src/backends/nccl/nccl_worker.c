/* SPDX-License-Identifier: Apache-2.0 */
/* The worker's half of `nccl`: the table. Checkpoint format, so start and
 * finish only open and close the reload.
 * Invariant: shutdown leaves no group, buffer or thread, and waits for no
 * other rank. */
#include "backends/nccl/nccl_worker_state.h"

#include "base/alloc.h"

static ferry_status worker_create(const ferry_worker_host *host,
                                  ferry_worker_context *ctx, void **out_self)
{
    nccl__worker *w = ferry__alloc(sizeof(*w));

    if (!w)
        return FERRY_ENOMEM;
    w->host = host;
    w->ctx = ctx;
    w->stop_fd = -1;
    pthread_mutex_init(&w->lock, NULL);
    *out_self = w;
    return FERRY_OK;
}

static ferry_status worker_init(void *self, const void *init_info)
{
    const ferry__nccl_init_info *info = init_info;
    nccl__worker *w = self;
    ferry_status status;

    w->host->set_bounds(w->ctx, info->deadline_ms, info->no_progress_ms);
    status = nccl__worker_join(w, info);
    if (status < 0)
        nccl__worker_leave(w, status);
    return status;
}

static ferry_status worker_start(void *self)
{
    nccl__worker *w = self;

    w->host->want_digests(w->ctx, w->digest);
    return w->host->reload_begin(w->ctx);
}

static ferry_status worker_finish(void *self)
{
    nccl__worker *w = self;

    return w->host->reload_finalise(w->ctx);
}

static void worker_shutdown(void *self)
{
    nccl__worker *w = self;

    nccl__worker_leave(w, FERRY_OK);
    w->inited = false;
}

static void worker_destroy(void *self)
{
    nccl__worker *w = self;

    if (!w)
        return;
    worker_shutdown(w);
    pthread_mutex_destroy(&w->lock);
    ferry__free(w);
}

static const ferry_worker_engine_ops worker_ops = {
    .size = sizeof(ferry_worker_engine_ops),
    .abi = FERRY_ENGINE_ABI,
    .flags = 0,
    .backend = "nccl",
    .init_info = &ferry__nccl_init_type,
    .update_info = &ferry__nccl_update_type,
    .create = worker_create,
    .init_transfer_engine = worker_init,
    .start_weight_update = worker_start,
    .receive_weights = nccl__worker_receive,
    .finish_weight_update = worker_finish,
    .shutdown = worker_shutdown,
    .destroy = worker_destroy,
};

const ferry_worker_engine_ops *ferry_worker_engine(void);

const ferry_worker_engine_ops *ferry_worker_engine(void)
{
    return &worker_ops;
}
