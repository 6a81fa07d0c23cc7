/* SPDX-License-Identifier: Apache-2.0 */
/* Joining a running server; see join.h. One attempt is: what is there, the
 * bytes, the digests of both, and whether it still is what was there. A round
 * on the other side spoils an attempt and another one is made, within the
 * bound of a round. */
#include "serve/join.h"

#include "base/alloc.h"
#include "base/json.h"
#include "base/log.h"
#include "base/thread.h"
#include "clients/http_client.h"
#include "serve/control.h"
#include "serve/join_copy.h"
#include "serve/rank_call.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ATTEMPTS         20
#define ATTEMPT_PAUSE_MS 250
#define REQUEST_MS       INT64_C(60000)

/* ---- asking the other server ---- */

ferry_status ferry__join_ask(ferry__join *j, const char *route,
                             const char *body, ferry__str *out)
{
    ferry__http_client *c = j->client.self;
    ferry__http_reply reply = {0};
    ferry__http_op op;
    ferry_status st;

    if (atomic_load(&j->stop))
        return ferry_fail(FERRY_ECANCELED, "the server is stopping");
    FERRY_TRY(ferry__http_op_begin(c, &op, "join", true));
    st = ferry__http_request(c, &op, body == NULL, route, body,
                             body == NULL ? 0 : strlen(body), &reply);
    ferry__http_op_end(c, &op);
    if (st == FERRY_OK)
        st = ferry__http_judge(c, "join", route, &reply);
    if (st < 0) {
        ferry__str_free(&reply.body);
        return st;
    }
    *out = reply.body;
    return FERRY_OK;
}

static ferry_status ask_json(ferry__join *j, const char *route,
                             const char *body, json_t **out)
{
    ferry__str text = {0};
    ferry_status st;

    FERRY_TRY(ferry__join_ask(j, route, body, &text));
    st = ferry__json_parse(route, text.data == NULL ? "" : text.data,
                           text.length, out);
    ferry__str_free(&text);
    return st < 0 ? FERRY_EPEER : FERRY_OK;
}

/* ---- what there is ---- */

static ferry_status differs(const char *what, const char *theirs,
                            const char *ours)
{
    return ferry_fail(FERRY_EMISMATCH, "%s is %s there and %s here", what,
                      theirs == NULL ? "unknown" : theirs, ours);
}

static ferry_status check_rank(const json_t *theirs, const json_t *ours,
                               int32_t rank)
{
    for (size_t i = 0; i < json_array_size(ours); i++) {
        json_t *a = json_array_get(theirs, i), *b = json_array_get(ours, i);
        char *left, *right;
        ferry_status st;

        if (json_equal(a, b))
            continue;
        left = json_dumps(a, JSON_COMPACT | JSON_ENCODE_ANY);
        right = json_dumps(b, JSON_COMPACT);
        st = ferry_fail(FERRY_EMISMATCH,
                        "rank %d, stored parameter %zu: %s there, %s here",
                        rank, i, left == NULL ? "nothing" : left,
                        right == NULL ? "?" : right);
        free(left);
        free(right);
        return st;
    }
    if (json_array_size(theirs) != json_array_size(ours))
        return ferry_fail(FERRY_EMISMATCH,
                          "rank %d stores %zu parameters there and %zu here",
                          rank, json_array_size(theirs), json_array_size(ours));
    return FERRY_OK;
}

/* Stored bytes can only be copied to where they are stored alike. */
static ferry_status check_alike(ferry__server *s, const json_t *manifest)
{
    const ferry__serve_options *o = s->options;
    const char *arch = ferry__arch_name(s->config->arch);
    const char *kernel = ferry__kernel_name(o->kernel);
    const char *their_arch =
        json_string_value(json_object_get(manifest, "architecture"));
    const char *their_kernel =
        json_string_value(json_object_get(manifest, "kernel_format"));
    json_int_t tp =
        json_integer_value(json_object_get(manifest, "tensor_parallel_size"));
    char there[24], here[24];

    if (their_arch == NULL || strcmp(arch, their_arch) != 0)
        return differs("the architecture", their_arch, arch);
    if (their_kernel == NULL || strcmp(kernel, their_kernel) != 0)
        return differs("--kernel-format", their_kernel, kernel);
    snprintf(there, sizeof there, "%lld", (long long)tp);
    snprintf(here, sizeof here, "%d", o->tp_size);
    if (tp != o->tp_size)
        return differs("--tensor-parallel-size", there, here);
    for (int32_t i = 0; i < o->tp_size; i++) {
        json_t *ours = NULL;
        ferry_status st = ferry__join_layout(s, i, &ours);

        if (st == FERRY_OK)
            st = check_rank(
                json_array_get(json_object_get(manifest, "ranks"), (size_t)i),
                ours, i);
        json_decref(ours);
        FERRY_TRY(st);
    }
    return FERRY_OK;
}

/* ---- digests ---- */

/* Ours under any replica must equal theirs under their first. */
static ferry_status compare_digests(const json_t *theirs, json_t *ours)
{
    const char *key;
    json_t *value;

    if (json_object_size(ours) == 0)
        return ferry_fail(FERRY_EINTERNAL, "no digests of our own");
    json_object_foreach(ours, key, value)
    {
        const char *rest = strchr(key, ':');
        char other[512];
        const char *want;

        snprintf(other, sizeof other, "dp0%s", rest == NULL ? "" : rest);
        want = json_string_value(json_object_get(theirs, other));
        if (want == NULL || strcmp(want, json_string_value(value)) != 0)
            return ferry_fail(FERRY_EDIGEST, "%s: %s there, %s here", key,
                              want == NULL ? "nothing" : want,
                              json_string_value(value));
    }
    return FERRY_OK;
}

static ferry_status check_digests(ferry__join *j)
{
    json_t *reply = NULL, *ours = NULL;
    char *text = NULL;
    ferry_status st;

    FERRY_TRY(
        ask_json(j, "/weight_checker", "{\"action\":\"checksum\"}", &reply));
    st = ferry__control_checksums_inside(j->server, &text);
    if (st == FERRY_OK)
        st = ferry__json_parse("digests", text, strlen(text), &ours);
    ferry__free(text);
    if (st == FERRY_OK)
        st = compare_digests(json_object_get(reply, "checksums"), ours);
    json_decref(reply);
    json_decref(ours);
    return st;
}

/* ---- the attempt ---- */

static ferry_status still_there(ferry__join *j, const json_t *manifest)
{
    json_t *now = NULL;
    bool same;

    FERRY_TRY(ask_json(j, "/ferry/weights", NULL, &now));
    same = json_equal(json_object_get(now, "content"),
                      json_object_get(manifest, "content")) &&
           json_equal(json_object_get(now, "weight_version"),
                      json_object_get(manifest, "weight_version"));
    json_decref(now);
    if (!same)
        return ferry_fail(FERRY_EORDER, "the weights changed while they were "
                                        "copied");
    return FERRY_OK;
}

static ferry_status attempt(ferry__join *j)
{
    json_t *manifest = NULL;
    const char *version;
    ferry_status st;

    FERRY_TRY(ask_json(j, "/ferry/weights", NULL, &manifest));
    st = check_alike(j->server, manifest);
    if (st == FERRY_OK)
        st = ferry__join_copy(j, manifest);
    if (st == FERRY_OK)
        st = check_digests(j);
    if (st == FERRY_OK)
        st = still_there(j, manifest);
    version = json_string_value(json_object_get(manifest, "weight_version"));
    if (st == FERRY_OK)
        st = ferry__rank_call(j->server, FERRY__RANK_ADOPT,
                              version == NULL ? "" : version, NULL);
    if (st == FERRY_OK && version != NULL)
        ferry__control_label(j->server, version);
    json_decref(manifest);
    return st;
}

/* Refusals that another moment answers differently. */
static bool passes(ferry_status st)
{
    return st == FERRY_EORDER || st == FERRY_ENOTREADY;
}

static ferry_status attempts(ferry__join *j)
{
    ferry__deadline d = ferry__deadline_in(ferry__rank_bound_ms(j->server));
    char line[1024];
    ferry_status st = FERRY_OK;

    for (int n = 1; n <= ATTEMPTS; n++) {
        st = attempt(j);
        if (!passes(st) || atomic_load(&j->stop))
            return st;
        snprintf(line, sizeof line, "%s", ferry_last_error());
        if (ferry__deadline_passed(&d))
            return ferry_fail(FERRY_ETIMEOUT, "not done within %lld ms: %s",
                              (long long)d.bound_ms, line);
        ferry__log(FERRY_LOG_INFO, "join: attempt %d: %s", n, line);
        ferry__sleep_ms(ATTEMPT_PAUSE_MS * n);
    }
    return ferry_fail(FERRY_EBUSY, "given up after %d attempts: %s", ATTEMPTS,
                      line);
}

static ferry_status run(ferry__join *j)
{
    ferry__server *s = j->server;
    ferry_status st;

    FERRY_TRY(ferry__rank_call_begin(s, "join"));
    st = ferry__rank_call_wait_up(s);
    if (st == FERRY_OK)
        st = attempts(j);
    if (st == FERRY_OK) {
        pthread_mutex_lock(&s->lock);
        s->content++;
        pthread_mutex_unlock(&s->lock);
        for (int32_t i = 0; i < s->options->dp_size; i++)
            ferry__replica_refresh(&s->replicas[i]);
    }
    ferry__rank_call_end(s);
    return st;
}

static void *join_thread(void *arg)
{
    ferry__join *j = arg;
    int64_t start = ferry__now_ns();
    ferry_status st = run(j);

    if (st < 0) {
        /* The client's own failures begin with the URL. */
        const char *url = j->server->options->join;
        bool named = strncmp(ferry_last_error(), url, strlen(url)) == 0;

        snprintf(j->line, sizeof j->line, "--join %s%s%s", named ? "" : url,
                 named ? "" : ": ", ferry_last_error());
    }
    if (st == FERRY_OK)
        ferry__log(FERRY_LOG_INFO, "joined %s in %.1f s",
                   j->server->options->join,
                   (double)(ferry__now_ns() - start) * 1e-9);
    atomic_store(&j->result, st);
    return NULL;
}

ferry_status ferry__join_begin(ferry__join *j, ferry__server *s)
{
    ferry_http_options o = FERRY_HTTP_OPTIONS_INIT;

    if (s->options->join == NULL)
        return FERRY_OK;
    o.token = s->options->join_key;
    o.ca_file = s->options->join_ca;
    o.timeout_ms = REQUEST_MS;
    FERRY_TRY(ferry_client_http(s->options->join, &o, &j->client));
    j->server = s;
    atomic_store(&j->result, 1);
    FERRY_TRY(ferry__thread_start(&j->thread, "ferry-join", join_thread, j));
    j->started = true;
    return FERRY_OK;
}

ferry_status ferry__join_check(ferry__join *j)
{
    int result = j->started ? atomic_load(&j->result) : FERRY_OK;

    return result < 0 ? ferry__fail_line((ferry_status)result, j->line)
                      : FERRY_OK;
}

bool ferry__join_done(ferry__join *j)
{
    return !j->started || atomic_load(&j->result) <= 0;
}

void ferry__join_end(ferry__join *j)
{
    if (j->started) {
        atomic_store(&j->stop, true);
        while (atomic_load(&j->result) > 0) {
            j->client.ops->cancel(j->client.self);
            ferry__sleep_ms(20);
        }
        pthread_join(j->thread, NULL);
        j->started = false;
    }
    ferry_client_close(&j->client);
}
