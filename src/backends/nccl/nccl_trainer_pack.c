/* SPDX-License-Identifier: Apache-2.0 */
/* Tensors into the rooms of the stream: whole ones one after another, without
 * alignment, converting nothing.
 * A tensor of a device comes to a room of the host, or of another device, by
 * way of the host; a room on its own device it reaches straight.
 * Invariant: a room is committed at a tensor's end or at a multiple of 32 of
 * its elements, which is where the other end can load. */
#include "backends/nccl/nccl_trainer_state.h"

#include "core/copy.h"

/* What the scratch holds, and between looks at the clock; beside that what a
 * device copies within itself at once. */
#define STEP_BYTES     ((size_t)1 << 20)
#define DIRECT_BYTES   ((size_t)64 << 20)
#define PIECE_ELEMENTS ((int64_t)32)
#define LOOK_BYTES     ((uint64_t)8 << 20)

static void count_wire(nccl__trainer *t, int64_t began)
{
    t->host->stats(t->ctx)->wire_ms +=
        (double)(t->host->now_ns() - began) / 1e6;
    FERRY_HOST_SPAN(t->host, t->ctx, "wire", began);
}

static ferry_status open_room(nccl__packer *p)
{
    ferry__stream *s = p->t->group.stream;
    int64_t began = p->t->host->now_ns();
    void *room;

    FERRY_TRY(s->ops->reserve(s, &room, &p->size));
    p->room = room;
    p->used = 0;
    count_wire(p->t, began);
    return FERRY_OK;
}

static ferry_status commit(nccl__packer *p)
{
    ferry__stream *s = p->t->group.stream;

    FERRY_TRY(s->ops->commit(s, p->used));
    p->t->host->progress(p->t->ctx, p->used);
    p->room = NULL;
    return FERRY_OK;
}

/* ---- the bytes of a step ---- */

/* One parameter on its way. */
typedef struct parcel {
    nccl__packer *p;
    size_t i;
    const char *name;
    const ferry_tensor *tensor;
    bool direct; /* from the device's memory to a room beside it */
} parcel;

/* To memory that the host reads next, hashed on the way. */
static void pack_range(void *arg, const ferry_tensor *view, int64_t first,
                       int64_t count, void *out)
{
    const parcel *c = arg;

    if (c->p->proofs)
        nccl__proofs_pack(c->p->proofs, c->i, view, first, count, out);
    else
        ferry__copy_range_hot(view, first, count, out);
}

/* A room that is not the host's is reached through the scratch. */
static ferry_status pack_staged(parcel *c, int64_t first, int64_t count,
                                char *room)
{
    nccl__trainer *t = c->p->t;
    size_t bytes = (size_t)count * ferry_dtype_bytes(c->tensor->dtype);

    FERRY_TRY(ferry__fetch_pack(&t->fetcher, first, count, t->stage.scratch,
                                pack_range, c));
    return ferry__nccl_stage_copy(&t->stage, room, t->stage.scratch, bytes);
}

/* What is hashed comes to the host all the same. */
static ferry_status pack_direct(parcel *c, int64_t first, int64_t count,
                                char *room)
{
    nccl__trainer *t = c->p->t;

    if (c->p->proofs)
        FERRY_TRY(ferry__fetch_pack(&t->fetcher, first, count, t->stage.scratch,
                                    pack_range, c));
    return ferry__fetch_copy(&t->fetcher, first, count, room);
}

static ferry_status pack_bytes(parcel *c, int64_t first, int64_t count)
{
    nccl__trainer *t = c->p->t;
    char *room = c->p->room + c->p->used;

    if (c->direct)
        return pack_direct(c, first, count, room);
    if (t->stage.memory)
        return pack_staged(c, first, count, room);
    return ferry__fetch_pack(&t->fetcher, first, count, room, pack_range, c);
}

/* Elements that the room at hand takes in one step. */
static int64_t room_for(const parcel *c, int64_t left)
{
    const nccl__packer *p = c->p;
    size_t elem = ferry_dtype_bytes(c->tensor->dtype);
    size_t room = p->size - p->used;
    size_t most = c->direct && !p->proofs ? DIRECT_BYTES : STEP_BYTES;

    if (room > most)
        room = most;
    if ((uint64_t)left * elem <= room)
        return left;
    return (int64_t)(room / elem) / PIECE_ELEMENTS * PIECE_ELEMENTS;
}

static ferry_status step(parcel *c, int64_t first, int64_t count)
{
    nccl__packer *p = c->p;
    nccl__trainer *t = p->t;
    uint64_t bytes = (uint64_t)count * ferry_dtype_bytes(c->tensor->dtype);
    int64_t began = t->host->now_ns();

    FERRY_TRY(pack_bytes(c, first, count));
    t->host->stats(t->ctx)->pack_ms +=
        (double)(t->host->now_ns() - began) / 1e6;
    FERRY_HOST_SPAN(t->host, t->ctx, "pack", began);
    p->used += (size_t)bytes;
    p->looked += bytes;
    if (p->looked >= LOOK_BYTES) {
        p->looked = 0;
        return t->host->check(t->ctx, "packing");
    }
    return FERRY_OK;
}

/* ---- a parameter ---- */

static void tell_devices(const parcel *c)
{
    nccl__trainer *t = c->p->t;

    if (c->tensor->device == 0 || c->direct || t->told_devices)
        return;
    t->told_devices = true;
    t->host->log(FERRY_LOG_INFO,
                 "nccl: parameter %s is in the memory of device %d and goes "
                 "by way of the host, as do others like it",
                 c->name, c->tensor->device - 1);
}

static ferry_status begin(parcel *c)
{
    nccl__trainer *t = c->p->t;

    FERRY_TRY(ferry__fetch_begin(&t->fetcher, c->name, c->tensor));
    c->direct =
        t->stage.memory && ferry__fetch_copies(&t->fetcher, t->stage.memory);
    tell_devices(c);
    return FERRY_OK;
}

ferry_status nccl__pack(nccl__packer *p, size_t i, const char *name,
                        const ferry_tensor *tensor)
{
    parcel c = {p, i, name, tensor, false};
    int64_t numel = ferry_tensor_numel(tensor), first = 0;

    if (numel > 0)
        FERRY_TRY(begin(&c));
    while (first < numel) {
        int64_t count;

        if (!p->room)
            FERRY_TRY(open_room(p));
        count = room_for(&c, numel - first);
        if (count == 0 && p->used == 0)
            return ferry_fail(FERRY_EINTERNAL,
                              "parameter %s: the stream gives a room of %zu "
                              "bytes, too few for 32 elements",
                              name, p->size);
        if (count > 0)
            FERRY_TRY(step(&c, first, count));
        first += count;
        if (count == 0 || p->used == p->size)
            FERRY_TRY(commit(p));
    }
    return FERRY_OK;
}
