/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of the host and of CUDA devices behind one table.
 * The CUDA driver is bound on first need, from one list of symbols; the same
 * binary runs with and without it. Invariant: a copy is ordered after all
 * earlier ones of its queue, and a buffer is reused only after its event. */
#ifndef FERRY_DEVICE_MEMORY_H
#define FERRY_DEVICE_MEMORY_H

#include <ferry/tensor.h>

typedef struct ferry__queue ferry__queue; /* a stream of a device */
typedef struct ferry__event ferry__event;

typedef struct ferry__rows {
    void *dst;
    const void *src;
    size_t dst_pitch, src_pitch, width, rows; /* bytes; 1 or more rows */
    bool dst_is_host;
} ferry__rows;
/* The largest pitch that every device takes. */
#define FERRY__PITCH_MOST ((size_t)INT32_MAX)

typedef struct ferry__memory {
    const char *name; /* "host", "cuda" */
    int32_t device;   /* ferry_tensor.device: 0 host, 1 + ordinal */
    ferry_status (*alloc)(size_t size_bytes, void **out);
    void (*free)(void *memory);
    /* Memory of the host that this memory's copies reach without a detour. */
    ferry_status (*pinned_alloc)(size_t size_bytes, void **out);
    void (*pinned_free)(void *memory);
    ferry_status (*queue_create)(ferry__queue **out);
    void (*queue_destroy)(ferry__queue *q);
    /* The native handle (CUstream); NULL on the host. */
    void *(*queue_handle)(ferry__queue *q);
    /* Either address may be of the host (pageable or not) or the device.
     * On the host it is a memcpy, done on return. */
    ferry_status (*copy)(ferry__queue *q, void *dst, const void *src,
                         size_t size_bytes);
    /* `rows` runs of `width` bytes, each `src_pitch` after the one before in
     * this memory, to every `dst_pitch` bytes of this memory or the host's.
     * No pitch is below the width. */
    ferry_status (*copy_rows)(ferry__queue *q, const ferry__rows *rows);
    ferry_status (*event_create)(ferry__event **out);
    void (*event_destroy)(ferry__event *e);
    ferry_status (*event_record)(ferry__event *e, ferry__queue *q);
    /* FERRY_OK: done; FERRY_EBUSY (no line): not yet. */
    ferry_status (*event_query)(ferry__event *e);
} ferry__memory;

/* Devices that one process uses at most: ordinals below this. */
#define FERRY__DEVICES_MOST 16

const ferry__memory *ferry__memory_host(void);
/* FERRY_EBACKEND says why there is none ("libcuda.so.1: …", "no device"). */
ferry_status ferry__memory_cuda(int32_t ordinal, const ferry__memory **out);

#endif
