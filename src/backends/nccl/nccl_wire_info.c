/* SPDX-License-Identifier: Apache-2.0 */
/* The dicts of the two calls as tables: vLLM's fields by their names, and
 * those that a Ferry trainer adds for workers that are Ferry.
 * Invariant: every field that the wire depends on is in the init info; an
 * update carries vLLM's three lists and nothing else. */
#include "backends/nccl/nccl_wire.h"

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
        return ferry__nccl_id_bytes(info->nccl_unique_id_b64, id);
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

/* ---- base64 ---- */

static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvw"
                             "xyz0123456789+/";

void ferry__nccl_id_text(const unsigned char id[FERRY__UNIQUE_ID],
                         char out[FERRY__NCCL_ID_CHARS + 1])
{
    char *at = out;

    for (size_t i = 0; i < FERRY__UNIQUE_ID; i += 3) {
        size_t n = FERRY__UNIQUE_ID - i;
        uint32_t v = (uint32_t)id[i] << 16;

        v |= n > 1 ? (uint32_t)id[i + 1] << 8 : 0;
        v |= n > 2 ? (uint32_t)id[i + 2] : 0;
        *at++ = digits[v >> 18];
        *at++ = digits[v >> 12 & 63];
        *at++ = '=';
        *at++ = '=';
        if (n > 1)
            at[-2] = digits[v >> 6 & 63];
        if (n > 2)
            at[-1] = digits[v & 63];
    }
    *at = '\0';
}

static ferry_status bad_base64(void)
{
    return ferry_fail(FERRY_EINVAL,
                      TYPE ": nccl_unique_id_b64 is not valid standard base64 "
                           "(URL-safe base64 is not accepted)");
}

/* Number of padding characters, or -1: none of standard base64. */
static int check_text(const char *text, size_t n)
{
    size_t pad = 0;

    while (pad < 2 && pad < n && text[n - 1 - pad] == '=')
        pad++;
    if (n % 4 != 0 || strspn(text, digits) != n - pad)
        return -1;
    return (int)pad;
}

ferry_status ferry__nccl_id_bytes(const char *text,
                                  unsigned char out[FERRY__UNIQUE_ID])
{
    size_t n = strlen(text), bytes;
    int pad = check_text(text, n);

    if (pad < 0)
        return bad_base64();
    bytes = n / 4 * 3 - (size_t)pad;
    if (bytes != FERRY__UNIQUE_ID)
        return ferry_fail(FERRY_EINVAL,
                          TYPE ": nccl_unique_id_b64 must decode to %d bytes, "
                               "got %zu",
                          FERRY__UNIQUE_ID, bytes);
    for (size_t i = 0, at = 0; i < n; i += 4) {
        uint32_t v = 0;

        for (size_t k = 0; k < 4; k++) {
            const char *d =
                text[i + k] == '=' ? digits : strchr(digits, text[i + k]);

            v = v << 6 | (uint32_t)(d - digits);
        }
        for (int shift = 16; shift >= 0 && at < FERRY__UNIQUE_ID; shift -= 8)
            out[at++] = (unsigned char)(v >> shift);
    }
    return FERRY_OK;
}
