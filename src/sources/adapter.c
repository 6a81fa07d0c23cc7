/* SPDX-License-Identifier: Apache-2.0 */
/* The shared part of the adapters. The inner source is trusted no more than
 * any other producer: an item that its own metadata did not declare is an
 * error here, before an adapter puts it under another name. */
#include "sources/adapter.h"

#include "base/alloc.h"
#include "base/log.h"

#include <string.h>

#define HAS_FIELD(ops, field)                                                  \
    ((ops)->size >= offsetof(ferry_source_ops, field) + sizeof((ops)->field))

bool ferry__source_is_stable(const ferry_source *source)
{
    return (source->ops->flags & FERRY_SOURCE_STABLE) != 0;
}

bool (*ferry__source_holds(const ferry_source *source))(void *self,
                                                        const char *name)
{
    return HAS_FIELD(source->ops, holds) ? source->ops->holds : NULL;
}

static ferry_status (*source_groups(const ferry_source *source))(
    void *self, const size_t **out_lengths, size_t *out_count)
{
    return HAS_FIELD(source->ops, groups) ? source->ops->groups : NULL;
}

ferry_status ferry__source_check(const char *what, const ferry_source *source)
{
    const ferry_source_ops *ops = source ? source->ops : NULL;
    const char *missing;

    if (!ops)
        return ferry_fail(FERRY_EINVAL, "%s: got no source to wrap", what);
    if (!HAS_FIELD(ops, end))
        return ferry_fail(FERRY_EINVAL,
                          "%s: the inner source's table has %zu bytes, want "
                          "at least %zu",
                          what, ops->size, offsetof(ferry_source_ops, close));
    missing = !ops->metadata ? "metadata"
              : !ops->begin  ? "begin"
              : !ops->next   ? "next"
              : !ops->end    ? "end"
                             : NULL;
    if (missing)
        return ferry_fail(FERRY_EINVAL, "%s: the inner source has no %s", what,
                          missing);
    return FERRY_OK;
}

/* ---- memory and tensors ---- */

ferry_status ferry__scratch_need(ferry__scratch *s, size_t size_bytes)
{
    if (s->data && s->size_bytes >= size_bytes)
        return FERRY_OK;
    ferry__scratch_free(s);
    s->data = ferry__alloc_raw(size_bytes);
    if (!s->data)
        return FERRY_ENOMEM;
    s->size_bytes = size_bytes;
    return FERRY_OK;
}

void ferry__scratch_free(ferry__scratch *s)
{
    ferry__free(s->data);
    *s = (ferry__scratch){0};
}

ferry_status ferry__meta_tensor(const ferry_param_meta *meta, void *data,
                                ferry_tensor *out)
{
    FERRY_TRY(
        ferry_tensor_init(out, data, meta->dtype, meta->ndim, meta->shape));
    out->name = meta->name;
    return FERRY_OK;
}

ferry_status ferry__item_wait(const ferry_item *item)
{
    ferry_status st;

    if (!item->wait)
        return FERRY_OK;
    st = item->wait(item->wait_arg, FERRY__SOURCE_WAIT_MS);
    if (st == FERRY_ETIMEOUT)
        return ferry_fail(st,
                          "parameter %s: its producer's event did not "
                          "come within %d ms",
                          item->name, FERRY__SOURCE_WAIT_MS);
    return st;
}

/* ---- metadata ---- */

static bool same_meta(const ferry_param_meta *a, const ferry_param_meta *b)
{
    return b->name && strcmp(a->name, b->name) == 0 && a->dtype == b->dtype &&
           a->ndim == b->ndim &&
           memcmp(a->shape, b->shape, (size_t)a->ndim * sizeof(a->shape[0])) ==
               0;
}

static bool unchanged(const ferry__manifest *seen,
                      const ferry_param_meta *params, size_t count)
{
    if (seen->count != count)
        return false;
    for (size_t i = 0; i < count; i++) {
        if (!same_meta(&seen->params[i], &params[i]))
            return false;
    }
    return true;
}

static void forget_plan(ferry__adapter *a)
{
    if (a->unplan)
        a->unplan(a);
    ferry__manifest_clear(&a->shown);
    ferry__manifest_clear(&a->seen);
    a->planned = false;
}

static ferry_status refresh(ferry__adapter *a)
{
    const ferry_param_meta *params = NULL;
    ferry_status st;
    size_t count = 0;

    FERRY_TRY(a->inner.ops->metadata(a->inner.self, &params, &count));
    if (a->planned && unchanged(&a->seen, params, count))
        return FERRY_OK;
    if (a->open)
        return ferry_fail(FERRY_EORDER,
                          "%s source: the metadata changed "
                          "during a pass",
                          a->ops.kind);
    forget_plan(a);
    st = ferry__manifest_copy(&a->seen, params, count);
    if (st == FERRY_OK)
        st = a->plan(a);
    if (st < 0)
        forget_plan(a);
    else
        a->planned = true;
    return st;
}

static ferry_status adapter_metadata(void *self,
                                     const ferry_param_meta **out_params,
                                     size_t *out_count)
{
    ferry__adapter *a = self;

    FERRY_TRY(refresh(a));
    *out_params = a->shown.params;
    *out_count = a->shown.count;
    return FERRY_OK;
}

/* Only adapters that keep count and order of the inner metadata keep this
 * method. */
static ferry_status adapter_groups(void *self, const size_t **out_lengths,
                                   size_t *out_count)
{
    ferry__adapter *a = self;

    return source_groups(&a->inner)(a->inner.self, out_lengths, out_count);
}

bool ferry__adapter_inner_holds(ferry__adapter *a, size_t index)
{
    bool (*holds)(void *, const char *) = ferry__source_holds(&a->inner);

    return !holds || holds(a->inner.self, a->seen.params[index].name);
}

/* The default is for adapters whose i-th parameter is the inner one's. */
static bool adapter_holds(void *self, const char *name)
{
    ferry__adapter *a = self;
    size_t index;

    return ferry__manifest_find(&a->shown, name, &index) &&
           ferry__adapter_inner_holds(a, index);
}

/* ---- the pass ---- */

static ferry_status adapter_begin(void *self)
{
    ferry__adapter *a = self;

    if (a->open)
        return ferry_fail(FERRY_EORDER,
                          "%s source: begin during a pass, "
                          "end must come first",
                          a->ops.kind);
    /* Metadata that was read already is not read again: the caller's
     * borrowed list must stay valid through the pass. */
    if (!a->planned)
        FERRY_TRY(refresh(a));
    FERRY_TRY(a->inner.ops->begin(a->inner.self));
    a->position = 0;
    a->open = true;
    return FERRY_OK;
}

static ferry_status check_item(ferry__adapter *a, const ferry_item *item)
{
    const ferry_param_meta *meta;
    const char *got = item->name ? item->name : "no name";

    if (a->position >= a->seen.count)
        return ferry_fail(FERRY_EMISMATCH,
                          "parameter %s: came after all %zu "
                          "declared ones",
                          got, a->seen.count);
    meta = &a->seen.params[a->position];
    if (strcmp(got, meta->name) != 0)
        return ferry_fail(FERRY_EMISMATCH,
                          "parameter %s: declared at "
                          "position %zu, got %s",
                          meta->name, a->position, got);
    if (!item->tensor.data)
        return FERRY_OK;
    return ferry__meta_check(meta, a->position, item->name, &item->tensor);
}

ferry_status ferry__adapter_pull(ferry__adapter *a, ferry_item *out_item,
                                 size_t *out_index)
{
    const ferry_param_meta *meta;
    ferry_item item = {0};
    ferry_status st;

    if (!a->open)
        return ferry_fail(FERRY_EORDER,
                          "%s source: next outside a pass, "
                          "begin must come first",
                          a->ops.kind);
    st = a->inner.ops->next(a->inner.self, &item);
    FERRY_TRY(st);
    if (st == FERRY_DONE && a->position < a->seen.count)
        return ferry_fail(FERRY_EMISMATCH,
                          "parameter %s: declared at "
                          "position %zu, but the pass ended before it",
                          a->seen.params[a->position].name, a->position);
    if (st == FERRY_DONE)
        return st;
    FERRY_TRY(check_item(a, &item));
    meta = &a->seen.params[a->position];
    if (!item.tensor.data)
        FERRY_TRY(ferry__meta_tensor(meta, NULL, &item.tensor));
    item.name = meta->name;
    item.tensor.name = meta->name;
    *out_item = item;
    *out_index = a->position++;
    return FERRY_OK;
}

static void adapter_end(void *self)
{
    ferry__adapter *a = self;

    if (!a->open)
        return;
    if (a->reset)
        a->reset(a);
    a->inner.ops->end(a->inner.self);
    a->open = false;
}

/* ---- life ---- */

void ferry__adapter_abandon(ferry__adapter *a)
{
    if (!a)
        return;
    forget_plan(a);
    if (a->destroy)
        a->destroy(a);
    ferry__free(a);
}

static void adapter_close(void *self)
{
    ferry__adapter *a = self;
    ferry_source inner = a->inner;

    adapter_end(a);
    ferry__adapter_abandon(a);
    ferry_source_close(&inner);
}

ferry_status ferry__adapter_create(
    size_t size_bytes, const char *kind, const ferry_source *inner,
    ferry_status (*next)(void *self, ferry_item *out), void *out_adapter)
{
    ferry__adapter *a;

    FERRY_TRY(ferry__source_check(kind, inner));
    a = ferry__alloc(size_bytes);
    if (!a)
        return FERRY_ENOMEM;
    a->inner = *inner;
    a->ops.size = sizeof(a->ops);
    a->ops.kind = kind;
    a->ops.flags = inner->ops->flags;
    a->ops.metadata = adapter_metadata;
    a->ops.begin = adapter_begin;
    a->ops.next = next;
    a->ops.end = adapter_end;
    a->ops.close = adapter_close;
    if (ferry__source_holds(inner))
        a->ops.holds = adapter_holds;
    if (source_groups(inner))
        a->ops.groups = adapter_groups;
    *(ferry__adapter **)out_adapter = a;
    return FERRY_OK;
}

ferry_status ferry__adapter_finish(ferry__adapter *a, ferry_source *inner,
                                   ferry_source *out_source)
{
    ferry_status st = refresh(a);

    if (st < 0) {
        ferry__fail_prefix(st, "%s source", a->ops.kind);
        ferry__adapter_abandon(a);
        return st;
    }
    /* In this order, so that both may be one variable. */
    *inner = (ferry_source){0};
    *out_source = (ferry_source){&a->ops, a};
    return FERRY_OK;
}
