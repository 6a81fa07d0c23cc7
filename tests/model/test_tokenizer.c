/* SPDX-License-Identifier: Apache-2.0 */
/* The tokeniser's own promises: text comes back, whatever it is; what is not
 * byte-level BPE is refused by name. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "base/str.h"
#include "model/tokenizer.h"

#include <ferry/worker.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SPECIAL "<|end|>"

static char path[512];

/* The alphabet of byte-level BPE as UTF-8. */
static void put_byte(ferry__str *out, int byte)
{
    static const int GAPS[] = {0, 33, 127, 161, 173, 174, 256};
    int c = byte, i, extra = 0;
    char text[3] = {0};

    for (i = 0; i < 256 && c == byte; i++) {
        bool plain =
            (i >= GAPS[1] && i < GAPS[2]) || (i >= GAPS[3] && i != GAPS[4]);

        if (!plain && i == byte)
            c = 256 + extra;
        extra += !plain;
    }
    if (c < 0x80) {
        text[0] = (char)c;
    } else {
        text[0] = (char)(0xC0 | c >> 6);
        text[1] = (char)(0x80 | (c & 0x3F));
    }
    ferry__str_append(out, text);
}

/* All 256 bytes, the two tokens "ab" and "abc", one special token. */
static void write_tokenizer(const char *pre, const char *more, int skip_byte)
{
    ferry__str text = {0};
    FILE *out = fopen(path, "w");
    int byte;

    ferry__str_append(&text, "{\"normalizer\": null, \"pre_tokenizer\": ");
    ferry__str_append(&text, pre);
    ferry__str_append(&text, ", \"added_tokens\": [{\"id\": 258, \"content\": "
                             "\"" SPECIAL "\", \"special\": true}], "
                             "\"model\": {\"type\": \"BPE\", \"vocab\": {");
    for (byte = 0; byte < 256; byte++) {
        ferry__str one = {0};

        if (byte == skip_byte)
            continue;
        put_byte(&one, byte);
        ferry__str_json(&text, one.data);
        ferry__str_printf(&text, ": %d, ", byte);
        ferry__str_free(&one);
    }
    ferry__str_append(&text, "\"ab\": 256, \"abc\": 257}, \"merges\": "
                             "[\"a b\", \"ab c\"]");
    ferry__str_append(&text, more);
    ferry__str_append(&text, "}}");
    assert_false(text.failed);
    assert_non_null(out);
    assert_true(fputs(text.data, out) >= 0);
    assert_int_equal(fclose(out), 0);
    ferry__str_free(&text);
}

static const char BYTE_LEVEL[] =
    "{\"type\": \"ByteLevel\", \"add_prefix_space\": false}";

static ferry__tokenizer *open_tokenizer(void)
{
    ferry__tokenizer *t = NULL;

    assert_int_equal(ferry__tokenizer_open(path, &t), FERRY_OK);
    return t;
}

static void expect_round_trip(const ferry__tokenizer *t, const char *text,
                              size_t length)
{
    ferry__str back = {0};
    int32_t *ids = NULL;
    size_t n = 0, i, size;

    assert_int_equal(ferry__tokenizer_encode(t, text, length, &ids, &n),
                     FERRY_OK);
    for (i = 0; i < n; i++) {
        const char *bytes = ferry__tokenizer_bytes(t, ids[i], true, &size);

        assert_non_null(bytes);
        ferry__str_append_n(&back, bytes, size);
    }
    assert_int_equal(back.length, length);
    if (length > 0)
        assert_memory_equal(back.data, text, length);
    ferry__str_free(&back);
    ferry_free(ids);
}

static size_t put_utf8(char *out, uint32_t c)
{
    if (c < 0x80) {
        out[0] = (char)c;
        return 1;
    }
    if (c < 0x800) {
        out[0] = (char)(0xC0 | c >> 6);
        out[1] = (char)(0x80 | (c & 0x3F));
        return 2;
    }
    if (c < 0x10000) {
        out[0] = (char)(0xE0 | c >> 12);
        out[1] = (char)(0x80 | (c >> 6 & 0x3F));
        out[2] = (char)(0x80 | (c & 0x3F));
        return 3;
    }
    out[0] = (char)(0xF0 | c >> 18);
    out[1] = (char)(0x80 | (c >> 12 & 0x3F));
    out[2] = (char)(0x80 | (c >> 6 & 0x3F));
    out[3] = (char)(0x80 | (c & 0x3F));
    return 4;
}

/* Any characters at all, NUL and unassigned ones included. */
static void any_valid_text_comes_back(void **state)
{
    ferry__tokenizer *t;
    uint64_t rng = 1;
    char text[4 * 64];
    int round, i;

    (void)state;
    write_tokenizer(BYTE_LEVEL, "", -1);
    t = open_tokenizer();
    for (round = 0; round < 2000; round++) {
        size_t n = 0;

        for (i = 0; i < 1 + round % 60; i++) {
            uint32_t c;

            rng = rng * 6364136223846793005u + 1442695040888963407u;
            c = (uint32_t)(rng >> 33);
            c %= round % 3 == 0 ? 0x80u : round % 3 == 1 ? 0x3000u : 0x110000u;
            if (c >= 0xD800 && c <= 0xDFFF)
                c = ' ';
            n += put_utf8(text + n, c);
        }
        expect_round_trip(t, text, n);
    }
    expect_round_trip(t, "", 0);
    expect_round_trip(t, "<|end|><|end|> <|end", 20);
    ferry__tokenizer_close(&t);
    assert_null(t);
}

static void expect_ids(const ferry__tokenizer *t, const char *text,
                       const int32_t *want, size_t n_want)
{
    int32_t *ids = NULL;
    size_t n = 0;

    assert_int_equal(ferry__tokenizer_encode(t, text, strlen(text), &ids, &n),
                     FERRY_OK);
    assert_int_equal(n, n_want);
    assert_memory_equal(ids, want, n * sizeof(*want));
    ferry_free(ids);
}

static void merges_apply_by_rank_and_specials_are_found(void **state)
{
    static const int32_t WANT[] = {257, 256, 'd', 258, 'a'};
    ferry__tokenizer *t;
    size_t n;

    (void)state;
    write_tokenizer(BYTE_LEVEL, "", -1);
    t = open_tokenizer();
    expect_ids(t, "abcabd" SPECIAL "a", WANT, 5);
    assert_int_equal(ferry__tokenizer_size(t), 259);
    assert_int_equal(ferry__tokenizer_bos(t), -1);
    assert_string_equal(ferry__tokenizer_bytes(t, 258, false, &n), "");
    assert_int_equal(n, 0);
    assert_string_equal(ferry__tokenizer_bytes(t, 258, true, &n), SPECIAL);
    assert_null(ferry__tokenizer_bytes(t, 259, true, &n));
    assert_null(ferry__tokenizer_bytes(t, -1, true, &n));
    ferry__tokenizer_close(&t);
}

static void text_that_is_no_utf8_is_refused(void **state)
{
    static const char *const BAD[] = {
        "\x80", "a\xC3", "\xC0\xAF", "\xED\xA0\x80", "\xF4\x90\x80\x80",
        "\xFF"};
    ferry__tokenizer *t;
    int32_t *ids = NULL;
    size_t n = 0, i;

    (void)state;
    write_tokenizer(BYTE_LEVEL, "", -1);
    t = open_tokenizer();
    for (i = 0; i < sizeof(BAD) / sizeof(BAD[0]); i++) {
        assert_int_equal(
            ferry__tokenizer_encode(t, BAD[i], strlen(BAD[i]), &ids, &n),
            FERRY_EINVAL);
        assert_non_null(strstr(ferry_last_error(), "utf-8 at byte"));
    }
    assert_null(ids);
    ferry__tokenizer_close(&t);
}

static void a_byte_without_a_token_is_refused_not_dropped(void **state)
{
    ferry__tokenizer *t;
    int32_t *ids = NULL;
    size_t n = 0;

    (void)state;
    write_tokenizer(BYTE_LEVEL, "", 0x04);
    t = open_tokenizer();
    assert_int_equal(ferry__tokenizer_encode(t, "a\x04", 2, &ids, &n),
                     FERRY_EINVAL);
    assert_non_null(strstr(ferry_last_error(), "0x04"));
    ferry__tokenizer_close(&t);
}

/* A megabyte without a single cut takes n log n. */
static void a_long_piece_is_no_trap(void **state)
{
    size_t n = (size_t)1 << 20, i;
    char *text = malloc(n);
    int64_t begin;
    ferry__tokenizer *t;

    (void)state;
    assert_non_null(text);
    for (i = 0; i < n; i++)
        text[i] = "abc"[i % 3];
    write_tokenizer(BYTE_LEVEL, "", -1);
    t = open_tokenizer();
    begin = ferry__now_ns();
    expect_round_trip(t, text, n);
    memset(text, ' ', n);
    expect_round_trip(t, text, n);
    assert_true(ferry__now_ns() - begin < 20000000000);
    ferry__tokenizer_close(&t);
    free(text);
}

static void expect_refusal(const char *pre, const char *more, ferry_status want,
                           const char *words)
{
    ferry__tokenizer *t = NULL;

    write_tokenizer(pre, more, -1);
    assert_int_equal(ferry__tokenizer_open(path, &t), want);
    assert_null(t);
    if (!strstr(ferry_last_error(), words))
        fail_msg("'%s' is not in '%s'", words, ferry_last_error());
}

static void other_kinds_are_named(void **state)
{
    (void)state;
    expect_refusal("{\"type\": \"Metaspace\"}", "", FERRY_ENOTSUP, "Metaspace");
    expect_refusal("null", "", FERRY_ENOTSUP, "pre_tokenizer");
    expect_refusal("{\"type\": \"ByteLevel\", \"add_prefix_space\": true}", "",
                   FERRY_ENOTSUP, "add_prefix_space");
    expect_refusal("{\"type\": \"Split\", \"pattern\": {\"Regex\": \"(\"}, "
                   "\"behavior\": \"Isolated\"}",
                   "", FERRY_EINVAL, "pattern");
    expect_refusal("{\"type\": \"Split\", \"pattern\": {\"String\": \" \"}, "
                   "\"behavior\": \"MergedWithNext\"}",
                   "", FERRY_ENOTSUP, "MergedWithNext");
    expect_refusal(BYTE_LEVEL, ", \"byte_fallback\": true", FERRY_ENOTSUP,
                   "byte_fallback");
}

/* The n-th allocation fails: one clean error, nothing leaked. */
static void failed_allocations_are_clean(void **state)
{
    ferry_status st = FERRY_ENOMEM;
    uint64_t n;

    (void)state;
    write_tokenizer(BYTE_LEVEL, ", \"ignore_merges\": true", -1);
    for (n = 1; st < 0; n++) {
        ferry__tokenizer *t = NULL;
        int32_t *ids = NULL;
        size_t count = 0;

        ferry__fault_arm(FERRY__FAULT_ALLOC, n);
        st = ferry__tokenizer_open(path, &t);
        if (st == FERRY_OK)
            st = ferry__tokenizer_encode(t, "abcab abd", 9, &ids, &count);
        ferry__fault_arm(FERRY__FAULT_ALLOC, 0);
        assert_true(st == FERRY_OK || st == FERRY_ENOMEM);
        assert_true(st == FERRY_OK || ids == NULL);
        ferry_free(ids);
        ferry__tokenizer_close(&t);
        assert_true(n < 10000);
    }
    assert_true(n > 500);
}

static int make_path(void **state)
{
    const char *tmp = getenv("TMPDIR");
    static char folder[256];

    (void)state;
    snprintf(folder, sizeof(folder), "%s/ferry-tokenizer-XXXXXX",
             tmp ? tmp : "/tmp");
    if (!mkdtemp(folder))
        return -1;
    snprintf(path, sizeof(path), "%s/tokenizer.json", folder);
    return 0;
}

static int remove_path(void **state)
{
    (void)state;
    unlink(path);
    *strrchr(path, '/') = '\0';
    return rmdir(path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_valid_text_comes_back),
        cmocka_unit_test(merges_apply_by_rank_and_specials_are_found),
        cmocka_unit_test(text_that_is_no_utf8_is_refused),
        cmocka_unit_test(a_byte_without_a_token_is_refused_not_dropped),
        cmocka_unit_test(a_long_piece_is_no_trap),
        cmocka_unit_test(other_kinds_are_named),
        cmocka_unit_test(failed_allocations_are_clean),
    };
    return cmocka_run_group_tests(tests, make_path, remove_path);
}
