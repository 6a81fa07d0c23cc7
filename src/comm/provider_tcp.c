/* SPDX-License-Identifier: Apache-2.0 */
/* The provider `tcp`: a meeting in the store and a group over sockets.
 * Invariant: what the group left open (address, host name) is settled here
 * and nowhere else. */
#include "comm/provider.h"

#include "base/config.h"
#include "comm/rendezvous.h"
#include "comm/tcp_address.h"

#include <string.h>

static ferry_status tcp_available(void)
{
    return FERRY_OK;
}

const char *ferry__group_host_name(const ferry__group *group)
{
    return group->host_name && *group->host_name
               ? group->host_name
               : ferry__config_get(FERRY__CONFIG_HOST_NAME);
}

ferry_status ferry__group_address(ferry__store *store,
                                  const ferry__group *group, char *out,
                                  size_t size_bytes)
{
    const char *given = group->advertise ? group->advertise : "";
    size_t n = strlen(given);

    if (n == 0)
        return ferry__store_local_address(store, out, size_bytes);
    if (n >= size_bytes)
        return ferry_fail(FERRY_EINVAL,
                          "group: the address to reach rank %d by has %zu "
                          "characters, at most %zu",
                          group->rank, n, size_bytes - 1);
    memcpy(out, given, n + 1);
    return FERRY_OK;
}

/* A rank that is told no address listens where its way to the store begins,
 * which is what it tells the others: nothing is offered to other networks. */
static const char *bind_of(const ferry__group *group, const char *address)
{
    if (group->bind && *group->bind)
        return group->bind;
    return group->advertise && *group->advertise ? "" : address;
}

static ferry_status tcp_open(ferry__store *store, const ferry__group *group,
                             ferry__comm **out)
{
    char address[FERRY__TCP_HOST_BYTES];
    ferry__rendezvous_tcp r = {.base = {.rank = group->rank,
                                        .world_size = group->world_size,
                                        .generation = group->generation,
                                        .timeout_ms = group->timeout_ms,
                                        .check = group->check,
                                        .check_arg = group->check_arg},
                               .host = bind_of(group, address),
                               .advertise = address,
                               .host_name = ferry__group_host_name(group),
                               .secret = group->secret,
                               .no_progress_ms = group->no_progress_ms};

    if (group->meeting != FERRY__MEET_FERRY)
        return ferry_fail(FERRY_ENOTSUP,
                          "provider tcp: ranks that are not Ferry");
    FERRY_TRY(ferry__group_address(store, group, address, sizeof(address)));
    return ferry__rendezvous_tcp_open(store, &r, out);
}

const ferry__provider ferry__provider_tcp = {
    .size = sizeof(ferry__provider),
    .name = "tcp",
    .available = tcp_available,
    .preferred = NULL,
    .open = tcp_open,
};
