/* SPDX-License-Identifier: Apache-2.0 */
/* What all providers share. */
#include "comm/comm.h"

#include "base/clock.h"

void ferry__comm_close(ferry__comm **comm)
{
    if (!comm || !*comm)
        return;
    (*comm)->ops->close(*comm);
    *comm = NULL;
}

int64_t ferry__comm_wait_ns(const ferry__comm *c)
{
    return c->waited ? ferry__now_ns() : 0;
}

void ferry__comm_waited(ferry__comm *c, int32_t peer, const char *address,
                        int64_t from_ns)
{
    if (from_ns != 0 && c->waited && ferry__now_ns() - from_ns > FERRY__WAIT_NS)
        c->waited(c->check_arg, peer, address, from_ns);
}
