/* SPDX-License-Identifier: Apache-2.0 */
/* Stream sockets of one host: listen, connect, accept, whole buffers.
 * Invariant: sockets are non-blocking, close-on-exec, never raise SIGPIPE;
 * every wait is a poll of at most 100 ms, after which the waiter is asked. */
#include "base/socket.h"

#include "base/hmac.h"
#include "base/socket_wait.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define SLICE_MS     100
#define BACKLOG      64
#define SOCKET_FLAGS (SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK)
#define RANDOM_MAX   64

static const char *what_of(const ferry__waiter *w)
{
    return w && w->what ? w->what : "socket";
}

ferry_status ferry__socket_error(const ferry__waiter *w, const char *call)
{
    int error = errno;

    if (error == EPIPE || error == ECONNRESET)
        return ferry_fail(FERRY_ECONN, "%s: closed by peer", what_of(w));
    return ferry_fail(FERRY_ECONN, "%s: %s: %s", what_of(w), call,
                      strerror(error));
}

ferry_status ferry__socket_closed(const ferry__waiter *w)
{
    return ferry_fail(FERRY_ECONN, "%s: closed by peer", what_of(w));
}

ferry_status ferry__socket_ask(const ferry__waiter *w)
{
    if (w->check)
        FERRY_TRY(w->check(w->arg));
    if (ferry__deadline_passed(&w->deadline))
        return ferry_fail(FERRY_ETIMEOUT, "%s: no answer within %lld ms",
                          what_of(w), (long long)w->deadline.bound_ms);
    return FERRY_OK;
}

ferry_status ferry__socket_wait(int fd, short events, const ferry__waiter *w)
{
    for (;;) {
        struct pollfd p = {fd, events, 0};
        int64_t left = ferry__deadline_left_ms(&w->deadline);
        int n;

        FERRY_TRY(ferry__socket_ask(w));
        n = poll(&p, 1, left < SLICE_MS ? (int)left : SLICE_MS);
        if (n > 0)
            return FERRY_OK;
        if (n < 0 && errno != EINTR)
            return ferry__socket_error(w, "poll");
    }
}

static ferry_status unix_address(const char *name, struct sockaddr_un *a,
                                 socklen_t *out_length)
{
    size_t n = strlen(name);

    if (n == 0 || n + 1 > sizeof(a->sun_path))
        return ferry_fail(FERRY_EINVAL,
                          "socket name: must have 1 to %zu bytes, got %zu",
                          sizeof(a->sun_path) - 1, n);
    memset(a, 0, sizeof(*a));
    a->sun_family = AF_UNIX;
    memcpy(a->sun_path + 1, name, n); /* byte 0 stays NUL: abstract */
    *out_length = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + n);
    return FERRY_OK;
}

static ferry_status unix_socket(const char *name, int *out_fd)
{
    int fd = socket(AF_UNIX, SOCKET_FLAGS, 0);

    if (fd < 0)
        return ferry_fail(FERRY_EIO, "socket %s: %s", name, strerror(errno));
    *out_fd = fd;
    return FERRY_OK;
}

ferry_status ferry__unix_listen(const char *name, int *out_fd)
{
    struct sockaddr_un a;
    socklen_t length;
    int fd = -1;

    FERRY_TRY(unix_address(name, &a, &length));
    FERRY_TRY(unix_socket(name, &fd));
    if (bind(fd, (struct sockaddr *)&a, length) < 0 ||
        listen(fd, BACKLOG) < 0) {
        int error = errno;

        close(fd);
        return ferry_fail(error == EADDRINUSE ? FERRY_EEXIST : FERRY_EIO,
                          "socket %s: %s", name, strerror(error));
    }
    *out_fd = fd;
    return FERRY_OK;
}

/* A full backlog answers EAGAIN, and a listener that is not there yet
 * ECONNREFUSED; the first is waited out, the second is the answer. */
static ferry_status connect_loop(int fd, const struct sockaddr_un *a,
                                 socklen_t length, const ferry__waiter *w)
{
    while (connect(fd, (const struct sockaddr *)a, length) < 0) {
        if (errno == EISCONN)
            break;
        if (errno == ECONNREFUSED)
            return ferry_fail(FERRY_ECONN, "%s: nobody listens", what_of(w));
        if (errno != EAGAIN && errno != EINTR)
            return ferry__socket_error(w, "connect");
        FERRY_TRY(ferry__socket_ask(w));
        ferry__sleep_ms(2);
    }
    return FERRY_OK;
}

ferry_status ferry__unix_connect(const char *name, const ferry__waiter *w,
                                 int *out_fd)
{
    struct sockaddr_un a;
    socklen_t length;
    ferry_status status;
    int fd = -1;

    FERRY_TRY(unix_address(name, &a, &length));
    FERRY_TRY(unix_socket(name, &fd));
    status = connect_loop(fd, &a, length, w);
    if (status < 0) {
        close(fd);
        return status;
    }
    *out_fd = fd;
    return FERRY_OK;
}

ferry_status ferry__unix_accept(int listener, const ferry__waiter *w,
                                int *out_fd)
{
    for (;;) {
        int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

        if (fd >= 0) {
            *out_fd = fd;
            return FERRY_OK;
        }
        if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED)
            return ferry__socket_error(w, "accept");
        FERRY_TRY(ferry__socket_wait(listener, POLLIN, w));
    }
}

ferry_status ferry__unix_peer(int fd, int32_t *out_pid, uint32_t *out_uid)
{
    struct ucred c;
    socklen_t length = sizeof(c);

    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &c, &length) < 0)
        return ferry_fail(FERRY_EIO, "peer credentials: %s", strerror(errno));
    *out_pid = c.pid;
    *out_uid = c.uid;
    return FERRY_OK;
}

ferry_status ferry__socket_pair(int out_fds[2])
{
    int fds[2];

    if (socketpair(AF_UNIX, SOCKET_FLAGS, 0, fds) < 0)
        return ferry_fail(FERRY_EIO, "socket pair: %s", strerror(errno));
    out_fds[0] = fds[0];
    out_fds[1] = fds[1];
    return FERRY_OK;
}

ferry_status ferry__send_all(int fd, const void *bytes, size_t size_bytes,
                             const ferry__waiter *w)
{
    const char *p = bytes;

    while (size_bytes > 0) {
        ssize_t n = send(fd, p, size_bytes, MSG_NOSIGNAL | MSG_DONTWAIT);

        if (n >= 0) {
            p += n;
            size_bytes -= (size_t)n;
        } else if (errno == EAGAIN) {
            FERRY_TRY(ferry__socket_wait(fd, POLLOUT, w));
        } else if (errno != EINTR) {
            return ferry__socket_error(w, "send");
        }
    }
    return FERRY_OK;
}

ferry_status ferry__recv_all(int fd, void *bytes, size_t size_bytes,
                             const ferry__waiter *w)
{
    char *p = bytes;

    while (size_bytes > 0) {
        ssize_t n = recv(fd, p, size_bytes, MSG_DONTWAIT);

        if (n > 0) {
            p += n;
            size_bytes -= (size_t)n;
        } else if (n == 0) {
            return ferry__socket_closed(w);
        } else if (errno == EAGAIN) {
            FERRY_TRY(ferry__socket_wait(fd, POLLIN, w));
        } else if (errno != EINTR) {
            return ferry__socket_error(w, "receive");
        }
    }
    return FERRY_OK;
}

bool ferry__socket_hung_up(int fd)
{
    struct pollfd p = {fd, POLLIN | POLLRDHUP, 0};
    char byte;
    ssize_t n;

    while (poll(&p, 1, 0) < 0) {
        if (errno != EINTR)
            return true;
    }
    if (p.revents & (POLLERR | POLLHUP | POLLRDHUP | POLLNVAL))
        return true;
    if (!(p.revents & POLLIN))
        return false;
    n = recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    return n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR);
}

ferry_status ferry__random_hex(char *out, size_t n_bytes)
{
    unsigned char bytes[RANDOM_MAX];

    for (size_t done = 0; done < n_bytes;) {
        size_t n = n_bytes - done;

        n = n < RANDOM_MAX ? n : RANDOM_MAX;
        FERRY_TRY(ferry__random_bytes(bytes, n));
        for (size_t i = 0; i < n; i++)
            snprintf(out + 2 * (done + i), 3, "%02x", bytes[i]);
        done += n;
    }
    out[2 * n_bytes] = '\0';
    return FERRY_OK;
}
