/* SPDX-License-Identifier: Apache-2.0 */
/* The small process that forks ranks, so that the API process, which has
 * threads, never forks. Invariant: when the API process dies the spawner ends
 * every rank and itself; a rank also dies with the spawner. */
#ifndef FERRY_SERVE_SPAWNER_H
#define FERRY_SERVE_SPAWNER_H

#include "model/model_config.h"
#include "serve/serve_options.h"

#define FERRY__TP_MAX 16

typedef struct ferry__spawner {
    int fd; /* socket to the spawner; -1 when not started */
    int32_t pid;
} ferry__spawner;

/* The sockets and pids of one replica's ranks. */
typedef struct ferry__rank_ends {
    int control_fds[FERRY__TP_MAX];
    int step_fds[FERRY__TP_MAX];
    int32_t pids[FERRY__TP_MAX];
} ferry__rank_ends;

/* Forks the spawner; call before any thread exists. */
ferry_status ferry__spawner_start(const ferry__serve_options *options,
                                  const ferry__model_config *config,
                                  ferry__spawner *out);
/* Kills what is left of replica `dp_rank`, forks its ranks anew. One thread
 * at a time. */
ferry_status ferry__spawner_spawn(ferry__spawner *spawner, int32_t dp_rank,
                                  bool unsynced, int32_t tp_size,
                                  ferry__rank_ends *out);
/* Ends the spawner and with it all ranks; waits for it, at most 10 s. */
void ferry__spawner_stop(ferry__spawner *spawner);

#endif
