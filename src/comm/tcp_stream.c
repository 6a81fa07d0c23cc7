/* SPDX-License-Identifier: Apache-2.0 */
/* The caller's side of a tcp group's stream; its waits are in
 * tcp_stream_wait.c.
 * Invariant: after one failure the group is broken and every later call
 * fails alike. */
#include "comm/tcp_stream.h"

#include "base/alloc.h"
#include "base/log.h"

#include <string.h>

static tcp__stream *of(ferry__stream *s)
{
    return (tcp__stream *)s;
}

static bool is_root(const tcp__stream *s)
{
    return s->base.comm->rank == s->o.root;
}

static ferry_status failed_before(const tcp__stream *s)
{
    if (s->failed < 0)
        return ferry__fail_line(s->failed, s->line);
    return FERRY_OK;
}

/* ---- what waits are for ---- */

static uint64_t progress_of(tcp__stream *s)
{
    return ferry__pool_progress(&s->pool) + atomic_load(&s->sender.progress) +
           ferry__gate_value(&s->pool.head->committed) +
           atomic_load(&s->carried);
}

static int32_t slowest(tcp__stream *s)
{
    int32_t r = ferry__pool_slowest(&s->pool);

    if (r >= 0 && r != TCP__POOL_FORWARD)
        return r;
    return s->next >= 0 ? s->next : s->leader;
}

static int32_t source_of(tcp__stream *s)
{
    return ferry__tcp_stream_leads(s) ? s->prev : s->leader;
}

/* Nothing more comes to a leader while others hold all of its slots. */
static int32_t sender_held_by(tcp__stream *s)
{
    if (ferry__tcp_stream_leads(s) && ferry__pool_is_full(&s->pool))
        return slowest(s);
    return source_of(s);
}

/* ---- rounds ---- */

static ferry_status check_sizes(const tcp__stream *s, const uint64_t *sizes,
                                size_t n, uint64_t *out_total)
{
    uint64_t total = 0;

    for (size_t i = 0; i < n; i++) {
        if (sizes[i] > s->o.buffer_bytes)
            return ferry_fail(FERRY_EINVAL,
                              "stream: buffer %zu has %llu bytes, the bound "
                              "is %llu",
                              i, (unsigned long long)sizes[i],
                              (unsigned long long)s->o.buffer_bytes);
        if (total > UINT64_MAX - sizes[i])
            return ferry_fail(FERRY_EOVERFLOW,
                              "stream: the sizes of %zu "
                              "buffers",
                              n);
        total += sizes[i];
    }
    *out_total = total;
    return FERRY_OK;
}

static ferry_status keep_sizes(tcp__stream *s, const uint64_t *sizes, size_t n)
{
    uint64_t *own;
    size_t bytes;

    if (n > s->sizes_capacity) {
        if (!ferry__mul(n, sizeof(*sizes), &bytes))
            return ferry_fail(FERRY_EOVERFLOW, "stream: %zu buffers", n);
        own = ferry__realloc(s->sizes, bytes);
        if (!own)
            return FERRY_ENOMEM;
        s->sizes = own;
        s->sizes_capacity = n;
    }
    if (n > 0)
        memcpy(s->sizes, sizes, n * sizeof(*sizes));
    return FERRY_OK;
}

static void skip_done(tcp__stream *s)
{
    while (s->at < s->n && s->sizes[s->at] == s->pos) {
        s->at++;
        s->pos = 0;
    }
}

static ferry_status stream_begin(ferry__stream *base, const uint64_t *sizes,
                                 size_t n)
{
    tcp__stream *s = of(base);
    ferry_status status;
    uint64_t total;
    tcp__call call;

    FERRY_TRY(failed_before(s));
    if (s->in_round)
        return ferry_fail(FERRY_EORDER, "stream: the round before has not "
                                        "ended");
    FERRY_TRY(check_sizes(s, sizes, n, &total));
    /* Rounds that never wait would not hear of anything. */
    status = ferry__tcp_enter(s->c, "stream", s->o.timeout_ms, &call);
    if (status < 0)
        return ferry__tcp_stream_give_up(s, status);
    status = keep_sizes(s, sizes, n);
    if (status < 0)
        return ferry__tcp_stream_give_up(s, status);
    s->n = n;
    s->at = 0;
    s->pos = 0;
    s->in_round = true;
    skip_done(s);
    if (total == 0)
        return FERRY_OK;
    s->round++;
    s->round_bytes = total;
    if (s->sender.started || s->receiver.started)
        ferry__gate_raise(&s->go, s->round);
    return FERRY_OK;
}

static ferry_status check_place(const tcp__stream *s, const char *what,
                                bool of_root)
{
    FERRY_TRY(failed_before(s));
    if (is_root(s) != of_root)
        return ferry_fail(FERRY_EORDER, "stream: %s on rank %d, the root is %d",
                          what, s->base.comm->rank, s->o.root);
    if (!s->in_round || s->at >= s->n)
        return ferry_fail(FERRY_EORDER, "stream: %s beyond the round", what);
    return FERRY_OK;
}

static void advance(tcp__stream *s, size_t size)
{
    s->pos += size;
    s->base.bytes += size;
    skip_done(s);
}

static ferry_status poll_slot(tcp__stream *s, int64_t slice_ms)
{
    return ferry__pool_acquire(&s->pool, slice_ms);
}

static bool has_slot(tcp__stream *s)
{
    return s->pool.held || s->pool.n_free > 0;
}

static size_t room_of(const tcp__stream *s)
{
    uint64_t left = s->sizes[s->at] - s->pos;
    uint32_t slot = s->pool.slot_bytes;

    return left < slot ? (size_t)left : slot;
}

static ferry_status stream_reserve(ferry__stream *base, void **out,
                                   size_t *out_size)
{
    static const tcp__goal g = {"stream: waiting for room",
                                "used nothing more",
                                poll_slot,
                                progress_of,
                                slowest,
                                slowest,
                                has_slot};
    tcp__stream *s = of(base);

    FERRY_TRY(check_place(s, "reserve", true));
    FERRY_TRY(ferry__tcp_stream_await(s, &g));
    *out = ferry__pool_slot(&s->pool);
    *out_size = room_of(s);
    return FERRY_OK;
}

static ferry_status stream_commit(ferry__stream *base, size_t size)
{
    tcp__stream *s = of(base);

    if (size == 0)
        return failed_before(s);
    FERRY_TRY(check_place(s, "commit", true));
    if (!s->pool.held || size > room_of(s))
        return ferry_fail(FERRY_EINVAL,
                          "stream: commit of %zu bytes, %zu were reserved",
                          size, s->pool.held ? room_of(s) : 0);
    ferry__pool_commit(&s->pool, size);
    advance(s, size);
    return FERRY_OK;
}

static ferry_status poll_piece(tcp__stream *s, int64_t slice_ms)
{
    return ferry__pool_peek(&s->pool, &s->cursor, slice_ms, &s->piece,
                            &s->piece_bytes);
}

static bool has_piece(tcp__stream *s)
{
    return ferry__gate_reached(&s->pool.head->committed, s->cursor.seq + 1);
}

static ferry_status stream_peek(ferry__stream *base, const void **out,
                                size_t *out_size)
{
    static const tcp__goal g = {"stream: waiting for bytes",
                                "sent nothing more",
                                poll_piece,
                                progress_of,
                                source_of,
                                sender_held_by,
                                has_piece};
    tcp__stream *s = of(base);

    FERRY_TRY(check_place(s, "peek", false));
    FERRY_TRY(ferry__tcp_stream_await(s, &g));
    if (s->piece_bytes > s->sizes[s->at] - s->pos)
        return ferry__tcp_stream_give_up(
            s,
            ferry_fail(FERRY_EMISMATCH,
                       "stream: a piece of %zu bytes came, %llu are left "
                       "of buffer %zu",
                       s->piece_bytes,
                       (unsigned long long)(s->sizes[s->at] - s->pos), s->at));
    *out = s->piece;
    *out_size = s->piece_bytes;
    return FERRY_OK;
}

static ferry_status stream_release(ferry__stream *base, size_t size)
{
    tcp__stream *s = of(base);

    if (size == 0)
        return failed_before(s);
    FERRY_TRY(check_place(s, "release", false));
    if (size > s->piece_bytes)
        return ferry_fail(FERRY_EINVAL,
                          "stream: release of %zu bytes, %zu are left", size,
                          s->piece_bytes);
    s->piece_bytes -= size;
    ferry__pool_release(&s->pool, &s->cursor, size);
    advance(s, size);
    return FERRY_OK;
}

/* ---- the end of a round ---- */

static ferry_status poll_users(tcp__stream *s, int64_t slice_ms)
{
    if (!ferry__pool_drained(&s->pool, slice_ms))
        return FERRY_DONE;
    if (s->next >= 0 && !ferry__gate_await(&s->sender.done, s->round, slice_ms))
        return FERRY_DONE;
    return FERRY_OK;
}

/* The receiver ends last, and the connections are the caller's again. */
static ferry_status poll_threads(tcp__stream *s, int64_t slice_ms)
{
    return ferry__gate_await(&s->receiver.done, s->round, slice_ms)
               ? FERRY_OK
               : FERRY_DONE;
}

static ferry_status stream_end(ferry__stream *base)
{
    static const tcp__goal users = {"stream: waiting for its end",
                                    "used nothing more",
                                    poll_users,
                                    progress_of,
                                    slowest,
                                    slowest,
                                    NULL};
    static const tcp__goal threads = {"stream: waiting for its end",
                                      "used nothing more",
                                      poll_threads,
                                      progress_of,
                                      slowest,
                                      slowest,
                                      NULL};
    tcp__stream *s = of(base);

    FERRY_TRY(failed_before(s));
    if (!s->in_round || s->at < s->n)
        return ferry_fail(FERRY_EORDER,
                          "stream: end at buffer %zu of %zu in the round",
                          s->at, s->n);
    if (!is_root(s))
        atomic_store(&s->pool.head->readers[s->base.comm->rank].ended,
                     s->round);
    if (is_root(s))
        FERRY_TRY(ferry__tcp_stream_await(s, &users));
    else if (s->receiver.started)
        FERRY_TRY(ferry__tcp_stream_await(s, &threads));
    s->base.peak_bytes = atomic_load(&s->pool.head->peak_bytes);
    s->in_round = false;
    return FERRY_OK;
}

/* ---- life ---- */

/* A round that is cut short would leave the others waiting. */
static void stream_close(ferry__stream *base)
{
    tcp__stream *s = of(base);

    if (s->in_round && s->failed == FERRY_OK && s->round > 0)
        ferry__tcp_stream_give_up(
            s, ferry_fail(FERRY_ECANCELED,
                          "stream: rank %d closed it within a round",
                          base->comm->rank));
    ferry__tcp_stream_stop(s);
    ferry__pool_close(&s->pool);
    ferry__free(s->sizes);
    pthread_mutex_destroy(&s->lock);
    ferry__free(s);
}

static const ferry__stream_ops stream_ops = {
    .begin = stream_begin,
    .reserve = stream_reserve,
    .commit = stream_commit,
    .peek = stream_peek,
    .release = stream_release,
    .end = stream_end,
    .close = stream_close,
};

/* "tcp" where no two ranks share memory, "shared" where all do. */
static const char *path_of(const tcp__stream *s)
{
    int32_t world = s->base.comm->world_size;
    bool shares = false, sends = false;

    for (int32_t r = 0; r < world; r++) {
        sends = sends || s->hosts[r] != s->hosts[0];
        for (int32_t q = 0; q < r; q++)
            shares = shares || s->hosts[q] == s->hosts[r];
    }
    return !sends ? "shared" : shares ? "tcp+shared" : "tcp";
}

static ferry_status open_all(tcp__stream *s)
{
    FERRY_TRY(ferry__tcp_stream_share(s));
    s->base.path = path_of(s);
    ferry__log(FERRY_LOG_INFO, "stream: rank %d of %d, path %s, leader %d",
               s->base.comm->rank, s->base.comm->world_size, s->base.path,
               s->leader);
    return ferry__tcp_stream_start(s);
}

ferry_status ferry__tcp_stream_open(ferry__comm *comm,
                                    const ferry__stream_options *options,
                                    ferry__stream **out)
{
    tcp__stream *s = ferry__alloc(sizeof(*s));
    ferry_status status;

    if (!s)
        return ferry__tcp_break((tcp__comm *)comm, FERRY_ENOMEM);
    s->base = (ferry__stream){.ops = &stream_ops, .comm = comm};
    s->c = (tcp__comm *)comm;
    s->o = *options;
    s->cursor.reader = comm->rank;
    s->pool.fd = s->stop_fd = -1;
    pthread_mutex_init(&s->lock, NULL);
    status = open_all(s);
    if (status < 0) {
        status = s->c->failed < 0 ? status : ferry__tcp_break(s->c, status);
        stream_close(&s->base);
        return status;
    }
    *out = &s->base;
    return FERRY_OK;
}
