/* SPDX-License-Identifier: Apache-2.0 */
/* Replies in vLLM's forms, and reading of bodies. A caller's mistake is 4xx,
 * what no engine can do is 501, the rest is 5xx (H2). */
#include "base/alloc.h"
#include "base/json.h"
#include "serve/http.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void ferry__reply_json(ferry__exchange *x, json_t *value)
{
    char *text = value == NULL ? NULL : json_dumps(value, JSON_COMPACT);

    json_decref(value);
    if (text == NULL) {
        ferry__reply_error(x, 500, NULL, "out of memory");
        return;
    }
    ferry__str_append(&x->reply, text);
    free(text);
}

static const char *type_of(unsigned int code)
{
    switch (code) {
    case 400:
    case 413:
        return "Bad Request";
    case 401:
        return "Unauthorized";
    case 404:
        return "NotFoundError";
    case 409:
        return "Conflict";
    case 501:
        return "NotImplementedError";
    case 503:
        return "ServiceUnavailableError";
    default:
        return "InternalServerError";
    }
}

void ferry__reply_error(ferry__exchange *x, unsigned int code,
                        const char *param, const char *fmt, ...)
{
    char message[1536];
    va_list args;

    va_start(args, fmt);
    vsnprintf(message, sizeof message, fmt, args);
    va_end(args);
    x->status = code;
    ferry__str_append(&x->reply, "{\"error\":{\"message\":");
    ferry__str_json(&x->reply, message);
    ferry__str_append(&x->reply, ",\"type\":");
    ferry__str_json(&x->reply, type_of(code));
    ferry__str_append(&x->reply, ",\"param\":");
    if (param == NULL)
        ferry__str_append(&x->reply, "null");
    else
        ferry__str_json(&x->reply, param);
    ferry__str_printf(&x->reply, ",\"code\":%u}}", code);
}

static unsigned int code_of(ferry_status status)
{
    switch (status) {
    case FERRY_EINVAL:
    case FERRY_EUNKNOWN:
    case FERRY_EEXIST:
    case FERRY_EOVERFLOW:
    case FERRY_EMISMATCH:
    case FERRY_ECOVERAGE:
    case FERRY_EVERSION:
        return 400;
    case FERRY_EAUTH:
        return 403;
    case FERRY_EORDER:
    case FERRY_EBUSY:
        return 409;
    case FERRY_ENOTSUP:
        return 501;
    case FERRY_ENOTREADY:
        return 503;
    default:
        return 500;
    }
}

void ferry__reply_status(ferry__exchange *x, ferry_status status)
{
    ferry__reply_error(x, code_of(status), NULL, "%s", ferry_last_error());
}

void ferry__reply_invalid(ferry__exchange *x, const char *location,
                          const char *type, const char *message)
{
    ferry__reply_error(x, 400, location,
                       "1 validation error:\n  {'type': '%s', 'loc': '%s', "
                       "'msg': '%s'}",
                       type, location, message);
}

const char *ferry__query(ferry__exchange *x, const char *name)
{
    return MHD_lookup_connection_value(x->connection, MHD_GET_ARGUMENT_KIND,
                                       name);
}

bool ferry__body_object(ferry__exchange *x, bool may_be_empty, json_t **out)
{
    json_t *value = NULL;

    if (may_be_empty && x->body_size == 0) {
        value = json_object();
    } else if (ferry__json_parse("body", x->body, x->body_size, &value) < 0) {
        ferry__reply_error(x, 400, "body", "Invalid JSON format: %s",
                           ferry_last_error());
        return false;
    }
    /* JSON null is as good as nothing where nothing is fine. */
    if (may_be_empty && json_is_null(value)) {
        json_decref(value);
        value = json_object();
    }
    if (!json_is_object(value)) {
        json_decref(value);
        ferry__reply_error(x, 400, "body",
                           "Request body must be a JSON object");
        return false;
    }
    *out = value;
    return true;
}
