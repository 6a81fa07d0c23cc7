/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of the trainer's half share.
 * Invariant: only the thread that called the engine touches any of this; the
 * control call runs on the host's helper thread, the buffers on the stream's,
 * and neither sees it. */
#ifndef FERRY_BACKENDS_NCCL_TRAINER_STATE_H
#define FERRY_BACKENDS_NCCL_TRAINER_STATE_H

#include "backends/nccl/nccl_wire.h"
#include "core/digester.h"
#include "device/fetch.h"

typedef enum nccl__rendezvous {
    NCCL__RENDEZVOUS_STORE,
    NCCL__RENDEZVOUS_UNIQUE_ID
} nccl__rendezvous;

/* Lists of boxes that a worker has sent to this group. */
typedef struct nccl__list {
    uint64_t digest;
    size_t size_bytes; /* as it came */
    ferry__box_lists lists;
} nccl__list;

typedef struct nccl__peer {
    nccl__list *lists;
    size_t n_lists, capacity;
    size_t list_bytes; /* of them all */
} nccl__peer;

typedef struct nccl__trainer {
    const ferry_trainer_host *host;
    ferry_trainer_context *ctx;
    const ferry_nccl_trainer_init_info *info;
    bool is_sender;
    uint64_t buffer_bytes; /* the defaults filled in */
    int32_t n_buffers;
    const char *address;
    nccl__rendezvous rendezvous;

    /* as long as the engine lives */
    ferry__store_server *server;
    int32_t port; /* of the store; 0: not served yet */
    uint64_t generation;
    uint64_t round;
    ferry__fetcher fetcher; /* of tensors in memory of devices */
    bool told_devices;      /* that they come by way of the host */

    /* the session */
    bool open;
    bool ferry; /* the peers are */
    /* Ferry's own messages go beside the buffers: never to workers that are
     * not Ferry, and with an id there is no field to say so. */
    bool extras;
    bool digest; /* boxes and digests go with each round */
    int32_t world_size;
    const ferry__provider *provider;
    char secret[FERRY__NCCL_SECRET_CHARS + 1];
    unsigned char unique_id[FERRY__UNIQUE_ID];
    ferry__nccl_group group;
    ferry__nccl_stage stage;
    nccl__peer *peers; /* world_size; number 0 is this rank */
} nccl__trainer;

/* ---- nccl_trainer_session.c ---- */

/* Asks the host; `arg` is the trainer. The check of the group. */
ferry_status nccl__trainer_check(void *arg, const char *what);
ferry_status nccl__session_open(nccl__trainer *t);
/* Never waits for a worker. status < 0: those that wait for this rank are
 * woken and told the last error, which stays. */
void nccl__session_close(nccl__trainer *t, ferry_status status);
int64_t nccl__no_progress_ms(const nccl__trainer *t);

/* ---- nccl_trainer_proofs.c ---- */

typedef struct nccl__proofs nccl__proofs;
/* Takes the boxes that every worker reads of these parameters. */
ferry_status nccl__proofs_open(nccl__trainer *t, const ferry_param_meta *params,
                               size_t count, nccl__proofs **out);
/* Feeds elements [first, first + count) of parameter i, packed at bytes. */
void nccl__proofs_feed(nccl__proofs *p, size_t i, const void *bytes,
                       int64_t first, int64_t count);
/* Packs them at out and feeds them in the same pass. */
void nccl__proofs_pack(nccl__proofs *p, size_t i, const ferry_tensor *tensor,
                       int64_t first, int64_t count, void *out);
/* Sends every worker the digests of its boxes. */
ferry_status nccl__proofs_send(nccl__proofs *p);
void nccl__proofs_close(nccl__proofs **proofs);
void nccl__peers_free(nccl__trainer *t);

/* ---- nccl_trainer_pack.c ---- */

/* Where the bytes of the round go: the room of the stream at hand. */
typedef struct nccl__packer {
    nccl__trainer *t;
    nccl__proofs *proofs; /* NULL: nothing is hashed */
    char *room;           /* NULL: none is reserved */
    size_t size, used;    /* of the room */
    uint64_t looked;      /* bytes since the host was asked */
} nccl__packer;

/* Appends parameter i whole. */
ferry_status nccl__pack(nccl__packer *p, size_t i, const char *name,
                        const ferry_tensor *tensor);

/* ---- nccl_trainer_send.c ---- */
ferry_status nccl__trainer_send(void *self, const void *payload,
                                size_t payload_count);

#endif
