/* SPDX-License-Identifier: Apache-2.0 */
/* The HTTP client: each wait ends at its time-out, when it is canceled, or
 * when the client is closed (J1). */
#include "harness/http_script.h"

#include "base/clock.h"

#include <ferry/ferry.h>

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static void a_call_ends_at_its_timeout(void **state)
{
    script told = {{{"/update_weights", {.mode = TINY_HANG}}}};
    tiny_http *s = tiny_http_start("127.0.0.1", follow, &told);
    ferry_client c = open_client(tiny_http_url(s), 200);
    int64_t before = ferry__now_ns();

    (void)state;
    assert_int_equal(c.ops->update_weights(c.self, "{}"), FERRY_ETIMEOUT);
    line_has("update_weights: no answer within 200 ms");
    assert_in_range((ferry__now_ns() - before) / 1000000, 190, 2000);
    assert_int_equal(c.ops->start_weight_update(c.self), FERRY_OK);
    ferry_client_close(&c);
    tiny_http_stop(s);
}

#define N_FILL 6

static void connecting_ends_at_its_timeout(void **state)
{
    ferry_http_options o = FERRY_HTTP_OPTIONS_INIT;
    int fds[N_FILL], port = tiny_http_unreachable(fds, N_FILL);
    int64_t before = ferry__now_ns();
    ferry_client c = {0};
    char url[64];

    (void)state;
    o.connect_timeout_ms = 150;
    snprintf(url, sizeof(url), "http://127.0.0.1:%d", port);
    assert_int_equal(ferry_client_http(url, &o, &c), FERRY_OK);
    assert_int_equal(c.ops->start_weight_update(c.self), FERRY_ETIMEOUT);
    line_has("no connection to 127.0.0.1:");
    line_has("within 150 ms");
    assert_in_range((ferry__now_ns() - before) / 1000000, 140, 2000);
    ferry_client_close(&c);
    for (int i = 0; i < N_FILL; i++)
        close(fds[i]);
}

typedef struct waiting {
    ferry_client *client;
    ferry_status status;
    char line[1024];
} waiting;

static void *update(void *arg)
{
    waiting *w = arg;

    w->status = w->client->ops->update_weights(w->client->self, "{}");
    snprintf(w->line, sizeof(w->line), "%s", ferry_last_error());
    return NULL;
}

static void *abort_round(void *arg)
{
    ferry_client *c = arg;

    return (void *)(intptr_t)c->ops->abort_weight_update(c->self);
}

/* Cancels until the call, which runs on another thread, is back. */
static void cancel_update(ferry_client *c)
{
    waiting w = {c, FERRY_OK, ""};
    int64_t before;
    pthread_t t;

    assert_int_equal(pthread_create(&t, NULL, update, &w), 0);
    ferry__sleep_ms(100);
    before = ferry__now_ns();
    c->ops->cancel(c->self);
    pthread_join(t, NULL);
    assert_true(ferry__now_ns() - before < 1000000000);
    assert_int_equal(w.status, FERRY_ECANCELED);
    assert_non_null(strstr(w.line, "update_weights: canceled"));
}

static void a_call_in_flight_can_be_canceled(void **state)
{
    script told = {{{"/update_weights", {.mode = TINY_HANG}}}};
    tiny_http *s = tiny_http_start("127.0.0.1", follow, &told);
    ferry_client c = open_client(tiny_http_url(s), 30000);

    (void)state;
    c.ops->cancel(c.self); /* nothing runs: no effect on what follows */
    assert_int_equal(c.ops->start_weight_update(c.self), FERRY_OK);
    cancel_update(&c);
    assert_int_equal(c.ops->start_weight_update(c.self), FERRY_OK);
    ferry_client_close(&c);
    tiny_http_stop(s);
}

static void connecting_can_be_canceled(void **state)
{
    int fds[N_FILL], port = tiny_http_unreachable(fds, N_FILL);
    ferry_client c;
    char url[64];

    (void)state;
    snprintf(url, sizeof(url), "http://127.0.0.1:%d", port);
    c = open_client(url, 30000);
    cancel_update(&c);
    ferry_client_close(&c);
    for (int i = 0; i < N_FILL; i++)
        close(fds[i]);
}

static void abort_and_status_need_not_wait_for_an_update(void **state)
{
    script told = {{{"/update_weights", {.mode = TINY_HANG}}}};
    tiny_http *s = tiny_http_start("127.0.0.1", follow, &told);
    ferry_client c = open_client(tiny_http_url(s), 30000);
    waiting w = {&c, FERRY_OK, ""};
    char buffer[16];
    pthread_t t;

    (void)state;
    assert_int_equal(pthread_create(&t, NULL, update, &w), 0);
    for (int i = 0; i < 200 && tiny_http_count(s) == 0; i++)
        ferry__sleep_ms(10);
    assert_int_equal(c.ops->status(c.self, buffer, sizeof(buffer)), FERRY_OK);
    assert_int_equal(c.ops->abort_weight_update(c.self), FERRY_OK);
    c.ops->cancel(c.self);
    pthread_join(t, NULL);
    assert_int_equal(w.status, FERRY_ECANCELED);
    ferry_client_close(&c);
    tiny_http_stop(s);
}

/* A trainer that gives up leaves its call behind; closing the client must
 * not pull the memory from under it. */
static void closing_ends_a_call_that_was_left_behind(void **state)
{
    script told = {{{"/ferry/abort", {.mode = TINY_HANG}}}};
    tiny_http *s = tiny_http_start("127.0.0.1", follow, &told);
    ferry_client c = open_client(tiny_http_url(s), 30000), copy = c;
    int64_t before;
    pthread_t t;
    void *result;

    (void)state;
    assert_int_equal(pthread_create(&t, NULL, abort_round, &copy), 0);
    for (int i = 0; i < 200 && tiny_http_count(s) == 0; i++)
        ferry__sleep_ms(10);
    before = ferry__now_ns();
    ferry_client_close(&c);
    pthread_join(t, &result);
    assert_int_equal((intptr_t)result, FERRY_ECANCELED);
    assert_true(ferry__now_ns() - before < 1000000000);
    tiny_http_stop(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_call_ends_at_its_timeout),
        cmocka_unit_test(connecting_ends_at_its_timeout),
        cmocka_unit_test(a_call_in_flight_can_be_canceled),
        cmocka_unit_test(connecting_can_be_canceled),
        cmocka_unit_test(abort_and_status_need_not_wait_for_an_update),
        cmocka_unit_test(closing_ends_a_call_that_was_left_behind),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
