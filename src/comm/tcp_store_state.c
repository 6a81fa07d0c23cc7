/* SPDX-License-Identifier: Apache-2.0 */
/* Working off requests. What torch's own server answers by closing the
 * connection (reading an absent key, adding to a text) closes it here too.
 * Invariant: buffered_bytes is the sum of all peers' `in` capacities,
 * `out` lengths and wanted keys. */
#include "comm/tcp_store_state.h"

#include "base/alloc.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

ferry_status ferry__store_peer_add(ferry__store_state *s,
                                   ferry__store_peer **out)
{
    ferry__store_peer *p = ferry__alloc(sizeof(*p));

    if (!p)
        return FERRY_ENOMEM;
    p->next = s->peers;
    s->peers = p;
    *out = p;
    return FERRY_OK;
}

static void free_peer(ferry__store_peer *p)
{
    ferry__free(p->in);
    ferry__free(p->wanted);
    ferry__str_free(&p->out);
    ferry__free(p);
}

void ferry__store_peer_remove(ferry__store_state *s, ferry__store_peer *p)
{
    ferry__store_peer **at = &s->peers;

    while (*at != p)
        at = &(*at)->next;
    *at = p->next;
    s->buffered_bytes -= p->in_capacity + p->out.length + p->wanted_bytes;
    free_peer(p);
}

void ferry__store_state_free(ferry__store_state *s)
{
    while (s->peers)
        ferry__store_peer_remove(s, s->peers);
    ferry__store_map_free(&s->map);
}

static ferry_status check_buffers(const ferry__store_state *s, size_t more)
{
    if (more > FERRY__STORE_BUFFER_BYTES - s->buffered_bytes)
        return ferry_fail(FERRY_ENOSPC,
                          "store: %zu bytes more in flight, at most %zu", more,
                          FERRY__STORE_BUFFER_BYTES);
    return FERRY_OK;
}

/* ---- answers ---- */

static ferry_status answer(ferry__store_state *s, ferry__store_peer *p,
                           const void *bytes, size_t size)
{
    FERRY_TRY(check_buffers(s, size));
    if (p->out.length + size > FERRY__STORE_UNREAD_BYTES)
        return ferry_fail(FERRY_EPEER,
                          "store: a peer leaves %zu bytes of answers unread",
                          p->out.length);
    if (size == 0)
        return FERRY_OK;
    ferry__str_append_n(&p->out, bytes, size);
    if (p->out.failed)
        return FERRY_ENOMEM;
    s->buffered_bytes += size;
    return FERRY_OK;
}

static ferry_status answer_byte(ferry__store_state *s, ferry__store_peer *p,
                                unsigned char byte)
{
    return answer(s, p, &byte, 1);
}

static ferry_status answer_u64(ferry__store_state *s, ferry__store_peer *p,
                               uint64_t v)
{
    unsigned char bytes[8];

    ferry__store_put_u64(bytes, v);
    return answer(s, p, bytes, sizeof(bytes));
}

static ferry_status answer_value(ferry__store_state *s, ferry__store_peer *p,
                                 ferry__store_bytes value)
{
    FERRY_TRY(answer_u64(s, p, value.size));
    return answer(s, p, value.data, value.size);
}

void ferry__store_taken(ferry__store_state *s, ferry__store_peer *p, size_t n)
{
    memmove(p->out.data, p->out.data + n, p->out.length - n);
    p->out.length -= n;
    s->buffered_bytes -= n;
    if (p->out.length == 0)
        ferry__str_free(&p->out);
}

/* ---- waits ---- */

static bool all_there(const ferry__store_state *s,
                      const ferry__store_bytes *keys, size_t n, size_t *from)
{
    ferry__store_bytes value;

    while (*from < n && ferry__store_map_get(&s->map, keys[*from], &value))
        (*from)++;
    return *from == n;
}

static void end_wait(ferry__store_state *s, ferry__store_peer *p)
{
    s->buffered_bytes -= p->wanted_bytes;
    p->wanted_bytes = 0;
    ferry__free(p->wanted);
    p->wanted = NULL;
    p->n_wanted = p->first_missing = 0;
    p->waiting = false;
}

/* A key came: only the peers whose first missing key it is have to look. A
 * key that was deleted between is looked for again before an answer. */
static void key_came(ferry__store_state *s, ferry__store_bytes key)
{
    for (ferry__store_peer *p = s->peers; p; p = p->next) {
        const ferry__store_bytes *missing;

        if (!p->waiting)
            continue;
        missing = &p->wanted[p->first_missing];
        if (missing->size != key.size ||
            memcmp(missing->data, key.data, key.size) != 0)
            continue;
        p->first_missing = 0;
        if (all_there(s, p->wanted, p->n_wanted, &p->first_missing)) {
            end_wait(s, p);
            /* A lack of memory for a byte leaves the peer to its own bound. */
            answer_byte(s, p, FERRY__STORE_READY);
        }
    }
}

static ferry_status do_wait(ferry__store_state *s, ferry__store_peer *p,
                            const ferry__store_request *r)
{
    size_t missing = 0, bytes = r->n_items * sizeof(*p->wanted);
    unsigned char *at;

    if (all_there(s, r->items, r->n_items, &missing))
        return answer_byte(s, p, FERRY__STORE_READY);
    if (p->waiting)
        return ferry_fail(FERRY_EPEER, "store: a wait inside a wait");
    for (size_t i = 0; i < r->n_items; i++)
        bytes += r->items[i].size;
    FERRY_TRY(check_buffers(s, bytes));
    p->wanted = ferry__alloc(bytes);
    if (!p->wanted)
        return FERRY_ENOMEM;
    p->wanted_bytes = bytes;
    s->buffered_bytes += bytes;
    at = (unsigned char *)(p->wanted + r->n_items);
    for (size_t i = 0; i < r->n_items; i++) {
        memcpy(at, r->items[i].data, r->items[i].size);
        p->wanted[i] = (ferry__store_bytes){at, r->items[i].size};
        at += r->items[i].size;
    }
    p->n_wanted = r->n_items;
    p->first_missing = missing;
    p->waiting = true;
    return FERRY_OK;
}

/* ---- requests ---- */

static ferry_status do_add(ferry__store_state *s, ferry__store_peer *p,
                           const ferry__store_request *r)
{
    ferry__store_bytes old;
    long long count = 0;
    char text[32];
    int n;

    if (ferry__store_map_get(&s->map, r->items[0], &old)) {
        char *end;

        if (old.size == 0 || old.size >= sizeof(text))
            return ferry_fail(FERRY_EPEER, "store: add to what is no number");
        memcpy(text, old.data, old.size);
        text[old.size] = '\0';
        errno = 0;
        count = strtoll(text, &end, 10);
        if (errno != 0 || end != text + old.size)
            return ferry_fail(FERRY_EPEER, "store: add to what is no number");
    }
    if (r->amount > 0 ? count > LLONG_MAX - r->amount
                      : count < LLONG_MIN - r->amount)
        return ferry_fail(FERRY_EPEER, "store: a count overflows");
    count += r->amount;
    n = snprintf(text, sizeof(text), "%lld", count);
    FERRY_TRY(ferry__store_map_set(
        &s->map, r->items[0],
        (ferry__store_bytes){(const unsigned char *)text, (size_t)n}));
    FERRY_TRY(answer_u64(s, p, (uint64_t)count));
    key_came(s, r->items[0]);
    return FERRY_OK;
}

/* An absent key counts as empty, and the answer is the value afterwards; of
 * an absent key that was expected to have one, the one expected. */
static ferry_status do_compare_set(ferry__store_state *s, ferry__store_peer *p,
                                   const ferry__store_request *r)
{
    ferry__store_bytes old, expected = r->items[1], value = r->items[2];
    bool there = ferry__store_map_get(&s->map, r->items[0], &old);

    if (!there && expected.size > 0)
        return answer_value(s, p, expected);
    if (there && (old.size != expected.size ||
                  memcmp(old.data, expected.data, old.size) != 0))
        return answer_value(s, p, old);
    FERRY_TRY(ferry__store_map_set(&s->map, r->items[0], value));
    FERRY_TRY(answer_value(s, p, value));
    key_came(s, r->items[0]);
    return FERRY_OK;
}

static ferry_status do_get(ferry__store_state *s, ferry__store_peer *p,
                           const ferry__store_request *r)
{
    for (size_t i = 0; i < r->n_items; i++) {
        ferry__store_bytes value;

        if (!ferry__store_map_get(&s->map, r->items[i], &value))
            return ferry_fail(FERRY_EPEER, "store: read of an absent key");
        FERRY_TRY(answer_value(s, p, value));
    }
    return FERRY_OK;
}

static ferry_status do_set(ferry__store_state *s, const ferry__store_request *r)
{
    for (size_t i = 0; i + 1 < r->n_items; i += 2) {
        FERRY_TRY(ferry__store_map_set(&s->map, r->items[i], r->items[i + 1]));
        key_came(s, r->items[i]);
    }
    return FERRY_OK;
}

static ferry_status do_hello(ferry__store_peer *p,
                             const ferry__store_request *r)
{
    if (r->op != FERRY__STORE_VALIDATE || r->word != FERRY__STORE_MAGIC)
        return ferry_fail(FERRY_EPEER,
                          "store: a peer did not greet with the magic number");
    p->greeted = true;
    return FERRY_OK;
}

static ferry_status do_ping(ferry__store_state *s, ferry__store_peer *p,
                            const ferry__store_request *r)
{
    unsigned char nonce[4];

    ferry__store_put_u32(nonce, r->word);
    return answer(s, p, nonce, sizeof(nonce));
}

static ferry_status do_request(ferry__store_state *s, ferry__store_peer *p,
                               const ferry__store_request *r)
{
    size_t missing = 0;

    if (!p->greeted || r->op == FERRY__STORE_VALIDATE)
        return do_hello(p, r);
    switch (r->op) {
    case FERRY__STORE_PING:
        return do_ping(s, p, r);
    case FERRY__STORE_SET:
    case FERRY__STORE_MULTI_SET:
        return do_set(s, r);
    case FERRY__STORE_APPEND:
        FERRY_TRY(ferry__store_map_append(&s->map, r->items[0], r->items[1]));
        key_came(s, r->items[0]);
        return FERRY_OK;
    case FERRY__STORE_COMPARE_SET:
        return do_compare_set(s, p, r);
    case FERRY__STORE_GET:
    case FERRY__STORE_MULTI_GET:
        return do_get(s, p, r);
    case FERRY__STORE_ADD:
        return do_add(s, p, r);
    case FERRY__STORE_CHECK:
        return answer_byte(s, p,
                           all_there(s, r->items, r->n_items, &missing)
                               ? FERRY__STORE_READY
                               : FERRY__STORE_NOT_READY);
    case FERRY__STORE_WAIT:
        return do_wait(s, p, r);
    case FERRY__STORE_CANCEL_WAIT:
        end_wait(s, p);
        return answer_byte(s, p, FERRY__STORE_NOT_READY);
    case FERRY__STORE_NUM_KEYS:
        return answer_u64(s, p, s->map.count);
    default: /* DELETE: the parser lets nothing else through */
        return answer_u64(s, p, ferry__store_map_delete(&s->map, r->items[0]));
    }
}

static ferry_status take_in(ferry__store_state *s, ferry__store_peer *p,
                            const void *bytes, size_t size)
{
    size_t old = p->in_capacity, want = p->in_bytes + size;

    if (want > old) {
        size_t capacity = old > SIZE_MAX / 2 || want > 2 * old ? want : 2 * old;
        unsigned char *grown;

        FERRY_TRY(check_buffers(s, capacity - old));
        grown = ferry__realloc(p->in, capacity);
        if (!grown)
            return FERRY_ENOMEM;
        p->in = grown;
        p->in_capacity = capacity;
        s->buffered_bytes += capacity - old;
    }
    if (size > 0)
        memcpy(p->in + p->in_bytes, bytes, size);
    p->in_bytes += size;
    return FERRY_OK;
}

/* A peer's buffer is kept only as long as half a request lies in it. */
static void drop_used(ferry__store_state *s, ferry__store_peer *p, size_t used)
{
    p->in_bytes -= used;
    if (p->in_bytes > 0) {
        memmove(p->in, p->in + used, p->in_bytes);
        return;
    }
    s->buffered_bytes -= p->in_capacity;
    ferry__free(p->in);
    p->in = NULL;
    p->in_capacity = 0;
}

ferry_status ferry__store_feed(ferry__store_state *s, ferry__store_peer *p,
                               const void *bytes, size_t size)
{
    size_t at = 0, used;

    FERRY_TRY(take_in(s, p, bytes, size));
    for (;;) {
        ferry_status status = ferry__store_parse(p->in + at, p->in_bytes - at,
                                                 &s->request, &used);

        FERRY_TRY(status);
        if (status == FERRY_DONE)
            break;
        FERRY_TRY(do_request(s, p, &s->request));
        at += used;
        if (at == p->in_bytes)
            break;
    }
    drop_used(s, p, at);
    return FERRY_OK;
}
