/* SPDX-License-Identifier: Apache-2.0 */
/* Tensors of devices on their way to the host, or to a buffer beside them.
 * Invariant: a window is written to only while nobody reads it, and read only
 * after its event. */
#include "device/fetch_private.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"
#include "core/load_plan.h"

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#define WINDOW_BYTES ((size_t)4 << 20)
/* The shortest run that a device copies well beside itself. */
#define DIRECT_RUN 64
/* Polls without sleeping at first: a window takes some hundred microseconds. */
#define SPINS    2000
#define SLEEP_MS 1
/* A round that failed is to answer soon all the same. */
#define SETTLE_MS 300

/* Freeing what a copy is still to write would wait for it, so lanes of devices
 * that do not end are left as they are. */
static _Atomic(ferry__lane *) left_behind;

ferry_status ferry__fetch_named(const ferry__fetcher *f, ferry_status status)
{
    if (status < 0)
        return ferry__fail_prefix(status, "parameter %s in memory of device %d",
                                  f->name, f->tensor.device - 1);
    return status;
}

static void count_held(ferry__fetcher *f, size_t bytes)
{
    f->held_bytes += bytes;
    if (f->held_bytes > f->peak_bytes)
        f->peak_bytes = f->held_bytes;
}

/* ---- lanes ---- */

static void lane_close(ferry__fetcher *f, ferry__lane *lane)
{
    const ferry__memory *m = lane->memory;

    for (int i = 0; i < 2; i++) {
        if (lane->windows[i].bytes)
            f->held_bytes -= WINDOW_BYTES;
        m->pinned_free(lane->windows[i].bytes);
        m->event_destroy(lane->windows[i].event);
    }
    m->event_destroy(lane->event);
    if (lane->queue)
        m->queue_destroy(lane->queue);
    ferry__free(lane);
}

static ferry_status lane_fill(ferry__fetcher *f, ferry__lane *lane)
{
    const ferry__memory *m = lane->memory;
    void *bytes;

    FERRY_TRY(m->queue_create(&lane->queue));
    FERRY_TRY(m->event_create(&lane->event));
    for (int i = 0; i < 2; i++) {
        FERRY_TRY(m->event_create(&lane->windows[i].event));
        FERRY_TRY(m->pinned_alloc(WINDOW_BYTES, &bytes));
        lane->windows[i].bytes = bytes;
        count_held(f, WINDOW_BYTES);
    }
    return FERRY_OK;
}

static ferry_status lane_of(ferry__fetcher *f, int32_t device,
                            ferry__lane **out)
{
    const ferry__memory *memory;
    ferry_status status;
    ferry__lane *lane;

    FERRY_TRY(ferry__memory_cuda(device - 1, &memory));
    lane = f->lanes[device - 1];
    if (!lane) {
        lane = ferry__alloc(sizeof(*lane));
        if (!lane)
            return FERRY_ENOMEM;
        lane->memory = memory;
        status = lane_fill(f, lane);
        if (status < 0) {
            lane_close(f, lane);
            return status;
        }
        f->lanes[device - 1] = lane;
    }
    *out = lane;
    return FERRY_OK;
}

static ferry_status await(const ferry__fetcher *f, ferry__event *event)
{
    for (int i = 0;; i++) {
        ferry_status status = f->lane->memory->event_query(event);

        if (status != FERRY_EBUSY)
            return ferry__fetch_named(f, status);
        if (i < SPINS)
            continue;
        if (f->check)
            FERRY_TRY(f->check(f->check_arg, "copying from a device"));
        ferry__sleep_ms(SLEEP_MS);
    }
}

/* Until all that is on the lane's queue is done. */
ferry_status ferry__fetch_drain(const ferry__fetcher *f)
{
    ferry__lane *lane = f->lane;

    FERRY_TRY(ferry__fetch_named(
        f, lane->memory->event_record(lane->event, lane->queue)));
    FERRY_TRY(await(f, lane->event));
    lane->busy = false;
    return FERRY_OK;
}

/* The same, without its owner's leave and for a while only. A device that
 * fails has no copy under way. */
static bool settle(ferry__lane *lane, const ferry__deadline *until)
{
    const ferry__memory *m = lane->memory;
    ferry_status status = FERRY_OK;

    if (lane->busy)
        status = m->event_record(lane->event, lane->queue);
    while (lane->busy && status >= 0) {
        status = m->event_query(lane->event);
        if (status == FERRY_OK)
            break;
        if (status == FERRY_EBUSY) {
            if (ferry__deadline_passed(until))
                return false;
            ferry__sleep_ms(SLEEP_MS);
            status = FERRY_OK;
        }
    }
    lane->busy = false;
    return true;
}

static void leave_behind(ferry__fetcher *f, int32_t ordinal)
{
    ferry__lane *lane = f->lanes[ordinal];

    f->lanes[ordinal] = NULL;
    f->held_bytes -= 2 * WINDOW_BYTES;
    if (lane == f->lane) {
        lane->staged = f->staged;
        f->staged = NULL;
    }
    lane->next = atomic_load(&left_behind);
    while (!atomic_compare_exchange_weak(&left_behind, &lane->next, lane))
        continue;
}

/* ---- strided tensors, whole ---- */

static ferry_status need_staged(ferry__fetcher *f, size_t bytes)
{
    if (f->staged_bytes >= bytes)
        return FERRY_OK;
    f->held_bytes -= f->staged_bytes;
    ferry__free(f->staged);
    f->staged_bytes = 0;
    f->staged = ferry__alloc_raw(bytes);
    if (!f->staged)
        return ferry__fetch_named(
            f, ferry_fail(FERRY_ENOMEM,
                          "no %zu bytes of host memory for a strided "
                          "tensor",
                          bytes));
    f->staged_bytes = bytes;
    count_held(f, bytes);
    return FERRY_OK;
}

static ferry_status stage(ferry__fetcher *f)
{
    const ferry_tensor *t = &f->tensor;
    size_t elem = ferry_dtype_bytes(t->dtype);
    ferry__fetch_hull hull;
    const char *low;
    size_t bytes;

    if (f->is_staged)
        return FERRY_OK;
    ferry__fetch_lay_out(t, &hull, &f->view);
    if (!ferry__mul((size_t)hull.numel, elem, &bytes))
        return ferry__fetch_named(
            f, ferry_fail(FERRY_EOVERFLOW, "strides are too large"));
    FERRY_TRY(need_staged(f, bytes));
    f->view.data = f->staged;
    low = (char *)ferry_tensor_data(t) + hull.low * (int64_t)elem;
    FERRY_TRY(ferry__fetch_box(f, &hull.op, f->staged, low, true));
    FERRY_TRY(ferry__fetch_drain(f));
    f->is_staged = true;
    return FERRY_OK;
}

/* ---- contiguous tensors, by windows ---- */

static bool holds(const ferry__window *w, int64_t element)
{
    return element >= w->first && element < w->first + w->count;
}

static ferry_status fill(ferry__fetcher *f, ferry__window *w, int64_t first)
{
    ferry__lane *lane = f->lane;
    size_t elem = ferry_dtype_bytes(f->tensor.dtype);
    const char *from = ferry_tensor_data(&f->tensor);
    int64_t left = ferry_tensor_numel(&f->tensor) - first;
    int64_t most = (int64_t)(WINDOW_BYTES / elem);
    int64_t count = left < most ? left : most;

    w->count = 0;
    lane->busy = true;
    FERRY_TRY(
        ferry__fetch_named(f, lane->memory->copy(lane->queue, w->bytes,
                                                 from + (size_t)first * elem,
                                                 (size_t)count * elem)));
    FERRY_TRY(ferry__fetch_named(
        f, lane->memory->event_record(w->event, lane->queue)));
    w->first = first;
    w->count = count;
    return FERRY_OK;
}

/* The window with an element, on the host; what comes after it is put on its
 * way into the other one. */
static ferry_status window_with(ferry__fetcher *f, int64_t element,
                                ferry__window **out)
{
    ferry__window *w = f->lane->windows, *other = w + 1;
    int64_t next;

    if (holds(other, element)) {
        other = w;
        w = f->lane->windows + 1;
    }
    if (!holds(w, element))
        FERRY_TRY(fill(f, w, element));
    next = w->first + w->count;
    if (next < ferry_tensor_numel(&f->tensor) && !holds(other, next))
        FERRY_TRY(fill(f, other, next));
    FERRY_TRY(await(f, w->event));
    f->lane->busy = holds(other, next);
    *out = w;
    return FERRY_OK;
}

static ferry_status pack_windows(ferry__fetcher *f, int64_t first,
                                 int64_t count, char *out,
                                 ferry__fetch_sink sink, void *arg)
{
    size_t elem = ferry_dtype_bytes(f->tensor.dtype);

    while (count > 0) {
        ferry__window *w;
        int64_t n;

        FERRY_TRY(window_with(f, first, &w));
        n = w->first + w->count - first;
        if (n > count)
            n = count;
        /* The tensor as if it lay where the window has this part of it. */
        f->view.data = w->bytes;
        f->view.offset = -w->first;
        sink(arg, &f->view, first, n, out);
        out += (size_t)n * elem;
        first += n;
        count -= n;
    }
    return FERRY_OK;
}

/* ---- the interface ---- */

ferry_status ferry__fetch_begin(ferry__fetcher *f, const char *name,
                                const ferry_tensor *tensor)
{
    f->name = name;
    f->tensor = f->view = *tensor;
    f->lane = NULL;
    f->is_staged = false;
    if (tensor->device == 0 || ferry_tensor_numel(tensor) == 0)
        return FERRY_OK;
    FERRY_TRY(ferry__fetch_named(f, lane_of(f, tensor->device, &f->lane)));
    f->lane->windows[0].count = f->lane->windows[1].count = 0;
    f->view.device = 0;
    return FERRY_OK;
}

ferry_status ferry__fetch_pack(ferry__fetcher *f, int64_t first, int64_t count,
                               void *out, ferry__fetch_sink sink, void *arg)
{
    if (f->lane && count > 0) {
        if (ferry_tensor_is_contiguous(&f->tensor))
            return pack_windows(f, first, count, out, sink, arg);
        FERRY_TRY(stage(f));
    }
    sink(arg, &f->view, first, count, out);
    return FERRY_OK;
}

bool ferry__fetch_copies(const ferry__fetcher *f, const ferry__memory *memory)
{
    const ferry_tensor *t = &f->tensor;
    int64_t run = 1;

    if (!f->lane || f->lane->memory != memory)
        return false;
    if (ferry_tensor_is_contiguous(t))
        return true;
    for (int32_t d = t->ndim - 1; d >= 0; d--) {
        if (t->shape[d] != 1 && t->stride[d] != run)
            break;
        run *= t->shape[d];
    }
    return run * (int64_t)ferry_dtype_bytes(t->dtype) >= DIRECT_RUN;
}

typedef struct beside {
    ferry__fetcher *f;
    void *out;
    ferry_status status;
} beside;

static void copy_box(void *arg, const ferry__copy_op *op)
{
    beside *b = arg;

    if (b->status >= 0)
        b->status = ferry__fetch_box(b->f, op, b->out,
                                     ferry_tensor_data(&b->f->tensor), false);
}

ferry_status ferry__fetch_copy(ferry__fetcher *f, int64_t first, int64_t count,
                               void *out)
{
    beside b = {f, out, FERRY_OK};

    ferry__range_ops(&f->tensor, first, count, copy_box, &b);
    FERRY_TRY(b.status);
    return ferry__fetch_drain(f);
}

void ferry__fetch_rest(ferry__fetcher *f)
{
    ferry__deadline until = ferry__deadline_in(SETTLE_MS);
    char line[1024];

    snprintf(line, sizeof(line), "%s", ferry_last_error());
    for (int i = 0; i < FERRY__DEVICES_MOST; i++) {
        if (f->lanes[i] && !settle(f->lanes[i], &until))
            leave_behind(f, i);
    }
    ferry__free(f->staged);
    f->staged = NULL;
    f->held_bytes -= f->staged_bytes;
    f->staged_bytes = 0;
    f->lane = NULL;
    f->name = NULL;
    f->is_staged = false;
    f->peak_bytes = f->held_bytes;
    /* What failed before keeps its line. */
    ferry__fail_line(FERRY_OK, line);
}

void ferry__fetch_close(ferry__fetcher *f)
{
    ferry__fetch_rest(f);
    for (int i = 0; i < FERRY__DEVICES_MOST; i++) {
        if (f->lanes[i])
            lane_close(f, f->lanes[i]);
        f->lanes[i] = NULL;
    }
    f->peak_bytes = f->held_bytes = 0;
}
