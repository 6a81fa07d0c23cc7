/* SPDX-License-Identifier: Apache-2.0 */
/* Growable text, and a few questions about strings. */
#include "base/str.h"

#include "base/alloc.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static void text_grows_and_is_taken(void **state)
{
    ferry__str s = {0};
    char *text = NULL;

    (void)state;
    ferry__str_append(&s, "a");
    ferry__str_append_n(&s, "bcd", 2);
    ferry__str_printf(&s, "%d-%s", 42, "x");
    for (int i = 0; i < 1000; i++)
        ferry__str_append(&s, ".");
    assert_int_equal(s.length, 1007);
    assert_int_equal(s.data[s.length], '\0');
    assert_int_equal(ferry__str_take(&s, &text), FERRY_OK);
    assert_memory_equal(text, "abc42-x....", 11);
    assert_null(s.data);
    ferry__free(text);
    assert_int_equal(ferry__str_take(&s, &text), FERRY_OK);
    assert_string_equal(text, "");
    ferry__free(text);
}

static void a_failed_text_stays_failed(void **state)
{
    ferry__str s = {0};
    char untouched[] = "untouched", *text = untouched;

    (void)state;
    ferry__str_append(&s, "12345678");
    ferry__fault_arm(FERRY__FAULT_ALLOC, 1);
    ferry__str_printf(&s, "%0100d", 1);
    assert_true(s.failed);
    ferry__str_append(&s, "more");
    assert_string_equal(s.data, "12345678");
    assert_int_equal(ferry__str_take(&s, &text), FERRY_ENOMEM);
    assert_ptr_equal(text, untouched);
    assert_false(s.failed);
    ferry__str_free(&s);
}

static void check_json(const char *text, size_t n, const char *expected)
{
    ferry__str s = {0};

    ferry__str_json_n(&s, text, n);
    assert_false(s.failed);
    assert_string_equal(s.data, expected);
    ferry__str_free(&s);
}

static void json_strings_are_escaped(void **state)
{
    (void)state;
    check_json("", 0, "\"\"");
    check_json("a\"b\\c", 5, "\"a\\\"b\\\\c\"");
    check_json("\n\r\t\x01\x7f", 5, "\"\\n\\r\\t\\u0001\\u007f\"");
    check_json("a\0b", 3, "\"a\\u0000b\"");
    check_json("\xC3\xA4\xE2\x82\xAC\xF0\x9F\x9A\xA2", 9,
               "\"\xC3\xA4\xE2\x82\xAC\xF0\x9F\x9A\xA2\"");
}

#define FFFD "\xEF\xBF\xBD"

static void invalid_utf8_is_replaced(void **state)
{
    (void)state;
    check_json("\xFF", 1, "\"" FFFD "\"");
    check_json("\x80z", 2, "\"" FFFD "z\"");
    check_json("\xC0\xAF", 2, "\"" FFFD FFFD "\"");          /* overlong */
    check_json("\xE0\x80\x80", 3, "\"" FFFD FFFD FFFD "\""); /* overlong */
    check_json("\xED\xA0\x80", 3, "\"" FFFD FFFD FFFD "\""); /* surrogate */
    check_json("\xF4\x90\x80\x80", 4,
               "\"" FFFD FFFD FFFD FFFD "\""); /* > U+10FFFF */
    /* Cut short: one for what is there of a character. */
    check_json("\xE2\x82", 2, "\"" FFFD "\"");
    check_json("\xF0\x9F\x98", 3, "\"" FFFD "\"");
    check_json("\xF0\x9F"
               "z",
               3, "\"" FFFD "z\"");
    check_json("\xE2\x82\xE2\x82\xAC", 5,
               "\"" FFFD "\xE2\x82\xAC"
               "\"");
}

static void one_star_matches_any_run(void **state)
{
    (void)state;
    assert_true(ferry__match("a.b", "a.b"));
    assert_false(ferry__match("a.b", "a.bc"));
    assert_true(ferry__match("*", ""));
    assert_true(ferry__match("model.*", "model."));
    assert_true(ferry__match("*.weight", "x.weight"));
    assert_true(ferry__match("a*c", "abbc"));
    assert_false(ferry__match("ab*bc", "abc")); /* ends overlap */
    assert_false(ferry__match("a*c", "abcd"));
    assert_false(ferry__match("A*", "abc"));
    assert_true(ferry__starts_with("model.x", "model."));
    assert_true(ferry__starts_with("x", ""));
    assert_false(ferry__starts_with("mod", "model."));
}

/* The whole table, the slow way. */
static size_t plain_distance(const char *a, const char *b)
{
    size_t n = strlen(a), m = strlen(b), d[16][16];

    for (size_t i = 0; i <= n; i++) {
        for (size_t j = 0; j <= m; j++) {
            size_t best = i + j;

            if (i > 0 && j > 0)
                best = d[i - 1][j - 1] + (a[i - 1] != b[j - 1]);
            if (i > 0 && d[i - 1][j] + 1 < best)
                best = d[i - 1][j] + 1;
            if (j > 0 && d[i][j - 1] + 1 < best)
                best = d[i][j - 1] + 1;
            d[i][j] = best;
        }
    }
    return d[n][m];
}

static void distance_equals_the_plain_one_up_to_the_limit(void **state)
{
    unsigned seed = 12345;

    (void)state;
    assert_int_equal(ferry__edit_distance("kitten", "sitting", 5), 3);
    assert_int_equal(ferry__edit_distance("kitten", "sitting", 2), 3);
    assert_int_equal(ferry__edit_distance("same", "same", 0), 0);
    assert_int_equal(ferry__edit_distance("a", "b", 0), 1);
    assert_int_equal(ferry__edit_distance("", "abc", 3), 3);
    for (int trial = 0; trial < 4000; trial++) {
        char a[12] = "", b[12] = "";
        size_t plain, limit = (size_t)(trial % 6);

        for (size_t k = 0, n = (size_t)rand_r(&seed) % 11; k < n; k++)
            a[k] = (char)('a' + rand_r(&seed) % 3);
        for (size_t k = 0, n = (size_t)rand_r(&seed) % 11; k < n; k++)
            b[k] = (char)('a' + rand_r(&seed) % 3);
        plain = plain_distance(a, b);
        assert_int_equal(ferry__edit_distance(a, b, limit),
                         plain < limit + 1 ? plain : limit + 1);
    }
}

static void secrets_compare_by_value(void **state)
{
    (void)state;
    assert_true(ferry__equal_secret("", ""));
    assert_true(ferry__equal_secret("token", "token"));
    assert_false(ferry__equal_secret("token", "tokem"));
    assert_false(ferry__equal_secret("token", "toke"));
    assert_false(ferry__equal_secret("toke", "token"));
    assert_false(ferry__equal_secret("", "x"));
}

static void shapes_are_written_as_lists(void **state)
{
    int64_t shape[3] = {8, 4, 1};
    char text[64], small[5];

    (void)state;
    assert_string_equal(ferry__shape_text(text, sizeof(text), 0, shape), "[]");
    assert_string_equal(ferry__shape_text(text, sizeof(text), 1, shape), "[8]");
    assert_string_equal(ferry__shape_text(text, sizeof(text), 3, shape),
                        "[8, 4, 1]");
    assert_string_equal(ferry__shape_text(small, sizeof(small), 3, shape),
                        "[8, ");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(text_grows_and_is_taken),
        cmocka_unit_test(a_failed_text_stays_failed),
        cmocka_unit_test(json_strings_are_escaped),
        cmocka_unit_test(invalid_utf8_is_replaced),
        cmocka_unit_test(one_star_matches_any_run),
        cmocka_unit_test(distance_equals_the_plain_one_up_to_the_limit),
        cmocka_unit_test(secrets_compare_by_value),
        cmocka_unit_test(shapes_are_written_as_lists),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
