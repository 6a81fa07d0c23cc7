/* SPDX-License-Identifier: Apache-2.0 */
/* Health, models, metrics, versions and Ferry's own status. These answer in
 * every state, also while an update runs. */
#include "base/alloc.h"
#include "base/clock.h"
#include "serve/http.h"
#include "serve/page.h"

#include <string.h>
#include <time.h>

/* Alive means that all replicas are up; ready that all may serve. */
static void handle_health(ferry__exchange *x)
{
    bool alive = true, ready = true;
    char reason[512] = "";

    for (int32_t i = 0; i < x->server->options->dp_size; i++) {
        ferry__replica *r = &x->server->replicas[i];

        pthread_mutex_lock(&r->lock);
        alive = alive && r->up;
        if (ready && !(r->up && (r->serving || r->gates > 0))) {
            ready = false;
            memcpy(reason, r->reason, sizeof reason);
        }
        pthread_mutex_unlock(&r->lock);
    }
    x->status = alive ? 200 : 503;
    ferry__reply_json(x, json_pack("{s:b,s:b,s:s}", "alive", alive, "ready",
                                   ready, "reason", reason));
}

static void handle_models(ferry__exchange *x)
{
    const ferry__serve_options *o = x->server->options;

    ferry__reply_json(
        x, json_pack("{s:s,s:[{s:s,s:s,s:I,s:s,s:s,s:i}]}", "object", "list",
                     "data", "id", o->served_name, "object", "model", "created",
                     (json_int_t)time(NULL), "owned_by", "ferry", "root",
                     o->model, "max_model_len", (int)o->max_len));
}

static void handle_metrics(ferry__exchange *x)
{
    int32_t running, waiting;

    ferry__scheduler_load(x->server, &running, &waiting);
    ferry__metrics_text(&x->server->metrics, running, waiting, &x->reply);
    ferry__page_metrics(x->server, &x->reply);
    x->content_type = "text/plain; version=0.0.4; charset=utf-8";
}

static void handle_version(ferry__exchange *x)
{
    ferry__reply_json(x, json_pack("{s:s,s:s}", "version", ferry_version_text(),
                                   "server", "ferry"));
}

/* A status is answered by then, whatever the ranks do. */
#define STATUS_MS 2000

/* Null for each rank, where none can be asked. */
static json_t *no_ranks(const ferry__replica *r)
{
    json_t *array = json_array();

    for (int32_t i = 0; i < r->server->options->tp_size; i++)
        json_array_append_new(array, json_null());
    return array;
}

/* The label of the weights that began the oldest cache in use; null without
 * one. Under the replica's lock. */
static json_t *oldest_cache(const ferry__replica *r)
{
    const ferry__request *oldest = NULL;

    for (int32_t i = 0; i < r->server->options->max_seqs; i++) {
        const ferry__request *q = r->active[i];

        if (q != NULL && q->n_computed > 0 && q->cache_version != NULL &&
            (oldest == NULL || q->cache_since_ns < oldest->cache_since_ns))
            oldest = q;
    }
    return oldest == NULL ? json_null() : json_string(oldest->cache_version);
}

static json_t *replica_status(ferry__replica *r, uint64_t question,
                              const ferry__deadline *until)
{
    json_t *o;
    bool up;

    pthread_mutex_lock(&r->lock);
    up = r->up;
    o = json_pack("{s:i,s:b,s:b,s:b,s:s,s:i,s:i,s:I}", "index", (int)r->index,
                  "up", r->up, "serving", r->serving, "gate_open",
                  r->gates == 0, "reason", r->reason, "running",
                  (int)r->n_active, "waiting", (int)r->n_queued, "restarts",
                  (json_int_t)r->n_restarts);
    json_object_set_new(o, "oldest_cache_version", oldest_cache(r));
    pthread_mutex_unlock(&r->lock);
    json_object_set_new(o, "ranks",
                        up ? ferry__replica_status_take(r, question, until)
                           : no_ranks(r));
    return o;
}

static void handle_status(ferry__exchange *x)
{
    static const char *const pauses[] = {"none", "abort", "wait", "keep"};
    ferry__server *s = x->server;
    const ferry__serve_options *o = s->options;
    ferry__deadline until = ferry__deadline_in(STATUS_MS);
    json_t *out, *replicas = json_array();
    uint64_t *questions =
        ferry__alloc_array((size_t)o->dp_size, sizeof *questions);

    for (int32_t i = 0; questions != NULL && i < o->dp_size; i++)
        questions[i] = ferry__replica_status_ask(&s->replicas[i]);
    /* Without room for their numbers: 0, which is answered already. */
    for (int32_t i = 0; i < o->dp_size; i++)
        json_array_append_new(
            replicas,
            replica_status(&s->replicas[i],
                           questions != NULL ? questions[i] : 0, &until));
    ferry__free(questions);
    pthread_mutex_lock(&s->lock);
    out = json_pack(
        "{s:s,s:s,s:s,s:s,s:{s:i,s:i},s:s,s:s,s:s?,s:s,s:s?,s:s?,s:I,s:I,"
        "s:f,s:f,s:o}",
        "server", "ferry", "ferry_version", ferry_version_text(), "model",
        o->served_name, "architecture", ferry__arch_name(s->config->arch),
        "parallel", "tp", (int)o->tp_size, "dp", (int)o->dp_size,
        "kernel_format", ferry__kernel_name(o->kernel), "commit",
        o->commit == FERRY_COMMIT_STAGED ? "staged" : "inplace", "backend",
        o->backend, "weight_version", s->version, "running_call", s->running,
        "last_failure", s->last_failure, "rounds_finished",
        (json_int_t)s->rounds_finished, "rounds_failed",
        (json_int_t)s->rounds_failed, "last_round_ms", s->last_round_ms,
        "last_stop_ms", s->last_stop_ms, "replicas", replicas);
    json_object_set_new(out, "instance", json_string(s->instance));
    json_object_set_new(out, "paused", json_string(pauses[s->paused]));
    pthread_mutex_unlock(&s->lock);
    ferry__page_status(x, out);
    ferry__reply_json(x, out);
}

const ferry__route ferry__routes_info[] = {
    {"GET", "/health", FERRY__ROUTE_OPEN, handle_health},
    {"GET", "/v1/models", 0, handle_models},
    {"GET", "/metrics", 0, handle_metrics},
    {"GET", "/version", 0, handle_version},
    {"GET", "/ferry/status", 0, handle_status},
    {"GET", "/ferry/", FERRY__ROUTE_OPEN, ferry__page_handle},
    {"GET", "/ferry", FERRY__ROUTE_OPEN, ferry__page_handle},
    {NULL, NULL, 0, NULL}};
