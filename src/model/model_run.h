/* SPDX-License-Identifier: Apache-2.0 */
/* What a forward pass needs beside the weights: ggml's views of them, the
 * key-value cache, and memory that is kept between passes.
 * Invariant: a collective that failed makes the later ones of the pass do
 * nothing, so a graph always runs to its end. */
#ifndef FERRY_MODEL_MODEL_RUN_H
#define FERRY_MODEL_MODEL_RUN_H

#include "base/clock.h"
#include "model/model_state.h"

#include <ggml-alloc.h>
#include <ggml-backend.h>
#include <ggml-cpu.h>
#include <ggml.h>

#define FERRY__RUN_LINE 1024

struct ferry__run {
    ferry__model *model;
    ggml_backend_t backend;
    ggml_gallocr_t galloc;
    struct ggml_threadpool *pool; /* NULL with one thread */

    struct ggml_context *fixed;       /* headers of all that follows */
    struct ggml_tensor **weights;     /* by parameter index */
    struct ggml_tensor **k_cache;     /* by layer: (slots × kv heads, max_len,
                                      head_dim) */
    struct ggml_tensor **v_cache;     /* transposed: (slots × kv heads,
                                      head_dim, max_len) */
    struct ggml_tensor *rope_factors; /* NULL without scaling */
    float *rope_values;
    void *cache;
    size_t cache_bytes;

    void *graph_memory; /* headers of one pass */
    size_t graph_bytes;
    float *gathered; /* rank 0: every rank's logits */
    size_t gathered_bytes;

    /* of the running pass */
    const int32_t *tokens; /* all of them, in batch order */
    ferry__deadline deadline;
    ferry_status failed;
    char line[FERRY__RUN_LINE];
};

/* The graph of one pass. The three inputs are filled by the caller after
 * allocation; `last` is NULL when every row is a last one. */
typedef struct ferry__graph {
    struct ggml_context *ctx;
    struct ggml_cgraph *nodes;
    struct ggml_tensor *tokens, *positions, *last;
    struct ggml_tensor *logits; /* (n_seqs, vocab_rows) */
} ferry__graph;

ferry_status ferry__graph_build(ferry__run *run, const ferry__seq_step *steps,
                                int32_t n_seqs, int32_t n_tokens,
                                ferry__graph *out);

/* The graph's own operations, called by ggml on its first thread. */
/* Zeroes the rows of tokens that other ranks embed, then adds up. */
void ferry__run_reduce_embedding(struct ggml_tensor *dst,
                                 const struct ggml_tensor *a, int ith, int nth,
                                 void *run);
void ferry__run_reduce(struct ggml_tensor *dst, const struct ggml_tensor *a,
                       int ith, int nth, void *run);

#endif
