/* SPDX-License-Identifier: Apache-2.0 */
/* One JSON request to a server, for the commands that ask it something. */
#ifndef FERRY_CLI_CLI_HTTP_H
#define FERRY_CLI_CLI_HTTP_H

#include <ferry/status.h>
#include <jansson.h>

typedef struct cli_http {
    const char *base_url; /* with or without a trailing slash */
    const char *token;    /* NULL: the setting `token` */
    int64_t timeout_ms;   /* of the whole request */
} cli_http;

/* GET when `body` is NULL, else POST; the body is borrowed. *out_reply is the
 * caller's. FERRY_ECONN: no connection; FERRY_ETIMEOUT; FERRY_EAUTH;
 * FERRY_EROUTE: 404; FERRY_EPEER: another answer than 200, with the server's
 * own text; FERRY_EINVAL: a malformed URL. */
ferry_status cli_http_json(const cli_http *http, const char *route,
                           const json_t *body, json_t **out_reply);

#endif
