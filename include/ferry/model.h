/* SPDX-License-Identifier: Apache-2.0 */
/* The model table: what a server implements to receive weights.
 * A model lists the parameters it stores and has an ordinary loader, which
 * narrows, picks its fused slot and copies. The loader runs once per name
 * with lazy tensors; what it records is the load plan, and every transport
 * replays that. Invariant: storage addresses never change. */
#ifndef FERRY_MODEL_H
#define FERRY_MODEL_H

#include <ferry/source.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Never in a checkpoint (rope tables, caches): outside coverage, no transfer
 * touches it. */
#define FERRY_PARAM_RUNTIME 0x1u

/* One stored (kernel) parameter of this worker: its shard, contiguous and
 * row-major. Fused parameters are one entry. */
typedef struct ferry_param {
    const char *name;  /* run-time name, "…self_attn.qkv_proj.weight" */
    ferry_dtype dtype; /* of the storage; q8_0 blocks run along the last
                            dimension, which must be a multiple of 32 */
    int32_t ndim;
    int64_t shape[FERRY_MAX_DIMS]; /* elements, of this shard */
    void *data;                    /* storage; the address is fixed for life */
    uint32_t flags;                /* FERRY_PARAM_… */
    uint32_t reserved;             /* 0 */
    int64_t valid_rows; /* rows (dimension 0) that a checkpoint covers; the
                            rest is padding and stays zero. 0 = all */
} ferry_param;

/* A prefix of checkpoint names and what the loader calls it. One table serves
 * disk loading and transfers alike. A name that begins with no `from` is
 * passed as it is, unless it begins with a `to`: that is the loader's own
 * spelling, which no checkpoint has, and it is refused. A row that maps a
 * prefix to itself allows it. */
typedef struct ferry_name_map {
    const char *from; /* "model.language_model." */
    const char *to;   /* "model." */
} ferry_name_map;

typedef struct ferry_loader ferry_loader;

/* `size` is sizeof(ferry_model) as the implementer compiled it. The table,
 * what it points to and the storage must outlive the worker. */
typedef struct ferry_model {
    size_t size;
    const char *name; /* architecture, for logs and status */
    void *self;
    const ferry_param *params; /* stored parameters; order is fixed */
    size_t n_params;
    const ferry_name_map *maps; /* may be NULL; first match wins */
    size_t n_maps;

    /* Records how checkpoint parameter `name` lands: `tensor` is lazy, whole
     * and contiguous, with the declared dtype and shape. Take views of it and
     * of ferry_loader_slot, and call ferry_load_copy and its kin. Answer
     * FERRY_OK with nothing recorded for a known name of which this shard
     * stores nothing; FERRY_EUNKNOWN for a name that the model does not have
     * (the core adds the nearest known name); FERRY_EMISMATCH through
     * ferry_loader_expect for a wrong shape. Must not touch storage. Must
     * give the same answer every time. */
    ferry_status (*load)(void *self, ferry_loader *loader, const char *name,
                         const ferry_tensor *tensor);

    /* Optional: the i-th checkpoint name that load accepts, NULL after the
     * last; for suggestions, for what is missing, and for plans before any
     * trainer came. Alternative forms may be left out. */
    const char *(*checkpoint_name)(void *self, size_t i);
    /* Optional, with checkpoint_name: its declared full shape and dtype. */
    ferry_status (*checkpoint_meta)(void *self, size_t i,
                                    ferry_param_meta *out_meta);
} ferry_model;

/* ---- what a loader may call, from inside load only ---- */

/* The whole storage of parameter `index` as a destination view. */
ferry_status ferry_loader_slot(ferry_loader *loader, size_t index,
                               ferry_tensor *out_slot);

/* FERRY_EMISMATCH unless `tensor` has exactly this shape; names the
 * parameter and both shapes. */
ferry_status ferry_loader_expect(ferry_loader *loader,
                                 const ferry_tensor *tensor, int32_t ndim,
                                 const int64_t *shape);

/* dst (a view of a slot) takes src (a view of the tensor); equal shapes;
 * dtypes are converted at replay. A destination must be a box of its slot
 * (what narrow, select, transpose and permute make); with q8_0 storage its
 * last dimension starts and ends on multiples of 32. */
ferry_status ferry_load_copy(ferry_loader *loader, const ferry_tensor *dst,
                             const ferry_tensor *src);

/* The same for one of several names of one tied parameter: the first write
 * of a round lands, a later one is compared, and unequal bytes fail the
 * round naming both. */
ferry_status ferry_load_tied(ferry_loader *loader, const ferry_tensor *dst,
                             const ferry_tensor *src);

/* An opaque step: dst is a function of whole inputs. `inputs` are real,
 * contiguous, of wire dtype; write every element of dst; a function of the
 * inputs only (never of dst), so that loading twice is loading once. Called
 * on the loading thread. */
typedef ferry_status (*ferry_step_fn)(void *arg, const ferry_tensor *dst,
                                      const ferry_tensor *inputs,
                                      int32_t n_inputs);

typedef struct ferry_step {
    const char *name; /* unique in the model, for errors and plans */
    ferry_step_fn fn;
    void *arg;
    int32_t n_inputs; /* 1..16; with more than one, inputs are held (a
                           counted copy) until all of a round arrived */
} ferry_step;

/* src becomes input number `input` of the step that writes dst. Each of the
 * step's names states the same step and dst. A step of which only some inputs
 * arrive fails the round at finish, naming the missing ones. */
ferry_status ferry_load_step(ferry_loader *loader, const ferry_step *step,
                             const ferry_tensor *dst, int32_t input,
                             const ferry_tensor *src);

/* Where a parameter that is put aside goes: `tensor` is lazy, contiguous, of
 * wire dtype, and named as the sender declared it; answer memory for all of
 * it. Called on the loading thread, once in each update that brings it, before
 * its first byte. The memory stays the model's; nobody else looks at it after
 * the update. */
typedef ferry_status (*ferry_room_fn)(void *arg, const ferry_tensor *tensor,
                                      void **out_bytes);

/* src, a view of the tensor, is put aside: packed, as it came, into memory
 * that `room` finds. Nothing stored is written, so it takes no part in
 * coverage, and a round that fails has changed nothing; digests are checked
 * as for any other parameter. This is how a server whose own loader wants
 * whole tensors receives names that nobody knew before the first round: a
 * model that puts everything aside needs no stored parameter. A view of no
 * element is known and asks for no room. */
ferry_status ferry_load_aside(ferry_loader *loader, ferry_room_fn room,
                              void *arg, const ferry_tensor *src);

#ifdef __cplusplus
}
#endif
#endif
