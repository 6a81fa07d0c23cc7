/* SPDX-License-Identifier: Apache-2.0 */
/* What the machine allows, without the library's transports: a shared ring,
 * a copy, a plain stream.
 * Invariant: every byte ends in each worker's own memory. */
#include "bench/broadcast.h"

#include "device/gate.h"

#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <pthread.h>

/* ---- a ring of 4 x 1 MiB: the root copies in, the workers copy out ---- */

#define RING_SLOTS 4
#define RING_SLOT  ((size_t)1 << 20)

typedef struct ring {
    ferry__gate filled;                   /* slots, by the root */
    ferry__gate taken[PARTY_WORKERS + 1]; /* slots, by each worker */
    _Alignas(64) char bytes[RING_SLOTS][RING_SLOT];
} ring;

static void await(ferry__gate *gate, uint32_t want)
{
    while (!ferry__gate_await(gate, want, 100))
        ;
}

static size_t piece_at(const party *p, size_t at)
{
    return p->bytes - at < RING_SLOT ? p->bytes - at : RING_SLOT;
}

static void ring_round(party *p, void *arg)
{
    ring *s = arg;
    uint32_t k = ferry__gate_value(p->rank ? &s->taken[p->rank] : &s->filled);

    for (size_t at = 0; at < p->bytes; at += RING_SLOT, k++) {
        char *slot = s->bytes[k % RING_SLOTS];

        if (p->rank > 0) {
            await(&s->filled, k + 1);
            party_copy(p->own + at, slot, piece_at(p, at));
            ferry__gate_raise(&s->taken[p->rank], k + 1);
            continue;
        }
        for (int r = 1; r <= p->n_workers && k >= RING_SLOTS; r++)
            await(&s->taken[r], k + 1 - RING_SLOTS);
        memcpy(slot, p->source + at, piece_at(p, at));
        ferry__gate_raise(&s->filled, k + 1);
    }
}

int bench_broadcast_ring(party *p)
{
    ring *s = mmap(NULL, sizeof(*s), PROT_READ | PROT_WRITE,
                   MAP_SHARED | MAP_ANONYMOUS, -1, 0);

    if (s == MAP_FAILED)
        party_die("no memory for the ring");
    memset(s, 0, sizeof(*s));
    if (party_fork(p) > 0) {
        party_open_own(p);
        party_work(p, ring_round, s);
        return 0;
    }
    party_open_source(p);
    party_lead(p, ring_round, s);
    return 0;
}

/* ---- memcpy by as many processes ---- */

static void memcpy_round(party *p, void *arg)
{
    (void)arg;
    if (p->rank == 0)
        return;
    for (size_t i = 0; i < p->n_tensors; i++)
        memcpy(p->own + p->tensors[i].at, p->source + p->tensors[i].at,
               p->tensors[i].size);
}

int bench_broadcast_memcpy(party *p)
{
    int rank = party_fork(p);

    if (rank > 0) {
        party_open_source(p);
        party_open_own(p);
        party_work(p, memcpy_round, NULL);
        return 0;
    }
    party_lead(p, memcpy_round, NULL);
    return 0;
}

/* ---- plain streams ---- */

typedef struct stream {
    int fds[PARTY_WORKERS + 1]; /* root: [rank]; worker: [0] */
    party *p;
    int rank; /* the writer's */
} stream;

static void *stream_write(void *arg)
{
    stream *s = arg;

    party_send(s->fds[s->rank], s->p->source, s->p->bytes);
    return NULL;
}

/* The root writes the first itself, so that one stream needs no thread. */
static void stream_round(party *p, void *arg)
{
    stream *s = arg, writers[PARTY_WORKERS + 1];
    pthread_t threads[PARTY_WORKERS + 1];

    if (p->rank > 0) {
        if (!party_recv(s->fds[0], p->own, p->bytes))
            party_die("the stream ended");
        return;
    }
    for (int r = 1; r <= p->n_workers; r++) {
        writers[r] = *s;
        writers[r].p = p;
        writers[r].rank = r;
        if (r > 1 &&
            pthread_create(&threads[r], NULL, stream_write, &writers[r]))
            party_die("no thread");
    }
    stream_write(&writers[1]);
    for (int r = 2; r <= p->n_workers; r++)
        pthread_join(threads[r], NULL);
}

static struct sockaddr_in address_of(const char *text, uint16_t port)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(port)};

    if (inet_pton(AF_INET, text, &a.sin_addr) != 1)
        party_die("%s is no address", text);
    return a;
}

static void stream_listen(party *p, stream *s)
{
    struct sockaddr_in a = address_of(p->addresses[p->rank], 0);
    socklen_t n = sizeof(a);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    uint16_t port;

    if (bind(fd, (struct sockaddr *)&a, sizeof(a)) != 0 || listen(fd, 1) != 0 ||
        getsockname(fd, (struct sockaddr *)&a, &n) != 0)
        party_die("listen on %s: %s", p->addresses[p->rank], strerror(errno));
    port = ntohs(a.sin_port);
    party_send(p->links[0], &port, sizeof(port));
    s->fds[0] = accept4(fd, NULL, NULL, SOCK_CLOEXEC);
    if (s->fds[0] < 0)
        party_die("accept: %s", strerror(errno));
    close(fd);
}

static void stream_connect(party *p, stream *s, int rank)
{
    struct sockaddr_in a;
    uint16_t port;
    int on = 1;

    if (!party_recv(p->links[rank], &port, sizeof(port)))
        party_die("worker %d is gone", rank);
    a = address_of(p->addresses[rank], port);
    s->fds[rank] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    setsockopt(s->fds[rank], IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    if (connect(s->fds[rank], (struct sockaddr *)&a, sizeof(a)) != 0)
        party_die("connect to %s: %s", p->addresses[rank], strerror(errno));
}

int bench_broadcast_stream(party *p)
{
    stream s = {.p = p};

    if (party_fork(p) > 0) {
        party_open_own(p);
        stream_listen(p, &s);
        party_work(p, stream_round, &s);
        return 0;
    }
    party_open_source(p);
    for (int r = 1; r <= p->n_workers; r++)
        stream_connect(p, &s, r);
    party_lead(p, stream_round, &s);
    return 0;
}
