/* SPDX-License-Identifier: Apache-2.0 */
/* One update: the buffers of the group, cut as the declared parameters say,
 * loaded in declared order, piece by piece where they lie.
 * Invariant: nothing is written before everything that can be checked was; a
 * failure ends the group, so that no other rank waits for this one. */
#include "backends/nccl/nccl_worker_state.h"

#include "core/manifest.h"

#include <stdio.h>

#define PIECE_ELEMENTS 32

typedef struct receive {
    nccl__worker *w;
    const ferry_param_meta *params;
    size_t count;
    ferry__cuts cuts;
    size_t n_boxes;
} receive;

/* ---- loading ---- */

static ferry_status load_whole(receive *r, size_t i, const void *bytes)
{
    const ferry_param_meta *param = &r->params[i];
    ferry_tensor tensor;

    FERRY_TRY(ferry_tensor_init(&tensor, (void *)(uintptr_t)bytes, param->dtype,
                                param->ndim, param->shape));
    return r->w->host->load(r->w->ctx, i, &tensor);
}

static ferry_status load_part(receive *r, size_t i, const char *bytes,
                              int64_t first, int64_t count)
{
    size_t elem = ferry_dtype_bytes(r->params[i].dtype);

    /* Tensors follow each other without gaps, so one may lie anywhere. */
    if (first == 0 && count == ferry__meta_numel(&r->params[i]) &&
        (uintptr_t)bytes % elem == 0)
        return load_whole(r, i, bytes);
    return r->w->host->load_range(r->w->ctx, i, bytes, first, count);
}

/* A buffer that is not the host's comes through the scratch. */
static ferry_status load_staged(receive *r, size_t i, const char *bytes,
                                int64_t first, int64_t count)
{
    nccl__worker *w = r->w;
    size_t elem = ferry_dtype_bytes(r->params[i].dtype);
    int64_t step = (int64_t)(FERRY__NCCL_STAGE_BYTES / elem);

    for (int64_t at = 0; at < count; at += step) {
        int64_t n = count - at < step ? count - at : step;

        FERRY_TRY(ferry__nccl_stage_copy(&w->stage, w->stage.scratch,
                                         bytes + (size_t)at * elem,
                                         (size_t)n * elem));
        FERRY_TRY(load_part(r, i, w->stage.scratch, first + at, n));
    }
    return FERRY_OK;
}

/* Elements of a parameter that a piece of `size` bytes brings. */
static int64_t take_of(size_t size, int64_t left, size_t elem_bytes)
{
    if (size / elem_bytes >= (uint64_t)left)
        return left;
    return (int64_t)(size / elem_bytes) / PIECE_ELEMENTS * PIECE_ELEMENTS;
}

static ferry_status load_one(receive *r, size_t i)
{
    nccl__worker *w = r->w;
    ferry__stream *s = w->group.stream;
    size_t elem = ferry_dtype_bytes(r->params[i].dtype), size;
    int64_t numel = ferry__meta_numel(&r->params[i]), at = 0;

    while (at < numel) {
        const void *piece;
        int64_t count;

        FERRY_TRY(s->ops->peek(s, &piece, &size));
        count = take_of(size, numel - at, elem);
        if (count == 0)
            return ferry_fail(FERRY_EPEER,
                              "parameter %s: a piece of %zu bytes ends within "
                              "32 elements",
                              r->params[i].name, size);
        FERRY_TRY(w->stage.memory ? load_staged(r, i, piece, at, count)
                                  : load_part(r, i, piece, at, count));
        FERRY_TRY(s->ops->release(s, (size_t)count * elem));
        w->host->progress(w->ctx, (uint64_t)count * elem);
        at += count;
    }
    return FERRY_OK;
}

static ferry_status load_all(receive *r)
{
    static const char nothing[8];

    for (size_t i = 0; i < r->count; i++) {
        if (ferry__meta_numel(&r->params[i]) == 0)
            FERRY_TRY(load_whole(r, i, nothing));
        else
            FERRY_TRY(load_one(r, i));
    }
    return FERRY_OK;
}

/* ---- the whole ---- */

static ferry_status stream_all(receive *r)
{
    nccl__worker *w = r->w;
    ferry__nccl_group *g = &w->group;

    if (r->cuts.peak_bytes == 0)
        return load_all(r);
    FERRY_TRY(ferry__nccl_fit_stream(g, &r->cuts, w->n_buffers,
                                     w->host->remaining_ms(w->ctx),
                                     w->no_progress_ms));
    FERRY_TRY(
        g->stream->ops->begin(g->stream, r->cuts.bytes, r->cuts.n_buffers));
    FERRY_TRY(load_all(r));
    return g->stream->ops->end(g->stream);
}

static void note_path(receive *r)
{
    nccl__worker *w = r->w;
    uint64_t peak = w->group.stream ? w->group.stream->peak_bytes : 0;
    char path[256];

    w->host->set_path(w->ctx, ferry__nccl_path(&w->group, path, sizeof(path)));
    w->host->count_buffers(w->ctx, (int64_t)peak - (int64_t)w->counted_bytes);
    w->counted_bytes = peak;
}

static ferry_status run(receive *r)
{
    nccl__worker *w = r->w;

    FERRY_TRY(ferry__nccl_cut(r->params, r->count, w->packed, w->buffer_bytes,
                              false, &r->cuts));
    if (w->extras)
        FERRY_TRY(nccl__worker_take_header(w, r->params, r->count, &r->cuts));
    if (w->digest)
        FERRY_TRY(nccl__worker_send_boxes(w, r->count, &r->n_boxes));
    FERRY_TRY(stream_all(r));
    note_path(r);
    if (w->digest)
        FERRY_TRY(nccl__worker_take_digests(w, r->count, r->n_boxes));
    return FERRY_OK;
}

static ferry_status check_call(const nccl__worker *w)
{
    if (w->group.comm)
        return FERRY_OK;
    if (!w->inited)
        return ferry_fail(FERRY_EORDER,
                          "NCCL weight transfer not initialized. Call "
                          "init_transfer_engine() first.");
    return ferry_fail(FERRY_EORDER,
                      "the group ended with %s: init_weight_transfer_engine "
                      "must come first",
                      w->deserted ? "its trainer, which left or died"
                                  : "the round that failed");
}

ferry_status nccl__worker_receive(void *self, const void *update_info)
{
    nccl__worker *w = self;
    receive r = {.w = w};
    ferry_status status;

    (void)update_info;
    r.params = w->host->declared(w->ctx, &r.count);
    pthread_mutex_lock(&w->lock);
    status = check_call(w);
    if (status >= 0)
        status = run(&r);
    pthread_mutex_unlock(&w->lock);
    if (status < 0)
        nccl__worker_leave(w, status);
    ferry__cuts_free(&r.cuts);
    return status;
}
