/* SPDX-License-Identifier: Apache-2.0 */
/* One answer to one prompt, and what is known of every token in it. */
#ifndef RL_LOOP_SAMPLE_H
#define RL_LOOP_SAMPLE_H

#include "task.h"

#include <stddef.h>

#define STEP_UNKNOWN (-1)

typedef struct sample {
    int32_t prompt[TASK_PROMPT];
    uint64_t seed; /* of the server's sampling */
    int32_t answer[TASK_ANSWER];
    int32_t n_answer;
    float logprobs[TASK_ANSWER]; /* as the worker gave them */
    int32_t steps[TASK_ANSWER];  /* n of the version "step-n" that made it */
    double rewards[TASK_ANSWER]; /* of each place */
    double reward;               /* their sum, in [0, 1] */
    double advantages[TASK_ANSWER];
} sample;

/* Position whose distribution made answer token t. */
static inline size_t sample_position(int32_t t)
{
    return (size_t)(TASK_PROMPT - 1 + t);
}

/* Every token was made by version `step`. */
static inline int sample_made_by(const sample *s, int32_t step)
{
    for (int32_t t = 0; t < s->n_answer; t++)
        if (s->steps[t] != step)
            return 0;
    return s->n_answer > 0;
}

#endif
