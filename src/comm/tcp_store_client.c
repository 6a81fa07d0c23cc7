/* SPDX-License-Identifier: Apache-2.0 */
/* The store's client: one request, one answer, on one connection.
 * Invariant: after an answer that was cut the connection is never used
 * again, so that no later answer is taken for another's. */
#include "comm/tcp_store.h"

#include "base/alloc.h"
#include "base/log.h"
#include "base/str.h"
#include "comm/tcp_address.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define JOIN_KEY  "init/"
#define POLL_MS   20
#define CANCEL_MS INT64_C(5000)

struct ferry__store {
    int fd;
    int64_t timeout_ms;
    ferry_status failed;
    ferry_status (*check)(void *arg, const char *what);
    void *check_arg;
    char where[FERRY__TCP_TEXT_BYTES];
    char what[FERRY__TCP_TEXT_BYTES + 16];
    char waits[FERRY__TCP_TEXT_BYTES + 32]; /* the same, as what is done */
};

/* ---- one request ---- */

static void put_op(ferry__str *m, unsigned char op)
{
    ferry__str_append_n(m, (const char *)&op, 1);
}

static void put_u64(ferry__str *m, uint64_t v)
{
    unsigned char bytes[8];

    ferry__store_put_u64(bytes, v);
    ferry__str_append_n(m, (const char *)bytes, sizeof(bytes));
}

static void put_u32(ferry__str *m, uint32_t v)
{
    unsigned char bytes[4];

    ferry__store_put_u32(bytes, v);
    ferry__str_append_n(m, (const char *)bytes, sizeof(bytes));
}

static void put_bytes(ferry__str *m, const void *bytes, size_t size)
{
    put_u64(m, size);
    if (size > 0)
        ferry__str_append_n(m, bytes, size);
}

static void put_key(ferry__str *m, const char *key)
{
    size_t n = strlen(key);

    put_u64(m, n + 1);
    ferry__str_append_n(m, "/", 1);
    if (n > 0)
        ferry__str_append_n(m, key, n);
}

static ferry_status check_key(const char *key)
{
    if (strlen(key) + 1 > FERRY__STORE_KEY_BYTES)
        return ferry_fail(FERRY_EOVERFLOW,
                          "store: key of %zu bytes, at most %zu", strlen(key),
                          FERRY__STORE_KEY_BYTES - 1);
    return FERRY_OK;
}

static ferry_status check_keys(const char *const *keys, size_t n)
{
    if (n > FERRY__STORE_KEYS_MAX)
        return ferry_fail(FERRY_EOVERFLOW,
                          "store: %zu keys in one request, at most %zu", n,
                          FERRY__STORE_KEYS_MAX);
    for (size_t i = 0; i < n; i++)
        FERRY_TRY(check_key(keys[i]));
    return FERRY_OK;
}

static ferry_status check_value(size_t size)
{
    if (size > FERRY__STORE_VALUE_BYTES)
        return ferry_fail(FERRY_EOVERFLOW,
                          "store: value of %zu bytes, at most %zu", size,
                          FERRY__STORE_VALUE_BYTES);
    return FERRY_OK;
}

static ferry_status ask(void *arg)
{
    const ferry__store *s = arg;

    return s->check(s->check_arg, s->waits);
}

static ferry__waiter waiter_of(ferry__store *s, int64_t timeout_ms)
{
    return (ferry__waiter){s->check ? ask : NULL, s,
                           ferry__deadline_in(timeout_ms), s->what};
}

static ferry_status breaks(ferry__store *s, ferry_status status)
{
    if (status < 0)
        s->failed = status;
    return status;
}

/* Sends the message and frees it. */
static ferry_status send_message(ferry__store *s, ferry__str *m,
                                 const ferry__waiter *w)
{
    ferry_status status;

    if (s->failed < 0)
        status =
            ferry_fail(s->failed, "%s: the connection failed before", s->what);
    else if (m->failed)
        status = FERRY_ENOMEM;
    else
        status = breaks(s, ferry__send_all(s->fd, m->data, m->length, w));
    ferry__str_free(m);
    return status;
}

static ferry_status recv_bytes(ferry__store *s, void *bytes, size_t size,
                               const ferry__waiter *w)
{
    return breaks(s, ferry__recv_all(s->fd, bytes, size, w));
}

static ferry_status recv_u64(ferry__store *s, uint64_t *out,
                             const ferry__waiter *w)
{
    unsigned char bytes[8];

    FERRY_TRY(recv_bytes(s, bytes, sizeof(bytes), w));
    *out = ferry__store_u64(bytes);
    return FERRY_OK;
}

static ferry_status recv_value(ferry__store *s, void **out, size_t *out_size,
                               const ferry__waiter *w)
{
    ferry_status status;
    uint64_t size;
    char *bytes;

    FERRY_TRY(recv_u64(s, &size, w));
    if (size > FERRY__STORE_VALUE_BYTES)
        return breaks(s, ferry_fail(FERRY_EPEER,
                                    "%s: value of %" PRIu64 " bytes, at most "
                                    "%zu are taken",
                                    s->what, size, FERRY__STORE_VALUE_BYTES));
    bytes = ferry__alloc_raw((size_t)size + 1);
    if (!bytes)
        return breaks(s, FERRY_ENOMEM);
    status = recv_bytes(s, bytes, (size_t)size, w);
    if (status < 0) {
        ferry__free(bytes);
        return status;
    }
    bytes[size] = '\0';
    *out = bytes;
    *out_size = (size_t)size;
    return FERRY_OK;
}

/* ---- opening ---- */

static ferry_status greet(ferry__store *s, const ferry__waiter *w)
{
    uint32_t nonce = (uint32_t)getpid();
    unsigned char sent[4], came[4];
    ferry__str m = {0};

    put_op(&m, FERRY__STORE_VALIDATE);
    put_u32(&m, FERRY__STORE_MAGIC);
    put_op(&m, FERRY__STORE_PING);
    put_u32(&m, nonce);
    FERRY_TRY(send_message(s, &m, w));
    FERRY_TRY(recv_bytes(s, came, sizeof(came), w));
    ferry__store_put_u32(sent, nonce);
    if (memcmp(sent, came, sizeof(sent)) != 0)
        return breaks(s, ferry_fail(FERRY_EPEER,
                                    "%s: the answer to the greeting is no "
                                    "store's",
                                    s->what));
    return FERRY_OK;
}

ferry_status ferry__store_open(const char *host, int32_t port,
                               int64_t timeout_ms, ferry__store **out)
{
    return ferry__store_open_checked(host, port, false, timeout_ms, NULL, NULL,
                                     out);
}

ferry_status ferry__store_open_checked(const char *host, int32_t port,
                                       bool served, int64_t timeout_ms,
                                       ferry_status (*check)(void *arg,
                                                             const char *what),
                                       void *check_arg, ferry__store **out)
{
    ferry__store *s;
    ferry_status status;
    ferry__waiter w;

    if (timeout_ms <= 0)
        return ferry_fail(FERRY_EINVAL, "store: timeout must be above 0 ms");
    s = ferry__alloc(sizeof(*s));
    if (!s)
        return FERRY_ENOMEM;
    s->fd = -1;
    s->timeout_ms = timeout_ms;
    s->check = check;
    s->check_arg = check_arg;
    ferry__tcp_text(s->where, host, port);
    snprintf(s->what, sizeof(s->what), "store %s", s->where);
    snprintf(s->waits, sizeof(s->waits), "waiting for %s", s->what);
    w = waiter_of(s, timeout_ms);
    status = served ? ferry__tcp_connect_now(host, port, &w, &s->fd)
                    : ferry__tcp_connect(host, port, &w, &s->fd);
    if (status >= 0)
        status = greet(s, &w);
    if (status < 0) {
        ferry__store_close(&s);
        return status;
    }
    *out = s;
    return FERRY_OK;
}

void ferry__store_close(ferry__store **store)
{
    if (!store || !*store)
        return;
    if ((*store)->fd >= 0)
        close((*store)->fd);
    ferry__free(*store);
    *store = NULL;
}

/* ---- the calls ---- */

static ferry_status add_raw(ferry__store *s, ferry__str *m, int64_t amount,
                            int64_t *out_sum)
{
    ferry__waiter w = waiter_of(s, s->timeout_ms);
    uint64_t sum;

    put_u64(m, (uint64_t)amount);
    FERRY_TRY(send_message(s, m, &w));
    FERRY_TRY(recv_u64(s, &sum, &w));
    *out_sum = (int64_t)sum;
    return FERRY_OK;
}

ferry_status ferry__store_add(ferry__store *s, const char *key, int64_t amount,
                              int64_t *out_sum)
{
    ferry__str m = {0};

    FERRY_TRY(check_key(key));
    put_op(&m, FERRY__STORE_ADD);
    put_key(&m, key);
    return add_raw(s, &m, amount, out_sum);
}

/* The one key without a prefix. */
static ferry_status add_joined(ferry__store *s, int64_t amount, int64_t *out)
{
    ferry__str m = {0};

    put_op(&m, FERRY__STORE_ADD);
    put_bytes(&m, JOIN_KEY, strlen(JOIN_KEY));
    return add_raw(s, &m, amount, out);
}

ferry_status ferry__store_join(ferry__store *s, int64_t *out_count)
{
    return add_joined(s, 1, out_count);
}

ferry_status ferry__store_await_joined(ferry__store *s, int32_t world_size,
                                       int64_t timeout_ms)
{
    ferry__deadline until = ferry__deadline_in(timeout_ms);

    for (;;) {
        int64_t count;

        FERRY_TRY(add_joined(s, 0, &count));
        if (count >= world_size)
            return FERRY_OK;
        if (s->check)
            FERRY_TRY(s->check(s->check_arg, s->waits));
        if (ferry__deadline_passed(&until))
            return ferry_fail(
                FERRY_ETIMEOUT, "%s: %lld of %d joined within %lld ms", s->what,
                (long long)count, world_size, (long long)timeout_ms);
        ferry__sleep_ms(POLL_MS);
    }
}

static ferry_status set_value(ferry__store *s, unsigned char op,
                              const char *key, const void *value, size_t size)
{
    ferry__waiter w = waiter_of(s, s->timeout_ms);
    ferry__str m = {0};

    FERRY_TRY(check_key(key));
    FERRY_TRY(check_value(size));
    put_op(&m, op);
    put_key(&m, key);
    put_bytes(&m, value, size);
    return send_message(s, &m, &w);
}

ferry_status ferry__store_set(ferry__store *s, const char *key,
                              const void *value, size_t size_bytes)
{
    return set_value(s, FERRY__STORE_SET, key, value, size_bytes);
}

ferry_status ferry__store_append(ferry__store *s, const char *key,
                                 const void *value, size_t size_bytes)
{
    return set_value(s, FERRY__STORE_APPEND, key, value, size_bytes);
}

static ferry_status send_keys(ferry__store *s, unsigned char op,
                              const char *const *keys, size_t n,
                              const ferry__waiter *w)
{
    ferry__str m = {0};

    FERRY_TRY(check_keys(keys, n));
    put_op(&m, op);
    put_u64(&m, n);
    for (size_t i = 0; i < n; i++)
        put_key(&m, keys[i]);
    return send_message(s, &m, w);
}

ferry_status ferry__store_check(ferry__store *s, const char *const *keys,
                                size_t n)
{
    ferry__waiter w = waiter_of(s, s->timeout_ms);
    unsigned char byte;

    FERRY_TRY(send_keys(s, FERRY__STORE_CHECK, keys, n, &w));
    FERRY_TRY(recv_bytes(s, &byte, 1, &w));
    return byte == FERRY__STORE_READY ? FERRY_OK : FERRY_DONE;
}

/* Gives a wait up. The keys may have come just now: then that answer is
 * before the one to this, and the wait has succeeded. */
static ferry_status cancel_wait(ferry__store *s, bool *out_came)
{
    ferry__waiter w = waiter_of(s, CANCEL_MS);
    ferry__str m = {0};
    unsigned char byte;

    put_op(&m, FERRY__STORE_CANCEL_WAIT);
    FERRY_TRY(send_message(s, &m, &w));
    FERRY_TRY(recv_bytes(s, &byte, 1, &w));
    *out_came = byte == FERRY__STORE_READY;
    return *out_came ? recv_bytes(s, &byte, 1, &w) : FERRY_OK;
}

ferry_status ferry__store_wait(ferry__store *s, const char *const *keys,
                               size_t n, int64_t timeout_ms)
{
    ferry__waiter w = waiter_of(s, timeout_ms);
    ferry_status status;
    unsigned char byte;
    bool came = false;

    FERRY_TRY(send_keys(s, FERRY__STORE_WAIT, keys, n, &w));
    status = ferry__recv_all(s->fd, &byte, 1, &w);
    if (status != FERRY_ETIMEOUT)
        return breaks(s, status);
    FERRY_TRY(cancel_wait(s, &came));
    if (came)
        return FERRY_OK;
    return ferry_fail(
        FERRY_ETIMEOUT, "%s: key %s%s did not come within %lld ms", s->what,
        keys[0], n > 1 ? " or another" : "", (long long)timeout_ms);
}

ferry_status ferry__store_get(ferry__store *s, const char *key,
                              int64_t timeout_ms, void **out_value,
                              size_t *out_size)
{
    ferry__waiter w;
    ferry__str m = {0};

    FERRY_TRY(ferry__store_wait(s, &key, 1, timeout_ms));
    put_op(&m, FERRY__STORE_GET);
    put_key(&m, key);
    w = waiter_of(s, s->timeout_ms);
    FERRY_TRY(send_message(s, &m, &w));
    return recv_value(s, out_value, out_size, &w);
}

ferry_status ferry__store_delete(ferry__store *s, const char *key,
                                 bool *out_was_there)
{
    ferry__waiter w = waiter_of(s, s->timeout_ms);
    ferry__str m = {0};
    uint64_t n;

    FERRY_TRY(check_key(key));
    put_op(&m, FERRY__STORE_DELETE);
    put_key(&m, key);
    FERRY_TRY(send_message(s, &m, &w));
    FERRY_TRY(recv_u64(s, &n, &w));
    if (out_was_there)
        *out_was_there = n > 0;
    return FERRY_OK;
}

ferry_status ferry__store_compare_set(ferry__store *s, const char *key,
                                      const char *expected, const char *value,
                                      void **out_value, size_t *out_size)
{
    ferry__waiter w = waiter_of(s, s->timeout_ms);
    ferry__str m = {0};

    FERRY_TRY(check_key(key));
    FERRY_TRY(check_value(strlen(expected)));
    FERRY_TRY(check_value(strlen(value)));
    put_op(&m, FERRY__STORE_COMPARE_SET);
    put_key(&m, key);
    put_bytes(&m, expected, strlen(expected));
    put_bytes(&m, value, strlen(value));
    FERRY_TRY(send_message(s, &m, &w));
    return recv_value(s, out_value, out_size, &w);
}

ferry_status ferry__store_num_keys(ferry__store *s, int64_t *out_count)
{
    ferry__waiter w = waiter_of(s, s->timeout_ms);
    ferry__str m = {0};
    uint64_t n;

    put_op(&m, FERRY__STORE_NUM_KEYS);
    FERRY_TRY(send_message(s, &m, &w));
    FERRY_TRY(recv_u64(s, &n, &w));
    *out_count = (int64_t)n;
    return FERRY_OK;
}

ferry_status ferry__store_multi_get(ferry__store *s, const char *const *keys,
                                    size_t n, void **out_values,
                                    size_t *out_sizes)
{
    ferry__waiter w = waiter_of(s, s->timeout_ms);

    FERRY_TRY(send_keys(s, FERRY__STORE_MULTI_GET, keys, n, &w));
    for (size_t i = 0; i < n; i++) {
        ferry_status status = recv_value(s, &out_values[i], &out_sizes[i], &w);

        if (status < 0) {
            while (i-- > 0)
                ferry__free(out_values[i]);
            return status;
        }
    }
    return FERRY_OK;
}

ferry_status ferry__store_multi_set(ferry__store *s, const char *const *keys,
                                    const void *const *values,
                                    const size_t *sizes, size_t n)
{
    ferry__waiter w = waiter_of(s, s->timeout_ms);
    ferry__str m = {0};

    FERRY_TRY(check_keys(keys, n));
    for (size_t i = 0; i < n; i++)
        FERRY_TRY(check_value(sizes[i]));
    put_op(&m, FERRY__STORE_MULTI_SET);
    put_u64(&m, n);
    for (size_t i = 0; i < n; i++) {
        put_key(&m, keys[i]);
        put_bytes(&m, values[i], sizes[i]);
    }
    return send_message(s, &m, &w);
}

ferry_status ferry__store_local_address(const ferry__store *s, char *out,
                                        size_t size_bytes)
{
    return ferry__tcp_local_host(s->fd, out, size_bytes);
}

/* ---- barrier ---- */

typedef struct barrier_keys {
    char arrived[FERRY__STORE_KEY_BYTES], open[FERRY__STORE_KEY_BYTES];
    char left[FERRY__STORE_KEY_BYTES];
} barrier_keys;

static void name_keys(barrier_keys *k, const char *prefix, uint64_t generation,
                      const char *name)
{
    snprintf(k->arrived, sizeof(k->arrived), "%s/%" PRIu64 "/%s/arrived",
             prefix, generation, name);
    snprintf(k->open, sizeof(k->open), "%s/%" PRIu64 "/%s/open", prefix,
             generation, name);
    snprintf(k->left, sizeof(k->left), "%s/%" PRIu64 "/%s/left", prefix,
             generation, name);
}

static ferry_status pass_barrier(ferry__store *s, const barrier_keys *k,
                                 int32_t world_size, int64_t timeout_ms)
{
    const char *open = k->open;
    int64_t n;

    FERRY_TRY(ferry__store_add(s, k->arrived, 1, &n));
    if (n > world_size)
        return ferry_fail(FERRY_EMISMATCH,
                          "store barrier %s: %lld came, the world has %d",
                          k->arrived, (long long)n, world_size);
    if (n == world_size)
        FERRY_TRY(ferry__store_set(s, k->open, "1", 1));
    else if (ferry__store_wait(s, &open, 1, timeout_ms) < 0)
        return ferry__fail_prefix(s->failed < 0 ? s->failed : FERRY_ETIMEOUT,
                                  "barrier of %d, %lld came before", world_size,
                                  (long long)n);
    FERRY_TRY(ferry__store_add(s, k->left, 1, &n));
    if (n < world_size)
        return FERRY_OK;
    FERRY_TRY(ferry__store_delete(s, k->arrived, NULL));
    FERRY_TRY(ferry__store_delete(s, k->open, NULL));
    return ferry__store_delete(s, k->left, NULL);
}

ferry_status ferry__store_barrier(ferry__store *s, const char *prefix,
                                  uint64_t generation, const char *name,
                                  int32_t world_size, int64_t timeout_ms)
{
    barrier_keys *k = ferry__alloc(sizeof(*k));
    ferry_status status;

    if (!k)
        return FERRY_ENOMEM;
    name_keys(k, prefix, generation, name);
    status = pass_barrier(s, k, world_size, timeout_ms);
    ferry__free(k);
    return status;
}
