/* SPDX-License-Identifier: Apache-2.0 */
/* What a model's load may call: each call checks two views and records one
 * entry. Invariant: sources are views of this call's lazy tensor,
 * destinations are boxes of a slot; nothing else gets into a plan. */
#include "base/log.h"
#include "base/alloc.h"
#include "base/str.h"
#include "core/plan_private.h"
#include <stdio.h>
#include <string.h>

/* Keeps the first failure, so that a loader that ignores it still fails. */
static ferry_status note(ferry_loader *loader, ferry_status status)
{
    if (status < 0 && loader->status == 0) {
        loader->status = status;
        snprintf(loader->line, sizeof(loader->line), "%s", ferry_last_error());
    }
    return status;
}

static const ferry_param *slot_param(const ferry_loader *loader,
                                     const ferry_tensor *t)
{
    return &loader->plan->model.params[t->slot];
}

ferry_status ferry_loader_slot(ferry_loader *loader, size_t index,
                               ferry_tensor *out_slot)
{
    FERRY__NEED(loader);
    const ferry_model *model = &loader->plan->model;
    if (out_slot == NULL)
        return note(loader, ferry_fail(FERRY_EINVAL, "out_slot is NULL"));
    if (index >= model->n_params || index > INT32_MAX)
        return note(loader,
                    ferry_fail(FERRY_EINVAL, "parameter %s: slot %zu of %zu",
                               loader->name, index, model->n_params));
    const ferry_param *p = &model->params[index];
    if (p->flags & FERRY_PARAM_RUNTIME)
        return note(loader, ferry_fail(FERRY_EINVAL,
                                       "parameter %s: slot %s is a run-time "
                                       "one, which nothing is loaded into",
                                       loader->name, p->name));
    FERRY_TRY(note(loader, ferry_tensor_init(out_slot, NULL, p->dtype, p->ndim,
                                             p->shape)));
    out_slot->name = p->name;
    out_slot->slot = (int32_t)index;
    return FERRY_OK;
}

static ferry_status expect_shape(ferry_loader *loader,
                                 const ferry_tensor *tensor, int32_t ndim,
                                 const int64_t *shape)
{
    FERRY__NEED(tensor);
    if (ndim > 0)
        FERRY__NEED(shape);
    char want[256], got[256];
    bool same = ndim == tensor->ndim;
    for (int32_t i = 0; same && i < ndim; i++)
        same = shape[i] == tensor->shape[i];
    if (same)
        return FERRY_OK;
    return ferry_fail(
        FERRY_EMISMATCH, "parameter %s: shape %s expected, got %s",
        loader->name, ferry__shape_text(want, sizeof(want), ndim, shape),
        ferry__shape_text(got, sizeof(got), tensor->ndim, tensor->shape));
}

ferry_status ferry_loader_expect(ferry_loader *loader,
                                 const ferry_tensor *tensor, int32_t ndim,
                                 const int64_t *shape)
{
    FERRY__NEED(loader);
    return note(loader, expect_shape(loader, tensor, ndim, shape));
}

/* ---- checks ---- */

/* A source view lies inside the tensor, and its dimensions, sorted, nest, so
 * that its elements come in rising order. */
static bool source_nests(const ferry_tensor *whole, const ferry_tensor *src)
{
    ferry__copy_op op;
    int64_t span = 1;
    if (src->data || src->name != whole->name || src->offset < 0)
        return false;
    ferry__op_between(src, src, &op);
    ferry__op_sort(&op);
    if (ferry__op_numel(&op) == 0)
        return true;
    for (int32_t i = op.ndim - 1; i >= 0; i--) {
        if (op.src_stride[i] < 0 ||
            (op.src_stride[i] > 0 && op.src_stride[i] < span))
            return false;
        int64_t more;
        if (!ferry__mul64(op.shape[i] - 1, op.src_stride[i], &more) ||
            more > INT64_MAX - span)
            return false;
        span += more;
    }
    return op.src_offset <= ferry_tensor_numel(whole) - span;
}

static ferry_status check_source(ferry_loader *loader, const ferry_tensor *src)
{
    if (src->ndim < 0 || src->ndim > FERRY_MAX_DIMS ||
        src->dtype != loader->tensor.dtype ||
        !source_nests(&loader->tensor, src))
        return ferry_fail(FERRY_EINVAL,
                          "parameter %s: the source is not a view of it",
                          loader->name);
    return FERRY_OK;
}

static ferry_status check_slot(ferry_loader *loader, const ferry_tensor *dst)
{
    const ferry_model *model = &loader->plan->model;
    if (dst->slot < 0 || (size_t)dst->slot >= model->n_params || dst->data ||
        dst->ndim < 0 || dst->ndim > FERRY_MAX_DIMS ||
        dst->name != slot_param(loader, dst)->name ||
        dst->dtype != slot_param(loader, dst)->dtype)
        return ferry_fail(FERRY_EINVAL,
                          "parameter %s: the destination is not a view of a "
                          "slot",
                          loader->name);
    return FERRY_OK;
}

/* The destination as a box of its slot, without padding rows. */
static ferry_status check_box(ferry_loader *loader, const ferry_tensor *dst,
                              int64_t *start, int64_t *count)
{
    const ferry_param *p = slot_param(loader, dst);
    if (!ferry__box_decode(p->ndim, p->shape, dst, start, count))
        return ferry_fail(FERRY_ENOTSUP,
                          "parameter %s: the destination is not a box of "
                          "slot %s",
                          loader->name, p->name);
    if (p->ndim > 0 && p->valid_rows > 0 && start[0] + count[0] > p->valid_rows)
        return ferry_fail(FERRY_EINVAL,
                          "parameter %s: row %lld of slot %s is padding, "
                          "which begins at %lld",
                          loader->name, (long long)(start[0] + count[0] - 1),
                          p->name, (long long)p->valid_rows);
    int32_t last = p->ndim - 1;
    if (p->dtype == FERRY_DTYPE_Q8_0 &&
        (start[last] % 32 != 0 || count[last] % 32 != 0))
        return ferry_fail(FERRY_EINVAL,
                          "parameter %s: columns %lld to %lld of q8_0 slot "
                          "%s are no whole blocks of 32",
                          loader->name, (long long)start[last],
                          (long long)(start[last] + count[last]), p->name);
    return FERRY_OK;
}

/* The kernels quantise along the dimension of stride 1. */
static bool op_keeps_blocks(const ferry__copy_op *op)
{
    bool along = false;
    if (op->dst_dtype != FERRY_DTYPE_Q8_0)
        return true;
    for (int32_t i = 0; i < op->ndim; i++) {
        if (op->dst_stride[i] == 1 && op->shape[i] % 32 == 0)
            along = true;
        else if (op->dst_stride[i] % 32 != 0)
            return false;
    }
    return along;
}

static void set_box(ferry__entry *e)
{
    e->box.offset = e->op.src_offset;
    e->box.ndim = e->op.ndim;
    memcpy(e->box.shape, e->op.shape, sizeof(e->box.shape));
    memcpy(e->box.stride, e->op.src_stride, sizeof(e->box.stride));
}

static ferry_status add_entry(ferry_loader *loader, const ferry__entry *entry)
{
    ferry__plan *plan = loader->plan;
    FERRY_TRY(ferry__grow(&plan->entries, &plan->entries_capacity,
                          plan->n_entries, sizeof(*plan->entries)));
    plan->entries[plan->n_entries++] = *entry;
    return FERRY_OK;
}

/* ---- copies ---- */

static ferry_status record_copy(ferry_loader *loader, ferry__entry_kind kind,
                                const ferry_tensor *dst,
                                const ferry_tensor *src)
{
    FERRY__NEED(dst);
    FERRY__NEED(src);
    ferry__entry e;
    memset(&e, 0, sizeof(e));
    FERRY_TRY(check_source(loader, src));
    FERRY_TRY(check_slot(loader, dst));
    FERRY_TRY(expect_shape(loader, src, dst->ndim, dst->shape));
    if (!ferry__dtype_converts(src->dtype, dst->dtype))
        return ferry_fail(FERRY_ENOTSUP,
                          "parameter %s: %s is not stored as %s (slot %s)",
                          loader->name, ferry_dtype_name(src->dtype),
                          ferry_dtype_name(dst->dtype), dst->name);
    if (ferry_tensor_numel(dst) == 0)
        return FERRY_OK; /* the name is known and brings nothing */
    FERRY_TRY(check_box(loader, dst, e.dst_start, e.dst_count));
    e.kind = kind;
    e.slot = (size_t)dst->slot;
    ferry__op_between(dst, src, &e.op);
    ferry__op_sort(&e.op);
    if (!op_keeps_blocks(&e.op))
        return ferry_fail(FERRY_ENOTSUP,
                          "parameter %s: blocks of q8_0 slot %s would be "
                          "put together from several runs",
                          loader->name, dst->name);
    set_box(&e);
    return add_entry(loader, &e);
}

ferry_status ferry_load_copy(ferry_loader *loader, const ferry_tensor *dst,
                             const ferry_tensor *src)
{
    FERRY__NEED(loader);
    return note(loader, record_copy(loader, FERRY__ENTRY_COPY, dst, src));
}

ferry_status ferry_load_tied(ferry_loader *loader, const ferry_tensor *dst,
                             const ferry_tensor *src)
{
    FERRY__NEED(loader);
    return note(loader, record_copy(loader, FERRY__ENTRY_TIED, dst, src));
}

/* ---- steps ---- */

static bool same_view(const ferry_tensor *a, const ferry_tensor *b)
{
    bool same =
        a->slot == b->slot && a->offset == b->offset && a->ndim == b->ndim;
    for (int32_t i = 0; same && i < a->ndim; i++)
        same = a->shape[i] == b->shape[i] && a->stride[i] == b->stride[i];
    return same;
}

static bool same_step(const ferry__plan_step *have, const ferry_step *step,
                      const ferry_tensor *dst)
{
    return have->step.fn == step->fn && have->step.arg == step->arg &&
           have->step.n_inputs == step->n_inputs && same_view(&have->dst, dst);
}

static void set_step(ferry__plan_step *s, const ferry__plan_step *value)
{
    const char *name = s->step.name;
    *s = *value;
    s->step.name = name;
}

static ferry_status new_step(ferry__plan *plan, const ferry_step *step,
                             size_t *out_index)
{
    size_t old;
    FERRY_TRY(ferry__grow(&plan->steps, &plan->steps_capacity, plan->n_steps,
                          sizeof(*plan->steps)));
    FERRY_TRY(ferry__grow(&plan->step_refs, &plan->step_refs_capacity,
                          plan->n_steps, sizeof(*plan->step_refs)));
    char *name = ferry__strdup(step->name);
    if (!name)
        return FERRY_ENOMEM;
    ferry_status st =
        ferry__table_add(&plan->steps_by_name, name, plan->n_steps, &old);
    if (st < 0) {
        ferry__free(name);
        return st;
    }
    memset(&plan->steps[plan->n_steps], 0, sizeof(*plan->steps));
    plan->steps[plan->n_steps].step.name = name;
    plan->step_refs[plan->n_steps] = 0;
    *out_index = plan->n_steps++;
    return FERRY_OK;
}

/* Whether an entry of this very bake states the step already. */
static bool stated_now(const ferry_loader *loader, size_t step, int32_t input)
{
    const ferry__plan *plan = loader->plan;
    for (size_t i = loader->first; i < plan->n_entries; i++) {
        const ferry__entry *e = &plan->entries[i];
        if (e->kind == FERRY__ENTRY_STEP && e->step == step &&
            (input < 0 || e->input == input))
            return true;
    }
    return false;
}

/* Finds or states the step. One that no entry uses may be stated anew: it
 * was left by a bake that failed or whose parameter changed. */
static ferry_status find_step(ferry_loader *loader, const ferry_step *step,
                              const ferry__plan_step *value, size_t *out_index)
{
    ferry__plan *plan = loader->plan;
    size_t index;
    if (!ferry__table_get(&plan->steps_by_name, step->name, &index)) {
        FERRY_TRY(new_step(plan, step, &index));
        set_step(&plan->steps[index], value);
    } else if (plan->step_refs[index] == 0 && !stated_now(loader, index, -1)) {
        set_step(&plan->steps[index], value);
    } else if (!same_step(&plan->steps[index], step, &value->dst)) {
        return ferry_fail(FERRY_EINVAL,
                          "parameter %s: step %s was stated with another "
                          "function, input count or destination",
                          loader->name, step->name);
    }
    *out_index = index;
    return FERRY_OK;
}

static ferry_status check_step(ferry_loader *loader, const ferry_step *step,
                               int32_t input)
{
    if (!step->name || step->name[0] == '\0' || !step->fn)
        return ferry_fail(FERRY_EINVAL,
                          "parameter %s: a step needs a name and a function",
                          loader->name);
    if (step->n_inputs < 1 || step->n_inputs > FERRY__STEP_INPUTS_MAX)
        return ferry_fail(FERRY_EINVAL,
                          "parameter %s: step %s has %d inputs, 1 to %d are "
                          "possible",
                          loader->name, step->name, (int)step->n_inputs,
                          FERRY__STEP_INPUTS_MAX);
    if (input < 0 || input >= step->n_inputs)
        return ferry_fail(
            FERRY_EINVAL, "parameter %s: input %d of step %s, which has %d",
            loader->name, (int)input, step->name, (int)step->n_inputs);
    return FERRY_OK;
}

/* The op of an input packs the source box into a contiguous tensor. */
static void set_input(ferry__entry *e, const ferry_tensor *src)
{
    ferry_tensor packed = *src;
    int64_t span = 1;
    packed.offset = 0;
    for (int32_t i = src->ndim - 1; i >= 0; i--) {
        packed.stride[i] = span;
        span *= src->shape[i];
    }
    e->input_ndim = src->ndim;
    memcpy(e->input_shape, src->shape, sizeof(e->input_shape));
    ferry__op_between(&packed, src, &e->op);
    ferry__op_sort(&e->op);
    set_box(e);
}

static ferry_status record_step(ferry_loader *loader, const ferry_step *step,
                                const ferry_tensor *dst, int32_t input,
                                const ferry_tensor *src)
{
    FERRY__NEED(step);
    FERRY__NEED(dst);
    FERRY__NEED(src);
    ferry__entry e;
    ferry__plan_step value;
    memset(&e, 0, sizeof(e));
    memset(&value, 0, sizeof(value));
    FERRY_TRY(check_step(loader, step, input));
    FERRY_TRY(check_source(loader, src));
    FERRY_TRY(check_slot(loader, dst));
    if (ferry_tensor_numel(dst) == 0)
        return FERRY_OK;
    if (ferry_tensor_numel(src) == 0)
        return ferry_fail(FERRY_EINVAL,
                          "parameter %s: input %d of step %s is empty",
                          loader->name, (int)input, step->name);
    FERRY_TRY(check_box(loader, dst, e.dst_start, e.dst_count));
    value.step = *step;
    value.slot = (size_t)dst->slot;
    value.dst = *dst;
    memcpy(value.dst_start, e.dst_start, sizeof(value.dst_start));
    memcpy(value.dst_count, e.dst_count, sizeof(value.dst_count));
    FERRY_TRY(find_step(loader, step, &value, &e.step));
    if (stated_now(loader, e.step, input))
        return ferry_fail(FERRY_EINVAL,
                          "parameter %s: input %d of step %s stated twice",
                          loader->name, (int)input, step->name);
    e.kind = FERRY__ENTRY_STEP;
    e.slot = value.slot;
    e.input = input;
    set_input(&e, src);
    return add_entry(loader, &e);
}

ferry_status ferry_load_step(ferry_loader *loader, const ferry_step *step,
                             const ferry_tensor *dst, int32_t input,
                             const ferry_tensor *src)
{
    FERRY__NEED(loader);
    return note(loader, record_step(loader, step, dst, input, src));
}

/* ---- aside ---- */

static ferry_status record_aside(ferry_loader *loader, ferry_room_fn room,
                                 void *arg, const ferry_tensor *src)
{
    FERRY__NEED(room);
    FERRY__NEED(src);
    ferry__entry e;
    memset(&e, 0, sizeof(e));
    FERRY_TRY(check_source(loader, src));
    if (ferry_tensor_numel(src) == 0)
        return FERRY_OK;
    e.kind = FERRY__ENTRY_ASIDE;
    e.slot = FERRY__NO_SLOT;
    e.room = room;
    e.room_arg = arg;
    set_input(&e, src);
    return add_entry(loader, &e);
}

ferry_status ferry_load_aside(ferry_loader *loader, ferry_room_fn room,
                              void *arg, const ferry_tensor *src)
{
    FERRY__NEED(loader);
    return note(loader, record_aside(loader, room, arg, src));
}
