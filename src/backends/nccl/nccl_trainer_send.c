/* SPDX-License-Identifier: Apache-2.0 */
/* A round: the update call with vLLM's three lists, beside it a header and
 * the workers' boxes where all are Ferry, then the tensors of the pass as the
 * buffers that both ends cut alike, then the digests.
 * Invariant: a tensor is gathered whole on all trainer ranks before it is
 * handed to the group (O-10), and whatever fails, no worker is left waiting
 * for bytes. */
#include "backends/nccl/nccl_trainer_state.h"

#include "base/log.h"
#include "core/manifest.h"

#include <stdio.h>

typedef struct send_state {
    nccl__trainer *t;
    const ferry_param_meta *params;
    size_t count;
    ferry__cuts cuts;
    nccl__proofs *proofs;
} send_state;

static uint64_t total_bytes(const ferry__cuts *cuts)
{
    uint64_t sum = 0;

    for (size_t i = 0; i < cuts->n_buffers; i++)
        sum += cuts->bytes[i];
    return sum;
}

/* ---- before the buffers ---- */

static ferry_status begin_call(const send_state *s)
{
    ferry__str text = {0};
    ferry_status status;

    ferry__str_append(&text, "{");
    ferry__manifest_to_json(s->params, s->count, &text);
    ferry__str_append(&text, "}");
    if (text.failed)
        status = ferry_fail(FERRY_ENOMEM, "nccl update info: out of memory");
    else
        status = s->t->host->update_begin(s->t->ctx, text.data);
    ferry__str_free(&text);
    return status;
}

static ferry_status send_header(const send_state *s)
{
    nccl__trainer *t = s->t;
    ferry__comm *c = t->group.comm;
    ferry__nccl_header v = {.magic = FERRY__NCCL_MAGIC,
                            .digest = t->digest,
                            .round = t->round,
                            .manifest_digest =
                                ferry__manifest_digest(s->params, s->count),
                            .cuts_digest = s->cuts.digest,
                            .n_buffers = s->cuts.n_buffers,
                            .bytes = total_bytes(&s->cuts)};
    ferry__str bytes = {0};
    ferry_status status = FERRY_ENOMEM;

    ferry__nccl_put_header(&bytes, &v);
    if (!bytes.failed)
        status = c->ops->broadcast(c, bytes.data, bytes.length, 0,
                                   t->host->remaining_ms(t->ctx));
    ferry__str_free(&bytes);
    return status;
}

static ferry_status announce(send_state *s)
{
    nccl__trainer *t = s->t;

    if (!t->extras)
        return FERRY_OK;
    FERRY_TRY(send_header(s));
    if (!t->digest)
        return FERRY_OK;
    return nccl__proofs_open(t, s->params, s->count, &s->proofs);
}

/* ---- the buffers ---- */

static ferry_status next_tensor(const send_state *s, size_t i, ferry_item *out)
{
    ferry_status status = s->t->host->pass_next(s->t->ctx, out);

    FERRY_TRY(status);
    if (status == FERRY_DONE)
        return ferry_fail(FERRY_ECOVERAGE, "parameter %s did not come",
                          s->params[i].name);
    return FERRY_OK;
}

static ferry_status expect_end(const nccl__trainer *t)
{
    ferry_item item;
    ferry_status status = t->host->pass_next(t->ctx, &item);

    FERRY_TRY(status);
    if (status != FERRY_DONE)
        return ferry_fail(FERRY_EMISMATCH, "parameter %s was not declared",
                          item.name);
    return FERRY_OK;
}

/* The next tensor is gathered while the stream's thread sends the last. */
static ferry_status pack_all(const send_state *s)
{
    nccl__packer p = {.t = s->t, .proofs = s->proofs};

    for (size_t i = 0; i < s->count; i++) {
        ferry_item item;

        FERRY_TRY(next_tensor(s, i, &item));
        FERRY_TRY(nccl__pack(&p, i, s->params[i].name, &item.tensor));
        /* An empty one is in no room; its boxes have a digest all the same. */
        if (s->proofs && ferry_tensor_numel(&item.tensor) == 0)
            nccl__proofs_feed(s->proofs, i, "", 0, 0);
    }
    return expect_end(s->t);
}

static ferry_status end_stream(nccl__trainer *t)
{
    ferry__stream *s = t->group.stream;
    int64_t began = t->host->now_ns();

    FERRY_TRY(s->ops->end(s));
    t->host->stats(t->ctx)->wire_ms +=
        (double)(t->host->now_ns() - began) / 1e6;
    FERRY_HOST_SPAN(t->host, t->ctx, "wire", began);
    return FERRY_OK;
}

static ferry_status stream_all(const send_state *s)
{
    nccl__trainer *t = s->t;
    ferry__nccl_group *g = &t->group;

    /* Only parameters without elements: nobody waits for a buffer. */
    if (s->cuts.peak_bytes == 0)
        return pack_all(s);
    FERRY_TRY(ferry__nccl_fit_stream(g, &s->cuts, t->n_buffers,
                                     t->host->remaining_ms(t->ctx),
                                     nccl__no_progress_ms(t)));
    FERRY_TRY(
        g->stream->ops->begin(g->stream, s->cuts.bytes, s->cuts.n_buffers));
    FERRY_TRY(pack_all(s));
    return end_stream(t);
}

static void note_stats(const nccl__trainer *t)
{
    ferry_round_stats *stats = t->host->stats(t->ctx);
    char path[256];

    if (t->group.stream)
        stats->peak_bytes = t->group.stream->peak_bytes;
    stats->peak_bytes += t->fetcher.peak_bytes;
    snprintf(stats->path, sizeof(stats->path), "%s",
             t->group.stream ? t->group.stream->path
                             : t->group.comm->ops->provider);
    t->host->log(FERRY_LOG_INFO, "nccl: round %llu went by %s",
                 (unsigned long long)t->round,
                 ferry__nccl_path(&t->group, path, sizeof(path)));
}

/* ---- the round ---- */

static ferry_status send_all(send_state *s)
{
    nccl__trainer *t = s->t;

    FERRY_TRY(begin_call(s));
    FERRY_TRY(announce(s));
    FERRY_TRY(stream_all(s));
    if (s->proofs)
        FERRY_TRY(nccl__proofs_send(s->proofs));
    FERRY_TRY(t->host->update_wait(t->ctx));
    note_stats(t);
    return FERRY_OK;
}

static ferry_status drain_pass(const nccl__trainer *t)
{
    ferry_item item;
    ferry_status status;

    do {
        status = t->host->pass_next(t->ctx, &item);
    } while (status == FERRY_OK);
    return status < 0 ? status : FERRY_OK;
}

static ferry_status send_round(send_state *s)
{
    nccl__trainer *t = s->t;

    FERRY_TRY(t->host->pass_begin(t->ctx, &s->params, &s->count));
    if (!t->is_sender || s->count == 0)
        return drain_pass(t);
    if (!t->open)
        return ferry_fail(FERRY_ECONN, "the group of the workers is closed");
    FERRY_TRY(ferry__nccl_cut(s->params, s->count, t->info->packed != 0,
                              t->buffer_bytes, t->round == 1, &s->cuts));
    return send_all(s);
}

/* A worker that fails ends the group, which here looks like a cancelation;
 * only the host knows whether it is one. */
static ferry_status cause_of(nccl__trainer *t, ferry_status status,
                             const char *line)
{
    if (status != FERRY_ECANCELED)
        return ferry__fail_line(status, line);
    FERRY_TRY(t->host->check(t->ctx, "sending"));
    return ferry__fail_line(FERRY_EPEER, line);
}

/* A round that failed leaves a group in which nobody can say what comes
 * next: it is ended at once, so that the workers wake too. */
static ferry_status end_group(nccl__trainer *t, ferry_status status)
{
    char line[1024];

    nccl__session_close(t, status);
    snprintf(line, sizeof(line), "%s", ferry_last_error());
    return cause_of(t, status, line);
}

ferry_status nccl__trainer_send(void *self, const void *payload,
                                size_t payload_count)
{
    nccl__trainer *t = self;
    send_state s = {.t = t};
    ferry_status status;

    (void)payload;
    (void)payload_count;
    t->round++;
    status = send_round(&s);
    /* Before the tensors may go. */
    ferry__fetch_rest(&t->fetcher);
    t->host->pass_end(t->ctx);
    nccl__proofs_close(&s.proofs);
    if (status < 0 && t->open)
        status = end_group(t, status);
    ferry__cuts_free(&s.cuts);
    return status;
}
