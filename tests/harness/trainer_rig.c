/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/trainer_rig.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/clock.h"
#include "harness/expect.h"

/* ---- a client that records ---- */

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

const ferry_client_ops desk_ops = {
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

hands_hook hands_on_init, hands_on_send;
int hands_ends, hands_destroyed;
ferry_status hands_ended_with;
size_t hands_payload_seen;

typedef struct hands {
    const ferry_trainer_host *host;
    ferry_trainer_context *ctx;
    bool is_sender;
} hands;

const hands_init *hands_info_seen;

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
    hands_info_seen = info;
    h->host = host;
    h->ctx = ctx;
    h->is_sender = is_sender;
    *out_self = h;
    return FERRY_OK;
}

static ferry_status init(void *self)
{
    hands *h = self;

    if (hands_on_init != NULL)
        return hands_on_init(h->host, h->ctx);
    return h->is_sender ? h->host->init_peer(h->ctx, "{}") : FERRY_OK;
}

static ferry_status send_round(void *self, const void *payload, size_t count)
{
    hands *h = self;

    (void)payload;
    hands_payload_seen = count;
    return hands_on_send(h->host, h->ctx);
}

static void round_end(void *self, ferry_status result)
{
    hands *h = self;

    hands_ends++;
    hands_ended_with = result;
    (h->host->fail)(FERRY_EINTERNAL, "said at the end");
}

static void destroy(void *self)
{
    hands *h = self;

    hands_destroyed++;
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
ferry_status hands_drive(const ferry_trainer_host *host,
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

ferry_status hands_drive_and_update(const ferry_trainer_host *host,
                                    ferry_trainer_context *ctx)
{
    FERRY_TRY(host->update_begin(ctx, "{\"x\":1}"));
    FERRY_TRY(hands_drive(host, ctx));
    return host->update_wait(ctx);
}

ferry_status hands_drive_nothing(const ferry_trainer_host *host,
                                 ferry_trainer_context *ctx)
{
    (void)host;
    (void)ctx;
    return FERRY_OK;
}

/* ---- a trainer over a toy ---- */

void scene_open(scene *s, const char *info)
{
    toy_options t = {.kind = TOY_A};

    memset(s, 0, sizeof(*s));
    hands_on_init = NULL;
    hands_on_send = hands_drive_and_update;
    hands_ends = hands_destroyed = 0;
    s->client.ops = &desk_ops;
    s->client.self = &s->desk;
    s->checkpoint = toy_checkpoint_create(&t);
    s->source = toy_checkpoint_source(s->checkpoint, 0, s->checkpoint->count);
    if (info != NULL)
        ok(ferry_trainer_init_dict("hands", info, &s->client, &s->source,
                                   &s->trainer));
}

void scene_close(scene *s)
{
    ferry_trainer_shutdown(&s->trainer);
    assert_null(s->trainer);
    ferry_trainer_shutdown(&s->trainer);
    ferry_source_close(&s->source);
    toy_checkpoint_free(s->checkpoint);
}

int scene_engines(void **state)
{
    (void)state;
    ok(ferry_trainer_register("hands", &hands_ops));
    ok(ferry_trainer_register("delta", &delta_ops));
    return 0;
}
