/* SPDX-License-Identifier: Apache-2.0 */
/* The index of a sharded checkpoint. What is accepted names no file outside
 * its folder, and finds every name. */
#include "sources/safetensors_format.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    ferry__shard_index index = {0};
    size_t found;

    if (ferry__shard_index_parse("input", (const char *)data, size, &index) < 0)
        return 0;
    for (size_t i = 0; i < index.n_files; i++) {
        if (strchr(index.files[i], '/') || strcmp(index.files[i], "..") == 0)
            abort();
    }
    for (size_t i = 0; i < index.n_names; i++) {
        if (!ferry__table_get(&index.by_name, index.names[i], &found) ||
            found != i || index.file_of[i] >= index.n_files)
            abort();
    }
    ferry__shard_index_clear(&index);
    return 0;
}
