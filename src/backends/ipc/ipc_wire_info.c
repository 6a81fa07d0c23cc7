/* SPDX-License-Identifier: Apache-2.0 */
/* The dicts of the two calls as tables. vLLM's own fields are known by name:
 * `packed` is taken; the handle fields of device tensors are refused in words,
 * the pickled one after it was read where the operator allows that (C6).
 * Invariant: every field that the wire depends on is in the init info. */
#include "backends/ipc/ipc_wire.h"

#include "backends/ipc/ipc_wire_pickle.h"
#include "base/config.h"
#include "base/json.h"

#include <stdio.h>
#include <string.h>

/* vLLM's own switch. */
#define ALLOW_PICKLES "VLLM_ALLOW_INSECURE_SERIALIZATION"
#define HOST_KEY      "host memory" /* what this worker's weights lie in */

static const ferry_field init_fields[] = {
    {"packed", FERRY_FIELD_BOOL, 0, offsetof(ferry__ipc_init_info, packed),
     "false", 0, 0},
    {"packed_buffer_size_bytes", FERRY_FIELD_U64, 0,
     offsetof(ferry__ipc_init_info, packed_buffer_size_bytes), "1073741824", 1,
     INT64_MAX},
    {"packed_num_buffers", FERRY_FIELD_I32, 0,
     offsetof(ferry__ipc_init_info, packed_num_buffers), "2", 1, 64},
    {"transport", FERRY_FIELD_STR, 0, offsetof(ferry__ipc_init_info, transport),
     NULL, 0, 0},
    {"protocol_version", FERRY_FIELD_I32, 0,
     offsetof(ferry__ipc_init_info, protocol_version), "0", 0, 0},
    {"socket", FERRY_FIELD_STR, 0, offsetof(ferry__ipc_init_info, socket), NULL,
     0, 0},
    {"secret", FERRY_FIELD_STR, FERRY_FIELD_SECRET,
     offsetof(ferry__ipc_init_info, secret), NULL, 0, 0},
    {"deadline_ms", FERRY_FIELD_I64, 0,
     offsetof(ferry__ipc_init_info, deadline_ms), "0", 0, INT64_MAX},
    {"no_progress_ms", FERRY_FIELD_I64, 0,
     offsetof(ferry__ipc_init_info, no_progress_ms), "0", 0, INT64_MAX},
    {"digest", FERRY_FIELD_BOOL, 0, offsetof(ferry__ipc_init_info, digest),
     "false", 0, 0},
};

static ferry_status check_init(const void *arg)
{
    const ferry__ipc_init_info *info = arg;

    if (info->transport && info->socket == NULL)
        return ferry_fail(FERRY_EINVAL,
                          "IPCWeightTransferInitInfo: field socket: missing "
                          "beside transport");
    if (info->socket && (info->transport == NULL || info->secret == NULL))
        return ferry_fail(FERRY_EINVAL,
                          "IPCWeightTransferInitInfo: field %s: missing "
                          "beside socket",
                          info->transport ? "secret" : "transport");
    return FERRY_OK;
}

const ferry_info_type ferry__ipc_init_type = {
    sizeof(ferry_info_type),
    "IPCWeightTransferInitInfo",
    sizeof(ferry__ipc_init_info),
    init_fields,
    sizeof(init_fields) / sizeof(init_fields[0]),
    check_init,
};

static const ferry_field update_fields[] = {
    {"names", FERRY_FIELD_STRS, FERRY_FIELD_REQUIRED,
     offsetof(ferry__ipc_update_info, names), NULL, 0, 0},
    {"dtype_names", FERRY_FIELD_STRS,
     FERRY_FIELD_REQUIRED | FERRY_FIELD_PER_NAME,
     offsetof(ferry__ipc_update_info, dtype_names), NULL, 0, 0},
    {"shapes", FERRY_FIELD_SHAPES, FERRY_FIELD_REQUIRED | FERRY_FIELD_PER_NAME,
     offsetof(ferry__ipc_update_info, shapes), NULL, 0, 0},
    {"handles", FERRY_FIELD_JSON, 0, offsetof(ferry__ipc_update_info, handles),
     NULL, 0, 0},
    {"update", FERRY_FIELD_U64, 0, offsetof(ferry__ipc_update_info, update),
     "0", 0, 0},
    {"ipc_handles", FERRY_FIELD_JSON, 0,
     offsetof(ferry__ipc_update_info, ipc_handles), NULL, 0, 0},
    {"ipc_handles_pickled", FERRY_FIELD_JSON, 0,
     offsetof(ferry__ipc_update_info, ipc_handles_pickled), NULL, 0, 0},
    {"tensor_sizes", FERRY_FIELD_JSON, 0,
     offsetof(ferry__ipc_update_info, tensor_sizes), NULL, 0, 0},
};

/* Whether the handle of a parameter is of what the update declares. */
static ferry_status check_handle(const ferry__ipc_update_info *info, size_t i,
                                 const ferry__cuda_handle *handle)
{
    const ferry_shape *shape = &info->shapes.items[i];
    bool same =
        handle->ndim == shape->ndim && strcmp(ferry_dtype_name(handle->dtype),
                                              info->dtype_names.items[i]) == 0;

    for (int32_t d = 0; same && d < shape->ndim; d++)
        same = handle->shape[d] == shape->dims[d];
    return same ? FERRY_OK
                : ferry_fail(FERRY_EMISMATCH,
                             "parameter %s: its handle has another dtype or "
                             "shape than is declared",
                             info->names.items[i]);
}

static ferry_status check_handles(const ferry__ipc_update_info *info,
                                  const ferry__cuda_handles *handles)
{
    const ferry__cuda_handle *found;

    if (!handles->packed && handles->n_entries != info->names.count)
        return ferry_fail(FERRY_EINVAL,
                          "`ipc_handles` should be of the same size as "
                          "`names`: got %zu and %zu",
                          handles->n_entries, info->names.count);
    for (size_t i = 0; i < handles->n_entries; i++) {
        for (size_t k = handles->first[i];
             !handles->packed && k < handles->first[i + 1]; k++)
            FERRY_TRY(check_handle(info, i, &handles->items[k]));
        FERRY_TRY(ferry__cuda_handles_find(handles, i, HOST_KEY, &found));
    }
    return FERRY_OK;
}

/* Prefixes the last error with the field's name. */
static ferry_status of_field(ferry_status st)
{
    char line[900];

    snprintf(line, sizeof(line), "%s", ferry_last_error());
    return ferry_fail(st, "field ipc_handles_pickled: %s%s", line,
                      st == FERRY_EMISMATCH ? "; device handles need a CUDA "
                                              "device"
                                            : "");
}

static ferry_status read_pickled(const ferry__ipc_update_info *info)
{
    ferry__cuda_handles handles;
    const char *text = info->ipc_handles_pickled;
    json_t *value = NULL;
    ferry_status st;

    FERRY_TRY(
        ferry__json_parse("ipc_handles_pickled", text, strlen(text), &value));
    if (!json_is_string(value)) {
        json_decref(value);
        return ferry_fail(FERRY_EINVAL, "must be a text");
    }
    st = ferry__cuda_handles_decode(json_string_value(value),
                                    json_string_length(value), &handles);
    json_decref(value);
    FERRY_TRY(st);
    st = check_handles(info, &handles);
    ferry__cuda_handles_free(&handles);
    return st;
}

/* O-51: unread unless the operator allows it; what is read is never run. */
static ferry_status check_pickled(const ferry__ipc_update_info *info)
{
    const char *allowed = ferry__config_foreign(ALLOW_PICKLES);
    ferry_status st;

    if (info->ipc_handles)
        return ferry_fail(FERRY_EINVAL,
                          "field ipc_handles: Cannot specify both "
                          "`ipc_handles` and `ipc_handles_pickled`");
    if (allowed == NULL || strcmp(allowed, "1") != 0)
        return ferry_fail(FERRY_ENOTSUP,
                          "Refusing to deserialize `ipc_handles_pickled` "
                          "without " ALLOW_PICKLES "=1; a Ferry trainer sends "
                          "handles");
    st = read_pickled(info);
    return st < 0 ? of_field(st) : FERRY_OK;
}

static ferry_status check_update(const void *arg)
{
    const ferry__ipc_update_info *info = arg;

    if (info->ipc_handles_pickled)
        return check_pickled(info);
    if (info->ipc_handles || info->tensor_sizes)
        return ferry_fail(FERRY_ENOTSUP,
                          "field %s: device handles are not supported by "
                          "this worker; a Ferry trainer sends handles",
                          info->ipc_handles ? "ipc_handles" : "tensor_sizes");
    if (info->handles == NULL && info->names.count > 0)
        return ferry_fail(FERRY_EINVAL,
                          "IPCWeightTransferUpdateInfo: field handles: "
                          "missing");
    return FERRY_OK;
}

const ferry_info_type ferry__ipc_update_type = {
    sizeof(ferry_info_type),
    "IPCWeightTransferUpdateInfo",
    sizeof(ferry__ipc_update_info),
    update_fields,
    sizeof(update_fields) / sizeof(update_fields[0]),
    check_update,
};
