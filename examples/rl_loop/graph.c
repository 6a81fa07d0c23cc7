/* SPDX-License-Identifier: Apache-2.0 */
/* The network in ggml; see graph.h. Shapes in comments are ggml's, innermost
 * first; n is length * SLICE tokens. The mathematics is the served model's:
 * RMS norm, rotary embedding over halves, grouped-query attention, SiLU. */
#include "graph.h"

#include <ggml-cpu.h>
#include <ggml.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define SLICE     64 /* sequences that go through together */
#define NODES_MAX 4096

struct graph {
    const policy *p;
    int32_t length, n_threads;
    struct ggml_context *ctx;
    struct ggml_tensor *params[POLICY_PARAMS_MAX];
    struct ggml_tensor *tokens, *positions, *mask; /* n; n; (length, length) */
    struct ggml_tensor *picked, *spread; /* (vocab, n): the loss's weights */
    struct ggml_tensor *logprobs;        /* (vocab, n) */
    struct ggml_tensor *loss;
    struct ggml_cgraph *forward, *backward;
    struct ggml_threadpool *pool;
    uint8_t *work;
    size_t work_size;
};

static struct ggml_tensor *weight(graph *g, int32_t layer, int kind)
{
    return g->params[POLICY_LAYER(layer, kind)];
}

static struct ggml_tensor *norm(graph *g, struct ggml_tensor *x,
                                struct ggml_tensor *w)
{
    return ggml_mul(g->ctx, ggml_rms_norm(g->ctx, x, g->p->config.rms_eps), w);
}

/* Projects x and splits it by heads, sequences outermost:
 * (head_dim, length, heads * SLICE). Folding sequences into the dimension of
 * heads lets one product do all of them, grouped queries included. */
static struct ggml_tensor *split(graph *g, struct ggml_tensor *w,
                                 struct ggml_tensor *x, int64_t n_heads,
                                 bool rotate)
{
    const policy_config *c = &g->p->config;
    int64_t n = (int64_t)g->length * SLICE;

    x = ggml_mul_mat(g->ctx, w, x);
    x = ggml_reshape_3d(g->ctx, x, c->head_dim, n_heads, n);
    if (rotate)
        x = ggml_rope_ext(g->ctx, x, g->positions, NULL, c->head_dim,
                          GGML_ROPE_TYPE_NEOX, 0, c->rope_theta, 1.0f, 0.0f,
                          1.0f, 0.0f, 0.0f);
    x = ggml_reshape_4d(g->ctx, x, c->head_dim, n_heads, g->length, SLICE);
    x = ggml_cont(g->ctx, ggml_permute(g->ctx, x, 0, 2, 1, 3));
    return ggml_reshape_3d(g->ctx, x, c->head_dim, g->length, n_heads * SLICE);
}

static struct ggml_tensor *attention(graph *g, int32_t layer,
                                     struct ggml_tensor *x)
{
    const policy_config *c = &g->p->config;
    int64_t n = (int64_t)g->length * SLICE;
    float scale = 1.0f / sqrtf((float)c->head_dim);
    struct ggml_tensor *q, *k, *v, *a;

    q = split(g, weight(g, layer, LAYER_Q), x, c->n_heads, true);
    k = split(g, weight(g, layer, LAYER_K), x, c->n_kv_heads, true);
    v = split(g, weight(g, layer, LAYER_V), x, c->n_kv_heads, false);
    v = ggml_cont(g->ctx, ggml_permute(g->ctx, v, 1, 0, 2, 3));
    a = ggml_mul_mat(g->ctx, k, q); /* (keys, length, heads * SLICE) */
    a = ggml_soft_max_ext(g->ctx, a, g->mask, scale, 0.0f);
    a = ggml_mul_mat(g->ctx, v, a); /* (head_dim, length, heads * SLICE) */
    a = ggml_reshape_4d(g->ctx, a, c->head_dim, g->length, c->n_heads, SLICE);
    a = ggml_cont(g->ctx, ggml_permute(g->ctx, a, 0, 2, 1, 3));
    a = ggml_reshape_2d(g->ctx, a, (int64_t)c->head_dim * c->n_heads, n);
    return ggml_mul_mat(g->ctx, weight(g, layer, LAYER_O), a);
}

static struct ggml_tensor *mlp(graph *g, int32_t layer, struct ggml_tensor *x)
{
    struct ggml_tensor *gate, *up;

    gate = ggml_mul_mat(g->ctx, weight(g, layer, LAYER_GATE), x);
    up = ggml_mul_mat(g->ctx, weight(g, layer, LAYER_UP), x);
    x = ggml_mul(g->ctx, ggml_silu(g->ctx, gate), up);
    return ggml_mul_mat(g->ctx, weight(g, layer, LAYER_DOWN), x);
}

static struct ggml_tensor *logits(graph *g)
{
    const policy_config *c = &g->p->config;
    struct ggml_tensor *x, *y;

    x = ggml_get_rows(g->ctx, g->params[POLICY_EMBED], g->tokens);
    for (int32_t l = 0; l < c->n_layers; l++) {
        y = norm(g, x, weight(g, l, LAYER_IN_NORM));
        x = ggml_add(g->ctx, x, attention(g, l, y));
        y = norm(g, x, weight(g, l, LAYER_POST_NORM));
        x = ggml_add(g->ctx, x, mlp(g, l, y));
    }
    x = norm(g, x, g->params[POLICY_NORM(c)]);
    return ggml_mul_mat(g->ctx, g->params[POLICY_HEAD(c)], x);
}

/* ggml's tensors of the weights, over the policy's own memory. */
static void bind_params(graph *g)
{
    for (size_t i = 0; i < g->p->n_params; i++) {
        const policy_param *param = &g->p->params[i];
        struct ggml_tensor *t =
            param->ndim == 1
                ? ggml_new_tensor_1d(g->ctx, GGML_TYPE_F32, param->shape[0])
                : ggml_new_tensor_2d(g->ctx, GGML_TYPE_F32, param->shape[1],
                                     param->shape[0]);

        t->data = g->p->weights + param->at;
        ggml_set_param(t);
        g->params[i] = t;
    }
}

static void make_inputs(graph *g)
{
    int64_t n = (int64_t)g->length * SLICE;
    float *mask;

    g->tokens = ggml_new_tensor_1d(g->ctx, GGML_TYPE_I32, n);
    g->positions = ggml_new_tensor_1d(g->ctx, GGML_TYPE_I32, n);
    g->mask = ggml_new_tensor_2d(g->ctx, GGML_TYPE_F32, g->length, g->length);
    g->picked =
        ggml_new_tensor_2d(g->ctx, GGML_TYPE_F32, g->p->config.vocab, n);
    g->spread =
        ggml_new_tensor_2d(g->ctx, GGML_TYPE_F32, g->p->config.vocab, n);
    for (int64_t i = 0; i < n; i++)
        ((int32_t *)g->positions->data)[i] = (int32_t)(i % g->length);
    mask = g->mask->data;
    for (int32_t row = 0; row < g->length; row++)
        for (int32_t key = 0; key < g->length; key++)
            mask[row * g->length + key] = key > row ? -INFINITY : 0.0f;
}

/* loss = sum(picked * log p) + sum(spread * p * log p). */
static void build(graph *g)
{
    struct ggml_context *ctx = g->ctx;
    struct ggml_tensor *p, *picked, *spread;

    bind_params(g);
    make_inputs(g);
    p = ggml_soft_max(ctx, logits(g));
    g->logprobs = ggml_log(ctx, p);
    picked = ggml_sum(ctx, ggml_mul(ctx, g->logprobs, g->picked));
    spread = ggml_mul(ctx, ggml_mul(ctx, p, g->logprobs), g->spread);
    g->loss = ggml_add(ctx, picked, ggml_sum(ctx, spread));
    ggml_set_loss(g->loss);
    g->forward = ggml_new_graph_custom(ctx, NODES_MAX, false);
    ggml_build_forward_expand(g->forward, g->logprobs);
    g->backward = ggml_new_graph_custom(ctx, NODES_MAX, true);
    ggml_build_forward_expand(g->backward, g->loss);
    ggml_build_backward_expand(ctx, g->backward, NULL);
}

/* Floats that a token's activations and their gradients take at most, with
 * room to spare; the pages that stay untouched cost nothing. */
static size_t context_size(const policy *p, int32_t length)
{
    const policy_config *c = &p->config;
    size_t wide = (size_t)c->hidden + (size_t)c->ffn +
                  (size_t)c->n_heads * (size_t)(c->head_dim + length);
    size_t token =
        40 * (size_t)(c->n_layers + 1) * wide + 20 * (size_t)c->vocab;

    return (token * (size_t)length * SLICE + 8 * p->n_weights) * sizeof(float) +
           2 * ggml_graph_overhead_custom(NODES_MAX, true) +
           NODES_MAX * ggml_tensor_overhead();
}

static ferry_status reserve_work(graph *g)
{
    struct ggml_cplan forward =
        ggml_graph_plan(g->forward, g->n_threads, g->pool);
    struct ggml_cplan backward =
        ggml_graph_plan(g->backward, g->n_threads, g->pool);

    g->work_size = forward.work_size > backward.work_size ? forward.work_size
                                                          : backward.work_size;
    g->work = malloc(g->work_size + 1);
    return g->work == NULL ? ferry_fail(FERRY_ENOMEM, "graph: out of memory")
                           : FERRY_OK;
}

ferry_status graph_create(const policy *p, int32_t length, int32_t n_threads,
                          graph **out)
{
    struct ggml_init_params params = {.mem_size = context_size(p, length)};
    struct ggml_threadpool_params threads =
        ggml_threadpool_params_default(n_threads);
    graph *g = calloc(1, sizeof *g);

    if (g == NULL)
        return ferry_fail(FERRY_ENOMEM, "graph: out of memory");
    g->p = p;
    g->length = length;
    g->n_threads = n_threads;
    g->ctx = ggml_init(params);
    /* Threads sleep between passes: the cores belong to the workers then. */
    threads.poll = 0;
    g->pool = n_threads > 1 ? ggml_threadpool_new(&threads) : NULL;
    if (g->ctx == NULL || (n_threads > 1 && g->pool == NULL)) {
        graph_destroy(&g);
        return ferry_fail(FERRY_ENOMEM, "graph: no memory for ggml");
    }
    build(g);
    if (reserve_work(g) < 0) {
        graph_destroy(&g);
        return FERRY_ENOMEM;
    }
    *out = g;
    return FERRY_OK;
}

void graph_destroy(graph **g)
{
    if (*g == NULL)
        return;
    if ((*g)->pool != NULL)
        ggml_threadpool_free((*g)->pool);
    if ((*g)->ctx != NULL)
        ggml_free((*g)->ctx);
    free((*g)->work);
    free(*g);
    *g = NULL;
}

static ferry_status compute(graph *g, struct ggml_cgraph *nodes)
{
    struct ggml_cplan plan = ggml_graph_plan(nodes, g->n_threads, g->pool);

    plan.work_data = g->work;
    if (ggml_graph_compute(nodes, &plan) != GGML_STATUS_SUCCESS)
        return ferry_fail(FERRY_EINTERNAL, "graph: ggml did not compute");
    return FERRY_OK;
}

/* Copies a slice's tokens in; the rows that are left over hold token 0. */
static size_t load_slice(graph *g, const int32_t *tokens, size_t first,
                         size_t n_seqs)
{
    size_t n = n_seqs - first < SLICE ? n_seqs - first : SLICE;
    size_t length = (size_t)g->length;

    memset(g->tokens->data, 0, ggml_nbytes(g->tokens));
    memcpy(g->tokens->data, tokens + first * length,
           n * length * sizeof *tokens);
    return n;
}

ferry_status graph_forward(graph *g, const int32_t *tokens, size_t n_seqs,
                           float *out)
{
    size_t row = (size_t)g->length * (size_t)g->p->config.vocab;

    for (size_t first = 0; first < n_seqs; first += SLICE) {
        size_t n = load_slice(g, tokens, first, n_seqs);

        FERRY_TRY(compute(g, g->forward));
        memcpy(out + first * row, g->logprobs->data, n * row * sizeof *out);
    }
    return FERRY_OK;
}

/* Writes the loss's weights of a slice. */
static void load_loss(graph *g, const int32_t *tokens, size_t first, size_t n,
                      const float *coefficients, const float *entropies)
{
    size_t length = (size_t)g->length, vocab = (size_t)g->p->config.vocab;
    float *picked = g->picked->data, *spread = g->spread->data;

    memset(picked, 0, ggml_nbytes(g->picked));
    memset(spread, 0, ggml_nbytes(g->spread));
    for (size_t i = 0; i < n * length; i++) {
        size_t at = first * length + i;

        if (i % length == length - 1)
            continue;
        picked[i * vocab + (size_t)tokens[at + 1]] = -coefficients[at];
        for (size_t v = 0; v < vocab; v++)
            spread[i * vocab + v] = entropies[at];
    }
}

static void add_gradient(const graph *g, float *sum)
{
    for (size_t i = 0; i < g->p->n_params; i++) {
        const policy_param *param = &g->p->params[i];
        const float *d = ggml_graph_get_grad(g->backward, g->params[i])->data;

        for (size_t k = 0; k < param->count; k++)
            sum[param->at + k] += d[k];
    }
}

ferry_status graph_gradient(graph *g, const int32_t *tokens, size_t n_seqs,
                            const float *coefficients, const float *entropies,
                            float *out_gradient, double *out_loss)
{
    double loss = 0;

    memset(out_gradient, 0, g->p->n_weights * sizeof *out_gradient);
    ggml_graph_reset(g->backward);
    for (size_t first = 0; first < n_seqs; first += SLICE) {
        size_t n = load_slice(g, tokens, first, n_seqs);

        load_loss(g, tokens, first, n, coefficients, entropies);
        FERRY_TRY(compute(g, g->backward));
        loss += (double)*(const float *)g->loss->data;
        add_gradient(g, out_gradient);
    }
    if (!isfinite(loss))
        return ferry_fail(FERRY_EINTERNAL, "graph: the loss is %g", loss);
    *out_loss = loss;
    return FERRY_OK;
}
