/* SPDX-License-Identifier: Apache-2.0 */
/* Stream sockets of one host and small TCP helpers, with deadlines.
 * Invariant: sockets are non-blocking, close-on-exec, never raise SIGPIPE;
 * every call has a bound and survives EINTR. */
#ifndef FERRY_BASE_SOCKET_H
#define FERRY_BASE_SOCKET_H

#include "base/clock.h"

/* Asked about every 100 ms while waiting; negative ends the wait with that
 * status. NULL: only the deadline bounds. */
typedef struct ferry__waiter {
    ferry_status (*check)(void *arg);
    void *arg;
    ferry__deadline deadline;
    const char *what; /* names the wait and the peer: "ipc hello, rank 1" */
} ferry__waiter;

/* Abstract-namespace Unix socket; `name` without the leading NUL. */
ferry_status ferry__unix_listen(const char *name, int *out_fd);
ferry_status ferry__unix_connect(const char *name, const ferry__waiter *w,
                                 int *out_fd);
ferry_status ferry__unix_accept(int listener, const ferry__waiter *w,
                                int *out_fd);
/* The peer's credentials, as the kernel has them. */
ferry_status ferry__unix_peer(int fd, int32_t *out_pid, uint32_t *out_uid);
ferry_status ferry__socket_pair(int out_fds[2]);

/* Whole buffers. FERRY_ECONN when the peer closed ("closed by peer"). */
ferry_status ferry__send_all(int fd, const void *bytes, size_t size_bytes,
                             const ferry__waiter *w);
ferry_status ferry__recv_all(int fd, void *bytes, size_t size_bytes,
                             const ferry__waiter *w);
/* One byte string with descriptors attached (n_fds <= 64). Received
 * descriptors are close-on-exec and the caller's. */
ferry_status ferry__send_fds(int fd, const void *bytes, size_t size_bytes,
                             const int *fds, size_t n_fds,
                             const ferry__waiter *w);
ferry_status ferry__recv_fds(int fd, void *bytes, size_t size_bytes,
                             int *out_fds, size_t max_fds, size_t *out_n_fds,
                             const ferry__waiter *w);
/* Length-prefixed frames: u32 little-endian length, then the bytes. The
 * received frame is owned (ferry__free), NUL terminated beyond its length. */
ferry_status ferry__send_frame(int fd, const void *bytes, size_t size_bytes,
                               const ferry__waiter *w);
ferry_status ferry__recv_frame(int fd, size_t max_bytes, void **out_bytes,
                               size_t *out_size, const ferry__waiter *w);
/* True when the peer closed or reset; consumes nothing. */
bool ferry__socket_hung_up(int fd);

/* Random bytes as lower-case hex; n bytes give 2n characters and a NUL. */
ferry_status ferry__random_hex(char *out, size_t n_bytes);

#endif
