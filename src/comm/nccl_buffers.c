/* SPDX-License-Identifier: Apache-2.0 */
/* Whose memory a call of NCCL reads and writes. A call that ignores its abort
 * goes on when its caller is back, so it is given nothing that the caller may
 * free: large buffers come from here and can be left to the call, everything
 * else that is host memory is copied.
 * Invariant: the communicator's thread never touches the caller's own memory
 * of the host. */
#include "comm/nccl_comm.h"

#include "base/alloc.h"
#include "base/log.h"
#include "device/cuda_driver.h"

#include <string.h>

/* ---- buffers ---- */

static bool holds(const nccl__buffer *b, const void *memory)
{
    const char *at = memory;

    return at && at >= b->memory && at < b->memory + b->size_bytes;
}

/* Under the lock. */
static bool is_in_use(const nccl__comm *c, const nccl__buffer *b)
{
    return (c->state == NCCL__GIVEN || c->unfinished) &&
           (holds(b, c->job.in) || holds(b, c->job.out));
}

ferry_status ferry__nccl_comm_alloc(nccl__comm *c, size_t size_bytes,
                                    void **out)
{
    nccl__buffer *b = ferry__alloc(sizeof(*b));
    ferry_status status;
    void *memory;

    if (!b)
        return FERRY_ENOMEM;
    status = c->memory->alloc(size_bytes, &memory);
    if (status < 0) {
        ferry__free(b);
        return status;
    }
    b->memory = memory;
    b->size_bytes = size_bytes;
    pthread_mutex_lock(&c->lock);
    b->next = c->buffers;
    c->buffers = b;
    pthread_mutex_unlock(&c->lock);
    *out = memory;
    return FERRY_OK;
}

void ferry__nccl_comm_free(nccl__comm *c, void *memory)
{
    nccl__buffer **at = &c->buffers, *b;
    bool in_use;

    pthread_mutex_lock(&c->lock);
    while (*at && (*at)->memory != memory)
        at = &(*at)->next;
    b = *at;
    if (b)
        *at = b->next;
    in_use = b && is_in_use(c, b);
    if (in_use) {
        b->next = c->left;
        c->left = b;
    }
    pthread_mutex_unlock(&c->lock);
    if (in_use) {
        ferry__log(FERRY_LOG_WARN,
                   "nccl %s of rank %d: %zu bytes that it may still use are "
                   "left to it and freed when it returns",
                   c->job.name, c->base.rank, b->size_bytes);
    } else if (b) {
        c->memory->free(b->memory);
        ferry__free(b);
    }
}

/* ---- the caller's memory, which a call must not outlive ---- */

/* Under the lock. */
static bool may_stay(const nccl__comm *c, const void *memory)
{
    const ferry__cuda *cuda;

    for (const nccl__buffer *b = c->buffers; b; b = b->next) {
        if (holds(b, memory))
            return true;
    }
    return c->memory->device > 0 && ferry__cuda_bind(&cuda) >= 0 &&
           ferry__cuda_owns(cuda, memory);
}

static ferry_status make_copy(nccl__staging *s, const void *from, size_t size)
{
    if (s->capacity < size) {
        ferry__free(s->memory);
        *s = (nccl__staging){ferry__alloc_raw(size), size};
        if (!s->memory) {
            s->capacity = 0;
            return FERRY_ENOMEM;
        }
    }
    if (from)
        memcpy(s->memory, from, size);
    return FERRY_OK;
}

ferry_status ferry__nccl_copy_in(nccl__comm *c, nccl__job *job)
{
    const void *in = job->in;

    if (job->out && !may_stay(c, job->out)) {
        FERRY_TRY(make_copy(&c->copied_out, in == job->out ? in : NULL,
                            job->out_bytes));
        if (in == job->out)
            job->in = c->copied_out.memory;
        job->out = c->copied_out.memory;
    }
    if (in && job->in == in && !may_stay(c, in)) {
        FERRY_TRY(make_copy(&c->copied_in, in, job->in_bytes));
        job->in = c->copied_in.memory;
    }
    return FERRY_OK;
}

/* The root of a broadcast has its bytes, and may be unable to write them. */
void ferry__nccl_copy_out(const nccl__comm *c, const nccl__job *from,
                          const nccl__job *job)
{
    bool is_root = job->kind == NCCL__BROADCAST && job->in;

    if (job->out && from->out != job->out && !is_root)
        memcpy(job->out, c->copied_out.memory, job->out_bytes);
}
