/* SPDX-License-Identifier: Apache-2.0 */
/* Host memory that other processes of this host can map: sealed memfds, and
 * the register of arenas that ferry_shared_alloc gave out.
 * Invariant: nothing has a name in a file system, so nothing is left behind
 * whatever dies. */
#ifndef FERRY_DEVICE_SHARED_H
#define FERRY_DEVICE_SHARED_H

#include <ferry/tensor.h>

/* memfd of exactly size_bytes (page rounded), pages reserved (FERRY_ENOSPC),
 * F_SEAL_SHRINK | F_SEAL_GROW set, mapped read-write. */
ferry_status ferry__shared_create(const char *label, size_t size_bytes,
                                  int *out_fd, void **out_memory);
/* The same without pages: they come as ferry__shared_reserve asks for those
 * of a range, which must be before it is written (FERRY_ENOSPC). */
ferry_status ferry__shared_create_sparse(const char *label, size_t size_bytes,
                                         int *out_fd, void **out_memory);
ferry_status ferry__shared_reserve(int fd, size_t offset, size_t size_bytes);
/* Maps a received descriptor. Refuses one that is not a memfd sealed against
 * shrinking or is smaller than size_bytes (a peer could truncate it and
 * raise SIGBUS): FERRY_EPEER. */
ferry_status ferry__shared_map(int fd, size_t size_bytes, int writable,
                               void **out_memory);
void ferry__shared_unmap(void *memory, size_t size_bytes);

/* One arena of ferry_shared_alloc. `fd` is borrowed. */
typedef struct ferry__arena {
    uint64_t id; /* unique in the process, never reused */
    int fd;
    char *memory;
    size_t size_bytes;
} ferry__arena;
/* The arena that holds all of [memory, memory + size_bytes); false if none.
 * O(log arenas). */
bool ferry__arena_find(const void *memory, size_t size_bytes,
                       ferry__arena *out);

#endif
