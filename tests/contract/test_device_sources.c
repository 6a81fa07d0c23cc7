/* SPDX-License-Identifier: Apache-2.0 */
/* Trainers whose tensors lie in memory of devices, which a driver of the tests
 * plays: by ipc and nccl, to workers of host memory and to groups whose
 * buffers are a device's. The memory cannot be read as the host's. */
#include "base/thread.h"
#include "harness/device.h"
#include "harness/fleet.h"
#include "harness/ipc_rig.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

static const rig_param params[] = {
    {"a.weight", FERRY_DTYPE_BF16, 2, {60, 80}, RIG_ROWS, false},
    {"a.bias", FERRY_DTYPE_F32, 1, {12}, RIG_WHOLE, false},
    {"scale", FERRY_DTYPE_F32, 0, {0}, RIG_WHOLE, false},
    {"b.weight", FERRY_DTYPE_F32, 2, {50, 40}, RIG_COLS, false},
    {"none", FERRY_DTYPE_BF16, 2, {3, 0}, RIG_WHOLE, false},
    {"c.weight", FERRY_DTYPE_U8, 2, {5, 8}, RIG_COLS, false},
    {"large.weight", FERRY_DTYPE_BF16, 2, {1200, 2000}, RIG_ROWS, false},
};
#define N_PARAMS (sizeof(params) / sizeof(params[0]))

/* ---- the ways ---- */

typedef struct way {
    const char *label, *backend;
    const char *info;  /* of the init info, beside the rank */
    bool through_host; /* which is said once */
} way;

static const way ways[] = {
    {"ipc ring", "ipc", "\"path\":\"ring\"", true},
    {"ipc ring without digests", "ipc", "\"path\":\"ring\",\"digest\":false",
     true},
    {"ipc auto", "ipc", "", true},
    {"ipc cma", "ipc", "\"path\":\"cma\"", true},
    {"ipc packed", "ipc", "\"packed\":true,\"packed_buffer_size_bytes\":30000",
     true},
    {"nccl tcp", "nccl", "\"provider\":\"tcp\"", true},
    {"nccl tcp, one by one", "nccl", "\"provider\":\"tcp\",\"packed\":false",
     true},
    {"nccl tcp, small buffers", "nccl",
     "\"provider\":\"tcp\",\"packed_buffer_size_bytes\":3000,\"digest\":false",
     true},
    {"nccl nccl", "nccl", "\"provider\":\"nccl\"", true},
    {"nccl nccl without digests", "nccl",
     "\"provider\":\"nccl\",\"digest\":false", true},
    {"nccl nccl, small buffers", "nccl",
     "\"provider\":\"nccl\",\"packed_buffer_size_bytes\":3000", true},
};
#define N_WAYS (sizeof(ways) / sizeof(ways[0]))

static char said[65536];
static int n_said;

static void keep_line(ferry_log_level level, const char *line, void *arg)
{
    (void)level;
    (void)arg;
    if (strstr(line, "through the host, as") || strstr(line, "by way of the") ||
        strstr(line, "copied through the host")) {
        n_said++;
        snprintf(said, sizeof(said), "%s", line);
    }
}

typedef struct setup {
    rig *r;
    rig_source *s;
    ferry_client client;
    ferry_source source;
    ferry_trainer *t;
} setup;

static void must(ferry_status status, const way *w)
{
    if (status < 0)
        fail_msg("%s: %s: %s", w->label, ferry_status_name(status),
                 ferry_last_error());
}

static void open_setup(setup *u, const way *w, unsigned flags, size_t count)
{
    rig_options ro = {.backend = w->backend,
                      .params = params,
                      .count = count,
                      .tp_size = 2,
                      .local = true};
    char info[512];

    memset(u, 0, sizeof(*u));
    u->r = rig_open(&ro);
    u->s = rig_source_open(params, count, flags);
    u->client = rig_client(u->r);
    u->source = rig_source_of(u->s);
    snprintf(info, sizeof(info), "{\"rank\":0%s%s}", w->info[0] ? "," : "",
             w->info);
    if (strcmp(w->backend, "nccl") == 0)
        snprintf(info, sizeof(info),
                 "{\"rank\":0,\"peers\":\"ferry\","
                 "\"world_size\":3,%s}",
                 w->info);
    must(ferry_trainer_init_dict(w->backend, info, &u->client, &u->source,
                                 &u->t),
         w);
}

static void send_good(setup *u, uint64_t seed, const way *w)
{
    const char *why;

    rig_source_fill(u->s, seed);
    must(ferry_trainer_send_weights(u->t, NULL), w);
    why = rig_differs(u->r, seed);
    if (why)
        fail_msg("%s, seed %d: %s", w->label, (int)seed, why);
}

static void close_setup(setup *u)
{
    ferry_trainer_shutdown(&u->t);
    rig_close(u->r);
    rig_source_close(u->s);
    assert_int_equal(device_left(), 0);
}

/* ---- bytes ---- */

static void g1_g2_tensors_of_devices_arrive_exact(void **state)
{
    static const unsigned flags[] = {0, RIG_STRIDED, RIG_STREAM,
                                     RIG_STREAM | RIG_STRIDED};

    (void)state;
    for (size_t i = 0; i < N_WAYS; i++) {
        for (size_t k = 0; k < 4; k++) {
            setup u;

            n_said = 0;
            /* The large one, for more than one window, goes once each way. */
            open_setup(&u, &ways[i], RIG_DEVICE | flags[k],
                       k == 0 ? N_PARAMS : N_PARAMS - 1);
            for (uint64_t seed = 1; seed < 3; seed++)
                send_good(&u, seed, &ways[i]);
            /* What is on the group's own device, and is no heap of columns,
             * does not come to the host. */
            if (ways[i].through_host && !(flags[k] & RIG_STREAM))
                assert_int_equal(n_said, 1);
            close_setup(&u);
        }
    }
}

/* ---- events ---- */

/* A source whose device has not written anything before its event is over. */
typedef struct late {
    ferry_source inner;
    ferry_item item;
    ferry_source_ops ops;
    rig_source *s;
    uint64_t seed;
    int asked;
} late;

static ferry_status late_wait(void *arg, int64_t timeout_ms)
{
    late *l = arg;

    (void)timeout_ms;
    if (l->asked++ == 0)
        return FERRY_ETIMEOUT;
    rig_source_fill(l->s, l->seed);
    return FERRY_OK;
}

static ferry_status late_metadata(void *self, const ferry_param_meta **params_,
                                  size_t *count)
{
    late *l = self;

    return l->inner.ops->metadata(l->inner.self, params_, count);
}

static ferry_status late_begin(void *self)
{
    late *l = self;

    rig_source_fill(l->s, l->seed + 1000);
    return l->inner.ops->begin(l->inner.self);
}

static ferry_status late_next(void *self, ferry_item *out)
{
    late *l = self;
    ferry_status status = l->inner.ops->next(l->inner.self, out);

    if (status != FERRY_OK)
        return status;
    /* What is read before its event is that of another seed. */
    rig_source_fill(l->s, l->seed + 1000);
    l->asked = 0;
    out->wait = late_wait;
    out->wait_arg = l;
    return FERRY_OK;
}

static void late_end(void *self)
{
    late *l = self;

    l->inner.ops->end(l->inner.self);
}

static const rig_param late_params[] = {
    {"a.weight", FERRY_DTYPE_BF16, 2, {60, 80}, RIG_ROWS, false},
    {"b.weight", FERRY_DTYPE_F32, 2, {50, 40}, RIG_COLS, false},
    {"a.bias", FERRY_DTYPE_F32, 1, {12}, RIG_WHOLE, false},
};

static void o31_a_device_is_read_after_its_event(void **state)
{
    (void)state;
    for (size_t i = 0; i < N_WAYS; i++) {
        rig_options ro = {.backend = ways[i].backend,
                          .params = late_params,
                          .count = 3,
                          .tp_size = 2,
                          .local = true};
        late l = {.ops = {.size = sizeof(l.ops),
                          .kind = "late",
                          .metadata = late_metadata,
                          .begin = late_begin,
                          .next = late_next,
                          .end = late_end}};
        ferry_source source = {&l.ops, &l};
        ferry_client client;
        ferry_trainer *t = NULL;
        char info[512];
        rig *r = rig_open(&ro);

        l.s = rig_source_open(late_params, 3, RIG_DEVICE);
        l.inner = rig_source_of(l.s);
        client = rig_client(r);
        snprintf(info, sizeof(info), "{\"rank\":0%s%s%s}",
                 strcmp(ways[i].backend, "nccl") == 0
                     ? ",\"peers\":\"ferry\",\"world_size\":3"
                     : "",
                 ways[i].info[0] ? "," : "", ways[i].info);
        must(ferry_trainer_init_dict(ways[i].backend, info, &client, &source,
                                     &t),
             &ways[i]);
        for (l.seed = 1; l.seed < 4; l.seed++) {
            const char *why;

            must(ferry_trainer_send_weights(t, NULL), &ways[i]);
            why = rig_differs(r, l.seed);
            if (why)
                fail_msg("%s, seed %d: %s", ways[i].label, (int)l.seed, why);
        }
        ferry_trainer_shutdown(&t);
        rig_close(r);
        rig_source_close(l.s);
    }
    assert_int_equal(device_left(), 0);
}

/* ---- failures ---- */

static void a_copy_that_fails_names_its_parameter(void **state)
{
    (void)state;
    for (size_t i = 0; i < N_WAYS; i++) {
        setup u;

        open_setup(&u, &ways[i], RIG_DEVICE, N_PARAMS - 1);
        send_good(&u, 1, &ways[i]);
        rig_source_fill(u.s, 2);
        device_fail(rig_source_bytes(u.s, N_PARAMS - 2));
        if (ferry_trainer_send_weights(u.t, NULL) != FERRY_EIO ||
            !strstr(ferry_last_error(), "parameter c.weight") ||
            !strstr(ferry_last_error(), "in memory of device "))
            fail_msg("%s: %s", ways[i].label, ferry_last_error());
        device_fail(NULL);
        send_good(&u, 3, &ways[i]);
        close_setup(&u);
    }
}

static void *cancel_soon(void *arg)
{
    struct timespec t = {0, 100000000};

    nanosleep(&t, NULL);
    ferry_trainer_cancel(arg);
    return NULL;
}

static double seconds(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* A device that stops does not keep the trainer from ending. */
static void d5_a_cancel_ends_a_copy_under_way(void **state)
{
    (void)state;
    for (size_t i = 0; i < N_WAYS; i++) {
        pthread_t thread;
        double began;
        setup u;

        /* There the workers' buffers would stop as well. */
        if (strstr(ways[i].info, "\"nccl\""))
            continue;
        open_setup(&u, &ways[i], RIG_DEVICE, N_PARAMS - 1);
        send_good(&u, 1, &ways[i]);
        device_hold(1);
        assert_int_equal(
            ferry__thread_start(&thread, "cancel", cancel_soon, u.t), FERRY_OK);
        began = seconds();
        if (ferry_trainer_send_weights(u.t, NULL) != FERRY_ECANCELED)
            fail_msg("%s: %s", ways[i].label, ferry_last_error());
        assert_true(seconds() - began < 30);
        pthread_join(thread, NULL);
        device_hold(0);
        send_good(&u, 2, &ways[i]);
        ferry_trainer_shutdown(&u.t);
        rig_close(u.r);
        rig_source_close(u.s);
    }
}

static void path_shared_refuses_a_device_by_name(void **state)
{
    static const way shared = {"ipc shared", "ipc", "\"path\":\"shared\"",
                               false};
    setup u;

    (void)state;
    open_setup(&u, &shared, RIG_DEVICE, N_PARAMS - 1);
    assert_int_equal(ferry_trainer_send_weights(u.t, NULL), FERRY_ENOTSUP);
    assert_non_null(strstr(ferry_last_error(), "a.weight"));
    close_setup(&u);
}

static void other_readers_refuse_a_device_by_name(void **state)
{
    int64_t shape[1] = {4};
    const char *name = "model.w";
    ferry_source source = {0};
    ferry_tensor t, host;
    float bytes[4];
    ferry_item item;

    (void)state;
    assert_int_equal(
        ferry_tensor_init(&t, device_alloc(0, 16), FERRY_DTYPE_F32, 1, shape),
        FERRY_OK);
    t.device = 1;
    assert_int_equal(ferry_tensor_init(&host, bytes, FERRY_DTYPE_F32, 1, shape),
                     FERRY_OK);
    assert_int_equal(ferry_tensor_copy(&host, &t), FERRY_ENOTSUP);
    assert_int_equal(ferry_tensor_copy(&t, &host), FERRY_ENOTSUP);
    assert_int_equal(ferry_source_module(&name, &t, 1, &source), FERRY_OK);
    assert_int_equal(
        ferry_source_cast(&source, FERRY_DTYPE_BF16, NULL, &source), FERRY_OK);
    assert_int_equal(source.ops->begin(source.self), FERRY_OK);
    assert_int_equal(source.ops->next(source.self, &item), FERRY_ENOTSUP);
    assert_non_null(strstr(ferry_last_error(),
                           "parameter model.w is in the memory of device 0"));
    source.ops->end(source.self);
    ferry_source_close(&source);
    device_free(0, t.data);
}

/* An engine that says nothing of devices never sees a tensor of one. */
static void f4_an_engine_of_the_host_is_spared_devices(void **state)
{
    fleet_options o = {.backend = "memory",
                       .toy = {.kind = TOY_A, .tp_size = 1}};
    const char *names[64];
    ferry_tensor tensors[64];
    ferry_source source;
    size_t n;
    fleet f;

    (void)state;
    fleet_open(&f, &o);
    n = f.checkpoint->count;
    for (size_t i = 0; i < n; i++) {
        const ferry_param_meta *m = &f.checkpoint->metas[i];

        names[i] = m->name;
        assert_int_equal(ferry_tensor_init(&tensors[i], f.checkpoint->bytes[i],
                                           m->dtype, m->ndim, m->shape),
                         FERRY_OK);
    }
    tensors[2].data = device_alloc(1, ferry_tensor_bytes(&tensors[2]));
    tensors[2].device = 2;
    assert_int_equal(ferry_source_module(names, tensors, n, &source), FERRY_OK);
    assert_int_equal(fleet_connect(&f, &source), FERRY_OK);
    assert_int_equal(ferry_trainer_send_weights(f.trainer, NULL),
                     FERRY_ENOTSUP);
    assert_non_null(strstr(ferry_last_error(), names[2]));
    assert_non_null(strstr(ferry_last_error(), "in the memory of device 1"));
    device_free(1, tensors[2].data);
    fleet_close(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(g1_g2_tensors_of_devices_arrive_exact),
        cmocka_unit_test(o31_a_device_is_read_after_its_event),
        cmocka_unit_test(a_copy_that_fails_names_its_parameter),
        cmocka_unit_test(path_shared_refuses_a_device_by_name),
        cmocka_unit_test(other_readers_refuse_a_device_by_name),
        cmocka_unit_test(f4_an_engine_of_the_host_is_spared_devices),
        /* Last: it leaves memory. */
        cmocka_unit_test(d5_a_cancel_ends_a_copy_under_way),
    };

    device_use();
    ferry_log_set(keep_line, NULL);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
