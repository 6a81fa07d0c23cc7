/* SPDX-License-Identifier: Apache-2.0 */
/* Configs: what is read, what is refused, and with which numbers (H1). */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "base/str.h"
#include "model/model_config.h"
#include "model/model_config_parts.h"

#include <ferry/worker.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SIZES                                                                  \
    "\"vocab_size\": 320, \"hidden_size\": 64, \"intermediate_size\": 128, "   \
    "\"num_hidden_layers\": 2, \"num_attention_heads\": 4"
#define LLAMA "{\"architectures\": [\"LlamaForCausalLM\"], " SIZES

static char folder[256];

static void write_file(const char *name, const char *text)
{
    char path[512];
    FILE *out;

    snprintf(path, sizeof(path), "%s/%s", folder, name);
    out = fopen(path, "w");
    assert_non_null(out);
    assert_true(fputs(text, out) >= 0);
    assert_int_equal(fclose(out), 0);
}

static void remove_file(const char *name)
{
    char path[512];

    snprintf(path, sizeof(path), "%s/%s", folder, name);
    unlink(path);
}

static int make_folder(void **state)
{
    const char *tmp = getenv("TMPDIR");

    (void)state;
    snprintf(folder, sizeof(folder), "%s/ferry-config-XXXXXX",
             tmp ? tmp : "/tmp");
    return mkdtemp(folder) ? 0 : -1;
}

static int remove_folder(void **state)
{
    (void)state;
    remove_file("config.json");
    remove_file("generation_config.json");
    remove_file("model.gguf");
    return rmdir(folder);
}

static ferry_status open_text(const char *text, ferry__model_config *out)
{
    write_file("config.json", text);
    return ferry__model_config_open(folder, out);
}

static void expect_refusal(const char *text, ferry_status want,
                           const char *words)
{
    ferry__model_config config = {.n_heads = 77};

    assert_int_equal(open_text(text, &config), want);
    if (!strstr(ferry_last_error(), words))
        fail_msg("'%s' is not in '%s'", words, ferry_last_error());
    assert_int_equal(config.n_heads, 77);
}

static void defaults_are_hugging_face_s(void **state)
{
    ferry__model_config c;

    (void)state;
    assert_int_equal(open_text(LLAMA "}", &c), FERRY_OK);
    assert_int_equal(c.arch, FERRY__ARCH_LLAMA);
    assert_int_equal(c.n_kv_heads, 4);
    assert_int_equal(c.head_dim, 16);
    assert_int_equal(c.max_positions, 2048);
    assert_true(c.rope_theta == 10000.0 && c.rope_factor == 0);
    assert_true(c.rms_eps == 1e-6);
    assert_false(c.tied || c.qkv_bias || c.qk_norm);
    assert_int_equal(c.n_eos, 0);
    assert_int_equal(c.bos_id, -1);
    assert_true(ferry__rope_freq_factor(&c, 3) == 1.0);
}

static void architectures_differ_in_bias_and_norm(void **state)
{
    ferry__model_config c;

    (void)state;
    assert_int_equal(
        open_text("{\"architectures\": [\"Qwen2ForCausalLM\"], " SIZES
                  ", \"tie_word_embeddings\": true, \"head_dim\": null}",
                  &c),
        FERRY_OK);
    assert_true(c.tied && c.qkv_bias && !c.qk_norm);
    assert_string_equal(ferry__arch_name(c.arch), "Qwen2ForCausalLM");
    assert_int_equal(
        open_text("{\"architectures\": [\"Qwen3ForCausalLM\"], " SIZES
                  ", \"head_dim\": 32}",
                  &c),
        FERRY_OK);
    assert_true(!c.qkv_bias && c.qk_norm);
    assert_int_equal(c.head_dim, 32);
}

static void end_tokens_come_from_both_files(void **state)
{
    ferry__model_config c;

    (void)state;
    write_file("generation_config.json",
               "{\"eos_token_id\": [7, 9], \"temperature\": 0.6}");
    assert_int_equal(open_text(LLAMA ", \"eos_token_id\": 9, "
                                     "\"bos_token_id\": 3}",
                               &c),
                     FERRY_OK);
    remove_file("generation_config.json");
    assert_int_equal(c.n_eos, 2);
    assert_int_equal(c.eos_ids[0], 9);
    assert_int_equal(c.eos_ids[1], 7);
    assert_int_equal(c.bos_id, 3);
}

/* The factors of Llama 3.1 as published: pairs faster than the upper bound
 * stay, slower than the lower one are divided by 8. */
static void llama3_scaling_bends_slow_pairs(void **state)
{
    static const char SCALING[] =
        "{\"rope_type\": \"llama3\", \"factor\": 8.0, "
        "\"low_freq_factor\": 1.0, \"high_freq_factor\": 4.0, "
        "\"original_max_position_embeddings\": 8192}";
    ferry__model_config c;
    char text[1024];

    (void)state;
    snprintf(text, sizeof(text),
             LLAMA ", \"head_dim\": 128, \"rope_theta\": 500000.0, "
                   "\"rope_scaling\": %s}",
             SCALING);
    assert_int_equal(open_text(text, &c), FERRY_OK);
    assert_true(ferry__rope_freq_factor(&c, 0) == 1.0);
    assert_true(fabs(ferry__rope_freq_factor(&c, 63) - 8.0) < 1e-12);
    assert_true(ferry__rope_freq_factor(&c, 32) > 1.0 &&
                ferry__rope_freq_factor(&c, 32) < 8.0);
    snprintf(text, sizeof(text), LLAMA ", \"rope_parameters\": %s}", SCALING);
    assert_int_equal(open_text(text, &c), FERRY_OK);
    assert_true(c.rope_factor == 8.0 && c.rope_theta == 10000.0);
}

static void what_is_not_served_is_named(void **state)
{
    (void)state;
    expect_refusal("{\"architectures\": [\"GPT2LMHeadModel\"], " SIZES "}",
                   FERRY_ENOTSUP, "GPT2LMHeadModel");
    expect_refusal(LLAMA ", \"hidden_act\": \"gelu\"}", FERRY_ENOTSUP,
                   "hidden_act gelu");
    expect_refusal(LLAMA ", \"attention_bias\": true}", FERRY_ENOTSUP,
                   "attention_bias");
    expect_refusal(LLAMA ", \"use_sliding_window\": true}", FERRY_ENOTSUP,
                   "use_sliding_window");
    expect_refusal(LLAMA ", \"rope_scaling\": {\"type\": \"yarn\"}}",
                   FERRY_ENOTSUP, "rope type yarn");
    expect_refusal(LLAMA ", \"partial_rotary_factor\": 0.5}", FERRY_ENOTSUP,
                   "partial_rotary_factor 0.5");
}

static void malformed_configs_name_the_field(void **state)
{
    (void)state;
    expect_refusal("{", FERRY_EINVAL, "config.json");
    expect_refusal("[]", FERRY_EINVAL, "object");
    expect_refusal("{" SIZES "}", FERRY_EINVAL, "architectures");
    expect_refusal("{\"architectures\": [\"LlamaForCausalLM\"]}", FERRY_EINVAL,
                   "vocab_size is missing");
    expect_refusal(LLAMA ", \"num_key_value_heads\": \"2\"}", FERRY_EINVAL,
                   "num_key_value_heads must be an integer");
    expect_refusal(LLAMA ", \"num_key_value_heads\": 3}", FERRY_EINVAL,
                   "num_attention_heads 4 is not a multiple of "
                   "num_key_value_heads 3");
    expect_refusal(LLAMA ", \"num_key_value_heads\": -1}", FERRY_EINVAL,
                   "num_key_value_heads must be in 1..16384, got -1");
    expect_refusal(LLAMA ", \"head_dim\": 15}", FERRY_EINVAL, "head_dim 15");
    expect_refusal(LLAMA ", \"rope_theta\": 0}", FERRY_EINVAL, "rope_theta");
    expect_refusal(LLAMA ", \"max_position_embeddings\": 1e9}", FERRY_EINVAL,
                   "max_position_embeddings");
    expect_refusal(LLAMA ", \"rope_scaling\": {\"rope_type\": \"llama3\", "
                         "\"factor\": 8, \"low_freq_factor\": 4, "
                         "\"high_freq_factor\": 4, "
                         "\"original_max_position_embeddings\": 64}}",
                   FERRY_EINVAL, "low_freq_factor 4");
}

static void missing_and_broken_files_are_named(void **state)
{
    ferry__model_config c;
    char path[512];

    (void)state;
    remove_file("config.json");
    assert_int_equal(ferry__model_config_open(folder, &c), FERRY_EIO);
    assert_non_null(strstr(ferry_last_error(), "config.json"));
    assert_int_equal(ferry__model_config_open("/nowhere/at/all", &c),
                     FERRY_EIO);
    assert_int_equal(ferry__model_config_open("", &c), FERRY_EINVAL);
    write_file("model.gguf", "GGUF but nothing else");
    snprintf(path, sizeof(path), "%s/model.gguf", folder);
    assert_int_equal(ferry__model_config_open(path, &c), FERRY_EINVAL);
    assert_non_null(strstr(ferry_last_error(), "model.gguf"));
}

static void expect_cut(const ferry__model_config *c, int32_t tp,
                       ferry_dtype kernel, const char *words)
{
    ferry_status st = ferry__model_config_check(c, tp, kernel);

    if (!words) {
        assert_int_equal(st, FERRY_OK);
        return;
    }
    assert_true(st == FERRY_EINVAL || st == FERRY_ENOTSUP);
    if (!strstr(ferry_last_error(), words))
        fail_msg("'%s' is not in '%s'", words, ferry_last_error());
}

static void cuts_that_do_not_fit_name_both_numbers(void **state)
{
    ferry__model_config c = {.vocab_size = 320,
                             .hidden_size = 96,
                             .intermediate_size = 192,
                             .n_layers = 1,
                             .n_heads = 6,
                             .n_kv_heads = 3,
                             .head_dim = 16};

    (void)state;
    expect_cut(&c, 1, FERRY_DTYPE_F32, NULL);
    expect_cut(&c, 3, FERRY_DTYPE_BF16, NULL);
    expect_cut(&c, 6, FERRY_DTYPE_F32, NULL); /* 3 kv heads under 6 ranks */
    expect_cut(&c, 3, FERRY_DTYPE_Q8_0, NULL);
    expect_cut(&c, 6, FERRY_DTYPE_Q8_0, "16 is not a multiple of");
    expect_cut(&c, 4, FERRY_DTYPE_F32, "num_attention_heads 6");
    expect_cut(&c, 2, FERRY_DTYPE_F32,
               "num_key_value_heads 3 and tensor-parallel size 2");
    expect_cut(&c, 0, FERRY_DTYPE_F32, "got 0");
    expect_cut(&c, 1, FERRY_DTYPE_F16, "kernel format float16");
    c.intermediate_size = 193;
    expect_cut(&c, 3, FERRY_DTYPE_F32, "intermediate_size 193");
    c.intermediate_size = 192;
    c.vocab_size = 5;
    expect_cut(&c, 6, FERRY_DTYPE_F32, "vocab_size 5");
    c.vocab_size = 320;
    c.hidden_size = 100;
    expect_cut(&c, 1, FERRY_DTYPE_Q8_0, "hidden_size 100");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(defaults_are_hugging_face_s),
        cmocka_unit_test(architectures_differ_in_bias_and_norm),
        cmocka_unit_test(end_tokens_come_from_both_files),
        cmocka_unit_test(llama3_scaling_bends_slow_pairs),
        cmocka_unit_test(what_is_not_served_is_named),
        cmocka_unit_test(malformed_configs_name_the_field),
        cmocka_unit_test(missing_and_broken_files_are_named),
        cmocka_unit_test(cuts_that_do_not_fit_name_both_numbers),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
