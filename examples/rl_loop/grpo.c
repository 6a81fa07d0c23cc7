/* SPDX-License-Identifier: Apache-2.0 */
/* Group-relative policy gradient; see grpo.h. */
#include "grpo.h"

#include <math.h>
#include <string.h>

static void set_returns(sample *s, double discount)
{
    double sum = 0;

    for (int t = TASK_ANSWER - 1; t >= 0; t--) {
        sum = s->rewards[t] + discount * sum;
        s->advantages[t] = sum;
    }
}

/* Measures the returns of one place against those of the group. */
static void normalise(sample *group, size_t size, int t)
{
    double mean = 0, square = 0, deviation;

    for (size_t i = 0; i < size; i++)
        mean += group[i].advantages[t] / (double)size;
    for (size_t i = 0; i < size; i++) {
        double d = group[i].advantages[t] - mean;

        square += d * d / (double)size;
    }
    deviation = sqrt(square) + 1e-4;
    for (size_t i = 0; i < size; i++)
        group[i].advantages[t] = (group[i].advantages[t] - mean) / deviation;
}

void grpo_advantages(sample *samples, size_t n_groups, size_t size,
                     double discount)
{
    for (size_t i = 0; i < n_groups * size; i++)
        set_returns(&samples[i], discount);
    for (size_t g = 0; g < n_groups; g++)
        for (int t = 0; t < TASK_ANSWER; t++)
            normalise(samples + g * size, size, t);
}

static void count_version(grpo_counts *c, int32_t made, int32_t step)
{
    int32_t age = step - made;

    if (made == STEP_UNKNOWN) {
        c->unknown++;
        return;
    }
    c->ages[age < GRPO_AGES ? age : GRPO_AGES - 1]++;
    if (c->oldest == STEP_UNKNOWN || made < c->oldest)
        c->oldest = made;
    if (made > c->newest)
        c->newest = made;
}

/* What a token counts beside its advantage: 1 when the current weights made
 * it, else how much likelier they are to make it, or 0 when it is too old. */
static double weight_of(const grpo_options *o, int32_t made, int32_t step,
                        double mine, double workers, grpo_counts *c)
{
    double ratio;

    if (made == step)
        return 1;
    if (made == STEP_UNKNOWN || step - made > o->age_max) {
        c->dropped++;
        return 0;
    }
    ratio = fmin(exp(mine - workers), o->ratio_max);
    c->weighted++;
    c->ratio_sum += ratio;
    return ratio;
}

void grpo_weights(const sample *samples, size_t n, const float *logprobs,
                  int32_t vocab, int32_t step, const grpo_options *options,
                  float *coefficients, float *entropies,
                  grpo_counts *out_counts)
{
    double share = 1.0 / ((double)n * TASK_ANSWER);
    grpo_counts c = {.oldest = STEP_UNKNOWN, .newest = STEP_UNKNOWN};

    memset(coefficients, 0, n * TASK_LENGTH * sizeof *coefficients);
    memset(entropies, 0, n * TASK_LENGTH * sizeof *entropies);
    for (size_t s = 0; s < n; s++) {
        const sample *x = &samples[s];

        for (int32_t t = 0; t < x->n_answer; t++) {
            size_t at = s * TASK_LENGTH + sample_position(t);
            double mine =
                (double)logprobs[at * (size_t)vocab + (size_t)x->answer[t]];
            double w = weight_of(options, x->steps[t], step, mine,
                                 (double)x->logprobs[t], &c);

            count_version(&c, x->steps[t], step);
            coefficients[at] = (float)(w * x->advantages[t] * share);
            entropies[at] = w > 0 ? (float)(options->entropy * share) : 0;
        }
    }
    *out_counts = c;
}
