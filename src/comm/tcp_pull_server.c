/* SPDX-License-Identifier: Apache-2.0 */
/* Serves exposed memory: one thread, many connections, each with one question
 * at a time.
 * Invariant: memory is read under the lock that removes it, a piece at a
 * time; a connection is asked nothing before it has proved itself. */
#include "comm/tcp_pull.h"

#include "base/alloc.h"
#include "base/bytes.h"
#include "base/log_limit.h"
#include "base/thread.h"
#include "comm/tcp_address.h"
#include "comm/tcp_store_wire.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#define CLIENTS_MAX (2 * FERRY__COMM_TCP_WORLD)
#define PROOF_MS    INT64_C(10000)
#define PIECE_BYTES ((size_t)256 << 10)
#define POLL_MS     1000

typedef struct exposed {
    struct exposed *next;
    uint64_t id;
    const char *bytes;
    size_t size_bytes;
} exposed;

typedef struct client {
    int fd;
    uint32_t step; /* of the proof, the message that is awaited; 0: proved */
    ferry__deadline until; /* of the proof */
    tcp__proof proof;
    tcp__proof_message message;
    size_t came; /* of the message */
    unsigned char ask[TCP__PULL_ASK_BYTES];
    size_t asked;
    unsigned char answer[TCP__PULL_ANSWER_BYTES];
    size_t answered; /* of the answer's head; bytes follow */
    bool answering;
    uint64_t id, at, left;
} client;

struct tcp__pull_server {
    int listener, stop;
    int32_t port;
    tcp__identity identity;
    pthread_t thread;
    bool running;
    pthread_mutex_t lock;
    exposed *exposed;
    uint64_t last_id;
    client clients[CLIENTS_MAX];
    size_t n_clients;
    ferry__log_limit refused;
};

/* ---- what is exposed ---- */

static const exposed *find(const tcp__pull_server *s, uint64_t id)
{
    for (const exposed *e = s->exposed; e; e = e->next) {
        if (e->id == id)
            return e;
    }
    return NULL;
}

ferry_status ferry__tcp_pull_add(tcp__pull_server *s, const void *bytes,
                                 size_t size_bytes, uint64_t *out_id)
{
    exposed *e = ferry__alloc(sizeof(*e));

    if (!e)
        return FERRY_ENOMEM;
    pthread_mutex_lock(&s->lock);
    *e = (exposed){s->exposed, ++s->last_id, bytes, size_bytes};
    s->exposed = e;
    *out_id = e->id;
    pthread_mutex_unlock(&s->lock);
    return FERRY_OK;
}

void ferry__tcp_pull_remove(tcp__pull_server *s, const void *bytes)
{
    exposed *gone = NULL;

    pthread_mutex_lock(&s->lock);
    for (exposed **at = &s->exposed; *at; at = &(*at)->next) {
        if ((*at)->bytes == bytes) {
            gone = *at;
            *at = gone->next;
            break;
        }
    }
    pthread_mutex_unlock(&s->lock);
    ferry__free(gone);
}

/* ---- one connection ---- */

static bool say(const tcp__pull_server *s, const client *k, uint32_t step)
{
    tcp__proof_message mine;

    return ferry__tcp_proof_write(&k->proof, &s->identity, step, mine) >= 0 &&
           send(k->fd, mine, sizeof(mine), MSG_DONTWAIT | MSG_NOSIGNAL) ==
               (ssize_t)sizeof(mine);
}

static void tell(tcp__pull_server *s, const char *why)
{
    ferry__log_limited(&s->refused, FERRY_LOG_WARN,
                       "expose: a connection is refused: %s", why);
}

static bool refuse(tcp__pull_server *s, const client *k)
{
    tcp__proof_message no;

    ferry__tcp_proof_refuse(no, ferry_last_error());
    (void)!send(k->fd, no, sizeof(no), MSG_DONTWAIT | MSG_NOSIGNAL);
    tell(s, ferry_last_error());
    return false;
}

static bool take_message(tcp__pull_server *s, client *k)
{
    k->came = 0;
    if (k->step == TCP__HELLO) {
        if (ferry__tcp_proof_answer(&k->proof, &s->identity, k->message) < 0)
            return refuse(s, k);
        k->step = TCP__PROOF;
        return k->proof.channel == TCP__PULLS && say(s, k, TCP__CHALLENGE);
    }
    if (ferry__tcp_proof_read(&k->proof, &s->identity, TCP__PROOF, k->message) <
        0)
        return refuse(s, k);
    k->step = 0;
    return say(s, k, TCP__WELCOME);
}

/* False: the connection is to be closed. */
static bool read_message(tcp__pull_server *s, client *k)
{
    ssize_t n;

    if (ferry__deadline_passed(&k->until))
        return false;
    n = recv(k->fd, k->message + k->came, sizeof(k->message) - k->came,
             MSG_DONTWAIT);
    if (n <= 0)
        return n < 0 && (errno == EAGAIN || errno == EINTR);
    k->came += (size_t)n;
    if (ferry__tcp_proof_is_foreign(k->message, k->came)) {
        tell(s, "it does not speak the protocol");
        return false;
    }
    return k->came < sizeof(k->message) || take_message(s, k);
}

static void answer(tcp__pull_server *s, client *k)
{
    const unsigned char *p = k->ask;
    uint64_t offset = ferry__store_u64(p + 16);
    uint64_t size = ferry__store_u64(p + 24);
    ferry_status status = FERRY_OK;
    const exposed *e;

    k->id = ferry__store_u64(p + 8);
    pthread_mutex_lock(&s->lock);
    e = find(s, k->id);
    if (!e)
        status = FERRY_EMISMATCH;
    else if (offset > e->size_bytes || size > e->size_bytes - offset)
        status = FERRY_EINVAL;
    pthread_mutex_unlock(&s->lock);
    k->at = offset;
    k->left = status == FERRY_OK ? size : 0;
    ferry__store_put_u32(k->answer, TCP__PULL_MAGIC);
    ferry__store_put_u32(k->answer + 4, (uint32_t)status);
    ferry__store_put_u64(k->answer + 8, k->left);
    k->answered = k->asked = 0;
    k->answering = true;
}

static bool read_ask(tcp__pull_server *s, client *k)
{
    ssize_t n =
        recv(k->fd, k->ask + k->asked, sizeof(k->ask) - k->asked, MSG_DONTWAIT);

    if (n <= 0)
        return n < 0 && (errno == EAGAIN || errno == EINTR);
    k->asked += (size_t)n;
    if (k->asked < sizeof(k->ask))
        return true;
    if (ferry__read_u32(k->ask) != TCP__PULL_MAGIC)
        return false;
    answer(s, k);
    return true;
}

static bool write_head(client *k)
{
    ssize_t n =
        send(k->fd, k->answer + k->answered, sizeof(k->answer) - k->answered,
             MSG_DONTWAIT | MSG_NOSIGNAL | (k->left > 0 ? MSG_MORE : 0));

    if (n < 0)
        return errno == EAGAIN || errno == EINTR;
    k->answered += (size_t)n;
    return true;
}

static bool write_piece(tcp__pull_server *s, client *k)
{
    size_t size = k->left < PIECE_BYTES ? (size_t)k->left : PIECE_BYTES;
    const exposed *e;
    ssize_t n = -1;
    int error = 0;

    pthread_mutex_lock(&s->lock);
    e = find(s, k->id);
    if (e) {
        n = send(k->fd, e->bytes + k->at, size, MSG_DONTWAIT | MSG_NOSIGNAL);
        error = errno;
    }
    pthread_mutex_unlock(&s->lock);
    if (n < 0)
        return e && (error == EAGAIN || error == EINTR);
    k->at += (uint64_t)n;
    k->left -= (uint64_t)n;
    return true;
}

static bool turn(tcp__pull_server *s, client *k)
{
    bool good;

    if (k->step != 0)
        return read_message(s, k);
    if (!k->answering)
        return read_ask(s, k);
    good = k->answered < sizeof(k->answer) ? write_head(k) : write_piece(s, k);
    k->answering = k->left > 0 || k->answered < sizeof(k->answer);
    return good;
}

/* ---- the thread ---- */

static void take_clients(tcp__pull_server *s)
{
    int fd;

    while (s->n_clients < CLIENTS_MAX &&
           ferry__tcp_accept(s->listener, &fd) == FERRY_OK)
        s->clients[s->n_clients++] =
            (client){.fd = fd,
                     .step = TCP__HELLO,
                     .until = ferry__deadline_in(PROOF_MS)};
}

static nfds_t fill_polls(const tcp__pull_server *s, struct pollfd *polls)
{
    bool full = s->n_clients == CLIENTS_MAX;
    nfds_t k = 0;

    polls[k++] = (struct pollfd){s->stop, POLLIN, 0};
    polls[k++] = (struct pollfd){full ? -1 : s->listener, POLLIN, 0};
    for (size_t i = 0; i < s->n_clients; i++) {
        const client *c = &s->clients[i];

        polls[k++] = (struct pollfd){c->fd, c->answering ? POLLOUT : POLLIN, 0};
    }
    return k;
}

static void *serve(void *arg)
{
    struct pollfd polls[CLIENTS_MAX + 2];
    tcp__pull_server *s = arg;
    nfds_t n;

    for (;;) {
        n = fill_polls(s, polls);
        if (poll(polls, n, POLL_MS) < 0 && errno != EINTR)
            return NULL;
        if (polls[0].revents)
            return NULL;
        for (size_t i = s->n_clients; i-- > 0;) {
            if (turn(s, &s->clients[i]))
                continue;
            close(s->clients[i].fd);
            s->clients[i] = s->clients[--s->n_clients];
        }
        take_clients(s);
        ferry__log_limit_flush(&s->refused, FERRY_LOG_WARN,
                               "expose: a connection is refused", false);
    }
}

static ferry_status start(tcp__pull_server *s, const char *host)
{
    FERRY_TRY(ferry__tcp_listen(host, 0, &s->listener, &s->port));
    s->stop = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (s->stop < 0)
        return ferry_fail(FERRY_EIO, "expose: %s", strerror(errno));
    FERRY_TRY(ferry__thread_start(&s->thread, "ferry-pull", serve, s));
    s->running = true;
    return FERRY_OK;
}

ferry_status ferry__tcp_pull_serve(const char *host, const tcp__identity *id,
                                   tcp__pull_server **out)
{
    tcp__pull_server *s = ferry__alloc(sizeof(*s));
    ferry_status status;

    if (!s)
        return FERRY_ENOMEM;
    s->listener = s->stop = -1;
    s->identity = *id;
    pthread_mutex_init(&s->lock, NULL);
    status = start(s, host);
    if (status < 0) {
        ferry__tcp_pull_server_close(&s);
        return status;
    }
    *out = s;
    return FERRY_OK;
}

void ferry__tcp_pull_server_close(tcp__pull_server **server)
{
    tcp__pull_server *s = *server;

    if (!s)
        return;
    if (s->running) {
        eventfd_write(s->stop, 1);
        pthread_join(s->thread, NULL);
    }
    ferry__log_limit_flush(&s->refused, FERRY_LOG_WARN,
                           "expose: a connection is refused", true);
    for (size_t i = 0; i < s->n_clients; i++)
        close(s->clients[i].fd);
    while (s->exposed)
        ferry__tcp_pull_remove(s, s->exposed->bytes);
    if (s->listener >= 0)
        close(s->listener);
    if (s->stop >= 0)
        close(s->stop);
    pthread_mutex_destroy(&s->lock);
    explicit_bzero(&s->identity, sizeof(s->identity));
    ferry__free(s);
    *server = NULL;
}

int32_t ferry__tcp_pull_port(const tcp__pull_server *s)
{
    return s->port;
}
