/* SPDX-License-Identifier: Apache-2.0 */
/* Fuses parts along one dimension into one parameter, which stands where its
 * last part stood. Invariant: a fused tensor's memory is taken when its first
 * part comes and given back, or used for the next, after it was given on. */
#include "base/log.h"
#include "sources/adapter.h"
#include "sources/name_pattern.h"

#include "base/alloc.h"

#include <inttypes.h>
#include <string.h>

/* One fused parameter: one value of the template's '*'. */
typedef struct fused {
    ferry_param_meta meta; /* name owned */
    size_t *parts;         /* inner index of each part */
    size_t last;           /* inner index of the part that comes last */
    int32_t dim;           /* counted from the front */
    ferry__scratch memory; /* in a pass, from first part to last */
    bool started, absent;
} fused;

/* What an inner parameter is. */
typedef struct part_role {
    size_t fused;  /* FERRY__NO_INDEX: passes unchanged */
    int64_t start; /* its first row in the fused dimension */
} part_role;

typedef struct fuse_source {
    ferry__adapter base;
    char *name, **part_names;
    size_t count;
    int32_t dim;
    fused *all;
    size_t n_all, all_capacity;
    ferry__table by_name;
    part_role *roles;     /* by inner index */
    size_t *origin;       /* by shown index: inner index (of the last part) */
    ferry__scratch given; /* the fused tensor that the caller reads */
} fuse_source;

/* ---- plan ---- */

static ferry_status new_fused(fuse_source *f, char *name, size_t *out_index)
{
    fused *g;

    FERRY_TRY(
        ferry__grow(&f->all, &f->all_capacity, f->n_all, sizeof(*f->all)));
    g = &f->all[f->n_all];
    *g = (fused){0};
    g->parts = ferry__alloc_array(f->count, sizeof(*g->parts));
    if (!g->parts)
        return FERRY_ENOMEM;
    for (size_t p = 0; p < f->count; p++)
        g->parts[p] = FERRY__NO_INDEX;
    if (ferry__table_add(&f->by_name, name, f->n_all, NULL) < 0) {
        ferry__free(g->parts);
        return FERRY_ENOMEM;
    }
    g->meta.name = name;
    *out_index = f->n_all++;
    return FERRY_OK;
}

static ferry_status join(fuse_source *f, size_t inner_index, size_t part,
                         const ferry__capture *star)
{
    char *name = ferry__template_fill(f->name, star);
    ferry_status st = FERRY_OK;
    size_t index;

    if (!name)
        return FERRY_ENOMEM;
    if (ferry__table_get(&f->by_name, name, &index)) {
        ferry__free(name);
    } else {
        st = new_fused(f, name, &index);
        if (st < 0)
            ferry__free(name);
        FERRY_TRY(st);
    }
    f->all[index].parts[part] = inner_index;
    f->all[index].last = inner_index;
    f->roles[inner_index].fused = index;
    return FERRY_OK;
}

static ferry_status find_parts(fuse_source *f)
{
    ferry__capture star;

    for (size_t i = 0; i < f->base.seen.count; i++) {
        const char *name = f->base.seen.params[i].name;
        size_t part = 0;

        f->roles[i].fused = FERRY__NO_INDEX;
        while (part < f->count &&
               !ferry__template_bind(f->part_names[part], name, &star))
            part++;
        if (part < f->count)
            FERRY_TRY(join(f, i, part, &star));
    }
    if (f->n_all == 0)
        return ferry_fail(FERRY_EUNKNOWN,
                          "parameter %s: none of its parts "
                          "is among the %zu parameters",
                          f->name, f->base.seen.count);
    return FERRY_OK;
}

/* Same dtype and shape but for the fused dimension. */
static ferry_status check_part(const fused *g, const ferry_param_meta *first,
                               const ferry_param_meta *part)
{
    bool same = part->ndim == first->ndim;

    if (part->dtype != first->dtype)
        return ferry_fail(FERRY_EMISMATCH,
                          "parameter %s: part %s is %s, "
                          "part %s is %s",
                          g->meta.name, first->name,
                          ferry_dtype_name(first->dtype), part->name,
                          ferry_dtype_name(part->dtype));
    for (int32_t d = 0; same && d < first->ndim; d++)
        same = d == g->dim || part->shape[d] == first->shape[d];
    if (!same)
        return ferry_fail(FERRY_EMISMATCH,
                          "parameter %s: parts %s and %s "
                          "have shapes that differ outside dimension %" PRId32,
                          g->meta.name, first->name, part->name, g->dim);
    return FERRY_OK;
}

static ferry_status measure(fuse_source *f, fused *g)
{
    const ferry_param_meta *params = f->base.seen.params, *first;
    const char *name = g->meta.name;
    int64_t total = 0;

    for (size_t p = 0; p < f->count; p++) {
        if (g->parts[p] == FERRY__NO_INDEX)
            return ferry_fail(FERRY_EUNKNOWN,
                              "parameter %s: its part %s is "
                              "missing",
                              name, f->part_names[p]);
    }
    first = &params[g->parts[0]];
    g->dim = f->dim < 0 ? f->dim + first->ndim : f->dim;
    if (g->dim < 0 || g->dim >= first->ndim)
        return ferry_fail(FERRY_EINVAL,
                          "parameter %s: fused along dimension "
                          "%" PRId32 ", part %s has %" PRId32 " dimensions",
                          name, f->dim, first->name, first->ndim);
    for (size_t p = 0; p < f->count; p++) {
        const ferry_param_meta *part = &params[g->parts[p]];

        FERRY_TRY(check_part(g, first, part));
        f->roles[g->parts[p]].start = total;
        if (part->shape[g->dim] > INT64_MAX - total)
            return ferry_fail(FERRY_EOVERFLOW,
                              "parameter %s: the parts' "
                              "extents do not fit",
                              name);
        total += part->shape[g->dim];
    }
    g->meta = *first;
    g->meta.name = name;
    g->meta.shape[g->dim] = total;
    return FERRY_OK;
}

static ferry_status fuse_plan(ferry__adapter *a)
{
    fuse_source *f = (fuse_source *)a;

    f->roles = ferry__alloc_array(a->seen.count, sizeof(*f->roles));
    f->origin = ferry__alloc_array(a->seen.count, sizeof(*f->origin));
    if (!f->roles || !f->origin)
        return FERRY_ENOMEM;
    FERRY_TRY(find_parts(f));
    for (size_t i = 0; i < f->n_all; i++)
        FERRY_TRY(measure(f, &f->all[i]));
    for (size_t i = 0; i < a->seen.count; i++) {
        const ferry_param_meta *meta = &a->seen.params[i];
        size_t index = f->roles[i].fused;

        if (index != FERRY__NO_INDEX && f->all[index].last != i)
            continue;
        f->origin[a->shown.count] = i;
        FERRY_TRY(ferry__manifest_add(
            &a->shown, index == FERRY__NO_INDEX ? meta : &f->all[index].meta));
    }
    return FERRY_OK;
}

static void fuse_reset(ferry__adapter *a)
{
    fuse_source *f = (fuse_source *)a;

    for (size_t i = 0; i < f->n_all; i++) {
        ferry__scratch_free(&f->all[i].memory);
        f->all[i].started = false;
    }
    ferry__scratch_free(&f->given);
}

static void fuse_unplan(ferry__adapter *a)
{
    fuse_source *f = (fuse_source *)a;

    for (size_t i = 0; i < f->n_all; i++) {
        ferry__free((char *)f->all[i].meta.name);
        ferry__free(f->all[i].parts);
    }
    ferry__table_free(&f->by_name);
    ferry__free(f->all);
    ferry__free(f->roles);
    ferry__free(f->origin);
    f->all = NULL;
    f->roles = NULL;
    f->origin = NULL;
    f->n_all = f->all_capacity = 0;
}

static void fuse_destroy(ferry__adapter *a)
{
    fuse_source *f = (fuse_source *)a;

    ferry__free(f->name);
    ferry__strings_free(f->part_names, f->count);
}

static bool fuse_holds(void *self, const char *name)
{
    fuse_source *f = self;
    size_t index, origin, all;

    if (!ferry__manifest_find(&f->base.shown, name, &index))
        return false;
    origin = f->origin[index];
    all = f->roles[origin].fused;
    if (all == FERRY__NO_INDEX)
        return ferry__adapter_inner_holds(&f->base, origin);
    for (size_t p = 0; p < f->count; p++) {
        if (!ferry__adapter_inner_holds(&f->base, f->all[all].parts[p]))
            return false;
    }
    return true;
}

/* ---- the pass ---- */

/* Takes the memory that the previous fused tensor left, when there is. */
static ferry_status start_fused(fuse_source *f, fused *g)
{
    if (g->started)
        return FERRY_OK;
    g->started = true;
    g->absent = false;
    g->memory = f->given;
    f->given = (ferry__scratch){0};
    return ferry__scratch_need(&g->memory, ferry__meta_bytes(&g->meta));
}

static ferry_status add_part(fuse_source *f, fused *g, size_t inner_index,
                             const ferry_item *item)
{
    ferry_tensor fused_tensor, slot;
    int64_t length;

    if (!item->tensor.data)
        g->absent = true;
    if (g->absent)
        return FERRY_OK;
    length = f->base.seen.params[inner_index].shape[g->dim];
    FERRY_TRY(ferry__meta_tensor(&g->meta, g->memory.data, &fused_tensor));
    FERRY_TRY(ferry_tensor_narrow(&fused_tensor, g->dim,
                                  f->roles[inner_index].start, length, &slot));
    FERRY_TRY(ferry__item_wait(item));
    return ferry_tensor_copy(&slot, &item->tensor);
}

/* A rank that lacks any part lacks the whole. */
static ferry_status give_fused(fuse_source *f, fused *g, ferry_item *out_item)
{
    ferry_item item = {.name = g->meta.name};

    FERRY_TRY(ferry__meta_tensor(&g->meta, g->absent ? NULL : g->memory.data,
                                 &item.tensor));
    ferry__scratch_free(&f->given);
    f->given = g->memory;
    g->memory = (ferry__scratch){0};
    g->started = false;
    *out_item = item;
    return FERRY_OK;
}

static ferry_status fuse_next(void *self, ferry_item *out_item)
{
    fuse_source *f = self;
    ferry_item item;
    size_t index;

    for (;;) {
        ferry_status st = ferry__adapter_pull(&f->base, &item, &index);
        fused *g;

        if (st != FERRY_OK)
            return st;
        if (f->roles[index].fused == FERRY__NO_INDEX) {
            *out_item = item;
            return FERRY_OK;
        }
        g = &f->all[f->roles[index].fused];
        FERRY_TRY(start_fused(f, g));
        FERRY_TRY(add_part(f, g, index, &item));
        if (index == g->last)
            return give_fused(f, g, out_item);
    }
}

static ferry_status check_args(const char *name, const char *const *parts,
                               size_t count)
{
    bool star, part_star;

    FERRY_TRY(ferry__pattern_check("fuse", name, &star));
    if (count == 0 || !parts)
        return ferry_fail(FERRY_EINVAL, "fuse %s: got no parts", name);
    for (size_t i = 0; i < count; i++) {
        FERRY_TRY(ferry__pattern_check("fuse part", parts[i], &part_star));
        if (part_star != star)
            return ferry_fail(FERRY_EINVAL,
                              "fuse: \"%s\" and \"%s\" must "
                              "both have a '*' or neither",
                              name, parts[i]);
    }
    return FERRY_OK;
}

ferry_status ferry_source_fuse(ferry_source *inner, const char *name,
                               int32_t dim, const char *const *part_names,
                               size_t count, ferry_source *out_source)
{
    FERRY__NEED(out_source);
    fuse_source *f;

    FERRY_TRY(check_args(name, part_names, count));
    FERRY_TRY(ferry__adapter_create(sizeof(*f), "fuse", inner, fuse_next, &f));
    f->base.plan = fuse_plan;
    f->base.unplan = fuse_unplan;
    f->base.reset = fuse_reset;
    f->base.destroy = fuse_destroy;
    f->base.ops.groups = NULL;
    /* Fused tensors share memory one after another. */
    f->base.ops.flags &= ~FERRY_SOURCE_STABLE;
    if (f->base.ops.holds)
        f->base.ops.holds = fuse_holds;
    f->dim = dim;
    f->count = count;
    f->name = ferry__strdup(name);
    f->part_names = ferry__strings_copy(part_names, count);
    if (!f->name || !f->part_names) {
        ferry__adapter_abandon(&f->base);
        return FERRY_ENOMEM;
    }
    return ferry__adapter_finish(&f->base, inner, out_source);
}
