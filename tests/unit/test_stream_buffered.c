/* SPDX-License-Identifier: Apache-2.0 */
/* ctest: timeout=600
 * Streams of whole buffers, over every provider that is always there. */
#include "harness/stream_cases.h"

int main(void)
{
    static const stream_maker local = {.name = "buffered over local",
                                       .group = &stream_group_local,
                                       .open = ferry__stream_buffered,
                                       .path = "local",
                                       .death_ms = 3000,
                                       .names_the_first = true};
    static const stream_maker tcp = {.name = "buffered over tcp",
                                     .group = &stream_group_one_host,
                                     .open = ferry__stream_buffered,
                                     .path = "tcp",
                                     .death_ms = 3000};
    int failed = stream_cases_run(&local);

    return failed + stream_cases_run(&tcp);
}
