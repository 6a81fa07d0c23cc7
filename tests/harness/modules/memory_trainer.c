/* SPDX-License-Identifier: Apache-2.0 */
/* The trainer half of the `memory` engine: copies each parameter into memory
 * of its own and sends the addresses, all at once or a few an update. */
#include "harness/modules/memory_wire.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

typedef struct memory_init {
    ferry_trainer_init_info base;
    const char *mode;
    int64_t range_elems;
    uint8_t digest;
    int32_t fail_at, skip_at, sleep_ms;
    int32_t per_update;    /* parameters of one update; 0: all */
    int32_t corrupt_at;    /* index whose first byte is flipped on the way */
    int32_t send_fails_at; /* items after which send fails */
    int64_t worker_deadline_ms, worker_no_progress_ms;
} memory_init;

static const ferry_field fields[] = {
    FERRY_TRAINER_INIT_FIELDS,
    MEMORY_INIT_FIELDS(memory_init),
    {"per_update", FERRY_FIELD_I32, 0, offsetof(memory_init, per_update), "0",
     0, 0},
    {"corrupt_at", FERRY_FIELD_I32, 0, offsetof(memory_init, corrupt_at), "-1",
     0, 0},
    {"send_fails_at", FERRY_FIELD_I32, 0, offsetof(memory_init, send_fails_at),
     "-1", 0, 0},
    {"worker_deadline_ms", FERRY_FIELD_I64, 0,
     offsetof(memory_init, worker_deadline_ms), "0", 0, 0},
    {"worker_no_progress_ms", FERRY_FIELD_I64, 0,
     offsetof(memory_init, worker_no_progress_ms), "0", 0, 0},
};
FERRY_TRAINER_INIT_TYPE(memory_type, "memory", memory_init, fields,
                        sizeof(fields) / sizeof(fields[0]), NULL);

/* The parameters of the update being put together. */
typedef struct batch {
    char *bytes[1024], *clean[1024];
    size_t first, count;
} batch;

typedef struct memory_trainer {
    const ferry_trainer_host *host;
    ferry_trainer_context *ctx;
    const memory_init *init;
    bool is_sender;
    const ferry_param_meta *declared;
    batch batch;
    char *text;
    size_t length, capacity;
} memory_trainer;

static void put(memory_trainer *m, const char *fmt, ...) FERRY_PRINTF(2, 3);

static void put(memory_trainer *m, const char *fmt, ...)
{
    va_list args;
    int n;

    va_start(args, fmt);
    n = vsnprintf(m->text + m->length, m->capacity - m->length, fmt, args);
    va_end(args);
    if (n > 0)
        m->length += (size_t)n;
}

static ferry_status create(const ferry_trainer_host *host,
                           ferry_trainer_context *ctx, const void *info,
                           bool is_sender, void **out_self)
{
    memory_trainer *m = host->alloc(sizeof(*m));

    if (m == NULL)
        return FERRY_ENOMEM;
    m->host = host;
    m->ctx = ctx;
    m->init = info;
    m->is_sender = is_sender;
    m->capacity = (size_t)4 << 20;
    *out_self = m;
    return FERRY_OK;
}

static ferry_status init(void *self)
{
    memory_trainer *m = self;
    const memory_init *i = m->init;
    char text[512];

    if (!m->is_sender)
        return FERRY_OK;
    snprintf(text, sizeof(text),
             "{\"mode\":\"%s\",\"range_elems\":%" PRId64 ",\"digest\":%s,"
             "\"fail_at\":%d,\"skip_at\":%d,\"sleep_ms\":%d,"
             "\"deadline_ms\":%" PRId64 ",\"no_progress_ms\":%" PRId64 "}",
             i->mode, i->range_elems, i->digest ? "true" : "false", i->fail_at,
             i->skip_at, i->sleep_ms, i->worker_deadline_ms,
             i->worker_no_progress_ms);
    return m->host->init_peer(m->ctx, text);
}

static void drop_batch(memory_trainer *m)
{
    for (size_t k = 0; k < m->batch.count; k++) {
        m->host->free(m->batch.bytes[k]);
        m->host->free(m->batch.clean[k]);
    }
    m->batch.first += m->batch.count;
    m->batch.count = 0;
}

static const char *dtype_name(ferry_dtype dtype)
{
    switch (dtype) {
#define NAMED(name, value, text, elems, bytes)                                 \
    case FERRY_DTYPE_##name:                                                   \
        return text;
        FERRY_DTYPE_TABLE(NAMED)
#undef NAMED
    case FERRY_DTYPE_NONE:
        break;
    }
    return "none";
}

static void put_addresses(memory_trainer *m, const char *key, char **items)
{
    put(m, ",\"%s\":[", key);
    for (size_t k = 0; k < m->batch.count; k++)
        put(m, "%s%" PRId64, k > 0 ? "," : "", (int64_t)(uintptr_t)items[k]);
    put(m, "]");
}

static void put_update(memory_trainer *m)
{
    const ferry_param_meta *meta = m->declared + m->batch.first;

    m->length = 0;
    put(m, "{\"names\":[");
    for (size_t k = 0; k < m->batch.count; k++)
        put(m, "%s\"%s\"", k > 0 ? "," : "", meta[k].name);
    put(m, "],\"dtype_names\":[");
    for (size_t k = 0; k < m->batch.count; k++)
        put(m, "%s\"%s\"", k > 0 ? "," : "", dtype_name(meta[k].dtype));
    put(m, "],\"shapes\":[");
    for (size_t k = 0; k < m->batch.count; k++) {
        put(m, "%s[", k > 0 ? "," : "");
        for (int32_t d = 0; d < meta[k].ndim; d++)
            put(m, "%s%" PRId64, d > 0 ? "," : "", meta[k].shape[d]);
        put(m, "]");
    }
    put(m, "]");
    put_addresses(m, "addresses", m->batch.bytes);
    put_addresses(m, "clean", m->batch.clean);
    put(m, "}");
}

static ferry_status flush(memory_trainer *m)
{
    ferry_status st;

    if (m->batch.count == 0)
        return FERRY_OK;
    put_update(m);
    st = m->host->update_begin(m->ctx, m->text);
    if (st == FERRY_OK)
        st = m->host->update_wait(m->ctx);
    if (st == FERRY_OK)
        drop_batch(m);
    return st;
}

static size_t elem_bytes(ferry_dtype dtype)
{
    switch (dtype) {
#define SIZED(name, value, text, elems, bytes)                                 \
    case FERRY_DTYPE_##name:                                                   \
        return bytes;
        FERRY_DTYPE_TABLE(SIZED)
#undef SIZED
    case FERRY_DTYPE_NONE:
        break;
    }
    return 0;
}

static void gather(const ferry_tensor *t, size_t elem, char *out, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        size_t left = i;
        int64_t offset = t->offset;

        for (int32_t d = t->ndim - 1; d >= 0; d--) {
            offset += (int64_t)(left % (size_t)t->shape[d]) * t->stride[d];
            left /= (size_t)t->shape[d];
        }
        memcpy(out + i * elem, (const char *)t->data + offset * (int64_t)elem,
               elem);
    }
}

static ferry_status take(memory_trainer *m, size_t index,
                         const ferry_item *item)
{
    size_t n = 1, elem = elem_bytes(item->tensor.dtype);
    batch *b = &m->batch;

    for (int32_t d = 0; d < item->tensor.ndim; d++)
        n *= (size_t)item->tensor.shape[d];
    b->bytes[b->count] = m->host->alloc(n * elem + 1);
    b->clean[b->count] = m->host->alloc(n * elem + 1);
    b->count++;
    if (b->bytes[b->count - 1] == NULL || b->clean[b->count - 1] == NULL)
        return FERRY_ENOMEM;
    gather(&item->tensor, elem, b->clean[b->count - 1], n);
    memcpy(b->bytes[b->count - 1], b->clean[b->count - 1], n * elem);
    if ((int32_t)index == m->init->corrupt_at)
        b->bytes[b->count - 1][0] ^= 1;
    m->host->progress(m->ctx, n * elem);
    return FERRY_OK;
}

static ferry_status send_items(memory_trainer *m)
{
    size_t count, index = 0;
    ferry_item item;
    ferry_status st;

    FERRY_TRY(m->host->pass_begin(m->ctx, &m->declared, &count));
    if (count > 1024)
        return m->host->fail(FERRY_EOVERFLOW, "memory: too many names");
    for (;;) {
        st = m->host->pass_next(m->ctx, &item);
        if (st == FERRY_DONE)
            break;
        FERRY_TRY(st);
        if (!m->is_sender)
            continue;
        if ((int32_t)index == m->init->send_fails_at)
            return m->host->fail(FERRY_EIO,
                                 "memory: planted failure of send "
                                 "at %s",
                                 item.name);
        FERRY_TRY(take(m, index++, &item));
        if (m->init->per_update > 0 &&
            m->batch.count == (size_t)m->init->per_update)
            FERRY_TRY(flush(m));
    }
    m->host->pass_end(m->ctx);
    return flush(m);
}

static ferry_status send_round(void *self, const void *payload,
                               size_t payload_count)
{
    memory_trainer *m = self;

    (void)payload;
    (void)payload_count;
    m->batch.first = 0;
    if (m->text == NULL)
        m->text = m->host->alloc(m->capacity);
    if (m->text == NULL)
        return FERRY_ENOMEM;
    snprintf(m->host->stats(m->ctx)->path, sizeof(m->host->stats(m->ctx)->path),
             "memory");
    return send_items(m);
}

static void round_end(void *self, ferry_status result)
{
    memory_trainer *m = self;

    (void)result;
    drop_batch(m);
}

static void destroy(void *self)
{
    memory_trainer *m = self;

    drop_batch(m);
    m->host->free(m->text);
    m->host->free(m);
}

const ferry_trainer_engine_ops *ferry_trainer_engine(void);

const ferry_trainer_engine_ops *ferry_trainer_engine(void)
{
    static const ferry_trainer_engine_ops ops = {
        .size = sizeof(ops),
        .abi = FERRY_ENGINE_ABI,
        .flags = FERRY_TRAINER_FULL_RESYNC,
        .init_type = &memory_type,
        .create = create,
        .init = init,
        .send = send_round,
        .round_end = round_end,
        .destroy = destroy,
    };

    return &ops;
}
