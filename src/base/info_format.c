/* SPDX-License-Identifier: Apache-2.0 */
/* Info structs described by tables: a typed struct becomes a JSON object.
 * Invariant: what ferry_info_format writes, ferry_info_parse reads back to
 * an equal struct. */
#include "base/log.h"
#include "base/json.h"

#include "base/str.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

static void write_comma(ferry__str *s, size_t i)
{
    if (i > 0)
        ferry__str_append_n(s, ",", 1);
}

static void write_strs(ferry__str *s, const ferry_strs *list)
{
    ferry__str_append(s, "[");
    for (size_t i = 0; i < list->count; i++) {
        write_comma(s, i);
        ferry__str_json(s, list->items[i]);
    }
    ferry__str_append(s, "]");
}

static void write_i64s(ferry__str *s, const int64_t *items, size_t count)
{
    ferry__str_append(s, "[");
    for (size_t i = 0; i < count; i++) {
        write_comma(s, i);
        ferry__str_printf(s, "%" PRId64, items[i]);
    }
    ferry__str_append(s, "]");
}

static void write_shapes(ferry__str *s, const ferry_shapes *list)
{
    ferry__str_append(s, "[");
    for (size_t i = 0; i < list->count; i++) {
        write_comma(s, i);
        write_i64s(s, list->items[i].dims, (size_t)list->items[i].ndim);
    }
    ferry__str_append(s, "]");
}

/* printf would write the decimal point of the program's locale. */
static ferry_status write_f64(ferry__str *s, const char *name, double value)
{
    json_t *real;
    char text[64];
    size_t n;

    if (!isfinite(value))
        return ferry_fail(FERRY_EINVAL, "field '%s' must be finite", name);
    real = json_real(value);
    n = real ? json_dumpb(real, text, sizeof(text), JSON_ENCODE_ANY) : 0;
    json_decref(real);
    if (n == 0 || n > sizeof(text))
        return ferry_fail(FERRY_ENOMEM, "out of memory: field '%s'", name);
    ferry__str_append_n(s, text, n);
    return FERRY_OK;
}

static ferry_status write_u64(ferry__str *s, const char *name, uint64_t value)
{
    if (value > INT64_MAX)
        return ferry_fail(FERRY_EOVERFLOW,
                          "field '%s' must be at most %" PRId64
                          ", got %" PRIu64,
                          name, INT64_MAX, value);
    ferry__str_printf(s, "%" PRIu64, value);
    return FERRY_OK;
}

/* Text that is no JSON would break the object around it. */
static ferry_status write_json(ferry__str *s, const char *name,
                               const char *text)
{
    json_t *value;

    FERRY_TRY(ferry__json_parse(name, text, strlen(text), &value));
    json_decref(value);
    ferry__str_append(s, text);
    return FERRY_OK;
}

static ferry_status write_value(ferry__str *s, const ferry_field *f,
                                const void *at)
{
    switch (f->kind) {
    case FERRY_FIELD_BOOL:
        ferry__str_append(s, *(const uint8_t *)at ? "true" : "false");
        return FERRY_OK;
    case FERRY_FIELD_I32:
        ferry__str_printf(s, "%" PRId32, *(const int32_t *)at);
        return FERRY_OK;
    case FERRY_FIELD_I64:
        ferry__str_printf(s, "%" PRId64, *(const int64_t *)at);
        return FERRY_OK;
    case FERRY_FIELD_U64:
        return write_u64(s, f->name, *(const uint64_t *)at);
    case FERRY_FIELD_F64:
        return write_f64(s, f->name, *(const double *)at);
    case FERRY_FIELD_STR:
        ferry__str_json(s, *(const char *const *)at);
        return FERRY_OK;
    case FERRY_FIELD_STRS:
        write_strs(s, at);
        return FERRY_OK;
    case FERRY_FIELD_I64S: {
        const ferry_i64s *list = at;
        write_i64s(s, list->items, list->count);
        return FERRY_OK;
    }
    case FERRY_FIELD_SHAPES:
        write_shapes(s, at);
        return FERRY_OK;
    case FERRY_FIELD_JSON:
        return write_json(s, f->name, *(const char *const *)at);
    }
    return ferry_fail(FERRY_EINTERNAL, "field '%s' has kind %d", f->name,
                      (int)f->kind);
}

static bool is_absent(const ferry_field *f, const void *at)
{
    return (f->kind == FERRY_FIELD_STR || f->kind == FERRY_FIELD_JSON) &&
           !*(const char *const *)at;
}

static ferry_status write_fields(ferry__str *s, const ferry_info_type *type,
                                 const char *info)
{
    size_t n = 0;

    for (size_t i = 0; i < type->n_fields; i++) {
        const ferry_field *f = &type->fields[i];
        const void *at = info + f->offset;

        if (is_absent(f, at))
            continue;
        write_comma(s, n++);
        ferry__str_json(s, f->name);
        ferry__str_append_n(s, ":", 1);
        FERRY_TRY(write_value(s, f, at));
    }
    return FERRY_OK;
}

ferry_status ferry_info_format(const ferry_info_type *type, const void *info,
                               char **out_json)
{
    FERRY__NEED(type);
    FERRY__NEED(info);
    FERRY__NEED(out_json);
    ferry__str s = {0};
    ferry_status status;

    ferry__str_append(&s, "{");
    status = write_fields(&s, type, info);
    if (status < 0) {
        ferry__str_free(&s);
        return status;
    }
    ferry__str_append(&s, "}");
    return ferry__str_take(&s, out_json);
}
