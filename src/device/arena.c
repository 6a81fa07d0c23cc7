/* SPDX-License-Identifier: Apache-2.0 */
/* The register of arenas: which addresses of this process other processes
 * can be handed. Invariant: the list is sorted by address, its ranges are
 * disjoint, and an id is never given out twice. */
#include "base/log.h"
#include "device/shared.h"

#include "base/alloc.h"

#include <pthread.h>
#include <string.h>
#include <unistd.h>

static pthread_mutex_t arenas_lock = PTHREAD_MUTEX_INITIALIZER;
static ferry__arena *arenas;
static size_t n_arenas, arenas_capacity;
static uint64_t last_id;

/* Index of the first arena that starts above `memory`. */
static size_t first_above(const char *memory)
{
    size_t low = 0, high = n_arenas;

    while (low < high) {
        size_t mid = low + (high - low) / 2;

        if ((uintptr_t)arenas[mid].memory > (uintptr_t)memory)
            high = mid;
        else
            low = mid + 1;
    }
    return low;
}

static ferry_status insert(const ferry__arena *arena)
{
    ferry_status status;
    size_t at;

    pthread_mutex_lock(&arenas_lock);
    status = ferry__grow(&arenas, &arenas_capacity, n_arenas, sizeof(*arenas));
    if (status == FERRY_OK) {
        at = first_above(arena->memory);
        memmove(arenas + at + 1, arenas + at,
                (n_arenas - at) * sizeof(*arenas));
        arenas[at] = *arena;
        arenas[at].id = ++last_id;
        n_arenas++;
    }
    pthread_mutex_unlock(&arenas_lock);
    return status;
}

/* Takes the arena that starts at `memory` out of the list. */
static bool take_out(const void *memory, ferry__arena *out)
{
    bool found = false;
    size_t at;

    pthread_mutex_lock(&arenas_lock);
    at = first_above(memory);
    if (at > 0 && arenas[at - 1].memory == memory) {
        *out = arenas[at - 1];
        n_arenas--;
        memmove(arenas + at - 1, arenas + at,
                (n_arenas - (at - 1)) * sizeof(*arenas));
        found = true;
    }
    if (n_arenas == 0) {
        ferry__free(arenas);
        arenas = NULL;
        arenas_capacity = 0;
    }
    pthread_mutex_unlock(&arenas_lock);
    return found;
}

bool ferry__arena_find(const void *memory, size_t size_bytes, ferry__arena *out)
{
    const char *first = memory;
    bool found = false;
    size_t at;

    pthread_mutex_lock(&arenas_lock);
    at = first_above(first);
    if (at > 0) {
        const ferry__arena *arena = &arenas[at - 1];
        size_t offset = (size_t)((uintptr_t)first - (uintptr_t)arena->memory);

        if (offset <= arena->size_bytes &&
            size_bytes <= arena->size_bytes - offset) {
            *out = *arena;
            found = true;
        }
    }
    pthread_mutex_unlock(&arenas_lock);
    return found;
}

ferry_status ferry_shared_alloc(size_t size_bytes, void **out_memory)
{
    FERRY__NEED(out_memory);
    ferry__arena arena = {0};
    ferry_status status;
    void *memory;

    FERRY_TRY(
        ferry__shared_create("ferry-arena", size_bytes, &arena.fd, &memory));
    arena.memory = memory;
    arena.size_bytes = size_bytes ? size_bytes : 1;
    status = insert(&arena);
    if (status < 0) {
        ferry__shared_unmap(memory, arena.size_bytes);
        close(arena.fd);
        return status;
    }
    *out_memory = memory;
    return FERRY_OK;
}

void ferry_shared_free(void *memory)
{
    ferry__arena arena;

    if (!memory || !take_out(memory, &arena))
        return;
    ferry__shared_unmap(arena.memory, arena.size_bytes);
    close(arena.fd);
}
