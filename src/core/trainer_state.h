/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of the trainer share.
 * Invariant: fields below `guarded` are read and written under the lock, as
 * an engine may report progress from a thread of its own; the rest belongs to
 * the thread that drives the round. */
#ifndef FERRY_CORE_TRAINER_STATE_H
#define FERRY_CORE_TRAINER_STATE_H

#include "core/control_call.h"
#include "core/manifest.h"
#include "core/pass.h"
#include "core/peers.h"
#include "core/round.h"
#include "core/spans.h"
#include <ferry/backend.h>
#include <stdatomic.h>
#include <sys/types.h>

typedef enum ferry__fleet {
    FERRY__FLEET_UNKNOWN,
    FERRY__FLEET_YES, /* several servers, all of them Ferry */
    FERRY__FLEET_NO
} ferry__fleet;

struct ferry_trainer {
    const ferry_trainer_engine_ops *ops;
    void *self;
    const char *backend;
    ferry_trainer_init_info *info; /* typed, owned */
    bool is_sender;
    pid_t pid; /* that made it: not to be used after fork */
    ferry_source_ops source_ops;
    ferry_source source;         /* ops NULL: none */
    ferry__control_call *call;   /* the four calls */
    ferry__control_call *ending; /* abort, beside one that is stuck */
    ferry__manifest declared;    /* metadata of this round */
    ferry__pass pass;
    bool passed;  /* a pass was begun in this round */
    bool started; /* the peers may have an open round, or wait in init */
    ferry__fleet fleet;
    bool failed; /* the last round did: init is called before the next */
    uint64_t rounds;
    ferry_round_stats stats;
    ferry_progress_fn progress;
    void *progress_arg;
    _Atomic bool canceled;
    /* Until then a cancel waits for the commit that runs; 0: none does. */
    _Atomic int64_t commit_until_ns;
    _Atomic bool sending; /* a send_weights runs: a second is refused */
    ferry__spans spans;   /* of the round that runs, or ran last */
    pthread_mutex_t lock;
    /* guarded */
    ferry__bounds bounds;
    uint64_t bytes_sent;
};

const ferry_trainer_host *ferry__trainer_host(void);

/* Runs one control call and waits for it within the bounds. */
ferry_status ferry__trainer_call(ferry_trainer *t, ferry__call_kind kind,
                                 const char *text);
/* Asks what the peers are. FERRY_EROUTE: none of them is Ferry. */
ferry_status ferry__trainer_ask_peers(ferry_trainer *t, ferry__peers *out);
/* Waits for the call in flight within the bounds and takes its result. */
ferry_status ferry__trainer_join(ferry_trainer *t);
/* Canceled, or a bound passed. */
ferry_status ferry__trainer_check_bounds(ferry_trainer *t, const char *what);
void ferry__trainer_touch(ferry_trainer *t);

/* ---- trainer_round.c ---- */

/* What a failure leaves behind: the peers are told, the real error and its
 * line (FERRY__LINE_MAX bytes) are the answer. */
ferry_status ferry__trainer_fail(ferry_trainer *t, ferry_status st, char *line);

/* ---- trainer_finish.c ---- */

/* Learns, once, whether the peers can commit as a fleet. */
ferry_status ferry__trainer_learn_peers(ferry_trainer *t);
/* Ends the round at the peers. A fleet prepares on all, then commits. */
ferry_status ferry__trainer_finish(ferry_trainer *t, const char *version);

#endif
