/* SPDX-License-Identifier: Apache-2.0 */
/* Which file of a folder is the checkpoint. */
#ifndef FERRY_SOURCES_SOURCE_FILES_H
#define FERRY_SOURCES_SOURCE_FILES_H

#include <ferry/status.h>
#include <stdbool.h>

bool ferry__is_folder(const char *path);

/* `path` itself unless it is a folder; in a folder the first that is there:
 * model.safetensors, model.safetensors.index.json, the only index, the only
 * safetensors file. *out_file is owned. FERRY_EIO: nothing there, or no
 * single answer. */
ferry_status ferry__find_safetensors(const char *path, char **out_file);

/* The only *.gguf of a folder, FERRY_OK with NULL when there is none; `path`
 * itself unless it is a folder. */
ferry_status ferry__find_gguf(const char *path, char **out_file);

/* `name` in the folder of the file `path`. Owned. */
ferry_status ferry__path_beside(const char *path, const char *name,
                                char **out_path);

#endif
