/* SPDX-License-Identifier: Apache-2.0 */
/* The slots that the ranks of one host share: one writer, many readers. A
 * piece is a slot and a size, and pieces are numbered; a reader tells only
 * how many it has released, in order, so that nothing is locked and a rank
 * that dies leaves nothing half done.
 *
 * Segment, in the machine's byte order: 1. tcp__pool_head  2. entries, a
 * power of two  3. from `data_at`, a page, n_slots slots of slot_bytes.
 * Invariant: only the writer knows which slots are free; the slot released
 * last is filled next, so that few are ever touched while readers keep up.
 * Of what another rank can write, all is checked before it is used. */
#ifndef FERRY_COMM_TCP_STREAM_POOL_H
#define FERRY_COMM_TCP_STREAM_POOL_H

#include "comm/tcp.h"
#include "device/gate.h"

#define TCP__POOL_KEY     32
#define TCP__POOL_FORWARD FERRY__COMM_TCP_WORLD /* reader: the next host */
#define TCP__POOL_READERS (FERRY__COMM_TCP_WORLD + 1)

typedef struct tcp__pool_entry {
    uint32_t slot, size_bytes;
} tcp__pool_entry;

typedef struct tcp__pool_reader {
    ferry__gate released;                /* pieces, since the pool was made */
    _Alignas(64) _Atomic uint32_t ended; /* rounds */
} tcp__pool_reader;

typedef struct tcp__pool_head {
    uint32_t magic, version;
    uint32_t n_slots, slot_bytes, n_entries, zero;
    uint64_t data_at;
    char key[TCP__POOL_KEY]; /* as handed over through the group */
    _Atomic uint64_t peak_bytes;
    ferry__gate committed; /* pieces, since the pool was made */
    tcp__pool_reader readers[TCP__POOL_READERS]; /* by rank */
    tcp__pool_entry entries[];
} tcp__pool_head;

typedef struct tcp__pool {
    tcp__pool_head *head;
    char *data;
    size_t size_bytes;
    uint32_t n_slots, slot_bytes, n_entries; /* own: the head's may change */
    int fd;                                  /* of the writer; -1 */
    /* Of the writer. */
    int32_t readers[TCP__POOL_READERS];
    int32_t n_readers;
    tcp__pool_entry *made; /* own entries, which readers cannot write */
    uint32_t *free_slots;
    uint32_t n_free, n_touched;
    uint32_t n_most; /* slots; fewer than n_slots when memory ran out */
    uint32_t committed, freed; /* pieces */
    uint32_t slot;             /* at hand, if `held` */
    bool held;
    bool announced; /* the size of what is at hand may be read by others */
} tcp__pool;

/* Where a reader stands. */
typedef struct tcp__cursor {
    int32_t reader;
    uint32_t seq;
    size_t offset;
} tcp__cursor;

/* At most `bound_bytes` of slots, of at most 1 MiB each. */
ferry_status ferry__pool_create(tcp__pool *p, uint64_t bound_bytes,
                                const char *key);
/* Of a descriptor that was handed over; the caller closes it. */
ferry_status ferry__pool_map(tcp__pool *p, int fd, const char *key);
void ferry__pool_close(tcp__pool *p);

/* ---- the writer ---- */

/* Takes a slot in hand. FERRY_DONE: all are in use, for slice_ms so far.
 * FERRY_EPEER: a reader says that it released what it never got.
 * FERRY_ENOSPC: the machine has not even the memory of two slots; with two or
 * more the pool does with those it has. */
ferry_status ferry__pool_acquire(tcp__pool *p, int64_t slice_ms);
char *ferry__pool_slot(const tcp__pool *p);
/* Says of which size the piece in hand will be; no reader looks yet. */
void ferry__pool_announce(tcp__pool *p, size_t size_bytes);
void ferry__pool_commit(tcp__pool *p, size_t size_bytes);
/* Waits at most slice_ms until all readers have released all pieces. */
bool ferry__pool_drained(tcp__pool *p, int64_t slice_ms);
/* The reader that holds the others up, and a sum that grows when any moves. */
int32_t ferry__pool_slowest(const tcp__pool *p);
uint64_t ferry__pool_progress(const tcp__pool *p);
/* Whether that reader holds every slot. */
bool ferry__pool_is_full(const tcp__pool *p);

/* ---- readers ---- */

/* What is left of the piece at the cursor. FERRY_DONE: none for slice_ms. */
ferry_status ferry__pool_peek(tcp__pool *p, const tcp__cursor *at,
                              int64_t slice_ms, const char **out,
                              size_t *out_size);
/* The same without waiting, of a piece that was committed or announced. */
ferry_status ferry__pool_piece(const tcp__pool *p, const tcp__cursor *at,
                               const char **out, size_t *out_size);
void ferry__pool_release(tcp__pool *p, tcp__cursor *at, size_t size_bytes);

#endif
