/* SPDX-License-Identifier: Apache-2.0 */
/* Meeting and opening a `tcp` group in one. The card of a rank is the text
 * "<host id> <port> <pid> <address>".
 * Invariant: a card is outside text; every field of it is checked. */
#include "comm/rendezvous.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"
#include "comm/tcp_address.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static ferry_status read_card(const char *card, int32_t rank,
                              ferry__comm_tcp_member *out)
{
    int32_t pid;
    int used = 0;

    if (sscanf(card, "%" SCNu64 " %" SCNd32 " %" SCNd32 " %n", &out->host_id,
               &out->port, &pid, &used) != 3 ||
        used == 0)
        return ferry_fail(FERRY_EPEER,
                          "rendezvous: the card of rank %d is "
                          "not readable",
                          rank);
    if (out->port < 1 || out->port > 65535 || card[used] == '\0' ||
        strlen(card + used) >= sizeof(out->host))
        return ferry_fail(FERRY_EPEER,
                          "rendezvous: rank %d gives no address to reach it",
                          rank);
    snprintf(out->host, sizeof(out->host), "%s", card + used);
    return FERRY_OK;
}

static ferry_status meet(ferry__store *store, const ferry__rendezvous_tcp *r,
                         int32_t port, ferry__comm_tcp_member *members)
{
    ferry__rendezvous base = r->base;
    ferry_status status = FERRY_OK;
    size_t *sizes;
    void **cards;
    char card[512];
    int n = snprintf(card, sizeof(card), "%" PRIu64 " %d %d %.255s",
                     ferry__comm_tcp_host_id(r->host_name), port, (int)getpid(),
                     r->advertise);

    base.secret = r->secret;
    FERRY_TRY(
        ferry__rendezvous_meet(store, &base, card, (size_t)n, &cards, &sizes));
    for (int32_t q = 0; q < r->base.world_size && status >= 0; q++)
        status = read_card(cards[q], q, &members[q]);
    ferry__rendezvous_free(cards, sizes, r->base.world_size);
    return status;
}

static ferry_status open_group(ferry__store *store,
                               const ferry__rendezvous_tcp *r, int listener,
                               int32_t port, ferry__comm **out)
{
    ferry__deadline until = ferry__deadline_in(r->base.timeout_ms);
    ferry__comm_tcp_options o = {.rank = r->base.rank,
                                 .world_size = r->base.world_size,
                                 .generation = r->base.generation,
                                 .secret = r->secret,
                                 .no_progress_ms = r->no_progress_ms,
                                 .check = r->base.check,
                                 .check_arg = r->base.check_arg};
    ferry__comm_tcp_member *members =
        ferry__alloc_array(FERRY__COMM_TCP_WORLD, sizeof(*members));
    ferry_status status;
    int64_t left;

    if (!members)
        return FERRY_ENOMEM;
    status = meet(store, r, port, members);
    left = ferry__deadline_left_ms(&until);
    o.members = members;
    if (status >= 0)
        status = ferry__comm_tcp_open(&o, listener, left > 0 ? left : 1, out);
    ferry__free(members);
    return status;
}

ferry_status ferry__rendezvous_tcp_open(ferry__store *store,
                                        const ferry__rendezvous_tcp *r,
                                        ferry__comm **out)
{
    ferry__waiter w = {NULL, NULL, ferry__deadline_in(r->base.timeout_ms),
                       "rendezvous"};
    char text[FERRY__TCP_TEXT_BYTES];
    ferry_status status;
    int listener;
    int32_t port;

    if (!r->advertise || !*r->advertise)
        return ferry_fail(FERRY_EINVAL,
                          "rendezvous: no address to reach this rank by");
    FERRY_TRY(ferry__tcp_listen_within(r->host, 0, &w, &listener, &port));
    status = open_group(store, r, listener, port, out);
    close(listener);
    if (status >= 0)
        ferry__log(FERRY_LOG_INFO,
                   "rank %d of %d: comm tcp at %s, generation %" PRIu64,
                   r->base.rank, r->base.world_size,
                   ferry__tcp_text(text, r->advertise, port),
                   r->base.generation);
    return status;
}
