/* SPDX-License-Identifier: Apache-2.0 */
/* What a toy must store, element by element, and how it differs. */
#include "harness/toy_private.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Which checkpoint element element k of stored parameter i is. */
static int64_t origin(const toy *t, size_t i, int64_t k, char *name,
                      size_t size)
{
    const toy_stored *s = &t->stored[i];
    const ferry_param *p = &t->params[i];
    int64_t tp = t->options.tp_size, rank = t->options.tp_rank;
    int64_t columns = p->ndim > 0 ? p->shape[p->ndim - 1] : 1;
    int64_t row = k / columns, column = k % columns, part;
    int64_t qkv = TOY_HIDDEN / tp, ffn = TOY_FFN / tp;
    static const char *const projections[] = {"q", "k", "v"};
    static const char *const halves[] = {"gate", "up"};

    snprintf(name, size, "%s", s->name);
    switch (s->role) {
    case ROLE_EMBED:
    case ROLE_HEAD:
        return (rank * (t->options.vocab / tp) + row) * TOY_HIDDEN + column;
    case ROLE_QKV:
        snprintf(name, size, "model.layers.%d.self_attn.%s_proj.weight",
                 s->layer, projections[row / qkv]);
        return (rank * qkv + row % qkv) * TOY_HIDDEN + column;
    case ROLE_O:
        return row * TOY_HIDDEN + rank * columns + column;
    case ROLE_GATE_UP:
        snprintf(name, size, "model.layers.%d.mlp.%s_proj.weight", s->layer,
                 halves[row / ffn]);
        return (rank * ffn + row % ffn) * TOY_HIDDEN + column;
    case ROLE_DOWN:
        return row * TOY_FFN + rank * columns + column;
    case ROLE_BIAS_EXPERTS:
        snprintf(name, size, "model.layers.%d.mlp.gate.e_score_correction_bias",
                 s->layer);
        return k;
    case ROLE_W13:
        part = row % (2 * ffn);
        snprintf(name, size, "model.layers.%d.mlp.experts.%d.%s_proj.weight",
                 s->layer, (int)(row / (2 * ffn)), halves[part / ffn]);
        return (rank * ffn + part % ffn) * TOY_HIDDEN + column;
    case ROLE_W2:
        snprintf(name, size, "model.layers.%d.mlp.experts.%d.down_proj.weight",
                 s->layer, (int)(row / TOY_HIDDEN));
        return (row % TOY_HIDDEN) * TOY_FFN + rank * columns + column;
    case ROLE_ROWS:
        return row * 128 + rank * columns + column;
    case ROLE_TURNED:
        return column * 5 + row;
    default:
        return k;
    }
}

/* The value as it came over the wire: rounded to the wire dtype. */
static double wire_value(const toy *t, uint32_t seed, const char *name,
                         int64_t index)
{
    char bytes[8], full[160];
    const char *lookup = name;
    ferry_dtype wire;

    if (t->options.prefix && strncmp(name, "model.", 6) == 0) {
        snprintf(full, sizeof(full), "model.language_model.%s", name + 6);
        lookup = full;
    }
    wire = t->names->metas[toy_checkpoint_find(t->names, lookup)].dtype;
    toy_encode(wire, toy_value(seed, name, index), bytes);
    return toy_decode(wire, bytes);
}

static double stored_value(const toy *t, size_t i, int64_t k, uint32_t seed)
{
    const toy_stored *s = &t->stored[i];
    char name[160];
    int64_t at = origin(t, i, k, name, sizeof(name));
    double v = wire_value(t, seed, name, at);

    switch (s->role) {
    case ROLE_SCALED:
        snprintf(name, sizeof(name), "model.layers.%d.proj.weight_scale_inv",
                 s->layer);
        return (double)((float)v * (float)wire_value(t, seed, name,
                                                     k / 8 * 2 + k % 4 / 2));
    case ROLE_A:
        return -v;
    case ROLE_DT:
        return (double)-expf((float)v);
    default:
        return v;
    }
}

/* One block of q8_0: an f16 scale, then 32 signed bytes. */
static void expect_block(const toy *t, size_t i, int64_t first, uint32_t seed,
                         unsigned char *out)
{
    float x[32], largest = 0.0f, d, inverse;

    for (int64_t k = 0; k < 32; k++) {
        x[k] = (float)stored_value(t, i, first + k, seed);
        largest = fmaxf(largest, fabsf(x[k]));
    }
    d = largest / 127.0f;
    inverse = d > 0.0f ? 1.0f / d : 0.0f;
    toy_encode(FERRY_DTYPE_F16, (double)d, out);
    for (int64_t k = 0; k < 32; k++)
        out[2 + k] = (unsigned char)(signed char)roundf(x[k] * inverse);
}

static void expect_slot(const toy *t, size_t i, uint32_t seed,
                        unsigned char *out)
{
    const ferry_param *p = &t->params[i];
    size_t unit = ferry_dtype_bytes(p->dtype), bytes = toy_slot_bytes(p);
    int64_t block = ferry_dtype_block(p->dtype);
    int64_t valid = INT64_MAX;
    static const float cosines[4] = {1.0f, 2.0f, 3.0f, 4.0f};

    if (t->stored[i].role == ROLE_COS) {
        memcpy(out, cosines, sizeof(cosines));
        return;
    }
    memset(out, 0, bytes);
    if (p->valid_rows > 0)
        valid = p->valid_rows * p->shape[1];
    for (size_t at = 0; at < bytes; at += unit) {
        int64_t k = (int64_t)(at / unit) * block;

        if (k >= valid)
            break;
        if (block > 1)
            expect_block(t, i, k, seed, out + at);
        else
            toy_encode(p->dtype, stored_value(t, i, k, seed), out + at);
    }
}

void toy_poison(toy *t)
{
    for (size_t i = 0; i < t->n; i++) {
        const ferry_param *p = &t->params[i];
        size_t row;

        if (t->stored[i].role == ROLE_COS) {
            expect_slot(t, i, 0, p->data);
            continue;
        }
        memset(p->data, 0x7F, toy_slot_bytes(p));
        if (p->valid_rows == 0)
            continue;
        row = toy_slot_bytes(p) / (size_t)p->shape[0];
        memset((char *)p->data + (size_t)p->valid_rows * row, 0,
               (size_t)(p->shape[0] - p->valid_rows) * row);
    }
}

static const char *slot_differs(toy *t, size_t i, uint32_t seed)
{
    size_t bytes = toy_slot_bytes(&t->params[i]);
    unsigned char *want = calloc(1, bytes + 1);
    const unsigned char *have = t->params[i].data;
    const char *answer = NULL;

    assert(want != NULL);
    expect_slot(t, i, seed, want);
    for (size_t k = 0; k < bytes && answer == NULL; k++)
        if (want[k] != have[k]) {
            snprintf(t->why, sizeof(t->why),
                     "%s: byte %zu of %zu is %02x, fill(%u) has %02x",
                     t->stored[i].name, k, bytes, have[k], seed, want[k]);
            answer = t->why;
        }
    free(want);
    return answer;
}

const char *toy_differs(toy *t, uint32_t seed)
{
    const char *answer = NULL;

    for (size_t i = 0; i < t->n && answer == NULL; i++)
        answer = slot_differs(t, i, seed);
    return answer;
}

size_t toy_slot(const toy *t, const char *name)
{
    for (size_t i = 0; i < t->n; i++)
        if (strcmp(t->stored[i].name, name) == 0)
            return i;
    assert(!"no such stored parameter");
    return 0;
}

const char *toy_slot_differs(toy *t, const char *name, uint32_t seed)
{
    return slot_differs(t, toy_slot(t, name), seed);
}

uint64_t toy_sum(const toy *t)
{
    uint64_t h = 1469598103934665603u;

    for (size_t i = 0; i < t->n; i++)
        for (size_t k = 0; k < toy_slot_bytes(&t->params[i]); k++)
            h = (h ^ ((const unsigned char *)t->params[i].data)[k]) *
                1099511628211u;
    return h;
}
