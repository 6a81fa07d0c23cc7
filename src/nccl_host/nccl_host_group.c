/* SPDX-License-Identifier: Apache-2.0 */
/* ncclGroupStart and ncclGroupEnd: calls of this thread are kept and carried
 * out at the end, those of several communicators at once.
 * Invariant: a group of which one call was refused carries out none. */
#include "nccl_host/nccl_host.h"

#include "base/alloc.h"
#include "base/log.h"
#include "base/thread.h"

#include <stdio.h>
#include <string.h>

typedef struct group {
    int depth;
    ferry__nccl_op *ops;
    size_t n, capacity;
    ncclResult_t refused;
    char line[512];
} group;

/* The calls of one communicator, on a thread of their own. */
typedef struct part {
    ferry__nccl_op *ops;
    size_t n;
    ncclResult_t result;
    char line[512];
    pthread_t thread;
    bool started;
} part;

static _Thread_local group mine;

static void forget(void)
{
    ferry__free(mine.ops);
    mine.ops = NULL;
    mine.n = mine.capacity = 0;
    mine.refused = ncclSuccess;
}

ncclResult_t ferry__nccl_refuse(ferry_status status)
{
    ncclResult_t result = ferry__nccl_result(status);

    if (mine.depth > 0 && mine.refused == ncclSuccess) {
        mine.refused = result;
        snprintf(mine.line, sizeof(mine.line), "%s", ferry_last_error());
    }
    return result;
}

ncclResult_t ferry__nccl_submit(const ferry__nccl_op *op)
{
    ferry_status status;

    if (mine.depth == 0)
        return ferry__nccl_run(op, 1);
    status = ferry__grow(&mine.ops, &mine.capacity, mine.n, sizeof(*op));
    if (status < 0)
        return ferry__nccl_refuse(status);
    mine.ops[mine.n++] = *op;
    return ncclSuccess;
}

static void *run_part(void *arg)
{
    part *p = arg;

    p->result = ferry__nccl_run(p->ops, p->n);
    if (p->result != ncclSuccess)
        snprintf(p->line, sizeof(p->line), "%s", ferry_last_error());
    return NULL;
}

/* Stable: calls of one communicator keep their order. */
static size_t split(const group *g, ferry__nccl_op *sorted, part *parts)
{
    size_t n_parts = 0, n = 0;

    for (size_t i = 0; i < g->n; i++) {
        size_t first = n;
        bool seen = false;

        for (size_t k = 0; k < i && !seen; k++)
            seen = g->ops[k].comm == g->ops[i].comm;
        if (seen)
            continue;
        for (size_t k = i; k < g->n; k++) {
            if (g->ops[k].comm == g->ops[i].comm)
                sorted[n++] = g->ops[k];
        }
        parts[n_parts++] = (part){.ops = sorted + first, .n = n - first};
    }
    return n_parts;
}

static ncclResult_t run_parts(part *parts, size_t n)
{
    ncclResult_t result = ncclSuccess;

    for (size_t i = 1; i < n; i++) {
        ferry_status status = ferry__thread_start(
            &parts[i].thread, "nccl-group", run_part, &parts[i]);

        parts[i].started = status >= 0;
        if (status < 0) {
            parts[i].result = ferry__nccl_result(status);
            snprintf(parts[i].line, sizeof(parts[i].line), "%s",
                     ferry_last_error());
        }
    }
    run_part(&parts[0]);
    for (size_t i = 0; i < n; i++) {
        if (parts[i].started)
            pthread_join(parts[i].thread, NULL);
        if (result == ncclSuccess && parts[i].result != ncclSuccess) {
            result = parts[i].result;
            ferry__fail_line(FERRY_EPEER, parts[i].line);
        }
    }
    return result;
}

static ncclResult_t run_group(const group *g)
{
    ferry__nccl_op *sorted = ferry__alloc_array(g->n, sizeof(*sorted));
    part *parts = ferry__alloc_array(g->n, sizeof(*parts));
    ncclResult_t result = ncclSystemError;

    if (sorted && parts)
        result = run_parts(parts, split(g, sorted, parts));
    ferry__free(sorted);
    ferry__free(parts);
    return result;
}

ncclResult_t ncclGroupStart(void)
{
    mine.depth++;
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void)
{
    ncclResult_t result = ncclSuccess;

    if (mine.depth == 0)
        return ferry__nccl_result(
            ferry_fail(FERRY_EORDER, "ncclGroupEnd without ncclGroupStart"));
    if (--mine.depth > 0)
        return ncclSuccess;
    if (mine.refused != ncclSuccess) {
        result = mine.refused;
        ferry__fail_line(FERRY_EINVAL, mine.line);
    } else if (mine.n > 0) {
        result = run_group(&mine);
    }
    forget();
    return result;
}
