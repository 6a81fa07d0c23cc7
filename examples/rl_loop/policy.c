/* SPDX-License-Identifier: Apache-2.0 */
/* The policy's parameters: their table, first values and config.json. */
#include "policy.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Every parameter starts on a cache line of its own. */
#define ALIGN_FLOATS 16

const policy_config policy_small = {.vocab = 16,
                                    .hidden = 64,
                                    .ffn = 128,
                                    .n_layers = 2,
                                    .n_heads = 4,
                                    .n_kv_heads = 2,
                                    .head_dim = 16,
                                    .max_positions = 32,
                                    .bos = 10,
                                    .eos = 12,
                                    .rms_eps = 1e-5f,
                                    .rope_theta = 10000.0f};

static void add(policy *p, const char *name, int64_t rows, int64_t columns)
{
    policy_param *param = &p->params[p->n_params++];
    size_t count = (size_t)rows * (columns > 0 ? (size_t)columns : 1);

    snprintf(param->name, sizeof param->name, "%s", name);
    param->ndim = columns > 0 ? 2 : 1;
    param->shape[0] = rows;
    param->shape[1] = columns;
    param->at = p->n_weights;
    param->count = count;
    p->n_weights += (count + ALIGN_FLOATS - 1) / ALIGN_FLOATS * ALIGN_FLOATS;
}

static void add_layer(policy *p, int32_t layer)
{
    static const char *const names[LAYER_PARAMS] = {
        "input_layernorm",  "self_attn.q_proj", "self_attn.k_proj",
        "self_attn.v_proj", "self_attn.o_proj", "post_attention_layernorm",
        "mlp.gate_proj",    "mlp.up_proj",      "mlp.down_proj"};
    const policy_config *c = &p->config;
    int64_t q = (int64_t)c->n_heads * c->head_dim;
    int64_t kv = (int64_t)c->n_kv_heads * c->head_dim;
    const int64_t shapes[LAYER_PARAMS][2] = {
        {c->hidden, 0},      {q, c->hidden},      {kv, c->hidden},
        {kv, c->hidden},     {c->hidden, q},      {c->hidden, 0},
        {c->ffn, c->hidden}, {c->ffn, c->hidden}, {c->hidden, c->ffn}};

    for (int kind = 0; kind < LAYER_PARAMS; kind++) {
        char name[64];

        snprintf(name, sizeof name, "model.layers.%d.%s.weight", (int)layer,
                 names[kind]);
        add(p, name, shapes[kind][0], shapes[kind][1]);
    }
}

static void fill(policy *p, size_t index, double deviation, rng *random)
{
    float *w = p->weights + p->params[index].at;

    for (size_t i = 0; i < p->params[index].count; i++)
        w[i] = (float)(deviation * rng_normal(random));
}

static void fill_ones(policy *p, size_t index)
{
    float *w = p->weights + p->params[index].at;

    for (size_t i = 0; i < p->params[index].count; i++)
        w[i] = 1.0f;
}

static void fill_all(policy *p, rng *random)
{
    const policy_config *c = &p->config;

    fill(p, POLICY_EMBED, 1.0, random);
    for (int32_t l = 0; l < c->n_layers; l++) {
        for (int kind = 0; kind < LAYER_PARAMS; kind++) {
            size_t index = (size_t)POLICY_LAYER(l, kind);
            double fan_in = (double)p->params[index].shape[1];

            if (p->params[index].ndim == 1)
                fill_ones(p, index);
            else if (kind == LAYER_O || kind == LAYER_DOWN)
                fill(p, index, 1.0 / sqrt(fan_in * 2.0 * c->n_layers), random);
            else
                fill(p, index, 1.0 / sqrt(fan_in), random);
        }
    }
    fill_ones(p, (size_t)POLICY_NORM(c));
    fill(p, (size_t)POLICY_HEAD(c), 0.02, random);
}

ferry_status policy_create(const policy_config *config, rng *random,
                           policy **out)
{
    policy *p;
    ferry_status st;

    if (config->n_layers < 1 || config->n_layers > POLICY_LAYERS_MAX)
        return ferry_fail(FERRY_EINVAL, "policy: 1 to %d layers, got %d",
                          POLICY_LAYERS_MAX, (int)config->n_layers);
    p = calloc(1, sizeof *p);
    if (p == NULL)
        return ferry_fail(FERRY_ENOMEM, "policy: out of memory");
    p->config = *config;
    add(p, "model.embed_tokens.weight", config->vocab, config->hidden);
    for (int32_t l = 0; l < config->n_layers; l++)
        add_layer(p, l);
    add(p, "model.norm.weight", config->hidden, 0);
    add(p, "lm_head.weight", config->vocab, config->hidden);
    st = ferry_shared_alloc(p->n_weights * sizeof(float), (void **)&p->weights);
    if (st < 0) {
        free(p);
        return st;
    }
    fill_all(p, random);
    *out = p;
    return FERRY_OK;
}

void policy_destroy(policy **p)
{
    if (*p == NULL)
        return;
    ferry_shared_free((*p)->weights);
    free(*p);
    *p = NULL;
}

ferry_status policy_source(const policy *p, ferry_source *out)
{
    const char *names[POLICY_PARAMS_MAX];
    ferry_tensor tensors[POLICY_PARAMS_MAX];

    for (size_t i = 0; i < p->n_params; i++) {
        names[i] = p->params[i].name;
        FERRY_TRY(ferry_tensor_init(&tensors[i], p->weights + p->params[i].at,
                                    FERRY_DTYPE_F32, p->params[i].ndim,
                                    p->params[i].shape));
    }
    return ferry_source_module(names, tensors, p->n_params, out);
}

ferry_status policy_write_config(const policy_config *config,
                                 const char *folder)
{
    char path[4096];
    json_t *o = json_pack(
        "{s:[s],s:s,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:f,s:f,s:b,s:i,s:i,s:s}",
        "architectures", "LlamaForCausalLM", "model_type", "llama",
        "vocab_size", (int)config->vocab, "hidden_size", (int)config->hidden,
        "intermediate_size", (int)config->ffn, "num_hidden_layers",
        (int)config->n_layers, "num_attention_heads", (int)config->n_heads,
        "num_key_value_heads", (int)config->n_kv_heads, "head_dim",
        (int)config->head_dim, "max_position_embeddings",
        (int)config->max_positions, "rms_norm_eps", (double)config->rms_eps,
        "rope_theta", (double)config->rope_theta, "tie_word_embeddings", 0,
        "bos_token_id", (int)config->bos, "eos_token_id", (int)config->eos,
        "torch_dtype", "float32");
    int failed;

    snprintf(path, sizeof path, "%s/config.json", folder);
    failed = o == NULL || json_dump_file(o, path, JSON_INDENT(2)) != 0;
    json_decref(o);
    return failed ? ferry_fail(FERRY_EIO, "cannot write %s", path) : FERRY_OK;
}
