/* SPDX-License-Identifier: Apache-2.0 */
/* The vocabulary and the merges of byte-level BPE. */
#include "model/bpe.h"

#include "base/alloc.h"
#include "base/str.h"

#include <assert.h>
#include <string.h>

#define TOKENS_MAX ((size_t)1 << 22)

typedef struct ferry__merge {
    int32_t left, right; /* ids; left -1: a free slot */
    int32_t rank, result;
} ferry__merge;

ferry_status ferry__ids_add(ferry__ids *ids, int32_t id)
{
    FERRY_TRY(ferry__grow(&ids->items, &ids->capacity, ids->count,
                          sizeof(*ids->items)));
    ids->items[ids->count++] = id;
    return FERRY_OK;
}

/* ---- the alphabet: a printable character for each byte ---- */

static bool is_plain(int byte)
{
    return (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) ||
           byte >= 174;
}

/* Character of each byte: itself, or the next free one from 256 on. */
static void fill_alphabet(uint16_t chars[256])
{
    uint16_t next = 256;
    int byte;

    for (byte = 0; byte < 256; byte++)
        chars[byte] = is_plain(byte) ? (uint16_t)byte : next++;
}

static size_t put_utf8(char *out, uint16_t c)
{
    if (c < 0x80) {
        out[0] = (char)c;
        return 1;
    }
    out[0] = (char)(0xC0 | c >> 6);
    out[1] = (char)(0x80 | (c & 0x3F));
    return 2;
}

/* The byte that the character at text[*at] stands for, or -1. */
static int byte_at(const char *text, size_t *at)
{
    static const int EXTRA_MAX = 256 + 68;
    unsigned char c = (unsigned char)text[*at];
    int wide, byte, next = 256;

    if (c < 0x80) {
        (*at)++;
        return is_plain(c) ? c : -1;
    }
    if (c < 0xC2 || c > 0xDF || ((unsigned char)text[*at + 1] & 0xC0) != 0x80)
        return -1;
    wide = (c & 0x1F) << 6 | ((unsigned char)text[*at + 1] & 0x3F);
    *at += 2;
    if (wide < 256)
        return is_plain(wide) ? wide : -1;
    if (wide >= EXTRA_MAX)
        return -1;
    for (byte = 0; byte < 256; byte++) {
        if (!is_plain(byte) && next++ == wide)
            return byte;
    }
    return -1;
}

/* Bytes of a token; text outside of the alphabet stands for itself. */
static void spell(ferry__token *t, bool raw)
{
    size_t n = strlen(t->text), at = 0, out = 0;

    while (!raw && at < n) {
        int byte = byte_at(t->text, &at);

        if (byte < 0)
            break;
        t->bytes[out++] = (char)byte;
    }
    if (raw || at < n) {
        memcpy(t->bytes, t->text, n);
        out = n;
    }
    t->bytes[out] = '\0';
    t->n_bytes = out;
}

/* ---- building ---- */

ferry_status ferry__bpe_reserve(ferry__bpe *bpe, size_t n_tokens,
                                size_t n_merges)
{
    size_t i;

    if (n_tokens == 0 || n_tokens > TOKENS_MAX || n_merges > TOKENS_MAX)
        return ferry_fail(FERRY_EINVAL,
                          "%zu tokens and %zu merges, the limit is %zu",
                          n_tokens, n_merges, TOKENS_MAX);
    bpe->merge_slots = 16;
    while (bpe->merge_slots < 2 * n_merges)
        bpe->merge_slots *= 2;
    bpe->tokens = ferry__alloc_array(n_tokens, sizeof(*bpe->tokens));
    bpe->merges = ferry__alloc_array(bpe->merge_slots, sizeof(*bpe->merges));
    if (!bpe->tokens || !bpe->merges)
        return FERRY_ENOMEM;
    for (i = 0; i < bpe->merge_slots; i++)
        bpe->merges[i].left = -1;
    bpe->n_tokens = n_tokens;
    return FERRY_OK;
}

static ferry_status name_token(ferry__bpe *bpe, ferry__token *t, int64_t id,
                               const char *text)
{
    size_t old = 0;
    ferry_status st;

    t->text = ferry__strdup(text);
    t->bytes = ferry__alloc(strlen(text) + 1);
    if (!t->text || !t->bytes)
        return FERRY_ENOMEM;
    st = ferry__table_add(&bpe->by_text, t->text, (size_t)id, &old);
    if (st == FERRY_EEXIST)
        return ferry_fail(st, "token '%s': id %zu, then %lld", text, old,
                          (long long)id);
    return st;
}

ferry_status ferry__bpe_token(ferry__bpe *bpe, int64_t id, const char *text,
                              bool added, bool special)
{
    ferry__token *t;

    if (id < 0 || (uint64_t)id >= bpe->n_tokens)
        return ferry_fail(FERRY_EINVAL, "token '%s': id %lld of %zu", text,
                          (long long)id, bpe->n_tokens);
    t = &bpe->tokens[id];
    if (t->text && strcmp(t->text, text) != 0)
        return ferry_fail(FERRY_EEXIST, "id %lld: token '%s', then '%s'",
                          (long long)id, t->text, text);
    if (!t->text)
        FERRY_TRY(name_token(bpe, t, id, text));
    spell(t, added);
    t->added = added;
    t->special = special;
    return FERRY_OK;
}

ferry_status ferry__bpe_seal(ferry__bpe *bpe)
{
    uint16_t chars[256];
    char text[3];
    size_t id, found = 0;
    int byte;

    fill_alphabet(chars);
    for (byte = 0; byte < 256; byte++) {
        text[put_utf8(text, chars[byte])] = '\0';
        bpe->byte_ids[byte] = -1;
        if (ferry__table_get(&bpe->by_text, text, &id)) {
            bpe->byte_ids[byte] = (int32_t)id;
            found++;
        }
    }
    /* Every ASCII letter at least: other kinds of BPE have bytes of another
     * spelling. */
    for (byte = 'a'; byte <= 'z'; byte++) {
        if (bpe->byte_ids[byte] < 0 || bpe->byte_ids[' '] < 0)
            return ferry_fail(FERRY_ENOTSUP,
                              "not a byte-level vocabulary: %zu of 256 "
                              "bytes have a token",
                              found);
    }
    return FERRY_OK;
}

static size_t hash_pair(int32_t left, int32_t right)
{
    uint64_t z = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;

    z *= 0x9E3779B97F4A7C15u;
    return (size_t)(z ^ z >> 29);
}

/* The slot of a pair, or the free one where it belongs. */
static ferry__merge *merge_slot(const ferry__bpe *bpe, int32_t left,
                                int32_t right)
{
    size_t mask = bpe->merge_slots - 1, at = hash_pair(left, right) & mask;

    while (bpe->merges[at].left >= 0 &&
           (bpe->merges[at].left != left || bpe->merges[at].right != right))
        at = (at + 1) & mask;
    return &bpe->merges[at];
}

static ferry_status find_text(const ferry__bpe *bpe, const char *text,
                              int32_t *out_id)
{
    size_t id;

    if (!ferry__table_get(&bpe->by_text, text, &id))
        return ferry_fail(FERRY_EINVAL,
                          "merge %zu: '%s' is not in the vocabulary",
                          bpe->n_merges, text);
    *out_id = (int32_t)id;
    return FERRY_OK;
}

static ferry_status find_merged(const ferry__bpe *bpe, ferry__str *text,
                                const char *left, size_t left_length,
                                const char *right, size_t right_length,
                                ferry__merge *out)
{
    ferry__str_append_n(text, left, left_length);
    if (text->failed)
        return FERRY_ENOMEM;
    FERRY_TRY(find_text(bpe, text->data, &out->left));
    ferry__str_append_n(text, right, right_length);
    if (text->failed)
        return FERRY_ENOMEM;
    FERRY_TRY(find_text(bpe, text->data + left_length, &out->right));
    return find_text(bpe, text->data, &out->result);
}

ferry_status ferry__bpe_merge(ferry__bpe *bpe, const char *left,
                              size_t left_length, const char *right,
                              size_t right_length)
{
    ferry__merge merge = {0}, *slot;
    ferry__str text = {0};
    ferry_status st =
        find_merged(bpe, &text, left, left_length, right, right_length, &merge);

    ferry__str_free(&text);
    FERRY_TRY(st);
    assert(bpe->n_merges < bpe->merge_slots / 2 + 8);
    merge.rank = (int32_t)bpe->n_merges++;
    slot = merge_slot(bpe, merge.left, merge.right);
    if (slot->left < 0)
        *slot = merge;
    return FERRY_OK;
}

void ferry__bpe_free(ferry__bpe *bpe)
{
    size_t i;

    for (i = 0; i < bpe->n_tokens; i++) {
        ferry__free(bpe->tokens[i].text);
        ferry__free(bpe->tokens[i].bytes);
    }
    ferry__free(bpe->tokens);
    ferry__free(bpe->merges);
    ferry__table_free(&bpe->by_text);
    *bpe = (ferry__bpe){0};
}

/* ---- encoding ---- */

/* The symbols of a piece are a linked list; candidates wait in a heap and
 * are dropped when one of their two symbols has changed meanwhile. */
typedef struct symbol {
    int32_t id; /* -1: merged into the one before */
    int32_t prev, next;
} symbol;

typedef struct candidate {
    int32_t rank, at;    /* at: index of the left symbol */
    int32_t left, right; /* ids when it was found */
    int32_t result;
} candidate;

typedef struct merging {
    const ferry__bpe *bpe;
    symbol *symbols;
    candidate *heap;
    size_t count, capacity;
} merging;

static bool before(const candidate *a, const candidate *b)
{
    return a->rank < b->rank || (a->rank == b->rank && a->at < b->at);
}

static ferry_status push(merging *m, candidate c)
{
    size_t at = m->count;

    FERRY_TRY(ferry__grow(&m->heap, &m->capacity, m->count, sizeof(*m->heap)));
    m->count++;
    while (at > 0 && before(&c, &m->heap[(at - 1) / 2])) {
        m->heap[at] = m->heap[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    m->heap[at] = c;
    return FERRY_OK;
}

static candidate pop(merging *m)
{
    candidate top = m->heap[0], last = m->heap[--m->count];
    size_t at = 0, child;

    while ((child = 2 * at + 1) < m->count) {
        if (child + 1 < m->count &&
            before(&m->heap[child + 1], &m->heap[child]))
            child++;
        if (!before(&m->heap[child], &last))
            break;
        m->heap[at] = m->heap[child];
        at = child;
    }
    if (m->count > 0)
        m->heap[at] = last;
    return top;
}

static ferry_status propose(merging *m, int32_t at)
{
    const symbol *left, *right;
    const ferry__merge *merge;

    if (at < 0 || m->symbols[at].next < 0)
        return FERRY_OK;
    left = &m->symbols[at];
    right = &m->symbols[left->next];
    merge = merge_slot(m->bpe, left->id, right->id);
    if (merge->left < 0)
        return FERRY_OK;
    return push(m, (candidate){.rank = merge->rank,
                               .at = at,
                               .left = left->id,
                               .right = right->id,
                               .result = merge->result});
}

static ferry_status apply(merging *m, const candidate *c)
{
    symbol *left = &m->symbols[c->at], *right;

    if (left->id != c->left || left->next < 0)
        return FERRY_OK;
    right = &m->symbols[left->next];
    if (right->id != c->right)
        return FERRY_OK;
    left->id = c->result;
    left->next = right->next;
    right->id = -1;
    if (left->next >= 0)
        m->symbols[left->next].prev = c->at;
    FERRY_TRY(propose(m, left->prev));
    return propose(m, c->at);
}

static ferry_status fill_symbols(merging *m, const char *piece, size_t length)
{
    size_t i;

    for (i = 0; i < length; i++) {
        int32_t id = m->bpe->byte_ids[(unsigned char)piece[i]];

        if (id < 0)
            return ferry_fail(FERRY_EINVAL,
                              "byte 0x%02x has no token in the vocabulary",
                              (unsigned char)piece[i]);
        m->symbols[i].id = id;
        m->symbols[i].prev = (int32_t)i - 1;
        m->symbols[i].next = i + 1 < length ? (int32_t)i + 1 : -1;
    }
    return FERRY_OK;
}

static ferry_status merge_up(merging *m, const char *piece, size_t length,
                             ferry__ids *out)
{
    int32_t at;
    size_t i;

    FERRY_TRY(fill_symbols(m, piece, length));
    for (i = 0; i + 1 < length; i++)
        FERRY_TRY(propose(m, (int32_t)i));
    while (m->count > 0) {
        candidate c = pop(m);

        FERRY_TRY(apply(m, &c));
    }
    for (at = 0; at >= 0; at = m->symbols[at].next)
        FERRY_TRY(ferry__ids_add(out, m->symbols[at].id));
    return FERRY_OK;
}

/* The id of a piece that is a token as a whole, or -1. */
static ferry_status find_whole(const ferry__bpe *bpe, const char *piece,
                               size_t length, int32_t *out_id)
{
    uint16_t chars[256];
    char *text = ferry__alloc(2 * length + 1);
    size_t i, n = 0, id;

    if (!text)
        return FERRY_ENOMEM;
    fill_alphabet(chars);
    for (i = 0; i < length; i++)
        n += put_utf8(text + n, chars[(unsigned char)piece[i]]);
    *out_id = ferry__table_get(&bpe->by_text, text, &id) ? (int32_t)id : -1;
    ferry__free(text);
    return FERRY_OK;
}

ferry_status ferry__bpe_encode(const ferry__bpe *bpe, const char *piece,
                               size_t length, ferry__ids *out)
{
    merging m = {.bpe = bpe};
    int32_t whole = -1;
    ferry_status st;

    if (length == 0)
        return FERRY_OK;
    if (length > INT32_MAX)
        return ferry_fail(FERRY_EOVERFLOW, "a piece of %zu bytes", length);
    if (bpe->whole_first && length > 1)
        FERRY_TRY(find_whole(bpe, piece, length, &whole));
    if (whole >= 0)
        return ferry__ids_add(out, whole);
    m.symbols = ferry__alloc_array(length, sizeof(*m.symbols));
    if (!m.symbols)
        return FERRY_ENOMEM;
    st = merge_up(&m, piece, length, out);
    ferry__free(m.symbols);
    ferry__free(m.heap);
    return st;
}
