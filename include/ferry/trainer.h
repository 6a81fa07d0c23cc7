/* SPDX-License-Identifier: Apache-2.0 */
/* TrainerEngine: how the bytes leave.
 * trainer_init once, send_weights each round, shutdown; called on every
 * trainer rank. Only rank 0, the sender, touches the control plane. */
#ifndef FERRY_TRAINER_H
#define FERRY_TRAINER_H

#include <ferry/client.h>
#include <ferry/source.h>

#ifdef __cplusplus
extern "C" {
#endif

struct ferry_trainer_init_type; /* backend.h */

/* Head of every init info. `type` holds the backend's name, a constant of
 * the type: callers never pass it. Fill it with the type's own macro, which
 * takes the rank by name. */
typedef struct ferry_trainer_init_info {
    size_t size; /* of the whole struct this is the head of */
    const struct ferry_trainer_init_type *type;
    int32_t rank;           /* of this trainer process; 0 is the sender. Never
                               read from anywhere else */
    int32_t reserved;       /* 0 */
    int64_t deadline_ms;    /* one round, init included; 0 = 300000 */
    int64_t no_progress_ms; /* longest time without a byte; 0 = 60000 */
} ferry_trainer_init_info;

/* `ipc`: trainer and workers on one host. */
typedef struct ferry_ipc_trainer_init_info {
    ferry_trainer_init_info base;
    uint64_t packed_buffer_size_bytes; /* per chunk; 0 = 1 GiB */
    int32_t packed_num_buffers;        /* chunks in flight; 0 = 2 */
    uint8_t packed;      /* 0: one update call a round; 1: one a chunk */
    uint8_t digest;      /* 1: also hash what is sent, so that workers
                                prove every byte; the macro sets it */
    uint8_t reserved[2]; /* 0 */
    const char *path;    /* NULL or "auto"; "shared" (tensors must be in
                                ferry_shared_alloc memory), "ring", "cma" */
} ferry_ipc_trainer_init_info;
extern const struct ferry_trainer_init_type ferry_ipc_trainer_init_type;
#define FERRY_IPC_TRAINER_INIT_INFO(rank_by_name)                              \
    {                                                                          \
        {sizeof(ferry_ipc_trainer_init_info),                                  \
         &ferry_ipc_trainer_init_type,                                         \
         (rank_by_name),                                                       \
         0,                                                                    \
         0,                                                                    \
         0},                                                                   \
            0, 0, 0, 1, {0, 0}, 0                                              \
    }

/* `nccl`: dense broadcast; rank 0 of the trainer and every worker of every
 * replica in one communicator. */
typedef struct ferry_nccl_trainer_init_info {
    ferry_trainer_init_info base;
    const char *master_address; /* of this rank, as the workers reach it; NULL
                                   = "127.0.0.1" */
    int32_t master_port;        /* of the rendezvous store; 0 picks one */
    int32_t world_size;         /* 1 + workers; 0: the client is asked */
    uint64_t packed_buffer_size_bytes; /* 0 = 1 GiB */
    int32_t packed_num_buffers;        /* in flight; 0 = 2 */
    uint8_t packed;         /* 1: whole tensors in buffers; 0: one broadcast a
                            parameter. The macro sets 1 */
    uint8_t digest;         /* 1: workers prove every byte, where all of them
                            are Ferry. The macro sets it */
    uint8_t reserved[2];    /* 0 */
    const char *provider;   /* NULL or "auto"; "tcp", "ucx" between Ferry
                               peers; "nccl" (what vLLM's workers speak) */
    const char *rendezvous; /* with provider nccl: NULL or "store"; or
                               "unique_id", through the control plane */
    const char *peers;      /* NULL or "auto": the servers are asked whether
                               they are Ferry; "ferry": their workers are, as
                               in a vLLM with Ferry's engines, which has no
                               route that tells; "vllm": they are not */
} ferry_nccl_trainer_init_info;
extern const struct ferry_trainer_init_type ferry_nccl_trainer_init_type;
#define FERRY_NCCL_TRAINER_INIT_INFO(rank_by_name)                             \
    {                                                                          \
        {sizeof(ferry_nccl_trainer_init_info),                                 \
         &ferry_nccl_trainer_init_type,                                        \
         (rank_by_name),                                                       \
         0,                                                                    \
         0,                                                                    \
         0},                                                                   \
            0, 0, 0, 0, 0, 1, 1, {0, 0}, 0, 0, 0                               \
    }

typedef struct ferry_trainer ferry_trainer;

/* Makes the engine that info->type names, opens its channel and, on the
 * sender, initialises the inference side. Blocks, at most deadline_ms. The
 * client and the source are borrowed (the structs are copied, what they point
 * to must outlive the trainer); source may be NULL where the backend takes
 * none. Errors: FERRY_EUNKNOWN lists the known backends; FERRY_EBACKEND says
 * why one cannot be loaded; FERRY_EINVAL names the field. */
ferry_status ferry_trainer_init(const ferry_trainer_init_info *info,
                                const ferry_client *client,
                                const ferry_source *source,
                                ferry_trainer **out_trainer);

/* The same from a backend's name and a dict (JSON object) of init info
 * fields, `rank` among them; for programs that read their configuration. */
ferry_status ferry_trainer_init_dict(const char *backend, const char *init_info,
                                     const ferry_client *client,
                                     const ferry_source *source,
                                     ferry_trainer **out_trainer);

/* What a round did. Times are wall milliseconds of the sender. What is hashed
 * while it is copied counts once: as packing by nccl, as digest by ipc. */
typedef struct ferry_round_stats {
    size_t size;    /* sizeof(ferry_round_stats), set by the caller */
    uint64_t round; /* 1, 2, … since trainer_init */
    uint64_t n_params;
    uint64_t bytes_declared;
    uint64_t bytes_sent; /* that left the trainer, all workers together */
    uint64_t n_updates;  /* update_weights calls */
    uint64_t peak_bytes; /* transport buffers held at most */
    double total_ms, start_ms, gather_ms, pack_ms, wire_ms, digest_ms,
        finish_ms;
    char path[32]; /* how bytes went: "shared", "ring", "cma", or
                               "shared+ring" */
} ferry_round_stats;

/* Called on the sender's thread as bytes leave; must not block. */
typedef void (*ferry_progress_fn)(void *arg, uint64_t bytes_done,
                                  uint64_t bytes_total);

/* One round's choices. Zero or NULL means default. */
typedef struct ferry_send_options {
    size_t size;
    const char *weight_version; /* label set by finish; NULL: unchanged */
    const void *payload;        /* delta backends only: must be NULL for full
                                   resync */
    size_t payload_count;
    int draft;    /* not 0: aim at the draft model */
    int reserved; /* 0 */
    ferry_progress_fn progress;
    void *progress_arg;
    ferry_round_stats *stats; /* filled also on failure, as far as it got */
} ferry_send_options;
#define FERRY_SEND_OPTIONS_INIT                                                \
    {                                                                          \
        sizeof(ferry_send_options), 0, 0, 0, 0, 0, 0, 0, 0                     \
    }

/* Drives one whole round trip and returns after everything is drained: the
 * workers have finished, buffers may be freed (D4). options may be NULL. On
 * failure the first real error surfaces at once, whichever plane it came
 * from; the workers are left able to take the next round (D5). Blocks, at
 * most deadline_ms plus a second. One thread at a time: FERRY_EBUSY on
 * a second. */
ferry_status ferry_trainer_send_weights(ferry_trainer *trainer,
                                        const ferry_send_options *options);

/* Makes a send_weights on another thread return soon with FERRY_ECANCELED.
 * Several servers that commit together are given up to 5 s to do so, so that
 * they end alike: then it returns FERRY_OK. The next round works. */
void ferry_trainer_cancel(ferry_trainer *trainer);

/* Closes the channel without waiting for peers that are gone, frees the
 * trainer and clears *trainer. Accepts NULL. */
void ferry_trainer_shutdown(ferry_trainer **trainer);

#ifdef __cplusplus
}
#endif
#endif
