/* SPDX-License-Identifier: Apache-2.0 */
/* Tensors in memory of a device, read to the host and beside themselves, and
 * read after the event of what writes them. */
#include "device/cuda_driver.h"
#include "device/fetch.h"
#include "harness/layouts.h"

#include "core/copy.h"
#include "gpu_check.h"

#include <string.h>

static const ferry__memory *gpu;
static ferry__queue *queue;
static ferry__event *event;

static void await(void)
{
    ferry__deadline until = ferry__deadline_in(60000);
    ferry_status status;

    while ((status = gpu->event_query(event)) == FERRY_EBUSY)
        CHECK(!ferry__deadline_passed(&until));
    GOOD(status);
}

static void copy(void *dst, const void *src, size_t size)
{
    GOOD(gpu->copy(queue, dst, src, size));
    GOOD(gpu->event_record(event, queue));
    await();
}

static ferry_tensor put(const layout *l)
{
    size_t size = (size_t)l->elements * ferry_dtype_bytes(l->dtype);
    ferry_tensor t = {.dtype = l->dtype,
                      .ndim = l->ndim,
                      .offset = l->offset,
                      .device = gpu->device};
    unsigned char *bytes = malloc(size);

    CHECK(bytes);
    for (size_t i = 0; i < size; i++)
        bytes[i] = byte_of((int64_t)i);
    GOOD(gpu->alloc(size, &t.data));
    copy(t.data, bytes, size);
    for (int32_t d = 0; d < l->ndim; d++) {
        t.shape[d] = l->shape[d];
        t.stride[d] = l->stride[d];
    }
    free(bytes);
    return t;
}

static void check(const layout *l, int64_t first, int64_t count,
                  const unsigned char *got)
{
    int64_t elem = (int64_t)ferry_dtype_bytes(l->dtype);

    for (int64_t i = 0; i < count * elem; i++) {
        if (got[i] != expected(l, first + i / elem, i % elem)) {
            printf("FAILED: %s: byte %d of element %d of %d on\n", l->label,
                   (int)(i % elem), (int)(i / elem), (int)first);
            exit(1);
        }
    }
}

static void pack(void *arg, const ferry_tensor *view, int64_t first,
                 int64_t count, void *out)
{
    (void)arg;
    ferry__copy_range(view, first, count, out);
}

static void read_by(ferry__fetcher *f, const layout *l, int64_t step,
                    bool beside)
{
    size_t elem = ferry_dtype_bytes(l->dtype);
    ferry_tensor t = put(l);
    int64_t numel = ferry_tensor_numel(&t);
    size_t size = (size_t)(step < numel ? step : numel) * elem;
    unsigned char *out = malloc(size);
    void *room;

    CHECK(out);
    GOOD(gpu->alloc(size, &room));
    GOOD(ferry__fetch_begin(f, l->label, &t));
    for (int64_t at = 0; at < numel; at += step) {
        int64_t count = numel - at < step ? numel - at : step;

        memset(out, 0xee, size);
        if (beside) {
            GOOD(ferry__fetch_copy(f, at, count, room));
            copy(out, room, (size_t)count * elem);
        } else {
            GOOD(ferry__fetch_pack(f, at, count, out, pack, NULL));
        }
        check(l, at, count, out);
    }
    ferry__fetch_rest(f);
    gpu->free(room);
    gpu->free(t.data);
    free(out);
}

static void every_layout_comes_in_its_own_order(void)
{
    ferry__fetcher f = {0};

    for (size_t i = 0; i < N_LAYOUTS; i++) {
        read_by(&f, &layouts[i], 1 << 30, false);
        read_by(&f, &layouts[i], 96, false);
        read_by(&f, &layouts[i], 1 << 30, true);
        read_by(&f, &layouts[i], 96, true);
    }
    ferry__fetch_close(&f);
}

static void large_tensors_come_by_windows(void)
{
    ferry__fetcher f = {0};

    read_by(&f, &large_layouts[0], 777 * 32, false);
    read_by(&f, &large_layouts[0], 1 << 30, true);
    read_by(&f, &large_layouts[1], 100000, false);
    read_by(&f, &large_layouts[2], 5000000, false);
    read_by(&f, &large_layouts[2], 5000000, true);
    ferry__fetch_close(&f);
}

/* A long row of copies, and behind it the one that writes the tensor. */
static void o31_bytes_are_read_after_their_event(void)
{
    enum { ROUNDS = 100, BYTES = 1 << 20, BUSY = 1 << 28 };
    unsigned char *bytes = malloc(BYTES), *out = malloc(BYTES);
    int64_t shape[1] = {BYTES};
    ferry__fetcher f = {0};
    ferry_tensor t;
    void *memory, *from, *heap;
    int busy = 0;

    CHECK(bytes && out);
    GOOD(gpu->alloc(BYTES, &memory));
    GOOD(gpu->alloc(BYTES, &from));
    GOOD(gpu->alloc(2 * (size_t)BUSY, &heap));
    GOOD(ferry_tensor_init(&t, memory, FERRY_DTYPE_U8, 1, shape));
    t.device = gpu->device;
    for (int r = 0; r < ROUNDS; r++) {
        memset(bytes, r, BYTES);
        copy(from, bytes, BYTES);
        for (int i = 0; i < 8; i++)
            GOOD(gpu->copy(queue, heap, (char *)heap + BUSY, BUSY));
        GOOD(gpu->copy(queue, memory, from, BYTES));
        GOOD(gpu->event_record(event, queue));
        busy += gpu->event_query(event) == FERRY_EBUSY;
        await();
        GOOD(ferry__fetch_begin(&f, "w", &t));
        GOOD(ferry__fetch_pack(&f, 0, BYTES, out, pack, NULL));
        CHECK(memcmp(out, bytes, BYTES) == 0);
    }
    printf("    the device was at work still in %d of %d rounds\n", busy,
           ROUNDS);
    CHECK(busy > ROUNDS / 2);
    ferry__fetch_close(&f);
    gpu->free(heap);
    gpu->free(from);
    gpu->free(memory);
    free(bytes);
    free(out);
}

static void a_device_that_is_not_there_is_named(void)
{
    int64_t shape[1] = {4};
    ferry__fetcher f = {0};
    ferry_tensor t;

    GOOD(ferry_tensor_init(&t, (void *)16, FERRY_DTYPE_F32, 1, shape));
    t.device = 1000;
    CHECK(ferry__fetch_begin(&f, "model.w", &t) == FERRY_EBACKEND);
    CHECK(strstr(ferry_last_error(), "parameter model.w in memory of device"));
    ferry__fetch_close(&f);
}

/* Packing 1 GiB in steps of 1 MiB, as the trainers do. */
static double speed(const layout *l, bool beside)
{
    size_t elem = ferry_dtype_bytes(l->dtype), step = ((size_t)1 << 20) / elem;
    ferry__fetcher f = {0};
    int64_t best = INT64_MAX;
    ferry_tensor t = {.dtype = l->dtype,
                      .ndim = l->ndim,
                      .device = gpu->device,
                      .shape = {l->shape[0], l->shape[1]},
                      .stride = {l->stride[0], l->stride[1]}};
    size_t numel = (size_t)ferry_tensor_numel(&t);
    char *out = malloc((size_t)1 << 20);
    void *room;

    CHECK(out);
    step = beside ? step * 64 : step;
    GOOD(gpu->alloc((size_t)l->elements * elem, &t.data));
    GOOD(gpu->alloc((size_t)64 << 20, &room));
    for (int i = 0; i < 3; i++) {
        int64_t began = ferry__now_ns(), took;

        GOOD(ferry__fetch_begin(&f, l->label, &t));
        for (size_t at = 0; at < numel; at += step) {
            size_t n = numel - at < step ? numel - at : step;

            if (beside)
                GOOD(ferry__fetch_copy(&f, (int64_t)at, (int64_t)n, room));
            else
                GOOD(ferry__fetch_pack(&f, (int64_t)at, (int64_t)n, out, pack,
                                       NULL));
        }
        took = ferry__now_ns() - began;
        best = took < best ? took : best;
    }
    ferry__fetch_close(&f);
    gpu->free(room);
    gpu->free(t.data);
    free(out);
    return (double)(numel * elem) / (double)best;
}

static void speed_of_packing(void)
{
    static const layout gib[] = {
        {"contiguous", BF16, 2, {16384, 32768}, {32768, 1}, 0, 16384 * 32768},
        {"transposed", BF16, 2, {16384, 32768}, {1, 16384}, 0, 16384 * 32768},
        {"rows apart",
         BF16,
         2,
         {16384, 32768},
         {40000, 1},
         0,
         (int64_t)16384 * 40000},
    };

    for (size_t i = 0; i < 3; i++) {
        printf("    1 GiB of bfloat16, %s: to the host %.1f GB/s", gib[i].label,
               speed(&gib[i], false));
        if (i != 1)
            printf(", beside itself %.1f GB/s", speed(&gib[i], true));
        printf("\n");
    }
}

int main(void)
{
    NEED(ferry__memory_cuda(0, &gpu));
    GOOD(gpu->queue_create(&queue));
    GOOD(gpu->event_create(&event));
    RUN(every_layout_comes_in_its_own_order);
    RUN(large_tensors_come_by_windows);
    RUN(o31_bytes_are_read_after_their_event);
    RUN(a_device_that_is_not_there_is_named);
    RUN(speed_of_packing);
    gpu->event_destroy(event);
    gpu->queue_destroy(queue);
    return 0;
}
