/* SPDX-License-Identifier: Apache-2.0 */
/* The provider `tcp`: a group over plain sockets, for links without RDMA.
 * Every pair of ranks has three connections: collectives, send and receive,
 * and control (failures, abort). Ranks prove to each other that they know the
 * secret without sending it; what they send afterwards is in clear, and who
 * sits on the way between two can read and change it: where that matters, run
 * the group through a tunnel.
 * Invariant: no byte of a collective moves to or from a peer that has not
 * proved itself, of the same protocol version and the same group. */
#ifndef FERRY_COMM_TCP_H
#define FERRY_COMM_TCP_H

#include "comm/comm.h"

#define FERRY__COMM_TCP_VERSION 2
#define FERRY__COMM_TCP_WORLD   128
#define FERRY__COMM_TCP_SECRET  64
#define FERRY__COMM_TCP_HOST    256

typedef struct ferry__comm_tcp_member {
    char host[FERRY__COMM_TCP_HOST]; /* address that the others connect to */
    int32_t port;
    uint64_t host_id; /* equal: one machine, the links between are cheap */
} ferry__comm_tcp_member;

typedef struct ferry__comm_tcp_options {
    int32_t rank, world_size;
    uint64_t generation; /* a peer of another generation is refused */
    const char *secret;  /* 1 to 64 characters, agreed beforehand */
    /* By rank; copied. Own host and port are only told. */
    const ferry__comm_tcp_member *members;
    /* A call in which no byte moves for so long fails with
     * FERRY_ENOPROGRESS; 0: only the call's own timeout bounds. */
    int64_t no_progress_ms;
    /* Asked while meeting, at least every 100 ms; NULL: only the timeout
     * bounds. */
    ferry_status (*check)(void *arg, const char *what);
    void *check_arg;
} ferry__comm_tcp_options;

/* Meets all others; `listener` (ferry__tcp_listen) stays the caller's and
 * may be closed afterwards. A stranger that connects is refused and the wait
 * goes on; FERRY_ETIMEOUT names the first rank that did not come. */
ferry_status ferry__comm_tcp_open(const ferry__comm_tcp_options *options,
                                  int listener, int64_t timeout_ms,
                                  ferry__comm **out);
/* Sends and receives that all run at once, so that ranks may exchange in any
 * order; those of one peer and direction keep theirs, and match the peer's
 * calls of `send` and `recv` as well as its exchanges. */
typedef struct ferry__comm_tcp_item {
    void *bytes; /* only read when it goes out */
    size_t size_bytes;
    int32_t peer; /* not this rank */
    bool out;
} ferry__comm_tcp_item;
ferry_status ferry__comm_tcp_exchange(ferry__comm *c,
                                      const ferry__comm_tcp_item *items,
                                      size_t n, int64_t timeout_ms);
/* Bytes that this rank has written to other hosts' ranks and to its own
 * host's, data only. */
void ferry__comm_tcp_egress(const ferry__comm *c, uint64_t *out_remote,
                            uint64_t *out_local);
/* Identifies this machine and network namespace; `name` not empty: derived
 * from it instead, for tests and odd networks. */
uint64_t ferry__comm_tcp_host_id(const char *name);

#endif
