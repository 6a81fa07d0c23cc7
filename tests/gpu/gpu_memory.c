/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of a device: copies to and from the host with events, in order. */
#include "device/cuda_driver.h"
#include "device/memory.h"

#include "gpu_check.h"

#include <string.h>

static const ferry__memory *gpu;
static const ferry__cuda *cuda;

static unsigned char byte_of(size_t seed, size_t i)
{
    return (unsigned char)((i * 2654435761u + seed * 40503u) >> 11);
}

static void fill(unsigned char *bytes, size_t size, size_t seed)
{
    for (size_t i = 0; i < size; i++)
        bytes[i] = byte_of(seed, i);
}

/* Until the event is done; counts how often it was not. */
static int64_t await(ferry__event *e)
{
    ferry__deadline until = ferry__deadline_in(20000);
    int64_t early = 0;
    ferry_status status;

    while ((status = gpu->event_query(e)) == FERRY_EBUSY) {
        CHECK(!ferry__deadline_passed(&until));
        early++;
    }
    GOOD(status);
    return early;
}

static void copies_come_back_as_they_went(void)
{
    static const size_t sizes[] = {
        1, 3, 4096, 4097, (size_t)1 << 20, ((size_t)64 << 20) + 5};
    ferry__queue *q;
    ferry__event *e;

    GOOD(gpu->queue_create(&q));
    GOOD(gpu->event_create(&e));
    for (size_t s = 0; s < sizeof(sizes) / sizeof(sizes[0]); s++) {
        size_t n = sizes[s];
        unsigned char *give = malloc(n), *take = calloc(1, n);
        void *a, *b;

        CHECK(give && take);
        fill(give, n, s);
        GOOD(gpu->alloc(n, &a));
        GOOD(gpu->alloc(n, &b));
        CHECK(ferry__cuda_owns(cuda, a) && !ferry__cuda_owns(cuda, give));
        GOOD(gpu->copy(q, a, give, n));
        GOOD(gpu->copy(q, b, a, n));
        GOOD(gpu->copy(q, take, b, n));
        GOOD(gpu->event_record(e, q));
        await(e);
        CHECK(memcmp(give, take, n) == 0);
        gpu->free(a);
        gpu->free(b);
        free(give);
        free(take);
    }
    gpu->event_destroy(e);
    gpu->queue_destroy(q);
}

/* Each buffer is filled again only after the event of its last copy. */
static void two_buffers_take_turns(void)
{
    enum { ROUNDS = 40, BYTES = 4 << 20 };
    unsigned char *host[2] = {malloc(BYTES), malloc(BYTES)}, *take;
    void *device = NULL;
    ferry__event *events[2];
    ferry__queue *q;

    take = malloc((size_t)ROUNDS * BYTES);
    CHECK(host[0] && host[1] && take);
    GOOD(gpu->alloc((size_t)ROUNDS * BYTES, &device));
    GOOD(gpu->queue_create(&q));
    GOOD(gpu->event_create(&events[0]));
    GOOD(gpu->event_create(&events[1]));
    for (size_t r = 0; r < ROUNDS; r++) {
        if (r >= 2)
            await(events[r % 2]);
        fill(host[r % 2], BYTES, r);
        GOOD(gpu->copy(q, (char *)device + r * BYTES, host[r % 2], BYTES));
        GOOD(gpu->event_record(events[r % 2], q));
    }
    GOOD(gpu->copy(q, take, device, (size_t)ROUNDS * BYTES));
    GOOD(gpu->event_record(events[0], q));
    await(events[0]);
    for (size_t r = 0; r < ROUNDS; r++) {
        for (size_t i = 0; i < BYTES; i += 997)
            CHECK(take[r * BYTES + i] == byte_of(r, i));
    }
    gpu->event_destroy(events[0]);
    gpu->event_destroy(events[1]);
    gpu->queue_destroy(q);
    gpu->free(device);
    free(host[0]);
    free(host[1]);
    free(take);
}

static void too_much_is_refused_in_words(void)
{
    void *memory = NULL;

    CHECK(gpu->alloc((size_t)1 << 50, &memory) == FERRY_ENOMEM);
    CHECK(strstr(ferry_last_error(), "CUDA_ERROR_OUT_OF_MEMORY"));
    CHECK(memory == NULL);
    CHECK(ferry__memory_cuda(4096, &gpu) == FERRY_EBACKEND);
}

static void speed_of_copies(void)
{
    enum { TIMES = 5 };
    size_t n = (size_t)1 << 30;
    char *host = malloc(n);
    int64_t best[2] = {INT64_MAX, INT64_MAX};
    ferry__queue *q;
    ferry__event *e;
    void *device;

    CHECK(host);
    memset(host, 1, n);
    GOOD(gpu->alloc(n, &device));
    GOOD(gpu->queue_create(&q));
    GOOD(gpu->event_create(&e));
    for (int i = 0; i < 2 * TIMES; i++) {
        int64_t began = ferry__now_ns(), took;

        GOOD(i % 2 == 0 ? gpu->copy(q, device, host, n)
                        : gpu->copy(q, host, device, n));
        GOOD(gpu->event_record(e, q));
        await(e);
        took = ferry__now_ns() - began;
        best[i % 2] = took < best[i % 2] ? took : best[i % 2];
    }
    printf("    1 GiB of pageable memory: to the device %.1f GB/s, back %.1f "
           "GB/s\n",
           (double)n / (double)best[0], (double)n / (double)best[1]);
    gpu->event_destroy(e);
    gpu->queue_destroy(q);
    gpu->free(device);
    free(host);
}

int main(void)
{
    NEED(ferry__cuda_bind(&cuda));
    NEED(ferry__memory_cuda(0, &gpu));
    printf("CUDA driver %d, %d device(s)\n", cuda->version, cuda->n_devices);
    RUN(copies_come_back_as_they_went);
    RUN(two_buffers_take_turns);
    RUN(too_much_is_refused_in_words);
    RUN(speed_of_copies);
    return 0;
}
