/* SPDX-License-Identifier: Apache-2.0 */
/* Stretches of work; see spans.h. */
#include "core/spans.h"

#include "base/clock.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FIRST_GAP_NS 50000

const char *ferry__span_name(ferry__span_kind kind)
{
    static const char *const names[FERRY__SPAN_KINDS] = {
        "start",  "gather", "pack",     "wire", "digest",
        "finish", "load",   "quantise", "step", "wait"};

    return names[kind];
}

void ferry__spans_init(ferry__spans *s, size_t limit)
{
    memset(s, 0, sizeof(*s));
    pthread_mutex_init(&s->lock, NULL);
    s->limit = limit;
    s->gap_ns = FIRST_GAP_NS;
}

void ferry__spans_destroy(ferry__spans *s)
{
    pthread_mutex_destroy(&s->lock);
}

void ferry__spans_clear(ferry__spans *s)
{
    pthread_mutex_lock(&s->lock);
    s->n = 0;
    s->gap_ns = FIRST_GAP_NS;
    pthread_mutex_unlock(&s->lock);
}

/* Lengthens `to` by `from`, which is of the same kind. */
static void join(ferry__span *to, const ferry__span *from)
{
    if (from->begin_ns < to->begin_ns)
        to->begin_ns = from->begin_ns;
    if (from->end_ns > to->end_ns)
        to->end_ns = from->end_ns;
    to->busy_ns += from->busy_ns;
    to->count += from->count;
}

/* Joins `span` to the last of its kind if the pause between is short. */
static int join_last(ferry__span *list, size_t n, const ferry__span *span,
                     int64_t gap_ns)
{
    for (size_t i = n; i > 0; i--) {
        ferry__span *last = &list[i - 1];

        if (last->kind != span->kind || last->peer != span->peer)
            continue;
        if (span->begin_ns - last->end_ns > gap_ns)
            return 0;
        join(last, span);
        return 1;
    }
    return 0;
}

/* Doubles the pause until half of the room is free. With a pause as long as
 * the round one stretch a kind and peer is left, so this ends. */
static void compact(ferry__spans *s)
{
    while (s->n > s->limit / 2 && s->gap_ns < INT64_MAX / 2) {
        size_t kept = 0;

        s->gap_ns *= 2;
        for (size_t i = 0; i < s->n; i++) {
            ferry__span span = s->list[i];

            if (!join_last(s->list, kept, &span, s->gap_ns))
                s->list[kept++] = span;
        }
        s->n = kept;
    }
}

/* Under the lock. */
static void put(ferry__spans *s, const ferry__span *span)
{
    if (join_last(s->list, s->n, span, s->gap_ns))
        return;
    if (s->n == s->limit)
        compact(s);
    if (!join_last(s->list, s->n, span, s->gap_ns))
        s->list[s->n++] = *span;
}

void ferry__spans_put(ferry__spans *s, ferry__span_kind kind, int64_t begin_ns,
                      int64_t end_ns)
{
    ferry__span span = {.kind = kind,
                        .count = 1,
                        .begin_ns = begin_ns,
                        .end_ns = end_ns,
                        .busy_ns = end_ns - begin_ns,
                        .peer = -1};

    pthread_mutex_lock(&s->lock);
    put(s, &span);
    pthread_mutex_unlock(&s->lock);
}

void ferry__spans_add(ferry__spans *s, ferry__span_kind kind, int64_t begin_ns)
{
    ferry__spans_put(s, kind, begin_ns, ferry__now_ns());
}

/* Whether waits for this rank have a stretch of their own. Under the lock. */
static int is_told_apart(const ferry__spans *s, int32_t peer)
{
    int32_t seen[FERRY__SPANS_PEERS];
    size_t n = 0;

    for (size_t i = 0; i < s->n; i++) {
        int32_t other = s->list[i].peer;
        size_t k = 0;

        if (other == peer)
            return 1;
        while (k < n && seen[k] != other)
            k++;
        if (other >= 0 && k == n)
            seen[n++] = other;
    }
    return n < FERRY__SPANS_PEERS;
}

void ferry__spans_wait(ferry__spans *s, int32_t peer, const char *address,
                       int64_t begin_ns)
{
    int64_t end_ns = ferry__now_ns();
    ferry__span span = {.kind = FERRY__SPAN_WAIT,
                        .count = 1,
                        .begin_ns = begin_ns,
                        .end_ns = end_ns,
                        .busy_ns = end_ns - begin_ns,
                        .peer = -1};

    pthread_mutex_lock(&s->lock);
    if (peer >= 0 && is_told_apart(s, peer)) {
        span.peer = peer;
        snprintf(span.address, sizeof(span.address), "%s", address);
    }
    put(s, &span);
    pthread_mutex_unlock(&s->lock);
}

static int by_begin(const void *a, const void *b)
{
    const ferry__span *x = a, *y = b;

    return (x->begin_ns > y->begin_ns) - (x->begin_ns < y->begin_ns);
}

size_t ferry__spans_copy(ferry__spans *s, ferry__span *out, size_t capacity)
{
    size_t n;

    pthread_mutex_lock(&s->lock);
    n = s->n < capacity ? s->n : capacity;
    memcpy(out, s->list, n * sizeof(*out));
    pthread_mutex_unlock(&s->lock);
    qsort(out, n, sizeof(*out), by_begin);
    return n;
}

int64_t ferry__spans_wall_offset_ns(void)
{
    struct timespec wall;

    clock_gettime(CLOCK_REALTIME, &wall);
    return (int64_t)wall.tv_sec * 1000000000 + wall.tv_nsec - ferry__now_ns();
}
