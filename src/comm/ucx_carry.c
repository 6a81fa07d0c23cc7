/* SPDX-License-Identifier: Apache-2.0 */
/* Moves flows by tagged messages: a head, with the bytes behind it if they
 * are few, else followed by pieces, some of them under way at a time. A rank
 * that relays sends a piece on as soon as it is there.
 * Invariant: nothing touches a flow's memory after carry and drop returned. */
#include "comm/ucx_private.h"

#include "base/alloc.h"
#include "base/log.h"

#include <errno.h>
#include <poll.h>
#include <string.h>

/* How long a wait spins before it sleeps; ranks may be more than cores. */
#define SPIN_NS INT64_C(20000)
/* How long the end of a rank may be known before its last bytes are. */
#define DRAIN_MS INT64_C(50)
/* How long to listen for the cause of a failure. */
#define BLAME_MS INT64_C(250)
#define DROP_MS  INT64_C(1000)
#define FLUSH_MS INT64_C(100)

/* ---- operations ---- */

static void op_ended(ucx__op *op, ucs_status_t status)
{
    op->done = true;
    op->status = status;
}

static void on_sent(void *request, ucs_status_t status, void *arg)
{
    (void)request;
    op_ended(arg, status);
}

static void on_received(void *request, ucs_status_t status,
                        const ucp_tag_recv_info_t *info, void *arg)
{
    ucx__op *op = arg;

    (void)request;
    op->size = status == UCS_OK ? info->length : 0;
    op_ended(op, status);
}

ucp_request_param_t ferry__ucx_param(ucx__op *op, bool recv)
{
    ucp_request_param_t p = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK |
                                             UCP_OP_ATTR_FIELD_USER_DATA,
                             .user_data = op};

    *op = (ucx__op){.recv = recv};
    if (recv) {
        /* Only the callback tells how much came. */
        p.op_attr_mask |= UCP_OP_ATTR_FLAG_NO_IMM_CMPL;
        p.cb.recv = on_received;
    } else {
        p.cb.send = on_sent;
    }
    return p;
}

void ferry__ucx_posted(ucx__net *n, ucx__op *op, ucs_status_ptr_t answer)
{
    op->posted = true;
    if (UCS_PTR_IS_PTR(answer)) {
        op->request = answer;
        n->outstanding++;
    } else {
        op_ended(op, UCS_PTR_RAW_STATUS(answer));
    }
}

bool ferry__ucx_reap(ucx__net *n, ucx__op *op)
{
    if (!op->posted || !op->done)
        return false;
    if (op->request) {
        ucp_request_free(op->request);
        n->outstanding--;
    }
    op->request = NULL;
    op->posted = false;
    return true;
}

static uint64_t tag_of(uint64_t token, int32_t from, int channel, int bytes)
{
    return token << 24 | (uint64_t)(uint32_t)from << 8 |
           (uint64_t)(channel * 2 + bytes);
}

static void post_send(ucx__net *n, const tcp__flow *f, ucx__op *op, int bytes,
                      const void *from, size_t size)
{
    ucp_request_param_t p = ferry__ucx_param(op, false);
    const ucx__peer *peer = &n->peers[f->peer];
    uint64_t tag = tag_of(peer->token, n->comm->base.rank, f->channel, bytes);

    if (!peer->ep || peer->failed != UCS_OK) {
        ferry__ucx_posted(n, op,
                          UCS_STATUS_PTR(peer->failed != UCS_OK
                                             ? peer->failed
                                             : UCS_ERR_CONNECTION_RESET));
        return;
    }
    ferry__ucx_posted(n, op, ucp_tag_send_nbx(peer->ep, from, size, tag, &p));
}

static void post_recv(ucx__net *n, const tcp__flow *f, ucx__op *op, int bytes,
                      void *to, size_t size)
{
    ucp_request_param_t p = ferry__ucx_param(op, true);

    ferry__ucx_posted(
        n, op,
        ucp_tag_recv_nbx(n->worker, to, size,
                         tag_of(n->token, f->peer, f->channel, bytes),
                         UINT64_MAX, &p));
}

/* ---- flows ---- */

static bool flow_done(const tcp__flow *f)
{
    return f->head_done == TCP__HEAD_BYTES && f->done == f->size;
}

static size_t piece_bytes(const tcp__flow *f, size_t piece)
{
    size_t left = f->size - piece * UCX__PIECE_BYTES;

    return left < UCX__PIECE_BYTES ? left : UCX__PIECE_BYTES;
}

static size_t count_pieces(const tcp__flow *f)
{
    return f->size <= UCX__INLINE_BYTES
               ? 0
               : (f->size + UCX__PIECE_BYTES - 1) / UCX__PIECE_BYTES;
}

static ferry_status wrong_size(const tcp__flow *f, const tcp__call *call,
                               size_t size)
{
    return ferry_fail(FERRY_EMISMATCH,
                      "%s of %zu bytes: rank %d sent a message of %zu bytes",
                      call->name, f->size, f->peer, size);
}

/* The head, once what goes with it is there. */
static void start_out(ucx__net *n, ucx__lane *lane, const tcp__flow *f)
{
    size_t with = f->size <= UCX__INLINE_BYTES ? f->size : 0;

    if (with > 0 && f->after && f->after->done < f->size)
        return;
    memcpy(lane->bounce, f->head, TCP__HEAD_BYTES);
    if (with > 0)
        memcpy(lane->bounce + TCP__HEAD_BYTES, f->bytes, with);
    post_send(n, f, &lane->head, 0, lane->bounce, TCP__HEAD_BYTES + with);
}

static ferry_status head_came(ucx__lane *lane, const tcp__call *call,
                              tcp__flow *f)
{
    size_t size = lane->head.size;

    if (size < TCP__HEAD_BYTES)
        return wrong_size(f, call, size);
    memcpy(f->came, lane->bounce, TCP__HEAD_BYTES);
    FERRY_TRY(ferry__tcp_check_head(f, call));
    if (f->size <= UCX__INLINE_BYTES) {
        if (size != TCP__HEAD_BYTES + f->size)
            return wrong_size(f, call, size);
        if (f->size > 0)
            memcpy(f->bytes, lane->bounce + TCP__HEAD_BYTES, f->size);
        f->done = f->size;
    }
    f->head_done = TCP__HEAD_BYTES;
    return FERRY_OK;
}

static ferry_status turn_head(ucx__net *n, ucx__lane *lane,
                              const tcp__call *call, tcp__flow *f,
                              bool *out_moved)
{
    if (!lane->head.posted) {
        if (f->out)
            start_out(n, lane, f);
        else
            post_recv(n, f, &lane->head, 0, lane->bounce, sizeof(lane->bounce));
    }
    if (!ferry__ucx_reap(n, &lane->head))
        return FERRY_OK;
    *out_moved = true;
    if (lane->head.status != UCS_OK)
        return ferry__ucx_lost(n, call, f->peer, lane->head.status);
    if (!f->out)
        return head_came(lane, call, f);
    f->head_done = TCP__HEAD_BYTES;
    if (f->size <= UCX__INLINE_BYTES) {
        f->done = f->size;
        ferry__tcp_count_sent(n->comm, f->peer, f->size);
    }
    return FERRY_OK;
}

static void post_pieces(ucx__net *n, ucx__lane *lane, const tcp__flow *f)
{
    size_t limit = f->after ? f->after->done : f->size;

    while (lane->posted < count_pieces(f) &&
           lane->posted - lane->taken < UCX__WINDOW) {
        size_t at = lane->posted * UCX__PIECE_BYTES;
        size_t size = piece_bytes(f, lane->posted);
        ucx__op *op = &lane->ops[lane->posted % UCX__WINDOW];

        if (f->out && limit < at + size)
            break;
        if (f->out)
            post_send(n, f, op, 1, f->bytes + at, size);
        else
            post_recv(n, f, op, 1, f->bytes + at, size);
        lane->posted++;
    }
}

static ferry_status take_pieces(ucx__net *n, ucx__lane *lane,
                                const tcp__call *call, tcp__flow *f,
                                bool *out_moved)
{
    while (lane->taken < lane->posted) {
        ucx__op *op = &lane->ops[lane->taken % UCX__WINDOW];
        size_t size = piece_bytes(f, lane->taken);

        if (!ferry__ucx_reap(n, op))
            break;
        if (op->status == UCS_ERR_MESSAGE_TRUNCATED)
            return ferry_fail(FERRY_EMISMATCH,
                              "%s of %zu bytes: rank %d sent more", call->name,
                              f->size, f->peer);
        if (op->status != UCS_OK)
            return ferry__ucx_lost(n, call, f->peer, op->status);
        if (op->recv && op->size != size)
            return wrong_size(f, call, op->size);
        if (f->out)
            ferry__tcp_count_sent(n->comm, f->peer, size);
        f->done += size;
        lane->taken++;
        *out_moved = true;
    }
    return FERRY_OK;
}

/* One turn of a lane, which may end it. */
static ferry_status turn(ucx__net *n, ucx__lane *lane, const tcp__call *call,
                         tcp__flow *f, bool *out_moved)
{
    if (flow_done(f) || (f->behind && !flow_done(f->behind)))
        return FERRY_OK;
    if (f->head_done < TCP__HEAD_BYTES)
        FERRY_TRY(turn_head(n, lane, call, f, out_moved));
    if (f->head_done < TCP__HEAD_BYTES)
        return FERRY_OK;
    post_pieces(n, lane, f);
    return take_pieces(n, lane, call, f, out_moved);
}

/* ---- waiting ---- */

/* Bytes of a rank that is gone may still be on their way; after that, what
 * others tell comes first. */
ferry_status ferry__ucx_lost(ucx__net *n, const tcp__call *call, int32_t peer,
                             ucs_status_t why)
{
    ferry__deadline until = ferry__deadline_in(BLAME_MS);
    tcp__comm *c = n->comm;
    int64_t left;

    while ((left = ferry__deadline_left_ms(&until)) > 0) {
        FERRY_TRY(ferry__tcp_listen_all(c, call->name));
        if (c->peers[peer].gone || c->peers[peer].left)
            return ferry__tcp_lost(c, call, peer, 0);
        if (poll(c->polls, ferry__tcp_control_polls(c), (int)left) < 0 &&
            errno != EINTR)
            break;
    }
    return ferry_fail(FERRY_EPEER, "%s: rank %d died or was cut off: %s",
                      call->name, peer, ucs_status_string(why));
}

static ferry_status check_bounds(ucx__net *n, const ucx__wait *w, int32_t peer,
                                 const char *how, int64_t *out_left)
{
    tcp__comm *c = n->comm;
    int64_t left = ferry__deadline_left_ms(&w->call->deadline), idle = left;

    if (c->no_progress_ms > 0)
        idle = c->no_progress_ms - (ferry__now_ns() - w->moved_ns) / 1000000;
    if (left <= 0)
        return ferry__tcp_time_out(c, w->call, peer, how, FERRY_ETIMEOUT,
                                   w->call->deadline.bound_ms);
    if (idle <= 0)
        return ferry__tcp_time_out(c, w->call, peer, how, FERRY_ENOPROGRESS,
                                   c->no_progress_ms);
    *out_left = left < idle ? left : idle;
    return FERRY_OK;
}

/* Asleep until the worker or a control connection has something. */
static ferry_status sleep_on(ucx__net *n, const char *name, int64_t left_ms)
{
    tcp__comm *c = n->comm;
    nfds_t k = ferry__tcp_control_polls(c);

    c->polls[k++] = (struct pollfd){n->events, POLLIN, 0};
    if (poll(c->polls, k,
             (int)(left_ms < TCP__CHECK_MS ? left_ms : TCP__CHECK_MS)) < 0 &&
        errno != EINTR)
        return ferry_fail(FERRY_EIO, "%s: poll: %s", name, strerror(errno));
    return FERRY_OK;
}

static bool quiet_for(const ucx__wait *w, int64_t ms)
{
    return ferry__now_ns() - w->moved_ns > ms * 1000000;
}

ferry_status ferry__ucx_await(ucx__net *n, ucx__wait *w, int32_t peer,
                              const char *how)
{
    tcp__comm *c = n->comm;
    int64_t left, now;

    FERRY_TRY(ferry__tcp_ask(c, w->call->name, &w->asked_ns));
    now = ferry__now_ns();
    if (now - w->moved_ns < SPIN_NS && now < w->call->deadline.at_ns)
        return FERRY_OK;
    if (c->failed < 0 && quiet_for(w, DRAIN_MS))
        return ferry__fail_line(c->failed, c->line);
    if (n->peers[peer].failed != UCS_OK && quiet_for(w, DRAIN_MS))
        return ferry__ucx_lost(n, w->call, peer, n->peers[peer].failed);
    if (c->peers[peer].gone && quiet_for(w, DRAIN_MS))
        return ferry__tcp_lost(c, w->call, peer, 0);
    FERRY_TRY(check_bounds(n, w, peer, how, &left));
    /* News are not waited out while they may explain an idle wait. */
    if (c->failed < 0 || n->peers[peer].failed != UCS_OK || c->peers[peer].gone)
        left = left < 5 ? left : 5;
    if (ucp_worker_arm(n->worker) == UCS_OK) {
        FERRY_TRY(sleep_on(n, w->call->name, left));
        ferry__tcp_waited(c, peer, now);
    }
    return c->failed < 0
               ? FERRY_OK
               : ferry__tcp_hold(c, ferry__tcp_listen_all(c, w->call->name));
}

/* ---- a call ---- */

/* Whom the call waits for: a flow that does not itself wait for another. */
static const tcp__flow *culprit(const tcp__flow *flows, size_t n)
{
    const tcp__flow *other = NULL;

    for (size_t i = 0; i < n; i++) {
        const tcp__flow *f = &flows[i];

        if (flow_done(f))
            continue;
        if (!f->out || !f->after || f->after->done > f->done)
            return f;
        other = f;
    }
    return other;
}

static ferry_status move(ucx__net *n, const tcp__call *call, tcp__flow *flows,
                         size_t n_flows)
{
    ucx__wait w = {call, ferry__now_ns(), ferry__now_ns()};

    for (;;) {
        bool moved = ucp_worker_progress(n->worker) > 0;
        const tcp__flow *f;

        for (size_t i = 0; i < n_flows; i++)
            FERRY_TRY(turn(n, &n->lanes[i], call, &flows[i], &moved));
        f = culprit(flows, n_flows);
        if (!f)
            return FERRY_OK;
        if (atomic_load(&n->comm->aborted))
            return ferry__tcp_listen_all(n->comm, call->name);
        if (moved) {
            w.moved_ns = ferry__now_ns();
            if (w.moved_ns < call->deadline.at_ns) {
                FERRY_TRY(ferry__tcp_ask(n->comm, call->name, &w.asked_ns));
                continue;
            }
        }
        FERRY_TRY(ferry__ucx_await(n, &w, f->peer, ferry__tcp_how(f)));
    }
}

static ferry_status carry(tcp__comm *c, const tcp__call *call, tcp__flow *flows,
                          size_t n_flows)
{
    ucx__net *n = c->carrier_state;
    ferry_status status;

    if (n_flows == 0)
        return FERRY_OK;
    if (n_flows > n->n_lanes)
        return ferry_fail(FERRY_EINTERNAL, "%s: %zu flows, %zu lanes",
                          call->name, n_flows, n->n_lanes);
    ferry__ucx_begin_call(n);
    n->n_used = n_flows;
    for (size_t i = 0; i < n_flows; i++) {
        ucx__lane *lane = &n->lanes[i];

        lane->posted = lane->taken = 0;
        lane->head = (ucx__op){0};
        memset(lane->ops, 0, sizeof(lane->ops));
    }
    status = move(n, call, flows, n_flows);
    ferry__ucx_end_call(n);
    return status;
}

/* ---- the end ---- */

static void give_up(ucx__net *n, ucx__op *op)
{
    if (op->posted && !op->done && op->recv)
        ucp_request_cancel(n->worker, op->request);
}

static bool all_ended(ucx__net *n)
{
    for (size_t i = 0; i < n->n_used; i++) {
        ucx__lane *lane = &n->lanes[i];

        ferry__ucx_reap(n, &lane->head);
        for (size_t k = 0; k < UCX__WINDOW; k++)
            ferry__ucx_reap(n, &lane->ops[k]);
    }
    return n->outstanding == 0;
}

/* What UCX took goes out before the endpoints close, if the others take it:
 * they do so by themselves, by their movers. */
static void flush(ucx__net *n)
{
    ferry__deadline until = ferry__deadline_in(FLUSH_MS);
    bool all = false;

    for (int32_t r = 0; r < n->comm->base.world_size; r++) {
        ucx__peer *peer = &n->peers[r];
        ucp_request_param_t p = ferry__ucx_param(&peer->flush, false);

        if (peer->ep && peer->failed == UCS_OK)
            ferry__ucx_posted(n, &peer->flush, ucp_ep_flush_nbx(peer->ep, &p));
    }
    while (!all && !ferry__deadline_passed(&until)) {
        ucp_worker_progress(n->worker);
        all = true;
        for (int32_t r = 0; r < n->comm->base.world_size; r++) {
            ferry__ucx_reap(n, &n->peers[r].flush);
            all = all && !n->peers[r].flush.posted;
        }
    }
}

void ferry__ucx_flush(ucx__net *n)
{
    ferry__ucx_begin_call(n);
    flush(n);
    ferry__ucx_end_call(n);
}

/* Operations that UCX does not end may still reach into memory that the
 * caller is about to have back. Without a worker nothing moves them and the
 * network has lost its way here; what they hold within UCX is leaked. */
static void cut_off(ucx__net *n)
{
    ferry__log(FERRY_LOG_WARN,
               "rank %d: ucx has not ended %zu operations within %lld ms: its "
               "worker is closed under them",
               n->comm->base.rank, n->outstanding, (long long)DROP_MS);
    ferry__ucx_stop_mover(n);
    ucp_worker_destroy(n->worker);
    n->worker = NULL;
    n->stale_key = NULL; /* went with the worker */
    n->outstanding = 0;
}

/* Closes all endpoints by force, which ends what they had under way. */
static void drop(tcp__comm *c)
{
    ferry__deadline until = ferry__deadline_in(
        ferry__fault_hit(FERRY__FAULT_UCX_DROP) ? 0 : DROP_MS);
    ucx__net *n = c->carrier_state;
    bool closed = false;

    if (!n->worker)
        return;
    ferry__ucx_begin_call(n);
    for (size_t i = 0; i < n->n_used; i++) {
        give_up(n, &n->lanes[i].head);
        for (size_t k = 0; k < UCX__WINDOW; k++)
            give_up(n, &n->lanes[i].ops[k]);
    }
    for (int32_t r = 0; r < c->base.world_size; r++) {
        ucx__peer *peer = &n->peers[r];
        ucp_request_param_t p;

        if (!peer->ep)
            continue;
        p = ferry__ucx_param(&peer->closing, false);
        p.op_attr_mask |= UCP_OP_ATTR_FIELD_FLAGS;
        p.flags = UCP_EP_CLOSE_FLAG_FORCE;
        ferry__ucx_posted(n, &peer->closing, ucp_ep_close_nbx(peer->ep, &p));
        peer->ep = NULL;
    }
    while (!closed && !ferry__deadline_passed(&until)) {
        ucp_worker_progress(n->worker);
        for (int32_t r = 0; r < c->base.world_size; r++) {
            ferry__ucx_reap(n, &n->peers[r].closing);
            ferry__ucx_reap(n, &n->peers[r].flush);
        }
        closed = all_ended(n);
    }
    if (!closed)
        cut_off(n);
    if (n->stale_key)
        ucp_rkey_destroy(n->stale_key);
    n->stale_key = NULL;
    ferry__ucx_end_call(n);
}

const tcp__bearer ferry__ucx_bearer = {.carry = carry, .drop = drop};
