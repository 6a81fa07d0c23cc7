/* SPDX-License-Identifier: Apache-2.0 */
/* /v1/completions and /inference/v1/generate: text or token ids in, ids,
 * text, logprobs and weight-version spans out. */
#include "base/alloc.h"
#include "base/clock.h"
#include "serve/generate_body.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

#define REQUEST_BOUND_MS (INT64_C(6) * 3600 * 1000)

/* New requests while paused: abort and wait refuse, keep queues. */
static bool gate(ferry__exchange *x)
{
    ferry__pause paused;

    pthread_mutex_lock(&x->server->lock);
    paused = x->server->paused;
    pthread_mutex_unlock(&x->server->lock);
    if (paused == FERRY__PAUSE_ABORT || paused == FERRY__PAUSE_WAIT) {
        ferry__reply_error(x, 503, NULL,
                           "Generation is paused. Please "
                           "retry after it resumes.");
        return false;
    }
    return true;
}

static bool make_request(ferry__exchange *x, json_t *body, const char *prefix,
                         ferry__request **out)
{
    json_t *id = json_object_get(body, "request_id");
    ferry__request *r = NULL;
    uint64_t number;

    if (ferry__request_create(&r) < 0) {
        ferry__reply_status(x, FERRY_ENOMEM);
        return false;
    }
    pthread_mutex_lock(&x->server->lock);
    number = ++x->server->next_id;
    pthread_mutex_unlock(&x->server->lock);
    if (json_is_string(id) && json_string_length(id) < sizeof r->id)
        snprintf(r->id, sizeof r->id, "%s", json_string_value(id));
    else
        snprintf(r->id, sizeof r->id, "%s-%llu", prefix,
                 (unsigned long long)number);
    r->tokenizer = x->server->tokenizer;
    *out = r;
    return true;
}

/* Runs the request; false when a reply was made instead. */
static bool run(ferry__exchange *x, ferry__request *r)
{
    ferry__deadline d = ferry__deadline_in(REQUEST_BOUND_MS);
    ferry_status st = ferry__scheduler_submit(x->server, r);

    if (st < 0) {
        ferry__reply_status(x, st);
        return false;
    }
    while (!ferry__request_wait(r, 1000))
        if (ferry__deadline_passed(&d))
            ferry__scheduler_abort(x->server, r->id);
    ferry__metrics_request(&x->server->metrics, r->finish_reason, r->n_prompt,
                           r->n_out);
    if (strcmp(r->finish_reason, "error") != 0)
        return true;
    ferry__reply_error(x, r->status == FERRY_ENOTREADY ? 503 : 500, NULL, "%s",
                       r->failure);
    return false;
}

static bool refuse_stream(ferry__exchange *x, json_t *body)
{
    if (!json_is_true(json_object_get(body, "stream")))
        return false;
    ferry__reply_error(x, 501, "body.stream",
                       "streamed answers are not served");
    return true;
}

static void reply_completion(ferry__exchange *x, json_t *body,
                             const ferry__request *r)
{
    bool want_logprobs = json_is_integer(json_object_get(body, "logprobs"));
    json_t *choice = json_pack(
        "{s:i,s:o,s:o,s:s,s:o}", "index", 0, "text", ferry__write_text(r),
        "logprobs",
        want_logprobs ? ferry__write_logprobs_completion(r) : json_null(),
        "finish_reason", r->finish_reason, "stop_reason",
        ferry__write_stop_reason(r));

    if (json_is_true(json_object_get(body, "return_token_ids"))) {
        json_object_set_new(choice, "token_ids",
                            ferry__write_ids(r->tokens, r->n_out));
        json_object_set_new(choice, "prompt_token_ids",
                            ferry__write_ids(r->prompt, r->n_prompt));
    }
    if (json_is_true(json_object_get(body, "return_weight_versions")))
        json_object_set_new(choice, "weight_versions", ferry__write_spans(r));
    ferry__reply_json(x, json_pack("{s:s,s:s,s:I,s:s,s:[o],s:o}", "id", r->id,
                                   "object", "text_completion", "created",
                                   (json_int_t)time(NULL), "model",
                                   x->server->options->served_name, "choices",
                                   choice, "usage", ferry__write_usage(r)));
}

static void handle_completions(ferry__exchange *x)
{
    json_t *body, *prompt;
    ferry__request *r = NULL;

    if (!ferry__body_object(x, false, &body))
        return;
    prompt = json_object_get(body, "prompt");
    if (prompt == NULL)
        ferry__reply_invalid(x, "body.prompt", "missing", "Field required");
    else if (gate(x) && !refuse_stream(x, body) &&
             make_request(x, body, "cmpl", &r) &&
             ferry__read_sampling(x, body, "body", r) &&
             ferry__read_prompt(x, prompt, "prompt", r) && run(x, r))
        reply_completion(x, body, r);
    ferry__request_destroy(&r);
    json_decref(body);
}

static void reply_generate(ferry__exchange *x, json_t *params,
                           const ferry__request *r)
{
    bool want_logprobs = json_is_integer(json_object_get(params, "logprobs"));
    json_t *choice =
        json_pack("{s:i,s:o,s:s,s:o,s:o,s:o}", "index", 0, "logprobs",
                  want_logprobs ? ferry__write_logprobs_chat(r) : json_null(),
                  "finish_reason", r->finish_reason, "stop_reason",
                  ferry__write_stop_reason(r), "token_ids",
                  ferry__write_ids(r->tokens, r->n_out), "weight_versions",
                  ferry__write_spans(r));

    ferry__reply_json(x, json_pack("{s:s,s:[o],s:n,s:o}", "request_id", r->id,
                                   "choices", choice, "prompt_logprobs",
                                   "usage", ferry__write_usage(r)));
}

static void handle_generate(ferry__exchange *x)
{
    json_t *body, *ids, *params, *none = json_object();
    ferry__request *r = NULL;

    if (!ferry__body_object(x, false, &body)) {
        json_decref(none);
        return;
    }
    ids = json_object_get(body, "token_ids");
    params = json_object_get(body, "sampling_params");
    if (params == NULL || json_is_null(params))
        params = none;
    if (!json_is_array(ids))
        ferry__reply_invalid(
            x, "body.token_ids", ids == NULL ? "missing" : "list_type",
            ids == NULL ? "Field required" : "Input should be a valid list");
    else if (!json_is_object(params))
        ferry__reply_invalid(x, "body.sampling_params", "dict_type",
                             "Input should be a valid dictionary");
    else if (gate(x) && !refuse_stream(x, body) &&
             make_request(x, body, "gen", &r) &&
             ferry__read_sampling(x, params, "body.sampling_params", r) &&
             ferry__read_prompt(x, ids, "token_ids", r) && run(x, r))
        reply_generate(x, params, r);
    ferry__request_destroy(&r);
    json_decref(body);
    json_decref(none);
}

const ferry__route ferry__routes_generate[] = {
    {"POST", "/v1/completions", 0, handle_completions},
    {"POST", "/inference/v1/generate", 0, handle_generate},
    {NULL, NULL, 0, NULL}};
