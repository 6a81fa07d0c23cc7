/* SPDX-License-Identifier: Apache-2.0 */
/* Communicators: who holds one, how it fails, and how it ends.
 * Invariant: a communicator is freed by the last that holds it, so that an
 * abort may come while another thread waits in a call. */
#include "nccl_host/nccl_host.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "base/thread.h"

#include <stdio.h>
#include <string.h>

/* How long an end waits for the calls that it woke. */
#define END_MS 10000

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static ncclComm_t all_comms;

ferry_status ferry__nccl_comm_create(int32_t rank, int32_t world_size,
                                     ncclComm_t *out)
{
    ncclComm_t c = ferry__alloc(sizeof(*c));

    if (!c)
        return FERRY_ENOMEM;
    c->rank = rank;
    c->world_size = world_size;
    c->users = 1;
    pthread_mutex_init(&c->turn, NULL);
    pthread_mutex_lock(&lock);
    c->next = all_comms;
    all_comms = c;
    pthread_mutex_unlock(&lock);
    *out = c;
    return FERRY_OK;
}

static bool is_listed(ncclComm_t comm)
{
    for (ncclComm_t c = all_comms; c; c = c->next) {
        if (c == comm)
            return true;
    }
    return false;
}

static ferry_status no_comm(ncclComm_t comm)
{
    if (!comm)
        return ferry_fail(FERRY_EINVAL, "comm is NULL");
    return ferry_fail(FERRY_EINVAL,
                      "comm is no communicator, or was destroyed");
}

ferry_status ferry__nccl_comm_enter(ncclComm_t comm)
{
    bool found;

    pthread_mutex_lock(&lock);
    found = is_listed(comm);
    if (found)
        comm->users++;
    pthread_mutex_unlock(&lock);
    return found ? FERRY_OK : no_comm(comm);
}

void ferry__nccl_comm_leave(ncclComm_t comm)
{
    bool last;

    pthread_mutex_lock(&lock);
    last = --comm->users == 0;
    pthread_mutex_unlock(&lock);
    if (!last)
        return;
    ferry__comm_close(&comm->group);
    pthread_mutex_destroy(&comm->turn);
    ferry__free(comm);
}

static ferry_status was_aborted(void)
{
    return ferry_fail(FERRY_ECANCELED, "the communicator was aborted");
}

ferry_status ferry__nccl_comm_opened(ncclComm_t comm, ferry__comm *group)
{
    bool aborted;

    pthread_mutex_lock(&lock);
    aborted = comm->aborted;
    comm->group = group;
    pthread_mutex_unlock(&lock);
    return aborted ? was_aborted() : FERRY_OK;
}

ferry_status ferry__nccl_comm_group(ncclComm_t comm, ferry__comm **out)
{
    ferry__comm *group;
    bool aborted;

    pthread_mutex_lock(&lock);
    aborted = comm->aborted;
    group = comm->group;
    pthread_mutex_unlock(&lock);
    if (aborted)
        return was_aborted();
    if (!group)
        return ferry_fail(FERRY_EORDER, "the communicator is not initialised");
    *out = group;
    return FERRY_OK;
}

static void unlist(ncclComm_t comm)
{
    ncclComm_t *at = &all_comms;

    while (*at != comm)
        at = &(*at)->next;
    *at = comm->next;
}

/* The caller's hold and the list's are all that may be left. Calls of the
 * group wake at once; an init ends by its own bound and is not waited for. */
static void await_others(ncclComm_t comm)
{
    ferry__deadline until = ferry__deadline_in(END_MS);

    while (!ferry__deadline_passed(&until)) {
        unsigned users;

        pthread_mutex_lock(&lock);
        users = comm->users;
        pthread_mutex_unlock(&lock);
        if (users <= 2)
            return;
        ferry__sleep_ms(1);
    }
}

ferry_status ferry__nccl_comm_end(ncclComm_t comm)
{
    ferry__comm *group;
    bool busy, found;

    pthread_mutex_lock(&lock);
    found = is_listed(comm);
    if (found) {
        unlist(comm);
        comm->aborted = true;
        busy = comm->users > 1;
        group = comm->group;
        comm->users++;
    }
    pthread_mutex_unlock(&lock);
    if (!found)
        return no_comm(comm);
    if (busy && group) {
        group->ops->abort(group);
        await_others(comm);
    }
    ferry__nccl_comm_leave(comm);
    ferry__nccl_comm_leave(comm);
    return FERRY_OK;
}

ncclResult_t ferry__nccl_result(ferry_status status)
{
    switch (status) {
    case FERRY_OK:
    case FERRY_DONE:
        return ncclSuccess;
    case FERRY_EINVAL:
    case FERRY_EMISMATCH:
    case FERRY_EOVERFLOW:
        return ncclInvalidArgument;
    case FERRY_ENOTSUP:
    case FERRY_EORDER:
    case FERRY_EBUSY:
        return ncclInvalidUsage;
    case FERRY_ENOMEM:
    case FERRY_EIO:
    case FERRY_ENOSPC:
        return ncclSystemError;
    case FERRY_EINTERNAL:
        return ncclInternalError;
    default: /* a peer, the network between, or a bound that passed */
        return ncclRemoteError;
    }
}

ncclResult_t ferry__nccl_comm_failed(ncclComm_t comm, ferry_status status)
{
    ncclResult_t result = ferry__nccl_result(status);

    pthread_mutex_lock(&lock);
    if (comm->failed == ncclSuccess) {
        comm->failed = result;
        snprintf(comm->line, sizeof(comm->line), "%s", ferry_last_error());
    }
    pthread_mutex_unlock(&lock);
    return result;
}

ferry_status ferry__nccl_comm_state(ncclComm_t comm, ncclResult_t *out_failed,
                                    char *out_line, size_t size_bytes)
{
    bool found;

    pthread_mutex_lock(&lock);
    found = is_listed(comm);
    if (found) {
        *out_failed = comm->failed;
        snprintf(out_line, size_bytes, "%s", comm->line);
    }
    pthread_mutex_unlock(&lock);
    return found ? FERRY_OK : no_comm(comm);
}
