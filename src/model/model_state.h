/* SPDX-License-Identifier: Apache-2.0 */
/* What a model shard consists of, shared by the files of this room.
 * Invariant: `params` and the storage behind them are laid out once, at
 * creation, and never move. */
#ifndef FERRY_MODEL_MODEL_STATE_H
#define FERRY_MODEL_MODEL_STATE_H

#include "model/model.h"
#include "model/model_names.h"

/* Stored (run-time) parameters of a layer; one that the architecture lacks
 * has offset -1. */
typedef enum ferry__kind {
    FERRY__KIND_QKV,
    FERRY__KIND_QKV_BIAS,
    FERRY__KIND_O,
    FERRY__KIND_Q_NORM,
    FERRY__KIND_K_NORM,
    FERRY__KIND_GATE_UP,
    FERRY__KIND_DOWN,
    FERRY__KIND_IN_NORM,
    FERRY__KIND_POST_NORM,
    FERRY__KIND_COUNT
} ferry__kind;

/* This rank's part of each cut dimension, in elements. */
typedef struct ferry__shard {
    int32_t rank, size;
    int64_t n_heads, n_kv_heads; /* of this rank */
    int64_t first_kv_head;
    int64_t q_rows, kv_rows;         /* heads × head_dim */
    int64_t inter;                   /* intermediate columns */
    int64_t vocab_first, vocab_rows; /* with padding */
    int64_t vocab_valid;             /* rows that the vocabulary has */
} ferry__shard;

typedef struct ferry__run ferry__run;

struct ferry__model {
    ferry__model_config config;
    ferry__shard shard;
    ferry_dtype kernel;
    ferry__comm *comm;
    int32_t max_seqs, max_len, n_threads;

    ferry_param *params; /* embed, layers, norm, head unless tied */
    size_t n_params;
    int32_t per_layer, kind_offset[FERRY__KIND_COUNT];
    void *storage;
    size_t storage_bytes;
    ferry_param_meta *checkpoint;
    size_t n_checkpoint;
    ferry_model table;
    ferry__run *run; /* NULL when storage_only */
};

/* Fills shard, params (without data), n_params and the layout. */
ferry_status ferry__params_create(ferry__model *model);
void ferry__params_destroy(ferry__model *model);
#define FERRY__EMBED_INDEX ((size_t)0)
/* Index of a layer's parameter; false when the architecture lacks it. */
bool ferry__layer_param(const ferry__model *model, int64_t layer,
                        ferry__kind kind, size_t *out_index);
size_t ferry__norm_index(const ferry__model *model);
/* The embedding when tied. */
size_t ferry__head_index(const ferry__model *model);

/* The `load` of the table. */
ferry_status ferry__model_load(void *self, ferry_loader *loader,
                               const char *name, const ferry_tensor *tensor);

ferry_status ferry__run_create(ferry__model *model);
void ferry__run_destroy(ferry__run **run);
size_t ferry__run_bytes(const ferry__run *run);

#endif
