/* SPDX-License-Identifier: Apache-2.0 */
/* One model's loading through a round: what was declared, what arrived, where
 * it went. The plan says where; the storage is live or staged; coverage,
 * held step inputs, tied parameters, digests and counters are kept here.
 * Invariant: nothing is written before its whole update was declared, baked
 * and checked, and nothing outside what the plan names is written ever. */
#ifndef FERRY_CORE_LOADING_H
#define FERRY_CORE_LOADING_H

#include "core/load_plan.h"
#include "core/spans.h"
#include "core/staging.h"
#include <stdatomic.h>

typedef struct ferry__loading ferry__loading;

typedef struct ferry__loading_options {
    const ferry_model *model; /* must outlive the loading */
    ferry__plan *plan;        /* likewise */
    uint64_t held_limit_bytes;
    int32_t defer_threads; /* quantise on so many threads; 0: while loading */
    /* Called right before the first write of a round, when it goes to live
     * storage. */
    void (*before_live_write)(void *arg);
    void *arg;
} ferry__loading_options;

ferry_status ferry__loading_create(const ferry__loading_options *options,
                                   ferry__loading **out);
void ferry__loading_destroy(ferry__loading **loading);

/* A new round. staging NULL: writes go to the live addresses. */
void ferry__loading_begin(ferry__loading *l, ferry__staging *staging);
/* Frees what the round held. Counters stay until the next begin. */
void ferry__loading_end(ferry__loading *l);

/* See ferry_worker_host, whose functions these are. */
ferry_status ferry__loading_declare(ferry__loading *l,
                                    const ferry_param_meta *params,
                                    size_t count);
const ferry_param_meta *ferry__loading_declared(const ferry__loading *l,
                                                size_t *out_count);
ferry_status ferry__loading_boxes(ferry__loading *l, size_t index,
                                  const ferry_box **out_boxes,
                                  size_t *out_count);
ferry_status ferry__loading_load(ferry__loading *l, size_t index,
                                 const ferry_tensor *tensor);
ferry_status ferry__loading_range(ferry__loading *l, size_t index,
                                  const void *bytes, int64_t first,
                                  int64_t count);
ferry_status ferry__loading_box(ferry__loading *l, size_t index, size_t box,
                                const void *bytes);
ferry_status ferry__loading_expect(ferry__loading *l, size_t index, size_t box,
                                   uint64_t xxh3);
void ferry__loading_want_digests(ferry__loading *l, bool on);
ferry_status ferry__loading_kernel_storage(ferry__loading *l, size_t param,
                                           void **out_bytes, size_t *out_size);
/* What the next update brings: stored parameters, whole (kernel), or those of
 * a checkpoint, which every round begins with. FERRY_EINVAL: the round has
 * brought something in the other format. */
ferry_status ferry__loading_set_format(ferry__loading *l, bool kernel);
bool ferry__loading_in_kernel_format(const ferry__loading *l);
void ferry__loading_count_buffers(ferry__loading *l, int64_t bytes);
/* Waits until what was deferred is done; idempotent. What asks about stored
 * bytes (check, commit) comes after it. */
void ferry__loading_drain(ferry__loading *l);
/* The parameter being loaded, "" when none. */
const char *ferry__loading_current(const ferry__loading *l);

/* Every declared parameter was loaded whole (declared = loaded). */
ferry_status ferry__loading_check_whole(const ferry__loading *l);
/* What a round must satisfy to be committed: whole parameters, no open step,
 * tied values equal, no half-written slot (no untouched one either when
 * `full`), digests as stated. Writes nothing. */
ferry_status ferry__loading_check(ferry__loading *l, bool full);
/* The coverage part of it. */
ferry_status ferry__loading_check_coverage(ferry__loading *l, bool full);
/* Every stored parameter was covered in this round. */
bool ferry__loading_is_full(const ferry__loading *l);
/* Nothing was declared and nothing written. */
bool ferry__loading_is_empty(const ferry__loading *l);
/* Copies staged slots into the live addresses; nothing when live. */
void ferry__loading_commit(ferry__loading *l);
/* All parameters that the round declared, each once, in order. */
ferry_status ferry__loading_names(const ferry__loading *l,
                                  ferry__manifest *out);
/* Slots that the round did not touch: their number, and the first `max` of
 * their indices. */
size_t ferry__loading_untouched(const ferry__loading *l, size_t *out_slots,
                                size_t max);

typedef struct ferry__loading_counters {
    uint64_t bytes_declared, bytes_received, bytes_loaded, n_params;
    uint64_t held_bytes, peak_bytes;
} ferry__loading_counters;
/* Any thread. */
void ferry__loading_counters_of(const ferry__loading *l,
                                ferry__loading_counters *out);
/* When this round's work was done. Any thread. */
size_t ferry__loading_spans(ferry__loading *l, ferry__span *out,
                            size_t capacity);
void ferry__loading_received(ferry__loading *l, uint64_t bytes);
void ferry__loading_waited(ferry__loading *l, int32_t peer, const char *address,
                           int64_t from_ns);

#endif
