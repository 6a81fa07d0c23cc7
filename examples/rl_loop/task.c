/* SPDX-License-Identifier: Apache-2.0 */
/* Sorting digits; see task.h. */
#include "task.h"

#include <stdbool.h>

void task_prompt(rng *random, int32_t out_prompt[TASK_PROMPT])
{
    out_prompt[0] = TASK_BEGIN;
    for (int i = 1; i <= TASK_DIGITS; i++)
        out_prompt[i] = rng_below(random, 10);
    out_prompt[TASK_PROMPT - 1] = TASK_THEN;
}

static void sorted(const int32_t prompt[TASK_PROMPT], int32_t out[TASK_ANSWER])
{
    for (int i = 0; i < TASK_DIGITS; i++) {
        int32_t digit = prompt[i + 1];
        int at = i;

        for (; at > 0 && out[at - 1] > digit; at--)
            out[at] = out[at - 1];
        out[at] = digit;
    }
    out[TASK_DIGITS] = TASK_END;
}

double task_reward(const int32_t prompt[TASK_PROMPT], const int32_t *answer,
                   int32_t n_answer, double out_rewards[TASK_ANSWER])
{
    int32_t right[TASK_ANSWER];
    int n_right = 0;

    sorted(prompt, right);
    for (int i = 0; i < TASK_ANSWER; i++) {
        bool good = i < n_answer && answer[i] == right[i];

        out_rewards[i] = good ? 1.0 / TASK_ANSWER : 0.0;
        n_right += good;
    }
    return (double)n_right / TASK_ANSWER;
}
