/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of CUDA devices behind the table of memory.h, in each device's
 * primary context, which the program's own CUDA code shares.
 * Invariant: a call leaves the calling thread's current context as it was. */
#include "device/memory.h"

#include "base/alloc.h"
#include "device/cuda_driver.h"

#include <pthread.h>

/* The table's functions know their device by being made once for each. */
#define ORDINALS(X)                                                            \
    X(0)                                                                       \
    X(1)                                                                       \
    X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14) X(15)
#define N_ORDINALS FERRY__DEVICES_MOST

struct ferry__queue {
    int32_t ordinal;
    CUstream stream;
};
struct ferry__event {
    int32_t ordinal;
    CUevent event;
};

static const ferry__cuda *cuda; /* set before any table is handed out */
static CUcontext contexts[N_ORDINALS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static ferry_status enter(int32_t ordinal)
{
    CUresult r = cuda->cuCtxPushCurrent_v2(contexts[ordinal]);

    return r == CUDA_SUCCESS ? FERRY_OK
                             : ferry__cuda_fail(cuda, "cuCtxPushCurrent", r);
}

static void leave(void)
{
    CUcontext was;

    cuda->cuCtxPopCurrent_v2(&was);
}

static ferry_status done(const char *what, CUresult r)
{
    leave();
    return r == CUDA_SUCCESS ? FERRY_OK : ferry__cuda_fail(cuda, what, r);
}

/* ---- memory ---- */

static ferry_status alloc_on(int32_t ordinal, size_t size_bytes, void **out)
{
    CUdeviceptr memory = 0;

    FERRY_TRY(enter(ordinal));
    /* The driver refuses 0 bytes. */
    FERRY_TRY(done("cuMemAlloc",
                   cuda->cuMemAlloc_v2(&memory, size_bytes ? size_bytes : 1)));
    *out = (void *)(uintptr_t)memory;
    return FERRY_OK;
}

static void free_on(int32_t ordinal, void *memory)
{
    if (!memory || enter(ordinal) < 0)
        return;
    cuda->cuMemFree_v2((CUdeviceptr)(uintptr_t)memory);
    leave();
}

static ferry_status pinned_alloc_on(int32_t ordinal, size_t size_bytes,
                                    void **out)
{
    void *memory = NULL;

    FERRY_TRY(enter(ordinal));
    FERRY_TRY(
        done("cuMemAllocHost",
             cuda->cuMemAllocHost_v2(&memory, size_bytes ? size_bytes : 1)));
    *out = memory;
    return FERRY_OK;
}

static void pinned_free_on(int32_t ordinal, void *memory)
{
    if (!memory || enter(ordinal) < 0)
        return;
    cuda->cuMemFreeHost(memory);
    leave();
}

/* ---- queues ---- */

static ferry_status queue_on(int32_t ordinal, ferry__queue **out)
{
    ferry__queue *q = ferry__alloc(sizeof(*q));
    ferry_status status;

    if (!q)
        return FERRY_ENOMEM;
    q->ordinal = ordinal;
    status = enter(ordinal);
    if (status >= 0)
        status = done("cuStreamCreate",
                      cuda->cuStreamCreate(&q->stream, FERRY__CU_STREAM_ASYNC));
    if (status < 0) {
        ferry__free(q);
        return status;
    }
    *out = q;
    return FERRY_OK;
}

static void queue_destroy(ferry__queue *q)
{
    if (q && enter(q->ordinal) >= 0) {
        cuda->cuStreamDestroy_v2(q->stream);
        leave();
    }
    ferry__free(q);
}

static void *queue_handle(ferry__queue *q)
{
    return q->stream;
}

static ferry_status cuda_copy(ferry__queue *q, void *dst, const void *src,
                              size_t size_bytes)
{
    if (size_bytes == 0)
        return FERRY_OK;
    FERRY_TRY(enter(q->ordinal));
    return done("cuMemcpyAsync",
                cuda->cuMemcpyAsync((CUdeviceptr)(uintptr_t)dst,
                                    (CUdeviceptr)(uintptr_t)src, size_bytes,
                                    q->stream));
}

static ferry_status cuda_copy_rows(ferry__queue *q, const ferry__rows *rows)
{
    CUDA_MEMCPY2D copy = {
        .srcMemoryType = CU_MEMORYTYPE_DEVICE,
        .srcDevice = (CUdeviceptr)(uintptr_t)rows->src,
        .srcPitch = rows->src_pitch,
        .dstMemoryType =
            rows->dst_is_host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE,
        .dstPitch = rows->dst_pitch,
        .WidthInBytes = rows->width,
        .Height = rows->rows,
    };

    if (rows->dst_is_host)
        copy.dstHost = rows->dst;
    else
        copy.dstDevice = (CUdeviceptr)(uintptr_t)rows->dst;
    FERRY_TRY(enter(q->ordinal));
    return done("cuMemcpy2DAsync", cuda->cuMemcpy2DAsync_v2(&copy, q->stream));
}

/* ---- events ---- */

static ferry_status event_on(int32_t ordinal, ferry__event **out)
{
    ferry__event *e = ferry__alloc(sizeof(*e));
    ferry_status status;

    if (!e)
        return FERRY_ENOMEM;
    e->ordinal = ordinal;
    status = enter(ordinal);
    if (status >= 0)
        status = done("cuEventCreate",
                      cuda->cuEventCreate(&e->event, FERRY__CU_EVENT_NO_TIMES));
    if (status < 0) {
        ferry__free(e);
        return status;
    }
    *out = e;
    return FERRY_OK;
}

static void event_destroy(ferry__event *e)
{
    if (e && enter(e->ordinal) >= 0) {
        cuda->cuEventDestroy_v2(e->event);
        leave();
    }
    ferry__free(e);
}

static ferry_status event_record(ferry__event *e, ferry__queue *q)
{
    FERRY_TRY(enter(e->ordinal));
    return done("cuEventRecord", cuda->cuEventRecord(e->event, q->stream));
}

static ferry_status event_query(ferry__event *e)
{
    CUresult r;

    FERRY_TRY(enter(e->ordinal));
    r = cuda->cuEventQuery(e->event);
    if (r == CUDA_ERROR_NOT_READY) {
        leave();
        return FERRY_EBUSY;
    }
    return done("cuEventQuery", r);
}

/* ---- one table a device ---- */

#define FUNCTIONS(n)                                                           \
    static ferry_status alloc_##n(size_t size_bytes, void **out)               \
    {                                                                          \
        return alloc_on(n, size_bytes, out);                                   \
    }                                                                          \
    static void free_##n(void *memory)                                         \
    {                                                                          \
        free_on(n, memory);                                                    \
    }                                                                          \
    static ferry_status pinned_alloc_##n(size_t size_bytes, void **out)        \
    {                                                                          \
        return pinned_alloc_on(n, size_bytes, out);                            \
    }                                                                          \
    static void pinned_free_##n(void *memory)                                  \
    {                                                                          \
        pinned_free_on(n, memory);                                             \
    }                                                                          \
    static ferry_status queue_##n(ferry__queue **out)                          \
    {                                                                          \
        return queue_on(n, out);                                               \
    }                                                                          \
    static ferry_status event_##n(ferry__event **out)                          \
    {                                                                          \
        return event_on(n, out);                                               \
    }
ORDINALS(FUNCTIONS)

#define TABLE(n)                                                               \
    {                                                                          \
        .name = "cuda",                                                        \
        .device = 1 + (n),                                                     \
        .alloc = alloc_##n,                                                    \
        .free = free_##n,                                                      \
        .pinned_alloc = pinned_alloc_##n,                                      \
        .pinned_free = pinned_free_##n,                                        \
        .queue_create = queue_##n,                                             \
        .queue_destroy = queue_destroy,                                        \
        .queue_handle = queue_handle,                                          \
        .copy = cuda_copy,                                                     \
        .copy_rows = cuda_copy_rows,                                           \
        .event_create = event_##n,                                             \
        .event_destroy = event_destroy,                                        \
        .event_record = event_record,                                          \
        .event_query = event_query,                                            \
    },
static const ferry__memory tables[N_ORDINALS] = {ORDINALS(TABLE)};

static ferry_status retain(int32_t ordinal)
{
    CUdevice device;
    CUresult r = cuda->cuDeviceGet(&device, ordinal);

    if (r == CUDA_SUCCESS)
        r = cuda->cuDevicePrimaryCtxRetain(&contexts[ordinal], device);
    if (r != CUDA_SUCCESS) {
        ferry__cuda_fail(cuda, "cuDevicePrimaryCtxRetain", r);
        return FERRY_EBACKEND;
    }
    return FERRY_OK;
}

ferry_status ferry__memory_cuda(int32_t ordinal, const ferry__memory **out)
{
    ferry_status status = FERRY_OK;
    const ferry__cuda *bound;

    FERRY_TRY(ferry__cuda_bind(&bound));
    if (ordinal < 0 || ordinal >= bound->n_devices || ordinal >= N_ORDINALS)
        return ferry_fail(FERRY_EBACKEND,
                          "cuda device %d of %d (at most %d are used)", ordinal,
                          bound->n_devices, N_ORDINALS);
    pthread_mutex_lock(&lock);
    if (!cuda)
        cuda = bound;
    if (!contexts[ordinal])
        status = retain(ordinal);
    pthread_mutex_unlock(&lock);
    FERRY_TRY(status);
    *out = &tables[ordinal];
    return FERRY_OK;
}

ferry_status ferry__cuda_use(int32_t ordinal)
{
    const ferry__memory *table;

    FERRY_TRY(ferry__memory_cuda(ordinal, &table));
    return enter(ordinal);
}
