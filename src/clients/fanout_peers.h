/* SPDX-License-Identifier: Apache-2.0 */
/* What a fan-out knows of its members: which of them are Ferry, how many
 * workers each has, and so the rank at which each one's workers begin. */
#ifndef FERRY_CLIENTS_FANOUT_PEERS_H
#define FERRY_CLIENTS_FANOUT_PEERS_H

#include "clients/fanout_call.h"

/* {"replicas": [status of each, in order]}. Where some are Ferry and some are
 * not, null stands for the others, and "ferry" and "not_ferry" list names. */
ferry_status ferry__fanout_status(void *self, char *buffer, size_t size_bytes);
/* The workers of all members together; all of them have world_size. */
ferry_status ferry__fanout_world_size(void *self, int32_t *out_workers);
/* Init on all, each with the rank_offset at which its own workers begin. */
ferry_status ferry__fanout_init(void *self, const char *init_info);

#endif
