/* SPDX-License-Identifier: Apache-2.0 */
/* Adam over one flat array of weights. */
#ifndef RL_LOOP_ADAM_H
#define RL_LOOP_ADAM_H

#include <ferry/ferry.h>

typedef struct adam {
    float *mean, *square; /* of the gradients, n each */
    size_t n;
    int64_t steps;
    double rate, beta1, beta2, epsilon;
    double clip;    /* largest norm */
    double horizon; /* steps after which the rate has halved; it falls to a
                       tenth at last */
} adam;

ferry_status adam_create(size_t n, double rate, adam **out);
void adam_destroy(adam **a); /* NULL is fine */

/* One step on `weights`, with the gradient cut to the norm `clip`. Answers
 * the norm before the cut. */
double adam_step(adam *a, float *weights, const float *gradient);

#endif
