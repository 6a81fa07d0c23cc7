/* SPDX-License-Identifier: Apache-2.0 */
/* Log lines, to the program's function or to standard error.
 * Invariant: no lock is held, so a log line can be written in a forked child
 * and from inside the program's own function. */
#include "base/log.h"

#include "base/config.h"

#include <errno.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define LOG_LINE_BYTES 2048
#define N_TARGETS      16

/* A function and its argument must be read as a pair. Pairs that were ever
 * set stay in their slot, and `current` says which one counts; a slot is
 * taken again only after N_TARGETS - 1 others were set. Slot 0 is the
 * default. */
static struct {
    _Atomic(ferry_log_fn) fn;
    _Atomic(void *) arg;
} targets[N_TARGETS];
static _Atomic uint32_t current;
static _Atomic uint32_t next_target;

static const char *const level_names[] = {"error", "warn", "info", "debug"};

static uint32_t find_target(ferry_log_fn fn, void *arg)
{
    for (uint32_t i = 1; i < N_TARGETS; i++) {
        if (atomic_load(&targets[i].fn) == fn &&
            atomic_load(&targets[i].arg) == arg)
            return i;
    }
    return 1 + atomic_fetch_add(&next_target, 1) % (N_TARGETS - 1);
}

void ferry_log_set(ferry_log_fn fn, void *arg)
{
    uint32_t i = fn ? find_target(fn, arg) : 0;

    if (fn) {
        atomic_store(&targets[i].fn, fn);
        atomic_store(&targets[i].arg, arg);
    }
    atomic_store(&current, i);
}

static ferry_log_level lowest_level(void)
{
    const char *name = ferry__config_get(FERRY__CONFIG_LOG_LEVEL);

    for (int i = FERRY_LOG_ERROR; i <= FERRY_LOG_DEBUG; i++) {
        if (strcmp(name, level_names[i]) == 0)
            return (ferry_log_level)i;
    }
    return FERRY_LOG_WARN;
}

/* A function of the program is handed every line with its level and picks
 * for itself; the setting rules the default alone. */
bool ferry__log_enabled(ferry_log_level level)
{
    return atomic_load(&current) != 0 || level <= lowest_level();
}

static void write_stderr(ferry_log_level level, const char *line)
{
    char text[LOG_LINE_BYTES + 32];
    int n = snprintf(text, sizeof(text), "ferry: %s: %s\n", level_names[level],
                     line);
    size_t done = 0;

    while (n > 0 && done < (size_t)n) {
        ssize_t wrote = write(STDERR_FILENO, text + done, (size_t)n - done);
        if (wrote < 0 && errno == EINTR)
            continue;
        if (wrote <= 0)
            return;
        done += (size_t)wrote;
    }
}

void ferry__log(ferry_log_level level, const char *fmt, ...)
{
    char line[LOG_LINE_BYTES];
    uint32_t i = atomic_load(&current);
    int saved_errno = errno;
    va_list args;

    if (level < FERRY_LOG_ERROR || level > FERRY_LOG_DEBUG ||
        !ferry__log_enabled(level))
        return;
    va_start(args, fmt);
    vsnprintf(line, sizeof(line), fmt, args);
    va_end(args);
    for (char *c = line; *c; c++) {
        if ((unsigned char)*c < 0x20 || *c == 0x7F)
            *c = ' ';
    }
    if (i == 0) {
        write_stderr(level, line);
    } else {
        ferry_log_fn fn = atomic_load(&targets[i].fn);
        fn(level, line, atomic_load(&targets[i].arg));
    }
    errno = saved_errno;
}
