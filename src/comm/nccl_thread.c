/* SPDX-License-Identifier: Apache-2.0 */
/* The thread of a communicator, which alone calls NCCL, and its ends.
 * Invariant: the communicator is ended once, by an abort or by the thread's
 * end, and freed by the last that holds it. */
#include "comm/nccl_comm.h"

#include "base/alloc.h"
#include "base/thread.h"
#include "device/cuda_driver.h"

#include <stdio.h>
#include <string.h>

#define SLICE_NS INT64_C(100000000)
/* How long a close waits for the thread. */
#define GRACE_NS INT64_C(2000000000)

static void release(nccl__comm *c)
{
    bool last;

    pthread_mutex_lock(&c->lock);
    last = --c->holders == 0;
    pthread_mutex_unlock(&c->lock);
    if (!last)
        return;
    pthread_mutex_destroy(&c->lock);
    pthread_cond_destroy(&c->changed);
    ferry__free(c->copied_in.memory);
    ferry__free(c->copied_out.memory);
    ferry__free(c);
}

/* ---- ending ---- */

typedef struct ending {
    nccl__comm *c;
    ncclComm_t comm;
} ending;

static void *end_comm(void *arg)
{
    ending *e = arg;

    e->c->lib->ncclCommAbort(e->comm);
    release(e->c);
    ferry__free(e);
    return NULL;
}

/* The thread is inside a call with `comm`: another one has to end it, which
 * may itself take long. Under the lock, which it lets go. */
static void end_beside(nccl__comm *c)
{
    ending *e = ferry__alloc(sizeof(*e));
    ncclComm_t comm = c->comm;
    pthread_t thread;

    c->comm = NULL;
    c->holders++;
    pthread_mutex_unlock(&c->lock);
    if (e) {
        *e = (ending){c, comm};
        if (ferry__thread_start(&thread, "nccl-abort", end_comm, e) >= 0)
            pthread_detach(thread);
        else
            end_comm(e);
    } else {
        c->lib->ncclCommAbort(comm);
        release(c);
    }
    pthread_mutex_lock(&c->lock);
}

void ferry__nccl_comm_stop(nccl__comm *c)
{
    if (c->stop)
        return;
    c->stop = true;
    pthread_cond_broadcast(&c->changed);
    if (c->in_library && c->comm)
        end_beside(c);
}

ferry_status ferry__nccl_comm_fail(nccl__comm *c, ferry_status status,
                                   const char *line)
{
    if (c->failed == FERRY_OK) {
        c->failed = status;
        snprintf(c->failed_line, sizeof(c->failed_line), "%s", line);
    }
    return c->failed;
}

void ferry__nccl_comm_end(nccl__comm *c)
{
    ncclComm_t comm;

    pthread_mutex_lock(&c->lock);
    comm = c->comm;
    c->comm = NULL;
    pthread_mutex_unlock(&c->lock);
    if (comm)
        c->lib->ncclCommAbort(comm);
}

void ferry__nccl_comm_abort(nccl__comm *c)
{
    char line[64];

    snprintf(line, sizeof(line), "the group was aborted by rank %d",
             c->base.rank);
    pthread_mutex_lock(&c->lock);
    ferry__nccl_comm_fail(c, FERRY_ECANCELED, line);
    ferry__nccl_comm_stop(c);
    pthread_mutex_unlock(&c->lock);
}

/* ---- the thread ---- */

ferry_status ferry__nccl_comm_enter(nccl__comm *c, ncclComm_t *out)
{
    bool stopped;

    pthread_mutex_lock(&c->lock);
    stopped = c->stop || !c->comm;
    if (!stopped) {
        c->in_library = true;
        *out = c->comm;
    }
    pthread_mutex_unlock(&c->lock);
    return stopped ? ferry_fail(FERRY_ECANCELED, "the group was aborted")
                   : FERRY_OK;
}

void ferry__nccl_comm_leave(nccl__comm *c)
{
    pthread_mutex_lock(&c->lock);
    c->in_library = false;
    pthread_mutex_unlock(&c->lock);
}

/* Whoever ends the communicator takes it away under the lock first. */
ferry_status ferry__nccl_comm_poll(nccl__comm *c, const char *what)
{
    ncclResult_t now = ncclSuccess, r;
    ferry_status status = FERRY_OK;

    pthread_mutex_lock(&c->lock);
    if (c->stop || !c->comm) {
        status = ferry_fail(FERRY_ECANCELED, "the group was aborted");
    } else {
        r = c->lib->ncclCommGetAsyncError(c->comm, &now);
        if (r == ncclSuccess && now != ncclInProgress)
            r = now;
        if (r != ncclSuccess)
            status = ferry__nccl_library_fail(c->lib, what, c->comm, r);
    }
    pthread_mutex_unlock(&c->lock);
    return status;
}

ferry_status ferry__nccl_comm_explain(nccl__comm *c, const char *what,
                                      ncclResult_t result)
{
    ferry_status status;

    pthread_mutex_lock(&c->lock);
    status = ferry__nccl_library_fail(c->lib, what, c->comm, result);
    pthread_mutex_unlock(&c->lock);
    return status;
}

bool ferry__nccl_comm_stopped(nccl__comm *c)
{
    bool stopped;

    pthread_mutex_lock(&c->lock);
    stopped = c->stop;
    pthread_mutex_unlock(&c->lock);
    return stopped;
}

void ferry__nccl_comm_opened(nccl__comm *c, ncclComm_t comm)
{
    pthread_mutex_lock(&c->lock);
    c->comm = comm;
    pthread_mutex_unlock(&c->lock);
}

/* Under the lock, which it lets go. */
static void run_job(nccl__comm *c)
{
    nccl__job job = c->job;
    ferry_status status;

    pthread_mutex_unlock(&c->lock);
    status = ferry__nccl_comm_stopped(c)
                 ? ferry_fail(FERRY_ECANCELED, "the group was aborted")
                 : ferry__nccl_job_run(c, &job);
    /* What has failed is of no more use, and its peers should know. */
    if (status < 0)
        ferry__nccl_comm_end(c);
    pthread_mutex_lock(&c->lock);
    c->result = status;
    snprintf(c->line, sizeof(c->line), "%s",
             status < 0 ? ferry_last_error() : "");
    c->state = NCCL__DONE;
    pthread_cond_broadcast(&c->changed);
}

static void *work(void *arg)
{
    nccl__comm *c = arg;
    ncclComm_t left;

    if (c->memory->device > 0)
        ferry__cuda_use(c->memory->device - 1);
    pthread_mutex_lock(&c->lock);
    while (!c->closing) {
        if (c->stop && c->comm) {
            pthread_mutex_unlock(&c->lock);
            ferry__nccl_comm_end(c);
            pthread_mutex_lock(&c->lock);
        } else if (c->state == NCCL__GIVEN) {
            run_job(c);
        } else {
            ferry__cond_wait_until(&c->changed, &c->lock,
                                   ferry__now_ns() + SLICE_NS);
        }
    }
    left = c->stop ? NULL : c->comm;
    if (left)
        c->comm = NULL;
    pthread_mutex_unlock(&c->lock);
    /* Unlike an abort, a destroy lets what is on its way arrive. */
    if (left)
        c->lib->ncclCommDestroy(left);
    ferry__nccl_comm_end(c);
    ferry__nccl_job_end(c);
    pthread_mutex_lock(&c->lock);
    c->finished = true;
    pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&c->lock);
    release(c);
    return NULL;
}

/* ---- life ---- */

void ferry__nccl_comm_close(nccl__comm *c)
{
    int64_t until = ferry__now_ns() + GRACE_NS;
    pthread_t thread = c->thread;
    bool finished;

    pthread_mutex_lock(&c->lock);
    c->closing = true;
    pthread_cond_broadcast(&c->changed);
    /* A thread that was left in a call is not waited for. */
    while (!c->finished && c->state == NCCL__IDLE && ferry__now_ns() < until)
        ferry__cond_wait_until(&c->changed, &c->lock, until);
    finished = c->finished;
    pthread_mutex_unlock(&c->lock);
    if (finished)
        pthread_join(thread, NULL);
    else
        pthread_detach(thread);
    release(c);
}

ferry_status ferry__nccl_comm_create(const ferry__nccl_library *lib,
                                     const ferry__group *group,
                                     const ferry__memory *memory,
                                     nccl__comm **out)
{
    nccl__comm *c = ferry__alloc(sizeof(*c));
    ferry_status status;

    if (!c)
        return FERRY_ENOMEM;
    c->base.rank = group->rank;
    c->base.world_size = group->world_size;
    c->base.check = group->check;
    c->base.check_arg = group->check_arg;
    c->base.memory = memory->device > 0 ? memory : NULL;
    c->base.bounds_silence = group->no_progress_ms > 0;
    c->lib = lib;
    c->memory = memory;
    c->no_progress_ms = group->no_progress_ms;
    c->holders = 2;
    status = ferry__cond_init(&c->changed);
    if (status < 0) {
        ferry__free(c);
        return status;
    }
    pthread_mutex_init(&c->lock, NULL);
    status = ferry__thread_start(&c->thread, "nccl", work, c);
    if (status < 0) {
        c->holders = 1;
        release(c);
        return status;
    }
    *out = c;
    return FERRY_OK;
}
