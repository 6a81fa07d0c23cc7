/* SPDX-License-Identifier: Apache-2.0 */
/* A round: the pass over the source cut into update calls, the next chunk
 * prepared while the last one loads.
 * Invariant: the items of the pass are fetched in order, whoever asks; and
 * whatever happens, no worker is left waiting for bytes. */
#include "backends/ipc/ipc_trainer_state.h"

#include "base/alloc.h"
#include "core/copy.h"
#include "core/manifest.h"
#include "core/packing.h"
#include "device/shared.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define ALIGN ((uint64_t)64)

/* One round's plan of chunks. */
typedef struct send_state {
    ipc__trainer *t;
    const ferry_param_meta *params;
    size_t count;
    bool stable;
    ferry__cuts cuts;
    size_t n_chunks;
    uint64_t buffer_bytes; /* the largest chunk, padded */
    ipc__chunk chunk;      /* the one being prepared */
    ipc__chunk in_flight;
} send_state;

ferry_status ipc__fetch(ipc__trainer *t, const ipc__chunk *chunk, size_t i,
                        ferry_tensor *out)
{
    ferry_item item;
    ferry_status status = t->host->pass_next(t->ctx, &item);

    FERRY_TRY(status);
    if (status == FERRY_DONE)
        return ferry_fail(FERRY_ECOVERAGE, "parameter %s did not come",
                          chunk->params[i].name);
    *out = item.tensor;
    return FERRY_OK;
}

ferry_status ipc__fetch_check(void *arg, const char *what)
{
    ipc__trainer *t = arg;

    return t->in_update ? ipc__peers_look(t, what, 0)
                        : t->host->check(t->ctx, what);
}

ferry_status ipc__take(ipc__trainer *t, const ipc__chunk *chunk, size_t i,
                       const ferry_tensor *tensor)
{
    const char *name = chunk->params[i].name;

    FERRY_TRY(ferry__fetch_begin(&t->fetcher, name, tensor));
    if (tensor->device == 0)
        return FERRY_OK;
    t->used_device = true;
    if (!t->told_devices)
        t->host->log(FERRY_LOG_WARN,
                     "ipc: parameter %s is in the memory of device %d; "
                     "tensors of devices are copied through the host",
                     name, tensor->device - 1);
    t->told_devices = true;
    return FERRY_OK;
}

static void chunk_free(ipc__chunk *chunk)
{
    ferry__free(chunk->tensors);
    ferry__free(chunk->handles);
    ferry__free(chunk->ranges);
    *chunk = (ipc__chunk){0};
}

static ferry_status chunk_begin(send_state *s, size_t first, size_t count,
                                uint64_t bytes)
{
    ipc__chunk *c = &s->chunk;

    c->params = s->params + first;
    c->count = count;
    c->bytes = bytes;
    c->tensors = ferry__alloc_array(count, sizeof(*c->tensors));
    c->handles = ferry__alloc_array(count, sizeof(*c->handles));
    if (s->t->path == IPC__PATH_CMA)
        c->ranges = ferry__alloc_array(count, sizeof(*c->ranges));
    if (!c->tensors || !c->handles ||
        (s->t->path == IPC__PATH_CMA && !c->ranges))
        return FERRY_ENOMEM;
    return FERRY_OK;
}

static uint64_t padded(uint64_t bytes)
{
    return (bytes + ALIGN - 1) / ALIGN * ALIGN;
}

static uint64_t chunk_padded(const ferry_param_meta *params, size_t count)
{
    uint64_t sum = 0;

    for (size_t i = 0; i < count; i++)
        sum += padded(ferry__meta_bytes(&params[i]));
    return sum;
}

/* ---- where a parameter's bytes go ---- */

/* Lowest and highest byte of a tensor that has elements. */
static void span_of(const ferry_tensor *tensor, char **out_first,
                    size_t *out_bytes)
{
    int64_t low = 0, high = 0;
    size_t elem = ferry_dtype_bytes(tensor->dtype);

    for (int32_t d = 0; d < tensor->ndim; d++) {
        int64_t reach = (tensor->shape[d] - 1) * tensor->stride[d];

        if (reach < 0)
            low += reach;
        else
            high += reach;
    }
    *out_first = (char *)ferry_tensor_data(tensor) + low * (int64_t)elem;
    *out_bytes = (size_t)(high - low + 1) * elem;
}

static void set_strides(ferry__ipc_handle *h, const ferry_tensor *tensor)
{
    h->strided = !ferry_tensor_is_contiguous(tensor);
    for (int32_t d = 0; h->strided && d < tensor->ndim; d++)
        h->stride[d] = tensor->stride[d];
}

/* Whether the tensor lies in an arena that workers can map. */
static ferry_status try_shared(send_state *s, const ferry_tensor *tensor,
                               ferry__ipc_handle *h, bool *out_shared)
{
    ferry__arena arena;
    size_t bytes;
    char *first;

    *out_shared = false;
    span_of(tensor, &first, &bytes);
    if (!ferry__arena_find(first, bytes, &arena))
        return FERRY_OK;
    h->offset = (uint64_t)((char *)ferry_tensor_data(tensor) - arena.memory);
    if (h->offset % ferry_dtype_bytes(tensor->dtype) != 0)
        return FERRY_OK;
    h->kind = FERRY__IPC_SHARED;
    h->id = arena.id * 2;
    set_strides(h, tensor);
    FERRY_TRY(ipc__segment_use(s->t, h->id, arena.size_bytes, arena.fd));
    s->t->used_shared = true;
    *out_shared = true;
    return FERRY_OK;
}

static void use_range(send_state *s, const ferry_tensor *tensor,
                      ferry__ipc_handle *h)
{
    ipc__chunk *c = &s->chunk;

    c->ranges[c->n_ranges] =
        (ferry__ipc_range){(uint64_t)(uintptr_t)ferry_tensor_data(tensor),
                           ferry_tensor_bytes(tensor)};
    h->kind = FERRY__IPC_CMA;
    h->id = c->n_ranges++;
    s->t->used_cma = true;
}

static ferry_status buffer_open(send_state *s, ipc__buffer *b)
{
    ipc__trainer *t = s->t;
    ferry_round_stats *stats = t->host->stats(t->ctx);
    void *memory;

    if (b->fd >= 0 && b->size_bytes >= s->buffer_bytes)
        return FERRY_OK;
    FERRY_TRY(
        ferry__shared_create("ferry-chunk", s->buffer_bytes, &b->fd, &memory));
    b->memory = memory;
    b->size_bytes = s->buffer_bytes;
    b->id = t->next_buffer_id++ * 2 + 1;
    stats->peak_bytes += b->size_bytes;
    return FERRY_OK;
}

static void copy_part(void *arg, const ferry_tensor *view, int64_t first,
                      int64_t count, void *out)
{
    (void)arg;
    ferry__copy_range(view, first, count, out);
}

/* Copies a tensor into the chunk's buffer; what is hashed later is the copy,
 * since the source may use its own memory again. */
static ferry_status use_buffer(send_state *s, ipc__buffer *b, uint64_t *at,
                               size_t i)
{
    ipc__trainer *t = s->t;
    ferry_tensor *tensor = &s->chunk.tensors[i];
    ferry__ipc_handle *h = &s->chunk.handles[i];
    int64_t began = t->host->now_ns();

    FERRY_TRY(buffer_open(s, b));
    FERRY_TRY(ipc__segment_use(t, b->id, b->size_bytes, b->fd));
    FERRY_TRY(ipc__take(t, &s->chunk, i, tensor));
    FERRY_TRY(ferry__fetch_pack(&t->fetcher, 0, ferry_tensor_numel(tensor),
                                b->memory + *at, copy_part, NULL));
    h->kind = FERRY__IPC_SHARED;
    h->id = b->id;
    h->offset = *at;
    FERRY_TRY(ferry_tensor_init(tensor, b->memory + *at, tensor->dtype,
                                tensor->ndim, tensor->shape));
    *at += padded(ferry_tensor_bytes(tensor));
    t->used_buffer = true;
    t->host->stats(t->ctx)->pack_ms +=
        (double)(t->host->now_ns() - began) / 1e6;
    FERRY_HOST_SPAN(t->host, t->ctx, "pack", began);
    return FERRY_OK;
}

static ferry_status fail_not_shared(const ferry_param_meta *param)
{
    return ferry_fail(FERRY_ENOTSUP,
                      "parameter %s is not in memory of ferry_shared_alloc, "
                      "which path \"shared\" needs",
                      param->name);
}

/* Decides for one parameter whose tensor is there. */
static ferry_status place(send_state *s, ipc__buffer *b, uint64_t *at, size_t i)
{
    ipc__trainer *t = s->t;
    ipc__chunk *c = &s->chunk;
    ferry__ipc_handle *h = &c->handles[i];
    ferry_tensor *tensor = &c->tensors[i];
    bool host = tensor->device == 0, shared = false;

    if (ferry_tensor_numel(tensor) == 0) {
        h->kind = FERRY__IPC_EMPTY;
        return FERRY_OK;
    }
    if (host && s->stable &&
        (t->path == IPC__PATH_AUTO || t->path == IPC__PATH_SHARED))
        FERRY_TRY(try_shared(s, tensor, h, &shared));
    if (shared)
        return FERRY_OK;
    if (t->path == IPC__PATH_SHARED)
        return fail_not_shared(&c->params[i]);
    if (host && s->stable && t->path == IPC__PATH_CMA && t->cma &&
        ferry_tensor_is_contiguous(tensor)) {
        use_range(s, tensor, h);
        return FERRY_OK;
    }
    if (b)
        return use_buffer(s, b, at, i);
    h->kind = FERRY__IPC_RING;
    return FERRY_OK;
}

/* Without a look at the tensors: all through the ring, as they come. */
static ferry_status place_stream(send_state *s)
{
    ipc__chunk *c = &s->chunk;

    for (size_t i = 0; i < c->count; i++) {
        if (s->t->path == IPC__PATH_SHARED &&
            ferry__meta_numel(&c->params[i]) > 0)
            return fail_not_shared(&c->params[i]);
        c->handles[i].kind = ferry__meta_numel(&c->params[i]) == 0
                                 ? FERRY__IPC_EMPTY
                                 : FERRY__IPC_RING;
    }
    return FERRY_OK;
}

/* The chunk's buffer, or NULL when its bytes go another way: a chunk is
 * copied together only in packed mode, and a tensor that alone exceeds the
 * buffer travels through the ring (O-30). */
static ipc__buffer *buffer_for(const send_state *s, size_t k)
{
    ipc__trainer *t = s->t;

    if (!t->info->packed || t->path == IPC__PATH_RING ||
        t->path == IPC__PATH_CMA || s->chunk.bytes > t->buffer_bytes)
        return NULL;
    return &t->buffers[k % (size_t)t->n_buffers];
}

/* Fetches and places the tensors of chunk k. A source whose tensors do not
 * last is read here only when they are copied at once. */
static ferry_status prepare(send_state *s, size_t k)
{
    ipc__chunk *c = &s->chunk;
    ipc__buffer *b = buffer_for(s, k);
    uint64_t at = 0;

    if (!s->stable && !b)
        return place_stream(s);
    c->fetched = true;
    for (size_t i = 0; i < c->count; i++) {
        FERRY_TRY(ipc__fetch(s->t, c, i, &c->tensors[i]));
        FERRY_TRY(place(s, b, &at, i));
        if (s->t->in_update && i % 16 == 15)
            FERRY_TRY(ipc__peers_look(s->t, "packing", 0));
    }
    return FERRY_OK;
}

/* ---- one update call ---- */

static ferry_status begin_call(ipc__trainer *t, const ipc__chunk *c)
{
    ferry__str s = {0};
    ferry_status status;

    ferry__str_append(&s, "{");
    ferry__manifest_to_json(c->params, c->count, &s);
    ferry__str_append(&s, ",\"handles\":");
    ferry__ipc_put_handles(&s, c->handles, c->params, c->count);
    ferry__str_printf(&s, ",\"update\":%llu}", (unsigned long long)t->update);
    if (s.failed)
        status = ferry_fail(FERRY_ENOMEM, "ipc update info: out of memory");
    else
        status = t->host->update_begin(t->ctx, s.data);
    ferry__str_free(&s);
    FERRY_TRY(status);
    t->in_update = true;
    return FERRY_OK;
}

static ferry_status drive_chunk(ipc__trainer *t, ipc__chunk *c,
                                ipc__digester **digester)
{
    FERRY_TRY(ipc__announce(
        t, c, ferry__ipc_handles_digest(c->handles, c->params, c->count)));
    if (t->info->digest) {
        FERRY_TRY(ipc__peers_await_boxes(t, c));
        FERRY_TRY(ipc__digester_create(t, c, digester));
    }
    FERRY_TRY(ipc__ring_stream(t, c, *digester));
    return *digester ? ipc__digester_send(*digester) : FERRY_OK;
}

/* Starts the call and gives it all its bytes; returns while it loads. */
static ferry_status begin_update(ipc__trainer *t, ipc__chunk *c)
{
    ipc__digester *digester = NULL;
    ferry_status status;

    t->update++;
    t->update_bytes = c->bytes;
    t->update_seen = 0;
    for (size_t i = 0; i < t->n_peers; i++) {
        t->peers[i].done = false;
        t->peers[i].done_bytes = 0;
        t->peers[i].boxes = NULL;
    }
    FERRY_TRY(begin_call(t, c));
    status = drive_chunk(t, c, &digester);
    ipc__digester_destroy(&digester);
    return status;
}

static ferry_status finish_update(ipc__trainer *t)
{
    int64_t began = t->host->now_ns();

    if (!t->in_update)
        return FERRY_OK;
    FERRY_TRY(ipc__peers_await_done(t));
    if (t->in_update) {
        t->in_update = false;
        FERRY_TRY(t->host->update_wait(t->ctx));
    }
    t->host->stats(t->ctx)->wire_ms +=
        (double)(t->host->now_ns() - began) / 1e6;
    FERRY_HOST_SPAN(t->host, t->ctx, "wire", began);
    return FERRY_OK;
}

static ferry_status expect_end(ipc__trainer *t)
{
    ferry_item item;
    ferry_status status = t->host->pass_next(t->ctx, &item);

    FERRY_TRY(status);
    if (status != FERRY_DONE)
        return ferry_fail(FERRY_EMISMATCH, "parameter %s was not declared",
                          item.name);
    return FERRY_OK;
}

/* ---- the round ---- */

static ferry_status send_chunk(send_state *s, size_t k, size_t first)
{
    size_t count = s->t->info->packed ? s->cuts.counts[k] : s->count;
    bool last = first + count == s->count;
    uint64_t bytes = 0;

    for (size_t i = 0; i < count; i++)
        bytes += ferry__meta_bytes(&s->params[first + i]);
    FERRY_TRY(chunk_begin(s, first, count, bytes));
    /* One buffer can not be filled while it is read. */
    if (s->t->n_buffers == 1)
        FERRY_TRY(finish_update(s->t));
    FERRY_TRY(prepare(s, k));
    if (last && s->chunk.fetched)
        FERRY_TRY(expect_end(s->t));
    FERRY_TRY(finish_update(s->t));
    chunk_free(&s->in_flight);
    s->in_flight = s->chunk;
    s->chunk = (ipc__chunk){0};
    FERRY_TRY(begin_update(s->t, &s->in_flight));
    return last && !s->in_flight.fetched ? expect_end(s->t) : FERRY_OK;
}

static ferry_status plan_chunks(send_state *s)
{
    size_t first = 0;

    s->n_chunks = 1;
    if (!s->t->info->packed)
        return FERRY_OK;
    /* A tensor that is too large for them is warned of once. */
    FERRY_TRY((s->t->round > 1 ? ferry__cuts_again : ferry__cuts_make)(
        FERRY__CUT_FIT, s->params, s->count, s->t->buffer_bytes, &s->cuts));
    s->n_chunks = s->cuts.n_buffers;
    for (size_t k = 0; k < s->n_chunks; k++) {
        uint64_t need = chunk_padded(s->params + first, s->cuts.counts[k]);

        if (s->cuts.bytes[k] <= s->t->buffer_bytes && need > s->buffer_bytes)
            s->buffer_bytes = need;
        first += s->cuts.counts[k];
    }
    return FERRY_OK;
}

static ferry_status send_all(send_state *s)
{
    size_t first = 0;

    FERRY_TRY(plan_chunks(s));
    for (size_t k = 0; k < s->n_chunks; k++) {
        FERRY_TRY(send_chunk(s, k, first));
        first += s->in_flight.count;
    }
    return finish_update(s->t);
}

static ferry_status drain_pass(ipc__trainer *t)
{
    ferry_item item;
    ferry_status status;

    do {
        status = t->host->pass_next(t->ctx, &item);
    } while (status == FERRY_OK);
    return status < 0 ? status : FERRY_OK;
}

static void note_path(ipc__trainer *t)
{
    ferry_round_stats *stats = t->host->stats(t->ctx);
    bool shared = t->used_shared || t->used_buffer;
    const char *direct = shared ? "shared" : t->used_cma ? "cma" : "";

    snprintf(stats->path, sizeof(stats->path), "%s%s%s", direct,
             direct[0] && t->used_ring ? "+" : "", t->used_ring ? "ring" : "");
    stats->peak_bytes += t->fetcher.peak_bytes;
    t->host->log(FERRY_LOG_INFO, "ipc: round %llu went by %s%s%s",
                 (unsigned long long)t->round,
                 stats->path[0] ? stats->path : "no path: nothing to send",
                 t->used_buffer ? " (packed into chunk buffers)" : "",
                 t->used_device ? ", from devices through the host" : "");
}

/* Progress follows the slowest worker; what the others took counts as sent
 * too. */
static void report_copies(send_state *s)
{
    uint64_t bytes = 0;

    for (size_t i = 0; i < s->count; i++)
        bytes += ferry__meta_bytes(&s->params[i]);
    if (s->t->n_peers > 1)
        s->t->host->progress(s->t->ctx, bytes * (s->t->n_peers - 1));
}

static ferry_status send_round(send_state *s)
{
    ipc__trainer *t = s->t;
    ferry_status status;

    FERRY_TRY(t->host->pass_begin(t->ctx, &s->params, &s->count));
    if (!t->is_sender || s->count == 0)
        return drain_pass(t);
    if (!t->open || !ipc__session_alive(t))
        return ferry_fail(FERRY_ECONN,
                          "the ipc session is broken: a worker's socket is "
                          "closed");
    s->stable = t->host->source_is_stable(t->ctx);
    t->host->stats(t->ctx)->peak_bytes += t->ring_bytes;
    status = send_all(s);
    if (status < 0) {
        ipc__peers_tell_failure(t, status);
        return status;
    }
    report_copies(s);
    note_path(t);
    return FERRY_OK;
}

ferry_status ipc__trainer_send(void *self, const void *payload,
                               size_t payload_count)
{
    ipc__trainer *t = self;
    send_state s = {.t = t};
    ferry_status status;

    (void)payload;
    (void)payload_count;
    t->round++;
    t->in_update = false;
    t->used_shared = t->used_ring = t->used_cma = t->used_buffer = false;
    t->used_device = false;
    status = send_round(&s);
    /* Before the tensors may go. */
    ferry__fetch_rest(&t->fetcher);
    t->host->pass_end(t->ctx);
    chunk_free(&s.chunk);
    chunk_free(&s.in_flight);
    ferry__cuts_free(&s.cuts);
    return status;
}

/* Chunk buffers live for one round, arenas as long as rounds use them. */
void ipc__trainer_round_end(void *self, ferry_status result)
{
    ipc__trainer *t = self;

    (void)result;
    t->in_update = false;
    for (int32_t i = 0; i < t->n_buffers; i++) {
        ipc__buffer *b = &t->buffers[i];

        if (b->fd < 0)
            continue;
        for (size_t k = 0; k < t->n_segments; k++) {
            if (t->segments[k].id == b->id)
                t->segments[k].used_round = 0;
        }
        ferry__shared_unmap(b->memory, b->size_bytes);
        close(b->fd);
        *b = (ipc__buffer){.fd = -1};
    }
    if (t->open)
        ipc__segments_trim(t);
}
