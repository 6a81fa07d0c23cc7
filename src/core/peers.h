/* SPDX-License-Identifier: Apache-2.0 */
/* What the servers behind a client are: Ferry, or not.
 * Invariant: a server is Ferry because its own status route says so, never by
 * a guess (C7). */
#ifndef FERRY_CORE_PEERS_H
#define FERRY_CORE_PEERS_H

#include <ferry/client.h>
#include <stdbool.h>

#define FERRY__PEER_NAME_MAX 256

/* The first of each kind, by name; "" where there is none. */
typedef struct ferry__peers {
    bool any_ferry, any_other;
    char ferry[FERRY__PEER_NAME_MAX], other[FERRY__PEER_NAME_MAX];
} ferry__peers;

/* The whole status text, however long; owned (ferry__free). FERRY_EROUTE: no
 * server behind the client is Ferry. The client has `status`. */
ferry_status ferry__peers_status(const ferry_client *client, char **out_text);
/* Reads from it which servers are Ferry. A fan-out of both kinds lists them
 * as "ferry" and "not_ferry"; any other status is of Ferry alone. */
ferry_status ferry__peers_sort(const char *text, ferry__peers *out_peers);

#endif
