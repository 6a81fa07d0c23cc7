/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/tcp_seats.h"

#include "base/thread.h"
#include "comm/tcp_address.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <unistd.h>

#include <cmocka.h>

const char tcp_seats_secret[] =
    "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

ferry_status tcp_seats_make(comm_group *g, int32_t world_size,
                            size_t slot_bytes)
{
    (void)slot_bytes;
    g->world_size = world_size;
    for (int32_t r = 0; r < world_size; r++)
        FERRY_TRY(ferry__tcp_listen("127.0.0.1", 0, &g->fds[r], &g->ports[r]));
    return FERRY_OK;
}

void tcp_seats_drop(comm_group *g)
{
    for (int32_t r = 0; r < g->world_size; r++)
        close(g->fds[r]);
}

/* Which rank is on which host: bits of a small number. */
static uint64_t host_of(uint32_t hosts, int32_t rank)
{
    return hosts >> rank & 1;
}

ferry_status tcp_seats_open(const comm_group *g, int32_t rank,
                            const tcp_wishes *w, ferry__comm **out)
{
    ferry__comm_tcp_member members[COMM_WORLD_MAX] = {0};
    ferry__comm_tcp_options o = {
        .rank = rank,
        .world_size = w->world_size ? w->world_size : g->world_size,
        .generation = w->generation,
        .secret = w->secret ? w->secret : tcp_seats_secret,
        .members = members,
        .no_progress_ms = w->no_progress_ms};

    for (int32_t r = 0; r < g->world_size; r++) {
        snprintf(members[r].host, sizeof(members[r].host), "127.0.0.1");
        members[r].port = g->ports[r];
        members[r].host_id = host_of(w->hosts, r);
    }
    return ferry__comm_tcp_open(
        &o, g->fds[rank], w->timeout_ms ? w->timeout_ms : TCP_SEATS_MS, out);
}

void *tcp_sit(void *arg)
{
    tcp_seat *s = arg;

    s->status = tcp_seats_open(s->group, s->rank, &s->w, &s->c);
    snprintf(s->line, sizeof(s->line), "%s",
             s->status < 0 ? ferry_last_error() : "");
    return NULL;
}

void tcp_sit_down(tcp_seat *seats, int32_t n)
{
    pthread_t threads[COMM_WORLD_MAX];

    for (int32_t i = 0; i < n; i++)
        assert_int_equal(
            ferry__thread_start(&threads[i], "seat", tcp_sit, &seats[i]),
            FERRY_OK);
    for (int32_t i = 0; i < n; i++)
        pthread_join(threads[i], NULL);
}
