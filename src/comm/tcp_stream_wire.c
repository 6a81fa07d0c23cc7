/* SPDX-License-Identifier: Apache-2.0 */
/* The threads of a leader: one takes pieces from the host before straight
 * into slots, one sends them on to the next host from there.
 *
 * Head, little-endian, as of the group's collectives: 1. u32 16  2. u32 1 a
 * piece, 2 moving, 3 done  3. u32 number of the piece, or of the round
 * 4. u32 0  5. u64 bytes that follow (a piece only). Pieces go down the
 * chain; up it go `moving`, now and then while pieces are being released,
 * and `done`, once every rank from there on has released all of the round.
 * Invariant: a thread waits for one thing at a time, for slices, and never
 * after `stop`. */
#include "comm/tcp_stream.h"

#include "base/bytes.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/thread.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

/* How often a host says that its ranks are moving. */
#define MOVING_MS 100

/* A wait of a thread for one peer: on its socket, or for its sake. */
typedef struct wait {
    tcp__stream *s;
    int32_t peer;
    int64_t since_ns;
} wait;

static void make_head(unsigned char *h, uint32_t kind, uint32_t number,
                      uint64_t size)
{
    ferry__write_u32(h, TCP__STREAM_OP);
    ferry__write_u32(h + 4, kind);
    ferry__write_u32(h + 8, number);
    ferry__write_u32(h + 12, 0);
    ferry__write_u32(h + 16, (uint32_t)size);
    ferry__write_u32(h + 20, (uint32_t)(size >> 32));
}

/* ---- failures ---- */

static ferry_status note(tcp__stream *s, ferry_status status, int32_t peer,
                         int error)
{
    bool first;

    pthread_mutex_lock(&s->lock);
    first = !s->has_error;
    if (first) {
        s->has_error = true;
        s->error = status;
        s->error_peer = peer;
        s->error_errno = error;
        snprintf(s->error_line, sizeof(s->error_line), "%s",
                 ferry_last_error());
    }
    pthread_mutex_unlock(&s->lock);
    /* The caller may be away for long; the other ranks must not wait. */
    if (first)
        ferry__tcp_tell(s->c, TCP__FAILED, status, ferry_last_error());
    return status;
}

static ferry_status fail(tcp__stream *s, ferry_status status)
{
    return note(s, status, -1, 0);
}

/* Whether it left or died is known to the caller, who reads control. */
static ferry_status lost(tcp__stream *s, int32_t peer, int error)
{
    ferry_fail(FERRY_EPEER, "stream: rank %d died or was cut off: %s", peer,
               error ? strerror(error) : "closed by peer");
    return note(s, FERRY_EPEER, peer, error);
}

static bool stopped(const tcp__stream *s)
{
    return atomic_load(&s->stop) || atomic_load(&s->c->aborted);
}

/* FERRY_ECANCELED without a line: it is the caller who knows why. */
static ferry_status look(const wait *w, const char *how)
{
    int64_t bound = w->s->o.no_progress_ms;

    if (stopped(w->s))
        return FERRY_ECANCELED;
    if (bound == 0 || (ferry__now_ns() - w->since_ns) / 1000000 < bound)
        return FERRY_OK;
    return fail(w->s, ferry_fail(FERRY_ENOPROGRESS,
                                 "stream: rank %d %s within %lld ms", w->peer,
                                 how, (long long)bound));
}

static wait wait_for(tcp__stream *s, int32_t peer)
{
    return (wait){s, peer, s->o.no_progress_ms ? ferry__now_ns() : 0};
}

/* ---- sockets ---- */

static ferry_status await_socket(const wait *w, short events)
{
    struct pollfd polls[2] = {
        {w->s->c->peers[w->peer].fds[TCP__GROUP], events, 0},
        {w->s->stop_fd, POLLIN, 0}};

    if (poll(polls, 2, 2 * TCP__STREAM_SLICE_MS) < 0 && errno != EINTR)
        return fail(w->s,
                    ferry_fail(FERRY_EIO, "stream: poll: %s", strerror(errno)));
    return look(w,
                events == POLLIN ? "sent nothing more" : "took nothing more");
}

/* Lets the sender look; only the receiver does. */
static void tell_arrival(tcp__stream *s, uint32_t seq, size_t bytes)
{
    if (s->next < 0)
        return;
    atomic_store(&s->under_way, (uint64_t)(seq + 1) << 32 | bytes);
    ferry__gate_raise(&s->arrivals, ferry__gate_value(&s->arrivals) + 1);
}

static ferry_status recv_bytes(tcp__stream *s, int32_t peer, char *bytes,
                               size_t size, bool piece)
{
    int fd = s->c->peers[peer].fds[TCP__GROUP];
    wait w = wait_for(s, peer);
    size_t done = 0;

    while (done < size) {
        ssize_t n = recv(fd, bytes + done, size - done, MSG_DONTWAIT);

        if (n > 0) {
            done += (size_t)n;
            atomic_fetch_add(&s->carried, (uint64_t)n);
            w = wait_for(s, peer);
            /* A whole piece is told of by its commit. */
            if (piece && done < size)
                tell_arrival(s, s->pool.committed, done);
        } else if (n == 0) {
            return lost(s, peer, 0);
        } else if (errno == EAGAIN) {
            FERRY_TRY(await_socket(&w, POLLIN));
        } else if (errno != EINTR) {
            return lost(s, peer, errno);
        }
    }
    return FERRY_OK;
}

static void count_sent(tcp__stream *s, int32_t peer, size_t n)
{
    tcp__comm *c = s->c;

    if (c->host_ids[peer] == c->host_ids[c->base.rank])
        c->sent_local += n;
    else
        c->sent_remote += n;
}

/* What is to go out: `there` of `size` bytes behind the head. */
typedef struct parcel {
    unsigned char head[TCP__HEAD_BYTES];
    const char *bytes;
    size_t size, there, done; /* done: of head and bytes */
} parcel;

/* As far as it is there, head and bytes in one call. */
static ferry_status send_parcel(tcp__stream *s, int32_t peer, parcel *p)
{
    int fd = s->c->peers[peer].fds[TCP__GROUP];
    size_t began = p->done, until = TCP__HEAD_BYTES + p->there;
    wait w = wait_for(s, peer);

    while (p->done < until) {
        size_t h = p->done < TCP__HEAD_BYTES ? p->done : TCP__HEAD_BYTES;
        size_t b = p->done - h;
        struct iovec parts[2] = {
            {p->head + h, TCP__HEAD_BYTES - h},
            {(void *)(uintptr_t)(p->bytes ? p->bytes + b : NULL),
             p->there - b}};
        struct msghdr m = {.msg_iov = parts, .msg_iovlen = p->there ? 2 : 1};
        ssize_t n = sendmsg(fd, &m, MSG_DONTWAIT | MSG_NOSIGNAL);

        if (n >= 0) {
            p->done += (size_t)n;
            atomic_fetch_add(&s->carried, (uint64_t)n);
            w = wait_for(s, peer);
        } else if (errno == EAGAIN) {
            FERRY_TRY(await_socket(&w, POLLOUT));
        } else if (errno != EINTR) {
            return lost(s, peer, errno);
        }
    }
    count_sent(s, peer, until - (began ? began : TCP__HEAD_BYTES));
    return FERRY_OK;
}

static ferry_status send_word(tcp__stream *s, int32_t peer, uint32_t kind,
                              uint32_t round)
{
    parcel p = {.size = 0};

    make_head(p.head, kind, round, 0);
    return send_parcel(s, peer, &p);
}

static ferry_status recv_head(tcp__stream *s, int32_t peer,
                              unsigned char head[TCP__HEAD_BYTES])
{
    FERRY_TRY(recv_bytes(s, peer, (char *)head, TCP__HEAD_BYTES, false));
    if (ferry__read_u32(head) != TCP__STREAM_OP ||
        ferry__read_u32(head + 12) != 0)
        return fail(s, ferry_fail(FERRY_EMISMATCH,
                                  "stream: rank %d called another operation",
                                  peer));
    return FERRY_OK;
}

/* ---- to the next host ---- */

/* More of the piece at the cursor than `had`: all of it once it is committed,
 * and before that what the receiver has of it. */
static ferry_status await_bytes(tcp__stream *s, const tcp__cursor *at,
                                size_t had, parcel *out)
{
    ferry__gate *committed = &s->pool.head->committed;

    while (!stopped(s)) {
        uint32_t seen = ferry__gate_value(&s->arrivals);
        bool whole = ferry__gate_reached(committed, at->seq + 1);
        uint64_t part = atomic_load(&s->under_way);

        if (whole ||
            ((uint32_t)(part >> 32) == at->seq + 1 && (uint32_t)part > had)) {
            ferry_status status =
                ferry__pool_piece(&s->pool, at, &out->bytes, &out->size);

            out->there = whole ? out->size : (uint32_t)part;
            return status < 0 ? fail(s, status) : FERRY_OK;
        }
        if (s->prev < 0)
            ferry__gate_await(committed, at->seq + 1, TCP__STREAM_SLICE_MS);
        else
            ferry__gate_await(&s->arrivals, seen + 1, TCP__STREAM_SLICE_MS);
    }
    return FERRY_ECANCELED;
}

static ferry_status send_piece(tcp__stream *s, tcp__cursor *at,
                               size_t *out_size)
{
    parcel p = {.size = 0};

    do {
        FERRY_TRY(await_bytes(s, at, p.there, &p));
        if (p.done == 0)
            make_head(p.head, TCP__PIECE, at->seq, p.size);
        FERRY_TRY(send_parcel(s, s->next, &p));
    } while (p.there < p.size);
    *out_size = p.size;
    ferry__pool_release(&s->pool, at, p.size);
    return FERRY_OK;
}

/* Until all from the next host on have released the round. */
static ferry_status await_done(tcp__stream *s, uint32_t round)
{
    unsigned char head[TCP__HEAD_BYTES];

    for (;;) {
        uint32_t kind;

        FERRY_TRY(recv_head(s, s->next, head));
        kind = ferry__read_u32(head + 4);
        if ((kind != TCP__MOVING && kind != TCP__DONE) ||
            ferry__read_u32(head + 8) != round)
            return fail(s,
                        ferry_fail(FERRY_EMISMATCH,
                                   "stream: rank %d is in round %u, this "
                                   "is %u",
                                   s->next, ferry__read_u32(head + 8), round));
        if (kind == TCP__DONE)
            return FERRY_OK;
        atomic_fetch_add(&s->sender.progress, 1);
    }
}

static ferry_status send_round(tcp__stream *s, uint32_t round, tcp__cursor *at)
{
    uint64_t left = s->round_bytes;

    while (left > 0) {
        size_t size;

        FERRY_TRY(send_piece(s, at, &size));
        left -= size;
    }
    return await_done(s, round);
}

/* ---- from the host before ---- */

typedef struct place {
    size_t at; /* buffer */
    uint64_t pos;
} place;

/* Pieces end where their buffers do. */
static ferry_status check_piece(tcp__stream *s, const unsigned char *head,
                                place *p, size_t *out_size)
{
    uint64_t size =
        ferry__read_u32(head + 16) | (uint64_t)ferry__read_u32(head + 20) << 32;
    uint64_t left;

    while (s->sizes[p->at] == p->pos) {
        p->at++;
        p->pos = 0;
    }
    left = s->sizes[p->at] - p->pos;
    if (ferry__read_u32(head + 4) != TCP__PIECE ||
        ferry__read_u32(head + 8) != s->pool.committed || size == 0 ||
        size > left || size > s->pool.slot_bytes)
        return fail(s, ferry_fail(FERRY_EMISMATCH,
                                  "stream: rank %d sent piece %u of %llu "
                                  "bytes, expected piece %u of at most %llu",
                                  s->prev, ferry__read_u32(head + 8),
                                  (unsigned long long)size, s->pool.committed,
                                  (unsigned long long)left));
    p->pos += size;
    *out_size = (size_t)size;
    return FERRY_OK;
}

/* The rank that holds up the pool; the next host is named by its leader. */
static int32_t slowest(const tcp__stream *s)
{
    int32_t r = ferry__pool_slowest(&s->pool);

    return r == TCP__POOL_FORWARD ? s->next : r;
}

static ferry_status take_slot(tcp__stream *s)
{
    wait w = wait_for(s, -1);
    ferry_status status;

    while ((status = ferry__pool_acquire(&s->pool, TCP__STREAM_SLICE_MS)) ==
           FERRY_DONE) {
        w.peer = slowest(s);
        FERRY_TRY(look(&w, "used nothing more"));
    }
    return status < 0 ? fail(s, status) : FERRY_OK;
}

static ferry_status recv_piece(tcp__stream *s, place *p, size_t *out_size)
{
    unsigned char head[TCP__HEAD_BYTES];

    FERRY_TRY(recv_head(s, s->prev, head));
    FERRY_TRY(check_piece(s, head, p, out_size));
    FERRY_TRY(take_slot(s));
    ferry__pool_announce(&s->pool, *out_size);
    FERRY_TRY(
        recv_bytes(s, s->prev, ferry__pool_slot(&s->pool), *out_size, true));
    ferry__pool_commit(&s->pool, *out_size);
    tell_arrival(s, s->pool.committed, 0);
    return FERRY_OK;
}

static bool all_done(tcp__stream *s, uint32_t round)
{
    if (!ferry__pool_drained(&s->pool, TCP__STREAM_SLICE_MS))
        return false;
    return s->next < 0 ||
           ferry__gate_await(&s->sender.done, round, TCP__STREAM_SLICE_MS);
}

static uint64_t progress_of(tcp__stream *s)
{
    return ferry__pool_progress(&s->pool) + atomic_load(&s->sender.progress);
}

static ferry_status await_users(tcp__stream *s, uint32_t round)
{
    uint64_t seen = progress_of(s), told = seen;
    int64_t told_ns = ferry__now_ns();
    wait w = wait_for(s, -1);

    while (!all_done(s, round)) {
        uint64_t now = progress_of(s);

        if (now != seen)
            w = wait_for(s, -1);
        seen = now;
        w.peer = slowest(s) >= 0 ? slowest(s) : s->next;
        FERRY_TRY(look(&w, "used nothing more"));
        if (now != told &&
            ferry__now_ns() - told_ns >= INT64_C(1000000) * MOVING_MS) {
            told = now;
            told_ns = ferry__now_ns();
            FERRY_TRY(send_word(s, s->prev, TCP__MOVING, round));
        }
    }
    return send_word(s, s->prev, TCP__DONE, round);
}

static ferry_status recv_round(tcp__stream *s, uint32_t round)
{
    uint64_t left = s->round_bytes;
    place p = {0, 0};

    while (left > 0) {
        size_t size;

        FERRY_TRY(recv_piece(s, &p, &size));
        left -= size;
    }
    return await_users(s, round);
}

/* ---- the threads ---- */

/* False: it is over. */
static bool await_round(tcp__stream *s, uint32_t round)
{
    while (!ferry__gate_await(&s->go, round, 60000)) {
        if (atomic_load(&s->stop))
            return false;
    }
    return !atomic_load(&s->stop);
}

static void *run_sender(void *arg)
{
    tcp__carrier *t = arg;
    tcp__cursor at = {TCP__POOL_FORWARD, 0, 0};

    for (uint32_t round = 1; await_round(t->stream, round); round++) {
        if (send_round(t->stream, round, &at) < 0)
            break;
        ferry__gate_raise(&t->done, round);
    }
    return NULL;
}

static void *run_receiver(void *arg)
{
    tcp__carrier *t = arg;

    for (uint32_t round = 1; await_round(t->stream, round); round++) {
        if (recv_round(t->stream, round) < 0)
            break;
        ferry__gate_raise(&t->done, round);
    }
    return NULL;
}

static ferry_status start(tcp__stream *s, tcp__carrier *t, const char *name,
                          void *(*run)(void *))
{
    t->stream = s;
    FERRY_TRY(ferry__thread_start(&t->thread, name, run, t));
    t->started = true;
    return FERRY_OK;
}

ferry_status ferry__tcp_stream_start(tcp__stream *s)
{
    s->stop_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (s->stop_fd < 0)
        return ferry_fail(FERRY_EIO, "stream: no event descriptor");
    if (s->next >= 0)
        FERRY_TRY(start(s, &s->sender, "ferry-send", run_sender));
    if (s->prev >= 0)
        FERRY_TRY(start(s, &s->receiver, "ferry-receive", run_receiver));
    return FERRY_OK;
}

void ferry__tcp_stream_stop(tcp__stream *s)
{
    atomic_store(&s->stop, true);
    /* Raised, so that the last sleeper cannot miss it. */
    ferry__gate_raise(&s->go, ferry__gate_value(&s->go) + 1);
    if (s->stop_fd >= 0)
        eventfd_write(s->stop_fd, 1);
    if (s->sender.started)
        pthread_join(s->sender.thread, NULL);
    if (s->receiver.started)
        pthread_join(s->receiver.thread, NULL);
    s->sender.started = s->receiver.started = false;
    if (s->stop_fd >= 0)
        close(s->stop_fd);
    s->stop_fd = -1;
}
