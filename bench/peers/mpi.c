/* SPDX-License-Identifier: Apache-2.0 */
/* A party of `bench broadcast`: MPI_Ibcast of every tensor, all at once, for
 * OpenMPI and for MPICH. Started by the MPI's own mpirun; rank 0 is the root.
 * Invariant: ranks yield while they wait, and sleep on a link between rounds,
 * where MPI would spin. */
#define _GNU_SOURCE
#include <mpi.h>

#include "party.h"

static MPI_Request *requests;
static MPI_Status *statuses;

static void broadcast(party *p, void *arg)
{
    char *bytes = p->rank == 0 ? p->source : p->own;
    int done = 0;

    (void)arg;
    for (size_t i = 0; i < p->n_tensors; i++) {
        const party_tensor *t = &p->tensors[i];

        if (MPI_Ibcast(bytes + t->at, (int)t->size, MPI_BYTE, 0, MPI_COMM_WORLD,
                       &requests[i]) != MPI_SUCCESS)
            party_die("MPI_Ibcast of %s", t->name);
    }
    for (int spins = 0; !done; spins++) {
        MPI_Testall((int)p->n_tensors, requests, &done, statuses);
        if (!done && spins % 16 == 15)
            sched_yield();
    }
}

int main(int argc, char **argv)
{
    int size = 0;
    party p;

    MPI_Init(&argc, &argv);
    party_arguments(&p, argc, argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &p.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    if (size != p.n_workers + 1)
        party_die("%d ranks for %d workers", size, p.n_workers);
    requests = malloc(p.n_tensors * sizeof(MPI_Request));
    statuses = malloc(p.n_tensors * sizeof(MPI_Status));
    if (p.rank == 0)
        party_open_source(&p);
    else
        party_open_own(&p);
    party_meet(&p);
    if (p.rank > 0)
        party_work(&p, broadcast, NULL);
    else
        party_lead(&p, broadcast, NULL);
    MPI_Finalize();
    return 0;
}
