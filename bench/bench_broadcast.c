/* SPDX-License-Identifier: Apache-2.0 */
/* One party of `scripts/bench broadcast`; bench_broadcast.py starts them all
 * and lets them take turns.
 *   bench_broadcast WAY --set FILE --source FILE --workers N
 *                   [--hosts NS,…] [--addresses A,…] [--pace MS]
 *   bench_broadcast empty URL…
 * WAY: ferry, ferry_plain, ferry_ipc, ring, memcpy, stream. */
#include "bench/broadcast.h"

int main(int argc, char **argv)
{
    static const struct {
        const char *way;
        int (*run)(party *p);
    } ways[] = {
        {"ferry", bench_broadcast_ferry},
        {"ferry_plain", bench_broadcast_ferry},
        {"ferry_ipc", bench_broadcast_ferry},
        {"ring", bench_broadcast_ring},
        {"memcpy", bench_broadcast_memcpy},
        {"stream", bench_broadcast_stream},
    };
    party p;

    signal(SIGPIPE, SIG_IGN);
    if (argc > 2 && strcmp(argv[1], "empty") == 0)
        return bench_broadcast_empty((const char *const *)argv + 2, argc - 2);
    party_arguments(&p, argc, argv);
    for (size_t i = 0; i < sizeof(ways) / sizeof(ways[0]); i++) {
        if (strcmp(p.way, ways[i].way) == 0)
            return ways[i].run(&p);
    }
    party_die("unknown way %s", p.way);
}
