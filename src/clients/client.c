/* SPDX-License-Identifier: Apache-2.0 */
/* What all clients share. */
#include "clients/client_ops.h"

#include <string.h>

void ferry_client_close(ferry_client *client)
{
    if (!client)
        return;
    if (client->ops && FERRY__CLIENT_HAS(client->ops, close))
        client->ops->close(client->self);
    memset(client, 0, sizeof(*client));
}
