/* SPDX-License-Identifier: Apache-2.0 */
/* The second copy of a model's stored parameters (`--commit staged`).
 * Mapped at the first staged round and kept; a commit copies whole slots into
 * the live addresses. Invariant: live storage is written by commit only. */
#ifndef FERRY_CORE_STAGING_H
#define FERRY_CORE_STAGING_H

#include <ferry/model.h>

typedef struct ferry__staging {
    const ferry_model *model;
    char *memory; /* one mapping; NULL until the first round */
    size_t size_bytes;
    size_t *offsets; /* per slot; runtime ones have none */
} ferry__staging;

/* Maps the copy if it is not there. */
ferry_status ferry__staging_open(ferry__staging *s, const ferry_model *model);
void *ferry__staging_slot(const ferry__staging *s, size_t slot);
/* The live bytes into the copy, and the copy into the live addresses. */
void ferry__staging_fill(const ferry__staging *s, size_t slot);
void ferry__staging_commit(const ferry__staging *s, size_t slot);
void ferry__staging_close(ferry__staging *s);

#endif
