/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of the trainer's wrapper share.
 * Invariant: the inner engine is handed this struct as its context and a
 * host table of its own; everything that no rule touches is passed on. */
#ifndef FERRY_BACKENDS_FAULT_TRAINER_STATE_H
#define FERRY_BACKENDS_FAULT_TRAINER_STATE_H

#include "backends/fault/fault_wire.h"

/* A copy of a parameter that a rule changes; kept until destroy, since the
 * engine may have published it. */
typedef struct fault__held {
    void *memory;
    size_t size_bytes;
} fault__held;

typedef struct fault__trainer {
    const ferry_trainer_engine_ops *inner;
    void *self;
    const ferry_trainer_host *host; /* the real one */
    ferry_trainer_context *ctx;
    fault__ground ground;
    fault__plan plan; /* without rules when this rank is not meant */
    int32_t rank;
    uint64_t round;
    uint64_t declared;    /* bytes of this round */
    uint64_t yielded;     /* bytes handed to the engine in this round */
    uint64_t sent;        /* bytes that it reported as sent */
    uint64_t text;        /* bytes of update infos in this round */
    bool ended;           /* the source was made to end early */
    ferry_status pending; /* a failure found where none can be answered */
    unsigned char *torn;  /* the byte that changes later */
    const fault__rule *torn_by;
    int64_t torn_ns; /* when it does; 0: not yet known */
    fault__held *held;
    size_t n_held, held_capacity, n_used;
} fault__trainer;

const ferry_trainer_host *fault__trainer_host(void);

#endif
