/* SPDX-License-Identifier: Apache-2.0 */
/* One rank process: a model shard, its worker, and two loops.
 * The control thread takes weight calls; the main thread takes steps and
 * aborts. Invariant: a commit and a step never overlap, since the API process
 * holds its replica's gate for both. */
#ifndef FERRY_SERVE_RANK_H
#define FERRY_SERVE_RANK_H

#include "model/model_config.h"
#include "serve/serve_options.h"

typedef struct ferry__rank_start {
    const ferry__serve_options *options;
    const ferry__model_config *config;
    int32_t dp_rank, tp_rank;
    int comm_fd; /* local group of the replica; -1 when tp_size is 1 */
    int control_fd, step_fd;
    bool unsynced; /* a respawned rank whose version is gone: not ready
                        until a full round, whatever it loads */
} ferry__rank_start;

/* Runs until the API process closes the sockets. Sends one reply on the
 * control socket when loaded (or why not). Returns the exit status. */
int ferry__rank_main(const ferry__rank_start *start);

#endif
