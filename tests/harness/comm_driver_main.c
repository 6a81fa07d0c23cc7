/* SPDX-License-Identifier: Apache-2.0 */
/* One rank of a tcp group as a process, for tests over several hosts.
 *   comm_driver_main RANK WORLD STORE_HOST STORE_PORT ADVERTISE MIB ROUNDS
 * Rank 0 serves the store. Broadcasts MIB mebibytes ROUNDS times, checks
 * every byte, and rank 0 prints "seconds S remote R local L". As
 *   comm_driver_main raw-send HOST PORT MIB | raw-recv HOST PORT MIB
 * it is one plain stream, whose sender prints the same. */
#include "comm/rendezvous.h"

#include "base/clock.h"
#include "comm/tcp_address.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define T INT64_C(60000)

static int bad(const char *what)
{
    fprintf(stderr, "%s: %s\n", what, ferry_last_error());
    return 1;
}

static void fill(uint64_t *words, size_t n, uint64_t seed)
{
    for (size_t i = 0; i < n; i++)
        words[i] = (i + seed) * UINT64_C(0x9e3779b97f4a7c15);
}

static bool same(const uint64_t *words, size_t n, uint64_t seed)
{
    for (size_t i = 0; i < n; i++) {
        if (words[i] != (i + seed) * UINT64_C(0x9e3779b97f4a7c15))
            return false;
    }
    return true;
}

static void report(double seconds, uint64_t remote, uint64_t local)
{
    printf("seconds %.4f remote %llu local %llu\n", seconds,
           (unsigned long long)remote, (unsigned long long)local);
}

/* The last byte has arrived when the barrier is passed. */
static int rounds(ferry__comm *c, uint64_t *words, size_t n, int n_rounds)
{
    double best = 1e9;
    uint64_t remote, local, r0 = 0, l0 = 0;

    for (int i = 0; i < n_rounds; i++) {
        int64_t began;

        if (c->rank == 0)
            fill(words, n, (uint64_t)i);
        if (c->ops->barrier(c, T) < 0)
            return bad("barrier");
        ferry__comm_tcp_egress(c, &r0, &l0);
        began = ferry__now_ns();
        if (c->ops->broadcast(c, words, 8 * n, 0, T) < 0)
            return bad("broadcast");
        ferry__comm_tcp_egress(c, &remote, &local);
        if (c->ops->barrier(c, T) < 0)
            return bad("barrier");
        if ((double)(ferry__now_ns() - began) / 1e9 < best)
            best = (double)(ferry__now_ns() - began) / 1e9;
        if (!same(words, n, (uint64_t)i)) {
            fprintf(stderr, "rank %d: wrong bytes\n", c->rank);
            return 1;
        }
    }
    if (c->rank == 0)
        report(best, remote - r0, local - l0);
    return 0;
}

static int rank_main(char **a)
{
    ferry__rendezvous_tcp r = {.base = {atoi(a[0]), atoi(a[1]), 1, T},
                               .host = "",
                               .advertise = a[4],
                               .secret = "test"};
    size_t n = (size_t)atoi(a[5]) << 17;
    uint64_t *words = calloc(n, 8);
    ferry__store_server *server = NULL;
    ferry__store *store = NULL;
    ferry__comm *c = NULL;
    int32_t port;
    int rc;

    if (r.base.rank == 0 &&
        ferry__store_serve("", atoi(a[3]), &port, &server) < 0)
        return bad("store");
    if (ferry__store_open(a[2], atoi(a[3]), T, &store) < 0 ||
        ferry__rendezvous_tcp_open(store, &r, &c) < 0)
        return bad("meeting");
    rc = rounds(c, words, n, atoi(a[6]));
    ferry__comm_close(&c);
    ferry__store_close(&store);
    ferry__store_server_close(&server);
    free(words);
    return rc;
}

static int raw_send(char **a)
{
    ferry__waiter w = {NULL, NULL, ferry__deadline_in(T), "raw"};
    size_t size = (size_t)atoi(a[2]) << 20;
    char *bytes = calloc(1, size), byte;
    int64_t began;
    int fd;

    if (ferry__tcp_connect(a[0], atoi(a[1]), &w, &fd) < 0)
        return bad("connect");
    began = ferry__now_ns();
    if (ferry__send_all(fd, bytes, size, &w) < 0 ||
        ferry__recv_all(fd, &byte, 1, &w) < 0)
        return bad("send");
    report((double)(ferry__now_ns() - began) / 1e9, size, 0);
    free(bytes);
    return 0;
}

static int raw_recv(char **a)
{
    ferry__waiter w = {NULL, NULL, ferry__deadline_in(T), "raw"};
    size_t size = (size_t)atoi(a[2]) << 20;
    char *bytes = calloc(1, size);
    int32_t port;
    int fd, listener;

    if (ferry__tcp_listen(a[0], atoi(a[1]), &listener, &port) < 0)
        return bad("listen");
    while (ferry__tcp_accept(listener, &fd) != FERRY_OK) {
        struct pollfd p = {listener, POLLIN, 0};

        if (poll(&p, 1, (int)T) <= 0)
            return bad("accept");
    }
    if (ferry__recv_all(fd, bytes, size, &w) < 0 ||
        ferry__send_all(fd, "k", 1, &w) < 0)
        return bad("receive");
    free(bytes);
    return 0;
}

int main(int argc, char **argv)
{
    alarm(120);
    if (argc == 5 && strcmp(argv[1], "raw-send") == 0)
        return raw_send(argv + 2);
    if (argc == 5 && strcmp(argv[1], "raw-recv") == 0)
        return raw_recv(argv + 2);
    if (argc == 8)
        return rank_main(argv + 1);
    fprintf(stderr, "usage: comm_driver_main RANK WORLD HOST PORT ADVERTISE "
                    "MIB ROUNDS\n");
    return 2;
}
