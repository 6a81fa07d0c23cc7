/* SPDX-License-Identifier: Apache-2.0 */
/* Requests of the rendezvous store, as torch's TCPStore (classic backend)
 * sends them; docs/protocol.md has the list.
 * Invariant: what is parsed points into the bytes given and obeys the
 * limits below; nothing is allocated for a length that a peer only claims. */
#ifndef FERRY_COMM_TCP_STORE_WIRE_H
#define FERRY_COMM_TCP_STORE_WIRE_H

#include <ferry/status.h>
#include <stdbool.h>

#define FERRY__STORE_MAGIC       0x3C85F7CEu
#define FERRY__STORE_KEY_BYTES   ((size_t)4096)
#define FERRY__STORE_VALUE_BYTES ((size_t)8 << 20)
#define FERRY__STORE_KEYS_MAX    ((size_t)1024) /* of one request */

enum {
    FERRY__STORE_VALIDATE = 0,
    FERRY__STORE_SET = 1,
    FERRY__STORE_COMPARE_SET = 2,
    FERRY__STORE_GET = 3,
    FERRY__STORE_ADD = 4,
    FERRY__STORE_CHECK = 5,
    FERRY__STORE_WAIT = 6,
    FERRY__STORE_NUM_KEYS = 7,
    FERRY__STORE_DELETE = 8,
    FERRY__STORE_APPEND = 9,
    FERRY__STORE_MULTI_GET = 10,
    FERRY__STORE_MULTI_SET = 11,
    FERRY__STORE_CANCEL_WAIT = 12,
    FERRY__STORE_PING = 13
};

/* Answers of one byte. */
enum {
    FERRY__STORE_READY = 0,     /* CHECK: all are there; WAIT: now they are */
    FERRY__STORE_NOT_READY = 1, /* CHECK: not all; WAIT: given up */
};

typedef struct ferry__store_bytes {
    const unsigned char *data;
    size_t size;
} ferry__store_bytes;

typedef struct ferry__store_request {
    uint8_t op;
    uint32_t word;  /* magic or nonce */
    int64_t amount; /* ADD */
    size_t n_items; /* keys and values, in the order of the wire */
    ferry__store_bytes items[2 * FERRY__STORE_KEYS_MAX];
} ferry__store_request;

/* Parses the request that bytes begin with. FERRY_OK: *out_used bytes were
 * it. FERRY_DONE: more bytes are needed, *out_used in all at least. Else
 * FERRY_EPEER: the peer speaks something else or exceeds a limit. */
ferry_status ferry__store_parse(const unsigned char *bytes, size_t size,
                                ferry__store_request *out, size_t *out_used);

uint64_t ferry__store_u64(const unsigned char *p);
void ferry__store_put_u64(unsigned char *p, uint64_t v);
void ferry__store_put_u32(unsigned char *p, uint32_t v);

#endif
