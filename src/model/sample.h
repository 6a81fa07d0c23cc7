/* SPDX-License-Identifier: Apache-2.0 */
/* Choosing the next token from logits. Invariant: the same logits, options
 * and draw number give the same token. */
#ifndef FERRY_MODEL_SAMPLE_H
#define FERRY_MODEL_SAMPLE_H

#include <ferry/status.h>

typedef struct ferry__sampling {
    double temperature; /* 0: greedy, lowest id on ties */
    double top_p;       /* (0, 1]; 1 = off */
    int32_t top_k;      /* <= 0 = off */
    uint64_t seed;
} ferry__sampling;

typedef struct ferry__sampled {
    int32_t token;
    float logprob; /* log-softmax of the raw logits (temperature 1) */
} ferry__sampled;

/* `draw` is the index of the output token in its sequence. */
void ferry__sample(const float *logits, int64_t vocab_size,
                   const ferry__sampling *sampling, uint64_t draw,
                   ferry__sampled *out);
/* The n most likely tokens with logprobs, falling; n <= 32. */
void ferry__top_logprobs(const float *logits, int64_t vocab_size, int32_t n,
                         ferry__sampled *out);

#endif
