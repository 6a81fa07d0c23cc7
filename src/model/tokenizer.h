/* SPDX-License-Identifier: Apache-2.0 */
/* Byte-level BPE from a checkpoint's own vocabulary (tokenizer.json or GGUF).
 * Invariant: decode(encode(text)) == text for any valid UTF-8. */
#ifndef FERRY_MODEL_TOKENIZER_H
#define FERRY_MODEL_TOKENIZER_H

#include <ferry/status.h>
#include <stdbool.h>

typedef struct ferry__tokenizer ferry__tokenizer;

/* FERRY_EUNKNOWN when the checkpoint has none: the server then takes ids
 * only. FERRY_ENOTSUP names a kind that is not byte-level BPE. */
ferry_status ferry__tokenizer_open(const char *path, ferry__tokenizer **out);
void ferry__tokenizer_close(ferry__tokenizer **tokenizer);
/* Special tokens in the text are recognised; nothing is put before it.
 * *out_ids owned (ferry_free). FERRY_EINVAL: the text is not UTF-8, or a byte
 * of it has no token. Any thread. */
ferry_status ferry__tokenizer_encode(const ferry__tokenizer *t,
                                     const char *text, size_t length,
                                     int32_t **out_ids, size_t *out_count);
/* Raw bytes of one token (may be part of a UTF-8 sequence). Borrowed. NULL
 * for an unknown id. Special tokens give "" unless with_special. */
const char *ferry__tokenizer_bytes(const ferry__tokenizer *t, int32_t id,
                                   bool with_special, size_t *out_length);
/* The token that the checkpoint puts before every text; -1: none. */
int32_t ferry__tokenizer_bos(const ferry__tokenizer *t);
int32_t ferry__tokenizer_size(const ferry__tokenizer *t);

#endif
