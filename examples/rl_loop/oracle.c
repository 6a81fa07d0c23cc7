/* SPDX-License-Identifier: Apache-2.0 */
/* The comparison of logprobs; see oracle.h. */
#include "oracle.h"

#include <math.h>

static ferry_status compare(const sample *x, size_t index, int32_t t,
                            double mine, int32_t step, oracle_report *r)
{
    double workers = (double)x->logprobs[t];
    double difference = fabs(mine - workers);

    /* Written so that a NaN fails. */
    if (!(difference <= ORACLE_TOLERANCE))
        return ferry_fail(
            FERRY_EMISMATCH,
            "the worker has drifted from the trainer: answer %zu, token %d "
            "(id %d), version step-%d: log p is %.6f there and %.6f here "
            "(%g apart, limit %g)",
            index, (int)t, (int)x->answer[t], (int)step, workers, mine,
            difference, ORACLE_TOLERANCE);
    r->checked++;
    if (difference > r->difference)
        r->difference = difference;
    return FERRY_OK;
}

ferry_status oracle_check(const sample *samples, size_t n,
                          const float *logprobs, int32_t vocab, int32_t step,
                          oracle_report *out)
{
    oracle_report r = {0};

    for (size_t s = 0; s < n; s++) {
        const sample *x = &samples[s];

        if (!sample_made_by(x, step))
            continue;
        for (int32_t t = 0; t < x->n_answer; t++) {
            size_t at = s * TASK_LENGTH + sample_position(t);
            float mine = logprobs[at * (size_t)vocab + (size_t)x->answer[t]];

            FERRY_TRY(compare(x, s, t, (double)mine, step, &r));
        }
    }
    *out = r;
    return FERRY_OK;
}
