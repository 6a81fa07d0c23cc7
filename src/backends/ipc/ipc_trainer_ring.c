/* SPDX-License-Identifier: Apache-2.0 */
/* The ring's writing end: pieces of parameters into slots that all workers
 * read. Small parameters share a slot, so that each costs a record and no
 * wake-up. Invariant: a slot is refilled only after every worker has read
 * it; pieces are multiples of 32 elements except at a parameter's end. */
#include "backends/ipc/ipc_trainer_state.h"

#include "core/copy.h"

#define ALIGN          ((uint64_t)64)
#define PIECE_ELEMENTS ((int64_t)32)

typedef struct writer {
    ipc__trainer *t;
    ferry__ipc_slot *head; /* NULL: no slot is open */
    char *data;
    uint64_t used;
} writer;

static void publish(writer *w)
{
    if (!w->head)
        return;
    w->t->ring_next++;
    ferry__gate_raise(&w->t->ring->published, w->t->ring_next);
    w->head = NULL;
}

/* Waits until every worker has read what the next slot holds. */
static ferry_status open_slot(writer *w)
{
    ipc__trainer *t = w->t;
    uint32_t want = t->ring_next + 1 - t->n_slots;
    bool ended = false;

    for (size_t i = 0; i < t->n_peers; i++) {
        ferry__gate *consumed = &t->ring->readers[i].consumed;

        while (!ferry__gate_await(consumed, want, IPC__SLICE_MS)) {
            FERRY_TRY(ipc__peers_check_call(t, &ended));
            FERRY_TRY(ipc__peers_look(t,
                                      "waiting for the workers to read "
                                      "the ring",
                                      0));
        }
    }
    w->head = ferry__ipc_ring_slot(t->ring, t->n_slots, t->ring_next);
    w->data = ferry__ipc_ring_data(t->ring, t->n_slots, FERRY__IPC_SLOT_BYTES,
                                   t->ring_next);
    w->head->update = t->update;
    w->head->n_records = 0;
    w->used = 0;
    return FERRY_OK;
}

/* Elements of the parameter that the open slot still takes. */
static int64_t room_for(const writer *w, int64_t left, size_t elem_bytes)
{
    int64_t room = (int64_t)((FERRY__IPC_SLOT_BYTES - w->used) / elem_bytes);

    if (w->head->n_records == FERRY__IPC_MAX_RECORDS)
        return 0;
    return left <= room ? left : room / PIECE_ELEMENTS * PIECE_ELEMENTS;
}

/* One parameter on its way. */
typedef struct parcel {
    uint32_t param;
    size_t elem_bytes;
    ipc__digester *digester; /* NULL: nothing is hashed */
} parcel;

/* Through the cache, since the workers read it next; hashed on the way. */
static void pack(void *arg, const ferry_tensor *view, int64_t first,
                 int64_t count, void *out)
{
    const parcel *c = arg;

    if (c->digester)
        ipc__digester_pack(c->digester, c->param, view, first, count, out);
    else
        ferry__copy_range_hot(view, first, count, out);
}

static ferry_status add_piece(writer *w, parcel *c, int64_t first,
                              int64_t count)
{
    ferry__ipc_slot *head = w->head;
    uint64_t bytes = (uint64_t)count * c->elem_bytes;

    FERRY_TRY(ferry__fetch_pack(&w->t->fetcher, first, count, w->data + w->used,
                                pack, c));
    head->records[head->n_records++] =
        (ferry__ipc_record){c->param, 0, first, count, w->used};
    w->used += (bytes + ALIGN - 1) / ALIGN * ALIGN;
    if (w->used > FERRY__IPC_SLOT_BYTES)
        w->used = FERRY__IPC_SLOT_BYTES;
    return FERRY_OK;
}

/* The tensor that was taken up. */
static ferry_status stream_tensor(writer *w, uint32_t param,
                                  const ferry_tensor *tensor,
                                  ipc__digester *digester)
{
    size_t elem = ferry_dtype_bytes(tensor->dtype);
    parcel c = {param, elem, digester};
    int64_t numel = ferry_tensor_numel(tensor), first = 0, count;

    while (first < numel) {
        if (!w->head)
            FERRY_TRY(open_slot(w));
        count = room_for(w, numel - first, elem);
        if (count == 0) {
            publish(w);
            continue;
        }
        FERRY_TRY(add_piece(w, &c, first, count));
        first += count;
    }
    return FERRY_OK;
}

ferry_status ipc__ring_stream(ipc__trainer *t, ipc__chunk *chunk,
                              ipc__digester *digester)
{
    writer w = {t, NULL, NULL, 0};

    for (size_t i = 0; i < chunk->count; i++) {
        ferry__ipc_kind kind = chunk->handles[i].kind;
        ferry_tensor tensor;

        if (chunk->fetched)
            tensor = chunk->tensors[i];
        else
            FERRY_TRY(ipc__fetch(t, chunk, i, &tensor));
        if (kind == FERRY__IPC_RING) {
            t->used_ring = true;
            FERRY_TRY(ipc__take(t, chunk, i, &tensor));
            FERRY_TRY(stream_tensor(&w, (uint32_t)i, &tensor, digester));
        } else if (digester) {
            /* A long hash must not keep back what the ring holds. */
            publish(&w);
            FERRY_TRY(ipc__digester_tensor(digester, i, &tensor));
            FERRY_TRY(ipc__peers_look(t, "hashing", 0));
        }
    }
    publish(&w);
    return FERRY_OK;
}
