/* SPDX-License-Identifier: Apache-2.0 */
/* Generation requests and results as JSON; see generate_body.h. */
#include "serve/generate_body.h"

#include "base/alloc.h"

#include <stdio.h>
#include <string.h>

#define MAX_TOKENS_DEFAULT 16
#define STOP_TEXTS_MAX     16

static bool invalid(ferry__exchange *x, const char *where, const char *field,
                    const char *message)
{
    char location[128];

    snprintf(location, sizeof location, "%s.%s", where, field);
    ferry__reply_invalid(x, location, "value_error", message);
    return false;
}

static bool read_number(ferry__exchange *x, json_t *o, const char *where,
                        const char *key, double low, double high, double *value)
{
    json_t *v = json_object_get(o, key);
    char message[96];

    if (v == NULL || json_is_null(v))
        return true;
    snprintf(message, sizeof message, "Input should be a number in [%g, %g]",
             low, high);
    if (!json_is_number(v) || json_number_value(v) < low ||
        json_number_value(v) > high)
        return invalid(x, where, key, message);
    *value = json_number_value(v);
    return true;
}

static bool read_integer(ferry__exchange *x, json_t *o, const char *where,
                         const char *key, int64_t low, int64_t high,
                         int64_t *value)
{
    json_t *v = json_object_get(o, key);
    char message[96];

    if (v == NULL || json_is_null(v))
        return true;
    snprintf(message, sizeof message,
             "Input should be an integer in [%lld, %lld]", (long long)low,
             (long long)high);
    if (!json_is_integer(v) || json_integer_value(v) < low ||
        json_integer_value(v) > high)
        return invalid(x, where, key, message);
    *value = json_integer_value(v);
    return true;
}

static bool read_ids(ferry__exchange *x, json_t *array, const char *where,
                     const char *field, int64_t vocab, int32_t **out,
                     int32_t *out_n)
{
    size_t n = json_array_size(array), i;
    int32_t *ids = ferry__alloc_array(n == 0 ? 1 : n, sizeof *ids);
    json_t *id;

    if (ids == NULL) {
        ferry__reply_status(x, FERRY_ENOMEM);
        return false;
    }
    json_array_foreach(array, i, id)
    {
        if (!json_is_integer(id) || json_integer_value(id) < 0 ||
            json_integer_value(id) >= vocab) {
            char message[128];

            snprintf(message, sizeof message,
                     "token %zu must be an integer in [0, %lld)", i,
                     (long long)vocab);
            ferry__free(ids);
            return invalid(x, where, field, message);
        }
        ids[i] = (int32_t)json_integer_value(id);
    }
    *out = ids;
    *out_n = (int32_t)n;
    return true;
}

static bool read_stop_texts(ferry__exchange *x, json_t *params,
                            const char *where, ferry__request *r)
{
    json_t *stop = json_object_get(params, "stop");
    size_t n;

    if (stop == NULL || json_is_null(stop))
        return true;
    n = json_is_string(stop) ? 1 : json_array_size(stop);
    if (!json_is_string(stop) && !json_is_array(stop))
        return invalid(x, where, "stop", "Input should be text or a list");
    if (n > STOP_TEXTS_MAX)
        return invalid(x, where, "stop", "at most 16 stop texts");
    if (n > 0 && r->tokenizer == NULL)
        return invalid(x, where, "stop",
                       "this server has no tokenizer: use stop_token_ids");
    r->stop_texts = ferry__alloc_array(n == 0 ? 1 : n, sizeof(char *));
    for (size_t i = 0; r->stop_texts != NULL && i < n; i++) {
        const char *text = json_is_string(stop)
                               ? json_string_value(stop)
                               : json_string_value(json_array_get(stop, i));

        if (text == NULL || text[0] == '\0')
            return invalid(x, where, "stop", "stop texts must not be empty");
        r->stop_texts[r->n_stop_texts] = ferry__strdup(text);
        if (r->stop_texts[r->n_stop_texts] == NULL)
            break;
        r->n_stop_texts++;
    }
    if (r->n_stop_texts != (int32_t)n) {
        ferry__reply_status(x, FERRY_ENOMEM);
        return false;
    }
    return true;
}

bool ferry__read_sampling(ferry__exchange *x, json_t *params, const char *where,
                          ferry__request *r)
{
    int64_t max_tokens = MAX_TOKENS_DEFAULT, top_k = 0, n_top = 0;
    int64_t seed = (int64_t)x->server->options->seed;
    json_t *ids = json_object_get(params, "stop_token_ids");
    json_t *count = json_object_get(params, "n");

    r->sampling = (ferry__sampling){.temperature = 1, .top_p = 1};
    if (count != NULL && !json_is_null(count) &&
        !(json_is_integer(count) && json_integer_value(count) == 1))
        return invalid(x, where, "n", "only n = 1 is served");
    if (!read_integer(x, params, where, "max_tokens", 1, INT32_MAX,
                      &max_tokens) ||
        !read_integer(x, params, where, "top_k", -1, INT32_MAX, &top_k) ||
        !read_integer(x, params, where, "logprobs", 0, 32, &n_top) ||
        !read_integer(x, params, where, "seed", INT64_MIN, INT64_MAX, &seed) ||
        !read_number(x, params, where, "temperature", 0, 100,
                     &r->sampling.temperature) ||
        !read_number(x, params, where, "top_p", 1e-9, 1, &r->sampling.top_p))
        return false;
    if (!json_is_integer(json_object_get(params, "seed"))) {
        /* Unseeded requests differ from each other, not from run to run. */
        pthread_mutex_lock(&x->server->lock);
        seed += (int64_t)x->server->next_id * 7919;
        pthread_mutex_unlock(&x->server->lock);
    }
    r->max_tokens = (int32_t)max_tokens;
    r->sampling.top_k = (int32_t)top_k;
    r->sampling.seed = (uint64_t)seed;
    r->n_top = (int32_t)n_top;
    r->ignore_eos = json_is_true(json_object_get(params, "ignore_eos"));
    if (ids != NULL && !json_is_null(ids)) {
        if (!json_is_array(ids))
            return invalid(x, where, "stop_token_ids",
                           "Input should be a valid list");
        if (!read_ids(x, ids, where, "stop_token_ids",
                      x->server->config->vocab_size, &r->stop_ids,
                      &r->n_stop_ids))
            return false;
    }
    return read_stop_texts(x, params, where, r);
}

static bool check_length(ferry__exchange *x, const char *where,
                         const char *field, ferry__request *r)
{
    char message[160];
    int32_t limit = x->server->options->max_len;

    if (r->n_prompt < 1)
        return invalid(x, where, field, "the prompt is empty");
    if (r->n_prompt >= limit) {
        snprintf(message, sizeof message,
                 "the prompt has %d tokens, the longest context is %d",
                 r->n_prompt, limit);
        return invalid(x, where, field, message);
    }
    if (r->max_tokens > limit - r->n_prompt)
        r->max_tokens = limit - r->n_prompt;
    return true;
}

/* Text to ids, with the token that the checkpoint puts before every text. */
static bool encode_prompt(ferry__exchange *x, json_t *prompt, const char *where,
                          const char *field, ferry__request *r)
{
    int32_t bos, *ids = NULL;
    size_t n = 0;
    ferry_status st;

    if (r->tokenizer == NULL)
        return invalid(x, where, field,
                       "this server has no tokenizer: send token ids");
    st = ferry__tokenizer_encode(r->tokenizer, json_string_value(prompt),
                                 json_string_length(prompt), &ids, &n);
    if (st < 0) {
        ferry__reply_status(x, st);
        return false;
    }
    r->prompt =
        n < INT32_MAX - 1 ? ferry__alloc_array(n + 1, sizeof *r->prompt) : NULL;
    if (r->prompt == NULL) {
        ferry_free(ids);
        ferry__reply_status(x, FERRY_ENOMEM);
        return false;
    }
    bos = ferry__tokenizer_bos(r->tokenizer);
    if (bos >= 0 && (n == 0 || ids[0] != bos))
        r->prompt[r->n_prompt++] = bos;
    if (n > 0)
        memcpy(r->prompt + r->n_prompt, ids, n * sizeof *ids);
    r->n_prompt += (int32_t)n;
    ferry_free(ids);
    return true;
}

bool ferry__read_prompt(ferry__exchange *x, json_t *prompt, const char *field,
                        ferry__request *r)
{
    const char *where = "body";

    if (json_is_array(prompt)) {
        if (!read_ids(x, prompt, where, field, x->server->config->vocab_size,
                      &r->prompt, &r->n_prompt))
            return false;
    } else if (json_is_string(prompt)) {
        if (!encode_prompt(x, prompt, where, field, r))
            return false;
    } else {
        return invalid(x, where, field,
                       "Input should be text or a list of token ids");
    }
    return check_length(x, where, field, r);
}

/* Appends a token's bytes, special tokens left out. */
static void append_token(const ferry__request *r, int32_t id, ferry__str *s)
{
    size_t n = 0;
    const char *bytes = ferry__tokenizer_bytes(r->tokenizer, id, false, &n);

    if (bytes != NULL)
        ferry__str_append_n(s, bytes, n);
}

/* A JSON string from bytes that may end inside a UTF-8 sequence. */
static json_t *text_of(const char *bytes, size_t n)
{
    ferry__str quoted = {0};
    json_t *value;

    ferry__str_json_n(&quoted, bytes == NULL ? "" : bytes, n);
    value = quoted.failed ? NULL
                          : json_loadb(quoted.data, quoted.length,
                                       JSON_DECODE_ANY | JSON_ALLOW_NUL, NULL);
    ferry__str_free(&quoted);
    return value;
}

json_t *ferry__write_text(const ferry__request *r)
{
    ferry__str s = {0};
    json_t *out;
    size_t n;

    if (r->tokenizer == NULL)
        return json_null();
    for (int32_t i = 0; i < r->n_out; i++)
        append_token(r, r->tokens[i], &s);
    n = s.length;
    for (int32_t i = 0; s.data != NULL && i < r->n_stop_texts; i++) {
        const char *at = strstr(s.data, r->stop_texts[i]);

        if (at != NULL && (size_t)(at - s.data) < n)
            n = (size_t)(at - s.data);
    }
    out = text_of(s.data, n);
    ferry__str_free(&s);
    return out;
}

json_t *ferry__write_ids(const int32_t *ids, int32_t n)
{
    json_t *array = json_array();

    for (int32_t i = 0; i < n; i++)
        json_array_append_new(array, json_integer(ids[i]));
    return array;
}

json_t *ferry__write_spans(const ferry__request *r)
{
    json_t *array;

    if (r->n_spans == 0)
        return json_null();
    array = json_array();
    for (size_t i = 0; i < r->n_spans; i++)
        json_array_append_new(array, json_pack("{s:s,s:i,s:i}", "version",
                                               r->spans[i].version, "start",
                                               (int)r->spans[i].start, "end",
                                               (int)r->spans[i].end));
    return array;
}

static json_t *token_text(const ferry__request *r, int32_t id)
{
    char text[32];
    size_t n = 0;
    const char *bytes =
        r->tokenizer == NULL
            ? NULL
            : ferry__tokenizer_bytes(r->tokenizer, id, true, &n);

    if (bytes != NULL)
        return text_of(bytes, n);
    snprintf(text, sizeof text, "token_id:%d", id);
    return json_string(text);
}

/* UTF-8 characters, as offsets into the text are counted. */
static size_t characters(const char *text)
{
    size_t n = 0;

    for (; text != NULL && *text != '\0'; text++)
        n += ((unsigned char)*text & 0xC0) != 0x80;
    return n;
}

/* The stop id or text that ended it. */
json_t *ferry__write_stop_reason(const ferry__request *r)
{
    if (r->stop_reason >= 0)
        return json_integer(r->stop_reason);
    if (r->stop_text >= 0)
        return json_string(r->stop_texts[r->stop_text]);
    return json_null();
}

json_t *ferry__write_logprobs_completion(const ferry__request *r)
{
    json_t *tokens = json_array(), *logprobs = json_array();
    json_t *tops = json_array(), *offsets = json_array();
    size_t at = 0;

    for (int32_t i = 0; i < r->n_out; i++) {
        json_t *top = json_object(), *text = token_text(r, r->tokens[i]);
        const char *key = json_string_value(text);

        json_array_append_new(offsets, json_integer((json_int_t)at));
        at += characters(json_string_value(text));
        json_array_append_new(logprobs, json_real(r->picked[i].picked.logprob));
        for (int32_t k = 0; k < r->n_top; k++) {
            json_t *name = token_text(r, r->picked[i].top[k].token);

            json_object_set_new(top, json_string_value(name),
                                json_real(r->picked[i].top[k].logprob));
            json_decref(name);
        }
        if (key != NULL)
            json_object_set_new(top, key,
                                json_real(r->picked[i].picked.logprob));
        json_array_append_new(tokens, text);
        json_array_append_new(tops, top);
    }
    return json_pack("{s:o,s:o,s:o,s:o}", "text_offset", offsets,
                     "token_logprobs", logprobs, "tokens", tokens,
                     "top_logprobs", tops);
}

static json_t *chat_entry(const ferry__request *r, const ferry__sampled *s)
{
    return json_pack("{s:o,s:f,s:i}", "token", token_text(r, s->token),
                     "logprob", (double)s->logprob, "token_id", (int)s->token);
}

json_t *ferry__write_logprobs_chat(const ferry__request *r)
{
    json_t *content = json_array();

    for (int32_t i = 0; i < r->n_out; i++) {
        json_t *entry = chat_entry(r, &r->picked[i].picked);
        json_t *top = json_array();

        for (int32_t k = 0; k < r->n_top; k++)
            json_array_append_new(top, chat_entry(r, &r->picked[i].top[k]));
        json_object_set_new(entry, "top_logprobs", top);
        json_array_append_new(content, entry);
    }
    return json_pack("{s:o}", "content", content);
}

json_t *ferry__write_usage(const ferry__request *r)
{
    return json_pack("{s:i,s:i,s:i,s:{s:i}}", "prompt_tokens", (int)r->n_prompt,
                     "completion_tokens", (int)r->n_out, "total_tokens",
                     (int)(r->n_prompt + r->n_out), "prompt_tokens_details",
                     "cached_tokens", 0);
}
