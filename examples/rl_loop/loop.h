/* SPDX-License-Identifier: Apache-2.0 */
/* The loop: sample, reward, step, sync, again. */
#ifndef RL_LOOP_LOOP_H
#define RL_LOOP_LOOP_H

#include "options.h"

#include <signal.h>

/* Runs until the rounds are done, the target is reached, or *stop is set,
 * which ends it after the round with a checkpoint. *out_good says whether the
 * run came out as it should: the target reached, or, without sync, nothing
 * learned. Blocks for the length of the run. */
ferry_status loop_run(const options *o, const volatile sig_atomic_t *stop,
                      bool *out_good);

#endif
