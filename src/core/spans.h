/* SPDX-License-Identifier: Apache-2.0 */
/* When a round's work was done, for traces: a bounded list of stretches.
 * Work of one kind that goes on after a short pause lengthens its stretch; a
 * list that is full joins its nearest ones, so a round of any size fits.
 * Invariant: no time is lost: the busy times of a kind add up to its work. */
#ifndef FERRY_CORE_SPANS_H
#define FERRY_CORE_SPANS_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#define FERRY__SPANS_MAX     128
#define FERRY__SPANS_ADDRESS 64
/* Peers that are told apart; waits for any more are those for rank -1. */
#define FERRY__SPANS_PEERS 8

typedef enum ferry__span_kind {
    FERRY__SPAN_START, /* of the trainer */
    FERRY__SPAN_GATHER,
    FERRY__SPAN_PACK,
    FERRY__SPAN_WIRE,
    FERRY__SPAN_DIGEST,
    FERRY__SPAN_FINISH,
    FERRY__SPAN_LOAD, /* of a worker */
    FERRY__SPAN_QUANTISE,
    FERRY__SPAN_STEP,
    FERRY__SPAN_WAIT, /* for a peer; of both */
    FERRY__SPAN_KINDS
} ferry__span_kind;
const char *ferry__span_name(ferry__span_kind kind);

typedef struct ferry__span {
    ferry__span_kind kind;
    uint32_t count;                     /* pieces of work in it */
    int64_t begin_ns, end_ns, busy_ns;  /* monotonic */
    int32_t peer;                       /* of a wait: the rank, or -1: others */
    char address[FERRY__SPANS_ADDRESS]; /* of that rank; "": not known */
} ferry__span;

typedef struct ferry__spans {
    pthread_mutex_t lock;
    size_t limit, n;
    int64_t gap_ns; /* a shorter pause does not end a stretch */
    ferry__span list[FERRY__SPANS_MAX];
} ferry__spans;

/* limit: at least twice what is told apart, which is FERRY__SPAN_KINDS and,
 * where there are waits, FERRY__SPANS_PEERS; at most FERRY__SPANS_MAX. */
void ferry__spans_init(ferry__spans *s, size_t limit);
void ferry__spans_destroy(ferry__spans *s);
void ferry__spans_clear(ferry__spans *s);
/* Notes work of this kind from `begin_ns` until now. Any thread. */
void ferry__spans_add(ferry__spans *s, ferry__span_kind kind, int64_t begin_ns);
/* The same with its end given. */
void ferry__spans_put(ferry__spans *s, ferry__span_kind kind, int64_t begin_ns,
                      int64_t end_ns);
/* Notes that rank `peer` was waited for from `begin_ns` until now. */
void ferry__spans_wait(ferry__spans *s, int32_t peer, const char *address,
                       int64_t begin_ns);
/* Copies at most `capacity`, in order of their begin; returns how many. */
size_t ferry__spans_copy(ferry__spans *s, ferry__span *out, size_t capacity);
/* The stretches of a trainer's round that runs, or ran last. */
struct ferry_trainer;
size_t ferry__trainer_spans(struct ferry_trainer *trainer, ferry__span *out,
                            size_t capacity);
/* What to add to a monotonic time for nanoseconds since 1970. */
int64_t ferry__spans_wall_offset_ns(void);

#endif
