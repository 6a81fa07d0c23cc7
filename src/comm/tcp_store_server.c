/* SPDX-License-Identifier: Apache-2.0 */
/* The store's sockets: one thread, one poll over all of them.
 * Invariant: only the thread touches the state; a client that misbehaves or
 * does not read is dropped and the others go on. */
#include "comm/tcp_store.h"

#include "base/alloc.h"
#include "base/log.h"
#include "base/log_limit.h"
#include "base/thread.h"
#include "comm/tcp_address.h"
#include "comm/tcp_store_state.h"

#include <errno.h>
#include <poll.h>
#include <stdatomic.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#define READ_BYTES ((size_t)64 << 10)
/* A connection that has not greeted by then is no client. */
#define GREET_MS INT64_C(10000)
/* Reads of one client before the others have their turn. */
#define TURNS_MAX 16
#define IDLE_MS   10000
/* How soon lines that were left out are told of. */
#define TELL_MS 1000

typedef struct client {
    int fd;
    ferry__store_peer *peer;
    ferry__deadline greet_by;
} client;

struct ferry__store_server {
    pthread_t thread;
    atomic_bool ends;
    int listener, wake;
    size_t n_clients;
    bool full;
    ferry__log_limit dropped, crowded, refused; /* lines of each kind */
    ferry__store_state state;
    client clients[FERRY__STORE_CLIENTS_MAX];
    struct pollfd polls[FERRY__STORE_CLIENTS_MAX + 2];
    unsigned char bytes[READ_BYTES];
};

static void drop(ferry__store_server *s, size_t i)
{
    close(s->clients[i].fd);
    ferry__store_peer_remove(&s->state, s->clients[i].peer);
    s->clients[i] = s->clients[--s->n_clients];
}

static void take_clients(ferry__store_server *s)
{
    ferry__store_peer *peer;
    int fd;

    while (s->n_clients < FERRY__STORE_CLIENTS_MAX) {
        ferry_status status = ferry__tcp_accept(s->listener, &fd);

        if (status == FERRY_DONE)
            return;
        if (status < 0) {
            ferry__log_limited(&s->refused, FERRY_LOG_WARN, "store: %s",
                               ferry_last_error());
            ferry__sleep_ms(10); /* out of descriptors: no spinning on it */
            return;
        }
        if (ferry__store_peer_add(&s->state, &peer) < 0) {
            close(fd);
            return;
        }
        s->clients[s->n_clients++] =
            (client){fd, peer, ferry__deadline_in(GREET_MS)};
    }
}

/* False when the client is to be dropped. */
static bool read_client(ferry__store_server *s, client *c)
{
    for (int turn = 0; turn < TURNS_MAX; turn++) {
        ssize_t n = recv(c->fd, s->bytes, READ_BYTES, MSG_DONTWAIT);

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return errno == EAGAIN;
        if (n == 0)
            return false;
        if (ferry__store_feed(&s->state, c->peer, s->bytes, (size_t)n) < 0) {
            ferry__log_limited(&s->dropped, FERRY_LOG_WARN,
                               "store: a client is dropped: %s",
                               ferry_last_error());
            return false;
        }
        if ((size_t)n < READ_BYTES)
            break;
    }
    return true;
}

static bool write_client(ferry__store_server *s, client *c)
{
    while (c->peer->out.length > 0) {
        ssize_t n = send(c->fd, c->peer->out.data, c->peer->out.length,
                         MSG_DONTWAIT | MSG_NOSIGNAL);

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return errno == EAGAIN;
        ferry__store_taken(&s->state, c->peer, (size_t)n);
    }
    return true;
}

/* True while there is more to tell. */
static bool tell_left_out(ferry__store_server *s, bool last)
{
    bool more = false;

    more |= ferry__log_limit_flush(&s->dropped, FERRY_LOG_WARN,
                                   "store: a client is dropped", last);
    more |= ferry__log_limit_flush(&s->crowded, FERRY_LOG_WARN,
                                   "store: full, more must wait", last);
    more |= ferry__log_limit_flush(&s->refused, FERRY_LOG_WARN,
                                   "store: a client was not taken", last);
    return more;
}

static int fill_polls(ferry__store_server *s)
{
    int timeout = tell_left_out(s, false) ? TELL_MS : IDLE_MS;
    bool room = s->n_clients < FERRY__STORE_CLIENTS_MAX;

    if (!room && !s->full)
        ferry__log_limited(&s->crowded, FERRY_LOG_WARN,
                           "store: %zu clients, more must wait", s->n_clients);
    s->full = !room;
    s->polls[0] = (struct pollfd){s->wake, POLLIN, 0};
    s->polls[1] = (struct pollfd){room ? s->listener : -1, POLLIN, 0};
    for (size_t i = 0; i < s->n_clients; i++) {
        client *c = &s->clients[i];
        short out = c->peer->out.length > 0 ? POLLOUT : 0;

        s->polls[i + 2] = (struct pollfd){c->fd, POLLIN | out, 0};
        if (!c->peer->greeted) {
            int64_t left = ferry__deadline_left_ms(&c->greet_by);

            timeout = left < timeout ? (int)left : timeout;
        }
    }
    return timeout;
}

static void *serve(void *arg)
{
    ferry__store_server *s = arg;

    while (!atomic_load(&s->ends)) {
        int timeout = fill_polls(s);

        if (poll(s->polls, s->n_clients + 2, timeout) < 0 && errno != EINTR) {
            ferry__log(FERRY_LOG_ERROR, "store: poll failed");
            ferry__sleep_ms(100);
            continue;
        }
        /* From the back, so that a dropped one's place is taken by one that
         * was looked at. */
        for (size_t i = s->n_clients; i-- > 0;) {
            client *c = &s->clients[i];
            bool good = true;

            if (s->polls[i + 2].revents)
                good = read_client(s, c);
            if (!c->peer->greeted && ferry__deadline_passed(&c->greet_by))
                good = false;
            if (!good)
                drop(s, i);
        }
        /* What one sent may answer another. */
        for (size_t i = s->n_clients; i-- > 0;) {
            if (!write_client(s, &s->clients[i]))
                drop(s, i);
        }
        if (s->polls[1].revents)
            take_clients(s);
    }
    tell_left_out(s, true);
    return NULL;
}

static void release(ferry__store_server *s)
{
    while (s->n_clients > 0)
        drop(s, 0);
    ferry__store_state_free(&s->state);
    if (s->listener >= 0)
        close(s->listener);
    if (s->wake >= 0)
        close(s->wake);
    ferry__free(s);
}

static ferry_status start(ferry__store_server *s, const char *host,
                          int32_t port, int32_t *out_port)
{
    FERRY_TRY(ferry__tcp_listen(host, port, &s->listener, out_port));
    s->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (s->wake < 0)
        return ferry_fail(FERRY_EIO, "store: no event descriptor");
    return ferry__thread_start(&s->thread, "ferry-store", serve, s);
}

ferry_status ferry__store_serve(const char *host, int32_t port,
                                int32_t *out_port, ferry__store_server **out)
{
    ferry__store_server *s = ferry__alloc(sizeof(*s));
    ferry_status status;
    int32_t bound;

    if (!s)
        return FERRY_ENOMEM;
    s->listener = s->wake = -1;
    status = start(s, host, port, &bound);
    if (status < 0) {
        release(s);
        return status;
    }
    *out_port = bound;
    *out = s;
    return FERRY_OK;
}

void ferry__store_server_close(ferry__store_server **server)
{
    ferry__store_server *s = server ? *server : NULL;

    if (!s)
        return;
    atomic_store(&s->ends, true);
    eventfd_write(s->wake, 1);
    pthread_join(s->thread, NULL);
    release(s);
    *server = NULL;
}
