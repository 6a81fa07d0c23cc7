/* SPDX-License-Identifier: Apache-2.0 */
/* A group's own kind of stream, with the rules applied to its pieces.
 * Pieces that arrive are shared with other ranks of the host and must not be
 * changed: one that a rule strikes is handed out as a copy. Invariant: what
 * the root lost is never committed, so the others wait for it. */
#include "comm/comm_fault_rules.h"
#include "comm/stream.h"

#include "base/alloc.h"

#include <string.h>

typedef struct faulty_stream {
    ferry__stream base;
    ferry__stream *inner;
    ferry__faulty *f;
    int32_t root;
    int64_t bound_ms; /* that a lost piece is waited for */
    bool silent;      /* root: nothing leaves any more */
    char *scratch;    /* what a silent root fills, or the changed piece */
    size_t scratch_bytes;
    const void *piece; /* judged already, and handed out as `given` */
    const void *given;
    size_t piece_bytes;
    /* Root: where the round is, for the room of a silent one. */
    const uint64_t *sizes;
    size_t n, at;
    uint64_t pos;
} faulty_stream;

static faulty_stream *of(ferry__stream *s)
{
    return (faulty_stream *)s;
}

static void mirror(faulty_stream *s)
{
    s->base.bytes = s->inner->bytes;
    s->base.peak_bytes = s->inner->peak_bytes;
    s->base.path = s->inner->path;
}

static ferry_status want_scratch(faulty_stream *s, size_t size)
{
    if (s->scratch_bytes >= size)
        return FERRY_OK;
    ferry__free(s->scratch);
    s->scratch = ferry__alloc(size);
    s->scratch_bytes = s->scratch ? size : 0;
    return s->scratch ? FERRY_OK : FERRY_ENOMEM;
}

static ferry_status faulty_begin(ferry__stream *base, const uint64_t *sizes,
                                 size_t n)
{
    faulty_stream *s = of(base);

    s->silent = false;
    s->piece = NULL;
    s->sizes = sizes;
    s->n = n;
    s->at = 0;
    s->pos = 0;
    return s->inner->ops->begin(s->inner, sizes, n);
}

/* ---- the root ---- */

/* Bytes to the end of the buffer at hand; 0 when the round is full. */
static uint64_t left_in_buffer(faulty_stream *s)
{
    while (s->at < s->n && s->pos >= s->sizes[s->at]) {
        s->at++;
        s->pos = 0;
    }
    return s->at < s->n ? s->sizes[s->at] - s->pos : 0;
}

static ferry_status faulty_reserve(ferry__stream *base, void **out,
                                   size_t *out_size)
{
    faulty_stream *s = of(base);
    ferry_status status;

    if (s->silent) {
        uint64_t left = left_in_buffer(s);

        if (left == 0)
            return ferry_fail(FERRY_EORDER, "stream: the round is full");
        *out = s->scratch;
        *out_size = left < s->scratch_bytes ? (size_t)left : s->scratch_bytes;
        return FERRY_OK;
    }
    status = s->inner->ops->reserve(s->inner, out, out_size);
    if (status == FERRY_OK) {
        s->given = *out;
        s->piece_bytes = *out_size;
    }
    mirror(s);
    return status;
}

/* From here on the caller fills memory that nobody reads. */
static ferry_status fall_silent(faulty_stream *s, uint64_t keep)
{
    FERRY_TRY(want_scratch(s, s->piece_bytes));
    s->silent = true;
    return keep > 0 ? s->inner->ops->commit(s->inner, (size_t)keep) : FERRY_OK;
}

static ferry_status faulty_commit(ferry__stream *base, size_t size)
{
    faulty_stream *s = of(base);
    const ferry__message m = {"stream", true, FERRY__ANY_RANK, size,
                              s->bound_ms};
    ferry__verdict v;
    ferry_status status;

    s->pos += size;
    if (s->silent || size == 0)
        return FERRY_OK;
    FERRY_TRY(ferry__faulty_judge(s->f, &m, &v));
    if (v.corrupt)
        FERRY_TRY(ferry__faulty_flip(s->f, &v, (void *)(uintptr_t)s->given));
    if (v.lost || v.keep < size)
        return fall_silent(s, v.lost ? 0 : v.keep);
    status = s->inner->ops->commit(s->inner, size);
    mirror(s);
    return status;
}

/* ---- the others ---- */

static ferry_status change(faulty_stream *s, const ferry__verdict *v,
                           size_t size)
{
    FERRY_TRY(want_scratch(s, size));
    memcpy(s->scratch, s->piece, (size_t)v->keep);
    memset(s->scratch + v->keep, 0, size - (size_t)v->keep);
    if (v->corrupt)
        ferry__fault_flip(v->seed, v->place,
                          (unsigned char *)s->scratch + v->corrupt_at);
    s->given = s->scratch;
    return FERRY_OK;
}

static ferry_status judge_piece(faulty_stream *s)
{
    const ferry__message m = {"stream", false, s->root, s->piece_bytes,
                              s->bound_ms};
    ferry__verdict v;

    FERRY_TRY(ferry__faulty_judge(s->f, &m, &v));
    if (v.lost)
        return ferry__faulty_starve(s->f, &m);
    s->given = s->piece;
    if (v.corrupt || v.keep < s->piece_bytes)
        return change(s, &v, s->piece_bytes);
    return FERRY_OK;
}

/* Pieces may grow between two peeks; what was judged is what is given. */
static ferry_status faulty_peek(ferry__stream *base, const void **out,
                                size_t *out_size)
{
    faulty_stream *s = of(base);

    if (!s->piece) {
        FERRY_TRY(s->inner->ops->peek(s->inner, &s->piece, &s->piece_bytes));
        FERRY_TRY(judge_piece(s));
    }
    *out = s->given;
    *out_size = s->piece_bytes;
    mirror(s);
    return FERRY_OK;
}

static ferry_status faulty_release(ferry__stream *base, size_t size)
{
    faulty_stream *s = of(base);
    ferry_status status;

    if (s->piece && size < s->piece_bytes) {
        s->piece = (const char *)s->piece + size;
        s->given = (const char *)s->given + size;
        s->piece_bytes -= size;
    } else {
        s->piece = NULL;
    }
    status = s->inner->ops->release(s->inner, size);
    mirror(s);
    return status;
}

/* ---- both ---- */

static ferry_status faulty_end(ferry__stream *base)
{
    faulty_stream *s = of(base);
    const ferry__message m = {"stream", true, FERRY__ANY_RANK, 0, s->bound_ms};
    ferry_status status;

    if (s->silent)
        return ferry__faulty_starve(s->f, &m);
    status = s->inner->ops->end(s->inner);
    mirror(s);
    return status;
}

static void faulty_stream_close(ferry__stream *base)
{
    faulty_stream *s = of(base);

    ferry__stream_close(&s->inner);
    ferry__free(s->scratch);
    ferry__free(s);
}

ferry_status ferry__faulty_stream(ferry__comm *c,
                                  const struct ferry__stream_options *options,
                                  struct ferry__stream **out)
{
    static const ferry__stream_ops ops = {
        .begin = faulty_begin,
        .reserve = faulty_reserve,
        .commit = faulty_commit,
        .peek = faulty_peek,
        .release = faulty_release,
        .end = faulty_end,
        .close = faulty_stream_close,
    };
    ferry__faulty *f = (ferry__faulty *)c;
    faulty_stream *s = ferry__alloc(sizeof(*s));
    ferry_status status;

    if (!s)
        return FERRY_ENOMEM;
    status = f->inner->ops->stream_open(f->inner, options, &s->inner);
    if (status < 0) {
        ferry__free(s);
        return status;
    }
    s->base.ops = &ops;
    s->base.comm = c;
    s->f = f;
    s->root = options->root;
    s->bound_ms = options->no_progress_ms > 0 ? options->no_progress_ms
                                              : options->timeout_ms;
    mirror(s);
    *out = &s->base;
    return FERRY_OK;
}
