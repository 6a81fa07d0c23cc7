/* SPDX-License-Identifier: Apache-2.0 */
/* One forward pass: checks the steps, runs the graph, brings the logits to
 * rank 0. All ranks refuse the same steps, before any collective. */
#include "model/model_run.h"

#include "base/alloc.h"
#include "base/log.h"

#include <string.h>

/* ---- the ranks' parts are added up ---- */

static int64_t time_left(const ferry__run *run)
{
    int64_t left = ferry__deadline_left_ms(&run->deadline);

    return left > 0 ? left : 1;
}

/* The line is kept, as ggml may run this on another thread. */
static void note(ferry__run *run, ferry_status st)
{
    if (st >= 0)
        return;
    run->failed = st;
    strncpy(run->line, ferry_last_error(), sizeof(run->line) - 1);
}

static void add_ranks(ferry__run *run, void *data, int64_t count)
{
    ferry__comm *comm = run->model->comm;

    if (run->failed == FERRY_OK)
        note(run, comm->ops->all_reduce(comm, data, count, FERRY_DTYPE_F32,
                                        FERRY__REDUCE_SUM, time_left(run)));
}

void ferry__run_reduce(struct ggml_tensor *dst, const struct ggml_tensor *a,
                       int ith, int nth, void *run)
{
    (void)a;
    (void)nth;
    if (ith == 0)
        add_ranks(run, dst->data, ggml_nelements(dst));
}

static bool is_mine(const ferry__shard *s, int32_t token)
{
    return token >= s->vocab_first && token < s->vocab_first + s->vocab_valid;
}

void ferry__run_reduce_embedding(struct ggml_tensor *dst,
                                 const struct ggml_tensor *a, int ith, int nth,
                                 void *run)
{
    ferry__run *r = run;
    int64_t i;

    (void)a;
    (void)nth;
    if (ith != 0)
        return;
    for (i = 0; i < dst->ne[1]; i++) {
        if (!is_mine(&r->model->shard, r->tokens[i]))
            memset((char *)dst->data + (size_t)i * dst->nb[1], 0,
                   (size_t)dst->ne[0] * sizeof(float));
    }
    add_ranks(r, dst->data, ggml_nelements(dst));
}

/* ---- checks ---- */

static ferry_status check_step(const ferry__model *m, const ferry__seq_step *s,
                               int32_t index)
{
    int32_t i;

    if (s->slot < 0 || s->slot >= m->max_seqs)
        return ferry_fail(FERRY_EINVAL, "sequence %d: slot %d of %d", index,
                          s->slot, m->max_seqs);
    if (s->n_tokens < 1 || s->position < 0 ||
        s->n_tokens > m->max_len - s->position)
        return ferry_fail(FERRY_EINVAL,
                          "sequence %d: %d tokens at position %d, the limit "
                          "is %d",
                          index, s->n_tokens, s->position, m->max_len);
    for (i = 0; i < s->n_tokens; i++) {
        if (s->tokens[i] < 0 || s->tokens[i] >= m->config.vocab_size)
            return ferry_fail(FERRY_EINVAL,
                              "sequence %d: token %d at position %d, the "
                              "vocabulary has %lld",
                              index, s->tokens[i], s->position + i,
                              (long long)m->config.vocab_size);
    }
    return FERRY_OK;
}

static ferry_status check_slots(const ferry__seq_step *steps, int32_t n_seqs)
{
    int32_t i, j;

    for (i = 0; i < n_seqs; i++) {
        for (j = 0; j < i; j++) {
            if (steps[i].slot == steps[j].slot)
                return ferry_fail(FERRY_EINVAL,
                                  "sequences %d and %d share slot %d", j, i,
                                  steps[i].slot);
        }
    }
    return FERRY_OK;
}

static ferry_status check_steps(const ferry__model *m,
                                const ferry__seq_step *steps, int32_t n_seqs,
                                int32_t *out_tokens)
{
    int64_t total = 0;
    int32_t i;

    if (!m->run)
        return ferry_fail(FERRY_ENOTSUP, "the model was made for storage only");
    if (n_seqs < 1 || n_seqs > m->max_seqs)
        return ferry_fail(FERRY_EINVAL, "%d sequences, the limit is %d", n_seqs,
                          m->max_seqs);
    for (i = 0; i < n_seqs; i++) {
        FERRY_TRY(check_step(m, &steps[i], i));
        total += steps[i].n_tokens;
    }
    if (total > INT32_MAX / 2)
        return ferry_fail(FERRY_EINVAL, "%lld tokens in one pass",
                          (long long)total);
    *out_tokens = (int32_t)total;
    return check_slots(steps, n_seqs);
}

/* ---- one pass ---- */

/* Rows of tokens that other ranks embed are read from row 0 and zeroed. */
static void fill_inputs(const ferry__run *run, const ferry__graph *g,
                        const ferry__seq_step *steps, int32_t n_seqs)
{
    const ferry__shard *shard = &run->model->shard;
    int32_t *rows = g->tokens->data, *positions = g->positions->data;
    int32_t *last = g->last ? g->last->data : NULL;
    int32_t at = 0, i, j;

    for (i = 0; i < n_seqs; i++) {
        for (j = 0; j < steps[i].n_tokens; j++, at++) {
            int32_t token = steps[i].tokens[j];

            rows[at] =
                is_mine(shard, token) ? token - (int32_t)shard->vocab_first : 0;
            positions[at] = steps[i].position + j;
        }
        if (last)
            last[i] = at - 1;
    }
}

static ferry_status compute(ferry__run *run, const ferry__seq_step *steps,
                            int32_t n_seqs, ferry__graph *g)
{
    enum ggml_status st;

    if (!ggml_gallocr_alloc_graph(run->galloc, g->nodes))
        return ferry_fail(FERRY_ENOMEM, "ggml: no memory for %d sequences",
                          n_seqs);
    fill_inputs(run, g, steps, n_seqs);
    run->failed = FERRY_OK;
    st = ggml_backend_graph_compute(run->backend, g->nodes);
    if (run->failed < 0)
        return ferry__fail_line(run->failed, run->line);
    if (st != GGML_STATUS_SUCCESS)
        return ferry_fail(FERRY_EINTERNAL, "ggml: %s",
                          ggml_status_to_string(st));
    return FERRY_OK;
}

static ferry_status reserve_gathered(ferry__run *run, size_t bytes)
{
    if (bytes <= run->gathered_bytes)
        return FERRY_OK;
    ferry__free(run->gathered);
    run->gathered_bytes = 0;
    run->gathered = ferry__alloc_raw(bytes);
    if (!run->gathered)
        return FERRY_ENOMEM;
    run->gathered_bytes = bytes;
    return FERRY_OK;
}

/* (rank, sequence, row) -> (sequence, row of the vocabulary); the padding
 * rows of the last ranks fall away. */
static void unshard(const ferry__model *m, int32_t n_seqs, const float *from,
                    float *out)
{
    int64_t rows = m->shard.vocab_rows, vocab = m->config.vocab_size;
    int32_t rank, i;

    for (rank = 0; rank < m->shard.size; rank++) {
        int64_t first = rank * rows;
        int64_t count = vocab - first < rows ? vocab - first : rows;

        for (i = 0; i < n_seqs; i++)
            memcpy(out + i * vocab + first,
                   from + ((int64_t)rank * n_seqs + i) * rows,
                   (size_t)count * sizeof(float));
    }
}

static ferry_status collect(ferry__run *run, const ferry__graph *g,
                            int32_t n_seqs, float *out_logits)
{
    const ferry__model *m = run->model;
    size_t bytes = ggml_nbytes(g->logits);
    bool root = m->shard.rank == 0;

    if (!m->comm) {
        memcpy(out_logits, g->logits->data, bytes);
        return FERRY_OK;
    }
    if (root)
        FERRY_TRY(reserve_gathered(run, bytes * (size_t)m->shard.size));
    FERRY_TRY(m->comm->ops->all_gather(m->comm, g->logits->data, bytes,
                                       root ? run->gathered : NULL,
                                       time_left(run)));
    if (root)
        unshard(m, n_seqs, run->gathered, out_logits);
    return FERRY_OK;
}

static ferry_status gather_tokens(const ferry__seq_step *steps, int32_t n_seqs,
                                  int32_t n_tokens, int32_t **out_tokens)
{
    int32_t *tokens = ferry__alloc_array((size_t)n_tokens, sizeof(*tokens));
    int32_t i, at = 0;

    if (!tokens)
        return FERRY_ENOMEM;
    for (i = 0; i < n_seqs; i++) {
        memcpy(tokens + at, steps[i].tokens,
               (size_t)steps[i].n_tokens * sizeof(*tokens));
        at += steps[i].n_tokens;
    }
    *out_tokens = tokens;
    return FERRY_OK;
}

ferry_status ferry__model_forward(ferry__model *model,
                                  const ferry__seq_step *steps, int32_t n_seqs,
                                  float *out_logits, int64_t timeout_ms)
{
    ferry__run *run = model->run;
    ferry__graph g = {0};
    int32_t *tokens = NULL, n_tokens = 0;
    ferry_status st;

    FERRY_TRY(check_steps(model, steps, n_seqs, &n_tokens));
    if ((model->shard.rank == 0) != (out_logits != NULL))
        return ferry_fail(FERRY_EINVAL, "rank %d: logits are for rank 0",
                          model->shard.rank);
    FERRY_TRY(gather_tokens(steps, n_seqs, n_tokens, &tokens));
    run->tokens = tokens;
    run->deadline = ferry__deadline_in(timeout_ms);
    st = ferry__graph_build(run, steps, n_seqs, n_tokens, &g);
    if (st == FERRY_OK)
        st = compute(run, steps, n_seqs, &g);
    if (st == FERRY_OK)
        st = collect(run, &g, n_seqs, out_logits);
    if (g.ctx)
        ggml_free(g.ctx);
    run->tokens = NULL;
    ferry__free(tokens);
    return st;
}
