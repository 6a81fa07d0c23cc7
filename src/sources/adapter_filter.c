/* SPDX-License-Identifier: Apache-2.0 */
/* Keeps or drops parameters by name.
 * Invariant: the order of what is kept is the inner order. */
#include "base/log.h"
#include "sources/adapter.h"
#include "sources/name_pattern.h"

#include "base/alloc.h"

typedef struct filter_source {
    ferry__adapter base;
    char **patterns;
    size_t count;
    bool keep;
    bool *kept;     /* by inner index */
    size_t *origin; /* by shown index: inner index */
} filter_source;

/* Whether any pattern matches; marks all that do, so that one that never
 * matches can be named. */
static bool match_all(const filter_source *f, const char *name, bool *used)
{
    bool any = false;

    for (size_t i = 0; i < f->count; i++) {
        if (ferry__pattern_matches(f->patterns[i], name)) {
            used[i] = true;
            any = true;
        }
    }
    return any;
}

static ferry_status check_used(const filter_source *f, const bool *used)
{
    for (size_t i = 0; i < f->count; i++) {
        if (!used[i])
            return ferry_fail(FERRY_EUNKNOWN,
                              "pattern %s matches none of "
                              "the %zu parameters",
                              f->patterns[i], f->base.seen.count);
    }
    return FERRY_OK;
}

static ferry_status select_names(filter_source *f, bool *used)
{
    const ferry__manifest *seen = &f->base.seen;

    for (size_t i = 0; i < seen->count; i++) {
        f->kept[i] = match_all(f, seen->params[i].name, used) == f->keep;
        if (!f->kept[i])
            continue;
        f->origin[f->base.shown.count] = i;
        FERRY_TRY(ferry__manifest_add(&f->base.shown, &seen->params[i]));
    }
    return check_used(f, used);
}

static ferry_status filter_plan(ferry__adapter *a)
{
    filter_source *f = (filter_source *)a;
    bool *used = ferry__alloc_array(f->count, sizeof(*used));
    ferry_status st = FERRY_ENOMEM;

    f->kept = ferry__alloc_array(a->seen.count, sizeof(*f->kept));
    f->origin = ferry__alloc_array(a->seen.count, sizeof(*f->origin));
    if (used && f->kept && f->origin)
        st = select_names(f, used);
    ferry__free(used);
    return st;
}

static void filter_unplan(ferry__adapter *a)
{
    filter_source *f = (filter_source *)a;

    ferry__free(f->kept);
    ferry__free(f->origin);
    f->kept = NULL;
    f->origin = NULL;
}

static void filter_destroy(ferry__adapter *a)
{
    filter_source *f = (filter_source *)a;

    ferry__strings_free(f->patterns, f->count);
}

static bool filter_holds(void *self, const char *name)
{
    filter_source *f = self;
    size_t index;

    return ferry__manifest_find(&f->base.shown, name, &index) &&
           ferry__adapter_inner_holds(&f->base, f->origin[index]);
}

static ferry_status filter_next(void *self, ferry_item *out_item)
{
    filter_source *f = self;
    ferry_item item;
    ferry_status st;
    size_t index;

    do {
        st = ferry__adapter_pull(&f->base, &item, &index);
    } while (st == FERRY_OK && !f->kept[index]);
    if (st == FERRY_OK)
        *out_item = item;
    return st;
}

ferry_status ferry_source_filter(ferry_source *inner,
                                 const char *const *patterns, size_t count,
                                 int keep, ferry_source *out_source)
{
    FERRY__NEED(out_source);
    filter_source *f;
    bool star;

    if (count > 0 && !patterns)
        return ferry_fail(FERRY_EINVAL, "filter: got NULL for %zu patterns",
                          count);
    for (size_t i = 0; i < count; i++)
        FERRY_TRY(ferry__pattern_check("filter", patterns[i], &star));
    FERRY_TRY(
        ferry__adapter_create(sizeof(*f), "filter", inner, filter_next, &f));
    f->base.plan = filter_plan;
    f->base.unplan = filter_unplan;
    f->base.destroy = filter_destroy;
    f->base.ops.groups = NULL;
    if (f->base.ops.holds)
        f->base.ops.holds = filter_holds;
    f->keep = keep != 0;
    f->count = count;
    f->patterns = ferry__strings_copy(patterns, count);
    if (!f->patterns) {
        ferry__adapter_abandon(&f->base);
        return FERRY_ENOMEM;
    }
    return ferry__adapter_finish(&f->base, inner, out_source);
}
