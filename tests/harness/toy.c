/* SPDX-License-Identifier: Apache-2.0 */
/* Toy checkpoints: names, shapes, fill(seed), and the dtypes' arithmetic. */
#include "harness/toy_private.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

toy_options toy_defaults(const toy_options *options)
{
    toy_options o = *options;

    if (o.tp_size == 0)
        o.tp_size = 1;
    if (o.n_layers == 0)
        o.n_layers = 2;
    if (o.vocab == 0)
        o.vocab = TOY_VOCAB;
    if (o.wire == FERRY_DTYPE_NONE)
        o.wire = FERRY_DTYPE_BF16;
    if (o.store == FERRY_DTYPE_NONE)
        o.store = FERRY_DTYPE_BF16;
    return o;
}

/* ---- values ---- */

double toy_value(uint32_t seed, const char *name, int64_t index)
{
    uint64_t h = UINT64_C(0x9E3779B97F4A7C15) * (seed + UINT64_C(1));

    for (const char *p = name; *p != '\0'; p++)
        h = (h ^ (uint64_t)(unsigned char)*p) * UINT64_C(0x100000001B3);
    h ^= (uint64_t)index * UINT64_C(0xD6E8FEB86659FD93);
    h ^= h >> 32;
    h *= UINT64_C(0xD6E8FEB86659FD93);
    h ^= h >> 29;
    /* 17 significant bits: exact in f32, rounded in bf16 and f16. */
    return ((double)(h % 131071) - 65535.0) / 32768.0;
}

/* Rounds to `bits` significant bits, ties to even; the exponent is free. */
static double round_bits(double v, int bits)
{
    int e;
    double m;

    if (v == 0.0)
        return v;
    m = frexp(v, &e);
    return ldexp(nearbyint(ldexp(m, bits)), e - bits);
}

static uint16_t encode_small(double v, int exponent_bits, int mantissa_bits)
{
    int bias = (1 << (exponent_bits - 1)) - 1, e;
    double m = fabs(round_bits(v, mantissa_bits + 1));
    uint16_t sign =
        (uint16_t)((signbit(v) ? 1 : 0) << (exponent_bits + mantissa_bits));

    if (m == 0.0)
        return sign;
    frexp(m, &e);
    e = e - 1 + bias;
    assert(e > 0); /* toy values are no subnormals */
    return (uint16_t)(sign | (e << mantissa_bits) |
                      ((int)ldexp(m, mantissa_bits - (e - bias)) &
                       ((1 << mantissa_bits) - 1)));
}

void toy_encode(ferry_dtype dtype, double value, void *out)
{
    float f = (float)value;
    uint16_t h;
    uint8_t b;
    int32_t i;

    switch ((int)dtype) {
    case FERRY_DTYPE_F64:
        memcpy(out, &value, 8);
        break;
    case FERRY_DTYPE_F32:
        memcpy(out, &f, 4);
        break;
    case FERRY_DTYPE_BF16:
        h = encode_small(value, 8, 7);
        memcpy(out, &h, 2);
        break;
    case FERRY_DTYPE_F16:
        h = encode_small(fabs(value) < 6.2e-5 ? 0.0 : value, 5, 10);
        memcpy(out, &h, 2);
        break;
    case FERRY_DTYPE_F8_E4M3: /* toy: kept to what e4m3 holds exactly */
        b = (uint8_t)encode_small(
            fabs(value) < 0.02 ? 0.0 : round_bits(value, 4), 4, 3);
        memcpy(out, &b, 1);
        break;
    case FERRY_DTYPE_I32:
        i = (int32_t)(value * 32768.0);
        memcpy(out, &i, 4);
        break;
    default:
        assert(!"a toy has no such dtype");
    }
}

static double decode_small(unsigned bits, int exponent_bits, int mantissa_bits)
{
    int bias = (1 << (exponent_bits - 1)) - 1;
    int e = (int)(bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
    double m = (double)(bits & ((1u << mantissa_bits) - 1));
    double v = e == 0 ? ldexp(m, 1 - bias - mantissa_bits)
                      : ldexp(m + (double)(1 << mantissa_bits),
                              e - bias - mantissa_bits);

    return bits >> (exponent_bits + mantissa_bits) ? -v : v;
}

double toy_decode(ferry_dtype dtype, const void *bytes)
{
    uint16_t h;
    float f;
    double d;
    int32_t i;

    switch ((int)dtype) {
    case FERRY_DTYPE_F64:
        memcpy(&d, bytes, 8);
        return d;
    case FERRY_DTYPE_F32:
        memcpy(&f, bytes, 4);
        return (double)f;
    case FERRY_DTYPE_BF16:
        memcpy(&h, bytes, 2);
        return decode_small(h, 8, 7);
    case FERRY_DTYPE_F16:
        memcpy(&h, bytes, 2);
        return decode_small(h, 5, 10);
    case FERRY_DTYPE_F8_E4M3:
        return decode_small(*(const uint8_t *)bytes, 4, 3);
    case FERRY_DTYPE_I32:
        memcpy(&i, bytes, 4);
        return (double)i / 32768.0;
    default:
        assert(!"a toy has no such dtype");
        return 0.0;
    }
}

/* ---- names ---- */

typedef struct namer {
    const toy_options *o;
    toy_name_fn fn;
    void *arg;
    int layer;
} namer;

static void named(const namer *n, const char *name, ferry_dtype dtype,
                  int32_t ndim, int64_t d0, int64_t d1)
{
    int64_t shape[2] = {d0, d1};
    char prefixed[160];
    const char *rest;

    if (n->o->prefix && strncmp(name, "model.", 6) == 0) {
        rest = name + 6;
        snprintf(prefixed, sizeof(prefixed), "model.language_model.%s", rest);
        name = prefixed;
    }
    n->fn(n->arg, name, dtype, ndim, shape);
}

static void in_layer(const namer *n, const char *what, ferry_dtype dtype,
                     int32_t ndim, int64_t d0, int64_t d1)
{
    char name[128];

    snprintf(name, sizeof(name), "model.layers.%d.%s", n->layer, what);
    named(n, name, dtype, ndim, d0, d1);
}

static void dense_mlp(const namer *n)
{
    ferry_dtype w = n->o->wire;

    in_layer(n, "mlp.gate_proj.weight", w, 2, TOY_FFN, TOY_HIDDEN);
    in_layer(n, "mlp.up_proj.weight", w, 2, TOY_FFN, TOY_HIDDEN);
    in_layer(n, "mlp.down_proj.weight", w, 2, TOY_HIDDEN, TOY_FFN);
}

static void expert_mlp(const namer *n)
{
    ferry_dtype w = n->o->wire;
    char name[64];

    in_layer(n, "mlp.gate.weight", w, 2, TOY_EXPERTS, TOY_HIDDEN);
    in_layer(n, "mlp.gate.e_score_correction_bias", FERRY_DTYPE_F32, 1,
             TOY_EXPERTS, 0);
    for (int e = 0; e < TOY_EXPERTS; e++) {
        snprintf(name, sizeof(name), "mlp.experts.%d.gate_proj.weight", e);
        in_layer(n, name, w, 2, TOY_FFN, TOY_HIDDEN);
        snprintf(name, sizeof(name), "mlp.experts.%d.up_proj.weight", e);
        in_layer(n, name, w, 2, TOY_FFN, TOY_HIDDEN);
        snprintf(name, sizeof(name), "mlp.experts.%d.down_proj.weight", e);
        in_layer(n, name, w, 2, TOY_HIDDEN, TOY_FFN);
    }
}

static void llama_names(const namer *head)
{
    ferry_dtype w = head->o->wire;
    namer n = *head;

    named(&n, "model.embed_tokens.weight", w, 2, n.o->vocab, TOY_HIDDEN);
    for (n.layer = 0; n.layer < n.o->n_layers; n.layer++) {
        in_layer(&n, "self_attn.q_proj.weight", w, 2, TOY_HIDDEN, TOY_HIDDEN);
        in_layer(&n, "self_attn.k_proj.weight", w, 2, TOY_HIDDEN, TOY_HIDDEN);
        in_layer(&n, "self_attn.v_proj.weight", w, 2, TOY_HIDDEN, TOY_HIDDEN);
        in_layer(&n, "self_attn.o_proj.weight", w, 2, TOY_HIDDEN, TOY_HIDDEN);
        if (n.o->kind == TOY_M)
            expert_mlp(&n);
        else
            dense_mlp(&n);
        in_layer(&n, "input_layernorm.weight", w, 1, TOY_HIDDEN, 0);
        in_layer(&n, "post_attention_layernorm.weight", w, 1, TOY_HIDDEN, 0);
    }
    named(&n, "model.norm.weight", w, 1, TOY_HIDDEN, 0);
    named(&n, "lm_head.weight", w, 2, n.o->vocab, TOY_HIDDEN);
}

static void step_names(const namer *head)
{
    namer n = *head;

    for (n.layer = 0; n.layer < n.o->n_layers; n.layer++) {
        in_layer(&n, "proj.weight", FERRY_DTYPE_F8_E4M3, 2, 4, 4);
        in_layer(&n, "proj.weight_scale_inv", FERRY_DTYPE_F32, 2, 2, 2);
        in_layer(&n, "k_scale", FERRY_DTYPE_F32, 0, 0, 0);
        in_layer(&n, "A", FERRY_DTYPE_F32, 1, 2, 0);
        in_layer(&n, "D", FERRY_DTYPE_F32, 1, 2, 0);
        in_layer(&n, "dt", FERRY_DTYPE_F32, 1, 2, 0);
    }
}

void toy_each_name(const toy_options *options, toy_name_fn fn, void *arg)
{
    toy_options o = toy_defaults(options);
    namer n = {&o, fn, arg, 0};

    switch (o.kind) {
    case TOY_A:
    case TOY_M:
        llama_names(&n);
        break;
    case TOY_Q:
        step_names(&n);
        break;
    case TOY_B:
        named(&n, "model.rows.weight", FERRY_DTYPE_F32, 2, 6, 128);
        named(&n, "model.turned.weight", FERRY_DTYPE_F32, 2, 64, 5);
        named(&n, "model.empty.weight", FERRY_DTYPE_F32, 2, 0, 4);
        break;
    }
}

/* ---- checkpoint ---- */

size_t toy_bytes(const ferry_param_meta *meta)
{
    size_t n = ferry_dtype_bytes(meta->dtype);

    for (int32_t d = 0; d < meta->ndim; d++)
        n *= (size_t)meta->shape[d];
    return n;
}

static void add_name(void *arg, const char *name, ferry_dtype dtype,
                     int32_t ndim, const int64_t *shape)
{
    toy_checkpoint *c = arg;
    ferry_param_meta *m;

    c->metas = realloc(c->metas, (c->count + 1) * sizeof(*c->metas));
    c->bytes = realloc(c->bytes, (c->count + 1) * sizeof(*c->bytes));
    assert(c->metas != NULL && c->bytes != NULL);
    m = &c->metas[c->count];
    memset(m, 0, sizeof(*m));
    m->name = strdup(name);
    m->dtype = dtype;
    m->ndim = ndim;
    for (int32_t d = 0; d < ndim; d++)
        m->shape[d] = shape[d];
    c->bytes[c->count] = malloc(toy_bytes(m) + 1);
    assert(m->name != NULL && c->bytes[c->count] != NULL);
    c->count++;
}

toy_checkpoint *toy_checkpoint_create(const toy_options *options)
{
    toy_checkpoint *c = calloc(1, sizeof(*c));

    assert(c != NULL);
    c->options = toy_defaults(options);
    toy_each_name(options, add_name, c);
    toy_checkpoint_fill(c, 0);
    return c;
}

void toy_checkpoint_free(toy_checkpoint *c)
{
    for (size_t i = 0; i < c->count; i++) {
        free((void *)(uintptr_t)c->metas[i].name);
        free(c->bytes[i]);
    }
    free(c->metas);
    free(c->bytes);
    free(c);
}

/* A prefixed name carries the values of the plain one. */
static const char *plain_name(const char *name, char *buffer, size_t size)
{
    const char *p = "model.language_model.";

    if (strncmp(name, p, strlen(p)) != 0)
        return name;
    snprintf(buffer, size, "model.%s", name + strlen(p));
    return buffer;
}

void toy_checkpoint_fill(toy_checkpoint *c, uint32_t seed)
{
    char buffer[160];

    for (size_t i = 0; i < c->count; i++) {
        const ferry_param_meta *m = &c->metas[i];
        size_t elem = ferry_dtype_bytes(m->dtype);
        const char *name = plain_name(m->name, buffer, sizeof(buffer));

        if (c->options.tied && strcmp(name, "lm_head.weight") == 0)
            name = "model.embed_tokens.weight";
        for (size_t k = 0; k < toy_bytes(m) / elem; k++)
            toy_encode(m->dtype, toy_value(seed, name, (int64_t)k),
                       (char *)c->bytes[i] + k * elem);
    }
}

size_t toy_checkpoint_find(const toy_checkpoint *c, const char *name)
{
    for (size_t i = 0; i < c->count; i++)
        if (strcmp(c->metas[i].name, name) == 0)
            return i;
    assert(!"no such name in the checkpoint");
    return 0;
}

ferry_source toy_checkpoint_source(toy_checkpoint *c, size_t first,
                                   size_t count)
{
    const char **names = calloc(count + 1, sizeof(*names));
    ferry_tensor *tensors = calloc(count + 1, sizeof(*tensors));
    ferry_source source = {NULL, NULL};
    ferry_status st;

    assert(names != NULL && tensors != NULL);
    for (size_t i = 0; i < count; i++) {
        const ferry_param_meta *m = &c->metas[first + i];

        names[i] = m->name;
        ferry_tensor_init(&tensors[i], c->bytes[first + i], m->dtype, m->ndim,
                          m->shape);
    }
    st = ferry_source_module(names, tensors, count, &source);
    assert(st == FERRY_OK);
    (void)st;
    free(names);
    free(tensors);
    return source;
}
