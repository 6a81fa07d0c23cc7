/* SPDX-License-Identifier: Apache-2.0 */
/* B9: layerwise gather groups. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "base/alloc.h"
#include "core/groups.h"
#include <stdio.h>
#include <string.h>

static void check_key(const char *name, const char *prefix, int64_t index)
{
    size_t n = 0;
    int64_t i = -1;
    if (!prefix) {
        assert_false(ferry__layer_key(name, &n, &i));
        return;
    }
    assert_true(ferry__layer_key(name, &n, &i));
    assert_int_equal(n, strlen(prefix));
    assert_memory_equal(name, prefix, n);
    assert_int_equal(i, index);
}

static void b9_the_outermost_index_is_the_key(void **state)
{
    (void)state;
    check_key("model.layers.3.self_attn.q_proj.weight", "model.layers.", 3);
    check_key("model.language_model.layers.3.x", "model.language_model.layers.",
              3);
    check_key("transformer.h.3.x", "transformer.h.", 3);
    check_key("backbone.layers.12.x", "backbone.layers.", 12);
    check_key("visual.blocks.3.x", "visual.blocks.", 3);
    check_key("model.layers.3.mlp.experts.7.w1", "model.layers.", 3);
    check_key("0.weight", "", 0);
    check_key("scales.17", "scales.", 17);
    check_key("model.norm.weight", NULL, 0);
    check_key("lm_head.weight", NULL, 0);
    check_key("model.layers3.x1.weight", NULL, 0);
    check_key("a..b", NULL, 0);
    check_key("", NULL, 0);
    check_key("a.99999999999999999999.b", NULL, 0);
    check_key("a.-1.b", NULL, 0);
}

#define MOST 16

static size_t metas(const char *const *names, ferry_param_meta *out)
{
    size_t n = 0;
    for (; names[n]; n++) {
        ferry_param_meta m = {names[n], FERRY_DTYPE_F32, 0, {0}};
        out[n] = m;
    }
    return n;
}

static void check_groups(const char *const *names, const size_t *want,
                         size_t n_want)
{
    ferry_param_meta m[MOST];
    size_t *lengths = NULL, n = metas(names, m), groups = 0;
    assert_int_equal(ferry__layerwise_groups(m, n, &lengths, &groups),
                     FERRY_OK);
    assert_int_equal(groups, n_want);
    assert_memory_equal(lengths, want, n_want * sizeof(*want));
    ferry__free(lengths);
}

static void b9_runs_without_index_are_groups_where_they_stand(void **state)
{
    (void)state;
    const char *plain[] = {"model.embed_tokens.weight",
                           "model.layers.0.a",
                           "model.layers.0.b",
                           "model.layers.1.a",
                           "model.norm.weight",
                           "lm_head.weight",
                           NULL};
    const size_t want[] = {1, 2, 1, 2};
    check_groups(plain, want, 4);
    const char *mixed[] = {
        "model.layers.0.a", "norm",  "extra", "visual.blocks.0.a",
        "model.layers.1.a", "other", NULL};
    const size_t want_mixed[] = {1, 2, 1, 1, 1};
    check_groups(mixed, want_mixed, 5);
    const char *moe[] = {"m.layers.0.mlp.experts.0.w1",
                         "m.layers.0.mlp.experts.1.w1", "m.layers.0.norm",
                         NULL};
    const size_t want_moe[] = {3};
    check_groups(moe, want_moe, 1);
}

static void b9_equal_indices_under_other_prefixes_are_other_layers(void **state)
{
    (void)state;
    const char *names[] = {"a.layers.0.x", "b.layers.0.x", "ab.0.x", "a.b.0.x",
                           NULL};
    const size_t want[] = {1, 1, 1, 1};
    check_groups(names, want, 4);
}

static void b9_a_layer_that_comes_back_is_refused_by_name(void **state)
{
    (void)state;
    const char *names[] = {"m.layers.0.a", "m.layers.1.a", "m.layers.0.b",
                           NULL};
    ferry_param_meta m[MOST];
    size_t *lengths = NULL, groups = 0, n = metas(names, m);
    assert_int_equal(ferry__layerwise_groups(m, n, &lengths, &groups),
                     FERRY_EINVAL);
    assert_non_null(strstr(ferry_last_error(), "parameter m.layers.0.b"));
    assert_non_null(strstr(ferry_last_error(), "m.layers.0.a"));
    assert_null(lengths);
    const char *zeros[] = {"m.layers.3.a", "norm", "m.layers.03.b", NULL};
    n = metas(zeros, m);
    assert_int_equal(ferry__layerwise_groups(m, n, &lengths, &groups),
                     FERRY_EINVAL);
    assert_non_null(strstr(ferry_last_error(), "layer m.layers.3 comes"));
}

static void no_parameters_are_no_groups(void **state)
{
    (void)state;
    size_t *lengths = NULL, groups = 9;
    assert_int_equal(ferry__layerwise_groups(NULL, 0, &lengths, &groups),
                     FERRY_OK);
    assert_int_equal(groups, 0);
    ferry__free(lengths);
}

static void memory_running_out_leaks_nothing(void **state)
{
    (void)state;
    const char *names[] = {"e", "m.0.a", "m.1.a", "m.2.a", NULL};
    ferry_param_meta m[MOST];
    size_t *lengths = NULL, groups = 0, n = metas(names, m);
    for (uint64_t k = 1; k < 100; k++) {
        ferry__fault_arm(FERRY__FAULT_ALLOC, k);
        ferry_status st = ferry__layerwise_groups(m, n, &lengths, &groups);
        ferry__fault_arm(FERRY__FAULT_ALLOC, 0);
        if (st == FERRY_OK) {
            assert_true(k > 3);
            ferry__free(lengths);
            return;
        }
        assert_int_equal(st, FERRY_ENOMEM);
    }
    fail();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(b9_the_outermost_index_is_the_key),
        cmocka_unit_test(b9_runs_without_index_are_groups_where_they_stand),
        cmocka_unit_test(
            b9_equal_indices_under_other_prefixes_are_other_layers),
        cmocka_unit_test(b9_a_layer_that_comes_back_is_refused_by_name),
        cmocka_unit_test(no_parameters_are_no_groups),
        cmocka_unit_test(memory_running_out_leaks_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
