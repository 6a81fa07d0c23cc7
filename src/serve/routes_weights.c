/* SPDX-License-Identifier: Apache-2.0 */
/* The RLHF routes: weight transfer, pause and resume, versions, checks.
 * JSON and codes as vLLM's where it answers; see docs/protocol.md. */
#include "base/alloc.h"
#include "base/clock.h"
#include "serve/http.h"

#include <stdlib.h>
#include <string.h>

#define LABEL_MAX 256 /* bytes of a version's label */

static void reply_message(ferry__exchange *x, const char *message)
{
    ferry__reply_json(x, json_pack("{s:s}", "message", message));
}

/* Runs one call under its metrics and answers. */
static void finish_call(ferry__exchange *x, ferry__operation op,
                        int64_t start_ns, ferry_status st, const char *message)
{
    ferry__metrics_end(&x->server->metrics, op,
                       (double)(ferry__now_ns() - start_ns) * 1e-9);
    if (st < 0)
        ferry__reply_status(x, st);
    else
        reply_message(x, message);
}

static int64_t begin_call(ferry__exchange *x, ferry__operation op)
{
    ferry__metrics_begin(&x->server->metrics, op);
    return ferry__now_ns();
}

/* The object (or, where `or_list`, the list) that the body holds under `key`,
 * as compact text to free; NULL when a reply was made. */
static char *read_info(ferry__exchange *x, const char *key, bool or_list)
{
    json_t *body, *info;
    char location[64];
    char *text = NULL;

    if (!ferry__body_object(x, false, &body))
        return NULL;
    info = json_object_get(body, key);
    snprintf(location, sizeof location, "body.%s", key);
    if (info == NULL)
        ferry__reply_invalid(x, location, "missing", "Field required");
    else if (!json_is_object(info) && !(or_list && json_is_array(info)))
        ferry__reply_invalid(x, location, "dict_type",
                             "Input should be a valid dictionary");
    else if ((text = json_dumps(info, JSON_COMPACT)) == NULL)
        ferry__reply_error(x, 500, NULL, "out of memory");
    json_decref(body);
    return text;
}

static void handle_init(ferry__exchange *x)
{
    char *info = read_info(x, "init_info", false);
    int64_t start;

    if (info == NULL)
        return;
    start = begin_call(x, FERRY__OP_INIT);
    finish_call(x, FERRY__OP_INIT, start, ferry__control_init(x->server, info),
                "Weight transfer initialized");
    free(info);
}

static void handle_start(ferry__exchange *x)
{
    int64_t start = begin_call(x, FERRY__OP_START);

    finish_call(x, FERRY__OP_START, start,
                ferry__control_start(x->server, false),
                "Weight update started");
}

static void handle_start_draft(ferry__exchange *x)
{
    int64_t start = begin_call(x, FERRY__OP_START_DRAFT);

    finish_call(x, FERRY__OP_START_DRAFT, start,
                ferry__control_start(x->server, true),
                "Draft weight update started");
}

static void handle_update(ferry__exchange *x)
{
    char *info = read_info(x, "update_info", true);
    int64_t start;

    if (info == NULL)
        return;
    start = begin_call(x, FERRY__OP_UPDATE);
    finish_call(x, FERRY__OP_UPDATE, start,
                ferry__control_update(x->server, info), "Weights updated");
    free(info);
}

/* Reads a version's label; false when a reply was made. *out is borrowed from
 * body. */
static bool read_label(ferry__exchange *x, json_t *value, const char *location,
                       const char **out)
{
    if (!json_is_string(value)) {
        ferry__reply_invalid(x, location, "string_type",
                             "Input should be a valid string");
        return false;
    }
    if (json_string_length(value) == 0) {
        ferry__reply_invalid(x, location, "string_too_short",
                             "String should have at least 1 byte");
        return false;
    }
    if (json_string_length(value) > LABEL_MAX) {
        ferry__reply_invalid(x, location, "string_too_long",
                             "String should have at most 256 bytes");
        return false;
    }
    *out = json_string_value(value);
    return true;
}

/* The same of a field that may be left out. */
static bool optional_label(ferry__exchange *x, json_t *body, const char *key,
                           const char *location, const char **out)
{
    json_t *value = json_object_get(body, key);

    *out = NULL;
    if (value == NULL || json_is_null(value))
        return true;
    return read_label(x, value, location, out);
}

static void handle_finish(ferry__exchange *x)
{
    json_t *body;
    const char *version;
    int64_t start;

    if (!ferry__body_object(x, true, &body))
        return;
    if (optional_label(x, body, "weight_version", "body.weight_version",
                       &version)) {
        start = begin_call(x, FERRY__OP_FINISH);
        finish_call(x, FERRY__OP_FINISH, start,
                    ferry__control_finish(x->server, version),
                    "Weight update finished");
    }
    json_decref(body);
}

static void handle_shutdown(ferry__exchange *x)
{
    int64_t start = begin_call(x, FERRY__OP_SHUTDOWN);

    finish_call(x, FERRY__OP_SHUTDOWN, start,
                ferry__control_shutdown(x->server),
                "Weight transfer shut down");
}

static void handle_prepare(ferry__exchange *x)
{
    ferry_status st = ferry__control_prepare(x->server);

    if (st < 0)
        ferry__reply_status(x, st);
    else
        reply_message(x, "Weight update prepared");
}

static void handle_commit(ferry__exchange *x)
{
    json_t *body;
    const char *version;
    ferry_status st;

    if (!ferry__body_object(x, true, &body))
        return;
    if (optional_label(x, body, "weight_version", "body.weight_version",
                       &version)) {
        st = ferry__control_commit(x->server, version);
        if (st < 0)
            ferry__reply_status(x, st);
        else
            reply_message(x, "Weight update committed");
    }
    json_decref(body);
}

static void handle_abort(ferry__exchange *x)
{
    ferry_status st = ferry__control_abort(x->server);

    if (st < 0)
        ferry__reply_status(x, st);
    else
        reply_message(x, "Weight update aborted");
}

static void handle_version(ferry__exchange *x)
{
    json_t *body;
    const char *version = NULL;
    ferry_status st;

    if (!ferry__body_object(x, false, &body))
        return;
    if (json_object_get(body, "new_version") == NULL) {
        ferry__reply_invalid(x, "body.new_version", "missing",
                             "Field required");
    } else if (read_label(x, json_object_get(body, "new_version"),
                          "body.new_version", &version)) {
        st = ferry__control_set_version(x->server, version);
        if (st < 0)
            ferry__reply_status(x, st);
        else
            ferry__reply_json(x, json_pack("{s:b,s:s}", "success", 1,
                                           "new_version", version));
    }
    json_decref(body);
}

static void handle_info(ferry__exchange *x)
{
    char *version = ferry__server_version(x->server);

    ferry__reply_json(x, json_pack("{s:s}", "weight_version",
                                   version == NULL ? "" : version));
    ferry__free(version);
}

/* Sorted keys in which the two objects differ. */
static json_t *differences(json_t *a, json_t *b)
{
    json_t *union_keys = json_object(), *out = json_array();
    const char *key;
    json_t *value;

    json_object_update(union_keys, a);
    json_object_update(union_keys, b);
    {
        /* jansson sorts when it dumps; the sorted text gives the order. */
        char *text = json_dumps(union_keys, JSON_SORT_KEYS | JSON_COMPACT);
        json_t *sorted = text == NULL ? NULL : json_loads(text, 0, NULL);

        free(text);
        json_object_foreach(sorted, key, value)
        {
            json_t *left = json_object_get(a, key);
            json_t *right = json_object_get(b, key);

            if (left == NULL || right == NULL || !json_equal(left, right))
                json_array_append_new(out, json_string(key));
        }
        json_decref(sorted);
    }
    json_decref(union_keys);
    return out;
}

static void checker_compare(ferry__exchange *x, json_t *baseline)
{
    char *text = NULL;
    json_t *now, *wrong;
    ferry_status st = ferry__control_checksums(x->server, &text);

    if (st < 0) {
        ferry__reply_status(x, st);
        return;
    }
    now = json_loads(text, 0, NULL);
    ferry__free(text);
    wrong = differences(now, baseline);
    json_decref(now);
    ferry__reply_json(x, json_pack("{s:b,s:o}", "match",
                                   json_array_size(wrong) == 0, "mismatches",
                                   wrong));
}

static void checker_checksum(ferry__exchange *x)
{
    char *text = NULL;
    ferry_status st = ferry__control_checksums(x->server, &text);

    if (st < 0) {
        ferry__reply_status(x, st);
        return;
    }
    ferry__str_printf(&x->reply, "{\"checksums\":%s}", text);
    ferry__free(text);
}

static void handle_checker(ferry__exchange *x)
{
    json_t *body;
    const char *action;
    ferry_status st;

    if (!ferry__body_object(x, false, &body))
        return;
    action = json_string_value(json_object_get(body, "action"));
    if (json_object_get(body, "action") == NULL) {
        ferry__reply_invalid(x, "body.action", "missing", "Field required");
    } else if (action != NULL && strcmp(action, "checksum") == 0) {
        checker_checksum(x);
    } else if (action != NULL && strcmp(action, "reset") == 0) {
        st = ferry__control_reset(x->server);
        if (st < 0)
            ferry__reply_status(x, st);
        else
            ferry__reply_json(x, json_pack("{s:s}", "status", "reset"));
    } else if (action != NULL && strcmp(action, "compare") == 0) {
        if (!json_is_object(json_object_get(body, "baseline")))
            ferry__reply_error(x, 400, NULL,
                               "action='compare' requires a "
                               "'baseline' object");
        else
            checker_compare(x, json_object_get(body, "baseline"));
    } else {
        ferry__reply_invalid(x, "body.action", "literal_error",
                             "Input should be checksum, reset or compare");
    }
    json_decref(body);
}

static bool read_flag(ferry__exchange *x, const char *name, bool fallback,
                      bool *out)
{
    const char *text = ferry__query(x, name);

    *out = fallback;
    if (text == NULL)
        return true;
    if (strcmp(text, "true") == 0 || strcmp(text, "1") == 0) {
        *out = true;
    } else if (strcmp(text, "false") == 0 || strcmp(text, "0") == 0) {
        *out = false;
    } else {
        char location[64];

        snprintf(location, sizeof location, "query.%s", name);
        ferry__reply_invalid(x, location, "bool_parsing",
                             "Input should be a valid boolean");
        return false;
    }
    return true;
}

static void handle_pause(ferry__exchange *x)
{
    const char *mode = ferry__query(x, "mode");
    ferry__pause pause = FERRY__PAUSE_ABORT;
    bool clear_cache;
    ferry_status st;

    if (!read_flag(x, "clear_cache", true, &clear_cache))
        return;
    if (mode != NULL && strcmp(mode, "wait") == 0) {
        pause = FERRY__PAUSE_WAIT;
    } else if (mode != NULL && strcmp(mode, "keep") == 0) {
        pause = FERRY__PAUSE_KEEP;
    } else if (mode != NULL && strcmp(mode, "abort") != 0) {
        ferry__reply_invalid(x, "query.mode", "literal_error",
                             "Input should be abort, wait or keep");
        return;
    }
    st = ferry__pause_set(x->server, pause, clear_cache);
    if (st < 0)
        ferry__reply_status(x, st);
    else
        ferry__reply_json(x, json_pack("{s:s}", "status", "paused"));
}

static void handle_resume(ferry__exchange *x)
{
    ferry__pause_resume(x->server);
    ferry__reply_json(x, json_pack("{s:s}", "status", "resumed"));
}

static void handle_is_paused(ferry__exchange *x)
{
    bool paused;

    pthread_mutex_lock(&x->server->lock);
    paused = x->server->paused != FERRY__PAUSE_NONE;
    pthread_mutex_unlock(&x->server->lock);
    ferry__reply_json(x, json_pack("{s:b}", "is_paused", paused));
}

static bool are_texts(json_t *array)
{
    json_t *item;
    size_t i;

    json_array_foreach(array, i, item)
    {
        if (!json_is_string(item))
            return false;
    }
    return json_is_array(array);
}

static void handle_abort_requests(ferry__exchange *x)
{
    json_t *body, *ids, *id;
    size_t i;
    int32_t n = 0;

    if (x->body_size == 0) {
        ferry__reply_error(x, 400, NULL, "Invalid JSON format");
        return;
    }
    if (!ferry__body_object(x, false, &body))
        return;
    ids = json_object_get(body, "request_ids");
    if (ids == NULL || json_is_null(ids)) {
        n = ferry__scheduler_abort(x->server, NULL);
    } else if (!are_texts(ids)) {
        ferry__reply_invalid(x, "body.request_ids", "list_type",
                             "Input should be a valid list of strings");
        json_decref(body);
        return;
    } else {
        /* As vLLM counts: ids that were named, known or not. */
        n = (int32_t)json_array_size(ids);
        json_array_foreach(ids, i, id)
        {
            ferry__scheduler_abort(x->server, json_string_value(id));
        }
    }
    json_decref(body);
    ferry__reply_json(
        x, json_pack("{s:s,s:i}", "status", "aborted", "aborted", (int)n));
}

static void handle_world_size(ferry__exchange *x)
{
    bool include_dp;
    const ferry__serve_options *o = x->server->options;

    if (!read_flag(x, "include_dp", true, &include_dp))
        return;
    ferry__reply_json(
        x, json_pack("{s:i}", "world_size",
                     (int)(o->tp_size * (include_dp ? o->dp_size : 1))));
}

static void handle_plan(ferry__exchange *x)
{
    char *text = NULL;
    ferry_status st = ferry__control_plan(x->server, &text);

    if (st < 0) {
        ferry__reply_status(x, st);
        return;
    }
    ferry__str_append(&x->reply, text);
    ferry__free(text);
}

#define W FERRY__ROUTE_WEIGHT
const ferry__route ferry__routes_weights[] = {
    {"POST", "/init_weight_transfer_engine", W, handle_init},
    {"POST", "/start_weight_update", W, handle_start},
    {"POST", "/start_draft_weight_update", W, handle_start_draft},
    {"POST", "/update_weights", W, handle_update},
    {"POST", "/finish_weight_update", W, handle_finish},
    {"POST", "/shutdown_weight_transfer_engine", W, handle_shutdown},
    {"POST", "/update_weight_version", W, handle_version},
    {"GET", "/weight_info", W, handle_info},
    {"POST", "/weight_checker", W, handle_checker},
    {"POST", "/pause", W, handle_pause},
    {"POST", "/resume", W, handle_resume},
    {"GET", "/is_paused", W, handle_is_paused},
    {"POST", "/abort_requests", W, handle_abort_requests},
    {"GET", "/get_world_size", W, handle_world_size},
    {"GET", "/ferry/plan", W, handle_plan},
    {"POST", "/ferry/prepare_weight_update", W, handle_prepare},
    {"POST", "/ferry/commit_weight_update", W, handle_commit},
    {"POST", "/ferry/abort_weight_update", W, handle_abort},
    {NULL, NULL, 0, NULL}};
