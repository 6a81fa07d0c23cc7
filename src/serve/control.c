/* SPDX-License-Identifier: Apache-2.0 */
/* The round, carried to every rank of every replica.
 * A commit happens on all ranks or, when one of them is not prepared, on
 * none. Invariant: the version changes here and nowhere else. */
#include "base/alloc.h"
#include "base/log.h"
#include "serve/rank_call.h"

#include <jansson.h>
#include <stdio.h>
#include <string.h>

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
    for (int32_t i = 0; i < s->options->dp_size; i++) {
        if (close)
            ferry__replica_gate_close(&s->replicas[i]);
        else
            ferry__replica_gate_open(&s->replicas[i]);
    }
}

static void round_end(ferry__server *s, bool finished, double stop_ms,
                      const char *line)
{
    double ms = (double)(ferry__now_ns() - s->round_started_ns) * 1e-6;

    s->round_open = false;
    refresh_all(s);
    round_gates(s, false);
    pthread_mutex_lock(&s->lock);
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
    ferry__metrics_round(&s->metrics, finished, stop_ms * 1e-3);
}

/* A failed round: every rank lets go of it. Keeps the recorded line. */
static ferry_status round_failed(ferry__server *s, ferry_status st)
{
    char line[1024];

    snprintf(line, sizeof line, "%s", ferry_last_error());
    ferry__rank_call_abort(s);
    if (s->round_open)
        round_end(s, false, 0, line);
    ferry__log(FERRY_LOG_ERROR, "weight update failed: %s", line);
    return ferry__fail_line(st, line);
}

ferry_status ferry__control_init(ferry__server *s, const char *init_info)
{
    ferry_status st;

    FERRY_TRY(ferry__rank_call_begin(s, "init_weight_transfer_engine"));
    st = ferry__rank_call_wait_up(s);
    /* A trainer that came back does not wait for the round that the dead one
     * left open. */
    if (st == FERRY_OK && s->round_open) {
        ferry_fail(FERRY_ECANCELED, "a new trainer initialised the transfer");
        (void)round_failed(s, FERRY_ECANCELED);
    }
    if (st == FERRY_OK)
        st = ferry__rank_call(s, FERRY__RANK_INIT, init_info, NULL);
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
        st = ferry__rank_call(
            s, draft ? FERRY__RANK_START_DRAFT : FERRY__RANK_START, NULL, NULL);
        if (st == FERRY_OK) {
            s->round_open = true;
            s->round_started_ns = ferry__now_ns();
        } else {
            st = round_failed(s, st);
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
        st = ferry_fail(FERRY_EORDER, "start_weight_update must be called "
                                      "before update_weights.");
    } else {
        round_gates(s, true);
        st = ferry__rank_call(s, FERRY__RANK_UPDATE, update_info, NULL);
        if (st < 0)
            st = round_failed(s, st);
    }
    ferry__rank_call_end(s);
    return st;
}

static void set_version_locked(ferry__server *s, const char *version)
{
    char *copy = ferry__strdup(version);

    pthread_mutex_lock(&s->lock);
    if (copy != NULL) {
        ferry__free(s->version);
        s->version = copy;
    }
    pthread_mutex_unlock(&s->lock);
}

/* Whether the round that was committed changed anything: an empty one does
 * not touch the label (H5). */
static bool round_changed(ferry__server *s)
{
    void *bodies[FERRY__TP_MAX] = {0};
    size_t sizes[FERRY__TP_MAX] = {0};
    bool changed = true;

    if (ferry__replica_exchange(&s->replicas[0], FERRY__RANK_STATUS, NULL, 0,
                                30000, bodies, sizes) == FERRY_OK) {
        json_t *o = json_loadb(bodies[0], sizes[0], 0, NULL);
        json_t *n = json_object_get(json_object_get(o, "counters"), "n_params");

        changed = !json_is_integer(n) || json_integer_value(n) > 0;
        json_decref(o);
    }
    for (int i = 0; i < FERRY__TP_MAX; i++)
        ferry__free(bodies[i]);
    return changed;
}

/* Commits on all ranks while no step runs; the label changes with them. */
static ferry_status commit_all(ferry__server *s, const char *version)
{
    int64_t start = ferry__now_ns();
    bool changed = round_changed(s);
    ferry_status st;
    double ms;

    for (int32_t i = 0; i < s->options->dp_size; i++)
        ferry__replica_gate_close(&s->replicas[i]);
    st = ferry__rank_call(s, FERRY__RANK_COMMIT, version == NULL ? "" : version,
                          NULL);
    if (st == FERRY_OK && version != NULL && changed)
        set_version_locked(s, version);
    ms = (double)(ferry__now_ns() - start) * 1e-6;
    if (st == FERRY_OK)
        round_end(s, true, ms, NULL);
    for (int32_t i = 0; i < s->options->dp_size; i++)
        ferry__replica_gate_open(&s->replicas[i]);
    return st;
}

static ferry_status finish(ferry__server *s, const char *what, bool prepare,
                           bool commit, const char *version)
{
    ferry_status st = FERRY_OK;

    FERRY_TRY(ferry__rank_call_begin(s, what));
    if (!s->round_open)
        st = ferry_fail(FERRY_EORDER, "finish_weight_update called without a "
                                      "matching start_weight_update.");
    if (st == FERRY_OK && prepare)
        st = ferry__rank_call(s, FERRY__RANK_PREPARE, NULL, NULL);
    if (st == FERRY_OK && commit)
        st = commit_all(s, version);
    if (st < 0 && s->round_open)
        st = round_failed(s, st);
    ferry__rank_call_end(s);
    return st;
}

ferry_status ferry__control_finish(ferry__server *s, const char *version)
{
    return finish(s, "finish_weight_update", true, true, version);
}

ferry_status ferry__control_prepare(ferry__server *s)
{
    return finish(s, "prepare_weight_update", true, false, NULL);
}

ferry_status ferry__control_commit(ferry__server *s, const char *version)
{
    return finish(s, "commit_weight_update", false, true, version);
}

ferry_status ferry__control_abort(ferry__server *s)
{
    /* First without the control lock: an update that holds it must end. */
    ferry__rank_call_abort(s);
    if (pthread_mutex_trylock(&s->control) != 0)
        return FERRY_OK; /* the running call ends the round itself */
    if (s->round_open)
        round_end(s, false, 0, "aborted by the trainer");
    pthread_mutex_unlock(&s->control);
    return FERRY_OK;
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
    set_version_locked(s, version);
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
