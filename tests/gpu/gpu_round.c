/* SPDX-License-Identifier: Apache-2.0 */
/* Rounds of a trainer whose tensors lie in memory of a device, to workers of
 * host memory in this process, over the rig of the tests. */
#include "device/memory.h"
#include "harness/device.h"
#include "harness/ipc_rig.h"

#include "gpu_check.h"

#include <string.h>

/* ---- the harness's devices, on real ones ---- */

static const ferry__memory *gpus[2];
static int32_t n_gpus;

int32_t device_count(void)
{
    return n_gpus;
}

void *device_alloc(int32_t ordinal, size_t size_bytes)
{
    void *memory = NULL;

    GOOD(gpus[ordinal]->alloc(size_bytes, &memory));
    return memory;
}

void device_free(int32_t ordinal, void *memory)
{
    gpus[ordinal]->free(memory);
}

void device_write(int32_t ordinal, void *memory, const void *bytes,
                  size_t size_bytes)
{
    const ferry__memory *m = gpus[ordinal];
    ferry_status status = FERRY_EBUSY;
    ferry__queue *q;
    ferry__event *e;

    GOOD(m->queue_create(&q));
    GOOD(m->event_create(&e));
    GOOD(m->copy(q, memory, bytes, size_bytes));
    GOOD(m->event_record(e, q));
    while (status == FERRY_EBUSY)
        status = m->event_query(e);
    GOOD(status);
    m->event_destroy(e);
    m->queue_destroy(q);
}

/* ---- rounds ---- */

static const rig_param params[] = {
    {"a.weight", FERRY_DTYPE_BF16, 2, {600, 800}, RIG_ROWS, false},
    {"a.bias", FERRY_DTYPE_F32, 1, {12}, RIG_WHOLE, false},
    {"scale", FERRY_DTYPE_F32, 0, {0}, RIG_WHOLE, false},
    {"b.weight", FERRY_DTYPE_F32, 2, {500, 400}, RIG_COLS, false},
    {"none", FERRY_DTYPE_BF16, 2, {3, 0}, RIG_WHOLE, false},
    {"large.weight", FERRY_DTYPE_BF16, 2, {12000, 2000}, RIG_ROWS, false},
};
#define N_PARAMS (sizeof(params) / sizeof(params[0]))

static void rounds(const char *backend, const char *info, unsigned flags)
{
    rig_options ro = {.backend = backend,
                      .params = params,
                      .count = N_PARAMS,
                      .tp_size = 2,
                      .local = true};
    rig_source *s = rig_source_open(params, N_PARAMS, RIG_DEVICE | flags);
    rig *r = rig_open(&ro);
    ferry_client client = rig_client(r);
    ferry_source source = rig_source_of(s);
    ferry_trainer *t = NULL;
    int64_t best = INT64_MAX;

    GOOD(ferry_trainer_init_dict(backend, info, &client, &source, &t));
    for (uint64_t seed = 1; seed < 5; seed++) {
        int64_t began;
        const char *why;

        rig_source_fill(s, seed);
        began = ferry__now_ns();
        GOOD(ferry_trainer_send_weights(t, NULL));
        began = ferry__now_ns() - began;
        best = began < best ? began : best;
        why = rig_differs(r, seed);
        if (why) {
            printf("FAILED: %s %s: %s\n", backend, info, why);
            exit(1);
        }
    }
    printf("    %s %s%s%s: best of 4 rounds %.1f ms\n", backend, info,
           flags & RIG_STRIDED ? ", transposed" : "",
           flags & RIG_STREAM ? ", one after another" : "", (double)best / 1e6);
    ferry_trainer_shutdown(&t);
    rig_close(r);
    rig_source_close(s);
}

static void g2_rounds_by_ipc_are_exact(void)
{
    static const char *const infos[] = {
        "{\"rank\":0}",
        "{\"rank\":0,\"path\":\"ring\",\"digest\":false}",
        "{\"rank\":0,\"packed\":true,\"packed_buffer_size_bytes\":1000000}",
    };

    for (size_t i = 0; i < sizeof(infos) / sizeof(infos[0]); i++) {
        rounds("ipc", infos[i], 0);
        rounds("ipc", infos[i], RIG_STRIDED);
        rounds("ipc", infos[i], RIG_STREAM);
    }
}

static void g1_rounds_by_nccl_over_tcp_are_exact(void)
{
    static const char *const infos[] = {
        "{\"rank\":0,\"peers\":\"ferry\",\"world_size\":3,"
        "\"provider\":\"tcp\"}",
        "{\"rank\":0,\"peers\":\"ferry\",\"world_size\":3,"
        "\"provider\":\"tcp\",\"packed_buffer_size_bytes\":100000}",
    };

    for (size_t i = 0; i < sizeof(infos) / sizeof(infos[0]); i++) {
        rounds("nccl", infos[i], 0);
        rounds("nccl", infos[i], RIG_STRIDED);
        rounds("nccl", infos[i], RIG_STREAM);
    }
}

int main(void)
{
    NEED(ferry__memory_cuda(0, &gpus[0]));
    n_gpus = ferry__memory_cuda(1, &gpus[1]) < 0 ? 1 : 2;
    printf("tensors on %d device(s)\n", n_gpus);
    RUN(g2_rounds_by_ipc_are_exact);
    RUN(g1_rounds_by_nccl_over_tcp_are_exact);
    return 0;
}
