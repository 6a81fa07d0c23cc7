/* SPDX-License-Identifier: Apache-2.0 */
/* The host's memory behind the table of memory.h: a copy is done on return,
 * so queues and events have nothing to keep.
 * Invariant: an event is done as soon as it exists. */
#include "device/memory.h"

#include "base/alloc.h"

#include <string.h>

struct ferry__queue {
    char nothing;
};
struct ferry__event {
    char nothing;
};

/* Handles must differ from NULL and are never written. */
static ferry__queue the_queue;
static ferry__event the_event;

static ferry_status host_alloc(size_t size_bytes, void **out)
{
    void *memory = ferry__alloc_raw(size_bytes);

    if (!memory)
        return FERRY_ENOMEM;
    *out = memory;
    return FERRY_OK;
}

static ferry_status queue_create(ferry__queue **out)
{
    *out = &the_queue;
    return FERRY_OK;
}

static void queue_destroy(ferry__queue *q)
{
    (void)q;
}

static void *queue_handle(ferry__queue *q)
{
    (void)q;
    return NULL;
}

static ferry_status host_copy(ferry__queue *q, void *dst, const void *src,
                              size_t size_bytes)
{
    (void)q;
    if (size_bytes > 0)
        memcpy(dst, src, size_bytes);
    return FERRY_OK;
}

static ferry_status host_copy_rows(ferry__queue *q, const ferry__rows *rows)
{
    (void)q;
    for (size_t r = 0; r < rows->rows; r++)
        memcpy((char *)rows->dst + r * rows->dst_pitch,
               (const char *)rows->src + r * rows->src_pitch, rows->width);
    return FERRY_OK;
}

static ferry_status event_create(ferry__event **out)
{
    *out = &the_event;
    return FERRY_OK;
}

static void event_destroy(ferry__event *e)
{
    (void)e;
}

static ferry_status event_record(ferry__event *e, ferry__queue *q)
{
    (void)e;
    (void)q;
    return FERRY_OK;
}

static ferry_status event_query(ferry__event *e)
{
    (void)e;
    return FERRY_OK;
}

const ferry__memory *ferry__memory_host(void)
{
    static const ferry__memory host = {
        .name = "host",
        .device = 0,
        .alloc = host_alloc,
        .free = ferry__free,
        .pinned_alloc = host_alloc,
        .pinned_free = ferry__free,
        .queue_create = queue_create,
        .queue_destroy = queue_destroy,
        .queue_handle = queue_handle,
        .copy = host_copy,
        .copy_rows = host_copy_rows,
        .event_create = event_create,
        .event_destroy = event_destroy,
        .event_record = event_record,
        .event_query = event_query,
    };

    return &host;
}
