/* SPDX-License-Identifier: Apache-2.0 */
/* One call on its way to all clients of a fan-out, a thread each.
 * Invariant: a call returns only when it returned everywhere; the first
 * failure by index is the answer, every other one is logged (C3). Where it
 * only tells of a rank of another member, that one's own failure comes first.
 */
#ifndef FERRY_CLIENTS_FANOUT_CALL_H
#define FERRY_CLIENTS_FANOUT_CALL_H

#include <ferry/client.h>
#include <stdatomic.h>
#include <stdbool.h>

/* The ranks of the group that one member holds; count 0: not known. */
typedef struct ferry__fanout_ranks {
    atomic_int first, count;
} ferry__fanout_ranks;

typedef struct ferry__fanout {
    ferry_client_ops ops; /* optional calls that not all have are NULL */
    ferry_client *clients;
    ferry__fanout_ranks *ranks; /* one a client */
    size_t count;
    atomic_int n_holders; /* the owner, and calls that are under way */
} ferry__fanout;

/* It is freed by the last of its holders, since a client's call may go on
 * after the fan-out was closed. */
void ferry__fanout_hold(ferry__fanout *f);
void ferry__fanout_release(ferry__fanout *f);

typedef ferry_status (*ferry__fanout_fn)(const ferry_client *client, void *arg,
                                         size_t index);

/* `may_starve`: they wait for bytes that a failed one will never let through,
 * and are canceled a while after the first failure. `done`, where a failure
 * in part leaves the servers apart: the line says which ones did it. */
ferry_status ferry__fanout_call(ferry__fanout *f, ferry__fanout_fn fn,
                                void *arg, bool may_starve, const char *done);
void ferry__fanout_cancel(ferry__fanout *f);

#endif
