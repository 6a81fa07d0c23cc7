/* SPDX-License-Identifier: Apache-2.0 */
/* Status names and texts, the last error of a thread, the version.
 * Invariant: recording a line allocates nothing, so it also works when
 * memory is gone; the line is always one line of at most 1023 bytes. */
#include "base/log.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define LINE_BYTES    1024
#define VERSION_MAJOR 0
#define VERSION_MINOR 1
#define VERSION_PATCH 0

static _Thread_local char last_error[LINE_BYTES];

const char *ferry_status_name(ferry_status status)
{
    switch (status) {
#define FERRY_STATUS_NAME(name, value, text)                                   \
    case FERRY_##name:                                                         \
        return #name;
        FERRY_STATUS_TABLE(FERRY_STATUS_NAME)
#undef FERRY_STATUS_NAME
    }
    return "?";
}

const char *ferry_status_text(ferry_status status)
{
    switch (status) {
#define FERRY_STATUS_TEXT(name, value, text)                                   \
    case FERRY_##name:                                                         \
        return text;
        FERRY_STATUS_TABLE(FERRY_STATUS_TEXT)
#undef FERRY_STATUS_TEXT
    }
    return "unknown status";
}

const char *ferry_last_error(void)
{
    return last_error;
}

/* Cuts a character that the end of the buffer split, so that the line stays
 * valid UTF-8 when its parts were. */
static size_t whole_characters(const char *text, size_t n)
{
    size_t start = n;

    while (start > 0 && n - start < 4 &&
           ((unsigned char)text[start - 1] & 0xC0) == 0x80)
        start--;
    if (start == 0)
        return n;
    start--;

    unsigned char lead = (unsigned char)text[start];
    size_t need = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : lead >= 0xC0 ? 2 : 1;
    return start + need > n ? start : n;
}

/* The new line may quote the old one, so it is made beside it first. */
static void record(const char *line)
{
    size_t n = strlen(line);

    if (n >= LINE_BYTES)
        n = LINE_BYTES - 1;
    if (n == LINE_BYTES - 1)
        n = whole_characters(line, n);
    memmove(last_error, line, n);
    last_error[n] = '\0';
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)last_error[i];
        if (c < 0x20 || c == 0x7F)
            last_error[i] = ' ';
    }
}

ferry_status ferry_fail(ferry_status status, const char *fmt, ...)
{
    char line[LINE_BYTES];
    va_list args;

    va_start(args, fmt);
    vsnprintf(line, sizeof(line), fmt, args);
    va_end(args);
    record(line);
    return status;
}

ferry_status ferry__fail_line(ferry_status status, const char *line)
{
    record(line ? line : "");
    return status;
}

ferry_status ferry__fail_prefix(ferry_status status, const char *fmt, ...)
{
    char line[2 * LINE_BYTES];
    va_list args;
    int n;

    va_start(args, fmt);
    n = vsnprintf(line, LINE_BYTES, fmt, args);
    va_end(args);
    if (n < 0)
        n = 0;
    if (n >= LINE_BYTES)
        n = LINE_BYTES - 1;
    snprintf(line + n, sizeof(line) - (size_t)n, ": %s", last_error);
    record(line);
    return status;
}

uint32_t ferry_version(void)
{
    return (uint32_t)VERSION_MAJOR << 16 | VERSION_MINOR << 8 | VERSION_PATCH;
}

#define TEXT(x)          #x
#define VERSION(a, b, c) TEXT(a) "." TEXT(b) "." TEXT(c)

const char *ferry_version_text(void)
{
    return VERSION(VERSION_MAJOR, VERSION_MINOR, VERSION_PATCH);
}
