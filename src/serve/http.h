/* SPDX-License-Identifier: Apache-2.0 */
/* The HTTP server: limits, the token, and the table of routes.
 * Invariant: no handler sees a body larger than its route's limit, or a
 * request without the token where one is set. */
#ifndef FERRY_SERVE_HTTP_H
#define FERRY_SERVE_HTTP_H

#include "serve/server.h"

#include <jansson.h>
#include <microhttpd.h>

/* One exchange. A handler sets status and reply. */
typedef struct ferry__exchange {
    ferry__server *server;
    struct MHD_Connection *connection;
    const char *body; /* NUL terminated */
    size_t body_size;
    unsigned int status; /* 200 unless set */
    ferry__str reply;
    const char *content_type; /* application/json unless set */
    const char *policy;       /* what a page may do; NULL: no page */
} ferry__exchange;

typedef void (*ferry__handler)(ferry__exchange *x);

#define FERRY__ROUTE_WEIGHT                                                    \
    0x1u                       /* exists only with a backend; takes the \
                                    weight token where there is one */
#define FERRY__ROUTE_OPEN 0x2u /* no token asked */

typedef struct ferry__route {
    const char *method, *path;
    uint32_t flags;
    ferry__handler handler;
} ferry__route;

extern const ferry__route ferry__routes_weights[];
extern const ferry__route ferry__routes_generate[];
extern const ferry__route ferry__routes_info[];
extern const ferry__route ferry__routes_share[];

/* Listens; *out_port is the bound one. */
ferry_status ferry__http_start(ferry__server *server,
                               struct MHD_Daemon **out_daemon,
                               int32_t *out_port);
/* daemon may be NULL: what a start that failed left behind. */
void ferry__http_stop(ferry__server *server, struct MHD_Daemon *daemon);

/* ---- for handlers ---- */
void ferry__reply_json(ferry__exchange *x, json_t *value); /* steals */
/* {"error": {"message", "type", "param", "code"}} */
void ferry__reply_error(ferry__exchange *x, unsigned int code,
                        const char *param, const char *fmt, ...)
    FERRY_PRINTF(4, 5);
/* The same from a status and its recorded line. */
void ferry__reply_status(ferry__exchange *x, ferry_status status);
/* vLLM's words for a field that is missing or of a wrong type. */
void ferry__reply_invalid(ferry__exchange *x, const char *location,
                          const char *type, const char *message);
const char *ferry__query(ferry__exchange *x, const char *name);
/* Parses the body as an object into *out; false when a reply was made. An
 * empty body is an empty object when `may_be_empty`. */
bool ferry__body_object(ferry__exchange *x, bool may_be_empty, json_t **out);

#endif
