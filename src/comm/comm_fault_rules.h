/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of the group's fault wrapper share: rules, what they say of
 * one message, and the wrapped group.
 * Invariant: each rule counts the bytes that passed its own pair, so its
 * place does not depend on what other pairs do. */
#ifndef FERRY_COMM_COMM_FAULT_RULES_H
#define FERRY_COMM_COMM_FAULT_RULES_H

#include "base/fault_text.h"
#include "comm/comm_fault.h"

#include <pthread.h>
#include <stdatomic.h>

#define FERRY__COMM_RULES_MAX 16
#define FERRY__ANY_RANK       (-1)

typedef enum ferry__comm_rule_kind {
    FERRY__COMM_DELAY,   /* before every message */
    FERRY__COMM_STALL,   /* once */
    FERRY__COMM_CORRUPT, /* one bit of one byte */
    FERRY__COMM_DROP,    /* the message is lost */
    FERRY__COMM_SHORT,   /* its end is lost */
    FERRY__COMM_CUT,     /* it and all later ones of the pair are lost */
    FERRY__COMM_FAIL,    /* an error instead */
    FERRY__COMM_DIE,     /* SIGKILL to this process */
    FERRY__COMM_STOP,    /* SIGSTOP to this process */
    FERRY__COMM_KINDS
} ferry__comm_rule_kind;

typedef struct ferry__comm_rule {
    ferry__comm_rule_kind kind;
    int32_t from, to; /* ranks, or any */
    bool sent;        /* strikes at the sender */
    bool fired;
    uint64_t at, seen;
    int64_t ms;
} ferry__comm_rule;

typedef struct ferry__comm_rules {
    uint64_t seed;
    size_t n;
    ferry__comm_rule rules[FERRY__COMM_RULES_MAX];
} ferry__comm_rules;

/* FERRY_EINVAL names the item that is not understood. Other wrappers' items
 * are skipped. */
ferry_status ferry__comm_rules_parse(const char *text, ferry__comm_rules *out);

typedef struct ferry__faulty {
    ferry__comm base;
    ferry__comm_ops ops; /* optional calls that the group lacks are NULL */
    ferry__comm *inner;
    atomic_bool aborted; /* or failed: no later call works */
    bool from_file;
    pthread_mutex_t lock;
    /* Under the lock: a stream's thread and its caller both ask. */
    char text[FERRY__FAULT_TEXT_BYTES]; /* that the rules were read from */
    ferry__comm_rules plan;
} ferry__faulty;

/* One message, or a piece of a stream. `peer` may be any rank: a broadcast
 * goes to all. */
typedef struct ferry__message {
    const char *what; /* "broadcast", … */
    bool sent;        /* by this rank */
    int32_t peer;
    uint64_t size_bytes;
    int64_t timeout_ms; /* how long a lost one is waited for */
} ferry__message;

/* What the rules say of it. */
typedef struct ferry__verdict {
    bool lost;
    uint64_t keep; /* bytes that come through */
    bool corrupt;  /* the bit of byte `corrupt_at` flips */
    uint64_t corrupt_at;
    uint64_t seed, place; /* of that byte on its pair: choose the bit */
} ferry__verdict;

/* Waits, stops, dies or fails as the rules say, and judges the rest. */
ferry_status ferry__faulty_judge(ferry__faulty *f, const ferry__message *m,
                                 ferry__verdict *out);
/* Flips the bit in a buffer of the group's memory. */
ferry_status ferry__faulty_flip(ferry__faulty *f, const ferry__verdict *v,
                                void *bytes);
/* What a lost message is to who waits for it: its own bound, the owner's
 * check or an abort ends it; never FERRY_OK. */
ferry_status ferry__faulty_starve(ferry__faulty *f, const ferry__message *m);

/* comm_fault_stream.c: the group's own kind of stream, wrapped. */
struct ferry__stream_options;
ferry_status ferry__faulty_stream(ferry__comm *c,
                                  const struct ferry__stream_options *options,
                                  struct ferry__stream **out);

#endif
