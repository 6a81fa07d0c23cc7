/* SPDX-License-Identifier: Apache-2.0 */
/* The address of a server, as users write it.
 * Invariant: what is accepted is a scheme, a host, perhaps a port and a
 * path, and nothing else; trailing slashes are gone. */
#include "clients/http_client.h"

#include "base/alloc.h"

#include <string.h>
#include <strings.h>

void ferry__http_address_free(ferry__http_address *a)
{
    ferry__free(a->given);
    ferry__free(a->base);
    ferry__free(a->root);
    ferry__free(a->path);
    ferry__free(a->host_port);
    memset(a, 0, sizeof(*a));
}

static ferry_status refuse(const char *url, const char *why)
{
    return ferry_fail(FERRY_EINVAL, "base_url '%.200s': %s", url, why);
}

/* "http://::1:8000" splits nowhere for certain, so it is not guessed at. */
static ferry_status check_brackets(const char *url, const char *host)
{
    size_t n = strcspn(host, "/?#");
    const char *colon = memchr(host, ':', n), *last = NULL;

    if (host[0] == '[' || !colon)
        return FERRY_OK;
    for (const char *p = colon; (p = memchr(p, ':', n - (size_t)(p - host)));
         p++)
        last = p;
    if (last == colon)
        return FERRY_OK;
    return ferry_fail(FERRY_EINVAL,
                      "base_url '%.200s': an IPv6 address needs brackets: "
                      "%.*s[%.*s]%.*s",
                      url, (int)(host - url), url, (int)(last - host), host,
                      (int)(n - (size_t)(last - host)), last);
}

static ferry_status check_text(const char *url)
{
    const char *host;

    for (const char *p = url; *p; p++) {
        if ((unsigned char)*p <= 0x20 || *p == 0x7F)
            return refuse(url, "must not contain spaces or control "
                               "characters");
    }
    if (strncasecmp(url, "http://", 7) == 0)
        host = url + 7;
    else if (strncasecmp(url, "https://", 8) == 0)
        host = url + 8;
    else
        return refuse(url, "must begin with http:// or https://");
    if (strpbrk(host, "?#"))
        return refuse(url, "must have no query and no fragment");
    if (memchr(host, '@', strcspn(host, "/")))
        return refuse(url, "must have no user name; give a token instead");
    FERRY_TRY(check_brackets(url, host));
    if (host[0] == '\0' || host[0] == '/' || host[0] == ':')
        return refuse(url, "has no host");
    return FERRY_OK;
}

/* Copies one part out of curl's handle into memory of ours. */
static ferry_status get_part(CURLU *u, CURLUPart part, unsigned flags,
                             char **out)
{
    char *text = NULL;
    CURLUcode rc = curl_url_get(u, part, &text, flags);

    if (rc == CURLUE_OUT_OF_MEMORY)
        return ferry_fail(FERRY_ENOMEM, "out of memory: URL");
    *out = ferry__strdup(rc == CURLUE_OK && text ? text : "");
    curl_free(text);
    return *out ? FERRY_OK : FERRY_ENOMEM;
}

static ferry_status join(char **out, const char *a, const char *b,
                         const char *c, const char *d)
{
    ferry__str s = {0};

    ferry__str_printf(&s, "%s%s%s%s", a, b, c, d);
    return ferry__str_take(&s, out);
}

static ferry_status take_parts(CURLU *u, ferry__http_address *a)
{
    char *scheme = NULL, *host = NULL, *zone = NULL, *port = NULL;
    ferry_status st = get_part(u, CURLUPART_SCHEME, 0, &scheme);

    if (st == FERRY_OK)
        st = get_part(u, CURLUPART_HOST, 0, &host);
    if (st == FERRY_OK)
        st = get_part(u, CURLUPART_ZONEID, 0, &zone);
    if (st == FERRY_OK)
        st = get_part(u, CURLUPART_PORT, CURLU_DEFAULT_PORT, &port);
    if (st == FERRY_OK)
        st = get_part(u, CURLUPART_PATH, 0, &a->path);
    if (st == FERRY_OK && zone[0] && host[0] == '[') {
        char *with_zone = NULL;

        host[strlen(host) - 1] = '\0'; /* the closing bracket moves */
        st = join(&with_zone, host, "%25", zone, "]");
        ferry__free(host);
        host = with_zone;
    }
    if (st == FERRY_OK) {
        for (size_t n = strlen(a->path); n > 0 && a->path[n - 1] == '/'; n--)
            a->path[n - 1] = '\0';
        st = join(&a->host_port, host, ":", port, "");
    }
    if (st == FERRY_OK)
        st = join(&a->root, scheme, "://", a->host_port, "");
    if (st == FERRY_OK)
        st = join(&a->base, a->root, a->path, "", "");
    ferry__free(scheme);
    ferry__free(host);
    ferry__free(zone);
    ferry__free(port);
    return st;
}

ferry_status ferry__http_address_parse(const char *base_url,
                                       ferry__http_address *out_address)
{
    ferry__http_address a = {0};
    ferry_status status = FERRY_ENOMEM;
    CURLUcode rc;
    CURLU *u;

    if (!base_url)
        return ferry_fail(FERRY_EINVAL, "base_url must not be NULL");
    FERRY_TRY(check_text(base_url));
    u = curl_url();
    if (!u)
        return ferry_fail(FERRY_ENOMEM, "out of memory: URL");
    rc = curl_url_set(u, CURLUPART_URL, base_url, 0);
    if (rc != CURLUE_OK) {
        curl_url_cleanup(u);
        return refuse(base_url, curl_url_strerror(rc));
    }
    a.given = ferry__strdup(base_url);
    if (a.given)
        status = take_parts(u, &a);
    curl_url_cleanup(u);
    if (status < 0) {
        ferry__http_address_free(&a);
        return status;
    }
    *out_address = a;
    return FERRY_OK;
}
