/* SPDX-License-Identifier: Apache-2.0 */
/* One generation step in a rank: the frame's sequences through the model. */
#ifndef FERRY_SERVE_RANK_STEP_H
#define FERRY_SERVE_RANK_STEP_H

#include "model/model.h"

/* Reads a STEP body, runs the forward pass, and on rank 0 samples. *out_body
 * is owned (ferry__free); NULL on the other ranks. */
ferry_status ferry__rank_step(ferry__model *model, int64_t vocab_size,
                              const char *bytes, size_t size_bytes,
                              void **out_body, size_t *out_size);

#endif
