/* SPDX-License-Identifier: Apache-2.0 */
/* Reads the same numbers from a GGUF's metadata. */
#include "model/model_config_parts.h"

#include "base/log.h"
#include "model/model_files.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

typedef struct reader {
    const ferry__gguf_meta *meta;
    const char *arch;
    char key[128];
} reader;

static const char *key_of(reader *r, const char *name)
{
    snprintf(r->key, sizeof(r->key), "%s.%s", r->arch, name);
    return r->key;
}

/* fallback < 0: the key must be there. */
static ferry_status get_int(reader *r, const char *name, int64_t fallback,
                            int64_t *out)
{
    const char *key = key_of(r, name);

    if (fallback >= 0 && !ferry__gguf_meta_has(r->meta, key)) {
        *out = fallback;
        return FERRY_OK;
    }
    return ferry__gguf_meta_int(r->meta, key, out);
}

static ferry_status get_float(reader *r, const char *name, double fallback,
                              double *out)
{
    const char *key = key_of(r, name);

    *out = fallback;
    if (!ferry__gguf_meta_has(r->meta, key))
        return FERRY_OK;
    return ferry__gguf_meta_float(r->meta, key, out);
}

static ferry_status read_sizes(reader *r, ferry__model_config *c)
{
    int64_t shape[4], rotary;
    int32_t ndim;

    FERRY_TRY(get_int(r, "block_count", -1, &c->n_layers));
    FERRY_TRY(get_int(r, "context_length", 2048, &c->max_positions));
    FERRY_TRY(get_int(r, "embedding_length", -1, &c->hidden_size));
    FERRY_TRY(get_int(r, "feed_forward_length", -1, &c->intermediate_size));
    FERRY_TRY(get_int(r, "attention.head_count", -1, &c->n_heads));
    if (c->n_heads < 1 || c->hidden_size < 1)
        return ferry_fail(FERRY_EINVAL,
                          "head_count %lld and embedding_length %lld must "
                          "be above 0",
                          (long long)c->n_heads, (long long)c->hidden_size);
    FERRY_TRY(
        get_int(r, "attention.head_count_kv", c->n_heads, &c->n_kv_heads));
    FERRY_TRY(get_int(r, "attention.key_length", c->hidden_size / c->n_heads,
                      &c->head_dim));
    FERRY_TRY(get_int(r, "rope.dimension_count", c->head_dim, &rotary));
    if (rotary != c->head_dim)
        return ferry_fail(FERRY_ENOTSUP,
                          "rope.dimension_count %lld of head size %lld is "
                          "not served",
                          (long long)rotary, (long long)c->head_dim);
    if (!ferry__gguf_meta_shape(r->meta, "token_embd.weight", shape, &ndim) ||
        ndim != 2)
        return ferry_fail(FERRY_EINVAL,
                          "tensor token_embd.weight is missing or not 2-D");
    c->vocab_size = shape[0];
    return FERRY_OK;
}

/* The files keep the factors of llama3 scaling as a tensor and forget the
 * three numbers behind it. All published models share the two frequency
 * bounds and the original length, and the largest factor is the scale: take
 * those, and refuse the file when they do not give its tensor. */
static ferry_status read_rope_factors(reader *r, ferry__model_config *c)
{
    float factors[1 << 11];
    int64_t n = c->head_dim / 2, i;

    if (c->head_dim < 2 || n > (int64_t)(sizeof(factors) / sizeof(float)))
        return ferry_fail(FERRY_EINVAL, "head_dim %lld is out of range",
                          (long long)c->head_dim);
    FERRY_TRY(ferry__gguf_meta_f32(r->meta, "rope_freqs.weight", n, factors));
    c->rope_low_freq = 1.0;
    c->rope_high_freq = 4.0;
    c->rope_original_positions = 8192;
    c->rope_factor = 1.0;
    for (i = 0; i < n; i++)
        c->rope_factor = fmax(c->rope_factor, (double)factors[i]);
    for (i = 0; i < n; i++) {
        double wanted = ferry__rope_freq_factor(c, i);

        if (!(fabs(wanted - (double)factors[i]) < 1e-3 * wanted))
            return ferry_fail(FERRY_ENOTSUP,
                              "rope_freqs.weight is not llama3 scaling: "
                              "element %lld expected %g, got %g",
                              (long long)i, wanted, (double)factors[i]);
    }
    return FERRY_OK;
}

static ferry_status read_rope(reader *r, ferry__model_config *c)
{
    int64_t shape[4];
    int32_t ndim;
    const char *type = "none", *key;

    FERRY_TRY(get_float(r, "rope.freq_base", 10000.0, &c->rope_theta));
    key = key_of(r, "rope.scaling.type");
    if (ferry__gguf_meta_has(r->meta, key))
        FERRY_TRY(ferry__gguf_meta_text(r->meta, key, &type));
    if (strcmp(type, "none") != 0)
        return ferry_fail(FERRY_ENOTSUP, "%s %s is not served", key, type);
    if (ferry__gguf_meta_shape(r->meta, "rope_freqs.weight", shape, &ndim))
        return read_rope_factors(r, c);
    return FERRY_OK;
}

static ferry_status read_token_id(reader *r, const char *key, int64_t *out)
{
    *out = -1;
    if (!ferry__gguf_meta_has(r->meta, key))
        return FERRY_OK;
    return ferry__gguf_meta_int(r->meta, key, out);
}

static ferry_status read_tokens(reader *r, ferry__model_config *c)
{
    int64_t id;

    FERRY_TRY(read_token_id(r, "tokenizer.ggml.eos_token_id", &id));
    ferry__config_add_eos(c, id);
    FERRY_TRY(read_token_id(r, "tokenizer.ggml.eot_token_id", &id));
    ferry__config_add_eos(c, id);
    FERRY_TRY(read_token_id(r, "tokenizer.ggml.bos_token_id", &id));
    if (id >= 0 && id <= INT32_MAX)
        c->bos_id = (int32_t)id;
    return FERRY_OK;
}

static ferry_status read_meta(const ferry__gguf_meta *meta,
                              ferry__model_config *c)
{
    reader r = {.meta = meta};
    int64_t shape[4];
    int32_t ndim;

    FERRY_TRY(ferry__gguf_meta_text(meta, "general.architecture", &r.arch));
    FERRY_TRY(ferry__arch_find(r.arch, true, &c->arch));
    FERRY_TRY(read_sizes(&r, c));
    FERRY_TRY(
        get_float(&r, "attention.layer_norm_rms_epsilon", 1e-6, &c->rms_eps));
    FERRY_TRY(read_rope(&r, c));
    c->tied = !ferry__gguf_meta_shape(meta, "output.weight", shape, &ndim);
    c->qkv_bias = c->arch == FERRY__ARCH_QWEN2;
    c->qk_norm = c->arch == FERRY__ARCH_QWEN3;
    return read_tokens(&r, c);
}

ferry_status ferry__config_from_gguf(const char *path,
                                     ferry__model_config *config)
{
    ferry__gguf_meta *meta = NULL;
    ferry_status st;

    FERRY_TRY(ferry__gguf_meta_open(path, &meta));
    st = read_meta(meta, config);
    if (st < 0)
        st = ferry__fail_prefix(st, "file %s", path);
    ferry__gguf_meta_close(&meta);
    return st;
}
