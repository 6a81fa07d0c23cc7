/* SPDX-License-Identifier: Apache-2.0 */
/* The edges of a shard: table, loader, refusals, and a collective that
 * fails in the middle of a pass. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "model/model.h"

#include <ferry/ferry.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const ferry__model_config CONFIG = {
    .arch = FERRY__ARCH_QWEN2,
    .vocab_size = 41,
    .hidden_size = 32,
    .intermediate_size = 64,
    .n_layers = 2,
    .n_heads = 4,
    .n_kv_heads = 2,
    .head_dim = 8,
    .max_positions = 64,
    .rms_eps = 1e-6,
    .rope_theta = 10000,
    .tied = true,
    .qkv_bias = true,
    .bos_id = -1,
};

static ferry__model *make(const ferry__model_config *config, int32_t rank,
                          int32_t tp, ferry__comm *comm, bool storage_only)
{
    ferry__model_options o = {.config = config,
                              .kernel = FERRY_DTYPE_F32,
                              .tp_rank = rank,
                              .tp_size = tp,
                              .comm = comm,
                              .max_seqs = 3,
                              .max_len = 16,
                              .n_threads = 1,
                              .storage_only = storage_only};
    ferry__model *model = NULL;

    assert_int_equal(ferry__model_create(&o, &model), FERRY_OK);
    return model;
}

static void load(ferry__model *model, const ferry__model_config *config,
                 uint64_t seed)
{
    ferry_worker_options o = FERRY_WORKER_OPTIONS_INIT(NULL);
    ferry_worker *worker = NULL;
    ferry_source source = {0};

    assert_int_equal(ferry__model_dummy_source(config, seed, &source),
                     FERRY_OK);
    assert_int_equal(
        ferry_worker_create(&o, ferry__model_table(model), NULL, &worker),
        FERRY_OK);
    assert_int_equal(ferry_worker_load_source(worker, &source), FERRY_OK);
    ferry_worker_destroy(&worker);
    ferry_source_close(&source);
}

static void the_table_has_vllm_s_names_and_fixed_aligned_storage(void **state)
{
    static const char *const NAMES[] = {
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.qkv_proj.weight",
        "model.layers.0.self_attn.qkv_proj.bias",
        "model.layers.0.self_attn.o_proj.weight",
        "model.layers.0.mlp.gate_up_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.post_attention_layernorm.weight",
    };
    ferry__model *m = make(&CONFIG, 1, 2, NULL, true);
    const ferry_model *t = ferry__model_table(m);
    size_t i;

    (void)state;
    assert_int_equal(t->n_params, 1 + 2 * 7 + 1);
    for (i = 0; i < sizeof(NAMES) / sizeof(NAMES[0]); i++)
        assert_string_equal(t->params[i].name, NAMES[i]);
    assert_string_equal(t->params[t->n_params - 1].name, "model.norm.weight");
    for (i = 0; i < t->n_params; i++)
        assert_int_equal((uintptr_t)t->params[i].data % 64, 0);
    /* 41 rows over two ranks: the second has 20 and a padding row. */
    assert_int_equal(t->params[0].shape[0], 21);
    assert_int_equal(t->params[0].valid_rows, 20);
    assert_int_equal(t->params[1].shape[0], 16 + 2 * 8);
    ferry__model_destroy(&m);
    assert_null(m);
}

static void checkpoint_names_end_with_null_and_have_full_shapes(void **state)
{
    ferry__model *m = make(&CONFIG, 0, 2, NULL, true);
    const ferry_model *t = ferry__model_table(m);
    ferry_param_meta meta;
    size_t n = 0;

    (void)state;
    while (t->checkpoint_name(t->self, n)) {
        assert_int_equal(t->checkpoint_meta(t->self, n, &meta), FERRY_OK);
        assert_string_equal(meta.name, t->checkpoint_name(t->self, n));
        n++;
    }
    assert_int_equal(n, 1 + 2 * 12 + 1);
    assert_int_equal(t->checkpoint_meta(t->self, n, &meta), FERRY_EINVAL);
    assert_int_equal(t->checkpoint_meta(t->self, 0, &meta), FERRY_OK);
    assert_int_equal(meta.shape[0], 41);
    ferry__model_destroy(&m);
}

static ferry_status plan(ferry__model *m, const char *name, int32_t ndim,
                         int64_t rows, int64_t columns)
{
    ferry_worker_options o = FERRY_WORKER_OPTIONS_INIT(NULL);
    ferry_param_meta meta = {.name = name,
                             .dtype = FERRY_DTYPE_F32,
                             .ndim = ndim,
                             .shape = {rows, columns}};
    ferry_worker *worker = NULL;
    char *json = NULL;
    ferry_status st;

    assert_int_equal(
        ferry_worker_create(&o, ferry__model_table(m), NULL, &worker),
        FERRY_OK);
    st = ferry_worker_plan(worker, &meta, 1, &json);
    ferry_free(json);
    ferry_worker_destroy(&worker);
    return st;
}

static void the_loader_knows_its_names(void **state)
{
    ferry__model *m = make(&CONFIG, 0, 1, NULL, true);

    (void)state;
    assert_int_equal(plan(m, "model.norm.weight", 1, 32, 0), FERRY_OK);
    assert_int_equal(plan(m, "lm_head.weight", 2, 41, 32), FERRY_OK);
    assert_int_equal(
        plan(m, "model.layers.1.self_attn.rotary_emb.inv_freq", 1, 4, 0),
        FERRY_OK);
    assert_int_equal(plan(m, "model.norm.weight", 1, 31, 0), FERRY_EMISMATCH);
    assert_non_null(strstr(ferry_last_error(), "model.norm.weight"));
    assert_int_equal(plan(m, "model.layers.2.mlp.up_proj.weight", 2, 64, 32),
                     FERRY_EUNKNOWN);
    assert_int_equal(plan(m, "model.layers.01.mlp.up_proj.weight", 2, 64, 32),
                     FERRY_EUNKNOWN);
    assert_int_equal(plan(m, "model.layers.0.self_attn.q_norm.weight", 1, 8, 0),
                     FERRY_EUNKNOWN);
    assert_int_equal(plan(m, "model.layers.0.self_attn.o_proj.bias", 1, 32, 0),
                     FERRY_EUNKNOWN);
    ferry__model_destroy(&m);
}

static void bad_steps_are_refused_with_both_numbers(void **state)
{
    ferry__model *m = make(&CONFIG, 0, 1, NULL, false);
    float logits[3 * 41];
    int32_t ids[20] = {1, 2, 41};
    ferry__seq_step s[2] = {{0, 0, 2, ids}, {0, 0, 1, ids}};

    (void)state;
    load(m, &CONFIG, 1);
    assert_int_equal(ferry__model_forward(m, s, 1, logits, 1000), FERRY_OK);
    assert_int_equal(ferry__model_forward(m, s, 2, logits, 1000), FERRY_EINVAL);
    assert_non_null(strstr(ferry_last_error(), "share slot 0"));
    s[0].n_tokens = 3;
    assert_int_equal(ferry__model_forward(m, s, 1, logits, 1000), FERRY_EINVAL);
    assert_non_null(strstr(ferry_last_error(), "token 41"));
    s[0] = (ferry__seq_step){0, 15, 2, ids};
    assert_int_equal(ferry__model_forward(m, s, 1, logits, 1000), FERRY_EINVAL);
    assert_non_null(strstr(ferry_last_error(), "limit is 16"));
    s[0] = (ferry__seq_step){3, 0, 1, ids};
    assert_int_equal(ferry__model_forward(m, s, 1, logits, 1000), FERRY_EINVAL);
    assert_non_null(strstr(ferry_last_error(), "slot 3 of 3"));
    assert_int_equal(ferry__model_forward(m, s, 0, logits, 1000), FERRY_EINVAL);
    s[0].slot = 0;
    assert_int_equal(ferry__model_forward(m, s, 1, NULL, 1000), FERRY_EINVAL);
    ferry__model_destroy(&m);
    m = make(&CONFIG, 0, 1, NULL, true);
    assert_int_equal(ferry__model_forward(m, s, 1, logits, 1000),
                     FERRY_ENOTSUP);
    ferry__model_destroy(&m);
}

/* Slots are apart: what another sequence wrote is never read. */
static void slots_do_not_see_each_other(void **state)
{
    ferry__model *m = make(&CONFIG, 0, 1, NULL, false);
    float alone[41], beside[3 * 41], again[41];
    int32_t a[4] = {3, 7, 11, 2}, b[6] = {40, 39, 38, 1, 1, 5};
    ferry__seq_step two[2] = {{2, 0, 6, b}, {1, 0, 4, a}};
    ferry__seq_step one = {0, 0, 4, a};
    int i;

    (void)state;
    load(m, &CONFIG, 5);
    assert_int_equal(ferry__model_forward(m, &one, 1, alone, 1000), FERRY_OK);
    assert_int_equal(ferry__model_forward(m, two, 2, beside, 1000), FERRY_OK);
    /* A slot that held a longer sequence before. */
    one.slot = 2;
    assert_int_equal(ferry__model_forward(m, &one, 1, again, 1000), FERRY_OK);
    for (i = 0; i < 41; i++) {
        assert_float_equal(alone[i], beside[41 + i], 1e-6);
        assert_float_equal(alone[i], again[i], 1e-6);
    }
    ferry__model_destroy(&m);
}

/* The graph reads storage in place: new bytes are new logits, with no call
 * between. */
static void new_weights_are_served_at_once(void **state)
{
    ferry__model *m = make(&CONFIG, 0, 1, NULL, false);
    float first[41], second[41], third[41];
    int32_t ids[3] = {1, 2, 3};
    ferry__seq_step s = {0, 0, 3, ids};

    (void)state;
    load(m, &CONFIG, 1);
    assert_int_equal(ferry__model_forward(m, &s, 1, first, 1000), FERRY_OK);
    load(m, &CONFIG, 2);
    assert_int_equal(ferry__model_forward(m, &s, 1, second, 1000), FERRY_OK);
    assert_memory_not_equal(first, second, sizeof(first));
    load(m, &CONFIG, 1);
    assert_int_equal(ferry__model_forward(m, &s, 1, third, 1000), FERRY_OK);
    assert_memory_equal(first, third, sizeof(first));
    ferry__model_destroy(&m);
}

/* A peer that never comes: the pass ends at its deadline with one error. */
static void a_missing_rank_fails_the_pass_in_time(void **state)
{
    ferry__comm *comm = NULL;
    ferry__model *m;
    float logits[41];
    int32_t ids[1] = {1};
    ferry__seq_step s = {0, 0, 1, ids};
    int64_t begin = ferry__now_ns();
    ferry_status st;
    int fd = -1;

    (void)state;
    assert_int_equal(ferry__comm_local_create(2, 0, &fd), FERRY_OK);
    assert_int_equal(ferry__comm_local_open(fd, 0, &comm), FERRY_OK);
    m = make(&CONFIG, 0, 2, comm, false);
    st = ferry__model_forward(m, &s, 1, logits, 200);
    assert_true(st == FERRY_ETIMEOUT || st == FERRY_EPEER);
    assert_non_null(strstr(ferry_last_error(), "rank 1"));
    assert_true(ferry__now_ns() - begin < 5000000000);
    ferry__model_destroy(&m);
    ferry__comm_close(&comm);
    close(fd);
}

static void options_that_do_not_fit_are_refused(void **state)
{
    ferry__model_options o = {.config = &CONFIG,
                              .kernel = FERRY_DTYPE_F32,
                              .tp_size = 2,
                              .max_seqs = 1,
                              .max_len = 1,
                              .n_threads = 1};
    ferry__model *m = NULL;

    (void)state;
    assert_int_equal(ferry__model_create(&o, &m), FERRY_EINVAL);
    assert_non_null(strstr(ferry_last_error(), "needs a group"));
    o.tp_rank = 2;
    assert_int_equal(ferry__model_create(&o, &m), FERRY_EINVAL);
    o.tp_rank = 0;
    o.tp_size = 1;
    o.max_len = 0;
    assert_int_equal(ferry__model_create(&o, &m), FERRY_EINVAL);
    o.max_len = INT32_MAX;
    o.max_seqs = INT32_MAX;
    assert_true(ferry__model_create(&o, &m) < 0);
    assert_null(m);
}

/* The n-th allocation or mapping fails: one clean error, nothing leaked. */
static void failed_allocations_are_clean(void **state)
{
    static const ferry__fault KINDS[] = {FERRY__FAULT_ALLOC, FERRY__FAULT_MMAP};
    ferry__model_options o = {.config = &CONFIG,
                              .kernel = FERRY_DTYPE_F32,
                              .tp_size = 1,
                              .max_seqs = 1,
                              .max_len = 4,
                              .n_threads = 1};
    float logits[41];
    int32_t ids[2] = {1, 2};
    ferry__seq_step s = {0, 0, 2, ids};
    size_t kind;
    uint64_t n;

    (void)state;
    for (kind = 0; kind < 2; kind++) {
        ferry_status st = FERRY_ENOMEM;

        for (n = 1; st < 0; n++) {
            ferry__model *m = NULL;

            ferry__fault_arm(KINDS[kind], n);
            st = ferry__model_create(&o, &m);
            if (st == FERRY_OK)
                st = ferry__model_forward(m, &s, 1, logits, 1000);
            ferry__fault_arm(KINDS[kind], 0);
            assert_true(st == FERRY_OK || st == FERRY_ENOMEM);
            ferry__model_destroy(&m);
            assert_true(n < 1000);
        }
        assert_true(n > 2);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_table_has_vllm_s_names_and_fixed_aligned_storage),
        cmocka_unit_test(checkpoint_names_end_with_null_and_have_full_shapes),
        cmocka_unit_test(the_loader_knows_its_names),
        cmocka_unit_test(bad_steps_are_refused_with_both_numbers),
        cmocka_unit_test(slots_do_not_see_each_other),
        cmocka_unit_test(new_weights_are_served_at_once),
        cmocka_unit_test(a_missing_rank_fails_the_pass_in_time),
        cmocka_unit_test(options_that_do_not_fit_are_refused),
        cmocka_unit_test(failed_allocations_are_clean),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
