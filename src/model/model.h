/* SPDX-License-Identifier: Apache-2.0 */
/* One shard of a Llama-family model on ggml: storage, loader table, caches
 * and the forward pass.
 * Invariant: parameter storage never moves; the forward pass reads it in
 * place, so a commit that copies into it is all that an update needs. */
#ifndef FERRY_MODEL_MODEL_H
#define FERRY_MODEL_MODEL_H

#include "comm/comm.h"
#include "model/model_config.h"
#include <ferry/model.h>

typedef struct ferry__model ferry__model;

typedef struct ferry__model_options {
    const ferry__model_config *config;
    ferry_dtype kernel; /* F32, BF16 or Q8_0: linear weights, embedding
                                and head; norms and biases are always F32 */
    int32_t tp_rank, tp_size;
    ferry__comm *comm; /* NULL when tp_size is 1; borrowed */
    int32_t max_seqs;  /* cache slots */
    int32_t max_len;   /* positions per slot */
    int32_t n_threads; /* of ggml, which wait by spinning: more than one only
                          where each has a core to itself */
    bool storage_only; /* no caches and no forward pass: for verify */
} ferry__model_options;

ferry_status ferry__model_create(const ferry__model_options *options,
                                 ferry__model **out);
void ferry__model_destroy(ferry__model **model);

/* The table for the worker (ferry_worker_create). Borrowed. Parameter names
 * are vLLM's run-time names (model.layers.0.self_attn.qkv_proj.weight, …,
 * lm_head.weight absent when tied). */
const ferry_model *ferry__model_table(ferry__model *model);

/* A source of random weights for `config`: a seeded function of name and flat
 * index (normal, scale 0.02; norms 1), so the same whatever the sharding. */
ferry_status ferry__model_dummy_source(const ferry__model_config *config,
                                       uint64_t seed, ferry_source *out_source);

int32_t ferry__model_tp_rank(const ferry__model *model);

/* One sequence's share of a step. */
typedef struct ferry__seq_step {
    int32_t slot;     /* cache slot, 0..max_seqs-1 */
    int32_t position; /* of tokens[0]; earlier ones are in the cache */
    int32_t n_tokens; /* >= 1 */
    const int32_t *tokens;
} ferry__seq_step;

/* Runs the sequences together; all ranks call with the same steps. On rank 0
 * `out_logits` takes (n_seqs, vocab_size) f32: of each sequence's last token;
 * NULL on the others. Blocks; bounded by timeout_ms in its collectives. A
 * token out of the vocabulary or a position beyond max_len: FERRY_EINVAL,
 * before anything is written. After another failure the slots of these
 * sequences hold nothing of use, and the group of ranks must be made anew. */
ferry_status ferry__model_forward(ferry__model *model,
                                  const ferry__seq_step *steps, int32_t n_seqs,
                                  float *out_logits, int64_t timeout_ms);
/* Bytes of weights and caches held. */
size_t ferry__model_bytes(const ferry__model *model);

#endif
