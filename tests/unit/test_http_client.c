/* SPDX-License-Identifier: Apache-2.0 */
/* The HTTP client against a real server that is told how to answer: routes,
 * addresses, tokens, its own words (C1, C7, G1; O-09, O-15, O-16, O-62). */
#include "harness/http_script.h"

#include "base/alloc.h"
#include "base/config.h"

#include <ferry/ferry.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

/* C1, C4: the bodies as vLLM reads them. */
static void c1_calls_are_vllms_routes_with_its_json(void **state)
{
    script told = {{{"/ferry/status", {.body = "{\"state\":\"idle\"}"}}}};
    tiny_http *s = tiny_http_start("127.0.0.1", follow, &told);
    ferry_client c = open_client(tiny_http_url(s), 5000);
    char buffer[64], small[8];
    int n = 0;

    (void)state;
    assert_int_equal(
        c.ops->init_weight_transfer_engine(c.self, "{\"rank_offset\":1}"),
        FERRY_OK);
    sent(s, n++, "POST", "/init_weight_transfer_engine",
         "{\"init_info\":{\"rank_offset\":1}}");
    assert_int_equal(c.ops->start_weight_update(c.self), FERRY_OK);
    sent(s, n++, "POST", "/start_weight_update", "");
    assert_int_equal(c.ops->update_weights(c.self, "{\"names\":[]}"), FERRY_OK);
    sent(s, n++, "POST", "/update_weights", "{\"update_info\":{\"names\":[]}}");
    assert_int_equal(c.ops->finish_weight_update(c.self, NULL), FERRY_OK);
    sent(s, n++, "POST", "/finish_weight_update", "");
    assert_int_equal(c.ops->finish_weight_update(c.self, "v\"1"), FERRY_OK);
    sent(s, n++, "POST", "/finish_weight_update",
         "{\"weight_version\":\"v\\\"1\"}");
    assert_int_equal(c.ops->start_draft_weight_update(c.self), FERRY_OK);
    sent(s, n++, "POST", "/start_draft_weight_update", "");
    assert_int_equal(c.ops->pause(c.self, "wait", 0), FERRY_OK);
    sent(s, n++, "POST", "/pause?mode=wait&clear_cache=false", "");
    assert_int_equal(c.ops->pause(c.self, "hold", 0), FERRY_EINVAL);
    assert_int_equal(c.ops->resume(c.self), FERRY_OK);
    sent(s, n++, "POST", "/resume", "");
    assert_int_equal(c.ops->prepare_weight_update(c.self), FERRY_OK);
    sent(s, n++, "POST", "/ferry/prepare_weight_update", "");
    assert_int_equal(c.ops->commit_weight_update(c.self, "v2"), FERRY_OK);
    sent(s, n++, "POST", "/ferry/commit_weight_update",
         "{\"weight_version\":\"v2\"}");
    assert_int_equal(c.ops->abort_weight_update(c.self), FERRY_OK);
    sent(s, n++, "POST", "/ferry/abort_weight_update", "");
    assert_int_equal(c.ops->status(c.self, buffer, sizeof(buffer)), FERRY_OK);
    sent(s, n++, "GET", "/ferry/status", "");
    assert_string_equal(buffer, "{\"state\":\"idle\"}");
    assert_int_equal(c.ops->status(c.self, small, sizeof(small)), FERRY_OK);
    assert_string_equal(small, "{\"state");
    /* All on one connection. */
    for (int i = 0; i < n; i++)
        assert_int_equal(tiny_http_request(s, i)->connection, 1);
    assert_int_equal(c.ops->update_weights(c.self, NULL), FERRY_EINVAL);
    ferry_client_close(&c);
    assert_null(c.ops);
    ferry_client_close(&c);
    ferry_client_close(NULL);
    tiny_http_stop(s);
}

/* vLLM's server closes the connection after an answer of 500, which may be
 * seen too late. */
static void a_connection_is_not_used_after_a_failing_answer(void **state)
{
    script told = {{{"/update_weights", {.code = 500}}}};
    tiny_http *s = tiny_http_start("127.0.0.1", follow, &told);
    ferry_client c = open_client(tiny_http_url(s), 5000);

    (void)state;
    assert_int_equal(c.ops->start_weight_update(c.self), FERRY_OK);
    assert_int_equal(c.ops->update_weights(c.self, "{}"), FERRY_EPEER);
    assert_int_equal(tiny_http_request(s, 1)->connection, 1);
    assert_int_equal(c.ops->start_weight_update(c.self), FERRY_OK);
    assert_int_equal(tiny_http_request(s, 2)->connection, 2);
    ferry_client_close(&c);
    tiny_http_stop(s);
}

static void o15_addresses_are_read_as_users_write_them(void **state)
{
    tiny_http *s = tiny_http_start("127.0.0.1", NULL, NULL);
    static const char *const tails[] = {"", "/", "//", "///"};
    char url[128];

    (void)state;
    for (int i = 0; i < 4; i++) {
        ferry_client c;

        snprintf(url, sizeof(url), "%s%s", tiny_http_url(s), tails[i]);
        c = open_client(url, 5000);
        assert_int_equal(c.ops->start_weight_update(c.self), FERRY_OK);
        sent(s, i, "POST", "/start_weight_update", "");
        ferry_client_close(&c);
    }
    tiny_http_stop(s);
}

static void o15_ipv6_needs_brackets_and_works_with_them(void **state)
{
    tiny_http *s = tiny_http_start("::1", NULL, NULL);
    ferry_client c = {0};
    char url[128];

    (void)state;
    assert_int_equal(ferry_client_http("http://::1:8000", NULL, &c),
                     FERRY_EINVAL);
    assert_string_equal(ferry_last_error(),
                        "base_url 'http://::1:8000': an IPv6 address needs "
                        "brackets: http://[::1]:8000");
    assert_int_equal(ferry_client_http("http://::1:/x", NULL, &c),
                     FERRY_EINVAL);
    if (!s) {
        print_message("no IPv6 loopback here: only the refusals were "
                      "checked\n");
        return;
    }
    snprintf(url, sizeof(url), "%s/", tiny_http_url(s));
    c = open_client(url, 5000);
    assert_int_equal(c.ops->start_weight_update(c.self), FERRY_OK);
    ferry_client_close(&c);
    tiny_http_stop(s);
    c = open_client("http://[fe80::1%25lo]:8000", 5000);
    ferry_client_close(&c);
}

static void malformed_addresses_are_refused_in_words(void **state)
{
    static const char *const wrong[][2] = {
        {"127.0.0.1:8000", "must begin with http:// or https://"},
        {"ftp://h", "must begin with http:// or https://"},
        {"", "must begin with http:// or https://"},
        {"http://", "has no host"},
        {"http:///v1", "has no host"},
        {"http://:8000", "has no host"},
        {"http://h:80 00", "must not contain spaces"},
        {"http://h\r\nX: y", "must not contain spaces"},
        {"http://h?x=1", "must have no query"},
        {"http://h/#f", "must have no query and no fragment"},
        {"http://user:pw@h", "must have no user name"},
        {"http://h:99999", "base_url 'http://h:99999': "},
        {"http://h:x", "base_url 'http://h:x': "},
        {"http://[::1", "base_url 'http://[::1': "},
    };
    ferry_client c = {0};

    (void)state;
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        assert_int_equal(ferry_client_http(wrong[i][0], NULL, &c),
                         FERRY_EINVAL);
        line_has(wrong[i][1]);
        assert_null(c.ops);
    }
    assert_int_equal(ferry_client_http(NULL, NULL, &c), FERRY_EINVAL);
}

static void options_are_checked_and_may_be_older_or_newer(void **state)
{
    ferry_http_options o = FERRY_HTTP_OPTIONS_INIT;
    ferry_client c = {0};

    (void)state;
    o.timeout_ms = -1;
    assert_int_equal(ferry_client_http("http://h", &o, &c), FERRY_EINVAL);
    line_has("timeout_ms must not be negative, got -1");
    o.timeout_ms = 0;
    o.token = "a\r\nb";
    assert_int_equal(ferry_client_http("http://h", &o, &c), FERRY_EINVAL);
    o.token = NULL;
    o.size = sizeof(o) + 8; /* of a newer program: cut */
    assert_int_equal(ferry_client_http("http://h", &o, &c), FERRY_OK);
    ferry_client_close(&c);
    o.size = 0;
    assert_int_equal(ferry_client_http("http://h", &o, &c), FERRY_EINVAL);
    o.size = offsetof(ferry_http_options, proxy);
    o.proxy = (const char *)1; /* beyond the size: not read */
    assert_int_equal(ferry_client_http("http://h", &o, &c), FERRY_OK);
    ferry_client_close(&c);
}

static void tokens_are_sent_as_bearer(void **state)
{
    tiny_http *s = tiny_http_start("127.0.0.1", NULL, NULL);
    ferry_http_options o = FERRY_HTTP_OPTIONS_INIT;
    ferry_client c = {0};

    (void)state;
    o.token = "t0ken";
    assert_int_equal(ferry_client_http(tiny_http_url(s), &o, &c), FERRY_OK);
    assert_int_equal(c.ops->resume(c.self), FERRY_OK);
    ferry_client_close(&c);
    assert_int_equal(ferry_client_http(tiny_http_url(s), NULL, &c), FERRY_OK);
    assert_int_equal(c.ops->resume(c.self), FERRY_OK);
    ferry_client_close(&c);
    assert_int_equal(ferry__config_set("token", "setting"), FERRY_OK);
    assert_int_equal(ferry_client_http(tiny_http_url(s), NULL, &c), FERRY_OK);
    assert_int_equal(c.ops->resume(c.self), FERRY_OK);
    ferry_client_close(&c);
    ferry__config_set("token", "");
    assert_string_equal(tiny_http_request(s, 0)->authorization, "Bearer t0ken");
    assert_string_equal(tiny_http_request(s, 1)->authorization, "");
    assert_string_equal(tiny_http_request(s, 2)->authorization,
                        "Bearer setting");
    tiny_http_stop(s);
}

static void o16_no_proxy_unless_told(void **state)
{
    static const char *const names[] = {"HTTP_PROXY",  "http_proxy",
                                        "HTTPS_PROXY", "https_proxy",
                                        "ALL_PROXY",   "all_proxy"};
    tiny_http *s = tiny_http_start("127.0.0.1", NULL, NULL);
    ferry_http_options o = FERRY_HTTP_OPTIONS_INIT;
    ferry_client c;

    (void)state;
    for (int i = 0; i < 6; i++)
        setenv(names[i], "http://127.0.0.1:9", 1);
    c = open_client(tiny_http_url(s), 5000);
    assert_int_equal(c.ops->init_weight_transfer_engine(c.self, "{}"),
                     FERRY_OK);
    assert_int_equal(c.ops->start_weight_update(c.self), FERRY_OK);
    assert_int_equal(c.ops->update_weights(c.self, "{}"), FERRY_OK);
    assert_int_equal(c.ops->finish_weight_update(c.self, NULL), FERRY_OK);
    ferry_client_close(&c);
    setenv("NO_PROXY", "*", 1);
    setenv("no_proxy", "*", 1);
    o.proxy = tiny_http_url(s);
    assert_int_equal(ferry_client_http("http://elsewhere.invalid:81", &o, &c),
                     FERRY_OK);
    assert_int_equal(c.ops->resume(c.self), FERRY_OK);
    sent(s, 4, "POST", "http://elsewhere.invalid:81/resume", "");
    ferry_client_close(&c);
    for (int i = 0; i < 6; i++)
        unsetenv(names[i]);
    unsetenv("NO_PROXY");
    unsetenv("no_proxy");
    tiny_http_stop(s);
}

static void o62_absent_routes_have_three_different_hints(void **state)
{
    script told = {{{"/",
                     {.code = 404,
                      .body = "{\"detail\":\"Not "
                              "Found\"}"}}}};
    tiny_http *s = tiny_http_start("127.0.0.1", follow, &told);
    static const char *const tails[] = {"/v1", "//", ""};
    char lines[3][1024], url[128], buffer[8];
    ferry_client c = {0};

    (void)state;
    for (int i = 0; i < 3; i++) {
        snprintf(url, sizeof(url), "%s%s", tiny_http_url(s), tails[i]);
        c = open_client(url, 5000);
        assert_int_equal(c.ops->start_weight_update(c.self), FERRY_EROUTE);
        snprintf(lines[i], sizeof(lines[i]), "%s", ferry_last_error());
        if (i < 2)
            ferry_client_close(&c);
    }
    assert_int_equal(tiny_http_count(s), 3); /* tries nothing else */
    assert_non_null(strstr(lines[0], "base_url has path /v1; the weight "
                                     "routes are at the root of a server"));
    assert_non_null(strstr(lines[1], "was read as http://127.0.0.1:"));
    assert_non_null(strstr(lines[2],
                           "start_weight_update: server has no "
                           "/start_weight_update: its weight transfer "
                           "routes are off (start it with "
                           "--weight-transfer-config; vLLM also needs "
                           "VLLM_SERVER_DEV_MODE=1)"));
    assert_int_equal(c.ops->status(c.self, buffer, sizeof(buffer)),
                     FERRY_EROUTE);
    line_has("it is not ferry serve");
    ferry_client_close(&c);
    tiny_http_stop(s);
}

/* G1: all ranks of all data-parallel replicas of the server. */
static void g1_the_server_is_asked_for_its_workers(void **state)
{
    static const struct {
        tiny_reply reply;
        ferry_status status;
        const char *words;
    } rows[] = {
        {{.body = "{\"world_size\":4}"}, FERRY_OK, ""},
        {{.body = "{\"world_size\":0}"}, FERRY_EPEER, "no world_size of 1 to"},
        {{.body = "{\"world_size\":\"4\"}"}, FERRY_EPEER, "no world_size"},
        {{.body = "{\"world_size\":2147483648}"}, FERRY_EPEER, "2147483648"},
        {{.body = "<html>"}, FERRY_EPEER, "<html>"},
        {{.code = 404}, FERRY_EROUTE, "server has no /get_world_size"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        script told = {{{"/get_world_size", rows[i].reply}}};
        tiny_http *s = tiny_http_start("127.0.0.1", follow, &told);
        ferry_client c = open_client(tiny_http_url(s), 5000);
        int32_t workers = 77;

        assert_int_equal(c.ops->world_size(c.self, &workers), rows[i].status);
        assert_int_equal(workers, rows[i].status < 0 ? 77 : 4);
        if (rows[i].status < 0)
            line_has(rows[i].words);
        assert_int_equal(tiny_http_count(s), 1);
        sent(s, 0, "GET", "/get_world_size?include_dp=true", "");
        ferry_client_close(&c);
        tiny_http_stop(s);
    }
}

static void a_page_for_everything_is_no_ferry(void **state)
{
    script told = {{{"/", {.body = "<html>"}}}};
    tiny_http *s = tiny_http_start("127.0.0.1", follow, &told);
    ferry_client c = open_client(tiny_http_url(s), 5000);
    char buffer[16] = "untouched";

    (void)state;
    assert_int_equal(c.ops->status(c.self, buffer, sizeof(buffer)),
                     FERRY_EROUTE);
    assert_string_equal(buffer, "untouched");
    ferry_client_close(&c);
    tiny_http_stop(s);
}

static void answered(int code, const char *body, const char *header,
                     ferry_status expected, const char *words)
{
    script told = {
        {{"/update_weights", {.code = code, .body = body, .header = header}}}};
    tiny_http *s = tiny_http_start("127.0.0.1", follow, &told);
    ferry_client c = open_client(tiny_http_url(s), 5000);
    char begin[128];

    snprintf(begin, sizeof(begin), "%s: update_weights: server answered %d",
             tiny_http_url(s), code);
    assert_int_equal(c.ops->update_weights(c.self, "{}"), expected);
    assert_int_equal(strncmp(ferry_last_error(), begin, strlen(begin)), 0);
    line_has(words);
    /* The next call works. */
    assert_int_equal(c.ops->start_weight_update(c.self), FERRY_OK);
    ferry_client_close(&c);
    tiny_http_stop(s);
}

static void o09_the_servers_own_words_come_back(void **state)
{
    static char longer[3001];

    (void)state;
    answered(500,
             "{\"error\":{\"message\":\"Worker failed with error 'unknown "
             "dtype bfloat61 of model.norm.weight'\",\"code\":500}}",
             NULL, FERRY_EPEER, "unknown dtype bfloat61 of model.norm.weight");
    answered(400, "{\"error\":\"plain\"}", NULL, FERRY_EPEER, ": plain");
    answered(422, "{\"detail\":[{\"msg\":\"Field required\"}]}", NULL,
             FERRY_EPEER, ": Field required");
    answered(400, "{\"detail\":\"why not\"}", NULL, FERRY_EPEER, ": why not");
    answered(400, "{\"message\":\"said\"}", NULL, FERRY_EPEER, ": said");
    answered(502, "<h1>bad gateway</h1>\n", NULL, FERRY_EPEER,
             ": <h1>bad gateway</h1>");
    answered(500, "", NULL, FERRY_EPEER, ": no text");
    answered(500, "{\"error\":[1]}", NULL, FERRY_EPEER, "{\"error\":[1]}");
    memset(longer, 'w', sizeof(longer) - 1);
    answered(500, longer, NULL, FERRY_EPEER, "wwww");
    answered(401, "{\"error\":\"Unauthorized\"}", NULL, FERRY_EAUTH,
             "401 to a call without token: Unauthorized");
    answered(403, "{}", NULL, FERRY_EAUTH, "{}");
    answered(409, "{\"error\":{\"message\":\"start must come first\"}}", NULL,
             FERRY_EORDER, "start must come first");
    answered(501, "{\"error\":{\"message\":\"no draft\"}}", NULL, FERRY_ENOTSUP,
             "no draft");
    answered(503, "{\"error\":{\"message\":\"paused\"}}", NULL, FERRY_ENOTREADY,
             "paused");
    answered(302, "", "Location: http://127.0.0.1:9/\r\n", FERRY_EPEER,
             "redirects are not followed");
}

static void a_refused_connection_names_host_and_port(void **state)
{
    char url[64], words[96];
    int port = tiny_http_closed_port();
    ferry_client c;

    (void)state;
    snprintf(url, sizeof(url), "http://127.0.0.1:%d", port);
    snprintf(words, sizeof(words),
             "start_weight_update: cannot connect to 127.0.0.1:%d: "
             "Connection refused",
             port);
    c = open_client(url, 5000);
    assert_int_equal(c.ops->start_weight_update(c.self), FERRY_ECONN);
    line_has(words);
    ferry_client_close(&c);
    c = open_client("http://name.invalid:81", 5000);
    assert_int_equal(c.ops->start_weight_update(c.self), FERRY_ECONN);
    line_has("name.invalid");
    ferry_client_close(&c);
}

/* On a connection that was used before, curl would repeat the request. */
static void a_torn_answer_is_an_error_and_no_second_request(void **state)
{
    script told = {{
        {"/update_weights", {.mode = TINY_SILENT}},
        {"/finish_weight_update", {.mode = TINY_TORN, .body = "{\"a\":1}"}},
    }};
    tiny_http *s = tiny_http_start("127.0.0.1", follow, &told);
    ferry_client c = open_client(tiny_http_url(s), 5000);

    (void)state;
    assert_int_equal(c.ops->start_weight_update(c.self), FERRY_OK);
    assert_int_equal(c.ops->update_weights(c.self, "{}"), FERRY_ECONN);
    line_has("closed the connection before its answer was whole");
    assert_int_equal(tiny_http_count(s), 2);
    assert_int_equal(c.ops->finish_weight_update(c.self, NULL), FERRY_ECONN);
    line_has("closed the connection before its answer was whole");
    assert_int_equal(tiny_http_count(s), 3);
    assert_int_equal(c.ops->start_weight_update(c.self), FERRY_OK);
    ferry_client_close(&c);
    tiny_http_stop(s);
}

static void answers_without_end_are_cut(void **state)
{
    script told = {{{"/resume", {.mode = TINY_FLOOD}}}};
    tiny_http *s = tiny_http_start("127.0.0.1", follow, &told);
    ferry_client c = open_client(tiny_http_url(s), 20000);

    (void)state;
    assert_int_equal(c.ops->resume(c.self), FERRY_EPEER);
    line_has("answer longer than 67108864 bytes");
    ferry_client_close(&c);
    tiny_http_stop(s);
}

/* The address sanitizer sees what a failure leaves behind. */
static void every_failing_allocation_is_survived(void **state)
{
    tiny_http *s = tiny_http_start("127.0.0.1", NULL, NULL);
    ferry_http_options o = FERRY_HTTP_OPTIONS_INIT;
    ferry_status status = FERRY_ENOMEM;
    ferry_client c = {0};

    (void)state;
    o.token = "t";
    o.ca_file = "/none";
    for (uint64_t n = 1; status < 0; n++) {
        assert_true(n < 200);
        ferry__fault_arm(FERRY__FAULT_ALLOC, n);
        status = ferry_client_http(tiny_http_url(s), &o, &c);
        ferry__fault_arm(FERRY__FAULT_ALLOC, 0);
        assert_true(status == FERRY_OK || status == FERRY_ENOMEM);
        assert_true((status == FERRY_OK) == (c.ops != NULL));
    }
    status = FERRY_ENOMEM;
    for (uint64_t n = 1; status < 0; n++) {
        assert_true(n < 200);
        ferry__fault_arm(FERRY__FAULT_ALLOC, n);
        status = c.ops->finish_weight_update(c.self, "v");
        ferry__fault_arm(FERRY__FAULT_ALLOC, 0);
        assert_true(status == FERRY_OK || status == FERRY_ENOMEM);
    }
    ferry_client_close(&c);
    tiny_http_stop(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(c1_calls_are_vllms_routes_with_its_json),
        cmocka_unit_test(a_connection_is_not_used_after_a_failing_answer),
        cmocka_unit_test(o15_addresses_are_read_as_users_write_them),
        cmocka_unit_test(o15_ipv6_needs_brackets_and_works_with_them),
        cmocka_unit_test(malformed_addresses_are_refused_in_words),
        cmocka_unit_test(options_are_checked_and_may_be_older_or_newer),
        cmocka_unit_test(tokens_are_sent_as_bearer),
        cmocka_unit_test(o16_no_proxy_unless_told),
        cmocka_unit_test(o62_absent_routes_have_three_different_hints),
        cmocka_unit_test(g1_the_server_is_asked_for_its_workers),
        cmocka_unit_test(a_page_for_everything_is_no_ferry),
        cmocka_unit_test(o09_the_servers_own_words_come_back),
        cmocka_unit_test(a_refused_connection_names_host_and_port),
        cmocka_unit_test(a_torn_answer_is_an_error_and_no_second_request),
        cmocka_unit_test(answers_without_end_are_cut),
        cmocka_unit_test(every_failing_allocation_is_survived),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
