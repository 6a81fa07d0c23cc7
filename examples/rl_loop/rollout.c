/* SPDX-License-Identifier: Apache-2.0 */
/* POST /inference/v1/generate over libcurl's multi interface.
 * Invariant: a slot is free, or in flight with one sample. */
#include "rollout.h"

#include <curl/curl.h>
#include <jansson.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define REQUEST_TIMEOUT_MS 60000L
#define REPLY_BYTES_MAX    ((size_t)1 << 20)

typedef struct slot {
    CURL *easy;
    sample *s; /* NULL: free */
    char body[512];
    char *reply;
    size_t n_reply;
} slot;

struct rollout {
    char url[512];
    CURLM *multi;
    struct curl_slist *headers;
    slot *slots;
    int32_t n_slots, n_busy;
};

static size_t take_bytes(char *bytes, size_t size, size_t count, void *arg)
{
    slot *k = arg;
    size_t n = size * count;
    char *bigger;

    if (n > REPLY_BYTES_MAX - k->n_reply)
        return 0;
    bigger = realloc(k->reply, k->n_reply + n + 1);
    if (bigger == NULL)
        return 0;
    k->reply = bigger;
    memcpy(k->reply + k->n_reply, bytes, n);
    k->n_reply += n;
    k->reply[k->n_reply] = '\0';
    return n;
}

static bool make_slot(rollout *r, slot *k)
{
    k->easy = curl_easy_init();
    if (k->easy == NULL)
        return false;
    curl_easy_setopt(k->easy, CURLOPT_URL, r->url);
    curl_easy_setopt(k->easy, CURLOPT_HTTPHEADER, r->headers);
    curl_easy_setopt(k->easy, CURLOPT_WRITEFUNCTION, take_bytes);
    curl_easy_setopt(k->easy, CURLOPT_WRITEDATA, k);
    curl_easy_setopt(k->easy, CURLOPT_PRIVATE, k);
    curl_easy_setopt(k->easy, CURLOPT_TIMEOUT_MS, REQUEST_TIMEOUT_MS);
    curl_easy_setopt(k->easy, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(k->easy, CURLOPT_PROXY, "");
    return true;
}

ferry_status rollout_create(const char *url, int32_t n_slots, rollout **out)
{
    rollout *r = calloc(1, sizeof *r);

    if (r == NULL)
        return ferry_fail(FERRY_ENOMEM, "rollout: out of memory");
    snprintf(r->url, sizeof r->url, "%s/inference/v1/generate", url);
    r->multi = curl_multi_init();
    r->headers = curl_slist_append(NULL, "Content-Type: application/json");
    r->slots = calloc((size_t)n_slots, sizeof *r->slots);
    for (; r->slots != NULL && r->n_slots < n_slots; r->n_slots++)
        if (!make_slot(r, &r->slots[r->n_slots]))
            break;
    if (r->multi == NULL || r->headers == NULL || r->n_slots < n_slots) {
        rollout_destroy(&r);
        return ferry_fail(FERRY_ENOMEM, "rollout: out of memory");
    }
    curl_multi_setopt(r->multi, CURLMOPT_MAXCONNECTS, (long)n_slots);
    *out = r;
    return FERRY_OK;
}

void rollout_destroy(rollout **handle)
{
    rollout *r = *handle;

    if (r == NULL)
        return;
    for (int32_t i = 0; i < r->n_slots; i++) {
        if (r->slots[i].s != NULL)
            curl_multi_remove_handle(r->multi, r->slots[i].easy);
        curl_easy_cleanup(r->slots[i].easy);
        free(r->slots[i].reply);
    }
    curl_multi_cleanup(r->multi);
    curl_slist_free_all(r->headers);
    free(r->slots);
    free(r);
    *handle = NULL;
}

int32_t rollout_in_flight(const rollout *r)
{
    return r->n_busy;
}

static void write_body(slot *k, const sample *s)
{
    size_t at = 0, size = sizeof k->body;

    at += (size_t)snprintf(k->body, size, "{\"token_ids\":[");
    for (int i = 0; i < TASK_PROMPT; i++)
        at += (size_t)snprintf(k->body + at, size - at, "%s%d",
                               i == 0 ? "" : ",", (int)s->prompt[i]);
    snprintf(k->body + at, size - at,
             "],\"sampling_params\":{\"max_tokens\":%d,\"temperature\":1,"
             "\"seed\":%lld,\"logprobs\":0,\"stop_token_ids\":[%d]}}",
             (int)TASK_ANSWER, (long long)(s->seed >> 1), (int)TASK_END);
}

ferry_status rollout_send(rollout *r, sample *s)
{
    slot *k = NULL;

    for (int32_t i = 0; i < r->n_slots && k == NULL; i++)
        if (r->slots[i].s == NULL)
            k = &r->slots[i];
    if (k == NULL)
        return ferry_fail(FERRY_EBUSY, "rollout: all %d slots are taken",
                          (int)r->n_slots);
    write_body(k, s);
    k->n_reply = 0;
    curl_easy_setopt(k->easy, CURLOPT_POSTFIELDS, k->body);
    if (curl_multi_add_handle(r->multi, k->easy) != CURLM_OK)
        return ferry_fail(FERRY_ENOMEM, "rollout: no request added");
    k->s = s;
    r->n_busy++;
    return FERRY_OK;
}

static int32_t step_of(const char *version)
{
    int step;
    char rest;

    if (version == NULL || sscanf(version, "step-%d%c", &step, &rest) != 1 ||
        step < 0)
        return STEP_UNKNOWN;
    return step;
}

static ferry_status malformed(const char *what)
{
    return ferry_fail(FERRY_EPEER, "the server's answer is malformed: %s",
                      what);
}

static ferry_status read_tokens(json_t *choice, sample *s)
{
    json_t *ids = json_object_get(choice, "token_ids");
    json_t *entries =
        json_object_get(json_object_get(choice, "logprobs"), "content");
    size_t n = json_array_size(ids);

    if (n < 1 || n > TASK_ANSWER || json_array_size(entries) != n)
        return malformed("token_ids and logprobs");
    for (size_t t = 0; t < n; t++) {
        json_t *entry = json_array_get(entries, t);
        json_t *id = json_array_get(ids, t);

        if (!json_equal(id, json_object_get(entry, "token_id")))
            return malformed("a logprob of another token");
        s->answer[t] = (int32_t)json_integer_value(id);
        s->logprobs[t] =
            (float)json_number_value(json_object_get(entry, "logprob"));
        s->steps[t] = STEP_UNKNOWN;
    }
    s->n_answer = (int32_t)n;
    return FERRY_OK;
}

/* Spans are contiguous, never empty, and cover all tokens. */
static ferry_status read_spans(json_t *choice, sample *s)
{
    json_t *spans = json_object_get(choice, "weight_versions"), *span;
    json_int_t at = 0;
    size_t i;

    json_array_foreach(spans, i, span)
    {
        json_int_t start = json_integer_value(json_object_get(span, "start"));
        json_int_t end = json_integer_value(json_object_get(span, "end"));
        int32_t step =
            step_of(json_string_value(json_object_get(span, "version")));

        if (start != at || end <= start || end > s->n_answer)
            return malformed("weight_versions");
        for (; at < end; at++)
            s->steps[at] = step;
    }
    return at == s->n_answer ? FERRY_OK : malformed("weight_versions");
}

static ferry_status read_answer(slot *k)
{
    json_t *reply =
        json_loadb(k->reply == NULL ? "" : k->reply, k->n_reply, 0, NULL);
    json_t *choice = json_array_get(json_object_get(reply, "choices"), 0);
    const char *reason =
        json_string_value(json_object_get(choice, "finish_reason"));
    ferry_status st;

    if (reason == NULL)
        st = malformed("no choice");
    else if (strcmp(reason, "stop") != 0 && strcmp(reason, "length") != 0)
        st = ferry_fail(FERRY_EPEER, "the server ended an answer with \"%s\"",
                        reason);
    else
        st = read_tokens(choice, k->s);
    if (st == FERRY_OK)
        st = read_spans(choice, k->s);
    json_decref(reply);
    return st;
}

static ferry_status finish(rollout *r, slot *k, CURLcode code)
{
    long status = 0;
    ferry_status st;

    curl_easy_getinfo(k->easy, CURLINFO_RESPONSE_CODE, &status);
    curl_multi_remove_handle(r->multi, k->easy);
    if (code != CURLE_OK)
        st = ferry_fail(code == CURLE_OPERATION_TIMEDOUT ? FERRY_ETIMEOUT
                                                         : FERRY_ECONN,
                        "%s: %s", r->url, curl_easy_strerror(code));
    else if (status != 200)
        st = ferry_fail(FERRY_EPEER, "%s: %ld %.300s", r->url, status,
                        k->reply == NULL ? "" : k->reply);
    else
        st = read_answer(k);
    k->s = NULL;
    r->n_busy--;
    return st;
}

ferry_status rollout_wait(rollout *r, int32_t timeout_ms, sample **out_done)
{
    int running, left;

    *out_done = NULL;
    for (int pass = 0; pass < 2; pass++) {
        CURLMsg *m;

        curl_multi_perform(r->multi, &running);
        m = curl_multi_info_read(r->multi, &left);
        if (m != NULL && m->msg == CURLMSG_DONE) {
            CURLcode code = m->data.result;
            slot *k = NULL;
            sample *s;

            curl_easy_getinfo(m->easy_handle, CURLINFO_PRIVATE, &k);
            s = k->s;
            FERRY_TRY(finish(r, k, code));
            *out_done = s;
            return FERRY_OK;
        }
        if (pass == 0)
            curl_multi_poll(r->multi, NULL, 0, timeout_ms, NULL);
    }
    return FERRY_OK;
}

ferry_status rollout_run(rollout *r, sample *samples, size_t n)
{
    size_t sent = 0, done = 0;

    while (done < n) {
        sample *s;

        while (sent < n && r->n_busy < r->n_slots)
            FERRY_TRY(rollout_send(r, &samples[sent++]));
        FERRY_TRY(rollout_wait(r, 1000, &s));
        done += s != NULL;
    }
    return FERRY_OK;
}
