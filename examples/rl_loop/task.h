/* SPDX-License-Identifier: Apache-2.0 */
/* What is to be learned: given some digits, say them in ascending order.
 *   prompt  BEGIN d d d THEN        answer  d d d END
 * Every place of the answer that is right earns an equal share of 1. Chance
 * earns about 1/16. */
#ifndef RL_LOOP_TASK_H
#define RL_LOOP_TASK_H

#include "rng.h"

#include <stdint.h>

enum {
    TASK_DIGITS = 3,
    TASK_PROMPT = TASK_DIGITS + 2, /* tokens */
    TASK_ANSWER = TASK_DIGITS + 1, /* tokens at most */
    TASK_LENGTH = TASK_PROMPT + TASK_ANSWER,
    TASK_BEGIN = 10,
    TASK_THEN = 11,
    TASK_END = 12
};

void task_prompt(rng *random, int32_t out_prompt[TASK_PROMPT]);

/* What each place earns, 0 where there is none. Answers the sum, in [0, 1];
 * it is 1 exactly when all is right. */
double task_reward(const int32_t prompt[TASK_PROMPT], const int32_t *answer,
                   int32_t n_answer, double out_rewards[TASK_ANSWER]);

#endif
