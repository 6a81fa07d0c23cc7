/* SPDX-License-Identifier: Apache-2.0 */
/* Reading a client's table, which may be of an older, shorter layout. */
#ifndef FERRY_CLIENTS_CLIENT_OPS_H
#define FERRY_CLIENTS_CLIENT_OPS_H

#include <ferry/client.h>

/* Whether the table reaches as far as `member` and has it. */
#define FERRY__CLIENT_HAS(ops, member)                                         \
    ((ops)->size >=                                                            \
         offsetof(ferry_client_ops, member) + sizeof((ops)->member) &&         \
     (ops)->member)

/* Servers that the client reaches; 1 where it does not say. */
size_t ferry__client_peers(const ferry_client *client);
/* Name of one of them, or NULL. */
const char *ferry__client_peer(const ferry_client *client, size_t index);

#endif
