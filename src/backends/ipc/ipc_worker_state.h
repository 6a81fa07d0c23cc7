/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of the worker's half share.
 * Invariant: everything here is guarded by `lock` while the watcher lives;
 * a call holds it from beginning to end. */
#ifndef FERRY_BACKENDS_IPC_WORKER_STATE_H
#define FERRY_BACKENDS_IPC_WORKER_STATE_H

#include "backends/ipc/ipc_wire.h"
#include <pthread.h>

#define IPC__SLICE_MS 50

/* Trainer memory, mapped read-only. */
typedef struct ipc__mapped {
    uint64_t id;
    char *memory;
    size_t size_bytes;
} ipc__mapped;

typedef struct ipc__worker {
    const ferry_worker_host *host;
    ferry_worker_context *ctx;
    pthread_mutex_t lock;

    bool hashing;         /* init info: what is loaded is hashed */
    bool digest;          /* the trainer sends digests to compare with */
    ferry__ipc_link link; /* fd -1: no Ferry trainer */
    int32_t trainer_pid;
    ferry__ipc_ring *ring;
    size_t ring_bytes, counted_bytes; /* mapped; told to the host */
    uint32_t n_slots;
    uint64_t slot_bytes;
    ferry__ipc_reader *reader;
    ipc__mapped *mapped;
    size_t n_mapped, mapped_capacity;
    uint64_t *lists; /* digests of the box lists that the trainer has */
    size_t n_lists, lists_capacity;
    uint64_t last_update;

    /* the watcher: unmaps when the trainer goes away between rounds */
    pthread_t watcher;
    bool watching;
    int stop_fd; /* eventfd */

    /* the update at hand */
    uint64_t update;
    bool announced;
    ferry__ipc_update announcement;
    ferry__ipc_ranges ranges;
    ferry__ipc_digests digests;
    bool have_digests;
    uint64_t bytes;
    uint32_t slot; /* number of the slot to be read next */
} ipc__worker;

/* ---- ipc_worker_session.c ---- */
ferry_status ipc__worker_join(ipc__worker *w, const ferry__ipc_init_info *info);
/* Closes the socket and unmaps everything. */
void ipc__worker_leave(ipc__worker *w);
void ipc__worker_unwatch(ipc__worker *w);

/* ---- ipc_worker_frames.c ---- */
ferry__waiter ipc__worker_waiter(ipc__worker *w, const char *what);
/* Takes one frame if there is one within timeout_ms; a trainer that is gone
 * or has given up is an error that says so. Asks the host too. */
ferry_status ipc__worker_look(ipc__worker *w, const char *what,
                              int64_t timeout_ms);
ferry_status ipc__worker_send(ipc__worker *w, ferry__str *s, const char *what);
ipc__mapped *ipc__worker_segment(ipc__worker *w, uint64_t id);
void ipc__worker_unmap_all(ipc__worker *w);

/* ---- ipc_worker_receive.c ---- */
ferry_status ipc__worker_receive(void *self, const void *update_info);

#endif
