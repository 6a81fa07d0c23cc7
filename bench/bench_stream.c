/* SPDX-License-Identifier: Apache-2.0 */
/* A tcp group's stream on one host beside what the machine allows, round
 * after round in turn; medians are printed.
 *   bench_stream [--rounds N] [--mib N] [--readers N] [--buffer-mib N]
 * stream: the root copies from memory of its own, every reader copies past
 * the cache into memory of its own. ring: the same through 4 slots of 1 MiB
 * without a library. memcpy: every reader copies as much from memory of its
 * own, all at once. Every byte is compared after the last round. */
#include "comm/stream.h"
#include "comm/tcp.h"

#include "base/clock.h"
#include "comm/tcp_address.h"
#include "core/copy_kernels.h"
#include "device/gate.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define T           INT64_C(60000)
#define ROUNDS_MAX  101
#define READERS_MAX 8
#define RING_SLOTS  4
#define RING_BYTES  ((size_t)1 << 20)

enum { STREAM, RING, MEMCPY, WAYS };
static const char *const names[WAYS] = {"stream", "ring", "memcpy"};

static int rounds = 9, readers = 1;
static size_t mib = 257, buffer_mib = 1024;

typedef struct shared {
    ferry__gate go;                     /* turns, by the root */
    ferry__gate ready[READERS_MAX + 1]; /* turns, by each rank */
    ferry__gate done[READERS_MAX + 1];
    ferry__gate filled; /* of the ring */
    ferry__gate taken[READERS_MAX + 1];
    _Alignas(4096) char slots[RING_SLOTS][RING_BYTES];
} shared;

typedef struct party {
    int rank;
    shared *sh;
    ferry__comm *c;
    ferry__stream *s;
    char *own, *source;
    size_t size;
    uint32_t ring_at;
} party;

static void die(const char *what)
{
    fprintf(stderr, "bench_stream: %s: %s\n", what, ferry_last_error());
    exit(1);
}

static void await(ferry__gate *gate, uint32_t want)
{
    while (!ferry__gate_await(gate, want, 100))
        ;
}

static void take(party *p, size_t at, const void *from, size_t n)
{
    ferry__stream_copy(p->own + at, from, n, true);
    ferry__stream_end();
}

/* ---- the ways ---- */

static void stream_round(party *p)
{
    const ferry__stream_ops *ops = p->s->ops;
    static uint64_t sizes[4096];
    size_t n_sizes = 0;

    for (size_t at = 0; at < p->size; at += buffer_mib << 20)
        sizes[n_sizes++] =
            p->size - at < buffer_mib << 20 ? p->size - at : buffer_mib << 20;
    if (ops->begin(p->s, sizes, n_sizes) < 0)
        die("begin");
    for (size_t at = 0, n; at < p->size; at += n) {
        const void *in;
        void *out;

        if (p->rank == 0) {
            if (ops->reserve(p->s, &out, &n) < 0)
                die("reserve");
            memcpy(out, p->source + at, n);
            if (ops->commit(p->s, n) < 0)
                die("commit");
        } else {
            if (ops->peek(p->s, &in, &n) < 0)
                die("peek");
            take(p, at, in, n);
            if (ops->release(p->s, n) < 0)
                die("release");
        }
    }
    if (ops->end(p->s) < 0)
        die("end");
}

static void ring_round(party *p)
{
    shared *sh = p->sh;

    for (size_t at = 0; at < p->size; at += RING_BYTES, p->ring_at++) {
        size_t left = p->size - at, n = left < RING_BYTES ? left : RING_BYTES;
        char *slot = sh->slots[p->ring_at % RING_SLOTS];

        if (p->rank == 0) {
            for (int r = 1; r <= readers; r++)
                await(&sh->taken[r], p->ring_at + 1 - RING_SLOTS);
            memcpy(slot, p->source + at, n);
            ferry__gate_raise(&sh->filled, p->ring_at + 1);
        } else {
            await(&sh->filled, p->ring_at + 1);
            take(p, at, slot, n);
            ferry__gate_raise(&sh->taken[p->rank], p->ring_at + 1);
        }
    }
}

static void memcpy_round(party *p)
{
    if (p->rank > 0)
        take(p, 0, p->source, p->size);
}

static void one_round(party *p, int way)
{
    if (way == STREAM)
        stream_round(p);
    else if (way == RING)
        ring_round(p);
    else
        memcpy_round(p);
}

/* ---- ranks ---- */

static void open_group(party *p, const int *listeners,
                       const ferry__comm_tcp_member *members)
{
    ferry__comm_tcp_options o = {.rank = p->rank,
                                 .world_size = readers + 1,
                                 .secret = "bench",
                                 .members = members};
    ferry__stream_options so = {.n_buffers = 2,
                                .buffer_bytes = (uint64_t)buffer_mib << 20,
                                .timeout_ms = T};

    if (ferry__comm_tcp_open(&o, listeners[p->rank], T, &p->c) < 0 ||
        ferry__stream_open(p->c, &so, &p->s) < 0)
        die("open");
}

static void check(const party *p)
{
    for (size_t i = 0; i < p->size; i++) {
        if (p->own[i] != (char)(i * 31 >> 7))
            die("wrong bytes");
    }
}

static void prepare(party *p)
{
    p->size = mib << 20;
    p->source = malloc(p->size);
    p->own = malloc(p->size);
    for (size_t i = 0; i < p->size; i++)
        p->source[i] = (char)(i * 31 >> 7);
    memset(p->own, 1, p->size);
}

static void be_reader(party *p)
{
    for (int turn = 0; turn < rounds * WAYS; turn++) {
        ferry__gate_raise(&p->sh->ready[p->rank], (uint32_t)turn + 1);
        await(&p->sh->go, (uint32_t)turn + 1);
        one_round(p, turn % WAYS);
        ferry__gate_raise(&p->sh->done[p->rank], (uint32_t)turn + 1);
    }
    check(p);
    ferry__stream_close(&p->s);
    ferry__comm_close(&p->c);
    exit(0);
}

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static void be_root(party *p)
{
    static double ms[WAYS][ROUNDS_MAX];

    for (int turn = 0; turn < rounds * WAYS; turn++) {
        int64_t began;

        for (int r = 1; r <= readers; r++)
            await(&p->sh->ready[r], (uint32_t)turn + 1);
        began = ferry__now_ns();
        ferry__gate_raise(&p->sh->go, (uint32_t)turn + 1);
        one_round(p, turn % WAYS);
        for (int r = 1; r <= readers; r++)
            await(&p->sh->done[r], (uint32_t)turn + 1);
        ms[turn % WAYS][turn / WAYS] = (double)(ferry__now_ns() - began) / 1e6;
    }
    for (int way = 0; way < WAYS; way++) {
        qsort(ms[way], (size_t)rounds, sizeof(ms[way][0]), by_size);
        printf("%-7s median %7.1f ms, best %7.1f ms\n", names[way],
               ms[way][rounds / 2], ms[way][0]);
    }
    printf("path %s, peak %llu MiB\n", p->s->path,
           (unsigned long long)p->s->peak_bytes >> 20);
    ferry__stream_close(&p->s);
    ferry__comm_close(&p->c);
}

static void run(void)
{
    ferry__comm_tcp_member members[READERS_MAX + 1] = {0};
    int listeners[READERS_MAX + 1], how, bad = 0;
    party p = {.sh = mmap(NULL, sizeof(shared), PROT_READ | PROT_WRITE,
                          MAP_SHARED | MAP_ANONYMOUS, -1, 0)};

    for (int r = 0; r <= readers; r++) {
        snprintf(members[r].host, sizeof(members[r].host), "127.0.0.1");
        if (ferry__tcp_listen("127.0.0.1", 0, &listeners[r], &members[r].port) <
            0)
            die("listen");
    }
    for (int r = 1; r <= readers; r++) {
        if (fork() == 0) {
            p.rank = r;
            prepare(&p);
            open_group(&p, listeners, members);
            be_reader(&p);
        }
    }
    prepare(&p);
    open_group(&p, listeners, members);
    be_root(&p);
    for (int r = 1; r <= readers; r++) {
        wait(&how);
        bad |= how;
    }
    if (bad)
        die("a reader failed");
}

int main(int argc, char **argv)
{
    for (int i = 1; i + 1 < argc; i += 2) {
        int v = atoi(argv[i + 1]);

        if (strcmp(argv[i], "--rounds") == 0 && v > 0 && v <= ROUNDS_MAX)
            rounds = v;
        else if (strcmp(argv[i], "--mib") == 0 && v > 0)
            mib = (size_t)v;
        else if (strcmp(argv[i], "--readers") == 0 && v > 0 && v <= READERS_MAX)
            readers = v;
        else if (strcmp(argv[i], "--buffer-mib") == 0 && v > 0)
            buffer_mib = (size_t)v;
        else
            die(argv[i]);
    }
    run();
    return 0;
}
