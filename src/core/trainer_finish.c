/* SPDX-License-Identifier: Apache-2.0 */
/* How a round ends at the peers. One server finishes; several that are known
 * to be Ferry prepare, and commit when all of them have.
 * Invariant: no server of a fleet is told to commit before every one of them
 * has said that it can. */
#include "core/trainer_state.h"

#include "base/clock.h"
#include "base/log.h"

#include <stdio.h>

/* Several servers whose client names them. */
static size_t count_peers(const ferry_client *client)
{
    size_t n = 0;

    while (client->ops->peer != NULL &&
           client->ops->peer(client->self, n) != NULL)
        n++;
    return n;
}

static void no_fleet(ferry_trainer *t, size_t n, const char *why)
{
    t->fleet = FERRY__FLEET_NO;
    ferry__log(FERRY_LOG_WARN,
               "%zu servers cannot commit as a fleet: %s; each of them "
               "finishes by itself, and one that fails then leaves them with "
               "different weights",
               n, why);
}

ferry_status ferry__trainer_learn_peers(ferry_trainer *t)
{
    const ferry_client *client = ferry__control_call_client(t->call);
    ferry__peers peers;
    size_t n;
    ferry_status st;
    char why[FERRY__LINE_MAX];

    if (t->fleet != FERRY__FLEET_UNKNOWN)
        return FERRY_OK;
    n = count_peers(client);
    if (n < 2) {
        t->fleet = FERRY__FLEET_NO;
        return FERRY_OK;
    }
    if (client->ops->prepare_weight_update == NULL ||
        client->ops->commit_weight_update == NULL ||
        client->ops->status == NULL) {
        no_fleet(t, n, "not every client can prepare and commit");
        return FERRY_OK;
    }
    st = ferry__trainer_ask_peers(t, &peers);
    if (st == FERRY_EROUTE)
        snprintf(why, sizeof(why), "a peer is not Ferry (%s)",
                 ferry_last_error());
    else if (st == FERRY_OK && peers.any_other)
        snprintf(why, sizeof(why), "%s is not Ferry", peers.other);
    else if (st == FERRY_OK)
        t->fleet = FERRY__FLEET_YES;
    if (st < 0 && st != FERRY_EROUTE)
        return st;
    if (t->fleet == FERRY__FLEET_UNKNOWN)
        no_fleet(t, n, why);
    return FERRY_OK;
}

/* A cancel that came in the middle of it would leave servers of which nobody
 * knows whether they have committed, where most take a moment longer. */
#define COMMIT_GRACE_NS (INT64_C(5) * 1000000000)

static ferry_status commit(ferry_trainer *t, const char *version)
{
    ferry_status st;

    FERRY_TRY(ferry__trainer_check_bounds(t, "ending the round"));
    atomic_store(&t->commit_until_ns, ferry__now_ns() + COMMIT_GRACE_NS);
    st = ferry__trainer_call(t, FERRY__CALL_COMMIT, version);
    atomic_store(&t->commit_until_ns, 0);
    return st;
}

ferry_status ferry__trainer_finish(ferry_trainer *t, const char *version)
{
    if (t->fleet != FERRY__FLEET_YES)
        return ferry__trainer_call(t, FERRY__CALL_FINISH, version);
    FERRY_TRY(ferry__trainer_call(t, FERRY__CALL_PREPARE, NULL));
    return commit(t, version);
}
