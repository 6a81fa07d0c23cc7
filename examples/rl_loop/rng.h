/* SPDX-License-Identifier: Apache-2.0 */
/* One 64-bit state, so that a checkpoint holds all of it. */
#ifndef RL_LOOP_RNG_H
#define RL_LOOP_RNG_H

#include <math.h>
#include <stdint.h>

typedef struct rng {
    uint64_t state;
} rng;

/* SplitMix64's finaliser: mixes a number into one that looks random. */
static inline uint64_t rng_mix(uint64_t z)
{
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

static inline uint64_t rng_next(rng *r)
{
    r->state += 0x9E3779B97F4A7C15u;
    return rng_mix(r->state);
}

/* In [0, 1). */
static inline double rng_uniform(rng *r)
{
    return (double)(rng_next(r) >> 11) * 0x1p-53;
}

/* In [0, n). */
static inline int32_t rng_below(rng *r, int32_t n)
{
    return (int32_t)(rng_uniform(r) * n);
}

/* Mean 0, standard deviation 1. */
static inline double rng_normal(rng *r)
{
    double u = 1.0 - rng_uniform(r), v = rng_uniform(r);

    return sqrt(-2.0 * log(u)) * cos(6.283185307179586 * v);
}

#endif
