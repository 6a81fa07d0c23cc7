/* SPDX-License-Identifier: Apache-2.0 */
/* Makes what the passes of a shard share: caches, headers, ggml's backend.
 */
#include "model/model_run.h"

#include "base/alloc.h"
#include "model/model_config_parts.h"

static enum ggml_type ggml_type_of(ferry_dtype dtype)
{
    switch (dtype) {
    case FERRY_DTYPE_BF16:
        return GGML_TYPE_BF16;
    case FERRY_DTYPE_Q8_0:
        return GGML_TYPE_Q8_0;
    default:
        return GGML_TYPE_F32;
    }
}

static void view_weights(ferry__run *run)
{
    const ferry__model *m = run->model;
    size_t i;

    for (i = 0; i < m->n_params; i++) {
        const ferry_param *p = &m->params[i];
        enum ggml_type type = ggml_type_of(p->dtype);

        run->weights[i] =
            p->ndim == 2
                ? ggml_new_tensor_2d(run->fixed, type, p->shape[1], p->shape[0])
                : ggml_new_tensor_1d(run->fixed, type, p->shape[0]);
        run->weights[i]->data = p->data;
    }
}

static ferry_status map_cache(ferry__run *run)
{
    const ferry__model *m = run->model;
    size_t rows = (size_t)m->max_seqs * (size_t)m->shard.n_kv_heads;
    size_t each, total;

    if (!ferry__mul(rows, (size_t)m->max_len, &each) ||
        !ferry__mul(each, (size_t)m->config.head_dim * sizeof(float), &each) ||
        !ferry__mul(each, 2 * (size_t)m->config.n_layers, &total))
        return ferry_fail(FERRY_EOVERFLOW,
                          "cache of %d sequences of %d positions: size does "
                          "not fit",
                          m->max_seqs, m->max_len);
    run->cache = ferry__map_anonymous(total);
    if (!run->cache)
        return FERRY_ENOMEM;
    run->cache_bytes = total;
    return FERRY_OK;
}

static void view_cache(ferry__run *run)
{
    const ferry__model *m = run->model;
    int64_t rows = m->max_seqs * m->shard.n_kv_heads, i;
    char *at = run->cache;

    for (i = 0; i < m->config.n_layers; i++) {
        run->k_cache[i] = ggml_new_tensor_3d(
            run->fixed, GGML_TYPE_F32, m->config.head_dim, m->max_len, rows);
        run->k_cache[i]->data = at;
        at += ggml_nbytes(run->k_cache[i]);
        run->v_cache[i] = ggml_new_tensor_3d(
            run->fixed, GGML_TYPE_F32, m->max_len, m->config.head_dim, rows);
        run->v_cache[i]->data = at;
        at += ggml_nbytes(run->v_cache[i]);
    }
}

static ferry_status make_rope(ferry__run *run)
{
    const ferry__model_config *c = &run->model->config;
    int64_t n = c->head_dim / 2, i;

    if (c->rope_factor == 0)
        return FERRY_OK;
    run->rope_values = ferry__alloc_array((size_t)n, sizeof(float));
    if (!run->rope_values)
        return FERRY_ENOMEM;
    for (i = 0; i < n; i++)
        run->rope_values[i] = (float)ferry__rope_freq_factor(c, i);
    run->rope_factors = ggml_new_tensor_1d(run->fixed, GGML_TYPE_F32, n);
    run->rope_factors->data = run->rope_values;
    return FERRY_OK;
}

static ferry_status make_headers(ferry__run *run)
{
    const ferry__model *m = run->model;
    size_t n_layers = (size_t)m->config.n_layers;
    struct ggml_init_params params = {
        .mem_size = (m->n_params + 2 * n_layers + 1) * ggml_tensor_overhead(),
        .no_alloc = true,
    };

    run->weights = ferry__alloc_array(m->n_params, sizeof(*run->weights));
    run->k_cache = ferry__alloc_array(n_layers, sizeof(*run->k_cache));
    run->v_cache = ferry__alloc_array(n_layers, sizeof(*run->v_cache));
    if (!run->weights || !run->k_cache || !run->v_cache)
        return FERRY_ENOMEM;
    run->fixed = ggml_init(params);
    if (!run->fixed)
        return ferry_fail(FERRY_ENOMEM, "ggml: no memory for headers");
    view_weights(run);
    view_cache(run);
    return make_rope(run);
}

/* Workers sleep between passes rather than poll: the machine's cores are
 * shared with the other ranks. */
static ferry_status make_backend(ferry__run *run)
{
    int n = run->model->n_threads;

    run->backend = ggml_backend_cpu_init();
    if (!run->backend)
        return ferry_fail(FERRY_EBACKEND, "ggml: no cpu backend");
    ggml_backend_cpu_set_n_threads(run->backend, n);
    if (n > 1) {
        struct ggml_threadpool_params params =
            ggml_threadpool_params_default(n);

        params.poll = 0;
        run->pool = ggml_threadpool_new(&params);
        if (!run->pool)
            return ferry_fail(FERRY_ENOMEM, "ggml: no pool of %d threads", n);
        ggml_backend_cpu_set_threadpool(run->backend, run->pool);
    }
    run->galloc = ggml_gallocr_new(ggml_backend_cpu_buffer_type());
    return run->galloc ? FERRY_OK
                       : ferry_fail(FERRY_ENOMEM, "ggml: no allocator");
}

ferry_status ferry__run_create(ferry__model *model)
{
    ferry__run *run = ferry__alloc(sizeof(*run));

    if (!run)
        return FERRY_ENOMEM;
    model->run = run; /* ferry__model_destroy clears up from here on */
    run->model = model;
    FERRY_TRY(map_cache(run));
    FERRY_TRY(make_headers(run));
    return make_backend(run);
}

void ferry__run_destroy(ferry__run **run)
{
    ferry__run *r = *run;

    if (!r)
        return;
    if (r->galloc)
        ggml_gallocr_free(r->galloc);
    if (r->backend)
        ggml_backend_free(r->backend);
    if (r->pool)
        ggml_threadpool_free(r->pool);
    if (r->fixed)
        ggml_free(r->fixed);
    if (r->cache)
        ferry__unmap(r->cache, r->cache_bytes);
    ferry__free(r->rope_values);
    ferry__free(r->weights);
    ferry__free(r->k_cache);
    ferry__free(r->v_cache);
    ferry__free(r->graph_memory);
    ferry__free(r->gathered);
    ferry__free(r);
    *run = NULL;
}

size_t ferry__run_bytes(const ferry__run *run)
{
    return run->cache_bytes;
}
