/* SPDX-License-Identifier: Apache-2.0 */
/* Several servers behind one trainer (J4): none commits before all have
 * prepared, and a failure says which servers have which weights. */
#include "base/alloc.h"
#include "base/clock.h"

#include <ferry/backend.h>
#include <ferry/ferry.h>
#include <ferry/registry.h>

#include <setjmp.h>
#include <stdarg.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#define N 3

/* A server: the letters of its calls in order. */
typedef struct peer {
    char calls[64];
    atomic_int n_calls;
    char fails_at; /* the call that fails; 0: none */
    bool stuck;    /* in that call until canceled, rather than failing */
    bool refuses;  /* that call, with an answer */
    bool no_ferry;
    char waits_at; /* the call that takes until goes_on; 0: none */
    atomic_bool in_call, goes_on;
    atomic_bool canceled;
    char url[32], version[32];
} peer;

static ferry_status take(peer *p, char letter)
{
    ferry__deadline d = ferry__deadline_in(10000);

    p->calls[atomic_fetch_add(&p->n_calls, 1)] = letter;
    if (p->waits_at == letter) {
        atomic_store(&p->in_call, true);
        while (!atomic_load(&p->goes_on) && !atomic_load(&p->canceled) &&
               !ferry__deadline_passed(&d))
            ferry__sleep_ms(1);
        if (atomic_load(&p->canceled))
            return ferry_fail(FERRY_ECANCELED, "%s: canceled", p->url);
    }
    if (p->fails_at != letter)
        return FERRY_OK;
    while (p->stuck && !atomic_load(&p->canceled) &&
           !ferry__deadline_passed(&d))
        ferry__sleep_ms(1);
    if (p->refuses)
        return ferry_fail(FERRY_EORDER, "%s: refuses at %c", p->url, letter);
    return p->stuck ? ferry_fail(FERRY_ECANCELED, "%s: canceled", p->url)
                    : ferry_fail(FERRY_ECONN, "%s: gone at %c", p->url, letter);
}

static ferry_status peer_init(void *self, const char *info)
{
    (void)info;
    return take(self, 'i');
}

static ferry_status peer_start(void *self)
{
    return take(self, 's');
}

static ferry_status peer_update(void *self, const char *info)
{
    (void)info;
    return take(self, 'u');
}

static ferry_status peer_finish(void *self, const char *version)
{
    (void)version;
    return take(self, 'f');
}

static void peer_cancel(void *self)
{
    atomic_store(&((peer *)self)->canceled, true);
}

static ferry_status peer_abort(void *self)
{
    return take(self, 'a');
}

static ferry_status peer_status(void *self, char *buffer, size_t size_bytes)
{
    peer *p = self;

    FERRY_TRY(take(p, '?'));
    if (p->no_ferry)
        return ferry_fail(FERRY_EROUTE, "%s: no /ferry/status", p->url);
    snprintf(buffer, size_bytes, "{}");
    return FERRY_OK;
}

static ferry_status peer_prepare(void *self)
{
    return take(self, 'p');
}

static ferry_status peer_commit(void *self, const char *version)
{
    peer *p = self;

    FERRY_TRY(take(p, 'c'));
    snprintf(p->version, sizeof(p->version), "%s", version ? version : "");
    return FERRY_OK;
}

static const char *peer_name(void *self, size_t index)
{
    return index == 0 ? ((peer *)self)->url : NULL;
}

static const ferry_client_ops peer_ops = {
    .size = sizeof(ferry_client_ops),
    .kind = "peer",
    .init_weight_transfer_engine = peer_init,
    .start_weight_update = peer_start,
    .update_weights = peer_update,
    .finish_weight_update = peer_finish,
    .cancel = peer_cancel,
    .abort_weight_update = peer_abort,
    .status = peer_status,
    .prepare_weight_update = peer_prepare,
    .commit_weight_update = peer_commit,
    .peer = peer_name,
};
/* C2: four calls and nothing else. */
static const ferry_client_ops plain_ops = {
    .size = offsetof(ferry_client_ops, cancel),
    .kind = "plain",
    .init_weight_transfer_engine = peer_init,
    .start_weight_update = peer_start,
    .update_weights = peer_update,
    .finish_weight_update = peer_finish,
};

/* ---- an engine of one update call ---- */

typedef struct hands {
    const ferry_trainer_host *host;
    ferry_trainer_context *ctx;
} hands;

static const ferry_field fields[] = {FERRY_TRAINER_INIT_FIELDS};
FERRY_TRAINER_INIT_TYPE(hands_type, "hands", ferry_trainer_init_info, fields,
                        sizeof(fields) / sizeof(fields[0]), NULL);

static ferry_status hands_create(const ferry_trainer_host *host,
                                 ferry_trainer_context *ctx, const void *info,
                                 bool is_sender, void **out_self)
{
    hands *h = host->alloc(sizeof(*h));

    (void)info, (void)is_sender;
    if (h == NULL)
        return FERRY_ENOMEM;
    h->host = host;
    h->ctx = ctx;
    *out_self = h;
    return FERRY_OK;
}

static ferry_status hands_init(void *self)
{
    hands *h = self;

    return h->host->init_peer(h->ctx, "{}");
}

static ferry_status hands_send(void *self, const void *payload, size_t count)
{
    hands *h = self;

    (void)payload, (void)count;
    FERRY_TRY(h->host->update_begin(h->ctx, "{}"));
    return h->host->update_wait(h->ctx);
}

static void hands_destroy(void *self)
{
    hands *h = self;

    h->host->free(h);
}

static const ferry_trainer_engine_ops hands_ops = {
    .size = sizeof(ferry_trainer_engine_ops),
    .abi = FERRY_ENGINE_ABI,
    .flags = FERRY_TRAINER_DELTA,
    .init_type = &hands_type,
    .create = hands_create,
    .init = hands_init,
    .send = hands_send,
    .destroy = hands_destroy,
};

/* ---- the scene ---- */

typedef struct scene {
    peer peers[N];
    ferry_client client;
    ferry_trainer *trainer;
} scene;

static void open_scene(scene *s, const ferry_client_ops *last, const char *info)
{
    ferry_client clients[N];

    for (int i = 0; i < N; i++) {
        snprintf(s->peers[i].url, sizeof(s->peers[i].url), "http://%c",
                 'x' + i);
        clients[i] =
            (ferry_client){i == N - 1 ? last : &peer_ops, &s->peers[i]};
    }
    assert_int_equal(ferry_client_fanout(clients, N, &s->client), FERRY_OK);
    assert_int_equal(
        ferry_trainer_init_dict("hands", info, &s->client, NULL, &s->trainer),
        FERRY_OK);
}

static ferry_status push(scene *s, const char *version)
{
    ferry_send_options o = FERRY_SEND_OPTIONS_INIT;

    o.weight_version = version;
    o.payload = "x";
    o.payload_count = 1;
    return ferry_trainer_send_weights(s->trainer, &o);
}

static void close_scene(scene *s)
{
    ferry_trainer_shutdown(&s->trainer);
    ferry_client_close(&s->client);
}

static char logged[2048];
static int n_logged;

static void note(ferry_log_level level, const char *line, void *arg)
{
    (void)arg;
    if (level != FERRY_LOG_WARN || strstr(line, "fleet") == NULL)
        return;
    snprintf(logged, sizeof(logged), "%s", line);
    n_logged++;
}

static void j4_all_prepare_before_any_commits(void **state)
{
    scene s = {0};

    (void)state;
    open_scene(&s, &peer_ops, "{\"rank\":0}");
    assert_int_equal(push(&s, "v1"), FERRY_OK);
    assert_int_equal(push(&s, "v2"), FERRY_OK);
    for (int i = 0; i < N; i++) {
        /* Who they are is asked once. */
        assert_string_equal(s.peers[i].calls, "is?upcsupc");
        assert_string_equal(s.peers[i].version, "v2");
    }
    close_scene(&s);
}

static void j4_one_that_cannot_prepare_keeps_all_from_committing(void **state)
{
    scene s = {0};

    (void)state;
    s.peers[1].fails_at = 'p';
    open_scene(&s, &peer_ops, "{\"rank\":0}");
    assert_int_equal(push(&s, "v1"), FERRY_ECONN);
    assert_non_null(strstr(ferry_last_error(), "http://y: gone at p"));
    for (int i = 0; i < N; i++) {
        assert_string_equal(s.peers[i].calls, "is?upa");
        assert_string_equal(s.peers[i].version, "");
    }
    close_scene(&s);
}

static void j4_a_commit_in_part_says_who_did_and_who_did_not(void **state)
{
    scene s = {0};

    (void)state;
    s.peers[1].fails_at = 'c';
    s.peers[1].refuses = true;
    open_scene(&s, &peer_ops, "{\"rank\":0}");
    assert_int_equal(push(&s, "v1"), FERRY_EORDER);
    assert_string_equal(ferry_last_error(),
                        "committed: http://x, http://z; not: http://y: "
                        "replica 1: http://y: refuses at c");
    assert_string_equal(s.peers[0].version, "v1");
    assert_string_equal(s.peers[1].version, "");
    close_scene(&s);
}

/* One whose answer never came may have committed. */
static void j4_a_commit_says_of_whom_it_is_not_known(void **state)
{
    scene s = {0};

    (void)state;
    s.peers[1].fails_at = 'c';
    s.peers[1].refuses = true;
    s.peers[2].fails_at = 'c';
    open_scene(&s, &peer_ops, "{\"rank\":0}");
    assert_int_equal(push(&s, "v1"), FERRY_EORDER);
    assert_string_equal(ferry_last_error(),
                        "committed: http://x; not: http://y; not known: "
                        "http://z: replica 1: http://y: refuses at c");
    close_scene(&s);
}

/* J1: also when it is a bound that ends the commit. */
static void j1_a_commit_that_hangs_says_who_did(void **state)
{
    scene s = {0};
    int64_t from_ns = ferry__now_ns();

    (void)state;
    s.peers[2].fails_at = 'c';
    s.peers[2].stuck = true;
    open_scene(&s, &peer_ops, "{\"rank\":0,\"no_progress_ms\":300}");
    assert_int_equal(push(&s, "v1"), FERRY_ENOPROGRESS);
    assert_true(ferry__now_ns() - from_ns < INT64_C(3000000000));
    assert_non_null(strstr(ferry_last_error(), "commit_weight_update"));
    assert_non_null(
        strstr(ferry_last_error(),
               "committed: http://x, http://y; not known: http://z"));
    close_scene(&s);
}

typedef struct canceler {
    ferry_trainer *trainer;
    peer *waits; /* the cancel comes when it is in its call */
} canceler;

static void *cancel_in_call(void *arg)
{
    canceler *c = arg;
    ferry__deadline d = ferry__deadline_in(10000);

    while (!atomic_load(&c->waits->in_call) && !ferry__deadline_passed(&d))
        ferry__sleep_ms(1);
    ferry_trainer_cancel(c->trainer);
    ferry__sleep_ms(300); /* longer than a wait's slice */
    atomic_store(&c->waits->goes_on, true);
    return NULL;
}

static ferry_status push_canceled_in(scene *s, char call)
{
    canceler c = {s->trainer, &s->peers[1]};
    pthread_t thread;
    ferry_status st;

    s->peers[1].waits_at = call;
    assert_int_equal(pthread_create(&thread, NULL, cancel_in_call, &c), 0);
    st = push(s, "v1");
    pthread_join(thread, NULL);
    return st;
}

/* J4: or nobody would know who has committed. */
static void j4_a_cancel_does_not_cut_a_commit_in_two(void **state)
{
    scene s = {0};

    (void)state;
    open_scene(&s, &peer_ops, "{\"rank\":0}");
    assert_int_equal(push_canceled_in(&s, 'c'), FERRY_OK);
    for (int i = 0; i < N; i++)
        assert_string_equal(s.peers[i].version, "v1");
    close_scene(&s);
}

static void j4_a_cancel_before_the_commit_keeps_all_from_it(void **state)
{
    scene s = {0};

    (void)state;
    open_scene(&s, &peer_ops, "{\"rank\":0}");
    assert_int_equal(push_canceled_in(&s, 'p'), FERRY_ECANCELED);
    for (int i = 0; i < N; i++)
        assert_string_equal(s.peers[i].version, "");
    close_scene(&s);
}

/* C7: a peer that is no Ferry finishes as always, and this is said once. */
static void c7_a_peer_that_is_not_ferry_is_said_plainly(void **state)
{
    scene s = {0};

    (void)state;
    s.peers[2].no_ferry = true;
    n_logged = 0;
    open_scene(&s, &peer_ops, "{\"rank\":0}");
    assert_int_equal(push(&s, "v1"), FERRY_OK);
    assert_int_equal(push(&s, "v2"), FERRY_OK);
    for (int i = 0; i < N; i++)
        assert_string_equal(s.peers[i].calls, "is?ufsuf");
    assert_int_equal(n_logged, 1);
    assert_non_null(strstr(logged, "cannot commit as a fleet"));
    assert_non_null(strstr(logged, "is not Ferry"));
    assert_non_null(strstr(logged, "http://z"));
    close_scene(&s);
}

static void c2_a_client_of_four_calls_keeps_finish(void **state)
{
    scene s = {0};

    (void)state;
    n_logged = 0;
    open_scene(&s, &plain_ops, "{\"rank\":0}");
    assert_int_equal(push(&s, "v1"), FERRY_OK);
    for (int i = 0; i < N; i++)
        assert_string_equal(s.peers[i].calls, "isuf");
    assert_int_equal(n_logged, 1);
    close_scene(&s);
}

/* One server prepares and commits inside its finish. */
static void one_server_finishes(void **state)
{
    peer p = {.url = "http://x"};
    scene s = {0};

    (void)state;
    s.client = (ferry_client){&peer_ops, &p};
    assert_int_equal(ferry_trainer_init_dict("hands", "{\"rank\":0}", &s.client,
                                             NULL, &s.trainer),
                     FERRY_OK);
    assert_int_equal(push(&s, "v1"), FERRY_OK);
    assert_string_equal(p.calls, "isuf");
    close_scene(&s);
}

/* A server that cannot be asked who it is fails the round, by name. */
static void c7_a_peer_that_does_not_answer_is_no_guess(void **state)
{
    scene s = {0};

    (void)state;
    s.peers[0].fails_at = '?';
    open_scene(&s, &peer_ops, "{\"rank\":0}");
    assert_int_equal(push(&s, "v1"), FERRY_ECONN);
    assert_non_null(strstr(ferry_last_error(), "http://x"));
    assert_string_equal(s.peers[1].calls, "is?a");
    s.peers[0].fails_at = 0;
    assert_int_equal(push(&s, "v1"), FERRY_OK);
    assert_string_equal(s.peers[1].version, "v1");
    close_scene(&s);
}

static int register_engine(void **state)
{
    (void)state;
    ferry_log_set(note, NULL);
    return ferry_trainer_register("hands", &hands_ops);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(j4_all_prepare_before_any_commits),
        cmocka_unit_test(j4_one_that_cannot_prepare_keeps_all_from_committing),
        cmocka_unit_test(j4_a_commit_in_part_says_who_did_and_who_did_not),
        cmocka_unit_test(j4_a_commit_says_of_whom_it_is_not_known),
        cmocka_unit_test(j1_a_commit_that_hangs_says_who_did),
        cmocka_unit_test(j4_a_cancel_does_not_cut_a_commit_in_two),
        cmocka_unit_test(j4_a_cancel_before_the_commit_keeps_all_from_it),
        cmocka_unit_test(c7_a_peer_that_is_not_ferry_is_said_plainly),
        cmocka_unit_test(c2_a_client_of_four_calls_keeps_finish),
        cmocka_unit_test(one_server_finishes),
        cmocka_unit_test(c7_a_peer_that_does_not_answer_is_no_guess),
    };

    return cmocka_run_group_tests(tests, register_engine, NULL);
}
