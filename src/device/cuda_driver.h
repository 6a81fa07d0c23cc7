/* SPDX-License-Identifier: Apache-2.0 */
/* As much of the CUDA driver's interface as Ferry calls, in declarations of
 * our own, bound on first need from one list; nothing here needs CUDA to be
 * built. A test compiles the declarations against the driver's header.
 * Invariant: a driver is bound whole or not at all, once, and never let go. */
#ifndef FERRY_DEVICE_CUDA_DRIVER_H
#define FERRY_DEVICE_CUDA_DRIVER_H

#include <ferry/status.h>
#include <stdbool.h>
#include <stddef.h>

/* Defined where the driver's header was read before this one. */
#ifndef FERRY__CUDA_TYPES_GIVEN
typedef enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NO_DEVICE = 100,
    CUDA_ERROR_NOT_READY = 600,
    CUDA_ERROR_UNKNOWN = 999
} CUresult;
typedef enum {
    CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2,
    CU_POINTER_ATTRIBUTE_LAST = 0x7fffffff
} CUpointer_attribute;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef struct CUarray_st *CUarray;
typedef enum { CU_MEMORYTYPE_HOST = 1, CU_MEMORYTYPE_DEVICE = 2 } CUmemorytype;
typedef struct {
    size_t srcXInBytes, srcY;
    CUmemorytype srcMemoryType;
    const void *srcHost;
    CUdeviceptr srcDevice;
    CUarray srcArray;
    size_t srcPitch;
    size_t dstXInBytes, dstY;
    CUmemorytype dstMemoryType;
    void *dstHost;
    CUdeviceptr dstDevice;
    CUarray dstArray;
    size_t dstPitch;
    size_t WidthInBytes, Height;
} CUDA_MEMCPY2D;
#endif
/* Holds for ours and for the driver's own. */
_Static_assert(offsetof(CUDA_MEMCPY2D, srcDevice) == 4 * sizeof(size_t) &&
                   offsetof(CUDA_MEMCPY2D, dstDevice) == 11 * sizeof(size_t) &&
                   sizeof(CUDA_MEMCPY2D) == 16 * sizeof(size_t),
               "the driver reads the struct by place");
/* Value of CU_POINTER_ATTRIBUTE_MEMORY_TYPE for memory of a device, and
 * flags of streams and events. */
#define FERRY__CU_MEMORY_DEVICE  2
#define FERRY__CU_STREAM_ASYNC   1
#define FERRY__CU_EVENT_NO_TIMES 2

/* X(name, arguments) */
#define FERRY__CUDA_SYMBOLS(X)                                                 \
    X(cuInit, (unsigned int flags))                                            \
    X(cuDriverGetVersion, (int *version))                                      \
    X(cuDeviceGetCount, (int *count))                                          \
    X(cuDeviceGet, (CUdevice * device, int ordinal))                           \
    X(cuDevicePrimaryCtxRetain, (CUcontext * ctx, CUdevice device))            \
    X(cuCtxGetDevice, (CUdevice * device))                                     \
    X(cuCtxPushCurrent_v2, (CUcontext ctx))                                    \
    X(cuCtxPopCurrent_v2, (CUcontext * ctx))                                   \
    X(cuMemAlloc_v2, (CUdeviceptr * memory, size_t size_bytes))                \
    X(cuMemFree_v2, (CUdeviceptr memory))                                      \
    X(cuMemAllocHost_v2, (void **memory, size_t size_bytes))                   \
    X(cuMemFreeHost, (void *memory))                                           \
    X(cuMemcpyAsync,                                                           \
      (CUdeviceptr dst, CUdeviceptr src, size_t size_bytes, CUstream stream))  \
    X(cuMemcpy2DAsync_v2, (const CUDA_MEMCPY2D *copy, CUstream stream))        \
    X(cuStreamCreate, (CUstream * stream, unsigned int flags))                 \
    X(cuStreamDestroy_v2, (CUstream stream))                                   \
    X(cuEventCreate, (CUevent * event, unsigned int flags))                    \
    X(cuEventDestroy_v2, (CUevent event))                                      \
    X(cuEventRecord, (CUevent event, CUstream stream))                         \
    X(cuEventQuery, (CUevent event))                                           \
    X(cuPointerGetAttribute,                                                   \
      (void *data, CUpointer_attribute attribute, CUdeviceptr memory))         \
    X(cuGetErrorName, (CUresult error, const char **text))                     \
    X(cuGetErrorString, (CUresult error, const char **text))

#define FERRY__CUDA_DECLARE(name, args) CUresult name args;
FERRY__CUDA_SYMBOLS(FERRY__CUDA_DECLARE)
#undef FERRY__CUDA_DECLARE

typedef struct ferry__cuda {
#define FERRY__CUDA_MEMBER(name, args) CUresult(*name) args;
    FERRY__CUDA_SYMBOLS(FERRY__CUDA_MEMBER)
#undef FERRY__CUDA_MEMBER
    int version;   /* of the driver: 13000 */
    int n_devices; /* at least 1 */
} ferry__cuda;

/* Binds the library that the setting cuda_library names, and starts it.
 * FERRY_EBACKEND: not there, a symbol missing, or no device; opens none. */
ferry_status ferry__cuda_bind(const ferry__cuda **out);
/* "WHAT: cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY (out of memory)", as
 * FERRY_ENOMEM, else FERRY_EIO. */
ferry_status ferry__cuda_fail(const ferry__cuda *cuda, const char *what,
                              CUresult result);
/* The device that the calling thread uses, 0 when it uses none. */
int32_t ferry__cuda_current(const ferry__cuda *cuda);
/* Makes a device's primary context current in the calling thread, for good
 * (memory_cuda.c). */
ferry_status ferry__cuda_use(int32_t ordinal);
/* Whether an address is of a device's memory. */
bool ferry__cuda_owns(const ferry__cuda *cuda, const void *memory);

#endif
