/* SPDX-License-Identifier: Apache-2.0 */
/* The group as both halves hold it: its cuts, its stream, buffers that are
 * not the host's, its end.
 * Invariant: all ranks open the stream anew in the same rounds, since they
 * decide it by the cuts alone. */
#include "backends/nccl/nccl_wire.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"
#include "device/memory.h"

#include <stdio.h>

bool ferry__nccl_can_digest(const ferry__comm *c)
{
    return c->ops->all_gather && c->ops->send && c->ops->recv;
}

ferry_status ferry__nccl_cut(const ferry_param_meta *params, size_t count,
                             bool packed, uint64_t limit_bytes, bool warn,
                             ferry__cuts *out)
{
    ferry__cut_rule rule = packed ? FERRY__CUT_EXCEED : FERRY__CUT_EACH;

    return warn ? ferry__cuts_make(rule, params, count, limit_bytes, out)
                : ferry__cuts_again(rule, params, count, limit_bytes, out);
}

ferry_status ferry__nccl_fit_stream(ferry__nccl_group *g,
                                    const ferry__cuts *cuts, int32_t n_buffers,
                                    int64_t timeout_ms, int64_t no_progress_ms)
{
    ferry__stream_options o = {.root = 0,
                               .n_buffers = n_buffers,
                               .buffer_bytes = cuts->peak_bytes,
                               .timeout_ms = timeout_ms,
                               .no_progress_ms = no_progress_ms};

    if (cuts->peak_bytes <= g->largest)
        return FERRY_OK;
    ferry__stream_close(&g->stream);
    g->largest = 0;
    FERRY_TRY(ferry__stream_open(g->comm, &o, &g->stream));
    g->largest = cuts->peak_bytes;
    return FERRY_OK;
}

bool ferry__nccl_moves(ferry__nccl_group *g)
{
    uint64_t before = g->moved;

    if (g->comm && g->comm->ops->moved)
        g->moved = g->comm->ops->moved(g->comm);
    return g->moved != before;
}

const char *ferry__nccl_path(const ferry__nccl_group *g, char *buffer,
                             size_t size_bytes)
{
    ferry__comm *c = g->comm;
    int n;

    buffer[0] = '\0';
    if (c->ops->describe)
        c->ops->describe(c, buffer, size_bytes);
    if (buffer[0] == '\0')
        snprintf(buffer, size_bytes, "%s", c->ops->provider);
    for (n = 0; buffer[n] != '\0';)
        n++;
    if (g->stream && g->stream->path && (size_t)n < size_bytes)
        snprintf(buffer + n, size_bytes - (size_t)n, ", %s", g->stream->path);
    return buffer;
}

void ferry__nccl_close(ferry__nccl_group *g, ferry_status status)
{
    char line[1024];

    snprintf(line, sizeof(line), "%s", ferry_last_error());
    if (g->comm && status < 0) {
        if (g->comm->ops->fail)
            g->comm->ops->fail(g->comm, status, line);
        else
            g->comm->ops->abort(g->comm);
    }
    ferry__stream_close(&g->stream);
    ferry__comm_close(&g->comm);
    g->largest = 0;
    g->moved = 0;
    ferry__fail_line(status, line);
}

/* ---- staging ---- */

ferry_status ferry__nccl_stage_open(ferry__nccl_stage *s, const ferry__comm *c)
{
    ferry__queue *queue = NULL;
    ferry__event *event = NULL;

    *s = (ferry__nccl_stage){
        .memory = c->memory, .check = c->check, .check_arg = c->check_arg};
    s->scratch = ferry__alloc_raw(FERRY__NCCL_STAGE_BYTES);
    if (!s->scratch)
        return FERRY_ENOMEM;
    if (!s->memory)
        return FERRY_OK;
    FERRY_TRY(s->memory->queue_create(&queue));
    s->queue = queue;
    FERRY_TRY(s->memory->event_create(&event));
    s->event = event;
    return FERRY_OK;
}

void ferry__nccl_stage_close(ferry__nccl_stage *s)
{
    if (s->event)
        s->memory->event_destroy(s->event);
    if (s->queue)
        s->memory->queue_destroy(s->queue);
    ferry__free(s->scratch);
    *s = (ferry__nccl_stage){0};
}

ferry_status ferry__nccl_stage_copy(ferry__nccl_stage *s, void *dst,
                                    const void *src, size_t size_bytes)
{
    ferry_status status;

    FERRY_TRY(s->memory->copy(s->queue, dst, src, size_bytes));
    FERRY_TRY(s->memory->event_record(s->event, s->queue));
    for (;;) {
        status = s->memory->event_query(s->event);
        if (status != FERRY_EBUSY)
            return status;
        if (s->check)
            FERRY_TRY(s->check(s->check_arg, "a copy of the device"));
        ferry__sleep_ms(0);
    }
}
