/* SPDX-License-Identifier: Apache-2.0 */
/* The system's resolver has no bound that a caller could set, and cannot be
 * stopped: names are looked up by a thread that is left behind when it takes
 * too long. Invariant: a lookup is freed by whoever of the two sees it last,
 * and the thread touches nothing else. */
#include "comm/tcp_resolve.h"

#include "base/alloc.h"
#include "base/thread.h"
#include "comm/tcp_address.h"

#include <stdio.h>
#include <string.h>

#define SLICE_NS INT64_C(100000000)
/* Lookups left behind that still run; a resolver that hangs must not gather
 * threads. */
#define LEFT_MAX 32

typedef struct lookup {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool done, left; /* left: the caller has gone */
    int code;
    struct addrinfo hints, *list;
    char host[FERRY__TCP_HOST_BYTES], service[16];
} lookup;

static _Atomic int left_behind;

static void free_lookup(lookup *l)
{
    if (l->list)
        freeaddrinfo(l->list);
    pthread_cond_destroy(&l->changed);
    pthread_mutex_destroy(&l->lock);
    ferry__free(l);
}

static void *look_up_main(void *arg)
{
    struct addrinfo *list = NULL;
    lookup *l = arg;
    int code = getaddrinfo(l->host, l->service, &l->hints, &list);
    bool left;

    pthread_mutex_lock(&l->lock);
    l->list = code == 0 ? list : NULL;
    l->code = code;
    l->done = true;
    left = l->left;
    pthread_cond_signal(&l->changed);
    pthread_mutex_unlock(&l->lock);
    if (left) {
        free_lookup(l);
        atomic_fetch_sub(&left_behind, 1);
    }
    return NULL;
}

static ferry_status no_such(const char *host, int32_t port, int code)
{
    char text[FERRY__TCP_TEXT_BYTES];

    return ferry_fail(FERRY_ECONN, "%s: %s", ferry__tcp_text(text, host, port),
                      gai_strerror(code));
}

/* With the lock held. */
static ferry_status await(lookup *l, const ferry__waiter *w)
{
    while (!l->done) {
        int64_t until = ferry__now_ns() + SLICE_NS;
        ferry_status status = FERRY_OK;

        if (ferry__deadline_passed(&w->deadline))
            return ferry_fail(FERRY_ETIMEOUT,
                              "%s: the name '%s' was not looked up within "
                              "%lld ms",
                              w->what ? w->what : "connect", l->host,
                              (long long)w->deadline.bound_ms);
        ferry__cond_wait_until(&l->changed, &l->lock,
                               until < w->deadline.at_ns ? until
                                                         : w->deadline.at_ns);
        if (!l->done && w->check) {
            pthread_mutex_unlock(&l->lock);
            status = w->check(w->arg);
            pthread_mutex_lock(&l->lock);
        }
        FERRY_TRY(status);
    }
    return FERRY_OK;
}

/* The end of a lookup for its caller. */
static ferry_status finish(lookup *l, const ferry__waiter *w, int *out_code,
                           struct addrinfo **out)
{
    ferry_status status;
    bool done;

    pthread_mutex_lock(&l->lock);
    status = await(l, w);
    done = l->done;
    l->left = !done;
    if (!done)
        atomic_fetch_add(&left_behind, 1);
    pthread_mutex_unlock(&l->lock);
    if (!done)
        return status;
    *out_code = l->code;
    if (status >= 0) {
        *out = l->list;
        l->list = NULL;
    }
    free_lookup(l);
    return status;
}

static ferry_status begin(const char *host, const char *service,
                          const struct addrinfo *hints, lookup **out)
{
    lookup *l = ferry__alloc(sizeof(*l));
    ferry_status status;
    pthread_t thread;

    if (!l)
        return FERRY_ENOMEM;
    l->hints = *hints;
    snprintf(l->host, sizeof(l->host), "%s", host);
    snprintf(l->service, sizeof(l->service), "%s", service);
    pthread_mutex_init(&l->lock, NULL);
    status = ferry__cond_init(&l->changed);
    if (status < 0) {
        pthread_mutex_destroy(&l->lock);
        ferry__free(l);
        return status;
    }
    status = ferry__thread_start(&thread, "ferry-resolve", look_up_main, l);
    if (status < 0) {
        free_lookup(l);
        return status;
    }
    pthread_detach(thread);
    *out = l;
    return FERRY_OK;
}

ferry_status ferry__tcp_resolve(const char *host, int32_t port, int flags,
                                const ferry__waiter *w, struct addrinfo **out)
{
    struct addrinfo hints = {.ai_flags =
                                 flags | AI_NUMERICSERV | AI_NUMERICHOST,
                             .ai_socktype = SOCK_STREAM};
    char service[16];
    lookup *l;
    int code;

    snprintf(service, sizeof(service), "%d", (int)port);
    code = getaddrinfo(host, service, &hints, out);
    if (code == 0)
        return FERRY_OK;
    if (!host || code != EAI_NONAME)
        return no_such(host, port, code);
    if (atomic_load(&left_behind) >= LEFT_MAX)
        return ferry_fail(FERRY_ETIMEOUT,
                          "%s: '%s' is not looked up: the system's resolver "
                          "has not answered %d times",
                          w->what ? w->what : "connect", host, LEFT_MAX);
    hints.ai_flags &= ~AI_NUMERICHOST;
    FERRY_TRY(begin(host, service, &hints, &l));
    FERRY_TRY(finish(l, w, &code, out));
    return code == 0 ? FERRY_OK : no_such(host, port, code);
}
