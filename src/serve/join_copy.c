/* SPDX-License-Identifier: Apache-2.0 */
/* The bytes of a join; see join_copy.h. A span goes to the same rank of every
 * replica, so that it crosses the network once. */
#include "serve/join_copy.h"

#include "base/alloc.h"
#include "base/log.h"
#include "serve/rank_share.h"

#include <stdio.h>
#include <string.h>

#define WRITE_MS 60000

ferry_status ferry__join_layout(ferry__server *s, int32_t rank,
                                json_t **out_list)
{
    void *body = NULL;
    size_t size = 0;

    FERRY_TRY(ferry__replica_ask(&s->replicas[0], rank, FERRY__RANK_LAYOUT,
                                 NULL, 0, &body, &size));
    *out_list = json_loadb(body, size, 0, NULL);
    ferry__free(body);
    if (*out_list == NULL)
        return ferry_fail(FERRY_EINTERNAL, "rank %d has no layout", rank);
    return FERRY_OK;
}

static ferry_status write_one(ferry__replica *r, int32_t rank,
                              const ferry__str *frame)
{
    ferry__waiter w = {NULL, NULL, ferry__deadline_in(WRITE_MS), "rank write"};
    ferry_status status = FERRY_OK;
    ferry_status st =
        ferry__rank_send(r->ranks.control_fds[rank], FERRY__RANK_WRITE,
                         frame->data, frame->length, &w);

    if (st == FERRY_OK)
        st = ferry__rank_receive(r->ranks.control_fds[rank], &w, &status, NULL,
                                 NULL);
    if (st < 0) {
        ferry__fail_prefix(st, "replica %d rank %d (pid %d)", r->index, rank,
                           r->ranks.pids[rank]);
        ferry__replica_lost(r, ferry_last_error());
        return FERRY_EPEER;
    }
    return status;
}

static ferry_status write_all(ferry__server *s, int32_t rank,
                              const ferry__str *frame)
{
    ferry_status st = FERRY_OK;

    pthread_mutex_lock(&s->calls);
    for (int32_t i = 0; st == FERRY_OK && i < s->options->dp_size; i++)
        st = write_one(&s->replicas[i], rank, frame);
    pthread_mutex_unlock(&s->calls);
    return st;
}

static ferry_status copy_span(ferry__join *j, json_int_t content, int32_t rank,
                              const ferry__share_span *span)
{
    ferry__str frame = {0}, bytes = {0};
    char route[192];
    ferry_status st;

    snprintf(route, sizeof route,
             "/ferry/weights?at=%lld&rank=%d&param=%llu&offset=%llu&size=%llu",
             (long long)content, rank, (unsigned long long)span->param,
             (unsigned long long)span->offset,
             (unsigned long long)span->size_bytes);
    FERRY_TRY(ferry__join_ask(j, route, NULL, &bytes));
    if (bytes.length != span->size_bytes)
        st = ferry_fail(FERRY_EPEER,
                        "rank %d, parameter %llu: %zu bytes came for %llu",
                        rank, (unsigned long long)span->param, bytes.length,
                        (unsigned long long)span->size_bytes);
    else {
        ferry__str_append_n(&frame, (const char *)span, sizeof *span);
        ferry__str_append_n(&frame, bytes.data, bytes.length);
        st = frame.failed ? FERRY_ENOMEM : write_all(j->server, rank, &frame);
    }
    ferry__str_free(&frame);
    ferry__str_free(&bytes);
    return st;
}

/* Told to whoever asks why this server is not ready. */
static void say_where(ferry__server *s, int32_t rank, size_t i, size_t count)
{
    for (int32_t k = 0; k < s->options->dp_size; k++) {
        ferry__replica *r = &s->replicas[k];

        pthread_mutex_lock(&r->lock);
        if (r->up && !r->serving)
            snprintf(r->reason, sizeof r->reason,
                     "joining %.200s: rank %d of %d, parameter %zu of %zu",
                     s->options->join, rank, s->options->tp_size, i, count);
        pthread_mutex_unlock(&r->lock);
    }
}

static uint64_t param_bytes(const json_t *list, size_t i)
{
    return (uint64_t)json_integer_value(
        json_object_get(json_array_get(list, i), "bytes"));
}

static ferry_status copy_rank(ferry__join *j, json_int_t content, int32_t rank,
                              const json_t *list)
{
    size_t count = json_array_size(list);
    ferry__share_span span = {0};
    uint64_t left = 0;

    for (size_t i = 0; i < count; i++)
        left += param_bytes(list, i);
    while (left > 0) {
        say_where(j->server, rank, (size_t)span.param, count);
        span.size_bytes =
            left < FERRY__SHARE_SPAN_MAX ? left : FERRY__SHARE_SPAN_MAX;
        FERRY_TRY(copy_span(j, content, rank, &span));
        left -= span.size_bytes;
        span.offset += span.size_bytes;
        while (left > 0 && span.offset >= param_bytes(list, span.param))
            span.offset -= param_bytes(list, span.param++);
    }
    return FERRY_OK;
}

ferry_status ferry__join_copy(ferry__join *j, const json_t *manifest)
{
    json_int_t content =
        json_integer_value(json_object_get(manifest, "content"));
    const json_t *ranks = json_object_get(manifest, "ranks");

    for (int32_t i = 0; i < j->server->options->tp_size; i++)
        FERRY_TRY(copy_rank(j, content, i, json_array_get(ranks, (size_t)i)));
    return FERRY_OK;
}
