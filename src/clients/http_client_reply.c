/* SPDX-License-Identifier: Apache-2.0 */
/* What a server's answer means.
 * Invariant: a failure names the server and the call, and carries the
 * server's own words where it said any (O-09, O-62). */
#include "clients/http_client.h"

#include "base/json.h"

#include <string.h>

#define WORDS_MAX 800

/* The first message of a list of validation errors, as FastAPI makes it. */
static const char *detail_words(const json_t *detail)
{
    if (json_is_array(detail))
        detail = json_object_get(json_array_get(detail, 0), "msg");
    return json_string_value(detail);
}

/* {"error":{"message":W}}, {"error":W}, {"detail":W} or {"message":W}. */
static const char *json_words(const json_t *value)
{
    const json_t *error = json_object_get(value, "error");
    const char *words = json_string_value(json_object_get(error, "message"));

    if (!words)
        words = json_string_value(error);
    if (!words)
        words = detail_words(json_object_get(value, "detail"));
    if (!words)
        words = json_string_value(json_object_get(value, "message"));
    return words;
}

/* Copies the server's words, or the raw body where it has no known form. */
static void copy_words(const ferry__http_reply *reply, char *out)
{
    const char *words = NULL;
    json_t *value = NULL;
    size_t n;

    if (reply->body.length > 0 &&
        ferry__json_parse("answer", reply->body.data, reply->body.length,
                          &value) == FERRY_OK)
        words = json_words(value);
    if (!words)
        words = reply->body.data ? reply->body.data : "";
    n = strnlen(words, WORDS_MAX);
    memcpy(out, words, n);
    out[n] = '\0';
    json_decref(value);
    while (n > 0 && (unsigned char)out[n - 1] <= 0x20)
        out[--n] = '\0';
    if (n == 0)
        memcpy(out, "no text", sizeof("no text"));
}

/* The query is no part of the route's name. */
static int route_length(const char *route)
{
    return (int)strcspn(route, "?");
}

static bool is_ferrys(const char *route)
{
    return ferry__starts_with(route, "/ferry/");
}

/* Which of the reasons it is shows in the base URL itself; nothing else is
 * tried. */
static ferry_status route_absent(const ferry__http_client *c, const char *call,
                                 const char *route)
{
    const ferry__http_address *a = &c->address;
    int n = route_length(route);
    size_t given = strlen(a->given);

    if (a->path[0])
        return ferry_fail(FERRY_EROUTE,
                          "%s: %s: base_url has path %s; the weight routes "
                          "are at the root of a server: try %s",
                          a->base, call, a->path, a->root);
    if (is_ferrys(route))
        return ferry_fail(FERRY_EROUTE,
                          "%s: %s: server has no %.*s: it is not ferry "
                          "serve, or its weight transfer routes are off",
                          a->base, call, n, route);
    if (given > 1 && a->given[given - 1] == '/' && a->given[given - 2] == '/')
        return ferry_fail(FERRY_EROUTE,
                          "%s: %s: base_url '%.100s' was read as %s, and "
                          "that server has no %.*s: its weight transfer "
                          "routes are off, or it is another server",
                          a->base, call, a->given, a->base, n, route);
    return ferry_fail(FERRY_EROUTE,
                      "%s: %s: server has no %.*s: its weight transfer "
                      "routes are off (start it with "
                      "--weight-transfer-config; vLLM also needs "
                      "VLLM_SERVER_DEV_MODE=1)",
                      a->base, call, n, route);
}

static ferry_status status_of(long code)
{
    switch (code) {
    case 401:
    case 403:
        return FERRY_EAUTH;
    case 409:
        return FERRY_EORDER;
    case 501:
        return FERRY_ENOTSUP;
    case 503:
        return FERRY_ENOTREADY;
    default:
        return FERRY_EPEER;
    }
}

ferry_status ferry__http_judge(const ferry__http_client *c, const char *call,
                               const char *route,
                               const ferry__http_reply *reply)
{
    const char *base = c->address.base;
    char words[WORDS_MAX + 1];

    if (reply->code >= 200 && reply->code < 300)
        return FERRY_OK;
    if (reply->code == 404 || reply->code == 405)
        return route_absent(c, call, route);
    if (reply->code >= 300 && reply->code < 400)
        return ferry_fail(FERRY_EPEER,
                          "%s: %s: server answered %ld: redirects are not "
                          "followed",
                          base, call, reply->code);
    copy_words(reply, words);
    /* 403 is for a rank that the data plane turned away, token or not. */
    if (reply->code == 401)
        return ferry_fail(FERRY_EAUTH, "%s: %s: server answered %ld to %s: %s",
                          base, call, reply->code,
                          c->token ? "our token" : "a call without token",
                          words);
    return ferry_fail(status_of(reply->code), "%s: %s: server answered %ld: %s",
                      base, call, reply->code, words);
}
