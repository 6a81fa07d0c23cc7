/* SPDX-License-Identifier: Apache-2.0 */
/* Feeds any bytes to the info parser. What it accepts must format, parse
 * again, and format to the same text. */
#include "base/json.h"

#include "base/alloc.h"

#include <ferry/ferry.h>

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

typedef struct info {
    uint8_t flag;
    int32_t small;
    int64_t large;
    uint64_t natural;
    double real;
    const char *text;
    ferry_strs names;
    ferry_i64s sizes;
    ferry_shapes shapes;
    const char *any;
} info;

static const ferry_field fields[] = {
    {"flag", FERRY_FIELD_BOOL, 0, offsetof(info, flag), "true", 0, 0},
    {"small", FERRY_FIELD_I32, 0, offsetof(info, small), "0", -5, 500},
    {"large", FERRY_FIELD_I64, 0, offsetof(info, large), NULL, 0, 0},
    {"natural", FERRY_FIELD_U64, 0, offsetof(info, natural), "1", 0, 0},
    {"real", FERRY_FIELD_F64, 0, offsetof(info, real), NULL, 0, 0},
    {"text", FERRY_FIELD_STR, FERRY_FIELD_SECRET, offsetof(info, text), NULL, 0,
     0},
    {"names", FERRY_FIELD_STRS, 0, offsetof(info, names), "[]", 0, 0},
    {"sizes", FERRY_FIELD_I64S, FERRY_FIELD_PER_NAME, offsetof(info, sizes),
     "[]", 0, 0},
    {"shapes", FERRY_FIELD_SHAPES, FERRY_FIELD_PER_NAME, offsetof(info, shapes),
     NULL, 0, 0},
    {"any", FERRY_FIELD_JSON, 0, offsetof(info, any), NULL, 0, 0},
};

static const ferry_info_type type = {sizeof(ferry_info_type),
                                     "FuzzInfo",
                                     sizeof(info),
                                     fields,
                                     sizeof(fields) / sizeof(fields[0]),
                                     NULL};

static void must(int condition)
{
    if (!condition)
        abort();
}

static void round_trip(const void *parsed)
{
    char *first = NULL, *second = NULL;
    void *again = NULL;

    must(ferry_info_format(&type, parsed, &first) == FERRY_OK);
    must(ferry_info_parse(&type, first, &again) == FERRY_OK);
    must(ferry_info_format(&type, again, &second) == FERRY_OK);
    must(strcmp(first, second) == 0);
    ferry_free(first);
    ferry_free(second);
    ferry_info_free(again);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    json_t *value = NULL;
    void *parsed = NULL;

    if (ferry__json_parse("input", (const char *)data, size, &value) < 0) {
        must(ferry_last_error()[0] != '\0');
        return 0;
    }
    if (ferry__info_from_json(&type, value, &parsed) == FERRY_OK) {
        round_trip(parsed);
        ferry_info_free(parsed);
    }
    json_decref(value);
    return 0;
}
