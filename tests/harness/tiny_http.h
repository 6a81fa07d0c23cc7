/* SPDX-License-Identifier: Apache-2.0 */
/* A small HTTP/1.1 server on a port of its own, for tests of the client:
 * it records every request and answers as told, also wrongly. */
#ifndef FERRY_TESTS_TINY_HTTP_H
#define FERRY_TESTS_TINY_HTTP_H

#include <stdbool.h>
#include <stddef.h>

#define TINY_REQUESTS_MAX 64

typedef struct tiny_request {
    char method[8];
    char target[256];
    char authorization[128];
    char content_type[64];
    char *body;     /* never NULL */
    int connection; /* 1, 2, … */
} tiny_request;

typedef enum tiny_mode {
    TINY_WHOLE = 0,
    TINY_TORN,   /* half of the body, then the connection closes */
    TINY_SILENT, /* closes the connection instead of answering */
    TINY_HANG,   /* never answers */
    TINY_FLOOD   /* a chunked body without end */
} tiny_mode;

typedef struct tiny_reply {
    tiny_mode mode;
    int code;           /* 0 = 200 */
    const char *body;   /* NULL = "{}" */
    const char *header; /* a whole line with CRLF, or NULL */
} tiny_reply;

/* Called on the connection's thread. */
typedef tiny_reply (*tiny_handler)(void *arg, const tiny_request *request);

typedef struct tiny_http tiny_http;

/* NULL when the address ("127.0.0.1", "::1") cannot be had here. */
tiny_http *tiny_http_start(const char *address, tiny_handler handler,
                           void *arg);
void tiny_http_stop(tiny_http *server);
int tiny_http_port(const tiny_http *server);
/* "http://127.0.0.1:PORT", "http://[::1]:PORT" */
const char *tiny_http_url(const tiny_http *server);
int tiny_http_count(tiny_http *server);
const tiny_request *tiny_http_request(tiny_http *server, int index);

/* A listener on 127.0.0.1 whose queue is full: connecting to it hangs until
 * it is closed. Returns the port and the descriptors to close. */
int tiny_http_unreachable(int *out_fds, int n_fds);
/* A port of 127.0.0.1 on which nobody listens. */
int tiny_http_closed_port(void);

#endif
