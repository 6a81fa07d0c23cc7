/* SPDX-License-Identifier: Apache-2.0 */
/* How the bytes of one entry land: copied, compared with a tied twin, or
 * packed as the input of a step. Pieces come in rising source order.
 * Invariant: an entry is marked covered once, when all of it is there. */
#include "core/loading_state.h"

#include "base/alloc.h"
#include "base/clock.h"

#include <string.h>

void *ferry__loading_base(const ferry__loading *l, size_t slot)
{
    if (l->staging != NULL)
        return ferry__staging_slot(l->staging, slot);
    return l->model->params[slot].data;
}

void ferry__loading_before_write(ferry__loading *l)
{
    if (l->wrote)
        return;
    l->wrote = true;
    if (l->staging == NULL && l->before_live_write != NULL)
        l->before_live_write(l->arg);
}

void ferry__op_packed(const ferry__copy_op *op, ferry__copy_op *out)
{
    int64_t stride = 1;

    *out = *op;
    out->src_offset = 0;
    for (int32_t d = op->ndim - 1; d >= 0; d--) {
        out->src_stride[d] = stride;
        stride *= op->shape[d];
    }
}

void ferry__op_pack(const ferry__copy_op *op, ferry__copy_op *out)
{
    ferry__op_packed(op, out);
    memcpy(out->dst_stride, out->src_stride, sizeof(out->dst_stride));
    memcpy(out->src_stride, op->src_stride, sizeof(out->src_stride));
    out->src_offset = op->src_offset;
    out->dst_offset = 0;
    out->dst_dtype = op->src_dtype;
}

static bool same_box(const ferry__tied *t, const ferry__entry *e, int32_t ndim)
{
    for (int32_t d = 0; d < ndim; d++)
        if (t->start[d] != e->dst_start[d] || t->count[d] != e->dst_count[d])
            return false;
    return true;
}

/* Decides how a tied entry arrives, and remembers who came first. */
static ferry_status tied_decide(ferry__loading *l, const ferry__arrival *a,
                                const ferry__entry *e, ferry__landing *landing)
{
    int32_t ndim = l->model->params[e->slot].ndim;
    ferry__tied *t;

    for (size_t i = l->tied_heads[e->slot]; i != 0; i = l->tied[i - 1].next) {
        t = &l->tied[i - 1];
        if (!same_box(t, e, ndim))
            continue;
        landing->tied = i - 1;
        if (t->owner == a->id && !t->compared) {
            t->complete = false;
            landing->mode = FERRY__TIED_LAND;
        } else {
            t->compared = true;
            if (t->owner != a->id)
                t->twin = a->id;
            landing->mode =
                t->complete ? FERRY__TIED_COMPARE : FERRY__TIED_DEFER;
        }
        return FERRY_OK;
    }
    FERRY_TRY(
        ferry__grow(&l->tied, &l->tied_capacity, l->n_tied, sizeof(*l->tied)));
    t = &l->tied[l->n_tied];
    memset(t, 0, sizeof(*t));
    t->slot = e->slot;
    t->owner = a->id;
    memcpy(t->start, e->dst_start, sizeof(t->start));
    memcpy(t->count, e->dst_count, sizeof(t->count));
    t->next = l->tied_heads[e->slot];
    landing->tied = l->n_tied++;
    landing->mode = FERRY__TIED_LAND;
    l->tied_heads[e->slot] = l->n_tied;
    return FERRY_OK;
}

/* Names the parameter that came now and the one that it must equal. */
static ferry_status tied_differ(const ferry__loading *l,
                                const ferry__arrival *a, size_t record)
{
    const ferry__tied *t = &l->tied[record];
    size_t other = t->owner == a->id ? t->twin : t->owner;

    return ferry_fail(FERRY_EMISMATCH,
                      "parameters %s and %s are tied, but this round brought "
                      "different values for them",
                      ferry__plan_baked(l->plan, other)->meta.name,
                      ferry__plan_baked(l->plan, a->id)->meta.name);
}

static ferry_status hold_packed(ferry__loading *l, const ferry__entry *e,
                                ferry__landing *landing)
{
    size_t bytes;

    if (landing->held != NULL)
        return FERRY_OK;
    if (!ferry__mul((size_t)ferry__op_numel(&e->op),
                    ferry_dtype_bytes(e->op.src_dtype), &bytes))
        return ferry_fail(FERRY_EOVERFLOW, "a box does not fit a size");
    FERRY_TRY(ferry__loading_hold(l, bytes, &landing->held));
    landing->held_bytes = bytes;
    return FERRY_OK;
}

/* Pieces come in box order, so a piece starts in the packed box where the
 * elements before it end. */
static ferry_status defer_piece(ferry__loading *l, const ferry__entry *e,
                                ferry__landing *landing,
                                const ferry__copy_op *op, const void *src)
{
    ferry__copy_op pack;

    FERRY_TRY(hold_packed(l, e, landing));
    ferry__op_pack(op, &pack);
    pack.dst_offset = landing->packed;
    ferry__copy_run(&pack, landing->held, src, landing->hash);
    landing->packed += ferry__op_numel(op);
    return FERRY_OK;
}

static ferry_status land_tied(ferry__loading *l, ferry__arrival *a,
                              const ferry__entry *e, ferry__landing *landing,
                              const ferry__copy_op *op, const void *src)
{
    if (landing->mode == FERRY__TIED_UNDECIDED)
        FERRY_TRY(tied_decide(l, a, e, landing));
    switch (landing->mode) {
    case FERRY__TIED_COMPARE:
        if (!ferry__copy_equal(op, ferry__loading_base(l, e->slot), src))
            return tied_differ(l, a, landing->tied);
        if (landing->hash != NULL)
            ferry__copy_digest(op, src, landing->hash);
        return FERRY_OK;
    case FERRY__TIED_DEFER:
        return defer_piece(l, e, landing, op, src);
    case FERRY__TIED_UNDECIDED:
    case FERRY__TIED_LAND:
        break;
    }
    ferry__loading_before_write(l);
    ferry__copy_run(op, ferry__loading_base(l, e->slot), src, landing->hash);
    return FERRY_OK;
}

static ferry_status land_step(ferry__loading *l, const ferry__entry *e,
                              ferry__landing *landing, const ferry__copy_op *op,
                              const void *src)
{
    FERRY_TRY(hold_packed(l, e, landing));
    ferry__copy_run(op, landing->held, src, landing->hash);
    return FERRY_OK;
}

/* Asked for when the first byte is there, so that a round that ends before it
 * costs no memory. */
static ferry_status ask_room(const ferry__loading *l, const ferry__entry *e,
                             ferry__landing *landing)
{
    ferry_tensor t;

    FERRY_TRY(ferry_tensor_init(&t, NULL, e->op.src_dtype, e->input_ndim,
                                e->input_shape));
    t.name = l->current;
    FERRY_TRY(e->room(e->room_arg, &t, &landing->room));
    if (landing->room == NULL)
        return ferry_fail(FERRY_EINVAL, "parameter %s: got no room for it",
                          l->current);
    return FERRY_OK;
}

static ferry_status land_aside(const ferry__loading *l, const ferry__entry *e,
                               ferry__landing *landing,
                               const ferry__copy_op *op, const void *src)
{
    if (landing->room == NULL)
        FERRY_TRY(ask_room(l, e, landing));
    ferry__copy_run(op, landing->room, src, landing->hash);
    return FERRY_OK;
}

static ferry_status land(ferry__loading *l, ferry__batch *b, ferry__arrival *a,
                         size_t entry, const ferry__copy_op *op,
                         const void *src)
{
    size_t count;
    const ferry__entry *e = &ferry__plan_entries(l->plan, a->id, &count)[entry];
    ferry__landing *landing = &b->landings[a->first + entry];

    if (l->digests && landing->hash == NULL) {
        landing->hash = ferry__xxh3_create();
        if (landing->hash == NULL)
            return FERRY_ENOMEM;
    }
    switch (e->kind) {
    case FERRY__ENTRY_TIED:
        return land_tied(l, a, e, landing, op, src);
    case FERRY__ENTRY_STEP:
        return land_step(l, e, landing, op, src);
    case FERRY__ENTRY_ASIDE:
        return land_aside(l, e, landing, op, src);
    case FERRY__ENTRY_COPY:
        break;
    }
    ferry__loading_before_write(l);
    if (ferry__loading_defer(l, e->slot, op, src, landing->hash))
        return FERRY_OK;
    ferry__copy_run(op, ferry__loading_base(l, e->slot), src, landing->hash);
    return FERRY_OK;
}

ferry_status ferry__land(ferry__loading *l, ferry__batch *b, ferry__arrival *a,
                         size_t entry, const ferry__copy_op *op,
                         const void *src)
{
    int64_t from_ns = ferry__now_ns();
    bool quantises = l->deferral == NULL && op->dst_dtype == FERRY_DTYPE_Q8_0 &&
                     op->src_dtype != FERRY_DTYPE_Q8_0;
    ferry_status st = land(l, b, a, entry, op, src);

    ferry__spans_add(&l->spans,
                     quantises ? FERRY__SPAN_QUANTISE : FERRY__SPAN_LOAD,
                     from_ns);
    return st;
}

static void take_digest(ferry__landing *landing)
{
    if (landing->hash == NULL)
        return;
    landing->digest = ferry__xxh3_value(landing->hash);
    landing->has_digest = true;
    ferry__xxh3_destroy(landing->hash);
    landing->hash = NULL;
}

ferry_status ferry__land_done(ferry__loading *l, ferry__batch *b,
                              ferry__arrival *a, size_t entry)
{
    size_t count, bytes;
    const ferry__entry *e = &ferry__plan_entries(l->plan, a->id, &count)[entry];
    ferry__landing *landing = &b->landings[a->first + entry];
    void *held;

    if (e->kind == FERRY__ENTRY_STEP)
        FERRY_TRY(hold_packed(l, e, landing)); /* a box of no element */
    take_digest(landing);
    landing->done = true;
    a->n_done++;
    if (e->kind == FERRY__ENTRY_STEP) {
        held = landing->held;
        bytes = landing->held_bytes;
        landing->held = NULL;
        landing->held_bytes = 0;
        return ferry__step_take(l, e, held, bytes);
    }
    if (e->kind == FERRY__ENTRY_ASIDE)
        return FERRY_OK;
    if (e->kind == FERRY__ENTRY_TIED && landing->mode == FERRY__TIED_LAND)
        l->tied[landing->tied].complete = true;
    return ferry__coverage_mark(l->coverage, e->slot, e->dst_start,
                                e->dst_count);
}

static ferry_status compare_held(ferry__loading *l, ferry__batch *b,
                                 ferry__arrival *a, size_t entry)
{
    size_t count;
    const ferry__entry *e = &ferry__plan_entries(l->plan, a->id, &count)[entry];
    ferry__landing *landing = &b->landings[a->first + entry];
    ferry__copy_op packed;

    ferry__op_packed(&e->op, &packed);
    if (!ferry__copy_equal(&packed, ferry__loading_base(l, e->slot),
                           landing->held))
        return tied_differ(l, a, landing->tied);
    ferry__loading_drop(l, landing->held, landing->held_bytes);
    landing->held = NULL;
    return FERRY_OK;
}

ferry_status ferry__land_deferred(ferry__loading *l)
{
    for (ferry__batch *b = l->first; b != NULL; b = b->next)
        for (size_t i = 0; i < b->manifest.count; i++) {
            ferry__arrival *a = &b->arrivals[i];

            for (size_t k = 0; k < a->count; k++)
                if (b->landings[a->first + k].held != NULL &&
                    b->landings[a->first + k].mode == FERRY__TIED_DEFER)
                    FERRY_TRY(compare_held(l, b, a, k));
        }
    return FERRY_OK;
}
