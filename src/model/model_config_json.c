/* SPDX-License-Identifier: Apache-2.0 */
/* Reads Hugging Face's config.json, in its older and newer forms. A null is
 * the same as an absent key, as transformers has it. */
#include "model/model_config_parts.h"

#include "base/alloc.h"
#include "base/json.h"
#include "base/log.h"
#include "model/model_files.h"

#include <string.h>

#define CONFIG_BYTES_MAX ((size_t)16 << 20)

static const json_t *get(const json_t *o, const char *key)
{
    const json_t *v = json_object_get(o, key);

    return json_is_null(v) ? NULL : v;
}

static ferry_status get_int(const json_t *o, const char *key, int64_t fallback,
                            int64_t *out)
{
    const json_t *v = get(o, key);

    *out = fallback;
    if (!v && fallback >= 0)
        return FERRY_OK;
    if (!v)
        return ferry_fail(FERRY_EINVAL, "%s is missing", key);
    if (!json_is_integer(v))
        return ferry_fail(FERRY_EINVAL, "%s must be an integer", key);
    *out = json_integer_value(v);
    return FERRY_OK;
}

static ferry_status get_number(const json_t *o, const char *key,
                               double fallback, double *out)
{
    const json_t *v = get(o, key);

    *out = fallback;
    if (!v)
        return FERRY_OK;
    if (!json_is_number(v))
        return ferry_fail(FERRY_EINVAL, "%s must be a number", key);
    *out = json_number_value(v);
    return FERRY_OK;
}

static ferry_status get_bool(const json_t *o, const char *key, bool *out)
{
    const json_t *v = get(o, key);

    *out = false;
    if (!v)
        return FERRY_OK;
    if (!json_is_boolean(v))
        return ferry_fail(FERRY_EINVAL, "%s must be true or false", key);
    *out = json_is_true(v);
    return FERRY_OK;
}

static ferry_status refuse_true(const json_t *o, const char *key)
{
    bool on;

    FERRY_TRY(get_bool(o, key, &on));
    if (on)
        return ferry_fail(FERRY_ENOTSUP, "%s true is not served", key);
    return FERRY_OK;
}

static ferry_status read_arch(const json_t *o, ferry__arch *out)
{
    const json_t *list = get(o, "architectures");
    const char *name = json_string_value(json_array_get(list, 0));

    if (!name || json_array_size(list) != 1)
        return ferry_fail(FERRY_EINVAL,
                          "architectures must be a list of one name, got %zu",
                          json_array_size(list));
    return ferry__arch_find(name, false, out);
}

static ferry_status read_sizes(const json_t *o, ferry__model_config *c)
{
    FERRY_TRY(get_int(o, "vocab_size", -1, &c->vocab_size));
    FERRY_TRY(get_int(o, "hidden_size", -1, &c->hidden_size));
    FERRY_TRY(get_int(o, "intermediate_size", -1, &c->intermediate_size));
    FERRY_TRY(get_int(o, "num_hidden_layers", -1, &c->n_layers));
    FERRY_TRY(get_int(o, "num_attention_heads", -1, &c->n_heads));
    if (c->n_heads < 1)
        return ferry_fail(FERRY_EINVAL,
                          "num_attention_heads must be above 0, got %lld",
                          (long long)c->n_heads);
    FERRY_TRY(get_int(o, "num_key_value_heads", c->n_heads, &c->n_kv_heads));
    FERRY_TRY(get_int(o, "head_dim",
                      c->hidden_size > 0 ? c->hidden_size / c->n_heads : 0,
                      &c->head_dim));
    FERRY_TRY(get_int(o, "max_position_embeddings", 2048, &c->max_positions));
    return get_number(o, "rms_norm_eps", 1e-6, &c->rms_eps);
}

static ferry_status read_llama3(const json_t *rope, ferry__model_config *c)
{
    FERRY_TRY(get_number(rope, "factor", 0, &c->rope_factor));
    FERRY_TRY(get_number(rope, "low_freq_factor", 0, &c->rope_low_freq));
    FERRY_TRY(get_number(rope, "high_freq_factor", 0, &c->rope_high_freq));
    FERRY_TRY(get_int(rope, "original_max_position_embeddings", -1,
                      &c->rope_original_positions));
    if (!(c->rope_factor > 0))
        return ferry_fail(FERRY_EINVAL,
                          "llama3 rope factor must be above 0, got %g",
                          c->rope_factor);
    return FERRY_OK;
}

static ferry_status read_rope(const json_t *o, ferry__model_config *c)
{
    const json_t *rope = get(o, "rope_parameters");
    const char *type;
    double theta, partial;

    if (!rope)
        rope = get(o, "rope_scaling");
    FERRY_TRY(get_number(o, "rope_theta", 10000.0, &theta));
    FERRY_TRY(get_number(o, "partial_rotary_factor", 1.0, &partial));
    c->rope_theta = theta;
    if (partial != 1.0)
        return ferry_fail(FERRY_ENOTSUP,
                          "partial_rotary_factor %g is not served", partial);
    if (!rope)
        return FERRY_OK;
    if (!json_is_object(rope))
        return ferry_fail(FERRY_EINVAL, "rope scaling must be an object");
    FERRY_TRY(get_number(rope, "rope_theta", theta, &c->rope_theta));
    type = json_string_value(get(rope, "rope_type"));
    if (!type)
        type = json_string_value(get(rope, "type"));
    if (!type || strcmp(type, "default") == 0)
        return FERRY_OK;
    if (strcmp(type, "llama3") != 0)
        return ferry_fail(FERRY_ENOTSUP,
                          "rope type %s is not served; served are default, "
                          "llama3",
                          type);
    return read_llama3(rope, c);
}

static void read_eos(const json_t *o, ferry__model_config *c)
{
    const json_t *eos = get(o, "eos_token_id");
    size_t i;

    if (json_is_integer(eos))
        ferry__config_add_eos(c, json_integer_value(eos));
    for (i = 0; i < json_array_size(eos); i++) {
        const json_t *id = json_array_get(eos, i);

        if (json_is_integer(id))
            ferry__config_add_eos(c, json_integer_value(id));
    }
}

static ferry_status read_features(const json_t *o, ferry__model_config *c)
{
    const char *act = json_string_value(get(o, "hidden_act"));
    const json_t *bos = get(o, "bos_token_id");

    if (act && strcmp(act, "silu") != 0)
        return ferry_fail(FERRY_ENOTSUP, "hidden_act %s is not served", act);
    FERRY_TRY(refuse_true(o, "attention_bias"));
    FERRY_TRY(refuse_true(o, "mlp_bias"));
    FERRY_TRY(refuse_true(o, "use_sliding_window"));
    FERRY_TRY(get_bool(o, "tie_word_embeddings", &c->tied));
    c->qkv_bias = c->arch == FERRY__ARCH_QWEN2;
    c->qk_norm = c->arch == FERRY__ARCH_QWEN3;
    if (json_is_integer(bos) && json_integer_value(bos) >= 0 &&
        json_integer_value(bos) <= INT32_MAX)
        c->bos_id = (int32_t)json_integer_value(bos);
    read_eos(o, c);
    return FERRY_OK;
}

static ferry_status read_object(const json_t *o, ferry__model_config *c)
{
    if (!json_is_object(o))
        return ferry_fail(FERRY_EINVAL, "must be an object");
    FERRY_TRY(read_arch(o, &c->arch));
    FERRY_TRY(read_sizes(o, c));
    FERRY_TRY(read_rope(o, c));
    return read_features(o, c);
}

static ferry_status load(const char *path, json_t **out_value)
{
    char *text = NULL;
    size_t length = 0;
    ferry_status st;

    FERRY_TRY(ferry__model_read(path, CONFIG_BYTES_MAX, &text, &length));
    st = ferry__json_parse("json", text, length, out_value);
    ferry__free(text);
    return st;
}

/* End tokens that only generation_config.json lists count too; a checkpoint
 * without that file is whole. */
static ferry_status read_generation(const char *path, ferry__model_config *c)
{
    char *file = NULL;
    json_t *value = NULL;
    bool gguf;
    ferry_status st;

    FERRY_TRY(ferry__model_file(path, "generation_config.json", &file, &gguf));
    st = load(file, &value);
    if (st < 0 && st != FERRY_EUNKNOWN)
        st = ferry__fail_prefix(st, "file %s", file);
    ferry__free(file);
    if (st == FERRY_EUNKNOWN)
        return FERRY_OK;
    FERRY_TRY(st);
    read_eos(value, c);
    json_decref(value);
    return FERRY_OK;
}

static ferry_status read_config(const char *path, ferry__model_config *config)
{
    json_t *value = NULL;
    ferry_status st = load(path, &value);

    if (st < 0)
        return st == FERRY_EUNKNOWN ? FERRY_EIO : st;
    st = read_object(value, config);
    json_decref(value);
    return st;
}

ferry_status ferry__config_from_json(const char *path,
                                     ferry__model_config *config)
{
    ferry_status st = read_config(path, config);

    if (st < 0)
        return ferry__fail_prefix(st, "file %s", path);
    return read_generation(path, config);
}
