/* SPDX-License-Identifier: Apache-2.0 */
/* What the two socket files share: the wait loop and its error lines. */
#ifndef FERRY_BASE_SOCKET_WAIT_H
#define FERRY_BASE_SOCKET_WAIT_H

#include "base/socket.h"

/* The failure that errno tells, of the named system call. */
ferry_status ferry__socket_error(const ferry__waiter *w, const char *call);
ferry_status ferry__socket_closed(const ferry__waiter *w);
/* FERRY_OK to go on waiting, else why not. */
ferry_status ferry__socket_ask(const ferry__waiter *w);
/* Until fd is ready for `events`, or has failed. */
ferry_status ferry__socket_wait(int fd, short events, const ferry__waiter *w);

#endif
