/* SPDX-License-Identifier: Apache-2.0 */
/* The host as the inner engine sees it. Hand-overs of bytes and digests are
 * where rules strike; the rest is passed on.
 * Invariant: what is changed is a copy; the sender's memory stays as it is. */
#include "backends/fault/fault_worker_state.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"

#include <string.h>

static fault__worker *of(ferry_worker_context *ctx)
{
    return (fault__worker *)ctx;
}

static const ferry_param_meta *meta_of(fault__worker *w, size_t index)
{
    size_t n;
    const ferry_param_meta *metas = w->host->declared(w->ctx, &n);

    return index < n ? &metas[index] : NULL;
}

/* Bytes of all that this update declared, for places that are drawn. */
static uint64_t declared_bytes(fault__worker *w)
{
    size_t n;
    const ferry_param_meta *metas = w->host->declared(w->ctx, &n);
    uint64_t sum = 0;

    for (size_t i = 0; i < n; i++) {
        uint64_t bytes = ferry_dtype_bytes(metas[i].dtype);

        for (int32_t d = 0; d < metas[i].ndim; d++)
            bytes *= (uint64_t)metas[i].shape[d];
        sum += bytes;
    }
    return sum;
}

/* One hand-over of [first, first + count) bytes of the round. */
typedef struct handing {
    uint64_t first, count;
    bool lost; /* it does not happen */
} handing;

static ferry_status begin(fault__worker *w, size_t index, uint64_t count,
                          handing *out)
{
    const ferry_param_meta *meta = meta_of(w, index);

    *out = (handing){w->bytes, count, false};
    w->bytes += count;
    if (w->plan.n == 0)
        return FERRY_OK;
    fault__plan_draw(&w->plan, declared_bytes(w));
    FERRY_TRY(fault__strike(&w->plan, &w->ground, FAULT__BYTE, out->first,
                            out->count, "handing over",
                            meta != NULL ? meta->name : ""));
    out->lost = (w->cut && w->cut_index == index) ||
                fault__plan_take(&w->plan, FAULT__DROP, FAULT__BYTE, out->first,
                                 out->count) != NULL;
    return FERRY_OK;
}

static const fault__rule *take(fault__worker *w, fault__kind kind,
                               const handing *h)
{
    return fault__plan_take(&w->plan, kind, FAULT__BYTE, h->first, h->count);
}

/* A changed copy of contiguous bytes, or NULL when out of memory. */
static unsigned char *corrupted(fault__worker *w, const fault__rule *r,
                                const handing *h, const void *bytes)
{
    unsigned char *copy = ferry__alloc_raw(h->count);

    if (copy == NULL)
        return NULL;
    memcpy(copy, bytes, h->count);
    fault__flip(&w->plan, r, copy + (r->at - h->first));
    return copy;
}

/* ---- whole parameters ---- */

/* As many elements as lie before the byte, in units that a range may have. */
static int64_t elements_before(const fault__rule *r, const handing *h,
                               ferry_dtype dtype)
{
    int64_t n = (int64_t)((r->at - h->first) / ferry_dtype_bytes(dtype));

    return n / 32 * 32;
}

static ferry_status load_changed(fault__worker *w, size_t index,
                                 const ferry_tensor *tensor, const handing *h,
                                 const fault__rule *corrupt,
                                 const fault__rule *cut)
{
    ferry_tensor copy;
    unsigned char *bytes = ferry__alloc_raw(h->count);
    ferry_status st;
    int64_t n;

    if (bytes == NULL)
        return FERRY_ENOMEM;
    st = ferry_tensor_init(&copy, bytes, tensor->dtype, tensor->ndim,
                           tensor->shape);
    if (st == FERRY_OK)
        st = ferry_tensor_copy(&copy, tensor);
    if (st == FERRY_OK && corrupt != NULL) {
        fault__flip(&w->plan, corrupt, bytes + (corrupt->at - h->first));
        st = w->host->load(w->ctx, index, &copy);
    } else if (st == FERRY_OK) {
        n = elements_before(cut, h, tensor->dtype);
        w->cut = true;
        w->cut_index = index;
        if (n > 0)
            st = w->host->load_range(w->ctx, index, bytes, 0, n);
    }
    ferry__free(bytes);
    return st;
}

static ferry_status host_load(ferry_worker_context *ctx, size_t index,
                              const ferry_tensor *tensor)
{
    fault__worker *w = of(ctx);
    const fault__rule *corrupt, *cut = NULL;
    handing h;

    FERRY_TRY(begin(w, index, ferry_tensor_bytes(tensor), &h));
    if (h.lost)
        return FERRY_OK;
    corrupt = take(w, FAULT__CORRUPT, &h);
    if (corrupt == NULL)
        cut = take(w, FAULT__SHORT, &h);
    if (corrupt != NULL || cut != NULL)
        return load_changed(w, index, tensor, &h, corrupt, cut);
    return w->host->load(w->ctx, index, tensor);
}

/* ---- ranges and boxes ---- */

static ferry_status host_load_range(ferry_worker_context *ctx, size_t index,
                                    const void *bytes, int64_t first,
                                    int64_t count)
{
    fault__worker *w = of(ctx);
    const ferry_param_meta *meta = meta_of(w, index);
    const fault__rule *r;
    unsigned char *copy;
    ferry_status st;
    handing h;

    if (meta == NULL || count < 0)
        return w->host->load_range(w->ctx, index, bytes, first, count);
    FERRY_TRY(
        begin(w, index, (uint64_t)count * ferry_dtype_bytes(meta->dtype), &h));
    if (h.lost)
        return FERRY_OK;
    if ((r = take(w, FAULT__SHORT, &h)) != NULL) {
        count = elements_before(r, &h, meta->dtype);
        w->cut = true;
        w->cut_index = index;
        if (count == 0)
            return FERRY_OK;
    }
    r = take(w, FAULT__CORRUPT, &h);
    if (r == NULL)
        return w->host->load_range(w->ctx, index, bytes, first, count);
    copy = corrupted(w, r, &h, bytes);
    if (copy == NULL)
        return FERRY_ENOMEM;
    st = w->host->load_range(w->ctx, index, copy, first, count);
    ferry__free(copy);
    return st;
}

static ferry_status box_bytes(fault__worker *w, size_t index, size_t box,
                              uint64_t *out)
{
    const ferry_param_meta *meta = meta_of(w, index);
    const ferry_box *boxes;
    uint64_t bytes;
    size_t n;

    FERRY_TRY(w->host->boxes(w->ctx, index, &boxes, &n));
    if (box >= n || meta == NULL) {
        *out = 0;
        return FERRY_OK;
    }
    bytes = ferry_dtype_bytes(meta->dtype);
    for (int32_t d = 0; d < boxes[box].ndim; d++)
        bytes *= (uint64_t)boxes[box].shape[d];
    *out = bytes;
    return FERRY_OK;
}

/* A box comes whole or not at all: short loses it. */
static ferry_status host_load_box(ferry_worker_context *ctx, size_t index,
                                  size_t box, const void *bytes)
{
    fault__worker *w = of(ctx);
    const fault__rule *r;
    unsigned char *copy;
    uint64_t count;
    ferry_status st;
    handing h;

    FERRY_TRY(box_bytes(w, index, box, &count));
    FERRY_TRY(begin(w, index, count, &h));
    if (h.lost || take(w, FAULT__SHORT, &h) != NULL)
        return FERRY_OK;
    r = take(w, FAULT__CORRUPT, &h);
    if (r == NULL)
        return w->host->load_box(w->ctx, index, box, bytes);
    copy = corrupted(w, r, &h, bytes);
    if (copy == NULL)
        return FERRY_ENOMEM;
    st = w->host->load_box(w->ctx, index, box, copy);
    ferry__free(copy);
    return st;
}

static ferry_status host_expect_digest(ferry_worker_context *ctx, size_t index,
                                       size_t box, uint64_t xxh3)
{
    fault__worker *w = of(ctx);
    uint64_t number = w->digests++;

    if (fault__plan_take(&w->plan, FAULT__MUTE, FAULT__BYTE, number, 1) != NULL)
        return FERRY_OK;
    if (fault__plan_take(&w->plan, FAULT__DIGEST, FAULT__BYTE, number, 1) !=
        NULL)
        xxh3 ^= (uint64_t)1 << (w->plan.seed & 63);
    return w->host->expect_digest(w->ctx, index, box, xxh3);
}

static ferry_status host_kernel_storage(ferry_worker_context *ctx, size_t param,
                                        void **out_bytes, size_t *out_size)
{
    fault__worker *w = of(ctx);

    FERRY_TRY(w->host->kernel_storage(w->ctx, param, out_bytes, out_size));
    w->kernel = *out_bytes;
    w->kernel_bytes = *out_size;
    return FERRY_OK;
}

/* ---- passed on ---- */

static ferry_status host_declare(ferry_worker_context *ctx,
                                 const ferry_param_meta *params, size_t count)
{
    return of(ctx)->host->declare(of(ctx)->ctx, params, count);
}

static const ferry_param_meta *host_declared(ferry_worker_context *ctx,
                                             size_t *out_count)
{
    return of(ctx)->host->declared(of(ctx)->ctx, out_count);
}

static ferry_status host_boxes(ferry_worker_context *ctx, size_t index,
                               const ferry_box **out_boxes, size_t *out_count)
{
    return of(ctx)->host->boxes(of(ctx)->ctx, index, out_boxes, out_count);
}

static void host_want_digests(ferry_worker_context *ctx, bool on)
{
    of(ctx)->host->want_digests(of(ctx)->ctx, on);
}

static ferry_status host_check(ferry_worker_context *ctx, const char *what)
{
    return of(ctx)->host->check(of(ctx)->ctx, what);
}

static void host_progress(ferry_worker_context *ctx, uint64_t bytes)
{
    of(ctx)->host->progress(of(ctx)->ctx, bytes);
}

static int64_t host_remaining_ms(ferry_worker_context *ctx)
{
    return of(ctx)->host->remaining_ms(of(ctx)->ctx);
}

static void host_set_bounds(ferry_worker_context *ctx, int64_t deadline_ms,
                            int64_t no_progress_ms)
{
    of(ctx)->host->set_bounds(of(ctx)->ctx, deadline_ms, no_progress_ms);
}

static void host_count_buffers(ferry_worker_context *ctx, int64_t bytes)
{
    of(ctx)->host->count_buffers(of(ctx)->ctx, bytes);
}

static void host_set_path(ferry_worker_context *ctx, const char *path)
{
    of(ctx)->host->set_path(of(ctx)->ctx, path);
}

static const ferry_model *host_model(ferry_worker_context *ctx)
{
    return of(ctx)->host->model(of(ctx)->ctx);
}

static const ferry_worker_options *host_options(ferry_worker_context *ctx)
{
    return of(ctx)->host->options(of(ctx)->ctx);
}

static ferry_status host_reload_begin(ferry_worker_context *ctx)
{
    return of(ctx)->host->reload_begin(of(ctx)->ctx);
}

static ferry_status host_reload_finalise(ferry_worker_context *ctx)
{
    return of(ctx)->host->reload_finalise(of(ctx)->ctx);
}

static void host_waited(ferry_worker_context *ctx, int32_t peer,
                        const char *address, int64_t from_ns)
{
    if (FERRY_WORKER_HOST_HAS(of(ctx)->host, waited))
        of(ctx)->host->waited(of(ctx)->ctx, peer, address, from_ns);
}

const ferry_worker_host *fault__worker_host(void)
{
    static const ferry_worker_host host = {
        .size = sizeof(ferry_worker_host),
        .abi = FERRY_ENGINE_ABI,
        .fail = ferry_fail,
        .log = ferry__log,
        .alloc = ferry__alloc,
        .free = ferry__free,
        .now_ns = ferry__now_ns,
        .declare = host_declare,
        .declared = host_declared,
        .boxes = host_boxes,
        .load = host_load,
        .load_range = host_load_range,
        .load_box = host_load_box,
        .expect_digest = host_expect_digest,
        .want_digests = host_want_digests,
        .check = host_check,
        .progress = host_progress,
        .remaining_ms = host_remaining_ms,
        .set_bounds = host_set_bounds,
        .count_buffers = host_count_buffers,
        .set_path = host_set_path,
        .model = host_model,
        .options = host_options,
        .reload_begin = host_reload_begin,
        .reload_finalise = host_reload_finalise,
        .kernel_storage = host_kernel_storage,
        .waited = host_waited,
    };

    return &host;
}
