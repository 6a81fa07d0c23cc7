/* SPDX-License-Identifier: Apache-2.0 */
/* The host as the inner engine sees it. Items of the pass, update infos and
 * progress are where rules strike; the rest is passed on.
 * Invariant: what is changed is a copy; the source's memory stays as it is. */
#include "backends/fault/fault_trainer_state.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"

#include <string.h>

#define POLL_MS 5

static fault__trainer *of(ferry_trainer_context *ctx)
{
    return (fault__trainer *)ctx;
}

/* ---- the pass ---- */

static ferry_status host_pass_begin(ferry_trainer_context *ctx,
                                    const ferry_param_meta **out_declared,
                                    size_t *out_count)
{
    fault__trainer *t = of(ctx);

    FERRY_TRY(t->host->pass_begin(t->ctx, out_declared, out_count));
    t->declared = t->host->stats(t->ctx)->bytes_declared;
    fault__plan_draw(&t->plan, t->declared);
    return FERRY_OK;
}

/* Room of the wrapper's own that workers can read in place. */
static ferry_status hold(fault__trainer *t, size_t size_bytes, void **out)
{
    fault__held *h;
    void *memory;

    if (t->n_used < t->n_held && t->held[t->n_used].size_bytes >= size_bytes) {
        *out = t->held[t->n_used++].memory;
        return FERRY_OK;
    }
    FERRY_TRY(
        ferry__grow(&t->held, &t->held_capacity, t->n_held, sizeof(*t->held)));
    FERRY_TRY(ferry_shared_alloc(size_bytes, &memory));
    h = &t->held[t->n_held++];
    *h = t->held[t->n_used];
    t->held[t->n_used++] = (fault__held){memory, size_bytes};
    *out = memory;
    return FERRY_OK;
}

/* The item with a copy in place of the source's bytes. */
static ferry_status change(fault__trainer *t, ferry_item *item, uint64_t first,
                           const fault__rule *corrupt, const fault__rule *tear)
{
    ferry_tensor copy;
    unsigned char *bytes;
    void *memory;

    FERRY_TRY(hold(t, ferry_tensor_bytes(&item->tensor), &memory));
    FERRY_TRY(ferry_tensor_init(&copy, memory, item->tensor.dtype,
                                item->tensor.ndim, item->tensor.shape));
    FERRY_TRY(ferry_tensor_copy(&copy, &item->tensor));
    item->tensor = copy;
    bytes = memory;
    if (corrupt != NULL)
        fault__flip(&t->plan, corrupt, bytes + (corrupt->at - first));
    if (tear != NULL) {
        t->torn = bytes + (tear->at - first);
        t->torn_by = tear;
    }
    return FERRY_OK;
}

static ferry_status host_pass_next(ferry_trainer_context *ctx,
                                   ferry_item *out_item)
{
    fault__trainer *t = of(ctx);
    const fault__rule *corrupt, *tear;
    ferry_item item;
    ferry_status st;
    uint64_t first = t->yielded, count;

    if (t->ended)
        return FERRY_DONE;
    st = t->host->pass_next(t->ctx, &item);
    if (st != FERRY_OK || t->plan.n == 0) {
        if (st == FERRY_OK)
            *out_item = item;
        return st;
    }
    count = ferry_tensor_bytes(&item.tensor);
    t->yielded += count;
    FERRY_TRY(fault__strike(&t->plan, &t->ground, FAULT__BYTE, first, count,
                            "yielding", item.name));
    if (fault__plan_take(&t->plan, FAULT__DROP, FAULT__BYTE, first, count)) {
        t->ended = true;
        return FERRY_DONE;
    }
    if (item.tensor.data != NULL) {
        corrupt = fault__plan_take(&t->plan, FAULT__CORRUPT, FAULT__BYTE, first,
                                   count);
        tear =
            fault__plan_take(&t->plan, FAULT__TEAR, FAULT__BYTE, first, count);
        if (corrupt != NULL || tear != NULL)
            FERRY_TRY(change(t, &item, first, corrupt, tear));
    }
    *out_item = item;
    return FERRY_OK;
}

static void host_pass_end(ferry_trainer_context *ctx)
{
    of(ctx)->host->pass_end(of(ctx)->ctx);
}

static bool host_source_is_stable(ferry_trainer_context *ctx)
{
    return of(ctx)->host->source_is_stable(of(ctx)->ctx);
}

/* ---- the source that changes while it is sent ---- */

/* Whether a byte is still to change; changes it when its time has come. */
static bool tear(fault__trainer *t)
{
    if (t->torn == NULL || t->torn_ns == 0)
        return false;
    if (t->host->now_ns() < t->torn_ns)
        return true;
    fault__flip(&t->plan, t->torn_by, t->torn);
    t->torn = NULL;
    return false;
}

static void arm_tear(fault__trainer *t)
{
    if (t->torn != NULL && t->torn_ns == 0)
        t->torn_ns = t->host->now_ns() + t->torn_by->ms * 1000000 + 1;
}

/* ---- the control plane ---- */

static ferry_status begin_text(fault__trainer *t, const char *text, size_t n,
                               const fault__rule *garble,
                               const fault__rule *cut, uint64_t first)
{
    char *copy = ferry__strndup(text, n);
    ferry_status st;

    if (copy == NULL)
        return FERRY_ENOMEM;
    if (garble != NULL)
        fault__flip(&t->plan, garble,
                    (unsigned char *)copy + (garble->at - first));
    if (cut != NULL)
        copy[cut->at - first] = '\0';
    st = t->host->update_begin(t->ctx, copy);
    ferry__free(copy);
    return st;
}

static ferry_status host_update_begin(ferry_trainer_context *ctx,
                                      const char *update_info)
{
    fault__trainer *t = of(ctx);
    const fault__rule *garble, *cut;
    uint64_t first = t->text;
    size_t n = strlen(update_info);

    t->text += n;
    garble = fault__plan_take(&t->plan, FAULT__GARBLE, FAULT__BYTE, first, n);
    cut = fault__plan_take(&t->plan, FAULT__SHORT, FAULT__BYTE, first, n);
    arm_tear(t);
    if (garble == NULL && cut == NULL)
        return t->host->update_begin(t->ctx, update_info);
    return begin_text(t, update_info, n, garble, cut, first);
}

static ferry_status host_update_poll(ferry_trainer_context *ctx)
{
    tear(of(ctx));
    return of(ctx)->host->update_poll(of(ctx)->ctx);
}

/* An engine that only waits gives the change its time as well. */
static ferry_status host_update_wait(ferry_trainer_context *ctx)
{
    fault__trainer *t = of(ctx);

    while (tear(t) && t->host->update_poll(t->ctx) == FERRY_EBUSY) {
        FERRY_TRY(t->host->check(t->ctx, "waiting to change the source"));
        ferry__sleep_ms(POLL_MS);
    }
    return t->host->update_wait(t->ctx);
}

static ferry_status host_init_peer(ferry_trainer_context *ctx,
                                   const char *init_info)
{
    return of(ctx)->host->init_peer(of(ctx)->ctx, init_info);
}

static ferry_status host_init_peer_begin(ferry_trainer_context *ctx,
                                         const char *init_info)
{
    return of(ctx)->host->init_peer_begin(of(ctx)->ctx, init_info);
}

static ferry_status host_check(ferry_trainer_context *ctx, const char *what)
{
    fault__trainer *t = of(ctx);

    tear(t);
    if (t->pending < 0)
        return t->host->fail(t->pending, "fault: trainer fails while %s", what);
    return t->host->check(t->ctx, what);
}

/* Progress answers nothing, so a failure waits for the next look. */
static void host_progress(ferry_trainer_context *ctx, uint64_t bytes)
{
    fault__trainer *t = of(ctx);
    uint64_t first = t->sent;
    ferry_status st;

    t->host->progress(t->ctx, bytes);
    t->sent += bytes;
    st = fault__strike(&t->plan, &t->ground, FAULT__SENT, first, bytes,
                       "sending", "");
    if (st < 0)
        t->pending = st;
}

static int64_t host_remaining_ms(ferry_trainer_context *ctx)
{
    return of(ctx)->host->remaining_ms(of(ctx)->ctx);
}

static ferry_round_stats *host_stats(ferry_trainer_context *ctx)
{
    return of(ctx)->host->stats(of(ctx)->ctx);
}

static void host_span(ferry_trainer_context *ctx, const char *phase,
                      int64_t from_ns)
{
    FERRY_HOST_SPAN(of(ctx)->host, of(ctx)->ctx, phase, from_ns);
}

static void host_waited(ferry_trainer_context *ctx, int32_t peer,
                        const char *address, int64_t from_ns)
{
    if (FERRY_HOST_HAS(of(ctx)->host, waited))
        of(ctx)->host->waited(of(ctx)->ctx, peer, address, from_ns);
}

/* The host that this wrapper runs in may be older than the wrapper. */
static ferry_status no_method(const fault__trainer *t, const char *name)
{
    return t->host->fail(FERRY_ENOTSUP, "this host has no %s", name);
}

static ferry_status host_peers_are_ferry(ferry_trainer_context *ctx, bool *out)
{
    const fault__trainer *t = of(ctx);

    if (!FERRY_HOST_HAS(t->host, peers_are_ferry))
        return no_method(t, "peers_are_ferry");
    return t->host->peers_are_ferry(t->ctx, out);
}

static ferry_status host_peer_world_size(ferry_trainer_context *ctx,
                                         int32_t *out_workers)
{
    const fault__trainer *t = of(ctx);

    if (!FERRY_HOST_HAS(t->host, peer_world_size))
        return no_method(t, "peer_world_size");
    return t->host->peer_world_size(t->ctx, out_workers);
}

const ferry_trainer_host *fault__trainer_host(void)
{
    static const ferry_trainer_host host = {
        .size = sizeof(ferry_trainer_host),
        .abi = FERRY_ENGINE_ABI,
        .fail = ferry_fail,
        .log = ferry__log,
        .alloc = ferry__alloc,
        .free = ferry__free,
        .now_ns = ferry__now_ns,
        .pass_begin = host_pass_begin,
        .pass_next = host_pass_next,
        .pass_end = host_pass_end,
        .source_is_stable = host_source_is_stable,
        .init_peer = host_init_peer,
        .update_begin = host_update_begin,
        .update_poll = host_update_poll,
        .update_wait = host_update_wait,
        .init_peer_begin = host_init_peer_begin,
        .check = host_check,
        .progress = host_progress,
        .remaining_ms = host_remaining_ms,
        .stats = host_stats,
        .span = host_span,
        .peers_are_ferry = host_peers_are_ferry,
        .peer_world_size = host_peer_world_size,
        .waited = host_waited,
    };

    return &host;
}
