/* SPDX-License-Identifier: Apache-2.0 */
/* The table of checkpoint names, in the order of Hugging Face's state dict.
 */
#include "model/model_names.h"

#include "base/alloc.h"
#include "base/str.h"

#include <stdio.h>
#include <string.h>

#define LAYER_PREFIX "model.layers."
#define EMBED_NAME   "model.embed_tokens.weight"
#define NORM_NAME    "model.norm.weight"
#define HEAD_NAME    "lm_head.weight"

typedef enum needs { ALWAYS, WITH_BIAS, WITH_QK_NORM } needs;

static const struct {
    const char *suffix;
    ferry__role role;
    needs needs;
} LAYER[] = {
    {"self_attn.q_proj.weight", FERRY__ROLE_Q, ALWAYS},
    {"self_attn.q_proj.bias", FERRY__ROLE_Q_BIAS, WITH_BIAS},
    {"self_attn.k_proj.weight", FERRY__ROLE_K, ALWAYS},
    {"self_attn.k_proj.bias", FERRY__ROLE_K_BIAS, WITH_BIAS},
    {"self_attn.v_proj.weight", FERRY__ROLE_V, ALWAYS},
    {"self_attn.v_proj.bias", FERRY__ROLE_V_BIAS, WITH_BIAS},
    {"self_attn.o_proj.weight", FERRY__ROLE_O, ALWAYS},
    {"self_attn.q_norm.weight", FERRY__ROLE_Q_NORM, WITH_QK_NORM},
    {"self_attn.k_norm.weight", FERRY__ROLE_K_NORM, WITH_QK_NORM},
    {"mlp.gate_proj.weight", FERRY__ROLE_GATE, ALWAYS},
    {"mlp.up_proj.weight", FERRY__ROLE_UP, ALWAYS},
    {"mlp.down_proj.weight", FERRY__ROLE_DOWN, ALWAYS},
    {"input_layernorm.weight", FERRY__ROLE_IN_NORM, ALWAYS},
    {"post_attention_layernorm.weight", FERRY__ROLE_POST_NORM, ALWAYS},
};
#define N_LAYER (sizeof(LAYER) / sizeof(LAYER[0]))

static bool present(const ferry__model_config *c, size_t row)
{
    switch (LAYER[row].needs) {
    case WITH_BIAS:
        return c->qkv_bias;
    case WITH_QK_NORM:
        return c->qk_norm;
    default:
        return true;
    }
}

/* A decimal without leading zeros, ended by a dot. */
static bool parse_index(const char **text, int64_t limit, int64_t *out)
{
    const char *p = *text;
    int64_t value = 0;

    if (*p < '0' || *p > '9' || (p[0] == '0' && p[1] != '.'))
        return false;
    for (; *p >= '0' && *p <= '9'; p++) {
        value = value * 10 + (*p - '0');
        if (value >= limit)
            return false;
    }
    if (*p != '.')
        return false;
    *text = p + 1;
    *out = value;
    return true;
}

static bool find_in_layer(const ferry__model_config *c, const char *suffix,
                          ferry__role *out_role)
{
    size_t i;

    if (strcmp(suffix, "self_attn.rotary_emb.inv_freq") == 0) {
        *out_role = FERRY__ROLE_NONE;
        return true;
    }
    for (i = 0; i < N_LAYER; i++) {
        if (strcmp(LAYER[i].suffix, suffix) == 0 && present(c, i)) {
            *out_role = LAYER[i].role;
            return true;
        }
    }
    return false;
}

bool ferry__role_find(const ferry__model_config *config, const char *name,
                      ferry__role *out_role, int64_t *out_layer)
{
    *out_layer = -1;
    if (ferry__starts_with(name, LAYER_PREFIX)) {
        name += sizeof(LAYER_PREFIX) - 1;
        return parse_index(&name, config->n_layers, out_layer) &&
               find_in_layer(config, name, out_role);
    }
    if (strcmp(name, EMBED_NAME) == 0)
        *out_role = FERRY__ROLE_EMBED;
    else if (strcmp(name, NORM_NAME) == 0)
        *out_role = FERRY__ROLE_NORM;
    else if (strcmp(name, HEAD_NAME) == 0)
        *out_role = FERRY__ROLE_HEAD;
    else if (strcmp(name, "model.rotary_emb.inv_freq") == 0)
        *out_role = FERRY__ROLE_NONE;
    else
        return false;
    return true;
}

static int32_t matrix(int64_t rows, int64_t columns, int64_t out_shape[2])
{
    out_shape[0] = rows;
    out_shape[1] = columns;
    return 2;
}

static int32_t vector(int64_t length, int64_t out_shape[2])
{
    out_shape[0] = length;
    out_shape[1] = 1;
    return 1;
}

int32_t ferry__role_shape(const ferry__model_config *c, ferry__role role,
                          int64_t out_shape[2])
{
    int64_t q = c->n_heads * c->head_dim, kv = c->n_kv_heads * c->head_dim;

    switch (role) {
    case FERRY__ROLE_EMBED:
    case FERRY__ROLE_HEAD:
        return matrix(c->vocab_size, c->hidden_size, out_shape);
    case FERRY__ROLE_Q:
        return matrix(q, c->hidden_size, out_shape);
    case FERRY__ROLE_K:
    case FERRY__ROLE_V:
        return matrix(kv, c->hidden_size, out_shape);
    case FERRY__ROLE_O:
        return matrix(c->hidden_size, q, out_shape);
    case FERRY__ROLE_GATE:
    case FERRY__ROLE_UP:
        return matrix(c->intermediate_size, c->hidden_size, out_shape);
    case FERRY__ROLE_DOWN:
        return matrix(c->hidden_size, c->intermediate_size, out_shape);
    case FERRY__ROLE_Q_BIAS:
        return vector(q, out_shape);
    case FERRY__ROLE_K_BIAS:
    case FERRY__ROLE_V_BIAS:
        return vector(kv, out_shape);
    case FERRY__ROLE_Q_NORM:
    case FERRY__ROLE_K_NORM:
        return vector(c->head_dim, out_shape);
    default:
        return vector(c->hidden_size, out_shape);
    }
}

bool ferry__role_is_norm(ferry__role role)
{
    return role == FERRY__ROLE_Q_NORM || role == FERRY__ROLE_K_NORM ||
           role == FERRY__ROLE_IN_NORM || role == FERRY__ROLE_POST_NORM ||
           role == FERRY__ROLE_NORM;
}

typedef struct list {
    const ferry__model_config *config;
    ferry_dtype dtype;
    ferry_param_meta *params;
    size_t count;
} list;

static ferry_status add(list *l, const char *name, ferry__role role)
{
    ferry_param_meta *meta = &l->params[l->count];
    char *copy = ferry__strdup(name);

    if (!copy)
        return FERRY_ENOMEM;
    meta->name = copy;
    meta->dtype = l->dtype;
    meta->ndim = ferry__role_shape(l->config, role, meta->shape);
    l->count++;
    return FERRY_OK;
}

static ferry_status add_layer(list *l, int64_t layer)
{
    char name[128];
    size_t i;

    for (i = 0; i < N_LAYER; i++) {
        if (!present(l->config, i))
            continue;
        snprintf(name, sizeof(name), LAYER_PREFIX "%lld.%s", (long long)layer,
                 LAYER[i].suffix);
        FERRY_TRY(add(l, name, LAYER[i].role));
    }
    return FERRY_OK;
}

static ferry_status fill(list *l)
{
    int64_t i;

    FERRY_TRY(add(l, EMBED_NAME, FERRY__ROLE_EMBED));
    for (i = 0; i < l->config->n_layers; i++)
        FERRY_TRY(add_layer(l, i));
    FERRY_TRY(add(l, NORM_NAME, FERRY__ROLE_NORM));
    if (!l->config->tied)
        FERRY_TRY(add(l, HEAD_NAME, FERRY__ROLE_HEAD));
    return FERRY_OK;
}

ferry_status ferry__checkpoint_list(const ferry__model_config *config,
                                    ferry_dtype dtype,
                                    ferry_param_meta **out_params,
                                    size_t *out_count)
{
    list l = {.config = config, .dtype = dtype};
    size_t room = (size_t)config->n_layers * N_LAYER + 3;
    ferry_status st;

    /* One more, so that a NULL name ends the list. */
    l.params = ferry__alloc_array(room + 1, sizeof(*l.params));
    if (!l.params)
        return FERRY_ENOMEM;
    st = fill(&l);
    if (st < 0) {
        ferry__checkpoint_free(&l.params);
        return st;
    }
    *out_params = l.params;
    *out_count = l.count;
    return FERRY_OK;
}

void ferry__checkpoint_free(ferry_param_meta **params)
{
    size_t i;

    for (i = 0; *params && (*params)[i].name; i++)
        ferry__free((char *)(uintptr_t)(*params)[i].name);
    ferry__free(*params);
    *params = NULL;
}
