/* SPDX-License-Identifier: Apache-2.0 */
/* Several clients as one (C3), made of clients that are four function
 * pointers and nothing else (C2), and over HTTP. */
#include "harness/tiny_http.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "base/thread.h"

#include <ferry/ferry.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <stdatomic.h>

/* A user's own client. With `meet`, a call returns when that many calls are
 * in it at once, so it proves that they run side by side. */
typedef struct own {
    atomic_int *inside;
    int meet;
    ferry_status result;
    const char *line;
    int delay_ms;
    atomic_bool canceled, until_canceled;
    atomic_int calls, closed;
    char last[128];
    const char *name; /* of its server, where its table has one */
    int32_t workers;
} own;

static ferry_status answer(own *o, const char *what)
{
    ferry__deadline d = ferry__deadline_in(5000);

    snprintf(o->last, sizeof(o->last), "%s", what);
    atomic_fetch_add(&o->calls, 1);
    if (o->meet) {
        atomic_fetch_add(o->inside, 1);
        while (atomic_load(o->inside) < o->meet) {
            if (ferry__deadline_passed(&d))
                return ferry_fail(FERRY_ETIMEOUT, "alone");
            ferry__sleep_ms(1);
        }
    }
    ferry__sleep_ms(o->delay_ms);
    while (atomic_load(&o->until_canceled)) {
        if (atomic_load(&o->canceled))
            return ferry_fail(FERRY_ECANCELED, "canceled");
        if (ferry__deadline_passed(&d))
            return ferry_fail(FERRY_ETIMEOUT, "never canceled");
        ferry__sleep_ms(1);
    }
    return o->result < 0 ? ferry_fail(o->result, "%s", o->line) : FERRY_OK;
}

static ferry_status own_init(void *self, const char *init_info)
{
    return answer(self, init_info);
}

static ferry_status own_start(void *self)
{
    return answer(self, "start");
}

static ferry_status own_update(void *self, const char *update_info)
{
    return answer(self, update_info);
}

static ferry_status own_finish(void *self, const char *weight_version)
{
    return answer(self, weight_version ? weight_version : "no version");
}

static void own_cancel(void *self)
{
    atomic_store(&((own *)self)->canceled, true);
}

static ferry_status own_abort(void *self)
{
    return answer(self, "abort");
}

static ferry_status own_draft(void *self)
{
    return answer(self, "draft");
}

static ferry_status own_pause(void *self, const char *mode, int clear_cache)
{
    char text[32];

    snprintf(text, sizeof(text), "pause %s %d", mode, clear_cache);
    return answer(self, text);
}

static ferry_status own_resume(void *self)
{
    return answer(self, "resume");
}

static ferry_status own_status(void *self, char *buffer, size_t size_bytes)
{
    snprintf(buffer, size_bytes, "{\"calls\":%d}",
             atomic_load(&((own *)self)->calls));
    return FERRY_OK;
}

static ferry_status own_prepare(void *self)
{
    return answer(self, "prepare");
}

static ferry_status own_commit(void *self, const char *weight_version)
{
    return answer(self, weight_version);
}

static void own_close(void *self)
{
    atomic_fetch_add(&((own *)self)->closed, 1);
}

/* C2: the table ends after the four calls, as one compiled against a header
 * without the others would. */
static const ferry_client_ops four = {
    .size = offsetof(ferry_client_ops, cancel),
    .kind = "four",
    .init_weight_transfer_engine = own_init,
    .start_weight_update = own_start,
    .update_weights = own_update,
    .finish_weight_update = own_finish,
    /* Beyond the size, so never looked at. */
    .cancel = (void (*)(void *))1,
    .close = (void (*)(void *))1,
};

static const ferry_client_ops all_calls = {
    .size = sizeof(ferry_client_ops),
    .kind = "own",
    .init_weight_transfer_engine = own_init,
    .start_weight_update = own_start,
    .update_weights = own_update,
    .finish_weight_update = own_finish,
    .cancel = own_cancel,
    .abort_weight_update = own_abort,
    .start_draft_weight_update = own_draft,
    .pause = own_pause,
    .resume = own_resume,
    .status = own_status,
    .prepare_weight_update = own_prepare,
    .commit_weight_update = own_commit,
    .close = own_close,
};

static const char *own_name(void *self, size_t index)
{
    return index == 0 ? ((own *)self)->name : NULL;
}

static ferry_status own_world_size(void *self, int32_t *out_workers)
{
    *out_workers = ((own *)self)->workers;
    return FERRY_OK;
}

static const ferry_client_ops ranked = {
    .size = sizeof(ferry_client_ops),
    .kind = "ranked",
    .init_weight_transfer_engine = own_init,
    .start_weight_update = own_start,
    .update_weights = own_update,
    .finish_weight_update = own_finish,
    .cancel = own_cancel,
    .peer = own_name,
    .world_size = own_world_size,
};

#define N 4

static ferry_client make(own *o, size_t n, const ferry_client_ops *ops)
{
    ferry_client clients[N], all = {0};

    for (size_t i = 0; i < n; i++)
        clients[i] = (ferry_client){ops, &o[i]};
    assert_int_equal(ferry_client_fanout(clients, n, &all), FERRY_OK);
    for (size_t i = 0; i < n; i++) {
        assert_null(clients[i].ops);
        assert_null(clients[i].self);
    }
    return all;
}

static void c2_four_function_pointers_are_a_client(void **state)
{
    own o[N] = {0};
    ferry_client c = make(o, N, &four);

    (void)state;
    assert_int_equal(c.ops->init_weight_transfer_engine(c.self, "{\"a\":1}"),
                     FERRY_OK);
    for (int i = 0; i < N; i++)
        assert_string_equal(o[i].last, "{\"a\":1}");
    assert_int_equal(c.ops->start_weight_update(c.self), FERRY_OK);
    assert_int_equal(c.ops->update_weights(c.self, "{}"), FERRY_OK);
    assert_int_equal(c.ops->finish_weight_update(c.self, NULL), FERRY_OK);
    for (int i = 0; i < N; i++) {
        assert_string_equal(o[i].last, "no version");
        assert_int_equal(o[i].calls, 4);
    }
    assert_null(c.ops->pause);
    assert_null(c.ops->resume);
    assert_null(c.ops->status);
    assert_null(c.ops->start_draft_weight_update);
    assert_null(c.ops->prepare_weight_update);
    assert_null(c.ops->commit_weight_update);
    c.ops->cancel(c.self);
    assert_int_equal(c.ops->abort_weight_update(c.self), FERRY_OK);
    assert_int_equal(o[0].calls, 4);
    ferry_client_close(&c);
}

static void c3_calls_run_side_by_side(void **state)
{
    atomic_int inside = 0;
    own o[N] = {0};
    ferry_client c;

    (void)state;
    for (int i = 0; i < N; i++) {
        o[i].inside = &inside;
        o[i].meet = N;
    }
    c = make(o, N, &all_calls);
    assert_int_equal(c.ops->update_weights(c.self, "{}"), FERRY_OK);
    assert_int_equal(atomic_load(&inside), N);
    ferry_client_close(&c);
    for (int i = 0; i < N; i++)
        assert_int_equal(o[i].closed, 1);
}

static void *update_slowly(void *arg)
{
    ferry_client *c = arg;

    c->ops->update_weights(c->self, "{}");
    return NULL;
}

/* J1: a client that does not end its call neither holds up a close for ever
 * nor finds the fan-out gone when it comes back. */
static void a_call_may_outlive_the_close(void **state)
{
    own o[N] = {{.delay_ms = 1500}};
    ferry__deadline d = ferry__deadline_in(5000);
    ferry_client c = make(o, N, &all_calls), copy = c;
    pthread_t thread;

    (void)state;
    assert_int_equal(
        ferry__thread_start(&thread, "update", update_slowly, &copy), FERRY_OK);
    while (atomic_load(&o[0].calls) == 0 && !ferry__deadline_passed(&d))
        ferry__sleep_ms(1);
    ferry_client_close(&c);
    pthread_join(thread, NULL);
    assert_int_equal(o[0].closed, 1);
}

typedef struct lines {
    int n;
    char text[8][256];
} lines;

static void see_log(ferry_log_level level, const char *line, void *arg)
{
    lines *l = arg;

    if (level == FERRY_LOG_ERROR && l->n < 8)
        snprintf(l->text[l->n++], sizeof(l->text[0]), "%s", line);
}

static void c3_the_first_failure_by_index_is_the_answer(void **state)
{
    lines l = {0};
    own o[N] = {0};
    ferry_client c;

    (void)state;
    o[1] = (own){.result = FERRY_EPEER, .line = "one", .delay_ms = 60};
    o[3] = (own){.result = FERRY_EAUTH, .line = "three"};
    o[0].delay_ms = 120;
    c = make(o, N, &all_calls);
    ferry_log_set(see_log, &l);
    assert_int_equal(c.ops->start_weight_update(c.self), FERRY_EPEER);
    assert_string_equal(ferry_last_error(), "replica 1: one");
    ferry_log_set(NULL, NULL);
    assert_int_equal(l.n, 1);
    assert_string_equal(l.text[0], "replica 3: EAUTH: three");
    for (int i = 0; i < N; i++)
        assert_int_equal(o[i].calls, 1); /* it reached all */
    ferry_client_close(&c);
}

/* Three servers of two ranks, one, and one, behind the trainer's rank 0. */
static ferry_client make_ranked(own *o)
{
    static const char *const names[] = {"http://a", "http://b", "http://c"};
    ferry_client c;

    for (int i = 0; i < 3; i++) {
        o[i].name = names[i];
        o[i].workers = i == 0 ? 2 : 1;
    }
    c = make(o, 3, &ranked);
    assert_int_equal(
        c.ops->init_weight_transfer_engine(c.self, "{\"rank_offset\":1}"),
        FERRY_OK);
    return c;
}

static void fails_with(own *o, ferry_status result, const char *line)
{
    o->result = result;
    o->line = line;
}

/* O-09: what a healthy server says of a dead one's rank names that one, and
 * comes after its own failure. */
static void o09_the_server_of_a_rank_is_named(void **state)
{
    lines l = {0};
    own o[N] = {0};
    ferry_client c = make_ranked(o);

    (void)state;
    fails_with(&o[0], FERRY_EPEER,
               "500: replica 0 rank 3: stream: rank 3 died: gone");
    fails_with(&o[1], FERRY_ECONN, "closed the connection");
    fails_with(&o[2], FERRY_EPEER,
               "tp_rank 1: rank 2 failed before: rank 3 died, rank 33");
    ferry_log_set(see_log, &l);
    assert_int_equal(c.ops->start_weight_update(c.self), FERRY_ECONN);
    ferry_log_set(NULL, NULL);
    assert_string_equal(ferry_last_error(),
                        "replica 1: closed the connection; replica 0: 500: "
                        "replica 0 rank 3: stream: rank 3 (http://b) died: "
                        "gone");
    assert_int_equal(l.n, 1);
    assert_string_equal(l.text[0], "replica 2: EPEER: tp_rank 1: rank 2 "
                                   "(http://a) failed before: rank 3 "
                                   "(http://b) died, rank 33");
    ferry_client_close(&c);
}

/* C3: it stays the first by index where none has a failure of its own to tell
 * of: both blame each other, or the blamed one has not failed. */
static void c3_blame_alone_changes_no_answer(void **state)
{
    own o[N] = {0};
    ferry_client c = make_ranked(o);

    (void)state;
    fails_with(&o[0], FERRY_EPEER, "rank 3 died");
    fails_with(&o[1], FERRY_ETIMEOUT, "rank 1 sent nothing more");
    assert_int_equal(c.ops->start_weight_update(c.self), FERRY_EPEER);
    assert_string_equal(ferry_last_error(),
                        "replica 0: rank 3 (http://b) died");
    o[1].result = FERRY_OK;
    assert_int_equal(c.ops->start_weight_update(c.self), FERRY_EPEER);
    assert_string_equal(ferry_last_error(),
                        "replica 0: rank 3 (http://b) died");
    ferry_client_close(&c);
}

/* Who waits for bytes that will not come any more is not waited for long. */
static void a_failed_update_ends_the_waiting_of_the_others(void **state)
{
    int64_t before = ferry__now_ns();
    lines l = {0};
    own o[2] = {0};
    ferry_client c;

    (void)state;
    atomic_init(&o[0].until_canceled, true);
    o[1].result = FERRY_EPEER;
    o[1].line = "bad dtype";
    c = make(o, 2, &all_calls);
    ferry_log_set(see_log, &l);
    assert_int_equal(c.ops->update_weights(c.self, "{}"), FERRY_EPEER);
    ferry_log_set(NULL, NULL);
    assert_string_equal(ferry_last_error(), "replica 1: bad dtype");
    assert_string_equal(l.text[0], "replica 0: ECANCELED: canceled");
    assert_in_range((ferry__now_ns() - before) / 1000000, 490, 3000);
    ferry_client_close(&c);
}

static void *update(void *arg)
{
    ferry_client *c = arg;

    return (void *)(intptr_t)c->ops->update_weights(c->self, "{}");
}

static void cancel_reaches_all(void **state)
{
    own o[2] = {0};
    ferry_client c;
    void *result;
    pthread_t t;

    (void)state;
    atomic_init(&o[0].until_canceled, true);
    atomic_init(&o[1].until_canceled, true);
    c = make(o, 2, &all_calls);
    assert_int_equal(ferry__thread_start(&t, "update", update, &c), FERRY_OK);
    while (atomic_load(&o[0].calls) + atomic_load(&o[1].calls) < 2)
        ferry__sleep_ms(1);
    c.ops->cancel(c.self);
    pthread_join(t, &result);
    assert_int_equal((intptr_t)result, FERRY_ECANCELED);
    ferry_client_close(&c);
}

static void optional_calls_reach_all(void **state)
{
    own o[2] = {0};
    ferry_client c = make(o, 2, &all_calls);
    char buffer[64];

    (void)state;
    assert_int_equal(c.ops->pause(c.self, "keep", 1), FERRY_OK);
    assert_string_equal(o[1].last, "pause keep 1");
    assert_int_equal(c.ops->resume(c.self), FERRY_OK);
    assert_string_equal(o[1].last, "resume");
    assert_int_equal(c.ops->start_draft_weight_update(c.self), FERRY_OK);
    assert_string_equal(o[1].last, "draft");
    assert_int_equal(c.ops->prepare_weight_update(c.self), FERRY_OK);
    assert_string_equal(o[1].last, "prepare");
    assert_int_equal(c.ops->commit_weight_update(c.self, "v7"), FERRY_OK);
    assert_string_equal(o[1].last, "v7");
    assert_int_equal(c.ops->abort_weight_update(c.self), FERRY_OK);
    assert_string_equal(o[1].last, "abort");
    assert_int_equal(c.ops->status(c.self, buffer, sizeof(buffer)), FERRY_OK);
    assert_string_equal(buffer, "{\"replicas\":[{\"calls\":6},{\"calls\":6}]}");
    assert_int_equal(c.ops->status(c.self, buffer, 5), FERRY_OK);
    assert_string_equal(buffer, "{\"re");
    ferry_client_close(&c);
}

static void what_is_no_set_of_clients_is_refused(void **state)
{
    ferry_client_ops three = all_calls;
    ferry_client clients[2] = {{&all_calls, NULL}, {&three, NULL}};
    ferry_client c = {0};

    (void)state;
    three.update_weights = NULL;
    assert_int_equal(ferry_client_fanout(clients, 0, &c), FERRY_EINVAL);
    assert_int_equal(ferry_client_fanout(NULL, 1, &c), FERRY_EINVAL);
    assert_int_equal(ferry_client_fanout(clients, 2, &c), FERRY_EINVAL);
    assert_string_equal(ferry_last_error(),
                        "fanout: client 1 lacks one of the four calls");
    clients[1].ops = NULL;
    assert_int_equal(ferry_client_fanout(clients, 2, &c), FERRY_EINVAL);
    assert_ptr_equal(clients[0].ops, &all_calls); /* still the caller's */
}

static void failing_allocations_and_threads_are_survived(void **state)
{
    own o[2] = {0};
    ferry_client clients[2] = {{&all_calls, &o[0]}, {&all_calls, &o[1]}};
    ferry_status status = FERRY_ENOMEM;
    ferry_client c = {0};

    (void)state;
    for (uint64_t n = 1; status < 0; n++) {
        assert_true(n < 100);
        ferry__fault_arm(FERRY__FAULT_ALLOC, n);
        status = ferry_client_fanout(clients, 2, &c);
        ferry__fault_arm(FERRY__FAULT_ALLOC, 0);
        assert_true(status == FERRY_OK || clients[0].ops == &all_calls);
    }
    status = FERRY_ENOMEM;
    for (uint64_t n = 1; status < 0; n++) {
        assert_true(n < 100);
        ferry__fault_arm(FERRY__FAULT_ALLOC, n);
        status = c.ops->start_weight_update(c.self);
        ferry__fault_arm(FERRY__FAULT_ALLOC, 0);
        assert_true(status == FERRY_OK || status == FERRY_ENOMEM);
    }
    ferry__fault_arm(FERRY__FAULT_THREAD, 2);
    assert_int_equal(c.ops->start_weight_update(c.self), FERRY_ENOMEM);
    assert_non_null(strstr(ferry_last_error(), "replica 1: thread"));
    ferry_client_close(&c);
}

static tiny_reply refuse(void *arg, const tiny_request *request)
{
    (void)arg;
    if (strcmp(request->target, "/update_weights") == 0)
        return (tiny_reply){.code = 500,
                            .body = "{\"error\":{\"message\":\"tensor 3: "
                                    "bad dtype\"}}"};
    return (tiny_reply){0};
}

/* C3, C4: says which replica failed, by index and URL, and what it said. */
static void c4_several_urls_fan_out(void **state)
{
    tiny_http *a = tiny_http_start("127.0.0.1", NULL, NULL);
    tiny_http *b = tiny_http_start("127.0.0.1", refuse, NULL);
    ferry_client clients[2] = {{0}}, c = {0};
    char expected[256];

    (void)state;
    assert_int_equal(ferry_client_http(tiny_http_url(a), NULL, &clients[0]),
                     FERRY_OK);
    assert_int_equal(ferry_client_http(tiny_http_url(b), NULL, &clients[1]),
                     FERRY_OK);
    assert_int_equal(ferry_client_fanout(clients, 2, &c), FERRY_OK);
    assert_int_equal(c.ops->start_weight_update(c.self), FERRY_OK);
    assert_int_equal(c.ops->update_weights(c.self, "{}"), FERRY_EPEER);
    snprintf(expected, sizeof(expected),
             "replica 1: %s: update_weights: server answered 500: tensor 3: "
             "bad dtype",
             tiny_http_url(b));
    assert_string_equal(ferry_last_error(), expected);
    assert_int_equal(tiny_http_count(a), 2);
    assert_int_equal(tiny_http_count(b), 2);
    ferry_client_close(&c);
    tiny_http_stop(a);
    tiny_http_stop(b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(c2_four_function_pointers_are_a_client),
        cmocka_unit_test(c3_calls_run_side_by_side),
        cmocka_unit_test(a_call_may_outlive_the_close),
        cmocka_unit_test(c3_the_first_failure_by_index_is_the_answer),
        cmocka_unit_test(o09_the_server_of_a_rank_is_named),
        cmocka_unit_test(c3_blame_alone_changes_no_answer),
        cmocka_unit_test(a_failed_update_ends_the_waiting_of_the_others),
        cmocka_unit_test(cancel_reaches_all),
        cmocka_unit_test(optional_calls_reach_all),
        cmocka_unit_test(what_is_no_set_of_clients_is_refused),
        cmocka_unit_test(failing_allocations_and_threads_are_survived),
        cmocka_unit_test(c4_several_urls_fan_out),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
