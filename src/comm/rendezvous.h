/* SPDX-License-Identifier: Apache-2.0 */
/* How the ranks of a group find each other through a store.
 * Every key holds the generation, under "ferry/<generation>/"; the key
 * "ferry/current" says which one is alive. Invariant: a duplicate or missing
 * rank is named on every rank within the timeout, and what a generation left
 * in the store is removed by the next one. */
#ifndef FERRY_COMM_RENDEZVOUS_H
#define FERRY_COMM_RENDEZVOUS_H

#include "comm/tcp.h"
#include "comm/tcp_store.h"

/* dp_index · ranks_per_dp + rank_in_dp + offset, checked against the world:
 * O-18. */
ferry_status ferry__rendezvous_rank(int32_t dp_index, int32_t ranks_per_dp,
                                    int32_t rank_in_dp, int32_t offset,
                                    int32_t world_size, int32_t *out_rank);

typedef struct ferry__rendezvous {
    int32_t rank, world_size;
    uint64_t generation; /* grows with every new group in one store */
    int64_t timeout_ms;
    /* Asked while waiting, at least every 100 ms; NULL: only the timeout
     * bounds. The store's own waits ask what the store was opened with. */
    ferry_status (*check)(void *arg, const char *what);
    void *check_arg;
    /* Of the group, 1 to 64 characters; never put into the store. */
    const char *secret;
} ferry__rendezvous;

/* Gives `card` (any bytes, at most 4 KiB) and takes those of all ranks, in
 * rank order: *out_cards has world_size owned texts (NUL terminated),
 * *out_sizes their sizes; free with ferry__rendezvous_free. Rank 0 begins
 * the generation. Each card was written by one who knows the secret.
 * FERRY_EEXIST: "rank 1 claimed twice"; FERRY_ETIMEOUT names the ranks that
 * are missing; FERRY_EORDER: the generation is over; FERRY_EVERSION names
 * both versions; FERRY_EAUTH names the rank whose card is not proved. */
ferry_status ferry__rendezvous_meet(ferry__store *store,
                                    const ferry__rendezvous *r,
                                    const void *card, size_t card_bytes,
                                    void ***out_cards, size_t **out_sizes);
void ferry__rendezvous_free(void **cards, size_t *sizes, int32_t world_size);

/* Both in one: listens on `host` ("" every address), tells the others
 * `advertise` (the address by which they reach this rank) and opens the
 * group. `host_name` "": ranks of one machine and network are one host. The
 * secret of `base` is not looked at. */
typedef struct ferry__rendezvous_tcp {
    ferry__rendezvous base;
    const char *host, *advertise, *host_name, *secret;
    int64_t no_progress_ms;
} ferry__rendezvous_tcp;
ferry_status ferry__rendezvous_tcp_open(ferry__store *store,
                                        const ferry__rendezvous_tcp *r,
                                        ferry__comm **out);

#endif
