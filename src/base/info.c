/* SPDX-License-Identifier: Apache-2.0 */
/* Info structs described by tables: a JSON object becomes a typed struct.
 * Layout of the group: one head, then the struct; strings and lists lie in
 * blocks that hang on the head. Invariant: nothing is handed out unless
 * every field was read and every check passed. */
#include "base/log.h"
#include "base/json.h"

#include "base/alloc.h"
#include "base/str.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define BLOCK_BYTES  ((size_t)4096)
#define SHOWN_BYTES  64
#define EXACT_DOUBLE 9007199254740992.0 /* 2^53 */
#define NEAR_NAME    2

typedef struct block {
    struct block *next;
    size_t used, size;
    _Alignas(max_align_t) char bytes[];
} block;

typedef struct head {
    block *blocks;
    _Alignas(max_align_t) char info[];
} head;

/* One field being read: for error lines and for memory. */
typedef struct reader {
    const ferry_info_type *type;
    const ferry_field *field;
    head *group;
    bool is_default; /* defaults may lie outside the range: 0 for "unset" */
} reader;

static void *take(head *group, size_t size_bytes)
{
    const size_t align = _Alignof(max_align_t);
    block *b = group->blocks;
    size_t need, room;
    void *p;

    if (!ferry__add(size_bytes, align - 1, &need))
        return NULL;
    need = need / align * align;
    if (!b || b->size - b->used < need) {
        room = need > BLOCK_BYTES ? need : BLOCK_BYTES;
        b = ferry__alloc(sizeof(block) + room);
        if (!b)
            return NULL;
        b->size = room;
        b->next = group->blocks;
        group->blocks = b;
    }
    p = b->bytes + b->used;
    b->used += need;
    return p;
}

static const char *take_text(head *group, const char *text, size_t n)
{
    char *copy = take(group, n + 1);

    if (copy) {
        memcpy(copy, text, n);
        copy[n] = '\0';
    }
    return copy;
}

void ferry_info_free(void *info)
{
    head *group;

    if (!info)
        return;
    group = (head *)(void *)((char *)info - offsetof(head, info));
    while (group->blocks) {
        block *b = group->blocks;

        group->blocks = b->next;
        ferry__free(b);
    }
    ferry__free(group);
}

static const char *shown(const reader *r, const json_t *v, char *buffer)
{
    size_t n;

    if (r->field->flags & FERRY_FIELD_SECRET)
        return "a value that is not shown";
    if (json_is_array(v))
        return "a list";
    if (json_is_object(v))
        return "an object";
    if (json_is_string(v)) {
        n = json_string_length(v);
        snprintf(buffer, SHOWN_BYTES, "\"%.*s%s\"", n > 40 ? 40 : (int)n,
                 json_string_value(v), n > 40 ? "..." : "");
        return buffer;
    }
    n = json_dumpb(v, buffer, SHOWN_BYTES - 1, JSON_ENCODE_ANY);
    buffer[n < SHOWN_BYTES ? n : SHOWN_BYTES - 1] = '\0';
    return buffer;
}

/* `item` < 0: the field itself, else one item of its list. */
static ferry_status mistyped(const reader *r, long long item,
                             const char *expected, const json_t *got)
{
    char buffer[SHOWN_BYTES], where[32] = "";

    if (item >= 0)
        snprintf(where, sizeof(where), " item %lld", item);
    return ferry_fail(FERRY_EINVAL, "%s: field '%s'%s must be %s, got %s",
                      r->type->name, r->field->name, where, expected,
                      shown(r, got, buffer));
}

static void type_range(ferry_field_kind kind, int64_t *min, int64_t *max)
{
    *min = kind == FERRY_FIELD_I32   ? INT32_MIN
           : kind == FERRY_FIELD_U64 ? 0
                                     : INT64_MIN;
    *max = kind == FERRY_FIELD_I32 ? INT32_MAX : INT64_MAX;
}

/* A field's own bounds narrow the type's and never widen them. */
static void range_of(const reader *r, int64_t *min, int64_t *max)
{
    const ferry_field *f = r->field;

    type_range(f->kind, min, max);
    if (r->is_default || (f->min == 0 && f->max == 0))
        return;
    *min = f->min > *min ? f->min : *min;
    *max = f->max < *max ? f->max : *max;
}

/* 3 and 3.0 are integers, 3.5 is none, nor is what a double cannot tell
 * from its neighbour. */
static bool integer_value(const json_t *v, int64_t *out)
{
    double d;

    if (json_is_integer(v)) {
        *out = json_integer_value(v);
        return true;
    }
    if (!json_is_real(v))
        return false;
    d = json_real_value(v);
    if (d != floor(d) || fabs(d) > EXACT_DOUBLE)
        return false;
    *out = (int64_t)d;
    return true;
}

static ferry_status read_integer(const reader *r, long long item,
                                 const json_t *v, int64_t *out)
{
    int64_t min, max, value;
    char range[80];

    if (!integer_value(v, &value))
        return mistyped(r, item, "an integer", v);
    range_of(r, &min, &max);
    if (value < min || value > max) {
        snprintf(range, sizeof(range), "an integer from %lld to %lld",
                 (long long)min, (long long)max);
        return mistyped(r, item, range, v);
    }
    *out = value;
    return FERRY_OK;
}

static ferry_status read_scalar(const reader *r, const json_t *v, void *at)
{
    int64_t i = 0;

    FERRY_TRY(read_integer(r, -1, v, &i));
    if (r->field->kind == FERRY_FIELD_I32)
        *(int32_t *)at = (int32_t)i;
    else if (r->field->kind == FERRY_FIELD_U64)
        *(uint64_t *)at = (uint64_t)i;
    else
        *(int64_t *)at = i;
    return FERRY_OK;
}

static ferry_status read_f64(const reader *r, const json_t *v, double *at)
{
    if (!json_is_number(v))
        return mistyped(r, -1, "a number", v);
    *at = json_number_value(v);
    return FERRY_OK;
}

static ferry_status read_text(const reader *r, long long item, const json_t *v,
                              const char **at)
{
    if (!json_is_string(v))
        return mistyped(r, item, "a string", v);
    *at = take_text(r->group, json_string_value(v), json_string_length(v));
    return *at ? FERRY_OK : FERRY_ENOMEM;
}

static ferry_status read_strs(const reader *r, const json_t *v, ferry_strs *at)
{
    size_t n = json_array_size(v);
    const char **items;

    if (!json_is_array(v))
        return mistyped(r, -1, "a list of strings", v);
    items = take(r->group, n * sizeof(*items));
    if (!items)
        return FERRY_ENOMEM;
    for (size_t i = 0; i < n; i++)
        FERRY_TRY(read_text(r, (long long)i, json_array_get(v, i), &items[i]));
    at->items = items;
    at->count = n;
    return FERRY_OK;
}

static ferry_status read_i64s(const reader *r, const json_t *v, ferry_i64s *at)
{
    size_t n = json_array_size(v);
    int64_t *items;

    if (!json_is_array(v))
        return mistyped(r, -1, "a list of integers", v);
    items = take(r->group, n * sizeof(*items));
    if (!items)
        return FERRY_ENOMEM;
    for (size_t i = 0; i < n; i++)
        FERRY_TRY(
            read_integer(r, (long long)i, json_array_get(v, i), &items[i]));
    at->items = items;
    at->count = n;
    return FERRY_OK;
}

static ferry_status read_shape(const reader *r, long long item, const json_t *v,
                               ferry_shape *out)
{
    static const char expected[] = "a list of integers >= 0";
    size_t ndim = json_array_size(v);

    if (!json_is_array(v))
        return mistyped(r, item, expected, v);
    if (ndim > FERRY_MAX_DIMS)
        return ferry_fail(FERRY_EINVAL,
                          "%s: field '%s' item %lld must have at most %d "
                          "dimensions, got %zu",
                          r->type->name, r->field->name, item, FERRY_MAX_DIMS,
                          ndim);
    for (size_t i = 0; i < ndim; i++) {
        const json_t *dim = json_array_get(v, i);

        if (!integer_value(dim, &out->dims[i]) || out->dims[i] < 0)
            return mistyped(r, item, expected, dim);
    }
    out->ndim = (int32_t)ndim;
    return FERRY_OK;
}

static ferry_status read_shapes(const reader *r, const json_t *v,
                                ferry_shapes *at)
{
    size_t n = json_array_size(v), size_bytes;
    ferry_shape *items;

    if (!json_is_array(v))
        return mistyped(r, -1, "a list of shapes", v);
    if (!ferry__mul(n, sizeof(*items), &size_bytes))
        return ferry_fail(FERRY_EOVERFLOW, "%zu shapes", n);
    items = take(r->group, size_bytes);
    if (!items)
        return FERRY_ENOMEM;
    for (size_t i = 0; i < n; i++)
        FERRY_TRY(read_shape(r, (long long)i, json_array_get(v, i), &items[i]));
    at->items = items;
    at->count = n;
    return FERRY_OK;
}

static ferry_status read_json(const reader *r, const json_t *v, const char **at)
{
    const size_t flags = JSON_COMPACT | JSON_ENCODE_ANY;
    size_t n = json_dumpb(v, NULL, 0, flags);
    char *text = take(r->group, n + 1);

    if (!text)
        return FERRY_ENOMEM;
    if (json_dumpb(v, text, n, flags) != n || n == 0)
        return ferry_fail(FERRY_ENOMEM, "out of memory: field '%s'",
                          r->field->name);
    *at = text;
    return FERRY_OK;
}

static ferry_status read_field(const reader *r, const json_t *v)
{
    void *at = r->group->info + r->field->offset;

    switch (r->field->kind) {
    case FERRY_FIELD_BOOL:
        if (!json_is_boolean(v))
            return mistyped(r, -1, "a boolean", v);
        *(uint8_t *)at = json_is_true(v);
        return FERRY_OK;
    case FERRY_FIELD_I32:
    case FERRY_FIELD_I64:
    case FERRY_FIELD_U64:
        return read_scalar(r, v, at);
    case FERRY_FIELD_F64:
        return read_f64(r, v, at);
    case FERRY_FIELD_STR:
        if (json_is_null(v) && !(r->field->flags & FERRY_FIELD_REQUIRED))
            return FERRY_OK;
        return read_text(r, -1, v, at);
    case FERRY_FIELD_STRS:
        return read_strs(r, v, at);
    case FERRY_FIELD_I64S:
        return read_i64s(r, v, at);
    case FERRY_FIELD_SHAPES:
        return read_shapes(r, v, at);
    case FERRY_FIELD_JSON:
        return read_json(r, v, at);
    }
    return ferry_fail(FERRY_EINTERNAL, "%s: field '%s' has kind %d",
                      r->type->name, r->field->name, (int)r->field->kind);
}

static ferry_status read_default(reader *r)
{
    const char *text = r->field->default_json;
    json_t *v;
    ferry_status status;

    if (!text)
        return FERRY_OK;
    FERRY_TRY(ferry__json_parse(r->field->name, text, strlen(text), &v));
    r->is_default = true;
    status = read_field(r, v);
    r->is_default = false;
    json_decref(v);
    return status;
}

static ferry_status unexpected(const ferry_info_type *type, const char *key)
{
    const char *best = NULL;
    size_t least = NEAR_NAME + 1;

    for (size_t i = 0; i < type->n_fields; i++) {
        size_t d = ferry__edit_distance(key, type->fields[i].name, NEAR_NAME);

        if (d < least) {
            least = d;
            best = type->fields[i].name;
        }
    }
    if (best)
        return ferry_fail(FERRY_EINVAL,
                          "%s: unexpected field '%.120s' (near '%s')",
                          type->name, key, best);
    return ferry_fail(FERRY_EINVAL, "%s: unexpected field '%.120s'", type->name,
                      key);
}

static ferry_status check_keys(const ferry_info_type *type,
                               const json_t *object)
{
    void *it = json_object_iter((json_t *)(uintptr_t)object);

    for (; it; it = json_object_iter_next((json_t *)(uintptr_t)object, it)) {
        const char *key = json_object_iter_key(it);
        size_t i = 0;

        while (i < type->n_fields && strcmp(type->fields[i].name, key) != 0)
            i++;
        if (i == type->n_fields)
            return unexpected(type, key);
    }
    return FERRY_OK;
}

static size_t list_count(const ferry_field *f, const char *info)
{
    const void *at = info + f->offset;

    if (f->kind == FERRY_FIELD_STRS)
        return ((const ferry_strs *)at)->count;
    if (f->kind == FERRY_FIELD_I64S)
        return ((const ferry_i64s *)at)->count;
    if (f->kind == FERRY_FIELD_SHAPES)
        return ((const ferry_shapes *)at)->count;
    return 0;
}

static ferry_status check_lengths(const ferry_info_type *type, const char *info)
{
    const ferry_field *names = NULL;
    size_t n_names;

    for (size_t i = 0; i < type->n_fields; i++) {
        if (strcmp(type->fields[i].name, "names") == 0)
            names = &type->fields[i];
    }
    if (!names)
        return FERRY_OK;
    n_names = list_count(names, info);
    for (size_t i = 0; i < type->n_fields; i++) {
        const ferry_field *f = &type->fields[i];

        if ((f->flags & FERRY_FIELD_PER_NAME) && list_count(f, info) != n_names)
            return ferry_fail(FERRY_EINVAL,
                              "%s: `%s` should be of the same size as "
                              "`names`: got %zu and %zu",
                              type->name, f->name, list_count(f, info),
                              n_names);
    }
    return FERRY_OK;
}

static ferry_status fill(const ferry_info_type *type, const json_t *object,
                         head *group)
{
    for (size_t i = 0; i < type->n_fields; i++) {
        reader r = {type, &type->fields[i], group, false};
        const json_t *v = json_object_get(object, r.field->name);

        if (v)
            FERRY_TRY(read_field(&r, v));
        else if (r.field->flags & FERRY_FIELD_REQUIRED)
            return ferry_fail(FERRY_EINVAL, "%s: missing required field '%s'",
                              type->name, r.field->name);
        else
            FERRY_TRY(read_default(&r));
    }
    FERRY_TRY(check_lengths(type, group->info));
    return type->check ? type->check(group->info) : FERRY_OK;
}

ferry_status ferry__info_from_json(const ferry_info_type *type,
                                   const json_t *object, void **out_info)
{
    ferry_status status;
    head *group;

    if (!json_is_object(object))
        return ferry_fail(FERRY_EINVAL, "%s: must be an object, got %s",
                          type->name,
                          json_is_array(object)    ? "a list"
                          : json_is_string(object) ? "a string"
                          : json_is_number(object) ? "a number"
                          : json_is_null(object)   ? "null"
                                                   : "a boolean");
    FERRY_TRY(check_keys(type, object));
    group = ferry__alloc(sizeof(*group) + type->struct_size);
    if (!group)
        return FERRY_ENOMEM;
    status = fill(type, object, group);
    if (status < 0) {
        ferry_info_free(group->info);
        return status;
    }
    *out_info = group->info;
    return FERRY_OK;
}

ferry_status ferry_info_parse(const ferry_info_type *type, const char *json,
                              void **out_info)
{
    FERRY__NEED(type);
    FERRY__NEED(out_info);
    ferry_status status;
    json_t *object;

    if (!json)
        return ferry_fail(FERRY_EINVAL, "%s: must be an object, got no text",
                          type->name);
    FERRY_TRY(ferry__json_parse(type->name, json, strlen(json), &object));
    status = ferry__info_from_json(type, object, out_info);
    json_decref(object);
    return status;
}
