/* SPDX-License-Identifier: Apache-2.0 */
/* The contract of streams as cases that any kind over any provider can be
 * put to. Invariant: a case knows a stream only through its maker. */
#ifndef FERRY_TESTS_STREAM_CASES_H
#define FERRY_TESTS_STREAM_CASES_H

#include "comm/stream.h"
#include "harness/comm_cases.h"

typedef struct stream_maker {
    const char *name;
    const comm_maker *group;
    ferry_status (*open)(ferry__comm *c, const ferry__stream_options *options,
                         ferry__stream **out);
    const char *path;     /* what the stream must say; NULL: anything */
    int32_t world_min;    /* the smallest group it is for; 0: 1 */
    int32_t fails_in;     /* groups of this size alone are broken; 0: all */
    int64_t death_ms;     /* within which all have named a killed rank */
    bool names_the_first; /* … or one that failed for its sake */
} stream_maker;

/* cmocka's answer: the number of failed cases. */
int stream_cases_run(const stream_maker *maker);

/* Groups for the makers above: processes of one segment, and sockets on
 * loopback whose ranks are on hosts by the bits or digits of a number. */
extern const comm_maker stream_group_local;
extern const comm_maker stream_group_one_host;
extern const comm_maker stream_group_own_hosts;   /* one rank each */
extern const comm_maker stream_group_mixed_hosts; /* 0 1 | 2 3, or fewer */

#endif
