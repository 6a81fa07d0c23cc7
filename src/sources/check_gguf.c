/* SPDX-License-Identifier: Apache-2.0 */
/* Walks the metadata rows of a GGUF file.
 * 1. "GGUF", u32 version (2 or 3), u64 tensors, u64 rows; little-endian.
 * 2. A row: string key, u32 type, value. A string: u64 length, bytes.
 * 3. An array value: u32 type, u64 count, the elements; no arrays within.
 * Invariant: nothing is read past the end, and the walk is linear in it. */
#include "sources/check_gguf.h"

#include <inttypes.h>
#include <stdbool.h>
#include <string.h>

enum { TYPE_U32 = 4, TYPE_STRING = 8, TYPE_ARRAY = 9, TYPE_COUNT = 13 };

#define ALIGNMENT_KEY "general.alignment"

/* Bytes of a scalar by type; 0 where the length is inside the value. */
static const unsigned char TYPE_BYTES[TYPE_COUNT] = {1, 1, 2, 2, 4, 4, 4,
                                                     1, 0, 0, 8, 8, 8};

typedef struct reader {
    const char *path;
    const unsigned char *at;
    size_t left;
} reader;

static ferry_status too_short(const reader *r, const char *what)
{
    return ferry_fail(FERRY_EINVAL, "file %s: ends inside its %s", r->path,
                      what);
}

static ferry_status read_bytes(reader *r, const char *what, uint64_t n,
                               const unsigned char **out)
{
    if (n > r->left)
        return too_short(r, what);
    *out = r->at;
    r->at += n;
    r->left -= (size_t)n;
    return FERRY_OK;
}

static ferry_status read_number(reader *r, const char *what, int n_bytes,
                                uint64_t *out)
{
    const unsigned char *bytes;
    uint64_t value = 0;

    FERRY_TRY(read_bytes(r, what, (uint64_t)n_bytes, &bytes));
    for (int i = n_bytes; i-- > 0;)
        value = value << 8 | bytes[i];
    *out = value;
    return FERRY_OK;
}

static ferry_status read_string(reader *r, const char *what,
                                const unsigned char **out, size_t *out_length)
{
    uint64_t length;

    FERRY_TRY(read_number(r, what, 8, &length));
    FERRY_TRY(read_bytes(r, what, length, out));
    *out_length = (size_t)length;
    return FERRY_OK;
}

static ferry_status skip_array(reader *r)
{
    uint64_t type, count;
    const unsigned char *bytes;
    size_t length;

    FERRY_TRY(read_number(r, "metadata", 4, &type));
    FERRY_TRY(read_number(r, "metadata", 8, &count));
    if (type >= TYPE_COUNT || type == TYPE_ARRAY)
        return ferry_fail(FERRY_EINVAL,
                          "file %s: metadata array of elements "
                          "of type %" PRIu64,
                          r->path, type);
    if (type != TYPE_STRING) {
        if (count > r->left / TYPE_BYTES[type])
            return too_short(r, "metadata");
        return read_bytes(r, "metadata", count * TYPE_BYTES[type], &bytes);
    }
    for (uint64_t i = 0; i < count; i++)
        FERRY_TRY(read_string(r, "metadata", &bytes, &length));
    return FERRY_OK;
}

static ferry_status skip_value(reader *r, uint64_t type)
{
    const unsigned char *bytes;
    size_t length;

    if (type >= TYPE_COUNT)
        return ferry_fail(FERRY_EINVAL,
                          "file %s: metadata of unknown type %" PRIu64, r->path,
                          type);
    if (type == TYPE_ARRAY)
        return skip_array(r);
    if (type == TYPE_STRING)
        return read_string(r, "metadata", &bytes, &length);
    return read_bytes(r, "metadata", TYPE_BYTES[type], &bytes);
}

static ferry_status check_alignment(reader r, uint64_t type)
{
    uint64_t value;

    if (type != TYPE_U32)
        return ferry_fail(FERRY_EINVAL,
                          "file %s: %s has type %" PRIu64 ", want %d (u32)",
                          r.path, ALIGNMENT_KEY, type, TYPE_U32);
    FERRY_TRY(read_number(&r, "metadata", 4, &value));
    if (value == 0 || (value & (value - 1)) != 0)
        return ferry_fail(FERRY_EINVAL,
                          "file %s: %s is %" PRIu64 ", want a power of two",
                          r.path, ALIGNMENT_KEY, value);
    return FERRY_OK;
}

static ferry_status check_row(reader *r)
{
    const unsigned char *key;
    size_t length;
    uint64_t type;

    FERRY_TRY(read_string(r, "metadata", &key, &length));
    if (memchr(key, '\0', length))
        return ferry_fail(FERRY_EINVAL,
                          "file %s: a metadata key has a zero "
                          "byte",
                          r->path);
    FERRY_TRY(read_number(r, "metadata", 4, &type));
    if (length == strlen(ALIGNMENT_KEY) &&
        memcmp(key, ALIGNMENT_KEY, length) == 0)
        FERRY_TRY(check_alignment(*r, type));
    return skip_value(r, type);
}

ferry_status ferry__gguf_check(const char *path, const void *bytes,
                               size_t size_bytes)
{
    reader r = {path, bytes, size_bytes};
    uint64_t version, n_tensors, n_rows;
    const unsigned char *magic;

    FERRY_TRY(read_bytes(&r, "header", 4, &magic));
    if (memcmp(magic, "GGUF", 4) != 0)
        return ferry_fail(FERRY_EINVAL, "file %s: does not begin with GGUF",
                          path);
    FERRY_TRY(read_number(&r, "header", 4, &version));
    if (version != 2 && version != 3)
        return ferry_fail(FERRY_EINVAL,
                          "file %s: GGUF version %" PRIu64
                          ", want 2 or 3, little-endian",
                          path, version);
    FERRY_TRY(read_number(&r, "header", 8, &n_tensors));
    FERRY_TRY(read_number(&r, "header", 8, &n_rows));
    /* Each takes bytes of the file, which bounds what a reader reserves. */
    if (n_rows > r.left / 13)
        return too_short(&r, "metadata");
    for (uint64_t i = 0; i < n_rows; i++)
        FERRY_TRY(check_row(&r));
    if (n_tensors > r.left / 24)
        return too_short(&r, "list of tensors");
    return FERRY_OK;
}
