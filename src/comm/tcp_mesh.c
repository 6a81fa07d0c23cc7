/* SPDX-License-Identifier: Apache-2.0 */
/* How a group meets. A rank connects to all lower ones, then takes the
 * higher ones; a rank waits only for lower ranks to answer, so the meeting
 * cannot lock up. On each connection both ends prove that they know the
 * secret (tcp_proof.h) before it belongs to the group.
 * Invariant: strangers are bounded in number and time. */
#include "comm/tcp_private.h"

#include "base/log_limit.h"
#include "comm/tcp_address.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define PENDING_MAX   64
#define PENDING_MS    INT64_C(10000)
#define ADDRESS_BYTES 300
/* A rank listens before it tells where; one that refuses for so long, or does
 * not answer, is gone. */
#define CALL_MS INT64_C(10000)
#define GONE_MS INT64_C(1500)

typedef struct pending {
    int fd;
    size_t bytes; /* of the message that comes */
    uint32_t step;
    ferry__deadline until;
    tcp__proof proof;
    tcp__proof_message message;
} pending;

typedef struct meeting {
    tcp__comm *c;
    const ferry__comm_tcp_options *o;
    size_t missing, n_pending;
    pending pending[PENDING_MAX];
    ferry__log_limit refused;
} meeting;

/* A wait of the meeting: asks the owner of the group. */
typedef struct asker {
    const ferry__comm_tcp_options *o;
    const char *what;
} asker;

static ferry_status ask(void *arg)
{
    const asker *a = arg;

    return a->o->check ? a->o->check(a->o->check_arg, a->what) : FERRY_OK;
}

/* ---- to the lower ranks ---- */

/* The proof follows each challenge at once, so that a connection never waits
 * for another one of the same rank. */
static ferry_status shake(const meeting *m, int32_t to, const int *fds,
                          const ferry__waiter *w)
{
    const tcp__identity *id = &m->c->identity;
    tcp__proof proofs[TCP__CHANNELS];

    for (uint32_t ch = 0; ch < TCP__CHANNELS; ch++) {
        FERRY_TRY(ferry__tcp_proof_call(&proofs[ch], to, ch));
        FERRY_TRY(
            ferry__tcp_proof_say(&proofs[ch], id, TCP__HELLO, fds[ch], w));
    }
    for (uint32_t ch = 0; ch < TCP__CHANNELS; ch++) {
        FERRY_TRY(
            ferry__tcp_proof_hear(&proofs[ch], id, TCP__CHALLENGE, fds[ch], w));
        FERRY_TRY(
            ferry__tcp_proof_say(&proofs[ch], id, TCP__PROOF, fds[ch], w));
    }
    for (uint32_t ch = 0; ch < TCP__CHANNELS; ch++)
        FERRY_TRY(
            ferry__tcp_proof_hear(&proofs[ch], id, TCP__WELCOME, fds[ch], w));
    return FERRY_OK;
}

/* A rank of an older generation may still hold the port and refuse, or a
 * dying one cut the connection: what cannot be waited out is a failure. */
static ferry_status call_peer(meeting *m, int32_t to,
                              const ferry__deadline *until)
{
    const ferry__comm_tcp_member *member = &m->o->members[to];
    char where[FERRY__TCP_TEXT_BYTES], what[ADDRESS_BYTES];
    char waits[ADDRESS_BYTES + 16];
    int64_t left = ferry__deadline_left_ms(until);
    ferry__deadline call = ferry__deadline_in(left < CALL_MS ? left : CALL_MS);
    asker a = {m->o, waits};
    ferry__waiter w = {ask, &a, call, what};
    ferry_status status = FERRY_OK;
    int fds[TCP__CHANNELS];
    size_t n = 0;

    snprintf(what, sizeof(what), "rank %d at %.270s", to,
             ferry__tcp_text(where, member->host, member->port));
    snprintf(waits, sizeof(waits), "waiting for %s", what);
    while (n < TCP__CHANNELS && status >= 0) {
        status = ferry__tcp_connect(member->host, member->port, &w, &fds[n]);
        n += status >= 0;
    }
    /* A lower rank may itself have others to call before it answers. */
    w.deadline = *until;
    if (status >= 0)
        status = shake(m, to, fds, &w);
    if (status >= 0) {
        memcpy(m->c->peers[to].fds, fds, sizeof(fds));
        return FERRY_OK;
    }
    while (n > 0)
        close(fds[--n]);
    return status;
}

/* ---- the higher ranks ---- */

static void tell(meeting *m, const char *why)
{
    ferry__log_limited(&m->refused, FERRY_LOG_WARN,
                       "rank %d: a connection is refused: %s", m->o->rank, why);
}

static void refuse(meeting *m, pending *p)
{
    tcp__proof_message no;
    const char *text = ferry_last_error();

    ferry__tcp_proof_refuse(no, text);
    (void)!send(p->fd, no, sizeof(no), MSG_DONTWAIT | MSG_NOSIGNAL);
    tell(m, text);
}

/* The few first bytes on a fresh connection fit its buffer. */
static ferry_status answer(const meeting *m, const pending *p, uint32_t step)
{
    tcp__proof_message mine;

    FERRY_TRY(ferry__tcp_proof_write(&p->proof, &m->c->identity, step, mine));
    if (send(p->fd, mine, sizeof(mine), MSG_DONTWAIT | MSG_NOSIGNAL) !=
        (ssize_t)sizeof(mine))
        return ferry_fail(FERRY_ECONN, "it does not take an answer");
    return FERRY_OK;
}

/* Only a rank and channel that are awaited, and not here yet. */
static ferry_status check_awaited(const meeting *m, const tcp__proof *p)
{
    if (p->peer <= m->o->rank || p->channel >= TCP__CHANNELS)
        return ferry_fail(FERRY_EMISMATCH,
                          "rank %d, channel %u are not awaited", p->peer,
                          p->channel);
    if (m->c->peers[p->peer].fds[p->channel] >= 0)
        return ferry_fail(FERRY_EEXIST, "rank %d claimed twice", p->peer);
    return FERRY_OK;
}

/* A whole message came. FERRY_DONE: the connection belongs to the group. */
static ferry_status take_message(meeting *m, pending *p)
{
    const tcp__identity *id = &m->c->identity;

    if (p->step == TCP__HELLO) {
        FERRY_TRY(ferry__tcp_proof_answer(&p->proof, id, p->message));
        FERRY_TRY(check_awaited(m, &p->proof));
        p->step = TCP__PROOF;
        p->bytes = 0;
        return answer(m, p, TCP__CHALLENGE);
    }
    FERRY_TRY(ferry__tcp_proof_read(&p->proof, id, TCP__PROOF, p->message));
    FERRY_TRY(check_awaited(m, &p->proof));
    FERRY_TRY(answer(m, p, TCP__WELCOME));
    m->c->peers[p->proof.peer].fds[p->proof.channel] = p->fd;
    m->missing--;
    return FERRY_DONE;
}

static void forget(meeting *m, size_t i, bool close_it)
{
    if (close_it)
        close(m->pending[i].fd);
    m->pending[i] = m->pending[--m->n_pending];
}

/* One that has not said all of a message. */
static void forget_silent(meeting *m, size_t i, const char *how)
{
    const pending *p = &m->pending[i];
    char why[80];

    snprintf(why, sizeof(why), "it %s %zu of %zu bytes of its %s", how,
             p->bytes, sizeof(p->message),
             p->step == TCP__HELLO ? "hello" : "proof");
    tell(m, why);
    forget(m, i, true);
}

static void read_pending(meeting *m, size_t i)
{
    pending *p = &m->pending[i];
    ferry_status status = FERRY_OK;
    ssize_t n;

    if (ferry__deadline_passed(&p->until)) {
        forget_silent(m, i, "gave in time only");
        return;
    }
    n = recv(p->fd, p->message + p->bytes, sizeof(p->message) - p->bytes,
             MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (n <= 0) {
        forget_silent(m, i, "ended after");
        return;
    }
    p->bytes += (size_t)n;
    /* Another protocol is known by its first bytes. */
    if (ferry__tcp_proof_is_foreign(p->message, p->bytes))
        status = ferry_fail(FERRY_EPEER, "it does not speak the protocol");
    else if (p->bytes == sizeof(p->message))
        status = take_message(m, p);
    if (status < 0)
        refuse(m, p);
    if (status != FERRY_OK)
        forget(m, i, status < 0);
}

static void take_pending(meeting *m, int listener)
{
    int fd;

    while (m->n_pending < PENDING_MAX &&
           ferry__tcp_accept(listener, &fd) == FERRY_OK)
        m->pending[m->n_pending++] =
            (pending){.fd = fd,
                      .step = TCP__HELLO,
                      .until = ferry__deadline_in(PENDING_MS)};
}

static ferry_status name_missing(const meeting *m, int64_t bound_ms)
{
    for (int32_t r = m->o->rank + 1; r < m->o->world_size; r++) {
        for (int ch = 0; ch < TCP__CHANNELS; ch++) {
            if (m->c->peers[r].fds[ch] < 0)
                return ferry_fail(FERRY_ETIMEOUT,
                                  "rank %d did not connect to rank %d within "
                                  "%lld ms",
                                  r, m->o->rank, (long long)bound_ms);
        }
    }
    return FERRY_OK;
}

/* A rank that was met and is gone again: the others will not come, if they
 * are not on their way already. */
static ferry_status look_at_met(const meeting *m, int64_t *gone_ns)
{
    for (int32_t r = 0; r < m->o->world_size; r++) {
        int fd = m->c->peers[r].fds[TCP__CONTROL];

        if (fd < 0 || !ferry__socket_hung_up(fd))
            continue;
        if (*gone_ns == 0)
            *gone_ns = ferry__now_ns();
        if (ferry__now_ns() - *gone_ns > GONE_MS * 1000000)
            return ferry_fail(FERRY_EPEER,
                              "rank %d left while the group was meeting", r);
    }
    return FERRY_OK;
}

static ferry_status await_higher(meeting *m, int listener,
                                 const ferry__deadline *until)
{
    struct pollfd polls[PENDING_MAX + 1];
    int64_t gone_ns = 0;

    while (m->missing > 0) {
        int64_t left = ferry__deadline_left_ms(until);
        asker a = {m->o, "waiting for the other ranks to connect"};

        if (left == 0)
            return name_missing(m, until->bound_ms);
        FERRY_TRY(ask(&a));
        FERRY_TRY(look_at_met(m, &gone_ns));
        polls[0] = (struct pollfd){m->n_pending < PENDING_MAX ? listener : -1,
                                   POLLIN, 0};
        for (size_t i = 0; i < m->n_pending; i++)
            polls[i + 1] = (struct pollfd){m->pending[i].fd, POLLIN, 0};
        if (poll(polls, m->n_pending + 1, left < 100 ? (int)left : 100) < 0 &&
            errno != EINTR)
            return ferry_fail(FERRY_EIO, "poll: %s", strerror(errno));
        for (size_t i = m->n_pending; i-- > 0;)
            read_pending(m, i);
        take_pending(m, listener);
        ferry__log_limit_flush(&m->refused, FERRY_LOG_WARN,
                               "a connection is refused", false);
    }
    return FERRY_OK;
}

ferry_status ferry__tcp_meet(tcp__comm *c,
                             const ferry__comm_tcp_options *options,
                             int listener, int64_t timeout_ms)
{
    ferry__deadline until = ferry__deadline_in(timeout_ms);
    meeting m = {.c = c, .o = options};
    ferry_status status = FERRY_OK;

    m.missing =
        (size_t)(options->world_size - options->rank - 1) * TCP__CHANNELS;
    for (int32_t to = 0; to < options->rank && status >= 0; to++)
        status = call_peer(&m, to, &until);
    if (status >= 0)
        status = await_higher(&m, listener, &until);
    while (m.n_pending > 0)
        forget_silent(&m, 0, "gave until the meeting ended only");
    ferry__log_limit_flush(&m.refused, FERRY_LOG_WARN,
                           "a connection is refused", true);
    return status;
}
