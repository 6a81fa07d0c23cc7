/* SPDX-License-Identifier: Apache-2.0 */
/* The files of a checkpoint: finding them, reading them whole, and asking a
 * GGUF for its metadata.
 * Invariant: a value of another type than asked for is never handed to ggml,
 * which would end the process. Errors of opening name the file, those
 * of reading from it do not: the reader puts its path before them. */
#ifndef FERRY_MODEL_MODEL_FILES_H
#define FERRY_MODEL_MODEL_FILES_H

#include <ferry/status.h>
#include <stdbool.h>

/* Where file `name` ("config.json") of the checkpoint `path` is: in the
 * folder, beside another file of it, or the file itself. A GGUF holds
 * everything: *out_gguf is then set and the path is its own. *out_path is
 * owned (ferry__free); the file need not exist unless `path` does not. */
ferry_status ferry__model_file(const char *path, const char *name,
                               char **out_path, bool *out_gguf);
/* Reads a whole file, NUL terminated beyond its length. FERRY_EUNKNOWN when
 * it does not exist, FERRY_EIO and FERRY_EOVERFLOW otherwise; errors do not
 * name it. */
ferry_status ferry__model_read(const char *path, size_t max_bytes,
                               char **out_text, size_t *out_length);

/* An open GGUF header. */
typedef struct ferry__gguf_meta ferry__gguf_meta;

ferry_status ferry__gguf_meta_open(const char *path, ferry__gguf_meta **out);
void ferry__gguf_meta_close(ferry__gguf_meta **meta);
/* The getters answer FERRY_EUNKNOWN (with a line) when the key is absent and
 * FERRY_EINVAL when its type is another. Strings are borrowed. */
ferry_status ferry__gguf_meta_int(const ferry__gguf_meta *meta, const char *key,
                                  int64_t *out);
ferry_status ferry__gguf_meta_float(const ferry__gguf_meta *meta,
                                    const char *key, double *out);
ferry_status ferry__gguf_meta_bool(const ferry__gguf_meta *meta,
                                   const char *key, bool *out);
ferry_status ferry__gguf_meta_text(const ferry__gguf_meta *meta,
                                   const char *key, const char **out);
bool ferry__gguf_meta_has(const ferry__gguf_meta *meta, const char *key);
/* Arrays of strings and of i32. */
ferry_status ferry__gguf_meta_texts(const ferry__gguf_meta *meta,
                                    const char *key, size_t *out_count);
const char *ferry__gguf_meta_text_at(const ferry__gguf_meta *meta,
                                     const char *key, size_t index);
ferry_status ferry__gguf_meta_i32s(const ferry__gguf_meta *meta,
                                   const char *key, const int32_t **out,
                                   size_t *out_count);
/* Extents of a tensor, outermost first; false when it is absent. */
bool ferry__gguf_meta_shape(const ferry__gguf_meta *meta, const char *tensor,
                            int64_t out_shape[4], int32_t *out_ndim);
/* Reads a whole f32 tensor of `count` elements. */
ferry_status ferry__gguf_meta_f32(const ferry__gguf_meta *meta,
                                  const char *tensor, int64_t count,
                                  float *out);

/* Sends ggml's own log lines to Ferry's log; any number of calls. */
void ferry__ggml_log_init(void);

#endif
