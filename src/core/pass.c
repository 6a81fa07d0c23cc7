/* SPDX-License-Identifier: Apache-2.0 */
/* The checked pass: compares each item with what was declared for its place.
 * Invariant: begin and end of the source are paired on every path. */
#include "core/pass.h"

#include "base/clock.h"
#include "core/manifest.h"
#include "core/round.h"

#include <stdio.h>
#include <string.h>

/* An event is awaited in slices, so that a deadline or a failure of the other
 * plane is seen soon. */
#define EVENT_SLICE_MS 50

ferry_status ferry__source_adopt(const ferry_source *source,
                                 ferry_source_ops *ops, ferry_source *out)
{
    const ferry_source_ops *from = source->ops;
    const char *missing;

    if (from == NULL)
        return ferry_fail(FERRY_EINVAL, "source has no table");
    if (from->size < offsetof(ferry_source_ops, close))
        return ferry_fail(FERRY_EINVAL,
                          "source table of %zu bytes; at least %zu are "
                          "needed",
                          from->size, offsetof(ferry_source_ops, close));
    memset(ops, 0, sizeof(*ops));
    memcpy(ops, from, from->size < sizeof(*ops) ? from->size : sizeof(*ops));
    missing = ops->metadata == NULL ? "metadata"
              : ops->begin == NULL  ? "begin"
              : ops->next == NULL   ? "next"
              : ops->end == NULL    ? "end"
                                    : NULL;
    if (missing != NULL)
        return ferry_fail(FERRY_EINVAL, "source %s has no method %s",
                          ops->kind != NULL ? ops->kind : "?", missing);
    out->ops = ops;
    out->self = source->self;
    return FERRY_OK;
}

ferry_status ferry__pass_begin(ferry__pass *p)
{
    if (p->open)
        return ferry_fail(FERRY_EORDER, "a pass over the source is open");
    FERRY_TRY(p->source->ops->begin(p->source->self));
    p->open = true;
    p->done = false;
    p->over = false;
    p->index = 0;
    return FERRY_OK;
}

static ferry_status wait_event(ferry__pass *p, const ferry_item *item)
{
    ferry_status st = FERRY_ETIMEOUT;

    if (item->wait == NULL)
        return FERRY_OK;
    while (st == FERRY_ETIMEOUT) {
        if (p->check != NULL)
            FERRY_TRY(p->check(p->arg, "waiting for the source's event"));
        st = item->wait(item->wait_arg, EVENT_SLICE_MS);
    }
    return st;
}

static ferry_status ended(ferry__pass *p)
{
    if (p->index < p->count)
        return ferry_fail(FERRY_ECOVERAGE,
                          "source yielded %zu parameters but its metadata "
                          "declared %zu; first missing is %s",
                          p->index, p->count, p->declared[p->index].name);
    p->done = true;
    return FERRY_DONE;
}

static ferry_status check_item(const ferry__pass *p, const ferry_item *item)
{
    const char *name = item->name != NULL ? item->name : "";

    if (p->index >= p->count)
        return ferry_fail(FERRY_EMISMATCH,
                          "source yielded more parameters than its metadata "
                          "declared (%zu); first extra is %s",
                          p->count, name);
    FERRY_TRY(ferry__meta_check(&p->declared[p->index], p->index, name,
                                &item->tensor));
    if (p->need_data && item->tensor.data == NULL &&
        ferry_tensor_numel(&item->tensor) > 0)
        return ferry_fail(FERRY_EMISMATCH,
                          "parameter %s: rank %d sends it, but its source "
                          "yielded no data",
                          name, (int)p->rank);
    if (p->need_data && !p->devices && item->tensor.device != 0 &&
        ferry_tensor_numel(&item->tensor) > 0)
        return ferry_fail(FERRY_ENOTSUP,
                          "parameter %s is in the memory of device %d; its "
                          "receiver reads tensors of the host",
                          name, (int)item->tensor.device - 1);
    return FERRY_OK;
}

static ferry_status take(ferry__pass *p, ferry_item *out)
{
    ferry_status st = p->source->ops->next(p->source->self, out);

    p->over = st != FERRY_OK;
    return st;
}

/* The other ranks are in the same pass and would wait for this one (B4). What
 * failed keeps its line. */
static void run_out(ferry__pass *p)
{
    char line[FERRY__LINE_MAX];
    ferry_item item;

    if (p->over || !(p->source->ops->flags & FERRY_SOURCE_COLLECTIVE))
        return;
    snprintf(line, sizeof(line), "%s", ferry_last_error());
    do {
        memset(&item, 0, sizeof(item));
    } while (take(p, &item) == FERRY_OK);
    ferry_fail(FERRY_ECANCELED, "%s", line);
}

ferry_status ferry__pass_next(ferry__pass *p, ferry_item *out_item)
{
    int64_t from_ns = ferry__now_ns();
    ferry_item item;
    ferry_status st;

    if (!p->open)
        return ferry_fail(FERRY_EORDER, "no pass over the source is open");
    if (p->done)
        return FERRY_DONE;
    memset(&item, 0, sizeof(item));
    /* A source may be slow while nothing else waits: the other plane's
     * failure, a cancel and the bounds are seen here too. */
    if (p->check != NULL && p->need_data)
        st = p->check(p->arg, "gathering");
    else
        st = FERRY_OK;
    if (st == FERRY_OK)
        st = take(p, &item);
    if (st == FERRY_OK)
        st = check_item(p, &item);
    else if (st == FERRY_DONE)
        st = ended(p);
    if (st == FERRY_OK)
        st = wait_event(p, &item);
    p->gather_ms += (double)(ferry__now_ns() - from_ns) / 1e6;
    if (p->spans != NULL)
        ferry__spans_add(p->spans, FERRY__SPAN_GATHER, from_ns);
    if (st != FERRY_OK) {
        if (st < 0)
            ferry__pass_end(p);
        return st;
    }
    p->index++;
    item.wait = NULL;
    item.wait_arg = NULL;
    *out_item = item;
    return FERRY_OK;
}

void ferry__pass_end(ferry__pass *p)
{
    if (!p->open)
        return;
    run_out(p);
    p->open = false;
    p->source->ops->end(p->source->self);
}
