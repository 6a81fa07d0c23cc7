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

#endif
