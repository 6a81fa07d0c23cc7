/* SPDX-License-Identifier: Apache-2.0 */
/* JSON over HTTP for the commands.
 * Invariant: bounded in time and in bytes, no proxy whatever the environment
 * says, no redirect followed, so that a token goes to its server only. */
#include "cli/cli_http.h"

#include "base/config.h"
#include "base/json.h"
#include "base/str.h"

#include <curl/curl.h>
#include <stdlib.h>
#include <string.h>

#define REPLY_MAX  ((size_t)256 << 20)
#define CONNECT_MS 10000L

static size_t take_bytes(char *bytes, size_t one, size_t n, void *arg)
{
    ferry__str *reply = arg;

    if (reply->length + n > REPLY_MAX)
        return 0; /* ends the transfer */
    ferry__str_append_n(reply, bytes, n);
    return reply->failed ? 0 : one * n;
}

static ferry_status status_of(CURLcode code, const char *url, const char *error)
{
    const char *why = error[0] ? error : curl_easy_strerror(code);

    switch (code) {
    case CURLE_URL_MALFORMAT:
    case CURLE_UNSUPPORTED_PROTOCOL:
        return ferry_fail(FERRY_EINVAL, "malformed URL %s: %s", url, why);
    case CURLE_OPERATION_TIMEDOUT:
        return ferry_fail(FERRY_ETIMEOUT, "%s: %s", url, why);
    case CURLE_WRITE_ERROR:
        return ferry_fail(FERRY_EPEER, "%s: the reply is larger than %zu MiB",
                          url, REPLY_MAX >> 20);
    case CURLE_OUT_OF_MEMORY:
        return ferry_fail(FERRY_ENOMEM, "%s: out of memory", url);
    default:
        return ferry_fail(FERRY_ECONN, "%s: %s", url, why);
    }
}

/* What the server said went wrong: vLLM's form, FastAPI's, or plain text. */
static const char *error_text(const json_t *reply, const char *raw)
{
    const json_t *error = json_object_get(reply, "error");
    const char *text = json_string_value(json_object_get(error, "message"));

    if (!text)
        text = json_string_value(json_object_get(reply, "detail"));
    return text ? text : raw;
}

static ferry_status read_reply(const char *url, long http_code,
                               const ferry__str *raw, json_t **out_reply)
{
    json_t *reply = NULL;
    const char *text = raw->data ? raw->data : "";
    ferry_status status;

    status = ferry__json_parse("reply", text, raw->length, &reply);
    if (http_code == 200 && status == FERRY_OK) {
        *out_reply = reply;
        return FERRY_OK;
    }
    if (http_code == 200)
        status = ferry_fail(FERRY_EPEER, "%s answers 200 without JSON", url);
    else if (http_code == 404)
        status = ferry_fail(FERRY_EROUTE, "%s: HTTP 404: %s", url,
                            error_text(reply, text));
    else
        status = ferry_fail(
            http_code == 401 || http_code == 403 ? FERRY_EAUTH : FERRY_EPEER,
            "%s: HTTP %ld: %s", url, http_code, error_text(reply, text));
    json_decref(reply);
    return status;
}

static struct curl_slist *make_headers(const cli_http *http)
{
    const char *token =
        http->token ? http->token : ferry__config_get(FERRY__CONFIG_TOKEN);
    struct curl_slist *headers =
        curl_slist_append(NULL, "Content-Type: application/json");
    ferry__str line = {0};

    headers = curl_slist_append(headers, "Expect:");
    if (token && token[0]) {
        ferry__str_printf(&line, "Authorization: Bearer %s", token);
        headers = curl_slist_append(headers, line.data ? line.data : "");
        ferry__str_free(&line);
    }
    return headers;
}

static ferry_status exchange(CURL *curl, const cli_http *http, const char *url,
                             const char *body, json_t **out_reply)
{
    struct curl_slist *headers = make_headers(http);
    char error[CURL_ERROR_SIZE] = "";
    ferry__str raw = {0};
    long http_code = 0;
    CURLcode code;
    ferry_status status;

    curl_easy_setopt(curl, CURLOPT_URL, url);
#if LIBCURL_VERSION_NUM >= 0x075500
    curl_easy_setopt(curl, CURLOPT_PROTOCOLS_STR, "http,https");
#else
    curl_easy_setopt(curl, CURLOPT_PROTOCOLS,
                     (long)(CURLPROTO_HTTP | CURLPROTO_HTTPS));
#endif
    curl_easy_setopt(curl, CURLOPT_PROXY, "");
    curl_easy_setopt(curl, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(curl, CURLOPT_HTTPHEADER, headers);
    curl_easy_setopt(curl, CURLOPT_ERRORBUFFER, error);
    curl_easy_setopt(curl, CURLOPT_CONNECTTIMEOUT_MS, CONNECT_MS);
    curl_easy_setopt(curl, CURLOPT_TIMEOUT_MS, (long)http->timeout_ms);
    curl_easy_setopt(curl, CURLOPT_WRITEFUNCTION, take_bytes);
    curl_easy_setopt(curl, CURLOPT_WRITEDATA, &raw);
    if (body)
        curl_easy_setopt(curl, CURLOPT_POSTFIELDS, body);
    code = curl_easy_perform(curl);
    curl_easy_getinfo(curl, CURLINFO_RESPONSE_CODE, &http_code);
    status = code == CURLE_OK ? read_reply(url, http_code, &raw, out_reply)
                              : status_of(code, url, error);
    ferry__str_free(&raw);
    curl_slist_free_all(headers);
    return status;
}

ferry_status cli_http_json(const cli_http *http, const char *route,
                           const json_t *body, json_t **out_reply)
{
    size_t length = strlen(http->base_url);
    char *text = body ? json_dumps(body, JSON_COMPACT) : NULL;
    CURL *curl = curl_easy_init();
    ferry__str url = {0};
    ferry_status status = FERRY_ENOMEM;

    while (length && http->base_url[length - 1] == '/')
        length--;
    ferry__str_append_n(&url, http->base_url, length);
    ferry__str_append(&url, route);
    if (curl && !url.failed && (text || !body))
        status = exchange(curl, http, url.data, text, out_reply);
    else
        ferry_fail(FERRY_ENOMEM, "out of memory");
    curl_easy_cleanup(curl);
    ferry__str_free(&url);
    free(text);
    return status;
}
