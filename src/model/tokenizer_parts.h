/* SPDX-License-Identifier: Apache-2.0 */
/* What a tokeniser consists of, and the readers of its two forms.
 * Invariant: after a reader succeeded, the vocabulary is sealed and whole. */
#ifndef FERRY_MODEL_TOKENIZER_PARTS_H
#define FERRY_MODEL_TOKENIZER_PARTS_H

#include "model/bpe.h"
#include "model/pretokenizer.h"
#include "model/tokenizer.h"

struct ferry__tokenizer {
    ferry__bpe bpe;
    ferry__pretokenizer cuts;
    int32_t *added; /* ids found in text as they are, longest first */
    size_t n_added;
    bool starts[256]; /* first bytes of those */
    int32_t bos;      /* put before a text; -1: none */
};

ferry_status ferry__tokenizer_from_json(const char *path, ferry__tokenizer *t);
ferry_status ferry__tokenizer_from_gguf(const char *path, ferry__tokenizer *t);

#endif
