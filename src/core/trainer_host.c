/* SPDX-License-Identifier: Apache-2.0 */
/* What the host offers a trainer engine: the checked pass, the control call
 * on its helper thread, bounds, progress.
 * Invariant: every wait looks at the bounds, at cancelation and at the other
 * plane at least every 100 ms. */
#include "core/trainer_state.h"

#include "base/alloc.h"
#include "base/log.h"

#include <stdio.h>
#include <string.h>

#define SLICE_MS 100

static ferry_trainer *trainer_of(ferry_trainer_context *ctx)
{
    return (ferry_trainer *)ctx;
}

/* ---- bounds ---- */

void ferry__trainer_touch(ferry_trainer *t)
{
    pthread_mutex_lock(&t->lock);
    t->bounds.progress_at_ns = ferry__now_ns();
    pthread_mutex_unlock(&t->lock);
}

ferry_status ferry__trainer_check_bounds(ferry_trainer *t, const char *what)
{
    char detail[320];
    ferry__bounds bounds;

    if (atomic_load(&t->canceled) &&
        ferry__now_ns() >= atomic_load(&t->commit_until_ns))
        return ferry_fail(FERRY_ECANCELED, "canceled while %s", what);
    detail[0] = '\0';
    if (t->pass.open && t->pass.index > 0)
        snprintf(detail, sizeof(detail), "parameter %s",
                 t->declared.params[t->pass.index - 1].name);
    pthread_mutex_lock(&t->lock);
    bounds = t->bounds;
    pthread_mutex_unlock(&t->lock);
    return ferry__bounds_check(&bounds, what, detail);
}

static ferry_status host_check(ferry_trainer_context *ctx, const char *what)
{
    ferry_trainer *t = trainer_of(ctx);
    ferry_status st;

    if (ferry__control_call_in_flight(t->call)) {
        st = ferry__control_call_peek(t->call);
        if (st < 0 && st != FERRY_EBUSY)
            return st;
    }
    return ferry__trainer_check_bounds(t, what);
}

static ferry_status check_for_pass(void *arg, const char *what)
{
    return host_check(arg, what);
}

static void host_progress(ferry_trainer_context *ctx, uint64_t bytes)
{
    ferry_trainer *t = trainer_of(ctx);
    uint64_t total = t->stats.bytes_declared;
    uint64_t done;

    pthread_mutex_lock(&t->lock);
    t->bounds.progress_at_ns = ferry__now_ns();
    t->bytes_sent += bytes;
    done = t->bytes_sent;
    pthread_mutex_unlock(&t->lock);
    if (bytes > 0 && t->progress != NULL)
        t->progress(t->progress_arg, done < total ? done : total, total);
}

static int64_t host_remaining_ms(ferry_trainer_context *ctx)
{
    ferry_trainer *t = trainer_of(ctx);
    int64_t left;

    pthread_mutex_lock(&t->lock);
    left = ferry__deadline_left_ms(&t->bounds.deadline);
    pthread_mutex_unlock(&t->lock);
    return left > 0 ? left : 1;
}

static ferry_round_stats *host_stats(ferry_trainer_context *ctx)
{
    return &trainer_of(ctx)->stats;
}

/* The phases that an engine has; others are of the host itself. */
static void host_span(ferry_trainer_context *ctx, const char *phase,
                      int64_t from_ns)
{
    for (int kind = FERRY__SPAN_PACK; kind <= FERRY__SPAN_DIGEST; kind++)
        if (strcmp(phase, ferry__span_name((ferry__span_kind)kind)) == 0)
            ferry__spans_add(&trainer_of(ctx)->spans, (ferry__span_kind)kind,
                             from_ns);
}

static void host_waited(ferry_trainer_context *ctx, int32_t peer,
                        const char *address, int64_t from_ns)
{
    ferry__spans_wait(&trainer_of(ctx)->spans, peer, address, from_ns);
}

/* ---- the pass ---- */

static ferry_status host_pass_begin(ferry_trainer_context *ctx,
                                    const ferry_param_meta **out_declared,
                                    size_t *out_count)
{
    ferry_trainer *t = trainer_of(ctx);

    if (t->source.ops == NULL)
        return ferry_fail(FERRY_EINVAL,
                          "backend %s has no source to pass "
                          "over",
                          t->backend);
    t->pass.source = &t->source;
    t->pass.declared = t->declared.params;
    t->pass.count = t->declared.count;
    t->pass.rank = t->info->rank;
    t->pass.need_data = t->is_sender;
    t->pass.devices = (t->ops->flags & FERRY_TRAINER_DEVICES) != 0;
    t->pass.check = check_for_pass;
    t->pass.arg = t;
    t->pass.spans = &t->spans;
    FERRY_TRY(ferry__pass_begin(&t->pass));
    t->passed = true;
    *out_declared = t->declared.params;
    *out_count = t->declared.count;
    return FERRY_OK;
}

static ferry_status host_pass_next(ferry_trainer_context *ctx,
                                   ferry_item *out_item)
{
    ferry_trainer *t = trainer_of(ctx);
    ferry_status st = ferry__pass_next(&t->pass, out_item);

    if (st == FERRY_OK)
        ferry__trainer_touch(t);
    return st;
}

static void host_pass_end(ferry_trainer_context *ctx)
{
    ferry__pass_end(&trainer_of(ctx)->pass);
}

static bool host_source_is_stable(ferry_trainer_context *ctx)
{
    const ferry_trainer *t = trainer_of(ctx);

    return t->source.ops != NULL &&
           (t->source.ops->flags & FERRY_SOURCE_STABLE) != 0;
}

/* ---- the control plane ---- */

static ferry_status begin_call(ferry_trainer *t, ferry__call_kind kind,
                               const char *text)
{
    if (!t->is_sender)
        return ferry_fail(FERRY_EINVAL,
                          "rank %d is not the sender, which alone makes the "
                          "call %s",
                          (int)t->info->rank, ferry__call_name(kind));
    ferry__trainer_touch(t);
    if (kind == FERRY__CALL_INIT)
        t->started = true;
    return ferry__control_call_begin(t->call, kind, text);
}

ferry_status ferry__trainer_join(ferry_trainer *t)
{
    char what[64];

    while (!ferry__control_call_wait(t->call, SLICE_MS)) {
        snprintf(what, sizeof(what), "waiting for %s",
                 ferry__call_name(ferry__control_call_kind_of(t->call)));
        FERRY_TRY(ferry__trainer_check_bounds(t, what));
    }
    ferry__trainer_touch(t);
    return ferry__control_call_poll(t->call);
}

ferry_status ferry__trainer_call(ferry_trainer *t, ferry__call_kind kind,
                                 const char *text)
{
    FERRY_TRY(begin_call(t, kind, text));
    return ferry__trainer_join(t);
}

static ferry_status host_init_peer(ferry_trainer_context *ctx,
                                   const char *init_info)
{
    return ferry__trainer_call(trainer_of(ctx), FERRY__CALL_INIT, init_info);
}

static ferry_status host_init_peer_begin(ferry_trainer_context *ctx,
                                         const char *init_info)
{
    return begin_call(trainer_of(ctx), FERRY__CALL_INIT, init_info);
}

static ferry_status host_update_begin(ferry_trainer_context *ctx,
                                      const char *update_info)
{
    ferry_trainer *t = trainer_of(ctx);

    FERRY_TRY(begin_call(t, FERRY__CALL_UPDATE, update_info));
    t->stats.n_updates++;
    return FERRY_OK;
}

static ferry_status host_update_poll(ferry_trainer_context *ctx)
{
    return ferry__control_call_poll(trainer_of(ctx)->call);
}

static ferry_status host_update_wait(ferry_trainer_context *ctx)
{
    return ferry__trainer_join(trainer_of(ctx));
}

ferry_status ferry__trainer_ask_peers(ferry_trainer *t, ferry__peers *out)
{
    FERRY_TRY(ferry__trainer_call(t, FERRY__CALL_STATUS, NULL));
    return ferry__peers_sort(ferry__control_call_status(t->call), out);
}

/* A backend speaks one way to all of them. */
static ferry_status host_peers_are_ferry(ferry_trainer_context *ctx, bool *out)
{
    ferry_trainer *t = trainer_of(ctx);
    ferry__peers peers = {0};
    ferry_status st = FERRY_EROUTE;

    if (ferry__control_call_client(t->call)->ops->status != NULL)
        st = ferry__trainer_ask_peers(t, &peers);
    if (st < 0 && st != FERRY_EROUTE)
        return st;
    if (peers.any_ferry && peers.any_other)
        return ferry_fail(FERRY_EMISMATCH,
                          "%s is Ferry, %s is not; backend %s needs all of "
                          "one kind",
                          peers.ferry, peers.other, t->backend);
    *out = peers.any_ferry;
    return FERRY_OK;
}

static ferry_status host_peer_world_size(ferry_trainer_context *ctx,
                                         int32_t *out_workers)
{
    ferry_trainer *t = trainer_of(ctx);

    FERRY_TRY(ferry__trainer_call(t, FERRY__CALL_WORLD_SIZE, NULL));
    *out_workers = ferry__control_call_workers(t->call);
    return FERRY_OK;
}

const ferry_trainer_host *ferry__trainer_host(void)
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
