/* SPDX-License-Identifier: Apache-2.0 */
/* Broadcasts of a tcp group on loopback beside one plain TCP stream of the
 * same bytes, round after round in turn; medians are printed.
 *   bench_comm [--json] [--rounds N] [--mib N]
 * Every byte ends in each receiver's own memory; after the last round it is
 * compared. Ranks are given hosts of their own, so that the chain is that
 * between hosts. */
#include "comm/tcp.h"

#include "base/clock.h"
#include "comm/tcp_address.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define T          INT64_C(60000)
#define ROUNDS_MAX 101
#define WORLD_MAX  5

static int rounds = 9;
static size_t mib = 256;

typedef struct group {
    int listeners[WORLD_MAX];
    int32_t world_size;
    ferry__comm_tcp_member members[WORLD_MAX];
} group;

static void die(const char *what)
{
    fprintf(stderr, "bench_comm: %s: %s\n", what, ferry_last_error());
    exit(1);
}

static group make_group(int32_t world_size)
{
    group g = {.world_size = world_size};

    for (int32_t r = 0; r < world_size; r++) {
        snprintf(g.members[r].host, sizeof(g.members[r].host), "127.0.0.1");
        g.members[r].host_id = (uint64_t)r;
        if (ferry__tcp_listen("127.0.0.1", 0, &g.listeners[r],
                              &g.members[r].port) < 0)
            die("listen");
    }
    return g;
}

static ferry__comm *join_group(const group *g, int32_t rank)
{
    ferry__comm_tcp_options o = {.rank = rank,
                                 .world_size = g->world_size,
                                 .secret = "bench",
                                 .members = g->members};
    ferry__comm *c;

    if (ferry__comm_tcp_open(&o, g->listeners[rank], T, &c) < 0)
        die("open");
    return c;
}

/* ---- receivers, one process each ---- */

static void receive_group(const group *g, int32_t rank, size_t size)
{
    char *bytes = malloc(size);
    ferry__comm *c = join_group(g, rank);

    memset(bytes, 1, size);
    for (int i = 0; i < rounds; i++) {
        if (c->ops->barrier(c, T) < 0 ||
            c->ops->broadcast(c, bytes, size, 0, T) < 0 ||
            c->ops->barrier(c, T) < 0)
            die("receiver");
    }
    for (size_t i = 0; i < size; i++) {
        if (bytes[i] != (char)(i * 31 >> 7))
            _exit(2);
    }
    ferry__comm_close(&c);
    _exit(0);
}

static void receive_plain(int listener, size_t size)
{
    ferry__waiter w = {NULL, NULL, ferry__deadline_in(T), "plain"};
    char *bytes = malloc(size), byte = 0;
    int fd;

    memset(bytes, 1, size);
    while (ferry__tcp_accept(listener, &fd) != FERRY_OK)
        ferry__sleep_ms(1);
    for (int i = 0; i < rounds; i++) {
        if (ferry__recv_all(fd, bytes, size, &w) < 0 ||
            ferry__send_all(fd, &byte, 1, &w) < 0)
            die("plain receiver");
    }
    _exit(0);
}

/* ---- the sender ---- */

static double ms_since(int64_t began)
{
    return (double)(ferry__now_ns() - began) / 1e6;
}

static double plain_round(int fd, const char *bytes, size_t size)
{
    ferry__waiter w = {NULL, NULL, ferry__deadline_in(T), "plain"};
    int64_t began = ferry__now_ns();
    char byte;

    if (ferry__send_all(fd, bytes, size, &w) < 0 ||
        ferry__recv_all(fd, &byte, 1, &w) < 0)
        die("plain sender");
    return ms_since(began);
}

static double group_round(ferry__comm *c, char *bytes, size_t size)
{
    int64_t began;

    if (c->ops->barrier(c, T) < 0)
        die("barrier");
    began = ferry__now_ns();
    if (c->ops->broadcast(c, bytes, size, 0, T) < 0 ||
        c->ops->barrier(c, T) < 0)
        die("broadcast");
    return ms_since(began);
}

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static double median(double *ms)
{
    qsort(ms, (size_t)rounds, sizeof(*ms), by_size);
    return ms[rounds / 2];
}

static void run(bool json)
{
    static double plain[ROUNDS_MAX], one[ROUNDS_MAX], two[ROUNDS_MAX];
    size_t size = mib << 20;
    group g1 = make_group(2), g2 = make_group(3);
    group p = make_group(1);
    char *bytes = malloc(size);
    ferry__waiter w = {NULL, NULL, ferry__deadline_in(T), "plain"};
    ferry__comm *c1, *c2;
    double m0, m1, m2;
    int fd, how;

    for (int32_t i = 0; i < 4; i++) {
        if (fork() != 0)
            continue;
        alarm(600);
        if (i == 0)
            receive_plain(p.listeners[0], size);
        receive_group(i == 1 ? &g1 : &g2, i == 3 ? 2 : 1, size);
    }
    for (size_t i = 0; i < size; i++)
        bytes[i] = (char)(i * 31 >> 7);
    if (ferry__tcp_connect("127.0.0.1", p.members[0].port, &w, &fd) < 0)
        die("connect");
    c1 = join_group(&g1, 0);
    c2 = join_group(&g2, 0);
    for (int i = 0; i < rounds; i++) {
        plain[i] = plain_round(fd, bytes, size);
        one[i] = group_round(c1, bytes, size);
        two[i] = group_round(c2, bytes, size);
    }
    for (int i = 0; i < 4; i++) {
        if (wait(&how) < 0 || how != 0)
            die("a receiver failed");
    }
    m0 = median(plain);
    m1 = median(one);
    m2 = median(two);
    printf(json ? "{\"mib\": %zu, \"plain_ms\": %.1f, \"tcp1_ms\": %.1f, "
                  "\"tcp2_ms\": %.1f, \"ratio1\": %.3f, \"ratio2\": %.3f}\n"
                : "%zu MiB: plain stream %.1f ms, tcp to 1 %.1f ms, to 2 "
                  "%.1f ms (%.2f and %.2f of the stream)\n",
           mib, m0, m1, m2, m1 / m0, m2 / m0);
    ferry__comm_close(&c1);
    ferry__comm_close(&c2);
    close(fd);
    free(bytes);
}

int main(int argc, char **argv)
{
    bool json = false;

    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--json") == 0)
            json = true;
        else if (strcmp(argv[i], "--rounds") == 0 && i + 1 < argc)
            rounds = atoi(argv[++i]);
        else if (strcmp(argv[i], "--mib") == 0 && i + 1 < argc)
            mib = (size_t)atoi(argv[++i]);
    }
    if (rounds < 1 || rounds > ROUNDS_MAX || mib < 1 || mib > 4096)
        return 2;
    run(json);
    return 0;
}
