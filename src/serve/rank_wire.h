/* SPDX-License-Identifier: Apache-2.0 */
/* What the API process and a rank process say to each other.
 * Each rank has two stream sockets, so that a long weight update never keeps
 * a decode step waiting: `control` for weights, `step` for generation and
 * abort. A message is one frame (base/socket.h):
 *   1. u32 kind   2. u32 reserved (0)   3. the body, by kind
 * and each is answered by exactly one reply frame:
 *   1. i32 status   2. u32 line length   3. the line   4. the body
 * Both ends are one build on one host: native byte order, no versions. */
#ifndef FERRY_SERVE_RANK_WIRE_H
#define FERRY_SERVE_RANK_WIRE_H

#include "base/socket.h"
#include "model/sample.h"
#include <ferry/status.h>

typedef enum ferry__rank_kind {
    /* control socket; body: JSON or text as the call takes it */
    FERRY__RANK_INIT = 1,
    FERRY__RANK_START,
    FERRY__RANK_START_DRAFT,
    FERRY__RANK_UPDATE,
    FERRY__RANK_PREPARE, /* body: FERRY__RANK_END_EMPTY or nothing */
    FERRY__RANK_COMMIT,  /* body: version, empty = leave; reply: JSON of
                            ferry_worker_status, or nothing */
    FERRY__RANK_SHUTDOWN,
    FERRY__RANK_CHECKSUM, /* reply: JSON object name -> sha256 hex */
    FERRY__RANK_RESET,    /* zero all parameters */
    FERRY__RANK_PLAN,     /* reply: JSON */
    /* step socket */
    FERRY__RANK_STEP, /* ferry__step_head, then the sequences */
    FERRY__RANK_ABORT,
    FERRY__RANK_SET_VERSION, /* body: the label */
    FERRY__RANK_STATUS,      /* reply: JSON of ferry_worker_status */
    FERRY__RANK_LAYOUT,      /* reply: JSON of ferry__rank_layout */
    FERRY__RANK_READ,        /* ferry__share_span; reply: the bytes */
    /* control socket, while joining */
    FERRY__RANK_WRITE, /* ferry__share_span, then its bytes */
    FERRY__RANK_ADOPT  /* what was written is whole; body: its label */
} ferry__rank_kind;

/* One sequence of a step; n_tokens ids (i32) follow it in the frame. */
typedef struct ferry__step_seq {
    int32_t slot, position, n_tokens;
    int32_t sample; /* not 0: reply with a token */
    int32_t n_top;  /* likely tokens wanted beside it, 0..32 */
    int32_t reserved;
    uint64_t draw;
    ferry__sampling sampling;
} ferry__step_seq;

typedef struct ferry__step_head {
    int32_t n_seqs, reserved;
} ferry__step_head;

/* Reply of rank 0, one for each sequence that samples, in order. */
typedef struct ferry__step_token {
    ferry__sampled picked;
    ferry__sampled top[32];
} ferry__step_token;

/* Prepare that also ends a round in which nothing was declared: the reply is
 * then FERRY__RANK_ENDED, and a commit that comes all the same does nothing. */
#define FERRY__RANK_END_EMPTY "end-empty"
#define FERRY__RANK_ENDED     "ended"

#define FERRY__RANK_FRAME_MAX ((size_t)512 << 20)

ferry_status ferry__rank_send(int fd, ferry__rank_kind kind, const void *body,
                              size_t size_bytes, const ferry__waiter *w);
ferry_status ferry__rank_reply(int fd, ferry_status status, const void *body,
                               size_t size_bytes, const ferry__waiter *w);
/* Receives a reply. The transport's failure is returned; the rank's own
 * status is in *out_status with its line recorded for this thread. *out_body
 * is owned (ferry__free), NUL terminated. */
ferry_status ferry__rank_receive(int fd, const ferry__waiter *w,
                                 ferry_status *out_status, void **out_body,
                                 size_t *out_size);

#endif
