/* SPDX-License-Identifier: Apache-2.0 */
/* What an engine learns of the servers behind its client: which of them are
 * Ferry (C7), how many workers they have, and that a fan-out gives each one
 * the ranks that follow those of the one before it (G1, O-18). */
#include "base/clock.h"

#include <ferry/backend.h>
#include <ferry/ferry.h>
#include <ferry/registry.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#define N 3

/* A server that answers as told. */
typedef struct peer {
    char url[32];
    int32_t workers;
    bool no_ferry;
    ferry_status fails;   /* what status and world_size fail with */
    bool stuck;           /* in world_size until canceled */
    size_t padding;       /* of its status, in bytes */
    const char *instance; /* which its status says; NULL: it says none */
    atomic_bool canceled;
    char info[160]; /* the init info that came */
} peer;

static ferry_status peer_init(void *self, const char *info)
{
    peer *p = self;

    snprintf(p->info, sizeof(p->info), "%s", info);
    return FERRY_OK;
}

static ferry_status peer_start(void *self)
{
    (void)self;
    return FERRY_OK;
}

static ferry_status peer_text(void *self, const char *text)
{
    (void)self, (void)text;
    return FERRY_OK;
}

static void peer_cancel(void *self)
{
    atomic_store(&((peer *)self)->canceled, true);
}

static ferry_status peer_status(void *self, char *buffer, size_t size_bytes)
{
    const peer *p = self;

    if (p->fails < 0)
        return ferry_fail(p->fails, "%s: gone", p->url);
    if (p->no_ferry)
        return ferry_fail(FERRY_EROUTE, "%s: no /ferry/status", p->url);
    if (p->instance)
        snprintf(buffer, size_bytes, "{\"instance\":\"%s\",\"replicas\":[{}]}",
                 p->instance);
    else
        snprintf(buffer, size_bytes, "{\"pad\":\"%0*d\"}", (int)p->padding, 0);
    return FERRY_OK;
}

static ferry_status peer_world_size(void *self, int32_t *out_workers)
{
    peer *p = self;
    ferry__deadline d = ferry__deadline_in(10000);

    if (p->fails < 0)
        return ferry_fail(p->fails, "%s: gone", p->url);
    while (p->stuck && !atomic_load(&p->canceled) &&
           !ferry__deadline_passed(&d))
        ferry__sleep_ms(1);
    if (p->stuck)
        return ferry_fail(FERRY_ECANCELED, "%s: canceled", p->url);
    *out_workers = p->workers;
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
    .update_weights = peer_text,
    .finish_weight_update = peer_text,
    .cancel = peer_cancel,
    .status = peer_status,
    .peer = peer_name,
    .world_size = peer_world_size,
};
/* One compiled before the table had world_size. */
static const ferry_client_ops older_ops = {
    .size = offsetof(ferry_client_ops, world_size),
    .kind = "older",
    .init_weight_transfer_engine = peer_init,
    .start_weight_update = peer_start,
    .update_weights = peer_text,
    .finish_weight_update = peer_text,
    .status = peer_status,
    .peer = peer_name,
    .world_size = (ferry_status(*)(void *, int32_t *))1, /* never read */
};
/* C2: four calls and nothing else. */
static const ferry_client_ops plain_ops = {
    .size = offsetof(ferry_client_ops, cancel),
    .kind = "plain",
    .init_weight_transfer_engine = peer_init,
    .start_weight_update = peer_start,
    .update_weights = peer_text,
    .finish_weight_update = peer_text,
};

/* ---- an engine that asks, at its init ---- */

typedef struct asker {
    const ferry_trainer_host *host;
    ferry_trainer_context *ctx;
} asker;

static struct {
    bool ferry;
    int32_t workers;
    ferry_status ferry_status, size_status;
    char ferry_line[256], size_line[256];
} heard;

static const ferry_field fields[] = {FERRY_TRAINER_INIT_FIELDS};
FERRY_TRAINER_INIT_TYPE(asker_type, "asker", ferry_trainer_init_info, fields,
                        sizeof(fields) / sizeof(fields[0]), NULL);

static ferry_status asker_create(const ferry_trainer_host *host,
                                 ferry_trainer_context *ctx, const void *info,
                                 bool is_sender, void **out_self)
{
    asker *a = host->alloc(sizeof(*a));

    (void)info, (void)is_sender;
    if (a == NULL)
        return FERRY_ENOMEM;
    *a = (asker){host, ctx};
    *out_self = a;
    return FERRY_OK;
}

static ferry_status asker_init(void *self)
{
    const asker *a = self;

    memset(&heard, 0, sizeof(heard));
    assert_true(FERRY_HOST_HAS(a->host, peers_are_ferry));
    assert_true(FERRY_HOST_HAS(a->host, peer_world_size));
    heard.ferry_status = a->host->peers_are_ferry(a->ctx, &heard.ferry);
    snprintf(heard.ferry_line, sizeof(heard.ferry_line), "%s",
             ferry_last_error());
    heard.size_status = a->host->peer_world_size(a->ctx, &heard.workers);
    snprintf(heard.size_line, sizeof(heard.size_line), "%s",
             ferry_last_error());
    return FERRY_OK;
}

static ferry_status asker_send(void *self, const void *payload, size_t count)
{
    (void)self, (void)payload, (void)count;
    return FERRY_OK;
}

static void asker_destroy(void *self)
{
    asker *a = self;

    a->host->free(a);
}

static const ferry_trainer_engine_ops asker_ops = {
    .size = sizeof(ferry_trainer_engine_ops),
    .abi = FERRY_ENGINE_ABI,
    .flags = FERRY_TRAINER_DELTA,
    .init_type = &asker_type,
    .create = asker_create,
    .init = asker_init,
    .send = asker_send,
    .destroy = asker_destroy,
};

/* ---- the scene: N peers, the last one of a kind of its own ---- */

static void name_peers(peer *peers)
{
    for (int i = 0; i < N; i++) {
        snprintf(peers[i].url, sizeof(peers[i].url), "http://%c", 'x' + i);
        peers[i].workers = i + 1;
    }
}

static ferry_client fan_out(peer *peers, const ferry_client_ops *last)
{
    ferry_client clients[N], all = {0};

    for (int i = 0; i < N; i++)
        clients[i] = (ferry_client){i == N - 1 ? last : &peer_ops, &peers[i]};
    assert_int_equal(ferry_client_fanout(clients, N, &all), FERRY_OK);
    return all;
}

static void ask(ferry_client *client, const char *info)
{
    ferry_trainer *trainer = NULL;

    assert_int_equal(
        ferry_trainer_init_dict("asker", info, client, NULL, &trainer),
        FERRY_OK);
    ferry_trainer_shutdown(&trainer);
    ferry_client_close(client);
}

static void c7_all_peers_are_ferry(void **state)
{
    peer peers[N] = {0};
    ferry_client c;

    (void)state;
    name_peers(peers);
    c = fan_out(peers, &peer_ops);
    ask(&c, "{\"rank\":0}");
    assert_int_equal(heard.ferry_status, FERRY_OK);
    assert_true(heard.ferry);
    assert_int_equal(heard.size_status, FERRY_OK);
    assert_int_equal(heard.workers, 1 + 2 + 3);
}

static void c7_no_peer_is_ferry(void **state)
{
    peer peers[N] = {0};
    ferry_client c;

    (void)state;
    name_peers(peers);
    for (int i = 0; i < N; i++)
        peers[i].no_ferry = true;
    c = fan_out(peers, &peer_ops);
    ask(&c, "{\"rank\":0}");
    assert_int_equal(heard.ferry_status, FERRY_OK);
    assert_false(heard.ferry);
}

static void expect_mixed(const char *line)
{
    assert_int_equal(heard.ferry_status, FERRY_EMISMATCH);
    assert_string_equal(heard.ferry_line, line);
}

static void c7_some_peers_that_are_ferry_are_a_mismatch_by_name(void **state)
{
    peer peers[N] = {0};
    ferry_client c;

    (void)state;
    name_peers(peers);
    peers[0].no_ferry = true;
    c = fan_out(peers, &peer_ops);
    ask(&c, "{\"rank\":0}");
    expect_mixed("http://y is Ferry, http://x is not; backend asker needs all "
                 "of one kind");
    peers[0].no_ferry = false;
    c = fan_out(peers, &plain_ops);
    ask(&c, "{\"rank\":0}");
    expect_mixed("http://x is Ferry, replica 2 is not; backend asker needs "
                 "all of one kind");
}

/* A fan-out may have fan-outs among its members. */
static void c7_fan_outs_inside_of_one_are_looked_into(void **state)
{
    peer inner[N] = {0}, outer = {.url = "http://w", .workers = 5};
    ferry_client clients[2], c = {0};

    (void)state;
    name_peers(inner);
    inner[1].no_ferry = true;
    clients[0] = (ferry_client){&peer_ops, &outer};
    clients[1] = fan_out(inner, &peer_ops);
    outer.no_ferry = true;
    assert_int_equal(ferry_client_fanout(clients, 2, &c), FERRY_OK);
    ask(&c, "{\"rank\":0}");
    expect_mixed("http://x is Ferry, http://w is not; backend asker needs all "
                 "of one kind");
    assert_int_equal(heard.workers, 5 + 6);
}

/* O-18: one server under two names would be met twice. */
static void o18_one_server_under_two_names_is_refused(void **state)
{
    peer peers[N] = {0}, more = {.url = "http://w", .workers = 1};
    ferry_client clients[2], c;

    (void)state;
    name_peers(peers);
    for (int i = 0; i < N; i++)
        peers[i].instance = i == 1 ? "b1" : "a0";
    c = fan_out(peers, &peer_ops);
    ask(&c, "{\"rank\":0}");
    assert_int_equal(heard.ferry_status, FERRY_EINVAL);
    assert_string_equal(heard.ferry_line, "http://x and http://z are the same "
                                          "server (instance a0)");
    peers[0].no_ferry = true;
    more.instance = "a0";
    clients[0] = fan_out(peers, &peer_ops);
    clients[1] = (ferry_client){&peer_ops, &more};
    assert_int_equal(ferry_client_fanout(clients, 2, &c), FERRY_OK);
    ask(&c, "{\"rank\":0}");
    assert_int_equal(heard.ferry_status, FERRY_EINVAL);
    assert_string_equal(heard.ferry_line, "http://z and http://w are the same "
                                          "server (instance a0)");
}

static void c7_a_client_without_status_is_not_ferry(void **state)
{
    peer p = {.url = "http://x"};
    ferry_client c = {&plain_ops, &p};

    (void)state;
    ask(&c, "{\"rank\":0}");
    assert_int_equal(heard.ferry_status, FERRY_OK);
    assert_false(heard.ferry);
    assert_int_equal(heard.size_status, FERRY_ENOTSUP);
    assert_string_equal(heard.size_line, "client plain has no world_size");
}

static void c7_a_peer_that_cannot_be_asked_is_no_guess(void **state)
{
    peer peers[N] = {0};
    ferry_client c;

    (void)state;
    name_peers(peers);
    peers[1].fails = FERRY_ECONN;
    c = fan_out(peers, &peer_ops);
    ask(&c, "{\"rank\":0}");
    assert_int_equal(heard.ferry_status, FERRY_ECONN);
    assert_string_equal(heard.ferry_line, "replica 1: http://y: gone");
    assert_int_equal(heard.size_status, FERRY_ECONN);
    assert_string_equal(heard.size_line, "replica 1: http://y: gone");
}

/* A status longer than the first buffer is read whole all the same. */
static void a_long_status_is_read_whole(void **state)
{
    peer peers[N] = {0};
    ferry_client c;

    (void)state;
    name_peers(peers);
    peers[0].padding = 300000;
    peers[2].no_ferry = true;
    c = fan_out(peers, &peer_ops);
    ask(&c, "{\"rank\":0}");
    expect_mixed("http://x is Ferry, http://z is not; backend asker needs all "
                 "of one kind");
}

/* J1: the bounds of the round hold for these questions as well. */
static void j1_a_peer_that_does_not_answer_is_bounded(void **state)
{
    peer p = {.url = "http://x", .stuck = true};
    ferry_client c = {&peer_ops, &p};
    int64_t from_ns = ferry__now_ns();

    (void)state;
    ask(&c, "{\"rank\":0,\"no_progress_ms\":300}");
    assert_int_equal(heard.size_status, FERRY_ENOPROGRESS);
    assert_non_null(strstr(heard.size_line, "world_size"));
    assert_true(ferry__now_ns() - from_ns < INT64_C(3000000000));
}

/* Only the sender speaks with the control plane (D3). */
static void d3_other_ranks_cannot_ask(void **state)
{
    peer p = {.url = "http://x", .workers = 1};
    ferry_client c = {&peer_ops, &p};

    (void)state;
    ask(&c, "{\"rank\":1}");
    assert_int_equal(heard.ferry_status, FERRY_EINVAL);
    assert_int_equal(heard.size_status, FERRY_EINVAL);
}

/* ---- rank_offset ---- */

static void g1_each_member_gets_the_ranks_after_the_one_before(void **state)
{
    peer peers[N] = {0};
    ferry_client c;

    (void)state;
    name_peers(peers);
    c = fan_out(peers, &peer_ops);
    assert_int_equal(
        c.ops->init_weight_transfer_engine(
            c.self, "{\"rank_offset\":1,\"world_size\":7,\"packed\":true}"),
        FERRY_OK);
    assert_string_equal(peers[0].info, "{\"rank_offset\":1,\"world_size\":7,"
                                       "\"packed\":true}");
    assert_string_equal(peers[1].info, "{\"rank_offset\":2,\"world_size\":7,"
                                       "\"packed\":true}");
    assert_string_equal(peers[2].info, "{\"rank_offset\":4,\"world_size\":7,"
                                       "\"packed\":true}");
    ferry_client_close(&c);
}

static void g1_members_of_unknown_size_all_get_the_same(void **state)
{
    static const char *const text = "{\"rank_offset\": 1}";
    peer peers[N] = {0};
    ferry_client c;

    (void)state;
    name_peers(peers);
    c = fan_out(peers, &older_ops);
    assert_null(c.ops->world_size);
    assert_int_equal(c.ops->init_weight_transfer_engine(c.self, text),
                     FERRY_OK);
    for (int i = 0; i < N; i++)
        assert_string_equal(peers[i].info, text);
    ferry_client_close(&c);
}

/* What has no such field, or is no dict, is passed on untouched, and nobody
 * is asked for a size. */
static void other_init_infos_go_out_as_they_are(void **state)
{
    static const char *const texts[] = {
        "{\"path\": \"ring\"}", "{\"rank_offset\": \"1\"}", "[1]", "{\"a\":"};
    peer peers[N] = {0};
    ferry_client c;

    (void)state;
    name_peers(peers);
    peers[0].fails = FERRY_ECONN;
    c = fan_out(peers, &peer_ops);
    for (size_t k = 0; k < sizeof(texts) / sizeof(texts[0]); k++) {
        assert_int_equal(c.ops->init_weight_transfer_engine(c.self, texts[k]),
                         FERRY_OK);
        for (int i = 0; i < N; i++)
            assert_string_equal(peers[i].info, texts[k]);
    }
    ferry_client_close(&c);
}

/* Nobody is told to join a group when one of them cannot be counted. */
static void a_member_that_cannot_be_counted_fails_init(void **state)
{
    peer peers[N] = {0};
    ferry_client c;

    (void)state;
    name_peers(peers);
    c = fan_out(peers, &peer_ops);
    peers[2].workers = 0;
    assert_int_equal(
        c.ops->init_weight_transfer_engine(c.self, "{\"rank_offset\":1}"),
        FERRY_EPEER);
    assert_string_equal(ferry_last_error(), "replica 2: world size is 0, must "
                                            "be at least 1");
    peers[2].workers = peers[1].workers = INT32_MAX;
    assert_int_equal(
        c.ops->init_weight_transfer_engine(c.self, "{\"rank_offset\":1}"),
        FERRY_EPEER);
    assert_string_equal(peers[0].info, "");
    ferry_client_close(&c);
}

static int register_engine(void **state)
{
    (void)state;
    return ferry_trainer_register("asker", &asker_ops);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(c7_all_peers_are_ferry),
        cmocka_unit_test(c7_no_peer_is_ferry),
        cmocka_unit_test(c7_some_peers_that_are_ferry_are_a_mismatch_by_name),
        cmocka_unit_test(c7_fan_outs_inside_of_one_are_looked_into),
        cmocka_unit_test(o18_one_server_under_two_names_is_refused),
        cmocka_unit_test(c7_a_client_without_status_is_not_ferry),
        cmocka_unit_test(c7_a_peer_that_cannot_be_asked_is_no_guess),
        cmocka_unit_test(a_long_status_is_read_whole),
        cmocka_unit_test(j1_a_peer_that_does_not_answer_is_bounded),
        cmocka_unit_test(d3_other_ranks_cannot_ask),
        cmocka_unit_test(g1_each_member_gets_the_ranks_after_the_one_before),
        cmocka_unit_test(g1_members_of_unknown_size_all_get_the_same),
        cmocka_unit_test(other_init_infos_go_out_as_they_are),
        cmocka_unit_test(a_member_that_cannot_be_counted_fails_init),
    };

    return cmocka_run_group_tests(tests, register_engine, NULL);
}
