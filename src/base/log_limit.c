/* SPDX-License-Identifier: Apache-2.0 */
/* Log lines at a bounded rate; see log_limit.h. */
#include "base/log_limit.h"

#include "base/clock.h"
#include "base/log.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>

#define LINE_BYTES 1024
#define EVERY_NS   INT64_C(1000000000)

/* Whether this thread is the one that may write now. */
static bool take_turn(ferry__log_limit *limit, bool anyway)
{
    int64_t now = ferry__now_ns(), next = atomic_load(&limit->next_ns);

    return (anyway || next == 0 || now >= next) &&
           atomic_compare_exchange_strong(&limit->next_ns, &next,
                                          now + EVERY_NS);
}

void ferry__log_limited(ferry__log_limit *limit, ferry_log_level level,
                        const char *fmt, ...)
{
    char line[LINE_BYTES];
    uint64_t n;
    va_list args;

    if (!take_turn(limit, false)) {
        atomic_fetch_add(&limit->left_out, 1);
        return;
    }
    va_start(args, fmt);
    vsnprintf(line, sizeof(line), fmt, args);
    va_end(args);
    n = atomic_exchange(&limit->left_out, 0);
    if (n > 0)
        ferry__log(level, "%s (and %" PRIu64 " more before it)", line, n);
    else
        ferry__log(level, "%s", line);
}

bool ferry__log_limit_flush(ferry__log_limit *limit, ferry_log_level level,
                            const char *what, bool last)
{
    uint64_t n;

    if (atomic_load(&limit->left_out) == 0)
        return false;
    if (!take_turn(limit, last))
        return true;
    n = atomic_exchange(&limit->left_out, 0);
    if (n > 0)
        ferry__log(level, "%s: %" PRIu64 " more", what, n);
    return false;
}
