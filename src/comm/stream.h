/* SPDX-License-Identifier: Apache-2.0 */
/* A broadcast of buffers whose bytes come and go in pieces, so that making
 * them, carrying them and using them overlap. The root reserves room, fills
 * it and commits; the others peek at pieces in place and release them. Bytes
 * travel on a thread of the stream's own while the caller gathers or loads.
 * Two kinds: a provider's own (comm_ops.stream_open), whose pieces are small
 * and stay in the cache, and `buffered`, whole buffers by comm_ops.broadcast.
 * Invariant: every rank sees the same buffers, in the same order; no piece
 * spans two of them; what a rank holds never exceeds its bound. */
#ifndef FERRY_COMM_STREAM_H
#define FERRY_COMM_STREAM_H

#include "comm/comm.h"

typedef struct ferry__stream ferry__stream;

typedef struct ferry__stream_options {
    int32_t root;
    /* Buffers that a rank may hold between its maker and its slowest user
     * (>= 1), and the size of the largest: together the bound. */
    int32_t n_buffers;
    uint64_t buffer_bytes;
    int64_t timeout_ms;     /* of opening */
    int64_t no_progress_ms; /* of the stream's thread; 0: none */
} ferry__stream_options;

/* All methods but close are called by one thread; where they wait they ask
 * comm->check at least every 100 ms. After a failure every later call fails
 * alike and the group is broken. */
typedef struct ferry__stream_ops {
    /* One round: n buffers of these sizes (all ranks give the same; the
     * array must stay until end). Zero sizes take part in nothing. */
    ferry_status (*begin)(ferry__stream *s, const uint64_t *sizes, size_t n);
    /* Root: room for the next bytes of the buffer at hand, at least 1 byte
     * and never beyond its end; waits for room. The same until commit. */
    ferry_status (*reserve)(ferry__stream *s, void **out, size_t *out_size);
    /* Root: the first `size` bytes of the room are there; they make a piece,
     * and a new one begins. size 0: nothing happens. */
    ferry_status (*commit)(ferry__stream *s, size_t size);
    /* Others: the next piece, or what is left of it, as it was committed or
     * in larger ones; read only, valid until it is released. */
    ferry_status (*peek)(ferry__stream *s, const void **out, size_t *out_size);
    ferry_status (*release)(ferry__stream *s, size_t size);
    /* Root: until every byte was released by every rank or, where the
     * provider cannot know, has left. Others: all must be released. */
    ferry_status (*end)(ferry__stream *s);
    void (*close)(ferry__stream *s); /* never blocks on peers */
} ferry__stream_ops;

struct ferry__stream {
    const ferry__stream_ops *ops;
    ferry__comm *comm;
    uint64_t bytes;      /* that this rank made or used since it was opened */
    uint64_t peak_bytes; /* of buffers, held at most */
    const char *path;    /* "shared", "tcp", "tcp+shared", "nccl", … */
};

/* The provider's own kind if it has one, else buffered. Collective. */
ferry_status ferry__stream_open(ferry__comm *c,
                                const ferry__stream_options *options,
                                ferry__stream **out);
ferry_status ferry__stream_buffered(ferry__comm *c,
                                    const ferry__stream_options *options,
                                    ferry__stream **out);
void ferry__stream_close(ferry__stream **stream);

#endif
