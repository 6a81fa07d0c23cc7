/* SPDX-License-Identifier: Apache-2.0 */
/* A trainer and its workers in one process: what the contract suite and the
 * tests of the spine drive. Aborts the test when something cannot be made. */
#ifndef FERRY_TESTS_HARNESS_FLEET_H
#define FERRY_TESTS_HARNESS_FLEET_H

#include "harness/toy.h"
#include <ferry/ferry.h>

#define FLEET_MAX 4

typedef struct fleet_options {
    const char *backend;
    const char *worker_backend; /* NULL: the same */
    toy_options toy;            /* tp_size ranks are made */
    ferry_commit commit;
    int require_full, has_weights;
    uint64_t held_limit_bytes;
    int32_t defer_threads;
    const char *init; /* more init info fields: "\"mode\":\"box\"" */
} fleet_options;

typedef struct fleet {
    fleet_options options;
    size_t n;
    toy *toys[FLEET_MAX];
    ferry_worker *workers[FLEET_MAX];
    toy_checkpoint *checkpoint;
    ferry_client client;
    ferry_source source;
    ferry_trainer *trainer;
} fleet;

/* Registers `memory` lazily, on both sides, once. */
void fleet_register(void);
/* Provider `nccl` runs on Ferry's own library over host memory. */
void fleet_host_nccl(void);
/* Whether both halves of a backend can be loaded; else why not. */
const char *fleet_unavailable(const char *backend);
void fleet_open(fleet *f, const fleet_options *options);
/* The trainer, over `source` (NULL: the whole checkpoint). */
ferry_status fleet_connect(fleet *f, const ferry_source *source);
ferry_status fleet_send(fleet *f, uint32_t seed, const char *version);
/* NULL when every rank stores fill(seed). */
const char *fleet_differs(fleet *f, uint32_t seed);
void fleet_close(fleet *f);
/* One key of a worker's status as JSON text. Static memory. */
const char *fleet_status(ferry_worker *w, const char *key);
int fleet_open_fds(void);

#endif
