/* SPDX-License-Identifier: Apache-2.0 */
/* The header of a safetensors file. What is accepted must lie within the
 * input, aligned to nothing, and tile its data. */
#include "sources/safetensors_format.h"

#include <stdint.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    ferry__safetensors header = {0};
    size_t at = 0;

    if (ferry__safetensors_parse("input", data, size, &header) < 0)
        return 0;
    for (size_t i = 0; i < header.params.count; i++) {
        size_t begin = header.begins[i];
        size_t bytes = ferry__meta_bytes(&header.params.params[i]);

        if (i > 0 && begin != at)
            abort();
        at = begin + bytes;
        if (at < begin || at > size)
            abort();
    }
    if (header.params.count > 0 && at != size)
        abort();
    ferry__safetensors_clear(&header);
    return 0;
}
