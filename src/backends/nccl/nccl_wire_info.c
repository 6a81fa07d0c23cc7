/* SPDX-License-Identifier: Apache-2.0 */
/* The dicts of the two calls as tables: vLLM's fields by their names, and
 * those that a Ferry trainer adds for workers that are Ferry.
 * Invariant: every field that the wire depends on is in the init info; an
 * update carries vLLM's three lists and nothing else. */
#include "backends/nccl/nccl_wire.h"

#include "base/log.h"
#include "comm/unique_id.h"

#include <string.h>

#define TYPE "NCCLWeightTransferInitInfo"

static const ferry_field init_fields[] = {
    {"master_address", FERRY_FIELD_STR, 0,
     offsetof(ferry__nccl_init_info, master_address), NULL, 0, 0},
    {"master_port", FERRY_FIELD_I32, 0,
     offsetof(ferry__nccl_init_info, master_port), "-1", 1, 65535},
    {"rank_offset", FERRY_FIELD_I32, FERRY_FIELD_REQUIRED,
     offsetof(ferry__nccl_init_info, rank_offset), NULL, 0, INT32_MAX},
    {"world_size", FERRY_FIELD_I32, FERRY_FIELD_REQUIRED,
     offsetof(ferry__nccl_init_info, world_size), NULL, 1, INT32_MAX},
    {"nccl_unique_id_b64", FERRY_FIELD_STR, FERRY_FIELD_SECRET,
     offsetof(ferry__nccl_init_info, nccl_unique_id_b64), NULL, 0, 0},
    {"packed", FERRY_FIELD_BOOL, 0, offsetof(ferry__nccl_init_info, packed),
     "false", 0, 0},
    {"packed_buffer_size_bytes", FERRY_FIELD_U64, 0,
     offsetof(ferry__nccl_init_info, packed_buffer_size_bytes), "1073741824", 1,
     INT64_MAX},
    {"packed_num_buffers", FERRY_FIELD_I32, 0,
     offsetof(ferry__nccl_init_info, packed_num_buffers), "2", 1, 64},
    {"transport", FERRY_FIELD_STR, 0,
     offsetof(ferry__nccl_init_info, transport), NULL, 0, 0},
    {"protocol_version", FERRY_FIELD_I32, 0,
     offsetof(ferry__nccl_init_info, protocol_version), "0", 0, 0},
    {"provider", FERRY_FIELD_STR, 0, offsetof(ferry__nccl_init_info, provider),
     NULL, 0, 0},
    {"secret", FERRY_FIELD_STR, FERRY_FIELD_SECRET,
     offsetof(ferry__nccl_init_info, secret), NULL, 0, 0},
    {"generation", FERRY_FIELD_U64, 0,
     offsetof(ferry__nccl_init_info, generation), "0", 0, 0},
    {"digest", FERRY_FIELD_BOOL, 0, offsetof(ferry__nccl_init_info, digest),
     "false", 0, 0},
    {"deadline_ms", FERRY_FIELD_I64, 0,
     offsetof(ferry__nccl_init_info, deadline_ms), "0", 0, INT64_MAX},
    {"no_progress_ms", FERRY_FIELD_I64, 0,
     offsetof(ferry__nccl_init_info, no_progress_ms), "0", 0, INT64_MAX},
};

static bool given(const char *text)
{
    return text && text[0] != '\0';
}

static ferry_status check_ferry(const ferry__nccl_init_info *info)
{
    const char *missing = !given(info->master_address) ? "master_address"
                          : info->master_port < 0      ? "master_port"
                          : !given(info->provider)     ? "provider"
                          : !given(info->secret)       ? "secret"
                          : info->generation == 0      ? "generation"
                                                       : NULL;

    if (missing)
        return ferry_fail(FERRY_EINVAL,
                          TYPE ": field %s: missing beside transport", missing);
    if (strlen(info->secret) > FERRY__NCCL_SECRET_CHARS)
        return ferry_fail(FERRY_EINVAL,
                          TYPE ": field secret: %zu characters, at most %d",
                          strlen(info->secret), FERRY__NCCL_SECRET_CHARS);
    return FERRY_OK;
}

/* Exactly one way to meet, in vLLM's own words. */
static ferry_status check_init(const void *arg)
{
    const ferry__nccl_init_info *info = arg;
    bool address = given(info->master_address), port = info->master_port >= 0;
    unsigned char id[FERRY__UNIQUE_ID];

    if (given(info->transport))
        return check_ferry(info);
    if (given(info->nccl_unique_id_b64)) {
        if (address || port)
            return ferry_fail(FERRY_EINVAL, TYPE
                              ": pass nccl_unique_id_b64 OR master_address/"
                              "master_port, not both");
        if (ferry__id_from_base64(info->nccl_unique_id_b64, id) < 0)
            return ferry__fail_prefix(FERRY_EINVAL, TYPE);
        return FERRY_OK;
    }
    if (address && port)
        return FERRY_OK;
    if (port)
        return ferry_fail(FERRY_EINVAL,
                          TYPE ": need nccl_unique_id_b64, or both "
                               "master_address and master_port (got "
                               "master_address=None, master_port=%d)",
                          info->master_port);
    return ferry_fail(FERRY_EINVAL,
                      TYPE ": need nccl_unique_id_b64, or both master_address "
                           "and master_port (got master_address=%s%s%s, "
                           "master_port=None)",
                      address ? "'" : "",
                      address ? info->master_address : "None",
                      address ? "'" : "");
}

const ferry_info_type ferry__nccl_init_type = {
    sizeof(ferry_info_type),
    TYPE,
    sizeof(ferry__nccl_init_info),
    init_fields,
    sizeof(init_fields) / sizeof(init_fields[0]),
    check_init,
};

static const ferry_field update_fields[] = {
    {"names", FERRY_FIELD_STRS, 0, offsetof(ferry__nccl_update_info, names),
     NULL, 0, 0},
    {"dtype_names", FERRY_FIELD_STRS, FERRY_FIELD_PER_NAME,
     offsetof(ferry__nccl_update_info, dtype_names), NULL, 0, 0},
    {"shapes", FERRY_FIELD_SHAPES, FERRY_FIELD_PER_NAME,
     offsetof(ferry__nccl_update_info, shapes), NULL, 0, 0},
};

const ferry_info_type ferry__nccl_update_type = {
    sizeof(ferry_info_type),
    "NCCLWeightTransferUpdateInfo",
    sizeof(ferry__nccl_update_info),
    update_fields,
    sizeof(update_fields) / sizeof(update_fields[0]),
    NULL,
};
