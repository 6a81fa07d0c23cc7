/* SPDX-License-Identifier: Apache-2.0 */
/* The dicts of the two calls as tables. vLLM's own fields are known by name:
 * `packed` is taken, the handle fields of device tensors are refused in
 * words and never decoded.
 * Invariant: every field that the wire depends on is in the init info. */
#include "backends/ipc/ipc_wire.h"

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

/* O-51: refused by name, nothing decoded, whatever its size. */
static ferry_status check_update(const void *arg)
{
    const ferry__ipc_update_info *info = arg;

    if (info->ipc_handles_pickled)
        return ferry_fail(FERRY_ENOTSUP,
                          "field ipc_handles_pickled: pickled handles are "
                          "refused and were not decoded; a Ferry trainer "
                          "sends handles");
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
