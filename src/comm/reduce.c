/* SPDX-License-Identifier: Apache-2.0 */
/* The sums of an all-reduce, the same in all providers.
 * Invariant: operands are combined in the order of the calls, so that ranks
 * which call in rank order get equal bits. */
#include "comm/reduce.h"

/* out[i] = out[i] op in[i]. Integers wrap; MAX keeps the earlier of two that
 * do not compare, so NaN handling is the same on all ranks. */
#define REDUCE_LOOP(type, sum_type)                                            \
    do {                                                                       \
        type *o = out;                                                         \
        const type *x = in;                                                    \
        if (op == FERRY__REDUCE_SUM) {                                         \
            for (size_t i = 0; i < count; i++)                                 \
                o[i] = (type)((sum_type)o[i] + (sum_type)x[i]);                \
        } else {                                                               \
            for (size_t i = 0; i < count; i++)                                 \
                o[i] = x[i] > o[i] ? x[i] : o[i];                              \
        }                                                                      \
    } while (0)

void ferry__reduce_into(void *out, const void *in, size_t count,
                        ferry_dtype dtype, ferry__reduce_op op)
{
    switch (dtype) {
    case FERRY_DTYPE_F32:
        REDUCE_LOOP(float, float);
        break;
    case FERRY_DTYPE_F64:
        REDUCE_LOOP(double, double);
        break;
    case FERRY_DTYPE_I32:
        REDUCE_LOOP(int32_t, uint32_t);
        break;
    default:
        REDUCE_LOOP(int64_t, uint64_t);
        break;
    }
}

bool ferry__reduce_takes(ferry_dtype dtype)
{
    return dtype == FERRY_DTYPE_F32 || dtype == FERRY_DTYPE_F64 ||
           dtype == FERRY_DTYPE_I32 || dtype == FERRY_DTYPE_I64;
}
