/* SPDX-License-Identifier: Apache-2.0 */
/* A tiny HTTP server that follows a script, a client of it, and what was sent
 * and said. */
#ifndef FERRY_TESTS_HTTP_SCRIPT_H
#define FERRY_TESTS_HTTP_SCRIPT_H

#include "harness/tiny_http.h"

#include <ferry/client.h>

/* What the server answers to a route: the first rule that fits. */
typedef struct rule {
    const char *target; /* prefix */
    tiny_reply reply;
} rule;

typedef struct script {
    rule rules[8];
} script;

/* The handler of a server whose arg is a script; else it answers {}. */
tiny_reply follow(void *arg, const tiny_request *request);

ferry_client open_client(const char *url, int64_t timeout_ms);

/* Request `index` was this one; `body` is JSON or empty. */
void sent(tiny_http *s, int index, const char *method, const char *target,
          const char *body);

/* The text is part of the last error's line. */
void line_has(const char *text);

#endif
