/* SPDX-License-Identifier: Apache-2.0 */
/* The safetensors format, read from memory.
 * 1. u64 little-endian: bytes of the header, at most 100,000,000.
 * 2. The header: a JSON object, name -> {"dtype", "shape", "data_offsets":
 *    [begin, end)}; "__metadata__" is no tensor. Spaces may follow.
 * 3. The data. Offsets count from its first byte; the tensors, row-major and
 *    little-endian, fill it without overlap and without gaps. */
#ifndef FERRY_SOURCES_SAFETENSORS_FORMAT_H
#define FERRY_SOURCES_SAFETENSORS_FORMAT_H

#include "core/manifest.h"

#define FERRY__SAFETENSORS_HEADER_MAX 100000000u

typedef struct ferry__safetensors {
    ferry__manifest params; /* in the order of their bytes */
    size_t *begins;         /* of each, from the start of the file */
} ferry__safetensors;

/* Reads the header of a whole file in memory; looks at no tensor byte.
 * FERRY_EINVAL begins with "file <path>: " and names what is malformed. */
ferry_status ferry__safetensors_parse(const char *path, const void *bytes,
                                      size_t size_bytes,
                                      ferry__safetensors *out);
void ferry__safetensors_clear(ferry__safetensors *s);

/* The index of a sharded checkpoint: which file holds which name. */
typedef struct ferry__shard_index {
    char **files; /* without folder; unique, in name order */
    size_t n_files;
    char **names;    /* in the order of the index */
    size_t *file_of; /* by name: index into files */
    size_t n_names;
    ferry__table by_name;
} ferry__shard_index;

/* FERRY_EINVAL begins with "file <path>: ": not an object with a
 * "weight_map" of strings, or a file name that leaves the folder. */
ferry_status ferry__shard_index_parse(const char *path, const char *text,
                                      size_t length, ferry__shard_index *out);
void ferry__shard_index_clear(ferry__shard_index *index);

#endif
