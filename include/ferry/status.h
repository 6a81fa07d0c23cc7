/* SPDX-License-Identifier: Apache-2.0 */
/* Status codes, the last error of a thread, and the log.
 * One table (FERRY_STATUS_TABLE) makes the enum, the names and the texts.
 * Invariant: 0 is success, negative is failure, positive is no failure. */
#ifndef FERRY_STATUS_H
#define FERRY_STATUS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define FERRY_PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))
#else
#define FERRY_PRINTF(fmt, args)
#endif

/* X(name, value, text). Values are pinned; they are grouped by what a caller
 * must rebuild: nothing (argument), the two ends (mismatch), the connection
 * (peer), the order of calls (round), the installation (backend). */
#define FERRY_STATUS_TABLE(X)                                                  \
    X(OK, 0, "success")                                                        \
    X(DONE, 1, "no more items")                                                \
    /* argument: the call was wrong, nothing was touched */                    \
    X(EINVAL, -1, "invalid argument")                                          \
    X(EUNKNOWN, -2, "unknown name")                                            \
    X(EEXIST, -3, "name already taken")                                        \
    X(ENOMEM, -4, "out of memory")                                             \
    X(ENOTSUP, -5, "operation not supported")                                  \
    X(EOVERFLOW, -6, "size too large")                                         \
    /* mismatch: the two ends, or declaration and data, disagree */            \
    X(EMISMATCH, -10, "declared and actual differ")                            \
    X(ECOVERAGE, -11, "not every element was written")                         \
    X(EDIGEST, -12, "digest differs")                                          \
    X(EVERSION, -13, "versions differ")                                        \
    /* peer: the other side failed, or cannot be reached */                    \
    X(EPEER, -20, "peer reported a failure")                                   \
    X(ETIMEOUT, -21, "deadline passed")                                        \
    X(ENOPROGRESS, -22, "no progress within the bound")                        \
    X(ECANCELED, -23, "canceled")                                              \
    X(EAUTH, -24, "not authorised")                                            \
    X(ECONN, -25, "connection failed")                                         \
    X(EROUTE, -26, "route absent")                                             \
    /* round: the call came at the wrong time */                               \
    X(EORDER, -30, "wrong order of calls")                                     \
    X(EBUSY, -31, "busy")                                                      \
    X(ENOTREADY, -32, "not ready")                                             \
    /* backend: this machine or installation cannot do it */                   \
    X(EBACKEND, -40, "backend unavailable")                                    \
    X(EIO, -41, "input or output failed")                                      \
    X(ENOSPC, -42, "no space left")                                            \
    X(EINTERNAL, -43, "internal error")

typedef enum ferry_status {
#define FERRY_STATUS_ENUM(name, value, text) FERRY_##name = (value),
    FERRY_STATUS_TABLE(FERRY_STATUS_ENUM)
#undef FERRY_STATUS_ENUM
} ferry_status;

/* Name of a status without prefix ("EMISMATCH"); "?" for an unknown value. */
const char *ferry_status_name(ferry_status status);

/* One line of text for a status; "unknown status" for an unknown value. */
const char *ferry_status_text(ferry_status status);

/* The line recorded by the last failing call of this thread: lower case, one
 * line, naming the first offending thing and both values. "" when nothing
 * failed yet. Borrowed; valid until the next failing call of this thread. */
const char *ferry_last_error(void);

/* Records a line for this thread and returns `status`, so that a function
 * can `return ferry_fail(FERRY_EMISMATCH, "…", …)`. Longer lines than 1023
 * bytes are cut; control characters become spaces. For implementers of
 * sources, clients, engines and models. */
ferry_status ferry_fail(ferry_status status, const char *fmt, ...)
    FERRY_PRINTF(2, 3);

/* Returns from the enclosing function when `expr` failed (is negative). */
#define FERRY_TRY(expr)                                                        \
    do {                                                                       \
        ferry_status ferry_try_ = (expr);                                      \
        if (ferry_try_ < 0)                                                    \
            return ferry_try_;                                                 \
    } while (0)

typedef enum ferry_log_level {
    FERRY_LOG_ERROR = 0,
    FERRY_LOG_WARN = 1,
    FERRY_LOG_INFO = 2,
    FERRY_LOG_DEBUG = 3
} ferry_log_level;

/* Receives one line without a newline, of every level. Called from any
 * thread. */
typedef void (*ferry_log_fn)(ferry_log_level level, const char *line,
                             void *arg);

/* Sets where log lines go. NULL restores the default, which writes to
 * standard error at FERRY_LOG_WARN and above (setting `log_level`). The
 * function must stay callable until replaced. Any thread. */
void ferry_log_set(ferry_log_fn fn, void *arg);

/* Version of the library as (major << 16 | minor << 8 | patch). */
uint32_t ferry_version(void);
/* The same as text, "0.1.0". */
const char *ferry_version_text(void);

#ifdef __cplusplus
}
#endif
#endif
