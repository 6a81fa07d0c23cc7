/* SPDX-License-Identifier: Apache-2.0 */
/* Waits of a stream's caller. They sleep on gates in shared memory and look
 * around between slices: the owner's check, aborts and failures that are told
 * of, ranks that are gone, threads that failed.
 * Invariant: no wait goes longer than a slice without a look, and one that
 * fails names whom it waited for. */
#include "comm/tcp_stream.h"

#include "base/log.h"

#include <stdio.h>

#define NOBODY (-2) /* other than any rank */

/* The threads hold slots and connections of a group that is over. */
ferry_status ferry__tcp_stream_give_up(tcp__stream *s, ferry_status status)
{
    s->failed = status;
    snprintf(s->line, sizeof(s->line), "%s", ferry_last_error());
    ferry__tcp_break(s->c, status);
    atomic_store(&s->stop, true);
    return ferry__fail_line(status, s->line);
}

/* ---- looking around ---- */

static ferry_status thread_error(tcp__stream *s, const char *what)
{
    tcp__call call = {what, {0, 0}};
    ferry_status status = FERRY_OK;
    bool has_error;

    pthread_mutex_lock(&s->lock);
    has_error = s->has_error;
    pthread_mutex_unlock(&s->lock);
    if (has_error && s->error_peer >= 0)
        status = ferry__tcp_lost(s->c, &call, s->error_peer, s->error_errno);
    else if (has_error)
        status = ferry__fail_line(s->error, s->error_line);
    return status;
}

/* A rank that has ended the round is not missed before the next one. */
static ferry_status none_gone(const tcp__stream *s, const char *what)
{
    tcp__call call = {what, {0, 0}};
    const ferry__comm *c = s->base.comm;

    for (int32_t r = 0; r < c->world_size; r++) {
        const tcp__peer *p = &s->c->peers[r];
        bool mate = s->hosts[r] == s->hosts[c->rank];

        if (r == c->rank || (!p->gone && !p->left))
            continue;
        if (r != s->o.root && mate &&
            atomic_load(&s->pool.head->readers[r].ended) == s->round)
            continue;
        if (mate || !p->left)
            return ferry__tcp_lost(s->c, &call, r, 0);
    }
    return FERRY_OK;
}

static ferry_status look(tcp__stream *s, const char *what)
{
    FERRY_TRY(ferry__tcp_listen_all(s->c, what));
    FERRY_TRY(thread_error(s, what));
    return none_gone(s, what);
}

static ferry_status look_in_time(tcp__stream *s, const tcp__goal *g,
                                 int64_t since_ns)
{
    int64_t bound = s->o.no_progress_ms;
    tcp__call call = {g->what, {0, 0}};

    FERRY_TRY(look(s, g->what));
    if (bound == 0 || (ferry__now_ns() - since_ns) / 1000000 < bound)
        return FERRY_OK;
    return ferry__tcp_time_out(s->c, &call, g->culprit(s), g->how,
                               FERRY_ENOPROGRESS, bound);
}

/* The owner's bounds are often those of the stream: only here is it known
 * who is waited for. */
static ferry_status check_owner(tcp__stream *s, const tcp__goal *g)
{
    const ferry__comm *c = s->base.comm;
    ferry_status status = c->check ? c->check(c->check_arg, g->what) : FERRY_OK;
    char line[1024];

    if (status != FERRY_ENOPROGRESS && status != FERRY_ETIMEOUT)
        return status;
    snprintf(line, sizeof(line), "%s", ferry_last_error());
    return ferry_fail(status, "%s, rank %d %s", line, g->culprit(s), g->how);
}

/* Whose wait it is, and since when: of a long one, told in parts where
 * another rank comes to be the last. */
typedef struct blame {
    int32_t peer;
    int64_t from_ns; /* 0: nobody wants to know */
} blame;

static void tell_wait(tcp__stream *s, blame *b, int32_t next)
{
    if (b->from_ns == 0 || next == b->peer)
        return;
    ferry__tcp_waited(s->c, b->peer, b->from_ns);
    *b = (blame){next, ferry__comm_wait_ns(s->base.comm)};
}

static ferry_status await_goal(tcp__stream *s, const tcp__goal *g, blame *b)
{
    ferry_status status = g->poll(s, TCP__STREAM_SLICE_MS);
    int64_t since_ns = ferry__now_ns();
    uint64_t seen = status == FERRY_DONE ? g->progress(s) : 0;

    if (atomic_load(&s->c->aborted))
        return ferry__tcp_stream_give_up(s,
                                         ferry__tcp_listen_all(s->c, g->what));
    while (status == FERRY_DONE) {
        ferry_status bad = check_owner(s, g);
        uint64_t now;

        tell_wait(s, b, g->holder(s));
        if (bad < 0)
            return ferry__tcp_stream_give_up(s, bad);
        bad = look_in_time(s, g, since_ns);
        /* It may have come with the last word of a rank that then left. */
        status = g->poll(s, bad < 0 ? 0 : TCP__STREAM_SLICE_MS);
        if (bad < 0 && status == FERRY_DONE)
            return ferry__tcp_stream_give_up(s, bad);
        now = g->progress(s);
        if (now != seen) {
            since_ns = ferry__now_ns();
            atomic_fetch_add(&s->c->streamed, 1);
        }
        seen = now;
    }
    return status < 0 ? ferry__tcp_stream_give_up(s, status) : FERRY_OK;
}

ferry_status ferry__tcp_stream_await(tcp__stream *s, const tcp__goal *g)
{
    blame b = {NOBODY, 0};
    ferry_status status;

    if (s->base.comm->waited && !(g->ready && g->ready(s)))
        b = (blame){g->holder(s), ferry__comm_wait_ns(s->base.comm)};
    status = await_goal(s, g, &b);
    tell_wait(s, &b, NOBODY);
    return status;
}
