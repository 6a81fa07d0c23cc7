/* SPDX-License-Identifier: Apache-2.0 */
/* Element-wise sums and maxima, shared by the providers.
 * Invariant: only dtypes that ferry__reduce_takes are given. */
#ifndef FERRY_COMM_REDUCE_H
#define FERRY_COMM_REDUCE_H

#include "comm/comm.h"

#include <stdbool.h>

/* float32, float64, int32, int64. */
bool ferry__reduce_takes(ferry_dtype dtype);
/* out[i] = out[i] op in[i]. */
void ferry__reduce_into(void *out, const void *in, size_t count,
                        ferry_dtype dtype, ferry__reduce_op op);

#endif
