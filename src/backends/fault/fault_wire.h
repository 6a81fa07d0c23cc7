/* SPDX-License-Identifier: Apache-2.0 */
/* What the two halves of the `fault` wrapper share: the setting `fault` read
 * into rules, and what a rule does.
 * Invariant: a rule fires once a round, at a place that the setting and the
 * seed alone decide, so that a failure can be replayed. */
#ifndef FERRY_BACKENDS_FAULT_WIRE_H
#define FERRY_BACKENDS_FAULT_WIRE_H

#include <ferry/backend.h>

#define FAULT__RULES_MAX 16
#define FAULT__PREFIX    "fault:"

typedef enum fault__kind {
    FAULT__DELAY,   /* before every hand-over */
    FAULT__STALL,   /* once, looking at the bounds meanwhile */
    FAULT__CORRUPT, /* one bit of one byte */
    FAULT__DROP,    /* the hand-over never happens */
    FAULT__SHORT,   /* it ends early */
    FAULT__FAIL,    /* an error instead */
    FAULT__DIE,     /* SIGKILL to this process */
    FAULT__STOP,    /* SIGSTOP to this process */
    FAULT__TEAR,    /* the source's byte changes after it was handed over */
    FAULT__GARBLE,  /* one bit of the update info's text */
    FAULT__DIGEST,  /* one bit of a stated digest */
    FAULT__MUTE,    /* a digest is not stated */
    FAULT__KINDS
} fault__kind;

typedef enum fault__where {
    FAULT__BYTE, /* a count: bytes handed over, digests stated, … */
    FAULT__SENT, /* bytes reported as sent */
    FAULT__INIT, /* phases */
    FAULT__START,
    FAULT__FINISH
} fault__where;

typedef struct fault__rule {
    fault__kind kind;
    fault__where where;
    uint64_t at;
    bool anywhere; /* "?": drawn when the first total is known */
    bool fired;
    int64_t ms;
} fault__rule;

typedef struct fault__plan {
    uint64_t seed;
    int64_t rank, replica, round; /* -1, -1, 0: any */
    size_t n;
    fault__rule rules[FAULT__RULES_MAX];
} fault__plan;

/* How a rule reaches its side. */
typedef struct fault__ground {
    const char *side; /* "trainer", "worker" */
    ferry_status (*fail)(ferry_status status, const char *fmt, ...)
        FERRY_PRINTF(2, 3);
    void (*log)(ferry_log_level level, const char *fmt, ...) FERRY_PRINTF(2, 3);
    ferry_status (*check)(void *arg, const char *what);
    void *arg;
} fault__ground;

/* FERRY_EINVAL names the item that is not understood. */
ferry_status fault__plan_parse(const char *text, fault__plan *out);
/* The setting, or, when it is "@FILE", what the file holds now; a file that
 * is not there is no fault. */
ferry_status fault__plan_read(fault__plan *out);
/* Draws the places left to the seed; total is in bytes. */
void fault__plan_draw(fault__plan *plan, uint64_t total);
/* The first rule of this kind that lies in [first, first + count), which has
 * then fired; NULL: none. */
fault__rule *fault__plan_take(fault__plan *plan, fault__kind kind,
                              fault__where where, uint64_t first,
                              uint64_t count);
/* What needs no bytes: delay, stall, stop, die, fail. `what` says in the
 * middle of what ("yielding"), `name` of which parameter; "" for a phase. */
ferry_status fault__strike(fault__plan *plan, const fault__ground *ground,
                           fault__where where, uint64_t first, uint64_t count,
                           const char *what, const char *name);
/* Flips the bit of a byte that the seed chooses. */
void fault__flip(const fault__plan *plan, const fault__rule *rule,
                 unsigned char *byte);

#endif
