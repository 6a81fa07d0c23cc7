/* SPDX-License-Identifier: Apache-2.0 */
/* The HTTP client round a sync: rounds that were left open at a vLLM server,
 * pausing and resuming (D5; O-05). */
#include "harness/http_script.h"

#include <ferry/ferry.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

/* ---- rounds that somebody left open at a vLLM server (D5) ---- */

#define VLLM_OPEN                                                              \
    "{\"error\":{\"message\":\"Worker failed with error 'start_weight_update " \
    "called while a weight update is already active. Call "                    \
    "finish_weight_update first.'\"}}"

static const char ends_round[] = "{\"update_info\":{\"ferry_ends_round\":1}}";

/* A server that has a round open until an update fails. */
typedef struct vllm {
    bool open;
    int abort_code;
} vllm;

static tiny_reply as_vllm(void *arg, const tiny_request *request)
{
    vllm *v = arg;

    if (strncmp(request->target, "/ferry/", 7) == 0)
        return (tiny_reply){.code = v->abort_code};
    if (strcmp(request->target, "/start_weight_update") == 0 && v->open)
        return (tiny_reply){.code = 500, .body = VLLM_OPEN};
    if (strcmp(request->target, "/update_weights") == 0) {
        v->open = false;
        return (tiny_reply){.code = 500, .body = "{\"error\":\"refused\"}"};
    }
    return (tiny_reply){0};
}

static void d5_an_abort_ends_the_round_of_a_vllm_server(void **state)
{
    vllm v = {.abort_code = 404};
    tiny_http *s = tiny_http_start("127.0.0.1", as_vllm, &v);
    ferry_client c = open_client(tiny_http_url(s), 5000);

    (void)state;
    /* There is none: nothing but the question. */
    assert_int_equal(c.ops->abort_weight_update(c.self), FERRY_EROUTE);
    assert_int_equal(tiny_http_count(s), 1);
    assert_int_equal(c.ops->start_weight_update(c.self), FERRY_OK);
    assert_int_equal(c.ops->abort_weight_update(c.self), FERRY_OK);
    sent(s, 2, "POST", "/ferry/abort_weight_update", "");
    sent(s, 3, "POST", "/update_weights", ends_round);
    assert_int_equal(c.ops->abort_weight_update(c.self), FERRY_EROUTE);
    /* One whose call failed is dropped already. */
    assert_int_equal(c.ops->start_weight_update(c.self), FERRY_OK);
    assert_int_equal(c.ops->update_weights(c.self, "{}"), FERRY_EPEER);
    assert_int_equal(c.ops->abort_weight_update(c.self), FERRY_EROUTE);
    assert_int_equal(c.ops->start_weight_update(c.self), FERRY_OK);
    assert_int_equal(c.ops->finish_weight_update(c.self, NULL), FERRY_OK);
    assert_int_equal(c.ops->abort_weight_update(c.self), FERRY_EROUTE);
    assert_int_equal(tiny_http_count(s), 11);
    /* A failing abort of a server that has one stays what it is. */
    v.abort_code = 500;
    assert_int_equal(c.ops->start_weight_update(c.self), FERRY_OK);
    assert_int_equal(c.ops->abort_weight_update(c.self), FERRY_EPEER);
    assert_int_equal(tiny_http_count(s), 13);
    ferry_client_close(&c);
    tiny_http_stop(s);
}

static void d5_who_opened_the_channel_drops_an_older_round(void **state)
{
    vllm v = {.open = true, .abort_code = 404};
    tiny_http *s = tiny_http_start("127.0.0.1", as_vllm, &v);
    ferry_client c = open_client(tiny_http_url(s), 5000);

    (void)state;
    /* Whose channel it is, is not known yet: nothing is dropped. */
    assert_int_equal(c.ops->start_weight_update(c.self), FERRY_EPEER);
    line_has("already active");
    assert_true(v.open);
    assert_int_equal(c.ops->init_weight_transfer_engine(c.self, "{}"),
                     FERRY_OK);
    assert_int_equal(c.ops->start_weight_update(c.self), FERRY_OK);
    sent(s, 2, "POST", "/start_weight_update", "");
    sent(s, 3, "POST", "/update_weights", ends_round);
    sent(s, 4, "POST", "/start_weight_update", "");
    assert_int_equal(tiny_http_count(s), 5);
    ferry_client_close(&c);
    tiny_http_stop(s);
}

static char logged[1024];

static void see_log(ferry_log_level level, const char *line, void *arg)
{
    (void)level, (void)arg;
    snprintf(logged, sizeof(logged), "%s", line);
}

static void o05_pauses_before_start_and_resumes_after_finish(void **state)
{
    script told = {{{NULL, {0}}}};
    tiny_http *s = tiny_http_start("127.0.0.1", follow, &told);
    ferry_http_options o = FERRY_HTTP_OPTIONS_INIT;
    ferry_client c = {0};

    (void)state;
    o.pause = 1;
    ferry_log_set(see_log, NULL);
    assert_int_equal(ferry_client_http(tiny_http_url(s), &o, &c), FERRY_OK);
    assert_int_equal(c.ops->start_weight_update(c.self), FERRY_OK);
    assert_int_equal(c.ops->finish_weight_update(c.self, "v1"), FERRY_OK);
    sent(s, 0, "POST", "/pause?mode=keep&clear_cache=true", "");
    sent(s, 1, "POST", "/start_weight_update", "");
    sent(s, 2, "POST", "/finish_weight_update", "{\"weight_version\":\"v1\"}");
    sent(s, 3, "POST", "/resume", "");
    assert_int_equal(tiny_http_count(s), 4);
    assert_string_equal(logged, "");
    /* A failed update leaves the server paused, with the reason said. */
    told.rules[0] = (rule){"/update_weights", {.code = 500, .body = "oh"}};
    assert_int_equal(c.ops->start_weight_update(c.self), FERRY_OK);
    assert_int_equal(c.ops->update_weights(c.self, "{}"), FERRY_EPEER);
    assert_int_equal(tiny_http_count(s), 7);
    assert_non_null(strstr(logged, "generation stays paused"));
    assert_non_null(strstr(logged, "server answered 500: oh"));
    /* The next round that works resumes it. */
    told.rules[0].target = NULL;
    assert_int_equal(c.ops->start_weight_update(c.self), FERRY_OK);
    assert_int_equal(c.ops->update_weights(c.self, "{}"), FERRY_OK);
    assert_int_equal(c.ops->prepare_weight_update(c.self), FERRY_OK);
    assert_int_equal(c.ops->commit_weight_update(c.self, NULL), FERRY_OK);
    sent(s, 12, "POST", "/resume", "");
    /* A resume that fails after a finish that worked is told. */
    told.rules[0] = (rule){"/resume", {.code = 500, .body = "stuck"}};
    assert_int_equal(c.ops->start_weight_update(c.self), FERRY_OK);
    assert_int_equal(c.ops->finish_weight_update(c.self, NULL), FERRY_EPEER);
    line_has("weights are updated, but: ");
    line_has("resume: server answered 500: stuck");
    /* A pause that fails starts nothing. */
    told.rules[0] = (rule){"/pause", {.code = 500, .body = "no"}};
    assert_int_equal(c.ops->start_weight_update(c.self), FERRY_EPEER);
    line_has(": pause: server answered 500: no");
    sent(s, tiny_http_count(s) - 1, "POST", "/pause?mode=keep&clear_cache=true",
         "");
    ferry_log_set(NULL, NULL);
    ferry_client_close(&c);
    tiny_http_stop(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(d5_an_abort_ends_the_round_of_a_vllm_server),
        cmocka_unit_test(d5_who_opened_the_channel_drops_an_older_round),
        cmocka_unit_test(o05_pauses_before_start_and_resumes_after_finish),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
