/* SPDX-License-Identifier: Apache-2.0 */
/* Fields of binary formats: little-endian, without padding.
 * Invariant: a reader that came short stays `bad` and gives zeros, so callers
 * read on and ask once; no count is believed that the bytes left cannot
 * hold. */
#ifndef FERRY_BASE_BYTES_H
#define FERRY_BASE_BYTES_H

#include "base/str.h"
#include <stddef.h>
#include <stdint.h>

void ferry__put_u32(ferry__str *s, uint32_t v);
void ferry__put_u64(ferry__str *s, uint64_t v);
/* Text in a field of `size` bytes, filled up with zeros; a longer one is
 * cut. */
void ferry__put_text(ferry__str *s, const char *text, size_t size);

/* The same at a place in a buffer of fixed form. */
static inline void ferry__write_u32(unsigned char *p, uint32_t v)
{
    for (int i = 0; i < 4; i++)
        p[i] = (unsigned char)(v >> (8 * i));
}

static inline uint32_t ferry__read_u32(const unsigned char *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 |
           (uint32_t)p[3] << 24;
}

typedef struct ferry__reader {
    const unsigned char *at;
    size_t left;
    bool bad;
} ferry__reader;

void ferry__get_bytes(ferry__reader *r, void *out, size_t n);
uint32_t ferry__get_u32(ferry__reader *r);
uint64_t ferry__get_u64(ferry__reader *r);
/* A u32 that counts items of at least item_bytes each. False, and *out 0,
 * when so many are not there. */
bool ferry__get_count(ferry__reader *r, size_t item_bytes, size_t *out);

#endif
