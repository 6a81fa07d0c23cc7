/* SPDX-License-Identifier: Apache-2.0 */
/* The TOY fixtures of the cases, as model tables and as checkpoints.
 * fill(seed): each element is a function of (seed, name, flat index).
 * Invariant: what a rank must store is worked out from the meaning of each
 * stored parameter, element by element; no view, plan or loader has a part in
 * it. */
#ifndef FERRY_TESTS_HARNESS_TOY_H
#define FERRY_TESTS_HARNESS_TOY_H

#include <ferry/model.h>

#define TOY_VOCAB   8
#define TOY_HIDDEN  4
#define TOY_FFN     6
#define TOY_EXPERTS 4

typedef enum toy_kind {
    TOY_A, /* dense */
    TOY_M, /* mixture of experts */
    TOY_Q, /* steps: scaled weights, transforms, 0-d scales */
    TOY_B  /* rows of q8_0 blocks, cut by column */
} toy_kind;

typedef struct toy_options {
    toy_kind kind;
    int32_t tp_rank, tp_size; /* size 0: 1 */
    int32_t n_layers;         /* 0: 2 */
    ferry_dtype wire;         /* of weights; 0: bfloat16 */
    ferry_dtype store;        /* of weights; 0: bfloat16 */
    int tied;                 /* lm_head is embed_tokens */
    int64_t vocab;            /* 0: 8 */
    int prefix;               /* names begin with model.language_model. */
} toy_options;

/* ---- checkpoint ---- */

typedef struct toy_checkpoint {
    toy_options options;
    ferry_param_meta *metas; /* names owned */
    size_t count;
    void **bytes; /* contiguous, one block each */
} toy_checkpoint;

toy_checkpoint *toy_checkpoint_create(const toy_options *options);
void toy_checkpoint_free(toy_checkpoint *c);
void toy_checkpoint_fill(toy_checkpoint *c, uint32_t seed);
size_t toy_checkpoint_find(const toy_checkpoint *c, const char *name);
size_t toy_bytes(const ferry_param_meta *meta);
/* A module source over names [first, first + count) of the checkpoint. */
ferry_source toy_checkpoint_source(toy_checkpoint *c, size_t first,
                                   size_t count);
/* The value of one element, as fill puts it (before rounding to a dtype). */
double toy_value(uint32_t seed, const char *name, int64_t index);
/* One element in a dtype; rounds to nearest even. Its own arithmetic. */
void toy_encode(ferry_dtype dtype, double value, void *out);
double toy_decode(ferry_dtype dtype, const void *bytes);

/* ---- model ---- */

typedef struct toy toy;

toy *toy_create(const toy_options *options);
void toy_free(toy *t);
const ferry_model *toy_model(toy *t);
/* Every stored byte becomes 0x7F; runtime tables get their own values. */
void toy_poison(toy *t);
/* NULL when every stored byte is that of fill(seed), else what differs. The
 * text is the toy's. */
const char *toy_differs(toy *t, uint32_t seed);
/* The same for one stored parameter. */
const char *toy_slot_differs(toy *t, const char *name, uint32_t seed);
size_t toy_slot(const toy *t, const char *name);
/* XXH-free checksum of everything stored, for "not one byte changed". */
uint64_t toy_sum(const toy *t);

#endif
