/* SPDX-License-Identifier: Apache-2.0 */
/* The provider `nccl`: groups over a library that speaks NCCL. On a device
 * its buffers are the device's memory; buffers of the host are taken too and
 * go through staging. The ranks of a group must all have the same library.
 * Invariant: the warm-up sum that vLLM's ranks make is made in every group,
 * so that the first call of the owner finds all ranks there. */
#include "comm/nccl_comm.h"
#include "comm/rendezvous.h"
#include "comm/unique_id.h"

#include "base/alloc.h"
#include "base/log.h"
#include "comm/reduce.h"
#include "device/cuda_driver.h"

#include <stdio.h>
#include <string.h>

const ferry__provider *ferry__provider_entry(void);

static nccl__comm *nccl_of(ferry__comm *c)
{
    return (nccl__comm *)c;
}

/* ---- the table ---- */

static ferry_status nccl_broadcast(ferry__comm *comm, void *bytes,
                                   size_t size_bytes, int32_t root,
                                   int64_t timeout_ms)
{
    nccl__job job = {.kind = NCCL__BROADCAST,
                     .name = "broadcast",
                     .in = root == comm->rank ? bytes : NULL,
                     .out = bytes,
                     .in_bytes = size_bytes,
                     .out_bytes = size_bytes,
                     .peer = root};

    if (root < 0 || root >= comm->world_size)
        return ferry_fail(FERRY_EINVAL, "broadcast: root %d of a world of %d",
                          root, comm->world_size);
    if (size_bytes == 0)
        return FERRY_OK;
    return ferry__nccl_comm_call(nccl_of(comm), &job, timeout_ms);
}

static ferry_status nccl_all_reduce(ferry__comm *comm, void *data,
                                    int64_t count, ferry_dtype dtype,
                                    ferry__reduce_op op, int64_t timeout_ms)
{
    nccl__job job = {.kind = NCCL__ALL_REDUCE,
                     .name = "all-reduce",
                     .in = data,
                     .out = data,
                     .count = count,
                     .dtype = dtype,
                     .op = op};

    if (!ferry__reduce_takes(dtype))
        return ferry_fail(FERRY_ENOTSUP,
                          "all-reduce: dtype %s, wants float32, float64, "
                          "int32 or int64",
                          ferry_dtype_name(dtype));
    if (count < 0 ||
        !ferry__mul((size_t)count, ferry_dtype_bytes(dtype), &job.in_bytes))
        return ferry_fail(FERRY_EINVAL, "all-reduce: %lld elements",
                          (long long)count);
    if (count == 0)
        return FERRY_OK;
    job.out_bytes = job.in_bytes;
    return ferry__nccl_comm_call(nccl_of(comm), &job, timeout_ms);
}

static ferry_status nccl_all_gather(ferry__comm *comm, const void *bytes,
                                    size_t size_bytes, void *out,
                                    int64_t timeout_ms)
{
    nccl__job job = {.kind = NCCL__ALL_GATHER,
                     .name = "all-gather",
                     .in = bytes,
                     .out = out,
                     .in_bytes = size_bytes};

    if (!ferry__mul(size_bytes, (size_t)comm->world_size, &job.out_bytes))
        return ferry_fail(FERRY_EOVERFLOW, "all-gather: %zu bytes × %d ranks",
                          size_bytes, comm->world_size);
    if (size_bytes == 0)
        return FERRY_OK;
    return ferry__nccl_comm_call(nccl_of(comm), &job, timeout_ms);
}

static nccl__job sum_of(float *one, const char *name)
{
    return (nccl__job){.kind = NCCL__ALL_REDUCE,
                       .name = name,
                       .in = one,
                       .out = one,
                       .in_bytes = sizeof(*one),
                       .out_bytes = sizeof(*one),
                       .count = 1,
                       .dtype = FERRY_DTYPE_F32,
                       .op = FERRY__REDUCE_SUM};
}

static ferry_status nccl_barrier(ferry__comm *comm, int64_t timeout_ms)
{
    float one = 1;
    nccl__job job = sum_of(&one, "barrier");

    return ferry__nccl_comm_call(nccl_of(comm), &job, timeout_ms);
}

static ferry_status between(ferry__comm *comm, const nccl__job *job,
                            int64_t timeout_ms)
{
    if (job->peer < 0 || job->peer >= comm->world_size ||
        job->peer == comm->rank)
        return ferry_fail(FERRY_EINVAL,
                          "%s: peer %d for rank %d in a world of %d", job->name,
                          job->peer, comm->rank, comm->world_size);
    if (job->in_bytes == 0 && job->out_bytes == 0)
        return FERRY_OK;
    return ferry__nccl_comm_call(nccl_of(comm), job, timeout_ms);
}

static ferry_status nccl_send(ferry__comm *comm, const void *bytes,
                              size_t size_bytes, int32_t to, int64_t timeout_ms)
{
    nccl__job job = {.kind = NCCL__SEND,
                     .name = "send",
                     .in = bytes,
                     .in_bytes = size_bytes,
                     .peer = to};

    return between(comm, &job, timeout_ms);
}

static ferry_status nccl_recv(ferry__comm *comm, void *bytes, size_t size_bytes,
                              int32_t from, int64_t timeout_ms)
{
    nccl__job job = {.kind = NCCL__RECV,
                     .name = "receive",
                     .out = bytes,
                     .out_bytes = size_bytes,
                     .peer = from};

    return between(comm, &job, timeout_ms);
}

static ferry_status nccl_alloc(ferry__comm *comm, size_t size_bytes, void **out)
{
    return ferry__nccl_comm_alloc(nccl_of(comm), size_bytes, out);
}

static void nccl_free(ferry__comm *comm, void *memory)
{
    ferry__nccl_comm_free(nccl_of(comm), memory);
}

static uint64_t nccl_moved(ferry__comm *comm)
{
    return ferry__nccl_comm_moved(nccl_of(comm));
}

static void nccl_abort(ferry__comm *comm)
{
    ferry__nccl_comm_abort(nccl_of(comm));
}

static void nccl_close(ferry__comm *comm)
{
    ferry__nccl_comm_close(nccl_of(comm));
}

static void nccl_describe(ferry__comm *comm, char *out, size_t size_bytes)
{
    const nccl__comm *c = nccl_of(comm);

    snprintf(out, size_bytes, "nccl %s (%s)", c->lib->text, c->lib->name);
}

static const ferry__comm_ops nccl_ops = {
    .size = sizeof(ferry__comm_ops),
    .provider = "nccl",
    .broadcast = nccl_broadcast,
    .all_reduce = nccl_all_reduce,
    .all_gather = nccl_all_gather,
    .barrier = nccl_barrier,
    .send = nccl_send,
    .recv = nccl_recv,
    .abort = nccl_abort,
    .close = nccl_close,
    .describe = nccl_describe,
    .alloc = nccl_alloc,
    .free = nccl_free,
    .moved = nccl_moved,
};

/* ---- the id ---- */

static ferry_status new_id(const ferry__nccl_library *lib, ncclUniqueId *out)
{
    ncclResult_t r = lib->ncclGetUniqueId(out);

    if (r != ncclSuccess)
        return ferry__nccl_library_fail(lib, "ncclGetUniqueId", NULL, r);
    return FERRY_OK;
}

/* Among Ferry's ranks the id is rank 0's card of the meeting, which also
 * names who is missing or comes twice. */
static ferry_status meet_ferry(const ferry__nccl_library *lib,
                               ferry__store *store, const ferry__group *g,
                               ncclUniqueId *out)
{
    ferry__rendezvous r = {.rank = g->rank,
                           .world_size = g->world_size,
                           .generation = g->generation,
                           .timeout_ms = g->timeout_ms,
                           .check = g->check,
                           .check_arg = g->check_arg,
                           .secret = g->secret};
    char text[FERRY__ID_BASE64 + 1] = "none", card[64 + sizeof(text)];
    ferry_status status = FERRY_OK;
    size_t *sizes;
    void **cards;
    int n;

    if (g->rank == 0) {
        FERRY_TRY(new_id(lib, out));
        ferry__id_base64(out->internal, text);
    }
    n = snprintf(card, sizeof(card), "%s nccl %s", text, lib->text);
    FERRY_TRY(
        ferry__rendezvous_meet(store, &r, card, (size_t)n, &cards, &sizes));
    snprintf(text, sizeof(text), "%s", (const char *)cards[0]);
    for (int32_t q = 0; q < g->world_size && status >= 0; q++) {
        const char *version = strchr(cards[q], ' ');

        if (!version || strcmp(version + 1, card + strcspn(card, " ") + 1) != 0)
            status =
                ferry_fail(FERRY_EVERSION, "rank %d has %s, rank %d has %s", q,
                           version ? version + 1 : "no NCCL", g->rank,
                           card + strcspn(card, " ") + 1);
    }
    ferry__rendezvous_free(cards, sizes, g->world_size);
    FERRY_TRY(status);
    text[strcspn(text, " ")] = '\0';
    return ferry__id_from_base64(text, out->internal);
}

/* As vLLM's StatelessProcessGroup does it: one key, one pickle. */
static ferry_status meet_vllm(const ferry__nccl_library *lib,
                              ferry__store *store, const ferry__group *g,
                              ncclUniqueId *out)
{
    unsigned char pickle[FERRY__ID_PICKLE];
    ferry_status status;
    int64_t count;
    size_t size;
    void *value;

    if (g->rank == 0) {
        FERRY_TRY(new_id(lib, out));
        ferry__id_pickle(out->internal, pickle);
        return ferry__store_set(store, FERRY__ID_KEY, pickle, sizeof(pickle));
    }
    /* A torch master goes on only when all of its world have joined. */
    FERRY_TRY(ferry__store_join(store, &count));
    FERRY_TRY(
        ferry__store_get(store, FERRY__ID_KEY, g->timeout_ms, &value, &size));
    status = ferry__id_unpickle(value, size, out->internal);
    ferry__free(value);
    return status;
}

static ferry_status meet(const ferry__nccl_library *lib, ferry__store *store,
                         const ferry__group *g, ncclUniqueId *out)
{
    if (g->meeting == FERRY__MEET_UNIQUE_ID) {
        if (!g->unique_id)
            return ferry_fail(FERRY_EINVAL, "provider nccl: no unique id");
        memcpy(out->internal, g->unique_id, FERRY__UNIQUE_ID);
        return FERRY_OK;
    }
    if (!store)
        return ferry_fail(FERRY_EINVAL, "provider nccl: no store to meet in");
    return g->meeting == FERRY__MEET_FERRY ? meet_ferry(lib, store, g, out)
                                           : meet_vllm(lib, store, g, out);
}

/* ---- opening ---- */

/* The memory that the library works on: the device's that the caller uses. */
static ferry_status memory_of(const ferry__nccl_library *lib,
                              const ferry__memory **out)
{
    const ferry__cuda *cuda;

    *out = ferry__memory_host();
    if (lib->host)
        return FERRY_OK;
    FERRY_TRY(ferry__cuda_bind(&cuda));
    return ferry__memory_cuda(ferry__cuda_current(cuda), out);
}

static ferry_status join(nccl__comm *c, const ferry__group *g,
                         const ncclUniqueId *id, const ferry__deadline *until)
{
    nccl__job meeting = {.kind = NCCL__INIT, .name = "meeting", .id = *id};
    float one = 1;
    nccl__job sum = sum_of(&one, "first sum");

    FERRY_TRY(ferry__nccl_comm_call_until(c, &meeting, until));
    FERRY_TRY(ferry__nccl_comm_call_until(c, &sum, until));
    ferry__log(FERRY_LOG_INFO, "rank %d of %d: comm nccl %s (%s), %s memory",
               g->rank, g->world_size, c->lib->text, c->lib->name,
               c->memory->name);
    return FERRY_OK;
}

static ferry_status check_group(const ferry__group *g)
{
    if (g->world_size < 1 || g->rank < 0 || g->rank >= g->world_size ||
        g->timeout_ms <= 0)
        return ferry_fail(FERRY_EINVAL,
                          "provider nccl: rank %d of a world of %d, timeout "
                          "%lld ms",
                          g->rank, g->world_size, (long long)g->timeout_ms);
    return FERRY_OK;
}

static ferry_status nccl_open(ferry__store *store, const ferry__group *group,
                              ferry__comm **out)
{
    ferry__deadline until = ferry__deadline_in(group->timeout_ms);
    const ferry__nccl_library *lib;
    const ferry__memory *memory;
    ferry_status status;
    nccl__comm *c;
    ncclUniqueId id;

    FERRY_TRY(check_group(group));
    FERRY_TRY(ferry__nccl_library_open(&lib));
    FERRY_TRY(memory_of(lib, &memory));
    FERRY_TRY(meet(lib, store, group, &id));
    FERRY_TRY(ferry__nccl_comm_create(lib, group, memory, &c));
    c->base.ops = &nccl_ops;
    status = join(c, group, &id, &until);
    if (status < 0) {
        ferry__nccl_comm_close(c);
        return status;
    }
    c->base.check = NULL;
    c->base.check_arg = NULL;
    *out = &c->base;
    return FERRY_OK;
}

static ferry_status nccl_available(void)
{
    const ferry__nccl_library *lib;
    const ferry__cuda *cuda;

    FERRY_TRY(ferry__nccl_library_open(&lib));
    return lib->host ? FERRY_OK : ferry__cuda_bind(&cuda);
}

static ferry_status nccl_unique_id(void *out)
{
    const ferry__nccl_library *lib;
    ncclUniqueId id;

    FERRY_TRY(ferry__nccl_library_open(&lib));
    FERRY_TRY(new_id(lib, &id));
    memcpy(out, id.internal, FERRY__UNIQUE_ID);
    return FERRY_OK;
}

static const char *nccl_version(void)
{
    const ferry__nccl_library *lib;

    return ferry__nccl_library_open(&lib) >= 0 ? lib->text : "";
}

const ferry__provider *ferry__provider_entry(void)
{
    static const ferry__provider provider = {
        .size = sizeof(ferry__provider),
        .name = "nccl",
        .available = nccl_available,
        .open = nccl_open,
        .unique_id = nccl_unique_id,
        .version = nccl_version,
    };

    return &provider;
}
