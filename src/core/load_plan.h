/* SPDX-License-Identifier: Apache-2.0 */
/* The load plan: for each checkpoint parameter, where which of its elements
 * go. Baked by running the model's loader once with a lazy tensor; replayed
 * over real bytes by every transport. Destinations are parameter ids and
 * boxes, never addresses; nothing is listed per element.
 * Invariant: baking touches no storage. */
#ifndef FERRY_CORE_LOAD_PLAN_H
#define FERRY_CORE_LOAD_PLAN_H

#include "core/copy.h"
#include "core/manifest.h"
#include <ferry/model.h>

typedef enum ferry__entry_kind {
    FERRY__ENTRY_COPY,
    FERRY__ENTRY_TIED, /* first write of a round lands, later compare */
    FERRY__ENTRY_STEP, /* input of an opaque step */
    FERRY__ENTRY_ASIDE /* packed into memory of the model's choice */
} ferry__entry_kind;

#define FERRY__NO_SLOT SIZE_MAX

typedef struct ferry__entry {
    ferry__entry_kind kind;
    size_t slot;                       /* stored parameter; ASIDE: none */
    ferry_box box;                     /* of the source */
    ferry__copy_op op;                 /* source box -> slot box (COPY, TIED) */
    int64_t dst_start[FERRY_MAX_DIMS]; /* slot box, for coverage */
    int64_t dst_count[FERRY_MAX_DIMS];
    size_t step; /* index in plan->steps (STEP) */
    int32_t input;
    /* STEP, ASIDE: op packs the source box into a contiguous tensor of wire
     * dtype and this shape; dst_start and dst_count are the step's. */
    int32_t input_ndim;
    int64_t input_shape[FERRY_MAX_DIMS];
    ferry_room_fn room; /* ASIDE */
    void *room_arg;
} ferry__entry;

/* One baked parameter: entries [first, first + count). */
typedef struct ferry__baked {
    ferry_param_meta meta; /* name owned by the plan */
    size_t first, count;
} ferry__baked;

typedef struct ferry__plan_step {
    ferry_step step; /* name owned */
    size_t slot;
    ferry_tensor dst; /* view of the slot */
    int64_t dst_start[FERRY_MAX_DIMS];
    int64_t dst_count[FERRY_MAX_DIMS];
} ferry__plan_step;

typedef struct ferry__plan ferry__plan;

ferry_status ferry__plan_create(const ferry_model *model, ferry__plan **out);
void ferry__plan_destroy(ferry__plan **plan);

/* Bakes one parameter, or finds it baked with the same meta. A changed meta
 * replaces the old entry. Unknown names: FERRY_EUNKNOWN with the nearest
 * known name. The model's name maps are applied here. O(entries). Ids are
 * stable for the life of the plan; what baked and entries answer is borrowed
 * until the next bake. */
ferry_status ferry__plan_bake(ferry__plan *plan, const ferry_param_meta *meta,
                              size_t *out_id);
const ferry__baked *ferry__plan_baked(const ferry__plan *plan, size_t id);
const ferry__entry *ferry__plan_entries(const ferry__plan *plan, size_t id,
                                        size_t *out_count);
const ferry__plan_step *ferry__plan_step_at(const ferry__plan *plan,
                                            size_t step);
size_t ferry__plan_n_steps(const ferry__plan *plan);

/* Checks a set of baked parameters together: no two of them write one
 * element (tied ones excepted), naming both. O(n log n). */
ferry_status ferry__plan_check_overlap(const ferry__plan *plan,
                                       const size_t *ids, size_t count);

/* The part of an entry's op that lies in elements [first, first + count) of
 * the flat source: calls fn for each box of it, in rising source order, so
 * that the digests of the parts are the digest of the whole. src_offset still
 * counts from the start of the whole source: subtract `first` when the bytes
 * at hand begin there. Cost: O(boxes found), not O(runs). */
typedef void (*ferry__op_fn)(void *arg, const ferry__copy_op *op);
void ferry__op_clip(const ferry__copy_op *op, int64_t first, int64_t count,
                    ferry__op_fn fn, void *arg);
/* The boxes that put elements [first, first + count) of the tensor's logical
 * order, packed, where destination offset 0 is; source offsets count from the
 * tensor's first element. */
void ferry__range_ops(const ferry_tensor *tensor, int64_t first, int64_t count,
                      ferry__op_fn fn, void *arg);

/* Whether every clip of the op at multiples of 32 can be run: false for a
 * q8_0 destination whose blocks such cuts would split. The caller then puts
 * the parameter together first. */
bool ferry__op_can_clip(const ferry__copy_op *op);
/* The same op, whose source is the contiguous whole parameter, over the
 * given tensor of the same shape and any strides (its offset included).
 * FERRY_ENOTSUP (no line) when that is no strided box: the caller then makes
 * a contiguous copy. The order of the elements stays. */
ferry_status ferry__op_over_tensor(const ferry__copy_op *op,
                                   const ferry_tensor *t, ferry__copy_op *out);

/* Number of elements a slot's checkpoint must cover (valid_rows applied). */
int64_t ferry__slot_numel(const ferry_param *param);
/* Bytes of a slot's storage. */
size_t ferry__slot_bytes(const ferry_param *param);
/* FERRY_EUNKNOWN with the nearest name of a stored parameter. */
ferry_status ferry__plan_not_stored(const ferry__plan *plan, const char *name);

/* The plan as JSON for ferry_worker_plan. */
ferry_status ferry__plan_to_json(const ferry__plan *plan, const size_t *ids,
                                 size_t count, char **out_json);

#endif
