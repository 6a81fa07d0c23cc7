/* SPDX-License-Identifier: Apache-2.0 */
/* The cuts, by PCRE2 with Unicode classes. */
#define PCRE2_CODE_UNIT_WIDTH 8
#include "model/pretokenizer.h"

#include <pcre2.h>
#include <string.h>

#define CONTRACTIONS "'s|'t|'re|'ve|'m|'ll|'d"

const char ferry__pattern_gpt2[] =
    CONTRACTIONS "| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+"
                 "|\\s+(?!\\S)|\\s+";
const char ferry__pattern_llama3[] =
    "(?i:" CONTRACTIONS ")|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}"
    "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
const char ferry__pattern_qwen2[] =
    "(?i:" CONTRACTIONS ")|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}"
    "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
const char ferry__pattern_digit[] = "\\p{N}";
const char ferry__pattern_digits[] = "\\p{N}+";

ferry_status ferry__pretokenizer_add(ferry__pretokenizer *p,
                                     const char *pattern, bool literal)
{
    uint32_t options =
        PCRE2_UTF | (literal ? PCRE2_LITERAL : (uint32_t)PCRE2_UCP);
    PCRE2_SIZE at = 0;
    PCRE2_UCHAR text[128];
    pcre2_code *code;
    int error = 0;

    if (p->count == FERRY__PATTERNS_MAX)
        return ferry_fail(FERRY_ENOTSUP, "more than %d pre-tokeniser patterns",
                          FERRY__PATTERNS_MAX);
    code = pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED, options,
                         &error, &at, NULL);
    if (!code) {
        pcre2_get_error_message(error, text, sizeof(text));
        return ferry_fail(FERRY_EINVAL,
                          "pre-tokeniser pattern, at byte %zu: %s", (size_t)at,
                          (const char *)text);
    }
    /* Without a compiler for this machine the interpreter is used. */
    (void)pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);
    p->patterns[p->count++] = code;
    return FERRY_OK;
}

void ferry__pretokenizer_free(ferry__pretokenizer *p)
{
    size_t i;

    for (i = 0; i < p->count; i++)
        pcre2_code_free(p->patterns[i]);
    p->count = 0;
}

/* One call of cut; match data of each level is its own, as levels nest. */
typedef struct cutting {
    const ferry__pretokenizer *p;
    pcre2_match_data *match[FERRY__PATTERNS_MAX];
    ferry__piece_fn fn;
    void *arg;
} cutting;

/* The next match from `at` on; FERRY_DONE when there is none. */
static ferry_status match_at(const cutting *c, size_t level, const char *text,
                             size_t length, size_t at)
{
    const pcre2_code *code = c->p->patterns[level];
    uint32_t options = PCRE2_NO_UTF_CHECK | PCRE2_NOTEMPTY;
    PCRE2_UCHAR line[128];
    int rc = pcre2_match(code, (PCRE2_SPTR)text, length, at, options,
                         c->match[level], NULL);

    if (rc == PCRE2_ERROR_JIT_STACKLIMIT)
        rc = pcre2_match(code, (PCRE2_SPTR)text, length, at,
                         options | PCRE2_NO_JIT, c->match[level], NULL);
    if (rc == PCRE2_ERROR_NOMATCH)
        return FERRY_DONE;
    if (rc >= 0)
        return FERRY_OK;
    pcre2_get_error_message(rc, line, sizeof(line));
    return ferry_fail(FERRY_EINVAL, "pre-tokeniser, at byte %zu: %s", at,
                      (const char *)line);
}

static ferry_status cut_level(const cutting *c, size_t level, const char *text,
                              size_t length)
{
    size_t at = 0;

    if (length == 0)
        return FERRY_OK;
    if (level == c->p->count)
        return c->fn(c->arg, text, length);
    while (at < length) {
        ferry_status st = match_at(c, level, text, length, at);
        const PCRE2_SIZE *span = pcre2_get_ovector_pointer(c->match[level]);
        size_t begin = st == FERRY_OK ? span[0] : length;
        size_t end = st == FERRY_OK ? span[1] : length;

        FERRY_TRY(st);
        if (begin < at || (st == FERRY_OK && end <= begin))
            return ferry_fail(FERRY_ENOTSUP,
                              "pre-tokeniser: a match of %zu..%zu from %zu",
                              begin, end, at);
        FERRY_TRY(cut_level(c, level + 1, text + at, begin - at));
        FERRY_TRY(cut_level(c, level + 1, text + begin, end - begin));
        at = end;
    }
    return FERRY_OK;
}

ferry_status ferry__pretokenizer_cut(const ferry__pretokenizer *p,
                                     const char *text, size_t length,
                                     ferry__piece_fn fn, void *arg)
{
    cutting c = {.p = p, .fn = fn, .arg = arg};
    ferry_status st = FERRY_OK;
    size_t i;

    for (i = 0; i < p->count; i++) {
        c.match[i] = pcre2_match_data_create_from_pattern(p->patterns[i], NULL);
        if (!c.match[i])
            st = ferry_fail(FERRY_ENOMEM, "pre-tokeniser: no memory");
    }
    if (st == FERRY_OK)
        st = cut_level(&c, 0, text, length);
    for (i = 0; i < p->count; i++)
        pcre2_match_data_free(c.match[i]);
    return st;
}
