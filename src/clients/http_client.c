/* SPDX-License-Identifier: Apache-2.0 */
/* The RLHF routes of a vLLM server or of `ferry serve` as a client.
 * Invariant: with `pause`, a server that this client paused is resumed after
 * a finish that worked, and stays paused, with a logged reason, after
 * anything that did not (O-05). */
#include "clients/http_client.h"

#include "base/alloc.h"
#include "base/config.h"
#include "base/json.h"
#include "base/log.h"
#include "base/thread.h"

#include <limits.h>
#include <string.h>

#define TIMEOUT_MS         INT64_C(300000)
#define CONNECT_TIMEOUT_MS INT64_C(10000)
/* Abort and status are asked when something went wrong already, and must
 * not add a long wait of their own. */
#define SHORT_TIMEOUT_MS INT64_C(5000)
#define WORLD_SIZE_ROUTE "/get_world_size?include_dp=true"
/* vLLM's words for a round that somebody else began. */
#define VLLM_ROUND_OPEN "a weight update is already active"

static ferry_status send_one(ferry__http_client *c, ferry__http_op *op,
                             const char *call, const char *route,
                             const char *body, size_t body_bytes)
{
    ferry__http_reply reply;
    ferry_status status;

    op->name = call;
    FERRY_TRY(
        ferry__http_request(c, op, false, route, body, body_bytes, &reply));
    status = ferry__http_judge(c, call, route, &reply);
    ferry__str_free(&reply.body);
    return status;
}

/* A failure leaves the server as it is; say so once a pause. */
static ferry_status stays_paused(ferry__http_client *c, ferry_status status)
{
    if (status < 0 && atomic_exchange(&c->paused, false))
        ferry__log(FERRY_LOG_WARN,
                   "%s: generation stays paused, since the update failed: "
                   "%s",
                   c->address.base, ferry_last_error());
    return status;
}

typedef enum place {
    IN_ROUND, /* a failure fails the update */
    BESIDE    /* it does not */
} place;

static ferry_status post(ferry__http_client *c, const char *call,
                         const char *route, const ferry__str *body, place where)
{
    ferry_status status;
    ferry__http_op op;

    if (body && body->failed)
        return ferry_fail(FERRY_ENOMEM, "%s: %s: out of memory",
                          c->address.base, call);
    FERRY_TRY(ferry__http_op_begin(c, &op, call, true));
    status = send_one(c, &op, call, route, body ? body->data : NULL,
                      body ? body->length : 0);
    if (where == IN_ROUND)
        stays_paused(c, status);
    ferry__http_op_end(c, &op);
    return status;
}

static ferry_status post_dict(ferry__http_client *c, const char *call,
                              const char *route, const char *key,
                              const char *dict, place where)
{
    ferry__str body = {0};
    ferry_status status;

    if (!dict)
        return ferry_fail(FERRY_EINVAL, "%s: %s must not be NULL", call, key);
    ferry__str_append(&body, "{");
    ferry__str_json(&body, key);
    ferry__str_append(&body, ":");
    ferry__str_append(&body, dict);
    ferry__str_append(&body, "}");
    status = post(c, call, route, &body, where);
    ferry__str_free(&body);
    return status;
}

static ferry_status http_init(void *self, const char *init_info)
{
    ferry__http_client *c = self;

    FERRY_TRY(post_dict(c, "init_weight_transfer_engine",
                        "/init_weight_transfer_engine", "init_info", init_info,
                        BESIDE));
    atomic_store(&c->inited, true);
    return FERRY_OK;
}

/* Whatever went wrong, the server has dropped the round, or will. */
static ferry_status http_update(void *self, const char *update_info)
{
    ferry__http_client *c = self;
    ferry_status status = post_dict(c, "update_weights", "/update_weights",
                                    "update_info", update_info, IN_ROUND);

    if (status < 0)
        atomic_store(&c->open, false);
    return status;
}

/* vLLM has no abort, but drops the round of a worker whose update fails:
 * this one is refused by every engine, in parsing. Only while a round is
 * open: vLLM reads the answers of several ranks to the first failure alone,
 * and a call that all of them refuse leaves the rest to be taken for answers
 * to later calls. FERRY_OK: the server answered. */
static ferry_status drop_round(ferry__http_client *c, ferry__http_op *op)
{
    static const char body[] = "{\"update_info\":{\"ferry_ends_round\":1}}";
    ferry_status status = send_one(c, op, "update_weights", "/update_weights",
                                   body, sizeof(body) - 1);

    return status == FERRY_EPEER ? FERRY_OK : status;
}

/* A trainer that is gone may have left vLLM with an open round, which would
 * refuse all others for ever. Whoever opened the channel after it ends it. */
static ferry_status start_anew(ferry__http_client *c, ferry__http_op *op,
                               const char *call, const char *route)
{
    ferry_status status = send_one(c, op, call, route, NULL, 0);

    if (status != FERRY_EPEER || !atomic_load(&c->inited) ||
        strstr(ferry_last_error(), VLLM_ROUND_OPEN) == NULL)
        return status;
    ferry__log(FERRY_LOG_WARN,
               "%s: an earlier trainer left a round open; it is dropped",
               c->address.base);
    FERRY_TRY(drop_round(c, op));
    return send_one(c, op, call, route, NULL, 0);
}

/* Pause and start are one operation, so that one cancel ends both. Kept
 * requests go on after the update under the new weights; what was cached
 * under the old ones must go, and only a pause drops it. */
static ferry_status start(ferry__http_client *c, const char *call,
                          const char *route)
{
    ferry_status status = FERRY_OK;
    ferry__http_op op;

    FERRY_TRY(ferry__http_op_begin(c, &op, call, true));
    if (c->pause) {
        status = send_one(c, &op, "pause", "/pause?mode=keep&clear_cache=true",
                          NULL, 0);
        if (status == FERRY_OK)
            atomic_store(&c->paused, true);
    }
    if (status == FERRY_OK)
        status = start_anew(c, &op, call, route);
    atomic_store(&c->open, status == FERRY_OK);
    stays_paused(c, status);
    ferry__http_op_end(c, &op);
    return status;
}

static ferry_status http_start(void *self)
{
    return start(self, "start_weight_update", "/start_weight_update");
}

static ferry_status http_start_draft(void *self)
{
    return start(self, "start_draft_weight_update",
                 "/start_draft_weight_update");
}

static ferry_status resume_after(ferry__http_client *c, ferry__http_op *op)
{
    ferry_status status;

    if (!atomic_load(&c->paused))
        return FERRY_OK;
    status = send_one(c, op, "resume", "/resume", NULL, 0);
    if (status < 0)
        return ferry__fail_prefix(status, "weights are updated, but");
    atomic_store(&c->paused, false);
    return FERRY_OK;
}

/* Finish or commit, then resume what start paused: one operation. */
static ferry_status end_round(ferry__http_client *c, const char *call,
                              const char *route, const char *weight_version)
{
    ferry__str body = {0};
    ferry__http_op op;
    ferry_status status;

    if (weight_version) {
        ferry__str_append(&body, "{\"weight_version\":");
        ferry__str_json(&body, weight_version);
        ferry__str_append(&body, "}");
    }
    if (body.failed)
        status = ferry_fail(FERRY_ENOMEM, "%s: %s: out of memory",
                            c->address.base, call);
    else
        status = ferry__http_op_begin(c, &op, call, true);
    if (status == FERRY_OK) {
        status = send_one(c, &op, call, route, body.data, body.length);
        atomic_store(&c->open, false);
        if (status == FERRY_OK)
            status = resume_after(c, &op);
        stays_paused(c, status);
        ferry__http_op_end(c, &op);
    }
    ferry__str_free(&body);
    return status;
}

static ferry_status http_finish(void *self, const char *weight_version)
{
    return end_round(self, "finish_weight_update", "/finish_weight_update",
                     weight_version);
}

static ferry_status http_commit(void *self, const char *weight_version)
{
    return end_round(self, "commit_weight_update",
                     "/ferry/commit_weight_update", weight_version);
}

static ferry_status http_prepare(void *self)
{
    return post(self, "prepare_weight_update", "/ferry/prepare_weight_update",
                NULL, IN_ROUND);
}

/* Short, and not canceled itself. */
static ferry_status http_abort(void *self)
{
    ferry__http_client *c = self;
    ferry__http_op op;
    ferry_status status;

    FERRY_TRY(ferry__http_op_begin(c, &op, "abort_weight_update", false));
    if (op.timeout_ms > SHORT_TIMEOUT_MS)
        op.timeout_ms = SHORT_TIMEOUT_MS;
    status = send_one(c, &op, "abort_weight_update",
                      "/ferry/abort_weight_update", NULL, 0);
    if (status == FERRY_EROUTE && atomic_exchange(&c->open, false))
        status = drop_round(c, &op);
    ferry__http_op_end(c, &op);
    return status;
}

static void http_cancel(void *self)
{
    ferry__http_cancel(self);
}

static ferry_status http_pause(void *self, const char *mode, int clear_cache)
{
    ferry__str route = {0};
    ferry_status status;

    if (!mode || (strcmp(mode, "abort") != 0 && strcmp(mode, "wait") != 0 &&
                  strcmp(mode, "keep") != 0))
        return ferry_fail(FERRY_EINVAL,
                          "pause: mode must be abort, wait or keep, got %s",
                          mode ? mode : "none");
    ferry__str_printf(&route, "/pause?mode=%s&clear_cache=%s", mode,
                      clear_cache ? "true" : "false");
    if (route.failed)
        status = ferry_fail(FERRY_ENOMEM, "pause: out of memory");
    else
        status = post(self, "pause", route.data, NULL, BESIDE);
    ferry__str_free(&route);
    return status;
}

static ferry_status http_resume(void *self)
{
    return post(self, "resume", "/resume", NULL, BESIDE);
}

/* A server that answers everything with a page is no Ferry either. */
static ferry_status check_status(const ferry__http_client *c,
                                 const ferry__http_reply *reply)
{
    json_t *value = NULL;
    bool is_object;

    FERRY_TRY(ferry__http_judge(c, "status", "/ferry/status", reply));
    if (reply->body.length > 0 &&
        ferry__json_parse("status", reply->body.data, reply->body.length,
                          &value) < 0)
        value = NULL;
    is_object = json_is_object(value);
    json_decref(value);
    if (!is_object)
        return ferry_fail(FERRY_EROUTE,
                          "%s: status: /ferry/status is no JSON object: it "
                          "is not ferry serve",
                          c->address.base);
    return FERRY_OK;
}

static ferry_status http_status(void *self, char *buffer, size_t size_bytes)
{
    ferry__http_client *c = self;
    ferry__http_reply reply = {0};
    ferry_status status;
    ferry__http_op op;

    FERRY_TRY(ferry__http_op_begin(c, &op, "status", false));
    if (op.timeout_ms > SHORT_TIMEOUT_MS)
        op.timeout_ms = SHORT_TIMEOUT_MS;
    status =
        ferry__http_request(c, &op, true, "/ferry/status", NULL, 0, &reply);
    ferry__http_op_end(c, &op);
    if (status == FERRY_OK)
        status = check_status(c, &reply);
    if (status == FERRY_OK && size_bytes > 0) {
        size_t n = reply.body.length < size_bytes - 1 ? reply.body.length
                                                      : size_bytes - 1;

        memcpy(buffer, reply.body.data, n);
        buffer[n] = '\0';
    }
    ferry__str_free(&reply.body);
    return status;
}

/* {"world_size": N}, all data-parallel replicas of the server together. */
static ferry_status read_world_size(const ferry__http_client *c,
                                    const ferry__http_reply *reply,
                                    int32_t *out_workers)
{
    const char *call = "world_size";
    json_t *value = NULL;
    json_int_t n = 0;

    FERRY_TRY(ferry__http_judge(c, call, WORLD_SIZE_ROUTE, reply));
    if (reply->body.length > 0 &&
        ferry__json_parse("answer", reply->body.data, reply->body.length,
                          &value) == FERRY_OK)
        n = json_integer_value(json_object_get(value, "world_size"));
    json_decref(value);
    if (n < 1 || n > INT32_MAX)
        return ferry_fail(FERRY_EPEER,
                          "%s: %s: server answered %.100s, which gives no "
                          "world_size of 1 to %d",
                          c->address.base, call,
                          reply->body.data ? reply->body.data : "nothing",
                          INT32_MAX);
    *out_workers = (int32_t)n;
    return FERRY_OK;
}

static ferry_status http_world_size(void *self, int32_t *out_workers)
{
    ferry__http_client *c = self;
    ferry__http_reply reply = {0};
    ferry_status status;
    ferry__http_op op;

    FERRY_TRY(ferry__http_op_begin(c, &op, "world_size", true));
    status =
        ferry__http_request(c, &op, true, WORLD_SIZE_ROUTE, NULL, 0, &reply);
    ferry__http_op_end(c, &op);
    if (status == FERRY_OK)
        status = read_world_size(c, &reply, out_workers);
    ferry__str_free(&reply.body);
    return status;
}

static const char *http_peer(void *self, size_t index)
{
    const ferry__http_client *c = self;

    return index == 0 ? c->address.base : NULL;
}

/* A trainer leaves a canceled call or an abort behind when it must; they
 * may still be on their way out. */
static void http_close(void *self)
{
    ferry__http_client *c = self;

    ferry__http_drain(c);
    ferry__http_line_close(&c->line);
    ferry__http_address_free(&c->address);
    ferry__free(c->token);
    ferry__free(c->proxy);
    ferry__free(c->ca_file);
    pthread_cond_destroy(&c->left);
    pthread_mutex_destroy(&c->lock);
    ferry__free(c);
}

static const ferry_client_ops http_ops = {
    .size = sizeof(ferry_client_ops),
    .kind = "http",
    .init_weight_transfer_engine = http_init,
    .start_weight_update = http_start,
    .update_weights = http_update,
    .finish_weight_update = http_finish,
    .cancel = http_cancel,
    .abort_weight_update = http_abort,
    .start_draft_weight_update = http_start_draft,
    .pause = http_pause,
    .resume = http_resume,
    .status = http_status,
    .prepare_weight_update = http_prepare,
    .commit_weight_update = http_commit,
    .close = http_close,
    .peer = http_peer,
    .world_size = http_world_size,
};

static pthread_once_t curl_once = PTHREAD_ONCE_INIT;
static CURLcode curl_ready;

static void init_curl(void)
{
    curl_ready = curl_global_init(CURL_GLOBAL_DEFAULT);
}

/* Options of an older, shorter layout leave the rest at their defaults. */
static ferry_status read_options(const ferry_http_options *options,
                                 ferry_http_options *out)
{
    ferry_http_options o = FERRY_HTTP_OPTIONS_INIT;

    if (options) {
        if (options->size < sizeof(options->size))
            return ferry_fail(FERRY_EINVAL,
                              "http options: size must be at least %zu, got "
                              "%zu",
                              sizeof(options->size), options->size);
        memcpy(&o, options,
               options->size < sizeof(o) ? options->size : sizeof(o));
    }
    if (o.timeout_ms < 0 || o.connect_timeout_ms < 0)
        return ferry_fail(
            FERRY_EINVAL, "http options: %s must not be negative, got %lld",
            o.timeout_ms < 0 ? "timeout_ms" : "connect_timeout_ms",
            (long long)(o.timeout_ms < 0 ? o.timeout_ms
                                         : o.connect_timeout_ms));
    if (!o.token && ferry__config_get(FERRY__CONFIG_TOKEN)[0])
        o.token = ferry__config_get(FERRY__CONFIG_TOKEN);
    for (const char *p = o.token; p && *p; p++) {
        if ((unsigned char)*p < 0x21 || (unsigned char)*p > 0x7E)
            return ferry_fail(FERRY_EINVAL,
                              "http options: token must be visible ASCII");
    }
    *out = o;
    return FERRY_OK;
}

static ferry_status copy_text(const char *text, char **out)
{
    if (!text)
        return FERRY_OK;
    *out = ferry__strdup(text);
    return *out ? FERRY_OK : FERRY_ENOMEM;
}

static int64_t bound_ms(int64_t ms, int64_t def)
{
    ms = ms ? ms : def;
    return ms < INT_MAX ? ms : INT_MAX;
}

static ferry_status fill(ferry__http_client *c, const char *base_url,
                         const ferry_http_options *o)
{
    c->timeout_ms = bound_ms(o->timeout_ms, TIMEOUT_MS);
    c->connect_timeout_ms = bound_ms(o->connect_timeout_ms, CONNECT_TIMEOUT_MS);
    c->pause = o->pause != 0;
    FERRY_TRY(ferry__http_address_parse(base_url, &c->address));
    FERRY_TRY(copy_text(o->token && o->token[0] ? o->token : NULL, &c->token));
    FERRY_TRY(copy_text(o->proxy, &c->proxy));
    FERRY_TRY(copy_text(o->ca_file, &c->ca_file));
    return ferry__http_line_open(&c->line);
}

ferry_status ferry_client_http(const char *base_url,
                               const ferry_http_options *options,
                               ferry_client *out_client)
{
    FERRY__NEED(out_client);
    ferry_http_options o = FERRY_HTTP_OPTIONS_INIT;
    ferry__http_client *c;
    ferry_status status;

    FERRY_TRY(read_options(options, &o));
    pthread_once(&curl_once, init_curl);
    if (curl_ready != CURLE_OK)
        return ferry_fail(FERRY_EBACKEND, "libcurl: %s",
                          curl_easy_strerror(curl_ready));
    c = ferry__alloc(sizeof(*c));
    if (!c)
        return FERRY_ENOMEM;
    status = ferry__cond_init(&c->left);
    if (status < 0) {
        ferry__free(c);
        return status;
    }
    pthread_mutex_init(&c->lock, NULL);
    status = fill(c, base_url, &o);
    if (status < 0) {
        http_close(c);
        return status;
    }
    out_client->ops = &http_ops;
    out_client->self = c;
    return FERRY_OK;
}
