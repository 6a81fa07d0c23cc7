/* SPDX-License-Identifier: Apache-2.0 */
/* The trainer around its engine: the round trip, whose error surfaces, what
 * is left behind (D1-D6, J1; O-09, O-11, O-12, O-31). Client and engine are
 * bent by the tests; the host is the real one. */
#include "harness/toy.h"
#include <ferry/backend.h>
#include <ferry/ferry.h>

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "harness/expect.h"

/* ---- a client that records ---- */

typedef struct desk {
    char calls[256]; /* one letter each: i s d u f a, c for cancel */
    char version[32];
    _Atomic bool canceled;
    _Atomic int update_hangs_ms; /* until canceled, at most this long */
    _Atomic int start_status, update_status, init_status;
    int init_delay_ms;
} desk;

static pthread_mutex_t desk_lock = PTHREAD_MUTEX_INITIALIZER;

static void put(desk *d, char c)
{
    size_t n;

    pthread_mutex_lock(&desk_lock);
    n = strlen(d->calls);
    if (n + 1 < sizeof(d->calls))
        d->calls[n] = c;
    pthread_mutex_unlock(&desk_lock);
}

static ferry_status desk_init(void *self, const char *info)
{
    desk *d = self;

    put(d, 'i');
    assert_non_null(info);
    ferry__sleep_ms(d->init_delay_ms);
    if (d->init_status < 0)
        return ferry_fail((ferry_status)d->init_status,
                          "replica 0: no init today");
    return FERRY_OK;
}

static ferry_status desk_start(void *self)
{
    desk *d = self;

    put(d, 's');
    if (d->start_status < 0)
        return ferry_fail((ferry_status)d->start_status,
                          "replica 0: 500 before any byte");
    return FERRY_OK;
}

static ferry_status desk_draft(void *self)
{
    put(self, 'd');
    return FERRY_OK;
}

static ferry_status desk_update(void *self, const char *info)
{
    desk *d = self;

    put(d, 'u');
    assert_string_equal(info, "{\"x\":1}");
    for (int ms = 0; ms < d->update_hangs_ms; ms += 5) {
        if (atomic_load(&d->canceled))
            return ferry_fail(FERRY_ECANCELED, "canceled");
        ferry__sleep_ms(5);
    }
    if (d->update_status < 0)
        return ferry_fail((ferry_status)d->update_status,
                          "replica 0: tensor 3 is bad");
    return FERRY_OK;
}

static ferry_status desk_finish(void *self, const char *version)
{
    desk *d = self;

    put(d, 'f');
    snprintf(d->version, sizeof(d->version), "%s",
             version != NULL ? version : "(none)");
    return FERRY_OK;
}

static void desk_cancel(void *self)
{
    desk *d = self;

    put(d, 'c');
    atomic_store(&d->canceled, true);
}

static ferry_status desk_abort(void *self)
{
    put(self, 'a');
    return FERRY_OK;
}

static const ferry_client_ops desk_ops = {
    .size = sizeof(ferry_client_ops),
    .kind = "desk",
    .init_weight_transfer_engine = desk_init,
    .start_weight_update = desk_start,
    .update_weights = desk_update,
    .finish_weight_update = desk_finish,
    .cancel = desk_cancel,
    .abort_weight_update = desk_abort,
    .start_draft_weight_update = desk_draft,
};

/* ---- an engine with hooks ---- */

typedef ferry_status (*hook)(const ferry_trainer_host *host,
                             ferry_trainer_context *ctx);
static hook on_init, on_send;
static int ends, destroyed;
static ferry_status ended_with;
static size_t payload_seen;

typedef struct hands {
    const ferry_trainer_host *host;
    ferry_trainer_context *ctx;
    bool is_sender;
} hands;

typedef struct hands_init {
    ferry_trainer_init_info base;
    const char *word;
    int32_t number;
} hands_init;

static const hands_init *info_seen;

static const ferry_field hands_fields[] = {
    FERRY_TRAINER_INIT_FIELDS,
    {"word", FERRY_FIELD_STR, 0, offsetof(hands_init, word), "\"none\"", 0, 0},
    {"number", FERRY_FIELD_I32, 0, offsetof(hands_init, number), "7", 0, 100},
};
FERRY_TRAINER_INIT_TYPE(hands_type, "hands", hands_init, hands_fields, 5, NULL);
FERRY_TRAINER_INIT_TYPE(delta_type, "delta", hands_init, hands_fields, 5, NULL);

static ferry_status create(const ferry_trainer_host *host,
                           ferry_trainer_context *ctx, const void *info,
                           bool is_sender, void **out_self)
{
    hands *h = host->alloc(sizeof(*h));

    if (h == NULL)
        return FERRY_ENOMEM;
    info_seen = info;
    h->host = host;
    h->ctx = ctx;
    h->is_sender = is_sender;
    *out_self = h;
    return FERRY_OK;
}

static ferry_status init(void *self)
{
    hands *h = self;

    if (on_init != NULL)
        return on_init(h->host, h->ctx);
    return h->is_sender ? h->host->init_peer(h->ctx, "{}") : FERRY_OK;
}

static ferry_status send_round(void *self, const void *payload, size_t count)
{
    hands *h = self;

    (void)payload;
    payload_seen = count;
    return on_send(h->host, h->ctx);
}

static void round_end(void *self, ferry_status result)
{
    hands *h = self;

    ends++;
    ended_with = result;
    (h->host->fail)(FERRY_EINTERNAL, "said at the end");
}

static void destroy(void *self)
{
    hands *h = self;

    destroyed++;
    h->host->free(h);
}

static const ferry_trainer_engine_ops hands_ops = {
    .size = sizeof(ferry_trainer_engine_ops),
    .abi = FERRY_ENGINE_ABI,
    .flags = FERRY_TRAINER_FULL_RESYNC,
    .init_type = &hands_type,
    .create = create,
    .init = init,
    .send = send_round,
    .round_end = round_end,
    .destroy = destroy,
};
static const ferry_trainer_engine_ops delta_ops = {
    .size = sizeof(ferry_trainer_engine_ops),
    .abi = FERRY_ENGINE_ABI,
    .flags = FERRY_TRAINER_DELTA,
    .init_type = &delta_type,
    .create = create,
    .send = send_round,
    .destroy = destroy,
};

/* Drives the pass; on the sender one update call, waited for. */
static ferry_status drive(const ferry_trainer_host *host,
                          ferry_trainer_context *ctx)
{
    const ferry_param_meta *declared;
    size_t count;
    ferry_item item;
    ferry_status st;

    FERRY_TRY(host->pass_begin(ctx, &declared, &count));
    while ((st = host->pass_next(ctx, &item)) == FERRY_OK)
        host->progress(ctx, ferry_tensor_bytes(&item.tensor));
    FERRY_TRY(st);
    host->pass_end(ctx);
    return FERRY_OK;
}

static ferry_status drive_and_update(const ferry_trainer_host *host,
                                     ferry_trainer_context *ctx)
{
    FERRY_TRY(host->update_begin(ctx, "{\"x\":1}"));
    FERRY_TRY(drive(host, ctx));
    return host->update_wait(ctx);
}

/* ---- a trainer over a toy ---- */

typedef struct scene {
    desk desk;
    ferry_client client;
    toy_checkpoint *checkpoint;
    ferry_source source;
    ferry_trainer *trainer;
} scene;

static void open_scene(scene *s, const char *info)
{
    toy_options t = {.kind = TOY_A};

    memset(s, 0, sizeof(*s));
    on_init = NULL;
    on_send = drive_and_update;
    ends = destroyed = 0;
    s->client.ops = &desk_ops;
    s->client.self = &s->desk;
    s->checkpoint = toy_checkpoint_create(&t);
    s->source = toy_checkpoint_source(s->checkpoint, 0, s->checkpoint->count);
    if (info != NULL)
        ok(ferry_trainer_init_dict("hands", info, &s->client, &s->source,
                                   &s->trainer));
}

static void close_scene(scene *s)
{
    ferry_trainer_shutdown(&s->trainer);
    assert_null(s->trainer);
    ferry_trainer_shutdown(&s->trainer);
    ferry_source_close(&s->source);
    toy_checkpoint_free(s->checkpoint);
}

/* ---- the good round ---- */

static uint64_t progress_last, progress_total;

static void note_progress(void *arg, uint64_t done, uint64_t total)
{
    (void)arg;
    assert_true(done >= progress_last && done <= total);
    progress_last = done;
    progress_total = total;
}

static void d1_a_round_is_start_update_finish(void **state)
{
    ferry_send_options so = FERRY_SEND_OPTIONS_INIT;
    ferry_round_stats stats = {.size = sizeof(stats)};
    scene s;

    (void)state;
    open_scene(&s, "{\"rank\":0}");
    assert_string_equal(s.desk.calls, "i");
    so.weight_version = "step-1";
    so.stats = &stats;
    so.progress = note_progress;
    progress_last = 0;
    ok(ferry_trainer_send_weights(s.trainer, &so));
    assert_string_equal(s.desk.calls, "isuf");
    assert_string_equal(s.desk.version, "step-1");
    assert_int_equal(stats.round, 1);
    assert_int_equal(stats.n_params, s.checkpoint->count);
    assert_int_equal(stats.n_updates, 1);
    assert_true(stats.bytes_declared > 0);
    assert_true(stats.bytes_sent == stats.bytes_declared);
    assert_true(progress_last == progress_total);
    assert_true(stats.total_ms >= stats.start_ms + stats.finish_ms);
    assert_int_equal(ends, 1);
    assert_int_equal(ended_with, FERRY_OK);
    ok(ferry_trainer_send_weights(s.trainer, NULL));
    assert_string_equal(s.desk.version, "(none)");
    close_scene(&s);
    assert_int_equal(destroyed, 1);
}

/* D3, B4: a rank that is not the sender drives the pass, calls nobody. */
static void d3_other_ranks_only_drive_the_pass(void **state)
{
    scene s;

    (void)state;
    open_scene(&s, "{\"rank\":2}");
    on_send = drive;
    ok(ferry_trainer_send_weights(s.trainer, NULL));
    assert_string_equal(s.desk.calls, "");
    on_send = drive_and_update;
    refused(ferry_trainer_send_weights(s.trainer, NULL), FERRY_EINVAL,
            "rank 2 is not the sender");
    assert_string_equal(s.desk.calls, "");
    close_scene(&s);
}

static ferry_status drive_nothing(const ferry_trainer_host *host,
                                  ferry_trainer_context *ctx)
{
    (void)host;
    (void)ctx;
    return FERRY_OK;
}

static void b4_a_pass_that_was_not_driven_is_no_success(void **state)
{
    scene s;

    (void)state;
    open_scene(&s, "{\"rank\":0}");
    on_send = drive_nothing;
    refused(ferry_trainer_send_weights(s.trainer, NULL), FERRY_ECOVERAGE,
            "engine hands ended its round after 0 of");
    assert_null(strchr(s.desk.calls, 'f'));
    close_scene(&s);
}

/* ---- failures ---- */

static void o09_the_server_s_own_text_surfaces(void **state)
{
    int64_t from;
    scene s;

    (void)state;
    open_scene(&s, "{\"rank\":0}");
    s.desk.start_status = FERRY_EPEER;
    refused(ferry_trainer_send_weights(s.trainer, NULL), FERRY_EPEER,
            "replica 0: 500 before any byte");
    s.desk.start_status = FERRY_OK;
    s.desk.update_status = FERRY_EPEER;
    from = ferry__now_ns();
    refused(ferry_trainer_send_weights(s.trainer, NULL), FERRY_EPEER,
            "replica 0: tensor 3 is bad");
    assert_true(ferry__now_ns() - from < 2000000000);
    assert_int_equal(ended_with, FERRY_EPEER);
    s.desk.update_status = FERRY_OK;
    ok(ferry_trainer_send_weights(s.trainer, NULL));
    close_scene(&s);
}

static ferry_status lose_the_wire(const ferry_trainer_host *host,
                                  ferry_trainer_context *ctx)
{
    FERRY_TRY(host->update_begin(ctx, "{\"x\":1}"));
    return (host->fail)(FERRY_ECONN, "closed by peer");
}

static void o09_the_wire_breaks_before_the_server_s_text_comes(void **state)
{
    scene s;

    (void)state;
    open_scene(&s, "{\"rank\":0}");
    on_send = lose_the_wire;
    s.desk.update_hangs_ms = 60;
    s.desk.update_status = FERRY_EPEER;
    refused(ferry_trainer_send_weights(s.trainer, NULL), FERRY_EPEER,
            "replica 0: tensor 3 is bad");
    close_scene(&s);
}

static ferry_status own_fault(const ferry_trainer_host *host,
                              ferry_trainer_context *ctx)
{
    FERRY_TRY(host->update_begin(ctx, "{\"x\":1}"));
    return (host->fail)(FERRY_EMISMATCH, "the source lied");
}

static ferry_status own_fault_late(const ferry_trainer_host *host,
                                   ferry_trainer_context *ctx)
{
    FERRY_TRY(host->update_begin(ctx, "{\"x\":1}"));
    ferry__sleep_ms(60);
    return (host->fail)(FERRY_EMISMATCH, "the source lied");
}

/* A cause found on this side stands, whatever the peers say of it. */
static void d5_the_sender_s_own_cause_is_not_masked(void **state)
{
    scene s;

    (void)state;
    open_scene(&s, "{\"rank\":0}");
    on_send = own_fault_late;
    s.desk.update_status = FERRY_EPEER;
    refused(ferry_trainer_send_weights(s.trainer, NULL), FERRY_EMISMATCH,
            "the source lied");
    close_scene(&s);
}

/* D5: no join on a call whose peer is blocked; the call is canceled, the
 * peers are told, the next round works. */
static void d5_an_error_surfaces_at_once_while_the_call_hangs(void **state)
{
    int64_t from;
    scene s;

    (void)state;
    open_scene(&s, "{\"rank\":0}");
    on_send = own_fault;
    s.desk.update_hangs_ms = 20000;
    from = ferry__now_ns();
    refused(ferry_trainer_send_weights(s.trainer, NULL), FERRY_EMISMATCH,
            "the source lied");
    assert_true(ferry__now_ns() - from < 500000000);
    assert_non_null(strchr(s.desk.calls, 'c'));
    assert_string_equal(s.desk.calls + strlen(s.desk.calls) - 1, "a");
    assert_int_equal(ended_with, FERRY_EMISMATCH);
    atomic_store(&s.desk.canceled, false);
    s.desk.update_hangs_ms = 0;
    on_send = drive_and_update;
    ok(ferry_trainer_send_weights(s.trainer, NULL));
    close_scene(&s);
}

static void d5_a_call_that_cannot_be_canceled_is_left_behind(void **state)
{
    ferry_client_ops ops = desk_ops;
    int64_t from;
    scene s;

    (void)state;
    open_scene(&s, NULL);
    ops.cancel = NULL;
    ops.size = offsetof(ferry_client_ops, cancel); /* the four, no more */
    s.client.ops = &ops;
    ok(ferry_trainer_init_dict("hands", "{\"rank\":0}", &s.client, &s.source,
                               &s.trainer));
    on_send = own_fault;
    s.desk.update_hangs_ms = 900;
    from = ferry__now_ns();
    refused(ferry_trainer_send_weights(s.trainer, NULL), FERRY_EMISMATCH,
            "the source lied");
    assert_true(ferry__now_ns() - from < 800000000);
    /* The next round waits for it, as the client takes one call at a time. */
    on_send = drive_and_update;
    ok(ferry_trainer_send_weights(s.trainer, NULL));
    close_scene(&s);
}

static ferry_status wait_for_ever(const ferry_trainer_host *host,
                                  ferry_trainer_context *ctx)
{
    for (;;) {
        FERRY_TRY(host->check(ctx, "waiting for worker 3"));
        ferry__sleep_ms(5);
    }
}

static ferry_status begin_and_wait(const ferry_trainer_host *host,
                                   ferry_trainer_context *ctx)
{
    FERRY_TRY(host->update_begin(ctx, "{\"x\":1}"));
    return wait_for_ever(host, ctx);
}

static void j1_bounds_hold_and_are_named(void **state)
{
    int64_t from = ferry__now_ns();
    scene s;

    (void)state;
    open_scene(&s, "{\"rank\":0,\"no_progress_ms\":100}");
    on_send = wait_for_ever;
    refused(ferry_trainer_send_weights(s.trainer, NULL), FERRY_ENOPROGRESS,
            "no progress for 100 ms while waiting for worker 3");
    close_scene(&s);
    open_scene(&s, "{\"rank\":0,\"deadline_ms\":100}");
    s.desk.update_hangs_ms = 20000;
    refused(ferry_trainer_send_weights(s.trainer, NULL), FERRY_ETIMEOUT,
            "deadline of 100 ms passed while waiting for update_weights");
    close_scene(&s);
    open_scene(&s, "{\"rank\":0}");
    /* The control plane's failure ends a wait of the data plane. */
    on_send = begin_and_wait;
    s.desk.update_hangs_ms = 30;
    s.desk.update_status = FERRY_EPEER;
    refused(ferry_trainer_send_weights(s.trainer, NULL), FERRY_EPEER,
            "tensor 3 is bad");
    close_scene(&s);
    assert_true(ferry__now_ns() - from < 4000000000);
}

static void *cancel_later(void *arg)
{
    ferry__sleep_ms(50);
    ferry_trainer_cancel(arg);
    return NULL;
}

static void cancel_ends_a_round_and_the_next_works(void **state)
{
    pthread_t thread;
    scene s;

    (void)state;
    open_scene(&s, "{\"rank\":0}");
    on_send = wait_for_ever;
    pthread_create(&thread, NULL, cancel_later, s.trainer);
    refused(ferry_trainer_send_weights(s.trainer, NULL), FERRY_ECANCELED,
            "canceled while waiting for worker 3");
    pthread_join(thread, NULL);
    ferry_trainer_cancel(s.trainer); /* nothing runs: no effect later */
    on_send = drive_and_update;
    ok(ferry_trainer_send_weights(s.trainer, NULL));
    close_scene(&s);
}

static _Atomic bool sending, refused_once;

static ferry_status send_until_refused(const ferry_trainer_host *host,
                                       ferry_trainer_context *ctx)
{
    atomic_store(&sending, true);
    for (int ms = 0; ms < 5000 && !atomic_load(&refused_once); ms++)
        ferry__sleep_ms(1);
    return drive_and_update(host, ctx);
}

static void *send_beside(void *arg)
{
    ferry_status *st = ((void **)arg)[1];

    *st = ferry_trainer_send_weights(((void **)arg)[0], NULL);
    return NULL;
}

static void a_second_send_at_once_is_busy(void **state)
{
    ferry_status first = FERRY_EINTERNAL;
    void *args[2];
    pthread_t thread;
    scene s;

    (void)state;
    open_scene(&s, "{\"rank\":0}");
    on_send = send_until_refused;
    atomic_store(&sending, false);
    atomic_store(&refused_once, false);
    args[0] = s.trainer;
    args[1] = &first;
    assert_int_equal(pthread_create(&thread, NULL, send_beside, args), 0);
    for (int ms = 0; ms < 5000 && !atomic_load(&sending); ms++)
        ferry__sleep_ms(1);
    refused(ferry_trainer_send_weights(s.trainer, NULL), FERRY_EBUSY,
            "another send_weights is running");
    atomic_store(&refused_once, true);
    pthread_join(thread, NULL);
    assert_int_equal(first, FERRY_OK);
    on_send = drive_and_update;
    ok(ferry_trainer_send_weights(s.trainer, NULL));
    close_scene(&s);
}

/* Refused options do not leave the trainer busy. */
static void send_options_have_nothing_reserved(void **state)
{
    ferry_send_options so = FERRY_SEND_OPTIONS_INIT;
    scene s;

    (void)state;
    open_scene(&s, "{\"rank\":0}");
    so.reserved = 3;
    refused(ferry_trainer_send_weights(s.trainer, &so), FERRY_EINVAL,
            "send options: reserved is 3, must be 0");
    so.reserved = 0;
    ok(ferry_trainer_send_weights(s.trainer, &so));
    close_scene(&s);
}

/* A start that was refused is nobody's round: it is not aborted. */
static void a_refused_start_is_not_aborted(void **state)
{
    scene s;

    (void)state;
    open_scene(&s, "{\"rank\":0}");
    s.desk.start_status = FERRY_EORDER;
    assert_int_equal(ferry_trainer_send_weights(s.trainer, NULL), FERRY_EORDER);
    assert_string_equal(s.desk.calls, "is");
    s.desk.start_status = FERRY_ECONN; /* it may have arrived */
    assert_int_equal(ferry_trainer_send_weights(s.trainer, NULL), FERRY_ECONN);
    assert_non_null(strchr(s.desk.calls, 'a'));
    close_scene(&s);
}

static ferry_status two_updates(const ferry_trainer_host *host,
                                ferry_trainer_context *ctx)
{
    FERRY_TRY(host->update_begin(ctx, "{\"x\":1}"));
    refused(host->update_begin(ctx, "{\"x\":1}"), FERRY_EBUSY,
            "update_weights is still in flight");
    while (host->update_poll(ctx) == FERRY_EBUSY)
        ferry__sleep_ms(1);
    FERRY_TRY(drive(host, ctx));
    return host->update_begin(ctx, "{\"x\":1}"); /* the host waits for it */
}

static void d4_at_most_one_call_and_none_is_left_in_flight(void **state)
{
    ferry_round_stats stats = {.size = sizeof(stats)};
    ferry_send_options so = FERRY_SEND_OPTIONS_INIT;
    scene s;

    (void)state;
    open_scene(&s, "{\"rank\":0}");
    on_send = two_updates;
    s.desk.update_hangs_ms = 20;
    so.stats = &stats;
    ok(ferry_trainer_send_weights(s.trainer, &so));
    assert_string_equal(s.desk.calls, "isuuf");
    assert_int_equal(stats.n_updates, 2);
    close_scene(&s);
}

/* ---- init ---- */

static ferry_status init_beside(const ferry_trainer_host *host,
                                ferry_trainer_context *ctx)
{
    FERRY_TRY(host->init_peer_begin(ctx, "{}"));
    assert_true(host->remaining_ms(ctx) > 1000);
    return host->update_wait(ctx);
}

static void o11_init_runs_beside_a_client_that_is_slow(void **state)
{
    scene s;

    (void)state;
    open_scene(&s, NULL);
    s.desk.init_delay_ms = 100;
    on_init = init_beside;
    ok(ferry_trainer_init_dict("hands", "{\"rank\":0}", &s.client, &s.source,
                               &s.trainer));
    ferry_trainer_shutdown(&s.trainer);
    s.desk.init_status = FERRY_EPEER;
    refused(ferry_trainer_init_dict("hands", "{\"rank\":0}", &s.client,
                                    &s.source, &s.trainer),
            FERRY_EPEER, "no init today");
    assert_int_equal(destroyed, 2);
    close_scene(&s);
}

static void d2_init_infos_are_checked_by_field(void **state)
{
    ferry_client_ops broken = desk_ops;
    ferry_client odd = {&broken, NULL};
    ferry_client none = {NULL, NULL};
    ferry_trainer *t = NULL;
    scene s;

    (void)state;
    open_scene(&s, NULL);
#define DICT(backend, text, client, source)                                    \
    ferry_trainer_init_dict(backend, text, client, source, &t)
    refused(DICT("hands", "{}", &s.client, &s.source), FERRY_EINVAL, "rank");
    refused(DICT("hands", "{\"rank\":-1}", &s.client, &s.source), FERRY_EINVAL,
            "rank");
    refused(DICT("hands", "{\"rank\":0,\"bad\":1}", &s.client, &s.source),
            FERRY_EINVAL, "bad");
    refused(DICT("nope", "{\"rank\":0}", &s.client, &s.source), FERRY_EUNKNOWN,
            "backend 'nope' is unknown");
    refused(DICT("hands", "{\"rank\":0}", NULL, &s.source), FERRY_EINVAL,
            "client is NULL");
    refused(DICT("hands", "{\"rank\":0}", &none, &s.source), FERRY_EINVAL,
            "no table");
    broken.update_weights = NULL;
    refused(DICT("hands", "{\"rank\":0}", &odd, &s.source), FERRY_EINVAL,
            "client desk has no method update_weights");
    broken.size = 16;
    refused(DICT("hands", "{\"rank\":0}", &odd, &s.source), FERRY_EINVAL,
            "16 bytes");
    refused(DICT("hands", "{\"rank\":0}", &s.client, NULL), FERRY_EINVAL,
            "hands trainer weight transfer requires a WeightSource.");
    refused(DICT("delta", "{\"rank\":0}", &s.client, &s.source), FERRY_EINVAL,
            "delta weight transfer takes no WeightSource");
    refused(DICT(NULL, "{}", &s.client, NULL), FERRY_EINVAL, "backend");
#undef DICT
    assert_null(t);
    close_scene(&s);
}

static void d2_a_typed_info_is_taken_in_any_size(void **state)
{
    hands_init info = {{sizeof(info), &hands_type, 0, 0, 0, 0}, "blue", 9};
    ferry_trainer_init_info bad = {sizeof(bad), NULL, 0, 0, 0, 0};
    scene s;

    (void)state;
    open_scene(&s, NULL);
    ok(ferry_trainer_init(&info.base, &s.client, &s.source, &s.trainer));
    assert_string_equal(info_seen->word, "blue");
    assert_int_equal(info_seen->number, 9);
    assert_ptr_equal(info_seen->base.type, &hands_type);
    ferry_trainer_shutdown(&s.trainer);
    /* J5: compiled when the struct ended earlier. */
    info.base.size = offsetof(hands_init, number);
    ok(ferry_trainer_init(&info.base, &s.client, &s.source, &s.trainer));
    assert_string_equal(info_seen->word, "blue");
    assert_int_equal(info_seen->number, 0);
    ferry_trainer_shutdown(&s.trainer);
    info.base.rank = -3;
    refused(ferry_trainer_init(&info.base, &s.client, &s.source, &s.trainer),
            FERRY_EINVAL, "rank");
    info.base.size = 8;
    refused(ferry_trainer_init(&info.base, &s.client, &s.source, &s.trainer),
            FERRY_EINVAL, "8 bytes");
    refused(ferry_trainer_init(&bad, &s.client, &s.source, &s.trainer),
            FERRY_EINVAL, "no type with a backend name");
    refused(ferry_trainer_init(NULL, &s.client, &s.source, &s.trainer),
            FERRY_EINVAL, "info is NULL");
    close_scene(&s);
}

/* ---- D6 ---- */

static void d6_delta_backends_send_payloads(void **state)
{
    ferry_send_options so = FERRY_SEND_OPTIONS_INIT;
    int patches[3] = {0};
    scene s;

    (void)state;
    open_scene(&s, NULL);
    ok(ferry_trainer_init_dict("delta", "{\"rank\":0}", &s.client, NULL,
                               &s.trainer));
    on_send = drive_nothing;
    ok(ferry_trainer_send_weights(s.trainer, NULL)); /* empty: no call */
    assert_string_equal(s.desk.calls, "");
    so.payload = patches;
    so.payload_count = 3;
    ok(ferry_trainer_send_weights(s.trainer, &so));
    assert_string_equal(s.desk.calls, "sf");
    assert_int_equal(payload_seen, 3);
    on_send = drive; /* there is no source to drive */
    refused(ferry_trainer_send_weights(s.trainer, &so), FERRY_EINVAL,
            "no source");
    so.payload = NULL;
    refused(ferry_trainer_send_weights(s.trainer, &so), FERRY_EINVAL,
            "payload of 3 is NULL");
    ferry_trainer_shutdown(&s.trainer);
    ok(ferry_trainer_init_dict("hands", "{\"rank\":0}", &s.client, &s.source,
                               &s.trainer));
    so.payload = patches;
    refused(ferry_trainer_send_weights(s.trainer, &so), FERRY_EINVAL,
            "takes no payload");
    so.size = 0;
    refused(ferry_trainer_send_weights(s.trainer, &so), FERRY_EINVAL,
            "send options");
    close_scene(&s);
}

static void e4_draft_rounds_are_asked_for_by_an_option(void **state)
{
    ferry_send_options so = FERRY_SEND_OPTIONS_INIT;
    ferry_client_ops ops = desk_ops;
    scene s;

    (void)state;
    open_scene(&s, "{\"rank\":0}");
    so.draft = 1;
    ok(ferry_trainer_send_weights(s.trainer, &so));
    assert_string_equal(s.desk.calls, "iduf");
    ferry_trainer_shutdown(&s.trainer);
    ops.start_draft_weight_update = NULL;
    s.client.ops = &ops;
    ok(ferry_trainer_init_dict("hands", "{\"rank\":0}", &s.client, &s.source,
                               &s.trainer));
    refused(ferry_trainer_send_weights(s.trainer, &so), FERRY_ENOTSUP,
            "client desk has no start_draft_weight_update");
    close_scene(&s);
}

/* ---- faults ---- */

static void a_forked_child_is_refused_not_hung(void **state)
{
    scene s;
    pid_t child;
    int status;

    (void)state;
    open_scene(&s, "{\"rank\":0}");
    ok(ferry_trainer_send_weights(s.trainer, NULL));
    child = fork();
    if (child == 0) {
        alarm(5);
        ferry_status st = ferry_trainer_send_weights(s.trainer, NULL);

        ferry_trainer_shutdown(&s.trainer);
        _exit(st == FERRY_ENOTSUP ? 0 : 1);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    ok(ferry_trainer_send_weights(s.trainer, NULL));
    close_scene(&s);
}

static void thread_and_memory_failures_are_clean(void **state)
{
    ferry_status st = FERRY_ENOMEM;
    scene s;

    (void)state;
    open_scene(&s, NULL);
    ferry__fault_arm(FERRY__FAULT_THREAD, 1);
    assert_true(ferry_trainer_init_dict("hands", "{\"rank\":0}", &s.client,
                                        &s.source, &s.trainer) < 0);
    ferry__fault_arm(FERRY__FAULT_THREAD, 0);
    for (uint64_t n = 1; st < 0 && n < 500; n++) {
        ferry__fault_arm(FERRY__FAULT_ALLOC, n);
        st = ferry_trainer_init_dict("hands", "{\"rank\":0}", &s.client,
                                     &s.source, &s.trainer);
        if (st == FERRY_OK) {
            st = ferry_trainer_send_weights(s.trainer, NULL);
            ferry_trainer_shutdown(&s.trainer);
        }
        ferry__fault_arm(FERRY__FAULT_ALLOC, 0);
        assert_true(st == FERRY_OK || st == FERRY_ENOMEM);
    }
    assert_int_equal(st, FERRY_OK);
    close_scene(&s);
}

static int register_both(void **state)
{
    (void)state;
    ok(ferry_trainer_register("hands", &hands_ops));
    ok(ferry_trainer_register("delta", &delta_ops));
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(d1_a_round_is_start_update_finish),
        cmocka_unit_test(d3_other_ranks_only_drive_the_pass),
        cmocka_unit_test(b4_a_pass_that_was_not_driven_is_no_success),
        cmocka_unit_test(o09_the_server_s_own_text_surfaces),
        cmocka_unit_test(o09_the_wire_breaks_before_the_server_s_text_comes),
        cmocka_unit_test(d5_the_sender_s_own_cause_is_not_masked),
        cmocka_unit_test(d5_an_error_surfaces_at_once_while_the_call_hangs),
        cmocka_unit_test(d5_a_call_that_cannot_be_canceled_is_left_behind),
        cmocka_unit_test(j1_bounds_hold_and_are_named),
        cmocka_unit_test(cancel_ends_a_round_and_the_next_works),
        cmocka_unit_test(a_second_send_at_once_is_busy),
        cmocka_unit_test(send_options_have_nothing_reserved),
        cmocka_unit_test(a_refused_start_is_not_aborted),
        cmocka_unit_test(d4_at_most_one_call_and_none_is_left_in_flight),
        cmocka_unit_test(o11_init_runs_beside_a_client_that_is_slow),
        cmocka_unit_test(d2_init_infos_are_checked_by_field),
        cmocka_unit_test(d2_a_typed_info_is_taken_in_any_size),
        cmocka_unit_test(d6_delta_backends_send_payloads),
        cmocka_unit_test(e4_draft_rounds_are_asked_for_by_an_option),
        cmocka_unit_test(a_forked_child_is_refused_not_hung),
        cmocka_unit_test(thread_and_memory_failures_are_clean),
    };

    return cmocka_run_group_tests(tests, register_both, NULL);
}
