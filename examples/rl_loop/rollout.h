/* SPDX-License-Identifier: Apache-2.0 */
/* Sampling answers from the server, many requests in flight at once:
 * token ids in; token ids, logprobs and weight versions out. */
#ifndef RL_LOOP_ROLLOUT_H
#define RL_LOOP_ROLLOUT_H

#include "sample.h"

#include <ferry/ferry.h>

#include <stdbool.h>

typedef struct rollout rollout;

/* At most `n_slots` requests in flight. Opens no connection yet. */
ferry_status rollout_create(const char *url, int32_t n_slots, rollout **out);
void rollout_destroy(rollout **handle); /* NULL is fine */

/* Requests in flight. */
int32_t rollout_in_flight(const rollout *r);
/* Sends one, which must stay in place until it is done. The prompt and the
 * seed are set. FERRY_EBUSY: all slots are taken. */
ferry_status rollout_send(rollout *r, sample *s);
/* Waits at most timeout_ms for an answer. *out_done is one whose answer has
 * been filled in, or NULL. The first failure ends the rollout: FERRY_ECONN,
 * FERRY_EPEER with the server's words, FERRY_ETIMEOUT. */
ferry_status rollout_wait(rollout *r, int32_t timeout_ms, sample **out_done);

/* Sends all and waits for all. */
ferry_status rollout_run(rollout *r, sample *samples, size_t n);

#endif
