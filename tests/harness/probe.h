/* SPDX-License-Identifier: Apache-2.0 */
/* A worker engine that a test bends: registered directly as `probe`, with
 * hooks that run inside its methods and a count of each call. */
#ifndef FERRY_TESTS_HARNESS_PROBE_H
#define FERRY_TESTS_HARNESS_PROBE_H

#include <ferry/backend.h>

typedef ferry_status (*probe_fn)(const ferry_worker_host *host,
                                 ferry_worker_context *ctx, void *arg);

typedef struct probe {
    const ferry_worker_host *host;
    ferry_worker_context *ctx;
    probe_fn on_init, on_start, on_receive, on_finish, on_drain;
    void *arg;
    int n_init, n_start, n_receive, n_finish, n_abort, n_drain, n_shutdown,
        n_destroy;
} probe;

/* The one probe; the engine's methods look here. */
extern probe the_probe;
/* Clears it and registers, once, `probe` (synchronous), `probe_deferred`,
 * `probe_kernel`, `probe_no_draft`, and `probe_either`, whose update info has
 * the field is_checkpoint_format. */
void probe_reset(void);

#endif
