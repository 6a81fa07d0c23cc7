/* SPDX-License-Identifier: Apache-2.0 */
/* Trainer ranks as threads of the test, whose gathers are collectives: none
 * gets on before all have come to the same parameter. */
#ifndef FERRY_TESTS_TRAINER_RANKS_H
#define FERRY_TESTS_TRAINER_RANKS_H

#include "harness/ipc_rig.h"

#define TRAINER_RANKS_MAX 8

typedef struct trainer_ranks {
    int32_t n;
    const ferry_client *client;
    const ferry_nccl_trainer_init_info *info; /* of rank 0 */
    const rig_param *params;
    size_t count;
    uint64_t turns; /* rounds: seed 1, 2, … */
    bool ragged;    /* the last rank holds nothing of the first half */
} trainer_ranks;

/* All rounds on all ranks. "" or what the first rank that failed says. Ends
 * the process when ten seconds pass without a gather. Static memory. */
const char *trainer_ranks_run(const trainer_ranks *what);

#endif
