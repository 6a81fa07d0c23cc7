/* SPDX-License-Identifier: Apache-2.0 */
/* What the two halves of `ipc` say to each other: frames over a Unix socket,
 * handles in the update info, and the session's shared segment. Written down
 * with byte widths in docs/protocol.md; golden bytes in tests/wire.
 * Invariant: nothing that came from the other side is used before it was
 * checked against sizes that this side knows. */
#ifndef FERRY_BACKENDS_IPC_WIRE_H
#define FERRY_BACKENDS_IPC_WIRE_H

#include "base/socket.h"
#include "core/box_lists.h"
#include "device/gate.h"
#include <ferry/backend.h>

#define FERRY__IPC_MAGIC        0x43504946u /* "FIPC" */
#define FERRY__IPC_VERSION      1
#define FERRY__IPC_TRANSPORT    "ferry"
#define FERRY__IPC_SECRET_CHARS 64
#define FERRY__IPC_PROBE_BYTES  16
/* The largest frame taken before a peer has proved itself, and after. */
#define FERRY__IPC_HELLO_MAX 256
#define FERRY__IPC_FRAME_MAX ((size_t)256 << 20)

/* ---- frames ---- */

typedef enum ferry__ipc_type {
    FERRY__IPC_HELLO = 1,    /* worker: who I am, and the secret */
    FERRY__IPC_WELCOME = 2,  /* trainer: the session; its segment follows */
    FERRY__IPC_READY = 3,    /* worker: mapped; whether cma works */
    FERRY__IPC_FAILURE = 4,  /* either: why an update, or init, ended */
    FERRY__IPC_SEGMENT = 5,  /* trainer: shared memory; a descriptor follows */
    FERRY__IPC_DROP = 6,     /* trainer: unmap a segment */
    FERRY__IPC_RANGES = 7,   /* trainer: memory that may be read across */
    FERRY__IPC_UPDATE = 8,   /* trainer: an update info is on its way */
    FERRY__IPC_BOXES = 9,    /* worker: what it reads of each parameter */
    FERRY__IPC_DIGESTS = 10, /* trainer: XXH3-64 of those boxes */
    FERRY__IPC_DONE = 11     /* worker: the update is loaded */
} ferry__ipc_type;

typedef struct ferry__ipc_hello {
    uint32_t magic, version;
    int32_t tp_rank, tp_size, dp_rank, dp_size, pid;
    char secret[FERRY__IPC_SECRET_CHARS + 1];
} ferry__ipc_hello;

#define FERRY__IPC_WANT_DIGEST 0x1u
#define FERRY__IPC_TRY_CMA     0x2u

typedef struct ferry__ipc_welcome {
    uint32_t magic, version, flags, reader;
    uint64_t segment_bytes;
    uint64_t probe_address; /* in the trainer, for a trial read */
    unsigned char probe[FERRY__IPC_PROBE_BYTES];
} ferry__ipc_welcome;

typedef struct ferry__ipc_ready {
    uint32_t cma;  /* 1: the trial read gave the right bytes */
    int32_t error; /* errno of the trial read */
} ferry__ipc_ready;

typedef struct ferry__ipc_failure {
    uint64_t update; /* 0: init */
    int32_t status;
    char text[512];
} ferry__ipc_failure;

typedef struct ferry__ipc_segment {
    uint64_t id, size_bytes;
} ferry__ipc_segment;

typedef struct ferry__ipc_range {
    uint64_t address, size_bytes;
} ferry__ipc_range;

typedef struct ferry__ipc_ranges {
    uint64_t update;
    size_t count;
    ferry__ipc_range *items; /* owned */
} ferry__ipc_ranges;

typedef struct ferry__ipc_update {
    uint64_t update;          /* 1, 2, … of this session */
    uint64_t manifest_digest; /* of the parameters it declares */
    uint64_t handles_digest;
    uint32_t ring_first; /* number of its first slot */
    uint32_t reserved;
} ferry__ipc_update;

/* The boxes of all parameters of an update, by one worker. */
typedef struct ferry__ipc_boxes {
    uint64_t update;
    uint64_t digest; /* of the lists */
    bool listed;     /* false: the same lists as earlier ones */
    ferry__box_lists lists;
} ferry__ipc_boxes;

typedef struct ferry__ipc_digest {
    uint32_t param, box;
    uint64_t xxh3;
} ferry__ipc_digest;

typedef struct ferry__ipc_digests {
    uint64_t update;
    size_t count;
    ferry__ipc_digest *items; /* owned */
} ferry__ipc_digests;

typedef struct ferry__ipc_done {
    uint64_t update, bytes;
} ferry__ipc_done;

/* Type of a frame; 0 when it is too short to have one. */
uint32_t ferry__ipc_frame_type(const void *bytes, size_t size_bytes);

/* Each pair writes a whole frame (without the length prefix) and reads one;
 * reading answers FERRY_EPEER naming the frame and what is wrong. */
void ferry__ipc_put_hello(ferry__str *s, const ferry__ipc_hello *v);
void ferry__ipc_put_welcome(ferry__str *s, const ferry__ipc_welcome *v);
void ferry__ipc_put_ready(ferry__str *s, const ferry__ipc_ready *v);
void ferry__ipc_put_failure(ferry__str *s, const ferry__ipc_failure *v);
void ferry__ipc_put_segment(ferry__str *s, const ferry__ipc_segment *v);
void ferry__ipc_put_drop(ferry__str *s, uint64_t id);
void ferry__ipc_put_ranges(ferry__str *s, const ferry__ipc_ranges *v);
void ferry__ipc_put_update(ferry__str *s, const ferry__ipc_update *v);
/* The lists are written when `listed`; digest is what
 * ferry__box_lists_digest gave. */
void ferry__ipc_put_boxes(ferry__str *s, const ferry__ipc_boxes *v);
void ferry__ipc_put_digests(ferry__str *s, const ferry__ipc_digests *v);
void ferry__ipc_put_done(ferry__str *s, const ferry__ipc_done *v);

ferry_status ferry__ipc_get_hello(const void *bytes, size_t size_bytes,
                                  ferry__ipc_hello *out);
ferry_status ferry__ipc_get_welcome(const void *bytes, size_t size_bytes,
                                    ferry__ipc_welcome *out);
ferry_status ferry__ipc_get_ready(const void *bytes, size_t size_bytes,
                                  ferry__ipc_ready *out);
ferry_status ferry__ipc_get_failure(const void *bytes, size_t size_bytes,
                                    ferry__ipc_failure *out);
ferry_status ferry__ipc_get_segment(const void *bytes, size_t size_bytes,
                                    ferry__ipc_segment *out);
ferry_status ferry__ipc_get_drop(const void *bytes, size_t size_bytes,
                                 uint64_t *out_id);
ferry_status ferry__ipc_get_ranges(const void *bytes, size_t size_bytes,
                                   ferry__ipc_ranges *out);
ferry_status ferry__ipc_get_update(const void *bytes, size_t size_bytes,
                                   ferry__ipc_update *out);
ferry_status ferry__ipc_get_boxes(const void *bytes, size_t size_bytes,
                                  ferry__ipc_boxes *out);
ferry_status ferry__ipc_get_digests(const void *bytes, size_t size_bytes,
                                    ferry__ipc_digests *out);
ferry_status ferry__ipc_get_done(const void *bytes, size_t size_bytes,
                                 ferry__ipc_done *out);

/* ---- the link: one socket to one peer ---- */

/* A call that stops in the middle of a frame leaves the stream unreadable:
 * the link is then broken for good. */
typedef struct ferry__ipc_link {
    int fd; /* -1: closed */
    bool broken;
} ferry__ipc_link;

void ferry__ipc_link_close(ferry__ipc_link *link);
/* Sends a built frame and, when fd >= 0, a byte that carries it. Frees s. */
ferry_status ferry__ipc_link_send(ferry__ipc_link *link, ferry__str *s, int fd,
                                  const ferry__waiter *w);
/* Waits for one frame; *out_bytes owned. A wait that ends before the first
 * byte (abort, deadline) leaves the link whole. */
ferry_status ferry__ipc_link_recv(ferry__ipc_link *link, size_t max_bytes,
                                  void **out_bytes, size_t *out_size,
                                  const ferry__waiter *w);
/* Takes the descriptor that follows a frame. */
ferry_status ferry__ipc_link_recv_fd(ferry__ipc_link *link, int *out_fd,
                                     const ferry__waiter *w);

/* ---- handles: where each parameter's bytes are ---- */

typedef enum ferry__ipc_kind {
    FERRY__IPC_RING = 1,   /* {"ring":true}: pieces in the ring */
    FERRY__IPC_EMPTY = 2,  /* {"empty":true}: no elements */
    FERRY__IPC_SHARED = 3, /* {"segment":id,"offset":bytes[,"strides":[]]} */
    FERRY__IPC_CMA = 4     /* {"range":index,"offset":bytes} */
} ferry__ipc_kind;

typedef struct ferry__ipc_handle {
    ferry__ipc_kind kind;
    bool strided;
    uint64_t id;                    /* segment or range */
    uint64_t offset;                /* bytes to element [0,0,…] */
    int64_t stride[FERRY_MAX_DIMS]; /* elements, when strided */
} ferry__ipc_handle;

/* Appends the JSON list. `ndim[i]` is of parameter i. */
void ferry__ipc_put_handles(ferry__str *s, const ferry__ipc_handle *handles,
                            const ferry_param_meta *params, size_t count);
/* Reads it; *out_handles owned. FERRY_EINVAL names the parameter. */
ferry_status ferry__ipc_get_handles(const char *json,
                                    const ferry_param_meta *params,
                                    size_t count,
                                    ferry__ipc_handle **out_handles);
uint64_t ferry__ipc_handles_digest(const ferry__ipc_handle *handles,
                                   const ferry_param_meta *params,
                                   size_t count);
/* FERRY_EINVAL unless every element that the handle describes lies within
 * size_bytes and is aligned to its size. */
ferry_status ferry__ipc_handle_check(const ferry__ipc_handle *handle,
                                     const ferry_param_meta *param,
                                     uint64_t size_bytes);
/* Fills a tensor over base + handle->offset. */
void ferry__ipc_handle_tensor(const ferry__ipc_handle *handle,
                              const ferry_param_meta *param, void *base,
                              ferry_tensor *out);

/* ---- the session's segment: counters, and the ring ---- */

#define FERRY__IPC_MAX_READERS 256
#define FERRY__IPC_MAX_RECORDS 200
#define FERRY__IPC_SLOT_BYTES  ((uint64_t)1 << 20)
#define FERRY__IPC_N_SLOTS     4u

typedef struct ferry__ipc_reader {
    ferry__gate consumed; /* slots read, by number */
    _Alignas(64) _Atomic uint64_t taken_update;
    _Atomic uint64_t taken_bytes; /* of that update */
} ferry__ipc_reader;

/* Elements [first, first + count) of one parameter. */
typedef struct ferry__ipc_record {
    uint32_t param, reserved;
    int64_t first, count;
    uint64_t offset; /* in the slot */
} ferry__ipc_record;

typedef struct ferry__ipc_slot {
    uint64_t update;
    uint32_t n_records, reserved;
    ferry__ipc_record records[FERRY__IPC_MAX_RECORDS];
} ferry__ipc_slot;

typedef struct ferry__ipc_ring {
    uint32_t magic, version, n_slots, reserved;
    uint64_t slot_bytes, total_bytes;
    ferry__gate published; /* slots filled, by number */
    ferry__ipc_reader readers[FERRY__IPC_MAX_READERS];
} ferry__ipc_ring;

uint64_t ferry__ipc_ring_bytes(uint32_t n_slots, uint64_t slot_bytes);
void ferry__ipc_ring_init(ferry__ipc_ring *ring, uint32_t n_slots,
                          uint64_t slot_bytes);
/* FERRY_EPEER unless the header fits a mapping of size_bytes. Copies the
 * sizes out, since the other side could change them later. */
ferry_status ferry__ipc_ring_check(const ferry__ipc_ring *ring,
                                   uint64_t size_bytes, uint32_t *out_slots,
                                   uint64_t *out_slot_bytes);
ferry__ipc_slot *ferry__ipc_ring_slot(ferry__ipc_ring *ring, uint32_t n_slots,
                                      uint32_t number);
char *ferry__ipc_ring_data(ferry__ipc_ring *ring, uint32_t n_slots,
                           uint64_t slot_bytes, uint32_t number);

/* ---- info types (ipc_wire_info.c) ---- */

typedef struct ferry__ipc_init_info {
    uint8_t packed, digest;
    uint64_t packed_buffer_size_bytes;
    int32_t packed_num_buffers;
    int32_t protocol_version;
    const char *transport, *socket, *secret;
    int64_t deadline_ms, no_progress_ms;
} ferry__ipc_init_info;

typedef struct ferry__ipc_update_info {
    ferry_strs names, dtype_names;
    ferry_shapes shapes;
    const char *handles; /* JSON */
    uint64_t update;
    const char *ipc_handles, *ipc_handles_pickled, *tensor_sizes;
} ferry__ipc_update_info;

extern const ferry_info_type ferry__ipc_init_type;
extern const ferry_info_type ferry__ipc_update_type;

#endif
