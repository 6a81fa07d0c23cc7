/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of the worker's half share.
 * Invariant: all of it belongs to the thread of the call that the engine is
 * in, but for the group while it is watched, which `lock` guards; buffers
 * arrive on the stream's own thread, which sees none of it. */
#ifndef FERRY_BACKENDS_NCCL_WORKER_STATE_H
#define FERRY_BACKENDS_NCCL_WORKER_STATE_H

#include "backends/nccl/nccl_wire.h"

#include <pthread.h>

/* A list of boxes that the trainer has. */
typedef struct nccl__known {
    uint64_t digest;
    size_t size_bytes;
} nccl__known;

typedef struct nccl__worker {
    const ferry_worker_host *host;
    ferry_worker_context *ctx;

    /* the wire, by the init info alone (E3) */
    bool packed;
    uint64_t buffer_bytes;
    int32_t n_buffers;
    int64_t no_progress_ms;

    /* the group */
    ferry__nccl_group group; /* comm NULL: none, or it broke */
    ferry__nccl_stage stage;
    bool inited;
    bool extras; /* a Ferry trainer: header, boxes, digests */
    bool digest;
    uint64_t round;
    nccl__known *lists;
    size_t n_lists, lists_capacity, list_bytes;
    uint64_t counted_bytes; /* of buffers, told to the host */

    /* the watcher: ends the group when its trainer goes between rounds */
    pthread_mutex_t lock;
    pthread_t watcher;
    bool watching;
    int stop_fd;   /* -1: none */
    bool deserted; /* it did so; under the lock */
} nccl__worker;

/* ---- nccl_worker_session.c ---- */

/* Asks the host; `arg` is the worker. The check of the group. */
ferry_status nccl__worker_check(void *arg, const char *what);
ferry_status nccl__worker_join(nccl__worker *w,
                               const ferry__nccl_init_info *info);
/* Never waits for another rank. status < 0: the others are told the last
 * error, which stays. */
void nccl__worker_leave(nccl__worker *w, ferry_status status);
/* Tells the host that the buffers which it was told of are gone. */
void nccl__worker_uncount(nccl__worker *w);

/* ---- nccl_worker_watch.c ---- */

/* Watches the trainer of the group at hand where the provider can. */
ferry_status nccl__worker_watch(nccl__worker *w);
/* Ends the watcher, if there is one; without the lock. */
void nccl__worker_unwatch(nccl__worker *w);

/* ---- nccl_worker_proofs.c ---- */

/* Waits for the header of a round and holds it against what the control
 * plane said. Nothing is written before this. */
ferry_status nccl__worker_take_header(nccl__worker *w,
                                      const ferry_param_meta *params,
                                      size_t count, const ferry__cuts *cuts);
/* Tells the trainer which boxes to hash; *out_boxes: how many. */
ferry_status nccl__worker_send_boxes(nccl__worker *w, size_t n_params,
                                     size_t *out_boxes);
/* Takes the digests of those boxes. */
ferry_status nccl__worker_take_digests(nccl__worker *w, size_t n_params,
                                       size_t n_boxes);

/* ---- nccl_worker_receive.c ---- */
ferry_status nccl__worker_receive(void *self, const void *update_info);

#endif
