/* SPDX-License-Identifier: Apache-2.0 */
/* For authors of engines: info structs, the two engine tables, modules.
 * A module exports one table per side. It is handed a table of host functions
 * (fail, log, alloc, clock, pass, load, …), so it needs no symbol of ours.
 * Invariant: the base behaviour (parse, order, coverage, deadlines, the
 * control-plane thread) is the host's; an engine only moves bytes. */
#ifndef FERRY_BACKEND_H
#define FERRY_BACKEND_H

#include <ferry/trainer.h>
#include <ferry/worker.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Version of the tables in this header. A module with another major
 * (value >> 16) is refused at load with both values. */
#define FERRY_ENGINE_ABI 0x00010000u

/* ---- info structs: a dict (JSON object) <-> a typed struct ---- */

typedef struct ferry_shape {
    int32_t ndim;
    int32_t reserved;
    int64_t dims[FERRY_MAX_DIMS];
} ferry_shape;

typedef enum ferry_field_kind {
    FERRY_FIELD_BOOL = 1,   /* uint8_t; JSON true/false */
    FERRY_FIELD_I32 = 2,    /* int32_t; an integral JSON number in range */
    FERRY_FIELD_I64 = 3,    /* int64_t */
    FERRY_FIELD_U64 = 4,    /* uint64_t; at most INT64_MAX, as JSON readers
                             commonly take no more */
    FERRY_FIELD_F64 = 5,    /* double; finite */
    FERRY_FIELD_STR = 6,    /* const char *; NULL when absent or null */
    FERRY_FIELD_STRS = 7,   /* ferry_strs: list of strings */
    FERRY_FIELD_I64S = 8,   /* ferry_i64s: list of integers */
    FERRY_FIELD_SHAPES = 9, /* ferry_shapes: list of lists of integers >= 0 */
    FERRY_FIELD_JSON = 10   /* const char *: any JSON value, as compact text */
} ferry_field_kind;

typedef struct ferry_strs {
    const char **items;
    size_t count;
} ferry_strs;
typedef struct ferry_i64s {
    int64_t *items;
    size_t count;
} ferry_i64s;
typedef struct ferry_shapes {
    ferry_shape *items;
    size_t count;
} ferry_shapes;

#define FERRY_FIELD_REQUIRED 0x1u
/* A list of per-parameter values: its length must equal that of `names`. */
#define FERRY_FIELD_PER_NAME 0x2u
/* Not shown in logs and errors (tokens, secrets). */
#define FERRY_FIELD_SECRET 0x4u

/* One field. Defaults are given as JSON text ("false", "1073741824", "[]");
 * NULL means zero/NULL/empty. */
typedef struct ferry_field {
    const char *name;
    ferry_field_kind kind;
    uint32_t flags;
    size_t offset; /* offsetof in the struct */
    const char *default_json;
    int64_t min, max; /* for integers; both 0: the type's range */
} ferry_field;

/* A typed struct as a table. The struct's memory is the host's: zeroed, then
 * filled; strings and lists live until the parsed info is freed. */
typedef struct ferry_info_type {
    size_t size;      /* sizeof(ferry_info_type) */
    const char *name; /* for errors: "IPCWeightTransferInitInfo" */
    size_t struct_size;
    const ferry_field *fields;
    size_t n_fields;
    /* Optional cross-field check after all fields are filled. */
    ferry_status (*check)(const void *info);
} ferry_info_type;

/* Parses a JSON object. FERRY_EINVAL names the type, the field and what is
 * wrong: unknown, missing, mistyped, out of range, repeated key, lists of
 * unequal length, not an object, not JSON. The result is one allocation
 * group: free it with ferry_info_free. */
ferry_status ferry_info_parse(const ferry_info_type *type, const char *json,
                              void **out_info);
void ferry_info_free(void *info);
/* Writes the struct as a compact JSON object, in field order; fields equal to
 * NULL are left out. Owned text: ferry_free. */
ferry_status ferry_info_format(const ferry_info_type *type, const void *info,
                               char **out_json);

/* ---- trainer side ---- */

/* The constant of a trainer init info's type: the backend's name and the
 * fields. Define it with the macro, which refuses an empty name when it is
 * compiled. */
typedef struct ferry_trainer_init_type {
    const char *backend;
    ferry_info_type info;
} ferry_trainer_init_type;
#define FERRY_TRAINER_INIT_TYPE(var, backend_name, struct_type, type_fields,   \
                                n_type_fields, check_fn)                       \
    _Static_assert(sizeof(backend_name) > 1,                                   \
                   "a trainer init info needs a backend name");                \
    const ferry_trainer_init_type var = {                                      \
        backend_name,                                                          \
        {sizeof(ferry_info_type), #struct_type, sizeof(struct_type),           \
         type_fields, n_type_fields, check_fn}}
/* The rows every init info begins with: rank (required), bounds. */
#define FERRY_TRAINER_INIT_FIELDS                                              \
    {"rank",                                                                   \
     FERRY_FIELD_I32,                                                          \
     FERRY_FIELD_REQUIRED,                                                     \
     offsetof(ferry_trainer_init_info, rank),                                  \
     0,                                                                        \
     0,                                                                        \
     INT32_MAX},                                                               \
        {"deadline_ms",                                                        \
         FERRY_FIELD_I64,                                                      \
         0,                                                                    \
         offsetof(ferry_trainer_init_info, deadline_ms),                       \
         "0",                                                                  \
         0,                                                                    \
         INT64_MAX},                                                           \
    {                                                                          \
        "no_progress_ms", FERRY_FIELD_I64, 0,                                  \
            offsetof(ferry_trainer_init_info, no_progress_ms), "0", 0,         \
            INT64_MAX                                                          \
    }

/* One engine's view of its trainer. Opaque; given back to host functions. */
typedef struct ferry_trainer_context ferry_trainer_context;

/* What the host offers a trainer engine. Every wait inside is bounded. */
typedef struct ferry_trainer_host {
    size_t size;
    uint32_t abi; /* FERRY_ENGINE_ABI of the host */
    uint32_t reserved;
    ferry_status (*fail)(ferry_status status, const char *fmt, ...)
        FERRY_PRINTF(2, 3);
    void (*log)(ferry_log_level level, const char *fmt, ...) FERRY_PRINTF(2, 3);
    void *(*alloc)(size_t size_bytes); /* zeroed; NULL when out of memory */
    void (*free)(void *memory);
    int64_t (*now_ns)(void); /* monotonic */

    /* A checked pass over the source (B3, in the one place): declared is the
     * metadata of this round. pass_next answers FERRY_DONE only when every
     * declared parameter came; the first divergence is FERRY_EMISMATCH or
     * FERRY_ECOVERAGE naming the parameter. It waits for the item's
     * completion event, within the round's bounds. */
    ferry_status (*pass_begin)(ferry_trainer_context *ctx,
                               const ferry_param_meta **out_declared,
                               size_t *out_count);
    ferry_status (*pass_next)(ferry_trainer_context *ctx, ferry_item *out_item);
    void (*pass_end)(ferry_trainer_context *ctx);
    bool (*source_is_stable)(ferry_trainer_context *ctx);

    /* The four calls. update_begin runs update_weights on the host's helper
     * thread and returns at once; update_wait joins it within the bounds and
     * answers its result; update_poll answers FERRY_EBUSY while it runs,
     * else its result. At most one call is in flight. start and finish are
     * issued by the host around send; an engine does not call them. */
    ferry_status (*init_peer)(ferry_trainer_context *ctx,
                              const char *init_info);
    ferry_status (*update_begin)(ferry_trainer_context *ctx,
                                 const char *update_info);
    ferry_status (*update_poll)(ferry_trainer_context *ctx);
    ferry_status (*update_wait)(ferry_trainer_context *ctx);
    /* As init_peer, on the helper thread; join with update_wait. For
     * rendezvous where both ends must be waiting at once (O-11). */
    ferry_status (*init_peer_begin)(ferry_trainer_context *ctx,
                                    const char *init_info);

    /* Called in every wait loop, at least every 100 ms: FERRY_OK to go on,
     * or why not (deadline, no progress, canceled, or the failure of the
     * control call in flight, with its line). `what` names the wait. */
    ferry_status (*check)(ferry_trainer_context *ctx, const char *what);
    /* Bytes left; feeds the no-progress bound, stats and the callback. */
    void (*progress)(ferry_trainer_context *ctx, uint64_t bytes);
    /* Milliseconds to the deadline, at least 1. */
    int64_t (*remaining_ms)(ferry_trainer_context *ctx);
    ferry_round_stats *(*stats)(ferry_trainer_context *ctx); /* never NULL */
    /* Notes for traces that "pack", "wire" or "digest" went on from `from_ns`
     * until now. Any thread. An older host has none: call it by
     * FERRY_HOST_SPAN. */
    void (*span)(ferry_trainer_context *ctx, const char *phase,
                 int64_t from_ns);
    /* Asks the peers, over the control plane, what they are: all Ferry, none
     * of them, or (FERRY_EMISMATCH) some. A client without `status` counts as
     * not Ferry. */
    ferry_status (*peers_are_ferry)(ferry_trainer_context *ctx, bool *out);
    /* Inference workers behind the client; FERRY_ENOTSUP when it cannot
     * tell. */
    ferry_status (*peer_world_size)(ferry_trainer_context *ctx,
                                    int32_t *out_workers);
    /* Notes for traces that this end waited from `from_ns` until now for rank
     * `peer` of its group (-1: not known which), which is reached by
     * `address` ("": not known). Any thread within a round. An older host has
     * none: FERRY_HOST_HAS. */
    void (*waited)(ferry_trainer_context *ctx, int32_t peer,
                   const char *address, int64_t from_ns);
} ferry_trainer_host;
/* Whether the host's table, which may be older, has a method. */
#define FERRY_HOST_HAS(host, method)                                           \
    ((host)->size > offsetof(ferry_trainer_host, method) && (host)->method)
#define FERRY_HOST_SPAN(host, ctx, phase, from_ns)                             \
    do {                                                                       \
        if ((host)->size > offsetof(ferry_trainer_host, span) && (host)->span) \
            (host)->span((ctx), (phase), (from_ns));                           \
    } while (0)

/* The source is required (full resync) or must be NULL (delta). An engine
 * that sets neither checks for itself in create. */
#define FERRY_TRAINER_FULL_RESYNC 0x1u
#define FERRY_TRAINER_DELTA       0x2u
/* The engine reads tensors of devices too. Without it the host refuses them
 * by name before the engine sees one. */
#define FERRY_TRAINER_DEVICES 0x4u

typedef struct ferry_trainer_engine_ops {
    size_t size;
    uint32_t abi;   /* FERRY_ENGINE_ABI */
    uint32_t flags; /* FERRY_TRAINER_… */
    const ferry_trainer_init_type *init_type;
    /* Makes the engine's state; opens nothing. `info` is the typed struct,
     * valid until destroy. */
    ferry_status (*create)(const ferry_trainer_host *host,
                           ferry_trainer_context *ctx, const void *info,
                           bool is_sender, void **out_self);
    /* Opens the channel; the sender calls host->init_peer. May block within
     * the bounds. Called again on the sender before the round that follows a
     * failed one: an engine whose channel still works answers FERRY_OK, one
     * whose channel broke opens it anew. NULL: nothing to open. */
    ferry_status (*init)(void *self);
    /* One round between start and finish: pass, bytes, update calls, drain.
     * payload is NULL for full resync. On an error return the host cancels
     * the call in flight; the engine must leave no thread waiting. Ranks that
     * are not the sender drive the pass and nothing else. */
    ferry_status (*send)(void *self, const void *payload, size_t payload_count);
    /* Called after a round ended, well or not, so that handles and buffers
     * are released on every path. NULL: nothing. */
    void (*round_end)(void *self, ferry_status result);
    void (*destroy)(void *self); /* closes the channel; never blocks on peers */
} ferry_trainer_engine_ops;

/* ---- worker side ---- */

typedef struct ferry_worker_context ferry_worker_context;

/* A strided box of a parameter: what a shard needs of it, in elements of the
 * full contiguous source tensor; dimensions sorted by falling stride. */
typedef struct ferry_box {
    int64_t offset;
    int32_t ndim;
    int32_t reserved;
    int64_t shape[FERRY_MAX_DIMS];
    int64_t stride[FERRY_MAX_DIMS];
} ferry_box;

/* What the host offers a worker engine. Only on the thread of the call that
 * the engine is in, unless said otherwise. */
typedef struct ferry_worker_host {
    size_t size;
    uint32_t abi;
    uint32_t reserved;
    ferry_status (*fail)(ferry_status status, const char *fmt, ...)
        FERRY_PRINTF(2, 3);
    void (*log)(ferry_log_level level, const char *fmt, ...) FERRY_PRINTF(2, 3);
    void *(*alloc)(size_t size_bytes);
    void (*free)(void *memory);
    int64_t (*now_ns)(void);

    /* Declares what an update will bring; bakes and validates every name
     * before the first write. Done by the host already when the update info
     * type has the fields names, dtype_names and shapes. The indices that
     * the functions below take count from 0 in the declared order. In kernel
     * format the names, dtypes and shapes are those of stored parameters;
     * one that is stored in blocks (q8_0) is declared as the uint8 that they
     * are: rows, and bytes a row. */
    ferry_status (*declare)(ferry_worker_context *ctx,
                            const ferry_param_meta *params, size_t count);
    /* The declared parameters of this update. Borrowed. */
    const ferry_param_meta *(*declared)(ferry_worker_context *ctx,
                                        size_t *out_count);
    /* The boxes of parameter `index` that this shard reads; none when it
     * stores nothing of it. Borrowed until the round ends. */
    ferry_status (*boxes)(ferry_worker_context *ctx, size_t index,
                          const ferry_box **out_boxes, size_t *out_count);

    /* load_weights: hands over one whole parameter, any strides. The bytes
     * may be reused when it returns. In kernel format they are copied into
     * the storage as they are, padding included. */
    ferry_status (*load)(ferry_worker_context *ctx, size_t index,
                         const ferry_tensor *tensor);
    /* Hands over elements [first, first + count) of the flat contiguous
     * parameter, in rising order without gaps; `first` and `count` are
     * multiples of 32 except at the end. Not in kernel format. */
    ferry_status (*load_range)(ferry_worker_context *ctx, size_t index,
                               const void *bytes, int64_t first, int64_t count);
    /* Hands over exactly the elements of one box, packed in box order. */
    ferry_status (*load_box)(ferry_worker_context *ctx, size_t index,
                             size_t box, const void *bytes);
    /* States what the sender says the XXH3-64 of a box is (its elements in
     * box order, wire dtype, as bytes), before or after its load; compared
     * at prepare: FERRY_EDIGEST names the parameter. */
    ferry_status (*expect_digest)(ferry_worker_context *ctx, size_t index,
                                  size_t box, uint64_t xxh3);
    /* Turns the hashing of loaded boxes on; call in start or before the first
     * load. Off by default. */
    void (*want_digests)(ferry_worker_context *ctx, bool on);

    ferry_status (*check)(ferry_worker_context *ctx, const char *what);
    void (*progress)(ferry_worker_context *ctx, uint64_t bytes);
    int64_t (*remaining_ms)(ferry_worker_context *ctx);
    /* Bounds that init info carried; 0 leaves the worker's own. */
    void (*set_bounds)(ferry_worker_context *ctx, int64_t deadline_ms,
                       int64_t no_progress_ms);
    /* Counts transport buffers for peak_bytes (negative: released). Any
     * thread. */
    void (*count_buffers)(ferry_worker_context *ctx, int64_t bytes);
    /* Names the path bytes take, for status and logs ("shared", "ring"). */
    void (*set_path)(ferry_worker_context *ctx, const char *path);
    /* What self.model is now: the target or the draft (E4). */
    const ferry_model *(*model)(ferry_worker_context *ctx);
    const ferry_worker_options *(*options)(ferry_worker_context *ctx);

    /* The layerwise reload's begin and finalise (E1): a checkpoint-format
     * engine calls begin in start and finalise in finish; the core checks
     * that they pair and, at finalise, that coverage is whole. */
    ferry_status (*reload_begin)(ferry_worker_context *ctx);
    ferry_status (*reload_finalise)(ferry_worker_context *ctx);
    /* For in-place (kernel-format) engines: marks the model as written. Call
     * it before the first byte changes; answers the storage to write: the
     * live one or the staged copy. */
    ferry_status (*kernel_storage)(ferry_worker_context *ctx, size_t param,
                                   void **out_bytes, size_t *out_size);
    /* As the trainer's. An older host has none: FERRY_WORKER_HOST_HAS. */
    void (*waited)(ferry_worker_context *ctx, int32_t peer, const char *address,
                   int64_t from_ns);
} ferry_worker_host;
#define FERRY_WORKER_HOST_HAS(host, method)                                    \
    ((host)->size > offsetof(ferry_worker_host, method) && (host)->method)

/* A returned receive means queued; drain_pending and finish complete it. */
#define FERRY_WORKER_DEFERS_PROCESSING 0x1u
#define FERRY_WORKER_NO_DRAFT          0x2u
/* The engine works in kernel format: it declares stored parameters by their
 * own names and writes them whole (load, or in place by kernel_storage); those
 * count as covered, and is_checkpoint_format false is accepted. An update info
 * that has a bool field of that name is asked instead, whatever this flag
 * says; it holds for all updates of a round. */
#define FERRY_WORKER_KERNEL_FORMAT 0x4u

typedef struct ferry_worker_engine_ops {
    size_t size;
    uint32_t abi;
    uint32_t flags; /* FERRY_WORKER_… */
    const char *backend;
    const ferry_info_type *init_info;
    const ferry_info_type *update_info;
    ferry_status (*create)(const ferry_worker_host *host,
                           ferry_worker_context *ctx, void **out_self);
    /* Opens the channel and records the wire params. Called again only after
     * shutdown. The struct is valid until shutdown. */
    ferry_status (*init_transfer_engine)(void *self, const void *init_info);
    ferry_status (*start_weight_update)(void *self);
    ferry_status (*receive_weights)(void *self, const void *update_info);
    ferry_status (*finish_weight_update)(void *self);
    /* Round ended without finish: release what the round held. Optional. */
    void (*abort_weight_update)(void *self);
    /* Optional: NULL for synchronous engines. */
    ferry_status (*drain_pending)(void *self);
    void (*shutdown)(void *self); /* idempotent; never blocks on peers */
    void (*destroy)(void *self);
} ferry_worker_engine_ops;

/* ---- modules ---- */

/* A trainer module exports a function of this type, a worker module one of
 * the other; the names below are the defaults. */
typedef const ferry_trainer_engine_ops *(*ferry_trainer_entry_fn)(void);
typedef const ferry_worker_engine_ops *(*ferry_worker_entry_fn)(void);
#define FERRY_TRAINER_ENTRY "ferry_trainer_engine"
#define FERRY_WORKER_ENTRY  "ferry_worker_engine"

#ifdef __cplusplus
}
#endif
#endif
