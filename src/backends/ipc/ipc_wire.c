/* SPDX-License-Identifier: Apache-2.0 */
/* Frames as bytes: u32 type, then the fields in order, little-endian, no
 * padding. Lists are a u32 count and their items. The list of boxes: u32
 * n_params, then for each parameter u32 n_boxes and for each box i64 offset,
 * u32 ndim, ndim × (i64 shape, i64 stride).
 * Invariant: a frame is read whole or refused; no trailing bytes. */
#include "backends/ipc/ipc_wire.h"

#include "base/alloc.h"
#include "base/hash.h"

#include <string.h>

static void put_u32(ferry__str *s, uint32_t v)
{
    char b[4];

    for (int i = 0; i < 4; i++)
        b[i] = (char)(unsigned char)(v >> (8 * i));
    ferry__str_append_n(s, b, sizeof(b));
}

static void put_u64(ferry__str *s, uint64_t v)
{
    put_u32(s, (uint32_t)v);
    put_u32(s, (uint32_t)(v >> 32));
}

typedef struct reader {
    const unsigned char *at;
    size_t left;
    bool bad;
} reader;

static void get_bytes(reader *r, void *out, size_t n)
{
    if (r->left < n) {
        r->bad = true;
        memset(out, 0, n);
        return;
    }
    memcpy(out, r->at, n);
    r->at += n;
    r->left -= n;
}

static uint32_t get_u32(reader *r)
{
    unsigned char b[4];

    get_bytes(r, b, sizeof(b));
    return (uint32_t)b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 |
           (uint32_t)b[3] << 24;
}

static uint64_t get_u64(reader *r)
{
    uint64_t low = get_u32(r);

    return low | (uint64_t)get_u32(r) << 32;
}

static const char *type_name(uint32_t type)
{
    static const char *const names[] = {
        "?",    "hello",  "welcome", "ready", "failure", "segment",
        "drop", "ranges", "update",  "boxes", "digests", "done"};

    return type < sizeof(names) / sizeof(names[0]) ? names[type] : "?";
}

uint32_t ferry__ipc_frame_type(const void *bytes, size_t size_bytes)
{
    reader r = {bytes, size_bytes, false};

    return get_u32(&r);
}

/* Opens a frame of the wanted type. */
static ferry_status begin(reader *r, const void *bytes, size_t size_bytes,
                          uint32_t want)
{
    uint32_t type;

    *r = (reader){bytes, size_bytes, false};
    type = get_u32(r);
    if (r->bad || type != want)
        return ferry_fail(FERRY_EPEER, "ipc frame %s: got type %u (%s)",
                          type_name(want), type, type_name(type));
    return FERRY_OK;
}

static ferry_status end(const reader *r, uint32_t type)
{
    if (r->bad)
        return ferry_fail(FERRY_EPEER, "ipc frame %s: too short",
                          type_name(type));
    if (r->left > 0)
        return ferry_fail(FERRY_EPEER, "ipc frame %s: %zu bytes too many",
                          type_name(type), r->left);
    return FERRY_OK;
}

void ferry__ipc_put_hello(ferry__str *s, const ferry__ipc_hello *v)
{
    char secret[FERRY__IPC_SECRET_CHARS] = {0};

    memcpy(secret, v->secret, strnlen(v->secret, sizeof(secret)));
    put_u32(s, FERRY__IPC_HELLO);
    put_u32(s, v->magic);
    put_u32(s, v->version);
    put_u32(s, (uint32_t)v->tp_rank);
    put_u32(s, (uint32_t)v->tp_size);
    put_u32(s, (uint32_t)v->dp_rank);
    put_u32(s, (uint32_t)v->dp_size);
    put_u32(s, (uint32_t)v->pid);
    ferry__str_append_n(s, secret, sizeof(secret));
}

ferry_status ferry__ipc_get_hello(const void *bytes, size_t size_bytes,
                                  ferry__ipc_hello *out)
{
    reader r;

    FERRY_TRY(begin(&r, bytes, size_bytes, FERRY__IPC_HELLO));
    memset(out, 0, sizeof(*out));
    out->magic = get_u32(&r);
    out->version = get_u32(&r);
    /* Another version may have another form behind these two. */
    if (!r.bad &&
        (out->magic != FERRY__IPC_MAGIC || out->version != FERRY__IPC_VERSION))
        return FERRY_OK;
    out->tp_rank = (int32_t)get_u32(&r);
    out->tp_size = (int32_t)get_u32(&r);
    out->dp_rank = (int32_t)get_u32(&r);
    out->dp_size = (int32_t)get_u32(&r);
    out->pid = (int32_t)get_u32(&r);
    get_bytes(&r, out->secret, FERRY__IPC_SECRET_CHARS);
    return end(&r, FERRY__IPC_HELLO);
}

void ferry__ipc_put_welcome(ferry__str *s, const ferry__ipc_welcome *v)
{
    put_u32(s, FERRY__IPC_WELCOME);
    put_u32(s, v->magic);
    put_u32(s, v->version);
    put_u32(s, v->flags);
    put_u32(s, v->reader);
    put_u64(s, v->segment_bytes);
    put_u64(s, v->probe_address);
    ferry__str_append_n(s, (const char *)v->probe, sizeof(v->probe));
}

ferry_status ferry__ipc_get_welcome(const void *bytes, size_t size_bytes,
                                    ferry__ipc_welcome *out)
{
    reader r;

    FERRY_TRY(begin(&r, bytes, size_bytes, FERRY__IPC_WELCOME));
    memset(out, 0, sizeof(*out));
    out->magic = get_u32(&r);
    out->version = get_u32(&r);
    if (!r.bad &&
        (out->magic != FERRY__IPC_MAGIC || out->version != FERRY__IPC_VERSION))
        return FERRY_OK;
    out->flags = get_u32(&r);
    out->reader = get_u32(&r);
    out->segment_bytes = get_u64(&r);
    out->probe_address = get_u64(&r);
    get_bytes(&r, out->probe, sizeof(out->probe));
    FERRY_TRY(end(&r, FERRY__IPC_WELCOME));
    if (out->reader >= FERRY__IPC_MAX_READERS)
        return ferry_fail(FERRY_EPEER, "ipc frame welcome: reader %u of %d",
                          out->reader, FERRY__IPC_MAX_READERS);
    return FERRY_OK;
}

void ferry__ipc_put_ready(ferry__str *s, const ferry__ipc_ready *v)
{
    put_u32(s, FERRY__IPC_READY);
    put_u32(s, v->cma);
    put_u32(s, (uint32_t)v->error);
}

ferry_status ferry__ipc_get_ready(const void *bytes, size_t size_bytes,
                                  ferry__ipc_ready *out)
{
    reader r;

    FERRY_TRY(begin(&r, bytes, size_bytes, FERRY__IPC_READY));
    out->cma = get_u32(&r);
    out->error = (int32_t)get_u32(&r);
    return end(&r, FERRY__IPC_READY);
}

void ferry__ipc_put_failure(ferry__str *s, const ferry__ipc_failure *v)
{
    put_u32(s, FERRY__IPC_FAILURE);
    put_u64(s, v->update);
    put_u32(s, (uint32_t)v->status);
    ferry__str_append_n(s, v->text, strnlen(v->text, sizeof(v->text) - 1));
}

ferry_status ferry__ipc_get_failure(const void *bytes, size_t size_bytes,
                                    ferry__ipc_failure *out)
{
    size_t n;
    reader r;

    FERRY_TRY(begin(&r, bytes, size_bytes, FERRY__IPC_FAILURE));
    memset(out, 0, sizeof(*out));
    out->update = get_u64(&r);
    out->status = (int32_t)get_u32(&r);
    n = r.left < sizeof(out->text) ? r.left : sizeof(out->text) - 1;
    get_bytes(&r, out->text, n);
    r.left = 0; /* a longer text is cut */
    /* A failure is one, whatever number the peer gives it. */
    if (out->status >= 0)
        out->status = FERRY_EPEER;
    return end(&r, FERRY__IPC_FAILURE);
}

void ferry__ipc_put_segment(ferry__str *s, const ferry__ipc_segment *v)
{
    put_u32(s, FERRY__IPC_SEGMENT);
    put_u64(s, v->id);
    put_u64(s, v->size_bytes);
}

ferry_status ferry__ipc_get_segment(const void *bytes, size_t size_bytes,
                                    ferry__ipc_segment *out)
{
    reader r;

    FERRY_TRY(begin(&r, bytes, size_bytes, FERRY__IPC_SEGMENT));
    out->id = get_u64(&r);
    out->size_bytes = get_u64(&r);
    return end(&r, FERRY__IPC_SEGMENT);
}

void ferry__ipc_put_drop(ferry__str *s, uint64_t id)
{
    put_u32(s, FERRY__IPC_DROP);
    put_u64(s, id);
}

ferry_status ferry__ipc_get_drop(const void *bytes, size_t size_bytes,
                                 uint64_t *out_id)
{
    reader r;

    FERRY_TRY(begin(&r, bytes, size_bytes, FERRY__IPC_DROP));
    *out_id = get_u64(&r);
    return end(&r, FERRY__IPC_DROP);
}

void ferry__ipc_put_ranges(ferry__str *s, const ferry__ipc_ranges *v)
{
    put_u32(s, FERRY__IPC_RANGES);
    put_u64(s, v->update);
    put_u32(s, (uint32_t)v->count);
    for (size_t i = 0; i < v->count; i++) {
        put_u64(s, v->items[i].address);
        put_u64(s, v->items[i].size_bytes);
    }
}

/* A count that the bytes left can hold, so that no memory is taken on the
 * word of a peer. */
static bool get_count(reader *r, size_t item_bytes, size_t *out)
{
    size_t count = get_u32(r);

    if (r->bad || count > r->left / item_bytes) {
        r->bad = true;
        *out = 0;
        return false;
    }
    *out = count;
    return true;
}

ferry_status ferry__ipc_get_ranges(const void *bytes, size_t size_bytes,
                                   ferry__ipc_ranges *out)
{
    ferry__ipc_ranges v = {0};
    ferry_status status;
    reader r;

    FERRY_TRY(begin(&r, bytes, size_bytes, FERRY__IPC_RANGES));
    v.update = get_u64(&r);
    if (get_count(&r, 16, &v.count)) {
        v.items = ferry__alloc_array(v.count, sizeof(*v.items));
        if (!v.items)
            return FERRY_ENOMEM;
        for (size_t i = 0; i < v.count; i++) {
            v.items[i].address = get_u64(&r);
            v.items[i].size_bytes = get_u64(&r);
        }
    }
    status = end(&r, FERRY__IPC_RANGES);
    if (status < 0)
        ferry__free(v.items);
    else
        *out = v;
    return status;
}

void ferry__ipc_put_update(ferry__str *s, const ferry__ipc_update *v)
{
    put_u32(s, FERRY__IPC_UPDATE);
    put_u64(s, v->update);
    put_u64(s, v->manifest_digest);
    put_u64(s, v->handles_digest);
    put_u32(s, v->ring_first);
    put_u32(s, v->reserved);
}

ferry_status ferry__ipc_get_update(const void *bytes, size_t size_bytes,
                                   ferry__ipc_update *out)
{
    reader r;

    FERRY_TRY(begin(&r, bytes, size_bytes, FERRY__IPC_UPDATE));
    out->update = get_u64(&r);
    out->manifest_digest = get_u64(&r);
    out->handles_digest = get_u64(&r);
    out->ring_first = get_u32(&r);
    out->reserved = get_u32(&r);
    return end(&r, FERRY__IPC_UPDATE);
}

static void put_box_list(ferry__str *s, const ferry__ipc_boxes *v)
{
    put_u32(s, (uint32_t)v->n_params);
    for (size_t p = 0; p < v->n_params; p++) {
        put_u32(s, (uint32_t)(v->first[p + 1] - v->first[p]));
        for (size_t b = v->first[p]; b < v->first[p + 1]; b++) {
            const ferry_box *box = &v->boxes[b];

            put_u64(s, (uint64_t)box->offset);
            put_u32(s, (uint32_t)box->ndim);
            for (int32_t d = 0; d < box->ndim; d++) {
                put_u64(s, (uint64_t)box->shape[d]);
                put_u64(s, (uint64_t)box->stride[d]);
            }
        }
    }
}

ferry_status ferry__ipc_boxes_digest(const ferry__ipc_boxes *v,
                                     uint64_t *out_digest)
{
    ferry__str s = {0};

    put_box_list(&s, v);
    if (s.failed) {
        ferry__str_free(&s);
        return ferry_fail(FERRY_ENOMEM, "ipc boxes: out of memory");
    }
    *out_digest = ferry__xxh3(s.data, s.length);
    ferry__str_free(&s);
    return FERRY_OK;
}

void ferry__ipc_put_boxes(ferry__str *s, const ferry__ipc_boxes *v)
{
    put_u32(s, FERRY__IPC_BOXES);
    put_u64(s, v->update);
    put_u64(s, v->digest);
    put_u32(s, v->listed);
    if (v->listed)
        put_box_list(s, v);
}

static void get_box(reader *r, ferry_box *box)
{
    uint32_t ndim;

    memset(box, 0, sizeof(*box));
    box->offset = (int64_t)get_u64(r);
    ndim = get_u32(r);
    if (ndim > FERRY_MAX_DIMS) {
        r->bad = true;
        return;
    }
    box->ndim = (int32_t)ndim;
    for (uint32_t d = 0; d < ndim; d++) {
        box->shape[d] = (int64_t)get_u64(r);
        box->stride[d] = (int64_t)get_u64(r);
    }
}

static ferry_status get_box_list(reader *r, ferry__ipc_boxes *v)
{
    size_t used = 0, capacity = 0, n;

    if (!get_count(r, 4, &v->n_params))
        return FERRY_OK;
    v->first = ferry__alloc_array(v->n_params + 1, sizeof(*v->first));
    if (!v->first)
        return FERRY_ENOMEM;
    for (size_t p = 0; p < v->n_params && get_count(r, 12, &n); p++) {
        for (size_t b = 0; b < n && !r->bad; b++) {
            FERRY_TRY(
                ferry__grow(&v->boxes, &capacity, used, sizeof(*v->boxes)));
            get_box(r, &v->boxes[used++]);
        }
        v->first[p + 1] = used;
    }
    return FERRY_OK;
}

ferry_status ferry__ipc_get_boxes(const void *bytes, size_t size_bytes,
                                  ferry__ipc_boxes *out)
{
    ferry__ipc_boxes v = {0};
    ferry_status status = FERRY_OK;
    reader r;

    FERRY_TRY(begin(&r, bytes, size_bytes, FERRY__IPC_BOXES));
    v.update = get_u64(&r);
    v.digest = get_u64(&r);
    v.listed = get_u32(&r) != 0;
    if (v.listed) {
        uint64_t digest = ferry__xxh3(r.at, r.left);

        status = get_box_list(&r, &v);
        if (status >= 0 && digest != v.digest)
            status =
                ferry_fail(FERRY_EPEER, "ipc frame boxes: the list has another "
                                        "digest than stated");
    }
    if (status >= 0)
        status = end(&r, FERRY__IPC_BOXES);
    if (status < 0)
        ferry__ipc_boxes_free(&v);
    else
        *out = v;
    return status;
}

static bool box_fits(const ferry_box *box, int64_t numel)
{
    int64_t last = box->offset, span;

    if (box->offset < 0 || box->offset >= numel)
        return false;
    for (int32_t d = 0; d < box->ndim; d++) {
        if (box->shape[d] < 1 || box->stride[d] < 0 ||
            !ferry__mul64(box->shape[d] - 1, box->stride[d], &span) ||
            span >= numel - last)
            return false;
        last += span;
    }
    return true;
}

static int64_t numel_of(const ferry_param_meta *param)
{
    int64_t n = 1;

    for (int32_t d = 0; d < param->ndim; d++)
        n *= param->shape[d];
    return n;
}

ferry_status ferry__ipc_boxes_check(const ferry__ipc_boxes *v,
                                    const ferry_param_meta *params,
                                    size_t count)
{
    if (v->n_params != count)
        return ferry_fail(FERRY_EPEER,
                          "ipc frame boxes: %zu parameters, %zu were "
                          "declared",
                          v->n_params, count);
    for (size_t p = 0; p < count; p++) {
        int64_t numel = numel_of(&params[p]);

        for (size_t b = v->first[p]; b < v->first[p + 1]; b++) {
            /* A box without elements reads nothing, wherever it is. */
            bool empty = numel == 0;

            for (int32_t d = 0; d < v->boxes[b].ndim; d++)
                empty = empty || v->boxes[b].shape[d] == 0;
            if (!empty && !box_fits(&v->boxes[b], numel))
                return ferry_fail(FERRY_EPEER,
                                  "ipc frame boxes: parameter %s: a box "
                                  "outside its %lld elements",
                                  params[p].name, (long long)numel);
        }
    }
    return FERRY_OK;
}

void ferry__ipc_boxes_free(ferry__ipc_boxes *v)
{
    ferry__free(v->first);
    ferry__free(v->boxes);
    *v = (ferry__ipc_boxes){0};
}

void ferry__ipc_put_digests(ferry__str *s, const ferry__ipc_digests *v)
{
    put_u32(s, FERRY__IPC_DIGESTS);
    put_u64(s, v->update);
    put_u32(s, (uint32_t)v->count);
    for (size_t i = 0; i < v->count; i++) {
        put_u32(s, v->items[i].param);
        put_u32(s, v->items[i].box);
        put_u64(s, v->items[i].xxh3);
    }
}

ferry_status ferry__ipc_get_digests(const void *bytes, size_t size_bytes,
                                    ferry__ipc_digests *out)
{
    ferry__ipc_digests v = {0};
    ferry_status status;
    reader r;

    FERRY_TRY(begin(&r, bytes, size_bytes, FERRY__IPC_DIGESTS));
    v.update = get_u64(&r);
    if (get_count(&r, 16, &v.count)) {
        v.items = ferry__alloc_array(v.count, sizeof(*v.items));
        if (!v.items)
            return FERRY_ENOMEM;
        for (size_t i = 0; i < v.count; i++) {
            v.items[i].param = get_u32(&r);
            v.items[i].box = get_u32(&r);
            v.items[i].xxh3 = get_u64(&r);
        }
    }
    status = end(&r, FERRY__IPC_DIGESTS);
    if (status < 0)
        ferry__free(v.items);
    else
        *out = v;
    return status;
}

void ferry__ipc_put_done(ferry__str *s, const ferry__ipc_done *v)
{
    put_u32(s, FERRY__IPC_DONE);
    put_u64(s, v->update);
    put_u64(s, v->bytes);
}

ferry_status ferry__ipc_get_done(const void *bytes, size_t size_bytes,
                                 ferry__ipc_done *out)
{
    reader r;

    FERRY_TRY(begin(&r, bytes, size_bytes, FERRY__IPC_DONE));
    out->update = get_u64(&r);
    out->bytes = get_u64(&r);
    return end(&r, FERRY__IPC_DONE);
}
