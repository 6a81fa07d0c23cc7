/* SPDX-License-Identifier: Apache-2.0 */
/* Hugging Face names of the tensors of a GGUF file. */
#ifndef FERRY_SOURCES_GGUF_NAMES_H
#define FERRY_SOURCES_GGUF_NAMES_H

#include <ferry/status.h>

/* Whose heads the rows of a tensor belong to, for the rotary order. */
typedef enum ferry__gguf_heads {
    FERRY__GGUF_NO_HEADS,
    FERRY__GGUF_QUERY_HEADS,
    FERRY__GGUF_KEY_HEADS
} ferry__gguf_heads;

typedef struct ferry__gguf_name {
    char *name; /* owned; NULL: the tensor is no weight */
    int32_t ndim;
    ferry__gguf_heads heads;
} ferry__gguf_name;

/* FERRY_ENOTSUP lists the architectures. */
ferry_status ferry__gguf_check_architecture(const char *architecture);
/* FERRY_EUNKNOWN: a tensor that is neither a known weight nor known to be
 * none; leaving it out in silence would lose a weight. */
ferry_status ferry__gguf_name_of(const char *tensor, ferry__gguf_name *out);

#endif
