/* SPDX-License-Identifier: Apache-2.0 */
/* Several clients as one: each call goes to all of them at the same time.
 * Invariant: an optional call is offered where every client can take it, so
 * that no call leaves the replicas apart (C3). */
#include "clients/client_ops.h"
#include "clients/fanout_peers.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"

#include <string.h>

#define LEAVE_MS 1000

static ferry_status call_all(ferry__fanout *f, ferry__fanout_fn fn, void *arg,
                             bool may_starve)
{
    return ferry__fanout_call(f, fn, arg, may_starve, NULL);
}

static ferry_status one_start(const ferry_client *client, void *arg, size_t i)
{
    (void)arg, (void)i;
    return client->ops->start_weight_update(client->self);
}

static ferry_status fanout_start(void *self)
{
    return call_all(self, one_start, NULL, false);
}

static ferry_status one_update(const ferry_client *client, void *arg, size_t i)
{
    (void)i;
    return client->ops->update_weights(client->self, arg);
}

static ferry_status fanout_update(void *self, const char *update_info)
{
    return call_all(self, one_update, (void *)(uintptr_t)update_info, true);
}

static ferry_status one_finish(const ferry_client *client, void *arg, size_t i)
{
    (void)i;
    return client->ops->finish_weight_update(client->self, arg);
}

static ferry_status fanout_finish(void *self, const char *weight_version)
{
    return call_all(self, one_finish, (void *)(uintptr_t)weight_version, false);
}

static void fanout_cancel(void *self)
{
    ferry__fanout_cancel(self);
}

static ferry_status one_abort(const ferry_client *client, void *arg, size_t i)
{
    (void)arg, (void)i;
    if (!FERRY__CLIENT_HAS(client->ops, abort_weight_update))
        return FERRY_OK; /* its peer learns of it at its own deadline */
    return client->ops->abort_weight_update(client->self);
}

static ferry_status fanout_abort(void *self)
{
    return call_all(self, one_abort, NULL, false);
}

static ferry_status one_start_draft(const ferry_client *client, void *arg,
                                    size_t i)
{
    (void)arg, (void)i;
    return client->ops->start_draft_weight_update(client->self);
}

static ferry_status fanout_start_draft(void *self)
{
    return call_all(self, one_start_draft, NULL, false);
}

typedef struct pause_args {
    const char *mode;
    int clear_cache;
} pause_args;

static ferry_status one_pause(const ferry_client *client, void *arg, size_t i)
{
    const pause_args *p = arg;

    (void)i;
    return client->ops->pause(client->self, p->mode, p->clear_cache);
}

static ferry_status fanout_pause(void *self, const char *mode, int clear_cache)
{
    pause_args p = {mode, clear_cache};

    return call_all(self, one_pause, &p, false);
}

static ferry_status one_resume(const ferry_client *client, void *arg, size_t i)
{
    (void)arg, (void)i;
    return client->ops->resume(client->self);
}

static ferry_status fanout_resume(void *self)
{
    return call_all(self, one_resume, NULL, false);
}

static ferry_status one_prepare(const ferry_client *client, void *arg, size_t i)
{
    (void)arg, (void)i;
    return client->ops->prepare_weight_update(client->self);
}

static ferry_status fanout_prepare(void *self)
{
    return call_all(self, one_prepare, NULL, false);
}

static ferry_status one_commit(const ferry_client *client, void *arg, size_t i)
{
    (void)i;
    return client->ops->commit_weight_update(client->self, arg);
}

static ferry_status fanout_commit(void *self, const char *weight_version)
{
    return ferry__fanout_call(self, one_commit,
                              (void *)(uintptr_t)weight_version, false,
                              "committed");
}

/* One that does not say its name is a server none the less: what it commits
 * must be committed with the others. */
static const char *fanout_peer(void *self, size_t index)
{
    const ferry__fanout *f = self;

    for (size_t i = 0; i < f->count; i++) {
        const ferry_client *client = &f->clients[i];
        size_t n = ferry__client_peers(client);

        if (index < n) {
            const char *name = ferry__client_peer(client, index);

            return name ? name : "a server of unknown name";
        }
        index -= n;
    }
    return NULL;
}

static void fanout_close(void *self)
{
    ferry__fanout *f = self;

    /* Closing ends what a trainer left behind, if it is on its way out. */
    for (size_t i = 0; i < f->count; i++) {
        const ferry_client *client = &f->clients[i];

        if (FERRY__CLIENT_HAS(client->ops, close))
            client->ops->close(client->self);
    }
    for (int i = 0; i < LEAVE_MS && atomic_load(&f->n_holders) > 1; i++)
        ferry__sleep_ms(1);
    ferry__fanout_release(f);
}

/* Offers an optional call where every client can take it. One that only
 * some could take would leave the replicas apart. Cancel and abort only
 * make things end sooner and need not be everywhere; a status says itself who
 * gave none. */
static void choose_ops(ferry__fanout *f)
{
    bool draft = true, pause = true, resume = true, status = false;
    bool prepare = true, commit = true, world_size = true;

    for (size_t i = 0; i < f->count; i++) {
        const ferry_client_ops *ops = f->clients[i].ops;

        draft &= FERRY__CLIENT_HAS(ops, start_draft_weight_update);
        pause &= FERRY__CLIENT_HAS(ops, pause);
        resume &= FERRY__CLIENT_HAS(ops, resume);
        status |= FERRY__CLIENT_HAS(ops, status);
        prepare &= FERRY__CLIENT_HAS(ops, prepare_weight_update);
        commit &= FERRY__CLIENT_HAS(ops, commit_weight_update);
        world_size &= FERRY__CLIENT_HAS(ops, world_size);
    }
    f->ops = (ferry_client_ops){
        .size = sizeof(ferry_client_ops),
        .kind = "fanout",
        .init_weight_transfer_engine = ferry__fanout_init,
        .start_weight_update = fanout_start,
        .update_weights = fanout_update,
        .finish_weight_update = fanout_finish,
        .cancel = fanout_cancel,
        .abort_weight_update = fanout_abort,
        .start_draft_weight_update = draft ? fanout_start_draft : NULL,
        .pause = pause && resume ? fanout_pause : NULL,
        .resume = pause && resume ? fanout_resume : NULL,
        .status = status ? ferry__fanout_status : NULL,
        .prepare_weight_update = prepare && commit ? fanout_prepare : NULL,
        .commit_weight_update = prepare && commit ? fanout_commit : NULL,
        .close = fanout_close,
        .peer = fanout_peer,
        .world_size = world_size ? ferry__fanout_world_size : NULL,
    };
}

static ferry_status check_clients(const ferry_client *clients, size_t count)
{
    if (count == 0 || !clients)
        return ferry_fail(FERRY_EINVAL, "fanout: needs at least one client");
    for (size_t i = 0; i < count; i++) {
        const ferry_client_ops *ops = clients[i].ops;

        if (!ops || !FERRY__CLIENT_HAS(ops, init_weight_transfer_engine) ||
            !FERRY__CLIENT_HAS(ops, start_weight_update) ||
            !FERRY__CLIENT_HAS(ops, update_weights) ||
            !FERRY__CLIENT_HAS(ops, finish_weight_update))
            return ferry_fail(FERRY_EINVAL,
                              "fanout: client %zu lacks one of the four "
                              "calls",
                              i);
    }
    return FERRY_OK;
}

ferry_status ferry_client_fanout(ferry_client *clients, size_t count,
                                 ferry_client *out_client)
{
    FERRY__NEED(out_client);
    ferry__fanout *f;

    FERRY_TRY(check_clients(clients, count));
    f = ferry__alloc(sizeof(*f));
    if (!f)
        return FERRY_ENOMEM;
    f->clients = ferry__alloc_array(count, sizeof(*clients));
    f->ranks = ferry__alloc_array(count, sizeof(*f->ranks));
    if (!f->clients || !f->ranks) {
        ferry__free(f->clients);
        ferry__free(f->ranks);
        ferry__free(f);
        return FERRY_ENOMEM;
    }
    memcpy(f->clients, clients, count * sizeof(*clients));
    memset(clients, 0, count * sizeof(*clients));
    f->count = count;
    ferry__fanout_hold(f);
    choose_ops(f);
    out_client->ops = &f->ops;
    out_client->self = f;
    return FERRY_OK;
}
