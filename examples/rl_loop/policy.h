/* SPDX-License-Identifier: Apache-2.0 */
/* The policy: a small Llama under Hugging Face's names, in f32.
 * All weights lie in one piece of memory that the workers of this host can
 * read in place, so a sync copies each byte once. */
#ifndef RL_LOOP_POLICY_H
#define RL_LOOP_POLICY_H

#include "rng.h"

#include <ferry/ferry.h>

#define POLICY_LAYERS_MAX 8

typedef struct policy_config {
    int32_t vocab, hidden, ffn, n_layers, n_heads, n_kv_heads, head_dim;
    int32_t max_positions, bos, eos;
    float rms_eps, rope_theta;
} policy_config;

extern const policy_config policy_small;

/* One parameter; `at` is its first float within the policy's memory. */
typedef struct policy_param {
    char name[64];
    int32_t ndim;
    int64_t shape[2]; /* row-major, as checkpoints have it */
    size_t at, count;
} policy_param;

/* Indexes into a layer's parameters. */
enum {
    LAYER_IN_NORM,
    LAYER_Q,
    LAYER_K,
    LAYER_V,
    LAYER_O,
    LAYER_POST_NORM,
    LAYER_GATE,
    LAYER_UP,
    LAYER_DOWN,
    LAYER_PARAMS
};

/* Parameter indexes: embedding, the layers' in order, final norm, head. */
#define POLICY_EMBED              0
#define POLICY_LAYER(layer, kind) (1 + (layer)*LAYER_PARAMS + (kind))
#define POLICY_NORM(config)       POLICY_LAYER((config)->n_layers, 0)
#define POLICY_HEAD(config)       POLICY_LAYER((config)->n_layers, 1)
#define POLICY_PARAMS_MAX         (POLICY_LAYERS_MAX * LAYER_PARAMS + 3)

typedef struct policy {
    policy_config config;
    policy_param params[POLICY_PARAMS_MAX];
    size_t n_params;
    float *weights; /* n_weights, shared memory */
    size_t n_weights;
} policy;

/* Random weights from `random`; the head starts small, so that the first
 * policy is close to chance. FERRY_EINVAL, FERRY_ENOSPC. */
ferry_status policy_create(const policy_config *config, rng *random,
                           policy **out);
void policy_destroy(policy **p); /* NULL is fine */

/* A source over the weights where they lie. */
ferry_status policy_source(const policy *p, ferry_source *out);

/* Writes `folder`/config.json, from which a server learns the shapes. */
ferry_status policy_write_config(const policy_config *config,
                                 const char *folder);

#endif
