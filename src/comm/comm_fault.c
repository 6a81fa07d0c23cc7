/* SPDX-License-Identifier: Apache-2.0 */
/* The group that the rules are applied to; see comm_fault.h.
 * Invariant: what is changed on its way out is a copy, or is put back before
 * the call returns: the caller's bytes stay what they are. */
#include "comm/comm_fault.h"

#include "base/alloc.h"
#include "base/log.h"
#include "comm/comm_fault_rules.h"
#include "device/memory.h"

#include <stdio.h>
#include <string.h>

static ferry__faulty *of(ferry__comm *c)
{
    return (ferry__faulty *)c;
}

static bool is_host(const ferry__faulty *f)
{
    return !f->base.memory || f->base.memory->device == 0;
}

/* The owner sets its check on the wrapper, the group asks the wrapper's. */
static ferry_status forward_check(void *arg, const char *what)
{
    const ferry__faulty *f = arg;

    return f->base.check ? f->base.check(f->base.check_arg, what) : FERRY_OK;
}

static void forward_waited(void *arg, int32_t peer, const char *address,
                           int64_t from_ns)
{
    const ferry__faulty *f = arg;

    if (f->base.waited)
        f->base.waited(f->base.check_arg, peer, address, from_ns);
}

/* ---- messages with one sender ---- */

/* A part of the message, its bit flipped while it is sent. */
static ferry_status send_bytes(ferry__faulty *f, const ferry__verdict *v,
                               const void *bytes, int32_t to,
                               int64_t timeout_ms)
{
    ferry__comm *inner = f->inner;
    void *copy;
    ferry_status status;

    /* A device's memory is left alone: its messages are broadcasts. */
    if (!v->corrupt || !is_host(f))
        return inner->ops->send(inner, bytes, (size_t)v->keep, to, timeout_ms);
    copy = ferry__alloc((size_t)v->keep);
    if (!copy)
        return FERRY_ENOMEM;
    memcpy(copy, bytes, (size_t)v->keep);
    status = ferry__faulty_flip(f, v, copy);
    if (status == FERRY_OK)
        status = inner->ops->send(inner, copy, (size_t)v->keep, to, timeout_ms);
    ferry__free(copy);
    return status;
}

static ferry_status faulty_send(ferry__comm *c, const void *bytes,
                                size_t size_bytes, int32_t to,
                                int64_t timeout_ms)
{
    ferry__faulty *f = of(c);
    const ferry__message m = {"send", true, to, size_bytes, timeout_ms};
    ferry__verdict v;

    FERRY_TRY(ferry__faulty_judge(f, &m, &v));
    if (v.lost || (v.keep == 0 && size_bytes > 0))
        return FERRY_OK; /* it left, as far as this rank can tell */
    return send_bytes(f, &v, bytes, to, timeout_ms);
}

/* What did not come through: the bytes beyond `keep` are as they were. */
static ferry_status receive_part(ferry__faulty *f, const ferry__message *m,
                                 const ferry__verdict *v, void *bytes,
                                 bool broadcast)
{
    ferry__comm *inner = f->inner;
    size_t size = (size_t)m->size_bytes, tail = size - (size_t)v->keep;
    void *held = NULL;
    ferry_status status;

    /* Device memory keeps its bytes: nothing is lost there in part. */
    if (tail > 0 && is_host(f)) {
        held = ferry__alloc(tail);
        if (!held)
            return FERRY_ENOMEM;
        memcpy(held, (char *)bytes + v->keep, tail);
    }
    status =
        broadcast
            ? inner->ops->broadcast(inner, bytes, size, m->peer, m->timeout_ms)
            : inner->ops->recv(inner, bytes, size, m->peer, m->timeout_ms);
    if (status == FERRY_OK && held)
        memcpy((char *)bytes + v->keep, held, tail);
    if (status == FERRY_OK && v->corrupt)
        status = ferry__faulty_flip(f, v, bytes);
    ferry__free(held);
    return status;
}

static ferry_status faulty_recv(ferry__comm *c, void *bytes, size_t size_bytes,
                                int32_t from, int64_t timeout_ms)
{
    ferry__faulty *f = of(c);
    const ferry__message m = {"recv", false, from, size_bytes, timeout_ms};
    ferry__verdict v;

    FERRY_TRY(ferry__faulty_judge(f, &m, &v));
    if (v.lost)
        return ferry__faulty_starve(f, &m);
    return receive_part(f, &m, &v, bytes, false);
}

static ferry_status broadcast_out(ferry__faulty *f, const ferry__message *m,
                                  void *bytes)
{
    ferry__comm *inner = f->inner;
    ferry__verdict v;
    ferry_status status;

    FERRY_TRY(ferry__faulty_judge(f, m, &v));
    if (v.lost || (v.keep == 0 && m->size_bytes > 0))
        return FERRY_OK;
    if (v.corrupt)
        FERRY_TRY(ferry__faulty_flip(f, &v, bytes));
    status = inner->ops->broadcast(inner, bytes, (size_t)v.keep, inner->rank,
                                   m->timeout_ms);
    if (v.corrupt) /* the same flip undoes itself */
        FERRY_TRY(ferry__faulty_flip(f, &v, bytes));
    return status;
}

static ferry_status faulty_broadcast(ferry__comm *c, void *bytes,
                                     size_t size_bytes, int32_t root,
                                     int64_t timeout_ms)
{
    ferry__faulty *f = of(c);
    bool sent = root == c->rank;
    const ferry__message m = {"broadcast", sent, sent ? FERRY__ANY_RANK : root,
                              size_bytes, timeout_ms};
    ferry__verdict v;

    if (sent)
        return broadcast_out(f, &m, bytes);
    FERRY_TRY(ferry__faulty_judge(f, &m, &v));
    if (v.lost)
        return ferry__faulty_starve(f, &m);
    return receive_part(f, &m, &v, bytes, true);
}

/* ---- messages of all to all ---- */

/* This rank's part leaves, then the others' come: lost either way, it does
 * not take part, and so all of them wait. */
static ferry_status meet(ferry__faulty *f, const char *what, uint64_t size,
                         int64_t timeout_ms)
{
    ferry__message m = {what, true, FERRY__ANY_RANK, size, timeout_ms};
    ferry__verdict v;

    FERRY_TRY(ferry__faulty_judge(f, &m, &v));
    if (!v.lost) {
        m.sent = false;
        FERRY_TRY(ferry__faulty_judge(f, &m, &v));
    }
    return v.lost ? ferry__faulty_starve(f, &m) : FERRY_OK;
}

static ferry_status faulty_all_reduce(ferry__comm *c, void *data, int64_t count,
                                      ferry_dtype dtype, ferry__reduce_op op,
                                      int64_t timeout_ms)
{
    ferry__faulty *f = of(c);
    uint64_t size = (uint64_t)count * ferry_dtype_bytes(dtype);

    FERRY_TRY(meet(f, "all_reduce", size, timeout_ms));
    return f->inner->ops->all_reduce(f->inner, data, count, dtype, op,
                                     timeout_ms);
}

static ferry_status faulty_all_gather(ferry__comm *c, const void *bytes,
                                      size_t size_bytes, void *out,
                                      int64_t timeout_ms)
{
    ferry__faulty *f = of(c);

    FERRY_TRY(meet(f, "all_gather", size_bytes, timeout_ms));
    return f->inner->ops->all_gather(f->inner, bytes, size_bytes, out,
                                     timeout_ms);
}

static ferry_status faulty_barrier(ferry__comm *c, int64_t timeout_ms)
{
    ferry__faulty *f = of(c);

    FERRY_TRY(meet(f, "barrier", 0, timeout_ms));
    return f->inner->ops->barrier(f->inner, timeout_ms);
}

/* ---- one-sided ---- */

static ferry_status faulty_expose(ferry__comm *c, void *bytes,
                                  size_t size_bytes, void *out_key,
                                  size_t *out_key_bytes)
{
    ferry__comm *inner = of(c)->inner;

    return inner->ops->expose(inner, bytes, size_bytes, out_key, out_key_bytes);
}

static void faulty_unexpose(ferry__comm *c, void *bytes)
{
    ferry__comm *inner = of(c)->inner;

    inner->ops->unexpose(inner, bytes);
}

static ferry_status faulty_pull(ferry__comm *c, void *bytes, size_t size_bytes,
                                int32_t from, const void *key, size_t key_bytes,
                                uint64_t offset, int64_t timeout_ms)
{
    ferry__faulty *f = of(c);
    const ferry__message m = {"pull", false, from, size_bytes, timeout_ms};
    ferry__verdict v;

    FERRY_TRY(ferry__faulty_judge(f, &m, &v));
    if (v.lost)
        return ferry__faulty_starve(f, &m);
    FERRY_TRY(f->inner->ops->pull(f->inner, bytes, (size_t)v.keep, from, key,
                                  key_bytes, offset, timeout_ms));
    return v.corrupt ? ferry__faulty_flip(f, &v, bytes) : FERRY_OK;
}

/* ---- the rest ---- */

static void faulty_describe(ferry__comm *c, char *out, size_t size_bytes)
{
    ferry__comm *inner = of(c)->inner;

    if (inner->ops->describe)
        inner->ops->describe(inner, out, size_bytes);
    else
        snprintf(out, size_bytes, "%s", inner->ops->provider);
}

static void faulty_abort(ferry__comm *c)
{
    ferry__faulty *f = of(c);

    atomic_store(&f->aborted, true);
    f->inner->ops->abort(f->inner);
}

static void faulty_fail(ferry__comm *c, ferry_status status, const char *line)
{
    ferry__faulty *f = of(c);

    atomic_store(&f->aborted, true);
    f->inner->ops->fail(f->inner, status, line);
}

static ferry_status faulty_watch(ferry__comm *c, int32_t peer, int stop_fd)
{
    ferry__comm *inner = of(c)->inner;

    return inner->ops->watch(inner, peer, stop_fd);
}

static ferry_status faulty_why_ended(ferry__comm *c, int32_t peer)
{
    ferry__comm *inner = of(c)->inner;

    return inner->ops->why_ended(inner, peer);
}

static ferry_status faulty_alloc(ferry__comm *c, size_t size_bytes, void **out)
{
    ferry__comm *inner = of(c)->inner;

    return inner->ops->alloc(inner, size_bytes, out);
}

static void faulty_free(ferry__comm *c, void *memory)
{
    ferry__comm *inner = of(c)->inner;

    inner->ops->free(inner, memory);
}

static uint64_t faulty_moved(ferry__comm *c)
{
    ferry__comm *inner = of(c)->inner;

    return inner->ops->moved(inner);
}

static void faulty_close(ferry__comm *c)
{
    ferry__faulty *f = of(c);

    ferry__comm_close(&f->inner);
    pthread_mutex_destroy(&f->lock);
    ferry__free(f);
}

static void fill(ferry__faulty *f, ferry__comm *inner)
{
    const ferry__comm_ops *o = inner->ops;

    f->inner = inner;
    f->ops = (ferry__comm_ops){
        .size = sizeof(f->ops),
        .provider = o->provider,
        .broadcast = faulty_broadcast,
        .all_reduce = o->all_reduce ? faulty_all_reduce : NULL,
        .all_gather = o->all_gather ? faulty_all_gather : NULL,
        .barrier = o->barrier ? faulty_barrier : NULL,
        .send = o->send ? faulty_send : NULL,
        .recv = o->recv ? faulty_recv : NULL,
        .abort = faulty_abort,
        .close = faulty_close,
        .expose = o->expose ? faulty_expose : NULL,
        .unexpose = o->unexpose ? faulty_unexpose : NULL,
        .pull = o->pull ? faulty_pull : NULL,
        .stream_open = o->stream_open ? ferry__faulty_stream : NULL,
        .describe = faulty_describe,
        .fail = o->fail ? faulty_fail : NULL,
        .watch = o->watch ? faulty_watch : NULL,
        .why_ended = o->why_ended ? faulty_why_ended : NULL,
        .alloc = o->alloc ? faulty_alloc : NULL,
        .free = o->free ? faulty_free : NULL,
        .moved = o->moved ? faulty_moved : NULL,
    };
    f->base = (ferry__comm){.ops = &f->ops,
                            .rank = inner->rank,
                            .world_size = inner->world_size,
                            .check = inner->check,
                            .check_arg = inner->check_arg,
                            .memory = inner->memory,
                            .bounds_silence = inner->bounds_silence};
    inner->check = forward_check;
    inner->waited = forward_waited;
    inner->check_arg = f;
}

ferry_status ferry__comm_fault_wrap(ferry__comm **comm)
{
    char text[FERRY__FAULT_TEXT_BYTES] = "";
    ferry__comm_rules rules;
    ferry__faulty *f;

    FERRY_TRY(ferry__fault_text(text));
    FERRY_TRY(ferry__comm_rules_parse(text, &rules));
    if (rules.n == 0 && !ferry__fault_is_file())
        return FERRY_OK;
    f = ferry__alloc(sizeof(*f));
    if (!f)
        return FERRY_ENOMEM;
    f->from_file = ferry__fault_is_file();
    memcpy(f->text, text, sizeof(text));
    f->plan = rules;
    pthread_mutex_init(&f->lock, NULL);
    fill(f, *comm);
    ferry__log(FERRY_LOG_INFO, "fault: %zu rules for rank %d of %d", rules.n,
               (int)f->base.rank, (int)f->base.world_size);
    *comm = &f->base;
    return FERRY_OK;
}
