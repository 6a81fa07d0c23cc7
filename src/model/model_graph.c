/* SPDX-License-Identifier: Apache-2.0 */
/* The forward pass as a ggml graph. Linear parts run over the tokens of all
 * sequences together; attention runs per sequence over its own cache slot.
 * Shapes in comments are ggml's, innermost first; n is a number of tokens. */
#include "model/model_run.h"

#include "base/alloc.h"

#include <math.h>

typedef struct builder {
    ferry__run *run;
    const ferry__model *m;
    ferry__graph *g;
    struct ggml_context *ctx;
    const ferry__seq_step *steps;
    int32_t n_seqs, n_tokens;
} builder;

static struct ggml_tensor *weight(const builder *b, int64_t layer,
                                  ferry__kind kind)
{
    size_t index;

    if (!ferry__layer_param(b->m, layer, kind, &index))
        return NULL;
    return b->run->weights[index];
}

static struct ggml_tensor *norm(const builder *b, struct ggml_tensor *x,
                                struct ggml_tensor *w)
{
    x = ggml_rms_norm(b->ctx, x, (float)b->m->config.rms_eps);
    return ggml_mul(b->ctx, x, w);
}

/* Sums the ranks' parts in place. */
static struct ggml_tensor *reduce(const builder *b, struct ggml_tensor *x)
{
    if (b->m->shard.size == 1)
        return x;
    return ggml_map_custom1_inplace(b->ctx, x, ferry__run_reduce, 1, b->run);
}

static struct ggml_tensor *embed(const builder *b)
{
    struct ggml_tensor *x = ggml_get_rows(
        b->ctx, b->run->weights[FERRY__EMBED_INDEX], b->g->tokens);

    if (b->m->shard.size == 1)
        return x;
    return ggml_map_custom1_inplace(b->ctx, x, ferry__run_reduce_embedding, 1,
                                    b->run);
}

static struct ggml_tensor *rope(const builder *b, struct ggml_tensor *x)
{
    const ferry__model_config *c = &b->m->config;

    return ggml_rope_ext(b->ctx, x, b->g->positions, b->run->rope_factors,
                         (int)c->head_dim, GGML_ROPE_TYPE_NEOX, 0,
                         (float)c->rope_theta, 1.0f, 0.0f, 1.0f, 0.0f, 0.0f);
}

/* Heads [first, first + n_heads) of the fused rows: (head_dim, heads, n). */
static struct ggml_tensor *heads(const builder *b, struct ggml_tensor *qkv,
                                 int64_t first_row, int64_t n_heads)
{
    size_t head = (size_t)b->m->config.head_dim * sizeof(float);

    return ggml_view_3d(b->ctx, qkv, b->m->config.head_dim, n_heads,
                        b->n_tokens, head, qkv->nb[1],
                        (size_t)first_row * sizeof(float));
}

/* Positions [first, first + n) of the slot's keys: (head_dim, n, kv heads).
 */
static struct ggml_tensor *keys(const builder *b, struct ggml_tensor *cache,
                                int32_t slot, int64_t first, int64_t n)
{
    int64_t n_kv = b->m->shard.n_kv_heads;

    return ggml_view_3d(
        b->ctx, cache, cache->ne[0], n, n_kv, cache->nb[1], cache->nb[2],
        (size_t)(slot * n_kv) * cache->nb[2] + (size_t)first * cache->nb[1]);
}

/* The same of the values: (n, head_dim, kv heads). */
static struct ggml_tensor *values(const builder *b, struct ggml_tensor *cache,
                                  int32_t slot, int64_t first, int64_t n)
{
    int64_t n_kv = b->m->shard.n_kv_heads;

    return ggml_view_3d(
        b->ctx, cache, n, cache->ne[1], n_kv, cache->nb[1], cache->nb[2],
        (size_t)(slot * n_kv) * cache->nb[2] + (size_t)first * cache->nb[0]);
}

/* The tokens of one sequence: (head_dim, heads, n). */
static struct ggml_tensor *rows_of(const builder *b, struct ggml_tensor *x,
                                   int64_t first, int64_t n)
{
    return ggml_view_3d(b->ctx, x, x->ne[0], x->ne[1], n, x->nb[1], x->nb[2],
                        (size_t)first * x->nb[2]);
}

/* Writes come before the reads that follow, as they enter the graph first.
 */
static void store(const builder *b, int64_t layer, const ferry__seq_step *s,
                  struct ggml_tensor *k, struct ggml_tensor *v)
{
    struct ggml_tensor *to_k =
        keys(b, b->run->k_cache[layer], s->slot, s->position, s->n_tokens);
    struct ggml_tensor *to_v =
        values(b, b->run->v_cache[layer], s->slot, s->position, s->n_tokens);

    k = ggml_permute(b->ctx, k, 0, 2, 1, 3);
    v = ggml_permute(b->ctx, v, 1, 2, 0, 3);
    ggml_build_forward_expand(b->g->nodes, ggml_cpy(b->ctx, k, to_k));
    ggml_build_forward_expand(b->g->nodes, ggml_cpy(b->ctx, v, to_v));
}

/* Attention of a sequence's new rows over its slot: (head_dim, heads, n),
 * not contiguous. */
static struct ggml_tensor *attend(const builder *b, int64_t layer,
                                  const ferry__seq_step *s,
                                  struct ggml_tensor *q)
{
    int64_t seen = (int64_t)s->position + s->n_tokens;
    float scale = 1.0f / sqrtf((float)b->m->config.head_dim);
    struct ggml_tensor *k = keys(b, b->run->k_cache[layer], s->slot, 0, seen);
    struct ggml_tensor *v = values(b, b->run->v_cache[layer], s->slot, 0, seen);
    struct ggml_tensor *p;

    p = ggml_mul_mat(b->ctx, k, ggml_permute(b->ctx, q, 0, 2, 1, 3));
    if (s->n_tokens > 1)
        p = ggml_diag_mask_inf_inplace(b->ctx, p, s->position);
    p = ggml_soft_max_ext_inplace(b->ctx, p, NULL, scale, 0.0f);
    return ggml_permute(b->ctx, ggml_mul_mat(b->ctx, v, p), 0, 2, 1, 3);
}

/* Attention of all sequences: (q_rows, n). */
static struct ggml_tensor *attend_all(const builder *b, int64_t layer,
                                      struct ggml_tensor *q,
                                      struct ggml_tensor *k,
                                      struct ggml_tensor *v)
{
    int64_t rows = b->m->shard.q_rows, first = 0;
    struct ggml_tensor *out = NULL, *one = NULL;
    int32_t i;

    if (b->n_seqs > 1)
        out = ggml_new_tensor_3d(b->ctx, GGML_TYPE_F32, q->ne[0], q->ne[1],
                                 b->n_tokens);
    for (i = 0; i < b->n_seqs; i++) {
        const ferry__seq_step *s = &b->steps[i];

        store(b, layer, s, rows_of(b, k, first, s->n_tokens),
              rows_of(b, v, first, s->n_tokens));
        one = attend(b, layer, s, rows_of(b, q, first, s->n_tokens));
        if (out)
            ggml_build_forward_expand(
                b->g->nodes,
                ggml_cpy(b->ctx, one, rows_of(b, out, first, s->n_tokens)));
        first += s->n_tokens;
    }
    if (!out)
        return ggml_cont_2d(b->ctx, one, rows, b->n_tokens);
    return ggml_reshape_2d(b->ctx, out, rows, b->n_tokens);
}

static struct ggml_tensor *attention(const builder *b, int64_t layer,
                                     struct ggml_tensor *x)
{
    const ferry__shard *s = &b->m->shard;
    struct ggml_tensor *bias = weight(b, layer, FERRY__KIND_QKV_BIAS);
    struct ggml_tensor *q_norm = weight(b, layer, FERRY__KIND_Q_NORM);
    struct ggml_tensor *k_norm = weight(b, layer, FERRY__KIND_K_NORM);
    struct ggml_tensor *qkv, *q, *k, *v;

    qkv = ggml_mul_mat(b->ctx, weight(b, layer, FERRY__KIND_QKV), x);
    if (bias)
        qkv = ggml_add(b->ctx, qkv, bias);
    q = heads(b, qkv, 0, s->n_heads);
    k = heads(b, qkv, s->q_rows, s->n_kv_heads);
    v = heads(b, qkv, s->q_rows + s->kv_rows, s->n_kv_heads);
    if (q_norm)
        q = norm(b, q, q_norm);
    if (k_norm)
        k = norm(b, k, k_norm);
    x = attend_all(b, layer, rope(b, q), rope(b, k), v);
    x = ggml_mul_mat(b->ctx, weight(b, layer, FERRY__KIND_O), x);
    return reduce(b, x);
}

static struct ggml_tensor *mlp(const builder *b, int64_t layer,
                               struct ggml_tensor *x)
{
    x = ggml_mul_mat(b->ctx, weight(b, layer, FERRY__KIND_GATE_UP), x);
    x = ggml_swiglu(b->ctx, x);
    x = ggml_mul_mat(b->ctx, weight(b, layer, FERRY__KIND_DOWN), x);
    return reduce(b, x);
}

static struct ggml_tensor *layers(const builder *b, struct ggml_tensor *x)
{
    int64_t i;

    for (i = 0; i < b->m->config.n_layers; i++) {
        struct ggml_tensor *y = norm(b, x, weight(b, i, FERRY__KIND_IN_NORM));

        x = ggml_add(b->ctx, x, attention(b, i, y));
        y = norm(b, x, weight(b, i, FERRY__KIND_POST_NORM));
        x = ggml_add(b->ctx, x, mlp(b, i, y));
    }
    return x;
}

static struct ggml_tensor *input(const builder *b, int32_t count)
{
    struct ggml_tensor *t = ggml_new_tensor_1d(b->ctx, GGML_TYPE_I32, count);

    ggml_set_input(t);
    return t;
}

static void build_nodes(const builder *b)
{
    ferry__graph *g = b->g;
    struct ggml_tensor *x;

    g->tokens = input(b, b->n_tokens);
    g->positions = input(b, b->n_tokens);
    g->last = b->n_seqs < b->n_tokens ? input(b, b->n_seqs) : NULL;
    x = layers(b, embed(b));
    if (g->last)
        x = ggml_get_rows(b->ctx, x, g->last);
    x = norm(b, x, b->run->weights[ferry__norm_index(b->m)]);
    x = ggml_mul_mat(b->ctx, b->run->weights[ferry__head_index(b->m)], x);
    ggml_set_output(x);
    ggml_build_forward_expand(g->nodes, x);
    g->logits = x;
}

/* Upper bounds of the nodes above, with room to spare. */
static size_t count_nodes(const ferry__run *run, int32_t n_seqs)
{
    return 64 +
           (size_t)run->model->config.n_layers * (40 + 24 * (size_t)n_seqs);
}

static ferry_status reserve(ferry__run *run, size_t n_nodes)
{
    size_t bytes = n_nodes * ggml_tensor_overhead() +
                   ggml_graph_overhead_custom(n_nodes, false);

    if (bytes <= run->graph_bytes)
        return FERRY_OK;
    ferry__free(run->graph_memory);
    run->graph_bytes = 0;
    run->graph_memory = ferry__alloc_raw(bytes);
    if (!run->graph_memory)
        return FERRY_ENOMEM;
    run->graph_bytes = bytes;
    return FERRY_OK;
}

ferry_status ferry__graph_build(ferry__run *run, const ferry__seq_step *steps,
                                int32_t n_seqs, int32_t n_tokens,
                                ferry__graph *out)
{
    size_t n_nodes = count_nodes(run, n_seqs);
    struct ggml_init_params params = {.no_alloc = true};
    builder b = {.run = run,
                 .m = run->model,
                 .g = out,
                 .steps = steps,
                 .n_seqs = n_seqs,
                 .n_tokens = n_tokens};

    FERRY_TRY(reserve(run, n_nodes));
    params.mem_size = run->graph_bytes;
    params.mem_buffer = run->graph_memory;
    out->ctx = ggml_init(params);
    if (!out->ctx)
        return ferry_fail(FERRY_ENOMEM, "ggml: no memory for a graph");
    b.ctx = out->ctx;
    out->nodes = ggml_new_graph_custom(out->ctx, n_nodes, false);
    build_nodes(&b);
    return FERRY_OK;
}
