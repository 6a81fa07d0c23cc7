/* SPDX-License-Identifier: Apache-2.0 */
/* Toy models: the parameter table and an ordinary loader. */
#include "harness/toy_private.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

size_t toy_slot_bytes(const ferry_param *p)
{
    size_t n = 1;

    for (int32_t d = 0; d < p->ndim; d++)
        n *= (size_t)p->shape[d];
    return n / (size_t)ferry_dtype_block(p->dtype) *
           ferry_dtype_bytes(p->dtype);
}

/* ---- the table ---- */

static ferry_param *add(toy *t, toy_role role, int32_t layer, const char *name,
                        ferry_dtype dtype, int32_t ndim, int64_t d0, int64_t d1,
                        int64_t d2)
{
    toy_stored *s = &t->stored[t->n];
    ferry_param *p = &t->params[t->n];
    int64_t shape[3] = {d0, d1, d2};

    assert(t->n < TOY_STORED_MAX);
    s->role = role;
    s->layer = layer;
    if (layer >= 0)
        snprintf(s->name, sizeof(s->name), "model.layers.%d.%s", layer, name);
    else
        snprintf(s->name, sizeof(s->name), "%s", name);
    snprintf(s->step, sizeof(s->step), "%s.step", s->name);
    p->name = s->name;
    p->dtype = dtype;
    p->ndim = ndim;
    for (int32_t d = 0; d < ndim; d++)
        p->shape[d] = shape[d];
    p->data = calloc(1, toy_slot_bytes(p) + 1);
    assert(p->data != NULL);
    t->n++;
    return p;
}

static void add_llama(toy *t)
{
    ferry_dtype s = t->options.store;
    int64_t tp = t->options.tp_size, h = TOY_HIDDEN, f = TOY_FFN;

    add(t, ROLE_EMBED, -1, "model.embed_tokens.weight", s, 2,
        t->options.vocab / tp, h, 0);
    for (int32_t l = 0; l < t->options.n_layers; l++) {
        add(t, ROLE_QKV, l, "self_attn.qkv_proj.weight", s, 2, 3 * h / tp, h,
            0);
        add(t, ROLE_O, l, "self_attn.o_proj.weight", s, 2, h, h / tp, 0);
        if (t->options.kind == TOY_M) {
            add(t, ROLE_ROUTER, l, "mlp.gate.weight", s, 2, TOY_EXPERTS, h, 0);
            add(t, ROLE_BIAS_GATE, l, "mlp.gate.e_score_correction_bias",
                FERRY_DTYPE_F32, 1, TOY_EXPERTS, 0, 0);
            add(t, ROLE_BIAS_EXPERTS, l, "mlp.experts.e_score_correction_bias",
                FERRY_DTYPE_F32, 1, TOY_EXPERTS, 0, 0);
            add(t, ROLE_W13, l, "mlp.experts.w13_weight", s, 3, TOY_EXPERTS,
                2 * f / tp, h);
            add(t, ROLE_W2, l, "mlp.experts.w2_weight", s, 3, TOY_EXPERTS, h,
                f / tp);
        } else {
            add(t, ROLE_GATE_UP, l, "mlp.gate_up_proj.weight", s, 2, 2 * f / tp,
                h, 0);
            add(t, ROLE_DOWN, l, "mlp.down_proj.weight", s, 2, h, f / tp, 0);
        }
        add(t, ROLE_NORM_IN, l, "input_layernorm.weight", s, 1, h, 0, 0);
        add(t, ROLE_NORM_POST, l, "post_attention_layernorm.weight", s, 1, h, 0,
            0);
        add(t, ROLE_COS, l, "self_attn.cos_cache", FERRY_DTYPE_F32, 1, 4, 0, 0)
            ->flags = FERRY_PARAM_RUNTIME;
    }
    add(t, ROLE_NORM, -1, "model.norm.weight", s, 1, h, 0, 0);
    if (!t->options.tied)
        add(t, ROLE_HEAD, -1, "lm_head.weight", s, 2, t->options.vocab / tp + 1,
            h, 0)
            ->valid_rows = t->options.vocab / tp;
}

static void add_steps(toy *t)
{
    for (int32_t l = 0; l < t->options.n_layers; l++) {
        add(t, ROLE_SCALED, l, "proj.weight", t->options.store, 2, 4, 4, 0);
        add(t, ROLE_K_SCALE, l, "k_scale", FERRY_DTYPE_F32, 0, 0, 0, 0);
        add(t, ROLE_A, l, "A", FERRY_DTYPE_F32, 1, 2, 0, 0);
        add(t, ROLE_D, l, "D", FERRY_DTYPE_F32, 1, 2, 0, 0);
        add(t, ROLE_DT, l, "dt", FERRY_DTYPE_F32, 1, 2, 0, 0);
    }
}

/* ---- steps ---- */

static float f32_at(const ferry_tensor *t, int64_t i)
{
    float f;

    memcpy(&f, (const char *)t->data + (size_t)i * 4, 4);
    return f;
}

static ferry_status step_scaled(void *arg, const ferry_tensor *dst,
                                const ferry_tensor *inputs, int32_t n)
{
    size_t elem = ferry_dtype_bytes(dst->dtype);

    (void)arg;
    assert(n == 2 && inputs[0].ndim == 2 && inputs[0].shape[1] == 4);
    for (int64_t i = 0; i < 16; i++) {
        float w = (float)toy_decode(inputs[0].dtype,
                                    (const char *)inputs[0].data + i);
        float s = f32_at(&inputs[1], (i / 4) / 2 * 2 + (i % 4) / 2);

        toy_encode(dst->dtype, (double)(w * s),
                   (char *)dst->data + (size_t)(dst->offset + i) * elem);
    }
    return FERRY_OK;
}

static ferry_status step_negate(void *arg, const ferry_tensor *dst,
                                const ferry_tensor *inputs, int32_t n)
{
    float *out = (float *)dst->data + dst->offset;

    (void)arg;
    (void)n;
    /* Copies, then negates in place: run on its own result it would undo
     * itself, so it must run once per arrival (O-35). */
    for (int64_t i = 0; i < 2; i++)
        out[i] = f32_at(&inputs[0], i);
    for (int64_t i = 0; i < 2; i++)
        out[i] = -out[i];
    return FERRY_OK;
}

static ferry_status step_exp(void *arg, const ferry_tensor *dst,
                             const ferry_tensor *inputs, int32_t n)
{
    float *out = (float *)dst->data + dst->offset;

    (void)arg;
    (void)n;
    for (int64_t i = 0; i < 2; i++)
        out[i] = -expf(f32_at(&inputs[0], i));
    return FERRY_OK;
}

/* ---- the loader ---- */

static size_t slot_of(const toy *t, toy_role role, int32_t layer)
{
    for (size_t i = 0; i < t->n; i++)
        if (t->stored[i].role == role &&
            (layer < 0 || t->stored[i].layer == layer))
            return i;
    assert(!"no such slot");
    return 0;
}

typedef struct loading {
    const toy *t;
    ferry_loader *loader;
    const ferry_tensor *src;
    int32_t layer;
} loading;

static ferry_status expect(const loading *l, int64_t d0, int64_t d1)
{
    int64_t shape[2] = {d0, d1};

    return ferry_loader_expect(l->loader, l->src, 2, shape);
}

/* This rank's part of src along `dim` into rows [at, …) of a slot. */
static ferry_status cut_rows(const loading *l, toy_role role, int64_t at)
{
    const toy_options *o = &l->t->options;
    int64_t n = l->src->shape[0] / o->tp_size;
    ferry_tensor dst, src;

    FERRY_TRY(
        ferry_loader_slot(l->loader, slot_of(l->t, role, l->layer), &dst));
    FERRY_TRY(ferry_tensor_narrow(&dst, 0, at, n, &dst));
    FERRY_TRY(ferry_tensor_narrow(l->src, 0, n * o->tp_rank, n, &src));
    return ferry_load_copy(l->loader, &dst, &src);
}

static ferry_status cut_columns(const loading *l, toy_role role)
{
    const toy_options *o = &l->t->options;
    int64_t n = l->src->shape[1] / o->tp_size;
    ferry_tensor dst, src;

    FERRY_TRY(
        ferry_loader_slot(l->loader, slot_of(l->t, role, l->layer), &dst));
    FERRY_TRY(ferry_tensor_narrow(l->src, 1, n * o->tp_rank, n, &src));
    return ferry_load_copy(l->loader, &dst, &src);
}

static ferry_status whole(const loading *l, toy_role role, int32_t ndim,
                          int64_t d0)
{
    ferry_tensor dst;

    FERRY_TRY(ferry_loader_expect(l->loader, l->src, ndim, &d0));
    FERRY_TRY(
        ferry_loader_slot(l->loader, slot_of(l->t, role, l->layer), &dst));
    return ferry_load_copy(l->loader, &dst, l->src);
}

static ferry_status expert(const loading *l, const char *rest)
{
    const toy_options *o = &l->t->options;
    int64_t f = TOY_FFN / o->tp_size;
    ferry_tensor dst, src;
    char kind[16];
    int e;
    bool down;

    if (sscanf(rest, "%d.%15[a-z]_proj.weight", &e, kind) != 2 || e < 0 ||
        e >= TOY_EXPERTS)
        return ferry_fail(FERRY_EUNKNOWN, "no such expert");
    down = strcmp(kind, "down") == 0;
    FERRY_TRY(down ? expect(l, TOY_HIDDEN, TOY_FFN)
                   : expect(l, TOY_FFN, TOY_HIDDEN));
    FERRY_TRY(ferry_loader_slot(
        l->loader, slot_of(l->t, down ? ROLE_W2 : ROLE_W13, l->layer), &dst));
    FERRY_TRY(ferry_tensor_select(&dst, 0, e, &dst));
    if (!down)
        FERRY_TRY(ferry_tensor_narrow(&dst, 0, strcmp(kind, "up") == 0 ? f : 0,
                                      f, &dst));
    FERRY_TRY(
        ferry_tensor_narrow(l->src, down ? 1 : 0, f * o->tp_rank, f, &src));
    return ferry_load_copy(l->loader, &dst, &src);
}

static ferry_status step(const loading *l, toy_role role, ferry_step_fn fn,
                         int32_t n_inputs, int32_t input)
{
    size_t slot = slot_of(l->t, role, l->layer);
    ferry_step s = {l->t->stored[slot].step, fn, NULL, n_inputs};
    ferry_tensor dst;

    FERRY_TRY(ferry_loader_slot(l->loader, slot, &dst));
    return ferry_load_step(l->loader, &s, &dst, input, l->src);
}

static ferry_status load_attention(const loading *l, const char *rest)
{
    static const char order[] = "qkv";
    int64_t r = TOY_HIDDEN / l->t->options.tp_size;
    const char *which = strchr(order, rest[0]);

    FERRY_TRY(expect(l, TOY_HIDDEN, TOY_HIDDEN));
    if (strcmp(rest, "o_proj.weight") == 0)
        return cut_columns(l, ROLE_O);
    if (which == NULL || strcmp(rest + 1, "_proj.weight") != 0)
        return ferry_fail(FERRY_EUNKNOWN, "unknown");
    return cut_rows(l, ROLE_QKV, (which - order) * r);
}

static ferry_status load_mlp(const loading *l, const char *rest)
{
    int64_t f = TOY_FFN / l->t->options.tp_size;

    if (l->t->options.kind == TOY_M) {
        if (strncmp(rest, "experts.", 8) == 0)
            return expert(l, rest + 8);
        if (strcmp(rest, "gate.weight") == 0) {
            loading one = *l;
            ferry_tensor dst;

            FERRY_TRY(expect(l, TOY_EXPERTS, TOY_HIDDEN));
            FERRY_TRY(ferry_loader_slot(
                one.loader, slot_of(l->t, ROLE_ROUTER, l->layer), &dst));
            return ferry_load_copy(l->loader, &dst, l->src);
        }
        if (strcmp(rest, "gate.e_score_correction_bias") == 0) {
            FERRY_TRY(whole(l, ROLE_BIAS_GATE, 1, TOY_EXPERTS));
            return whole(l, ROLE_BIAS_EXPERTS, 1, TOY_EXPERTS);
        }
    } else if (strcmp(rest, "gate_proj.weight") == 0) {
        FERRY_TRY(expect(l, TOY_FFN, TOY_HIDDEN));
        return cut_rows(l, ROLE_GATE_UP, 0);
    } else if (strcmp(rest, "up_proj.weight") == 0) {
        FERRY_TRY(expect(l, TOY_FFN, TOY_HIDDEN));
        return cut_rows(l, ROLE_GATE_UP, f);
    } else if (strcmp(rest, "down_proj.weight") == 0) {
        FERRY_TRY(expect(l, TOY_HIDDEN, TOY_FFN));
        return cut_columns(l, ROLE_DOWN);
    }
    return ferry_fail(FERRY_EUNKNOWN, "unknown");
}

static ferry_status load_layer(const loading *l, const char *rest)
{
    if (l->t->options.kind == TOY_Q) {
        if (strcmp(rest, "proj.weight") == 0)
            return step(l, ROLE_SCALED, step_scaled, 2, 0);
        if (strcmp(rest, "proj.weight_scale_inv") == 0)
            return step(l, ROLE_SCALED, step_scaled, 2, 1);
        if (strcmp(rest, "k_scale") == 0)
            return whole(l, ROLE_K_SCALE, 0, 0);
        if (strcmp(rest, "A") == 0)
            return step(l, ROLE_A, step_negate, 1, 0);
        if (strcmp(rest, "D") == 0)
            return whole(l, ROLE_D, 1, 2);
        if (strcmp(rest, "dt") == 0)
            return step(l, ROLE_DT, step_exp, 1, 0);
        return ferry_fail(FERRY_EUNKNOWN, "unknown");
    }
    if (strncmp(rest, "self_attn.", 10) == 0)
        return load_attention(l, rest + 10);
    if (strncmp(rest, "mlp.", 4) == 0)
        return load_mlp(l, rest + 4);
    if (strcmp(rest, "input_layernorm.weight") == 0)
        return whole(l, ROLE_NORM_IN, 1, TOY_HIDDEN);
    if (strcmp(rest, "post_attention_layernorm.weight") == 0)
        return whole(l, ROLE_NORM_POST, 1, TOY_HIDDEN);
    return ferry_fail(FERRY_EUNKNOWN, "unknown");
}

/* Vocabulary rows, through either name when the two are tied. */
static ferry_status load_vocab(const loading *l, toy_role role)
{
    const toy_options *o = &l->t->options;
    int64_t n = o->vocab / o->tp_size;
    ferry_tensor dst, src;

    FERRY_TRY(expect(l, o->vocab, TOY_HIDDEN));
    if (!o->tied)
        return cut_rows(l, role, 0);
    FERRY_TRY(
        ferry_loader_slot(l->loader, slot_of(l->t, ROLE_EMBED, -1), &dst));
    FERRY_TRY(ferry_tensor_narrow(l->src, 0, n * o->tp_rank, n, &src));
    return ferry_load_tied(l->loader, &dst, &src);
}

static ferry_status load_blocks(const loading *l, const char *name)
{
    ferry_tensor dst;

    if (strcmp(name, "model.rows.weight") == 0) {
        FERRY_TRY(expect(l, 6, 128));
        return cut_columns(l, ROLE_ROWS);
    }
    if (strcmp(name, "model.turned.weight") == 0) {
        FERRY_TRY(expect(l, 64, 5));
        FERRY_TRY(
            ferry_loader_slot(l->loader, slot_of(l->t, ROLE_TURNED, -1), &dst));
        FERRY_TRY(ferry_tensor_transpose(&dst, 0, 1, &dst));
        return ferry_load_copy(l->loader, &dst, l->src);
    }
    if (strcmp(name, "model.empty.weight") == 0)
        return FERRY_OK;
    return ferry_fail(FERRY_EUNKNOWN, "unknown");
}

static ferry_status load(void *self, ferry_loader *loader, const char *name,
                         const ferry_tensor *tensor)
{
    const toy *t = self;
    loading l = {t, loader, tensor, -1};
    int layer, used = 0;

    if (t->options.kind == TOY_B)
        return load_blocks(&l, name);
    if (sscanf(name, "model.layers.%d.%n", &layer, &used) == 1 && used > 0) {
        if (layer < 0 || layer >= t->options.n_layers)
            return ferry_fail(FERRY_EUNKNOWN, "no such layer");
        l.layer = layer;
        return load_layer(&l, name + used);
    }
    if (t->options.kind != TOY_Q) {
        if (strcmp(name, "model.embed_tokens.weight") == 0)
            return load_vocab(&l, ROLE_EMBED);
        if (strcmp(name, "lm_head.weight") == 0)
            return load_vocab(&l, ROLE_HEAD);
        if (strcmp(name, "model.norm.weight") == 0)
            return whole(&l, ROLE_NORM, 1, TOY_HIDDEN);
    }
    return ferry_fail(FERRY_EUNKNOWN, "unknown");
}

/* In the loader's spelling, which has no prefix. */
static const char *checkpoint_name(void *self, size_t i)
{
    const toy *t = self;

    return i < t->plain->count ? t->plain->metas[i].name : NULL;
}

static ferry_status checkpoint_meta(void *self, size_t i,
                                    ferry_param_meta *out_meta)
{
    *out_meta = ((const toy *)self)->plain->metas[i];
    return FERRY_OK;
}

/* ---- making ---- */

toy *toy_create(const toy_options *options)
{
    toy *t = calloc(1, sizeof(*t));
    toy_options plain = *options;

    assert(t != NULL);
    t->options = toy_defaults(options);
    t->params = calloc(TOY_STORED_MAX, sizeof(*t->params));
    t->stored = calloc(TOY_STORED_MAX, sizeof(*t->stored));
    assert(t->params != NULL && t->stored != NULL);
    t->names = toy_checkpoint_create(options);
    plain.prefix = 0;
    t->plain = toy_checkpoint_create(&plain);
    switch (t->options.kind) {
    case TOY_A:
    case TOY_M:
        add_llama(t);
        break;
    case TOY_Q:
        add_steps(t);
        break;
    case TOY_B:
        add(t, ROLE_ROWS, -1, "model.rows.weight", FERRY_DTYPE_Q8_0, 2, 6,
            128 / t->options.tp_size, 0);
        add(t, ROLE_TURNED, -1, "model.turned.weight", FERRY_DTYPE_Q8_0, 2, 5,
            64, 0);
        break;
    }
    t->map.from = "model.language_model.";
    t->map.to = "model.";
    t->model.size = sizeof(t->model);
    t->model.name = "toy";
    t->model.self = t;
    t->model.params = t->params;
    t->model.n_params = t->n;
    t->model.maps = &t->map;
    t->model.n_maps = t->options.prefix ? 1 : 0;
    t->model.load = load;
    t->model.checkpoint_name = checkpoint_name;
    t->model.checkpoint_meta = checkpoint_meta;
    toy_poison(t);
    return t;
}

void toy_free(toy *t)
{
    for (size_t i = 0; i < t->n; i++)
        free(t->params[i].data);
    free(t->params);
    free(t->stored);
    toy_checkpoint_free(t->names);
    toy_checkpoint_free(t->plain);
    free(t);
}

const ferry_model *toy_model(toy *t)
{
    return &t->model;
}
