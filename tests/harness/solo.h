/* SPDX-License-Identifier: Apache-2.0 */
/* One worker over a toy, driven call by call, with the probe as its engine.
 * Its hooks load what was declared from a checkpoint. */
#ifndef FERRY_TESTS_HARNESS_SOLO_H
#define FERRY_TESTS_HARNESS_SOLO_H

#include "harness/probe.h"
#include "harness/toy.h"

typedef struct solo {
    toy *toy;
    toy_checkpoint *checkpoint;
    ferry_worker *worker;
} solo;

/* probe_reset, then a worker with these options over a toy of this kind. The
 * probe's arg becomes the checkpoint, its receive solo_load_all. */
void solo_open(solo *r, const ferry_worker_options *options,
               const toy_options *toy_opts);
/* The same over a toy of this kind, its engine initialised. */
void solo_open_kind(solo *r, const char *backend, toy_kind kind,
                    ferry_commit commit);
void solo_close(solo *r);
/* Hook: loads every declared parameter whole. */
ferry_status solo_load_all(const ferry_worker_host *host,
                           ferry_worker_context *ctx, void *checkpoint);
/* One declared parameter. */
ferry_status solo_load_one(const ferry_worker_host *host,
                           ferry_worker_context *ctx, toy_checkpoint *c,
                           size_t index);
/* The update info of names [first, first + count). Static memory. */
const char *solo_update(const solo *r, size_t first, size_t count);
/* The same of one name. */
const char *solo_update_of(const solo *r, const char *name);
/* fill(seed), start, one update of everything, finish. */
ferry_status solo_round(solo *r, uint32_t seed, const char *version);
/* Lines logged at warn or above since the last call. */
int solo_warnings(void);
const char *solo_last_warning(void);

#endif
