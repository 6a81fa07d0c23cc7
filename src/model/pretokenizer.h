/* SPDX-License-Identifier: Apache-2.0 */
/* Cuts text into the pieces inside which BPE may merge: a list of patterns,
 * each applied inside the pieces of the one before.
 * Invariant: the pieces put together are the text; what a pattern does not
 * match is a piece too. */
#ifndef FERRY_MODEL_PRETOKENIZER_H
#define FERRY_MODEL_PRETOKENIZER_H

#include <ferry/status.h>
#include <stdbool.h>

#define FERRY__PATTERNS_MAX 8

typedef struct ferry__pretokenizer {
    void *patterns[FERRY__PATTERNS_MAX]; /* pcre2_code */
    size_t count;
} ferry__pretokenizer;

/* The patterns that several checkpoints share. */
extern const char ferry__pattern_gpt2[];
extern const char ferry__pattern_llama3[];
extern const char ferry__pattern_qwen2[];
extern const char ferry__pattern_digit[];
extern const char ferry__pattern_digits[];

ferry_status ferry__pretokenizer_add(ferry__pretokenizer *p,
                                     const char *pattern, bool literal);
void ferry__pretokenizer_free(ferry__pretokenizer *p);

typedef ferry_status (*ferry__piece_fn)(void *arg, const char *piece,
                                        size_t length);
/* Calls fn for each piece, in order. `text` must be valid UTF-8. */
ferry_status ferry__pretokenizer_cut(const ferry__pretokenizer *p,
                                     const char *text, size_t length,
                                     ferry__piece_fn fn, void *arg);

#endif
