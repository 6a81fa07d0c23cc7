/* SPDX-License-Identifier: Apache-2.0 */
/* The CUDA driver's names over host memory, for machines without a device:
 * what Ferry does around them can then run. Copies are done at once; an event
 * is ready after some queries, or never while it is held. Memory and contexts
 * are counted, so that a test can ask what was left. */
#include "device/cuda_driver.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define MOST 256

void cuda_host_hold(int hold);
int cuda_host_left(void);
int cuda_host_depth(void);

struct CUctx_st {
    int ordinal;
};
struct CUstream_st {
    int unused;
};
struct CUevent_st {
    int queries_left;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    uintptr_t at;
    size_t size;
} blocks[MOST];
static atomic_int held, left;
static struct CUctx_st contexts[2] = {{0}, {1}};
static _Thread_local CUcontext stack[16];
static _Thread_local int depth;

void cuda_host_hold(int hold)
{
    atomic_store(&held, hold);
}

/* Blocks, streams and events that live. */
int cuda_host_left(void)
{
    return atomic_load(&left);
}

/* Contexts that this thread has pushed and not popped. */
int cuda_host_depth(void)
{
    return depth;
}

CUresult cuInit(unsigned int flags)
{
    return flags == 0 ? CUDA_SUCCESS : CUDA_ERROR_UNKNOWN;
}

CUresult cuDriverGetVersion(int *version)
{
    *version = 13000;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count)
{
    const char *text = getenv("CUDA_HOST_DEVICES");

    *count = text ? atoi(text) : 2;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    *device = ordinal;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *ctx, CUdevice device)
{
    *ctx = &contexts[device];
    return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device)
{
    if (depth == 0)
        return CUDA_ERROR_UNKNOWN;
    *device = stack[depth - 1]->ordinal;
    return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent_v2(CUcontext ctx)
{
    if (depth == 16)
        return CUDA_ERROR_UNKNOWN;
    stack[depth++] = ctx;
    return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent_v2(CUcontext *ctx)
{
    if (depth == 0)
        return CUDA_ERROR_UNKNOWN;
    *ctx = stack[--depth];
    return CUDA_SUCCESS;
}

CUresult cuMemAlloc_v2(CUdeviceptr *memory, size_t size_bytes)
{
    void *block = size_bytes < (size_t)1 << 40 ? malloc(size_bytes) : NULL;

    if (depth == 0)
        return CUDA_ERROR_UNKNOWN;
    if (!block)
        return CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MOST; i++) {
        if (blocks[i].size == 0) {
            blocks[i].at = (uintptr_t)block;
            blocks[i].size = size_bytes;
            break;
        }
    }
    pthread_mutex_unlock(&lock);
    atomic_fetch_add(&left, 1);
    *memory = (CUdeviceptr)(uintptr_t)block;
    return CUDA_SUCCESS;
}

CUresult cuMemFree_v2(CUdeviceptr memory)
{
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MOST; i++) {
        if (blocks[i].at == memory)
            blocks[i].at = blocks[i].size = 0;
    }
    pthread_mutex_unlock(&lock);
    free((void *)(uintptr_t)memory);
    atomic_fetch_sub(&left, 1);
    return CUDA_SUCCESS;
}

CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t size_bytes,
                       CUstream stream)
{
    if (depth == 0 || !stream)
        return CUDA_ERROR_UNKNOWN;
    memcpy((void *)(uintptr_t)dst, (const void *)(uintptr_t)src, size_bytes);
    return CUDA_SUCCESS;
}

CUresult cuStreamCreate(CUstream *stream, unsigned int flags)
{
    (void)flags;
    *stream = calloc(1, sizeof(**stream));
    atomic_fetch_add(&left, 1);
    return *stream ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuStreamDestroy_v2(CUstream stream)
{
    free(stream);
    atomic_fetch_sub(&left, 1);
    return CUDA_SUCCESS;
}

CUresult cuEventCreate(CUevent *event, unsigned int flags)
{
    (void)flags;
    *event = calloc(1, sizeof(**event));
    atomic_fetch_add(&left, 1);
    return *event ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuEventDestroy_v2(CUevent event)
{
    free(event);
    atomic_fetch_sub(&left, 1);
    return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent event, CUstream stream)
{
    if (depth == 0 || !stream)
        return CUDA_ERROR_UNKNOWN;
    event->queries_left = 3;
    return CUDA_SUCCESS;
}

CUresult cuEventQuery(CUevent event)
{
    if (atomic_load(&held) || event->queries_left-- > 0)
        return CUDA_ERROR_NOT_READY;
    return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute,
                               CUdeviceptr memory)
{
    unsigned int type = 0;

    if (attribute != CU_POINTER_ATTRIBUTE_MEMORY_TYPE)
        return CUDA_ERROR_UNKNOWN;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MOST; i++) {
        if (blocks[i].size > 0 && memory >= blocks[i].at &&
            memory < blocks[i].at + blocks[i].size)
            type = FERRY__CU_MEMORY_DEVICE;
    }
    pthread_mutex_unlock(&lock);
    /* As the driver: it knows nothing of plain host memory. */
    if (type == 0)
        return CUDA_ERROR_UNKNOWN;
    memcpy(data, &type, sizeof(type));
    return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char **text)
{
    *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY"
                                              : "CUDA_ERROR_UNKNOWN";
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text)
{
    *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "unknown";
    return CUDA_SUCCESS;
}
