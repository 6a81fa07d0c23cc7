/* SPDX-License-Identifier: Apache-2.0 */
/* A counter in memory that forked ranks share with the test. */
#include "harness/together.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

static atomic_int *ended;

void together_begin(void)
{
    if (!ended) {
        void *memory = mmap(NULL, sizeof(*ended), PROT_READ | PROT_WRITE,
                            MAP_SHARED | MAP_ANONYMOUS, -1, 0);

        if (memory == MAP_FAILED)
            abort();
        ended = memory;
    }
    atomic_store(ended, 0);
}

void together_await(int n)
{
    while (atomic_load(ended) < n)
        usleep(1000);
}

void together_end(int n)
{
    atomic_fetch_add(ended, 1);
    together_await(n);
}
