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

const char *ferry__client_peer(const ferry_client *client, size_t index)
{
    if (!FERRY__CLIENT_HAS(client->ops, peer))
        return NULL;
    return client->ops->peer(client->self, index);
}

size_t ferry__client_peers(const ferry_client *client)
{
    size_t n = 0;

    while (ferry__client_peer(client, n))
        n++;
    return n > 0 ? n : 1;
}
