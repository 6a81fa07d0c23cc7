/* SPDX-License-Identifier: Apache-2.0 */
/* The end of a round on all ranks: prepare, then commit.
 * Invariant: a replica serves what the label says: one that did not commit
 * what another one did is taken for lost and comes back without weights. */
#include "base/alloc.h"
#include "serve/control.h"
#include "serve/rank_call.h"

#include <jansson.h>
#include <stdio.h>
#include <string.h>

/* Whether the round that is committed changed anything: an empty one does
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

/* A replica that was started again since prepare has nothing to commit, and
 * no other one may then. */
static ferry_status check_prepared(ferry__server *s)
{
    uint64_t restarts = 0;

    for (int32_t i = 0; i < s->options->dp_size; i++) {
        ferry__replica *r = &s->replicas[i];
        char reason[512];
        bool up;

        pthread_mutex_lock(&r->lock);
        restarts += r->n_restarts;
        up = r->up;
        snprintf(reason, sizeof reason, "%s", r->reason);
        pthread_mutex_unlock(&r->lock);
        if (!up)
            return ferry_fail(FERRY_EPEER,
                              "replica %d was lost after "
                              "prepare_weight_update: %s",
                              r->index, reason);
    }
    if (restarts != s->prepared_restarts)
        return ferry_fail(FERRY_EPEER,
                          "a replica was lost after prepare_weight_update "
                          "and started again");
    return FERRY_OK;
}

static void mark_prepared(ferry__server *s)
{
    uint64_t restarts = 0;

    for (int32_t i = 0; i < s->options->dp_size; i++) {
        pthread_mutex_lock(&s->replicas[i].lock);
        restarts += s->replicas[i].n_restarts;
        pthread_mutex_unlock(&s->replicas[i].lock);
    }
    s->prepared_restarts = restarts;
    pthread_mutex_lock(&s->lock);
    s->prepared = true;
    pthread_mutex_unlock(&s->lock);
}

/* Ranks of the replica that committed. */
static int32_t committed_ranks(const ferry__server *s, int32_t replica,
                               const ferry_status *statuses)
{
    int32_t tp = s->options->tp_size, n = 0;

    for (int32_t i = 0; i < tp; i++)
        n += statuses[replica * tp + i] == FERRY_OK;
    return n;
}

/* After a commit that failed somewhere. True when a replica committed whole;
 * the others are then lost, and the recorded line says which. */
static bool settle_part(ferry__server *s, const ferry__answers *a)
{
    int32_t tp = s->options->tp_size, whole = -1, any = 0;

    for (int32_t i = 0; i < s->options->dp_size; i++) {
        int32_t n = committed_ranks(s, i, a->statuses);

        any += n;
        if (n == tp && whole < 0)
            whole = i;
    }
    for (int32_t i = 0; any > 0 && i < s->options->dp_size; i++)
        if (committed_ranks(s, i, a->statuses) < tp)
            ferry__replica_lost(&s->replicas[i], a->line);
    if (whole >= 0)
        ferry_fail(a->first,
                   "replica %d committed; one that did not starts again: %s",
                   whole, a->line);
    return whole >= 0;
}

/* What every rank said of itself with its answer; NULL where it did not.
 * Owned, with its objects. */
static json_t **read_statuses(const ferry__server *s, const ferry__answers *a)
{
    int32_t n = ferry__rank_world(s);
    json_t **out = ferry__alloc_array((size_t)n, sizeof *out);

    for (int32_t i = 0; out != NULL && i < n; i++)
        if (a->sizes[i] > 0)
            out[i] = json_loadb(a->bodies[i], a->sizes[i], 0, NULL);
    return out;
}

static void take_statuses(ferry__server *s, json_t **statuses)
{
    for (int32_t i = 0; i < s->options->dp_size; i++) {
        if (statuses == NULL)
            ferry__replica_refresh(&s->replicas[i]);
        else
            ferry__replica_take_statuses(&s->replicas[i],
                                         statuses + i * s->options->tp_size);
    }
    ferry__free(statuses);
}

/* Commits on all ranks while no step runs; the label changes with them. */
static ferry_status commit_gated(ferry__server *s, const char *version,
                                 bool changed, ferry__answers *a)
{
    bool took = true;
    ferry_status st;

    FERRY_TRY(ferry__answers_open(s, a));
    ferry__history_stop(&s->history, true);
    for (int32_t i = 0; i < s->options->dp_size; i++)
        ferry__replica_gate_close(&s->replicas[i]);
    pthread_mutex_lock(&s->ending);
    st = ferry__rank_call(s, FERRY__RANK_COMMIT, version == NULL ? "" : version,
                          a);
    pthread_mutex_unlock(&s->ending);
    if (st < 0)
        took = settle_part(s, a);
    if (took && version != NULL && changed)
        ferry__control_label(s, version);
    if (st == FERRY_OK) {
        take_statuses(s, read_statuses(s, a));
        ferry__control_round_end(s, true, NULL);
    }
    for (int32_t i = 0; i < s->options->dp_size; i++)
        ferry__replica_gate_open(&s->replicas[i]);
    ferry__history_stop(&s->history, false);
    return st;
}

static ferry_status commit_all(ferry__server *s, const char *version,
                               bool changed)
{
    ferry__answers a = {0};
    ferry_status st;

    FERRY_TRY(check_prepared(s));
    st = commit_gated(s, version, changed, &a);
    ferry__answers_close(s, &a);
    return st;
}

/* Books a round in which no rank had anything. Nothing was written, so nobody
 * had to stop for it, and neither the label (H5) nor what may be served is
 * touched. */
static void end_empty(ferry__server *s)
{
    json_t *idle = json_pack("{s:s}", "state", "idle");

    for (int32_t i = 0; i < ferry__rank_world(s); i++)
        ferry__history_rank(&s->history, i, json_incref(idle));
    json_decref(idle);
    ferry__control_round_end(s, true, NULL);
}

/* Prepares on all ranks. With `may_end` an empty round ends here. */
static ferry_status prepare_all(ferry__server *s, bool may_end, bool *out_ended)
{
    ferry__answers a = {0};
    int32_t n = ferry__rank_world(s), n_ended = 0;
    ferry_status st = ferry__answers_open(s, &a);

    if (st == FERRY_OK)
        st = ferry__rank_call(s, FERRY__RANK_PREPARE,
                              may_end ? FERRY__RANK_END_EMPTY : NULL, &a);
    for (int32_t i = 0; st == FERRY_OK && i < n; i++)
        n_ended +=
            a.bodies[i] != NULL && strcmp(a.bodies[i], FERRY__RANK_ENDED) == 0;
    *out_ended = n_ended == n;
    if (*out_ended)
        end_empty(s);
    else if (st == FERRY_OK)
        mark_prepared(s);
    ferry__answers_close(s, &a);
    return st;
}

/* A call that comes at the wrong time changes nothing. */
static ferry_status check_order(ferry__server *s, bool prepare)
{
    bool prepared = ferry__control_is_prepared(s);

    if (!s->round_open)
        return ferry__control_no_round(s, "finish_weight_update called "
                                          "without a matching "
                                          "start_weight_update.");
    if (prepare && prepared)
        return ferry_fail(FERRY_EORDER,
                          "the weight update is prepared already: "
                          "commit_weight_update or abort_weight_update must "
                          "come next.");
    if (!prepare && !prepared)
        return ferry_fail(FERRY_EORDER,
                          "prepare_weight_update must be called before "
                          "commit_weight_update.");
    return FERRY_OK;
}

static ferry_status finish(ferry__server *s, const char *what, bool prepare,
                           bool commit, const char *version)
{
    bool ended = false;
    ferry_status st;

    FERRY_TRY(ferry__rank_call_begin(s, what));
    st = check_order(s, prepare);
    if (st < 0) {
        ferry__rank_call_end(s);
        return st;
    }
    if (prepare)
        st = prepare_all(s, commit, &ended);
    if (st == FERRY_OK && commit && !ended)
        st = commit_all(s, version, prepare || round_changed(s));
    if (st < 0)
        st = ferry__control_round_failed(s, st);
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
