/* SPDX-License-Identifier: Apache-2.0 */
/* What the workers may read: segments, once each, and the announcement of an
 * update, against which they hold the update info that came over HTTP.
 * Invariant: a worker reads nothing that was not published here, over the
 * socket, to a peer that had proved itself. */
#include "backends/ipc/ipc_trainer_state.h"

#include "base/alloc.h"
#include "core/manifest.h"

#include <string.h>

static ipc__segment *find_segment(const ipc__trainer *t, uint64_t id)
{
    for (size_t i = 0; i < t->n_segments; i++) {
        if (t->segments[i].id == id)
            return &t->segments[i];
    }
    return NULL;
}

/* An arena goes out once and stays mapped while consecutive rounds use it. */
ferry_status ipc__segment_use(ipc__trainer *t, uint64_t id, uint64_t bytes,
                              int fd)
{
    ferry__ipc_segment v = {id, bytes};
    ipc__segment *known = find_segment(t, id);

    if (known) {
        known->used_round = t->round;
        return FERRY_OK;
    }
    FERRY_TRY(ferry__grow(&t->segments, &t->segments_capacity, t->n_segments,
                          sizeof(*t->segments)));
    t->segments[t->n_segments++] = (ipc__segment){id, t->round};
    for (size_t i = 0; i < t->n_peers; i++) {
        ferry__str s = {0};

        ferry__ipc_put_segment(&s, &v);
        FERRY_TRY(ipc__peer_send(t, &t->peers[i], &s, fd, "publishing memory"));
    }
    return FERRY_OK;
}

/* Takes back what the round that ended did not use. */
void ipc__segments_trim(ipc__trainer *t)
{
    size_t kept = 0;

    for (size_t i = 0; i < t->n_segments; i++) {
        ipc__segment segment = t->segments[i];

        if (segment.used_round == t->round) {
            t->segments[kept++] = segment;
            continue;
        }
        for (size_t p = 0; p < t->n_peers; p++) {
            ferry__waiter w = {NULL, NULL, ferry__deadline_in(50),
                               t->peers[p].label};
            ferry__str s = {0};

            ferry__ipc_put_drop(&s, segment.id);
            ferry__ipc_link_send(&t->peers[p].link, &s, -1, &w);
        }
    }
    t->n_segments = kept;
}

static ferry_status announce_to(ipc__trainer *t, ipc__peer *peer,
                                const ipc__chunk *chunk,
                                const ferry__ipc_update *update)
{
    ferry__str s = {0};

    if (chunk->n_ranges > 0) {
        ferry__ipc_ranges v = {update->update, chunk->n_ranges, chunk->ranges};

        ferry__ipc_put_ranges(&s, &v);
        FERRY_TRY(ipc__peer_send(t, peer, &s, -1, "publishing ranges"));
    }
    ferry__ipc_put_update(&s, update);
    return ipc__peer_send(t, peer, &s, -1, "announcing an update");
}

ferry_status ipc__announce(ipc__trainer *t, const ipc__chunk *chunk,
                           uint64_t handles_digest)
{
    ferry__ipc_update v = {t->update,
                           ferry__manifest_digest(chunk->params, chunk->count),
                           handles_digest, t->ring_next, 0};

    for (size_t i = 0; i < t->n_peers; i++)
        FERRY_TRY(announce_to(t, &t->peers[i], chunk, &v));
    return FERRY_OK;
}
