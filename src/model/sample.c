/* SPDX-License-Identifier: Apache-2.0 */
/* Sampling without sorting or allocating: the least likely token that is
 * kept is found by its bits, eleven at a time. */
#include "model/sample.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

#define TOP_MAX 32
#define BINS    2048

/* Rises with the logit; NaN is below everything. */
static uint32_t key_of(float logit)
{
    uint32_t bits;

    if (isnan(logit))
        return 0;
    memcpy(&bits, &logit, sizeof(bits));
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

typedef struct drawing {
    const float *logits;
    int64_t n;
    double max, scale; /* scale = 1 / temperature */
} drawing;

/* Weight relative to the most likely token. */
static double weight_of(const drawing *d, float logit)
{
    if (isnan(logit))
        return 0;
    if ((double)logit == d->max)
        return 1;
    return exp(((double)logit - d->max) * d->scale);
}

static int64_t argmax(const float *logits, int64_t n)
{
    int64_t best = 0, i;

    for (i = 1; i < n; i++) {
        if (logits[i] > logits[best] ||
            (isnan(logits[best]) && !isnan(logits[i])))
            best = i;
    }
    return best;
}

/* Tokens with a higher key than `key` are kept, and of those with `key` the
 * `n_equal` lowest ids. */
typedef struct cut {
    uint32_t key;
    int64_t n_equal;
} cut;

/* What a token adds towards the goal: 1 (top_k), or its weight (top_p). */
static double amount(const drawing *d, float logit, bool by_weight)
{
    return by_weight ? weight_of(d, logit) : 1.0;
}

static void fill_bins(const drawing *d, bool by_weight, uint32_t prefix,
                      int shift, int width, double bins[BINS])
{
    uint32_t mask = (1u << width) - 1;
    int64_t i;

    memset(bins, 0, BINS * sizeof(bins[0]));
    for (i = 0; i < d->n; i++) {
        uint32_t key = key_of(d->logits[i]);

        if (shift + width == 32 || key >> (shift + width) == prefix)
            bins[key >> shift & mask] += amount(d, d->logits[i], by_weight);
    }
}

/* The shortest run of most likely tokens whose amounts reach `goal`. */
static cut find_cut(const drawing *d, bool by_weight, double goal)
{
    static const int SHIFTS[] = {21, 10, 0}, WIDTHS[] = {11, 11, 10};
    double bins[BINS], reached = 0, each;
    uint32_t prefix = 0;
    cut c = {0, 0};
    int round;

    for (round = 0; round < 3; round++) {
        int32_t bin = (int32_t)(1u << WIDTHS[round]) - 1, lowest = -1;

        fill_bins(d, by_weight, prefix, SHIFTS[round], WIDTHS[round], bins);
        for (; bin >= 0; bin--) {
            if (bins[bin] <= 0)
                continue;
            lowest = bin;
            if (reached + bins[bin] >= goal)
                break;
            reached += bins[bin];
        }
        if (bin < 0) { /* rounding kept the sum below: keep all of them */
            bin = lowest < 0 ? 0 : lowest;
            reached -= bins[bin];
        }
        prefix = prefix << WIDTHS[round] | (uint32_t)bin;
    }
    c.key = prefix;
    each = by_weight ? 0 : 1;
    if (by_weight) {
        float logit;
        uint32_t bits = prefix & 0x80000000u ? prefix & 0x7FFFFFFFu : ~prefix;

        memcpy(&logit, &bits, sizeof(logit));
        each = weight_of(d, logit);
    }
    c.n_equal = each > 0 ? (int64_t)ceil((goal - reached) / each) : INT64_MAX;
    if (c.n_equal < 1)
        c.n_equal = 1;
    return c;
}

static bool kept(const cut *c, uint32_t key, int64_t *n_equal)
{
    return key > c->key || (key == c->key && (*n_equal)++ < c->n_equal);
}

/* The stricter of two cuts. */
static cut stricter(cut a, cut b)
{
    if (a.key != b.key)
        return a.key > b.key ? a : b;
    return a.n_equal < b.n_equal ? a : b;
}

static double kept_weight(const drawing *d, const cut *c)
{
    double total = 0;
    int64_t n_equal = 0, i;

    for (i = 0; i < d->n; i++) {
        if (kept(c, key_of(d->logits[i]), &n_equal))
            total += weight_of(d, d->logits[i]);
    }
    return total;
}

/* A number in [0, 1) from seed and draw number. */
static double uniform(uint64_t seed, uint64_t draw)
{
    uint64_t z = seed + 0x9E3779B97F4A7C15u;
    int i;

    for (i = 0; i < 2; i++) {
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
        z ^= z >> 31;
        if (i == 0)
            z += (draw + 1) * 0x9E3779B97F4A7C15u;
    }
    return (double)(z >> 11) * 0x1p-53;
}

static int64_t draw_token(const drawing *d, const cut *c, double target)
{
    int64_t n_equal = 0, chosen = -1, i;
    double sum = 0;

    for (i = 0; i < d->n; i++) {
        double w;

        if (!kept(c, key_of(d->logits[i]), &n_equal))
            continue;
        w = weight_of(d, d->logits[i]);
        if (w <= 0)
            continue;
        chosen = i;
        sum += w;
        if (sum > target)
            break;
    }
    return chosen;
}

static int64_t choose(const drawing *d, const ferry__sampling *s, uint64_t draw)
{
    cut c = {0, INT64_MAX};
    int64_t token;
    double total;

    if (s->top_k > 0 && s->top_k < d->n)
        c = find_cut(d, false, (double)s->top_k);
    total = kept_weight(d, &c);
    if (s->top_p < 1) {
        /* top_p is a share of what top_k left. */
        c = stricter(c, find_cut(d, true, s->top_p * total));
        total = kept_weight(d, &c);
    }
    token = draw_token(d, &c, uniform(s->seed, draw) * total);
    return token < 0 ? argmax(d->logits, d->n) : token;
}

static double log_total(const float *logits, int64_t n, double max)
{
    drawing d = {logits, n, max, 1.0};
    double total = 0;
    int64_t i;

    for (i = 0; i < n; i++)
        total += weight_of(&d, logits[i]);
    return log(total);
}

void ferry__sample(const float *logits, int64_t vocab_size,
                   const ferry__sampling *sampling, uint64_t draw,
                   ferry__sampled *out)
{
    int64_t best = argmax(logits, vocab_size), token = best;
    double max = (double)logits[best];

    if (sampling->temperature > 0) {
        drawing d = {logits, vocab_size, max, 1.0 / sampling->temperature};

        token = choose(&d, sampling, draw);
    }
    out->token = (int32_t)token;
    out->logprob = (float)((double)logits[token] - max -
                           log_total(logits, vocab_size, max));
}

void ferry__top_logprobs(const float *logits, int64_t vocab_size, int32_t n,
                         ferry__sampled *out)
{
    uint32_t keys[TOP_MAX];
    int32_t count = 0, j;
    int64_t i;
    double max, total;

    if (n > TOP_MAX)
        n = TOP_MAX;
    for (i = 0; i < vocab_size && n > 0; i++) {
        uint32_t key = key_of(logits[i]);

        if (count == n && key <= keys[n - 1])
            continue;
        if (count < n)
            count++;
        for (j = count - 1; j > 0 && keys[j - 1] < key; j--) {
            keys[j] = keys[j - 1];
            out[j] = out[j - 1];
        }
        keys[j] = key;
        out[j].token = (int32_t)i;
    }
    if (count == 0)
        return;
    max = (double)logits[out[0].token];
    total = log_total(logits, vocab_size, max);
    for (j = 0; j < count; j++)
        out[j].logprob = (float)((double)logits[out[j].token] - max - total);
}
