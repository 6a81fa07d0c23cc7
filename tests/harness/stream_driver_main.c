/* SPDX-License-Identifier: Apache-2.0 */
/* One rank of a tcp group's stream as a process, for tests over several
 * hosts and for figures.
 *   stream_driver_main RANK WORLD STORE_HOST STORE_PORT ADVERTISE MIB ROUNDS
 *       [HOST_NAME [BUFFER_MIB]]
 * Rank 0 serves the store and streams MIB mebibytes ROUNDS times from memory
 * of its own; the others copy them past the cache into theirs. Every byte is
 * checked. Rank 0 prints the best round as "seconds S remote R local L path
 * P peak B empty E", E the seconds of an empty round. */
#include "comm/rendezvous.h"
#include "comm/stream.h"

#include "base/clock.h"
#include "core/copy_kernels.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define T          INT64_C(60000)
#define N_BUFFERS  2
#define EMPTY_RUNS 1000

typedef struct run {
    ferry__comm *c;
    ferry__stream *s;
    uint64_t *words; /* of this rank */
    size_t size;
    uint64_t *sizes;
    size_t n_sizes;
} run;

static int bad(const char *what)
{
    fprintf(stderr, "%s: %s\n", what, ferry_last_error());
    return 1;
}

static uint64_t word_of(size_t i, uint64_t seed)
{
    return (i + seed) * UINT64_C(0x9e3779b97f4a7c15);
}

/* Large runs pass the cache by as they do in a worker. */
static ferry_status make_or_use(const run *r)
{
    const ferry__stream_ops *ops = r->s->ops;
    char *own = (char *)r->words;

    for (size_t at = 0; at < r->size;) {
        const void *in;
        void *out;
        size_t n;

        if (r->c->rank == 0) {
            FERRY_TRY(ops->reserve(r->s, &out, &n));
            memcpy(out, own + at, n);
            FERRY_TRY(ops->commit(r->s, n));
        } else {
            FERRY_TRY(ops->peek(r->s, &in, &n));
            ferry__stream_copy(own + at, in, n, true);
            ferry__stream_end();
            FERRY_TRY(ops->release(r->s, n));
        }
        at += n;
    }
    return FERRY_OK;
}

static ferry_status one_round(const run *r)
{
    FERRY_TRY(r->s->ops->begin(r->s, r->sizes, r->n_sizes));
    FERRY_TRY(make_or_use(r));
    return r->s->ops->end(r->s);
}

static int timed_round(run *r, uint64_t seed, double *best)
{
    size_t n = r->size / 8;
    int64_t began;
    double seconds;

    if (r->c->rank == 0) {
        for (size_t i = 0; i < n; i++)
            r->words[i] = word_of(i, seed);
    }
    if (r->c->ops->barrier(r->c, T) < 0)
        return bad("barrier");
    began = ferry__now_ns();
    if (one_round(r) < 0)
        return bad("stream");
    seconds = (double)(ferry__now_ns() - began) / 1e9;
    *best = seconds < *best ? seconds : *best;
    for (size_t i = 0; i < n; i++) {
        if (r->words[i] != word_of(i, seed)) {
            fprintf(stderr, "rank %d: wrong bytes at %zu\n", r->c->rank, 8 * i);
            return 1;
        }
    }
    return 0;
}

static int empty_rounds(run *r, double *out)
{
    int64_t began = ferry__now_ns();

    for (int i = 0; i < EMPTY_RUNS; i++) {
        if (r->s->ops->begin(r->s, NULL, 0) < 0 || r->s->ops->end(r->s) < 0)
            return bad("empty round");
    }
    *out = (double)(ferry__now_ns() - began) / 1e9 / EMPTY_RUNS;
    return 0;
}

static int rounds(run *r, int n_rounds)
{
    double best = 1e9, empty = 0;
    uint64_t remote = 0, local = 0, r0, l0;

    for (int i = 0; i < n_rounds; i++) {
        ferry__comm_tcp_egress(r->c, &r0, &l0);
        if (timed_round(r, (uint64_t)i, &best))
            return 1;
        ferry__comm_tcp_egress(r->c, &remote, &local);
    }
    if (empty_rounds(r, &empty))
        return 1;
    if (r->c->rank == 0)
        printf("seconds %.4f remote %llu local %llu path %s peak %llu empty "
               "%.7f\n",
               best, (unsigned long long)(remote - r0),
               (unsigned long long)(local - l0), r->s->path,
               (unsigned long long)r->s->peak_bytes, empty);
    return 0;
}

static int stream_main(run *r, int n_rounds, size_t buffer_mib)
{
    ferry__stream_options o = {.root = 0,
                               .n_buffers = N_BUFFERS,
                               .buffer_bytes = (uint64_t)buffer_mib << 20,
                               .timeout_ms = T,
                               .no_progress_ms = T};
    int rc;

    r->n_sizes = (r->size + (buffer_mib << 20) - 1) / (buffer_mib << 20);
    r->sizes = calloc(r->n_sizes, sizeof(*r->sizes));
    r->words = malloc(r->size);
    for (size_t i = 0; i < r->n_sizes; i++) {
        size_t left = r->size - i * (buffer_mib << 20);

        r->sizes[i] = left < buffer_mib << 20 ? left : buffer_mib << 20;
    }
    memset(r->words, 1, r->size);
    if (ferry__stream_open(r->c, &o, &r->s) < 0)
        return bad("stream");
    rc = rounds(r, n_rounds);
    ferry__stream_close(&r->s);
    free(r->words);
    free(r->sizes);
    return rc;
}

static int rank_main(int argc, char **a)
{
    ferry__rendezvous_tcp v = {.base = {atoi(a[0]), atoi(a[1]), 1, T},
                               .host = "",
                               .advertise = a[4],
                               .host_name = argc > 7 ? a[7] : "",
                               .secret = "test"};
    run r = {.size = (size_t)atoi(a[5]) << 20};
    ferry__store_server *server = NULL;
    ferry__store *store = NULL;
    int32_t port;
    int rc;

    if (v.base.rank == 0 &&
        ferry__store_serve("", atoi(a[3]), &port, &server) < 0)
        return bad("store");
    if (ferry__store_open(a[2], atoi(a[3]), T, &store) < 0 ||
        ferry__rendezvous_tcp_open(store, &v, &r.c) < 0)
        return bad("meeting");
    rc = stream_main(&r, atoi(a[6]), argc > 8 ? (size_t)atoi(a[8]) : 1024);
    ferry__comm_close(&r.c);
    ferry__store_close(&store);
    ferry__store_server_close(&server);
    return rc;
}

int main(int argc, char **argv)
{
    alarm(120);
    if (argc >= 8 && argc <= 10)
        return rank_main(argc - 1, argv + 1);
    fprintf(stderr, "usage: stream_driver_main RANK WORLD HOST PORT ADVERTISE "
                    "MIB ROUNDS [HOST_NAME [BUFFER_MIB]]\n");
    return 2;
}
