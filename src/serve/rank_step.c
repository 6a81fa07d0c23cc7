/* SPDX-License-Identifier: Apache-2.0 */
/* One generation step in a rank; see rank_step.h. */
#include "serve/rank_step.h"

#include "base/alloc.h"
#include "serve/rank_wire.h"

#include <string.h>

#define STEP_TIMEOUT_MS 60000
#define STEP_SEQS_MAX   4096

typedef struct step {
    int32_t n_seqs;
    int32_t n_sampled;
    ferry__step_seq *seqs;
    ferry__seq_step *steps;
    int32_t *tokens; /* one block; the frame's own copy is unaligned */
} step;

static void step_free(step *s)
{
    ferry__free(s->seqs);
    ferry__free(s->steps);
    ferry__free(s->tokens);
}

static ferry_status step_read(step *s, const char *bytes, size_t size)
{
    ferry__step_head head;
    size_t at = sizeof head, n_tokens = 0;

    if (size < sizeof head)
        return ferry_fail(FERRY_EINTERNAL, "step of %zu bytes is short", size);
    memcpy(&head, bytes, sizeof head);
    if (head.n_seqs < 1 || head.n_seqs > STEP_SEQS_MAX)
        return ferry_fail(FERRY_EINTERNAL, "step of %d sequences", head.n_seqs);
    s->n_seqs = head.n_seqs;
    s->seqs = ferry__alloc_array((size_t)head.n_seqs, sizeof *s->seqs);
    s->steps = ferry__alloc_array((size_t)head.n_seqs, sizeof *s->steps);
    s->tokens = ferry__alloc(size);
    if (s->seqs == NULL || s->steps == NULL || s->tokens == NULL)
        return FERRY_ENOMEM;
    for (int32_t i = 0; i < head.n_seqs; i++) {
        ferry__step_seq *seq = &s->seqs[i];
        size_t token_bytes;

        if (size - at < sizeof *seq)
            return ferry_fail(FERRY_EINTERNAL, "step ends in sequence %d", i);
        memcpy(seq, bytes + at, sizeof *seq);
        at += sizeof *seq;
        token_bytes = (size_t)seq->n_tokens * sizeof(int32_t);
        if (seq->n_tokens < 1 || size - at < token_bytes)
            return ferry_fail(FERRY_EINTERNAL,
                              "step ends in tokens of "
                              "sequence %d",
                              i);
        memcpy(s->tokens + n_tokens, bytes + at, token_bytes);
        s->steps[i] = (ferry__seq_step){seq->slot, seq->position, seq->n_tokens,
                                        s->tokens + n_tokens};
        n_tokens += (size_t)seq->n_tokens;
        at += token_bytes;
        s->n_sampled += seq->sample != 0;
    }
    return FERRY_OK;
}

static ferry_status step_sample(const step *s, int64_t vocab_size,
                                const float *logits, void **out_body,
                                size_t *out_size)
{
    size_t size = (size_t)s->n_sampled * sizeof(ferry__step_token);
    ferry__step_token *tokens = ferry__alloc(size);
    int32_t k = 0;

    if (tokens == NULL)
        return FERRY_ENOMEM;
    for (int32_t i = 0; i < s->n_seqs; i++) {
        const ferry__step_seq *seq = &s->seqs[i];
        const float *row = logits + (size_t)i * (size_t)vocab_size;

        if (!seq->sample)
            continue;
        ferry__sample(row, vocab_size, &seq->sampling, seq->draw,
                      &tokens[k].picked);
        if (seq->n_top > 0)
            ferry__top_logprobs(row, vocab_size,
                                seq->n_top > 32 ? 32 : seq->n_top,
                                tokens[k].top);
        k++;
    }
    *out_body = tokens;
    *out_size = size;
    return FERRY_OK;
}

ferry_status ferry__rank_step(ferry__model *model, int64_t vocab_size,
                              const char *bytes, size_t size_bytes,
                              void **out_body, size_t *out_size)
{
    step s = {0};
    float *logits = NULL;
    bool first = ferry__model_tp_rank(model) == 0;
    ferry_status st = step_read(&s, bytes, size_bytes);

    if (st == FERRY_OK && first) {
        logits = ferry__alloc_array((size_t)s.n_seqs * (size_t)vocab_size,
                                    sizeof *logits);
        if (logits == NULL)
            st = FERRY_ENOMEM;
    }
    if (st == FERRY_OK)
        st = ferry__model_forward(model, s.steps, s.n_seqs, logits,
                                  STEP_TIMEOUT_MS);
    if (st == FERRY_OK && first)
        st = step_sample(&s, vocab_size, logits, out_body, out_size);
    ferry__free(logits);
    step_free(&s);
    return st;
}
