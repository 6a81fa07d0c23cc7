/* SPDX-License-Identifier: Apache-2.0 */
/* Splits a parameter along one dimension into consecutive parts: views of
 * the inner tensor, never copies. Invariant: an inner event is asked for by
 * whichever part is read first and not again. */
#include "base/log.h"
#include "sources/adapter.h"
#include "sources/name_pattern.h"

#include "base/alloc.h"

#include <inttypes.h>
#include <string.h>

/* A parameter that is split, and its event in this pass. */
typedef struct whole {
    ferry_status (*wait)(void *arg, int64_t timeout_ms);
    void *wait_arg;
    bool waited;
    int32_t dim;        /* counted from the front */
    size_t first_shown; /* shown index of part 0 */
} whole;

typedef struct split_source {
    ferry__adapter base;
    char *name, **parts;
    int64_t *sizes;
    size_t count;
    int32_t dim; /* as given, may be negative */
    whole *wholes;
    size_t n_wholes, wholes_capacity;
    size_t *whole_of; /* by inner index: index of its whole, or none */
    size_t *origin;   /* by shown index: inner index */
    size_t origin_capacity;
    ferry_item item; /* the whole whose parts are being given */
    whole *current;
    size_t part;
    int64_t start;
} split_source;

static ferry_status check_sizes(const split_source *s,
                                const ferry_param_meta *meta, int32_t *out_dim)
{
    int32_t dim = s->dim < 0 ? s->dim + meta->ndim : s->dim;
    int64_t left;

    if (dim < 0 || dim >= meta->ndim)
        return ferry_fail(FERRY_EINVAL,
                          "parameter %s: split along dimension "
                          "%" PRId32 ", has %" PRId32 " dimensions",
                          meta->name, s->dim, meta->ndim);
    left = meta->shape[dim];
    for (size_t i = 0; i < s->count; i++) {
        if (s->sizes[i] > left)
            left = -1;
        if (left < 0)
            break;
        left -= s->sizes[i];
    }
    if (left != 0)
        return ferry_fail(FERRY_EINVAL,
                          "parameter %s: dimension %" PRId32
                          " has extent %" PRId64 ", the sizes of the parts "
                          "add up to %s",
                          meta->name, dim, meta->shape[dim],
                          left < 0 ? "more" : "less");
    *out_dim = dim;
    return FERRY_OK;
}

static ferry_status add_shown(split_source *s, const ferry_param_meta *meta,
                              size_t inner_index)
{
    FERRY_TRY(ferry__grow(&s->origin, &s->origin_capacity, s->base.shown.count,
                          sizeof(*s->origin)));
    s->origin[s->base.shown.count] = inner_index;
    return ferry__manifest_add(&s->base.shown, meta);
}

static ferry_status add_parts(split_source *s, size_t inner_index,
                              const ferry__capture *star, int32_t dim)
{
    for (size_t i = 0; i < s->count; i++) {
        ferry_param_meta meta = s->base.seen.params[inner_index];
        char *name = ferry__template_fill(s->parts[i], star);
        ferry_status st;

        if (!name)
            return FERRY_ENOMEM;
        meta.name = name;
        meta.shape[dim] = s->sizes[i];
        st = add_shown(s, &meta, inner_index);
        ferry__free(name);
        FERRY_TRY(st);
    }
    return FERRY_OK;
}

static ferry_status plan_one(split_source *s, size_t i)
{
    const ferry_param_meta *meta = &s->base.seen.params[i];
    ferry__capture star;
    int32_t dim;

    s->whole_of[i] = FERRY__NO_INDEX;
    if (!ferry__template_bind(s->name, meta->name, &star))
        return add_shown(s, meta, i);
    FERRY_TRY(check_sizes(s, meta, &dim));
    FERRY_TRY(ferry__grow(&s->wholes, &s->wholes_capacity, s->n_wholes,
                          sizeof(*s->wholes)));
    s->wholes[s->n_wholes] =
        (whole){.dim = dim, .first_shown = s->base.shown.count};
    s->whole_of[i] = s->n_wholes++;
    return add_parts(s, i, &star, dim);
}

static ferry_status split_plan(ferry__adapter *a)
{
    split_source *s = (split_source *)a;

    s->whole_of = ferry__alloc_array(a->seen.count, sizeof(*s->whole_of));
    if (!s->whole_of)
        return FERRY_ENOMEM;
    for (size_t i = 0; i < a->seen.count; i++)
        FERRY_TRY(plan_one(s, i));
    if (s->n_wholes == 0)
        return ferry_fail(FERRY_EUNKNOWN,
                          "parameter %s: not among the %zu "
                          "parameters",
                          s->name, a->seen.count);
    return FERRY_OK;
}

static void split_unplan(ferry__adapter *a)
{
    split_source *s = (split_source *)a;

    ferry__free(s->wholes);
    ferry__free(s->whole_of);
    ferry__free(s->origin);
    s->wholes = NULL;
    s->whole_of = s->origin = NULL;
    s->n_wholes = s->wholes_capacity = s->origin_capacity = 0;
}

static void split_reset(ferry__adapter *a)
{
    ((split_source *)a)->current = NULL;
}

static void split_destroy(ferry__adapter *a)
{
    split_source *s = (split_source *)a;

    ferry__free(s->name);
    ferry__free(s->sizes);
    ferry__strings_free(s->parts, s->count);
}

static bool split_holds(void *self, const char *name)
{
    split_source *s = self;
    size_t index;

    return ferry__manifest_find(&s->base.shown, name, &index) &&
           ferry__adapter_inner_holds(&s->base, s->origin[index]);
}

static ferry_status split_wait(void *arg, int64_t timeout_ms)
{
    whole *w = arg;
    ferry_status st;

    if (w->waited)
        return FERRY_OK;
    st = w->wait(w->wait_arg, timeout_ms);
    w->waited = st == FERRY_OK;
    return st;
}

static ferry_status give_part(split_source *s, ferry_item *out_item)
{
    whole *w = s->current;
    ferry_item item = s->item;
    int64_t length = s->sizes[s->part];

    item.name = s->base.shown.params[w->first_shown + s->part].name;
    FERRY_TRY(ferry_tensor_narrow(&s->item.tensor, w->dim, s->start, length,
                                  &item.tensor));
    item.tensor.name = item.name;
    if (item.wait) {
        item.wait = split_wait;
        item.wait_arg = w;
    }
    s->start += length;
    if (++s->part == s->count)
        s->current = NULL;
    *out_item = item;
    return FERRY_OK;
}

static ferry_status split_next(void *self, ferry_item *out_item)
{
    split_source *s = self;
    ferry_item item;
    ferry_status st;
    size_t index;

    if (s->current)
        return give_part(s, out_item);
    st = ferry__adapter_pull(&s->base, &item, &index);
    if (st != FERRY_OK)
        return st;
    if (s->whole_of[index] == FERRY__NO_INDEX) {
        *out_item = item;
        return FERRY_OK;
    }
    s->item = item;
    s->part = 0;
    s->start = 0;
    s->current = &s->wholes[s->whole_of[index]];
    s->current->wait = item.wait;
    s->current->wait_arg = item.wait_arg;
    s->current->waited = false;
    return give_part(s, out_item);
}

static ferry_status check_args(const char *name, const char *const *parts,
                               const int64_t *sizes, size_t count)
{
    bool star, part_star;

    FERRY_TRY(ferry__pattern_check("split", name, &star));
    if (count == 0 || !parts || !sizes)
        return ferry_fail(FERRY_EINVAL, "split %s: got no parts", name);
    for (size_t i = 0; i < count; i++) {
        FERRY_TRY(ferry__pattern_check("split part", parts[i], &part_star));
        if (part_star != star)
            return ferry_fail(FERRY_EINVAL,
                              "split: \"%s\" and \"%s\" must "
                              "both have a '*' or neither",
                              name, parts[i]);
        if (sizes[i] < 0)
            return ferry_fail(FERRY_EINVAL,
                              "split %s: part %s has size %" PRId64
                              ", want 0 or more",
                              name, parts[i], sizes[i]);
    }
    return FERRY_OK;
}

ferry_status ferry_source_split(ferry_source *inner, const char *name,
                                int32_t dim, const char *const *part_names,
                                const int64_t *sizes, size_t count,
                                ferry_source *out_source)
{
    FERRY__NEED(out_source);
    split_source *s;

    FERRY_TRY(check_args(name, part_names, sizes, count));
    FERRY_TRY(
        ferry__adapter_create(sizeof(*s), "split", inner, split_next, &s));
    s->base.plan = split_plan;
    s->base.unplan = split_unplan;
    s->base.reset = split_reset;
    s->base.destroy = split_destroy;
    s->base.ops.groups = NULL;
    if (s->base.ops.holds)
        s->base.ops.holds = split_holds;
    s->dim = dim;
    s->count = count;
    s->name = ferry__strdup(name);
    s->parts = ferry__strings_copy(part_names, count);
    s->sizes = ferry__alloc_array(count, sizeof(*s->sizes));
    if (!s->name || !s->parts || !s->sizes) {
        ferry__adapter_abandon(&s->base);
        return FERRY_ENOMEM;
    }
    memcpy(s->sizes, sizes, count * sizeof(*sizes));
    return ferry__adapter_finish(&s->base, inner, out_source);
}
