/* SPDX-License-Identifier: Apache-2.0 */
/* The policy's forward and backward passes, on batches of token sequences.
 * Any number of sequences goes through in slices of fixed size; gradients
 * add up over the slices. One thread at a time. */
#ifndef RL_LOOP_GRAPH_H
#define RL_LOOP_GRAPH_H

#include "policy.h"

typedef struct graph graph;

/* Sequences of `length` tokens, padded at the end as need be: attention is
 * causal, so what follows a token cannot change it. */
ferry_status graph_create(const policy *p, int32_t length, int32_t n_threads,
                          graph **out);
void graph_destroy(graph **g); /* NULL is fine */

/* Log probabilities of every token of the vocabulary after every position:
 * out is (n_seqs, length, vocab). */
ferry_status graph_forward(graph *g, const int32_t *tokens, size_t n_seqs,
                           float *out);

/* The gradient of
 *   loss = - sum of coefficients[s][t] * log p(tokens[s][t + 1])
 *          - sum of entropies[s][t] * entropy after position t
 * over all positions but each sequence's last, by automatic differentiation.
 * out_gradient has the layout of the policy's weights and is overwritten.
 * FERRY_EINTERNAL: the loss is not finite. */
ferry_status graph_gradient(graph *g, const int32_t *tokens, size_t n_seqs,
                            const float *coefficients, const float *entropies,
                            float *out_gradient, double *out_loss);

#endif
