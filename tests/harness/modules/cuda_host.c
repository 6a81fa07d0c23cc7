/* SPDX-License-Identifier: Apache-2.0 */
/* The CUDA driver's names over host memory, for machines without a device:
 * what Ferry does around them can then run. Memory of a device is mapped
 * without access, so that whoever reads it as the host's dies of it; the
 * driver's own calls reach its bytes by another mapping. Copies are checked
 * against the blocks at once and carried out only when an event after them is
 * found done; an event is done after some queries, or never while it is held.
 * Memory, queues and contexts are counted, so that a test can ask what was
 * left. */
#include "harness/modules/cuda_host.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MOST          4096
#define INVALID_VALUE ((CUresult)1)

typedef struct copy {
    char *dst;
    const char *src;
    size_t dst_pitch, src_pitch, width, rows;
} copy;

struct CUctx_st {
    int ordinal;
};
struct CUstream_st {
    int ordinal;
    copy *copies; /* not carried out */
    size_t n, capacity;
    uint64_t done; /* that were */
    struct CUstream_st *next;
};
struct CUevent_st {
    int queries_left;
    struct CUstream_st *stream;
    uint64_t after; /* copies of the stream */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    char *at, *bytes;
    size_t size;
    int ordinal;
} blocks[MOST];
static struct CUstream_st *streams;
static const void *failing;
static atomic_int held, left;
static atomic_long n_copies;
static struct CUctx_st contexts[2] = {{0}, {1}};
static _Thread_local CUcontext stack[16];
static _Thread_local int depth;

/* ---- for tests ---- */

void cuda_host_hold(int hold)
{
    atomic_store(&held, hold);
}

int cuda_host_left(void)
{
    return atomic_load(&left);
}

int cuda_host_depth(void)
{
    return depth;
}

void cuda_host_fail(const void *memory)
{
    pthread_mutex_lock(&lock);
    failing = memory;
    pthread_mutex_unlock(&lock);
}

long cuda_host_copies(void)
{
    return atomic_load(&n_copies);
}

/* Under the lock: the block that an address is of. */
static int block_of(const void *memory)
{
    for (int i = 0; i < MOST; i++) {
        if (blocks[i].size > 0 && (const char *)memory >= blocks[i].at &&
            (const char *)memory < blocks[i].at + blocks[i].size)
            return i;
    }
    return -1;
}

void *cuda_host_reach(const void *memory)
{
    void *bytes = (void *)(uintptr_t)memory;
    int i;

    pthread_mutex_lock(&lock);
    i = block_of(memory);
    if (i >= 0)
        bytes = blocks[i].bytes + ((const char *)memory - blocks[i].at);
    pthread_mutex_unlock(&lock);
    return bytes;
}

/* ---- copies ---- */

/* Under the lock. */
static void carry_out(CUstream stream, uint64_t until)
{
    size_t n = 0;

    for (; stream->done < until && n < stream->n; n++, stream->done++) {
        const copy *c = &stream->copies[n];

        for (size_t r = 0; r < c->rows; r++)
            memcpy(c->dst + r * c->dst_pitch, c->src + r * c->src_pitch,
                   c->width);
    }
    stream->n -= n;
    if (n > 0)
        memmove(stream->copies, stream->copies + n,
                stream->n * sizeof(*stream->copies));
}

void cuda_host_flush(CUstream stream)
{
    pthread_mutex_lock(&lock);
    for (CUstream s = streams; s; s = s->next) {
        if (!stream || s == stream)
            carry_out(s, UINT64_MAX);
    }
    pthread_mutex_unlock(&lock);
}

/* Under the lock: where the bytes of an address are, if it is of the kind
 * that it is said to be and the extent lies in one block of the device. */
static char *bytes_at(const void *memory, size_t size, int ordinal,
                      bool is_device)
{
    int i = block_of(memory);

    if ((i >= 0) != is_device)
        return NULL;
    if (i < 0)
        return (char *)(uintptr_t)memory;
    if (blocks[i].ordinal != ordinal ||
        size > blocks[i].size - (size_t)((const char *)memory - blocks[i].at))
        return NULL;
    return blocks[i].bytes + ((const char *)memory - blocks[i].at);
}

/* Under the lock. */
static CUresult keep(CUstream stream, copy c, bool dst_is_device,
                     bool src_is_device)
{
    size_t last = c.rows - 1;

    atomic_fetch_add(&n_copies, 1);
    if (failing && src_is_device && block_of(c.src) == block_of(failing))
        return CUDA_ERROR_UNKNOWN;
    c.dst = bytes_at(c.dst, last * c.dst_pitch + c.width, stream->ordinal,
                     dst_is_device);
    c.src = bytes_at(c.src, last * c.src_pitch + c.width, stream->ordinal,
                     src_is_device);
    if (!c.dst || !c.src)
        return INVALID_VALUE;
    if (stream->n == stream->capacity) {
        size_t more = stream->capacity ? 2 * stream->capacity : 16;
        copy *copies = realloc(stream->copies, more * sizeof(*copies));

        if (!copies)
            return CUDA_ERROR_OUT_OF_MEMORY;
        stream->copies = copies;
        stream->capacity = more;
    }
    stream->copies[stream->n++] = c;
    return CUDA_SUCCESS;
}

static bool may_copy(CUstream stream)
{
    return depth > 0 && stream && stack[depth - 1]->ordinal == stream->ordinal;
}

CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t size_bytes,
                       CUstream stream)
{
    copy c = {(char *)(uintptr_t)dst,
              (const char *)(uintptr_t)src,
              size_bytes,
              size_bytes,
              size_bytes,
              1};
    CUresult result;

    if (!may_copy(stream))
        return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    result = keep(stream, c, block_of(c.dst) >= 0, block_of(c.src) >= 0);
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *copy_, CUstream stream)
{
    bool to_device = copy_->dstMemoryType == CU_MEMORYTYPE_DEVICE;
    bool from_device = copy_->srcMemoryType == CU_MEMORYTYPE_DEVICE;
    copy c = {to_device ? (char *)(uintptr_t)copy_->dstDevice : copy_->dstHost,
              from_device ? (const char *)(uintptr_t)copy_->srcDevice
                          : copy_->srcHost,
              copy_->dstPitch,
              copy_->srcPitch,
              copy_->WidthInBytes,
              copy_->Height};
    CUresult result;

    if (!may_copy(stream) || c.rows == 0 || c.width == 0 ||
        c.src_pitch < c.width || c.dst_pitch < c.width ||
        c.src_pitch > INT32_MAX || c.dst_pitch > INT32_MAX ||
        copy_->srcXInBytes || copy_->srcY || copy_->dstXInBytes || copy_->dstY)
        return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    result = keep(stream, c, to_device, from_device);
    pthread_mutex_unlock(&lock);
    return result;
}

/* ---- devices and contexts ---- */

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

/* ---- memory ---- */

/* Twice the same pages: once without access, once for the driver. */
static bool map_block(size_t size, char **out_at, char **out_bytes)
{
    int fd = memfd_create("device", MFD_CLOEXEC);
    void *at = MAP_FAILED, *bytes = MAP_FAILED;

    if (fd >= 0 && ftruncate(fd, (off_t)size) == 0) {
        at = mmap(NULL, size, PROT_NONE, MAP_SHARED, fd, 0);
        bytes = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    }
    if (fd >= 0)
        close(fd);
    if (at == MAP_FAILED || bytes == MAP_FAILED)
        return false;
    *out_at = at;
    *out_bytes = bytes;
    return true;
}

CUresult cuMemAlloc_v2(CUdeviceptr *memory, size_t size_bytes)
{
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;

    if (depth == 0 || size_bytes == 0)
        return INVALID_VALUE;
    if (size_bytes >= (size_t)1 << 40)
        return result;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MOST; i++) {
        if (blocks[i].size > 0)
            continue;
        if (map_block(size_bytes, &blocks[i].at, &blocks[i].bytes)) {
            blocks[i].size = size_bytes;
            blocks[i].ordinal = stack[depth - 1]->ordinal;
            *memory = (CUdeviceptr)(uintptr_t)blocks[i].at;
            atomic_fetch_add(&left, 1);
            result = CUDA_SUCCESS;
        }
        break;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

/* As the driver's, after all that is under way. */
CUresult cuMemFree_v2(CUdeviceptr memory)
{
    int i;

    cuda_host_flush(NULL);
    pthread_mutex_lock(&lock);
    i = block_of((void *)(uintptr_t)memory);
    if (i >= 0 && blocks[i].at == (char *)(uintptr_t)memory) {
        munmap(blocks[i].at, blocks[i].size);
        munmap(blocks[i].bytes, blocks[i].size);
        blocks[i].size = 0;
        atomic_fetch_sub(&left, 1);
    } else {
        i = -1;
    }
    pthread_mutex_unlock(&lock);
    return i >= 0 ? CUDA_SUCCESS : INVALID_VALUE;
}

CUresult cuMemAllocHost_v2(void **memory, size_t size_bytes)
{
    if (depth == 0)
        return CUDA_ERROR_UNKNOWN;
    *memory = malloc(size_bytes);
    if (!*memory)
        return CUDA_ERROR_OUT_OF_MEMORY;
    atomic_fetch_add(&left, 1);
    return CUDA_SUCCESS;
}

CUresult cuMemFreeHost(void *memory)
{
    cuda_host_flush(NULL);
    free(memory);
    atomic_fetch_sub(&left, 1);
    return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute,
                               CUdeviceptr memory)
{
    unsigned int type = FERRY__CU_MEMORY_DEVICE;
    int i;

    if (attribute != CU_POINTER_ATTRIBUTE_MEMORY_TYPE)
        return CUDA_ERROR_UNKNOWN;
    pthread_mutex_lock(&lock);
    i = block_of((void *)(uintptr_t)memory);
    pthread_mutex_unlock(&lock);
    /* As the driver: it knows nothing of plain host memory. */
    if (i < 0)
        return CUDA_ERROR_UNKNOWN;
    memcpy(data, &type, sizeof(type));
    return CUDA_SUCCESS;
}

/* ---- queues and events ---- */

CUresult cuStreamCreate(CUstream *stream, unsigned int flags)
{
    CUstream s = calloc(1, sizeof(*s));

    (void)flags;
    if (!s || depth == 0) {
        free(s);
        return CUDA_ERROR_UNKNOWN;
    }
    s->ordinal = stack[depth - 1]->ordinal;
    pthread_mutex_lock(&lock);
    s->next = streams;
    streams = s;
    pthread_mutex_unlock(&lock);
    atomic_fetch_add(&left, 1);
    *stream = s;
    return CUDA_SUCCESS;
}

CUresult cuStreamDestroy_v2(CUstream stream)
{
    pthread_mutex_lock(&lock);
    for (CUstream *at = &streams; *at; at = &(*at)->next) {
        if (*at == stream) {
            *at = stream->next;
            break;
        }
    }
    carry_out(stream, UINT64_MAX);
    pthread_mutex_unlock(&lock);
    free(stream->copies);
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
    pthread_mutex_lock(&lock);
    event->queries_left = 3;
    event->stream = stream;
    event->after = stream->done + stream->n;
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

CUresult cuEventQuery(CUevent event)
{
    if (atomic_load(&held) || event->queries_left-- > 0)
        return CUDA_ERROR_NOT_READY;
    pthread_mutex_lock(&lock);
    /* A stream that is gone has done all. */
    for (CUstream s = streams; s; s = s->next) {
        if (s == event->stream)
            carry_out(s, event->after);
    }
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

/* ---- errors ---- */

CUresult cuGetErrorName(CUresult error, const char **text)
{
    *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY"
            : error == INVALID_VALUE          ? "CUDA_ERROR_INVALID_VALUE"
                                              : "CUDA_ERROR_UNKNOWN";
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text)
{
    *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory"
            : error == INVALID_VALUE          ? "invalid argument"
                                              : "unknown";
    return CUDA_SUCCESS;
}
