/* SPDX-License-Identifier: Apache-2.0 */
/* Memory, checked sizes, and planted failures for tests.
 * Invariant: a failed allocation records one line and changes nothing. */
#include "base/alloc.h"

#include <ferry/worker.h>

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#ifdef FERRY_POISON
#define POISON_BYTE 0x7F
#endif

static _Atomic uint64_t countdown[FERRY__FAULT_COUNT];

void ferry__fault_arm(ferry__fault kind, uint64_t n)
{
    atomic_store(&countdown[kind], n);
}

bool ferry__fault_hit(ferry__fault kind)
{
    uint64_t n = atomic_load_explicit(&countdown[kind], memory_order_relaxed);

    while (n != 0) {
        if (atomic_compare_exchange_weak(&countdown[kind], &n, n - 1))
            return n == 1;
    }
    return false;
}

static void *out_of_memory(size_t size_bytes)
{
    ferry_fail(FERRY_ENOMEM, "out of memory: %zu bytes", size_bytes);
    return NULL;
}

void *ferry__alloc(size_t size_bytes)
{
    void *p = NULL;

    if (!ferry__fault_hit(FERRY__FAULT_ALLOC))
        p = calloc(1, size_bytes ? size_bytes : 1);
    return p ? p : out_of_memory(size_bytes);
}

void *ferry__alloc_array(size_t count, size_t elem_bytes)
{
    size_t size_bytes;

    if (!ferry__mul(count, elem_bytes, &size_bytes)) {
        ferry_fail(FERRY_EOVERFLOW, "array of %zu elements of %zu bytes", count,
                   elem_bytes);
        return NULL;
    }
    return ferry__alloc(size_bytes);
}

void *ferry__alloc_raw(size_t size_bytes)
{
    void *p = NULL;

    if (!ferry__fault_hit(FERRY__FAULT_ALLOC))
        p = malloc(size_bytes ? size_bytes : 1);
    if (!p)
        return out_of_memory(size_bytes);
#ifdef FERRY_POISON
    memset(p, POISON_BYTE, size_bytes);
#endif
    return p;
}

void *ferry__realloc(void *old, size_t size_bytes)
{
    void *p = NULL;

    if (!ferry__fault_hit(FERRY__FAULT_ALLOC))
        p = realloc(old, size_bytes ? size_bytes : 1);
    return p ? p : out_of_memory(size_bytes);
}

void ferry__free(void *memory)
{
    free(memory);
}

void ferry_free(void *memory)
{
    free(memory);
}

char *ferry__strdup(const char *text)
{
    return ferry__strndup(text, strlen(text));
}

char *ferry__strndup(const char *text, size_t n)
{
    size_t length = strnlen(text, n);
    char *copy = ferry__alloc_raw(length + 1);

    if (!copy)
        return NULL;
    memcpy(copy, text, length);
    copy[length] = '\0';
    return copy;
}

ferry_status ferry__grow(void *items_ptr, size_t *capacity, size_t count,
                         size_t elem_bytes)
{
    size_t wanted, size_bytes;
    void *items;

    if (count < *capacity)
        return FERRY_OK;
    if (!ferry__mul(*capacity, 2, &wanted) || wanted <= count) {
        if (!ferry__add(count, 1, &wanted))
            return ferry_fail(FERRY_EOVERFLOW, "array of %zu elements", count);
    }
    if (wanted < 8)
        wanted = 8;
    if (!ferry__mul(wanted, elem_bytes, &size_bytes))
        return ferry_fail(FERRY_EOVERFLOW, "array of %zu elements of %zu bytes",
                          wanted, elem_bytes);
    /* The caller's pointer is of some other pointer type; copying its bytes
     * is the one way to read and write it that is defined. */
    memcpy(&items, items_ptr, sizeof(items));
    items = ferry__realloc(items, size_bytes);
    if (!items)
        return FERRY_ENOMEM;
    memcpy(items_ptr, &items, sizeof(items));
    *capacity = wanted;
    return FERRY_OK;
}

bool ferry__mul(size_t a, size_t b, size_t *out)
{
    size_t r;

    if (__builtin_mul_overflow(a, b, &r))
        return false;
    *out = r;
    return true;
}

bool ferry__add(size_t a, size_t b, size_t *out)
{
    size_t r;

    if (__builtin_add_overflow(a, b, &r))
        return false;
    *out = r;
    return true;
}

bool ferry__mul64(int64_t a, int64_t b, int64_t *out)
{
    int64_t r;

    if (__builtin_mul_overflow(a, b, &r))
        return false;
    *out = r;
    return true;
}

void *ferry__map_anonymous(size_t size_bytes)
{
    void *p = MAP_FAILED;

    if (!ferry__fault_hit(FERRY__FAULT_MMAP))
        p = mmap(NULL, size_bytes, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        return out_of_memory(size_bytes);
    return p;
}

void ferry__unmap(void *memory, size_t size_bytes)
{
    if (memory)
        munmap(memory, size_bytes);
}
