/* SPDX-License-Identifier: Apache-2.0 */
/* Random loaders, baked and replayed, against a loop over elements: any view
 * of the source into any permuted box of a slot. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "core/load_plan.h"
#include "harness/naive.h"
#include <string.h>

typedef struct random_load {
    uint64_t rng;
    ferry_tensor whole; /* what the loader must be given */
    ferry_tensor src, dst;
    ferry_param slot;
} random_load;

static ferry_status load_random(void *self_ptr, ferry_loader *l,
                                const char *name, const ferry_tensor *t)
{
    random_load *r = self_ptr;
    ferry_tensor slot, src = r->src, dst = r->dst;
    (void)name;
    FERRY_TRY(ferry_loader_expect(l, t, r->whole.ndim, r->whole.shape));
    FERRY_TRY(ferry_loader_slot(l, 0, &slot));
    src.name = t->name; /* the views were taken of an equal tensor */
    dst.name = slot.name;
    return ferry_load_copy(l, &dst, &src);
}

/* A slot somewhat larger than the view, permuted, and the box in it. */
static void random_slot(random_load *r)
{
    int32_t order[FERRY_MAX_DIMS], back[FERRY_MAX_DIMS];
    int64_t start[FERRY_MAX_DIMS], room = 1;
    int32_t n = r->src.ndim;
    for (int32_t i = 0; i < n; i++)
        order[i] = i;
    for (int32_t i = n - 1; i > 0; i--) {
        int32_t j = (int32_t)naive_between(&r->rng, 0, i), old = order[i];
        order[i] = order[j];
        order[j] = old;
    }
    memset(&r->slot, 0, sizeof(r->slot));
    r->slot.name = "slot";
    r->slot.dtype = FERRY_DTYPE_BF16;
    r->slot.ndim = n;
    for (int32_t i = 0; i < n; i++) {
        int64_t more = room < 500 ? naive_between(&r->rng, 0, 1) : 0;
        back[order[i]] = i;
        start[i] = more;
        r->slot.shape[i] = r->src.shape[order[i]] + more;
        room *= r->slot.shape[i];
    }
    assert_int_equal(
        ferry_tensor_init(&r->dst, NULL, r->slot.dtype, n, r->slot.shape),
        FERRY_OK);
    for (int32_t i = 0; i < n; i++)
        assert_int_equal(ferry_tensor_narrow(&r->dst, i, start[i],
                                             r->src.shape[order[i]], &r->dst),
                         FERRY_OK);
    assert_int_equal(ferry_tensor_permute(&r->dst, back, &r->dst), FERRY_OK);
}

static void random_loaders_replay_as_element_loops(void **state)
{
    (void)state;
    static naive_view from, to;
    static float source[NAIVE_MAX];
    static uint16_t got[1 << 16], want[1 << 16];
    for (int i = 0; i < NAIVE_MAX; i++)
        source[i] = (float)(i - 700);
    for (uint64_t seed = 1; seed <= 1500; seed++) {
        random_load r = {.rng = seed * 65537};
        ferry_model m = {.size = sizeof(m),
                         .self = &r,
                         .params = &r.slot,
                         .n_params = 1,
                         .load = load_random};
        naive_tensor(&r.rng, FERRY_DTYPE_F32, 1200, &r.whole, &from);
        r.src = r.whole;
        for (int64_t k = naive_between(&r.rng, 0, 5); k > 0; k--)
            naive_step(&r.rng, &r.src, &from);
        random_slot(&r);
        naive_of(&r.dst, &to);
        memset(got, 0x7f, sizeof(got));
        memset(want, 0x7f, sizeof(want));
        for (size_t i = 0; i < from.count; i++)
            ferry__convert(&want[to.index[i]], FERRY_DTYPE_BF16,
                           &source[from.index[i]], FERRY_DTYPE_F32, 1);
        ferry_param_meta meta_of = {"p", FERRY_DTYPE_F32, r.whole.ndim, {0}};
        memcpy(meta_of.shape, r.whole.shape, sizeof(meta_of.shape));
        ferry__plan *plan = NULL;
        size_t id, n;
        assert_int_equal(ferry__plan_create(&m, &plan), FERRY_OK);
        assert_int_equal(ferry__plan_bake(plan, &meta_of, &id), FERRY_OK);
        const ferry__entry *e = ferry__plan_entries(plan, id, &n);
        assert_int_equal(n, from.count > 0 ? 1 : 0);
        if (n == 1)
            ferry__copy_run(&e->op, got, source, NULL);
        assert_memory_equal(got, want, sizeof(got));
        ferry__plan_destroy(&plan);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_loaders_replay_as_element_loops),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
