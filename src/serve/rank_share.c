/* SPDX-License-Identifier: Apache-2.0 */
/* Stored bytes of a rank, out and in; see rank_share.h. */
#include "serve/rank_share.h"

#include "base/alloc.h"
#include "base/str.h"
#include "core/load_plan.h"

#include <stdbool.h>
#include <string.h>

static size_t shared_bytes(const ferry_param *p)
{
    return p->flags & FERRY_PARAM_RUNTIME ? 0 : ferry__slot_bytes(p);
}

ferry_status ferry__rank_layout(const ferry_model *model, char **out_json)
{
    ferry__str s = {0};

    ferry__str_append(&s, "[");
    for (size_t i = 0; i < model->n_params; i++) {
        const ferry_param *p = &model->params[i];

        ferry__str_append(&s, i > 0 ? ",{\"name\":" : "{\"name\":");
        ferry__str_json(&s, p->name);
        ferry__str_append(&s, ",\"dtype\":");
        ferry__str_json(&s, ferry_dtype_name(p->dtype));
        ferry__str_append(&s, ",\"shape\":[");
        for (int32_t d = 0; d < p->ndim; d++)
            ferry__str_printf(&s, "%s%lld", d > 0 ? "," : "",
                              (long long)p->shape[d]);
        ferry__str_printf(&s, "],\"bytes\":%zu}", shared_bytes(p));
    }
    ferry__str_append(&s, "]");
    return ferry__str_take(&s, out_json);
}

/* The span that a body begins with, checked against what is stored. */
static ferry_status read_span(const ferry_model *model, const void *body,
                              size_t body_size, ferry__share_span *out)
{
    uint64_t stored = 0;

    if (body_size < sizeof *out)
        return ferry_fail(FERRY_EINVAL, "a span of %zu bytes is short",
                          body_size);
    memcpy(out, body, sizeof *out);
    if (out->param >= model->n_params)
        return ferry_fail(FERRY_EINVAL, "parameter number %llu of %zu",
                          (unsigned long long)out->param, model->n_params);
    for (size_t i = out->param; i < model->n_params; i++)
        stored += shared_bytes(&model->params[i]);
    if (out->size_bytes > FERRY__SHARE_SPAN_MAX ||
        out->offset > shared_bytes(&model->params[out->param]) ||
        out->size_bytes > stored - out->offset)
        return ferry_fail(
            FERRY_EINVAL,
            "parameter %s: %llu bytes at %llu; there are %llu "
            "from it on, and a span has at most %llu",
            model->params[out->param].name, (unsigned long long)out->size_bytes,
            (unsigned long long)out->offset, (unsigned long long)stored,
            (unsigned long long)FERRY__SHARE_SPAN_MAX);
    return FERRY_OK;
}

/* Copies between the stored bytes of the span and `bytes`. */
static void copy_span(const ferry_model *model, const ferry__share_span *span,
                      char *bytes, bool write)
{
    size_t offset = span->offset, left = span->size_bytes;

    for (size_t i = span->param; left > 0; i++, offset = 0) {
        const ferry_param *p = &model->params[i];
        size_t here = shared_bytes(p) - offset;
        size_t n = here < left ? here : left;
        char *stored = (char *)p->data + offset;

        if (n > 0 && write)
            memcpy(stored, bytes, n);
        else if (n > 0)
            memcpy(bytes, stored, n);
        bytes += n;
        left -= n;
    }
}

ferry_status ferry__rank_read(const ferry_model *model, const void *body,
                              size_t body_size, void **out_bytes,
                              size_t *out_size)
{
    ferry__share_span span;
    void *copy;

    FERRY_TRY(read_span(model, body, body_size, &span));
    copy = ferry__alloc_raw(span.size_bytes > 0 ? span.size_bytes : 1);
    if (copy == NULL)
        return FERRY_ENOMEM;
    copy_span(model, &span, copy, false);
    *out_bytes = copy;
    *out_size = span.size_bytes;
    return FERRY_OK;
}

ferry_status ferry__rank_write(const ferry_model *model, const void *body,
                               size_t body_size)
{
    ferry__share_span span;

    FERRY_TRY(read_span(model, body, body_size, &span));
    if (body_size - sizeof span != span.size_bytes)
        return ferry_fail(FERRY_EINVAL, "parameter %s: %zu bytes for %llu",
                          model->params[span.param].name,
                          body_size - sizeof span,
                          (unsigned long long)span.size_bytes);
    copy_span(model, &span, (char *)(uintptr_t)body + sizeof span, true);
    return FERRY_OK;
}
