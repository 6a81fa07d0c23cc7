/* SPDX-License-Identifier: Apache-2.0 */
/* The load plan: its tables, and one bake.
 * Invariant: a bake that fails leaves the plan as it was; ids never change,
 * entries move only when a bake compacts them. */
#include "base/alloc.h"
#include "base/log.h"
#include "core/plan_private.h"
#include <string.h>

#define COMPACT_ABOVE 1024 /* dead entries that are not worth a pass */

ferry_status ferry__plan_create(const ferry_model *model, ferry__plan **out)
{
    if (model->size < offsetof(ferry_model, checkpoint_name))
        return ferry_fail(FERRY_EINVAL,
                          "model table has size %zu, at least %zu is needed",
                          model->size, offsetof(ferry_model, checkpoint_name));
    if (!model->load)
        return ferry_fail(FERRY_EINVAL, "model %s has no load function",
                          model->name ? model->name : "table");
    ferry__plan *plan = ferry__alloc(sizeof(*plan));
    if (!plan)
        return FERRY_ENOMEM;
    size_t size = model->size < sizeof(*model) ? model->size : sizeof(*model);
    memcpy(&plan->model, model, size);
    *out = plan;
    return FERRY_OK;
}

void ferry__plan_destroy(ferry__plan **plan_ptr)
{
    ferry__plan *plan = plan_ptr ? *plan_ptr : NULL;
    if (!plan)
        return;
    for (size_t i = 0; i < plan->n_baked; i++)
        ferry__free((void *)(uintptr_t)plan->baked[i].meta.name);
    for (size_t i = 0; i < plan->n_steps; i++)
        ferry__free((void *)(uintptr_t)plan->steps[i].step.name);
    ferry__table_free(&plan->by_name);
    ferry__table_free(&plan->steps_by_name);
    ferry__free(plan->baked);
    ferry__free(plan->entries);
    ferry__free(plan->steps);
    ferry__free(plan->step_refs);
    ferry__free(plan);
    *plan_ptr = NULL;
}

/* ---- one bake ---- */

static void count_steps(ferry__plan *plan, size_t first, size_t count, bool add)
{
    for (size_t i = first; i < first + count; i++) {
        const ferry__entry *e = &plan->entries[i];
        if (e->kind == FERRY__ENTRY_STEP)
            plan->step_refs[e->step] += add ? 1 : (size_t)-1;
    }
}

/* Runs the model's load over a lazy tensor; its entries are appended. */
static ferry_status run_loader(ferry__plan *plan, const ferry_param_meta *meta)
{
    ferry_loader loader;
    char *mapped = NULL;

    memset(&loader, 0, sizeof(loader));
    loader.plan = plan;
    loader.name = meta->name;
    loader.first = plan->n_entries;
    ferry_status st = ferry_tensor_init(&loader.tensor, NULL, meta->dtype,
                                        meta->ndim, meta->shape);
    if (st < 0)
        return ferry__fail_prefix(st, "parameter %s", meta->name);
    FERRY_TRY(ferry__plan_map_name(plan, meta->name, &mapped));
    if (!mapped)
        return ferry__plan_unknown(plan, meta->name);
    loader.tensor.name = mapped;
    st = plan->model.load(plan->model.self, &loader, mapped, &loader.tensor);
    ferry__free(mapped);
    if (loader.status < 0)
        return ferry__fail_line(loader.status, loader.line);
    if (st == FERRY_EUNKNOWN)
        return ferry__plan_unknown(plan, meta->name);
    return st < 0 ? st : FERRY_OK;
}

static bool same_meta(const ferry_param_meta *a, const ferry_param_meta *b)
{
    if (a->dtype != b->dtype || a->ndim != b->ndim)
        return false;
    for (int32_t i = 0; i < a->ndim; i++) {
        if (a->shape[i] != b->shape[i])
            return false;
    }
    return true;
}

/* Drops what nobody owns any more. Costs as much as is live, and at least as
 * much died since the last time. */
static void compact(ferry__plan *plan)
{
    if (plan->n_dead < COMPACT_ABOVE || plan->n_dead <= plan->n_entries / 2)
        return;
    ferry__entry *live =
        ferry__alloc_array(plan->n_entries - plan->n_dead, sizeof(*live));
    if (!live)
        return; /* waste is no failure */
    size_t n = 0;
    for (size_t i = 0; i < plan->n_baked; i++) {
        ferry__baked *b = &plan->baked[i];
        memcpy(live + n, plan->entries + b->first, b->count * sizeof(*live));
        b->first = n;
        n += b->count;
    }
    ferry__free(plan->entries);
    plan->entries = live;
    plan->entries_capacity = plan->n_entries - plan->n_dead;
    plan->n_entries = n;
    plan->n_dead = 0;
}

static ferry_status bake_again(ferry__plan *plan, size_t id,
                               const ferry_param_meta *meta)
{
    ferry__baked *b = &plan->baked[id];
    size_t first = plan->n_entries;
    /* The old entries let go of their steps first, so that a step with no
     * other input may be stated anew. */
    count_steps(plan, b->first, b->count, false);
    ferry_status st = run_loader(plan, meta);
    if (st < 0) {
        plan->n_entries = first;
        count_steps(plan, b->first, b->count, true);
        return st;
    }
    count_steps(plan, first, plan->n_entries - first, true);
    const char *name = b->meta.name;
    plan->n_dead += b->count;
    b->meta = *meta;
    b->meta.name = name;
    b->first = first;
    b->count = plan->n_entries - first;
    compact(plan);
    return FERRY_OK;
}

static ferry_status bake_new(ferry__plan *plan, const ferry_param_meta *meta,
                             size_t *out_id)
{
    size_t first = plan->n_entries, old;
    FERRY_TRY(ferry__grow(&plan->baked, &plan->baked_capacity, plan->n_baked,
                          sizeof(*plan->baked)));
    ferry_status st = run_loader(plan, meta);
    if (st < 0) {
        plan->n_entries = first;
        return st;
    }
    char *name = ferry__strdup(meta->name);
    if (name)
        st = ferry__table_add(&plan->by_name, name, plan->n_baked, &old);
    if (!name || st < 0) {
        ferry__free(name);
        plan->n_entries = first;
        return FERRY_ENOMEM;
    }
    count_steps(plan, first, plan->n_entries - first, true);
    ferry__baked *b = &plan->baked[plan->n_baked];
    b->meta = *meta;
    b->meta.name = name;
    b->first = first;
    b->count = plan->n_entries - first;
    *out_id = plan->n_baked++;
    return FERRY_OK;
}

ferry_status ferry__plan_bake(ferry__plan *plan, const ferry_param_meta *meta,
                              size_t *out_id)
{
    size_t id;
    if (!meta->name || meta->name[0] == '\0')
        return ferry_fail(FERRY_EINVAL, "parameter name is empty");
    if (ferry_dtype_block(meta->dtype) != 1)
        return ferry_fail(FERRY_EINVAL,
                          "parameter %s: dtype %s does not travel", meta->name,
                          ferry_dtype_name(meta->dtype));
    if (!ferry__table_get(&plan->by_name, meta->name, &id))
        return bake_new(plan, meta, out_id);
    if (!same_meta(&plan->baked[id].meta, meta))
        FERRY_TRY(bake_again(plan, id, meta));
    *out_id = id;
    return FERRY_OK;
}

/* ---- questions ---- */

const ferry__baked *ferry__plan_baked(const ferry__plan *plan, size_t id)
{
    return &plan->baked[id];
}

const ferry__entry *ferry__plan_entries(const ferry__plan *plan, size_t id,
                                        size_t *out_count)
{
    *out_count = plan->baked[id].count;
    /* No entry at all yet: the array may not exist. */
    return plan->entries ? plan->entries + plan->baked[id].first : NULL;
}

const ferry__plan_step *ferry__plan_step_at(const ferry__plan *plan,
                                            size_t step)
{
    return &plan->steps[step];
}

size_t ferry__plan_n_steps(const ferry__plan *plan)
{
    return plan->n_steps;
}

int64_t ferry__slot_numel(const ferry_param *param)
{
    int64_t n = 1;
    if (param->flags & FERRY_PARAM_RUNTIME)
        return 0;
    for (int32_t i = 0; i < param->ndim; i++) {
        int64_t d = param->shape[i];
        if (i == 0 && param->valid_rows > 0 && param->valid_rows < d)
            d = param->valid_rows;
        n *= d;
    }
    return n;
}

size_t ferry__slot_bytes(const ferry_param *param)
{
    int64_t n = 1, block = ferry_dtype_block(param->dtype);
    for (int32_t i = 0; i < param->ndim; i++)
        n *= param->shape[i];
    return block == 0 ? 0
                      : (size_t)(n / block) * ferry_dtype_bytes(param->dtype);
}
