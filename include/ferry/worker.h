/* SPDX-License-Identifier: Apache-2.0 */
/* The worker side: one model shard that takes weight updates.
 * A server creates one worker per shard and passes in the four calls' dicts.
 * The round's state machine, coverage, digests and the commit live here, so
 * every engine has them. Invariant: a worker never serves half-updated
 * weights (H4). */
#ifndef FERRY_WORKER_H
#define FERRY_WORKER_H

#include <ferry/model.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum ferry_commit {
    FERRY_COMMIT_INPLACE = 0, /* bytes replace the weights as they arrive */
    FERRY_COMMIT_STAGED = 1   /* a second copy, copied into the same addresses
                                 at commit; a failed round changes nothing */
} ferry_commit;

/* Head of every worker config that engines see; also the options. */
typedef struct ferry_worker_options {
    size_t size;
    const char *backend; /* "ipc", …, or a registered name */
    ferry_commit commit;
    int require_full;          /* not 0: refuse rounds that do not cover every
                                parameter of the checkpoint */
    int has_weights;           /* not 0: the storage holds a loaded checkpoint,
                                so the worker may serve before any round */
    int32_t tp_rank, tp_size;  /* in the replica; size 0 = 1 */
    int32_t dp_rank, dp_size;  /* replica; size 0 = 1 */
    uint64_t held_limit_bytes; /* inputs held for unfinished steps;
                                     0 = 1 GiB. Beyond: clean failure */
    int64_t deadline_ms;       /* one round; 0 = 300000; the smaller of this and
                                what init info says */
    int64_t no_progress_ms;    /* 0 = 60000 */
    int32_t defer_threads;     /* quantise on so many background threads, at
                                most 64, with 2 MiB × (2 × threads + 2) of
                                buffers; 0 = while loading. The bytes are the
                                same */
    int32_t reserved;          /* 0 */
} ferry_worker_options;
#define FERRY_WORKER_OPTIONS_INIT(backend_name)                                \
    {                                                                          \
        sizeof(ferry_worker_options), (backend_name), FERRY_COMMIT_INPLACE, 0, \
            0, 0, 0, 0, 0, 0, 0, 0, 0, 0                                       \
    }

typedef struct ferry_worker ferry_worker;

/* Makes the worker and its engine (the factory picks by options->backend).
 * `model` is borrowed (the table is copied; what it points to must outlive
 * the worker); `draft` may be NULL. Loads no transport yet. */
ferry_status ferry_worker_create(const ferry_worker_options *options,
                                 const ferry_model *model,
                                 const ferry_model *draft,
                                 ferry_worker **out_worker);
/* Ends a running round as abort does, shuts the engine down, frees. */
void ferry_worker_destroy(ferry_worker **worker);

/* The calls of the control plane, with their dicts as JSON objects. One
 * thread at a time, except abort and the queries, which any thread may call.
 * Errors: FERRY_EINVAL, FERRY_EUNKNOWN, FERRY_EMISMATCH, FERRY_ENOTSUP,
 * FERRY_EORDER (naming the call that must come first) are the caller's
 * mistakes; the others are failures of the transfer.
 *
 * init again at any time outside a round tears the old channel down first. */
ferry_status ferry_worker_init_transfer_engine(ferry_worker *worker,
                                               const char *init_info);
ferry_status ferry_worker_start_weight_update(ferry_worker *worker);
ferry_status ferry_worker_start_draft_weight_update(ferry_worker *worker);
/* A failure ends the round (state "failed"); the next start is accepted.
 * A JSON list picks the element of this worker: dp_rank * tp_size + tp_rank.
 */
ferry_status ferry_worker_update_weights(ferry_worker *worker,
                                         const char *update_info);
/* prepare + commit. weight_version NULL leaves the label. */
ferry_status ferry_worker_finish_weight_update(ferry_worker *worker,
                                               const char *weight_version);
/* The two halves, for servers of several shards: prepare drains, checks
 * digests and coverage and writes nothing; commit cannot fail for a reason
 * that prepare could have seen. */
ferry_status ferry_worker_prepare_weight_update(ferry_worker *worker);
ferry_status ferry_worker_commit_weight_update(ferry_worker *worker,
                                               const char *weight_version);
/* Ends the round if there is one; idempotent; also makes a running update
 * return soon. Any thread. */
void ferry_worker_abort_weight_update(ferry_worker *worker);
/* Refused with FERRY_EORDER while a round is open. */
ferry_status ferry_worker_shutdown_transfer_engine(ferry_worker *worker);

/* Joins deferred processing; idempotent; a no-op for synchronous engines. */
ferry_status ferry_worker_drain_pending(ferry_worker *worker);
/* Whether a returned update_weights means queued rather than loaded (E5). */
bool ferry_worker_defers_processing(const ferry_worker *worker);

/* Only sets the label; no other effect. */
ferry_status ferry_worker_set_weight_version(ferry_worker *worker,
                                             const char *weight_version);

/* FERRY_OK when generation may run now; FERRY_ENOTREADY (the line says why:
 * never synced, dirty after a failed round, or a round is writing in place).
 * Any thread. */
ferry_status ferry_worker_may_serve(const ferry_worker *worker);

/* The worker's state as one JSON object: state, round, weight_version,
 * serving, dirty, failure {status, message}, counters {bytes_declared,
 * bytes_received, bytes_loaded, n_params}, held_bytes, peak_bytes, path,
 * phases, spans (when its work was done), commit, backend. Cut at size_bytes
 * and NUL terminated; returns the length it needs without NUL. Any thread.
 */
size_t ferry_worker_status(const ferry_worker *worker, char *buffer,
                           size_t size_bytes);

/* The plan for the given declared parameters as JSON: for each name its
 * source boxes and destinations. Ownership of *out_json: ferry_free. */
ferry_status ferry_worker_plan(ferry_worker *worker,
                               const ferry_param_meta *params, size_t count,
                               char **out_json);

/* XXH3-64 of each stored parameter's bytes is what the transfer proves;
 * this one is for comparing servers: calls fn(name, bytes, n) for every
 * stored parameter, in order, runtime ones too. Not during a round in place:
 * FERRY_EBUSY. */
typedef void (*ferry_bytes_fn)(void *arg, const char *name, const void *bytes,
                               size_t size_bytes);
ferry_status ferry_worker_each_param(ferry_worker *worker, ferry_bytes_fn fn,
                                     void *arg);

/* Loads a whole source into the model by the same plan: what a server does at
 * start with a checkpoint on disk. Covers everything or fails by name. */
ferry_status ferry_worker_load_source(ferry_worker *worker,
                                      const ferry_source *source);

/* Declares that the stored weights must not be served until a full round
 * succeeded: random weights, or weights whose version is gone. */
void ferry_worker_require_sync(ferry_worker *worker);

/* Frees what the library handed out as owned. NULL is fine. */
void ferry_free(void *memory);

#ifdef __cplusplus
}
#endif
#endif
