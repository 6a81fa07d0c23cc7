/* SPDX-License-Identifier: Apache-2.0 */
/* Tensors into the rooms of the stream: whole ones one after another, without
 * alignment, converting nothing.
 * Invariant: a room is committed at a tensor's end or at a multiple of 32 of
 * its elements, which is where the other end can load. */
#include "backends/nccl/nccl_trainer_state.h"

#include "core/copy.h"

/* What the scratch holds, and between looks at the clock. */
#define STEP_BYTES     ((size_t)1 << 20)
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

/* Elements that the room at hand takes in one step. */
static int64_t room_for(const nccl__packer *p, int64_t left, size_t elem_bytes)
{
    size_t room = p->size - p->used;

    if (room > STEP_BYTES)
        room = STEP_BYTES;
    if ((uint64_t)left * elem_bytes <= room)
        return left;
    return (int64_t)(room / elem_bytes) / PIECE_ELEMENTS * PIECE_ELEMENTS;
}

/* To memory that the host reads next, hashed on the way. */
static void pack_range(const nccl__packer *p, size_t i,
                       const ferry_tensor *tensor, int64_t first, int64_t count,
                       void *out)
{
    if (p->proofs)
        nccl__proofs_pack(p->proofs, i, tensor, first, count, out);
    else
        ferry__copy_range_hot(tensor, first, count, out);
}

/* A room that is not the host's is reached through the scratch. */
static ferry_status pack_staged(nccl__packer *p, size_t i,
                                const ferry_tensor *tensor, int64_t first,
                                int64_t count)
{
    ferry__nccl_stage *stage = &p->t->stage;
    size_t bytes = (size_t)count * ferry_dtype_bytes(tensor->dtype);

    pack_range(p, i, tensor, first, count, stage->scratch);
    return ferry__nccl_stage_copy(stage, p->t->group.comm, p->room + p->used,
                                  stage->scratch, bytes);
}

static ferry_status step(nccl__packer *p, size_t i, const ferry_tensor *tensor,
                         int64_t first, int64_t count)
{
    nccl__trainer *t = p->t;
    uint64_t bytes = (uint64_t)count * ferry_dtype_bytes(tensor->dtype);
    int64_t began = t->host->now_ns();

    if (t->stage.memory)
        FERRY_TRY(pack_staged(p, i, tensor, first, count));
    else
        pack_range(p, i, tensor, first, count, p->room + p->used);
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

ferry_status nccl__pack(nccl__packer *p, size_t i, const char *name,
                        const ferry_tensor *tensor)
{
    size_t elem = ferry_dtype_bytes(tensor->dtype);
    int64_t numel = ferry_tensor_numel(tensor), first = 0;

    if (tensor->device != 0 && numel > 0)
        return ferry_fail(FERRY_ENOTSUP,
                          "parameter %s is in the memory of device %d; this "
                          "backend reads tensors of the host",
                          name, tensor->device - 1);
    while (first < numel) {
        int64_t count;

        if (!p->room)
            FERRY_TRY(open_room(p));
        count = room_for(p, numel - first, elem);
        if (count == 0 && p->used == 0)
            return ferry_fail(FERRY_EINTERNAL,
                              "parameter %s: the stream gives a room of %zu "
                              "bytes, too few for 32 elements",
                              name, p->size);
        if (count > 0)
            FERRY_TRY(step(p, i, tensor, first, count));
        first += count;
        if (count == 0 || p->used == p->size)
            FERRY_TRY(commit(p));
    }
    return FERRY_OK;
}
