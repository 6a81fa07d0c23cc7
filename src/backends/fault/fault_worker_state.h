/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of the worker's wrapper share.
 * Invariant: the inner engine is handed this struct as its context and a
 * host table of its own; everything that no rule touches is passed on. */
#ifndef FERRY_BACKENDS_FAULT_WORKER_STATE_H
#define FERRY_BACKENDS_FAULT_WORKER_STATE_H

#include "backends/fault/fault_wire.h"

typedef struct fault__worker {
    const ferry_worker_engine_ops *inner;
    void *self;
    const ferry_worker_host *host; /* the real one */
    ferry_worker_context *ctx;
    fault__ground ground;
    fault__plan plan; /* without rules when this rank is not meant */
    uint64_t round;
    uint64_t bytes;   /* handed over in this round */
    uint64_t digests; /* stated in this round */
    bool cut;         /* the rest of parameter cut_index does not come */
    size_t cut_index;
    unsigned char *kernel; /* storage that the engine writes in place */
    size_t kernel_bytes;
} fault__worker;

const ferry_worker_host *fault__worker_host(void);

#endif
