/* SPDX-License-Identifier: Apache-2.0 */
/* The policy gradient's weights. A group is several answers to one prompt; a
 * token counts by how much more is earned from its place on than the group
 * earns from there. */
#ifndef RL_LOOP_GRPO_H
#define RL_LOOP_GRPO_H

#include "sample.h"

/* Tokens by the version that made them, and what became of the old ones. */
#define GRPO_AGES 4 /* 0, 1, 2, 3 and more versions behind */

typedef struct grpo_options {
    double entropy;   /* what spreading out is worth, per token */
    double ratio_max; /* importance weights are cut here */
    int32_t age_max;  /* older tokens are dropped */
} grpo_options;

typedef struct grpo_counts {
    int64_t ages[GRPO_AGES];
    int64_t unknown;  /* tokens without a version of ours: dropped */
    int64_t weighted; /* off-policy tokens that were importance-weighted */
    int64_t dropped;  /* off-policy tokens that were left out */
    int32_t oldest, newest; /* versions seen; STEP_UNKNOWN when none */
    double ratio_sum;       /* of the weighted ones */
} grpo_counts;

/* Sets the advantages of each place: (return - mean of the group) / its
 * deviation, where a return is what the place earns and, by `discount`, what
 * the places after it do. Samples [i * size, (i + 1) * size) are group i. */
void grpo_advantages(sample *samples, size_t n_groups, size_t size,
                     double discount);

/* Fills coefficients and entropies, (n, TASK_LENGTH) both, as
 * graph_gradient takes them. `logprobs` (n, TASK_LENGTH, vocab) are the
 * trainer's own, of version `step`. */
void grpo_weights(const sample *samples, size_t n, const float *logprobs,
                  int32_t vocab, int32_t step, const grpo_options *options,
                  float *coefficients, float *entropies,
                  grpo_counts *out_counts);

#endif
