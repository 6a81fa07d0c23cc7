/* SPDX-License-Identifier: Apache-2.0 */
/* Messages over stream sockets: descriptors and length-prefixed frames.
 * Frame: 1. u32 little-endian length n  2. n bytes.
 * Descriptors ride on the first byte of their byte string.
 * Invariant: a descriptor that was received is returned or closed. */
#include "base/bytes.h"
#include "base/socket.h"

#include "base/alloc.h"
#include "base/socket_wait.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define FDS_MAX 64

typedef union control {
    struct cmsghdr align;
    char bytes[CMSG_SPACE(FDS_MAX * sizeof(int))];
} control;

static ferry_status check_fds(size_t size_bytes, size_t n_fds)
{
    if (n_fds > FDS_MAX)
        return ferry_fail(FERRY_EINVAL,
                          "descriptors in one message: at most %d, got %zu",
                          FDS_MAX, n_fds);
    if (size_bytes == 0)
        return ferry_fail(FERRY_EINVAL, "descriptors need a byte to ride on");
    return FERRY_OK;
}

ferry_status ferry__send_fds(int fd, const void *bytes, size_t size_bytes,
                             const int *fds, size_t n_fds,
                             const ferry__waiter *w)
{
    struct iovec part = {(void *)(uintptr_t)bytes, size_bytes};
    struct msghdr m = {.msg_iov = &part, .msg_iovlen = 1};
    control c;
    ssize_t n;

    FERRY_TRY(check_fds(size_bytes, n_fds));
    if (n_fds > 0) {
        struct cmsghdr *h;

        memset(&c, 0, sizeof(c));
        m.msg_control = c.bytes;
        m.msg_controllen = CMSG_SPACE(n_fds * sizeof(int));
        h = CMSG_FIRSTHDR(&m);
        h->cmsg_level = SOL_SOCKET;
        h->cmsg_type = SCM_RIGHTS;
        h->cmsg_len = CMSG_LEN(n_fds * sizeof(int));
        memcpy(CMSG_DATA(h), fds, n_fds * sizeof(int));
    }
    for (;;) {
        n = sendmsg(fd, &m, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n > 0)
            break;
        if (n < 0 && errno != EAGAIN && errno != EINTR)
            return ferry__socket_error(w, "send");
        FERRY_TRY(ferry__socket_wait(fd, POLLOUT, w));
    }
    return ferry__send_all(fd, (const char *)bytes + n, size_bytes - (size_t)n,
                           w);
}

/* Takes all descriptors out of a message, closing those beyond max_fds. */
static size_t take_fds(struct msghdr *m, int *fds, size_t max_fds,
                       bool *out_too_many)
{
    size_t taken = 0;

    *out_too_many = (m->msg_flags & MSG_CTRUNC) != 0;
    for (struct cmsghdr *h = CMSG_FIRSTHDR(m); h; h = CMSG_NXTHDR(m, h)) {
        size_t n;

        if (h->cmsg_level != SOL_SOCKET || h->cmsg_type != SCM_RIGHTS)
            continue;
        n = (h->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < n; i++) {
            int one;

            memcpy(&one, CMSG_DATA(h) + i * sizeof(int), sizeof(int));
            if (taken < max_fds) {
                fds[taken++] = one;
            } else {
                close(one);
                *out_too_many = true;
            }
        }
    }
    return taken;
}

static void close_all(const int *fds, size_t n)
{
    for (size_t i = 0; i < n; i++)
        close(fds[i]);
}

/* A stream may hand the byte string over in pieces, and only the first one
 * carries descriptors; a later piece that does is a peer that cheats. */
ferry_status ferry__recv_fds(int fd, void *bytes, size_t size_bytes,
                             int *out_fds, size_t max_fds, size_t *out_n_fds,
                             const ferry__waiter *w)
{
    int fds[FDS_MAX];
    size_t done = 0, n_fds = 0;
    ferry_status status;

    FERRY_TRY(check_fds(size_bytes, max_fds));
    while (done < size_bytes) {
        control c;
        struct iovec part = {(char *)bytes + done, size_bytes - done};
        struct msghdr m = {.msg_iov = &part,
                           .msg_iovlen = 1,
                           .msg_control = c.bytes,
                           .msg_controllen = sizeof(c.bytes)};
        ssize_t n = recvmsg(fd, &m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
        bool too_many = false;

        if (n > 0) {
            n_fds += take_fds(&m, fds + n_fds, max_fds - n_fds, &too_many);
            done += (size_t)n;
            status = !too_many
                         ? FERRY_OK
                         : ferry_fail(FERRY_EPEER,
                                      "%s: more than %zu descriptors came",
                                      w->what ? w->what : "socket", max_fds);
        } else if (n == 0) {
            status = ferry__socket_closed(w);
        } else if (errno == EAGAIN) {
            status = ferry__socket_wait(fd, POLLIN, w);
        } else {
            status =
                errno == EINTR ? FERRY_OK : ferry__socket_error(w, "receive");
        }
        if (status < 0) {
            close_all(fds, n_fds);
            return status;
        }
    }
    memcpy(out_fds, fds, n_fds * sizeof(int));
    *out_n_fds = n_fds;
    return FERRY_OK;
}

/* Length and bytes in one call, as far as they go: sent apart, the length
 * alone would wake the receiver, only for it to wait again. */
static ferry_status send_start(int fd, unsigned char head[4], const void *bytes,
                               size_t size_bytes, const ferry__waiter *w,
                               size_t *out_sent)
{
    struct iovec parts[2] = {{head, 4}, {(void *)(uintptr_t)bytes, size_bytes}};
    struct msghdr m = {.msg_iov = parts, .msg_iovlen = 2};
    ssize_t n;

    do {
        n = sendmsg(fd, &m, MSG_NOSIGNAL | MSG_DONTWAIT);
    } while (n < 0 && errno == EINTR);
    if (n < 0 && errno != EAGAIN)
        return ferry__socket_error(w, "send");
    *out_sent = n > 0 ? (size_t)n : 0;
    return FERRY_OK;
}

ferry_status ferry__send_frame(int fd, const void *bytes, size_t size_bytes,
                               const ferry__waiter *w)
{
    unsigned char head[4];
    size_t sent = 0;

    if (size_bytes > UINT32_MAX)
        return ferry_fail(FERRY_EOVERFLOW, "frame of %zu bytes", size_bytes);
    ferry__write_u32(head, (uint32_t)size_bytes);
    FERRY_TRY(send_start(fd, head, bytes, size_bytes, w, &sent));
    if (sent < sizeof(head)) {
        FERRY_TRY(ferry__send_all(fd, head + sent, sizeof(head) - sent, w));
        sent = sizeof(head);
    }
    sent -= sizeof(head);
    return ferry__send_all(fd, (const char *)bytes + sent, size_bytes - sent,
                           w);
}

ferry_status ferry__recv_frame(int fd, size_t max_bytes, void **out_bytes,
                               size_t *out_size, const ferry__waiter *w)
{
    unsigned char head[4];
    ferry_status status;
    size_t size_bytes;
    char *bytes;

    FERRY_TRY(ferry__recv_all(fd, head, sizeof(head), w));
    size_bytes = ferry__read_u32(head);
    if (size_bytes > max_bytes)
        return ferry_fail(FERRY_EPEER,
                          "%s: frame of %zu bytes, at most %zu are taken",
                          w->what ? w->what : "socket", size_bytes, max_bytes);
    bytes = ferry__alloc_raw(size_bytes + 1);
    if (!bytes)
        return FERRY_ENOMEM;
    status = ferry__recv_all(fd, bytes, size_bytes, w);
    if (status < 0) {
        ferry__free(bytes);
        return status;
    }
    bytes[size_bytes] = '\0';
    *out_bytes = bytes;
    *out_size = size_bytes;
    return FERRY_OK;
}
