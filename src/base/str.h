/* SPDX-License-Identifier: Apache-2.0 */
/* Growable text, and a few questions about strings.
 * Invariant: a ferry__str with `failed` set stays failed until freed, so
 * callers append freely and ask once. */
#ifndef FERRY_BASE_STR_H
#define FERRY_BASE_STR_H

#include <ferry/status.h>
#include <stdbool.h>

typedef struct ferry__str {
    char *data; /* NUL terminated once anything was appended */
    size_t length, capacity;
    bool failed; /* out of memory */
} ferry__str;

void ferry__str_append(ferry__str *s, const char *text);
void ferry__str_append_n(ferry__str *s, const char *text, size_t n);
void ferry__str_printf(ferry__str *s, const char *fmt, ...) FERRY_PRINTF(2, 3);
/* Appends as a quoted JSON string; invalid UTF-8 bytes become U+FFFD. */
void ferry__str_json(ferry__str *s, const char *text);
void ferry__str_json_n(ferry__str *s, const char *text, size_t n);
void ferry__str_free(ferry__str *s);
/* Moves the text out (owned by the caller), or FERRY_ENOMEM. */
ferry_status ferry__str_take(ferry__str *s, char **out_text);

bool ferry__starts_with(const char *text, const char *prefix);
/* '*' matches any run (also empty), anything else itself. At most one '*'. */
bool ferry__match(const char *pattern, const char *text);
/* Edit distance, capped at `limit` + 1; for nearest-name suggestions. */
size_t ferry__edit_distance(const char *a, const char *b, size_t limit);
/* Equal in time that depends on the lengths only. */
bool ferry__equal_secret(const char *a, const char *b);
/* Writes "[8, 4]" for a shape. Returns buffer. */
const char *ferry__shape_text(char *buffer, size_t size_bytes, int32_t ndim,
                              const int64_t *shape);

#endif
