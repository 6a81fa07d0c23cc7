/* SPDX-License-Identifier: Apache-2.0 */
/* The naming of llama, qwen2 and qwen3 in GGUF files, which is one table. */
#include "sources/gguf_names.h"

#include "base/alloc.h"
#include "base/str.h"

#include <stdbool.h>
#include <string.h>

typedef struct part {
    const char *gguf, *hf;
    int32_t ndim; /* of its weight; a bias has one dimension */
    ferry__gguf_heads heads;
} part;

static const part TOP_PARTS[] = {
    {"token_embd", "model.embed_tokens", 2, FERRY__GGUF_NO_HEADS},
    {"output_norm", "model.norm", 1, FERRY__GGUF_NO_HEADS},
    {"output", "lm_head", 2, FERRY__GGUF_NO_HEADS},
};

static const part LAYER_PARTS[] = {
    {"attn_norm", "input_layernorm", 1, FERRY__GGUF_NO_HEADS},
    {"attn_q", "self_attn.q_proj", 2, FERRY__GGUF_QUERY_HEADS},
    {"attn_k", "self_attn.k_proj", 2, FERRY__GGUF_KEY_HEADS},
    {"attn_v", "self_attn.v_proj", 2, FERRY__GGUF_NO_HEADS},
    {"attn_output", "self_attn.o_proj", 2, FERRY__GGUF_NO_HEADS},
    {"attn_q_norm", "self_attn.q_norm", 1, FERRY__GGUF_NO_HEADS},
    {"attn_k_norm", "self_attn.k_norm", 1, FERRY__GGUF_NO_HEADS},
    {"ffn_norm", "post_attention_layernorm", 1, FERRY__GGUF_NO_HEADS},
    {"ffn_gate", "mlp.gate_proj", 2, FERRY__GGUF_NO_HEADS},
    {"ffn_up", "mlp.up_proj", 2, FERRY__GGUF_NO_HEADS},
    {"ffn_down", "mlp.down_proj", 2, FERRY__GGUF_NO_HEADS},
};

/* Tables of rotary frequencies: computed from the configuration. */
static const char *const NO_WEIGHTS[] = {"rope_freqs", "rope_factors_long",
                                         "rope_factors_short", "attn_rot_embd"};

static const char *const ARCHITECTURES[] = {"llama", "qwen2", "qwen3"};

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

ferry_status ferry__gguf_check_architecture(const char *architecture)
{
    for (size_t i = 0; i < COUNT(ARCHITECTURES); i++) {
        if (strcmp(architecture, ARCHITECTURES[i]) == 0)
            return FERRY_OK;
    }
    return ferry_fail(FERRY_ENOTSUP,
                      "architecture %s: known are llama, "
                      "qwen2, qwen3",
                      architecture);
}

static bool equals(const char *text, size_t length, const char *word)
{
    return strlen(word) == length && memcmp(text, word, length) == 0;
}

static const part *find_part(const part *parts, size_t count, const char *text,
                             size_t length)
{
    for (size_t i = 0; i < count; i++) {
        if (equals(text, length, parts[i].gguf))
            return &parts[i];
    }
    return NULL;
}

static bool is_no_weight(const char *text, size_t length)
{
    for (size_t i = 0; i < COUNT(NO_WEIGHTS); i++) {
        if (equals(text, length, NO_WEIGHTS[i]))
            return true;
    }
    return false;
}

/* Length of "blk.<digits>." at the start, or 0. */
static size_t layer_prefix(const char *tensor)
{
    size_t digits;

    if (!ferry__starts_with(tensor, "blk."))
        return 0;
    digits = strspn(tensor + 4, "0123456789");
    return digits > 0 && tensor[4 + digits] == '.' ? 4 + digits + 1 : 0;
}

static ferry_status unknown(const char *tensor)
{
    return ferry_fail(FERRY_EUNKNOWN, "tensor %s: has no Hugging Face name",
                      tensor);
}

ferry_status ferry__gguf_name_of(const char *tensor, ferry__gguf_name *out)
{
    size_t prefix = layer_prefix(tensor);
    const char *stem = tensor + prefix, *kind = strrchr(stem, '.');
    size_t length = kind ? (size_t)(kind - stem) : strlen(stem);
    ferry__str name = {0};
    const part *p;
    bool bias;

    *out = (ferry__gguf_name){0};
    if (is_no_weight(stem, length))
        return FERRY_OK;
    p = prefix ? find_part(LAYER_PARTS, COUNT(LAYER_PARTS), stem, length)
               : find_part(TOP_PARTS, COUNT(TOP_PARTS), stem, length);
    bias = kind && strcmp(kind, ".bias") == 0;
    if (!p || !kind || (!bias && strcmp(kind, ".weight") != 0))
        return unknown(tensor);
    if (prefix)
        ferry__str_printf(&name, "model.layers.%.*s", (int)(prefix - 4),
                          tensor + 4);
    ferry__str_printf(&name, "%s%s", p->hf, kind);
    out->ndim = bias ? 1 : p->ndim;
    out->heads = p->heads;
    return ferry__str_take(&name, &out->name);
}
