/* SPDX-License-Identifier: Apache-2.0 */
/* The weight calls, carried to every rank of every replica.
 * One call at a time: a second one is refused, naming the first. A commit
 * happens on all ranks or, when one of them is not prepared, on none.
 * Invariant: the version changes here and nowhere else. */
#include "base/alloc.h"
#include "base/log.h"
#include "base/thread.h"
#include "serve/server.h"

#include <jansson.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>

#define REPLICA_UP_MS       60000
#define DEFAULT_DEADLINE_MS 300000
#define DEADLINE_SLACK_MS   5000

/* Answers of all ranks, dp-major. */
typedef struct answers {
    ferry_status first; /* of the lowest failing rank */
    char line[1024];
    void **bodies; /* NULL, or one owned text a rank */
    size_t *sizes;
} answers;

static int32_t world(const ferry__server *s)
{
    return s->options->dp_size * s->options->tp_size;
}

static ferry_status control_begin(ferry__server *s, const char *what)
{
    const char *running;

    if (pthread_mutex_trylock(&s->control) != 0) {
        pthread_mutex_lock(&s->lock);
        running = s->running;
        pthread_mutex_unlock(&s->lock);
        return ferry_fail(FERRY_EBUSY, "%s refused: %s is running", what,
                          running == NULL ? "another weight call" : running);
    }
    pthread_mutex_lock(&s->lock);
    s->running = what;
    pthread_mutex_unlock(&s->lock);
    return FERRY_OK;
}

static void control_end(ferry__server *s)
{
    pthread_mutex_lock(&s->lock);
    s->running = NULL;
    pthread_mutex_unlock(&s->lock);
    pthread_mutex_unlock(&s->control);
}

static int64_t call_bound_ms(const ferry__server *s)
{
    int64_t ms = s->options->deadline_ms > 0 ? s->options->deadline_ms
                                             : DEFAULT_DEADLINE_MS;

    return ms + DEADLINE_SLACK_MS;
}

static void note(answers *a, ferry_status st)
{
    if (a->first == FERRY_OK) {
        a->first = st;
        snprintf(a->line, sizeof a->line, "%s", ferry_last_error());
    } else {
        ferry__log(FERRY_LOG_WARN, "also: %s", ferry_last_error());
    }
}

/* Tells the ranks of all replicas to end their round; they answer even while
 * an update runs. */
static void abort_ranks(ferry__server *s)
{
    for (int32_t i = 0; i < s->options->dp_size; i++) {
        bool up;

        pthread_mutex_lock(&s->replicas[i].lock);
        up = s->replicas[i].up;
        pthread_mutex_unlock(&s->replicas[i].lock);
        if (up)
            (void)ferry__replica_exchange(&s->replicas[i], FERRY__RANK_ABORT,
                                          NULL, 0, 30000, NULL, NULL);
    }
}

static ferry_status receive_one(ferry__server *s, int32_t i, answers *a,
                                const ferry__waiter *w)
{
    ferry__replica *r = &s->replicas[i / s->options->tp_size];
    int32_t rank = i % s->options->tp_size;
    ferry_status status = FERRY_OK;
    ferry_status st =
        ferry__rank_receive(r->ranks.control_fds[rank], w, &status,
                            a->bodies == NULL ? NULL : &a->bodies[i],
                            a->sizes == NULL ? NULL : &a->sizes[i]);

    if (st == FERRY_OK && status < 0)
        return ferry__fail_prefix(status, "replica %d rank %d", r->index, rank);
    if (st < 0) {
        ferry__fail_prefix(st, "replica %d rank %d (pid %d)", r->index, rank,
                           r->ranks.pids[rank]);
        ferry__replica_lost(r, ferry_last_error());
        return FERRY_EPEER;
    }
    return st;
}

/* Collects the answers as they come, so that the first failure can end the
 * others at once. */
static void collect(ferry__server *s, bool *pending, answers *a,
                    bool abort_on_failure)
{
    ferry__waiter w = {NULL, NULL, ferry__deadline_in(call_bound_ms(s)),
                       "rank answer"};
    int32_t left = 0;
    struct pollfd *fds = ferry__alloc_array((size_t)world(s), sizeof *fds);

    for (int32_t i = 0; i < world(s); i++) {
        ferry__replica *r = &s->replicas[i / s->options->tp_size];

        left += pending[i];
        if (fds != NULL)
            fds[i] = (struct pollfd){
                pending[i] ? r->ranks.control_fds[i % s->options->tp_size] : -1,
                POLLIN, 0};
    }
    while (left > 0) {
        if (fds != NULL)
            poll(fds, (nfds_t)world(s), 200);
        for (int32_t i = 0; i < world(s); i++) {
            ferry_status st;

            if (!pending[i] || (fds != NULL && fds[i].revents == 0 &&
                                !ferry__deadline_passed(&w.deadline)))
                continue;
            st = receive_one(s, i, a, &w);
            pending[i] = false;
            if (fds != NULL)
                fds[i].fd = -1;
            left--;
            if (st < 0) {
                bool first = a->first == FERRY_OK;

                note(a, st);
                if (first && abort_on_failure)
                    abort_ranks(s);
            }
        }
    }
    ferry__free(fds);
}

/* One call on every rank; waits for all. Under `control`. */
static ferry_status call_all(ferry__server *s, ferry__rank_kind kind,
                             const char *body, answers *a)
{
    ferry__waiter w = {NULL, NULL, ferry__deadline_in(30000), "rank call"};
    answers own = {0};
    bool *pending = ferry__alloc_array((size_t)world(s), sizeof *pending);

    if (pending == NULL)
        return FERRY_ENOMEM;
    if (a == NULL)
        a = &own;
    pthread_mutex_lock(&s->calls);
    for (int32_t i = 0; i < world(s); i++) {
        ferry__replica *r = &s->replicas[i / s->options->tp_size];
        int32_t rank = i % s->options->tp_size;
        ferry_status st =
            ferry__rank_send(r->ranks.control_fds[rank], kind, body,
                             body == NULL ? 0 : strlen(body) + 1, &w);

        pending[i] = st == FERRY_OK;
        if (st < 0) {
            ferry__fail_prefix(st, "replica %d rank %d (pid %d)", r->index,
                               rank, r->ranks.pids[rank]);
            note(a, FERRY_EPEER);
            ferry__replica_lost(r, a->line);
        }
    }
    collect(s, pending, a, kind == FERRY__RANK_UPDATE);
    pthread_mutex_unlock(&s->calls);
    ferry__free(pending);
    if (a->first < 0)
        return ferry__fail_line(a->first, a->line);
    return FERRY_OK;
}

static ferry_status wait_all_up(ferry__server *s)
{
    for (int32_t i = 0; i < s->options->dp_size; i++)
        FERRY_TRY(ferry__replica_wait_up(&s->replicas[i], REPLICA_UP_MS));
    return FERRY_OK;
}

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
    abort_ranks(s);
    if (s->round_open)
        round_end(s, false, 0, line);
    ferry__log(FERRY_LOG_ERROR, "weight update failed: %s", line);
    return ferry__fail_line(st, line);
}

ferry_status ferry__control_init(ferry__server *s, const char *init_info)
{
    ferry_status st;

    FERRY_TRY(control_begin(s, "init_weight_transfer_engine"));
    st = wait_all_up(s);
    /* A trainer that came back does not wait for the round that the dead one
     * left open. */
    if (st == FERRY_OK && s->round_open) {
        ferry_fail(FERRY_ECANCELED, "a new trainer initialised the transfer");
        (void)round_failed(s, FERRY_ECANCELED);
    }
    if (st == FERRY_OK)
        st = call_all(s, FERRY__RANK_INIT, init_info, NULL);
    control_end(s);
    return st;
}

ferry_status ferry__control_start(ferry__server *s, bool draft)
{
    ferry_status st;

    FERRY_TRY(control_begin(s, draft ? "start_draft_weight_update"
                                     : "start_weight_update"));
    st = wait_all_up(s);
    if (st == FERRY_OK && s->round_open)
        st = ferry_fail(FERRY_EORDER,
                        "start_weight_update called while a weight update is "
                        "already active. Call finish_weight_update first.");
    else if (st == FERRY_OK) {
        st = call_all(s, draft ? FERRY__RANK_START_DRAFT : FERRY__RANK_START,
                      NULL, NULL);
        if (st == FERRY_OK) {
            s->round_open = true;
            s->round_started_ns = ferry__now_ns();
        } else {
            st = round_failed(s, st);
        }
    }
    control_end(s);
    return st;
}

ferry_status ferry__control_update(ferry__server *s, const char *update_info)
{
    ferry_status st;

    FERRY_TRY(control_begin(s, "update_weights"));
    if (!s->round_open) {
        st = ferry_fail(FERRY_EORDER, "start_weight_update must be called "
                                      "before update_weights.");
    } else {
        round_gates(s, true);
        st = call_all(s, FERRY__RANK_UPDATE, update_info, NULL);
        if (st < 0)
            st = round_failed(s, st);
    }
    control_end(s);
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
    st = call_all(s, FERRY__RANK_COMMIT, version == NULL ? "" : version, NULL);
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

    FERRY_TRY(control_begin(s, what));
    if (!s->round_open)
        st = ferry_fail(FERRY_EORDER, "finish_weight_update called without a "
                                      "matching start_weight_update.");
    if (st == FERRY_OK && prepare)
        st = call_all(s, FERRY__RANK_PREPARE, NULL, NULL);
    if (st == FERRY_OK && commit)
        st = commit_all(s, version);
    if (st < 0 && s->round_open)
        st = round_failed(s, st);
    control_end(s);
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
    abort_ranks(s);
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

    FERRY_TRY(control_begin(s, "shutdown_weight_transfer_engine"));
    if (s->round_open)
        st = ferry_fail(FERRY_EORDER, "Cannot release a trainer connection "
                                      "during a weight update");
    else
        st = call_all(s, FERRY__RANK_SHUTDOWN, NULL, NULL);
    control_end(s);
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

static ferry_status gather(ferry__server *s, const char *what,
                           ferry__rank_kind kind, answers *a)
{
    ferry_status st;

    FERRY_TRY(control_begin(s, what));
    a->bodies = ferry__alloc_array((size_t)world(s), sizeof *a->bodies);
    a->sizes = ferry__alloc_array((size_t)world(s), sizeof *a->sizes);
    st = a->bodies == NULL || a->sizes == NULL ? FERRY_ENOMEM : FERRY_OK;
    if (st == FERRY_OK)
        st = wait_all_up(s);
    if (st == FERRY_OK)
        st = call_all(s, kind, NULL, a);
    control_end(s);
    return st;
}

static void answers_free(ferry__server *s, answers *a)
{
    for (int32_t i = 0; a->bodies != NULL && i < world(s); i++)
        ferry__free(a->bodies[i]);
    ferry__free(a->bodies);
    ferry__free(a->sizes);
}

ferry_status ferry__control_checksums(ferry__server *s, char **out_json)
{
    answers a = {0};
    ferry__str out = {0};
    ferry_status st = gather(s, "weight_checker", FERRY__RANK_CHECKSUM, &a);

    ferry__str_append(&out, "{");
    for (int32_t i = 0; st == FERRY_OK && i < world(s); i++) {
        json_t *o = json_loadb(a.bodies[i], a.sizes[i], 0, NULL);
        const char *name;
        json_t *hex;

        json_object_foreach(o, name, hex)
        {
            ferry__str_printf(&out, "%s\"dp%d:pp0:pcp0:tp%d:%s\":\"%s\"",
                              out.length > 1 ? "," : "",
                              i / s->options->tp_size, i % s->options->tp_size,
                              name, json_string_value(hex));
        }
        json_decref(o);
    }
    ferry__str_append(&out, "}");
    answers_free(s, &a);
    if (st < 0) {
        ferry__str_free(&out);
        return st;
    }
    return ferry__str_take(&out, out_json);
}

ferry_status ferry__control_plan(ferry__server *s, char **out_json)
{
    answers a = {0};
    ferry__str out = {0};
    ferry_status st = gather(s, "plan", FERRY__RANK_PLAN, &a);

    ferry__str_append(&out, "{");
    for (int32_t i = 0; st == FERRY_OK && i < world(s); i++) {
        ferry__str_printf(&out, "%s\"dp%d:tp%d\":", i > 0 ? "," : "",
                          i / s->options->tp_size, i % s->options->tp_size);
        ferry__str_append_n(&out, a.bodies[i], a.sizes[i]);
    }
    ferry__str_append(&out, "}");
    answers_free(s, &a);
    if (st < 0) {
        ferry__str_free(&out);
        return st;
    }
    return ferry__str_take(&out, out_json);
}

ferry_status ferry__control_reset(ferry__server *s)
{
    ferry_status st;

    FERRY_TRY(control_begin(s, "weight_checker"));
    if (s->round_open) {
        st = ferry_fail(FERRY_EORDER, "reset refused: a weight update is "
                                      "active");
    } else {
        for (int32_t i = 0; i < s->options->dp_size; i++)
            ferry__replica_gate_close(&s->replicas[i]);
        st = call_all(s, FERRY__RANK_RESET, NULL, NULL);
        for (int32_t i = 0; i < s->options->dp_size; i++)
            ferry__replica_gate_open(&s->replicas[i]);
    }
    control_end(s);
    return st;
}
