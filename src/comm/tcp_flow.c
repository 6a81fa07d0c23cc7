/* SPDX-License-Identifier: Apache-2.0 */
/* Moving bytes: all flows of a call at once, on the caller's thread, asleep
 * in poll while none can move.
 *
 * Head of a flow, little-endian: 1. u32 operation  2. u32 detail
 * 3. u32 sequence  4. u32 0  5. u64 bytes that follow.
 * Invariant: every wait ends at the call's deadline, on a control message,
 * or on an abort. */
#include "comm/tcp_private.h"

#include "base/bytes.h"
#include "base/log.h"
#include "base/socket.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

/* Bytes that one flow moves before the next has its turn: a relayed piece
 * is still in the cache when it is sent on. */
#define PIECE_BYTES ((size_t)256 << 10)
/* While the owner has no check. */
#define POLL_MS INT64_C(60000)

void ferry__tcp_flow_init(tcp__flow *f, bool out, int32_t peer, int channel,
                          uint32_t what, uint32_t detail, uint32_t sequence,
                          void *bytes, size_t size)
{
    memset(f, 0, sizeof(*f));
    f->out = out;
    f->peer = peer;
    f->channel = channel;
    f->bytes = bytes;
    f->size = size;
    ferry__write_u32(f->head, what);
    ferry__write_u32(f->head + 4, detail);
    ferry__write_u32(f->head + 8, sequence);
    ferry__write_u32(f->head + 16, (uint32_t)size);
    ferry__write_u32(f->head + 20, (uint32_t)((uint64_t)size >> 32));
}

/* ---- moving ---- */

static bool flow_done(const tcp__flow *f)
{
    return f->head_done == TCP__HEAD_BYTES && f->done == f->size;
}

static size_t may_send(const tcp__flow *f)
{
    size_t limit = f->after ? f->after->done : f->size;
    size_t n = limit - f->done;

    return n < PIECE_BYTES ? n : PIECE_BYTES;
}

static bool can_move(const tcp__flow *f)
{
    if (flow_done(f) || (f->behind && !flow_done(f->behind)))
        return false;
    return !f->out || f->head_done < TCP__HEAD_BYTES || may_send(f) > 0;
}

void ferry__tcp_count_sent(tcp__comm *c, int32_t peer, size_t n)
{
    if (c->host_ids[peer] == c->host_ids[c->base.rank])
        c->sent_local += n;
    else
        c->sent_remote += n;
}

void ferry__tcp_count_moved(tcp__comm *c)
{
    uint64_t sum = c->moved_before;

    for (size_t i = 0; i < c->n_flows; i++)
        sum += c->flows[i].head_done + c->flows[i].done;
    atomic_store(&c->moved, sum);
}

uint64_t ferry__tcp_moved(ferry__comm *comm)
{
    tcp__comm *c = (tcp__comm *)comm;

    return atomic_load(&c->moved) + atomic_load(&c->streamed);
}

static size_t advance(tcp__flow *f, size_t n)
{
    size_t head = TCP__HEAD_BYTES - f->head_done;

    head = n < head ? n : head;
    f->head_done += head;
    f->done += n - head;
    return n - head;
}

ferry_status ferry__tcp_check_head(const tcp__flow *f, const tcp__call *call)
{
    if (memcmp(f->head, f->came, TCP__HEAD_BYTES) == 0)
        return FERRY_OK;
    if (memcmp(f->head, f->came, 12) == 0)
        return ferry_fail(
            FERRY_EMISMATCH, "%s of %zu bytes: rank %d gave %llu bytes",
            call->name, f->size, f->peer,
            (unsigned long long)ferry__read_u32(f->came + 20) << 32 |
                ferry__read_u32(f->came + 16));
    return ferry_fail(FERRY_EMISMATCH,
                      "%s of %zu bytes: rank %d called another operation",
                      call->name, f->size, f->peer);
}

/* Head and bytes in one system call. FERRY_DONE: nothing moved. */
static ferry_status move(tcp__comm *c, const tcp__call *call, tcp__flow *f)
{
    bool head = f->head_done < TCP__HEAD_BYTES;
    size_t left = f->size - f->done;
    size_t n_bytes =
        f->out ? may_send(f) : (left < PIECE_BYTES ? left : PIECE_BYTES);
    struct iovec parts[2] = {{(f->out ? f->head : f->came) + f->head_done,
                              TCP__HEAD_BYTES - f->head_done},
                             {f->bytes ? f->bytes + f->done : NULL, n_bytes}};
    struct msghdr m = {.msg_iov = parts + !head,
                       .msg_iovlen = (size_t)head + (n_bytes > 0)};
    int fd = c->peers[f->peer].fds[f->channel];
    ssize_t n;

    /* What follows a head is not known to fit before the head is checked. */
    if (head && !f->out)
        m.msg_iovlen = 1;
    do {
        n = f->out ? sendmsg(fd, &m, MSG_DONTWAIT | MSG_NOSIGNAL)
                   : recvmsg(fd, &m, MSG_DONTWAIT);
    } while (n < 0 && errno == EINTR);
    if (n < 0 && errno == EAGAIN)
        return FERRY_DONE;
    if (n <= 0) {
        int error = n < 0 ? errno : 0;

        FERRY_TRY(ferry__tcp_listen_all(c, call->name));
        return ferry__tcp_lost(c, call, f->peer, error);
    }
    if (f->out)
        ferry__tcp_count_sent(c, f->peer, advance(f, (size_t)n));
    else
        advance(f, (size_t)n);
    if (head && !f->out && f->head_done == TCP__HEAD_BYTES)
        FERRY_TRY(ferry__tcp_check_head(f, call));
    return FERRY_OK;
}

/* ---- waiting ---- */

/* The first that could move, or else the first that is not done. */
static const tcp__flow *culprit(const tcp__flow *flows, size_t n)
{
    const tcp__flow *other = NULL;

    for (size_t i = 0; i < n; i++) {
        if (can_move(&flows[i]))
            return &flows[i];
        if (!flow_done(&flows[i]))
            other = &flows[i];
    }
    return other;
}

static nfds_t fill_polls(tcp__comm *c, const tcp__flow *flows, size_t n)
{
    nfds_t k = ferry__tcp_control_polls(c);

    for (size_t i = 0; i < n; i++) {
        const tcp__flow *f = &flows[i];

        if (can_move(f))
            c->polls[k++] = (struct pollfd){c->peers[f->peer].fds[f->channel],
                                            f->out ? POLLOUT : POLLIN, 0};
    }
    return k;
}

const char *ferry__tcp_how(const tcp__flow *f)
{
    return f->out             ? "took nothing more"
           : f->head_done > 0 ? "sent nothing more"
                              : "did not come";
}

void ferry__tcp_waited(tcp__comm *c, int32_t peer, int64_t from_ns)
{
    ferry__comm_waited(&c->base, peer, peer >= 0 ? c->peers[peer].host : "",
                       from_ns);
}

static ferry_status await(tcp__comm *c, const tcp__call *call,
                          const tcp__flow *flows, size_t n, int64_t moved_ns)
{
    const tcp__flow *f = culprit(flows, n);
    int64_t left = ferry__deadline_left_ms(&call->deadline), idle = left;
    int64_t from_ns = ferry__comm_wait_ns(&c->base);

    if (c->no_progress_ms > 0)
        idle = c->no_progress_ms - (ferry__now_ns() - moved_ns) / 1000000;
    if (left <= 0)
        return ferry__tcp_time_out(c, call, f->peer, ferry__tcp_how(f),
                                   FERRY_ETIMEOUT, call->deadline.bound_ms);
    if (idle <= 0)
        return ferry__tcp_time_out(c, call, f->peer, ferry__tcp_how(f),
                                   FERRY_ENOPROGRESS, c->no_progress_ms);
    left = idle < left ? idle : left;
    idle = c->base.check ? TCP__CHECK_MS : POLL_MS;
    if (poll(c->polls, fill_polls(c, flows, n),
             (int)(left < idle ? left : idle)) < 0 &&
        errno != EINTR)
        return ferry_fail(FERRY_EIO, "%s: poll: %s", call->name,
                          strerror(errno));
    ferry__tcp_waited(c, f->peer, from_ns);
    return ferry__tcp_listen_all(c, call->name);
}

/* A peer whose control connection ended has nothing more to give once its
 * data are drained, and takes nothing. */
static ferry_status none_gone(const tcp__comm *c, const tcp__call *call,
                              const tcp__flow *flows, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (!flow_done(&flows[i]) && c->peers[flows[i].peer].gone)
            return ferry__tcp_lost(c, call, flows[i].peer, 0);
    }
    return FERRY_OK;
}

/* One turn of every flow. FERRY_DONE: all are done. */
static ferry_status turn(tcp__comm *c, const tcp__call *call, tcp__flow *flows,
                         size_t n, bool *out_moved)
{
    bool done = true;

    *out_moved = false;
    for (size_t i = 0; i < n; i++) {
        if (can_move(&flows[i])) {
            ferry_status status = move(c, call, &flows[i]);

            FERRY_TRY(status);
            *out_moved = *out_moved || status == FERRY_OK;
        }
        done = done && flow_done(&flows[i]);
    }
    return done ? FERRY_DONE : FERRY_OK;
}

static ferry_status run(tcp__comm *c, const tcp__call *call, tcp__flow *flows,
                        size_t n)
{
    int64_t moved_ns = ferry__now_ns(), asked_ns = moved_ns;

    for (;;) {
        bool moved;
        ferry_status status = turn(c, call, flows, n, &moved);

        if (status != FERRY_OK)
            return status;
        FERRY_TRY(ferry__tcp_ask(c, call->name, &asked_ns));
        if (atomic_load(&c->aborted))
            return ferry__tcp_listen_all(c, call->name);
        if (moved) {
            moved_ns = c->no_progress_ms > 0 ? ferry__now_ns() : moved_ns;
            if (!ferry__deadline_passed(&call->deadline))
                continue;
        } else {
            if (c->failed < 0)
                return ferry__fail_line(c->failed, c->line);
            FERRY_TRY(none_gone(c, call, flows, n));
        }
        FERRY_TRY(ferry__tcp_hold(c, await(c, call, flows, n, moved_ns)));
    }
}

ferry_status ferry__tcp_fail(tcp__comm *c, ferry_status status)
{
    ferry__tcp_break(c, status);
    if (c->carrier)
        c->carrier->drop(c);
    return ferry__fail_line(status, c->line);
}

ferry_status ferry__tcp_run(tcp__comm *c, const tcp__call *call,
                            tcp__flow *flows, size_t n)
{
    ferry_status status;

    c->flows = flows;
    c->n_flows = n;
    status = c->carrier ? c->carrier->carry(c, call, flows, n)
                        : run(c, call, flows, n);
    ferry__tcp_count_moved(c);
    c->moved_before = atomic_load(&c->moved);
    c->flows = NULL;
    c->n_flows = 0;
    return status < 0 ? ferry__tcp_fail(c, status) : FERRY_OK;
}
