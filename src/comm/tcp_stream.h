/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of the tcp group's own stream share. Each host has a pool
 * of slots; its leader (the root on its host, else the lowest rank) fills
 * them: the root's caller from the source, elsewhere a thread from the host
 * before. Another thread of each leader hands them on to the next host.
 * Invariant: within a round the group's data connections between leaders
 * belong to those threads, outside of one to the caller. */
#ifndef FERRY_COMM_TCP_STREAM_H
#define FERRY_COMM_TCP_STREAM_H

#include "comm/stream.h"
#include "comm/tcp_private.h"
#include "comm/tcp_stream_pool.h"

#define TCP__STREAM_VERSION 1
/* The operation in a head, and its detail. */
#define TCP__STREAM_OP 16
enum { TCP__PIECE = 1, TCP__MOVING, TCP__DONE };

/* The longest that a wait goes without a look around. */
#define TCP__STREAM_SLICE_MS 50

typedef struct tcp__stream tcp__stream;

/* A thread that carries one round after the other. */
typedef struct tcp__carrier {
    tcp__stream *stream;
    pthread_t thread;
    bool started;
    ferry__gate done; /* rounds */
    _Atomic uint64_t progress;
} tcp__carrier;

struct tcp__stream {
    ferry__stream base;
    tcp__comm *c;
    ferry__stream_options o;
    uint64_t hosts[FERRY__COMM_TCP_WORLD]; /* as memory can be shared */
    int32_t leader;                        /* of this host */
    int32_t prev, next; /* leaders of other hosts, or -1; of a leader */
    tcp__pool pool;

    /* Of the caller. */
    uint64_t *sizes; /* own: a thread may outlast a round that failed */
    size_t sizes_capacity, n, at; /* buffers */
    uint64_t pos;                 /* in buffer `at` */
    bool in_round;
    uint32_t round; /* that have bytes */
    tcp__cursor cursor;
    const char *piece; /* what is left of it */
    size_t piece_bytes;
    ferry_status failed;
    char line[1024];

    /* Of the threads: the round that `go` has reached. */
    ferry__gate go;
    uint64_t round_bytes;
    tcp__carrier sender, receiver;
    /* The piece that is being received, + 1, << 32, and how much is there:
     * what has come is sent on before the rest has. */
    _Atomic uint64_t under_way;
    _Atomic uint64_t carried; /* bytes, out and in */
    ferry__gate arrivals;
    atomic_bool stop;
    int stop_fd;
    /* The first failure of a thread. */
    pthread_mutex_t lock;
    bool has_error; /* under the lock */
    ferry_status error;
    int32_t error_peer; /* lost; else -1 and the line */
    int error_errno;
    char error_line[512];
};

static inline bool ferry__tcp_stream_leads(const tcp__stream *s)
{
    return s->leader == s->base.comm->rank;
}

/* ---- tcp_stream_wait.c ---- */

/* What a call waits for. `poll` waits itself, for a slice, and answers
 * FERRY_DONE when it is not yet; `progress` changes when anything moves. */
typedef struct tcp__goal {
    const char *what;
    const char *how; /* what the culprit did not do */
    ferry_status (*poll)(tcp__stream *s, int64_t slice_ms);
    uint64_t (*progress)(tcp__stream *s);
    int32_t (*culprit)(tcp__stream *s);
    /* For traces: who is behind it, and whether there is nothing to wait for
     * (NULL: that is not known). */
    int32_t (*holder)(tcp__stream *s);
    bool (*ready)(tcp__stream *s);
} tcp__goal;

ferry_status ferry__tcp_stream_await(tcp__stream *s, const tcp__goal *g);
/* After a failure of the caller: threads hold slots and connections of a
 * group that is over. Returns the failure. */
ferry_status ferry__tcp_stream_give_up(tcp__stream *s, ferry_status status);

/* ---- tcp_stream.c, tcp_stream_share.c, tcp_stream_wire.c ---- */

/* comm_ops.stream_open. */
ferry_status ferry__tcp_stream_open(ferry__comm *comm,
                                    const ferry__stream_options *options,
                                    ferry__stream **out);
/* Agrees on hosts and pools, all ranks at once. */
ferry_status ferry__tcp_stream_share(tcp__stream *s);
/* Starts the threads that this rank needs; stops and joins them. */
ferry_status ferry__tcp_stream_start(tcp__stream *s);
void ferry__tcp_stream_stop(tcp__stream *s);

#endif
