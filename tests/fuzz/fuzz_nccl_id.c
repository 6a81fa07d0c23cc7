/* SPDX-License-Identifier: Apache-2.0 */
/* The value under which a peer offers NCCL's unique id, and the base64 form
 * of an init info. What is taken must be what is written for the same id. */
#include "comm/unique_id.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void try_pickle(const uint8_t *data, size_t size)
{
    unsigned char id[FERRY__UNIQUE_ID], again[FERRY__ID_PICKLE];

    if (ferry__id_unpickle(data, size, id) < 0)
        return;
    ferry__id_pickle(id, again);
    again[1] = data[1]; /* the protocol: 4 or 5 */
    if (size != sizeof(again) || memcmp(data, again, size) != 0)
        abort();
}

static void try_base64(const uint8_t *data, size_t size)
{
    unsigned char id[FERRY__UNIQUE_ID];
    char *text = malloc(size + 1), again[FERRY__ID_BASE64 + 1];

    if (!text)
        return;
    memcpy(text, data, size);
    text[size] = '\0';
    if (ferry__id_from_base64(text, id) >= 0) {
        ferry__id_base64(id, again);
        if (strcmp(text, again) != 0)
            abort();
    }
    free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    try_pickle(data, size);
    try_base64(data, size);
    return 0;
}
