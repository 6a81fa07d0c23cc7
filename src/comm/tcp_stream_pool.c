/* SPDX-License-Identifier: Apache-2.0 */
/* Slots, pieces and how they come back. Pages are taken slot by slot, on
 * first use. Invariant: between `freed` and `committed` lie the pieces that
 * some reader may still look at, at most n_entries of them. */
#include "comm/tcp_stream_pool.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"
#include "device/shared.h"

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MAGIC      0x4c504653u /* "SFPL" */
#define VERSION    1u
#define PAGE_BYTES 4096u
#define SLOT_MOST  ((uint64_t)1 << 20)
#define SLOTS_MOST ((uint64_t)1 << 20)
/* With fewer nothing could be filled while something is read. */
#define SLOTS_LEAST 2u
/* As many slots are filled without a thought; before another one is touched
 * the readers are given a moment, since a slot that comes back is in the
 * cache and one that does not is not. A slow reader costs no more than that
 * moment a piece, until the pool is full. */
#define HOT_SLOTS 4u
#define MOMENT_MS 1

static uint64_t round_up(uint64_t n, uint64_t to)
{
    return (n + to - 1) / to * to;
}

static uint64_t data_at(uint32_t n_entries)
{
    return round_up(sizeof(tcp__pool_head) +
                        (uint64_t)n_entries * sizeof(tcp__pool_entry),
                    PAGE_BYTES);
}

static void measure(uint64_t bound, tcp__pool_head *out)
{
    uint64_t slot = bound / 4 / PAGE_BYTES * PAGE_BYTES, n_slots;

    slot = slot < PAGE_BYTES ? PAGE_BYTES : slot;
    slot = slot > SLOT_MOST ? SLOT_MOST : slot;
    n_slots = bound / slot;
    n_slots = n_slots < SLOTS_LEAST ? SLOTS_LEAST : n_slots;
    n_slots = n_slots > SLOTS_MOST ? SLOTS_MOST : n_slots;
    out->magic = MAGIC;
    out->version = VERSION;
    out->slot_bytes = (uint32_t)slot;
    out->n_slots = (uint32_t)n_slots;
    out->n_entries = 2;
    while (out->n_entries < n_slots)
        out->n_entries *= 2;
    out->data_at = data_at(out->n_entries);
}

static uint64_t total_of(const tcp__pool_head *h)
{
    return h->data_at + (uint64_t)h->n_slots * h->slot_bytes;
}

static void lay_out(tcp__pool *p, void *memory, const tcp__pool_head *size)
{
    p->head = memory;
    p->data = (char *)memory + size->data_at;
    p->size_bytes = (size_t)total_of(size);
    p->n_slots = p->n_most = size->n_slots;
    p->slot_bytes = size->slot_bytes;
    p->n_entries = size->n_entries;
}

ferry_status ferry__pool_create(tcp__pool *p, uint64_t bound_bytes,
                                const char *key)
{
    tcp__pool_head size = {0};
    void *memory;

    *p = (tcp__pool){.fd = -1};
    measure(bound_bytes, &size);
    p->free_slots = ferry__alloc_array(size.n_slots, sizeof(uint32_t));
    p->made = ferry__alloc_array(size.n_entries, sizeof(*p->made));
    if (!p->free_slots || !p->made)
        return FERRY_ENOMEM;
    FERRY_TRY(ferry__shared_create_sparse(
        "ferry-stream", (size_t)total_of(&size), &p->fd, &memory));
    lay_out(p, memory, &size);
    FERRY_TRY(ferry__shared_reserve(p->fd, 0, (size_t)size.data_at));
    p->head->magic = size.magic;
    p->head->version = size.version;
    p->head->slot_bytes = size.slot_bytes;
    p->head->n_slots = size.n_slots;
    p->head->n_entries = size.n_entries;
    p->head->data_at = size.data_at;
    memcpy(p->head->key, key, TCP__POOL_KEY);
    return FERRY_OK;
}

static ferry_status check_head(const tcp__pool_head *h, const char *key)
{
    if (h->magic != MAGIC || h->version != VERSION ||
        memcmp(h->key, key, TCP__POOL_KEY) != 0)
        return ferry_fail(FERRY_EPEER, "stream: the shared memory that came "
                                       "is not that of this stream");
    if (h->slot_bytes < PAGE_BYTES || h->slot_bytes > SLOT_MOST ||
        h->slot_bytes % PAGE_BYTES != 0 || h->n_slots < SLOTS_LEAST ||
        h->n_slots > SLOTS_MOST || h->n_entries < h->n_slots ||
        h->n_entries > 2 * SLOTS_MOST ||
        (h->n_entries & (h->n_entries - 1)) != 0 ||
        h->data_at != data_at(h->n_entries))
        return ferry_fail(FERRY_EPEER,
                          "stream: the shared memory that came "
                          "has %u slots of %u bytes",
                          h->n_slots, h->slot_bytes);
    return FERRY_OK;
}

/* Its size is known only from its head, which is mapped first, and copied
 * before it is checked: the other ranks can still write to it. */
ferry_status ferry__pool_map(tcp__pool *p, int fd, const char *key)
{
    tcp__pool_head *memory, size = {0};
    void *mapped;

    *p = (tcp__pool){.fd = -1};
    FERRY_TRY(ferry__shared_map(fd, sizeof(*memory), 1, &mapped));
    memory = mapped;
    size.magic = memory->magic;
    size.version = memory->version;
    size.n_slots = memory->n_slots;
    size.slot_bytes = memory->slot_bytes;
    size.n_entries = memory->n_entries;
    size.data_at = memory->data_at;
    memcpy(size.key, memory->key, TCP__POOL_KEY);
    ferry__shared_unmap(mapped, sizeof(*memory));
    FERRY_TRY(check_head(&size, key));
    FERRY_TRY(ferry__shared_map(fd, (size_t)total_of(&size), 1, &mapped));
    lay_out(p, mapped, &size);
    /* A stray write of a reader must not reach the others. */
    if (mprotect(p->data, (size_t)size.n_slots * size.slot_bytes, PROT_READ) !=
        0)
        return ferry_fail(FERRY_EIO, "stream: cannot protect shared memory");
    return FERRY_OK;
}

void ferry__pool_close(tcp__pool *p)
{
    if (p->head)
        ferry__shared_unmap(p->head, p->size_bytes);
    if (p->fd >= 0)
        close(p->fd);
    ferry__free(p->free_slots);
    ferry__free(p->made);
    *p = (tcp__pool){.fd = -1};
}

/* ---- the writer ---- */

static ferry__gate *gate_of(const tcp__pool *p, int32_t i)
{
    return &p->head->readers[p->readers[i]].released;
}

/* The writer's is its own. */
static const tcp__pool_entry *entry_of(const tcp__pool *p, uint32_t seq)
{
    const tcp__pool_entry *all = p->made ? p->made : p->head->entries;

    return &all[seq & (p->n_entries - 1)];
}

/* Pieces that the slowest reader has not released: those between `freed` and
 * `committed`, or a reader counts what it never had. */
static ferry_status behind(const tcp__pool *p, uint32_t *out)
{
    uint32_t most = 0;

    for (int32_t i = 0; i < p->n_readers; i++) {
        uint32_t n = p->committed - ferry__gate_value(gate_of(p, i));

        if (n > p->committed - p->freed)
            return ferry_fail(FERRY_EPEER,
                              "stream: reader %d says that it released %u "
                              "pieces, %u to %u can be",
                              p->readers[i], p->committed - n, p->freed,
                              p->committed);
        most = n > most ? n : most;
    }
    *out = most;
    return FERRY_OK;
}

/* What came back last lies on top. */
static ferry_status reap(tcp__pool *p)
{
    uint32_t left;

    FERRY_TRY(behind(p, &left));
    for (; p->committed - p->freed != left; p->freed++)
        p->free_slots[p->n_free++] = entry_of(p, p->freed)->slot;
    return FERRY_OK;
}

static void await_oldest(tcp__pool *p, int64_t slice_ms)
{
    ferry__deadline until = ferry__deadline_in(slice_ms);

    for (int32_t i = 0; i < p->n_readers; i++) {
        int64_t left = ferry__deadline_left_ms(&until);

        if (left <= 0 || !ferry__gate_await(gate_of(p, i), p->freed + 1, left))
            return;
    }
}

/* The machine has no memory for another slot, which is no reason to end a
 * round: those that are there go round. */
static ferry_status do_with_less(tcp__pool *p)
{
    uint64_t slot = p->slot_bytes, had = slot * p->n_touched;

    if (p->n_touched < SLOTS_LEAST)
        return ferry__fail_prefix(FERRY_ENOSPC,
                                  "stream: %llu bytes of buffers could be "
                                  "had, at least %llu are needed",
                                  (unsigned long long)had,
                                  (unsigned long long)slot * SLOTS_LEAST);
    ferry__log(FERRY_LOG_WARN,
               "stream: no memory for more than %llu of the %llu bytes of "
               "buffers that were agreed on; it goes on with those: %s",
               (unsigned long long)had, (unsigned long long)slot * p->n_slots,
               ferry_last_error());
    p->n_most = p->n_touched;
    return FERRY_OK;
}

static ferry_status touch_another(tcp__pool *p)
{
    uint32_t slot = p->n_touched;
    size_t bytes = p->slot_bytes, data = (size_t)(p->data - (char *)p->head);
    ferry_status status =
        ferry__shared_reserve(p->fd, data + (size_t)slot * bytes, bytes);

    if (status == FERRY_ENOSPC)
        return do_with_less(p);
    FERRY_TRY(status);
    p->n_touched++;
    atomic_store(&p->head->peak_bytes, (uint64_t)p->n_touched * bytes);
    p->free_slots[p->n_free++] = slot;
    return FERRY_OK;
}

ferry_status ferry__pool_acquire(tcp__pool *p, int64_t slice_ms)
{
    if (p->held)
        return FERRY_OK;
    FERRY_TRY(reap(p));
    if (p->committed - p->freed >= HOT_SLOTS) {
        await_oldest(p, slice_ms < MOMENT_MS ? slice_ms : MOMENT_MS);
        FERRY_TRY(reap(p));
    }
    if (p->n_free == 0 && p->n_touched < p->n_most)
        FERRY_TRY(touch_another(p));
    if (p->n_free == 0) {
        await_oldest(p, slice_ms);
        FERRY_TRY(reap(p));
    }
    if (p->n_free == 0)
        return FERRY_DONE;
    p->slot = p->free_slots[--p->n_free];
    p->held = true;
    return FERRY_OK;
}

char *ferry__pool_slot(const tcp__pool *p)
{
    return p->data + (size_t)p->slot * p->slot_bytes;
}

void ferry__pool_announce(tcp__pool *p, size_t size_bytes)
{
    tcp__pool_entry e = {p->slot, (uint32_t)size_bytes};
    uint32_t at = p->committed & (p->n_entries - 1);

    p->made[at] = e;
    p->head->entries[at] = e;
    p->announced = true;
}

void ferry__pool_commit(tcp__pool *p, size_t size_bytes)
{
    if (!p->announced)
        ferry__pool_announce(p, size_bytes);
    p->announced = false;
    p->held = false;
    p->committed++;
    ferry__gate_raise(&p->head->committed, p->committed);
}

bool ferry__pool_drained(tcp__pool *p, int64_t slice_ms)
{
    ferry__deadline until = ferry__deadline_in(slice_ms);

    for (int32_t i = 0; i < p->n_readers; i++) {
        int64_t left = ferry__deadline_left_ms(&until);

        if (!ferry__gate_await(gate_of(p, i), p->committed,
                               left > 0 ? left : 0))
            return false;
    }
    return true;
}

bool ferry__pool_is_full(const tcp__pool *p)
{
    uint32_t committed = ferry__gate_value(&p->head->committed), most = 0;

    for (int32_t i = 0; i < p->n_readers; i++) {
        uint32_t n = committed - ferry__gate_value(gate_of(p, i));

        most = (int32_t)n > (int32_t)most ? n : most;
    }
    return most >= p->n_most;
}

int32_t ferry__pool_slowest(const tcp__pool *p)
{
    uint32_t committed = ferry__gate_value(&p->head->committed), most = 0;
    int32_t slowest = -1;

    for (int32_t i = 0; i < p->n_readers; i++) {
        uint32_t n = committed - ferry__gate_value(gate_of(p, i));

        if ((int32_t)n > (int32_t)most) {
            most = n;
            slowest = p->readers[i];
        }
    }
    return slowest;
}

uint64_t ferry__pool_progress(const tcp__pool *p)
{
    uint64_t sum = 0;

    for (int32_t i = 0; i < p->n_readers; i++)
        sum += ferry__gate_value(gate_of(p, i));
    return sum;
}

/* ---- readers ---- */

ferry_status ferry__pool_piece(const tcp__pool *p, const tcp__cursor *at,
                               const char **out, size_t *out_size)
{
    tcp__pool_entry e = *entry_of(p, at->seq);

    if (e.slot >= p->n_slots || e.size_bytes > p->slot_bytes ||
        e.size_bytes <= at->offset)
        return ferry_fail(FERRY_EPEER,
                          "stream: piece %u has %u bytes in slot %u", at->seq,
                          e.size_bytes, e.slot);
    *out = p->data + (size_t)e.slot * p->slot_bytes + at->offset;
    *out_size = e.size_bytes - at->offset;
    return FERRY_OK;
}

ferry_status ferry__pool_peek(tcp__pool *p, const tcp__cursor *at,
                              int64_t slice_ms, const char **out,
                              size_t *out_size)
{
    if (!ferry__gate_await(&p->head->committed, at->seq + 1, slice_ms))
        return FERRY_DONE;
    return ferry__pool_piece(p, at, out, out_size);
}

void ferry__pool_release(tcp__pool *p, tcp__cursor *at, size_t size_bytes)
{
    at->offset += size_bytes;
    if (at->offset < entry_of(p, at->seq)->size_bytes)
        return;
    at->offset = 0;
    at->seq++;
    ferry__gate_raise(&p->head->readers[at->reader].released, at->seq);
}
