/* SPDX-License-Identifier: Apache-2.0 */
/* JSON read strictly, and info structs described by tables (E2). */
#include "base/json.h"

#include "base/alloc.h"

#include <ferry/ferry.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <locale.h>
#include <math.h>

typedef struct sample {
    uint8_t packed;
    int32_t rank;
    int64_t deadline_ms;
    uint64_t buffer_size_bytes;
    double scale;
    const char *host;
    const char *token;
    ferry_strs names;
    ferry_strs dtype_names;
    ferry_shapes shapes;
    ferry_i64s sizes;
    const char *extra;
} sample;

#define AT(member) offsetof(sample, member)

static const ferry_field sample_fields[] = {
    {"packed", FERRY_FIELD_BOOL, 0, AT(packed), "true", 0, 0},
    {"rank", FERRY_FIELD_I32, FERRY_FIELD_REQUIRED, AT(rank), NULL, 0,
     INT32_MAX},
    {"deadline_ms", FERRY_FIELD_I64, 0, AT(deadline_ms), NULL, 0, 0},
    {"buffer_size_bytes", FERRY_FIELD_U64, 0, AT(buffer_size_bytes),
     "1073741824", 1, INT64_MAX},
    {"scale", FERRY_FIELD_F64, 0, AT(scale), "0.5", 0, 0},
    {"host", FERRY_FIELD_STR, 0, AT(host), NULL, 0, 0},
    {"token", FERRY_FIELD_STR, FERRY_FIELD_SECRET, AT(token), NULL, 0, 0},
    {"names", FERRY_FIELD_STRS, 0, AT(names), "[]", 0, 0},
    {"dtype_names", FERRY_FIELD_STRS, FERRY_FIELD_PER_NAME, AT(dtype_names),
     "[]", 0, 0},
    {"shapes", FERRY_FIELD_SHAPES, FERRY_FIELD_PER_NAME, AT(shapes), NULL, 0,
     0},
    {"sizes", FERRY_FIELD_I64S, FERRY_FIELD_PER_NAME, AT(sizes), NULL, 0, 99},
    {"extra", FERRY_FIELD_JSON, 0, AT(extra), NULL, 0, 0},
};

static ferry_status check_sample(const void *info)
{
    const sample *s = info;

    if (s->host && strcmp(s->host, "bad") == 0)
        return ferry_fail(FERRY_EINVAL, "SampleInfo: host 'bad'");
    return FERRY_OK;
}

static const ferry_info_type sample_type = {sizeof(ferry_info_type),
                                            "SampleInfo",
                                            sizeof(sample),
                                            sample_fields,
                                            sizeof(sample_fields) /
                                                sizeof(sample_fields[0]),
                                            check_sample};

static sample *parse(const char *json)
{
    void *info = NULL;

    assert_int_equal(ferry_info_parse(&sample_type, json, &info), FERRY_OK);
    assert_non_null(info);
    return info;
}

static void refused(const char *json, const char *line)
{
    void *info = (void *)&sample_type;

    assert_int_equal(ferry_info_parse(&sample_type, json, &info), FERRY_EINVAL);
    assert_string_equal(ferry_last_error(), line);
    assert_ptr_equal(info, &sample_type); /* outputs only on success */
}

static void defaults_fill_what_is_absent(void **state)
{
    sample *s = parse("{\"rank\": 3}");

    (void)state;
    assert_int_equal(s->packed, 1);
    assert_int_equal(s->rank, 3);
    assert_int_equal(s->deadline_ms, 0);
    assert_true(s->buffer_size_bytes == 1073741824u);
    assert_true(s->scale == 0.5);
    assert_null(s->host);
    assert_int_equal(s->names.count, 0);
    assert_int_equal(s->shapes.count, 0);
    assert_null(s->extra);
    ferry_info_free(s);
    ferry_info_free(NULL);
}

static const char whole[] =
    "{\"packed\":false,\"rank\":2147483647,"
    "\"deadline_ms\":-9223372036854775808,"
    "\"buffer_size_bytes\":9223372036854775807,\"scale\":-1.25,"
    "\"host\":\"h\\u00e4\",\"token\":\"t\",\"names\":[\"a\",\"b.c\"],"
    "\"dtype_names\":[\"bfloat16\",\"float32\"],"
    "\"shapes\":[[],[2,0,9007199254740993]],\"sizes\":[0,99],"
    "\"extra\":{\"k\":[1,null,true]}}";

static void every_kind_is_read(void **state)
{
    sample *s = parse(whole);

    (void)state;
    assert_int_equal(s->packed, 0);
    assert_int_equal(s->rank, INT32_MAX);
    assert_true(s->deadline_ms == INT64_MIN);
    assert_true(s->buffer_size_bytes == INT64_MAX);
    assert_true(s->scale == -1.25);
    assert_string_equal(s->host, "h\xC3\xA4");
    assert_int_equal(s->names.count, 2);
    assert_string_equal(s->names.items[1], "b.c");
    assert_string_equal(s->dtype_names.items[0], "bfloat16");
    assert_int_equal(s->shapes.items[0].ndim, 0);
    assert_int_equal(s->shapes.items[1].ndim, 3);
    assert_int_equal(s->shapes.items[1].dims[1], 0);
    assert_true(s->shapes.items[1].dims[2] == INT64_C(9007199254740993));
    assert_int_equal(s->sizes.items[1], 99);
    assert_string_equal(s->extra, "{\"k\":[1,null,true]}");
    ferry_info_free(s);
}

static void format_is_the_inverse_of_parse(void **state)
{
    sample *s = parse(whole), *again;
    char *text = NULL, *text2 = NULL;

    (void)state;
    /* A program's locale must not reach the numbers. */
    setlocale(LC_NUMERIC, "de_DE.UTF-8");
    assert_int_equal(ferry_info_format(&sample_type, s, &text), FERRY_OK);
    assert_non_null(strstr(text, "\"scale\":-1.25,"));
    assert_non_null(strstr(text, "\"host\":\"h\xC3\xA4\""));
    again = parse(text);
    assert_int_equal(ferry_info_format(&sample_type, again, &text2), FERRY_OK);
    setlocale(LC_NUMERIC, "C");
    assert_string_equal(text, text2);
    ferry_free(text);
    ferry_free(text2);
    ferry_info_free(again);
    ferry_info_free(s);
}

static void absent_texts_are_left_out(void **state)
{
    sample *s = parse("{\"rank\":0,\"host\":null}");
    char *text = NULL;

    (void)state;
    assert_int_equal(ferry_info_format(&sample_type, s, &text), FERRY_OK);
    assert_string_equal(text, "{\"packed\":true,\"rank\":0,\"deadline_ms\":0,"
                              "\"buffer_size_bytes\":1073741824,\"scale\":0.5,"
                              "\"names\":[],\"dtype_names\":[],\"shapes\":[],"
                              "\"sizes\":[]}");
    ferry_free(text);
    ferry_info_free(s);
}

static void what_json_cannot_hold_is_refused(void **state)
{
    sample s = {.scale = NAN};
    char *text = NULL;

    (void)state;
    assert_int_equal(ferry_info_format(&sample_type, &s, &text), FERRY_EINVAL);
    s.scale = HUGE_VAL;
    assert_int_equal(ferry_info_format(&sample_type, &s, &text), FERRY_EINVAL);
    s.scale = 0;
    s.buffer_size_bytes = UINT64_MAX;
    assert_int_equal(ferry_info_format(&sample_type, &s, &text),
                     FERRY_EOVERFLOW);
    s.buffer_size_bytes = 1;
    s.extra = "{\"a\":";
    assert_int_equal(ferry_info_format(&sample_type, &s, &text), FERRY_EINVAL);
    assert_null(text);
}

static void unknown_and_missing_fields_are_named(void **state)
{
    (void)state;
    refused("{\"rank\":0,\"bogus\":1}", "SampleInfo: unexpected field 'bogus'");
    refused("{\"bogus\":1}", "SampleInfo: unexpected field 'bogus'");
    refused("{\"rank\":0,\"pakced\":1}",
            "SampleInfo: unexpected field 'pakced' (near 'packed')");
    refused("{}", "SampleInfo: missing required field 'rank'");
}

static void mistyped_fields_are_named_with_what_came(void **state)
{
    (void)state;
    refused("{\"rank\":0,\"packed\":\"yes\"}",
            "SampleInfo: field 'packed' must be a boolean, got \"yes\"");
    refused("{\"rank\":0,\"packed\":1}",
            "SampleInfo: field 'packed' must be a boolean, got 1");
    refused("{\"rank\":true}",
            "SampleInfo: field 'rank' must be an integer, got true");
    refused("{\"rank\":\"0\"}",
            "SampleInfo: field 'rank' must be an integer, got \"0\"");
    refused("{\"rank\":null}",
            "SampleInfo: field 'rank' must be an integer, got null");
    refused("{\"rank\":0,\"host\":[1]}",
            "SampleInfo: field 'host' must be a string, got a list");
    refused("{\"rank\":0,\"scale\":{}}",
            "SampleInfo: field 'scale' must be a number, got an object");
    refused("{\"rank\":0,\"names\":\"a\"}",
            "SampleInfo: field 'names' must be a list of strings, got "
            "\"a\"");
    refused("{\"rank\":0,\"names\":[\"a\",7]}",
            "SampleInfo: field 'names' item 1 must be a string, got 7");
    refused("{\"rank\":0,\"sizes\":[1.5]}",
            "SampleInfo: field 'sizes' item 0 must be an integer, got 1.5");
    refused("{\"rank\":0,\"sizes\":{}}",
            "SampleInfo: field 'sizes' must be a list of integers, got an "
            "object");
    refused("{\"rank\":0,\"shapes\":3}",
            "SampleInfo: field 'shapes' must be a list of shapes, got 3");
    refused("{\"rank\":0,\"shapes\":[3]}",
            "SampleInfo: field 'shapes' item 0 must be a list of integers "
            ">= 0, got 3");
    refused("{\"rank\":0,\"shapes\":[[-1]]}",
            "SampleInfo: field 'shapes' item 0 must be a list of integers "
            ">= 0, got -1");
    refused("{\"rank\":0,\"shapes\":[[1,1,1,1,1,1,1,1,1]]}",
            "SampleInfo: field 'shapes' item 0 must have at most 8 "
            "dimensions, got 9");
}

static void secrets_are_not_shown(void **state)
{
    (void)state;
    refused("{\"rank\":0,\"token\":123456}",
            "SampleInfo: field 'token' must be a string, got a value that "
            "is not shown");
    refused("{\"rank\":0,\"token\":\"hush\" x}",
            "SampleInfo: line 1, column 26: '}' expected");
}

static void integers_keep_to_their_range(void **state)
{
    sample *s = parse("{\"rank\":7.0,\"deadline_ms\":1e3}");

    (void)state;
    assert_int_equal(s->rank, 7);
    assert_int_equal(s->deadline_ms, 1000);
    ferry_info_free(s);
    refused("{\"rank\":7.5}",
            "SampleInfo: field 'rank' must be an integer, got 7.5");
    refused("{\"rank\":-1}", "SampleInfo: field 'rank' must be an integer "
                             "from 0 to 2147483647, got -1");
    refused("{\"rank\":2147483648}",
            "SampleInfo: field 'rank' must be an integer from 0 to "
            "2147483647, got 2147483648");
    refused("{\"rank\":0,\"buffer_size_bytes\":0}",
            "SampleInfo: field 'buffer_size_bytes' must be an integer from "
            "1 to 9223372036854775807, got 0");
    refused("{\"rank\":0,\"sizes\":[100]}",
            "SampleInfo: field 'sizes' item 0 must be an integer from 0 to "
            "99, got 100");
    refused("{\"rank\":0,\"deadline_ms\":1e300}",
            "SampleInfo: field 'deadline_ms' must be an integer, got "
            "1.0000000000000001e300");
}

static void numbers_that_are_none_are_refused(void **state)
{
    (void)state;
    refused("{\"rank\":NaN}", "SampleInfo: line 1, column 11: invalid token");
    refused("{\"rank\":0,\"scale\":Infinity}",
            "SampleInfo: line 1, column 26: invalid token");
    refused("{\"rank\":0,\"scale\":1e400}",
            "SampleInfo: line 1, column 23: real number overflow");
    refused("{\"rank\":99999999999999999999999}",
            "SampleInfo: line 1, column 31: too big integer");
    refused("{\"rank\":-99999999999999999999999}",
            "SampleInfo: line 1, column 32: too big negative integer");
}

static void repeated_keys_are_named(void **state)
{
    (void)state;
    refused("{\"rank\":1,\"rank\":2}",
            "SampleInfo: repeated key 'rank' at line 1, column 16");
    refused("{\"rank\":1,\"extra\":{\"a\":1,\n\"a\":2}}",
            "SampleInfo: repeated key 'a' at line 2, column 3");
}

static void lists_of_unequal_length_are_refused_in_vllms_words(void **state)
{
    (void)state;
    refused("{\"rank\":0,\"names\":[\"a\",\"b\"],\"dtype_names\":[\"x\"]}",
            "SampleInfo: `dtype_names` should be of the same size as "
            "`names`: got 1 and 2");
    refused("{\"rank\":0,\"names\":[\"a\"],\"dtype_names\":[\"x\"],"
            "\"shapes\":[[1],[2]]}",
            "SampleInfo: `shapes` should be of the same size as `names`: "
            "got 2 and 1");
    refused("{\"rank\":0,\"sizes\":[1]}",
            "SampleInfo: `sizes` should be of the same size as `names`: "
            "got 1 and 0");
}

static void cross_checks_run_after_all_fields(void **state)
{
    (void)state;
    refused("{\"rank\":0,\"host\":\"bad\"}", "SampleInfo: host 'bad'");
}

static void texts_that_are_no_object_are_refused(void **state)
{
    (void)state;
    refused("[1]", "SampleInfo: must be an object, got a list");
    refused("\"x\"", "SampleInfo: must be an object, got a string");
    refused("7", "SampleInfo: must be an object, got a number");
    refused("null", "SampleInfo: must be an object, got null");
    refused("true", "SampleInfo: must be an object, got a boolean");
    refused("",
            "SampleInfo: line 1, column 0: unexpected token near end of file");
    refused("{\"rank\":1} {}",
            "SampleInfo: line 1, column 12: end of file expected");
    refused("{\"host\":\"\\u0000\"}", "SampleInfo: line 1, column 16: \\u0000 "
                                      "is not allowed without JSON_ALLOW_NUL");
    refused("{\"host\":\"\xff\"}",
            "SampleInfo: line 1, column 9: unable to decode byte 0xff");
    assert_int_equal(ferry_info_parse(&sample_type, NULL, &(void *){NULL}),
                     FERRY_EINVAL);
}

static void deep(char *out, size_t depth)
{
    memset(out, '[', depth);
    memset(out + depth, ']', depth);
    out[2 * depth] = '\0';
}

static void depth_is_bounded_before_the_parser_recurses(void **state)
{
    const size_t huge = 1 << 20;
    char *text = ferry__alloc(2 * huge + 1);
    json_t *value = NULL;

    (void)state;
    deep(text, 64);
    assert_int_equal(ferry__json_parse("x", text, 128, &value), FERRY_OK);
    json_decref(value);
    deep(text, 65);
    assert_int_equal(ferry__json_parse("x", text, 130, &value), FERRY_EINVAL);
    assert_string_equal(ferry_last_error(), "x: nested deeper than 64");
    deep(text, huge);
    assert_int_equal(ferry__json_parse("x", text, 2 * huge, &value),
                     FERRY_EINVAL);
    /* Brackets inside strings are text. */
    memset(text, '[', 1000);
    memcpy(text, "\"\\\"[", 4);
    text[999] = '"';
    assert_int_equal(ferry__json_parse("x", text, 1000, &value), FERRY_OK);
    json_decref(value);
    assert_int_equal(
        ferry__json_parse("x", text, FERRY__JSON_BYTES_MAX + 1, &value),
        FERRY_EINVAL);
    ferry__free(text);
}

static void many_long_names_fit(void **state)
{
    size_t n = 20000, used = 0;
    char *json = ferry__alloc(n * 60 + 100);
    sample *s;

    (void)state;
    used += (size_t)sprintf(json, "{\"rank\":0,\"sizes\":[");
    for (size_t i = 0; i < n; i++)
        used += (size_t)sprintf(json + used, "%s%zu", i ? "," : "", i % 100);
    used += (size_t)sprintf(json + used, "],\"names\":[");
    for (size_t i = 0; i < n; i++)
        used += (size_t)sprintf(json + used, "%s\"layers.%zu.weight\"",
                                i ? "," : "", i);
    used += (size_t)sprintf(json + used, "],\"dtype_names\":[");
    for (size_t i = 0; i < n; i++)
        used += (size_t)sprintf(json + used, "%s\"f\"", i ? "," : "");
    used += (size_t)sprintf(json + used, "],\"shapes\":[");
    for (size_t i = 0; i < n; i++)
        used += (size_t)sprintf(json + used, "%s[%zu]", i ? "," : "", i);
    sprintf(json + used, "]}");
    s = parse(json);
    assert_int_equal(s->names.count, n);
    assert_string_equal(s->names.items[n - 1], "layers.19999.weight");
    assert_int_equal(s->shapes.items[n - 1].dims[0], n - 1);
    ferry_info_free(s);
    ferry__free(json);
}

/* Every allocation fails once; the address sanitizer sees what leaks. */
static void every_failing_allocation_is_survived(void **state)
{
    ferry_status status = FERRY_ENOMEM;
    sample *s = parse(whole);
    void *info = NULL;
    char *text = NULL;

    (void)state;
    for (uint64_t n = 1; status < 0; n++) {
        assert_true(n < 1000);
        ferry__fault_arm(FERRY__FAULT_ALLOC, n);
        status = ferry_info_parse(&sample_type, whole, &info);
        ferry__fault_arm(FERRY__FAULT_ALLOC, 0);
        assert_true(status == FERRY_OK || status == FERRY_ENOMEM);
    }
    ferry_info_free(info);
    status = FERRY_ENOMEM;
    for (uint64_t n = 1; status < 0; n++) {
        assert_true(n < 1000);
        ferry__fault_arm(FERRY__FAULT_ALLOC, n);
        status = ferry_info_format(&sample_type, s, &text);
        ferry__fault_arm(FERRY__FAULT_ALLOC, 0);
        assert_true(status == FERRY_OK || status == FERRY_ENOMEM);
    }
    ferry_free(text);
    ferry_info_free(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(defaults_fill_what_is_absent),
        cmocka_unit_test(every_kind_is_read),
        cmocka_unit_test(format_is_the_inverse_of_parse),
        cmocka_unit_test(absent_texts_are_left_out),
        cmocka_unit_test(what_json_cannot_hold_is_refused),
        cmocka_unit_test(unknown_and_missing_fields_are_named),
        cmocka_unit_test(mistyped_fields_are_named_with_what_came),
        cmocka_unit_test(secrets_are_not_shown),
        cmocka_unit_test(integers_keep_to_their_range),
        cmocka_unit_test(numbers_that_are_none_are_refused),
        cmocka_unit_test(repeated_keys_are_named),
        cmocka_unit_test(lists_of_unequal_length_are_refused_in_vllms_words),
        cmocka_unit_test(cross_checks_run_after_all_fields),
        cmocka_unit_test(texts_that_are_no_object_are_refused),
        cmocka_unit_test(depth_is_bounded_before_the_parser_recurses),
        cmocka_unit_test(many_long_names_fit),
        cmocka_unit_test(every_failing_allocation_is_survived),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
