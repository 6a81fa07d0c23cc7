/* SPDX-License-Identifier: Apache-2.0 */
/* The three ways in which a parameter is handed over: whole, by ranges of the
 * flat tensor, by boxes.
 * Invariant: a parameter comes once in an update, by one of the three. */
#include "core/loading_state.h"

#include "base/alloc.h"

#include <string.h>

static ferry_status twice(const ferry__loading *l)
{
    return ferry_fail(FERRY_EMISMATCH, "parameter %s: came twice in one update",
                      l->current);
}

static void finish_arrival(ferry__loading *l, ferry__arrival *a)
{
    a->whole = true;
    atomic_fetch_add(
        &l->bytes_loaded,
        ferry__meta_bytes(&l->last->manifest.params[a - l->last->arrivals]));
}

/* A step of one input whose box lies packed in the tensor already. */
static bool lies_packed(const ferry__loading *l, const ferry__entry *e,
                        const ferry__copy_op *op)
{
    if (e->kind != FERRY__ENTRY_STEP || l->digests ||
        ferry__plan_step_at(l->plan, e->step)->step.n_inputs != 1)
        return false;
    for (int32_t d = 0; d < op->ndim; d++)
        if (op->src_stride[d] != op->dst_stride[d])
            return false;
    return op->dst_offset == 0;
}

/* Lands every entry from a tensor of any strides that the ops can follow. */
static ferry_status land_tensor(ferry__loading *l, ferry__arrival *a,
                                const ferry_tensor *t)
{
    size_t count, elem = ferry_dtype_bytes(t->dtype);

    for (size_t k = 0; k < a->count; k++) {
        const ferry__entry *e = &ferry__plan_entries(l->plan, a->id, &count)[k];
        ferry__copy_op op;

        FERRY_TRY(ferry__op_over_tensor(&e->op, t, &op));
        if (lies_packed(l, e, &op)) {
            FERRY_TRY(ferry__step_run_now(
                l, e, (const char *)t->data + (size_t)op.src_offset * elem));
            l->last->landings[a->first + k].done = true;
            a->n_done++;
            continue;
        }
        if (ferry__op_numel(&op) > 0)
            FERRY_TRY(ferry__land(l, l->last, a, k, &op, t->data));
        FERRY_TRY(ferry__land_done(l, l->last, a, k));
    }
    return FERRY_OK;
}

/* Whether every op can follow the tensor's strides. */
static bool can_follow(const ferry__loading *l, const ferry__arrival *a,
                       const ferry_tensor *t)
{
    size_t count;
    const ferry__entry *e = ferry__plan_entries(l->plan, a->id, &count);
    ferry__copy_op op;

    for (size_t k = 0; k < a->count; k++)
        if (ferry__op_over_tensor(&e[k].op, t, &op) < 0)
            return false;
    return true;
}

static ferry_status land_contiguous_copy(ferry__loading *l, ferry__arrival *a,
                                         const ferry_tensor *t)
{
    size_t bytes = ferry_tensor_bytes(t);
    ferry_tensor copy;
    void *memory;
    ferry_status st;

    FERRY_TRY(ferry__loading_hold(l, bytes, &memory));
    st = ferry_tensor_init(&copy, memory, t->dtype, t->ndim, t->shape);
    if (st == FERRY_OK)
        st = ferry_tensor_copy(&copy, t);
    if (st == FERRY_OK)
        st = land_tensor(l, a, &copy);
    ferry__loading_drop(l, memory, bytes);
    return st;
}

ferry_status ferry__loading_load(ferry__loading *l, size_t index,
                                 const ferry_tensor *tensor)
{
    ferry__arrival *a;
    const ferry_param_meta *meta;

    FERRY_TRY(ferry__arrival_at(l, index, &a));
    if (a->begun)
        return twice(l);
    meta = &l->last->manifest.params[index];
    FERRY_TRY(ferry__meta_check(meta, index, meta->name, tensor));
    if (tensor->data == NULL && ferry_tensor_numel(tensor) > 0)
        return ferry_fail(FERRY_EINVAL, "parameter %s: came without data",
                          meta->name);
    if (tensor->device != 0 && ferry_tensor_numel(tensor) > 0)
        return ferry_fail(FERRY_ENOTSUP,
                          "parameter %s: came in the memory of device %d; "
                          "tensors of the host are loaded",
                          meta->name, (int)tensor->device - 1);
    a->begun = true;
    if (l->kernel_format)
        FERRY_TRY(ferry__loading_place(l, a->id, tensor));
    else if (can_follow(l, a, tensor))
        FERRY_TRY(land_tensor(l, a, tensor));
    else
        FERRY_TRY(land_contiguous_copy(l, a, tensor));
    finish_arrival(l, a);
    return FERRY_OK;
}

/* ---- by range ---- */

typedef struct ranged {
    ferry__loading *l;
    ferry__arrival *a;
    size_t entry;
    int64_t first;
    const void *bytes;
    ferry_status status;
} ranged;

static void land_piece(void *arg, const ferry__copy_op *op)
{
    ranged *r = arg;
    ferry__copy_op piece = *op;

    if (r->status < 0)
        return;
    piece.src_offset -= r->first;
    r->status = ferry__land(r->l, r->l->last, r->a, r->entry, &piece, r->bytes);
}

static ferry_status land_range(ferry__loading *l, ferry__arrival *a,
                               const void *bytes, int64_t first, int64_t count)
{
    ranged r = {l, a, 0, first, bytes, FERRY_OK};
    size_t n;

    for (; r.entry < a->count; r.entry++) {
        ferry__copy_op op = ferry__plan_entries(l->plan, a->id, &n)[r.entry].op;

        ferry__op_clip(&op, first, count, land_piece, &r);
        FERRY_TRY(r.status);
    }
    return FERRY_OK;
}

/* Whether pieces can land as they come; else the parameter is put together
 * first (q8_0 blocks that a cut would split). */
static bool can_clip(const ferry__loading *l, const ferry__arrival *a)
{
    size_t count;
    const ferry__entry *e = ferry__plan_entries(l->plan, a->id, &count);

    for (size_t k = 0; k < count; k++)
        if (!ferry__op_can_clip(&e[k].op))
            return false;
    return true;
}

static ferry_status bounce_whole(ferry__loading *l, ferry__arrival *a,
                                 const ferry_param_meta *meta)
{
    ferry_tensor t;
    ferry_status st =
        ferry_tensor_init(&t, a->bounce, meta->dtype, meta->ndim, meta->shape);

    if (st == FERRY_OK)
        st = land_tensor(l, a, &t);
    ferry__loading_drop(l, a->bounce, a->bounce_bytes);
    a->bounce = NULL;
    return st;
}

static ferry_status range_ended(ferry__loading *l, ferry__arrival *a,
                                const ferry_param_meta *meta)
{
    if (a->bounce != NULL)
        FERRY_TRY(bounce_whole(l, a, meta));
    else
        for (size_t k = 0; k < a->count; k++)
            FERRY_TRY(ferry__land_done(l, l->last, a, k));
    finish_arrival(l, a);
    return FERRY_OK;
}

static ferry_status check_range(const ferry_param_meta *meta,
                                const ferry__arrival *a, int64_t first,
                                int64_t count)
{
    int64_t numel = ferry__meta_numel(meta);

    if (first != a->position)
        return ferry_fail(FERRY_EMISMATCH,
                          "parameter %s: expected element %lld next, got "
                          "%lld",
                          meta->name, (long long)a->position, (long long)first);
    if (count < 0 || count > numel - first)
        return ferry_fail(FERRY_EMISMATCH,
                          "parameter %s: declared %lld elements, got %lld "
                          "from element %lld on",
                          meta->name, (long long)numel, (long long)count,
                          (long long)first);
    if (first % 32 != 0 || (count % 32 != 0 && first + count != numel))
        return ferry_fail(FERRY_EINVAL,
                          "parameter %s: a range of %lld elements from %lld "
                          "is not cut at a multiple of 32",
                          meta->name, (long long)count, (long long)first);
    return FERRY_OK;
}

ferry_status ferry__loading_range(ferry__loading *l, size_t index,
                                  const void *bytes, int64_t first,
                                  int64_t count)
{
    const ferry_param_meta *meta;
    ferry__arrival *a;
    size_t elem;

    FERRY_TRY(ferry__arrival_at(l, index, &a));
    meta = &l->last->manifest.params[index];
    if (l->kernel_format)
        return ferry_fail(FERRY_ENOTSUP,
                          "parameter %s: in kernel format it comes whole",
                          meta->name);
    if (a->whole || (a->begun && a->position == 0))
        return twice(l);
    FERRY_TRY(check_range(meta, a, first, count));
    elem = ferry_dtype_bytes(meta->dtype);
    if (!a->begun && !can_clip(l, a)) {
        FERRY_TRY(ferry__loading_hold(l, (size_t)ferry__meta_bytes(meta),
                                      &a->bounce));
        a->bounce_bytes = (size_t)ferry__meta_bytes(meta);
    }
    if (a->bounce != NULL)
        memcpy((char *)a->bounce + (size_t)first * elem, bytes,
               (size_t)count * elem);
    else if (count > 0)
        FERRY_TRY(land_range(l, a, bytes, first, count));
    a->begun = count > 0 || a->begun;
    a->position = first + count;
    if (a->position == ferry__meta_numel(meta)) {
        a->begun = true;
        return range_ended(l, a, meta);
    }
    return FERRY_OK;
}

/* ---- by box ---- */

ferry_status ferry__loading_box(ferry__loading *l, size_t index, size_t box,
                                const void *bytes)
{
    ferry__arrival *a;
    const ferry__entry *e;
    ferry__copy_op op;
    size_t count;

    FERRY_TRY(ferry__arrival_at(l, index, &a));
    if (box >= a->count)
        return ferry_fail(FERRY_EINVAL,
                          "parameter %s: box %zu of %zu does not exist",
                          l->current, box, a->count);
    if (a->whole || a->position != 0 || l->last->landings[a->first + box].done)
        return twice(l);
    e = &ferry__plan_entries(l->plan, a->id, &count)[box];
    ferry__op_packed(&e->op, &op);
    a->begun = true;
    if (ferry__op_numel(&op) > 0)
        FERRY_TRY(ferry__land(l, l->last, a, box, &op, bytes));
    FERRY_TRY(ferry__land_done(l, l->last, a, box));
    if (a->n_done == a->count)
        finish_arrival(l, a);
    return FERRY_OK;
}
