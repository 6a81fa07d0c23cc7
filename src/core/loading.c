/* SPDX-License-Identifier: Apache-2.0 */
/* A round's loading: declaring an update, and what is asked of it. How bytes
 * are handed over is in loading_hand.c, how they land in loading_land.c.
 * Invariant: an update is checked whole before its first byte is written. */
#include "core/loading_state.h"

#include "base/alloc.h"

#include <string.h>

#define HELD_LIMIT_BYTES ((uint64_t)1 << 30)
/* Few enough to go with every status. */
#define SPANS_LIMIT 48

static ferry_status deferral_open(ferry__loading *l, int32_t n_threads)
{
    if (n_threads == 0)
        return FERRY_OK;
    l->deferred_in =
        ferry__alloc_array(l->model->n_params, sizeof(*l->deferred_in));
    if (l->deferred_in == NULL)
        return FERRY_ENOMEM;
    return ferry__deferral_create(n_threads, &l->spans, &l->deferral);
}

ferry_status ferry__loading_create(const ferry__loading_options *options,
                                   ferry__loading **out)
{
    ferry__loading *l = ferry__alloc(sizeof(*l));
    size_t n = options->model->n_params;

    if (l == NULL)
        return FERRY_ENOMEM;
    ferry__spans_init(&l->spans, SPANS_LIMIT);
    l->model = options->model;
    l->plan = options->plan;
    l->before_live_write = options->before_live_write;
    l->arg = options->arg;
    l->held_limit_bytes = options->held_limit_bytes != 0
                              ? options->held_limit_bytes
                              : HELD_LIMIT_BYTES;
    l->tied_heads = ferry__alloc_array(n, sizeof(*l->tied_heads));
    l->kernel = ferry__alloc_array(n, sizeof(*l->kernel));
    if (l->tied_heads == NULL || l->kernel == NULL ||
        ferry__coverage_create(l->model, &l->coverage) < 0 ||
        deferral_open(l, options->defer_threads) < 0) {
        ferry__loading_destroy(&l);
        return FERRY_ENOMEM;
    }
    *out = l;
    return FERRY_OK;
}

static void batch_free(ferry__loading *l, ferry__batch *b)
{
    for (size_t i = 0; b->arrivals != NULL && i < b->manifest.count; i++) {
        ferry__loading_drop(l, b->arrivals[i].bounce,
                            b->arrivals[i].bounce_bytes);
        ferry__free(b->arrivals[i].boxes);
    }
    for (size_t i = 0; b->landings != NULL && i < b->n_landings; i++) {
        ferry__loading_drop(l, b->landings[i].held, b->landings[i].held_bytes);
        ferry__xxh3_destroy(b->landings[i].hash);
    }
    ferry__free(b->arrivals);
    ferry__free(b->landings);
    ferry__manifest_clear(&b->manifest);
    ferry__free(b);
}

void ferry__loading_end(ferry__loading *l)
{
    ferry__loading_discard(l);
    while (l->first != NULL) {
        ferry__batch *next = l->first->next;

        batch_free(l, l->first);
        l->first = next;
    }
    l->last = NULL;
    l->current = NULL;
    l->n_tied = 0;
    memset(l->tied_heads, 0, l->model->n_params * sizeof(*l->tied_heads));
    ferry__step_reset(l);
}

void ferry__loading_begin(ferry__loading *l, ferry__staging *staging)
{
    ferry__loading_end(l);
    ferry__coverage_reset(l->coverage);
    ferry__spans_clear(&l->spans);
    memset(l->kernel, 0, l->model->n_params * sizeof(*l->kernel));
    l->staging = staging;
    l->wrote = l->digests = l->promised = l->warned = false;
    l->kernel_any = l->kernel_format = false;
    l->update = 0;
    atomic_store(&l->bytes_declared, 0);
    atomic_store(&l->bytes_received, 0);
    atomic_store(&l->bytes_loaded, 0);
    atomic_store(&l->n_params, 0);
    atomic_store(&l->peak_bytes, atomic_load(&l->buffer_bytes));
}

void ferry__loading_destroy(ferry__loading **loading)
{
    ferry__loading *l = *loading;

    if (l == NULL)
        return;
    if (l->tied_heads != NULL)
        ferry__loading_end(l);
    ferry__deferral_destroy(&l->deferral);
    ferry__free(l->deferred_in);
    ferry__spans_destroy(&l->spans);
    ferry__coverage_destroy(&l->coverage);
    ferry__xxh3_destroy(l->scratch);
    ferry__free(l->tied_heads);
    ferry__free(l->tied);
    ferry__free(l->kernel);
    ferry__table_free(&l->slot_names);
    ferry__free(l->steps);
    ferry__free(l);
    *loading = NULL;
}

/* Bakes every name, so that all that can be refused is refused now. */
static ferry_status bake(ferry__loading *l, ferry__batch *b)
{
    size_t n = b->manifest.count, count;
    size_t *ids = ferry__alloc_array(n, sizeof(*ids));
    ferry_status st = FERRY_OK;

    if (ids == NULL)
        return FERRY_ENOMEM;
    for (size_t i = 0; i < n && st == FERRY_OK; i++) {
        st = ferry__plan_bake(l->plan, &b->manifest.params[i], &ids[i]);
        if (st < 0)
            break;
        ferry__plan_entries(l->plan, ids[i], &count);
        b->arrivals[i].id = ids[i];
        b->arrivals[i].first = b->n_landings;
        b->arrivals[i].count = count;
        b->n_landings += count;
    }
    if (st == FERRY_OK)
        st = ferry__plan_check_overlap(l->plan, ids, n);
    ferry__free(ids);
    return st;
}

static ferry_status batch_fill(ferry__loading *l, ferry__batch *b,
                               const ferry_param_meta *params, size_t count)
{
    FERRY_TRY(ferry__manifest_copy(&b->manifest, params, count));
    b->arrivals = ferry__alloc_array(count, sizeof(*b->arrivals));
    if (b->arrivals == NULL)
        return FERRY_ENOMEM;
    FERRY_TRY(l->kernel_format ? ferry__loading_match_stored(l, b)
                               : bake(l, b));
    b->landings = ferry__alloc_array(b->n_landings, sizeof(*b->landings));
    return b->landings != NULL ? FERRY_OK : FERRY_ENOMEM;
}

ferry_status ferry__loading_declare(ferry__loading *l,
                                    const ferry_param_meta *params,
                                    size_t count)
{
    ferry__batch *b = ferry__alloc(sizeof(*b));
    ferry_status st;

    if (b == NULL)
        return FERRY_ENOMEM;
    st = batch_fill(l, b, params, count);
    if (st < 0) {
        b->n_landings = b->landings != NULL ? b->n_landings : 0;
        batch_free(l, b);
        return st;
    }
    if (l->last != NULL)
        l->last->next = b;
    else
        l->first = b;
    l->last = b;
    l->update++;
    atomic_fetch_add(&l->bytes_declared, b->manifest.total_bytes);
    atomic_fetch_add(&l->n_params, (uint64_t)count);
    return FERRY_OK;
}

const ferry_param_meta *ferry__loading_declared(const ferry__loading *l,
                                                size_t *out_count)
{
    *out_count = l->last != NULL ? l->last->manifest.count : 0;
    return l->last != NULL ? l->last->manifest.params : NULL;
}

ferry_status ferry__arrival_at(ferry__loading *l, size_t index,
                               ferry__arrival **out)
{
    size_t count;

    ferry__loading_declared(l, &count);
    if (index >= count)
        return ferry_fail(FERRY_EINVAL,
                          "parameter index %zu is outside the %zu declared "
                          "parameters of this update",
                          index, count);
    *out = &l->last->arrivals[index];
    l->current = l->last->manifest.params[index].name;
    return FERRY_OK;
}

ferry_status ferry__loading_boxes(ferry__loading *l, size_t index,
                                  const ferry_box **out_boxes,
                                  size_t *out_count)
{
    ferry__arrival *a;
    const ferry__entry *e;
    size_t count;

    FERRY_TRY(ferry__arrival_at(l, index, &a));
    if (a->boxes == NULL && a->count > 0) {
        a->boxes = ferry__alloc_array(a->count, sizeof(*a->boxes));
        if (a->boxes == NULL)
            return FERRY_ENOMEM;
        e = ferry__plan_entries(l->plan, a->id, &count);
        for (size_t k = 0; k < a->count; k++)
            a->boxes[k] = e[k].box;
    }
    *out_boxes = a->boxes;
    *out_count = a->count;
    return FERRY_OK;
}

/* ---- digests, storage, questions ---- */

ferry_status ferry__loading_expect(ferry__loading *l, size_t index, size_t box,
                                   uint64_t xxh3)
{
    ferry__arrival *a;

    FERRY_TRY(ferry__arrival_at(l, index, &a));
    if (box >= a->count)
        return ferry_fail(FERRY_EINVAL,
                          "parameter %s: a digest for box %zu, but it has "
                          "%zu boxes here",
                          l->current, box, a->count);
    l->last->landings[a->first + box].expected = xxh3;
    l->last->landings[a->first + box].has_expected = true;
    l->promised = true;
    return FERRY_OK;
}

void ferry__loading_want_digests(ferry__loading *l, bool on)
{
    l->digests = on;
}

ferry_status ferry__loading_kernel_storage(ferry__loading *l, size_t param,
                                           void **out_bytes, size_t *out_size)
{
    FERRY_TRY(ferry__loading_check_slot(l, param));
    if (!l->kernel[param] && l->staging != NULL)
        ferry__staging_fill(l->staging, param);
    ferry__loading_before_write(l);
    l->kernel[param] = l->kernel_any = true;
    *out_bytes = ferry__loading_base(l, param);
    *out_size = ferry__slot_bytes(&l->model->params[param]);
    return FERRY_OK;
}

const char *ferry__loading_current(const ferry__loading *l)
{
    return l->current != NULL ? l->current : "";
}

void ferry__loading_received(ferry__loading *l, uint64_t bytes)
{
    atomic_fetch_add(&l->bytes_received, bytes);
}

void ferry__loading_counters_of(const ferry__loading *l,
                                ferry__loading_counters *out)
{
    out->bytes_declared = atomic_load(&l->bytes_declared);
    out->bytes_received = atomic_load(&l->bytes_received);
    out->bytes_loaded = atomic_load(&l->bytes_loaded);
    out->n_params = atomic_load(&l->n_params);
    out->held_bytes = atomic_load(&l->held_bytes);
    out->peak_bytes = atomic_load(&l->peak_bytes);
}

size_t ferry__loading_spans(ferry__loading *l, ferry__span *out,
                            size_t capacity)
{
    return ferry__spans_copy(&l->spans, out, capacity);
}

void ferry__loading_waited(ferry__loading *l, int32_t peer, const char *address,
                           int64_t from_ns)
{
    ferry__spans_wait(&l->spans, peer, address, from_ns);
}
