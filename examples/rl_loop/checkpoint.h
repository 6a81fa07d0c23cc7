/* SPDX-License-Identifier: Apache-2.0 */
/* Everything a run needs to go on: one safetensors file, replaced whole.
 *   1. the parameters under their own names, f32
 *   2. adam.mean and adam.square, f32, laid out as the policy's memory
 *   3. history, f64, (rounds, columns)
 *   4. metadata: format, seed, round, adam_steps and rng as decimal text
 */
#ifndef RL_LOOP_CHECKPOINT_H
#define RL_LOOP_CHECKPOINT_H

#include "adam.h"
#include "history.h"
#include "policy.h"

typedef struct checkpoint {
    policy *p;
    adam *a;
    history *h;
    rng *random;
    uint64_t seed;
    int64_t round; /* the next one */
} checkpoint;

/* Writes beside `path`, syncs, renames: whoever kills us finds the old file
 * or the new one. FERRY_EIO names the path. */
ferry_status checkpoint_save(const checkpoint *c, const char *path);
/* Fills what c points to, and seed and round. FERRY_EUNKNOWN: no such file;
 * FERRY_EMISMATCH: made by another model, format or seed (c->seed). */
ferry_status checkpoint_load(checkpoint *c, const char *path);

#endif
