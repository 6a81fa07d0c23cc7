/* SPDX-License-Identifier: Apache-2.0 */
/* What the two halves of the `memory` engine agree on: a trainer and a worker
 * of one process, which hand each other addresses. It is written as a user
 * would write an engine out of the tree: public headers, no symbol of
 * libferry. Its knobs plant the faults that the contract suite needs. */
#ifndef FERRY_TESTS_MODULES_MEMORY_WIRE_H
#define FERRY_TESTS_MODULES_MEMORY_WIRE_H

#include <ferry/backend.h>

/* Init info of the worker: how bytes are handed over, and planted faults. */
typedef struct memory_worker_init {
    const char *mode;    /* "load", "range", "box", "strided" */
    int64_t range_elems; /* of one range; a multiple of 32 */
    uint8_t digest;
    int32_t fail_at;  /* declared index at which receive fails */
    int32_t skip_at;  /* declared index that is never loaded */
    int32_t sleep_ms; /* before each parameter, in checked slices */
    int64_t deadline_ms, no_progress_ms;
} memory_worker_init;

#define MEMORY_INIT_FIELDS(type)                                               \
    {"mode", FERRY_FIELD_STR, 0, offsetof(type, mode), "\"load\"", 0, 0},      \
        {"range_elems",                                                        \
         FERRY_FIELD_I64,                                                      \
         0,                                                                    \
         offsetof(type, range_elems),                                          \
         "32",                                                                 \
         32,                                                                   \
         1 << 20},                                                             \
        {"digest", FERRY_FIELD_BOOL, 0, offsetof(type, digest), "true", 0, 0}, \
        {"fail_at", FERRY_FIELD_I32, 0, offsetof(type, fail_at), "-1", 0, 0},  \
        {"skip_at", FERRY_FIELD_I32, 0, offsetof(type, skip_at), "-1", 0, 0},  \
    {                                                                          \
        "sleep_ms", FERRY_FIELD_I32, 0, offsetof(type, sleep_ms), "0", 0, 0    \
    }

typedef struct memory_update {
    ferry_strs names, dtype_names;
    ferry_shapes shapes;
    ferry_i64s addresses; /* of contiguous bytes */
    ferry_i64s clean;     /* the same, never corrupted: digests are of these */
} memory_update;

#endif
