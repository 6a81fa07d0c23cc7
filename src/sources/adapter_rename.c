/* SPDX-License-Identifier: Apache-2.0 */
/* Renames parameters by prefix or template; the first matching pair counts.
 * Invariant: one parameter in, one out, in the same order. */
#include "base/log.h"
#include "sources/adapter.h"
#include "sources/name_pattern.h"

#include "base/alloc.h"

#include <string.h>

typedef struct rename_source {
    ferry__adapter base;
    char **from, **to;
    size_t count;
} rename_source;

/* Prefix: its length is replaced; template: what '*' stood for is kept. */
static char *renamed_by(const char *from, const char *to, const char *name)
{
    size_t head = strlen(to), tail;
    ferry__capture star;
    char *out;

    if (strchr(from, '*')) {
        ferry__template_bind(from, name, &star);
        return ferry__template_fill(to, &star);
    }
    name += strlen(from);
    tail = strlen(name);
    out = ferry__alloc(head + tail + 1);
    if (out) {
        memcpy(out, to, head);
        memcpy(out + head, name, tail);
    }
    return out;
}

static ferry_status rename_one(const rename_source *r, const char *name,
                               char **out)
{
    for (size_t i = 0; i < r->count; i++) {
        if (!ferry__pattern_matches(r->from[i], name))
            continue;
        *out = renamed_by(r->from[i], r->to[i], name);
        return *out ? FERRY_OK : FERRY_ENOMEM;
    }
    *out = ferry__strdup(name);
    return *out ? FERRY_OK : FERRY_ENOMEM;
}

static ferry_status rename_add(rename_source *r, size_t index)
{
    ferry_param_meta meta = r->base.seen.params[index];
    const char *old = meta.name;
    size_t other;
    ferry_status st;
    char *name;

    FERRY_TRY(rename_one(r, old, &name));
    meta.name = name;
    if (ferry__manifest_find(&r->base.shown, name, &other))
        st = ferry_fail(FERRY_EEXIST,
                        "parameters %s and %s would both be "
                        "named %s",
                        r->base.seen.params[other].name, old, name);
    else
        st = ferry__manifest_add(&r->base.shown, &meta);
    ferry__free(name);
    return st;
}

static ferry_status rename_plan(ferry__adapter *a)
{
    for (size_t i = 0; i < a->seen.count; i++)
        FERRY_TRY(rename_add((rename_source *)a, i));
    return FERRY_OK;
}

static void rename_destroy(ferry__adapter *a)
{
    rename_source *r = (rename_source *)a;

    ferry__strings_free(r->from, r->count);
    ferry__strings_free(r->to, r->count);
}

static ferry_status rename_next(void *self, ferry_item *out_item)
{
    rename_source *r = self;
    ferry_item item;
    ferry_status st;
    size_t index;

    st = ferry__adapter_pull(&r->base, &item, &index);
    if (st != FERRY_OK)
        return st;
    item.name = r->base.shown.params[index].name;
    item.tensor.name = item.name;
    *out_item = item;
    return FERRY_OK;
}

static ferry_status check_pairs(const char *const *from, const char *const *to,
                                size_t count)
{
    bool star_from, star_to;

    if (count > 0 && (!from || !to))
        return ferry_fail(FERRY_EINVAL, "rename: got NULL for %zu pairs",
                          count);
    for (size_t i = 0; i < count; i++) {
        FERRY_TRY(ferry__pattern_check("rename from", from[i], &star_from));
        FERRY_TRY(ferry__pattern_check("rename to", to[i], &star_to));
        if (star_from != star_to)
            return ferry_fail(FERRY_EINVAL,
                              "rename: \"%s\" and \"%s\" must "
                              "both have a '*' or neither",
                              from[i], to[i]);
    }
    return FERRY_OK;
}

ferry_status ferry_source_rename(ferry_source *inner, const char *const *from,
                                 const char *const *to, size_t count,
                                 ferry_source *out_source)
{
    FERRY__NEED(out_source);
    rename_source *r;

    FERRY_TRY(check_pairs(from, to, count));
    FERRY_TRY(
        ferry__adapter_create(sizeof(*r), "rename", inner, rename_next, &r));
    r->base.plan = rename_plan;
    r->base.destroy = rename_destroy;
    r->count = count;
    r->from = ferry__strings_copy(from, count);
    r->to = ferry__strings_copy(to, count);
    if (!r->from || !r->to) {
        ferry__adapter_abandon(&r->base);
        return FERRY_ENOMEM;
    }
    return ferry__adapter_finish(&r->base, inner, out_source);
}
