/* SPDX-License-Identifier: Apache-2.0 */
/* The entry of the module ferry_source_gguf: libferry opens it on first use,
 * so that libferry itself needs no ggml. */
#ifndef FERRY_SOURCES_SOURCE_GGUF_H
#define FERRY_SOURCES_SOURCE_GGUF_H

#include <ferry/source.h>

#define FERRY__GGUF_MODULE "ferry_source_gguf"
#define FERRY__GGUF_SYMBOL "ferry_source_gguf_open"

/* Same contract as ferry_source_gguf. */
typedef ferry_status (*ferry__gguf_open_fn)(const char *path,
                                            ferry_source *out_source);
ferry_status ferry_source_gguf_open(const char *path, ferry_source *out_source);

#endif
