/* SPDX-License-Identifier: Apache-2.0 */
/* Writes the trace of a push; see cli_trace.h.
 * Times are microseconds since the first round began. All are taken from wall
 * clocks; a server whose clock differs by more than asking it can explain is
 * shifted by the difference, and its rounds say so.
 * Invariant: the file is one JSON array once it was closed. */
#include "cli/cli_trace.h"

#include "base/clock.h"
#include "cli/cli.h"
#include "core/spans.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define TRAINER_PID  1
#define ROUND_THREAD 1
/* Where waits for peers begin: a rank's own WAIT_THREADS, and of these one a
 * peer, the first for those that are not told apart. */
#define WAIT_THREAD  1000
#define WAIT_THREADS 256
/* What a clock may differ by beyond half the time that asking takes. */
#define CLOCK_SLACK_S 0.002

/* A track of waits that has its name. */
typedef struct named {
    int pid, thread;
} named;

typedef struct server {
    cli_http http;
    json_int_t taken; /* number of the last round that was told */
    bool named, is_ferry;
} server;

struct cli_trace {
    FILE *file;
    char *path;
    bool any; /* an event was written */
    double base_s, began_s;
    bool kinds[FERRY__SPAN_KINDS]; /* threads of the trainer, named */
    named *waits;
    size_t n_waits;
    size_t n_servers;
    server servers[];
};

static double wall_s(void)
{
    struct timespec now;

    clock_gettime(CLOCK_REALTIME, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* ---- events ---- */

static void emit(cli_trace *t, json_t *event)
{
    if (!event)
        return;
    fputs(t->any ? ",\n" : "[\n", t->file);
    json_dumpf(event, t->file, JSON_COMPACT | JSON_REAL_PRECISION(14));
    t->any = true;
    json_decref(event);
}

static double microseconds(double seconds)
{
    return floor(seconds * 1e9 + 0.5) / 1e3;
}

/* A stretch of time; steals args, which may be NULL. */
static void emit_span(cli_trace *t, const char *name, const char *category,
                      int pid, int thread, double at_s, double ms, json_t *args)
{
    emit(t, json_pack("{s:s, s:s, s:s, s:f, s:f, s:i, s:i, s:o}", "name", name,
                      "cat", category, "ph", "X", "ts",
                      microseconds(at_s - t->base_s), "dur",
                      microseconds(ms > 0 ? ms / 1e3 : 0), "pid", pid, "tid",
                      thread, "args", args ? args : json_object()));
}

static void emit_name(cli_trace *t, const char *what, int pid, int thread,
                      const char *name)
{
    emit(t, json_pack("{s:s, s:s, s:i, s:i, s:{s:s}}", "name", what, "ph", "M",
                      "pid", pid, "tid", thread, "args", "name", name));
}

static void name_thread(cli_trace *t, int pid, int thread, const char *name)
{
    emit_name(t, "thread_name", pid, thread, name);
    emit(t, json_pack("{s:s, s:s, s:i, s:i, s:{s:i}}", "name",
                      "thread_sort_index", "ph", "M", "pid", pid, "tid", thread,
                      "args", "sort_index", thread));
}

/* ---- waits ---- */

static bool is_named(cli_trace *t, int pid, int thread)
{
    named *waits;

    for (size_t i = 0; i < t->n_waits; i++) {
        if (t->waits[i].pid == pid && t->waits[i].thread == thread)
            return true;
    }
    waits = realloc(t->waits, (t->n_waits + 1) * sizeof(*waits));
    if (waits) {
        t->waits = waits;
        t->waits[t->n_waits++] = (named){pid, thread};
    }
    return false;
}

/* A track for each peer, since joined waits may overlap those for another.
 * `rank`: who waited, as its track is called; steals args. */
static void emit_wait(cli_trace *t, int pid, size_t index, const char *rank,
                      int peer, const char *address, double at_s, double ms,
                      json_t *args)
{
    int thread = WAIT_THREAD + WAIT_THREADS * (int)index + 1 + peer;
    char whom[128] = "other ranks", name[256];

    if (peer >= 0)
        snprintf(whom, sizeof(whom), address[0] ? "rank %d (%s)" : "rank %d",
                 peer, address);
    snprintf(name, sizeof(name), "%swaits for %s", rank, whom);
    if (!is_named(t, pid, thread))
        name_thread(t, pid, thread, name);
    snprintf(name, sizeof(name), "waited for %s", whom);
    json_object_set_new(args, "peer", json_integer(peer));
    emit_span(t, name, "wait", pid, thread, at_s, ms, args);
}

/* ---- the trainer ---- */

static void trainer_span(cli_trace *t, const ferry__span *e, double offset_s)
{
    double at_s = (double)e->begin_ns * 1e-9 + offset_s;
    double ms = (double)(e->end_ns - e->begin_ns) * 1e-6;
    int thread = ROUND_THREAD + 1 + (int)e->kind;
    json_t *args = json_pack("{s:f, s:i}", "busy_ms", (double)e->busy_ns * 1e-6,
                             "pieces", (int)e->count);

    if (e->kind == FERRY__SPAN_WAIT) {
        emit_wait(t, TRAINER_PID, 0, "", e->peer, e->address, at_s, ms, args);
        return;
    }
    if (!t->kinds[e->kind])
        name_thread(t, TRAINER_PID, thread, ferry__span_name(e->kind));
    t->kinds[e->kind] = true;
    emit_span(t, ferry__span_name(e->kind), "trainer", TRAINER_PID, thread,
              at_s, ms, args);
}

static void trainer_spans(cli_trace *t, ferry_trainer *trainer)
{
    ferry__span spans[FERRY__SPANS_MAX];
    size_t n = ferry__trainer_spans(trainer, spans, FERRY__SPANS_MAX);
    double offset_s = (double)ferry__spans_wall_offset_ns() * 1e-9;

    for (size_t i = 0; i < n; i++)
        trainer_span(t, &spans[i], offset_s);
}

static void trainer_round(cli_trace *t, ferry_trainer *trainer,
                          const ferry_round_stats *stats, ferry_status status,
                          const char *line)
{
    char name[48];
    json_t *args = json_pack("{s:s, s:I, s:I, s:I, s:I, s:s}", "status",
                             ferry_status_name(status), "parameters",
                             (json_int_t)stats->n_params, "bytes_declared",
                             (json_int_t)stats->bytes_declared, "bytes_sent",
                             (json_int_t)stats->bytes_sent, "updates",
                             (json_int_t)stats->n_updates, "path", stats->path);

    if (status < 0)
        json_object_set_new(args, "error", json_string(line));
    snprintf(name, sizeof(name), "round %llu",
             (unsigned long long)stats->round);
    emit_span(t, name, "trainer", TRAINER_PID, ROUND_THREAD, t->began_s,
              stats->total_ms, args);
    trainer_spans(t, trainer);
}

/* ---- the servers ---- */

static int server_pid(const cli_trace *t, const server *s)
{
    return TRAINER_PID + 1 + (int)(s - t->servers);
}

/* Four threads a rank: the calls that it answered, and each kind of its own
 * work, whose stretches may overlap. */
static int rank_thread(size_t rank)
{
    return ROUND_THREAD + 1 + 4 * (int)rank;
}

static int work_thread(size_t rank, const char *phase)
{
    int kind = strcmp(phase, "load") == 0       ? 1
               : strcmp(phase, "quantise") == 0 ? 2
                                                : 3;

    return rank_thread(rank) + kind;
}

static void name_server(cli_trace *t, server *s, json_t *record)
{
    static const char *const kinds[] = {"", ": load", ": quantise", ": steps"};
    int pid = server_pid(t, s);
    json_t *rank;
    size_t i;

    if (s->named)
        return;
    s->named = true;
    emit_name(t, "process_name", pid, 0, s->http.base_url);
    name_thread(t, pid, ROUND_THREAD, "round");
    json_array_foreach(json_object_get(record, "ranks"), i, rank)
    {
        int replica = 0, index = 0;

        json_unpack(rank, "{s:i, s:i}", "replica", &replica, "rank", &index);
        for (int kind = 0; kind < 4; kind++) {
            char name[80];

            snprintf(name, sizeof(name), "replica %d rank %d%s", replica, index,
                     kinds[kind]);
            name_thread(t, pid, rank_thread(i) + kind, name);
        }
    }
}

static double number_of(json_t *o, const char *key)
{
    return json_number_value(json_object_get(o, key));
}

static void rank_calls(cli_trace *t, const server *s, json_t *record,
                       double began_s)
{
    json_t *call, *ms;
    size_t i, rank;

    json_array_foreach(json_object_get(record, "calls"), i, call)
    {
        const char *phase = json_string_value(json_object_get(call, "phase"));
        double at_s = began_s + number_of(call, "at_ms") / 1e3;

        json_array_foreach(json_object_get(call, "ranks_ms"), rank, ms)
        {
            bool answered = json_is_number(ms);

            emit_span(
                t, phase ? phase : "?", "rank", server_pid(t, s),
                rank_thread(rank), at_s,
                answered ? json_number_value(ms) : number_of(call, "ms"),
                json_pack("{s:b, s:I}", "answered", (int)answered, "calls",
                          json_integer_value(json_object_get(call, "count"))));
        }
    }
}

static void rank_span(cli_trace *t, const server *s, size_t index,
                      const char *rank, json_t *span, double at_s)
{
    const char *phase = json_string_value(json_object_get(span, "phase"));
    const char *address = json_string_value(json_object_get(span, "address"));
    json_int_t peer = json_integer_value(json_object_get(span, "peer"));
    double ms = number_of(span, "ms");
    json_t *args =
        json_pack("{s:f, s:I}", "busy_ms", number_of(span, "busy_ms"), "pieces",
                  json_integer_value(json_object_get(span, "count")));

    if (strcmp(phase, ferry__span_name(FERRY__SPAN_WAIT)) == 0)
        emit_wait(t, server_pid(t, s), index, rank,
                  peer >= 0 && peer < WAIT_THREADS - 1 ? (int)peer : -1,
                  address ? address : "", at_s, ms, args);
    else
        emit_span(t, phase, "rank", server_pid(t, s), work_thread(index, phase),
                  at_s, ms, args);
}

/* What the ranks say of their own work in the window of the round. */
static void rank_work(cli_trace *t, const server *s, json_t *status,
                      double shift_s, double from_s, double to_s)
{
    json_t *replica, *rank, *span;
    size_t i, k, n, index = 0;
    char name[80];

    json_array_foreach(json_object_get(status, "replicas"), i, replica)
    {
        json_array_foreach(json_object_get(replica, "ranks"), k, rank)
        {
            snprintf(name, sizeof(name), "replica %zu rank %zu: ", i, k);
            json_array_foreach(json_object_get(rank, "spans"), n, span)
            {
                double at_s = number_of(span, "at") + shift_s;

                if (json_is_string(json_object_get(span, "phase")) &&
                    at_s >= from_s && at_s <= to_s)
                    rank_span(t, s, index, name, span, at_s);
            }
            index++;
        }
    }
}

/* The newest record that may be of the round of this trainer, or NULL. */
static json_t *find_record(const cli_trace *t, const server *s, json_t *status,
                           double shift_s, double end_s)
{
    json_t *history = json_object_get(status, "history");

    for (size_t i = json_array_size(history); i > 0; i--) {
        json_t *record = json_array_get(history, i - 1);
        double at_s = number_of(record, "started_at") + shift_s;

        if (json_integer_value(json_object_get(record, "number")) > s->taken &&
            at_s >= t->began_s - 0.05 && at_s <= end_s + 0.05)
            return record;
    }
    return NULL;
}

static void server_round(cli_trace *t, server *s, json_t *status,
                         double shift_s, double end_s)
{
    json_t *record = find_record(t, s, status, shift_s, end_s);
    double began_s = number_of(record, "started_at") + shift_s;
    double total_ms = number_of(record, "total_ms");
    char name[48], clock[64];
    json_t *args;

    if (!record) {
        fprintf(stderr, "ferry push: trace: %s has no record of the round\n",
                s->http.base_url);
        return;
    }
    s->taken = json_integer_value(json_object_get(record, "number"));
    name_server(t, s, record);
    if (shift_s == 0)
        snprintf(clock, sizeof(clock), "as the trainer's");
    else
        snprintf(clock, sizeof(clock), "shifted by %.3f ms", shift_s * 1e3);
    args = json_pack("{s:s, s:O, s:O, s:O, s:O, s:O, s:O, s:O}", "clock", clock,
                     "result", json_object_get(record, "result"), "error",
                     json_object_get(record, "error"), "version",
                     json_object_get(record, "version"), "bytes",
                     json_object_get(record, "bytes"), "path",
                     json_object_get(record, "path"), "transfer_ms",
                     json_object_get(record, "transfer_ms"), "stop_ms",
                     json_object_get(record, "stop_ms"));
    snprintf(name, sizeof(name), "round %lld", (long long)s->taken);
    emit_span(t, name, "server", server_pid(t, s), ROUND_THREAD, began_s,
              total_ms, args);
    rank_calls(t, s, record, began_s);
    rank_work(t, s, status, shift_s, began_s - 0.05,
              began_s + total_ms / 1e3 + 0.05);
}

static void ask_server(cli_trace *t, server *s, double end_s)
{
    double from_s = wall_s(), to_s, differs_s;
    json_t *status = NULL;
    ferry_status st;

    if (!s->is_ferry)
        return;
    st = cli_http_json(&s->http, "/ferry/status?history=4&spans=1", NULL,
                       &status);
    to_s = wall_s();
    if (st < 0) {
        s->is_ferry = st != FERRY_EROUTE;
        fprintf(stderr, "ferry push: trace: %s does not tell its rounds: %s\n",
                s->http.base_url, ferry_last_error());
        return;
    }
    differs_s = number_of(status, "time") - (from_s + to_s) / 2;
    if (fabs(differs_s) < (to_s - from_s) / 2 + CLOCK_SLACK_S)
        differs_s = 0;
    server_round(t, s, status, -differs_s, end_s);
    json_decref(status);
}

/* ---- the file ---- */

ferry_status cli_trace_open(const char *path, const cli_http *servers,
                            size_t count, cli_trace **out)
{
    cli_trace *t = calloc(1, sizeof(*t) + count * sizeof(t->servers[0]));

    if (!t)
        return ferry_fail(FERRY_ENOMEM, "trace: out of memory");
    t->path = strdup(path);
    t->file = fopen(path, "w");
    if (!t->file || !t->path) {
        ferry_fail(FERRY_EIO, "trace %s: %s", path, strerror(errno));
        free(t->path);
        free(t);
        return FERRY_EIO;
    }
    t->n_servers = count;
    for (size_t i = 0; i < count; i++)
        t->servers[i] = (server){servers[i], 0, false, true};
    *out = t;
    return FERRY_OK;
}

void cli_trace_begin(cli_trace *t)
{
    char name[64];

    t->began_s = wall_s();
    if (t->base_s != 0)
        return;
    t->base_s = t->began_s;
    snprintf(name, sizeof(name), "ferry push (pid %d)", (int)getpid());
    emit_name(t, "process_name", TRAINER_PID, 0, name);
    name_thread(t, TRAINER_PID, ROUND_THREAD, "round");
}

void cli_trace_round(cli_trace *t, ferry_trainer *trainer,
                     const ferry_round_stats *stats, ferry_status status)
{
    char line[1024];
    double end_s = wall_s();

    /* Asking the servers records errors of its own. */
    snprintf(line, sizeof(line), "%s", status < 0 ? ferry_last_error() : "");
    trainer_round(t, trainer, stats, status, line);
    for (size_t i = 0; i < t->n_servers; i++)
        ask_server(t, &t->servers[i], end_s);
    fflush(t->file);
    if (status < 0)
        ferry_fail(status, "%s", line);
}

ferry_status cli_trace_close(cli_trace **trace)
{
    cli_trace *t = *trace;
    ferry_status status = FERRY_OK;
    bool lost;

    if (!t)
        return FERRY_OK;
    fputs(t->any ? "\n]\n" : "[]\n", t->file);
    lost = ferror(t->file) != 0;
    lost = fclose(t->file) != 0 || lost;
    if (lost)
        status =
            ferry_fail(FERRY_EIO, "trace %s: it could not be written", t->path);
    free(t->waits);
    free(t->path);
    free(t);
    *trace = NULL;
    return status;
}
