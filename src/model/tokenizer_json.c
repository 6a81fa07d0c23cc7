/* SPDX-License-Identifier: Apache-2.0 */
/* Reads Hugging Face's tokenizer.json. What would change the text beyond
 * recovery is refused by name; NFC normalisation is left out, as it changes
 * nothing in text that is normalised already. */
#include "model/tokenizer_parts.h"

#include "base/alloc.h"
#include "base/json.h"
#include "base/log.h"
#include "model/model_files.h"

#include <string.h>

static const char *text_at(const json_t *o, const char *key)
{
    const char *text = json_string_value(json_object_get(o, key));

    return text ? text : "";
}

static ferry_status refuse(const char *what, const char *kind)
{
    return ferry_fail(FERRY_ENOTSUP, "%s %s is not served", what,
                      kind[0] ? kind : "of unknown type");
}

/* ---- normaliser and pre-tokeniser ---- */

static ferry_status read_normalizer(const json_t *n)
{
    const json_t *parts = json_object_get(n, "normalizers");
    const char *type = text_at(n, "type");
    size_t i;

    if (!json_is_object(n))
        return FERRY_OK;
    if (strcmp(type, "NFC") == 0)
        return FERRY_OK;
    if (strcmp(type, "Sequence") != 0)
        return refuse("normalizer", type);
    for (i = 0; i < json_array_size(parts); i++) {
        const char *part = text_at(json_array_get(parts, i), "type");

        if (strcmp(part, "NFC") != 0)
            return refuse("normalizer", part);
    }
    return FERRY_OK;
}

static ferry_status read_split(const json_t *p, ferry__tokenizer *t)
{
    const json_t *pattern = json_object_get(p, "pattern");
    const char *regex = json_string_value(json_object_get(pattern, "Regex"));
    const char *plain = json_string_value(json_object_get(pattern, "String"));
    const char *behavior = text_at(p, "behavior");
    bool invert = json_is_true(json_object_get(p, "invert"));

    if (!regex && !plain)
        return ferry_fail(FERRY_EINVAL, "pre_tokenizer Split: no pattern");
    /* To remove what lies between matches is to keep the matches: these
     * patterns leave nothing between. */
    if (strcmp(behavior, "Isolated") != 0 &&
        !(strcmp(behavior, "Removed") == 0 && invert))
        return refuse("pre_tokenizer Split behavior", behavior);
    return ferry__pretokenizer_add(&t->cuts, regex ? regex : plain, !regex);
}

static ferry_status read_byte_level(const json_t *p, ferry__tokenizer *t,
                                    bool *out_byte_level)
{
    const json_t *use_regex = json_object_get(p, "use_regex");

    *out_byte_level = true;
    if (json_is_true(json_object_get(p, "add_prefix_space")))
        return refuse("pre_tokenizer ByteLevel", "add_prefix_space");
    if (json_is_false(use_regex))
        return FERRY_OK;
    return ferry__pretokenizer_add(&t->cuts, ferry__pattern_gpt2, false);
}

static ferry_status read_cut(const json_t *p, ferry__tokenizer *t,
                             bool *out_byte_level)
{
    const char *type = text_at(p, "type");

    if (strcmp(type, "ByteLevel") == 0)
        return read_byte_level(p, t, out_byte_level);
    if (strcmp(type, "Split") == 0)
        return read_split(p, t);
    if (strcmp(type, "Digits") == 0)
        return ferry__pretokenizer_add(
            &t->cuts,
            json_is_true(json_object_get(p, "individual_digits"))
                ? ferry__pattern_digit
                : ferry__pattern_digits,
            false);
    return refuse("pre_tokenizer", type);
}

static ferry_status read_cuts(const json_t *p, ferry__tokenizer *t)
{
    const json_t *parts = json_object_get(p, "pretokenizers");
    bool byte_level = false;
    size_t i;

    if (strcmp(text_at(p, "type"), "Sequence") != 0)
        FERRY_TRY(read_cut(p, t, &byte_level));
    for (i = 0; i < json_array_size(parts); i++)
        FERRY_TRY(read_cut(json_array_get(parts, i), t, &byte_level));
    if (!byte_level)
        return ferry_fail(FERRY_ENOTSUP,
                          "pre_tokenizer without ByteLevel is not served");
    return FERRY_OK;
}

/* ---- vocabulary and merges ---- */

static size_t count_ids(const json_t *vocab, const json_t *added)
{
    json_int_t top = -1;
    const char *text;
    json_t *id;
    size_t i;

    json_object_foreach((json_t *)(uintptr_t)vocab, text, id)
    {
        if (json_integer_value(id) > top)
            top = json_integer_value(id);
    }
    for (i = 0; i < json_array_size(added); i++) {
        id = json_object_get(json_array_get(added, i), "id");
        if (json_integer_value(id) > top)
            top = json_integer_value(id);
    }
    return top < 0 ? 0 : (size_t)top + 1;
}

static ferry_status read_vocab(const json_t *vocab, ferry__bpe *bpe)
{
    const char *text;
    json_t *id;

    json_object_foreach((json_t *)(uintptr_t)vocab, text, id)
    {
        if (!json_is_integer(id))
            return ferry_fail(FERRY_EINVAL, "token '%s': its id is no integer",
                              text);
        FERRY_TRY(
            ferry__bpe_token(bpe, json_integer_value(id), text, false, false));
    }
    return FERRY_OK;
}

static ferry_status read_added(const json_t *added, ferry__bpe *bpe)
{
    size_t i;

    for (i = 0; i < json_array_size(added); i++) {
        const json_t *o = json_array_get(added, i);
        const json_t *id = json_object_get(o, "id");

        if (!json_is_integer(id))
            return ferry_fail(FERRY_EINVAL, "added_tokens[%zu]: id is missing",
                              i);
        FERRY_TRY(ferry__bpe_token(
            bpe, json_integer_value(id), text_at(o, "content"), true,
            json_is_true(json_object_get(o, "special"))));
    }
    return FERRY_OK;
}

static ferry_status read_merge(const json_t *m, size_t index, ferry__bpe *bpe)
{
    const char *left = json_string_value(json_array_get(m, 0));
    const char *right = json_string_value(json_array_get(m, 1));
    const char *line = json_string_value(m), *space;

    if (left && right && json_array_size(m) == 2)
        return ferry__bpe_merge(bpe, left, strlen(left), right, strlen(right));
    space = line && line[0] ? strchr(line + 1, ' ') : NULL;
    if (!space)
        return ferry_fail(FERRY_EINVAL, "merges[%zu] is not a pair", index);
    return ferry__bpe_merge(bpe, line, (size_t)(space - line), space + 1,
                            strlen(space + 1));
}

static ferry_status read_model(const json_t *root, ferry__tokenizer *t)
{
    const json_t *model = json_object_get(root, "model");
    const json_t *vocab = json_object_get(model, "vocab");
    const json_t *merges = json_object_get(model, "merges");
    const json_t *added = json_object_get(root, "added_tokens");
    const char *type = text_at(model, "type");
    size_t i;

    if (type[0] && strcmp(type, "BPE") != 0)
        return refuse("tokenizer model", type);
    if (!json_is_object(vocab) || !json_is_array(merges))
        return ferry_fail(FERRY_EINVAL, "model has no vocab or no merges");
    if (json_is_true(json_object_get(model, "byte_fallback")))
        return refuse("tokenizer model BPE with", "byte_fallback");
    t->bpe.whole_first = json_is_true(json_object_get(model, "ignore_merges"));
    FERRY_TRY(ferry__bpe_reserve(&t->bpe, count_ids(vocab, added),
                                 json_array_size(merges)));
    FERRY_TRY(read_vocab(vocab, &t->bpe));
    FERRY_TRY(read_added(added, &t->bpe));
    FERRY_TRY(ferry__bpe_seal(&t->bpe));
    for (i = 0; i < json_array_size(merges); i++)
        FERRY_TRY(read_merge(json_array_get(merges, i), i, &t->bpe));
    return FERRY_OK;
}

/* ---- what is put before a text ---- */

static void read_template(const json_t *p, ferry__tokenizer *t)
{
    const json_t *first = json_array_get(json_object_get(p, "single"), 0);
    const json_t *token = json_object_get(first, "SpecialToken");
    size_t id;

    if (token && ferry__table_get(&t->bpe.by_text, text_at(token, "id"), &id))
        t->bos = (int32_t)id;
}

static void read_post_processor(const json_t *p, ferry__tokenizer *t)
{
    const json_t *parts = json_object_get(p, "processors");
    size_t i;

    if (strcmp(text_at(p, "type"), "TemplateProcessing") == 0)
        read_template(p, t);
    for (i = 0; i < json_array_size(parts); i++) {
        const json_t *part = json_array_get(parts, i);

        if (strcmp(text_at(part, "type"), "TemplateProcessing") == 0)
            read_template(part, t);
    }
}

static ferry_status read_root(const json_t *root, ferry__tokenizer *t)
{
    if (!json_is_object(root))
        return ferry_fail(FERRY_EINVAL, "must be an object");
    FERRY_TRY(read_normalizer(json_object_get(root, "normalizer")));
    FERRY_TRY(read_cuts(json_object_get(root, "pre_tokenizer"), t));
    FERRY_TRY(read_model(root, t));
    read_post_processor(json_object_get(root, "post_processor"), t);
    return FERRY_OK;
}

static ferry_status read_path(const char *path, ferry__tokenizer *t)
{
    char *text = NULL;
    size_t length = 0;
    json_t *root = NULL;
    ferry_status st;

    FERRY_TRY(ferry__model_read(path, FERRY__JSON_BYTES_MAX, &text, &length));
    st = ferry__json_parse("json", text, length, &root);
    ferry__free(text);
    FERRY_TRY(st);
    st = read_root(root, t);
    json_decref(root);
    return st;
}

ferry_status ferry__tokenizer_from_json(const char *path, ferry__tokenizer *t)
{
    ferry_status st = read_path(path, t);

    return st < 0 ? ferry__fail_prefix(st, "file %s", path) : st;
}
