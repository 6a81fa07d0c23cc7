/* SPDX-License-Identifier: Apache-2.0 */
/* The plan as JSON, for people and for /ferry/plan.
 * Format: {"model":…,"params":[{"name","dtype","shape","entries":[…]}]}; an
 * entry is {"kind","slot","slot_dtype","source":{"offset","shape","stride"},
 * "start","count"} and, for a step, "step" and "input"; of what is put aside,
 * only {"kind","source"}.
 * Invariant: parameters come in the order asked for. */
#include "base/str.h"
#include "core/plan_private.h"
#include <inttypes.h>

static void put_list(ferry__str *out, const char *key, int32_t n,
                     const int64_t *values)
{
    ferry__str_printf(out, "\"%s\":[", key);
    for (int32_t i = 0; i < n; i++)
        ferry__str_printf(out, "%s%" PRId64, i > 0 ? "," : "", values[i]);
    ferry__str_append(out, "]");
}

static const char *kind_text(ferry__entry_kind kind)
{
    switch (kind) {
    case FERRY__ENTRY_TIED:
        return "tied";
    case FERRY__ENTRY_STEP:
        return "step";
    case FERRY__ENTRY_ASIDE:
        return "aside";
    case FERRY__ENTRY_COPY:
        break;
    }
    return "copy";
}

static void put_source(const ferry__entry *e, ferry__str *out)
{
    ferry__str_printf(out, "\"source\":{\"offset\":%" PRId64 ",",
                      e->box.offset);
    put_list(out, "shape", e->box.ndim, e->box.shape);
    ferry__str_append(out, ",");
    put_list(out, "stride", e->box.ndim, e->box.stride);
    ferry__str_append(out, "}");
}

static void put_aside(const ferry__entry *e, ferry__str *out)
{
    ferry__str_append(out, "{\"kind\":\"aside\",");
    put_source(e, out);
    ferry__str_append(out, "}");
}

static void put_entry(const ferry__plan *plan, const ferry__entry *e,
                      ferry__str *out)
{
    if (e->kind == FERRY__ENTRY_ASIDE) {
        put_aside(e, out);
        return;
    }
    const ferry_param *p = &plan->model.params[e->slot];
    ferry__str_printf(out, "{\"kind\":\"%s\",\"slot\":", kind_text(e->kind));
    ferry__str_json(out, p->name);
    ferry__str_printf(out, ",\"slot_dtype\":\"%s\",",
                      ferry_dtype_name(p->dtype));
    put_source(e, out);
    ferry__str_append(out, ",");
    put_list(out, "start", p->ndim, e->dst_start);
    ferry__str_append(out, ",");
    put_list(out, "count", p->ndim, e->dst_count);
    if (e->kind == FERRY__ENTRY_STEP) {
        ferry__str_append(out, ",\"step\":");
        ferry__str_json(out, plan->steps[e->step].step.name);
        ferry__str_printf(out, ",\"input\":%d", (int)e->input);
    }
    ferry__str_append(out, "}");
}

static void put_param(const ferry__plan *plan, size_t id, ferry__str *out)
{
    const ferry__baked *b = &plan->baked[id];
    ferry__str_append(out, "{\"name\":");
    ferry__str_json(out, b->meta.name);
    ferry__str_printf(out, ",\"dtype\":\"%s\",",
                      ferry_dtype_name(b->meta.dtype));
    put_list(out, "shape", b->meta.ndim, b->meta.shape);
    ferry__str_append(out, ",\"entries\":[");
    for (size_t i = 0; i < b->count; i++) {
        ferry__str_append(out, i > 0 ? "," : "");
        put_entry(plan, &plan->entries[b->first + i], out);
    }
    ferry__str_append(out, "]}");
}

ferry_status ferry__plan_to_json(const ferry__plan *plan, const size_t *ids,
                                 size_t count, char **out_json)
{
    ferry__str out = {0};
    ferry__str_append(&out, "{\"model\":");
    ferry__str_json(&out, plan->model.name ? plan->model.name : "");
    ferry__str_append(&out, ",\"params\":[");
    for (size_t i = 0; i < count; i++) {
        ferry__str_append(&out, i > 0 ? "," : "");
        put_param(plan, ids[i], &out);
    }
    ferry__str_append(&out, "]}");
    return ferry__str_take(&out, out_json);
}
