/* SPDX-License-Identifier: Apache-2.0 */
/* One weight call on every rank of every replica.
 * Invariant: under server.control; a call that was sent to a rank is answered
 * or the replica is lost before the next one is sent. */
#ifndef FERRY_SERVE_RANK_CALL_H
#define FERRY_SERVE_RANK_CALL_H

#include "serve/server.h"

/* Answers of all ranks, dp-major. */
typedef struct ferry__answers {
    ferry_status first; /* the first that came */
    char line[1024];
    void **bodies; /* NULL, or one owned text a rank */
    size_t *sizes;
    ferry_status *statuses; /* NULL, or one a rank */
} ferry__answers;

/* Room for the answers' bodies; FERRY_ENOMEM. */
ferry_status ferry__answers_open(const ferry__server *s, ferry__answers *out);
/* Frees all that is there; also after a failed open. */
void ferry__answers_close(const ferry__server *s, ferry__answers *a);

/* Ranks of all replicas. */
int32_t ferry__rank_world(const ferry__server *s);
/* How long one round may take, in milliseconds. */
int64_t ferry__rank_bound_ms(const ferry__server *s);
/* Takes server.control for the call `what`, or FERRY_EBUSY naming the one
 * that runs. One that only asks is waited for: a monitor must not make a
 * trainer's round fail. */
ferry_status ferry__rank_call_begin(ferry__server *s, const char *what);
/* The same for a call that only asks. */
ferry_status ferry__rank_ask_begin(ferry__server *s, const char *what);
void ferry__rank_call_end(ferry__server *s);
/* Waits until all replicas are up. */
ferry_status ferry__rank_call_wait_up(ferry__server *s);
/* Sends to all, waits for all; the first failure that came is returned.
 * `answers` may be NULL. */
ferry_status ferry__rank_call(ferry__server *s, ferry__rank_kind kind,
                              const char *body, ferry__answers *answers);
/* Tells the ranks of all replicas to end their round; they answer even while
 * an update runs. */
void ferry__rank_call_abort(ferry__server *s);

#endif
