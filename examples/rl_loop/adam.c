/* SPDX-License-Identifier: Apache-2.0 */
/* Adam; see adam.h. */
#include "adam.h"

#include <math.h>
#include <stdlib.h>

ferry_status adam_create(size_t n, double rate, adam **out)
{
    adam *a = calloc(1, sizeof *a);

    if (a != NULL) {
        a->mean = calloc(n, sizeof(float));
        a->square = calloc(n, sizeof(float));
    }
    if (a == NULL || a->mean == NULL || a->square == NULL) {
        adam_destroy(&a);
        return ferry_fail(FERRY_ENOMEM, "adam: out of memory");
    }
    a->n = n;
    a->rate = rate;
    a->beta1 = 0.9;
    a->beta2 = 0.98;
    a->epsilon = 1e-8;
    a->clip = 1.0;
    a->horizon = 100;
    *out = a;
    return FERRY_OK;
}

void adam_destroy(adam **a)
{
    if (*a == NULL)
        return;
    free((*a)->mean);
    free((*a)->square);
    free(*a);
    *a = NULL;
}

/* Flat at first, then falling: large steps find the answer, small ones keep
 * it. A function of the step alone, so that a resumed run goes on with it. */
static double rate_now(const adam *a)
{
    double x = (double)a->steps / a->horizon;

    return a->rate * fmax(1.0 / (1.0 + x * x), 0.1);
}

double adam_step(adam *a, float *weights, const float *gradient)
{
    double norm = 0, scale, rate, correct1, correct2;

    for (size_t i = 0; i < a->n; i++)
        norm += (double)gradient[i] * (double)gradient[i];
    norm = sqrt(norm);
    scale = norm > a->clip ? a->clip / norm : 1.0;
    a->steps++;
    rate = rate_now(a);
    correct1 = 1.0 - pow(a->beta1, (double)a->steps);
    correct2 = 1.0 - pow(a->beta2, (double)a->steps);
    for (size_t i = 0; i < a->n; i++) {
        double d = scale * (double)gradient[i];
        double m = a->beta1 * (double)a->mean[i] + (1.0 - a->beta1) * d;
        double s = a->beta2 * (double)a->square[i] + (1.0 - a->beta2) * d * d;

        a->mean[i] = (float)m;
        a->square[i] = (float)s;
        weights[i] -=
            (float)(rate * (m / correct1) / (sqrt(s / correct2) + a->epsilon));
    }
    return norm;
}
