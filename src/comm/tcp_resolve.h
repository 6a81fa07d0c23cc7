/* SPDX-License-Identifier: Apache-2.0 */
/* Looking up names within a bound.
 * Invariant: an address that is written in numbers needs no thread and asks
 * nobody. */
#ifndef FERRY_COMM_TCP_RESOLVE_H
#define FERRY_COMM_TCP_RESOLVE_H

#include "base/socket.h"

#include <netdb.h>

/* As getaddrinfo: `host` NULL is this machine's own, `port` 0 to 65535,
 * `flags` AI_PASSIVE or 0; *out is for freeaddrinfo. FERRY_ECONN: no such
 * name; FERRY_ETIMEOUT: the system's resolver did not answer within the
 * waiter's deadline. It goes on by itself, and what it finds is dropped. */
ferry_status ferry__tcp_resolve(const char *host, int32_t port, int flags,
                                const ferry__waiter *w, struct addrinfo **out);

#endif
