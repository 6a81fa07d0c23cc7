/* SPDX-License-Identifier: Apache-2.0 */
/* The first look over a GGUF file: it must end, and read nothing outside. */
#include "sources/check_gguf.h"

#include <stdint.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    ferry__gguf_check("input", data, size);
    return 0;
}
