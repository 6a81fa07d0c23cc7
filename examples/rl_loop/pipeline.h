/* SPDX-License-Identifier: Apache-2.0 */
/* Rollouts that never stop: a thread keeps groups of answers in flight, also
 * while weights change, and hands whole groups over as they complete. */
#ifndef RL_LOOP_PIPELINE_H
#define RL_LOOP_PIPELINE_H

#include "sample.h"

#include <ferry/ferry.h>

typedef struct pipeline pipeline;

/* `n_groups` groups of `size` are in flight or waiting at most, which bounds
 * how old an answer can get. `n_slots`: requests at once. */
ferry_status pipeline_create(const char *url, int32_t n_slots, size_t n_groups,
                             size_t size, uint64_t seed, pipeline **out);
void pipeline_destroy(pipeline **handle); /* NULL is fine */

/* Takes the n_groups oldest complete groups: n_groups * size samples. Waits
 * for them, at most a minute: FERRY_ETIMEOUT. A failure of the rollouts is
 * reported here. */
ferry_status pipeline_take(pipeline *p, size_t n_groups, sample *out);

#endif
