/* SPDX-License-Identifier: Apache-2.0 */
/* Element types: names, aliases, sizes, and which converts to which.
 * Invariant: one table (FERRY_DTYPE_TABLE) gives names, values and sizes. */
#include "base/log.h"
#include "base/str.h"
#include "core/copy.h"
#include <ctype.h>
#include <string.h>

#define LONGEST_NAME 32

typedef struct alias {
    const char *text;
    ferry_dtype dtype;
} alias;

static const alias aliases[] = {
#define DTYPE_ALIAS(name, value, text, elems, bytes) {text, FERRY_DTYPE_##name},
    FERRY_DTYPE_TABLE(DTYPE_ALIAS)
#undef DTYPE_ALIAS
        {"f64", FERRY_DTYPE_F64},
    {"double", FERRY_DTYPE_F64},
    {"f32", FERRY_DTYPE_F32},
    {"float", FERRY_DTYPE_F32},
    {"f16", FERRY_DTYPE_F16},
    {"half", FERRY_DTYPE_F16},
    {"bf16", FERRY_DTYPE_BF16},
    {"fp8_e4m3", FERRY_DTYPE_F8_E4M3},
    {"fp8_e5m2", FERRY_DTYPE_F8_E5M2},
    {"long", FERRY_DTYPE_I64},
    {"int", FERRY_DTYPE_I32},
    {"short", FERRY_DTYPE_I16},
};

const char *ferry_dtype_name(ferry_dtype dtype)
{
    switch (dtype) {
#define DTYPE_NAME(name, value, text, elems, bytes)                            \
    case FERRY_DTYPE_##name:                                                   \
        return text;
        FERRY_DTYPE_TABLE(DTYPE_NAME)
#undef DTYPE_NAME
    case FERRY_DTYPE_NONE:
        break;
    }
    return "none";
}

size_t ferry_dtype_bytes(ferry_dtype dtype)
{
    switch (dtype) {
#define DTYPE_BYTES(name, value, text, elems, bytes)                           \
    case FERRY_DTYPE_##name:                                                   \
        return bytes;
        FERRY_DTYPE_TABLE(DTYPE_BYTES)
#undef DTYPE_BYTES
    case FERRY_DTYPE_NONE:
        break;
    }
    return 0;
}

int64_t ferry_dtype_block(ferry_dtype dtype)
{
    switch (dtype) {
#define DTYPE_BLOCK(name, value, text, elems, bytes)                           \
    case FERRY_DTYPE_##name:                                                   \
        return elems;
        FERRY_DTYPE_TABLE(DTYPE_BLOCK)
#undef DTYPE_BLOCK
    case FERRY_DTYPE_NONE:
        break;
    }
    return 0;
}

/* Lower case; false when it does not fit and so cannot be a known name. */
static bool lower(const char *name, char *out, size_t size)
{
    size_t n = strlen(name);
    if (n >= size)
        return false;
    for (size_t i = 0; i <= n; i++)
        out[i] = (char)tolower((unsigned char)name[i]);
    return true;
}

static ferry_status unknown_dtype(const char *name)
{
    static const char known[] =
#define DTYPE_LIST(name, value, text, elems, bytes) " " text
        FERRY_DTYPE_TABLE(DTYPE_LIST)
#undef DTYPE_LIST
        ;
    return ferry_fail(FERRY_EUNKNOWN, "unknown dtype \"%.64s\"; known:%s", name,
                      known);
}

ferry_status ferry_dtype_parse(const char *name, ferry_dtype *out_dtype)
{
    FERRY__NEED(out_dtype);
    char text[LONGEST_NAME];
    if (!name)
        return ferry_fail(FERRY_EINVAL, "dtype name is NULL");
    if (!lower(name, text, sizeof(text)))
        return unknown_dtype(name);
    const char *bare = text;
    if (ferry__starts_with(text, "torch."))
        bare = text + strlen("torch.");
    for (size_t i = 0; i < sizeof(aliases) / sizeof(aliases[0]); i++) {
        if (strcmp(aliases[i].text, bare) == 0) {
            *out_dtype = aliases[i].dtype;
            return FERRY_OK;
        }
    }
    return unknown_dtype(name);
}

bool ferry__dtype_is_float(ferry_dtype d)
{
    switch (d) {
    case FERRY_DTYPE_F64:
    case FERRY_DTYPE_F32:
    case FERRY_DTYPE_F16:
    case FERRY_DTYPE_BF16:
    case FERRY_DTYPE_F8_E4M3:
    case FERRY_DTYPE_F8_E5M2:
        return true;
    default:
        return false;
    }
}

bool ferry__dtype_converts(ferry_dtype from, ferry_dtype to)
{
    if (ferry_dtype_block(from) != 1)
        return false; /* unknown, or a storage type that never travels */
    if (from == to)
        return true;
    return ferry__dtype_is_float(from) &&
           (ferry__dtype_is_float(to) || to == FERRY_DTYPE_Q8_0);
}
