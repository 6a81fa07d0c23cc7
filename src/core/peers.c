/* SPDX-License-Identifier: Apache-2.0 */
/* Asking a client what its servers are; see peers.h.
 * Invariant: a status that was cut at the end of a buffer is asked for anew,
 * never read. */
#include "core/peers.h"

#include "base/alloc.h"
#include "base/json.h"

#include <stdio.h>
#include <string.h>

#define FIRST_BYTES ((size_t)64 << 10)
#define MOST_BYTES  ((size_t)64 << 20)

ferry_status ferry__peers_status(const ferry_client *client, char **out_text)
{
    for (size_t n = FIRST_BYTES; n <= MOST_BYTES; n *= 4) {
        char *text = ferry__alloc(n);
        ferry_status st;

        if (text == NULL)
            return FERRY_ENOMEM;
        st = client->ops->status(client->self, text, n);
        if (st == FERRY_OK && strlen(text) < n - 1) {
            *out_text = text;
            return FERRY_OK;
        }
        ferry__free(text);
        FERRY_TRY(st);
    }
    return ferry_fail(FERRY_EPEER, "status is longer than %zu bytes",
                      MOST_BYTES);
}

static void first_name(const json_t *object, const char *key, bool *out_any,
                       char *out_name)
{
    const json_t *names = json_object_get(object, key);
    const char *name = json_string_value(json_array_get(names, 0));

    *out_any = json_array_size(names) > 0;
    snprintf(out_name, FERRY__PEER_NAME_MAX, "%s", name != NULL ? name : "");
}

ferry_status ferry__peers_sort(const char *text, ferry__peers *out_peers)
{
    ferry__peers peers = {0};
    json_t *value = NULL;

    FERRY_TRY(ferry__json_parse("status", text, strlen(text), &value));
    first_name(value, "ferry", &peers.any_ferry, peers.ferry);
    first_name(value, "not_ferry", &peers.any_other, peers.other);
    if (!peers.any_other)
        peers.any_ferry = true;
    json_decref(value);
    *out_peers = peers;
    return FERRY_OK;
}
