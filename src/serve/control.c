/* SPDX-License-Identifier: Apache-2.0 */
/* The round, carried to every rank of every replica: init, start, update,
 * abort, and what ends a round. Its finish is in control_finish.c.
 * Invariant: the version changes in ferry__control_label and nowhere else. */
#include "serve/control.h"

#include "base/alloc.h"
#include "base/log.h"
#include "base/thread.h"
#include "serve/rank_call.h"

#include <stdio.h>
#include <string.h>

/* How long an abort waits for the call that it ends. Ranks let go within
 * their waiting slice; the client itself waits 5 s for an abort. */
#define ABORT_WAIT_MS 4000
/* How long an init waits for a call that is on its way out. */
#define INIT_WAIT_MS 1000

static const char init_name[] = "init_weight_transfer_engine";

static void refresh_all(ferry__server *s)
{
    for (int32_t i = 0; i < s->options->dp_size; i++)
        ferry__replica_refresh(&s->replicas[i]);
}

/* An in-place round writes under the running model: steps wait until it
 * ends. A staged one lets them go on. */
static void round_gates(ferry__server *s, bool close)
{
    if (s->options->commit != FERRY_COMMIT_INPLACE ||
        s->gates_for_round == close)
        return;
    s->gates_for_round = close;
    if (close)
        ferry__history_stop(&s->history, true);
    for (int32_t i = 0; i < s->options->dp_size; i++) {
        if (close)
            ferry__replica_gate_close(&s->replicas[i]);
        else
            ferry__replica_gate_open(&s->replicas[i]);
    }
    if (!close)
        ferry__history_stop(&s->history, false);
}

/* Books the round in history and metrics; how long generation stood. */
static double record(ferry__server *s, bool finished, const char *line)
{
    char *version = finished ? ferry__server_version(s) : NULL;
    ferry__round_sums sums;

    ferry__history_end(&s->history, finished, version, line, &sums);
    ferry__metrics_round(&s->metrics, finished, &sums);
    ferry__free(version);
    return sums.stop_seconds * 1e3;
}

/* A start that a rank refused as the caller's mistake was no round. */
static void record_start(ferry__server *s, ferry_status st)
{
    if (st == FERRY_ENOTSUP || st == FERRY_EORDER)
        ferry__history_forget(&s->history);
    else if (st < 0)
        (void)record(s, false, ferry_last_error());
}

void ferry__control_round_end(ferry__server *s, bool finished, const char *line)
{
    double ms, stop_ms;

    s->round_open = false;
    if (!finished)
        refresh_all(s);
    /* Before a reader can come through an open gate. */
    pthread_mutex_lock(&s->lock);
    s->content++;
    pthread_mutex_unlock(&s->lock);
    round_gates(s, false);
    ms = (double)(ferry__now_ns() - s->round_started_ns) * 1e-6;
    stop_ms = record(s, finished, line);
    pthread_mutex_lock(&s->lock);
    s->prepared = false;
    if (finished) {
        s->rounds_finished++;
        s->last_round_ms = ms;
        s->last_stop_ms = stop_ms;
    } else {
        s->rounds_failed++;
    }
    ferry__free(s->last_failure);
    s->last_failure = line == NULL ? NULL : ferry__strdup(line);
    pthread_mutex_unlock(&s->lock);
}

ferry_status ferry__control_round_failed(ferry__server *s, ferry_status st)
{
    char line[1024];

    snprintf(line, sizeof line, "%s", ferry_last_error());
    ferry__rank_call_abort(s);
    if (s->round_open)
        ferry__control_round_end(s, false, line);
    ferry__log(FERRY_LOG_ERROR, "weight update failed: %s", line);
    return ferry__fail_line(st, line);
}

ferry_status ferry__control_no_round(ferry__server *s, const char *words)
{
    ferry_status st;

    pthread_mutex_lock(&s->lock);
    st = ferry_fail(FERRY_EORDER, "%s%s%.600s", words,
                    s->last_failure == NULL ? "" : " The last round failed: ",
                    s->last_failure == NULL ? "" : s->last_failure);
    pthread_mutex_unlock(&s->lock);
    return st;
}

/* Marks the init that runs as one that another takes over. */
static bool take_over(ferry__server *s)
{
    bool runs;

    pthread_mutex_lock(&s->lock);
    runs = s->running != NULL && strcmp(s->running, init_name) == 0;
    s->taken_over = s->taken_over || runs;
    pthread_mutex_unlock(&s->lock);
    return runs;
}

/* Its trainer must hear of the other one, and not only that it was canceled.
 */
static ferry_status say_taken_over(ferry__server *s, ferry_status st)
{
    bool taken;

    pthread_mutex_lock(&s->lock);
    taken = s->taken_over;
    s->taken_over = false;
    pthread_mutex_unlock(&s->lock);
    if (st < 0 && taken)
        return ferry__fail_prefix(st, "another trainer initialised the "
                                      "transfer (or the same one, which "
                                      "reaches this server by two URLs)");
    return st;
}

/* An init that still waits for its group to form gives way: its trainer may
 * be gone. Any other call is given the time in which its ranks find that out
 * by themselves. */
static ferry_status begin_init(ferry__server *s)
{
    ferry__deadline d = ferry__deadline_in(INIT_WAIT_MS);
    ferry_status st;

    while ((st = ferry__rank_call_begin(s, init_name)) == FERRY_EBUSY &&
           !ferry__deadline_passed(&d)) {
        if (take_over(s))
            ferry__rank_call_abort(s);
        ferry__sleep_ms(50);
    }
    return st;
}

ferry_status ferry__control_init(ferry__server *s, const char *init_info)
{
    ferry_status st;

    FERRY_TRY(begin_init(s));
    (void)say_taken_over(s, FERRY_OK); /* that was the one before */
    st = ferry__rank_call_wait_up(s);
    /* A trainer that came back does not wait for the round that the dead one
     * left open. */
    if (st == FERRY_OK && s->round_open) {
        ferry_fail(FERRY_ECANCELED, "a new trainer initialised the transfer");
        (void)ferry__control_round_failed(s, FERRY_ECANCELED);
    }
    if (st == FERRY_OK)
        st = ferry__rank_call(s, FERRY__RANK_INIT, init_info, NULL);
    st = say_taken_over(s, st);
    ferry__rank_call_end(s);
    return st;
}

ferry_status ferry__control_start(ferry__server *s, bool draft)
{
    ferry_status st;

    FERRY_TRY(ferry__rank_call_begin(s, draft ? "start_draft_weight_update"
                                              : "start_weight_update"));
    st = ferry__rank_call_wait_up(s);
    if (st == FERRY_OK && s->round_open)
        st = ferry_fail(FERRY_EORDER,
                        "start_weight_update called while a weight update is "
                        "already active. Call finish_weight_update first.");
    else if (st == FERRY_OK) {
        ferry__history_begin(&s->history);
        st = ferry__rank_call(
            s, draft ? FERRY__RANK_START_DRAFT : FERRY__RANK_START, NULL, NULL);
        if (st == FERRY_OK) {
            s->round_open = true;
            s->round_started_ns = ferry__now_ns();
        } else {
            st = ferry__control_round_failed(s, st);
            record_start(s, st);
        }
    }
    ferry__rank_call_end(s);
    return st;
}

ferry_status ferry__control_update(ferry__server *s, const char *update_info)
{
    ferry_status st;

    FERRY_TRY(ferry__rank_call_begin(s, "update_weights"));
    if (!s->round_open) {
        st = ferry__control_no_round(s, "start_weight_update must be called "
                                        "before update_weights.");
    } else if (ferry__control_is_prepared(s)) {
        st = ferry_fail(FERRY_EORDER,
                        "update_weights came after prepare_weight_update: "
                        "commit or abort first.");
    } else {
        round_gates(s, true);
        st = ferry__rank_call(s, FERRY__RANK_UPDATE, update_info, NULL);
        if (st < 0)
            st = ferry__control_round_failed(s, st);
    }
    ferry__rank_call_end(s);
    return st;
}

bool ferry__control_is_prepared(ferry__server *s)
{
    bool prepared;

    pthread_mutex_lock(&s->lock);
    prepared = s->prepared;
    pthread_mutex_unlock(&s->lock);
    return prepared;
}

void ferry__control_label(ferry__server *s, const char *version)
{
    char *copy = ferry__strdup(version);

    pthread_mutex_lock(&s->lock);
    if (copy != NULL) {
        ferry__free(s->version);
        s->version = copy;
    }
    pthread_mutex_unlock(&s->lock);
}

/* Ends the round that is open. Under control. */
static void end_open(ferry__server *s, ferry_status st, const char *why)
{
    /* A start that was under way opened it after the ranks were told. */
    ferry__rank_call_abort(s);
    ferry_fail(st, "%s", why);
    ferry__log(FERRY_LOG_WARN, "weight update ended: %s", why);
    ferry__control_round_end(s, false, why);
}

static ferry_status not_ended(ferry__server *s)
{
    const char *running;

    pthread_mutex_lock(&s->lock);
    running = s->running;
    pthread_mutex_unlock(&s->lock);
    return ferry_fail(
        FERRY_ETIMEOUT, "abort_weight_update: %s has not ended within %d ms",
        running == NULL ? "a weight call" : running, ABORT_WAIT_MS);
}

ferry_status ferry__control_abort(ferry__server *s)
{
    int64_t until = ferry__now_ns() + ABORT_WAIT_MS * INT64_C(1000000);

    /* First without the control lock: an update that holds it must end. A
     * commit is not stopped half way. */
    if (!ferry__mutex_lock_until(&s->ending, until))
        return not_ended(s);
    ferry__rank_call_abort(s);
    pthread_mutex_unlock(&s->ending);
    /* An answer before the update let go would let the next trainer meet it. */
    if (!ferry__mutex_lock_until(&s->control, until))
        return not_ended(s);
    if (s->round_open)
        end_open(s, FERRY_ECANCELED, "aborted by the trainer");
    pthread_mutex_unlock(&s->control);
    return FERRY_OK;
}

void ferry__control_reap(ferry__server *s)
{
    int64_t bound_ms = ferry__rank_bound_ms(s);
    char why[128];

    if (pthread_mutex_trylock(&s->control) != 0)
        return; /* a call runs, which has bounds of its own */
    snprintf(why, sizeof why,
             "its trainer did not finish the weight update within %lld ms",
             (long long)bound_ms);
    if (s->round_open &&
        ferry__now_ns() - s->round_started_ns > bound_ms * 1000000)
        end_open(s, FERRY_ETIMEOUT, why);
    pthread_mutex_unlock(&s->control);
}

ferry_status ferry__control_shutdown(ferry__server *s)
{
    ferry_status st;

    FERRY_TRY(ferry__rank_call_begin(s, "shutdown_weight_transfer_engine"));
    if (s->round_open)
        st = ferry_fail(FERRY_EORDER, "Cannot release a trainer connection "
                                      "during a weight update");
    else
        st = ferry__rank_call(s, FERRY__RANK_SHUTDOWN, NULL, NULL);
    ferry__rank_call_end(s);
    return st;
}

ferry_status ferry__control_set_version(ferry__server *s, const char *version)
{
    ferry__control_label(s, version);
    for (int32_t i = 0; i < s->options->dp_size; i++) {
        bool up;

        pthread_mutex_lock(&s->replicas[i].lock);
        up = s->replicas[i].up;
        pthread_mutex_unlock(&s->replicas[i].lock);
        if (up)
            FERRY_TRY(ferry__replica_exchange(
                &s->replicas[i], FERRY__RANK_SET_VERSION, version,
                strlen(version) + 1, 30000, NULL, NULL));
    }
    return FERRY_OK;
}
