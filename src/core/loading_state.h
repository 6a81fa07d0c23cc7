/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of the loading share.
 * Invariant: a batch is one update; its indices count from 0 in declared
 * order, and it lives until the round ends. */
#ifndef FERRY_CORE_LOADING_STATE_H
#define FERRY_CORE_LOADING_STATE_H

#include "core/coverage.h"
#include "core/deferral.h"
#include "core/loading.h"

#define FERRY__STEP_INPUTS_MAX 16

/* How an entry of a tied parameter arrives. */
typedef enum ferry__tied_mode {
    FERRY__TIED_UNDECIDED,
    FERRY__TIED_LAND,    /* the first of the round: written */
    FERRY__TIED_COMPARE, /* another name is whole already: compared */
    FERRY__TIED_DEFER    /* another name is on its way: compared at the end */
} ferry__tied_mode;

/* One entry of one declared parameter. */
typedef struct ferry__landing {
    uint64_t digest, expected;
    ferry__xxh3_state *hash; /* open while pieces arrive */
    void *held;              /* packed box: step input, deferred tied */
    void *room;              /* where it is put aside; the model's */
    size_t held_bytes;
    int64_t packed; /* elements of the deferred box so far */
    size_t tied;    /* index of the tied record */
    bool has_digest, has_expected, done;
    ferry__tied_mode mode;
} ferry__landing;

typedef struct ferry__arrival {
    size_t id;           /* in the plan; in kernel format the slot */
    size_t first, count; /* landings */
    size_t n_done;
    int64_t position; /* elements that came by range */
    void *bounce;     /* the whole parameter, being put together */
    size_t bounce_bytes;
    ferry_box *boxes; /* made when asked for */
    bool begun, whole;
} ferry__arrival;

typedef struct ferry__batch {
    ferry__manifest manifest;
    ferry__arrival *arrivals;
    ferry__landing *landings;
    size_t n_landings;
    struct ferry__batch *next;
} ferry__batch;

/* Who wrote a tied box first in this round. */
typedef struct ferry__tied {
    size_t slot;
    int64_t start[FERRY_MAX_DIMS], count[FERRY_MAX_DIMS];
    size_t owner; /* plan id */
    size_t twin;  /* plan id of the name that was compared last */
    bool complete, compared;
    size_t next; /* chain of the slot, index + 1; 0 ends it */
} ferry__tied;

typedef struct ferry__step_state {
    ferry_tensor inputs[FERRY__STEP_INPUTS_MAX];
    size_t bytes[FERRY__STEP_INPUTS_MAX];
    uint64_t ran_with[FERRY__STEP_INPUTS_MAX]; /* digests of the last run */
    uint32_t have;                             /* bit i: input i is held */
    bool ran;
} ferry__step_state;

struct ferry__loading {
    const ferry_model *model;
    ferry__plan *plan;
    ferry__staging *staging;
    ferry__coverage *coverage;
    uint64_t held_limit_bytes;
    void (*before_live_write)(void *arg);
    void *arg;

    bool wrote, digests, promised, warned;
    const char *current;
    ferry__batch *first, *last;
    ferry__tied *tied;
    size_t n_tied, tied_capacity;
    size_t *tied_heads; /* per slot, index + 1 */
    ferry__step_state **steps;
    size_t n_steps;
    bool *kernel; /* per slot: handed to an in-place engine */
    bool kernel_any;
    bool kernel_format;      /* the round brings whole stored parameters */
    ferry__table slot_names; /* made when first asked for */
    size_t n_slot_names;
    ferry__xxh3_state *scratch;
    ferry__deferral *deferral; /* NULL: nothing is deferred */
    void *defer_memory;        /* held while a round uses it */
    uint32_t *deferred_in;     /* per slot: the update that last deferred */
    uint32_t update;           /* 1, 2, … in the round */

    ferry__spans spans; /* of this round's work */
    _Atomic uint64_t bytes_declared, bytes_received, bytes_loaded, n_params;
    _Atomic uint64_t held_bytes, buffer_bytes, peak_bytes;
};

/* The arrival of declared parameter `index`; it becomes the current one. */
ferry_status ferry__arrival_at(ferry__loading *l, size_t index,
                               ferry__arrival **out);
/* The storage of a slot that this round writes. */
void *ferry__loading_base(const ferry__loading *l, size_t slot);
void ferry__loading_before_write(ferry__loading *l);

/* Held memory, counted; fails cleanly at the limit, naming the open steps. */
ferry_status ferry__loading_hold(ferry__loading *l, size_t size_bytes,
                                 void **out);
void ferry__loading_drop(ferry__loading *l, void *held, size_t size_bytes);

/* One entry at its landing: a piece of it, or the whole. `src` is the base of
 * the op's source offsets. */
ferry_status ferry__land(ferry__loading *l, ferry__batch *b, ferry__arrival *a,
                         size_t entry, const ferry__copy_op *op,
                         const void *src);
/* All of the entry is there: digest, coverage, steps. */
ferry_status ferry__land_done(ferry__loading *l, ferry__batch *b,
                              ferry__arrival *a, size_t entry);
/* The comparisons that had to wait. */
ferry_status ferry__land_deferred(ferry__loading *l);

/* Input bytes of a step; owns `held`. Runs the step when all are there. */
ferry_status ferry__step_take(ferry__loading *l, const ferry__entry *e,
                              void *held, size_t size_bytes);
/* A one-input step over bytes that are in place. */
ferry_status ferry__step_run_now(ferry__loading *l, const ferry__entry *e,
                                 const void *packed);
ferry_status ferry__step_check(ferry__loading *l);
void ferry__step_reset(ferry__loading *l);

/* ---- kernel format: loading_kernel.c ---- */

/* FERRY_EINVAL: no slot that a transfer may touch. */
ferry_status ferry__loading_check_slot(const ferry__loading *l, size_t param);
/* What bake is in checkpoint format. */
ferry_status ferry__loading_match_stored(ferry__loading *l, ferry__batch *b);
/* The tensor, which is as the slot stores it, goes there. */
ferry_status ferry__loading_place(ferry__loading *l, size_t slot,
                                  const ferry_tensor *tensor);

/* The i-th parameter that the model's loader knows, under the name that a
 * checkpoint has for it; the name is written to `buffer`. False after the
 * last one, or when the model cannot say. */
bool ferry__loading_known(const ferry__loading *l, size_t i, char *buffer,
                          size_t size_bytes, ferry_param_meta *out);

/* The op with a source that is its own elements, packed in box order. */
void ferry__op_packed(const ferry__copy_op *op, ferry__copy_op *out);
/* The op that packs the same source elements in box order. */
void ferry__op_pack(const ferry__copy_op *op, ferry__copy_op *out);

/* Takes a box that goes to `slot` and must be quantised; `src` may be reused
 * at once. False: it is not deferred, and the caller copies it now. */
bool ferry__loading_defer(ferry__loading *l, size_t slot,
                          const ferry__copy_op *op, const void *src,
                          ferry__xxh3_state *hash);
/* Drops what is not done yet: the round is over. */
void ferry__loading_discard(ferry__loading *l);

#endif
