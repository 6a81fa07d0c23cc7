/* SPDX-License-Identifier: Apache-2.0 */
/* Growable text, and a few questions about strings.
 * Invariant: once `failed`, appends change nothing until the text is
 * freed. */
#include "base/str.h"

#include "base/alloc.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define REPLACEMENT "\xEF\xBF\xBD"

/* Room for n more bytes and the NUL. */
static bool reserve(ferry__str *s, size_t n)
{
    size_t need;

    if (s->failed)
        return false;
    if (!ferry__add(s->length, n, &need) ||
        ferry__grow(&s->data, &s->capacity, need, 1) < 0) {
        s->failed = true;
        return false;
    }
    return true;
}

void ferry__str_append_n(ferry__str *s, const char *text, size_t n)
{
    if (!reserve(s, n))
        return;
    memcpy(s->data + s->length, text, n);
    s->length += n;
    s->data[s->length] = '\0';
}

void ferry__str_append(ferry__str *s, const char *text)
{
    ferry__str_append_n(s, text, strlen(text));
}

void ferry__str_printf(ferry__str *s, const char *fmt, ...)
{
    va_list args, again;
    int n;

    va_start(args, fmt);
    va_copy(again, args);
    n = vsnprintf(NULL, 0, fmt, args);
    va_end(args);
    if (n < 0)
        s->failed = true;
    else if (reserve(s, (size_t)n)) {
        vsnprintf(s->data + s->length, (size_t)n + 1, fmt, again);
        s->length += (size_t)n;
    }
    va_end(again);
}

/* Bytes of the UTF-8 character at the start (which is not ASCII), or of as
 * much of one as is there: what is cut short is replaced once, as decoders
 * commonly do. The range of the second byte shuts out what is overlong, a
 * surrogate or beyond U+10FFFF. */
static size_t utf8_length(const unsigned char *p, size_t left, bool *out_whole)
{
    unsigned char low = 0x80, high = 0xBF;
    size_t n, i = 1;

    *out_whole = false;
    if (p[0] < 0xC2 || p[0] > 0xF4)
        return 1;
    n = p[0] < 0xE0 ? 2 : p[0] < 0xF0 ? 3 : 4;
    if (p[0] == 0xE0)
        low = 0xA0;
    if (p[0] == 0xED)
        high = 0x9F;
    if (p[0] == 0xF0)
        low = 0x90;
    if (p[0] == 0xF4)
        high = 0x8F;
    while (i < n && i < left && p[i] >= low && p[i] <= high) {
        low = 0x80;
        high = 0xBF;
        i++;
    }
    *out_whole = i == n;
    return i;
}

static void append_escaped(ferry__str *s, unsigned char c)
{
    switch (c) {
    case '"':
        ferry__str_append_n(s, "\\\"", 2);
        break;
    case '\\':
        ferry__str_append_n(s, "\\\\", 2);
        break;
    case '\n':
        ferry__str_append_n(s, "\\n", 2);
        break;
    case '\r':
        ferry__str_append_n(s, "\\r", 2);
        break;
    case '\t':
        ferry__str_append_n(s, "\\t", 2);
        break;
    default:
        ferry__str_printf(s, "\\u%04x", c);
    }
}

void ferry__str_json_n(ferry__str *s, const char *text, size_t n)
{
    const unsigned char *p = (const unsigned char *)text;
    size_t i = 0;

    ferry__str_append_n(s, "\"", 1);
    while (i < n) {
        size_t run = i;

        while (run < n && p[run] >= 0x20 && p[run] < 0x7F && p[run] != '"' &&
               p[run] != '\\')
            run++;
        if (run > i) {
            ferry__str_append_n(s, text + i, run - i);
            i = run;
        } else if (p[i] < 0x80) {
            append_escaped(s, p[i++]);
        } else {
            bool whole;
            size_t length = utf8_length(p + i, n - i, &whole);

            if (whole)
                ferry__str_append_n(s, text + i, length);
            else
                ferry__str_append(s, REPLACEMENT);
            i += length;
        }
    }
    ferry__str_append_n(s, "\"", 1);
}

void ferry__str_json(ferry__str *s, const char *text)
{
    ferry__str_json_n(s, text, strlen(text));
}

void ferry__str_free(ferry__str *s)
{
    ferry__free(s->data);
    memset(s, 0, sizeof(*s));
}

ferry_status ferry__str_take(ferry__str *s, char **out_text)
{
    if (!s->data)
        ferry__str_append_n(s, "", 0);
    if (s->failed) {
        ferry__str_free(s);
        return ferry_fail(FERRY_ENOMEM, "out of memory: text");
    }
    *out_text = s->data;
    memset(s, 0, sizeof(*s));
    return FERRY_OK;
}

bool ferry__starts_with(const char *text, const char *prefix)
{
    return strncmp(text, prefix, strlen(prefix)) == 0;
}

bool ferry__match(const char *pattern, const char *text)
{
    const char *star = strchr(pattern, '*');
    size_t n = strlen(text), head, tail;

    if (!star)
        return strcmp(pattern, text) == 0;
    head = (size_t)(star - pattern);
    tail = strlen(star + 1);
    return n >= head + tail && memcmp(pattern, text, head) == 0 &&
           memcmp(star + 1, text + n - tail, tail) == 0;
}

#define DISTANCE_MAX 64

static size_t least(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* Only the band of the distance table within `limit` of the diagonal is
 * computed: row i holds columns i - limit … i + limit. */
size_t ferry__edit_distance(const char *a, const char *b, size_t limit)
{
    size_t row[2 * DISTANCE_MAX + 3], n = strlen(a), m = strlen(b);
    size_t far, width;

    if (limit > DISTANCE_MAX)
        limit = DISTANCE_MAX;
    far = limit + 1;
    width = 2 * limit + 1;
    if ((n > m ? n - m : m - n) > limit)
        return far;
    for (size_t k = 0; k < width; k++) /* row 0: column k - limit */
        row[k] = k < limit ? far : least(k - limit, far);
    row[width] = far;
    for (size_t i = 1; i <= n; i++) {
        size_t left = far;

        for (size_t k = 0; k < width; k++) {
            size_t cost = far;

            if (i + k >= limit && i + k - limit <= m) {
                size_t j = i + k - limit;

                /* Until it is replaced, row[k] is the cell up left, and
                 * row[k + 1] the cell above. */
                if (j == 0)
                    cost = i;
                else
                    cost = least(row[k] + (a[i - 1] != b[j - 1]),
                                 least(row[k + 1], left) + 1);
            }
            row[k] = left = least(cost, far);
        }
    }
    return row[m + limit - n];
}

bool ferry__equal_secret(const char *a, const char *b)
{
    size_t n = strlen(a), m = strlen(b);
    volatile unsigned char differ = (unsigned char)(n != m);

    for (size_t i = 0; i < n; i++)
        differ |= (unsigned char)(a[i] ^ (i < m ? b[i] : 0));
    return differ == 0;
}

const char *ferry__shape_text(char *buffer, size_t size_bytes, int32_t ndim,
                              const int64_t *shape)
{
    size_t used = 0;

    if (size_bytes == 0)
        return buffer;
    buffer[0] = '\0';
    for (int32_t i = 0; i <= ndim && used < size_bytes; i++) {
        int n;

        if (i < ndim)
            n = snprintf(buffer + used, size_bytes - used, "%s%lld",
                         i ? ", " : "[", (long long)shape[i]);
        else
            n = snprintf(buffer + used, size_bytes - used, "%s",
                         ndim > 0 ? "]" : "[]");
        if (n < 0)
            break;
        used += (size_t)n;
    }
    return buffer;
}
