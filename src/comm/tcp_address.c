/* SPDX-License-Identifier: Apache-2.0 */
/* TCP addresses: one list from the resolver, tried in its order.
 * Invariant: a host may come with brackets, and a scope id, and never with a
 * port glued to it. */
#include "comm/tcp_address.h"

#include "base/socket_wait.h"
#include "comm/tcp_resolve.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define BACKLOG  1024
#define RETRY_MS 20
/* For a name to listen at, where the caller has no bound of its own. */
#define NAME_MS INT64_C(10000)

const char *ferry__tcp_text(char buffer[FERRY__TCP_TEXT_BYTES],
                            const char *host, int32_t port)
{
    bool any = !host || !*host;
    bool bare_v6 = !any && host[0] != '[' && strchr(host, ':');

    snprintf(buffer, FERRY__TCP_TEXT_BYTES,
             bare_v6 ? "[%.255s]:%d" : "%.255s:%d", any ? "*" : host,
             (int)port);
    return buffer;
}

/* Takes the brackets away. */
static ferry_status host_of(const char *host, char *out)
{
    size_t n = strlen(host);
    bool brackets = n > 0 && host[0] == '[';

    if (brackets) {
        if (n < 3 || host[n - 1] != ']')
            return ferry_fail(FERRY_EINVAL,
                              "host '%s': a bracket is not closed at its end",
                              host);
        host++;
        n -= 2;
    }
    if (n == 0 || n >= FERRY__TCP_HOST_BYTES)
        return ferry_fail(FERRY_EINVAL,
                          "host: must have 1 to %d bytes, got %zu",
                          FERRY__TCP_HOST_BYTES - 1, n);
    memcpy(out, host, n);
    out[n] = '\0';
    return FERRY_OK;
}

/* A glued port or a stray colon would only be called an unknown name. */
static ferry_status check_colons(const char *host, const char *given)
{
    struct addrinfo hints = {.ai_flags = AI_NUMERICHOST,
                             .ai_socktype = SOCK_STREAM};
    struct addrinfo *list;

    if (!strchr(host, ':'))
        return FERRY_OK;
    if (getaddrinfo(host, NULL, &hints, &list) != 0)
        return ferry_fail(FERRY_EINVAL,
                          "host '%s' is no IPv6 address, and a port is given "
                          "apart",
                          given);
    freeaddrinfo(list);
    return FERRY_OK;
}

static ferry_status look_up(const char *host, int32_t port, int flags,
                            const ferry__waiter *w, struct addrinfo **out)
{
    char bare[FERRY__TCP_HOST_BYTES];
    bool any = !host || !*host;

    if (port < 0 || port > 65535)
        return ferry_fail(FERRY_EINVAL, "port must be 0 to 65535, got %d",
                          (int)port);
    if (!any) {
        FERRY_TRY(host_of(host, bare));
        FERRY_TRY(check_colons(bare, host));
    }
    return ferry__tcp_resolve(any ? NULL : bare, port, flags, w, out);
}

static int open_socket(const struct addrinfo *a)
{
    return socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK,
                  a->ai_protocol);
}

/* A socket that listens at one address, or -1 with errno. */
static int listen_at(const struct addrinfo *a, bool any)
{
    int fd = open_socket(a), on = 1, off = 0, error;

    if (fd < 0)
        return -1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (any && a->ai_family == AF_INET6)
        setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
    if (bind(fd, a->ai_addr, a->ai_addrlen) == 0 && listen(fd, BACKLOG) == 0)
        return fd;
    error = errno;
    close(fd);
    errno = error;
    return -1;
}

static int32_t port_of(int fd)
{
    struct sockaddr_storage a;
    socklen_t length = sizeof(a);

    if (getsockname(fd, (struct sockaddr *)&a, &length) != 0)
        return -1;
    return a.ss_family == AF_INET6
               ? ntohs(((struct sockaddr_in6 *)&a)->sin6_port)
               : ntohs(((struct sockaddr_in *)&a)->sin_port);
}

/* Every address: the IPv6 wildcard takes IPv4 as well, so it comes first. */
static int listen_any_of(const struct addrinfo *list, bool any)
{
    int fd = -1;

    errno = EADDRNOTAVAIL;
    for (const struct addrinfo *a = list; any && a && fd < 0; a = a->ai_next) {
        if (a->ai_family == AF_INET6)
            fd = listen_at(a, any);
    }
    for (const struct addrinfo *a = list; a && fd < 0; a = a->ai_next) {
        if (!any || a->ai_family == AF_INET)
            fd = listen_at(a, any);
    }
    return fd;
}

ferry_status ferry__tcp_listen(const char *host, int32_t port, int *out_fd,
                               int32_t *out_port)
{
    ferry__waiter w = {NULL, NULL, ferry__deadline_in(NAME_MS), "listen"};

    return ferry__tcp_listen_within(host, port, &w, out_fd, out_port);
}

ferry_status ferry__tcp_listen_within(const char *host, int32_t port,
                                      const ferry__waiter *w, int *out_fd,
                                      int32_t *out_port)
{
    char text[FERRY__TCP_TEXT_BYTES];
    struct addrinfo *list;
    bool any = !host || !*host;
    int fd, error;

    FERRY_TRY(look_up(host, port, AI_PASSIVE, w, &list));
    fd = listen_any_of(list, any);
    error = errno;
    freeaddrinfo(list);
    if (fd < 0)
        return ferry_fail(error == EADDRINUSE ? FERRY_EEXIST : FERRY_EIO,
                          "cannot listen on %s: %s",
                          ferry__tcp_text(text, host, port), strerror(error));
    *out_fd = fd;
    *out_port = port_of(fd);
    return FERRY_OK;
}

/* Small messages must not wait for an acknowledgement, and a host that
 * vanished must be noticed by an idle connection too. */
static void tune(int fd)
{
    int on = 1, idle = 15, every = 5, times = 3;

    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof(idle));
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &every, sizeof(every));
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &times, sizeof(times));
}

/* Linux can connect a socket to itself when the port it is given by chance
 * is the one it calls, and nobody listens there. */
static bool met_itself(int fd)
{
    struct sockaddr_storage a, b;
    socklen_t na = sizeof(a), nb = sizeof(b);

    memset(&a, 0, sizeof(a));
    memset(&b, 0, sizeof(b));
    return getsockname(fd, (struct sockaddr *)&a, &na) == 0 &&
           getpeername(fd, (struct sockaddr *)&b, &nb) == 0 && na == nb &&
           memcmp(&a, &b, na) == 0;
}

/* FERRY_OK; FERRY_DONE when this address refuses for now (errno says how);
 * a failure when the waiter ends the wait. */
static ferry_status connect_to(const struct addrinfo *a, const ferry__waiter *w,
                               int *out_fd)
{
    int fd = open_socket(a), error = 0;
    socklen_t length = sizeof(error);
    ferry_status status = FERRY_OK;

    if (fd < 0)
        return FERRY_DONE;
    if (connect(fd, a->ai_addr, a->ai_addrlen) < 0) {
        error = errno;
        if (error == EINPROGRESS || error == EINTR) {
            error = 0;
            status = ferry__socket_wait(fd, POLLOUT, w);
            getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length);
        }
    }
    if (status == FERRY_OK && error == 0 && met_itself(fd))
        error = ECONNREFUSED;
    if (status < 0 || error != 0) {
        close(fd);
        errno = error;
        return status < 0 ? status : FERRY_DONE;
    }
    tune(fd);
    *out_fd = fd;
    return FERRY_OK;
}

static bool worth_trying_again(int error)
{
    return error == ECONNREFUSED || error == EHOSTUNREACH ||
           error == ENETUNREACH || error == ETIMEDOUT || error == EAGAIN ||
           error == ECONNRESET || error == ECONNABORTED;
}

static ferry_status connect_list(const struct addrinfo *list, const char *text,
                                 bool again, const ferry__waiter *w,
                                 int *out_fd)
{
    for (;;) {
        int error = EADDRNOTAVAIL;

        for (const struct addrinfo *a = list; a; a = a->ai_next) {
            ferry_status status = connect_to(a, w, out_fd);

            if (status != FERRY_DONE)
                return status;
            error = errno;
        }
        if (!worth_trying_again(error) || (!again && error == ECONNREFUSED))
            return ferry_fail(FERRY_ECONN, "%s: %s: %s",
                              w->what ? w->what : "connect", text,
                              strerror(error));
        if (w->check)
            FERRY_TRY(w->check(w->arg));
        if (ferry__deadline_passed(&w->deadline))
            return ferry_fail(FERRY_ETIMEOUT, "%s: %s: %s for %lld ms",
                              w->what ? w->what : "connect", text,
                              strerror(error), (long long)w->deadline.bound_ms);
        ferry__sleep_ms(RETRY_MS);
    }
}

static ferry_status connect_host(const char *host, int32_t port, bool again,
                                 const ferry__waiter *w, int *out_fd)
{
    char text[FERRY__TCP_TEXT_BYTES];
    struct addrinfo *list;
    ferry_status status;

    if (!host || !*host)
        return ferry_fail(FERRY_EINVAL, "connect: no host is given");
    if (port == 0)
        return ferry_fail(FERRY_EINVAL, "connect to %s: port 0", host);
    FERRY_TRY(look_up(host, port, 0, w, &list));
    status =
        connect_list(list, ferry__tcp_text(text, host, port), again, w, out_fd);
    freeaddrinfo(list);
    return status;
}

ferry_status ferry__tcp_connect(const char *host, int32_t port,
                                const ferry__waiter *w, int *out_fd)
{
    return connect_host(host, port, true, w, out_fd);
}

ferry_status ferry__tcp_connect_now(const char *host, int32_t port,
                                    const ferry__waiter *w, int *out_fd)
{
    return connect_host(host, port, false, w, out_fd);
}

ferry_status ferry__tcp_local_host(int fd, char *out, size_t size_bytes)
{
    static const char mapped[] = "::ffff:";
    struct sockaddr_storage a;
    socklen_t n = sizeof(a);
    int error;

    if (getsockname(fd, (struct sockaddr *)&a, &n) != 0)
        return ferry_fail(FERRY_ECONN, "address of this end: %s",
                          strerror(errno));
    error = getnameinfo((struct sockaddr *)&a, n, out, (socklen_t)size_bytes,
                        NULL, 0, NI_NUMERICHOST);
    if (error != 0)
        return ferry_fail(FERRY_ECONN, "address of this end: %s",
                          gai_strerror(error));
    /* An IPv4 address that came through an IPv6 socket. */
    if (strncmp(out, mapped, sizeof(mapped) - 1) == 0 && strchr(out, '.'))
        memmove(out, out + sizeof(mapped) - 1,
                strlen(out + sizeof(mapped) - 1) + 1);
    return FERRY_OK;
}

ferry_status ferry__tcp_accept(int listener, int *out_fd)
{
    int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

    if (fd >= 0) {
        tune(fd);
        *out_fd = fd;
        return FERRY_OK;
    }
    if (errno == EMFILE || errno == ENFILE || errno == ENOMEM ||
        errno == ENOBUFS)
        return ferry_fail(FERRY_EIO, "accept: %s", strerror(errno));
    return FERRY_DONE; /* none, or one that went before it was taken */
}
