/* SPDX-License-Identifier: Apache-2.0 */
/* Bounds on slow clients; see http_guard.h. */
#include "serve/http_guard.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/thread.h"

#include <sys/socket.h>

#define SWEEP_MS 250
/* Beyond the bound, a body or an answer must move at least this fast. */
#define BYTES_PER_MS 64

struct ferry__guarded {
    ferry__guarded *next, **at;
    int fd;
    int64_t until_ns; /* 0: no bound */
    bool cut;
};

static void cut_late(ferry__http_guard *g)
{
    int64_t now = ferry__now_ns();

    for (ferry__guarded *c = g->connections; c != NULL; c = c->next) {
        if (c->cut || c->until_ns == 0 || now < c->until_ns)
            continue;
        /* Its thread wakes, finds the end of the stream and closes it. */
        shutdown(c->fd, SHUT_RDWR);
        c->cut = true;
        g->n_cut++;
        ferry__log(FERRY_LOG_INFO,
                   "http: a connection was cut: no whole request or answer "
                   "within its bound");
    }
}

static void *sweep(void *arg)
{
    ferry__http_guard *g = arg;

    pthread_mutex_lock(&g->lock);
    while (!g->stop) {
        cut_late(g);
        ferry__cond_wait_until(&g->changed, &g->lock,
                               ferry__now_ns() + SWEEP_MS * INT64_C(1000000));
    }
    pthread_mutex_unlock(&g->lock);
    return NULL;
}

ferry_status ferry__http_guard_open(ferry__http_guard *g, int64_t bound_ms)
{
    pthread_mutex_init(&g->lock, NULL);
    FERRY_TRY(ferry__cond_init(&g->changed));
    g->bound_ms = bound_ms;
    FERRY_TRY(ferry__thread_start(&g->thread, "ferry-guard", sweep, g));
    g->started = true;
    return FERRY_OK;
}

void ferry__http_guard_close(ferry__http_guard *g)
{
    if (!g->started)
        return;
    pthread_mutex_lock(&g->lock);
    g->stop = true;
    pthread_cond_broadcast(&g->changed);
    pthread_mutex_unlock(&g->lock);
    pthread_join(g->thread, NULL);
    pthread_cond_destroy(&g->changed);
    pthread_mutex_destroy(&g->lock);
    g->started = false;
}

static int64_t bound_ns(const ferry__http_guard *g, size_t bytes)
{
    return (g->bound_ms + (int64_t)(bytes / BYTES_PER_MS)) * 1000000;
}

static void add(ferry__http_guard *g, struct MHD_Connection *connection,
                void **context)
{
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD);
    ferry__guarded *c = ferry__alloc(sizeof *c);

    *context = c;
    if (c == NULL || info == NULL)
        return; /* MHD's own idle bound remains */
    c->fd = info->connect_fd;
    pthread_mutex_lock(&g->lock);
    c->until_ns = ferry__now_ns() + bound_ns(g, 0);
    c->next = g->connections;
    c->at = &g->connections;
    if (c->next != NULL)
        c->next->at = &c->next;
    g->connections = c;
    pthread_mutex_unlock(&g->lock);
}

static void drop(ferry__http_guard *g, void **context)
{
    ferry__guarded *c = *context;

    *context = NULL;
    if (c == NULL)
        return;
    pthread_mutex_lock(&g->lock);
    if (c->at != NULL) {
        *c->at = c->next;
        if (c->next != NULL)
            c->next->at = c->at;
    }
    pthread_mutex_unlock(&g->lock);
    ferry__free(c);
}

/* The end is told before the socket is closed, so a listed one is ours. */
void ferry__http_guard_notify(void *cls, struct MHD_Connection *c,
                              void **context,
                              enum MHD_ConnectionNotificationCode code)
{
    if (code == MHD_CONNECTION_NOTIFY_STARTED)
        add(cls, c, context);
    else
        drop(cls, context);
}

static ferry__guarded *find(struct MHD_Connection *connection)
{
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(connection, MHD_CONNECTION_INFO_SOCKET_CONTEXT);

    return info == NULL ? NULL : info->socket_context;
}

/* Moves the bound: to `ns` from now, or away with 0. */
static void rearm(ferry__http_guard *g, struct MHD_Connection *connection,
                  int64_t ns)
{
    ferry__guarded *c = find(connection);

    if (c == NULL)
        return;
    pthread_mutex_lock(&g->lock);
    c->until_ns = ns == 0 ? 0 : ferry__now_ns() + ns;
    pthread_mutex_unlock(&g->lock);
}

void ferry__http_guard_body(ferry__http_guard *g, struct MHD_Connection *c,
                            size_t bytes)
{
    ferry__guarded *found = find(c);

    if (found == NULL)
        return;
    pthread_mutex_lock(&g->lock);
    if (found->until_ns != 0)
        found->until_ns += (int64_t)bytes * (1000000 / BYTES_PER_MS);
    pthread_mutex_unlock(&g->lock);
}

void ferry__http_guard_handling(ferry__http_guard *g, struct MHD_Connection *c)
{
    rearm(g, c, 0);
}

void ferry__http_guard_answering(ferry__http_guard *g, struct MHD_Connection *c,
                                 size_t bytes)
{
    rearm(g, c, bound_ns(g, bytes));
}

void ferry__http_guard_next(ferry__http_guard *g, struct MHD_Connection *c)
{
    rearm(g, c, bound_ns(g, 0));
}
