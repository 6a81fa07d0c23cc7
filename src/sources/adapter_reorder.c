/* SPDX-License-Identifier: Apache-2.0 */
/* Puts the names of a layer next to each other, layers by index (B9).
 * Names of one family (one prefix before the index) stand together; a name
 * without an index keeps its place between the families that are seen before
 * and after it. Invariant: the inner pass is read whole before the first
 * item is given, which is why the inner source must be stable. */
#include "base/log.h"
#include "sources/adapter.h"

#include "base/alloc.h"
#include "core/groups.h"
#include "sources/name_pattern.h"

#include <stdlib.h>

/* What a name is sorted by. */
typedef struct place {
    size_t slot; /* 2 * families seen before it, + 1 within a family */
    int64_t layer;
    size_t index; /* inner position; keeps the sort stable */
} place;

typedef struct reorder_source {
    ferry__adapter base;
    place *order;      /* by shown index */
    ferry_item *items; /* by inner index; NULL until the pass was read */
    size_t position;   /* items given in this pass */
} reorder_source;

/* Family number by prefix; the prefixes are owned. */
typedef struct families {
    ferry__table table;
    char **prefixes;
    size_t count, capacity;
} families;

static ferry_status family_of(families *f, const char *name, size_t length,
                              size_t *out_family)
{
    char *prefix = ferry__strndup(name, length);
    ferry_status st = prefix ? FERRY_OK : FERRY_ENOMEM;

    if (prefix && ferry__table_get(&f->table, prefix, out_family)) {
        ferry__free(prefix);
        return FERRY_OK;
    }
    if (st == FERRY_OK)
        st = ferry__grow(&f->prefixes, &f->capacity, f->count,
                         sizeof(*f->prefixes));
    if (st == FERRY_OK)
        st = ferry__table_add(&f->table, prefix, f->count, NULL);
    if (st < 0) {
        ferry__free(prefix);
        return st;
    }
    f->prefixes[f->count] = prefix;
    *out_family = f->count++;
    return FERRY_OK;
}

static void families_free(families *f)
{
    ferry__table_free(&f->table);
    ferry__strings_free(f->prefixes, f->count);
}

static ferry_status place_names(reorder_source *r, families *f)
{
    const ferry__manifest *seen = &r->base.seen;
    size_t length, family;

    for (size_t i = 0; i < seen->count; i++) {
        place *p = &r->order[i];

        p->index = i;
        if (!ferry__layer_key(seen->params[i].name, &length, &p->layer)) {
            p->slot = 2 * f->count;
            p->layer = 0;
            continue;
        }
        FERRY_TRY(family_of(f, seen->params[i].name, length, &family));
        p->slot = 2 * family + 1;
    }
    return FERRY_OK;
}

static int compare_places(const void *left, const void *right)
{
    const place *a = left, *b = right;

    if (a->slot != b->slot)
        return a->slot < b->slot ? -1 : 1;
    if (a->layer != b->layer)
        return a->layer < b->layer ? -1 : 1;
    return a->index < b->index ? -1 : a->index > b->index;
}

static ferry_status reorder_plan(ferry__adapter *a)
{
    reorder_source *r = (reorder_source *)a;
    families f = {0};
    ferry_status st;

    r->order = ferry__alloc_array(a->seen.count, sizeof(*r->order));
    if (!r->order)
        return FERRY_ENOMEM;
    st = place_names(r, &f);
    families_free(&f);
    FERRY_TRY(st);
    qsort(r->order, a->seen.count, sizeof(*r->order), compare_places);
    for (size_t i = 0; i < a->seen.count; i++)
        FERRY_TRY(
            ferry__manifest_add(&a->shown, &a->seen.params[r->order[i].index]));
    return FERRY_OK;
}

static void reorder_unplan(ferry__adapter *a)
{
    reorder_source *r = (reorder_source *)a;

    ferry__free(r->order);
    r->order = NULL;
}

static void reorder_reset(ferry__adapter *a)
{
    reorder_source *r = (reorder_source *)a;

    ferry__free(r->items);
    r->items = NULL;
    r->position = 0;
}

static bool reorder_holds(void *self, const char *name)
{
    reorder_source *r = self;
    size_t index;

    return ferry__manifest_find(&r->base.shown, name, &index) &&
           ferry__adapter_inner_holds(&r->base, r->order[index].index);
}

static ferry_status check_stable(const ferry_source *inner)
{
    if (!ferry__source_is_stable(inner))
        return ferry_fail(FERRY_ENOTSUP,
                          "reorder: the inner %s source is "
                          "not stable, so its items cannot be kept",
                          inner->ops->kind ? inner->ops->kind : "unnamed");
    return FERRY_OK;
}

/* One pull more than there are parameters, so that an extra item of the
 * inner source is noticed. */
static ferry_status read_pass(reorder_source *r)
{
    ferry_status st = FERRY_OK;
    ferry_item item;
    size_t index;

    FERRY_TRY(check_stable(&r->base.inner));
    r->items = ferry__alloc_array(r->base.seen.count, sizeof(*r->items));
    if (!r->items)
        return FERRY_ENOMEM;
    while (st == FERRY_OK) {
        st = ferry__adapter_pull(&r->base, &item, &index);
        if (st == FERRY_OK)
            r->items[index] = item;
    }
    if (st < 0)
        reorder_reset(&r->base);
    return st < 0 ? st : FERRY_OK;
}

static ferry_status reorder_next(void *self, ferry_item *out_item)
{
    reorder_source *r = self;

    if (!r->items)
        FERRY_TRY(read_pass(r));
    if (r->position == r->base.seen.count)
        return FERRY_DONE;
    *out_item = r->items[r->order[r->position++].index];
    return FERRY_OK;
}

ferry_status ferry_source_reorder(ferry_source *inner, ferry_source *out_source)
{
    FERRY__NEED(out_source);
    reorder_source *r;

    FERRY_TRY(ferry__source_check("reorder", inner));
    FERRY_TRY(check_stable(inner));
    FERRY_TRY(
        ferry__adapter_create(sizeof(*r), "reorder", inner, reorder_next, &r));
    r->base.plan = reorder_plan;
    r->base.unplan = reorder_unplan;
    r->base.reset = reorder_reset;
    r->base.ops.groups = NULL;
    if (r->base.ops.holds)
        r->base.ops.holds = reorder_holds;
    return ferry__adapter_finish(&r->base, inner, out_source);
}
