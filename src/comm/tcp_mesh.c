/* SPDX-License-Identifier: Apache-2.0 */
/* How a group meets. A rank connects to all lower ones, then takes the
 * higher ones; a rank waits only for lower ranks to answer, so the meeting
 * cannot lock up.
 *
 * Hello, 104 bytes, little-endian: 1. u32 magic "FTCP"  2. u32 version
 * 3. u64 generation  4. u32 world size  5. u32 rank of the sender  6. u32
 * rank meant  7. u32 channel  8. u64 0  9. 64 bytes secret, NUL padded.
 * The one that connects sends first; the other sends its own hello only to
 * one that showed the secret, else a refusal: u32 "FNO!", 100 bytes text.
 * Invariant: strangers are bounded in number and time. */
#include "comm/tcp_private.h"

#include "base/bytes.h"
#include "base/log.h"
#include "comm/tcp_address.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define MAGIC         0x50435446u
#define REFUSAL       0x214f4e46u
#define HELLO_BYTES   104
#define SECRET_AT     40
#define PENDING_MAX   64
#define PENDING_MS    INT64_C(10000)
#define ADDRESS_BYTES 300
/* A rank listens before it tells where; one that refuses for so long, or does
 * not answer, is gone. */
#define CALL_MS INT64_C(10000)
#define GONE_MS INT64_C(1500)

typedef struct pending {
    int fd;
    size_t bytes;
    ferry__deadline until;
    unsigned char hello[HELLO_BYTES];
} pending;

typedef struct meeting {
    tcp__comm *c;
    const ferry__comm_tcp_options *o;
    char secret[FERRY__COMM_TCP_SECRET + 1];
    size_t missing, n_pending;
    pending pending[PENDING_MAX];
} meeting;

static void make_hello(const meeting *m, int32_t to, int channel,
                       unsigned char *h)
{
    memset(h, 0, HELLO_BYTES);
    ferry__write_u32(h, MAGIC);
    ferry__write_u32(h + 4, FERRY__COMM_TCP_VERSION);
    ferry__write_u32(h + 8, (uint32_t)m->o->generation);
    ferry__write_u32(h + 12, (uint32_t)(m->o->generation >> 32));
    ferry__write_u32(h + 16, (uint32_t)m->o->world_size);
    ferry__write_u32(h + 20, (uint32_t)m->o->rank);
    ferry__write_u32(h + 24, (uint32_t)to);
    ferry__write_u32(h + 28, (uint32_t)channel);
    memcpy(h + SECRET_AT, m->secret, FERRY__COMM_TCP_SECRET);
}

/* Looks at every byte whatever the first ones are. */
static bool secret_is_right(const meeting *m, const unsigned char *h)
{
    unsigned char differs = 0;

    for (size_t i = 0; i < FERRY__COMM_TCP_SECRET; i++)
        differs |=
            (unsigned char)(h[SECRET_AT + i] ^ (unsigned char)m->secret[i]);
    return differs == 0;
}

static ferry_status check_hello(const meeting *m, const unsigned char *h)
{
    uint64_t generation =
        ferry__read_u32(h + 8) | (uint64_t)ferry__read_u32(h + 12) << 32;

    if (ferry__read_u32(h) != MAGIC)
        return ferry_fail(FERRY_EPEER, "it does not speak the protocol");
    if (ferry__read_u32(h + 4) != FERRY__COMM_TCP_VERSION)
        return ferry_fail(FERRY_EVERSION, "protocol version %u, this is %d",
                          ferry__read_u32(h + 4), FERRY__COMM_TCP_VERSION);
    if (!secret_is_right(m, h))
        return ferry_fail(FERRY_EAUTH, "the secret is wrong");
    if (generation != m->o->generation)
        return ferry_fail(FERRY_EMISMATCH, "generation %llu, this is %llu",
                          (unsigned long long)generation,
                          (unsigned long long)m->o->generation);
    if (ferry__read_u32(h + 16) != (uint32_t)m->o->world_size)
        return ferry_fail(FERRY_EMISMATCH, "world size %u, this is %d",
                          ferry__read_u32(h + 16), m->o->world_size);
    if (ferry__read_u32(h + 24) != (uint32_t)m->o->rank)
        return ferry_fail(FERRY_EMISMATCH, "it looks for rank %u, this is %d",
                          ferry__read_u32(h + 24), m->o->rank);
    return FERRY_OK;
}

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

static ferry_status shake(meeting *m, int32_t to, int channel, int fd,
                          const ferry__waiter *w)
{
    unsigned char h[HELLO_BYTES];

    make_hello(m, to, channel, h);
    FERRY_TRY(ferry__send_all(fd, h, sizeof(h), w));
    FERRY_TRY(ferry__recv_all(fd, h, sizeof(h), w));
    if (ferry__read_u32(h) == REFUSAL) {
        h[HELLO_BYTES - 1] = '\0';
        return ferry_fail(FERRY_EPEER, "%s refused this rank: %s", w->what,
                          (char *)h + 8);
    }
    if (check_hello(m, h) < 0 || ferry__read_u32(h + 20) != (uint32_t)to)
        return ferry_fail(FERRY_EAUTH, "%s: what answers there is not it: %s",
                          w->what,
                          ferry__read_u32(h) == MAGIC ? ferry_last_error()
                                                      : "another protocol");
    return FERRY_OK;
}

/* A rank of an older generation may still hold the port and refuse, or a
 * dying one cut the connection: what cannot be waited out is a failure. */
static ferry_status call_peer(meeting *m, int32_t to, int channel,
                              const ferry__deadline *until)
{
    const ferry__comm_tcp_member *member = &m->o->members[to];
    char where[FERRY__TCP_TEXT_BYTES], what[ADDRESS_BYTES];
    int64_t left = ferry__deadline_left_ms(until);
    ferry__deadline call = ferry__deadline_in(left < CALL_MS ? left : CALL_MS);
    asker a = {m->o, what};
    ferry__waiter w = {ask, &a, call, what};
    ferry_status status;
    int fd = -1;

    snprintf(what, sizeof(what), "rank %d at %.270s", to,
             ferry__tcp_text(where, member->host, member->port));
    FERRY_TRY(ferry__tcp_connect(member->host, member->port, &w, &fd));
    /* A lower rank may itself have others to call before it answers. */
    w.deadline = *until;
    status = shake(m, to, channel, fd, &w);
    if (status < 0) {
        close(fd);
        return status;
    }
    m->c->peers[to].fds[channel] = fd;
    return FERRY_OK;
}

/* ---- the higher ranks ---- */

static void refuse(const meeting *m, pending *p)
{
    unsigned char no[HELLO_BYTES] = {0};
    const char *text = ferry_last_error();

    ferry__write_u32(no, REFUSAL);
    memcpy(no + 8, text, strnlen(text, HELLO_BYTES - 9));
    (void)!send(p->fd, no, sizeof(no), MSG_DONTWAIT | MSG_NOSIGNAL);
    ferry__log(FERRY_LOG_WARN, "rank %d: a connection is refused: %s",
               m->o->rank, text);
}

/* True when the connection now belongs to the group. */
static bool admit(meeting *m, pending *p)
{
    unsigned char mine[HELLO_BYTES];
    uint32_t rank = ferry__read_u32(p->hello + 20),
             channel = ferry__read_u32(p->hello + 28);

    if (check_hello(m, p->hello) < 0) {
        refuse(m, p);
        return false;
    }
    if (rank <= (uint32_t)m->o->rank || rank >= (uint32_t)m->o->world_size ||
        channel >= TCP__CHANNELS) {
        ferry_fail(FERRY_EMISMATCH, "rank %u, channel %u are not awaited", rank,
                   channel);
        refuse(m, p);
        return false;
    }
    if (m->c->peers[rank].fds[channel] >= 0) {
        ferry_fail(FERRY_EEXIST, "rank %u claimed twice", rank);
        refuse(m, p);
        return false;
    }
    make_hello(m, (int32_t)rank, (int)channel, mine);
    /* The first bytes on a fresh connection fit its buffer. */
    if (send(p->fd, mine, sizeof(mine), MSG_DONTWAIT | MSG_NOSIGNAL) !=
        (ssize_t)sizeof(mine))
        return false;
    m->c->peers[rank].fds[channel] = p->fd;
    m->missing--;
    return true;
}

static void forget(meeting *m, size_t i, bool close_it)
{
    if (close_it)
        close(m->pending[i].fd);
    m->pending[i] = m->pending[--m->n_pending];
}

static void read_pending(meeting *m, size_t i)
{
    pending *p = &m->pending[i];
    ssize_t n =
        recv(p->fd, p->hello + p->bytes, HELLO_BYTES - p->bytes, MSG_DONTWAIT);

    if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
        if (ferry__deadline_passed(&p->until))
            forget(m, i, true);
        return;
    }
    if (n <= 0) {
        forget(m, i, true);
        return;
    }
    p->bytes += (size_t)n;
    /* Another protocol is known by its first bytes. */
    if (p->bytes >= 4 && ferry__read_u32(p->hello) != MAGIC) {
        check_hello(m, p->hello);
        refuse(m, p);
        forget(m, i, true);
    } else if (p->bytes == HELLO_BYTES) {
        forget(m, i, !admit(m, p));
    }
}

static void take_pending(meeting *m, int listener)
{
    int fd;

    while (m->n_pending < PENDING_MAX &&
           ferry__tcp_accept(listener, &fd) == FERRY_OK)
        m->pending[m->n_pending++] =
            (pending){.fd = fd, .until = ferry__deadline_in(PENDING_MS)};
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

    memcpy(m.secret, options->secret,
           strnlen(options->secret, FERRY__COMM_TCP_SECRET));
    m.missing =
        (size_t)(options->world_size - options->rank - 1) * TCP__CHANNELS;
    for (int32_t to = 0; to < options->rank && status >= 0; to++) {
        for (int ch = 0; ch < TCP__CHANNELS && status >= 0; ch++)
            status = call_peer(&m, to, ch, &until);
    }
    if (status >= 0)
        status = await_higher(&m, listener, &until);
    while (m.n_pending > 0)
        forget(&m, 0, true);
    return status;
}
