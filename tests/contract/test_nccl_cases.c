/* SPDX-License-Identifier: Apache-2.0 */
/* What is the nccl backend's own, over workers of this process: cuts and
 * their memory, geometry that both ends agree on, the meeting in any order,
 * failures of either plane, ranks that are not the sender. */
#include "backends/nccl/nccl_wire.h"
#include "harness/fleet.h"
#include "harness/ipc_rig.h"
#include "harness/trainer_ranks.h"

#include <arpa/inet.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

static double seconds(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static char warnings[4096];

static void keep_warning(ferry_log_level level, const char *line, void *arg)
{
    (void)arg;
    if (level == FERRY_LOG_WARN && strlen(warnings) + strlen(line) < 4000) {
        strcat(warnings, line);
        strcat(warnings, "\n");
    }
}

static const rig_param plain[] = {
    {"a", FERRY_DTYPE_BF16, 2, {6, 4}, RIG_ROWS, false},
    {"b", FERRY_DTYPE_F32, 1, {12}, RIG_WHOLE, false},
    {"c", FERRY_DTYPE_U8, 2, {5, 8}, RIG_COLS, false},
};
#define N_PLAIN 3

typedef struct setup {
    rig *r;
    rig_source *s;
    ferry_client client, inner;
    ferry_client_ops ops; /* of the client, to be bent */
    ferry_source source;
    ferry_nccl_trainer_init_info info;
    ferry_trainer *t;
} setup;

static void open_workers(setup *u, const rig_param *params, size_t count,
                         rig_options ro)
{
    memset(u, 0, sizeof(*u));
    ro.backend = "nccl";
    ro.params = params;
    ro.count = count;
    ro.local = true;
    u->r = rig_open(&ro);
    u->s = rig_source_open(params, count, 0);
    rig_source_fill(u->s, 1);
    u->inner = rig_client(u->r);
    u->ops = *u->inner.ops;
    u->client = (ferry_client){&u->ops, u->inner.self};
    u->source = rig_source_of(u->s);
    u->info = (ferry_nccl_trainer_init_info)FERRY_NCCL_TRAINER_INIT_INFO(0);
    u->info.provider = "tcp";
    u->info.world_size =
        1 + (ro.tp_size ? ro.tp_size : 1) * (ro.replicas ? ro.replicas : 1);
    warnings[0] = '\0';
}

static ferry_status connect_trainer(setup *u)
{
    return ferry_trainer_init(&u->info.base, &u->client, &u->source, &u->t);
}

static void must(ferry_status status)
{
    if (status < 0)
        fail_msg("%s: %s", ferry_status_name(status), ferry_last_error());
}

static void says(ferry_status status, const char *words)
{
    if (status >= 0 || !strstr(ferry_last_error(), words))
        fail_msg("%s: %s, not %s", ferry_status_name(status),
                 ferry_last_error(), words);
}

static void send_good(setup *u, uint64_t seed, ferry_round_stats *stats)
{
    ferry_send_options so = FERRY_SEND_OPTIONS_INIT;
    const char *why;

    so.stats = stats;
    rig_source_fill(u->s, seed);
    must(ferry_trainer_send_weights(u->t, &so));
    why = rig_differs(u->r, seed);
    if (why)
        fail_msg("seed %d: %s", (int)seed, why);
}

static void close_setup(setup *u)
{
    ferry_trainer_shutdown(&u->t);
    rig_close(u->r);
    rig_source_close(u->s);
}

/* ---- cuts ---- */

/* Sends the parameters through buffers of `limit` bytes, one to three of
 * them; 0: not packed. */
static void through(const rig_param *params, size_t count, uint64_t limit)
{
    for (int32_t n = 1; n <= 3; n++) {
        setup u;

        open_workers(&u, params, count, (rig_options){.tp_size = 2});
        u.info.packed = limit > 0;
        u.info.packed_buffer_size_bytes = limit;
        u.info.packed_num_buffers = n;
        must(connect_trainer(&u));
        for (uint64_t seed = 1; seed < 4; seed++)
            send_good(&u, seed, NULL);
        close_setup(&u);
    }
}

static void o23_scalars_in_packed_buffers(void **state)
{
    static const rig_param params[] = {
        {"a", FERRY_DTYPE_F32, 0, {0}, RIG_WHOLE, false},
        {"b", FERRY_DTYPE_BF16, 1, {3}, RIG_WHOLE, false},
        {"c", FERRY_DTYPE_F32, 0, {0}, RIG_WHOLE, false},
    };

    (void)state;
    through(params, 3, 8);
    through(params, 3, 1 << 20);
    through(params, 3, 0);
}

static void o24_o26_empty_tensors_and_odd_cuts(void **state)
{
    static const rig_param cuts[] = {
        {"a", FERRY_DTYPE_U8, 1, {4}, RIG_WHOLE, false},
        {"b", FERRY_DTYPE_U8, 1, {4}, RIG_WHOLE, false},
        {"c", FERRY_DTYPE_U8, 1, {4}, RIG_WHOLE, false},
        {"d", FERRY_DTYPE_U8, 1, {11}, RIG_WHOLE, false},
        {"e", FERRY_DTYPE_U8, 1, {0}, RIG_WHOLE, false},
        {"f", FERRY_DTYPE_U8, 1, {1}, RIG_WHOLE, false},
    };
    static const rig_param empty[] = {
        {"a", FERRY_DTYPE_F32, 2, {0, 4}, RIG_WHOLE, false},
        {"b", FERRY_DTYPE_BF16, 2, {3, 0}, RIG_WHOLE, false},
    };
    static const rig_param trailing[] = {
        {"a", FERRY_DTYPE_F32, 2, {3, 4}, RIG_ROWS, false},
        {"b", FERRY_DTYPE_BF16, 2, {3, 0}, RIG_WHOLE, false},
    };

    (void)state;
    through(cuts, 6, 10);
    through(cuts, 6, 0);
    through(empty, 2, 10);
    through(empty, 2, 0);
    through(trailing, 2, 10);
    through(trailing, 2, 0);
    /* And what comes after an odd number of bytes lies unaligned. */
    through(plain, N_PLAIN, 1);
}

/* O-27: the bound is limit + largest, per buffer; the warning names the
 * tensor, once. Whole buffers show it to the byte; those of tcp are made of
 * pages. */
static void o27_one(const char *provider, uint64_t most)
{
    static const rig_param params[] = {
        {"small", FERRY_DTYPE_U8, 1, {15}, RIG_WHOLE, false},
        {"large", FERRY_DTYPE_U8, 1, {100}, RIG_WHOLE, false},
    };
    ferry_round_stats stats = {.size = sizeof(stats)};
    setup u;

    ferry_log_set(keep_warning, NULL);
    open_workers(&u, params, 2, (rig_options){.tp_size = 1});
    u.info.packed_buffer_size_bytes = 16;
    u.info.packed_num_buffers = 2;
    u.info.provider = provider;
    must(connect_trainer(&u));
    for (uint64_t seed = 1; seed < 4; seed++)
        send_good(&u, seed, &stats);
    ferry_log_set(NULL, NULL);
    assert_true(stats.bytes_declared == 115 && stats.bytes_sent == 115);
    assert_true(stats.n_updates == 1);
    assert_true(stats.peak_bytes >= 115 && stats.peak_bytes <= most);
    assert_non_null(strstr(warnings, "large"));
    assert_null(strstr(warnings, "small"));
    assert_null(strstr(strstr(warnings, "large") + 1, "large"));
    close_setup(&u);
}

static void o27_memory_is_bounded_and_the_large_tensor_named(void **state)
{
    (void)state;
    o27_one("nccl", 115);
    o27_one("tcp", 2 * (16 + 100) + 8 * 4096);
}

/* ---- geometry ---- */

static setup *bent; /* whose init info is rewritten on its way */
static const char *bend_from, *bend_to;

static ferry_status bend_init(void *self, const char *text)
{
    char copy[2048];
    const char *at = strstr(text, bend_from);

    assert_non_null(at);
    snprintf(copy, sizeof(copy), "%.*s%s%s", (int)(at - text), text, bend_to,
             at + strlen(bend_from));
    return bent->inner.ops->init_weight_transfer_engine(self, copy);
}

static void bent_init_says(const char *from, const char *to, const char *a,
                           const char *b)
{
    double began = seconds();
    setup u;

    open_workers(&u, plain, N_PLAIN, (rig_options){.tp_size = 2});
    u.info.packed_buffer_size_bytes = 64;
    u.ops.init_weight_transfer_engine = bend_init;
    bent = &u;
    bend_from = from;
    bend_to = to;
    says(connect_trainer(&u), a);
    assert_non_null(strstr(ferry_last_error(), b));
    assert_null(u.t);
    assert_true(seconds() - began < 3);
    /* The workers are as good as before. */
    u.ops.init_weight_transfer_engine =
        u.inner.ops->init_weight_transfer_engine;
    must(connect_trainer(&u));
    send_good(&u, 2, NULL);
    close_setup(&u);
}

static void o08_o26_geometry_is_agreed_on_at_init(void **state)
{
    (void)state;
    bent_init_says("\"packed_buffer_size_bytes\":64",
                   "\"packed_buffer_size_bytes\":32", "64", "32");
    bent_init_says("\"packed\":true", "\"packed\":false", "packed", "1");
    bent_init_says("\"packed_num_buffers\":2", "\"packed_num_buffers\":5",
                   "packed_num_buffers", "5");
    bent_init_says("\"protocol_version\":1", "\"protocol_version\":9",
                   "protocol version", "9");
    bent_init_says("\"provider\":\"tcp\"", "\"provider\":\"owl\"", "owl",
                   "tcp");
    bent_init_says("\"rank_offset\":1", "\"rank_offset\":0", "rank_offset", "");
}

static void o08_wire_parameters_in_an_update_are_refused(void **state)
{
    setup u;

    (void)state;
    open_workers(&u, plain, N_PLAIN, (rig_options){.tp_size = 1});
    must(connect_trainer(&u));
    send_good(&u, 1, NULL);
    must(rig_call(u.r, "start", ""));
    says(rig_call(u.r, "update", "{\"packed_buffer_size_bytes\":128}"),
         "packed_buffer_size_bytes");
    must(rig_call(u.r, "start", ""));
    says(rig_call(u.r, "update", "{\"colour\":1}"), "colour");
    assert_null(rig_differs(u.r, 1));
    send_good(&u, 2, NULL);
    close_setup(&u);
}

/* O-01: the second tensor's shape is wrong; no restart, and the group, which
 * saw none of it, goes on. */
static void o01_refused_update_leaves_the_group(void **state)
{
    setup u;

    (void)state;
    open_workers(&u, plain, N_PLAIN, (rig_options){.tp_size = 1});
    must(connect_trainer(&u));
    must(rig_call(u.r, "start", ""));
    says(rig_call(u.r, "update",
                  "{\"names\":[\"a\",\"b\"],\"dtype_names\":[\"bfloat16\","
                  "\"float32\"],\"shapes\":[[6,4],[13]]}"),
         "b");
    send_good(&u, 2, NULL);
    close_setup(&u);
}

/* O-21: nobody sends. The worker answers by its bound, with the old bytes;
 * and no names at all are no update. */
static void o21_silence_is_no_success(void **state)
{
    static const char update[] =
        "{\"names\":[\"a\",\"b\",\"c\"],\"dtype_names\":[\"bfloat16\","
        "\"float32\",\"uint8\"],\"shapes\":[[6,4],[12],[5,8]]}";
    double began;
    setup u;

    (void)state;
    open_workers(&u, plain, N_PLAIN, (rig_options){.tp_size = 1});
    u.info.base.no_progress_ms = 500;
    must(connect_trainer(&u));
    must(rig_call(u.r, "start", ""));
    must(rig_call(u.r, "update", "{}"));
    must(rig_call(u.r, "finish", ""));
    assert_non_null(rig_differs(u.r, 1));
    send_good(&u, 1, NULL);
    must(rig_call(u.r, "start", ""));
    began = seconds();
    says(rig_call(u.r, "update", update), "500 ms");
    assert_true(seconds() - began < 2);
    assert_null(rig_differs(u.r, 1));
    /* The group ended with that: the worker says what must come first. */
    must(rig_call(u.r, "start", ""));
    says(rig_call(u.r, "update", update),
         "init_weight_transfer_engine must come first");
    /* A trainer that knows of no failure finds out, and then makes a new
     * group. */
    assert_true(ferry_trainer_send_weights(u.t, NULL) < 0);
    send_good(&u, 2, NULL);
    close_setup(&u);
}

/* ---- the control plane ---- */

static ferry_status answer_500(void *self, const char *text)
{
    (void)self;
    (void)text;
    return ferry_fail(FERRY_EPEER, "500: out of cheese");
}

static void o09_http_500_before_any_byte(void **state)
{
    double began;
    setup u;

    (void)state;
    open_workers(&u, plain, N_PLAIN, (rig_options){.tp_size = 2});
    u.ops.init_weight_transfer_engine = answer_500;
    began = seconds();
    says(connect_trainer(&u), "500: out of cheese");
    assert_true(seconds() - began < 2);
    u.ops.init_weight_transfer_engine =
        u.inner.ops->init_weight_transfer_engine;
    must(connect_trainer(&u));
    send_good(&u, 1, NULL);
    u.ops.update_weights = answer_500;
    ferry_trainer_shutdown(&u.t);
    must(connect_trainer(&u));
    began = seconds();
    says(ferry_trainer_send_weights(u.t, NULL), "500: out of cheese");
    assert_true(seconds() - began < 2);
    close_setup(&u);
}

/* The worker refuses a name, in its own words. */
static void o09_worker_refuses_a_tensor(void **state)
{
    static const rig_param more[] = {
        {"a", FERRY_DTYPE_BF16, 2, {6, 4}, RIG_ROWS, false},
        {"b", FERRY_DTYPE_F32, 1, {12}, RIG_WHOLE, false},
        {"stray", FERRY_DTYPE_U8, 2, {5, 8}, RIG_COLS, false},
    };
    rig_source *other = rig_source_open(more, 3, 0);
    double began = seconds();
    setup u;

    (void)state;
    open_workers(&u, plain, N_PLAIN, (rig_options){.tp_size = 2});
    u.source = rig_source_of(other);
    must(connect_trainer(&u));
    rig_source_fill(other, 1);
    says(ferry_trainer_send_weights(u.t, NULL), "stray");
    assert_true(seconds() - began < 3);
    close_setup(&u);
    rig_source_close(other);
}

static setup *slow;
static bool at_once;

static ferry_status slow_init(void *self, const char *text)
{
    struct sockaddr_in a = {.sin_family = AF_INET};
    const char *port = strstr(text, "\"master_port\":");
    int fd = -1;

    if (!at_once) {
        usleep(300000);
        return slow->inner.ops->init_weight_transfer_engine(self, text);
    }
    /* Until the trainer listens. */
    assert_non_null(port);
    a.sin_port = htons((uint16_t)atoi(port + strlen("\"master_port\":")));
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    for (int i = 0; i < 200; i++) {
        fd = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(fd, (struct sockaddr *)&a, sizeof(a)) == 0)
            break;
        close(fd);
        usleep(10000);
    }
    close(fd);
    return slow->inner.ops->init_weight_transfer_engine(self, text);
}

static void o11_either_end_may_wait_first(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++) {
        setup u;

        open_workers(&u, plain, N_PLAIN, (rig_options){.tp_size = 2});
        u.ops.init_weight_transfer_engine = slow_init;
        slow = &u;
        at_once = i == 1;
        must(connect_trainer(&u));
        send_good(&u, 1, NULL);
        close_setup(&u);
    }
}

/* ---- addresses and ranks ---- */

static void o15_addresses_of_every_form(void **state)
{
    static const char *const good[] = {"::1", "[::1]", "localhost",
                                       "127.0.0.1"};
    setup u;

    (void)state;
    for (int i = 0; i < 4; i++) {
        open_workers(&u, plain, N_PLAIN, (rig_options){.tp_size = 2});
        u.info.master_address = good[i];
        must(connect_trainer(&u));
        send_good(&u, 1, NULL);
        close_setup(&u);
    }
    open_workers(&u, plain, N_PLAIN, (rig_options){.tp_size = 1});
    u.info.master_address = "::1:";
    says(connect_trainer(&u), "::1:");
    close_setup(&u);
}

static int inits;

static ferry_status count_init(void *self, const char *text)
{
    (void)self;
    (void)text;
    inits++;
    return ferry_fail(FERRY_EPEER, "not now");
}

static void o17_a_taken_port_fails_before_anybody_is_told(void **state)
{
    struct sockaddr_in a = {.sin_family = AF_INET};
    socklen_t length = sizeof(a);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    char where[64];
    double began;
    setup u;

    (void)state;
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    assert_int_equal(bind(fd, (struct sockaddr *)&a, sizeof(a)), 0);
    assert_int_equal(listen(fd, 1), 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)&a, &length), 0);
    open_workers(&u, plain, N_PLAIN, (rig_options){.tp_size = 1});
    u.info.master_port = ntohs(a.sin_port);
    snprintf(where, sizeof(where), "127.0.0.1:%d", u.info.master_port);
    u.ops.init_weight_transfer_engine = count_init;
    inits = 0;
    began = seconds();
    says(connect_trainer(&u), where);
    assert_true(seconds() - began < 1);
    assert_int_equal(inits, 0);
    close(fd);
    u.ops.init_weight_transfer_engine =
        u.inner.ops->init_weight_transfer_engine;
    must(connect_trainer(&u));
    send_good(&u, 1, NULL);
    close_setup(&u);
}

static void o18_a_rank_that_is_claimed_twice(void **state)
{
    double began = seconds();
    setup u;

    (void)state;
    open_workers(
        &u, plain, N_PLAIN,
        (rig_options){.tp_size = 1, .replicas = 2, .same_replica = true});
    says(connect_trainer(&u), "rank 1 claimed twice");
    assert_true(seconds() - began < 3);
    close_setup(&u);
}

/* ---- trainer ranks ---- */

#define MANY 20

/* Each tensor is its own buffer, or all are in one. */
static void ranks_send(int32_t n_ranks, uint64_t limit, uint64_t turns,
                       bool ragged)
{
    rig_param many[MANY];
    char names[MANY][8];
    setup u;

    for (int i = 0; i < MANY; i++) {
        snprintf(names[i], sizeof(names[i]), "p%d", i);
        many[i] =
            (rig_param){names[i], FERRY_DTYPE_F32, 2, {4, 3}, RIG_ROWS, false};
    }
    open_workers(&u, many, MANY, (rig_options){.tp_size = 2});
    u.info.packed_buffer_size_bytes = limit;
    assert_string_equal(trainer_ranks_run(&(trainer_ranks){.n = n_ranks,
                                                           .client = &u.client,
                                                           .info = &u.info,
                                                           .params = many,
                                                           .count = MANY,
                                                           .turns = turns,
                                                           .ragged = ragged}),
                        "");
    assert_null(rig_differs(u.r, turns));
    close_setup(&u);
}

/* O-10, B4: every rank's gather is a collective. */
static void o10_other_ranks_drive_the_pass_in_lockstep(void **state)
{
    (void)state;
    ranks_send(4, 1, 30, false);
}

/* O-24: a rank that holds none of the first layer, as with pipeline
 * parallelism; its part is empty and the pass goes on. */
static void o24_a_rank_that_holds_nothing_of_a_layer(void **state)
{
    (void)state;
    ranks_send(2, 1, 3, true);
    ranks_send(2, 300, 3, true);
    ranks_send(2, 1 << 20, 3, true);
}

/* ---- manifests ---- */

#define MANIFESTS (FERRY__NCCL_LISTS_MAX + 16)

/* The first `count` parameters of a source. */
typedef struct prefix {
    ferry_source inner;
    size_t count, at;
} prefix;

static ferry_status prefix_metadata(void *self, const ferry_param_meta **out,
                                    size_t *out_count)
{
    prefix *p = self;
    size_t all;

    FERRY_TRY(p->inner.ops->metadata(p->inner.self, out, &all));
    *out_count = p->count;
    return FERRY_OK;
}

static ferry_status prefix_begin(void *self)
{
    prefix *p = self;

    p->at = 0;
    return p->inner.ops->begin(p->inner.self);
}

static ferry_status prefix_next(void *self, ferry_item *out)
{
    prefix *p = self;

    return p->at++ == p->count ? FERRY_DONE
                               : p->inner.ops->next(p->inner.self, out);
}

static void prefix_end(void *self)
{
    prefix *p = self;

    p->inner.ops->end(p->inner.self);
}

/* Each round declares other parameters than the one before, more of them
 * than lists of boxes are kept, and then the same again: both ends drop the
 * same lists, and a bit that differs would be found by those that stay. */
static void rounds_of_many_manifests_keep_in_step(void **state)
{
    static const ferry_source_ops ops = {.size = sizeof(ferry_source_ops),
                                         .kind = "prefix",
                                         .metadata = prefix_metadata,
                                         .begin = prefix_begin,
                                         .next = prefix_next,
                                         .end = prefix_end};
    static char names[MANIFESTS][8];
    static rig_param many[MANIFESTS];
    prefix p = {.count = MANIFESTS};
    setup u;

    (void)state;
    for (int i = 0; i < MANIFESTS; i++) {
        snprintf(names[i], sizeof(names[i]), "p%d", i);
        many[i] =
            (rig_param){names[i], FERRY_DTYPE_U8, 1, {6}, RIG_ROWS, false};
    }
    open_workers(&u, many, MANIFESTS, (rig_options){.tp_size = 2});
    p.inner = u.source;
    u.source = (ferry_source){&ops, &p};
    must(connect_trainer(&u));
    send_good(&u, 1, NULL);
    for (int turn = 0; turn < 2; turn++) {
        for (p.count = 1; p.count <= MANIFESTS; p.count++)
            must(ferry_trainer_send_weights(u.t, NULL));
    }
    p.count = MANIFESTS;
    send_good(&u, 2, NULL);
    close_setup(&u);
}

/* ---- without Ferry's extras ---- */

static char told[2][4096];

static ferry_status keep_init(void *self, const char *text)
{
    snprintf(told[0], sizeof(told[0]), "%s", text);
    return bent->inner.ops->init_weight_transfer_engine(self, text);
}

static ferry_status keep_update(void *self, const char *text)
{
    snprintf(told[1], sizeof(told[1]), "%s", text);
    return bent->inner.ops->update_weights(self, text);
}

/* The peers do not say that they are Ferry: they get vLLM's fields and no
 * others, in either form, and read the buffers as under a trainer of vLLM. */
static void peers_that_are_not_ferry_get_what_vllm_knows(void **state)
{
    (void)state;
    for (int i = 0; i < 4; i++) {
        setup u;

        open_workers(&u, plain, N_PLAIN, (rig_options){.tp_size = 2});
        u.ops.status = NULL;
        u.ops.init_weight_transfer_engine = keep_init;
        u.ops.update_weights = keep_update;
        bent = &u;
        u.info.provider = i % 2 ? "nccl" : NULL;
        u.info.rendezvous = i / 2 ? "unique_id" : "store";
        u.info.packed = i != 1;
        u.info.packed_buffer_size_bytes = 64;
        must(connect_trainer(&u));
        for (uint64_t seed = 1; seed < 4; seed++)
            send_good(&u, seed, NULL);
        assert_null(strstr(told[0], "transport"));
        assert_null(strstr(told[0], "secret"));
        assert_non_null(strstr(told[0], "\"rank_offset\":1,\"world_size\":3"));
        assert_true((strstr(told[0], "nccl_unique_id_b64") != NULL) == (i > 1));
        assert_true((strstr(told[0], "master_port") != NULL) == (i < 2));
        assert_string_equal(told[1],
                            "{\"names\":[\"a\",\"b\",\"c\"],"
                            "\"dtype_names\":[\"bfloat16\",\"float32\","
                            "\"uint8\"],\"shapes\":[[6,4],[12],[5,8]]}");
        close_setup(&u);
    }
}

/* Workers that are Ferry's behind servers that cannot say so, as a vLLM with
 * its engines: told by the trainer, they get all that Ferry's peers get. */
static void peers_may_be_stated(void **state)
{
    setup u;

    (void)state;
    open_workers(&u, plain, N_PLAIN, (rig_options){.tp_size = 2});
    u.ops.status = NULL;
    u.ops.init_weight_transfer_engine = keep_init;
    bent = &u;
    u.info.provider = "tcp";
    u.info.peers = "ferry";
    u.info.world_size = 3;
    must(connect_trainer(&u));
    assert_non_null(strstr(told[0], "\"transport\":\"ferry\""));
    for (uint64_t seed = 1; seed < 3; seed++)
        send_good(&u, seed, NULL);
    u.info.peers = "owl";
    says(connect_trainer(&u), "field peers: owl is none of auto, ferry, vllm");
    u.info.peers = "vllm";
    says(connect_trainer(&u), "field provider: tcp needs Ferry's own workers");
    close_setup(&u);
}

/* ---- what init refuses ---- */

static void init_refuses_in_words(void **state)
{
    setup u;

    (void)state;
    open_workers(&u, plain, N_PLAIN, (rig_options){.tp_size = 1});
    u.info.provider = "owl";
    says(connect_trainer(&u), "field provider: owl is none of auto, tcp");
    u.info.provider = "tcp";
    u.info.rendezvous = "unique_id";
    says(connect_trainer(&u), "field rendezvous: unique_id needs provider "
                              "nccl, got tcp");
    u.info.rendezvous = "owl";
    says(connect_trainer(&u), "neither store nor unique_id");
    u.info.rendezvous = NULL;
    u.info.world_size = 1;
    says(connect_trainer(&u), "field world_size: 1 is this trainer alone");
    /* Clients of one rank each do not know how many there are. */
    u.info.world_size = 0;
    says(connect_trainer(&u), "field world_size: 0");
    u.info.world_size = 2;
    u.info.packed_num_buffers = 65;
    says(connect_trainer(&u), "packed_num_buffers");
    u.info.packed_num_buffers = 0;
    /* Without a status route the peers are not Ferry. */
    u.ops.status = NULL;
    says(connect_trainer(&u), "field provider: tcp needs Ferry's own workers");
    u.ops.status = u.inner.ops->status;
    u.info.provider = NULL; /* auto */
    must(connect_trainer(&u));
    send_good(&u, 1, NULL);
    close_setup(&u);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(o23_scalars_in_packed_buffers),
        cmocka_unit_test(o24_o26_empty_tensors_and_odd_cuts),
        cmocka_unit_test(o27_memory_is_bounded_and_the_large_tensor_named),
        cmocka_unit_test(o08_o26_geometry_is_agreed_on_at_init),
        cmocka_unit_test(o08_wire_parameters_in_an_update_are_refused),
        cmocka_unit_test(o01_refused_update_leaves_the_group),
        cmocka_unit_test(o21_silence_is_no_success),
        cmocka_unit_test(o09_http_500_before_any_byte),
        cmocka_unit_test(o09_worker_refuses_a_tensor),
        cmocka_unit_test(o11_either_end_may_wait_first),
        cmocka_unit_test(o15_addresses_of_every_form),
        cmocka_unit_test(o17_a_taken_port_fails_before_anybody_is_told),
        cmocka_unit_test(o18_a_rank_that_is_claimed_twice),
        cmocka_unit_test(o10_other_ranks_drive_the_pass_in_lockstep),
        cmocka_unit_test(o24_a_rank_that_holds_nothing_of_a_layer),
        cmocka_unit_test(rounds_of_many_manifests_keep_in_step),
        cmocka_unit_test(peers_that_are_not_ferry_get_what_vllm_knows),
        cmocka_unit_test(peers_may_be_stated),
        cmocka_unit_test(init_refuses_in_words),
    };

    fleet_host_nccl();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
