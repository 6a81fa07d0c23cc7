/* SPDX-License-Identifier: Apache-2.0 */
/* The table of stored parameters: vLLM's run-time names, this rank's shapes.
 */
#include "model/model_state.h"

#include "base/alloc.h"

#include <stdio.h>

static const struct {
    const char *suffix;
    bool is_matrix; /* in the kernel format; vectors are f32 */
} KINDS[FERRY__KIND_COUNT] = {
    [FERRY__KIND_QKV] = {"self_attn.qkv_proj.weight", true},
    [FERRY__KIND_QKV_BIAS] = {"self_attn.qkv_proj.bias", false},
    [FERRY__KIND_O] = {"self_attn.o_proj.weight", true},
    [FERRY__KIND_Q_NORM] = {"self_attn.q_norm.weight", false},
    [FERRY__KIND_K_NORM] = {"self_attn.k_norm.weight", false},
    [FERRY__KIND_GATE_UP] = {"mlp.gate_up_proj.weight", true},
    [FERRY__KIND_DOWN] = {"mlp.down_proj.weight", true},
    [FERRY__KIND_IN_NORM] = {"input_layernorm.weight", false},
    [FERRY__KIND_POST_NORM] = {"post_attention_layernorm.weight", false},
};

static bool present(const ferry__model_config *c, ferry__kind kind)
{
    if (kind == FERRY__KIND_QKV_BIAS)
        return c->qkv_bias;
    if (kind == FERRY__KIND_Q_NORM || kind == FERRY__KIND_K_NORM)
        return c->qk_norm;
    return true;
}

static void cut(const ferry__model_config *c, ferry__shard *s)
{
    int64_t tp = s->size, rank = s->rank, left;

    s->n_heads = c->n_heads / tp;
    /* With fewer key-value heads than ranks each rank holds one, shared. */
    s->n_kv_heads = c->n_kv_heads >= tp ? c->n_kv_heads / tp : 1;
    s->first_kv_head = rank * c->n_kv_heads / tp;
    s->q_rows = s->n_heads * c->head_dim;
    s->kv_rows = s->n_kv_heads * c->head_dim;
    s->inter = c->intermediate_size / tp;
    s->vocab_rows = (c->vocab_size + tp - 1) / tp;
    s->vocab_first = rank * s->vocab_rows;
    left = c->vocab_size - s->vocab_first;
    s->vocab_valid = left < s->vocab_rows ? left : s->vocab_rows;
}

static int32_t kind_shape(const ferry__model *m, ferry__kind kind,
                          int64_t shape[2])
{
    const ferry__shard *s = &m->shard;
    int64_t hidden = m->config.hidden_size, qkv = s->q_rows + 2 * s->kv_rows;

    shape[1] = hidden;
    switch (kind) {
    case FERRY__KIND_QKV:
        shape[0] = qkv;
        return 2;
    case FERRY__KIND_O:
        shape[0] = hidden;
        shape[1] = s->q_rows;
        return 2;
    case FERRY__KIND_GATE_UP:
        shape[0] = 2 * s->inter;
        return 2;
    case FERRY__KIND_DOWN:
        shape[0] = hidden;
        shape[1] = s->inter;
        return 2;
    case FERRY__KIND_QKV_BIAS:
        shape[0] = qkv;
        return 1;
    case FERRY__KIND_Q_NORM:
    case FERRY__KIND_K_NORM:
        shape[0] = m->config.head_dim;
        return 1;
    default:
        shape[0] = hidden;
        return 1;
    }
}

static ferry_status add(ferry__model *m, const char *name, ferry_dtype dtype,
                        int32_t ndim, const int64_t *shape, int64_t valid_rows)
{
    ferry_param *p = &m->params[m->n_params];
    int32_t i;

    p->name = ferry__strdup(name);
    if (!p->name)
        return FERRY_ENOMEM;
    p->dtype = dtype;
    p->ndim = ndim;
    for (i = 0; i < ndim; i++)
        p->shape[i] = shape[i];
    p->valid_rows = valid_rows;
    m->n_params++;
    return FERRY_OK;
}

static ferry_status add_vocabulary(ferry__model *m, const char *name)
{
    const ferry__shard *s = &m->shard;
    int64_t shape[2] = {s->vocab_rows, m->config.hidden_size};

    return add(m, name, m->kernel, 2, shape,
               s->vocab_valid == s->vocab_rows ? 0 : s->vocab_valid);
}

static ferry_status add_layer(ferry__model *m, int64_t layer)
{
    char name[128];
    int64_t shape[2];
    int kind;

    for (kind = 0; kind < FERRY__KIND_COUNT; kind++) {
        int32_t ndim;

        if (m->kind_offset[kind] < 0)
            continue;
        ndim = kind_shape(m, (ferry__kind)kind, shape);
        snprintf(name, sizeof(name), "model.layers.%lld.%s", (long long)layer,
                 KINDS[kind].suffix);
        FERRY_TRY(add(m, name,
                      KINDS[kind].is_matrix ? m->kernel : FERRY_DTYPE_F32, ndim,
                      shape, 0));
    }
    return FERRY_OK;
}

static ferry_status fill(ferry__model *m)
{
    int64_t i;

    FERRY_TRY(add_vocabulary(m, "model.embed_tokens.weight"));
    for (i = 0; i < m->config.n_layers; i++)
        FERRY_TRY(add_layer(m, i));
    FERRY_TRY(add(m, "model.norm.weight", FERRY_DTYPE_F32, 1,
                  &m->config.hidden_size, 0));
    if (!m->config.tied)
        FERRY_TRY(add_vocabulary(m, "lm_head.weight"));
    return FERRY_OK;
}

ferry_status ferry__params_create(ferry__model *model)
{
    int kind;

    cut(&model->config, &model->shard);
    for (kind = 0; kind < FERRY__KIND_COUNT; kind++)
        model->kind_offset[kind] = present(&model->config, (ferry__kind)kind)
                                       ? model->per_layer++
                                       : -1;
    model->params = ferry__alloc_array(
        (size_t)model->config.n_layers * (size_t)model->per_layer + 3,
        sizeof(*model->params));
    if (!model->params)
        return FERRY_ENOMEM;
    return fill(model);
}

void ferry__params_destroy(ferry__model *model)
{
    size_t i;

    for (i = 0; i < model->n_params; i++)
        ferry__free((char *)(uintptr_t)model->params[i].name);
    ferry__free(model->params);
    model->params = NULL;
    model->n_params = 0;
}

bool ferry__layer_param(const ferry__model *model, int64_t layer,
                        ferry__kind kind, size_t *out_index)
{
    if (model->kind_offset[kind] < 0)
        return false;
    *out_index = 1 + (size_t)layer * (size_t)model->per_layer +
                 (size_t)model->kind_offset[kind];
    return true;
}

size_t ferry__norm_index(const ferry__model *model)
{
    return 1 + (size_t)model->config.n_layers * (size_t)model->per_layer;
}

size_t ferry__head_index(const ferry__model *model)
{
    return model->config.tied ? FERRY__EMBED_INDEX
                              : ferry__norm_index(model) + 1;
}
