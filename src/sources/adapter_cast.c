/* SPDX-License-Identifier: Apache-2.0 */
/* Casts floating-point parameters, one at a time, through one buffer.
 * Invariant: an item whose producer is not ready is converted in its own
 * wait, so next never blocks longer than the inner source does. */
#include "base/log.h"
#include "sources/adapter.h"
#include "sources/name_pattern.h"

#include "base/alloc.h"
#include "core/copy.h"

typedef struct cast_source {
    ferry__adapter base;
    ferry_dtype to;
    char *only;  /* NULL: all */
    bool *casts; /* by index */
    ferry__scratch scratch;
    ferry_item pending;  /* the inner item that a wait will convert */
    ferry_tensor result; /* where to */
    bool converted;
} cast_source;

static bool is_cast(const cast_source *c, const ferry_param_meta *meta)
{
    return meta->dtype != c->to && ferry__dtype_is_float(meta->dtype) &&
           (!c->only || ferry__pattern_matches(c->only, meta->name));
}

static ferry_status cast_plan(ferry__adapter *a)
{
    cast_source *c = (cast_source *)a;
    bool any = false;

    c->casts = ferry__alloc_array(a->seen.count, sizeof(*c->casts));
    if (!c->casts)
        return FERRY_ENOMEM;
    for (size_t i = 0; i < a->seen.count; i++) {
        ferry_param_meta meta = a->seen.params[i];

        c->casts[i] = is_cast(c, &meta);
        any = any || c->casts[i];
        if (c->casts[i])
            meta.dtype = c->to;
        FERRY_TRY(ferry__manifest_add(&a->shown, &meta));
    }
    /* A converted tensor lives in the buffer, until the next one. */
    if (any)
        a->ops.flags &= ~FERRY_SOURCE_STABLE;
    return FERRY_OK;
}

static void cast_unplan(ferry__adapter *a)
{
    cast_source *c = (cast_source *)a;

    ferry__free(c->casts);
    c->casts = NULL;
}

static void cast_reset(ferry__adapter *a)
{
    ferry__scratch_free(&((cast_source *)a)->scratch);
}

static void cast_destroy(ferry__adapter *a)
{
    ferry__free(((cast_source *)a)->only);
}

static ferry_status cast_convert(cast_source *c)
{
    FERRY_TRY(ferry_tensor_copy(&c->result, &c->pending.tensor));
    c->converted = true;
    return FERRY_OK;
}

static ferry_status cast_wait(void *arg, int64_t timeout_ms)
{
    cast_source *c = arg;
    ferry_status st;

    if (c->converted)
        return FERRY_OK;
    st = c->pending.wait(c->pending.wait_arg, timeout_ms);
    if (st != FERRY_OK)
        return st;
    return cast_convert(c);
}

static ferry_status cast_next(void *self, ferry_item *out_item)
{
    cast_source *c = self;
    const ferry_param_meta *meta;
    ferry_item item;
    ferry_status st;
    size_t index;

    st = ferry__adapter_pull(&c->base, &item, &index);
    if (st != FERRY_OK)
        return st;
    meta = &c->base.shown.params[index];
    if (!c->casts[index]) {
        *out_item = item;
        return FERRY_OK;
    }
    c->pending = item;
    c->converted = false;
    item.tensor.dtype = meta->dtype;
    if (item.tensor.data) {
        FERRY_TRY(ferry__scratch_need(&c->scratch, ferry__meta_bytes(meta)));
        FERRY_TRY(ferry__meta_tensor(meta, c->scratch.data, &c->result));
        item.tensor = c->result;
        if (!item.wait)
            FERRY_TRY(cast_convert(c));
        else
            item.wait_arg = c;
        item.wait = item.wait ? cast_wait : NULL;
    }
    *out_item = item;
    return FERRY_OK;
}

static ferry_status check_args(ferry_dtype to, const char *only)
{
    bool star;

    if (!ferry__dtype_is_float(to) || ferry_dtype_block(to) != 1)
        return ferry_fail(FERRY_EINVAL,
                          "cast: dtype is %s, want a "
                          "floating-point one",
                          ferry_dtype_name(to));
    if (only)
        FERRY_TRY(ferry__pattern_check("cast only", only, &star));
    return FERRY_OK;
}

ferry_status ferry_source_cast(ferry_source *inner, ferry_dtype to,
                               const char *only, ferry_source *out_source)
{
    FERRY__NEED(out_source);
    cast_source *c;

    FERRY_TRY(check_args(to, only));
    FERRY_TRY(ferry__adapter_create(sizeof(*c), "cast", inner, cast_next, &c));
    c->base.plan = cast_plan;
    c->base.unplan = cast_unplan;
    c->base.reset = cast_reset;
    c->base.destroy = cast_destroy;
    c->to = to;
    if (only) {
        c->only = ferry__strdup(only);
        if (!c->only) {
            ferry__adapter_abandon(&c->base);
            return FERRY_ENOMEM;
        }
    }
    return ferry__adapter_finish(&c->base, inner, out_source);
}
