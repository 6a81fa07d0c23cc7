/* SPDX-License-Identifier: Apache-2.0 */
/* What a round has written: per stored parameter, the set of boxes covered.
 * Completeness is by set of boxes, never by counting calls (O-35).
 * Invariant: a box written twice in a round counts once. */
#ifndef FERRY_CORE_COVERAGE_H
#define FERRY_CORE_COVERAGE_H

#include <ferry/model.h>

typedef struct ferry__coverage ferry__coverage;

ferry_status ferry__coverage_create(const ferry_model *model,
                                    ferry__coverage **out);
void ferry__coverage_destroy(ferry__coverage **coverage);
void ferry__coverage_reset(ferry__coverage *coverage);
/* Marks a box of slot. Repeats are merged. Amortised O(log boxes). */
ferry_status ferry__coverage_mark(ferry__coverage *coverage, size_t slot,
                                  const int64_t *start, const int64_t *count);
typedef enum ferry__covered {
    FERRY__COVERED_NONE,
    FERRY__COVERED_PART,
    FERRY__COVERED_FULL
} ferry__covered;
ferry__covered ferry__coverage_of(const ferry__coverage *coverage, size_t slot);
/* Elements covered and wanted of one slot. */
void ferry__coverage_count(const ferry__coverage *coverage, size_t slot,
                           int64_t *out_covered, int64_t *out_wanted);

#endif
