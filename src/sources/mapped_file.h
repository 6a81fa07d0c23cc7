/* SPDX-License-Identifier: Apache-2.0 */
/* A regular file, mapped read-only.
 * Invariant: `bytes` is NULL only when the file is empty. Whoever shortens
 * the file while it is mapped makes later reads fatal, so sizes are checked
 * once, at opening. */
#ifndef FERRY_SOURCES_MAPPED_FILE_H
#define FERRY_SOURCES_MAPPED_FILE_H

#include <ferry/status.h>

typedef struct ferry__mapped_file {
    const unsigned char *bytes;
    size_t size_bytes;
} ferry__mapped_file;

/* FERRY_EIO names the file and the system's reason. */
ferry_status ferry__mapped_open(const char *path, ferry__mapped_file *out);
/* Accepts a cleared one. */
void ferry__mapped_close(ferry__mapped_file *file);

#endif
