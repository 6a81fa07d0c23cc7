/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of the trainer's half share.
 * Invariant: only the thread that called the engine touches any of this; the
 * control call runs on the host's helper thread and sees none of it. */
#ifndef FERRY_BACKENDS_IPC_TRAINER_STATE_H
#define FERRY_BACKENDS_IPC_TRAINER_STATE_H

#include "backends/ipc/ipc_wire.h"
#include "core/digester.h"
#include "device/fetch.h"

/* How often sockets and the control call are looked at while waiting. */
#define IPC__SLICE_MS 20

typedef enum ipc__path {
    IPC__PATH_AUTO,
    IPC__PATH_SHARED,
    IPC__PATH_RING,
    IPC__PATH_CMA
} ipc__path;

typedef struct ipc__peer {
    ferry__ipc_link link;
    ferry__ipc_hello hello;
    int32_t pid;    /* as the kernel says */
    char label[64]; /* "ipc worker dp0 tp1 (pid 123)" */
    bool cma;
    int32_t cma_error;
    bool done; /* with the update at hand */
    uint64_t done_bytes;
    const ferry__ipc_boxes *boxes; /* of the update at hand; one of `lists` */
    ferry__ipc_boxes *lists;       /* distinct ones of this session */
    size_t n_lists, lists_capacity;
} ipc__peer;

/* Shared memory that the peers have been handed. */
typedef struct ipc__segment {
    uint64_t id;
    uint64_t used_round;
} ipc__segment;

/* A chunk's memory: packed here, read in place by all workers. */
typedef struct ipc__buffer {
    int fd;
    char *memory;
    size_t size_bytes;
    uint64_t id;
    bool sent; /* the peers have it */
} ipc__buffer;

typedef struct ipc__trainer {
    const ferry_trainer_host *host;
    ferry_trainer_context *ctx;
    const ferry_ipc_trainer_init_info *info;
    bool is_sender;
    ipc__path path;
    uint64_t buffer_bytes; /* of a chunk; the defaults filled in */
    int32_t n_buffers;

    /* the session */
    bool open;
    char secret[FERRY__IPC_SECRET_CHARS + 1];
    unsigned char probe[FERRY__IPC_PROBE_BYTES];
    int ring_fd;
    ferry__ipc_ring *ring;
    size_t ring_bytes;
    uint32_t n_slots;
    bool cma; /* all peers can */
    ipc__peer *peers;
    size_t n_peers, peers_capacity;
    ipc__segment *segments;
    size_t n_segments, segments_capacity;
    uint64_t update;    /* number of the last one */
    uint32_t ring_next; /* slot number to be filled next */
    uint64_t next_buffer_id;

    /* the round */
    uint64_t round;
    ipc__buffer *buffers;               /* n_buffers of them */
    bool in_update;                     /* a control call is in flight */
    uint64_t update_bytes, update_seen; /* declared, and reported as progress */
    bool used_shared, used_ring, used_cma, used_buffer, used_device;
    ferry__fetcher fetcher; /* of tensors in memory of devices */
    bool told_devices;      /* that they come by way of the host */
} ipc__trainer;

/* One update call: parameters [first, first + count) of the round. */
typedef struct ipc__chunk {
    const ferry_param_meta *params; /* of the chunk */
    size_t count;
    uint64_t bytes;
    bool fetched; /* tensors are there (else: streaming) */
    ferry_tensor *tensors;
    ferry__ipc_handle *handles;
    ferry__ipc_range *ranges; /* of cma handles, by range number */
    size_t n_ranges;
} ipc__chunk;

/* ---- ipc_trainer_session.c ---- */
ferry_status ipc__session_open(ipc__trainer *t);
void ipc__session_close(ipc__trainer *t);
/* Whether all sockets still work. */
bool ipc__session_alive(const ipc__trainer *t);

/* ---- ipc_trainer_peers.c ---- */
ferry__waiter ipc__waiter(ipc__trainer *t, const char *what);
/* Sends the built frame to one peer (frees s). */
ferry_status ipc__peer_send(ipc__trainer *t, ipc__peer *peer, ferry__str *s,
                            int fd, const char *what);
/* While workers still have something to do the call must run. FERRY_EPEER when
 * it had ended already at the look before: its client swallowed a failure. */
ferry_status ipc__peers_check_call(ipc__trainer *t, bool *seen_ended);
/* Looks at all sockets for up to timeout_ms: takes what came, names a peer
 * that is gone or has failed, reports progress, asks the host. */
ferry_status ipc__peers_look(ipc__trainer *t, const char *what,
                             int64_t timeout_ms);
/* Tells all peers that the update at hand has failed. */
void ipc__peers_tell_failure(ipc__trainer *t, ferry_status status);
ferry_status ipc__peers_await_boxes(ipc__trainer *t, const ipc__chunk *chunk);
/* Until every peer has reported the update as loaded. */
ferry_status ipc__peers_await_done(ipc__trainer *t);
/* Whether the ranks that came are whole replicas. */
ferry_status ipc__peers_check_ranks(const ipc__trainer *t);

/* ---- ipc_trainer_publish.c ---- */
ferry_status ipc__announce(ipc__trainer *t, const ipc__chunk *chunk,
                           uint64_t handles_digest);
void ipc__segments_trim(ipc__trainer *t);
ferry_status ipc__segment_use(ipc__trainer *t, uint64_t id, uint64_t bytes,
                              int fd);

/* ---- ipc_trainer_digest.c ---- */
typedef struct ipc__digester ipc__digester;
ferry_status ipc__digester_create(ipc__trainer *t, const ipc__chunk *chunk,
                                  ipc__digester **out);
void ipc__digester_destroy(ipc__digester **digester);
/* Packs elements [first, first + count) of parameter i of the chunk at out
 * and feeds them in the same pass; pieces come in rising order. */
void ipc__digester_pack(ipc__digester *d, size_t i, const ferry_tensor *tensor,
                        int64_t first, int64_t count, void *out);
/* Feeds the whole of parameter i, any strides. */
ferry_status ipc__digester_tensor(ipc__digester *d, size_t i,
                                  const ferry_tensor *tensor);
ferry_status ipc__digester_send(ipc__digester *d);

/* ---- ipc_trainer_ring.c ---- */
/* Streams the ring's parameters of a chunk, fetching as it goes when they are
 * not there yet; digests the others on the way (digester may be NULL). */
ferry_status ipc__ring_stream(ipc__trainer *t, ipc__chunk *chunk,
                              ipc__digester *digester);

/* ---- ipc_trainer_send.c ---- */
/* Takes a tensor up for packing, wherever it lies. */
ferry_status ipc__take(ipc__trainer *t, const ipc__chunk *chunk, size_t i,
                       const ferry_tensor *tensor);
/* Asks the host and looks at the workers; `arg` is the trainer. The check of
 * the fetcher. */
ferry_status ipc__fetch_check(void *arg, const char *what);
ferry_status ipc__fetch(ipc__trainer *t, const ipc__chunk *chunk, size_t i,
                        ferry_tensor *out);
ferry_status ipc__trainer_send(void *self, const void *payload,
                               size_t payload_count);
void ipc__trainer_round_end(void *self, ferry_status result);

#endif
