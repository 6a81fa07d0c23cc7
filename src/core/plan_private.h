/* SPDX-License-Identifier: Apache-2.0 */
/* The plan's insides, shared by the files that make it up.
 * Invariant: entries of one baked parameter are consecutive; entries that a
 * changed meta left behind belong to nobody until the plan is compacted. */
#ifndef FERRY_CORE_PLAN_PRIVATE_H
#define FERRY_CORE_PLAN_PRIVATE_H

#include "base/hash.h"
#include "core/load_plan.h"

#define FERRY__STEP_INPUTS_MAX 16

struct ferry__plan {
    ferry_model model; /* copied by its own size: newer members are NULL */
    ferry__baked *baked;
    size_t n_baked, baked_capacity;
    ferry__table by_name;
    ferry__entry *entries;
    size_t n_entries, entries_capacity, n_dead;
    ferry__plan_step *steps;
    size_t n_steps, steps_capacity;
    size_t *step_refs; /* live entries of each step */
    size_t step_refs_capacity;
    ferry__table steps_by_name;
};

/* What the model's load is given. */
struct ferry_loader {
    ferry__plan *plan;
    const char *name;    /* as declared, for messages */
    ferry_tensor tensor; /* lazy, whole, contiguous */
    size_t first;        /* its entries begin here */
    ferry_status status; /* first failure inside load, even if ignored */
    char line[1024];
};

/* Start and count per dimension of `view`, whose strides are those of a
 * contiguous tensor of `shape`. False when it is no box of it. */
bool ferry__box_decode(int32_t ndim, const int64_t *shape,
                       const ferry_tensor *view, int64_t *out_start,
                       int64_t *out_count);

/* The loader's spelling of a checkpoint name, owned; *out_name is NULL when
 * the name is in the loader's own spelling, which no checkpoint has. */
ferry_status ferry__plan_map_name(const ferry__plan *plan, const char *name,
                                  char **out_name);
/* FERRY_EUNKNOWN with the nearest known name. */
ferry_status ferry__plan_unknown(const ferry__plan *plan, const char *name);

#endif
