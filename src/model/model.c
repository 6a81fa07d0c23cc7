/* SPDX-License-Identifier: Apache-2.0 */
/* Creation of a shard: its storage in one mapping, its table, its run. */
#include "model/model_state.h"

#include "base/alloc.h"
#include "model/model_files.h"

#define STORAGE_ALIGN ((size_t)64)

/* Bytes of a stored parameter; rows of blocks are whole. */
static bool param_bytes(const ferry_param *p, size_t *out)
{
    size_t blocks = 1;
    int32_t i;

    for (i = 0; i < p->ndim; i++) {
        int64_t extent = p->shape[i];

        if (i == p->ndim - 1)
            extent /= ferry_dtype_block(p->dtype);
        if (!ferry__mul(blocks, (size_t)extent, &blocks))
            return false;
    }
    return ferry__mul(blocks, ferry_dtype_bytes(p->dtype), out);
}

/* Offset of every parameter in the mapping goes to offsets[i]. */
static ferry_status lay_out(const ferry__model *m, size_t *offsets,
                            size_t *out_total)
{
    size_t total = 0, bytes, i;

    for (i = 0; i < m->n_params; i++) {
        offsets[i] = total;
        if (!param_bytes(&m->params[i], &bytes) ||
            !ferry__add(bytes, STORAGE_ALIGN - 1, &bytes) ||
            !ferry__add(total, bytes & ~(STORAGE_ALIGN - 1), &total))
            return ferry_fail(FERRY_EOVERFLOW,
                              "parameter %s: size does not fit",
                              m->params[i].name);
    }
    *out_total = total;
    return FERRY_OK;
}

static ferry_status map_storage(ferry__model *m)
{
    size_t *offsets = ferry__alloc_array(m->n_params, sizeof(*offsets));
    size_t i;
    ferry_status st;

    if (!offsets)
        return FERRY_ENOMEM;
    st = lay_out(m, offsets, &m->storage_bytes);
    if (st == FERRY_OK) {
        m->storage = ferry__map_anonymous(m->storage_bytes);
        st = m->storage ? FERRY_OK : FERRY_ENOMEM;
    }
    for (i = 0; st == FERRY_OK && i < m->n_params; i++)
        m->params[i].data = (char *)m->storage + offsets[i];
    ferry__free(offsets);
    return st;
}

static const char *checkpoint_name(void *self, size_t i)
{
    const ferry__model *m = self;

    return i < m->n_checkpoint ? m->checkpoint[i].name : NULL;
}

static ferry_status checkpoint_meta(void *self, size_t i,
                                    ferry_param_meta *out_meta)
{
    const ferry__model *m = self;

    if (i >= m->n_checkpoint)
        return ferry_fail(FERRY_EINVAL, "checkpoint parameter %zu of %zu", i,
                          m->n_checkpoint);
    *out_meta = m->checkpoint[i];
    return FERRY_OK;
}

static void fill_table(ferry__model *m)
{
    m->table = (ferry_model){
        .size = sizeof(ferry_model),
        .name = ferry__arch_name(m->config.arch),
        .self = m,
        .params = m->params,
        .n_params = m->n_params,
        .load = ferry__model_load,
        .checkpoint_name = checkpoint_name,
        .checkpoint_meta = checkpoint_meta,
    };
}

static ferry_status check_options(const ferry__model_options *o)
{
    FERRY_TRY(ferry__model_config_check(o->config, o->tp_size, o->kernel));
    if (o->tp_rank < 0 || o->tp_rank >= o->tp_size)
        return ferry_fail(FERRY_EINVAL, "tensor-parallel rank %d of %d",
                          o->tp_rank, o->tp_size);
    if (o->storage_only)
        return FERRY_OK;
    if (o->max_seqs < 1 || o->max_len < 1 || o->n_threads < 1)
        return ferry_fail(FERRY_EINVAL,
                          "max_seqs %d, max_len %d and n_threads %d must be "
                          "above 0",
                          o->max_seqs, o->max_len, o->n_threads);
    if (o->tp_size > 1 && (!o->comm || o->comm->world_size != o->tp_size ||
                           o->comm->rank != o->tp_rank))
        return ferry_fail(FERRY_EINVAL,
                          "tensor-parallel rank %d of %d needs a group, got "
                          "rank %d of %d",
                          o->tp_rank, o->tp_size, o->comm ? o->comm->rank : -1,
                          o->comm ? o->comm->world_size : 0);
    return FERRY_OK;
}

static ferry_status build(ferry__model *m, bool storage_only)
{
    /* The dtype that trainers commonly send for this kernel format. */
    ferry_dtype wire =
        m->kernel == FERRY_DTYPE_F32 ? FERRY_DTYPE_F32 : FERRY_DTYPE_BF16;

    FERRY_TRY(ferry__params_create(m));
    FERRY_TRY(ferry__checkpoint_list(&m->config, wire, &m->checkpoint,
                                     &m->n_checkpoint));
    FERRY_TRY(map_storage(m));
    fill_table(m);
    return storage_only ? FERRY_OK : ferry__run_create(m);
}

ferry_status ferry__model_create(const ferry__model_options *options,
                                 ferry__model **out)
{
    ferry__model *m;
    ferry_status st;

    FERRY_TRY(check_options(options));
    m = ferry__alloc(sizeof(*m));
    if (!m)
        return FERRY_ENOMEM;
    ferry__ggml_log_init();
    m->config = *options->config;
    m->kernel = options->kernel;
    m->comm = options->tp_size > 1 ? options->comm : NULL;
    m->max_seqs = options->max_seqs;
    m->max_len = options->max_len;
    m->n_threads = options->n_threads;
    m->shard.rank = options->tp_rank;
    m->shard.size = options->tp_size;
    st = build(m, options->storage_only);
    if (st < 0) {
        ferry__model_destroy(&m);
        return st;
    }
    *out = m;
    return FERRY_OK;
}

void ferry__model_destroy(ferry__model **model)
{
    ferry__model *m = *model;

    if (!m)
        return;
    ferry__run_destroy(&m->run);
    ferry__checkpoint_free(&m->checkpoint);
    if (m->storage)
        ferry__unmap(m->storage, m->storage_bytes);
    ferry__params_destroy(m);
    ferry__free(m);
    *model = NULL;
}

const ferry_model *ferry__model_table(ferry__model *model)
{
    return &model->table;
}

size_t ferry__model_bytes(const ferry__model *model)
{
    return model->storage_bytes +
           (model->run ? ferry__run_bytes(model->run) : 0);
}

int32_t ferry__model_tp_rank(const ferry__model *model)
{
    return model->shard.rank;
}
