/* SPDX-License-Identifier: Apache-2.0 */
/* Hyperparameters of a Llama-family model, from config.json or GGUF metadata.
 * Invariant: a config that was read without error can be cut into tp shards
 * or is refused by ferry__model_config_check, naming the two numbers. */
#ifndef FERRY_MODEL_MODEL_CONFIG_H
#define FERRY_MODEL_MODEL_CONFIG_H

#include <ferry/tensor.h>

typedef enum ferry__arch {
    FERRY__ARCH_LLAMA, /* LlamaForCausalLM */
    FERRY__ARCH_QWEN2, /* Qwen2ForCausalLM: q/k/v bias */
    FERRY__ARCH_QWEN3  /* Qwen3ForCausalLM: q/k norm */
} ferry__arch;

#define FERRY__MAX_EOS 8

typedef struct ferry__model_config {
    ferry__arch arch;
    int64_t vocab_size, hidden_size, intermediate_size;
    int64_t n_layers, n_heads, n_kv_heads, head_dim;
    int64_t max_positions;
    double rms_eps, rope_theta;
    bool tied, qkv_bias, qk_norm;
    /* llama3 rope scaling; factor 0 = none */
    double rope_factor, rope_low_freq, rope_high_freq;
    int64_t rope_original_positions;
    int32_t eos_ids[FERRY__MAX_EOS];
    int32_t n_eos;
    int32_t bos_id; /* -1: none */
} ferry__model_config;

/* `path`: a folder with config.json, a config.json, or a GGUF file. GGUF is
 * read through the worker's own ggml. FERRY_ENOTSUP names an architecture or
 * feature that is not served. */
ferry_status ferry__model_config_open(const char *path,
                                      ferry__model_config *out);
/* heads % tp, (kv % tp or tp % kv), intermediate % tp, and with q8_0 that
 * row-parallel cuts end on blocks of 32. */
ferry_status ferry__model_config_check(const ferry__model_config *config,
                                       int32_t tp_size, ferry_dtype kernel);
const char *ferry__arch_name(ferry__arch arch); /* "LlamaForCausalLM" */

#endif
