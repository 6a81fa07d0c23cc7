/* SPDX-License-Identifier: Apache-2.0 */
/* The groups that streams are put to. Ranks are given hosts by number, so
 * that one machine plays several. */
#include "harness/stream_cases.h"

#include "comm/tcp.h"
#include "harness/tcp_seats.h"

#include <stdio.h>
#include <unistd.h>

#define T 10000

static ferry_status local_make(comm_group *g, int32_t world_size,
                               size_t slot_bytes)
{
    g->world_size = world_size;
    return ferry__comm_local_create(world_size, slot_bytes, &g->fds[0]);
}

static ferry_status local_open(comm_group *g, int32_t rank, ferry__comm **out)
{
    return ferry__comm_local_open(g->fds[0], rank, out);
}

static void local_drop(comm_group *g)
{
    close(g->fds[0]);
}

static ferry_status tcp_open(const comm_group *g, int32_t rank,
                             int32_t ranks_per_host, ferry__comm **out)
{
    ferry__comm_tcp_member members[COMM_WORLD_MAX] = {0};
    ferry__comm_tcp_options o = {.rank = rank,
                                 .world_size = g->world_size,
                                 .generation = 1,
                                 .secret = "stream",
                                 .members = members};

    for (int32_t r = 0; r < g->world_size; r++) {
        snprintf(members[r].host, sizeof(members[r].host), "127.0.0.1");
        members[r].port = g->ports[r];
        members[r].host_id = (uint64_t)(r / ranks_per_host);
    }
    return ferry__comm_tcp_open(&o, g->fds[rank], T, out);
}

static ferry_status open_one_host(comm_group *g, int32_t rank,
                                  ferry__comm **out)
{
    return tcp_open(g, rank, COMM_WORLD_MAX, out);
}

static ferry_status open_own_hosts(comm_group *g, int32_t rank,
                                   ferry__comm **out)
{
    return tcp_open(g, rank, 1, out);
}

static ferry_status open_mixed_hosts(comm_group *g, int32_t rank,
                                     ferry__comm **out)
{
    return tcp_open(g, rank, 2, out);
}

const comm_maker stream_group_local = {.name = "local",
                                       .make = local_make,
                                       .open = local_open,
                                       .drop = local_drop};
const comm_maker stream_group_one_host = {.name = "tcp, one host",
                                          .make = tcp_seats_make,
                                          .open = open_one_host,
                                          .drop = tcp_seats_drop};
const comm_maker stream_group_own_hosts = {.name = "tcp, own hosts",
                                           .make = tcp_seats_make,
                                           .open = open_own_hosts,
                                           .drop = tcp_seats_drop};
const comm_maker stream_group_mixed_hosts = {.name = "tcp, two hosts",
                                             .make = tcp_seats_make,
                                             .open = open_mixed_hosts,
                                             .drop = tcp_seats_drop};
