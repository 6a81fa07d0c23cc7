/* SPDX-License-Identifier: Apache-2.0 */
/* ctest: timeout=300
 * The tcp group's own streams: on one host, between hosts, and mixed. */
#include "harness/stream_cases.h"

int main(void)
{
    static const stream_maker makers[] = {
        {.name = "tcp's own, one host",
         .group = &stream_group_one_host,
         .open = ferry__stream_open,
         .path = "shared",
         .death_ms = 200},
        {.name = "tcp's own, hosts of one rank",
         .group = &stream_group_own_hosts,
         .open = ferry__stream_open,
         .path = "tcp",
         .death_ms = 400},
        {.name = "tcp's own, hosts of two ranks",
         .group = &stream_group_mixed_hosts,
         .open = ferry__stream_open,
         .path = "tcp+shared",
         .world_min = 3,
         .death_ms = 400},
    };
    int failed = 0;

    for (size_t i = 0; i < sizeof(makers) / sizeof(makers[0]); i++)
        failed += stream_cases_run(&makers[i]);
    return failed;
}
