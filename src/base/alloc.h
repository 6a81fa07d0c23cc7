/* SPDX-License-Identifier: Apache-2.0 */
/* Memory, checked sizes, and planted failures for tests.
 * Invariant: all heap memory of the library comes from here, zeroed. */
#ifndef FERRY_BASE_ALLOC_H
#define FERRY_BASE_ALLOC_H

#include <ferry/status.h>
#include <stdbool.h>

/* Zeroed memory, or NULL with a line recorded (ENOMEM). Size 0 gives 1 byte.
 * In builds with FERRY_POISON, ferry__alloc_raw fills with 0x7F. */
void *ferry__alloc(size_t size_bytes);
void *ferry__alloc_array(size_t count, size_t elem_bytes);
void *ferry__alloc_raw(size_t size_bytes); /* not zeroed */
/* Grows or shrinks; new bytes are not zeroed. NULL leaves the old block. */
void *ferry__realloc(void *old, size_t size_bytes);
void ferry__free(void *memory);
char *ferry__strdup(const char *text);
char *ferry__strndup(const char *text, size_t n);
/* Grows *items (element size `elem_bytes`) so that `count + 1` fit. Doubles;
 * *capacity is in elements. */
ferry_status ferry__grow(void *items_ptr, size_t *capacity, size_t count,
                         size_t elem_bytes);

/* Checked arithmetic: false on overflow, out is then untouched. */
bool ferry__mul(size_t a, size_t b, size_t *out);
bool ferry__add(size_t a, size_t b, size_t *out);
bool ferry__mul64(int64_t a, int64_t b, int64_t *out);

/* Anonymous private memory, page aligned, zero pages; NULL with a line. */
void *ferry__map_anonymous(size_t size_bytes);
void ferry__unmap(void *memory, size_t size_bytes);

/* Planted failures: the n-th (from 1) next operation of `kind` fails once.
 * 0 disarms. ferry__fault_hit is asked by the operation itself. */
typedef enum ferry__fault {
    FERRY__FAULT_ALLOC,
    FERRY__FAULT_MMAP,
    FERRY__FAULT_THREAD,
    FERRY__FAULT_UCX_DROP, /* what is under way in UCX does not end in time */
    FERRY__FAULT_RESERVE,  /* pages of shared memory */
    FERRY__FAULT_COUNT
} ferry__fault;
void ferry__fault_arm(ferry__fault kind, uint64_t n);
bool ferry__fault_hit(ferry__fault kind);

#endif
