/* SPDX-License-Identifier: Apache-2.0 */
/* One generation request; see request.h. */
#include "serve/request.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "base/thread.h"

#include <stdio.h>
#include <string.h>

ferry_status ferry__request_create(ferry__request **out)
{
    ferry__request *r = ferry__alloc(sizeof *r);

    if (r == NULL)
        return FERRY_ENOMEM;
    if (pthread_mutex_init(&r->lock, NULL) != 0 ||
        ferry__cond_init(&r->cond) < 0) {
        ferry__free(r);
        return ferry_fail(FERRY_ENOMEM, "no lock for a request");
    }
    r->slot = -1;
    r->stop_reason = r->stop_text = -1;
    *out = r;
    return FERRY_OK;
}

void ferry__request_destroy(ferry__request **request)
{
    ferry__request *r = *request;

    if (r == NULL)
        return;
    *request = NULL;
    for (int32_t i = 0; i < r->n_stop_texts; i++)
        ferry__free(r->stop_texts[i]);
    for (size_t i = 0; i < r->n_spans; i++)
        ferry__free(r->spans[i].version);
    ferry__free(r->stop_texts);
    ferry__free(r->spans);
    ferry__free(r->prompt);
    ferry__free(r->stop_ids);
    ferry__free(r->tokens);
    ferry__free(r->picked);
    ferry__free(r->cache_version);
    ferry__str_free(&r->text);
    pthread_cond_destroy(&r->cond);
    pthread_mutex_destroy(&r->lock);
    ferry__free(r);
}

/* Room for one more token in both arrays. */
static ferry_status grow_tokens(ferry__request *r)
{
    size_t tokens = (size_t)r->out_capacity;
    size_t picked = tokens;

    FERRY_TRY(
        ferry__grow(&r->tokens, &tokens, (size_t)r->n_out, sizeof *r->tokens));
    FERRY_TRY(
        ferry__grow(&r->picked, &picked, (size_t)r->n_out, sizeof *r->picked));
    r->out_capacity = (int32_t)(tokens < picked ? tokens : picked);
    return FERRY_OK;
}

static ferry_status stamp(ferry__request *r, const char *version)
{
    ferry__version_span *last =
        r->n_spans == 0 ? NULL : &r->spans[r->n_spans - 1];

    if (last != NULL && strcmp(last->version, version) == 0) {
        last->end = r->n_out;
        return FERRY_OK;
    }
    FERRY_TRY(ferry__grow(&r->spans, &r->spans_capacity, r->n_spans,
                          sizeof *r->spans));
    last = &r->spans[r->n_spans];
    last->version = ferry__strdup(version);
    if (last->version == NULL)
        return FERRY_ENOMEM;
    last->start = r->n_out - 1;
    last->end = r->n_out;
    r->n_spans++;
    return FERRY_OK;
}

static bool stops_on_id(ferry__request *r, int32_t token,
                        const int32_t *eos_ids, int32_t n_eos)
{
    for (int32_t i = 0; !r->ignore_eos && i < n_eos; i++)
        if (eos_ids[i] == token)
            return true;
    for (int32_t i = 0; i < r->n_stop_ids; i++) {
        if (r->stop_ids[i] == token) {
            r->stop_reason = token;
            return true;
        }
    }
    return false;
}

static bool stops_on_text(ferry__request *r, int32_t token)
{
    const char *bytes;
    size_t n = 0;

    if (r->n_stop_texts == 0 || r->tokenizer == NULL)
        return false;
    bytes = ferry__tokenizer_bytes(r->tokenizer, token, false, &n);
    if (bytes != NULL)
        ferry__str_append_n(&r->text, bytes, n);
    for (int32_t i = 0; r->text.data != NULL && i < r->n_stop_texts; i++)
        if (strstr(r->text.data, r->stop_texts[i]) != NULL) {
            r->stop_text = i;
            return true;
        }
    return false;
}

ferry_status ferry__request_take(ferry__request *r,
                                 const ferry__step_token *token,
                                 const char *version, const int32_t *eos_ids,
                                 int32_t n_eos)
{
    FERRY_TRY(grow_tokens(r));
    r->tokens[r->n_out] = token->picked.token;
    r->picked[r->n_out] = *token;
    r->n_out++;
    FERRY_TRY(stamp(r, version));
    if (stops_on_id(r, token->picked.token, eos_ids, n_eos) ||
        stops_on_text(r, token->picked.token))
        r->finish_reason = "stop";
    else if (r->n_out >= r->max_tokens)
        r->finish_reason = "length";
    return FERRY_OK;
}

void ferry__request_done(ferry__request *r, const char *reason)
{
    pthread_mutex_lock(&r->lock);
    if (r->finish_reason == NULL)
        r->finish_reason = reason;
    r->done = true;
    pthread_cond_broadcast(&r->cond);
    pthread_mutex_unlock(&r->lock);
}

void ferry__request_fail(ferry__request *r, ferry_status status,
                         const char *line)
{
    r->status = status;
    snprintf(r->failure, sizeof r->failure, "%s", line);
    r->finish_reason = "error";
    ferry__request_done(r, "error");
}

bool ferry__request_wait(ferry__request *r, int64_t timeout_ms)
{
    int64_t until = ferry__now_ns() + timeout_ms * 1000000;
    bool done;

    pthread_mutex_lock(&r->lock);
    while (!r->done && ferry__now_ns() < until)
        ferry__cond_wait_until(&r->cond, &r->lock, until);
    done = r->done;
    pthread_mutex_unlock(&r->lock);
    return done;
}
