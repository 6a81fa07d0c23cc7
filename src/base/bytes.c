/* SPDX-License-Identifier: Apache-2.0 */
/* Little-endian fields, written to growing text and read with a bound.
 * Invariant: nothing here depends on the machine's own byte order. */
#include "base/bytes.h"

#include <string.h>

void ferry__put_u32(ferry__str *s, uint32_t v)
{
    char b[4];

    for (int i = 0; i < 4; i++)
        b[i] = (char)(unsigned char)(v >> (8 * i));
    ferry__str_append_n(s, b, sizeof(b));
}

void ferry__put_u64(ferry__str *s, uint64_t v)
{
    ferry__put_u32(s, (uint32_t)v);
    ferry__put_u32(s, (uint32_t)(v >> 32));
}

void ferry__put_text(ferry__str *s, const char *text, size_t size)
{
    size_t n = strnlen(text, size);

    if (n > 0)
        ferry__str_append_n(s, text, n);
    for (; n < size; n++)
        ferry__str_append_n(s, "", 1);
}

void ferry__get_bytes(ferry__reader *r, void *out, size_t n)
{
    if (r->left < n) {
        r->bad = true;
        memset(out, 0, n);
        return;
    }
    if (n > 0)
        memcpy(out, r->at, n);
    r->at += n;
    r->left -= n;
}

uint32_t ferry__get_u32(ferry__reader *r)
{
    unsigned char b[4];

    ferry__get_bytes(r, b, sizeof(b));
    return (uint32_t)b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 |
           (uint32_t)b[3] << 24;
}

uint64_t ferry__get_u64(ferry__reader *r)
{
    uint64_t low = ferry__get_u32(r);

    return low | (uint64_t)ferry__get_u32(r) << 32;
}

bool ferry__get_count(ferry__reader *r, size_t item_bytes, size_t *out)
{
    size_t count = ferry__get_u32(r);

    *out = 0;
    if (r->bad || count > r->left / item_bytes) {
        r->bad = true;
        return false;
    }
    *out = count;
    return true;
}
