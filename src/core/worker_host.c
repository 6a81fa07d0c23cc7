/* SPDX-License-Identifier: Apache-2.0 */
/* What the host offers a worker engine: the table of backend.h, each function
 * a few lines over the round and the loading.
 * Invariant: a context is the worker itself, and only one call is inside. */
#include "core/worker_state.h"

#include "base/alloc.h"
#include "base/log.h"

#include <stdio.h>

static ferry_worker *worker_of(ferry_worker_context *ctx)
{
    return (ferry_worker *)ctx;
}

static ferry__loading *loading_of(ferry_worker_context *ctx)
{
    return worker_of(ctx)->target->loading;
}

/* Bytes may only land in an open round: an engine that loads from its init
 * has a bug, and the storage must not pay for it. */
static ferry_status in_round(ferry_worker_context *ctx, const char *what)
{
    if (!ferry__round_active(&worker_of(ctx)->round))
        return ferry_fail(FERRY_EORDER, "%s outside a weight update", what);
    return FERRY_OK;
}

static ferry_status host_declare(ferry_worker_context *ctx,
                                 const ferry_param_meta *params, size_t count)
{
    FERRY_TRY(in_round(ctx, "declare"));
    return ferry__loading_declare(loading_of(ctx), params, count);
}

static const ferry_param_meta *host_declared(ferry_worker_context *ctx,
                                             size_t *out_count)
{
    return ferry__loading_declared(loading_of(ctx), out_count);
}

static ferry_status host_boxes(ferry_worker_context *ctx, size_t index,
                               const ferry_box **out_boxes, size_t *out_count)
{
    return ferry__loading_boxes(loading_of(ctx), index, out_boxes, out_count);
}

static ferry_status host_load(ferry_worker_context *ctx, size_t index,
                              const ferry_tensor *tensor)
{
    FERRY_TRY(in_round(ctx, "load"));
    FERRY_TRY(ferry__loading_load(loading_of(ctx), index, tensor));
    ferry__round_progress(&worker_of(ctx)->round);
    return FERRY_OK;
}

static ferry_status host_load_range(ferry_worker_context *ctx, size_t index,
                                    const void *bytes, int64_t first,
                                    int64_t count)
{
    FERRY_TRY(in_round(ctx, "load_range"));
    FERRY_TRY(
        ferry__loading_range(loading_of(ctx), index, bytes, first, count));
    ferry__round_progress(&worker_of(ctx)->round);
    return FERRY_OK;
}

static ferry_status host_load_box(ferry_worker_context *ctx, size_t index,
                                  size_t box, const void *bytes)
{
    FERRY_TRY(in_round(ctx, "load_box"));
    FERRY_TRY(ferry__loading_box(loading_of(ctx), index, box, bytes));
    ferry__round_progress(&worker_of(ctx)->round);
    return FERRY_OK;
}

static ferry_status host_expect_digest(ferry_worker_context *ctx, size_t index,
                                       size_t box, uint64_t xxh3)
{
    return ferry__loading_expect(loading_of(ctx), index, box, xxh3);
}

static void host_want_digests(ferry_worker_context *ctx, bool on)
{
    ferry__loading_want_digests(loading_of(ctx), on);
}

static ferry_status host_check(ferry_worker_context *ctx, const char *what)
{
    const char *current = ferry__loading_current(loading_of(ctx));
    char detail[320];

    detail[0] = '\0';
    if (current[0] != '\0')
        snprintf(detail, sizeof(detail), "parameter %s", current);
    return ferry__round_check(&worker_of(ctx)->round, what, detail);
}

static void host_progress(ferry_worker_context *ctx, uint64_t bytes)
{
    ferry__loading_received(loading_of(ctx), bytes);
    ferry__round_progress(&worker_of(ctx)->round);
}

static int64_t host_remaining_ms(ferry_worker_context *ctx)
{
    return ferry__round_remaining_ms(&worker_of(ctx)->round);
}

static void host_set_bounds(ferry_worker_context *ctx, int64_t deadline_ms,
                            int64_t no_progress_ms)
{
    ferry__round_set_bounds(&worker_of(ctx)->round, deadline_ms,
                            no_progress_ms);
}

/* An engine's buffers are the same whichever model a round aims at. */
static void host_count_buffers(ferry_worker_context *ctx, int64_t bytes)
{
    ferry_worker *w = worker_of(ctx);

    for (size_t i = 0; i < w->n_targets; i++)
        ferry__loading_count_buffers(w->targets[i].loading, bytes);
}

static void host_set_path(ferry_worker_context *ctx, const char *path)
{
    ferry_worker *w = worker_of(ctx);

    pthread_mutex_lock(&w->round.lock);
    snprintf(w->path, sizeof(w->path), "%s", path != NULL ? path : "");
    pthread_mutex_unlock(&w->round.lock);
}

static const ferry_model *host_model(ferry_worker_context *ctx)
{
    return &worker_of(ctx)->target->model;
}

static const ferry_worker_options *host_options(ferry_worker_context *ctx)
{
    return &worker_of(ctx)->options;
}

static ferry_status host_reload_begin(ferry_worker_context *ctx)
{
    ferry_worker *w = worker_of(ctx);

    FERRY_TRY(in_round(ctx, "reload_begin"));
    if (w->reload_open)
        return ferry_fail(FERRY_EORDER,
                          "reload_begin called while a reload is open; "
                          "reload_finalise must come first");
    w->reload_open = true;
    return FERRY_OK;
}

static ferry_status host_reload_finalise(ferry_worker_context *ctx)
{
    ferry_worker *w = worker_of(ctx);

    if (!w->reload_open)
        return ferry_fail(FERRY_EORDER,
                          "reload_finalise called without a matching "
                          "reload_begin");
    w->reload_open = false;
    return ferry__loading_check_coverage(w->target->loading, false);
}

static ferry_status host_kernel_storage(ferry_worker_context *ctx, size_t param,
                                        void **out_bytes, size_t *out_size)
{
    FERRY_TRY(in_round(ctx, "kernel_storage"));
    return ferry__loading_kernel_storage(loading_of(ctx), param, out_bytes,
                                         out_size);
}

static void host_waited(ferry_worker_context *ctx, int32_t peer,
                        const char *address, int64_t from_ns)
{
    ferry__loading_waited(loading_of(ctx), peer, address, from_ns);
}

const ferry_worker_host *ferry__worker_host(void)
{
    static const ferry_worker_host host = {
        .size = sizeof(ferry_worker_host),
        .abi = FERRY_ENGINE_ABI,
        .fail = ferry_fail,
        .log = ferry__log,
        .alloc = ferry__alloc,
        .free = ferry__free,
        .now_ns = ferry__now_ns,
        .declare = host_declare,
        .declared = host_declared,
        .boxes = host_boxes,
        .load = host_load,
        .load_range = host_load_range,
        .load_box = host_load_box,
        .expect_digest = host_expect_digest,
        .want_digests = host_want_digests,
        .check = host_check,
        .progress = host_progress,
        .remaining_ms = host_remaining_ms,
        .set_bounds = host_set_bounds,
        .count_buffers = host_count_buffers,
        .set_path = host_set_path,
        .model = host_model,
        .options = host_options,
        .reload_begin = host_reload_begin,
        .reload_finalise = host_reload_finalise,
        .kernel_storage = host_kernel_storage,
        .waited = host_waited,
    };

    return &host;
}
