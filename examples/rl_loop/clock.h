/* SPDX-License-Identifier: Apache-2.0 */
#ifndef RL_LOOP_CLOCK_H
#define RL_LOOP_CLOCK_H

#include <time.h>

static inline double now_ms(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

#endif
