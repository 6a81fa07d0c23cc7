/* SPDX-License-Identifier: Apache-2.0 */
/* Frames as bytes: u32 type, then the fields in order, little-endian, no
 * padding. Lists are a u32 count and their items; lists of boxes have the
 * form of core/box_lists.h.
 * Invariant: a frame is read whole or refused; no trailing bytes. */
#include "backends/ipc/ipc_wire.h"

#include "base/alloc.h"
#include "base/hash.h"

#include <string.h>

static const char *type_name(uint32_t type)
{
    static const char *const names[] = {
        "?",    "hello",  "welcome", "ready", "failure", "segment",
        "drop", "ranges", "update",  "boxes", "digests", "done"};

    return type < sizeof(names) / sizeof(names[0]) ? names[type] : "?";
}

uint32_t ferry__ipc_frame_type(const void *bytes, size_t size_bytes)
{
    ferry__reader r = {bytes, size_bytes, false};

    return ferry__get_u32(&r);
}

/* Opens a frame of the wanted type. */
static ferry_status begin(ferry__reader *r, const void *bytes,
                          size_t size_bytes, uint32_t want)
{
    uint32_t type;

    *r = (ferry__reader){bytes, size_bytes, false};
    type = ferry__get_u32(r);
    if (r->bad || type != want)
        return ferry_fail(FERRY_EPEER, "ipc frame %s: got type %u (%s)",
                          type_name(want), type, type_name(type));
    return FERRY_OK;
}

static ferry_status end(const ferry__reader *r, uint32_t type)
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
    ferry__put_u32(s, FERRY__IPC_HELLO);
    ferry__put_u32(s, v->magic);
    ferry__put_u32(s, v->version);
    ferry__put_u32(s, (uint32_t)v->tp_rank);
    ferry__put_u32(s, (uint32_t)v->tp_size);
    ferry__put_u32(s, (uint32_t)v->dp_rank);
    ferry__put_u32(s, (uint32_t)v->dp_size);
    ferry__put_u32(s, (uint32_t)v->pid);
    ferry__str_append_n(s, secret, sizeof(secret));
}

ferry_status ferry__ipc_get_hello(const void *bytes, size_t size_bytes,
                                  ferry__ipc_hello *out)
{
    ferry__reader r;

    FERRY_TRY(begin(&r, bytes, size_bytes, FERRY__IPC_HELLO));
    memset(out, 0, sizeof(*out));
    out->magic = ferry__get_u32(&r);
    out->version = ferry__get_u32(&r);
    /* Another version may have another form behind these two. */
    if (!r.bad &&
        (out->magic != FERRY__IPC_MAGIC || out->version != FERRY__IPC_VERSION))
        return FERRY_OK;
    out->tp_rank = (int32_t)ferry__get_u32(&r);
    out->tp_size = (int32_t)ferry__get_u32(&r);
    out->dp_rank = (int32_t)ferry__get_u32(&r);
    out->dp_size = (int32_t)ferry__get_u32(&r);
    out->pid = (int32_t)ferry__get_u32(&r);
    ferry__get_bytes(&r, out->secret, FERRY__IPC_SECRET_CHARS);
    return end(&r, FERRY__IPC_HELLO);
}

void ferry__ipc_put_welcome(ferry__str *s, const ferry__ipc_welcome *v)
{
    ferry__put_u32(s, FERRY__IPC_WELCOME);
    ferry__put_u32(s, v->magic);
    ferry__put_u32(s, v->version);
    ferry__put_u32(s, v->flags);
    ferry__put_u32(s, v->reader);
    ferry__put_u64(s, v->segment_bytes);
    ferry__put_u64(s, v->probe_address);
    ferry__str_append_n(s, (const char *)v->probe, sizeof(v->probe));
}

ferry_status ferry__ipc_get_welcome(const void *bytes, size_t size_bytes,
                                    ferry__ipc_welcome *out)
{
    ferry__reader r;

    FERRY_TRY(begin(&r, bytes, size_bytes, FERRY__IPC_WELCOME));
    memset(out, 0, sizeof(*out));
    out->magic = ferry__get_u32(&r);
    out->version = ferry__get_u32(&r);
    if (!r.bad &&
        (out->magic != FERRY__IPC_MAGIC || out->version != FERRY__IPC_VERSION))
        return FERRY_OK;
    out->flags = ferry__get_u32(&r);
    out->reader = ferry__get_u32(&r);
    out->segment_bytes = ferry__get_u64(&r);
    out->probe_address = ferry__get_u64(&r);
    ferry__get_bytes(&r, out->probe, sizeof(out->probe));
    FERRY_TRY(end(&r, FERRY__IPC_WELCOME));
    if (out->reader >= FERRY__IPC_MAX_READERS)
        return ferry_fail(FERRY_EPEER, "ipc frame welcome: reader %u of %d",
                          out->reader, FERRY__IPC_MAX_READERS);
    return FERRY_OK;
}

void ferry__ipc_put_ready(ferry__str *s, const ferry__ipc_ready *v)
{
    ferry__put_u32(s, FERRY__IPC_READY);
    ferry__put_u32(s, v->cma);
    ferry__put_u32(s, (uint32_t)v->error);
}

ferry_status ferry__ipc_get_ready(const void *bytes, size_t size_bytes,
                                  ferry__ipc_ready *out)
{
    ferry__reader r;

    FERRY_TRY(begin(&r, bytes, size_bytes, FERRY__IPC_READY));
    out->cma = ferry__get_u32(&r);
    out->error = (int32_t)ferry__get_u32(&r);
    return end(&r, FERRY__IPC_READY);
}

void ferry__ipc_put_failure(ferry__str *s, const ferry__ipc_failure *v)
{
    ferry__put_u32(s, FERRY__IPC_FAILURE);
    ferry__put_u64(s, v->update);
    ferry__put_u32(s, (uint32_t)v->status);
    ferry__str_append_n(s, v->text, strnlen(v->text, sizeof(v->text) - 1));
}

ferry_status ferry__ipc_get_failure(const void *bytes, size_t size_bytes,
                                    ferry__ipc_failure *out)
{
    size_t n;
    ferry__reader r;

    FERRY_TRY(begin(&r, bytes, size_bytes, FERRY__IPC_FAILURE));
    memset(out, 0, sizeof(*out));
    out->update = ferry__get_u64(&r);
    out->status = (int32_t)ferry__get_u32(&r);
    n = r.left < sizeof(out->text) ? r.left : sizeof(out->text) - 1;
    ferry__get_bytes(&r, out->text, n);
    r.left = 0; /* a longer text is cut */
    /* A failure is one, whatever number the peer gives it. */
    if (out->status >= 0)
        out->status = FERRY_EPEER;
    return end(&r, FERRY__IPC_FAILURE);
}

void ferry__ipc_put_segment(ferry__str *s, const ferry__ipc_segment *v)
{
    ferry__put_u32(s, FERRY__IPC_SEGMENT);
    ferry__put_u64(s, v->id);
    ferry__put_u64(s, v->size_bytes);
}

ferry_status ferry__ipc_get_segment(const void *bytes, size_t size_bytes,
                                    ferry__ipc_segment *out)
{
    ferry__reader r;

    FERRY_TRY(begin(&r, bytes, size_bytes, FERRY__IPC_SEGMENT));
    out->id = ferry__get_u64(&r);
    out->size_bytes = ferry__get_u64(&r);
    return end(&r, FERRY__IPC_SEGMENT);
}

void ferry__ipc_put_drop(ferry__str *s, uint64_t id)
{
    ferry__put_u32(s, FERRY__IPC_DROP);
    ferry__put_u64(s, id);
}

ferry_status ferry__ipc_get_drop(const void *bytes, size_t size_bytes,
                                 uint64_t *out_id)
{
    ferry__reader r;

    FERRY_TRY(begin(&r, bytes, size_bytes, FERRY__IPC_DROP));
    *out_id = ferry__get_u64(&r);
    return end(&r, FERRY__IPC_DROP);
}

void ferry__ipc_put_ranges(ferry__str *s, const ferry__ipc_ranges *v)
{
    ferry__put_u32(s, FERRY__IPC_RANGES);
    ferry__put_u64(s, v->update);
    ferry__put_u32(s, (uint32_t)v->count);
    for (size_t i = 0; i < v->count; i++) {
        ferry__put_u64(s, v->items[i].address);
        ferry__put_u64(s, v->items[i].size_bytes);
    }
}

ferry_status ferry__ipc_get_ranges(const void *bytes, size_t size_bytes,
                                   ferry__ipc_ranges *out)
{
    ferry__ipc_ranges v = {0};
    ferry_status status;
    ferry__reader r;

    FERRY_TRY(begin(&r, bytes, size_bytes, FERRY__IPC_RANGES));
    v.update = ferry__get_u64(&r);
    if (ferry__get_count(&r, 16, &v.count)) {
        v.items = ferry__alloc_array(v.count, sizeof(*v.items));
        if (!v.items)
            return FERRY_ENOMEM;
        for (size_t i = 0; i < v.count; i++) {
            v.items[i].address = ferry__get_u64(&r);
            v.items[i].size_bytes = ferry__get_u64(&r);
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
    ferry__put_u32(s, FERRY__IPC_UPDATE);
    ferry__put_u64(s, v->update);
    ferry__put_u64(s, v->manifest_digest);
    ferry__put_u64(s, v->handles_digest);
    ferry__put_u32(s, v->ring_first);
    ferry__put_u32(s, v->reserved);
}

ferry_status ferry__ipc_get_update(const void *bytes, size_t size_bytes,
                                   ferry__ipc_update *out)
{
    ferry__reader r;

    FERRY_TRY(begin(&r, bytes, size_bytes, FERRY__IPC_UPDATE));
    out->update = ferry__get_u64(&r);
    out->manifest_digest = ferry__get_u64(&r);
    out->handles_digest = ferry__get_u64(&r);
    out->ring_first = ferry__get_u32(&r);
    out->reserved = ferry__get_u32(&r);
    return end(&r, FERRY__IPC_UPDATE);
}

void ferry__ipc_put_boxes(ferry__str *s, const ferry__ipc_boxes *v)
{
    ferry__put_u32(s, FERRY__IPC_BOXES);
    ferry__put_u64(s, v->update);
    ferry__put_u64(s, v->digest);
    ferry__put_u32(s, v->listed);
    if (v->listed)
        ferry__box_lists_put(s, &v->lists);
}

ferry_status ferry__ipc_get_boxes(const void *bytes, size_t size_bytes,
                                  ferry__ipc_boxes *out)
{
    ferry__ipc_boxes v = {0};
    ferry_status status = FERRY_OK;
    ferry__reader r;

    FERRY_TRY(begin(&r, bytes, size_bytes, FERRY__IPC_BOXES));
    v.update = ferry__get_u64(&r);
    v.digest = ferry__get_u64(&r);
    v.listed = ferry__get_u32(&r) != 0;
    if (v.listed) {
        uint64_t digest = ferry__xxh3(r.at, r.left);

        status = ferry__box_lists_get(&r, &v.lists);
        if (status >= 0 && digest != v.digest)
            status =
                ferry_fail(FERRY_EPEER, "ipc frame boxes: the list has another "
                                        "digest than stated");
    }
    if (status >= 0)
        status = end(&r, FERRY__IPC_BOXES);
    if (status < 0)
        ferry__box_lists_free(&v.lists);
    else
        *out = v;
    return status;
}

void ferry__ipc_put_digests(ferry__str *s, const ferry__ipc_digests *v)
{
    ferry__put_u32(s, FERRY__IPC_DIGESTS);
    ferry__put_u64(s, v->update);
    ferry__put_u32(s, (uint32_t)v->count);
    for (size_t i = 0; i < v->count; i++) {
        ferry__put_u32(s, v->items[i].param);
        ferry__put_u32(s, v->items[i].box);
        ferry__put_u64(s, v->items[i].xxh3);
    }
}

ferry_status ferry__ipc_get_digests(const void *bytes, size_t size_bytes,
                                    ferry__ipc_digests *out)
{
    ferry__ipc_digests v = {0};
    ferry_status status;
    ferry__reader r;

    FERRY_TRY(begin(&r, bytes, size_bytes, FERRY__IPC_DIGESTS));
    v.update = ferry__get_u64(&r);
    if (ferry__get_count(&r, 16, &v.count)) {
        v.items = ferry__alloc_array(v.count, sizeof(*v.items));
        if (!v.items)
            return FERRY_ENOMEM;
        for (size_t i = 0; i < v.count; i++) {
            v.items[i].param = ferry__get_u32(&r);
            v.items[i].box = ferry__get_u32(&r);
            v.items[i].xxh3 = ferry__get_u64(&r);
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
    ferry__put_u32(s, FERRY__IPC_DONE);
    ferry__put_u64(s, v->update);
    ferry__put_u64(s, v->bytes);
}

ferry_status ferry__ipc_get_done(const void *bytes, size_t size_bytes,
                                 ferry__ipc_done *out)
{
    ferry__reader r;

    FERRY_TRY(begin(&r, bytes, size_bytes, FERRY__IPC_DONE));
    out->update = ferry__get_u64(&r);
    out->bytes = ferry__get_u64(&r);
    return end(&r, FERRY__IPC_DONE);
}
