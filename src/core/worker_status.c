/* SPDX-License-Identifier: Apache-2.0 */
/* What a worker says about itself: whether it may serve, and its state as
 * JSON. Invariant: one lock, one consistent answer; it tells the truth in
 * every state, from any thread. */
#include "base/log.h"
#include "core/worker_state.h"

#include "base/str.h"

#include <stdio.h>
#include <string.h>

/* Why the worker may not serve, or NULL. Under the lock. */
static const char *not_ready(const ferry_worker *w)
{
    ferry__round_state state = w->round.state;

    for (size_t i = 0; i < w->n_targets; i++) {
        if (!w->targets[i].dirty)
            continue;
        if (state == FERRY__ROUND_FAILED)
            return "the last weight update failed after its first write; a "
                   "full one must finish first";
        if (state == FERRY__ROUND_IDLE)
            return "an earlier weight update failed after its first write; a "
                   "full one must finish first";
        return "a weight update is writing";
    }
    if (!w->targets[0].synced)
        return "no weights yet; a full weight update must finish first";
    return NULL;
}

ferry_status ferry_worker_may_serve(const ferry_worker *worker)
{
    FERRY__NEED(worker);
    ferry_worker *w = (ferry_worker *)(uintptr_t)worker;
    char line[FERRY__LINE_MAX + 160];
    const char *why;

    pthread_mutex_lock(&w->round.lock);
    why = not_ready(w);
    if (why != NULL)
        snprintf(line, sizeof(line), "%s%s%s", why,
                 w->round.failure < 0 ? ": " : "",
                 w->round.failure < 0 ? w->round.failure_line : "");
    pthread_mutex_unlock(&w->round.lock);
    if (why == NULL)
        return FERRY_OK;
    return ferry_fail(FERRY_ENOTREADY, "%s", line);
}

static void add_string(ferry__str *s, const char *key, const char *value)
{
    ferry__str_printf(s, "\"%s\":", key);
    if (value != NULL)
        ferry__str_json(s, value);
    else
        ferry__str_append(s, "null");
}

static void add_failure(ferry__str *s, const ferry__round *r)
{
    if (r->failure == FERRY_OK) {
        ferry__str_append(s, ",\"failure\":null");
        return;
    }
    ferry__str_printf(s, ",\"failure\":{\"status\":\"%s\",",
                      ferry_status_name(r->failure));
    add_string(s, "message", r->failure_line);
    ferry__str_append(s, "}");
}

static void add_counters(ferry__str *s, const ferry__target *t)
{
    ferry__loading_counters c;

    ferry__loading_counters_of(t->loading, &c);
    ferry__str_printf(
        s,
        ",\"counters\":{\"bytes_declared\":%llu,"
        "\"bytes_received\":%llu,\"bytes_loaded\":%llu,"
        "\"n_params\":%llu},\"held_bytes\":%llu,"
        "\"peak_bytes\":%llu",
        (unsigned long long)c.bytes_declared,
        (unsigned long long)c.bytes_received,
        (unsigned long long)c.bytes_loaded, (unsigned long long)c.n_params,
        (unsigned long long)c.held_bytes, (unsigned long long)c.peak_bytes);
}

/* When the work was done, as wall-clock times, in seconds since 1970. */
static void add_spans(ferry__str *s, const ferry__target *t)
{
    ferry__span spans[FERRY__SPANS_MAX];
    size_t n = ferry__loading_spans(t->loading, spans, FERRY__SPANS_MAX);
    int64_t offset_ns = ferry__spans_wall_offset_ns();

    ferry__str_append(s, ",\"spans\":[");
    for (size_t i = 0; i < n; i++) {
        const ferry__span *e = &spans[i];

        ferry__str_printf(
            s,
            "%s{\"phase\":\"%s\",\"at\":%.6f,\"ms\":%.3f,\"busy_ms\":%.3f,"
            "\"count\":%u",
            i > 0 ? "," : "", ferry__span_name(e->kind),
            (double)(e->begin_ns + offset_ns) / 1e9,
            (double)(e->end_ns - e->begin_ns) / 1e6, (double)e->busy_ns / 1e6,
            e->count);
        if (e->kind == FERRY__SPAN_WAIT) {
            ferry__str_printf(s, ",\"peer\":%d,\"address\":", (int)e->peer);
            ferry__str_json(s, e->address);
        }
        ferry__str_append(s, "}");
    }
    ferry__str_append(s, "]");
}

static void add_untouched(ferry__str *s, const ferry__target *t)
{
    ferry__str_printf(s, ",\"not_updated\":{\"count\":%zu,\"names\":[",
                      t->n_untouched);
    for (size_t i = 0; i < t->n_untouched && i < FERRY__UNTOUCHED_MAX; i++) {
        ferry__str_append(s, i > 0 ? "," : "");
        ferry__str_json(s, t->model.params[t->untouched[i]].name);
    }
    ferry__str_append(s, "]}");
}

/* Under the lock. */
static void write_status(ferry__str *s, const ferry_worker *w)
{
    const ferry__round *r = &w->round;
    const char *why = not_ready(w);
    bool dirty = false;

    for (size_t i = 0; i < w->n_targets; i++)
        dirty = dirty || w->targets[i].dirty;
    ferry__str_append(s, "{");
    add_string(s, "state", ferry__round_state_name(r->state));
    ferry__str_printf(s, ",\"round\":%llu,", (unsigned long long)r->number);
    add_string(s, "target", w->target->label);
    ferry__str_append(s, ",");
    add_string(s, "weight_version", w->version);
    ferry__str_printf(s, ",\"serving\":%s,", why == NULL ? "true" : "false");
    add_string(s, "reason", why);
    ferry__str_printf(s, ",\"dirty\":%s", dirty ? "true" : "false");
    add_failure(s, r);
    add_counters(s, w->target);
    ferry__str_append(s, ",");
    add_string(s, "path", w->path);
    ferry__str_printf(s,
                      ",\"phases\":{\"start_ms\":%.3f,\"update_ms\":%.3f,"
                      "\"prepare_ms\":%.3f,\"commit_ms\":%.3f}",
                      r->phases.start_ms, r->phases.update_ms,
                      r->phases.prepare_ms, r->phases.commit_ms);
    add_spans(s, w->target);
    add_untouched(s, w->target);
    ferry__str_append(s, ",");
    add_string(s, "commit", ferry__worker_is_staged(w) ? "staged" : "inplace");
    ferry__str_append(s, ",");
    add_string(s, "backend", w->backend);
    ferry__str_append(s, ",");
    add_string(s, "model", w->targets[0].model.name);
    ferry__str_append(s, "}");
}

size_t ferry_worker_status(const ferry_worker *worker, char *buffer,
                           size_t size_bytes)
{
    if (worker == NULL) {
        if (size_bytes > 0 && buffer != NULL)
            buffer[0] = '\0';
        return 0;
    }
    ferry_worker *w = (ferry_worker *)(uintptr_t)worker;
    ferry__str s = {0};
    const char *text;
    size_t length, n;

    pthread_mutex_lock(&w->round.lock);
    write_status(&s, w);
    pthread_mutex_unlock(&w->round.lock);
    text =
        s.failed || s.data == NULL ? "{\"state\":\"out of memory\"}" : s.data;
    length = strlen(text);
    if (size_bytes > 0 && buffer != NULL) {
        n = length < size_bytes ? length : size_bytes - 1;
        memcpy(buffer, text, n);
        buffer[n] = '\0';
    }
    ferry__str_free(&s);
    return length;
}
