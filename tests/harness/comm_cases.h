/* SPDX-License-Identifier: Apache-2.0 */
/* The contract of the comm table as cases that any provider can be put to.
 * Invariant: a case knows a group only through its maker. */
#ifndef FERRY_TESTS_COMM_CASES_H
#define FERRY_TESTS_COMM_CASES_H

#include "comm/comm.h"

#include <stdbool.h>

#define COMM_WORLD_MAX 4

/* What is made before ranks are forked and holds in all of them. */
typedef struct comm_group {
    int32_t world_size;
    int fds[COMM_WORLD_MAX];
    int32_t ports[COMM_WORLD_MAX];
} comm_group;

typedef struct comm_maker {
    const char *name;
    ferry_status (*make)(comm_group *g, int32_t world_size, size_t slot_bytes);
    ferry_status (*open)(comm_group *g, int32_t rank, ferry__comm **out);
    bool moves_only; /* the cases that move bytes, not the failures */
    bool no_pull;    /* the provider has no one-sided reads */
    void (*drop)(comm_group *g); /* in the process that made it */
} comm_maker;

/* cmocka's answer: the number of failed cases. */
int comm_cases_run(const comm_maker *maker);

#endif
