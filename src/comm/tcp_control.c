/* SPDX-License-Identifier: Apache-2.0 */
/* Failures and how they travel: the control connections of a group, which
 * also tell at once when a rank is gone.
 *
 * Control message, 256 bytes, little-endian: 1. u32 kind  2. i32 status, or
 * the rank waited for  3. u32 0  4. text, NUL padded.
 * Invariant: after one failure every later call of this rank fails alike. */
#include "comm/tcp_private.h"

#include "base/bytes.h"
#include "base/log.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

/* At the end of a wait, how long to listen for whom the others wait, at
 * most. */
#define BLAME_MS 250

void ferry__tcp_tell(tcp__comm *c, uint32_t kind, ferry_status status,
                     const char *text)
{
    unsigned char m[TCP__CONTROL_BYTES] = {0};

    ferry__write_u32(m, kind);
    ferry__write_u32(m + 4, (uint32_t)status);
    memcpy(m + 12, text, strnlen(text, TCP__TEXT_BYTES - 1));
    pthread_mutex_lock(&c->lock);
    for (int32_t r = 0; r < c->base.world_size; r++) {
        int fd = c->peers[r].fds[TCP__CONTROL];

        /* A few small messages in the life of a connection always fit. */
        if (fd >= 0)
            (void)!send(fd, m, sizeof(m), MSG_DONTWAIT | MSG_NOSIGNAL);
    }
    pthread_mutex_unlock(&c->lock);
}

static ferry_status heard(tcp__comm *c, const char *name, int32_t rank)
{
    tcp__peer *p = &c->peers[rank];
    const char *text = (const char *)p->control + 12;
    uint32_t waits_for = ferry__read_u32(p->control + 4);

    p->control[TCP__CONTROL_BYTES - 1] = '\0';
    switch (ferry__read_u32(p->control)) {
    case TCP__ABORTED:
        return ferry_fail(FERRY_ECANCELED,
                          "%s: the group was aborted by rank "
                          "%d",
                          name, rank);
    case TCP__LEFT:
        p->left = true;
        return FERRY_OK;
    case TCP__WAITS:
        if (waits_for < (uint32_t)c->base.world_size)
            p->waits_for = (int32_t)waits_for + 1;
        return FERRY_OK;
    default:
        return ferry_fail(FERRY_EPEER, "%s: rank %d failed before: %s", name,
                          rank, text);
    }
}

/* Reads what the control connections hold. */
static ferry_status listen_to(tcp__comm *c, const char *name, int32_t rank)
{
    tcp__peer *p = &c->peers[rank];

    while (p->fds[TCP__CONTROL] >= 0 && !p->gone) {
        ssize_t n = recv(p->fds[TCP__CONTROL], p->control + p->control_bytes,
                         sizeof(p->control) - p->control_bytes, MSG_DONTWAIT);

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && errno == EAGAIN)
            return FERRY_OK;
        if (n <= 0) {
            p->gone = true;
            return FERRY_OK;
        }
        p->control_bytes += (size_t)n;
        if (p->control_bytes < sizeof(p->control))
            continue;
        p->control_bytes = 0;
        FERRY_TRY(heard(c, name, rank));
    }
    return FERRY_OK;
}

ferry_status ferry__tcp_listen_all(tcp__comm *c, const char *name)
{
    if (atomic_load(&c->aborted))
        return ferry_fail(FERRY_ECANCELED,
                          "%s: the group was aborted by rank %d", name,
                          c->base.rank);
    for (int32_t r = 0; r < c->base.world_size; r++)
        FERRY_TRY(listen_to(c, name, r));
    return FERRY_OK;
}

ferry_status ferry__tcp_break(tcp__comm *c, ferry_status status)
{
    c->failed = status;
    snprintf(c->line, sizeof(c->line), "%s", ferry_last_error());
    ferry__tcp_tell(c, TCP__FAILED, status, c->line);
    return status;
}

ferry_status ferry__tcp_enter(tcp__comm *c, const char *name,
                              int64_t timeout_ms, tcp__call *out)
{
    ferry_status status;

    if (timeout_ms <= 0)
        return ferry_fail(FERRY_EINVAL,
                          "%s: timeout must be above 0 ms, got %lld", name,
                          (long long)timeout_ms);
    if (c->failed < 0)
        return ferry__fail_line(c->failed, c->line);
    status = ferry__tcp_listen_all(c, name);
    if (status < 0)
        return ferry__tcp_break(c, status);
    *out = (tcp__call){name, ferry__deadline_in(timeout_ms)};
    return FERRY_OK;
}

ferry_status ferry__tcp_lost(const tcp__comm *c, const tcp__call *call,
                             int32_t peer, int error)
{
    const tcp__peer *p = &c->peers[peer];

    /* What a rank told of before says more than its going. */
    if (c->failed < 0)
        return ferry__fail_line(c->failed, c->line);
    if (p->left)
        return ferry_fail(FERRY_EPEER, "%s: rank %d left the group", call->name,
                          peer);
    return ferry_fail(FERRY_EPEER, "%s: rank %d died or was cut off: %s",
                      call->name, peer,
                      error ? strerror(error) : "closed by peer");
}

ferry_status ferry__tcp_watch(ferry__comm *comm, int32_t peer, int stop_fd)
{
    const tcp__comm *c = (const tcp__comm *)comm;
    struct pollfd polls[2] = {{c->peers[peer].fds[TCP__CONTROL], POLLRDHUP, 0},
                              {stop_fd, POLLIN, 0}};

    while (poll(polls, 2, -1) < 0) {
        if (errno != EINTR)
            return ferry_fail(FERRY_EIO, "watching rank %d: poll: %s", peer,
                              strerror(errno));
    }
    return polls[1].revents ? FERRY_DONE : FERRY_OK;
}

ferry_status ferry__tcp_why_ended(ferry__comm *comm, int32_t peer)
{
    const tcp__call call = {"between calls", {0, 0}};
    tcp__comm *c = (tcp__comm *)comm;

    FERRY_TRY(ferry__tcp_listen_all(c, call.name));
    return c->peers[peer].left ? FERRY_OK : ferry__tcp_lost(c, &call, peer, 0);
}

/* ---- waiting ---- */

nfds_t ferry__tcp_control_polls(tcp__comm *c)
{
    nfds_t k = 0;

    c->polls[k++] = (struct pollfd){c->wake, POLLIN, 0};
    for (int32_t r = 0; r < c->base.world_size; r++) {
        const tcp__peer *p = &c->peers[r];

        if (p->fds[TCP__CONTROL] >= 0 && !p->gone)
            c->polls[k++] = (struct pollfd){p->fds[TCP__CONTROL], POLLIN, 0};
    }
    return k;
}

/* The rank waited for may itself wait for another, whose bound ends at about
 * the same time. All tell whom they wait for; the one at the end of that
 * line has told nobody and is the cause. */
static int32_t find_silent(tcp__comm *c, const tcp__call *call, int32_t peer,
                           int64_t bound_ms)
{
    int64_t window = bound_ms / 4 < BLAME_MS ? bound_ms / 4 + 1 : BLAME_MS;
    ferry__deadline until = ferry__deadline_in(window);
    int64_t left;

    ferry__tcp_tell(c, TCP__WAITS, (ferry_status)peer, "");
    while ((left = ferry__deadline_left_ms(&until)) > 0 &&
           !atomic_load(&c->aborted)) {
        if (poll(c->polls, ferry__tcp_control_polls(c), (int)left) < 0 &&
            errno != EINTR)
            break;
        for (int32_t r = 0; r < c->base.world_size; r++)
            listen_to(c, call->name, r);
    }
    for (int32_t i = 0; i < c->base.world_size; i++) {
        int32_t next = c->peers[peer].waits_for - 1;

        if (next < 0 || next >= c->base.world_size || next == c->base.rank)
            break;
        peer = next;
    }
    return peer;
}

ferry_status ferry__tcp_time_out(tcp__comm *c, const tcp__call *call,
                                 int32_t peer, const char *how,
                                 ferry_status status, int64_t bound_ms)
{
    int32_t silent = find_silent(c, call, peer, bound_ms);

    if (silent != peer)
        return ferry_fail(status,
                          "%s: rank %d did not come within %lld ms, rank %d "
                          "waits for it too",
                          call->name, silent, (long long)bound_ms, peer);
    return ferry_fail(status, "%s: rank %d %s within %lld ms", call->name, peer,
                      how, (long long)bound_ms);
}

ferry_status ferry__tcp_hold(tcp__comm *c, ferry_status status)
{
    if (status != FERRY_EPEER)
        return status;
    c->failed = status;
    snprintf(c->line, sizeof(c->line), "%s", ferry_last_error());
    return FERRY_OK;
}

/* The owner's own word is never held: it ends the call at once. */
ferry_status ferry__tcp_ask(tcp__comm *c, const char *name, int64_t *asked_ns)
{
    int64_t now;

    ferry__tcp_count_moved(c);
    if (!c->base.check)
        return FERRY_OK;
    now = ferry__now_ns();
    if (now - *asked_ns < TCP__CHECK_MS * 1000000)
        return FERRY_OK;
    *asked_ns = now;
    return c->base.check(c->base.check_arg, name);
}
