/* SPDX-License-Identifier: Apache-2.0 */
/* The rounds of this server: the one that runs, and the last ones that ended.
 * A round is noted call by call, each with the time every rank took for it.
 * Invariant: its own lock is the last one taken, and is never held over a
 * wait, so any thread may ask at any time. */
#ifndef FERRY_SERVE_HISTORY_H
#define FERRY_SERVE_HISTORY_H

#include "serve/rank_wire.h"

#include <jansson.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#define FERRY__HISTORY_ROUNDS 64
/* Calls of one round that are kept apart; later updates count as one. */
#define FERRY__HISTORY_CALLS 24

typedef enum ferry__round_phase {
    FERRY__PHASE_START,
    FERRY__PHASE_UPDATE,
    FERRY__PHASE_PREPARE,
    FERRY__PHASE_COMMIT,
    FERRY__PHASE_COUNT
} ferry__round_phase;

typedef struct ferry__round_call {
    ferry__round_phase phase;
    uint32_t count;            /* calls that this entry stands for */
    int64_t began_ns, last_ns; /* of the first call, end of the last */
    int64_t ns;                /* inside, all of them together */
    int64_t *rank_ns;          /* per rank; -1: did not answer */
} ferry__round_call;

const char *ferry__round_phase_name(ferry__round_phase phase);

/* What a round added up to, for the metrics. */
typedef struct ferry__round_sums {
    double phase_seconds[FERRY__PHASE_COUNT], stop_seconds;
    uint64_t bytes_declared, bytes_received, bytes_loaded;
} ferry__round_sums;

typedef struct ferry__history {
    pthread_mutex_t lock;
    int32_t tp_size, world;
    json_t *rounds;  /* ended, newest last */
    uint64_t number; /* of the last round begun */

    bool open;
    int64_t began_ns, stop_began_ns, stop_ns; /* stop_began_ns 0: running */
    double started_at; /* wall clock, seconds since 1970 */
    size_t n_calls;
    bool in_call;
    int64_t call_ns; /* when it went out */
    ferry__round_call calls[FERRY__HISTORY_CALLS];
    int64_t *rank_ns;  /* FERRY__HISTORY_CALLS × world, behind `calls` */
    json_t **statuses; /* per rank, what it said when the round ended */
} ferry__history;

ferry_status ferry__history_init(ferry__history *h, int32_t tp_size,
                                 int32_t dp_size);
void ferry__history_free(ferry__history *h);

/* A round begins; one that is open is forgotten. */
void ferry__history_begin(ferry__history *h);
/* The round was none: its start was refused. */
void ferry__history_forget(ferry__history *h);
/* A call goes out to all ranks, one rank answered it, all did. Calls that are
 * not part of a round are ignored. */
void ferry__history_call(ferry__history *h, ferry__rank_kind kind);
void ferry__history_answer(ferry__history *h, int32_t rank);
void ferry__history_called(ferry__history *h);
/* Generation stops, or goes on. */
void ferry__history_stop(ferry__history *h, bool stopped);
/* What a rank says of itself as the round ends. Takes the object over. */
void ferry__history_rank(ferry__history *h, int32_t rank, json_t *status);
/* The round is over. `version` is the label now served, `line` the error. */
void ferry__history_end(ferry__history *h, bool finished, const char *version,
                        const char *line, ferry__round_sums *out_sums);

bool ferry__history_is_open(ferry__history *h);
/* {number, phase, started_at, elapsed_ms, stopped, calls} or null. Owned. */
json_t *ferry__history_running(ferry__history *h);
/* The last `count` rounds that ended, newest last; owned. Without `whole`
 * each lacks its ranks and calls. */
json_t *ferry__history_rounds(ferry__history *h, size_t count, bool whole);

/* Wall clock, in seconds since 1970. */
double ferry__history_wall(void);

#endif
