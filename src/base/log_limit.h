/* SPDX-License-Identifier: Apache-2.0 */
/* Log lines that whoever is outside may cause as often as he likes.
 * Invariant: the first is written at once, then at most one a second, which
 * says how many were left out; none is left out without being counted. */
#ifndef FERRY_BASE_LOG_LIMIT_H
#define FERRY_BASE_LOG_LIMIT_H

#include <ferry/status.h>
#include <stdatomic.h>
#include <stdbool.h>

/* All zero: nothing was written yet. Any thread. */
typedef struct ferry__log_limit {
    _Atomic int64_t next_ns; /* before that, lines are only counted */
    _Atomic uint64_t left_out;
} ferry__log_limit;

void ferry__log_limited(ferry__log_limit *limit, ferry_log_level level,
                        const char *fmt, ...) FERRY_PRINTF(3, 4);
/* Says how many were left out since the last line ("what: 7 more"), if any
 * were and the second is over, or it is the `last` chance. True while some
 * are still to be told. */
bool ferry__log_limit_flush(ferry__log_limit *limit, ferry_log_level level,
                            const char *what, bool last);

#endif
