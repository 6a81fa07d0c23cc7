/* SPDX-License-Identifier: Apache-2.0 */
/* A thread that moves a group's worker while the group's owner does something
 * else: what was sent goes out, pulls are answered, connections are made.
 * Invariant: the thread and a call never use the worker at once. */
#include "comm/ucx_private.h"

#include "base/thread.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* Calls come in rows: after one, the mover waits a little for the next, so
 * that it does not wake up for each. */
#define CALL_MS 5
#define IDLE_MS 1000

void ferry__ucx_begin_call(ucx__net *n)
{
    pthread_mutex_lock(&n->lock);
    n->in_call = true;
    pthread_mutex_unlock(&n->lock);
    ferry__ucx_inside(true);
}

void ferry__ucx_end_call(ucx__net *n)
{
    ferry__ucx_inside(false);
    pthread_mutex_lock(&n->lock);
    n->in_call = false;
    pthread_mutex_unlock(&n->lock);
}

/* FERRY_DONE: the group closes. Else how long to sleep, and on what. */
static ferry_status turn(ucx__net *n, struct pollfd *events, int *out_ms)
{
    ferry_status status = FERRY_OK;

    events->fd = -1;
    *out_ms = CALL_MS;
    pthread_mutex_lock(&n->lock);
    if (n->closing) {
        status = FERRY_DONE;
    } else if (!n->in_call) {
        while (ucp_worker_progress(n->worker) > 0)
            continue;
        if (ucp_worker_arm(n->worker) == UCS_OK) {
            events->fd = n->events;
            *out_ms = IDLE_MS;
        } else {
            *out_ms = 0;
        }
    }
    pthread_mutex_unlock(&n->lock);
    return status;
}

static void *mover_main(void *arg)
{
    ucx__net *n = arg;
    struct pollfd polls[2] = {{-1, POLLIN, 0}, {n->stop, POLLIN, 0}};
    int ms;

    ferry__ucx_inside(true);
    while (turn(n, &polls[0], &ms) == FERRY_OK)
        poll(polls, 2, ms);
    return NULL;
}

ferry_status ferry__ucx_start_mover(ucx__net *n)
{
    n->stop = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (n->stop < 0)
        return ferry_fail(FERRY_EIO, "ucx: no event descriptor");
    FERRY_TRY(ferry__thread_start(&n->mover, "ferry-ucx", mover_main, n));
    n->has_mover = true;
    return FERRY_OK;
}

void ferry__ucx_stop_mover(ucx__net *n)
{
    if (n->has_mover) {
        pthread_mutex_lock(&n->lock);
        n->closing = true;
        pthread_mutex_unlock(&n->lock);
        eventfd_write(n->stop, 1);
        pthread_join(n->mover, NULL);
        n->has_mover = false;
    }
    if (n->stop >= 0)
        close(n->stop);
    n->stop = -1;
}
