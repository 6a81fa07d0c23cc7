/* SPDX-License-Identifier: Apache-2.0 */
/* Log lines, to the program's function or to standard error, there as text or
 * as one JSON object a line.
 * Invariant: no lock is held, so a log line can be written in a forked child
 * and from inside the program's own function. */
#include "base/log.h"

#include "base/config.h"

#include <errno.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
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

/* UTC as "2026-01-31T12:00:00.123Z". gmtime_r takes a lock, which a forked
 * child may find held, so the date is reckoned here: by eras of 400 years
 * whose years begin in March, which puts the leap day last. */
static void utc_text(char *out, size_t size_bytes)
{
    struct timespec now;
    int64_t days, second, era, day, year, of_year, month;

    clock_gettime(CLOCK_REALTIME, &now);
    days = now.tv_sec / 86400 + 719468;
    second = now.tv_sec % 86400;
    era = days / 146097;
    day = days % 146097;
    year = (day - day / 1460 + day / 36524 - day / 146096) / 365;
    of_year = day - (365 * year + year / 4 - year / 100);
    month = (5 * of_year + 2) / 153;
    day = of_year - (153 * month + 2) / 5 + 1;
    month += month < 10 ? 3 : -9;
    year += era * 400 + (month <= 2);
    snprintf(out, size_bytes, "%04d-%02d-%02dT%02d:%02d:%02d.%03dZ", (int)year,
             (int)month, (int)day, (int)(second / 3600),
             (int)(second / 60 % 60), (int)(second % 60),
             (int)(now.tv_nsec / 1000000));
}

/* The length of the UTF-8 sequence at c, 0 when it is none. */
static size_t utf8_length(const unsigned char *c)
{
    size_t n = c[0] < 0x80                   ? 1
               : c[0] >= 0xC2 && c[0] < 0xE0 ? 2
               : c[0] >= 0xE0 && c[0] < 0xF0 ? 3
               : c[0] >= 0xF0 && c[0] < 0xF5 ? 4
                                             : 0;

    for (size_t i = 1; i < n; i++)
        if ((c[i] & 0xC0) != 0x80)
            return 0;
    /* Overlong forms, surrogates, and beyond the last code point. */
    if ((c[0] == 0xE0 && c[1] < 0xA0) || (c[0] == 0xED && c[1] > 0x9F) ||
        (c[0] == 0xF0 && c[1] < 0x90) || (c[0] == 0xF4 && c[1] > 0x8F))
        return 0;
    return n;
}

/* The line as the inside of a JSON string: it has no control characters any
 * more; bytes that are no UTF-8, as a cut may leave, become '?'. */
static size_t json_escape(char *out, const char *line)
{
    const unsigned char *c = (const unsigned char *)line;
    size_t n = 0;

    while (*c) {
        size_t length = utf8_length(c);

        if (*c == '"' || *c == '\\')
            out[n++] = '\\';
        if (length == 0)
            out[n++] = '?';
        for (size_t i = 0; i < length; i++)
            out[n++] = (char)c[i];
        c += length == 0 ? 1 : length;
    }
    return n;
}

#define LOG_TEXT_BYTES (2 * LOG_LINE_BYTES + 128)

static size_t format_json(char *out, ferry_log_level level, const char *line)
{
    char when[48];
    size_t n;

    utc_text(when, sizeof(when));
    n = (size_t)snprintf(out, LOG_TEXT_BYTES,
                         "{\"time\":\"%s\",\"level\":\"%s\",\"message\":\"",
                         when, level_names[level]);
    n += json_escape(out + n, line);
    memcpy(out + n, "\"}\n", 3);
    return n + 3;
}

static void write_stderr(ferry_log_level level, const char *line)
{
    char text[LOG_TEXT_BYTES];
    size_t n, done = 0;

    if (ferry__config_get(FERRY__CONFIG_LOG_FORMAT)[0] == 'j')
        n = format_json(text, level, line);
    else
        n = (size_t)snprintf(text, sizeof(text), "ferry: %s: %s\n",
                             level_names[level], line);
    while (done < n) {
        ssize_t wrote = write(STDERR_FILENO, text + done, n - done);
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
