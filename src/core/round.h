/* SPDX-License-Identifier: Apache-2.0 */
/* The round: one state machine for every worker engine.
 * Idle -> Open -> Updating -> Finishing -> Prepared -> Idle, and Failed from
 * anywhere. It owns the order of calls, who is inside one, cancelation, the
 * two bounds and the record of a failure; it knows nothing of weights.
 * Invariant: at most one call is inside, and every field is read and written
 * under `lock`, so that any thread may ask. */
#ifndef FERRY_CORE_ROUND_H
#define FERRY_CORE_ROUND_H

#include "base/clock.h"
#include "base/thread.h"
#include <ferry/status.h>
#include <stdbool.h>

#define FERRY__DEADLINE_MS    300000
#define FERRY__NO_PROGRESS_MS 60000
#define FERRY__LINE_MAX       1024

typedef enum ferry__round_state {
    FERRY__ROUND_IDLE,
    FERRY__ROUND_OPEN,
    FERRY__ROUND_UPDATING,
    FERRY__ROUND_FINISHING,
    FERRY__ROUND_PREPARED,
    FERRY__ROUND_FAILED
} ferry__round_state;
const char *ferry__round_state_name(ferry__round_state state);

/* The two bounds of a round (J1), and what they watch. Plain data: the owner
 * guards it. */
typedef struct ferry__bounds {
    ferry__deadline deadline;
    int64_t no_progress_ms;
    int64_t progress_at_ns;
} ferry__bounds;
void ferry__bounds_arm(ferry__bounds *b, int64_t deadline_ms,
                       int64_t no_progress_ms);
/* FERRY_OK, FERRY_ETIMEOUT or FERRY_ENOPROGRESS; the line names the bound and
 * `what`, and `detail` when it is not empty ("parameter x"). */
ferry_status ferry__bounds_check(const ferry__bounds *b, const char *what,
                                 const char *detail);

/* Wall times of a round's phases, in milliseconds. */
typedef struct ferry__phases {
    double start_ms, update_ms, prepare_ms, commit_ms;
} ferry__phases;

typedef struct ferry__round {
    pthread_mutex_t lock;
    pthread_cond_t left; /* signaled when a call leaves */
    ferry__round_state state;
    bool busy; /* a call is inside */
    bool canceled;
    bool draft;                          /* the round aims at the draft model */
    uint64_t number;                     /* 1, 2, … */
    int64_t deadline_ms, no_progress_ms; /* the worker's own bounds */
    int64_t init_deadline_ms, init_no_progress_ms; /* of init info; 0 none */
    ferry__bounds bounds;
    ferry__phases phases;
    ferry_status failure;
    char failure_line[FERRY__LINE_MAX];
} ferry__round;

ferry_status ferry__round_init(ferry__round *r, int64_t deadline_ms,
                               int64_t no_progress_ms);
void ferry__round_destroy(ferry__round *r);

/* Every call of the control plane stands between enter and leave. enter waits
 * a moment for a call that is on its way out, then answers FERRY_EBUSY.
 * leave answers true when the round was aborted meanwhile: the caller, still
 * inside, then fails the round and leaves again. */
ferry_status ferry__round_enter(ferry__round *r);
bool ferry__round_leave(ferry__round *r);

/* Whether a round is open (from start to commit, abort or failure). */
bool ferry__round_active(ferry__round *r);
ferry__round_state ferry__round_state_of(ferry__round *r);

/* The steps, called from inside. Each answers FERRY_EORDER with the call that
 * must come first. open arms the bounds of the round. */
ferry_status ferry__round_open(ferry__round *r, bool draft);
ferry_status ferry__round_to_updating(ferry__round *r);
void ferry__round_updated(ferry__round *r, double ms);
ferry_status ferry__round_to_finishing(ferry__round *r);
void ferry__round_prepared(ferry__round *r, double ms);
ferry_status ferry__round_to_commit(ferry__round *r);
void ferry__round_committed(ferry__round *r, double ms);
/* Ends the round with this thread's last error as the reason. */
void ferry__round_fail(ferry__round *r, ferry_status status);
/* Arms the bounds for a call outside a round (init, loading a source). */
void ferry__round_arm(ferry__round *r);

/* Any thread. Marks what runs, or is open, as canceled. True: nobody is
 * inside and the caller is now; it must end the round and leave. */
bool ferry__round_cancel(ferry__round *r);

/* Any thread. */
ferry_status ferry__round_check(ferry__round *r, const char *what,
                                const char *detail);
void ferry__round_progress(ferry__round *r);
int64_t ferry__round_remaining_ms(ferry__round *r);
void ferry__round_set_bounds(ferry__round *r, int64_t deadline_ms,
                             int64_t no_progress_ms);

#endif
