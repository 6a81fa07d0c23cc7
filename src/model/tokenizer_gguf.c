/* SPDX-License-Identifier: Apache-2.0 */
/* Reads the vocabulary that a GGUF carries. */
#include "model/tokenizer_parts.h"

#include "base/log.h"
#include "model/model_files.h"

#include <string.h>

#define TOKENS_KEY "tokenizer.ggml.tokens"
#define TYPES_KEY  "tokenizer.ggml.token_type"
#define MERGES_KEY "tokenizer.ggml.merges"

/* Values of token_type. */
enum { TYPE_CONTROL = 3, TYPE_USER = 4 };

/* What GGUF calls each way of cutting. */
static const struct {
    const char *name;
    const char *first, *second; /* second may be NULL */
} PRE[] = {
    {"gpt-2", ferry__pattern_gpt2, NULL},
    {"default", ferry__pattern_gpt2, NULL},
    {"smollm", ferry__pattern_digit, ferry__pattern_gpt2},
    {"llama-bpe", ferry__pattern_llama3, NULL},
    {"llama3", ferry__pattern_llama3, NULL},
    {"qwen2", ferry__pattern_qwen2, NULL},
};
#define N_PRE (sizeof(PRE) / sizeof(PRE[0]))

static ferry_status read_text(const ferry__gguf_meta *meta, const char *key,
                              const char *fallback, const char **out)
{
    *out = fallback;
    if (!ferry__gguf_meta_has(meta, key))
        return FERRY_OK;
    return ferry__gguf_meta_text(meta, key, out);
}

static ferry_status read_cuts(const char *pre, ferry__tokenizer *t)
{
    size_t i;

    for (i = 0; i < N_PRE; i++) {
        if (strcmp(PRE[i].name, pre) != 0)
            continue;
        FERRY_TRY(ferry__pretokenizer_add(&t->cuts, PRE[i].first, false));
        if (PRE[i].second)
            return ferry__pretokenizer_add(&t->cuts, PRE[i].second, false);
        return FERRY_OK;
    }
    return ferry_fail(FERRY_ENOTSUP,
                      "pre-tokeniser %s is not served; served are gpt-2, "
                      "smollm, llama-bpe, qwen2",
                      pre);
}

static ferry_status read_vocab(const ferry__gguf_meta *meta, size_t n_tokens,
                               ferry__bpe *bpe)
{
    const int32_t *types = NULL;
    size_t n_types = 0, i;

    if (ferry__gguf_meta_has(meta, TYPES_KEY))
        FERRY_TRY(ferry__gguf_meta_i32s(meta, TYPES_KEY, &types, &n_types));
    if (types && n_types != n_tokens)
        return ferry_fail(FERRY_EINVAL, "%s has %zu entries, %s has %zu",
                          TYPES_KEY, n_types, TOKENS_KEY, n_tokens);
    for (i = 0; i < n_tokens; i++) {
        bool control = types && types[i] == TYPE_CONTROL;
        bool added = control || (types && types[i] == TYPE_USER);

        FERRY_TRY(ferry__bpe_token(
            bpe, (int64_t)i, ferry__gguf_meta_text_at(meta, TOKENS_KEY, i),
            added, control));
    }
    return ferry__bpe_seal(bpe);
}

static ferry_status read_merges(const ferry__gguf_meta *meta, size_t n_merges,
                                ferry__bpe *bpe)
{
    size_t i;

    for (i = 0; i < n_merges; i++) {
        const char *line = ferry__gguf_meta_text_at(meta, MERGES_KEY, i);
        const char *space = line[0] ? strchr(line + 1, ' ') : NULL;

        if (!space)
            return ferry_fail(FERRY_EINVAL, "%s[%zu] is not a pair", MERGES_KEY,
                              i);
        FERRY_TRY(ferry__bpe_merge(bpe, line, (size_t)(space - line), space + 1,
                                   strlen(space + 1)));
    }
    return FERRY_OK;
}

/* A file that does not say puts one there with Llama 3's cuts alone. */
static ferry_status read_bos(const ferry__gguf_meta *meta, const char *pre,
                             ferry__tokenizer *t)
{
    bool add = strcmp(pre, "llama-bpe") == 0 || strcmp(pre, "llama3") == 0;
    int64_t id = -1;

    if (ferry__gguf_meta_has(meta, "tokenizer.ggml.add_bos_token"))
        FERRY_TRY(
            ferry__gguf_meta_bool(meta, "tokenizer.ggml.add_bos_token", &add));
    if (!add || !ferry__gguf_meta_has(meta, "tokenizer.ggml.bos_token_id"))
        return FERRY_OK;
    FERRY_TRY(ferry__gguf_meta_int(meta, "tokenizer.ggml.bos_token_id", &id));
    if (id >= 0 && (uint64_t)id < t->bpe.n_tokens)
        t->bos = (int32_t)id;
    return FERRY_OK;
}

static ferry_status read_meta(const ferry__gguf_meta *meta, ferry__tokenizer *t)
{
    const char *model, *pre;
    size_t n_tokens, n_merges;

    FERRY_TRY(ferry__gguf_meta_text(meta, "tokenizer.ggml.model", &model));
    if (strcmp(model, "gpt2") != 0)
        return ferry_fail(FERRY_ENOTSUP, "tokenizer model %s is not served",
                          model);
    FERRY_TRY(read_text(meta, "tokenizer.ggml.pre", "default", &pre));
    FERRY_TRY(read_cuts(pre, t));
    FERRY_TRY(ferry__gguf_meta_texts(meta, TOKENS_KEY, &n_tokens));
    FERRY_TRY(ferry__gguf_meta_texts(meta, MERGES_KEY, &n_merges));
    FERRY_TRY(ferry__bpe_reserve(&t->bpe, n_tokens, n_merges));
    FERRY_TRY(read_vocab(meta, n_tokens, &t->bpe));
    FERRY_TRY(read_merges(meta, n_merges, &t->bpe));
    return read_bos(meta, pre, t);
}

ferry_status ferry__tokenizer_from_gguf(const char *path, ferry__tokenizer *t)
{
    ferry__gguf_meta *meta = NULL;
    ferry_status st;

    FERRY_TRY(ferry__gguf_meta_open(path, &meta));
    st = read_meta(meta, t);
    if (st < 0)
        st = ferry__fail_prefix(st, "file %s", path);
    ferry__gguf_meta_close(&meta);
    return st;
}
