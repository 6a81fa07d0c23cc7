/* SPDX-License-Identifier: Apache-2.0 */
/* Byte-pair encoding of one piece over one vocabulary.
 * Invariant: the ids of a piece spell its bytes, whatever the merges are. */
#ifndef FERRY_MODEL_BPE_H
#define FERRY_MODEL_BPE_H

#include "base/hash.h"

/* A growing list of ids. */
typedef struct ferry__ids {
    int32_t *items;
    size_t count, capacity;
} ferry__ids;
ferry_status ferry__ids_add(ferry__ids *ids, int32_t id);

typedef struct ferry__token {
    char *text;  /* as the vocabulary spells it; NULL: a gap in the ids */
    char *bytes; /* what it stands for */
    size_t n_bytes;
    bool special; /* not part of the text that is shown */
    bool added;   /* found in text as it is, before any piece is cut */
} ferry__token;

typedef struct ferry__bpe {
    ferry__token *tokens; /* by id */
    size_t n_tokens;
    ferry__table by_text;
    int32_t byte_ids[256];       /* -1: the vocabulary lacks it */
    struct ferry__merge *merges; /* open addressing */
    size_t n_merges, merge_slots;
    bool whole_first; /* a piece that is a token is not merged up */
} ferry__bpe;

/* Vocabulary first, then ferry__bpe_seal, then merges in falling priority. */
ferry_status ferry__bpe_reserve(ferry__bpe *bpe, size_t n_tokens,
                                size_t n_merges);
/* FERRY_EEXIST: the id is taken. Added tokens are plain text, others are
 * spelled in the alphabet of byte-level BPE. */
ferry_status ferry__bpe_token(ferry__bpe *bpe, int64_t id, const char *text,
                              bool added, bool special);
ferry_status ferry__bpe_seal(ferry__bpe *bpe);
ferry_status ferry__bpe_merge(ferry__bpe *bpe, const char *left,
                              size_t left_length, const char *right,
                              size_t right_length);
/* Appends the ids of one piece. FERRY_EINVAL names a byte that the
 * vocabulary lacks. O(n log n). */
ferry_status ferry__bpe_encode(const ferry__bpe *bpe, const char *piece,
                               size_t length, ferry__ids *out);
void ferry__bpe_free(ferry__bpe *bpe);

#endif
