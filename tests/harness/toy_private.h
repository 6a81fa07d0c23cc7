/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of the toys share: the list of checkpoint names, and what
 * each stored parameter means. */
#ifndef FERRY_TESTS_HARNESS_TOY_PRIVATE_H
#define FERRY_TESTS_HARNESS_TOY_PRIVATE_H

#include "harness/toy.h"

typedef void (*toy_name_fn)(void *arg, const char *name, ferry_dtype dtype,
                            int32_t ndim, const int64_t *shape);
void toy_each_name(const toy_options *options, toy_name_fn fn, void *arg);
toy_options toy_defaults(const toy_options *options);

/* What a stored parameter holds. */
typedef enum toy_role {
    ROLE_EMBED,
    ROLE_QKV,
    ROLE_O,
    ROLE_GATE_UP,
    ROLE_DOWN,
    ROLE_NORM_IN,
    ROLE_NORM_POST,
    ROLE_NORM,
    ROLE_HEAD, /* one padding row */
    ROLE_ROUTER,
    ROLE_BIAS_GATE,
    ROLE_BIAS_EXPERTS, /* the same values once more (O-61) */
    ROLE_W13,
    ROLE_W2,
    ROLE_COS, /* runtime */
    ROLE_SCALED,
    ROLE_K_SCALE,
    ROLE_A,
    ROLE_D,
    ROLE_DT,
    ROLE_ROWS,
    ROLE_TURNED
} toy_role;

typedef struct toy_stored {
    toy_role role;
    int32_t layer;
    char name[80];
    char step[96];
} toy_stored;

#define TOY_STORED_MAX 512

struct toy {
    toy_options options;
    ferry_model model;
    ferry_name_map map;
    ferry_param *params;
    toy_stored *stored;
    size_t n;
    toy_checkpoint *names; /* as a trainer sends them */
    toy_checkpoint *plain; /* as the loader spells them */
    char why[512];
};

/* Bytes of slot i, and where element k of it lies. */
size_t toy_slot_bytes(const ferry_param *p);

#endif
