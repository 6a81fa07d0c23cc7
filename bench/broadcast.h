/* SPDX-License-Identifier: Apache-2.0 */
/* The parties of `bench broadcast` that are built with the library: Ferry
 * itself and the loops that show what the machine allows. Each is a process
 * that speaks the line protocol of peers/party.h. */
#ifndef FERRY_BENCH_BROADCAST_H
#define FERRY_BENCH_BROADCAST_H

#include "bench/peers/party.h"

/* send_weights over `nccl` ("ferry"; "ferry_plain" proves no bytes by digest)
 * or, to try the bench itself, over `ipc` ("ferry_ipc"). Also answers "noop"
 * (one call to all workers that does nothing), "pass" (the source alone) and
 * "about". */
int bench_broadcast_ferry(party *p);
/* Private weights through a shared ring, read by every worker. */
int bench_broadcast_ring(party *p);
/* Each worker copies all from memory of its own host, at once. */
int bench_broadcast_memcpy(party *p);
/* One plain TCP stream to each worker, each with a writer of its own. */
int bench_broadcast_stream(party *p);
/* Rounds without parameters to servers that run, beside a call that does
 * nothing: answers "round" and "noop". */
int bench_broadcast_empty(const char *const *urls, int n_urls);

#endif
