/* SPDX-License-Identifier: Apache-2.0 */
/* Status codes, the last error of a thread, log lines, the version. */
#include "base/log.h"

#include "base/config.h"

#include <ferry/ferry.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <jansson.h>
#include <pthread.h>
#include <time.h>
#include <unistd.h>

static void values_are_pinned(void **state)
{
    (void)state;
    assert_int_equal(FERRY_OK, 0);
    assert_int_equal(FERRY_DONE, 1);
    assert_int_equal(FERRY_EINVAL, -1);
    assert_int_equal(FERRY_EMISMATCH, -10);
    assert_int_equal(FERRY_EPEER, -20);
    assert_int_equal(FERRY_EROUTE, -26);
    assert_int_equal(FERRY_EORDER, -30);
    assert_int_equal(FERRY_EINTERNAL, -43);
}

static void names_and_texts_come_from_one_table(void **state)
{
    (void)state;
    assert_string_equal(ferry_status_name(FERRY_OK), "OK");
    assert_string_equal(ferry_status_name(FERRY_EMISMATCH), "EMISMATCH");
    assert_string_equal(ferry_status_text(FERRY_ETIMEOUT), "deadline passed");
    assert_string_equal(ferry_status_name((ferry_status)77), "?");
    assert_string_equal(ferry_status_text((ferry_status)-99), "unknown status");
}

static void *fresh_thread(void *arg)
{
    int *empty_at_first = arg;

    *empty_at_first = ferry_last_error()[0] == '\0';
    ferry_fail(FERRY_EIO, "other thread");
    return NULL;
}

static void last_error_is_of_the_thread(void **state)
{
    pthread_t t;
    int empty_at_first = 0;

    (void)state;
    assert_int_equal(ferry_fail(FERRY_EMISMATCH, "parameter %s: %d", "w", 7),
                     FERRY_EMISMATCH);
    assert_int_equal(pthread_create(&t, NULL, fresh_thread, &empty_at_first),
                     0);
    assert_int_equal(pthread_join(t, NULL), 0);
    assert_true(empty_at_first);
    assert_string_equal(ferry_last_error(), "parameter w: 7");
}

static void control_characters_become_spaces(void **state)
{
    (void)state;
    ferry_fail(FERRY_EPEER, "a\nb\tc\x7f"
                            "d\r\x01");
    assert_string_equal(ferry_last_error(), "a b c d  ");
}

static void long_lines_are_cut_at_1023_bytes(void **state)
{
    char text[3000];

    (void)state;
    memset(text, 'x', sizeof(text) - 1);
    text[sizeof(text) - 1] = '\0';
    ferry_fail(FERRY_EPEER, "%s", text);
    assert_int_equal(strlen(ferry_last_error()), 1023);
    /* A character of three bytes that the cut would split is left out. */
    memcpy(text + 1021, "\xE2\x82\xAC", 3);
    ferry_fail(FERRY_EPEER, "%s", text);
    assert_int_equal(strlen(ferry_last_error()), 1021);
    ferry__fail_line(FERRY_EPEER, text);
    assert_int_equal(strlen(ferry_last_error()), 1021);
    ferry__fail_prefix(FERRY_EPEER, "%s", text);
    assert_in_range(strlen(ferry_last_error()), 1021, 1023);
}

static void a_line_may_quote_the_line_before(void **state)
{
    (void)state;
    ferry_fail(FERRY_EIO, "disk full");
    ferry_fail(FERRY_EPEER, "replica 1: %s", ferry_last_error());
    assert_string_equal(ferry_last_error(), "replica 1: disk full");
    assert_int_equal(ferry__fail_prefix(FERRY_EPEER, "fleet %d", 3),
                     FERRY_EPEER);
    assert_string_equal(ferry_last_error(), "fleet 3: replica 1: disk full");
    assert_int_equal(ferry__fail_line(FERRY_EIO, ferry_last_error()),
                     FERRY_EIO);
    assert_string_equal(ferry_last_error(), "fleet 3: replica 1: disk full");
    ferry__fail_line(FERRY_EIO, NULL);
    assert_string_equal(ferry_last_error(), "");
}

static void version_number_and_text_agree(void **state)
{
    char text[32];
    uint32_t v = ferry_version();

    (void)state;
    snprintf(text, sizeof(text), "%u.%u.%u", (unsigned)(v >> 16),
             (unsigned)(v >> 8 & 0xFF), (unsigned)(v & 0xFF));
    assert_string_equal(ferry_version_text(), text);
}

typedef struct seen {
    int n;
    ferry_log_level level;
    char line[4096];
} seen;

static void see(ferry_log_level level, const char *line, void *arg)
{
    seen *s = arg;

    s->n++;
    s->level = level;
    snprintf(s->line, sizeof(s->line), "%s", line);
}

static void log_lines_reach_the_programs_function(void **state)
{
    seen a = {0}, b = {0};

    (void)state;
    ferry_log_set(see, &a);
    assert_true(ferry__log_enabled(FERRY_LOG_DEBUG));
    ferry__log(FERRY_LOG_DEBUG, "path %s\nsecond", "shared");
    ferry_log_set(see, &b);
    ferry__log(FERRY_LOG_ERROR, "%d", 5);
    ferry_log_set(NULL, NULL);
    assert_int_equal(a.n, 1);
    assert_int_equal(a.level, FERRY_LOG_DEBUG);
    assert_string_equal(a.line, "path shared second");
    assert_int_equal(b.n, 1);
    assert_string_equal(b.line, "5");
}

static void many_log_functions_can_be_set_in_turn(void **state)
{
    seen s[40] = {0};

    (void)state;
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < 40; i++) {
            ferry_log_set(see, &s[i]);
            ferry__log(FERRY_LOG_INFO, "line");
        }
    }
    ferry_log_set(NULL, NULL);
    for (int i = 0; i < 40; i++)
        assert_int_equal(s[i].n, 2);
}

static void default_log_writes_whole_lines_from_the_set_level(void **state)
{
    char text[256] = "";
    int ends[2], saved = dup(STDERR_FILENO);
    ssize_t n;

    (void)state;
    assert_int_equal(pipe(ends), 0);
    assert_true(dup2(ends[1], STDERR_FILENO) >= 0);
    ferry_log_set(NULL, NULL);
    ferry__log(FERRY_LOG_INFO, "hidden");
    ferry__log(FERRY_LOG_WARN, "shown %d", 1);
    assert_int_equal(ferry__config_set("log_level", "debug"), FERRY_OK);
    ferry__log(FERRY_LOG_DEBUG, "shown %d", 2);
    ferry__config_set("log_level", "warn");
    assert_true(dup2(saved, STDERR_FILENO) >= 0);
    close(saved);
    close(ends[1]);
    n = read(ends[0], text, sizeof(text) - 1);
    close(ends[0]);
    assert_true(n > 0);
    assert_string_equal(text, "ferry: warn: shown 1\nferry: debug: shown 2\n");
}

/* One JSON object a line, whatever is in the message. */
static void json_log_lines_parse_and_carry_the_time(void **state)
{
    static const char *const messages[] = {
        "say \"hi\" \\ there\n\tend",
        "caf\xC3\xA9 \xE2\x82\xAC \xF0\x9F\x9A\xA2",
        "bad \xFF \xC3( \xED\xA0\x80 end \xE2\x82"};
    static const char *const expected[] = {
        "say \"hi\" \\ there  end", "caf\xC3\xA9 \xE2\x82\xAC \xF0\x9F\x9A\xA2",
        "bad ? ?( ??? end ??"};
    char text[16384] = "", *line = text;
    int ends[2], saved = dup(STDERR_FILENO);
    time_t before = time(NULL);
    char long_line[4000];

    (void)state;
    memset(long_line, '"', sizeof(long_line) - 1);
    long_line[sizeof(long_line) - 1] = '\0';
    assert_int_equal(pipe(ends), 0);
    assert_true(dup2(ends[1], STDERR_FILENO) >= 0);
    assert_int_equal(ferry__config_set("log_format", "json"), FERRY_OK);
    for (size_t i = 0; i < 3; i++)
        ferry__log(FERRY_LOG_ERROR, "%s", messages[i]);
    ferry__log(FERRY_LOG_WARN, "%s", long_line);
    ferry__config_set("log_format", "text");
    assert_true(dup2(saved, STDERR_FILENO) >= 0);
    close(saved);
    close(ends[1]);
    assert_true(read(ends[0], text, sizeof(text) - 1) > 0);
    close(ends[0]);
    for (size_t i = 0; i < 4; i++) {
        char *end = strchr(line, '\n');
        json_t *o;
        struct tm tm = {0};
        time_t at;

        assert_non_null(end);
        o = json_loadb(line, (size_t)(end - line), 0, NULL);
        assert_non_null(o);
        assert_int_equal(json_object_size(o), 3);
        assert_string_equal(json_string_value(json_object_get(o, "level")),
                            i < 3 ? "error" : "warn");
        if (i < 3)
            assert_string_equal(
                json_string_value(json_object_get(o, "message")), expected[i]);
        assert_non_null(strptime(json_string_value(json_object_get(o, "time")),
                                 "%Y-%m-%dT%H:%M:%S", &tm));
        at = timegm(&tm);
        assert_true(at >= before && at <= time(NULL));
        json_decref(o);
        line = end + 1;
    }
    assert_string_equal(line, "");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(values_are_pinned),
        cmocka_unit_test(names_and_texts_come_from_one_table),
        cmocka_unit_test(last_error_is_of_the_thread),
        cmocka_unit_test(control_characters_become_spaces),
        cmocka_unit_test(long_lines_are_cut_at_1023_bytes),
        cmocka_unit_test(a_line_may_quote_the_line_before),
        cmocka_unit_test(version_number_and_text_agree),
        cmocka_unit_test(log_lines_reach_the_programs_function),
        cmocka_unit_test(many_log_functions_can_be_set_in_turn),
        cmocka_unit_test(default_log_writes_whole_lines_from_the_set_level),
        cmocka_unit_test(json_log_lines_parse_and_carry_the_time),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
