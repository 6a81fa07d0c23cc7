/* SPDX-License-Identifier: Apache-2.0 */
/* Sampling: determinism, the cuts against a sort, and the shares drawn. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "model/sample.h"

#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#define N 500

static uint64_t next_random(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return *state >> 33;
}

/* Some values repeat, so that ties occur at every cut. */
static void random_logits(uint64_t seed, float *out)
{
    int i;

    for (i = 0; i < N; i++)
        out[i] = (float)(next_random(&seed) % 64) / 8.0f - 4.0f;
}

static int32_t draw_one(const float *logits, int64_t n, double temperature,
                        double top_p, int32_t top_k, uint64_t seed,
                        uint64_t draw)
{
    ferry__sampling s = {temperature, top_p, top_k, seed};
    ferry__sampled out;

    ferry__sample(logits, n, &s, draw, &out);
    return out.token;
}

static void greedy_takes_the_lowest_id_of_a_tie(void **state)
{
    float logits[5] = {1, 3, 2, 3, -1};
    ferry__sampling greedy = {.top_p = 1};
    ferry__sampled out;
    double total = exp(1) + 2 * exp(3) + exp(2) + exp(-1);

    (void)state;
    ferry__sample(logits, 5, &greedy, 0, &out);
    assert_int_equal(out.token, 1);
    assert_true(fabs((double)out.logprob - (3 - log(total))) < 1e-6);
}

static void logprobs_are_of_raw_logits(void **state)
{
    float logits[3] = {0, 1, 2};
    ferry__sampling hot = {.temperature = 5, .top_p = 0.9, .seed = 4};
    ferry__sampled out;
    double total = 1 + exp(1) + exp(2);

    (void)state;
    ferry__sample(logits, 3, &hot, 7, &out);
    assert_true(fabs((double)out.logprob -
                     ((double)logits[out.token] - log(total))) < 1e-6);
}

static void the_same_seed_and_draw_give_the_same_token(void **state)
{
    float logits[N];
    int i, moved = 0;

    (void)state;
    random_logits(1, logits);
    for (i = 0; i < 50; i++) {
        int32_t a = draw_one(logits, N, 1, 1, 0, 9, (uint64_t)i);

        assert_int_equal(a, draw_one(logits, N, 1, 1, 0, 9, (uint64_t)i));
        moved += a != draw_one(logits, N, 1, 1, 0, 10, (uint64_t)i);
    }
    assert_true(moved > 30);
}

static const float *order_by;

static int falling(const void *a, const void *b)
{
    int x = *(const int *)a, y = *(const int *)b;

    if (order_by[x] != order_by[y])
        return order_by[x] < order_by[y] ? 1 : -1;
    return (x > y) - (x < y);
}

/* Which tokens may come, by sorting. */
static void allowed(const float *logits, double temperature, double top_p,
                    int32_t top_k, bool out[N])
{
    int order[N], i, kept = top_k > 0 && top_k < N ? top_k : N;
    double total = 0, sum = 0;

    order_by = logits;
    for (i = 0; i < N; i++)
        order[i] = i;
    qsort(order, N, sizeof(order[0]), falling);
    memset(out, 0, N * sizeof(out[0]));
    for (i = 0; i < kept; i++)
        total +=
            exp((double)(logits[order[i]] - logits[order[0]]) / temperature);
    for (i = 0; i < kept && sum < top_p * total - 1e-9; i++) {
        sum += exp((double)(logits[order[i]] - logits[order[0]]) / temperature);
        out[order[i]] = true;
    }
}

static void cuts_equal_those_of_a_sort(void **state)
{
    static const struct {
        double temperature, top_p;
        int32_t top_k;
    } CASES[] = {{1, 1, 1},      {1, 1, 7},      {1, 1, 499},   {1, 0.1, 0},
                 {0.7, 0.5, 0},  {2, 0.9, 0},    {1, 0.95, 40}, {1, 1e-6, 0},
                 {0.01, 0.9, 0}, {100, 0.999, 0}};
    float logits[N];
    bool may[N], seen[N];
    size_t c;
    uint64_t seed, draw;
    int i;

    (void)state;
    for (c = 0; c < sizeof(CASES) / sizeof(CASES[0]); c++) {
        for (seed = 1; seed <= 3; seed++) {
            int n_may = 0, n_seen = 0;

            random_logits(seed, logits);
            allowed(logits, CASES[c].temperature, CASES[c].top_p,
                    CASES[c].top_k, may);
            memset(seen, 0, sizeof(seen));
            for (draw = 0; draw < 3000; draw++) {
                int32_t t =
                    draw_one(logits, N, CASES[c].temperature, CASES[c].top_p,
                             CASES[c].top_k, seed, draw);

                assert_true(t >= 0 && t < N);
                assert_true(may[t]);
                seen[t] = true;
            }
            for (i = 0; i < N; i++) {
                n_may += may[i];
                n_seen += seen[i];
            }
            if (n_may <= 40)
                assert_true(n_seen >= (n_may + 1) / 2);
        }
    }
}

static void shares_follow_the_probabilities(void **state)
{
    float logits[4] = {0, (float)log(2.0), (float)log(3.0), -INFINITY};
    int counts[4] = {0}, i;

    (void)state;
    for (i = 0; i < 60000; i++)
        counts[draw_one(logits, 4, 1, 1, 0, 5, (uint64_t)i)]++;
    assert_int_equal(counts[3], 0);
    assert_true(abs(counts[0] - 10000) < 400);
    assert_true(abs(counts[1] - 20000) < 500);
    assert_true(abs(counts[2] - 30000) < 500);
}

static void odd_logits_never_leave_the_vocabulary(void **state)
{
    float all_nan[3] = {NAN, NAN, NAN};
    float some[4] = {NAN, -INFINITY, 2, NAN};
    float infinite[3] = {1, INFINITY, INFINITY};
    uint64_t draw;

    (void)state;
    assert_int_equal(draw_one(all_nan, 3, 0, 1, 0, 0, 0), 0);
    assert_int_equal(draw_one(some, 4, 0, 1, 0, 0, 0), 2);
    for (draw = 0; draw < 100; draw++) {
        int32_t t = draw_one(all_nan, 3, 1, 0.5, 2, 0, draw);

        assert_true(t >= 0 && t < 3);
        assert_int_equal(draw_one(some, 4, 1, 0.9, 3, 1, draw), 2);
        t = draw_one(infinite, 3, 1, 0.9, 0, 1, draw);
        assert_true(t == 1 || t == 2);
    }
}

static void top_logprobs_fall_and_start_with_the_lowest_id(void **state)
{
    float logits[N];
    ferry__sampled top[32];
    bool may[N];
    int i;

    (void)state;
    random_logits(3, logits);
    ferry__top_logprobs(logits, N, 32, top);
    allowed(logits, 1, 1, 32, may);
    for (i = 0; i < 32; i++) {
        assert_true(may[top[i].token]);
        if (i > 0) {
            assert_true(top[i].logprob <= top[i - 1].logprob);
            assert_true(top[i].logprob < top[i - 1].logprob ||
                        top[i].token > top[i - 1].token);
        }
    }
    ferry__top_logprobs(logits, 2, 5, top);
    assert_true(top[0].logprob >= top[1].logprob);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(greedy_takes_the_lowest_id_of_a_tie),
        cmocka_unit_test(logprobs_are_of_raw_logits),
        cmocka_unit_test(the_same_seed_and_draw_give_the_same_token),
        cmocka_unit_test(cuts_equal_those_of_a_sort),
        cmocka_unit_test(shares_follow_the_probabilities),
        cmocka_unit_test(odd_logits_never_leave_the_vocabulary),
        cmocka_unit_test(top_logprobs_fall_and_start_with_the_lowest_id),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
