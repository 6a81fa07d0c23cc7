/* SPDX-License-Identifier: Apache-2.0 */
/* What a store server knows, without its sockets: keys, and for each peer
 * what came in, what goes out, and what it waits for.
 * Invariant: a peer whose bytes were refused is never fed again; a peer that
 * waits is answered as soon as all its keys are there. */
#ifndef FERRY_COMM_TCP_STORE_STATE_H
#define FERRY_COMM_TCP_STORE_STATE_H

#include "base/str.h"
#include "comm/tcp_store_map.h"

/* All that peers have sent and not yet been worked off, the keys that they
 * wait for, and answers that they have not yet taken, together. */
#define FERRY__STORE_BUFFER_BYTES ((size_t)64 << 20)

/* Answers that one peer may leave. */
#define FERRY__STORE_UNREAD_BYTES ((size_t)32 << 20)

typedef struct ferry__store_peer {
    struct ferry__store_peer *next;
    unsigned char *in;
    size_t in_bytes, in_capacity;
    ferry__str out;
    bool greeted; /* sent the magic */
    bool waiting;
    ferry__store_bytes *wanted; /* one block with the keys behind */
    size_t n_wanted, first_missing, wanted_bytes;
} ferry__store_peer;

typedef struct ferry__store_state {
    ferry__store_map map;
    ferry__store_peer *peers;
    size_t buffered_bytes;
    ferry__store_request request; /* the one being worked off */
} ferry__store_state;

ferry_status ferry__store_peer_add(ferry__store_state *s,
                                   ferry__store_peer **out);
void ferry__store_peer_remove(ferry__store_state *s, ferry__store_peer *p);
/* Takes bytes from a peer and works off whole requests; answers (of other
 * peers too) go to `out`. A failure means: close this peer. */
ferry_status ferry__store_feed(ferry__store_state *s, ferry__store_peer *p,
                               const void *bytes, size_t size);
/* `n` bytes of p->out went to the peer. */
void ferry__store_taken(ferry__store_state *s, ferry__store_peer *p, size_t n);
void ferry__store_state_free(ferry__store_state *s);

#endif
