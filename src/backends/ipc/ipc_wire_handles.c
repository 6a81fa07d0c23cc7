/* SPDX-License-Identifier: Apache-2.0 */
/* Handles: the plain JSON that says where each parameter's bytes are, and
 * the checks that keep a reader inside what the trainer has published.
 * Invariant: a handle holds a number to look up, never an address. */
#include "backends/ipc/ipc_wire.h"

#include "base/alloc.h"
#include "base/hash.h"
#include "base/json.h"

#include <string.h>

void ferry__ipc_put_handles(ferry__str *s, const ferry__ipc_handle *handles,
                            const ferry_param_meta *params, size_t count)
{
    ferry__str_append(s, "[");
    for (size_t i = 0; i < count; i++) {
        const ferry__ipc_handle *h = &handles[i];
        const char *key = h->kind == FERRY__IPC_CMA ? "range" : "segment";

        if (i > 0)
            ferry__str_append(s, ",");
        if (h->kind == FERRY__IPC_RING) {
            ferry__str_append(s, "{\"ring\":true}");
            continue;
        }
        if (h->kind == FERRY__IPC_EMPTY) {
            ferry__str_append(s, "{\"empty\":true}");
            continue;
        }
        ferry__str_printf(s, "{\"%s\":%llu,\"offset\":%llu", key,
                          (unsigned long long)h->id,
                          (unsigned long long)h->offset);
        if (h->strided) {
            ferry__str_append(s, ",\"strides\":[");
            for (int32_t d = 0; d < params[i].ndim; d++)
                ferry__str_printf(s, "%s%lld", d ? "," : "",
                                  (long long)h->stride[d]);
            ferry__str_append(s, "]");
        }
        ferry__str_append(s, "}");
    }
    ferry__str_append(s, "]");
}

static ferry_status fail_handle(const char *name, const char *what)
{
    return ferry_fail(FERRY_EINVAL, "field handles: parameter %s: %s", name,
                      what);
}

/* A number from 0 to INT64_MAX. */
static bool get_natural(const json_t *value, uint64_t *out)
{
    if (!json_is_integer(value) || json_integer_value(value) < 0)
        return false;
    *out = (uint64_t)json_integer_value(value);
    return true;
}

static ferry_status get_strides(const json_t *value,
                                const ferry_param_meta *param,
                                ferry__ipc_handle *out)
{
    if (!json_is_array(value) || json_array_size(value) != (size_t)param->ndim)
        return fail_handle(param->name, "strides must be a list with one "
                                        "number per dimension");
    for (int32_t d = 0; d < param->ndim; d++) {
        const json_t *item = json_array_get(value, (size_t)d);

        if (!json_is_integer(item))
            return fail_handle(param->name, "a stride is no integer");
        out->stride[d] = (int64_t)json_integer_value(item);
    }
    out->strided = true;
    return FERRY_OK;
}

static ferry_status get_flag(const json_t *object, const char *key,
                             const char *name, ferry__ipc_kind kind,
                             ferry__ipc_handle *out)
{
    if (json_object_size(object) != 1 ||
        !json_is_true(json_object_get(object, key)))
        return ferry_fail(FERRY_EINVAL,
                          "field handles: parameter %s: must be "
                          "{\"%s\":true}",
                          name, key);
    out->kind = kind;
    return FERRY_OK;
}

static ferry_status get_handle(const json_t *object,
                               const ferry_param_meta *param,
                               ferry__ipc_handle *out)
{
    const json_t *strides, *id;
    size_t known = 2;

    if (!json_is_object(object))
        return fail_handle(param->name, "no object");
    if (json_object_get(object, "ring"))
        return get_flag(object, "ring", param->name, FERRY__IPC_RING, out);
    if (json_object_get(object, "empty"))
        return get_flag(object, "empty", param->name, FERRY__IPC_EMPTY, out);
    out->kind = FERRY__IPC_SHARED;
    id = json_object_get(object, "segment");
    if (!id) {
        out->kind = FERRY__IPC_CMA;
        id = json_object_get(object, "range");
    }
    if (!id || !get_natural(id, &out->id))
        return fail_handle(param->name, "wants ring, empty, segment or range "
                                        "(a number)");
    if (!get_natural(json_object_get(object, "offset"), &out->offset))
        return fail_handle(param->name, "offset must be a number from 0");
    strides = json_object_get(object, "strides");
    if (strides) {
        FERRY_TRY(get_strides(strides, param, out));
        known++;
    }
    if (json_object_size(object) != known)
        return fail_handle(param->name, "unknown key beside segment, offset "
                                        "and strides");
    return FERRY_OK;
}

ferry_status ferry__ipc_get_handles(const char *json,
                                    const ferry_param_meta *params,
                                    size_t count,
                                    ferry__ipc_handle **out_handles)
{
    ferry__ipc_handle *handles;
    ferry_status status = FERRY_OK;
    json_t *list;

    FERRY_TRY(ferry__json_parse("field handles", json, strlen(json), &list));
    if (!json_is_array(list)) {
        json_decref(list);
        return ferry_fail(FERRY_EINVAL, "field handles: must be a list");
    }
    if (json_array_size(list) != count) {
        status = ferry_fail(FERRY_EINVAL,
                            "field handles: should be of the same size as "
                            "names: got %zu and %zu",
                            json_array_size(list), count);
        json_decref(list);
        return status;
    }
    handles = ferry__alloc_array(count, sizeof(*handles));
    if (!handles)
        status = FERRY_ENOMEM;
    for (size_t i = 0; status >= 0 && i < count; i++)
        status = get_handle(json_array_get(list, i), &params[i], &handles[i]);
    json_decref(list);
    if (status < 0)
        ferry__free(handles);
    else
        *out_handles = handles;
    return status;
}

uint64_t ferry__ipc_handles_digest(const ferry__ipc_handle *handles,
                                   const ferry_param_meta *params, size_t count)
{
    uint64_t digest = count;

    for (size_t i = 0; i < count; i++) {
        const ferry__ipc_handle *h = &handles[i];
        uint64_t words[5 + FERRY_MAX_DIMS] = {digest, h->kind, h->strided,
                                              h->id, h->offset};

        for (int32_t d = 0; h->strided && d < params[i].ndim; d++)
            words[5 + d] = (uint64_t)h->stride[d];
        digest = ferry__xxh3(words, sizeof(words));
    }
    return digest;
}

static int64_t numel_of(const ferry_param_meta *param)
{
    int64_t n = 1;

    for (int32_t d = 0; d < param->ndim; d++)
        n *= param->shape[d];
    return n;
}

/* Lowest and highest element that the view touches, from [0,0,…]. */
static bool extent_of(const ferry__ipc_handle *h, const ferry_param_meta *param,
                      int64_t *out_low, int64_t *out_high)
{
    int64_t low = 0, high = numel_of(param) - 1, span;

    if (h->strided) {
        high = 0;
        for (int32_t d = 0; d < param->ndim; d++) {
            if (!ferry__mul64(param->shape[d] - 1, h->stride[d], &span))
                return false;
            if (span < 0 ? low < INT64_MIN / 2 - span
                         : high > INT64_MAX / 2 - span)
                return false;
            if (span < 0)
                low += span;
            else
                high += span;
        }
    }
    *out_low = low;
    *out_high = high;
    return true;
}

ferry_status ferry__ipc_handle_check(const ferry__ipc_handle *handle,
                                     const ferry_param_meta *param,
                                     uint64_t size_bytes)
{
    int64_t elem = (int64_t)ferry_dtype_bytes(param->dtype);
    int64_t low, high, below, above;
    bool inside;

    if (numel_of(param) == 0)
        return FERRY_OK;
    if (handle->offset % (uint64_t)elem != 0)
        return ferry_fail(FERRY_EINVAL,
                          "field handles: parameter %s: offset %llu is no "
                          "multiple of %lld",
                          param->name, (unsigned long long)handle->offset,
                          (long long)elem);
    inside = handle->offset <= INT64_MAX && size_bytes <= INT64_MAX &&
             extent_of(handle, param, &low, &high) &&
             ferry__mul64(low, elem, &below) && high < INT64_MAX &&
             ferry__mul64(high + 1, elem, &above) &&
             (int64_t)handle->offset >= -below &&
             above <= (int64_t)size_bytes &&
             (int64_t)handle->offset <= (int64_t)size_bytes - above;
    if (!inside)
        return ferry_fail(FERRY_EINVAL,
                          "field handles: parameter %s at offset %llu "
                          "reaches outside the %llu bytes of %s %llu",
                          param->name, (unsigned long long)handle->offset,
                          (unsigned long long)size_bytes,
                          handle->kind == FERRY__IPC_CMA ? "range" : "segment",
                          (unsigned long long)handle->id);
    return FERRY_OK;
}

void ferry__ipc_handle_tensor(const ferry__ipc_handle *handle,
                              const ferry_param_meta *param, void *base,
                              ferry_tensor *out)
{
    int64_t stride = 1;

    memset(out, 0, sizeof(*out));
    out->data = (char *)base + handle->offset;
    out->name = param->name;
    out->dtype = param->dtype;
    out->ndim = param->ndim;
    for (int32_t d = param->ndim - 1; d >= 0; d--) {
        out->shape[d] = param->shape[d];
        out->stride[d] = handle->strided ? handle->stride[d] : stride;
        stride *= param->shape[d];
    }
}
