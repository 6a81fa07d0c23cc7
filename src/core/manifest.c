/* SPDX-License-Identifier: Apache-2.0 */
/* The list of declared parameters, checked as it is built.
 * Invariant: what is in the list has a unique name, a wire dtype and a byte
 * size that fits, so that nobody behind it checks again. */
#include "core/manifest.h"
#include "base/alloc.h"
#include "base/str.h"
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* Empty dimensions count as one, as in ferry_tensor_init. */
static bool span_fits(const ferry_param_meta *meta)
{
    int64_t span = (int64_t)ferry_dtype_bytes(meta->dtype);
    for (int32_t i = 0; i < meta->ndim; i++) {
        int64_t d = meta->shape[i] > 0 ? meta->shape[i] : 1;
        if (!ferry__mul64(span, d, &span))
            return false;
    }
    return true;
}

static ferry_status check_meta(const ferry_param_meta *meta, size_t index)
{
    char text[256];
    if (!meta->name || meta->name[0] == '\0')
        return ferry_fail(FERRY_EINVAL, "names[%zu] is empty", index);
    if (ferry_dtype_block(meta->dtype) != 1)
        return ferry_fail(
            FERRY_EINVAL, "parameter %s: dtype %s (%d) does not travel",
            meta->name, ferry_dtype_name(meta->dtype), (int)meta->dtype);
    if (meta->ndim < 0 || meta->ndim > FERRY_MAX_DIMS)
        return ferry_fail(FERRY_EINVAL,
                          "parameter %s: shape has %d dimensions, at most "
                          "%d are possible",
                          meta->name, (int)meta->ndim, FERRY_MAX_DIMS);
    for (int32_t i = 0; i < meta->ndim; i++) {
        if (meta->shape[i] < 0)
            return ferry_fail(FERRY_EINVAL,
                              "parameter %s: shape dimension %d is %" PRId64
                              ", must be >= 0",
                              meta->name, (int)i, meta->shape[i]);
    }
    if (!span_fits(meta))
        return ferry_fail(
            FERRY_EOVERFLOW,
            "parameter %s: shape %s and dtype %s are too large", meta->name,
            ferry__shape_text(text, sizeof(text), meta->ndim, meta->shape),
            ferry_dtype_name(meta->dtype));
    return FERRY_OK;
}

ferry_status ferry__manifest_add(ferry__manifest *m,
                                 const ferry_param_meta *meta)
{
    size_t old = 0;
    FERRY_TRY(check_meta(meta, m->count));
    uint64_t bytes = ferry__meta_bytes(meta);
    if (bytes > UINT64_MAX - m->total_bytes)
        return ferry_fail(FERRY_EOVERFLOW,
                          "parameter %s: all parameters together are too "
                          "large",
                          meta->name);
    FERRY_TRY(
        ferry__grow(&m->params, &m->capacity, m->count, sizeof(*m->params)));
    char *name = ferry__strdup(meta->name);
    if (!name)
        return FERRY_ENOMEM;
    ferry_status st = ferry__table_add(&m->by_name, name, m->count, &old);
    if (st < 0) {
        ferry__free(name);
        if (st == FERRY_EEXIST)
            return ferry_fail(FERRY_EEXIST,
                              "parameter %s: named twice, at %zu and %zu",
                              meta->name, old, m->count);
        return st;
    }
    m->params[m->count] = *meta;
    m->params[m->count].name = name;
    m->count++;
    m->total_bytes += bytes;
    return FERRY_OK;
}

ferry_status ferry__manifest_copy(ferry__manifest *m,
                                  const ferry_param_meta *params, size_t count)
{
    for (size_t i = 0; i < count; i++)
        FERRY_TRY(ferry__manifest_add(m, &params[i]));
    return FERRY_OK;
}

static bool same_meta(const ferry_param_meta *a, const ferry_param_meta *b)
{
    if (a->dtype != b->dtype || a->ndim != b->ndim || b->name == NULL ||
        strcmp(a->name, b->name) != 0)
        return false;
    for (int32_t i = 0; i < a->ndim; i++) {
        if (a->shape[i] != b->shape[i])
            return false;
    }
    return true;
}

bool ferry__manifest_is(const ferry__manifest *m,
                        const ferry_param_meta *params, size_t count)
{
    if (m->count != count)
        return false;
    for (size_t i = 0; i < count; i++) {
        if (!same_meta(&m->params[i], &params[i]))
            return false;
    }
    return true;
}

bool ferry__manifest_find(const ferry__manifest *m, const char *name,
                          size_t *out_index)
{
    return ferry__table_get(&m->by_name, name, out_index);
}

void ferry__manifest_clear(ferry__manifest *m)
{
    for (size_t i = 0; i < m->count; i++)
        ferry__free((void *)(uintptr_t)m->params[i].name);
    ferry__free(m->params);
    ferry__table_free(&m->by_name);
    memset(m, 0, sizeof(*m));
}

/* The canonical line is hashed piece by piece through a small buffer, so
 * that the digest of a long list allocates nothing but the state. */
typedef struct line_hash {
    ferry__xxh3_state *state;
    char buffer[4096];
    size_t used;
} line_hash;

static void line_put(line_hash *h, const char *text, size_t n)
{
    while (n > 0) {
        size_t part = sizeof(h->buffer) - h->used;
        if (part > n)
            part = n;
        memcpy(h->buffer + h->used, text, part);
        h->used += part;
        text += part;
        n -= part;
        if (h->used == sizeof(h->buffer)) {
            ferry__xxh3_update(h->state, h->buffer, h->used);
            h->used = 0;
        }
    }
}

static void line_meta(line_hash *h, const ferry_param_meta *meta)
{
    char number[32];
    const char *dtype = ferry_dtype_name(meta->dtype);
    line_put(h, meta->name, strlen(meta->name));
    line_put(h, " ", 1);
    line_put(h, dtype, strlen(dtype));
    line_put(h, " ", 1);
    for (int32_t i = 0; i < meta->ndim; i++) {
        int n = snprintf(number, sizeof(number), "%s%" PRId64, i > 0 ? "," : "",
                         meta->shape[i]);
        line_put(h, number, (size_t)n);
    }
    line_put(h, "\n", 1);
}

uint64_t ferry__manifest_digest(const ferry_param_meta *params, size_t count)
{
    line_hash h;
    h.used = 0;
    h.state = ferry__xxh3_create();
    if (!h.state)
        return 0;
    for (size_t i = 0; i < count; i++)
        line_meta(&h, &params[i]);
    ferry__xxh3_update(h.state, h.buffer, h.used);
    uint64_t value = ferry__xxh3_value(h.state);
    ferry__xxh3_destroy(h.state);
    return value;
}

static ferry_status meta_from_lists(const char *name, const char *dtype_name,
                                    const ferry_shape *shape, size_t index,
                                    ferry_param_meta *out)
{
    memset(out, 0, sizeof(*out));
    out->name = name;
    if (!name || name[0] == '\0')
        return ferry_fail(FERRY_EINVAL, "names[%zu] is empty", index);
    if (ferry_dtype_parse(dtype_name, &out->dtype) < 0) {
        char line[512];
        snprintf(line, sizeof(line), "%s", ferry_last_error());
        return ferry_fail(FERRY_EINVAL, "dtype_names[%zu], parameter %s: %s",
                          index, name, line);
    }
    if (shape->ndim < 0 || shape->ndim > FERRY_MAX_DIMS)
        return ferry_fail(FERRY_EINVAL,
                          "shapes[%zu], parameter %s: %d dimensions, at "
                          "most %d are possible",
                          index, name, (int)shape->ndim, FERRY_MAX_DIMS);
    out->ndim = shape->ndim;
    for (int32_t i = 0; i < shape->ndim; i++) {
        if (shape->dims[i] < 0)
            return ferry_fail(FERRY_EINVAL,
                              "shapes[%zu], parameter %s: dimension %d is "
                              "%" PRId64 ", must be >= 0",
                              index, name, (int)i, shape->dims[i]);
        out->shape[i] = shape->dims[i];
    }
    return FERRY_OK;
}

ferry_status ferry__manifest_from_lists(ferry__manifest *m,
                                        const ferry_strs *names,
                                        const ferry_strs *dtype_names,
                                        const ferry_shapes *shapes)
{
    ferry_param_meta meta;
    if (dtype_names->count != names->count)
        return ferry_fail(FERRY_EINVAL,
                          "`dtype_names` should be of the same size as "
                          "`names`: got %zu and %zu",
                          dtype_names->count, names->count);
    if (shapes->count != names->count)
        return ferry_fail(FERRY_EINVAL,
                          "`shapes` should be of the same size as `names`: "
                          "got %zu and %zu",
                          shapes->count, names->count);
    for (size_t i = 0; i < names->count; i++) {
        FERRY_TRY(meta_from_lists(names->items[i], dtype_names->items[i],
                                  &shapes->items[i], i, &meta));
        FERRY_TRY(ferry__manifest_add(m, &meta));
    }
    return FERRY_OK;
}

static void shape_to_json(const ferry_param_meta *meta, ferry__str *out)
{
    ferry__str_append(out, "[");
    for (int32_t i = 0; i < meta->ndim; i++)
        ferry__str_printf(out, "%s%" PRId64, i > 0 ? "," : "", meta->shape[i]);
    ferry__str_append(out, "]");
}

void ferry__manifest_to_json(const ferry_param_meta *params, size_t count,
                             struct ferry__str *out)
{
    ferry__str_append(out, "\"names\":[");
    for (size_t i = 0; i < count; i++) {
        ferry__str_append(out, i > 0 ? "," : "");
        ferry__str_json(out, params[i].name);
    }
    ferry__str_append(out, "],\"dtype_names\":[");
    for (size_t i = 0; i < count; i++) {
        ferry__str_append(out, i > 0 ? "," : "");
        ferry__str_json(out, ferry_dtype_name(params[i].dtype));
    }
    ferry__str_append(out, "],\"shapes\":[");
    for (size_t i = 0; i < count; i++) {
        ferry__str_append(out, i > 0 ? "," : "");
        shape_to_json(&params[i], out);
    }
    ferry__str_append(out, "]");
}

ferry_status ferry__meta_check(const ferry_param_meta *declared, size_t index,
                               const char *name, const ferry_tensor *got)
{
    char want[256], have[256];
    if (!name || strcmp(declared->name, name) != 0)
        return ferry_fail(FERRY_EMISMATCH, "parameter %zu: declared %s, got %s",
                          index, declared->name, name ? name : "no name");
    if (got->dtype != declared->dtype)
        return ferry_fail(FERRY_EMISMATCH,
                          "parameter %s (%zu): declared dtype %s, got %s", name,
                          index, ferry_dtype_name(declared->dtype),
                          ferry_dtype_name(got->dtype));
    bool same = got->ndim == declared->ndim;
    for (int32_t i = 0; same && i < declared->ndim; i++)
        same = got->shape[i] == declared->shape[i];
    if (same)
        return FERRY_OK;
    return ferry_fail(
        FERRY_EMISMATCH, "parameter %s (%zu): declared shape %s, got %s", name,
        index,
        ferry__shape_text(want, sizeof(want), declared->ndim, declared->shape),
        ferry__shape_text(have, sizeof(have), got->ndim, got->shape));
}

int64_t ferry__meta_numel(const ferry_param_meta *meta)
{
    int64_t n = 1;
    for (int32_t i = 0; i < meta->ndim; i++) {
        if (meta->shape[i] == 0)
            return 0;
        n *= meta->shape[i];
    }
    return n;
}

uint64_t ferry__meta_bytes(const ferry_param_meta *meta)
{
    return (uint64_t)ferry__meta_numel(meta) * ferry_dtype_bytes(meta->dtype);
}
