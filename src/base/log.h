/* SPDX-License-Identifier: Apache-2.0 */
/* Log lines. Invariant: one call, one line, whatever the thread. */
#ifndef FERRY_BASE_LOG_H
#define FERRY_BASE_LOG_H

#include <ferry/status.h>
#include <stdbool.h>

void ferry__log(ferry_log_level level, const char *fmt, ...) FERRY_PRINTF(2, 3);
bool ferry__log_enabled(ferry_log_level level);
/* Records `line` as this thread's last error: used when a line crosses a
 * thread or a wire. Returns status. */
ferry_status ferry__fail_line(ferry_status status, const char *line);
/* Puts "prefix: " before the recorded line. Returns status. */
ferry_status ferry__fail_prefix(ferry_status status, const char *fmt, ...)
    FERRY_PRINTF(2, 3);

/* A public function refuses a NULL argument by the name that its header
 * gives it. */
#define FERRY__NEED_AS(arg, name)                                              \
    do {                                                                       \
        if ((arg) == NULL)                                                     \
            return ferry_fail(FERRY_EINVAL, "%s is NULL", name);               \
    } while (0)
#define FERRY__NEED(arg) FERRY__NEED_AS(arg, #arg)

#endif
