/* SPDX-License-Identifier: Apache-2.0 */
/* ipc, host memory: every path carries every byte, whatever the form of the
 * source, the number of ranks and the cut into calls. Workers of this
 * process, so that the thread sanitizer sees both halves. */
#include "harness/ipc_rig.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const rig_param params[] = {
    {"embed", FERRY_DTYPE_BF16, 2, {1000, 64}, RIG_ROWS, false},
    {"scalar", FERRY_DTYPE_F32, 0, {0}, RIG_WHOLE, false},
    {"q", FERRY_DTYPE_BF16, 2, {96, 100}, RIG_ROWS, false},
    {"empty", FERRY_DTYPE_F32, 2, {0, 4}, RIG_WHOLE, false},
    {"o", FERRY_DTYPE_F32, 2, {33, 96}, RIG_COLS, false},
    {"norm", FERRY_DTYPE_F32, 1, {577}, RIG_WHOLE, false},
    {"down", FERRY_DTYPE_BF16, 2, {500, 1200}, RIG_COLS, false},
    {"bias", FERRY_DTYPE_BF16, 1, {3}, RIG_WHOLE, false},
    {"none", FERRY_DTYPE_BF16, 2, {3, 0}, RIG_WHOLE, false},
    {"stack", FERRY_DTYPE_F16, 3, {6, 10, 30}, RIG_ROWS, false},
    {"flags", FERRY_DTYPE_BOOL, 1, {40}, RIG_WHOLE, false},
};
#define N_PARAMS (sizeof(params) / sizeof(params[0]))

typedef struct way {
    const char *path; /* asked for */
    unsigned flags;   /* of the source */
    const char *want; /* reported */
    uint64_t packed;  /* buffer size; 0: one call */
    int32_t buffers;
} way;

static const way ways[] = {
    {NULL, RIG_SHARED, "shared", 0, 0},
    {NULL, 0, "ring", 0, 0},
    {NULL, RIG_MIXED, "shared+ring", 0, 0},
    {NULL, RIG_STREAM, "ring", 0, 0},
    {NULL, RIG_STRIDED, "ring", 0, 0},
    {NULL, RIG_STRIDED | RIG_SHARED, "shared", 0, 0},
    {"shared", RIG_SHARED, "shared", 0, 0},
    {"ring", RIG_SHARED, "ring", 0, 0},
    {"cma", 0, "cma", 0, 0},
    {"cma", RIG_STRIDED, "cma+ring", 0, 0},
    {NULL, 0, "shared", 1 << 22, 0},
    {NULL, 0, "shared+ring", 4096, 2},
    {NULL, 0, "shared+ring", 4096, 1},
    {NULL, RIG_STREAM, "shared+ring", 20000, 3},
    {NULL, RIG_SHARED, "shared", 4096, 2},
    {NULL, RIG_STRIDED, "shared+ring", 70000, 2},
    {"ring", 0, "ring", 4096, 2},
    {"cma", 0, "cma", 4096, 2},
};

static void run_way(const way *w, int32_t tp_size, int32_t replicas,
                    bool digest)
{
    rig_options ro = {.params = params,
                      .count = N_PARAMS,
                      .tp_size = tp_size,
                      .replicas = replicas,
                      .local = true};
    ferry_ipc_trainer_init_info info = FERRY_IPC_TRAINER_INIT_INFO(0);
    ferry_send_options so = FERRY_SEND_OPTIONS_INIT;
    ferry_round_stats stats = {.size = sizeof(stats)};
    rig *r = rig_open(&ro);
    rig_source *s = rig_source_open(params, N_PARAMS, w->flags);
    ferry_client client = rig_client(r);
    ferry_source source = rig_source_of(s);
    ferry_trainer *t = NULL;
    char want[64];

    info.path = w->path;
    info.packed = w->packed != 0;
    info.packed_buffer_size_bytes = w->packed;
    info.packed_num_buffers = w->buffers;
    info.digest = digest;
    so.stats = &stats;
    if (ferry_trainer_init(&info.base, &client, &source, &t) != FERRY_OK)
        fail_msg("init: %s", ferry_last_error());
    /* O-59 in small: a round after a round after a round. */
    for (uint64_t seed = 1; seed <= 3; seed++) {
        rig_source_fill(s, seed);
        if (ferry_trainer_send_weights(t, &so) != FERRY_OK)
            fail_msg("send: %s", ferry_last_error());
        assert_null(rig_differs(r, seed));
        assert_string_equal(stats.path, w->want);
        assert_int_equal(stats.bytes_sent,
                         stats.bytes_declared * (uint64_t)(tp_size * replicas));
        assert_true(w->packed ? stats.n_updates >= 1 : stats.n_updates == 1);
    }
    snprintf(want, sizeof(want), "\"path\":\"");
    assert_non_null(strstr(rig_status(r, 0), want));
    ferry_trainer_shutdown(&t);
    rig_close(r);
    rig_source_close(s);
}

static void every_way_carries_every_byte(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof(ways) / sizeof(ways[0]); i++) {
        print_message("way %zu\n", i);
        run_way(&ways[i], 1, 1, true);
        run_way(&ways[i], 2, 1, i % 2 == 0);
    }
    run_way(&ways[0], 2, 2, true);
    run_way(&ways[1], 2, 2, true);
    run_way(&ways[1], 1, 2, true);
    run_way(&ways[11], 3, 1, true);
}

typedef struct setup {
    rig *r;
    rig_source *s;
    ferry_client client;
    ferry_source source;
    ferry_trainer *t;
} setup;

static setup open_setup(rig_options ro, ferry_ipc_trainer_init_info info,
                        unsigned flags)
{
    setup u = {0};

    u.r = rig_open(&ro);
    u.s = rig_source_open(ro.params, ro.count, flags);
    rig_source_fill(u.s, 1);
    u.client = rig_client(u.r);
    u.source = rig_source_of(u.s);
    if (ferry_trainer_init(&info.base, &u.client, &u.source, &u.t) != FERRY_OK)
        fail_msg("init: %s", ferry_last_error());
    return u;
}

static void close_setup(setup *u)
{
    ferry_trainer_shutdown(&u->t);
    rig_close(u->r);
    rig_source_close(u->s);
}

static rig_options local_rig(const rig_param *p, size_t n)
{
    return (rig_options){.params = p, .count = n, .local = true};
}

/* O-23: a scalar inside a packed chunk, exact on every path. */
static void o23_scalar_in_packed_chunk(void **state)
{
    static const rig_param few[] = {
        {"a", FERRY_DTYPE_F32, 0, {0}, RIG_WHOLE, false},
        {"b", FERRY_DTYPE_BF16, 1, {3}, RIG_WHOLE, false},
        {"c", FERRY_DTYPE_F32, 0, {0}, RIG_WHOLE, false},
    };
    static const char *const paths[] = {NULL, "ring", "cma"};

    (void)state;
    for (int i = 0; i < 3; i++) {
        ferry_ipc_trainer_init_info info = FERRY_IPC_TRAINER_INIT_INFO(0);
        setup u;

        info.packed = 1;
        info.packed_buffer_size_bytes = 8;
        info.path = paths[i];
        u = open_setup(local_rig(few, 3), info, 0);
        assert_int_equal(ferry_trainer_send_weights(u.t, NULL), FERRY_OK);
        assert_null(rig_differs(u.r, 1));
        close_setup(&u);
    }
}

/* O-30: a tensor larger than the buffer travels alone. */
static void o30_tensor_larger_than_the_buffer(void **state)
{
    static const rig_param few[] = {
        {"small", FERRY_DTYPE_U8, 1, {100}, RIG_WHOLE, false},
        {"large", FERRY_DTYPE_U8, 1, {4096}, RIG_WHOLE, false},
        {"huge", FERRY_DTYPE_F32, 1, {2000003}, RIG_WHOLE, false},
        {"last", FERRY_DTYPE_U8, 1, {1000}, RIG_WHOLE, false},
    };
    static const unsigned forms[] = {0, RIG_STREAM, RIG_SHARED};

    (void)state;
    for (int i = 0; i < 3; i++) {
        ferry_ipc_trainer_init_info info = FERRY_IPC_TRAINER_INIT_INFO(0);
        setup u;

        info.packed = 1;
        info.packed_buffer_size_bytes = 1024;
        u = open_setup(local_rig(few, 4), info, forms[i]);
        assert_int_equal(ferry_trainer_send_weights(u.t, NULL), FERRY_OK);
        assert_null(rig_differs(u.r, 1));
        close_setup(&u);
    }
}

/* Path "shared" is a promise: no other way is taken for it. */
static void shared_path_refuses_private_memory_by_name(void **state)
{
    static const unsigned forms[] = {0, RIG_STREAM, RIG_MIXED};

    (void)state;
    for (int i = 0; i < 3; i++) {
        ferry_ipc_trainer_init_info info = FERRY_IPC_TRAINER_INIT_INFO(0);
        setup u;

        info.path = "shared";
        u = open_setup(local_rig(params, N_PARAMS), info, forms[i]);
        assert_int_equal(ferry_trainer_send_weights(u.t, NULL), FERRY_ENOTSUP);
        assert_non_null(
            strstr(ferry_last_error(), i == 2 ? "scalar" : "embed"));
        close_setup(&u);
    }
}

static void odd_init_info_is_refused_by_field(void **state)
{
    rig_options ro = local_rig(params, N_PARAMS);
    rig *r = rig_open(&ro);
    rig_source *s = rig_source_open(params, N_PARAMS, 0);
    ferry_client client = rig_client(r);
    ferry_source source = rig_source_of(s);
    ferry_ipc_trainer_init_info info = FERRY_IPC_TRAINER_INIT_INFO(0);
    ferry_trainer *t = NULL;

    (void)state;
    info.path = "magic";
    assert_int_equal(ferry_trainer_init(&info.base, &client, &source, &t),
                     FERRY_EINVAL);
    assert_non_null(strstr(ferry_last_error(), "magic"));
    assert_null(t);
    rig_close(r);
    rig_source_close(s);
}

/* B3: the first divergence fails the round naming it, streaming or not, and
 * the next round is right. */
static void b3_divergence_fails_the_round_and_the_next_works(void **state)
{
    static const unsigned forms[] = {0, RIG_STREAM, RIG_SHARED};

    (void)state;
    for (int i = 0; i < 6; i++) {
        ferry_ipc_trainer_init_info info = FERRY_IPC_TRAINER_INIT_INFO(0);
        setup u;

        info.packed = i >= 3;
        info.packed_buffer_size_bytes = 4096;
        u = open_setup(local_rig(params, N_PARAMS), info, forms[i % 3]);
        rig_source_misname(u.s, 6);
        assert_int_equal(ferry_trainer_send_weights(u.t, NULL),
                         FERRY_EMISMATCH);
        assert_non_null(strstr(ferry_last_error(), "stranger"));
        rig_source_misname(u.s, SIZE_MAX);
        rig_source_fill(u.s, 5);
        if (ferry_trainer_send_weights(u.t, NULL) != FERRY_OK)
            fail_msg("%s", ferry_last_error());
        assert_null(rig_differs(u.r, 5));
        close_setup(&u);
    }
}

/* O-51: a pickle is refused by its field's name and never decoded; a worker
 * without a Ferry trainer accepts vLLM's init info. */
static void o51_pickled_handles_are_refused(void **state)
{
    static const char *const bodies[] = {
        "\"gASVIgAAAAAAAACMBXBvc2l4lIwGc3lzdGVtlJOUjAd0b3VjaCB4lIWUUpQu\"",
        "\"AAA\"", "[\"x\",\"y\"]"};
    rig_options ro = local_rig(params, N_PARAMS);
    rig *r = rig_open(&ro);
    char text[512];

    (void)state;
    assert_int_equal(rig_call(r, "init", "{\"packed\":false}"), FERRY_OK);
    for (int i = 0; i < 3; i++) {
        snprintf(text, sizeof(text),
                 "{\"names\":[\"norm\"],\"dtype_names\":[\"float32\"],"
                 "\"shapes\":[[577]],\"ipc_handles_pickled\":%s}",
                 bodies[i]);
        assert_int_equal(rig_call(r, "start", ""), FERRY_OK);
        assert_int_equal(rig_call(r, "update", text), FERRY_ENOTSUP);
        assert_non_null(strstr(ferry_last_error(), "ipc_handles_pickled"));
    }
    assert_int_equal(rig_call(r, "start", ""), FERRY_OK);
    assert_int_equal(
        rig_call(r, "update",
                 "{\"names\":[\"norm\"],\"dtype_names\":[\"float32\"],"
                 "\"shapes\":[[577]],\"ipc_handles\":[{\"GPU-x\":[]}]}"),
        FERRY_ENOTSUP);
    assert_int_equal(rig_call(r, "start", ""), FERRY_OK);
    assert_int_equal(
        rig_call(r, "update",
                 "{\"names\":[\"norm\"],\"dtype_names\":[\"float32\"],"
                 "\"shapes\":[[577]],\"handles\":[{\"segment\":0,"
                 "\"offset\":0}],\"update\":1}"),
        FERRY_EORDER);
    rig_close(r);
}

/* A client of the control port names memory that was never published, or
 * repeats an update: nothing is read and nothing is written. */
static void forged_updates_read_nothing(void **state)
{
    static const char *const forged[] = {
        "{\"segment\":0,\"offset\":0}", "{\"range\":0,\"offset\":0}",
        "{\"segment\":2,\"offset\":0}", "{\"ring\":true}"};
    ferry_ipc_trainer_init_info info = FERRY_IPC_TRAINER_INIT_INFO(0);
    rig_options ro = local_rig(params, N_PARAMS);
    char text[512];
    setup u;

    (void)state;
    ro.no_progress_ms = 300;
    u = open_setup(ro, info, RIG_SHARED);
    assert_int_equal(ferry_trainer_send_weights(u.t, NULL), FERRY_OK);
    for (int i = 0; i < 4; i++) {
        for (int update = 1; update <= 2; update++) {
            snprintf(text, sizeof(text),
                     "{\"names\":[\"norm\"],\"dtype_names\":[\"float32\"],"
                     "\"shapes\":[[577]],\"handles\":[%s],\"update\":%d}",
                     forged[i], update);
            assert_int_equal(rig_call(u.r, "start", ""), FERRY_OK);
            assert_true(rig_call(u.r, "update", text) < 0);
        }
    }
    assert_null(rig_differs(u.r, 1));
    rig_source_fill(u.s, 2);
    if (ferry_trainer_send_weights(u.t, NULL) != FERRY_OK)
        fail_msg("%s", ferry_last_error());
    assert_null(rig_differs(u.r, 2));
    close_setup(&u);
}

/* The init info's socket with another secret, version or name. */
static void strangers_are_turned_away(void **state)
{
    static const char *const infos[] = {
        "{\"transport\":\"ferry\",\"protocol_version\":2,\"socket\":\"x\","
        "\"secret\":\"y\"}",
        "{\"transport\":\"ferry\",\"protocol_version\":1,"
        "\"socket\":\"ferry-nobody-listens\",\"secret\":\"y\"}",
        "{\"transport\":\"carrier\",\"protocol_version\":1,"
        "\"socket\":\"x\",\"secret\":\"y\"}",
        "{\"transport\":\"ferry\",\"protocol_version\":1}",
        "{\"packed\":false,\"fast\":true}"};
    static const ferry_status want[] = {
        FERRY_EVERSION, FERRY_ECONN, FERRY_ENOTSUP, FERRY_EINVAL, FERRY_EINVAL};
    rig_options ro = local_rig(params, N_PARAMS);
    rig *r = rig_open(&ro);

    (void)state;
    for (int i = 0; i < 5; i++)
        assert_int_equal(rig_call(r, "init", infos[i]), want[i]);
    assert_int_equal(rig_call(r, "init", infos[0]), FERRY_EVERSION);
    assert_non_null(strstr(ferry_last_error(), "trainer 2, worker 1"));
    rig_close(r);
}

/* A client that changes the secret on its way to the worker. */
static ferry_client inner;

static ferry_status forge_init(void *self, const char *text)
{
    char *copy = strdup(text), *at = strstr(copy, "\"secret\":\"");
    ferry_status status;

    (void)self;
    at[10] = at[10] == '0' ? '1' : '0';
    status = inner.ops->init_weight_transfer_engine(inner.self, copy);
    free(copy);
    return status;
}

static void wrong_secret_is_refused(void **state)
{
    rig_options ro = local_rig(params, N_PARAMS);
    rig *r = rig_open(&ro);
    rig_source *s = rig_source_open(params, N_PARAMS, 0);
    ferry_source source = rig_source_of(s);
    ferry_ipc_trainer_init_info info = FERRY_IPC_TRAINER_INIT_INFO(0);
    ferry_client_ops ops;
    ferry_client client = {&ops, NULL};
    ferry_trainer *t = NULL;

    (void)state;
    inner = rig_client(r);
    ops = *inner.ops;
    ops.init_weight_transfer_engine = forge_init;
    client.self = inner.self;
    assert_int_equal(ferry_trainer_init(&info.base, &client, &source, &t),
                     FERRY_EAUTH);
    assert_non_null(strstr(ferry_last_error(), "secret"));
    rig_close(r);
    rig_source_close(s);
}

/* O-18: two replicas that claim one rank are told, and nothing hangs. */
static void o18_rank_claimed_twice_is_refused(void **state)
{
    rig_options ro = local_rig(params, N_PARAMS);
    ferry_ipc_trainer_init_info info = FERRY_IPC_TRAINER_INIT_INFO(0);
    rig_source *s = rig_source_open(params, N_PARAMS, 0);
    ferry_source source = rig_source_of(s);
    ferry_trainer *t = NULL;
    ferry_client client;
    rig *r;

    (void)state;
    ro.replicas = 2;
    ro.same_replica = true;
    r = rig_open(&ro);
    client = rig_client(r);
    assert_int_equal(ferry_trainer_init(&info.base, &client, &source, &t),
                     FERRY_EPEER);
    assert_non_null(strstr(ferry_last_error(), "dp0 tp0 claimed twice"));
    assert_null(t);
    rig_close(r);
    rig_source_close(s);
}

/* O-47, O-50: rounds and sessions leave nothing behind. */
static void o47_nothing_is_left_behind(void **state)
{
    int shm = rig_count_entries("/dev/shm"), fds, maps = 0;

    (void)state;
    for (int turn = 0; turn < 6; turn++) {
        ferry_ipc_trainer_init_info info = FERRY_IPC_TRAINER_INIT_INFO(0);
        setup u;

        info.packed = turn % 2;
        info.packed_buffer_size_bytes = 4096;
        u = open_setup(local_rig(params, N_PARAMS), info,
                       turn % 3 ? 0 : RIG_SHARED);
        for (int i = 0; i < 5; i++) {
            int now;

            assert_int_equal(ferry_trainer_send_weights(u.t, NULL), FERRY_OK);
            now = rig_count_entries("/proc/self/map_files");
            if (i > 1)
                assert_true(now <= maps + 2);
            maps = now;
        }
        close_setup(&u);
        if (turn == 0)
            fds = rig_count_entries("/proc/self/fd");
    }
    assert_int_equal(rig_count_entries("/proc/self/fd"), fds);
    assert_int_equal(rig_count_entries("/dev/shm"), shm);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_way_carries_every_byte),
        cmocka_unit_test(o23_scalar_in_packed_chunk),
        cmocka_unit_test(o30_tensor_larger_than_the_buffer),
        cmocka_unit_test(shared_path_refuses_private_memory_by_name),
        cmocka_unit_test(odd_init_info_is_refused_by_field),
        cmocka_unit_test(b3_divergence_fails_the_round_and_the_next_works),
        cmocka_unit_test(o51_pickled_handles_are_refused),
        cmocka_unit_test(forged_updates_read_nothing),
        cmocka_unit_test(strangers_are_turned_away),
        cmocka_unit_test(wrong_secret_is_refused),
        cmocka_unit_test(o18_rank_claimed_twice_is_refused),
        cmocka_unit_test(o47_nothing_is_left_behind),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
