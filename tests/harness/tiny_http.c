/* SPDX-License-Identifier: Apache-2.0 */
/* The server of tiny_http.h, on plain sockets, so that a test can cut a
 * connection where it likes. Every wait ends when the server is stopped. */
#include "harness/tiny_http.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>

#define CONNECTIONS_MAX 64
#define HEAD_MAX        8192

struct tiny_http {
    int listener, port;
    char url[64];
    tiny_handler handler;
    void *arg;
    atomic_bool stop;
    pthread_t acceptor;
    pthread_mutex_t lock;
    tiny_request requests[TINY_REQUESTS_MAX];
    int n_requests, n_connections;
    pthread_t threads[CONNECTIONS_MAX];
};

typedef struct connection {
    tiny_http *server;
    int fd, number;
    char head[HEAD_MAX];
    size_t used;
} connection;

static bool ready(tiny_http *s, int fd, short events)
{
    struct pollfd p = {fd, events, 0};

    while (!atomic_load(&s->stop)) {
        int n = poll(&p, 1, 20);

        if (n > 0)
            return true;
        if (n < 0 && errno != EINTR)
            return false;
    }
    return false;
}

static bool send_text(connection *c, const char *text, size_t n)
{
    while (n > 0) {
        ssize_t sent;

        if (!ready(c->server, c->fd, POLLOUT))
            return false;
        sent = send(c->fd, text, n, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0 && (errno == EAGAIN || errno == EINTR))
            continue;
        if (sent <= 0)
            return false;
        text += sent;
        n -= (size_t)sent;
    }
    return true;
}

static bool receive(connection *c, char *at, size_t room, size_t *out_n)
{
    ssize_t n;

    if (!ready(c->server, c->fd, POLLIN))
        return false;
    n = recv(c->fd, at, room, 0);
    if (n <= 0)
        return false;
    *out_n = (size_t)n;
    return true;
}

static void copy_header(const char *head, const char *name, char *out,
                        size_t size_bytes)
{
    size_t n = strlen(name);

    out[0] = '\0';
    for (const char *line = strstr(head, "\r\n"); line;
         line = strstr(line + 2, "\r\n")) {
        const char *text = line + 2;

        if (strncasecmp(text, name, n) != 0 || text[n] != ':')
            continue;
        text += n + 1;
        text += strspn(text, " ");
        snprintf(out, size_bytes, "%.*s", (int)strcspn(text, "\r"), text);
        return;
    }
}

/* One request into *r (its body is the caller's); false when the connection
 * ended. What was read beyond it stays in c->head. */
static bool read_request(connection *c, tiny_request *r)
{
    char *end, length_text[24];
    size_t n, head_bytes, length, have;

    c->head[c->used] = '\0';
    while (!(end = strstr(c->head, "\r\n\r\n"))) {
        if (c->used + 1 >= HEAD_MAX ||
            !receive(c, c->head + c->used, HEAD_MAX - 1 - c->used, &n))
            return false;
        c->used += n;
        c->head[c->used] = '\0';
    }
    head_bytes = (size_t)(end + 4 - c->head);
    if (sscanf(c->head, "%7s %255s", r->method, r->target) != 2)
        return false;
    end[2] = '\0';
    copy_header(c->head, "authorization", r->authorization,
                sizeof(r->authorization));
    copy_header(c->head, "content-type", r->content_type,
                sizeof(r->content_type));
    copy_header(c->head, "content-length", length_text, sizeof(length_text));
    length = strtoull(length_text, NULL, 10);
    r->body = calloc(1, length + 1);
    have = c->used - head_bytes;
    if (have > length)
        have = length;
    memcpy(r->body, c->head + head_bytes, have);
    c->used -= head_bytes + have;
    memmove(c->head, c->head + head_bytes + have, c->used);
    while (have < length) {
        if (!receive(c, r->body + have, length - have, &n)) {
            free(r->body);
            return false;
        }
        have += n;
    }
    r->connection = c->number;
    return true;
}

static bool flood(connection *c)
{
    static const char head[] =
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
    size_t n = 1 << 20;
    char *chunk = calloc(1, n + 32);
    bool ok = send_text(c, head, sizeof(head) - 1);
    int start = snprintf(chunk, 32, "%zx\r\n", n);

    memset(chunk + start, 'x', n);
    memcpy(chunk + start + n, "\r\n", 2);
    while (ok)
        ok = send_text(c, chunk, (size_t)start + n + 2);
    free(chunk);
    return false;
}

static bool answer(connection *c, const tiny_reply *reply)
{
    const char *body = reply->body ? reply->body : "{}";
    size_t n = strlen(body);
    char head[512];

    if (reply->mode == TINY_SILENT)
        return false;
    if (reply->mode == TINY_FLOOD)
        return flood(c);
    if (reply->mode == TINY_HANG) {
        char byte;
        size_t got;

        while (receive(c, &byte, 1, &got))
            continue;
        return false;
    }
    snprintf(
        head, sizeof(head), "HTTP/1.1 %d Text\r\nContent-Length: %zu\r\n%s\r\n",
        reply->code ? reply->code : 200, n, reply->header ? reply->header : "");
    if (!send_text(c, head, strlen(head)))
        return false;
    if (reply->mode == TINY_TORN) {
        send_text(c, body, n / 2);
        return false;
    }
    return send_text(c, body, n);
}

static void keep_request(tiny_http *s, const tiny_request *r)
{
    pthread_mutex_lock(&s->lock);
    if (s->n_requests < TINY_REQUESTS_MAX)
        s->requests[s->n_requests++] = *r;
    else
        free(r->body);
    pthread_mutex_unlock(&s->lock);
}

static void *serve_connection(void *arg)
{
    connection *c = arg;
    tiny_request r = {0};

    while (read_request(c, &r)) {
        tiny_reply reply = {0};
        tiny_request seen = r;

        seen.body = strdup(r.body);
        keep_request(c->server, &seen);
        if (c->server->handler)
            reply = c->server->handler(c->server->arg, &r);
        free(r.body);
        if (!answer(c, &reply))
            break;
    }
    close(c->fd);
    free(c);
    return NULL;
}

static void *accept_connections(void *arg)
{
    tiny_http *s = arg;

    while (ready(s, s->listener, POLLIN)) {
        int fd = accept4(s->listener, NULL, NULL, SOCK_CLOEXEC);
        connection *c;

        if (fd < 0)
            continue;
        if (s->n_connections == CONNECTIONS_MAX) {
            close(fd);
            continue;
        }
        c = calloc(1, sizeof(*c));
        c->server = s;
        c->fd = fd;
        c->number = s->n_connections + 1;
        if (pthread_create(&s->threads[s->n_connections], NULL,
                           serve_connection, c) == 0) {
            s->n_connections++;
        } else {
            close(fd);
            free(c);
        }
    }
    return NULL;
}

/* Port 0: the system picks one. */
static int listen_on(const char *address, int backlog, int *out_port)
{
    struct sockaddr_in6 six = {.sin6_family = AF_INET6};
    struct sockaddr_in four = {.sin_family = AF_INET};
    bool is_six = strchr(address, ':') != NULL;
    struct sockaddr *a = is_six ? (void *)&six : (void *)&four;
    socklen_t length = is_six ? sizeof(six) : sizeof(four);
    int fd = socket(is_six ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

    inet_pton(is_six ? AF_INET6 : AF_INET, address,
              is_six ? (void *)&six.sin6_addr : (void *)&four.sin_addr);
    if (fd < 0 || bind(fd, a, length) < 0 || listen(fd, backlog) < 0 ||
        getsockname(fd, a, &length) < 0) {
        if (fd >= 0)
            close(fd);
        return -1;
    }
    *out_port = ntohs(is_six ? six.sin6_port : four.sin_port);
    return fd;
}

tiny_http *tiny_http_start(const char *address, tiny_handler handler, void *arg)
{
    tiny_http *s = calloc(1, sizeof(*s));

    s->listener = listen_on(address, 64, &s->port);
    if (s->listener < 0) {
        free(s);
        return NULL;
    }
    snprintf(s->url, sizeof(s->url),
             strchr(address, ':') ? "http://[%s]:%d" : "http://%s:%d", address,
             s->port);
    s->handler = handler;
    s->arg = arg;
    pthread_mutex_init(&s->lock, NULL);
    if (pthread_create(&s->acceptor, NULL, accept_connections, s) != 0)
        abort();
    return s;
}

void tiny_http_stop(tiny_http *s)
{
    if (!s)
        return;
    atomic_store(&s->stop, true);
    pthread_join(s->acceptor, NULL);
    for (int i = 0; i < s->n_connections; i++)
        pthread_join(s->threads[i], NULL);
    for (int i = 0; i < s->n_requests; i++)
        free(s->requests[i].body);
    close(s->listener);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

int tiny_http_port(const tiny_http *s)
{
    return s->port;
}

const char *tiny_http_url(const tiny_http *s)
{
    return s->url;
}

int tiny_http_count(tiny_http *s)
{
    int n;

    pthread_mutex_lock(&s->lock);
    n = s->n_requests;
    pthread_mutex_unlock(&s->lock);
    return n;
}

const tiny_request *tiny_http_request(tiny_http *s, int index)
{
    const tiny_request *r;

    pthread_mutex_lock(&s->lock);
    r = index < s->n_requests ? &s->requests[index] : NULL;
    pthread_mutex_unlock(&s->lock);
    return r;
}

int tiny_http_unreachable(int *out_fds, int n_fds)
{
    struct sockaddr_in a = {.sin_family = AF_INET};
    int port = -1;

    out_fds[0] = listen_on("127.0.0.1", 0, &port);
    a.sin_port = htons((uint16_t)port);
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    for (int i = 1; i < n_fds; i++) {
        out_fds[i] =
            socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        if (connect(out_fds[i], (struct sockaddr *)&a, sizeof(a)) < 0 &&
            errno != EINPROGRESS)
            abort();
    }
    return port;
}

int tiny_http_closed_port(void)
{
    int port = -1, fd = listen_on("127.0.0.1", 1, &port);

    if (fd >= 0)
        close(fd);
    return port;
}
