/* SPDX-License-Identifier: Apache-2.0 */
/* One JSON request to a server, for the commands that ask it something. */
#ifndef FERRY_CLI_CLI_HTTP_H
#define FERRY_CLI_CLI_HTTP_H

#include <ferry/status.h>
#include <jansson.h>

typedef struct cli_http {
    const char *base_url; /* with or without a trailing slash */
    const char *token;    /* NULL: the setting `token` */
    const char *ca_file;  /* PEM; NULL: the system's */
    int64_t timeout_ms;   /* of the whole request */
} cli_http;

/* GET when `body` is NULL, else POST; the body is borrowed, *out_reply is the
 * caller's. Fails as ferry_client_http and its calls do; FERRY_EINVAL is a
 * malformed URL or token. */
ferry_status cli_http_json(const cli_http *http, const char *route,
                           const json_t *body, json_t **out_reply);

/* Says of --ca FILE that it cannot be read or holds no certificate, before
 * anything is connected: -1 to go on, or 2. NULL is fine. */
int cli_ca_check(const char *command, const char *ca_file);

#endif
