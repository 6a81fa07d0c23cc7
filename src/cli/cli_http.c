/* SPDX-License-Identifier: Apache-2.0 */
/* JSON over HTTP for the commands, through the library's own client: the
 * same bounds, the same reading of addresses and failures as a push has. */
#include "cli/cli_http.h"

#include "cli/cli.h"

#include "base/json.h"
#include "base/str.h"
#include "clients/http_client.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static ferry_status read_reply(const ferry__http_client *c, const char *route,
                               const ferry__http_reply *reply,
                               json_t **out_reply)
{
    ferry_status status;

    /* The client would speak of the weight routes, which these are not. */
    if (reply->code == 404 && strncmp(route, "/v1/", 4) == 0)
        return ferry_fail(FERRY_EROUTE, "%s: the server has no %s",
                          c->address.base, route);
    FERRY_TRY(ferry__http_judge(c, route + 1, route, reply));
    status =
        ferry__json_parse("reply", reply->body.data ? reply->body.data : "",
                          reply->body.length, out_reply);
    if (status != FERRY_OK)
        return ferry_fail(FERRY_EPEER,
                          "%s: %s: the server's answer is no "
                          "JSON",
                          c->address.base, route + 1);
    return FERRY_OK;
}

static ferry_status exchange(ferry__http_client *c, const char *route,
                             const char *body, json_t **out_reply)
{
    ferry__http_reply reply = {0};
    ferry__http_op op;
    ferry_status status;

    FERRY_TRY(ferry__http_op_begin(c, &op, route + 1, false));
    status = ferry__http_request(c, &op, body == NULL, route, body,
                                 body ? strlen(body) : 0, &reply);
    ferry__http_op_end(c, &op);
    if (status == FERRY_OK)
        status = read_reply(c, route, &reply, out_reply);
    ferry__str_free(&reply.body);
    return status;
}

ferry_status cli_http_json(const cli_http *http, const char *route,
                           const json_t *body, json_t **out_reply)
{
    ferry_http_options options = FERRY_HTTP_OPTIONS_INIT;
    ferry_client client = {0};
    char *text = NULL;
    ferry_status status;

    options.token = http->token;
    options.ca_file = http->ca_file;
    options.timeout_ms = http->timeout_ms;
    FERRY_TRY(ferry_client_http(http->base_url, &options, &client));
    if (body)
        text = json_dumps(body, JSON_COMPACT);
    if (body && !text)
        status = ferry_fail(FERRY_ENOMEM, "%s: out of memory", route);
    else
        status = exchange(client.self, route, text, out_reply);
    free(text);
    ferry_client_close(&client);
    return status;
}

int cli_ca_check(const char *command, const char *ca_file)
{
    char line[512];
    bool found = false;
    FILE *file;
    int error;

    if (!ca_file)
        return -1;
    file = fopen(ca_file, "re");
    if (!file)
        return cli_usage(command, "--ca %s: %s", ca_file, strerror(errno));
    errno = 0;
    while (!found && fgets(line, sizeof(line), file))
        found = ferry__starts_with(line, "-----BEGIN ") &&
                strstr(line, "CERTIFICATE-----") != NULL;
    error = ferror(file) ? errno : 0;
    fclose(file);
    if (error)
        return cli_usage(command, "--ca %s: %s", ca_file, strerror(error));
    if (!found)
        return cli_usage(command, "--ca %s: holds no PEM certificate", ca_file);
    return -1;
}
