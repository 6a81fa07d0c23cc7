/* SPDX-License-Identifier: Apache-2.0 */
/* Listening, connecting and accepting over TCP, IPv4 and IPv6.
 * A host is a name or a literal: 10.0.0.1, ::1, [::1], fe80::1%eth0.
 * Invariant: sockets are non-blocking and close-on-exec, every wait is
 * bounded, and every message names host:port, IPv6 in brackets. */
#ifndef FERRY_COMM_TCP_ADDRESS_H
#define FERRY_COMM_TCP_ADDRESS_H

#include "base/socket.h"

#define FERRY__TCP_HOST_BYTES 256
#define FERRY__TCP_TEXT_BYTES (FERRY__TCP_HOST_BYTES + 16)

/* Writes host:port, "[::1]:80" for IPv6. Returns buffer. */
const char *ferry__tcp_text(char buffer[FERRY__TCP_TEXT_BYTES],
                            const char *host, int32_t port);
/* Listens; "" or NULL as host is every address. Port 0 picks one, which
 * *out_port tells. FERRY_EEXIST: the port is taken, at once;
 * FERRY_EIO: another reason of this machine's. Both name host:port. */
ferry_status ferry__tcp_listen(const char *host, int32_t port, int *out_fd,
                               int32_t *out_port);
/* The same with a bound for the time that it takes to look the name up, which
 * is 10 s above. */
ferry_status ferry__tcp_listen_within(const char *host, int32_t port,
                                      const ferry__waiter *w, int *out_fd,
                                      int32_t *out_port);
/* Tries every address of the host. A refusal is tried again until the
 * deadline: the listener may be about to come. The deadline also bounds how
 * long a name is looked up. */
ferry_status ferry__tcp_connect(const char *host, int32_t port,
                                const ferry__waiter *w, int *out_fd);
/* The address of this end of a connection, as the other end knows it: without
 * brackets, with the scope id where there is one. */
ferry_status ferry__tcp_local_host(int fd, char *out, size_t size_bytes);
/* The same of a listener that is known to be there: a refusal is final. */
ferry_status ferry__tcp_connect_now(const char *host, int32_t port,
                                    const ferry__waiter *w, int *out_fd);
/* One connection that waits at the listener, or FERRY_DONE. */
ferry_status ferry__tcp_accept(int listener, int *out_fd);

#endif
