/* SPDX-License-Identifier: Apache-2.0 */
/* Text to ids and back: added tokens are found first, the text between them
 * is cut into pieces, and each piece is encoded. */
#include "model/tokenizer_parts.h"

#include "base/alloc.h"
#include "model/model_files.h"

#include <stdlib.h>
#include <string.h>

typedef struct sized {
    int32_t id;
    size_t n_bytes;
} sized;

static int longest_first(const void *a, const void *b)
{
    const sized *x = a, *y = b;

    if (x->n_bytes != y->n_bytes)
        return x->n_bytes < y->n_bytes ? 1 : -1;
    return (x->id > y->id) - (x->id < y->id);
}

static size_t count_added(const ferry__bpe *bpe)
{
    size_t n = 0, i;

    for (i = 0; i < bpe->n_tokens; i++)
        n += bpe->tokens[i].added && bpe->tokens[i].n_bytes > 0;
    return n;
}

static ferry_status list_added(ferry__tokenizer *t)
{
    size_t n = count_added(&t->bpe), i, at = 0;
    sized *list = ferry__alloc_array(n, sizeof(*list));

    t->added = ferry__alloc_array(n, sizeof(*t->added));
    if (!list || !t->added) {
        ferry__free(list);
        return FERRY_ENOMEM;
    }
    for (i = 0; i < t->bpe.n_tokens; i++) {
        const ferry__token *token = &t->bpe.tokens[i];

        if (!token->added || token->n_bytes == 0)
            continue;
        list[at++] = (sized){(int32_t)i, token->n_bytes};
        t->starts[(unsigned char)token->bytes[0]] = true;
    }
    qsort(list, n, sizeof(*list), longest_first);
    for (i = 0; i < n; i++)
        t->added[i] = list[i].id;
    t->n_added = n;
    ferry__free(list);
    return FERRY_OK;
}

static ferry_status open_file(const char *path, bool gguf, ferry__tokenizer *t)
{
    t->bos = -1;
    FERRY_TRY(gguf ? ferry__tokenizer_from_gguf(path, t)
                   : ferry__tokenizer_from_json(path, t));
    return list_added(t);
}

ferry_status ferry__tokenizer_open(const char *path, ferry__tokenizer **out)
{
    ferry__tokenizer *t = NULL;
    char *file = NULL;
    bool gguf = false;
    ferry_status st;

    FERRY_TRY(ferry__model_file(path, "tokenizer.json", &file, &gguf));
    t = ferry__alloc(sizeof(*t));
    st = t ? open_file(file, gguf, t) : FERRY_ENOMEM;
    ferry__free(file);
    if (st < 0) {
        ferry__tokenizer_close(&t);
        return st;
    }
    *out = t;
    return FERRY_OK;
}

void ferry__tokenizer_close(ferry__tokenizer **tokenizer)
{
    ferry__tokenizer *t = *tokenizer;

    if (!t)
        return;
    ferry__bpe_free(&t->bpe);
    ferry__pretokenizer_free(&t->cuts);
    ferry__free(t->added);
    ferry__free(t);
    *tokenizer = NULL;
}

int32_t ferry__tokenizer_size(const ferry__tokenizer *t)
{
    return (int32_t)t->bpe.n_tokens;
}

int32_t ferry__tokenizer_bos(const ferry__tokenizer *t)
{
    return t->bos;
}

const char *ferry__tokenizer_bytes(const ferry__tokenizer *t, int32_t id,
                                   bool with_special, size_t *out_length)
{
    const ferry__token *token;

    *out_length = 0;
    if (id < 0 || (size_t)id >= t->bpe.n_tokens)
        return NULL;
    token = &t->bpe.tokens[id];
    if (!token->text)
        return NULL;
    if (token->special && !with_special)
        return "";
    *out_length = token->n_bytes;
    return token->bytes;
}

/* ---- encoding ---- */

/* Bytes of the UTF-8 sequence at s, 0 when it is none. */
static size_t sequence(const unsigned char *s, size_t left)
{
    size_t n, i;
    uint32_t c;

    if (s[0] < 0x80)
        return 1;
    n = s[0] >= 0xF0 ? 4 : s[0] >= 0xE0 ? 3 : 2;
    if (s[0] < 0xC2 || s[0] > 0xF4 || n > left)
        return 0;
    c = s[0] & (0x7Fu >> n);
    for (i = 1; i < n; i++) {
        if ((s[i] & 0xC0) != 0x80)
            return 0;
        c = c << 6 | (s[i] & 0x3Fu);
    }
    if ((n == 3 && c < 0x800) || (n == 4 && (c < 0x10000 || c > 0x10FFFF)) ||
        (c >= 0xD800 && c <= 0xDFFF))
        return 0;
    return n;
}

static ferry_status check_utf8(const char *text, size_t length)
{
    size_t at = 0, n;

    while (at < length) {
        n = sequence((const unsigned char *)text + at, length - at);
        if (n == 0)
            return ferry_fail(FERRY_EINVAL,
                              "text is not valid utf-8 at byte %zu", at);
        at += n;
    }
    return FERRY_OK;
}

/* The longest added token at `text`, or -1. */
static int32_t added_at(const ferry__tokenizer *t, const char *text,
                        size_t left)
{
    size_t i;

    if (!t->starts[(unsigned char)text[0]])
        return -1;
    for (i = 0; i < t->n_added; i++) {
        const ferry__token *token = &t->bpe.tokens[t->added[i]];

        if (token->n_bytes <= left &&
            memcmp(token->bytes, text, token->n_bytes) == 0)
            return t->added[i];
    }
    return -1;
}

typedef struct encoding {
    const ferry__tokenizer *t;
    ferry__ids ids;
} encoding;

static ferry_status encode_piece(void *arg, const char *piece, size_t length)
{
    encoding *e = arg;

    return ferry__bpe_encode(&e->t->bpe, piece, length, &e->ids);
}

static ferry_status encode_text(encoding *e, const char *text, size_t length)
{
    return ferry__pretokenizer_cut(&e->t->cuts, text, length, encode_piece, e);
}

static ferry_status encode_all(encoding *e, const char *text, size_t length)
{
    size_t begin = 0, at = 0;

    while (at < length) {
        int32_t id = added_at(e->t, text + at, length - at);

        if (id < 0) {
            at++;
            continue;
        }
        FERRY_TRY(encode_text(e, text + begin, at - begin));
        FERRY_TRY(ferry__ids_add(&e->ids, id));
        at += e->t->bpe.tokens[id].n_bytes;
        begin = at;
    }
    return encode_text(e, text + begin, length - begin);
}

ferry_status ferry__tokenizer_encode(const ferry__tokenizer *t,
                                     const char *text, size_t length,
                                     int32_t **out_ids, size_t *out_count)
{
    encoding e = {.t = t};
    ferry_status st;

    FERRY_TRY(check_utf8(text, length));
    st = encode_all(&e, text, length);
    if (st == FERRY_OK && !e.ids.items) {
        e.ids.items = ferry__alloc(sizeof(*e.ids.items));
        st = e.ids.items ? FERRY_OK : FERRY_ENOMEM;
    }
    if (st < 0) {
        ferry__free(e.ids.items);
        return st;
    }
    *out_ids = e.ids.items;
    *out_count = e.ids.count;
    return FERRY_OK;
}
