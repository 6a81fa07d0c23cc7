/* SPDX-License-Identifier: Apache-2.0 */
/* What the two halves of `nccl` say to each other beside the buffers: the
 * dicts of the two calls, and, where all ranks are Ferry, a hello when the
 * group is open, a header before the buffers of a round, the workers' boxes
 * and their digests. Written down with byte widths in docs/protocol.md;
 * golden bytes in tests/wire.
 * Invariant: nothing that came from another rank is used before it was
 * checked; ranks that are not Ferry see vLLM's own messages and no other. */
#ifndef FERRY_BACKENDS_NCCL_WIRE_H
#define FERRY_BACKENDS_NCCL_WIRE_H

#include "base/bytes.h"
#include "comm/provider.h"
#include "comm/stream.h"
#include "core/box_lists.h"
#include "core/packing.h"

#define FERRY__NCCL_MAGIC        0x4c43464eu /* "NFCL" */
#define FERRY__NCCL_VERSION      1
#define FERRY__NCCL_TRANSPORT    "ferry"
#define FERRY__NCCL_SECRET_CHARS 64
/* The lists of boxes that the trainer keeps of one worker: so many, and so
 * many bytes of them as they travel, which is also the largest that is taken.
 * Both ends reckon alike; a list that does not fit beside the others takes
 * the place of the last ones. */
#define FERRY__NCCL_LISTS_MAX 64
#define FERRY__NCCL_LIST_MAX  ((size_t)64 << 20)

/* ---- hello: what all ranks must agree on, by all-gather ---- */

#define FERRY__NCCL_HELLO_BYTES    256
#define FERRY__NCCL_PROVIDER_CHARS 16
#define FERRY__NCCL_SETTINGS_CHARS 200

typedef struct ferry__nccl_hello {
    uint32_t magic, version;
    uint64_t generation, buffer_bytes;
    uint32_t n_buffers, packed, digest, world_size;
    char provider[FERRY__NCCL_PROVIDER_CHARS + 1];
    /* "NAME=value" of the library below, one after another: O-20 */
    char settings[FERRY__NCCL_SETTINGS_CHARS + 1];
} ferry__nccl_hello;

void ferry__nccl_put_hello(ferry__str *s, const ferry__nccl_hello *v);
ferry_status ferry__nccl_get_hello(const void *bytes, size_t size_bytes,
                                   ferry__nccl_hello *out);
/* FERRY_EMISMATCH or FERRY_EVERSION names the field and both values. */
ferry_status ferry__nccl_check_hello(const ferry__nccl_hello *trainer,
                                     const ferry__nccl_hello *worker,
                                     int32_t worker_rank);
/* Exchanges it with all ranks of the group and compares: rank 0 with each,
 * the others with rank 0. */
ferry_status ferry__nccl_meet(ferry__comm *c, const ferry__nccl_hello *mine,
                              int64_t timeout_ms);
/* The settings of the library that the provider runs on. */
void ferry__nccl_settings(const ferry__provider *provider,
                          char out[FERRY__NCCL_SETTINGS_CHARS + 1]);

/* ---- header: what a round is, broadcast by rank 0 ---- */

#define FERRY__NCCL_HEADER_BYTES 56

typedef struct ferry__nccl_header {
    uint32_t magic;
    uint32_t digest;           /* 1: boxes and digests go with this round */
    uint64_t round;            /* 1, 2, … of this trainer */
    uint64_t manifest_digest;  /* of the declared parameters */
    uint64_t cuts_digest;      /* of the buffers (core/packing.h) */
    uint64_t n_buffers, bytes; /* of them all */
    uint64_t reserved;
} ferry__nccl_header;

void ferry__nccl_put_header(ferry__str *s, const ferry__nccl_header *v);
ferry_status ferry__nccl_get_header(const void *bytes, size_t size_bytes,
                                    ferry__nccl_header *out);

/* ---- boxes: what a worker reads, by all-gather of the heads ---- */

#define FERRY__NCCL_HEAD_BYTES 16

typedef struct ferry__nccl_head {
    uint64_t digest;     /* of the lists (core/box_lists.h) */
    uint64_t list_bytes; /* sent after this; 0: the same as earlier ones */
} ferry__nccl_head;

void ferry__nccl_put_head(ferry__str *s, const ferry__nccl_head *v);
ferry_status ferry__nccl_get_head(const void *bytes, size_t size_bytes,
                                  ferry__nccl_head *out);
/* Whether one more list fits beside n of so many bytes in all. */
bool ferry__nccl_list_fits(size_t n, size_t kept_bytes, size_t size_bytes);

/* ---- the group that both halves hold ---- */

typedef struct ferry__nccl_group {
    ferry__comm *comm;     /* NULL: none */
    ferry__stream *stream; /* NULL: no round had bytes yet */
    uint64_t largest;      /* buffer that the stream takes */
    uint64_t moved;        /* what the group had moved when it was asked */
} ferry__nccl_group;

/* Whether boxes and digests can go with a round on this group. */
bool ferry__nccl_can_digest(const ferry__comm *c);
/* The cuts of a round: buffers of whole tensors, or one a tensor. `warn`: of
 * a tensor that is larger than a buffer. */
ferry_status ferry__nccl_cut(const ferry_param_meta *params, size_t count,
                             bool packed, uint64_t limit_bytes, bool warn,
                             ferry__cuts *out);
/* Makes the stream take buffers of these cuts: all ranks open it anew when
 * they grow beyond what it takes. */
ferry_status ferry__nccl_fit_stream(ferry__nccl_group *g,
                                    const ferry__cuts *cuts, int32_t n_buffers,
                                    int64_t timeout_ms, int64_t no_progress_ms);
/* Whether bytes have moved since it was last asked: a buffer that is large is
 * long on its way before any of it is counted as sent or received. */
bool ferry__nccl_moves(ferry__nccl_group *g);
/* "tcp 10.0.0.2:4411, shared". Returns buffer. */
const char *ferry__nccl_path(const ferry__nccl_group *g, char *buffer,
                             size_t size_bytes);
/* Never waits for another rank. status < 0: what they wait for ends with
 * this thread's last error as the reason, which stays the last error. */
void ferry__nccl_close(ferry__nccl_group *g, ferry_status status);

/* ---- staging: buffers that are not the host's ---- */

/* Copies to and from buffers of a group. Those of the host are used in
 * place; others are reached through a scratch and the queue of their device.
 */
typedef struct ferry__nccl_stage {
    const struct ferry__memory *memory; /* NULL: the host's */
    void *queue, *event;                /* of memory */
    /* The group's, whose own is away while buffers stream. */
    ferry_status (*check)(void *arg, const char *what);
    void *check_arg;
    char *scratch; /* FERRY__NCCL_STAGE_BYTES */
} ferry__nccl_stage;
#define FERRY__NCCL_STAGE_BYTES ((size_t)1 << 20)

ferry_status ferry__nccl_stage_open(ferry__nccl_stage *s, const ferry__comm *c);
void ferry__nccl_stage_close(ferry__nccl_stage *s);
/* Copies and waits until it is done, asking the check. */
ferry_status ferry__nccl_stage_copy(ferry__nccl_stage *s, void *dst,
                                    const void *src, size_t size_bytes);

/* ---- info types (nccl_wire_info.c) ---- */

typedef struct ferry__nccl_init_info {
    const char *master_address;
    int32_t master_port; /* -1: none */
    int32_t rank_offset, world_size;
    const char *nccl_unique_id_b64;
    uint8_t packed, digest;
    uint64_t packed_buffer_size_bytes;
    int32_t packed_num_buffers;
    /* of a Ferry trainer alone */
    const char *transport, *provider, *secret;
    int32_t protocol_version;
    uint64_t generation;
    int64_t deadline_ms, no_progress_ms;
} ferry__nccl_init_info;

typedef struct ferry__nccl_update_info {
    ferry_strs names, dtype_names;
    ferry_shapes shapes;
} ferry__nccl_update_info;

extern const ferry_info_type ferry__nccl_init_type;
extern const ferry_info_type ferry__nccl_update_type;

#endif
