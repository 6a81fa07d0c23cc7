/* SPDX-License-Identifier: Apache-2.0 */
/* Parses the header of a safetensors file. Every number comes from outside:
 * nothing is multiplied or added unchecked, and no byte beyond the header is
 * touched. */
#include "sources/safetensors_format.h"

#include "base/alloc.h"
#include "base/json.h"
#include "base/log.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* One tensor of the header; the name belongs to the JSON value. */
typedef struct entry {
    ferry_param_meta meta;
    uint64_t begin, end; /* from the first data byte */
    size_t order;        /* in the header */
} entry;

static const struct {
    const char *text;
    ferry_dtype dtype;
} DTYPES[] = {
    {"F64", FERRY_DTYPE_F64},         {"F32", FERRY_DTYPE_F32},
    {"F16", FERRY_DTYPE_F16},         {"BF16", FERRY_DTYPE_BF16},
    {"F8_E4M3", FERRY_DTYPE_F8_E4M3}, {"F8_E5M2", FERRY_DTYPE_F8_E5M2},
    {"I64", FERRY_DTYPE_I64},         {"I32", FERRY_DTYPE_I32},
    {"I16", FERRY_DTYPE_I16},         {"I8", FERRY_DTYPE_I8},
    {"U64", FERRY_DTYPE_U64},         {"U32", FERRY_DTYPE_U32},
    {"U16", FERRY_DTYPE_U16},         {"U8", FERRY_DTYPE_U8},
    {"BOOL", FERRY_DTYPE_BOOL},
};

static ferry_status read_dtype(const char *path, const char *name,
                               const json_t *value, ferry_dtype *out)
{
    const char *text = json_string_value(value);

    if (!text)
        return ferry_fail(FERRY_EINVAL,
                          "file %s: parameter %s: dtype is "
                          "missing or no string",
                          path, name);
    for (size_t i = 0; i < sizeof(DTYPES) / sizeof(DTYPES[0]); i++) {
        if (strcmp(text, DTYPES[i].text) == 0) {
            *out = DTYPES[i].dtype;
            return FERRY_OK;
        }
    }
    return ferry_fail(FERRY_EINVAL,
                      "file %s: parameter %s: unknown dtype "
                      "\"%s\"",
                      path, name, text);
}

static ferry_status read_shape(const char *path, const char *name,
                               const json_t *value, ferry_param_meta *out)
{
    size_t ndim = json_array_size(value);

    if (!json_is_array(value))
        return ferry_fail(FERRY_EINVAL,
                          "file %s: parameter %s: shape is "
                          "missing or no list",
                          path, name);
    if (ndim > FERRY_MAX_DIMS)
        return ferry_fail(FERRY_EINVAL,
                          "file %s: parameter %s: %zu "
                          "dimensions, at most %d are supported",
                          path, name, ndim, FERRY_MAX_DIMS);
    for (size_t d = 0; d < ndim; d++) {
        const json_t *extent = json_array_get(value, d);

        if (!json_is_integer(extent) || json_integer_value(extent) < 0)
            return ferry_fail(FERRY_EINVAL,
                              "file %s: parameter %s: "
                              "shape[%zu] is not an integer of 0 or more",
                              path, name, d);
        out->shape[d] = json_integer_value(extent);
    }
    out->ndim = (int32_t)ndim;
    return FERRY_OK;
}

static ferry_status read_offsets(const char *path, const char *name,
                                 const json_t *value, uint64_t data_bytes,
                                 entry *out)
{
    const json_t *begin = json_array_get(value, 0);
    const json_t *end = json_array_get(value, 1);

    if (json_array_size(value) != 2 || !json_is_integer(begin) ||
        !json_is_integer(end) || json_integer_value(begin) < 0 ||
        json_integer_value(end) < 0)
        return ferry_fail(FERRY_EINVAL,
                          "file %s: parameter %s: "
                          "data_offsets is not two integers of 0 or more",
                          path, name);
    out->begin = (uint64_t)json_integer_value(begin);
    out->end = (uint64_t)json_integer_value(end);
    if (out->begin > out->end)
        return ferry_fail(FERRY_EINVAL,
                          "file %s: parameter %s: begins at "
                          "byte %" PRIu64 " and ends at byte %" PRIu64,
                          path, name, out->begin, out->end);
    if (out->end > data_bytes)
        return ferry_fail(FERRY_EINVAL,
                          "file %s: parameter %s: ends at byte "
                          "%" PRIu64 ", the file has %" PRIu64 " bytes of data",
                          path, name, out->end, data_bytes);
    return FERRY_OK;
}

static ferry_status check_bytes(const char *path, const entry *e)
{
    size_t bytes = ferry_dtype_bytes(e->meta.dtype);
    bool fits = true;

    for (int32_t d = 0; fits && d < e->meta.ndim; d++)
        fits = ferry__mul(bytes, (size_t)e->meta.shape[d], &bytes);
    if (!fits)
        return ferry_fail(FERRY_EINVAL,
                          "file %s: parameter %s: the size of "
                          "its shape does not fit",
                          path, e->meta.name);
    if (bytes != e->end - e->begin)
        return ferry_fail(FERRY_EINVAL,
                          "file %s: parameter %s: shape and "
                          "dtype need %zu bytes, data_offsets span %" PRIu64,
                          path, e->meta.name, bytes, e->end - e->begin);
    return FERRY_OK;
}

static ferry_status read_entry(const char *path, const char *name,
                               const json_t *value, uint64_t data_bytes,
                               entry *out)
{
    if (!json_is_object(value))
        return ferry_fail(FERRY_EINVAL,
                          "file %s: parameter %s: not an "
                          "object",
                          path, name);
    out->meta.name = name;
    FERRY_TRY(read_dtype(path, name, json_object_get(value, "dtype"),
                         &out->meta.dtype));
    FERRY_TRY(
        read_shape(path, name, json_object_get(value, "shape"), &out->meta));
    FERRY_TRY(read_offsets(path, name, json_object_get(value, "data_offsets"),
                           data_bytes, out));
    return check_bytes(path, out);
}

static int compare_entries(const void *left, const void *right)
{
    const entry *a = left, *b = right;

    if (a->begin != b->begin)
        return a->begin < b->begin ? -1 : 1;
    if (a->end != b->end)
        return a->end < b->end ? -1 : 1;
    return a->order < b->order ? -1 : a->order > b->order;
}

/* The tensors, sorted by place, must tile the data. */
static ferry_status check_tiling(const char *path, const entry *entries,
                                 size_t count, uint64_t data_bytes)
{
    uint64_t at = 0;

    for (size_t i = 0; i < count; i++) {
        const entry *e = &entries[i];

        if (e->begin < at)
            return ferry_fail(FERRY_EINVAL,
                              "file %s: parameter %s: begins "
                              "at byte %" PRIu64 ", inside %s, which ends at "
                              "byte %" PRIu64,
                              path, e->meta.name, e->begin,
                              entries[i - 1].meta.name, at);
        if (e->begin > at)
            return ferry_fail(FERRY_EINVAL,
                              "file %s: parameter %s: begins "
                              "at byte %" PRIu64 ", bytes from %" PRIu64
                              " belong to nothing",
                              path, e->meta.name, e->begin, at);
        at = e->end;
    }
    if (at != data_bytes)
        return ferry_fail(FERRY_EINVAL,
                          "file %s: %" PRIu64 " bytes of data, "
                          "the header declares %" PRIu64,
                          path, data_bytes, at);
    return FERRY_OK;
}

static ferry_status read_entries(const char *path, json_t *header,
                                 uint64_t data_bytes, entry *entries,
                                 size_t *out_count)
{
    size_t count = 0;
    const char *name;
    json_t *value;

    json_object_foreach(header, name, value)
    {
        if (strcmp(name, "__metadata__") == 0) {
            if (!json_is_object(value))
                return ferry_fail(FERRY_EINVAL,
                                  "file %s: __metadata__ is "
                                  "not an object",
                                  path);
            continue;
        }
        FERRY_TRY(read_entry(path, name, value, data_bytes, &entries[count]));
        entries[count].order = count;
        count++;
    }
    qsort(entries, count, sizeof(*entries), compare_entries);
    *out_count = count;
    return check_tiling(path, entries, count, data_bytes);
}

static ferry_status keep_entries(const char *path, const entry *entries,
                                 size_t count, size_t data_begin,
                                 ferry__safetensors *out)
{
    out->begins = ferry__alloc_array(count, sizeof(*out->begins));
    if (!out->begins)
        return FERRY_ENOMEM;
    for (size_t i = 0; i < count; i++) {
        ferry_status st = ferry__manifest_add(&out->params, &entries[i].meta);

        if (st < 0)
            return ferry__fail_prefix(st, "file %s", path);
        out->begins[i] = data_begin + (size_t)entries[i].begin;
    }
    return FERRY_OK;
}

static ferry_status read_header(const char *path, json_t *header,
                                size_t data_begin, size_t size_bytes,
                                ferry__safetensors *out)
{
    entry *entries;
    ferry_status st;
    size_t count;

    if (!json_is_object(header))
        return ferry_fail(FERRY_EINVAL,
                          "file %s: the header is not a JSON "
                          "object",
                          path);
    entries = ferry__alloc_array(json_object_size(header), sizeof(*entries));
    if (!entries)
        return FERRY_ENOMEM;
    st = read_entries(path, header, size_bytes - data_begin, entries, &count);
    if (st == FERRY_OK)
        st = keep_entries(path, entries, count, data_begin, out);
    ferry__free(entries);
    return st;
}

/* Item 1 of the format. */
static ferry_status header_length(const char *path, const unsigned char *bytes,
                                  size_t size_bytes, size_t *out_length)
{
    uint64_t length = 0;

    if (size_bytes < 8)
        return ferry_fail(FERRY_EINVAL,
                          "file %s: %zu bytes, too short for a "
                          "safetensors header",
                          path, size_bytes);
    for (int i = 7; i >= 0; i--)
        length = length << 8 | bytes[i];
    /* The header is an object of JSON, so this is some other file. */
    if (size_bytes > 8 && bytes[8] != '{' &&
        (length > FERRY__SAFETENSORS_HEADER_MAX || length > size_bytes - 8))
        return ferry_fail(FERRY_EINVAL,
                          "file %s: is no safetensors file: its first 8 bytes "
                          "would mean a header of %" PRIu64
                          " bytes, the file has %zu and no '{' after them",
                          path, length, size_bytes);
    if (length > FERRY__SAFETENSORS_HEADER_MAX)
        return ferry_fail(FERRY_EINVAL,
                          "file %s: header of %" PRIu64
                          " bytes, at most %u are allowed",
                          path, length, FERRY__SAFETENSORS_HEADER_MAX);
    if (length > size_bytes - 8)
        return ferry_fail(FERRY_EINVAL,
                          "file %s: header of %" PRIu64
                          " bytes, the file ends after %zu",
                          path, length, size_bytes - 8);
    *out_length = (size_t)length;
    return FERRY_OK;
}

ferry_status ferry__safetensors_parse(const char *path, const void *bytes,
                                      size_t size_bytes,
                                      ferry__safetensors *out)
{
    ferry__safetensors result = {0};
    json_t *header = NULL;
    ferry_status st;
    size_t length;

    FERRY_TRY(header_length(path, bytes, size_bytes, &length));
    st = ferry__json_parse("header", (const char *)bytes + 8, length, &header);
    if (st < 0)
        return ferry__fail_prefix(st, "file %s", path);
    st = read_header(path, header, 8 + length, size_bytes, &result);
    json_decref(header);
    if (st < 0)
        ferry__safetensors_clear(&result);
    else
        *out = result;
    return st;
}

void ferry__safetensors_clear(ferry__safetensors *s)
{
    ferry__manifest_clear(&s->params);
    ferry__free(s->begins);
    *s = (ferry__safetensors){0};
}
