/* SPDX-License-Identifier: Apache-2.0 */
/* A first look over the metadata of a GGUF file in memory: what ggml's own
 * reader would abort the process over, or trust without need, is refused
 * here. The tensors are left to that reader. */
#ifndef FERRY_SOURCES_CHECK_GGUF_H
#define FERRY_SOURCES_CHECK_GGUF_H

#include <ferry/status.h>

/* FERRY_EINVAL begins with "file <path>: ". */
ferry_status ferry__gguf_check(const char *path, const void *bytes,
                               size_t size_bytes);

#endif
