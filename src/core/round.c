/* SPDX-License-Identifier: Apache-2.0 */
/* The round's state machine: order, occupancy, bounds, failure.
 * Invariant: a state changes under the lock and only by the call that is
 * inside, so a transition that was refused changed nothing. */
#include "core/round.h"

#include <stdio.h>
#include <string.h>

/* How long a call waits for another that is on its way out (an abort, or an
 * update that was told to stop: engines look every 100 ms). */
#define ENTER_WAIT_MS 2000

const char *ferry__round_state_name(ferry__round_state state)
{
    static const char *const names[] = {"idle",      "open",     "updating",
                                        "finishing", "prepared", "failed"};

    return names[state];
}

void ferry__bounds_arm(ferry__bounds *b, int64_t deadline_ms,
                       int64_t no_progress_ms)
{
    b->deadline = ferry__deadline_in(deadline_ms);
    b->no_progress_ms = no_progress_ms;
    b->progress_at_ns = ferry__now_ns();
}

ferry_status ferry__bounds_check(const ferry__bounds *b, const char *what,
                                 const char *detail)
{
    const char *comma = detail != NULL && detail[0] != '\0' ? ", " : "";
    int64_t idle_ms;

    if (detail == NULL)
        detail = "";
    if (ferry__deadline_passed(&b->deadline))
        return ferry_fail(FERRY_ETIMEOUT,
                          "deadline of %lld ms passed while %s%s%s",
                          (long long)b->deadline.bound_ms, what, comma, detail);
    idle_ms = (ferry__now_ns() - b->progress_at_ns) / 1000000;
    if (idle_ms >= b->no_progress_ms)
        return ferry_fail(FERRY_ENOPROGRESS,
                          "no progress for %lld ms while %s%s%s",
                          (long long)b->no_progress_ms, what, comma, detail);
    return FERRY_OK;
}

ferry_status ferry__round_init(ferry__round *r, int64_t deadline_ms,
                               int64_t no_progress_ms)
{
    memset(r, 0, sizeof(*r));
    r->deadline_ms = deadline_ms > 0 ? deadline_ms : FERRY__DEADLINE_MS;
    r->no_progress_ms =
        no_progress_ms > 0 ? no_progress_ms : FERRY__NO_PROGRESS_MS;
    ferry__bounds_arm(&r->bounds, r->deadline_ms, r->no_progress_ms);
    if (pthread_mutex_init(&r->lock, NULL) != 0)
        return ferry_fail(FERRY_ENOMEM, "no mutex for the round");
    if (ferry__cond_init(&r->left) < 0) {
        pthread_mutex_destroy(&r->lock);
        return ferry_fail(FERRY_ENOMEM, "no condition for the round");
    }
    return FERRY_OK;
}

void ferry__round_destroy(ferry__round *r)
{
    pthread_cond_destroy(&r->left);
    pthread_mutex_destroy(&r->lock);
}

static bool active(const ferry__round *r)
{
    return r->state != FERRY__ROUND_IDLE && r->state != FERRY__ROUND_FAILED;
}

ferry_status ferry__round_enter(ferry__round *r)
{
    int64_t until_ns = ferry__now_ns() + (int64_t)ENTER_WAIT_MS * 1000000;
    bool busy;

    pthread_mutex_lock(&r->lock);
    while (r->busy && ferry__now_ns() < until_ns)
        ferry__cond_wait_until(&r->left, &r->lock, until_ns);
    busy = r->busy;
    if (!busy) {
        r->busy = true;
        if (!active(r))
            r->canceled = false;
        r->bounds.progress_at_ns = ferry__now_ns();
    }
    pthread_mutex_unlock(&r->lock);
    if (busy)
        return ferry_fail(FERRY_EBUSY,
                          "another call of the control plane is running");
    return FERRY_OK;
}

bool ferry__round_leave(ferry__round *r)
{
    bool aborted;

    pthread_mutex_lock(&r->lock);
    aborted = r->canceled && active(r);
    if (!aborted) {
        r->busy = false;
        r->canceled = false;
        pthread_cond_broadcast(&r->left);
    }
    pthread_mutex_unlock(&r->lock);
    return aborted;
}

bool ferry__round_active(ferry__round *r)
{
    bool answer;

    pthread_mutex_lock(&r->lock);
    answer = active(r);
    pthread_mutex_unlock(&r->lock);
    return answer;
}

ferry__round_state ferry__round_state_of(ferry__round *r)
{
    ferry__round_state state;

    pthread_mutex_lock(&r->lock);
    state = r->state;
    pthread_mutex_unlock(&r->lock);
    return state;
}

/* The smaller of the worker's bound and the one that init info carried. */
static int64_t bound(int64_t own, int64_t asked)
{
    return asked > 0 && asked < own ? asked : own;
}

static void arm(ferry__round *r)
{
    ferry__bounds_arm(&r->bounds, bound(r->deadline_ms, r->init_deadline_ms),
                      bound(r->no_progress_ms, r->init_no_progress_ms));
}

void ferry__round_arm(ferry__round *r)
{
    pthread_mutex_lock(&r->lock);
    arm(r);
    pthread_mutex_unlock(&r->lock);
}

ferry_status ferry__round_open(ferry__round *r, bool draft)
{
    bool taken;

    pthread_mutex_lock(&r->lock);
    taken = active(r);
    if (!taken) {
        r->state = FERRY__ROUND_OPEN;
        r->draft = draft;
        r->canceled = false;
        r->number++;
        r->failure = FERRY_OK;
        r->failure_line[0] = '\0';
        memset(&r->phases, 0, sizeof(r->phases));
        arm(r);
    }
    pthread_mutex_unlock(&r->lock);
    if (taken)
        return ferry_fail(FERRY_EORDER,
                          "start_weight_update called while a weight update "
                          "is already active. Call finish_weight_update "
                          "first.");
    return FERRY_OK;
}

/* Refuses a call that came at the wrong time. After a failed round the reason
 * is added, since the caller may not have seen it. */
static ferry_status refuse(const ferry__round *r, const char *words)
{
    if (r->state == FERRY__ROUND_FAILED)
        return ferry_fail(FERRY_EORDER, "%s The last round failed: %s", words,
                          r->failure_line);
    return ferry_fail(FERRY_EORDER, "%s", words);
}

ferry_status ferry__round_to_updating(ferry__round *r)
{
    ferry_status st = FERRY_OK;

    pthread_mutex_lock(&r->lock);
    if (r->state == FERRY__ROUND_OPEN)
        r->state = FERRY__ROUND_UPDATING;
    else if (r->state == FERRY__ROUND_PREPARED)
        st = ferry_fail(FERRY_EORDER,
                        "update_weights came after "
                        "prepare_weight_update: commit or abort first.");
    else
        st = refuse(r, "start_weight_update must be called before "
                       "update_weights.");
    pthread_mutex_unlock(&r->lock);
    return st;
}

void ferry__round_updated(ferry__round *r, double ms)
{
    pthread_mutex_lock(&r->lock);
    r->state = FERRY__ROUND_OPEN;
    r->phases.update_ms += ms;
    pthread_mutex_unlock(&r->lock);
}

ferry_status ferry__round_to_finishing(ferry__round *r)
{
    ferry_status st = FERRY_OK;

    pthread_mutex_lock(&r->lock);
    if (r->state == FERRY__ROUND_OPEN)
        r->state = FERRY__ROUND_FINISHING;
    else if (r->state == FERRY__ROUND_PREPARED)
        st = ferry_fail(FERRY_EORDER,
                        "the weight update is prepared already: "
                        "commit_weight_update or abort_weight_update must "
                        "come next.");
    else
        st = refuse(r, "finish_weight_update called without a matching "
                       "start_weight_update.");
    pthread_mutex_unlock(&r->lock);
    return st;
}

void ferry__round_prepared(ferry__round *r, double ms)
{
    pthread_mutex_lock(&r->lock);
    r->state = FERRY__ROUND_PREPARED;
    r->phases.prepare_ms = ms;
    pthread_mutex_unlock(&r->lock);
}

ferry_status ferry__round_to_commit(ferry__round *r)
{
    ferry_status st = FERRY_OK;

    pthread_mutex_lock(&r->lock);
    if (r->state != FERRY__ROUND_PREPARED)
        st = refuse(r, "prepare_weight_update must be called before "
                       "commit_weight_update.");
    pthread_mutex_unlock(&r->lock);
    return st;
}

void ferry__round_committed(ferry__round *r, double ms)
{
    pthread_mutex_lock(&r->lock);
    r->state = FERRY__ROUND_IDLE;
    r->phases.commit_ms = ms;
    r->canceled = false;
    pthread_mutex_unlock(&r->lock);
}

void ferry__round_fail(ferry__round *r, ferry_status status)
{
    pthread_mutex_lock(&r->lock);
    r->state = FERRY__ROUND_FAILED;
    r->failure = status;
    snprintf(r->failure_line, sizeof(r->failure_line), "%s",
             ferry_last_error());
    r->canceled = false;
    pthread_mutex_unlock(&r->lock);
}

bool ferry__round_cancel(ferry__round *r)
{
    bool inside = false;

    pthread_mutex_lock(&r->lock);
    if (r->busy || active(r)) {
        r->canceled = true;
        inside = !r->busy;
        if (inside)
            r->busy = true;
    }
    pthread_mutex_unlock(&r->lock);
    return inside;
}

ferry_status ferry__round_check(ferry__round *r, const char *what,
                                const char *detail)
{
    ferry__bounds bounds;
    bool canceled;

    pthread_mutex_lock(&r->lock);
    bounds = r->bounds;
    canceled = r->canceled;
    pthread_mutex_unlock(&r->lock);
    if (canceled)
        return ferry_fail(FERRY_ECANCELED, "canceled while %s", what);
    return ferry__bounds_check(&bounds, what, detail);
}

void ferry__round_progress(ferry__round *r)
{
    pthread_mutex_lock(&r->lock);
    r->bounds.progress_at_ns = ferry__now_ns();
    pthread_mutex_unlock(&r->lock);
}

int64_t ferry__round_remaining_ms(ferry__round *r)
{
    int64_t left;

    pthread_mutex_lock(&r->lock);
    left = ferry__deadline_left_ms(&r->bounds.deadline);
    pthread_mutex_unlock(&r->lock);
    return left > 0 ? left : 1;
}

void ferry__round_set_bounds(ferry__round *r, int64_t deadline_ms,
                             int64_t no_progress_ms)
{
    pthread_mutex_lock(&r->lock);
    r->init_deadline_ms = deadline_ms;
    r->init_no_progress_ms = no_progress_ms;
    if (!active(r)) /* they bound the init that brought them as well */
        arm(r);
    pthread_mutex_unlock(&r->lock);
}
