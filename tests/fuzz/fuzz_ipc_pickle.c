/* SPDX-License-Identifier: Apache-2.0 */
/* Pickled CUDA IPC handles: the first byte chooses between base64 text and
 * the pickle itself. What is accepted must lie inside the input. */
#include "backends/ipc/ipc_wire_pickle.h"

#include "base/alloc.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static unsigned sum;

static void touch(const ferry__cuda_bytes *bytes)
{
    for (size_t i = 0; i < bytes->size; i++)
        sum += bytes->data[i];
}

static void look(ferry__cuda_handles *h)
{
    const ferry__cuda_handle *found;

    for (size_t i = 0; i < h->n_entries; i++) {
        if (h->first[i] >= h->first[i + 1])
            abort();
        ferry__cuda_handles_find(h, i, "GPU-0", &found);
    }
    for (size_t i = 0; i < h->first[h->n_entries]; i++) {
        const ferry__cuda_handle *item = &h->items[i];

        if (item->ndim < 0 || item->ndim > FERRY_MAX_DIMS || item->offset < 0 ||
            item->storage_bytes < 0)
            abort();
        touch(&item->key);
        touch(&item->handle);
        touch(&item->ref_counter);
        touch(&item->event);
    }
    ferry__cuda_handles_free(h);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    ferry__cuda_handles handles;
    unsigned char *copy;

    if (size == 0)
        return 0;
    if (data[0] == 'B') {
        if (ferry__cuda_handles_decode((const char *)data + 1, size - 1,
                                       &handles) >= 0)
            look(&handles);
        return 0;
    }
    copy = ferry__alloc(size);
    if (copy == NULL)
        return 0;
    memcpy(copy, data + 1, size - 1);
    if (ferry__cuda_handles_read(copy, size - 1, &handles) >= 0)
        look(&handles);
    else
        ferry__free(copy);
    return 0;
}
