/* SPDX-License-Identifier: Apache-2.0 */
/* GGUF files through the module (B6). The test writes each byte of its file
 * and computes the values, names and row order by hand. */
#include "base/alloc.h"
#include "core/module.h"
#include "harness/source_pass.h"

#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    TYPE_F32 = 0,
    TYPE_F16 = 1,
    TYPE_Q4_1 = 3,
    TYPE_Q8_0 = 8,
    TYPE_I32 = 26,
    TYPE_BF16 = 30
};
enum { META_U32 = 4, META_STRING = 8, META_ARRAY = 9 };

#define COLS   32
#define Q_ROWS 8 /* two heads of four rows */
#define K_ROWS 4 /* one head */

/* ---- a file, written by hand ---- */

typedef struct gguf_file {
    unsigned char bytes[8192];
    size_t size;
    unsigned char data[4096];
    size_t data_size;
} gguf_file;

static gguf_file file;

static void put(const void *bytes, size_t n)
{
    assert_true(file.size + n <= sizeof(file.bytes));
    memcpy(file.bytes + file.size, bytes, n);
    file.size += n;
}

static void put_number(uint64_t value, size_t n)
{
    unsigned char bytes[8];

    for (size_t i = 0; i < 8; i++)
        bytes[i] = (unsigned char)(value >> (8 * i));
    put(bytes, n);
}

static void put_string(const char *text)
{
    put_number(strlen(text), 8);
    put(text, strlen(text));
}

static void put_u32(const char *key, uint32_t value)
{
    put_string(key);
    put_number(META_U32, 4);
    put_number(value, 4);
}

static void put_text(const char *key, const char *value)
{
    put_string(key);
    put_number(META_STRING, 4);
    put_string(value);
}

static void start(uint64_t n_tensors, uint64_t n_rows)
{
    memset(&file, 0, sizeof(file));
    put("GGUF", 4);
    put_number(3, 4);
    put_number(n_tensors, 8);
    put_number(n_rows, 8);
}

/* A tensor row, and its bytes at the next multiple of 32. */
static void put_tensor(const char *name, int type, int64_t rows, int64_t cols,
                       const void *bytes, size_t n)
{
    put_string(name);
    put_number(rows ? 2 : 1, 4);
    put_number((uint64_t)cols, 8);
    if (rows)
        put_number((uint64_t)rows, 8);
    put_number((uint64_t)type, 4);
    put_number(file.data_size, 8);
    assert_true(file.data_size + n <= sizeof(file.data));
    memcpy(file.data + file.data_size, bytes, n);
    file.data_size = (file.data_size + n + 31) / 32 * 32;
}

static const char *finish(const char *name)
{
    const char *path = test_path(name);

    while (file.size % 32 != 0)
        put("", 1);
    put(file.data, file.data_size);
    write_test_file(path, file.bytes, file.size);
    return path;
}

/* ---- values ---- */

/* f16 bits of a whole number from 0 to 2047. */
static uint16_t half_of(unsigned value)
{
    unsigned exponent = 25;

    if (value == 0)
        return 0;
    while (value < 1024) {
        value *= 2;
        exponent--;
    }
    return (uint16_t)(exponent << 10 | (value & 1023));
}

static unsigned char embed_q8[2][34], q_q4[Q_ROWS][20];
static uint16_t k_f16[K_ROWS * COLS], v_bf16[K_ROWS * COLS];
static float embed_f32[2 * COLS], q_f32[Q_ROWS * COLS];
static float k_f32[K_ROWS * COLS], v_f32[K_ROWS * COLS], norm[COLS];
static float q_bias[Q_ROWS], q_bias_hf[Q_ROWS];

/* In a checkpoint, row r of a head of four is stored row ORDER[r]. */
static const int ORDER[4] = {0, 2, 1, 3};

static int stored_row(int row)
{
    return row / 4 * 4 + ORDER[row % 4];
}

static void make_q8(void)
{
    const uint16_t scale = half_of(2);

    for (int r = 0; r < 2; r++) {
        memcpy(embed_q8[r], &scale, 2);
        for (int c = 0; c < COLS; c++) {
            embed_q8[r][2 + c] = (unsigned char)(signed char)(c - 16 + r);
            embed_f32[r * COLS + c] = 2.0f * (float)(c - 16 + r);
        }
    }
}

/* Element c is nibble * 3 + 10 * row; low nibbles first. */
static void make_q4(void)
{
    for (int r = 0; r < Q_ROWS; r++) {
        const uint16_t scale = half_of(3), min = half_of(10 * (unsigned)r);

        memcpy(q_q4[r], &scale, 2);
        memcpy(q_q4[r] + 2, &min, 2);
        for (int i = 0; i < 16; i++)
            q_q4[r][4 + i] = (unsigned char)(i | (15 - i) << 4);
    }
    for (int r = 0; r < Q_ROWS; r++) {
        for (int c = 0; c < COLS; c++) {
            int nibble = c < 16 ? c : 15 - (c - 16);

            q_f32[r * COLS + c] = (float)(nibble * 3 + 10 * stored_row(r));
        }
    }
}

static void make_values(void)
{
    make_q8();
    make_q4();
    for (int i = 0; i < K_ROWS * COLS; i++) {
        int r = i / COLS, from = stored_row(r) * COLS + i % COLS;
        float value = (float)(i % 128);
        uint32_t bits;

        k_f16[i] = half_of((unsigned)i);
        k_f32[i] = (float)from;
        memcpy(&bits, &value, 4);
        v_bf16[i] = (uint16_t)(bits >> 16);
        v_f32[i] = value;
    }
    for (int i = 0; i < COLS; i++)
        norm[i] = (float)i / 4;
    for (int r = 0; r < Q_ROWS; r++) {
        q_bias[r] = (float)r;
        q_bias_hf[r] = (float)stored_row(r);
    }
}

static void put_weights(void)
{
    put_tensor("token_embd.weight", TYPE_Q8_0, 2, COLS, embed_q8,
               sizeof(embed_q8));
    put_tensor("rope_freqs.weight", TYPE_F32, 0, COLS, norm, sizeof(norm));
    put_tensor("blk.0.attn_q.weight", TYPE_Q4_1, Q_ROWS, COLS, q_q4,
               sizeof(q_q4));
    put_tensor("blk.0.attn_q.bias", TYPE_F32, 0, Q_ROWS, q_bias,
               sizeof(q_bias));
    put_tensor("blk.0.attn_k.weight", TYPE_F16, K_ROWS, COLS, k_f16,
               sizeof(k_f16));
    put_tensor("blk.0.attn_v.weight", TYPE_BF16, K_ROWS, COLS, v_bf16,
               sizeof(v_bf16));
    put_tensor("blk.0.attn_norm.weight", TYPE_F32, 0, COLS, norm, sizeof(norm));
}

static const char *write_llama(void)
{
    start(7, 4);
    put_text("general.architecture", "llama");
    put_u32("llama.attention.head_count", 2);
    put_u32("llama.attention.head_count_kv", 1);
    put_string("tokenizer.ggml.tokens");
    put_number(META_ARRAY, 4);
    put_number(META_STRING, 4);
    put_number(2, 8);
    put_string("a");
    put_string("b");
    put_weights();
    return finish("tiny.gguf");
}

#define L0 "model.layers.0."

static const expected_param want[6] = {
    {"model.embed_tokens.weight", FERRY_DTYPE_F32, 2, {2, COLS}, embed_f32},
    {L0 "self_attn.q_proj.weight", FERRY_DTYPE_F32, 2, {Q_ROWS, COLS}, q_f32},
    {L0 "self_attn.q_proj.bias", FERRY_DTYPE_F32, 1, {Q_ROWS}, q_bias_hf},
    {L0 "self_attn.k_proj.weight", FERRY_DTYPE_F32, 2, {K_ROWS, COLS}, k_f32},
    {L0 "self_attn.v_proj.weight", FERRY_DTYPE_F32, 2, {K_ROWS, COLS}, v_f32},
    {L0 "input_layernorm.weight", FERRY_DTYPE_F32, 1, {COLS}, norm},
};

/* ---- tests ---- */

static void b6_dequantised_with_names_and_row_order(void **state)
{
    const char *path = write_llama();
    ferry_source source = {0};

    (void)state;
    assert_int_equal(ferry_source_gguf(path, &source), FERRY_OK);
    assert_false(source.ops->flags & FERRY_SOURCE_STABLE);
    for (int pass = 0; pass < 3; pass++)
        expect_pass(&source, want, 6);
    ferry_source_close(&source);
    assert_int_equal(ferry_source_open(path, &source), FERRY_OK);
    expect_pass(&source, want, 6);
    ferry_source_close(&source);
    /* A folder with nothing else in it is the same. */
    assert_int_equal(ferry_source_open(test_path("."), &source), FERRY_OK);
    expect_pass(&source, want, 6);
    ferry_source_close(&source);
    remove(path);
}

/* Only llama files are permuted: the others rotate halves as checkpoints do.
 */
static void b6_qwen_rows_are_in_order(void **state)
{
    const expected_param param = {
        L0 "self_attn.q_proj.bias", FERRY_DTYPE_F32, 1, {Q_ROWS}, q_bias};
    static const char *const names[] = {"qwen2", "qwen3"};
    ferry_source source = {0};

    (void)state;
    for (int i = 0; i < 2; i++) {
        const char *path;

        start(1, 1);
        put_text("general.architecture", names[i]);
        put_tensor("blk.0.attn_q.bias", TYPE_F32, 0, Q_ROWS, q_bias,
                   sizeof(q_bias));
        path = finish("qwen.gguf");
        assert_int_equal(ferry_source_gguf(path, &source), FERRY_OK);
        expect_pass(&source, &param, 1);
        ferry_source_close(&source);
        remove(path);
    }
}

static void b6_every_name(void **state)
{
    static const char *const names[][2] = {
        {"token_embd.weight", "model.embed_tokens.weight"},
        {"output_norm.weight", "model.norm.weight"},
        {"output.weight", "lm_head.weight"},
        {"blk.12.attn_norm.weight", "model.layers.12.input_layernorm.weight"},
        {"blk.12.attn_q.weight", "model.layers.12.self_attn.q_proj.weight"},
        {"blk.12.attn_k.weight", "model.layers.12.self_attn.k_proj.weight"},
        {"blk.12.attn_k.bias", "model.layers.12.self_attn.k_proj.bias"},
        {"blk.12.attn_v.bias", "model.layers.12.self_attn.v_proj.bias"},
        {"blk.12.attn_output.weight",
         "model.layers.12.self_attn.o_proj.weight"},
        {"blk.12.attn_q_norm.weight",
         "model.layers.12.self_attn.q_norm.weight"},
        {"blk.12.attn_k_norm.weight",
         "model.layers.12.self_attn.k_norm.weight"},
        {"blk.12.ffn_norm.weight",
         "model.layers.12.post_attention_layernorm.weight"},
        {"blk.12.ffn_gate.weight", "model.layers.12.mlp.gate_proj.weight"},
        {"blk.12.ffn_up.weight", "model.layers.12.mlp.up_proj.weight"},
        {"blk.12.ffn_down.weight", "model.layers.12.mlp.down_proj.weight"},
    };
    enum { N = sizeof(names) / sizeof(names[0]) };
    const ferry_param_meta *params;
    ferry_source source = {0};
    const char *path;
    size_t count;

    (void)state;
    start(N, 1);
    put_text("general.architecture", "qwen3");
    for (int i = 0; i < N; i++)
        put_tensor(
            names[i][0], TYPE_F32,
            strstr(names[i][0], "norm") || strstr(names[i][0], "bias") ? 0 : 1,
            2, norm, 8);
    path = finish("names.gguf");
    assert_int_equal(ferry_source_gguf(path, &source), FERRY_OK);
    assert_int_equal(source.ops->metadata(source.self, &params, &count),
                     FERRY_OK);
    assert_int_equal(count, N);
    for (int i = 0; i < N; i++)
        assert_string_equal(params[i].name, names[i][1]);
    ferry_source_close(&source);
    remove(path);
}

static void refuse(ferry_status status, const char *text)
{
    const char *path = finish("bad.gguf");
    ferry_source source = {0};

    expect_error(ferry_source_gguf(path, &source), status, text);
    assert_non_null(strstr(ferry_last_error(), "bad.gguf"));
    assert_null(source.ops);
    remove(path);
}

static void files_that_cannot_be_sent_are_refused_by_name(void **state)
{
    ferry_source source = {0};

    (void)state;
    start(0, 1);
    put_text("general.architecture", "mamba");
    refuse(FERRY_ENOTSUP, "architecture mamba: known are llama");
    start(0, 0);
    refuse(FERRY_EINVAL, "general.architecture is missing");
    start(1, 1);
    put_text("general.architecture", "qwen2");
    put_tensor("blk.0.ffn_gate_exps.weight", TYPE_F32, 1, 2, norm, 8);
    refuse(FERRY_EUNKNOWN, "tensor blk.0.ffn_gate_exps.weight");
    start(1, 1);
    put_text("general.architecture", "qwen2");
    put_tensor("blk.0.attn_norm.weight", TYPE_I32, 0, 2, norm, 8);
    refuse(FERRY_ENOTSUP, "type i32 cannot be dequantised");
    start(1, 1);
    put_text("general.architecture", "qwen2");
    put_tensor("blk.0.attn_norm.weight", TYPE_F32, 2, 2, norm, 16);
    refuse(FERRY_EINVAL, "tensor blk.0.attn_norm.weight: dimension 1");
    start(1, 1);
    put_text("general.architecture", "llama");
    put_tensor("blk.0.attn_q.bias", TYPE_F32, 0, 8, q_bias, 32);
    refuse(FERRY_EINVAL, "llama.attention.head_count is missing");
    start(1, 2);
    put_text("general.architecture", "llama");
    put_u32("llama.attention.head_count", 3);
    put_tensor("blk.0.attn_q.bias", TYPE_F32, 0, 8, q_bias, 32);
    refuse(FERRY_EINVAL, "8 rows are not pairs for each of 3 heads");
    start(1, 2);
    put_text("general.architecture", "llama");
    put_u32("llama.attention.head_count", 0);
    put_tensor("blk.0.attn_q.bias", TYPE_F32, 0, 8, q_bias, 32);
    refuse(FERRY_EINVAL, "u32 of 1 or more");
    start(0, 1);
    put_text("general.alignment", "32");
    refuse(FERRY_EINVAL, "general.alignment has type 8");
    start(0, 1);
    put_u32("general.alignment", 24);
    refuse(FERRY_EINVAL, "general.alignment is 24");
    start(0, 0);
    file.bytes[4] = 1;
    refuse(FERRY_EINVAL, "GGUF version 1");
    start(0, 0);
    file.bytes[0] = 'X';
    refuse(FERRY_EINVAL, "does not begin with GGUF");
    start(UINT64_MAX, 0);
    refuse(FERRY_EINVAL, "ends inside its list of tensors");
    start(0, UINT64_MAX);
    refuse(FERRY_EINVAL, "ends inside its metadata");
    expect_error(ferry_source_gguf(test_path("nowhere.gguf"), &source),
                 FERRY_EIO, "nowhere.gguf");
    expect_error(ferry_source_gguf(NULL, &source), FERRY_EINVAL, "NULL");
}

static void truncated_anywhere_is_an_error(void **state)
{
    const char *path = write_llama();
    ferry_source source = {0};

    (void)state;
    /* The last tensor needs all of its 128 bytes; no padding follows. */
    for (size_t size = 0; size < file.size; size += 7) {
        write_test_file(path, file.bytes, size);
        assert_true(ferry_source_gguf(path, &source) < 0);
        assert_null(source.ops);
    }
    write_test_file(path, file.bytes, file.size - 1);
    expect_error(ferry_source_gguf(path, &source), FERRY_EINVAL, "file ");
    remove(path);
}

/* Whatever a damaged header says, the answer is a source or an error. */
static void damaged_headers_never_end_the_process(void **state)
{
    static const unsigned char values[3] = {0x00, 0xFF, 0x80};
    const char *path = write_llama();
    size_t header = file.size - file.data_size;
    ferry_source source = {0};

    (void)state;
    for (size_t i = 0; i < header; i++) {
        for (size_t v = 0; v < 3; v++) {
            unsigned char old = file.bytes[i];

            file.bytes[i] = values[v];
            write_test_file(path, file.bytes, file.size);
            if (ferry_source_gguf(path, &source) == FERRY_OK)
                assert_int_equal(drive_pass(&source), FERRY_DONE);
            ferry_source_close(&source);
            file.bytes[i] = old;
        }
    }
    remove(path);
}

static void every_allocation_and_mapping_may_fail(void **state)
{
    static const ferry__fault kinds[2] = {FERRY__FAULT_ALLOC,
                                          FERRY__FAULT_MMAP};
    const char *path = write_llama();
    ferry_source source = {0};

    (void)state;
    for (int kind = 0; kind < 2; kind++) {
        ferry_status st = FERRY_ENOMEM;
        uint64_t n = 0;

        while (st != FERRY_DONE) {
            assert_true(n < 500);
            ferry__fault_arm(kinds[kind], ++n);
            st = ferry_source_gguf(path, &source);
            if (st == FERRY_OK)
                st = drive_pass(&source);
            ferry__fault_arm(kinds[kind], 0);
            assert_true(st == FERRY_DONE || st == FERRY_ENOMEM ||
                        st == FERRY_EIO);
            ferry_source_close(&source);
        }
    }
    remove(path);
}

static int need_module(void **state)
{
    (void)state;
    make_values();
    if (ferry__module_present("ferry_source_gguf"))
        return 0;
    printf("skipped: built without the module ferry_source_gguf\n");
    exit(77);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(b6_dequantised_with_names_and_row_order),
        cmocka_unit_test(b6_qwen_rows_are_in_order),
        cmocka_unit_test(b6_every_name),
        cmocka_unit_test(files_that_cannot_be_sent_are_refused_by_name),
        cmocka_unit_test(truncated_anywhere_is_an_error),
        cmocka_unit_test(damaged_headers_never_end_the_process),
        cmocka_unit_test(every_allocation_and_mapping_may_fail),
    };

    return cmocka_run_group_tests(tests, need_module, NULL);
}
