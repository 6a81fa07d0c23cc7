/* SPDX-License-Identifier: Apache-2.0 */
/* The worker half of the `memory` engine. */
#include "harness/modules/memory_wire.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <string.h>
#include <time.h>

static const ferry_field init_fields[] = {
    MEMORY_INIT_FIELDS(memory_worker_init),
    {"deadline_ms", FERRY_FIELD_I64, 0,
     offsetof(memory_worker_init, deadline_ms), "0", 0, 0},
    {"no_progress_ms", FERRY_FIELD_I64, 0,
     offsetof(memory_worker_init, no_progress_ms), "0", 0, 0},
};
static const ferry_info_type init_type = {sizeof(ferry_info_type),
                                          "MemoryWeightTransferInitInfo",
                                          sizeof(memory_worker_init),
                                          init_fields,
                                          sizeof(init_fields) /
                                              sizeof(init_fields[0]),
                                          NULL};

static const ferry_field update_fields[] = {
    {"names", FERRY_FIELD_STRS, 0, offsetof(memory_update, names), "[]", 0, 0},
    {"dtype_names", FERRY_FIELD_STRS, FERRY_FIELD_PER_NAME,
     offsetof(memory_update, dtype_names), "[]", 0, 0},
    {"shapes", FERRY_FIELD_SHAPES, FERRY_FIELD_PER_NAME,
     offsetof(memory_update, shapes), "[]", 0, 0},
    {"addresses", FERRY_FIELD_I64S, 0, offsetof(memory_update, addresses), "[]",
     0, 0},
    {"clean", FERRY_FIELD_I64S, 0, offsetof(memory_update, clean), "[]", 0, 0},
};
static const ferry_info_type update_type = {sizeof(ferry_info_type),
                                            "MemoryWeightTransferUpdateInfo",
                                            sizeof(memory_update),
                                            update_fields,
                                            sizeof(update_fields) /
                                                sizeof(update_fields[0]),
                                            NULL};

typedef struct memory_worker {
    const ferry_worker_host *host;
    ferry_worker_context *ctx;
    const memory_worker_init *init;
} memory_worker;

static ferry_status create(const ferry_worker_host *host,
                           ferry_worker_context *ctx, void **out_self)
{
    memory_worker *m = host->alloc(sizeof(*m));

    if (m == NULL)
        return FERRY_ENOMEM;
    m->host = host;
    m->ctx = ctx;
    *out_self = m;
    return FERRY_OK;
}

static ferry_status init(void *self, const void *info)
{
    memory_worker *m = self;

    m->init = info;
    m->host->set_bounds(m->ctx, m->init->deadline_ms, m->init->no_progress_ms);
    m->host->set_path(m->ctx, "memory");
    return FERRY_OK;
}

static ferry_status start(void *self)
{
    memory_worker *m = self;

    m->host->want_digests(m->ctx, m->init->digest);
    return m->host->reload_begin(m->ctx);
}

static size_t box_numel(const ferry_box *box)
{
    size_t n = 1;

    for (int32_t d = 0; d < box->ndim; d++)
        n *= (size_t)box->shape[d];
    return n;
}

/* The elements of a box, one by one, in its order. */
static void pack_box(const ferry_box *box, size_t elem, const char *from,
                     char *out)
{
    int64_t at[FERRY_MAX_DIMS] = {0};
    size_t n = box_numel(box);

    for (size_t i = 0; i < n; i++) {
        int64_t offset = box->offset;

        for (int32_t d = 0; d < box->ndim; d++)
            offset += at[d] * box->stride[d];
        memcpy(out + i * elem, from + (size_t)offset * elem, elem);
        for (int32_t d = box->ndim - 1; d >= 0; d--) {
            if (++at[d] < box->shape[d])
                break;
            at[d] = 0;
        }
    }
}

static size_t elem_bytes(const ferry_param_meta *meta)
{
    switch ((int)meta->dtype) {
    case FERRY_DTYPE_F64:
    case FERRY_DTYPE_I64:
        return 8;
    case FERRY_DTYPE_F32:
    case FERRY_DTYPE_I32:
        return 4;
    case FERRY_DTYPE_F16:
    case FERRY_DTYPE_BF16:
        return 2;
    default:
        return 1;
    }
}

static int64_t numel(const ferry_param_meta *meta)
{
    int64_t n = 1;

    for (int32_t d = 0; d < meta->ndim; d++)
        n *= meta->shape[d];
    return n;
}

/* With load: each box loaded. Else: the digest of the clean bytes stated. */
static ferry_status each_box(memory_worker *m, size_t index,
                             const ferry_param_meta *meta, const char *bytes,
                             bool load)
{
    const ferry_box *boxes;
    size_t count, elem = elem_bytes(meta);
    ferry_status st = FERRY_OK;

    FERRY_TRY(m->host->boxes(m->ctx, index, &boxes, &count));
    for (size_t k = 0; k < count && st == FERRY_OK; k++) {
        char *packed = m->host->alloc(box_numel(&boxes[k]) * elem);

        if (packed == NULL)
            return FERRY_ENOMEM;
        pack_box(&boxes[k], elem, bytes, packed);
        if (load)
            st = m->host->load_box(m->ctx, index, k, packed);
        else
            st = m->host->expect_digest(
                m->ctx, index, k,
                XXH3_64bits(packed, box_numel(&boxes[k]) * elem));
        m->host->free(packed);
    }
    return st;
}

static ferry_status load_ranges(memory_worker *m, size_t index,
                                const ferry_param_meta *meta, const char *bytes)
{
    int64_t n = numel(meta), step = m->init->range_elems;
    size_t elem = elem_bytes(meta);

    if (n == 0)
        return m->host->load_range(m->ctx, index, bytes, 0, 0);
    for (int64_t at = 0; at < n; at += step)
        FERRY_TRY(m->host->load_range(m->ctx, index, bytes + (size_t)at * elem,
                                      at, at + step < n ? step : n - at));
    return FERRY_OK;
}

/* The same values in a tensor whose dimensions lie the other way round. */
static ferry_status load_strided(memory_worker *m, size_t index,
                                 const ferry_param_meta *meta,
                                 const char *bytes)
{
    size_t elem = elem_bytes(meta), n = (size_t)numel(meta);
    char *turned = m->host->alloc(n * elem * 2 + 1);
    ferry_tensor t;
    ferry_status st;
    int64_t stride = 2;
    ferry_box box;

    if (turned == NULL)
        return FERRY_ENOMEM;
    memset(&t, 0, sizeof(t));
    memset(&box, 0, sizeof(box));
    t.data = turned;
    t.dtype = meta->dtype;
    t.ndim = meta->ndim;
    for (int32_t d = 0; d < meta->ndim; d++) {
        t.shape[d] = meta->shape[d];
        t.stride[d] = stride;
        stride *= meta->shape[d];
    }
    for (size_t i = 0; i < n; i++) {
        size_t left = i;
        int64_t offset = 0;

        for (int32_t d = meta->ndim - 1; d >= 0; d--) {
            offset += (int64_t)(left % (size_t)meta->shape[d]) * t.stride[d];
            left /= (size_t)meta->shape[d];
        }
        memcpy(turned + (size_t)offset * elem, bytes + i * elem, elem);
    }
    st = m->host->load(m->ctx, index, &t);
    m->host->free(turned);
    return st;
}

static ferry_status load_whole(memory_worker *m, size_t index,
                               const ferry_param_meta *meta, const char *bytes)
{
    ferry_tensor t;
    int64_t stride = 1;

    memset(&t, 0, sizeof(t));
    t.data = (void *)(uintptr_t)bytes;
    t.dtype = meta->dtype;
    t.ndim = meta->ndim;
    for (int32_t d = meta->ndim - 1; d >= 0; d--) {
        t.shape[d] = meta->shape[d];
        t.stride[d] = stride;
        stride *= meta->shape[d];
    }
    return m->host->load(m->ctx, index, &t);
}

static ferry_status nap(memory_worker *m)
{
    struct timespec slice = {0, 10 * 1000000};

    for (int32_t left = m->init->sleep_ms; left > 0; left -= 10) {
        FERRY_TRY(m->host->check(m->ctx, "waiting in memory"));
        nanosleep(&slice, NULL);
    }
    return FERRY_OK;
}

static ferry_status receive_one(memory_worker *m, size_t i,
                                const ferry_param_meta *meta,
                                const memory_update *u)
{
    const char *bytes = (const char *)(uintptr_t)u->addresses.items[i];
    const char *clean = (const char *)(uintptr_t)u->clean.items[i];
    const char *mode = m->init->mode;

    FERRY_TRY(nap(m));
    if ((int32_t)i == m->init->fail_at)
        return m->host->fail(FERRY_EPEER, "memory: planted failure at %s",
                             meta->name);
    if ((int32_t)i == m->init->skip_at)
        return FERRY_OK;
    if (m->init->digest)
        FERRY_TRY(each_box(m, i, meta, clean, false));
    if (strcmp(mode, "range") == 0)
        FERRY_TRY(load_ranges(m, i, meta, bytes));
    else if (strcmp(mode, "box") == 0)
        FERRY_TRY(each_box(m, i, meta, bytes, true));
    else if (strcmp(mode, "strided") == 0)
        FERRY_TRY(load_strided(m, i, meta, bytes));
    else
        FERRY_TRY(load_whole(m, i, meta, bytes));
    m->host->progress(m->ctx, (uint64_t)numel(meta) * elem_bytes(meta));
    return FERRY_OK;
}

static ferry_status receive(void *self, const void *info)
{
    memory_worker *m = self;
    const memory_update *u = info;
    const ferry_param_meta *declared;
    size_t count;

    declared = m->host->declared(m->ctx, &count);
    if (u->addresses.count != count || u->clean.count != count)
        return m->host->fail(FERRY_EINVAL,
                             "memory: %zu addresses for %zu names",
                             u->addresses.count, count);
    for (size_t i = 0; i < count; i++)
        FERRY_TRY(receive_one(m, i, &declared[i], u));
    return FERRY_OK;
}

static ferry_status finish(void *self)
{
    memory_worker *m = self;

    return m->host->reload_finalise(m->ctx);
}

static void shut_down(void *self)
{
    ((memory_worker *)self)->init = NULL;
}

static void destroy(void *self)
{
    ((memory_worker *)self)->host->free(self);
}

const ferry_worker_engine_ops *ferry_worker_engine(void);

const ferry_worker_engine_ops *ferry_worker_engine(void)
{
    static const ferry_worker_engine_ops ops = {
        .size = sizeof(ops),
        .abi = FERRY_ENGINE_ABI,
        .backend = "memory",
        .init_info = &init_type,
        .update_info = &update_type,
        .create = create,
        .init_transfer_engine = init,
        .start_weight_update = start,
        .receive_weights = receive,
        .finish_weight_update = finish,
        .shutdown = shut_down,
        .destroy = destroy,
    };

    return &ops;
}
