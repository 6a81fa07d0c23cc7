/* SPDX-License-Identifier: Apache-2.0 */
/* Groups of the provider tcp on loopback, without a store: listeners that are
 * known to all, and ranks that are threads. */
#ifndef FERRY_TESTS_TCP_SEATS_H
#define FERRY_TESTS_TCP_SEATS_H

#include "comm/tcp.h"
#include "harness/comm_cases.h"

#define TCP_SEATS_MS 10000 /* of a meeting, unless it wishes for less */

extern const char tcp_seats_secret[];

/* What a rank wants otherwise than the others do; zeros: nothing. */
typedef struct tcp_wishes {
    uint32_t hosts; /* bit r: the host, of two, that rank r is on */
    uint64_t generation;
    int64_t no_progress_ms, timeout_ms;
    int32_t world_size;
    const char *secret;
} tcp_wishes;

/* One listener a rank; tcp_seats_drop closes them. */
ferry_status tcp_seats_make(comm_group *g, int32_t world_size,
                            size_t slot_bytes);
void tcp_seats_drop(comm_group *g);
ferry_status tcp_seats_open(const comm_group *g, int32_t rank,
                            const tcp_wishes *w, ferry__comm **out);

/* A rank as a thread: `tcp_sit` is its body. */
typedef struct tcp_seat {
    comm_group *group;
    int32_t rank;
    tcp_wishes w;
    ferry_status status;
    char line[512]; /* of the failure, or empty */
    ferry__comm *c;
} tcp_seat;

void *tcp_sit(void *seat);
/* All at once, until each has its group or its failure. */
void tcp_sit_down(tcp_seat *seats, int32_t n);

#endif
