/* SPDX-License-Identifier: Apache-2.0 */
/* The two factories: backends by name, for trainers and for workers.
 * They share names by custom and nothing else: registering or loading on one
 * side never touches the other (A2). Built-ins cost nothing until used. */
#ifndef FERRY_REGISTRY_H
#define FERRY_REGISTRY_H

#include <ferry/status.h>

#ifdef __cplusplus
extern "C" {
#endif

struct ferry_trainer_engine_ops;
struct ferry_worker_engine_ops;

/* Registers a backend, directly. The table must stay valid for the life of
 * the process. FERRY_EEXIST names the taken name; FERRY_EVERSION gives both
 * ABI versions; FERRY_EINVAL: empty name, or a table without a method that is
 * not optional, naming it. Any thread. */
ferry_status ferry_trainer_register(const char *backend,
                                    const struct ferry_trainer_engine_ops *ops);
ferry_status ferry_worker_register(const char *backend,
                                   const struct ferry_worker_engine_ops *ops);

/* Registers a backend lazily: `library` is opened and `symbol` looked up when
 * the backend is first asked for. symbol NULL: the default entry name. A
 * missing file, a missing symbol or another ABI is then FERRY_EBACKEND or
 * FERRY_EVERSION, each time it is asked for. */
ferry_status ferry_trainer_register_lazy(const char *backend,
                                         const char *library,
                                         const char *symbol);
ferry_status ferry_worker_register_lazy(const char *backend,
                                        const char *library,
                                        const char *symbol);

/* Looks a backend up, loading its module if it must. FERRY_EUNKNOWN lists
 * the known names. */
ferry_status ferry_trainer_find(const char *backend,
                                const struct ferry_trainer_engine_ops **out);
ferry_status ferry_worker_find(const char *backend,
                               const struct ferry_worker_engine_ops **out);

/* One known backend of a side. Listing loads nothing. */
typedef struct ferry_backend_info {
    size_t size; /* set by the caller: sizeof(ferry_backend_info) */
    char name[64];
    int built_in;     /* one of nccl, ipc, sparse_nccl, sharded_rdt */
    int available;    /* the module file is there, or it is direct */
    char reason[192]; /* why not available; "" otherwise */
} ferry_backend_info;

/* The index-th backend in order of registration; FERRY_DONE after the last.
 */
ferry_status ferry_trainer_list(size_t index, ferry_backend_info *out);
ferry_status ferry_worker_list(size_t index, ferry_backend_info *out);

#ifdef __cplusplus
}
#endif
#endif
