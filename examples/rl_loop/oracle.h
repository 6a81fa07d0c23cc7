/* SPDX-License-Identifier: Apache-2.0 */
/* Does the worker compute with the trainer's weights? Its logprobs say so:
 * for one version both ends must come to the same numbers. */
#ifndef RL_LOOP_ORACLE_H
#define RL_LOOP_ORACLE_H

#include "sample.h"

#include <ferry/ferry.h>

#define ORACLE_TOLERANCE 1e-3

typedef struct oracle_report {
    int64_t checked;   /* tokens */
    double difference; /* the largest */
} oracle_report;

/* Compares the tokens of all samples that version `step` made alone with
 * `logprobs` (n, TASK_LENGTH, vocab), the trainer's own of that version.
 * FERRY_EMISMATCH names the token and both values. A sample that an update
 * crossed is left out: its later tokens saw keys and values of old weights.
 */
ferry_status oracle_check(const sample *samples, size_t n,
                          const float *logprobs, int32_t vocab, int32_t step,
                          oracle_report *out);

#endif
