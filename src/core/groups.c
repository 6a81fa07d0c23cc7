/* SPDX-License-Identifier: Apache-2.0 */
/* Layerwise gather groups (B9).
 * Invariant: the partition is a pure function of the ordered names, so every
 * side that has one rank's metadata derives the same groups. */
#include "core/groups.h"
#include "base/alloc.h"
#include "base/hash.h"
#include <string.h>

/* Digits of the segment that ends at `end`, as a number; false when it is
 * not all digits or would not fit. */
static bool segment_index(const char *segment, const char *end,
                          int64_t *out_index)
{
    int64_t value = 0;
    if (segment == end)
        return false;
    for (const char *c = segment; c < end; c++) {
        if (*c < '0' || *c > '9' || value > (INT64_MAX - 9) / 10)
            return false;
        value = value * 10 + (*c - '0');
    }
    *out_index = value;
    return true;
}

bool ferry__layer_key(const char *name, size_t *out_prefix_length,
                      int64_t *out_index)
{
    const char *segment = name;
    for (;;) {
        const char *end = strchr(segment, '.');
        bool last = end == NULL;
        if (last)
            end = segment + strlen(segment);
        if (segment_index(segment, end, out_index)) {
            *out_prefix_length = (size_t)(segment - name);
            return true;
        }
        if (last)
            return false;
        segment = end + 1;
    }
}

typedef struct layer_key {
    bool indexed;
    size_t prefix_length;
    int64_t index;
} layer_key;

static layer_key key_of(const char *name)
{
    layer_key k = {false, 0, 0};
    k.indexed = ferry__layer_key(name, &k.prefix_length, &k.index);
    return k;
}

static bool same_key(const char *a, const layer_key *ka, const char *b,
                     const layer_key *kb)
{
    if (ka->indexed != kb->indexed)
        return false;
    if (!ka->indexed)
        return true;
    return ka->index == kb->index && ka->prefix_length == kb->prefix_length &&
           memcmp(a, b, ka->prefix_length) == 0;
}

typedef struct grouping {
    const ferry_param_meta *params;
    ferry__table seen; /* "prefix.index" -> first parameter */
    const char **keys; /* owned texts of seen */
    size_t n_keys, keys_capacity;
    size_t *lengths;
    size_t n_groups, capacity;
} grouping;

static ferry_status come_back(const grouping *g, size_t i, const layer_key *key,
                              size_t first)
{
    return ferry_fail(
        FERRY_EINVAL,
        "parameter %s: layer %.*s%lld comes back after another group (it "
        "began with %s); names of one layer must be contiguous",
        g->params[i].name, (int)key->prefix_length, g->params[i].name,
        (long long)key->index, g->params[first].name);
}

/* Opens a group at parameter i; a layer that was there before is an error. */
static ferry_status open_group(grouping *g, size_t i, const layer_key *key)
{
    FERRY_TRY(ferry__grow(&g->lengths, &g->capacity, g->n_groups,
                          sizeof(*g->lengths)));
    if (key->indexed) {
        /* The index is written anew so that "03" and "3" are one layer. */
        char digits[24];
        size_t n = sizeof(digits), first = 0;
        int64_t rest = key->index;
        do {
            digits[--n] = (char)('0' + rest % 10);
            rest /= 10;
        } while (rest > 0);
        size_t n_digits = sizeof(digits) - n;
        FERRY_TRY(ferry__grow(&g->keys, &g->keys_capacity, g->n_keys,
                              sizeof(*g->keys)));
        char *text = ferry__alloc(key->prefix_length + n_digits + 1);
        if (!text)
            return FERRY_ENOMEM;
        memcpy(text, g->params[i].name, key->prefix_length);
        memcpy(text + key->prefix_length, digits + n, n_digits);
        g->keys[g->n_keys++] = text;
        ferry_status st = ferry__table_add(&g->seen, text, i, &first);
        if (st == FERRY_EEXIST)
            return come_back(g, i, key, first);
        FERRY_TRY(st);
    }
    g->lengths[g->n_groups++] = 0;
    return FERRY_OK;
}

static ferry_status run_grouping(grouping *g, size_t count)
{
    layer_key before = {false, 0, 0};
    for (size_t i = 0; i < count; i++) {
        layer_key key = key_of(g->params[i].name);
        if (i == 0 ||
            !same_key(g->params[i - 1].name, &before, g->params[i].name, &key))
            FERRY_TRY(open_group(g, i, &key));
        g->lengths[g->n_groups - 1]++;
        before = key;
    }
    return FERRY_OK;
}

ferry_status ferry__layerwise_groups(const ferry_param_meta *params,
                                     size_t count, size_t **out_lengths,
                                     size_t *out_groups)
{
    grouping g;
    memset(&g, 0, sizeof(g));
    g.params = params;
    ferry_status st = run_grouping(&g, count);
    for (size_t i = 0; i < g.n_keys; i++)
        ferry__free((void *)(uintptr_t)g.keys[i]);
    ferry__free(g.keys);
    ferry__table_free(&g.seen);
    if (st < 0) {
        ferry__free(g.lengths);
        return st;
    }
    *out_lengths = g.lengths;
    *out_groups = g.n_groups;
    return FERRY_OK;
}
