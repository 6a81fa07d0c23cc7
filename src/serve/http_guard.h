/* SPDX-License-Identifier: Apache-2.0 */
/* Bounds on how long a connection may take to send a request or to take an
 * answer, whatever it does meanwhile: a client that drips a byte a second is
 * cut off like one that sends none. A handler may take as long as it needs.
 * Invariant: a socket is shut down only while its connection is listed. */
#ifndef FERRY_SERVE_HTTP_GUARD_H
#define FERRY_SERVE_HTTP_GUARD_H

#include <ferry/status.h>
#include <microhttpd.h>
#include <pthread.h>
#include <stdbool.h>

typedef struct ferry__guarded ferry__guarded;

typedef struct ferry__http_guard {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    pthread_t thread;
    bool started;
    /* under the lock */
    ferry__guarded *connections;
    int64_t bound_ms;
    bool stop;
    uint64_t n_cut;
} ferry__http_guard;

ferry_status ferry__http_guard_open(ferry__http_guard *g, int64_t bound_ms);
/* After the daemon stopped. */
void ferry__http_guard_close(ferry__http_guard *g);
/* MHD_OPTION_NOTIFY_CONNECTION; cls is the guard. */
void ferry__http_guard_notify(void *cls, struct MHD_Connection *c,
                              void **context,
                              enum MHD_ConnectionNotificationCode code);

/* `bytes` of a request's body came: it has that much longer. */
void ferry__http_guard_body(ferry__http_guard *g, struct MHD_Connection *c,
                            size_t bytes);
/* The request is whole: no bound while it is handled. */
void ferry__http_guard_handling(ferry__http_guard *g, struct MHD_Connection *c);
/* An answer of `bytes` goes out. */
void ferry__http_guard_answering(ferry__http_guard *g, struct MHD_Connection *c,
                                 size_t bytes);
/* The exchange is over: the next request may take its time anew. */
void ferry__http_guard_next(ferry__http_guard *g, struct MHD_Connection *c);

#endif
