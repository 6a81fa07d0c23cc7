/* SPDX-License-Identifier: Apache-2.0 */
/* Carrying a job out on the communicator's thread: buffers that NCCL cannot
 * reach go through staging, and what was put on the device's queue is polled
 * beside NCCL's own error until it is done.
 * Invariant: nothing is copied into a caller's buffer after an abort. */
#include "comm/nccl_comm.h"

#include "base/alloc.h"
#include "base/log.h"
#include "device/cuda_driver.h"

#include <stdatomic.h>
#include <string.h>

/* Polls without sleeping at first: a small call takes microseconds. */
#define SPINS       2000
#define SLEEP_MS    1
#define AFTER_MS    2000 /* for what an abort ends */
#define STAGE_BYTES ((size_t)1 << 16)

/* ---- staging ---- */

static bool is_native(const nccl__comm *c, const void *memory)
{
    const ferry__cuda *cuda;

    return memory &&
           (c->memory->device == 0 ||
            (ferry__cuda_bind(&cuda) >= 0 && ferry__cuda_owns(cuda, memory)));
}

static ferry_status make_room(nccl__comm *c, nccl__staging *s, size_t size)
{
    size_t capacity = size > STAGE_BYTES ? size : STAGE_BYTES;
    void *memory;

    if (s->capacity >= size && s->memory)
        return FERRY_OK;
    if (s->memory)
        c->memory->free(s->memory);
    *s = (nccl__staging){NULL, 0};
    FERRY_TRY(c->memory->alloc(capacity, &memory));
    *s = (nccl__staging){memory, capacity};
    return FERRY_OK;
}

static ferry_status make_queue(nccl__comm *c)
{
    if (!c->queue)
        FERRY_TRY(c->memory->queue_create(&c->queue));
    if (!c->event)
        FERRY_TRY(c->memory->event_create(&c->event));
    return FERRY_OK;
}

/* The addresses to give to NCCL. */
typedef struct view {
    const void *in;
    void *out;
    bool copy_out;
} view;

static ferry_status stage(nccl__comm *c, const nccl__job *job, view *v)
{
    bool same = job->in && job->in == job->out;

    *v = (view){job->in, job->out, false};
    FERRY_TRY(make_queue(c));
    if (job->out_bytes > 0 && !is_native(c, job->out)) {
        FERRY_TRY(make_room(c, &c->staged_out, job->out_bytes));
        v->out = c->staged_out.memory;
        v->copy_out = job->out != NULL;
    }
    if (same) {
        v->in = v->out;
    } else if (job->in && job->in_bytes > 0 && !is_native(c, job->in)) {
        FERRY_TRY(make_room(c, &c->staged_in, job->in_bytes));
        v->in = c->staged_in.memory;
    }
    if (job->in && v->in != job->in)
        FERRY_TRY(c->memory->copy(c->queue, (void *)(uintptr_t)v->in, job->in,
                                  job->in_bytes));
    return FERRY_OK;
}

/* ---- waiting for the device ---- */

/* What was queued before may still use the buffers until NCCL has let go. */
static void drain(nccl__comm *c)
{
    ferry__deadline until = ferry__deadline_in(AFTER_MS);
    bool busy;

    ferry__nccl_comm_end(c);
    while ((busy = c->memory->event_query(c->event) == FERRY_EBUSY) &&
           !ferry__deadline_passed(&until))
        ferry__sleep_ms(SLEEP_MS);
    pthread_mutex_lock(&c->lock);
    c->unfinished = busy;
    pthread_mutex_unlock(&c->lock);
}

static ferry_status await_queue(nccl__comm *c, const nccl__job *job)
{
    ferry_status status;

    FERRY_TRY(c->memory->event_record(c->event, c->queue));
    for (int spins = 0;; spins++) {
        status = c->memory->event_query(c->event);
        if (status != FERRY_EBUSY)
            return status;
        if (spins < SPINS)
            continue;
        status = ferry__nccl_comm_poll(c, job->name);
        if (status < 0) {
            drain(c);
            /* What drain did is no news: the line stays the failure's. */
            return status;
        }
        ferry__sleep_ms(SLEEP_MS);
    }
}

/* ---- calls ---- */

static ferry_status init(nccl__comm *c, const nccl__job *job)
{
    ncclComm_t comm = NULL;
    ncclResult_t r = c->lib->ncclCommInitRank(&comm, c->base.world_size,
                                              job->id, c->base.rank);

    if (r != ncclSuccess)
        return ferry__nccl_library_fail(c->lib, "ncclCommInitRank", NULL, r);
    ferry__nccl_comm_opened(c, comm);
    return FERRY_OK;
}

static ncclDataType_t dtype_of(ferry_dtype dtype)
{
    switch (dtype) {
    case FERRY_DTYPE_F64:
        return ncclFloat64;
    case FERRY_DTYPE_I64:
        return ncclInt64;
    case FERRY_DTYPE_I32:
        return ncclInt32;
    default:
        return ncclFloat32;
    }
}

static ncclResult_t call(nccl__comm *c, const nccl__job *job, const view *v,
                         ncclComm_t comm)
{
    cudaStream_t stream = c->memory->queue_handle(c->queue);

    switch (job->kind) {
    case NCCL__BROADCAST:
        return c->lib->ncclBroadcast(v->in, v->out, job->out_bytes, ncclUint8,
                                     job->peer, comm, stream);
    case NCCL__ALL_REDUCE:
        return c->lib->ncclAllReduce(
            v->in, v->out, (size_t)job->count, dtype_of(job->dtype),
            job->op == FERRY__REDUCE_MAX ? ncclMax : ncclSum, comm, stream);
    case NCCL__ALL_GATHER:
        return c->lib->ncclAllGather(v->in, v->out, job->in_bytes, ncclUint8,
                                     comm, stream);
    case NCCL__SEND:
        return c->lib->ncclSend(v->in, job->in_bytes, ncclUint8, job->peer,
                                comm, stream);
    default:
        return c->lib->ncclRecv(v->out, job->out_bytes, ncclUint8, job->peer,
                                comm, stream);
    }
}

static ferry_status call_nccl(nccl__comm *c, const nccl__job *job,
                              const view *v)
{
    ncclComm_t comm;
    ncclResult_t r;

    FERRY_TRY(ferry__nccl_comm_enter(c, &comm));
    r = call(c, job, v, comm);
    ferry__nccl_comm_leave(c);
    return r == ncclSuccess || r == ncclInProgress
               ? FERRY_OK
               : ferry__nccl_comm_explain(c, job->name, r);
}

ferry_status ferry__nccl_job_run(nccl__comm *c, const nccl__job *job)
{
    view v;

    if (job->kind == NCCL__INIT)
        return init(c, job);
    FERRY_TRY(stage(c, job, &v));
    FERRY_TRY(call_nccl(c, job, &v));
    FERRY_TRY(await_queue(c, job));
    if (!v.copy_out)
        return FERRY_OK;
    FERRY_TRY(c->memory->copy(c->queue, job->out, v.out, job->out_bytes));
    return await_queue(c, job);
}

static void free_left(nccl__comm *c)
{
    while (c->left) {
        nccl__buffer *b = c->left;

        c->left = b->next;
        c->memory->free(b->memory);
        ferry__free(b);
    }
}

/* What a device that hangs may still write, for good. It stays within reach,
 * since it is kept and not lost. */
typedef struct kept {
    struct kept *next;
    ferry__queue *queue;
    ferry__event *event;
    nccl__staging in, out;
    nccl__buffer *left;
} kept;

static kept *_Atomic all_kept;

static void keep(const nccl__comm *c)
{
    kept *k = ferry__alloc(sizeof(*k));

    if (!k)
        return;
    *k = (kept){atomic_load(&all_kept), c->queue,      c->event,
                c->staged_in,           c->staged_out, c->left};
    while (!atomic_compare_exchange_weak(&all_kept, &k->next, k)) {
    }
}

void ferry__nccl_job_end(nccl__comm *c)
{
    /* To free what a device may still write would write over what comes
     * next there, or wait for a device that hangs. */
    if (c->unfinished && c->memory->event_query(c->event) == FERRY_EBUSY) {
        keep(c);
        ferry__log(FERRY_LOG_WARN,
                   "nccl: rank %d: the device still works on a call that "
                   "failed; its buffers stay for good",
                   c->base.rank);
        return;
    }
    free_left(c);
    if (c->staged_in.memory)
        c->memory->free(c->staged_in.memory);
    if (c->staged_out.memory)
        c->memory->free(c->staged_out.memory);
    if (c->event)
        c->memory->event_destroy(c->event);
    if (c->queue)
        c->memory->queue_destroy(c->queue);
}
