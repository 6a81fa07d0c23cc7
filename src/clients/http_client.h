/* SPDX-License-Identifier: Apache-2.0 */
/* The parts of the HTTP client: its server's address, one call, the reading
 * of answers. Invariant: a call's handles belong to the thread that makes
 * it; another thread may only set `canceled` and wake it, under the lock. */
#ifndef FERRY_CLIENTS_HTTP_CLIENT_H
#define FERRY_CLIENTS_HTTP_CLIENT_H

#include "base/str.h"

#include <ferry/client.h>

#include <curl/curl.h>
#include <pthread.h>
#include <stdatomic.h>

#define FERRY__HTTP_BODY_MAX ((size_t)64 << 20)

typedef struct ferry__http_address {
    char *given;     /* as the caller wrote it */
    char *base;      /* without trailing slashes: routes are put after it */
    char *root;      /* without path */
    char *path;      /* "" or "/v1" */
    char *host_port; /* "127.0.0.1:8000", "[::1]:8000" */
} ferry__http_address;

ferry_status ferry__http_address_parse(const char *base_url,
                                       ferry__http_address *out_address);
void ferry__http_address_free(ferry__http_address *address);

/* The handles of one call at a time. */
typedef struct ferry__http_line {
    CURL *easy;
    CURLM *multi;
} ferry__http_line;

/* One operation: one or several requests that are canceled together. */
typedef struct ferry__http_op {
    struct ferry__http_op *next;
    ferry__http_line line;
    bool borrowed; /* the client's own line, to be kept */
    bool cancelable;
    atomic_bool canceled;
    const char *name; /* for error lines */
    int64_t timeout_ms;
} ferry__http_op;

typedef struct ferry__http_client {
    ferry__http_address address;
    char *token, *proxy, *ca_file;
    int64_t timeout_ms, connect_timeout_ms;
    bool pause;
    atomic_bool paused; /* by this client, not yet resumed */
    atomic_bool inited; /* the servers' channel is this client's */
    atomic_bool fresh;  /* the next request opens a connection */
    atomic_bool open;   /* a round of this client's: no call of it failed */

    pthread_mutex_t lock; /* guards what follows */
    ferry__http_line line;
    bool line_busy;
    ferry__http_op *ops;
    pthread_cond_t left; /* an operation ended */
} ferry__http_client;

ferry_status ferry__http_line_open(ferry__http_line *out_line);
void ferry__http_line_close(ferry__http_line *line);

ferry_status ferry__http_op_begin(ferry__http_client *c, ferry__http_op *op,
                                  const char *name, bool cancelable);
void ferry__http_op_end(ferry__http_client *c, ferry__http_op *op);
void ferry__http_cancel(ferry__http_client *c);
/* Cancels every operation, whatever it is, and waits until all are back. */
void ferry__http_drain(ferry__http_client *c);

typedef struct ferry__http_reply {
    long code;
    ferry__str body;
    bool too_long;
} ferry__http_reply;

/* One request. `body` NULL: a GET when `get`, else a POST without body. The
 * reply is filled (ferry__str_free it) whenever a whole answer came, of
 * whatever status code. */
ferry_status ferry__http_request(ferry__http_client *c, ferry__http_op *op,
                                 bool get, const char *route, const char *body,
                                 size_t body_bytes, ferry__http_reply *reply);

/* FERRY_OK for a code of success, else the status and line it stands for. */
ferry_status ferry__http_judge(const ferry__http_client *c, const char *call,
                               const char *route,
                               const ferry__http_reply *reply);

#endif
