/* SPDX-License-Identifier: Apache-2.0 */
/* The pickle, 247 bytes:
 *   1. 80 04  protocol
 *   2. 95, u64 236  length of what follows
 *   3. 8c 07 "_ctypes" 94, 8c 09 "_unpickle" 94, 93 94  the function
 *   4. 8c 34 "vllm.distributed.device_communicators.pynccl_wrapper" 94,
 *      8c 0c "ncclUniqueId" 94, 93 94  the class
 *   5. 7d 94  no attributes
 *   6. 43 80, 128 bytes, 94  the id, at offset 111
 *   7. 86 94, 86 94, 52 94, 2e  two tuples, the call, the end
 * Invariant: a value of any other shape is refused. */
#include "comm/unique_id.h"

#include <assert.h>
#include <string.h>

#define AT_ID       111
#define AT_PROTOCOL 1

static const unsigned char before[] =
    "\x80\x04"
    "\x95\xec\0\0\0\0\0\0\0"
    "\x8c\x07"
    "_ctypes"
    "\x94\x8c\x09"
    "_unpickle"
    "\x94\x93\x94\x8c\x34"
    "vllm.distributed.device_communicators.pynccl_wrapper"
    "\x94\x8c\x0c"
    "ncclUniqueId"
    "\x94\x93\x94}\x94"
    "C\x80";
static const unsigned char after[] = "\x94\x86\x94\x86\x94R\x94.";

static_assert(sizeof(before) - 1 == AT_ID, "the id's offset");
static_assert(AT_ID + FERRY__UNIQUE_ID + sizeof(after) - 1 == FERRY__ID_PICKLE,
              "the pickle's size");

void ferry__id_pickle(const void *id, unsigned char out[FERRY__ID_PICKLE])
{
    memcpy(out, before, AT_ID);
    memcpy(out + AT_ID, id, FERRY__UNIQUE_ID);
    memcpy(out + AT_ID + FERRY__UNIQUE_ID, after, sizeof(after) - 1);
}

static bool is_of_form(unsigned char byte, size_t at, unsigned char want)
{
    return byte == want || (at == AT_PROTOCOL && byte == 5);
}

ferry_status ferry__id_unpickle(const void *bytes, size_t size_bytes,
                                void *out_id)
{
    unsigned char want[FERRY__ID_PICKLE];
    const unsigned char *b = bytes;

    /* The id itself may be anything; so it is compared with itself. */
    if (size_bytes >= AT_ID + FERRY__UNIQUE_ID)
        ferry__id_pickle(b + AT_ID, want);
    else
        memcpy(want, before, AT_ID);
    for (size_t i = 0; i < size_bytes && i < FERRY__ID_PICKLE; i++) {
        if (i >= AT_ID && size_bytes < AT_ID + FERRY__UNIQUE_ID)
            break;
        if (!is_of_form(b[i], i, want[i]))
            return ferry_fail(FERRY_EPEER,
                              "the value of " FERRY__ID_KEY
                              " is no pickled NCCL unique id: byte %zu is "
                              "0x%02x, wants 0x%02x",
                              i, b[i], want[i]);
    }
    if (size_bytes != FERRY__ID_PICKLE)
        return ferry_fail(FERRY_EPEER,
                          "the value of " FERRY__ID_KEY
                          " is no pickled NCCL unique id: it has %zu bytes, "
                          "wants %d",
                          size_bytes, FERRY__ID_PICKLE);
    memcpy(out_id, b + AT_ID, FERRY__UNIQUE_ID);
    return FERRY_OK;
}

/* ---- base64 ---- */

static const char digits[] =
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

void ferry__id_base64(const void *id, char out[FERRY__ID_BASE64 + 1])
{
    const unsigned char *b = id;
    size_t n = 0;

    for (size_t i = 0; i < FERRY__UNIQUE_ID; i += 3) {
        size_t left = FERRY__UNIQUE_ID - i;
        uint32_t v = (uint32_t)b[i] << 16 |
                     (left > 1 ? (uint32_t)b[i + 1] << 8 : 0) |
                     (left > 2 ? (uint32_t)b[i + 2] : 0);

        out[n++] = digits[v >> 18];
        out[n++] = digits[v >> 12 & 63];
        out[n++] = left > 1 ? digits[v >> 6 & 63] : '=';
        out[n++] = left > 2 ? digits[v & 63] : '=';
    }
    out[n] = '\0';
}

/* The value of a digit; -1 when it is none. */
static int digit_of(char c)
{
    const char *found = c ? strchr(digits, c) : NULL;

    return found ? (int)(found - digits) : -1;
}

static ferry_status not_base64(size_t at)
{
    return ferry_fail(FERRY_EINVAL,
                      "nccl_unique_id_b64 is not valid standard base64 "
                      "(URL-safe base64 is not accepted): character %zu",
                      at);
}

ferry_status ferry__id_from_base64(const char *text, void *out_id)
{
    unsigned char id[FERRY__UNIQUE_ID + 1];
    size_t n = strlen(text), digits_wanted = FERRY__ID_BASE64 - 1, got = 0;
    size_t padding = n > 0 && text[n - 1] == '=' ? 1 : 0;
    uint32_t v = 0;

    padding += padding && n > 1 && text[n - 2] == '=';
    for (size_t i = 0; i < n - padding; i++) {
        if (digit_of(text[i]) < 0)
            return not_base64(i);
    }
    if (n % 4 != 0)
        return not_base64(n);
    if (n / 4 * 3 - padding != FERRY__UNIQUE_ID)
        return ferry_fail(FERRY_EINVAL,
                          "nccl_unique_id_b64 must decode to %d bytes, got "
                          "%zu",
                          FERRY__UNIQUE_ID, n / 4 * 3 - padding);
    for (size_t i = 0; i < digits_wanted; i++) {
        v = v << 6 | (uint32_t)digit_of(text[i]);
        if (i % 4 != 0)
            id[got++] = (unsigned char)(v >> (6 - i % 4 * 2));
    }
    /* The last digit has two bits too many; a second text for one id would
     * be one that no encoder writes. */
    if (v & 3)
        return not_base64(digits_wanted - 1);
    memcpy(out_id, id, FERRY__UNIQUE_ID);
    return FERRY_OK;
}
