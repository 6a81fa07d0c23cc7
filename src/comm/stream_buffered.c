/* SPDX-License-Identifier: Apache-2.0 */
/* A stream of whole buffers, each one broadcast of the group, on a thread of
 * its own: the root fills one buffer while another goes out, the others use
 * one while the next arrives.
 * Invariant: between begin and end only the thread calls the group, and only
 * the caller asks the owner's check; `made`, `moved` and `used` count buffers
 * of the round, and `used` <= `moved` <= `made` <= `used` + n_buffers. */
#include "comm/stream.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/thread.h"
#include "device/memory.h"

#include <stdio.h>
#include <string.h>

#define SLICE_MS 100
/* A broadcast is given the time that a link of 8 MiB/s would need on top of
 * the bound on silence, where the group does not itself end a call in which
 * nothing moves. */
#define BYTES_PER_MS   8192
#define UNBOUNDED_MS   (INT64_C(30) * 24 * 3600 * 1000)
#define N_BUFFERS_MOST 4096

typedef struct buffer {
    char *memory;
    size_t capacity;
} buffer;

typedef struct buffered {
    ferry__stream base;
    ferry__stream_options o;
    buffer *buffers;
    uint64_t held_bytes; /* of all buffers together */
    pthread_t thread;
    bool has_thread;
    ferry_status (*check)(void *arg, const char *what);
    void *check_arg;

    /* Of the caller: the round, and where it stands in the buffer at hand. */
    uint64_t *sizes; /* own: the thread may outlast a round that failed */
    size_t sizes_capacity, n, at, pos;
    bool in_round;

    pthread_mutex_t lock;
    pthread_cond_t changed;
    /* Under the lock, by index into sizes; empty buffers count at once. */
    size_t n_round, made, moved, used;
    bool stop, busy;
    ferry_status failed;
    char line[1024];
} buffered;

static buffered *of(ferry__stream *s)
{
    return (buffered *)s;
}

static bool is_root(const buffered *b)
{
    return b->base.comm->rank == b->o.root;
}

/* ---- memory ---- */

static const ferry__memory *kind_of(const buffered *b)
{
    const ferry__memory *m = b->base.comm->memory;

    return m ? m : ferry__memory_host();
}

static ferry_status take_memory(const buffered *b, size_t size, void **out)
{
    ferry__comm *c = b->base.comm;

    return c->ops->alloc ? c->ops->alloc(c, size, out)
                         : kind_of(b)->alloc(size, out);
}

static void drop_buffer(buffered *b, buffer *buf)
{
    ferry__comm *c = b->base.comm;

    if (!buf->memory)
        return;
    if (c->ops->free)
        c->ops->free(c, buf->memory);
    else
        kind_of(b)->free(buf->memory);
    b->held_bytes -= buf->capacity;
    *buf = (buffer){NULL, 0};
}

/* Only while nobody uses it. */
static ferry_status size_buffer(buffered *b, size_t index, size_t size)
{
    buffer *buf = &b->buffers[index % (size_t)b->o.n_buffers];
    void *memory;

    if (buf->capacity >= size)
        return FERRY_OK;
    drop_buffer(b, buf);
    FERRY_TRY(take_memory(b, size, &memory));
    *buf = (buffer){memory, size};
    b->held_bytes += size;
    if (b->held_bytes > b->base.peak_bytes)
        b->base.peak_bytes = b->held_bytes;
    return FERRY_OK;
}

static char *memory_of(const buffered *b, size_t index)
{
    return b->buffers[index % (size_t)b->o.n_buffers].memory;
}

/* ---- failures ---- */

/* The first one counts: what follows is its echo. Under the lock. */
static void note(buffered *b, ferry_status status)
{
    if (b->failed < 0)
        return;
    b->failed = status;
    snprintf(b->line, sizeof(b->line), "%s", ferry_last_error());
    pthread_cond_broadcast(&b->changed);
}

/* From here on the group is of no use to anyone. Its check comes back when
 * the stream is closed, since the thread may still be in a call. */
static ferry_status give_up(buffered *b, ferry_status status)
{
    ferry__comm *c = b->base.comm;

    pthread_mutex_lock(&b->lock);
    note(b, status);
    pthread_mutex_unlock(&b->lock);
    c->ops->abort(c);
    return ferry__fail_line(b->failed, b->line);
}

static ferry_status look(buffered *b)
{
    ferry_status status;

    pthread_mutex_lock(&b->lock);
    status = b->failed;
    pthread_mutex_unlock(&b->lock);
    return status < 0 ? ferry__fail_line(status, b->line) : FERRY_OK;
}

/* ---- the thread ---- */

static int64_t bound_ms(const buffered *b, size_t size)
{
    if (b->o.no_progress_ms == 0 || b->o.no_progress_ms > UNBOUNDED_MS ||
        b->base.comm->bounds_silence)
        return UNBOUNDED_MS;
    return b->o.no_progress_ms + (int64_t)(size / BYTES_PER_MS);
}

/* Whether the next buffer of the round may move. Under the lock. */
static bool may_move(const buffered *b)
{
    if (b->moved >= b->n_round)
        return false;
    if (is_root(b))
        return b->moved < b->made;
    return b->moved < b->used + (size_t)b->o.n_buffers;
}

static ferry_status move_one(buffered *b, size_t index)
{
    ferry__comm *c = b->base.comm;
    size_t size = (size_t)b->sizes[index];

    if (size == 0)
        return FERRY_OK;
    if (!is_root(b))
        FERRY_TRY(size_buffer(b, index, size));
    return c->ops->broadcast(c, memory_of(b, index), size, b->o.root,
                             bound_ms(b, size));
}

static void *carry(void *arg)
{
    buffered *b = arg;

    pthread_mutex_lock(&b->lock);
    while (!b->stop && b->failed >= 0) {
        ferry_status status;
        size_t index = b->moved;

        if (!may_move(b)) {
            ferry__cond_wait_until(&b->changed, &b->lock,
                                   ferry__now_ns() + SLICE_MS * 1000000);
            continue;
        }
        b->busy = true;
        pthread_mutex_unlock(&b->lock);
        status = move_one(b, index);
        pthread_mutex_lock(&b->lock);
        b->busy = false;
        if (status < 0)
            note(b, status);
        else
            b->moved++;
        pthread_cond_broadcast(&b->changed);
    }
    pthread_mutex_unlock(&b->lock);
    return NULL;
}

/* ---- the caller ---- */

/* Asks the owner when it is time to. Under the lock, which it lets go. */
static ferry_status ask(buffered *b, int64_t *at_ns, const char *what)
{
    int64_t now = ferry__now_ns();
    ferry_status status;

    if (now < *at_ns)
        return FERRY_OK;
    *at_ns = now + SLICE_MS * 1000000;
    if (!b->check)
        return FERRY_OK;
    pthread_mutex_unlock(&b->lock);
    status = b->check(b->check_arg, what);
    pthread_mutex_lock(&b->lock);
    return status;
}

/* Waits until *counter has reached `want`. */
static ferry_status await(buffered *b, const size_t *counter, size_t want,
                          const char *what)
{
    int64_t at_ns = ferry__now_ns() + SLICE_MS * 1000000;
    ferry_status status = FERRY_OK;

    pthread_mutex_lock(&b->lock);
    while (status >= 0 && b->failed >= 0 && *counter < want) {
        ferry__cond_wait_until(&b->changed, &b->lock, at_ns);
        status = ask(b, &at_ns, what);
    }
    pthread_mutex_unlock(&b->lock);
    if (status < 0)
        return give_up(b, status);
    return look(b);
}

static void count(buffered *b, size_t *counter, size_t value)
{
    pthread_mutex_lock(&b->lock);
    *counter = value;
    pthread_cond_broadcast(&b->changed);
    pthread_mutex_unlock(&b->lock);
}

static void skip_empty(buffered *b)
{
    while (b->at < b->n && b->sizes[b->at] == 0)
        b->at++;
}

static ferry_status keep_sizes(buffered *b, const uint64_t *sizes, size_t n)
{
    uint64_t *own;
    size_t bytes;

    if (n > b->sizes_capacity) {
        if (!ferry__mul(n, sizeof(*sizes), &bytes))
            return ferry_fail(FERRY_EOVERFLOW, "stream: %zu buffers", n);
        own = ferry__realloc(b->sizes, bytes);
        if (!own)
            return FERRY_ENOMEM;
        b->sizes = own;
        b->sizes_capacity = n;
    }
    if (n > 0)
        memcpy(b->sizes, sizes, n * sizeof(*sizes));
    return FERRY_OK;
}

static ferry_status buffered_begin(ferry__stream *s, const uint64_t *sizes,
                                   size_t n)
{
    buffered *b = of(s);
    ferry__comm *c = s->comm;

    FERRY_TRY(look(b));
    if (b->in_round)
        return ferry_fail(FERRY_EORDER, "stream: the round before has not "
                                        "ended");
    for (size_t i = 0; i < n; i++) {
        if (sizes[i] > b->o.buffer_bytes)
            return ferry_fail(FERRY_EINVAL,
                              "stream: buffer %zu has %llu bytes, the bound "
                              "is %llu",
                              i, (unsigned long long)sizes[i],
                              (unsigned long long)b->o.buffer_bytes);
    }
    FERRY_TRY(keep_sizes(b, sizes, n));
    b->check = c->check;
    b->check_arg = c->check_arg;
    c->check = NULL;
    b->n = n;
    b->at = b->pos = 0;
    b->in_round = true;
    skip_empty(b);
    pthread_mutex_lock(&b->lock);
    b->n_round = n;
    b->made = b->moved = b->used = b->at;
    pthread_cond_broadcast(&b->changed);
    pthread_mutex_unlock(&b->lock);
    return FERRY_OK;
}

static ferry_status check_place(const buffered *b, const char *what,
                                bool of_root)
{
    if (is_root(b) != of_root)
        return ferry_fail(FERRY_EORDER, "stream: %s on rank %d, the root is %d",
                          what, b->base.comm->rank, b->o.root);
    if (!b->in_round || b->at >= b->n)
        return ferry_fail(FERRY_EORDER, "stream: %s beyond the round", what);
    return FERRY_OK;
}

/* Buffer `at` may be filled once that of n_buffers before it has left. */
static ferry_status buffered_reserve(ferry__stream *s, void **out,
                                     size_t *out_size)
{
    buffered *b = of(s);
    size_t n = (size_t)b->o.n_buffers;
    ferry_status status;

    FERRY_TRY(check_place(b, "reserve", true));
    FERRY_TRY(await(b, &b->moved, b->at < n ? 0 : b->at - n + 1,
                    "stream: waiting for a buffer"));
    status = size_buffer(b, b->at, (size_t)b->sizes[b->at]);
    if (status < 0)
        return give_up(b, status);
    *out = memory_of(b, b->at) + b->pos;
    *out_size = (size_t)b->sizes[b->at] - b->pos;
    return FERRY_OK;
}

/* Goes on by `size` bytes; true when a buffer ended there. */
static ferry_status advance(buffered *b, const char *what, size_t size,
                            size_t *counter)
{
    size_t left;

    if (size == 0)
        return FERRY_OK;
    FERRY_TRY(check_place(b, what, is_root(b)));
    left = (size_t)b->sizes[b->at] - b->pos;
    if (size > left)
        return ferry_fail(FERRY_EINVAL, "stream: %s of %zu bytes, %zu are left",
                          what, size, left);
    b->pos += size;
    b->base.bytes += size;
    if (size < left)
        return FERRY_OK;
    b->pos = 0;
    b->at++;
    skip_empty(b);
    count(b, counter, b->at);
    return FERRY_OK;
}

static ferry_status buffered_commit(ferry__stream *s, size_t size)
{
    FERRY_TRY(look(of(s)));
    return advance(of(s), "commit", size, &of(s)->made);
}

static ferry_status buffered_peek(ferry__stream *s, const void **out,
                                  size_t *out_size)
{
    buffered *b = of(s);

    FERRY_TRY(check_place(b, "peek", false));
    FERRY_TRY(await(b, &b->moved, b->at + 1, "stream: waiting for a buffer"));
    *out = memory_of(b, b->at) + b->pos;
    *out_size = (size_t)b->sizes[b->at] - b->pos;
    return FERRY_OK;
}

static ferry_status buffered_release(ferry__stream *s, size_t size)
{
    FERRY_TRY(look(of(s)));
    return advance(of(s), "release", size, &of(s)->used);
}

static void give_check_back(buffered *b)
{
    if (!b->in_round)
        return;
    b->in_round = false;
    b->base.comm->check = b->check;
    b->base.comm->check_arg = b->check_arg;
}

static ferry_status buffered_end(ferry__stream *s)
{
    buffered *b = of(s);

    FERRY_TRY(look(b));
    if (!b->in_round || b->at < b->n)
        return ferry_fail(FERRY_EORDER,
                          "stream: end at buffer %zu of %zu in the round",
                          b->at, b->n);
    FERRY_TRY(await(b, &b->moved, b->n, "stream: waiting for its end"));
    give_check_back(b);
    return FERRY_OK;
}

/* ---- life ---- */

/* A round that is cut short would leave the others waiting. */
static void buffered_close(ferry__stream *s)
{
    buffered *b = of(s);
    bool cut;

    pthread_mutex_lock(&b->lock);
    b->stop = true;
    cut = b->busy || (b->in_round && b->failed >= 0);
    pthread_cond_broadcast(&b->changed);
    pthread_mutex_unlock(&b->lock);
    if (cut)
        s->comm->ops->abort(s->comm);
    if (b->has_thread)
        pthread_join(b->thread, NULL);
    give_check_back(b);
    for (int32_t i = 0; b->buffers && i < b->o.n_buffers; i++)
        drop_buffer(b, &b->buffers[i]);
    ferry__free(b->buffers);
    ferry__free(b->sizes);
    pthread_cond_destroy(&b->changed);
    pthread_mutex_destroy(&b->lock);
    ferry__free(b);
}

static const ferry__stream_ops buffered_ops = {
    .begin = buffered_begin,
    .reserve = buffered_reserve,
    .commit = buffered_commit,
    .peek = buffered_peek,
    .release = buffered_release,
    .end = buffered_end,
    .close = buffered_close,
};

static ferry_status start(buffered *b)
{
    b->buffers = ferry__alloc_array((size_t)b->o.n_buffers, sizeof(buffer));
    if (!b->buffers)
        return FERRY_ENOMEM;
    FERRY_TRY(ferry__thread_start(&b->thread, "ferry-stream", carry, b));
    b->has_thread = true;
    return FERRY_OK;
}

ferry_status ferry__stream_buffered(ferry__comm *c,
                                    const ferry__stream_options *options,
                                    ferry__stream **out)
{
    ferry_status status;
    buffered *b;

    if (options->n_buffers < 1 || options->n_buffers > N_BUFFERS_MOST)
        return ferry_fail(FERRY_EINVAL, "stream: 1 to %d buffers, got %d",
                          N_BUFFERS_MOST, options->n_buffers);
    b = ferry__alloc(sizeof(*b));
    if (!b)
        return FERRY_ENOMEM;
    status = ferry__cond_init(&b->changed);
    if (status < 0) {
        ferry__free(b);
        return status;
    }
    pthread_mutex_init(&b->lock, NULL);
    b->o = *options;
    b->base = (ferry__stream){
        .ops = &buffered_ops, .comm = c, .path = c->ops->provider};
    status = start(b);
    if (status < 0) {
        buffered_close(&b->base);
        return status;
    }
    *out = &b->base;
    return FERRY_OK;
}
