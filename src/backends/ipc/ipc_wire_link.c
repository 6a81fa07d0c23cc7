/* SPDX-License-Identifier: Apache-2.0 */
/* One socket to one peer, and the layout of the session's segment.
 * Segment: 1. ferry__ipc_ring (header, counters), padded to a page
 * 2. n_slots slot heads of SLOT_HEAD bytes 3. n_slots × slot_bytes of data.
 * Invariant: a link that stopped inside a frame is never read again. */
#include "backends/ipc/ipc_wire.h"

#include "base/alloc.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <unistd.h>

#define SLICE_MS  100
#define PAGE      ((uint64_t)4096)
#define SLOT_HEAD ((uint64_t)8192)

_Static_assert(sizeof(ferry__ipc_slot) <= 8192, "a slot head is two pages");

void ferry__ipc_link_close(ferry__ipc_link *link)
{
    if (link->fd >= 0)
        close(link->fd);
    link->fd = -1;
}

ferry_status ferry__ipc_link_send(ferry__ipc_link *link, ferry__str *s, int fd,
                                  const ferry__waiter *w)
{
    ferry_status status = FERRY_OK;

    if (s->failed)
        status = ferry_fail(FERRY_ENOMEM, "%s: out of memory", w->what);
    else if (link->fd < 0 || link->broken)
        status = ferry_fail(FERRY_ECONN, "%s: closed", w->what);
    if (status == FERRY_OK) {
        status = ferry__send_frame(link->fd, s->data, s->length, w);
        if (status == FERRY_OK && fd >= 0)
            status = ferry__send_fds(link->fd, "F", 1, &fd, 1, w);
        if (status < 0)
            link->broken = true;
    }
    ferry__str_free(s);
    return status;
}

/* Until there is a first byte, or the peer is gone. */
static ferry_status await_bytes(const ferry__ipc_link *link,
                                const ferry__waiter *w)
{
    for (;;) {
        struct pollfd p = {link->fd, POLLIN, 0};
        int64_t left = ferry__deadline_left_ms(&w->deadline);
        int n = poll(&p, 1, left < SLICE_MS ? (int)left : SLICE_MS);

        if (n > 0)
            return FERRY_OK;
        if (n < 0 && errno != EINTR)
            return ferry_fail(FERRY_ECONN, "%s: poll: %s", w->what,
                              strerror(errno));
        if (w->check)
            FERRY_TRY(w->check(w->arg));
        if (ferry__deadline_passed(&w->deadline))
            return ferry_fail(FERRY_ETIMEOUT, "%s: no answer within %lld ms",
                              w->what, (long long)w->deadline.bound_ms);
    }
}

ferry_status ferry__ipc_link_recv(ferry__ipc_link *link, size_t max_bytes,
                                  void **out_bytes, size_t *out_size,
                                  const ferry__waiter *w)
{
    ferry_status status;

    if (link->fd < 0 || link->broken)
        return ferry_fail(FERRY_ECONN, "%s: closed", w->what);
    FERRY_TRY(await_bytes(link, w));
    status = ferry__recv_frame(link->fd, max_bytes, out_bytes, out_size, w);
    if (status < 0)
        link->broken = true;
    return status;
}

ferry_status ferry__ipc_link_recv_fd(ferry__ipc_link *link, int *out_fd,
                                     const ferry__waiter *w)
{
    ferry_status status;
    size_t n = 0;
    char mark;

    status = ferry__recv_fds(link->fd, &mark, 1, out_fd, 1, &n, w);
    if (status >= 0 && (n != 1 || mark != 'F'))
        status = ferry_fail(FERRY_EPEER, "%s: no descriptor came", w->what);
    if (status < 0) {
        if (n == 1 && mark != 'F')
            close(*out_fd);
        link->broken = true;
    }
    return status;
}

static uint64_t heads_at(void)
{
    return (sizeof(ferry__ipc_ring) + PAGE - 1) / PAGE * PAGE;
}

uint64_t ferry__ipc_ring_bytes(uint32_t n_slots, uint64_t slot_bytes)
{
    return heads_at() + n_slots * (SLOT_HEAD + slot_bytes);
}

void ferry__ipc_ring_init(ferry__ipc_ring *ring, uint32_t n_slots,
                          uint64_t slot_bytes)
{
    ring->version = FERRY__IPC_VERSION;
    ring->n_slots = n_slots;
    ring->slot_bytes = slot_bytes;
    ring->total_bytes = ferry__ipc_ring_bytes(n_slots, slot_bytes);
    ring->magic = FERRY__IPC_MAGIC;
}

ferry_status ferry__ipc_ring_check(const ferry__ipc_ring *ring,
                                   uint64_t size_bytes, uint32_t *out_slots,
                                   uint64_t *out_slot_bytes)
{
    uint32_t n_slots = ring->n_slots;
    uint64_t slot_bytes = ring->slot_bytes;

    if (size_bytes < heads_at() || ring->magic != FERRY__IPC_MAGIC ||
        ring->version != FERRY__IPC_VERSION)
        return ferry_fail(FERRY_EPEER,
                          "ipc segment: no session of version "
                          "%d",
                          FERRY__IPC_VERSION);
    if (n_slots > 1024 || slot_bytes > (UINT64_C(1) << 32) ||
        slot_bytes % 64 != 0 ||
        ferry__ipc_ring_bytes(n_slots, slot_bytes) > size_bytes)
        return ferry_fail(FERRY_EPEER,
                          "ipc segment: %u slots of %llu bytes do not fit "
                          "%llu",
                          n_slots, (unsigned long long)slot_bytes,
                          (unsigned long long)size_bytes);
    *out_slots = n_slots;
    *out_slot_bytes = slot_bytes;
    return FERRY_OK;
}

ferry__ipc_slot *ferry__ipc_ring_slot(ferry__ipc_ring *ring, uint32_t n_slots,
                                      uint32_t number)
{
    return (ferry__ipc_slot *)((char *)ring + heads_at() +
                               (number % n_slots) * SLOT_HEAD);
}

char *ferry__ipc_ring_data(ferry__ipc_ring *ring, uint32_t n_slots,
                           uint64_t slot_bytes, uint32_t number)
{
    return (char *)ring + heads_at() + n_slots * SLOT_HEAD +
           (number % n_slots) * slot_bytes;
}
