/* SPDX-License-Identifier: Apache-2.0 */
/* Checkpoint names of the Llama family: which there are, their full shapes.
 * Invariant: one table gives the loader, the list of what is missing and the
 * random source their names. */
#ifndef FERRY_MODEL_MODEL_NAMES_H
#define FERRY_MODEL_MODEL_NAMES_H

#include "model/model_config.h"
#include <ferry/source.h>

typedef enum ferry__role {
    FERRY__ROLE_EMBED,
    FERRY__ROLE_Q,
    FERRY__ROLE_K,
    FERRY__ROLE_V,
    FERRY__ROLE_Q_BIAS,
    FERRY__ROLE_K_BIAS,
    FERRY__ROLE_V_BIAS,
    FERRY__ROLE_O,
    FERRY__ROLE_Q_NORM,
    FERRY__ROLE_K_NORM,
    FERRY__ROLE_GATE,
    FERRY__ROLE_UP,
    FERRY__ROLE_DOWN,
    FERRY__ROLE_IN_NORM,
    FERRY__ROLE_POST_NORM,
    FERRY__ROLE_NORM,
    FERRY__ROLE_HEAD,
    FERRY__ROLE_NONE /* known, stores nothing: saved rotary tables */
} ferry__role;

/* What `name` is; false when the model has no such parameter. */
bool ferry__role_find(const ferry__model_config *config, const char *name,
                      ferry__role *out_role, int64_t *out_layer);
/* Full shape in the checkpoint; returns the number of dimensions. */
int32_t ferry__role_shape(const ferry__model_config *config, ferry__role role,
                          int64_t out_shape[2]);
bool ferry__role_is_norm(ferry__role role);

/* Every parameter of a checkpoint, in order, with `dtype`; a tied head is
 * left out. */
ferry_status ferry__checkpoint_list(const ferry__model_config *config,
                                    ferry_dtype dtype,
                                    ferry_param_meta **out_params,
                                    size_t *out_count);
void ferry__checkpoint_free(ferry_param_meta **params);

#endif
