/* SPDX-License-Identifier: Apache-2.0 */
/* The HTTP server; see http.h. */
#include "serve/http.h"

#include "base/alloc.h"
#include "base/log.h"
#include "comm/tcp_resolve.h"

#include <arpa/inet.h>
#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define CONNECTIONS_MAX 512
#define RESOLVE_MS      INT64_C(10000)
/* The guard bounds what a client may take; this one is for a handler whose
 * client is silent, which may take long. */
#define IDLE_TIMEOUT_S (6 * 3600)
#define PEM_MAX        ((size_t)1 << 20)

/* What is collected of one request until its body is whole. */
typedef struct pending {
    const ferry__route *route;
    ferry__str body;
    unsigned int refusal; /* not 0: read on, keep nothing, answer this */
    const char *text;
} pending;

static const ferry__route *find_in(const ferry__route *table,
                                   const ferry__server *s, const char *method,
                                   const char *path, bool *path_exists)
{
    for (; table->path != NULL; table++) {
        if (strcmp(table->path, path) != 0)
            continue;
        if ((table->flags & FERRY__ROUTE_WEIGHT) && s->options->backend == NULL)
            continue;
        *path_exists = true;
        if (strcmp(table->method, method) == 0)
            return table;
    }
    return NULL;
}

static const ferry__route *find(const ferry__server *s, const char *method,
                                const char *path, bool *path_exists)
{
    const ferry__route *const tables[] = {
        ferry__routes_weights, ferry__routes_generate, ferry__routes_info,
        ferry__routes_share};
    const ferry__route *route = NULL;

    for (size_t i = 0; route == NULL && i < sizeof tables / sizeof tables[0];
         i++)
        route = find_in(tables[i], s, method, path, path_exists);
    return route;
}

static enum MHD_Result queue(struct MHD_Connection *c, ferry__exchange *x)
{
    struct MHD_Response *response;
    enum MHD_Result result;
    size_t size_bytes = x->reply.length;

    if (x->reply.failed) {
        ferry__str_free(&x->reply);
        x->status = 500;
    }
    response = MHD_create_response_from_buffer(
        x->reply.length, x->reply.data == NULL ? (char *)"" : x->reply.data,
        MHD_RESPMEM_MUST_COPY);
    ferry__str_free(&x->reply);
    if (response == NULL)
        return MHD_NO;
    MHD_add_response_header(response, "Content-Type", x->content_type);
    ferry__http_guard_answering(&x->server->guard, c, size_bytes);
    if (x->status == 401)
        MHD_add_response_header(response, "WWW-Authenticate", "Bearer");
    if (x->policy != NULL) {
        MHD_add_response_header(response, "Content-Security-Policy", x->policy);
        MHD_add_response_header(response, "Referrer-Policy", "no-referrer");
    }
    MHD_add_response_header(response, "X-Content-Type-Options", "nosniff");
    MHD_add_response_header(response, "Cache-Control", "no-store");
    result = MHD_queue_response(c, x->status, response);
    MHD_destroy_response(response);
    return result;
}

static enum MHD_Result refuse(ferry__server *s, struct MHD_Connection *c,
                              unsigned int code, const char *text)
{
    ferry__exchange x = {
        .server = s, .status = code, .content_type = "application/json"};

    if (code == 404 || code == 405) {
        ferry__str_append(&x.reply, "{\"detail\":");
        ferry__str_json(&x.reply, text);
        ferry__str_append(&x.reply, "}");
    } else {
        ferry__reply_error(&x, code, NULL, "%s", text);
    }
    return queue(c, &x);
}

static bool is_token(const char *given, const char *token)
{
    return token != NULL && ferry__equal_secret(given, token);
}

/* Weight routes take their own token where there is one, and it opens the
 * others too: who may replace the weights may ask about them. */
static bool authorised(const ferry__server *s, const ferry__route *route,
                       struct MHD_Connection *c)
{
    const char *key = s->options->api_key, *weight = s->options->weight_key;
    bool of_weights = (route->flags & FERRY__ROUTE_WEIGHT) != 0;
    const char *given =
        MHD_lookup_connection_value(c, MHD_HEADER_KIND, "Authorization");

    if (route->flags & FERRY__ROUTE_OPEN)
        return true;
    if (weight == NULL || !of_weights) {
        if (key == NULL)
            return true;
    }
    if (given == NULL || strncmp(given, "Bearer ", 7) != 0)
        return false;
    if (is_token(given + 7, weight))
        return true;
    return (weight == NULL || !of_weights) && is_token(given + 7, key);
}

/* Answers once the body was read and dropped, so that a client that is still
 * sending sees why rather than a closed connection. */
static void refuse_later(pending *p, unsigned int code, const char *text)
{
    if (p->refusal == 0) {
        p->refusal = code;
        p->text = text;
    }
    ferry__str_free(&p->body);
}

/* First call of a request: what can be told before its body comes. */
static enum MHD_Result begin(ferry__server *s, struct MHD_Connection *c,
                             const char *url, const char *method,
                             void **con_cls)
{
    bool path_exists = false;
    const ferry__route *route = find(s, method, url, &path_exists);
    const char *length =
        MHD_lookup_connection_value(c, MHD_HEADER_KIND, "Content-Length");
    pending *p = ferry__alloc(sizeof *p);

    if (p == NULL)
        return MHD_NO;
    p->route = route;
    if (route == NULL)
        refuse_later(p, path_exists ? 405 : 404,
                     path_exists ? "Method Not Allowed" : "Not Found");
    else if (!authorised(s, route, c))
        refuse_later(p, 401, "Unauthorized");
    else if (length != NULL &&
             strtoull(length, NULL, 10) > (uint64_t)s->options->max_body_bytes)
        refuse_later(p, 413, "Request body too large");
    *con_cls = p;
    return MHD_YES;
}

static enum MHD_Result on_request(void *cls, struct MHD_Connection *c,
                                  const char *url, const char *method,
                                  const char *version, const char *data,
                                  size_t *size, void **con_cls)
{
    ferry__server *s = cls;
    pending *p = *con_cls;
    ferry__exchange x = {.server = s,
                         .connection = c,
                         .status = 200,
                         .content_type = "application/json"};

    (void)version;
    if (p == NULL)
        return begin(s, c, url, method, con_cls);
    if (*size > 0) {
        ferry__http_guard_body(&s->guard, c, *size);
        if (p->body.length + *size > (size_t)s->options->max_body_bytes)
            refuse_later(p, 413, "Request body too large");
        if (p->refusal == 0)
            ferry__str_append_n(&p->body, data, *size);
        *size = 0;
        return MHD_YES;
    }
    if (p->body.failed)
        refuse_later(p, 500, "out of memory");
    if (p->refusal != 0)
        return refuse(s, c, p->refusal, p->text);
    x.body = p->body.data == NULL ? "" : p->body.data;
    x.body_size = p->body.length;
    ferry__http_guard_handling(&s->guard, c);
    p->route->handler(&x);
    return queue(c, &x);
}

static void on_done(void *cls, struct MHD_Connection *c, void **con_cls,
                    enum MHD_RequestTerminationCode code)
{
    pending *p = *con_cls;

    ferry__http_guard_next(&((ferry__server *)cls)->guard, c);
    (void)code;
    if (p == NULL)
        return;
    ferry__str_free(&p->body);
    ferry__free(p);
    *con_cls = NULL;
}

/* Binds the address; errors name host and port. */
static ferry_status listen_on(const char *host, int32_t port, int *out_fd,
                              int32_t *out_port)
{
    ferry__waiter w = {NULL, NULL, ferry__deadline_in(RESOLVE_MS), "host"};
    struct addrinfo *list = NULL;
    int fd = -1, one = 1;
    struct sockaddr_storage bound;
    socklen_t length = sizeof bound;
    ferry_status status = ferry__tcp_resolve(host, port, AI_PASSIVE, &w, &list);

    if (status < 0)
        return ferry__fail_prefix(status == FERRY_ECONN ? FERRY_EINVAL : status,
                                  "host");
    fd = socket(list->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd >= 0)
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (fd < 0 || bind(fd, list->ai_addr, list->ai_addrlen) < 0 ||
        listen(fd, 128) < 0 ||
        getsockname(fd, (struct sockaddr *)&bound, &length) < 0) {
        int error = errno;

        if (fd >= 0)
            close(fd);
        freeaddrinfo(list);
        return ferry_fail(error == EADDRINUSE ? FERRY_EEXIST : FERRY_EIO,
                          "cannot listen on %s port %d: %s", host, port,
                          error == EADDRINUSE ? "another program has it in use"
                                              : strerror(error));
    }
    freeaddrinfo(list);
    *out_port = ntohs(bound.ss_family == AF_INET6
                          ? ((struct sockaddr_in6 *)(void *)&bound)->sin6_port
                          : ((struct sockaddr_in *)(void *)&bound)->sin_port);
    *out_fd = fd;
    return FERRY_OK;
}

static void quiet(void *cls, const char *fmt, va_list args)
{
    char line[512];

    (void)cls;
    vsnprintf(line, sizeof line, fmt, args);
    line[strcspn(line, "\n")] = '\0';
    ferry__log(FERRY_LOG_DEBUG, "http: %s", line);
}

/* A PEM file as a text that is the caller's. */
static ferry_status read_pem(const char *flag, const char *path, char **out)
{
    FILE *f = fopen(path, "re");
    ferry__str s = {0};
    char part[4096];
    size_t n;
    bool failed;

    if (f == NULL)
        return ferry_fail(FERRY_EINVAL, "--%s %s: %s", flag, path,
                          strerror(errno));
    while ((n = fread(part, 1, sizeof part, f)) > 0 && s.length < PEM_MAX)
        ferry__str_append_n(&s, part, n);
    failed = ferror(f) != 0 || s.failed || s.length == 0 || s.length > PEM_MAX;
    fclose(f);
    if (failed || strstr(s.data, "-----BEGIN") == NULL) {
        ferry__str_free(&s);
        return ferry_fail(FERRY_EINVAL, "--%s %s is no PEM file", flag, path);
    }
    return ferry__str_take(&s, out);
}

/* Texts that must live as long as the daemon. */
static ferry_status open_tls(ferry__server *s)
{
    const ferry__serve_options *o = s->options;

    if (o->tls_cert == NULL)
        return FERRY_OK;
    if (MHD_is_feature_supported(MHD_FEATURE_TLS) != MHD_YES)
        return ferry_fail(FERRY_EBACKEND,
                          "--tls-cert: this libmicrohttpd has no TLS");
    FERRY_TRY(read_pem("tls-cert", o->tls_cert, &s->tls_cert));
    return read_pem("tls-key", o->tls_key, &s->tls_key);
}

static struct MHD_Daemon *start_daemon(ferry__server *s, int fd)
{
    unsigned int flags = MHD_USE_THREAD_PER_CONNECTION |
                         MHD_USE_INTERNAL_POLLING_THREAD | MHD_USE_POLL |
                         MHD_USE_ITC | MHD_USE_ERROR_LOG;
    struct MHD_OptionItem tls[] = {{MHD_OPTION_HTTPS_MEM_CERT, 0, s->tls_cert},
                                   {MHD_OPTION_HTTPS_MEM_KEY, 0, s->tls_key},
                                   {MHD_OPTION_END, 0, NULL}};

    if (s->tls_cert != NULL)
        flags |= MHD_USE_TLS;
    else
        tls[0] = tls[2];
    return MHD_start_daemon(
        flags, 0, NULL, NULL, on_request, s, MHD_OPTION_EXTERNAL_LOGGER, quiet,
        NULL, MHD_OPTION_LISTEN_SOCKET, fd, MHD_OPTION_NOTIFY_COMPLETED,
        on_done, s, MHD_OPTION_NOTIFY_CONNECTION, ferry__http_guard_notify,
        &s->guard, MHD_OPTION_CONNECTION_LIMIT, CONNECTIONS_MAX,
        MHD_OPTION_PER_IP_CONNECTION_LIMIT,
        (unsigned int)s->options->per_address, MHD_OPTION_CONNECTION_TIMEOUT,
        (unsigned int)IDLE_TIMEOUT_S, MHD_OPTION_THREAD_STACK_SIZE,
        (size_t)1 << 20, MHD_OPTION_ARRAY, tls, MHD_OPTION_END);
}

ferry_status ferry__http_start(ferry__server *server,
                               struct MHD_Daemon **out_daemon,
                               int32_t *out_port)
{
    struct MHD_Daemon *daemon;
    int fd = -1;

    FERRY_TRY(open_tls(server));
    FERRY_TRY(
        listen_on(server->options->host, server->options->port, &fd, out_port));
    if (ferry__http_guard_open(&server->guard,
                               server->options->request_timeout_ms) < 0) {
        close(fd);
        return FERRY_EINTERNAL;
    }
    daemon = start_daemon(server, fd);
    if (daemon == NULL) {
        close(fd);
        return ferry_fail(FERRY_EINTERNAL,
                          server->tls_cert == NULL
                              ? "the http server does not start"
                              : "the https server does not start; is --tls-key "
                                "the key of --tls-cert?");
    }
    *out_daemon = daemon;
    return FERRY_OK;
}

void ferry__http_stop(ferry__server *server, struct MHD_Daemon *daemon)
{
    if (daemon != NULL)
        MHD_stop_daemon(daemon);
    ferry__http_guard_close(&server->guard);
    ferry__free(server->tls_cert);
    ferry__free(server->tls_key);
    server->tls_cert = server->tls_key = NULL;
}
