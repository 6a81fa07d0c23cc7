/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of the provider `ucx` share. A group of it is a tcp group
 * (meeting, secret, failures, collectives) whose flows a UCX worker moves.
 * Tag of a message, from the highest bit: 40 bits token of the receiver, 16
 * bits rank of the sender, 8 bits channel × 2 + (0 head, 1 bytes).
 * Invariant: the worker and all that UCX calls back are used under `lock`. */
#ifndef FERRY_COMM_UCX_PRIVATE_H
#define FERRY_COMM_UCX_PRIVATE_H

#include "comm/tcp_private.h"

#include <ucp/api/ucp.h>

/* Messages go with their head up to this size, else in pieces after it. */
#define UCX__INLINE_BYTES ((size_t)8 << 10)
#define UCX__PIECE_BYTES  ((size_t)1 << 20)
#define UCX__WINDOW       4
#define UCX__PATH_BYTES   128

/* One operation of UCX. Stays where it is until it is done. */
typedef struct ucx__op {
    void *request;
    bool posted, done, recv;
    ucs_status_t status;
    size_t size; /* received */
} ucx__op;

/* What carries one flow. */
typedef struct ucx__lane {
    ucx__op head, ops[UCX__WINDOW];
    size_t posted, taken; /* pieces */
    char bounce[TCP__HEAD_BYTES + UCX__INLINE_BYTES];
} ucx__lane;

typedef struct ucx__peer {
    ucp_ep_h ep;
    ucs_status_t failed;
    uint64_t token;
    ucx__op flush, closing;
} ucx__peer;

typedef struct ucx__exposed {
    struct ucx__exposed *next;
    void *bytes;
    ucp_mem_h memory;
} ucx__exposed;

typedef struct ucx__net {
    tcp__comm *comm;
    ucp_context_h context;
    ucp_worker_h worker; /* NULL: it was cut off */
    int events;          /* descriptor of the worker */
    uint64_t token;
    ucx__peer peers[FERRY__COMM_TCP_WORLD];
    ucx__lane *lanes;
    size_t n_lanes, n_used;
    size_t outstanding; /* operations */
    char path[UCX__PATH_BYTES];
    /* The mover moves the worker while no call does. */
    pthread_mutex_t lock;
    bool in_call, has_mover, closing;
    pthread_t mover;
    int stop; /* event descriptor */
    ucx__exposed *exposed;
    ucp_rkey_h stale_key; /* of a pull that failed */
} ucx__net;

/* ---- ucx_provider.c ---- */

/* While this thread is inside of UCX, what UCX logs goes to Ferry's log. */
void ferry__ucx_inside(bool yes);

/* ---- ucx_net.c ---- */

ferry_status ferry__ucx_context(ucp_context_h *out);
ferry_status ferry__ucx_net_open(tcp__comm *c, const ferry__deadline *until,
                                 ucx__net **out);
void ferry__ucx_net_close(ucx__net *n);

/* ---- ucx_carry.c ---- */

extern const tcp__bearer ferry__ucx_bearer;
/* Gives what was sent to the network, for a bounded time. */
void ferry__ucx_flush(ucx__net *n);

/* The parameters of an operation whose end `op` learns of. */
ucp_request_param_t ferry__ucx_param(ucx__op *op, bool recv);
void ferry__ucx_posted(ucx__net *n, ucx__op *op, ucs_status_ptr_t answer);
/* True once, when the operation is done. */
bool ferry__ucx_reap(ucx__net *n, ucx__op *op);
/* One turn of a wait: FERRY_OK to go on. `peer`, `how` as in time_out. */
typedef struct ucx__wait {
    const tcp__call *call;
    int64_t moved_ns, asked_ns;
} ucx__wait;
ferry_status ferry__ucx_await(ucx__net *n, ucx__wait *w, int32_t peer,
                              const char *how);
ferry_status ferry__ucx_lost(ucx__net *n, const tcp__call *call, int32_t peer,
                             ucs_status_t why);

/* ---- ucx_pull.c ---- */

ferry_status ferry__ucx_expose(ferry__comm *comm, void *bytes,
                               size_t size_bytes, void *out_key,
                               size_t *out_key_bytes);
void ferry__ucx_unexpose(ferry__comm *comm, void *bytes);
ferry_status ferry__ucx_pull(ferry__comm *comm, void *bytes, size_t size_bytes,
                             int32_t from, const void *key, size_t key_bytes,
                             uint64_t offset, int64_t timeout_ms);

/* ---- ucx_mover.c ---- */

ferry_status ferry__ucx_start_mover(ucx__net *n);
void ferry__ucx_stop_mover(ucx__net *n);
/* A call has the worker to itself in between. */
void ferry__ucx_begin_call(ucx__net *n);
void ferry__ucx_end_call(ucx__net *n);

#endif
