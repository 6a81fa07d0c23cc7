/* SPDX-License-Identifier: Apache-2.0 */
/* One byte of operation, then by it: a u32, an i64, a string (u64 length and
 * bytes), or a u64 count and that many strings. All little-endian.
 * Invariant: no read beyond the bytes given, whatever lengths they claim. */
#include "comm/tcp_store_wire.h"

typedef struct cursor {
    const unsigned char *bytes;
    size_t size, at;
} cursor;

uint64_t ferry__store_u64(const unsigned char *p)
{
    uint64_t v = 0;

    for (int i = 7; i >= 0; i--)
        v = v << 8 | p[i];
    return v;
}

void ferry__store_put_u64(unsigned char *p, uint64_t v)
{
    for (int i = 0; i < 8; i++)
        p[i] = (unsigned char)(v >> (8 * i));
}

void ferry__store_put_u32(unsigned char *p, uint32_t v)
{
    for (int i = 0; i < 4; i++)
        p[i] = (unsigned char)(v >> (8 * i));
}

/* FERRY_DONE when `n` bytes are not there yet; the cursor then tells how
 * many would do. */
static ferry_status take(cursor *c, size_t n, const unsigned char **out)
{
    if (n > c->size - c->at) {
        c->at += n;
        return FERRY_DONE;
    }
    *out = c->bytes + c->at;
    c->at += n;
    return FERRY_OK;
}

#define TAKE(expr)                                                             \
    do {                                                                       \
        ferry_status take_ = (expr);                                           \
        if (take_ != FERRY_OK)                                                 \
            return take_;                                                      \
    } while (0)

static ferry_status take_u64(cursor *c, uint64_t *out)
{
    const unsigned char *p;

    TAKE(take(c, 8, &p));
    *out = ferry__store_u64(p);
    return FERRY_OK;
}

static ferry_status take_u32(cursor *c, uint32_t *out)
{
    const unsigned char *p;

    TAKE(take(c, 4, &p));
    *out = (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 |
           (uint32_t)p[3] << 24;
    return FERRY_OK;
}

static ferry_status take_string(cursor *c, ferry__store_request *r,
                                const char *what, size_t limit)
{
    ferry__store_bytes *s = &r->items[r->n_items];
    uint64_t n;

    TAKE(take_u64(c, &n));
    if (n > limit)
        return ferry_fail(FERRY_EPEER,
                          "store request %d: %s of %llu bytes, at most %zu are "
                          "taken",
                          r->op, what, (unsigned long long)n, limit);
    TAKE(take(c, (size_t)n, &s->data));
    s->size = (size_t)n;
    r->n_items++;
    return FERRY_OK;
}

static ferry_status take_key(cursor *c, ferry__store_request *r)
{
    return take_string(c, r, "key", FERRY__STORE_KEY_BYTES);
}

static ferry_status take_value(cursor *c, ferry__store_request *r)
{
    return take_string(c, r, "value", FERRY__STORE_VALUE_BYTES);
}

static ferry_status take_many(cursor *c, ferry__store_request *r, bool values)
{
    uint64_t n;

    TAKE(take_u64(c, &n));
    if (n > FERRY__STORE_KEYS_MAX)
        return ferry_fail(FERRY_EPEER,
                          "store request %d: %llu keys, at most %zu are taken",
                          r->op, (unsigned long long)n, FERRY__STORE_KEYS_MAX);
    for (uint64_t i = 0; i < n; i++) {
        TAKE(take_key(c, r));
        if (values)
            TAKE(take_value(c, r));
    }
    return FERRY_OK;
}

static ferry_status take_add(cursor *c, ferry__store_request *r)
{
    uint64_t amount;

    TAKE(take_key(c, r));
    TAKE(take_u64(c, &amount));
    r->amount = (int64_t)amount;
    return FERRY_OK;
}

static ferry_status take_body(cursor *c, ferry__store_request *r)
{
    switch (r->op) {
    case FERRY__STORE_VALIDATE:
    case FERRY__STORE_PING:
        return take_u32(c, &r->word);
    case FERRY__STORE_SET:
    case FERRY__STORE_APPEND:
        TAKE(take_key(c, r));
        return take_value(c, r);
    case FERRY__STORE_COMPARE_SET:
        TAKE(take_key(c, r));
        TAKE(take_value(c, r));
        return take_value(c, r);
    case FERRY__STORE_GET:
    case FERRY__STORE_DELETE:
        return take_key(c, r);
    case FERRY__STORE_ADD:
        return take_add(c, r);
    case FERRY__STORE_CHECK:
    case FERRY__STORE_WAIT:
    case FERRY__STORE_MULTI_GET:
        return take_many(c, r, false);
    case FERRY__STORE_MULTI_SET:
        return take_many(c, r, true);
    case FERRY__STORE_NUM_KEYS:
    case FERRY__STORE_CANCEL_WAIT:
        return FERRY_OK;
    default:
        return ferry_fail(FERRY_EPEER, "store request %d is not known", r->op);
    }
}

ferry_status ferry__store_parse(const unsigned char *bytes, size_t size,
                                ferry__store_request *out, size_t *out_used)
{
    cursor c = {bytes, size, 1};
    ferry_status status;

    if (size == 0) {
        *out_used = 1;
        return FERRY_DONE;
    }
    out->op = bytes[0];
    out->n_items = 0;
    status = take_body(&c, out);
    if (status >= 0)
        *out_used = c.at;
    return status;
}
