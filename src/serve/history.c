/* SPDX-License-Identifier: Apache-2.0 */
/* The record of rounds; see history.h. */
#include "serve/history.h"

#include "base/alloc.h"
#include "base/clock.h"

#include <string.h>

static const char *const phase_names[FERRY__PHASE_COUNT] = {
    "start", "update", "prepare", "commit"};
static const char *const phase_keys[FERRY__PHASE_COUNT] = {
    "start_ms", "update_ms", "prepare_ms", "commit_ms"};

double ferry__history_wall(void)
{
    struct timespec t;

    clock_gettime(CLOCK_REALTIME, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

const char *ferry__round_phase_name(ferry__round_phase phase)
{
    return phase_names[phase];
}

static double ms_of(int64_t ns)
{
    return (double)ns * 1e-6;
}

ferry_status ferry__history_init(ferry__history *h, int32_t tp_size,
                                 int32_t dp_size)
{
    size_t world = (size_t)tp_size * (size_t)dp_size;

    memset(h, 0, sizeof *h);
    pthread_mutex_init(&h->lock, NULL);
    h->tp_size = tp_size;
    h->world = (int32_t)world;
    h->rounds = json_array();
    h->rank_ns =
        ferry__alloc_array(world * FERRY__HISTORY_CALLS, sizeof *h->rank_ns);
    h->statuses = ferry__alloc_array(world, sizeof(json_t *));
    if (h->rounds == NULL || h->rank_ns == NULL || h->statuses == NULL)
        return FERRY_ENOMEM;
    for (size_t i = 0; i < FERRY__HISTORY_CALLS; i++)
        h->calls[i].rank_ns = h->rank_ns + i * world;
    return FERRY_OK;
}

static void drop_statuses(ferry__history *h)
{
    for (int32_t i = 0; h->statuses != NULL && i < h->world; i++) {
        json_decref(h->statuses[i]);
        h->statuses[i] = NULL;
    }
}

void ferry__history_free(ferry__history *h)
{
    drop_statuses(h);
    json_decref(h->rounds);
    ferry__free(h->rank_ns);
    ferry__free(h->statuses);
    h->rounds = NULL;
    h->rank_ns = NULL;
    h->statuses = NULL;
}

/* ---- the round that runs ---- */

void ferry__history_begin(ferry__history *h)
{
    pthread_mutex_lock(&h->lock);
    drop_statuses(h);
    h->open = true;
    h->number++;
    h->began_ns = ferry__now_ns();
    h->started_at = ferry__history_wall();
    h->stop_ns = h->stop_began_ns = 0;
    h->n_calls = 0;
    h->in_call = false;
    pthread_mutex_unlock(&h->lock);
}

void ferry__history_forget(ferry__history *h)
{
    pthread_mutex_lock(&h->lock);
    if (h->open)
        h->number--;
    h->open = false;
    pthread_mutex_unlock(&h->lock);
}

static bool phase_of(ferry__rank_kind kind, ferry__round_phase *out)
{
    switch (kind) {
    case FERRY__RANK_START:
    case FERRY__RANK_START_DRAFT:
        *out = FERRY__PHASE_START;
        return true;
    case FERRY__RANK_UPDATE:
        *out = FERRY__PHASE_UPDATE;
        return true;
    case FERRY__RANK_PREPARE:
        *out = FERRY__PHASE_PREPARE;
        return true;
    case FERRY__RANK_COMMIT:
        *out = FERRY__PHASE_COMMIT;
        return true;
    default:
        return false;
    }
}

/* Room is kept for prepare and commit: beyond it, updates join the last. */
static ferry__round_call *entry_for(ferry__history *h, ferry__round_phase phase)
{
    ferry__round_call *last = h->n_calls > 0 ? &h->calls[h->n_calls - 1] : NULL;

    if (last != NULL && last->phase == phase &&
        h->n_calls >= FERRY__HISTORY_CALLS - FERRY__PHASE_COUNT)
        return last;
    if (h->n_calls == FERRY__HISTORY_CALLS)
        return NULL;
    last = &h->calls[h->n_calls++];
    last->phase = phase;
    last->count = 0;
    last->ns = 0;
    last->began_ns = last->last_ns = ferry__now_ns();
    for (int32_t i = 0; i < h->world; i++)
        last->rank_ns[i] = -1;
    return last;
}

void ferry__history_call(ferry__history *h, ferry__rank_kind kind)
{
    ferry__round_phase phase;
    ferry__round_call *c;

    if (!phase_of(kind, &phase))
        return;
    pthread_mutex_lock(&h->lock);
    c = h->open ? entry_for(h, phase) : NULL;
    if (c != NULL) {
        h->in_call = true;
        h->call_ns = ferry__now_ns();
        c->count++;
    }
    pthread_mutex_unlock(&h->lock);
}

void ferry__history_answer(ferry__history *h, int32_t rank)
{
    pthread_mutex_lock(&h->lock);
    if (h->open && h->in_call && rank < h->world) {
        int64_t *ns = &h->calls[h->n_calls - 1].rank_ns[rank];

        *ns = (*ns < 0 ? 0 : *ns) + ferry__now_ns() - h->call_ns;
    }
    pthread_mutex_unlock(&h->lock);
}

void ferry__history_called(ferry__history *h)
{
    pthread_mutex_lock(&h->lock);
    if (h->open && h->in_call) {
        ferry__round_call *c = &h->calls[h->n_calls - 1];

        c->last_ns = ferry__now_ns();
        c->ns += c->last_ns - h->call_ns;
    }
    h->in_call = false;
    pthread_mutex_unlock(&h->lock);
}

void ferry__history_stop(ferry__history *h, bool stopped)
{
    pthread_mutex_lock(&h->lock);
    if (stopped && h->stop_began_ns == 0) {
        h->stop_began_ns = ferry__now_ns();
    } else if (!stopped && h->stop_began_ns != 0) {
        h->stop_ns += ferry__now_ns() - h->stop_began_ns;
        h->stop_began_ns = 0;
    }
    pthread_mutex_unlock(&h->lock);
}

void ferry__history_rank(ferry__history *h, int32_t rank, json_t *status)
{
    json_t *old = status;

    pthread_mutex_lock(&h->lock);
    if (h->open && rank < h->world && status != NULL) {
        old = h->statuses[rank];
        h->statuses[rank] = status;
    }
    pthread_mutex_unlock(&h->lock);
    json_decref(old);
}

/* ---- the record ---- */

static json_t *call_json(const ferry__history *h, const ferry__round_call *c,
                         int64_t now_ns)
{
    bool inside = h->in_call && c == &h->calls[h->n_calls - 1];
    int64_t ns = c->ns + (inside ? now_ns - h->call_ns : 0);
    json_t *ranks = json_array();

    for (int32_t i = 0; i < h->world; i++)
        json_array_append_new(ranks, c->rank_ns[i] < 0
                                         ? json_null()
                                         : json_real(ms_of(c->rank_ns[i])));
    return json_pack("{s:s,s:i,s:f,s:f,s:b,s:o}", "phase",
                     phase_names[c->phase], "count", (int)c->count, "at_ms",
                     ms_of(c->began_ns - h->began_ns), "ms", ms_of(ns),
                     "running", inside, "ranks_ms", ranks);
}

static json_t *calls_json(const ferry__history *h, int64_t now_ns)
{
    json_t *calls = json_array();

    for (size_t i = 0; i < h->n_calls; i++)
        json_array_append_new(calls, call_json(h, &h->calls[i], now_ns));
    return calls;
}

static json_t *phases_json(const ferry__history *h, ferry__round_sums *sums)
{
    json_t *phases = json_object();
    int64_t ns[FERRY__PHASE_COUNT] = {0};

    for (size_t i = 0; i < h->n_calls; i++)
        ns[h->calls[i].phase] += h->calls[i].ns;
    for (int i = 0; i < FERRY__PHASE_COUNT; i++) {
        sums->phase_seconds[i] = (double)ns[i] * 1e-9;
        json_object_set_new(phases, phase_keys[i], json_real(ms_of(ns[i])));
    }
    return phases;
}

static uint64_t counter_of(json_t *status, const char *key)
{
    json_t *counters = json_object_get(status, "counters");

    return (uint64_t)json_integer_value(json_object_get(counters, key));
}

/* From the start to the end of the last update: bytes are on their way. */
static int64_t transfer_ns(const ferry__history *h)
{
    for (size_t i = h->n_calls; i > 0; i--) {
        const ferry__round_call *c = &h->calls[i - 1];

        if (c->phase == FERRY__PHASE_UPDATE)
            return c->last_ns - h->began_ns;
    }
    return 0;
}

/* What one rank did, in its own words; null where it could not be asked. */
static json_t *rank_json(const ferry__history *h, int32_t rank)
{
    json_t *status = h->statuses[rank];
    json_t *phases = json_object_get(status, "phases");
    json_t *path = json_object_get(status, "path");
    json_t *failure = json_object_get(status, "failure");
    json_t *o = json_pack("{s:i,s:i}", "replica", (int)(rank / h->tp_size),
                          "rank", (int)(rank % h->tp_size));

    for (int i = 0; i < FERRY__PHASE_COUNT; i++) {
        json_t *ms = json_object_get(phases, phase_keys[i]);

        json_object_set_new(o, phase_keys[i],
                            ms == NULL ? json_null() : json_copy(ms));
    }
    json_object_set_new(o, "answered", json_boolean(status != NULL));
    json_object_set_new(
        o, "bytes_declared",
        json_integer((json_int_t)counter_of(status, "bytes_declared")));
    json_object_set_new(
        o, "bytes_received",
        json_integer((json_int_t)counter_of(status, "bytes_received")));
    json_object_set_new(
        o, "bytes_loaded",
        json_integer((json_int_t)counter_of(status, "bytes_loaded")));
    json_object_set_new(o, "path",
                        path == NULL ? json_null() : json_copy(path));
    json_object_set_new(o, "failure",
                        failure == NULL ? json_null() : json_copy(failure));
    return o;
}

static json_t *ranks_json(const ferry__history *h, ferry__round_sums *sums)
{
    json_t *ranks = json_array();

    for (int32_t i = 0; i < h->world; i++) {
        sums->bytes_declared += counter_of(h->statuses[i], "bytes_declared");
        sums->bytes_received += counter_of(h->statuses[i], "bytes_received");
        sums->bytes_loaded += counter_of(h->statuses[i], "bytes_loaded");
        json_array_append_new(ranks, rank_json(h, i));
    }
    return ranks;
}

/* Ranks of one round go the same way; the first that knows tells it. */
static const char *path_of(const ferry__history *h)
{
    for (int32_t i = 0; i < h->world; i++) {
        const char *path =
            json_string_value(json_object_get(h->statuses[i], "path"));

        if (path != NULL && path[0] != '\0')
            return path;
    }
    return NULL;
}

void ferry__history_end(ferry__history *h, bool finished, const char *version,
                        const char *line, ferry__round_sums *out_sums)
{
    ferry__round_sums sums = {0};
    json_t *o, *phases, *ranks;
    int64_t now_ns = ferry__now_ns();

    memset(out_sums, 0, sizeof *out_sums);
    pthread_mutex_lock(&h->lock);
    if (!h->open) {
        pthread_mutex_unlock(&h->lock);
        return;
    }
    if (h->stop_began_ns != 0)
        h->stop_ns += now_ns - h->stop_began_ns;
    h->stop_began_ns = 0;
    phases = phases_json(h, &sums);
    ranks = ranks_json(h, &sums);
    sums.stop_seconds = (double)h->stop_ns * 1e-9;
    o = json_pack("{s:I,s:s,s:s?,s:s?,s:f,s:f,s:f,s:f,s:{s:I,s:I,s:I},s:s?,"
                  "s:o,s:o,s:o}",
                  "number", (json_int_t)h->number, "result",
                  finished ? "finished" : "failed", "version", version, "error",
                  line, "started_at", h->started_at, "total_ms",
                  ms_of(now_ns - h->began_ns), "transfer_ms",
                  ms_of(transfer_ns(h)), "stop_ms", ms_of(h->stop_ns), "bytes",
                  "declared", (json_int_t)sums.bytes_declared, "received",
                  (json_int_t)sums.bytes_received, "loaded",
                  (json_int_t)sums.bytes_loaded, "path", path_of(h), "phases",
                  phases, "ranks", ranks, "calls", calls_json(h, now_ns));
    if (json_array_size(h->rounds) >= FERRY__HISTORY_ROUNDS)
        json_array_remove(h->rounds, 0);
    if (o != NULL)
        json_array_append_new(h->rounds, o);
    drop_statuses(h);
    h->open = false;
    pthread_mutex_unlock(&h->lock);
    *out_sums = sums;
}

/* ---- questions ---- */

bool ferry__history_is_open(ferry__history *h)
{
    bool open;

    pthread_mutex_lock(&h->lock);
    open = h->open;
    pthread_mutex_unlock(&h->lock);
    return open;
}

json_t *ferry__history_running(ferry__history *h)
{
    int64_t now_ns = ferry__now_ns();
    json_t *o = NULL;

    pthread_mutex_lock(&h->lock);
    if (h->open) {
        const char *phase = "start";
        int64_t stop_ns = h->stop_ns;

        if (h->n_calls > 0)
            phase = phase_names[h->calls[h->n_calls - 1].phase];
        if (h->stop_began_ns != 0)
            stop_ns += now_ns - h->stop_began_ns;
        o = json_pack("{s:I,s:s,s:b,s:f,s:f,s:f,s:b,s:o}", "number",
                      (json_int_t)h->number, "phase", phase, "in_call",
                      h->in_call, "started_at", h->started_at, "elapsed_ms",
                      ms_of(now_ns - h->began_ns), "stop_ms", ms_of(stop_ns),
                      "stopped", h->stop_began_ns != 0, "calls",
                      calls_json(h, now_ns));
    }
    pthread_mutex_unlock(&h->lock);
    return o == NULL ? json_null() : o;
}

json_t *ferry__history_rounds(ferry__history *h, size_t count, bool whole)
{
    json_t *out = json_array();
    size_t n;

    pthread_mutex_lock(&h->lock);
    n = json_array_size(h->rounds);
    for (size_t i = count < n ? n - count : 0; i < n; i++) {
        json_t *round = json_array_get(h->rounds, i);
        json_t *copy = whole ? json_deep_copy(round) : json_copy(round);

        if (!whole && copy != NULL) {
            json_object_del(copy, "ranks");
            json_object_del(copy, "calls");
        }
        json_array_append_new(out, copy == NULL ? json_null() : copy);
    }
    pthread_mutex_unlock(&h->lock);
    return out;
}
