/* SPDX-License-Identifier: Apache-2.0 */
/* What is common to every form of a config: which file it is in, whether its
 * numbers fit together, and whether it can be cut. */
#include "model/model_config_parts.h"

#include "base/alloc.h"
#include "base/log.h"
#include "model/model_files.h"

#include <string.h>

static const struct {
    const char *name; /* Hugging Face's class */
    const char *gguf; /* general.architecture */
} ARCHS[] = {
    [FERRY__ARCH_LLAMA] = {"LlamaForCausalLM", "llama"},
    [FERRY__ARCH_QWEN2] = {"Qwen2ForCausalLM", "qwen2"},
    [FERRY__ARCH_QWEN3] = {"Qwen3ForCausalLM", "qwen3"},
};
#define N_ARCHS (sizeof(ARCHS) / sizeof(ARCHS[0]))

const char *ferry__arch_name(ferry__arch arch)
{
    return (size_t)arch < N_ARCHS ? ARCHS[arch].name : "?";
}

ferry_status ferry__arch_find(const char *name, bool gguf, ferry__arch *out)
{
    size_t i;

    for (i = 0; i < N_ARCHS; i++) {
        if (strcmp(name, gguf ? ARCHS[i].gguf : ARCHS[i].name) == 0) {
            *out = (ferry__arch)i;
            return FERRY_OK;
        }
    }
    return ferry_fail(FERRY_ENOTSUP,
                      "architecture %s is not served; served are "
                      "LlamaForCausalLM, Qwen2ForCausalLM, "
                      "Qwen3ForCausalLM",
                      name);
}

void ferry__config_add_eos(ferry__model_config *config, int64_t id)
{
    int32_t i;

    if (id < 0 || id > INT32_MAX)
        return;
    for (i = 0; i < config->n_eos; i++) {
        if (config->eos_ids[i] == id)
            return;
    }
    if (config->n_eos < FERRY__MAX_EOS)
        config->eos_ids[config->n_eos++] = (int32_t)id;
    else
        ferry__log(FERRY_LOG_WARN,
                   "end token %lld left out: more than %d are given",
                   (long long)id, FERRY__MAX_EOS);
}

static ferry_status check_rope(const ferry__model_config *c)
{
    if (!(c->rope_theta > 0) || !(c->rms_eps > 0))
        return ferry_fail(FERRY_EINVAL,
                          "rope_theta %g and rms_norm_eps %g must be above 0",
                          c->rope_theta, c->rms_eps);
    if (c->rope_factor == 0)
        return FERRY_OK;
    if (!(c->rope_factor > 0) || c->rope_original_positions < 1)
        return ferry_fail(FERRY_EINVAL,
                          "llama3 rope factor %g and original positions "
                          "%lld must be above 0",
                          c->rope_factor,
                          (long long)c->rope_original_positions);
    if (!(c->rope_low_freq > 0) || !(c->rope_high_freq > c->rope_low_freq))
        return ferry_fail(FERRY_EINVAL,
                          "llama3 rope low_freq_factor %g must be above 0 "
                          "and below high_freq_factor %g",
                          c->rope_low_freq, c->rope_high_freq);
    return FERRY_OK;
}

static ferry_status check_range(const char *what, int64_t value, int64_t max)
{
    if (value >= 1 && value <= max)
        return FERRY_OK;
    return ferry_fail(FERRY_EINVAL, "%s must be in 1..%lld, got %lld", what,
                      (long long)max, (long long)value);
}

/* The bounds keep every product of two of them far inside 64 bits. */
static ferry_status check_numbers(const ferry__model_config *c)
{
    FERRY_TRY(check_range("vocab_size", c->vocab_size, 1 << 24));
    FERRY_TRY(check_range("hidden_size", c->hidden_size, 1 << 20));
    FERRY_TRY(check_range("intermediate_size", c->intermediate_size, 1 << 22));
    FERRY_TRY(check_range("num_hidden_layers", c->n_layers, 4096));
    FERRY_TRY(check_range("num_attention_heads", c->n_heads, 1 << 14));
    FERRY_TRY(check_range("num_key_value_heads", c->n_kv_heads, 1 << 14));
    FERRY_TRY(check_range("head_dim", c->head_dim, 1 << 12));
    return check_range("max_position_embeddings", c->max_positions, 1 << 30);
}

ferry_status ferry__config_validate(const ferry__model_config *c)
{
    FERRY_TRY(check_numbers(c));
    if (c->head_dim % 2 != 0)
        return ferry_fail(FERRY_EINVAL, "head_dim %lld is not a multiple of 2",
                          (long long)c->head_dim);
    if (c->n_heads % c->n_kv_heads != 0)
        return ferry_fail(FERRY_EINVAL,
                          "num_attention_heads %lld is not a multiple of "
                          "num_key_value_heads %lld",
                          (long long)c->n_heads, (long long)c->n_kv_heads);
    return check_rope(c);
}

ferry_status ferry__model_config_open(const char *path,
                                      ferry__model_config *out)
{
    ferry__model_config config = {.bos_id = -1};
    char *file = NULL;
    bool gguf = false;
    ferry_status st;

    if (!path || path[0] == '\0')
        return ferry_fail(FERRY_EINVAL, "empty model path");
    FERRY_TRY(ferry__model_file(path, "config.json", &file, &gguf));
    st = gguf ? ferry__config_from_gguf(file, &config)
              : ferry__config_from_json(file, &config);
    if (st == FERRY_OK) {
        st = ferry__config_validate(&config);
        if (st < 0)
            st = ferry__fail_prefix(st, "file %s", file);
    }
    ferry__free(file);
    if (st == FERRY_OK)
        *out = config;
    return st;
}

static ferry_status check_multiple(const char *what, int64_t value, int64_t of,
                                   const char *of_what)
{
    if (value % of == 0)
        return FERRY_OK;
    return ferry_fail(FERRY_EINVAL, "%s %lld is not a multiple of %s %lld",
                      what, (long long)value, of_what, (long long)of);
}

static ferry_status check_shards(const ferry__model_config *c, int64_t tp)
{
    const char *size = "tensor-parallel size";
    int64_t rows = (c->vocab_size + tp - 1) / tp;

    FERRY_TRY(check_multiple("num_attention_heads", c->n_heads, tp, size));
    if (c->n_kv_heads % tp != 0 && tp % c->n_kv_heads != 0)
        return ferry_fail(FERRY_EINVAL,
                          "num_key_value_heads %lld and tensor-parallel "
                          "size %lld: neither is a multiple of the other",
                          (long long)c->n_kv_heads, (long long)tp);
    FERRY_TRY(
        check_multiple("intermediate_size", c->intermediate_size, tp, size));
    if (rows * (tp - 1) >= c->vocab_size)
        return ferry_fail(FERRY_EINVAL,
                          "vocab_size %lld leaves the last of %lld ranks "
                          "without a row",
                          (long long)c->vocab_size, (long long)tp);
    return FERRY_OK;
}

/* Blocks of 32 run along the input dimension, which o_proj and down_proj are
 * cut along. */
static ferry_status check_blocks(const ferry__model_config *c, int64_t tp)
{
    const char *block = "the q8_0 block of";

    FERRY_TRY(check_multiple("hidden_size", c->hidden_size, 32, block));
    FERRY_TRY(check_multiple("attention columns per rank",
                             c->n_heads * c->head_dim / tp, 32, block));
    return check_multiple("intermediate columns per rank",
                          c->intermediate_size / tp, 32, block);
}

ferry_status ferry__model_config_check(const ferry__model_config *config,
                                       int32_t tp_size, ferry_dtype kernel)
{
    FERRY_TRY(check_range("tensor-parallel size", tp_size, 1 << 14));
    if (kernel != FERRY_DTYPE_F32 && kernel != FERRY_DTYPE_BF16 &&
        kernel != FERRY_DTYPE_Q8_0)
        return ferry_fail(FERRY_ENOTSUP,
                          "kernel format %s: f32, bf16 or q8_0 expected",
                          ferry_dtype_name(kernel));
    FERRY_TRY(check_shards(config, tp_size));
    if (kernel == FERRY_DTYPE_Q8_0)
        return check_blocks(config, tp_size);
    return FERRY_OK;
}
