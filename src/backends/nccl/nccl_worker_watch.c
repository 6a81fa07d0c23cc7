/* SPDX-License-Identifier: Apache-2.0 */
/* Between rounds nobody reads the group's connections. A thread watches the
 * trainer's, so that a worker that is idle gives back the buffers, which all
 * ranks of a host share, as soon as the trainer has left or died.
 * Invariant: it touches the group under the lock alone, which a call that
 * uses the group holds; then that call finds out by itself. */
#include "backends/nccl/nccl_worker_state.h"

#include "base/log.h"
#include "base/thread.h"

#include <errno.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* Others may be in a round with the trainer that is gone: to them this end
 * must not look like this rank's own. */
static void desert(nccl__worker *w)
{
    ferry__comm *c = w->group.comm;
    ferry_status status = c->ops->why_ended(c, 0);

    ferry__nccl_close(&w->group, status);
    nccl__worker_uncount(w);
    w->deserted = true;
    ferry__log(FERRY_LOG_INFO,
               "nccl: the trainer has gone, and with it the group and its "
               "buffers: %s",
               status < 0 ? ferry_last_error() : "it left");
}

static void *watch(void *arg)
{
    nccl__worker *w = arg;
    ferry__comm *c = w->group.comm;

    if (c->ops->watch(c, 0, w->stop_fd) != FERRY_OK)
        return NULL;
    pthread_mutex_lock(&w->lock);
    if (w->group.comm)
        desert(w);
    pthread_mutex_unlock(&w->lock);
    return NULL;
}

ferry_status nccl__worker_watch(nccl__worker *w)
{
    w->deserted = false;
    if (!w->group.comm->ops->watch)
        return FERRY_OK;
    w->stop_fd = eventfd(0, EFD_CLOEXEC);
    if (w->stop_fd < 0)
        return ferry_fail(FERRY_EIO, "eventfd: %s", strerror(errno));
    FERRY_TRY(ferry__thread_start(&w->watcher, "ferry-watch", watch, w));
    w->watching = true;
    return FERRY_OK;
}

void nccl__worker_unwatch(nccl__worker *w)
{
    if (w->watching) {
        eventfd_write(w->stop_fd, 1);
        pthread_join(w->watcher, NULL);
        w->watching = false;
    }
    if (w->stop_fd >= 0)
        close(w->stop_fd);
    w->stop_fd = -1;
}
