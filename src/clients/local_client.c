/* SPDX-License-Identifier: Apache-2.0 */
/* The local client: a worker in this process, called straight.
 * Invariant: cancel and abort are one thing here, since the worker lets any
 * thread end its round. */
#include <ferry/client.h>
#include <ferry/worker.h>

static ferry_status local_init(void *self, const char *init_info)
{
    return ferry_worker_init_transfer_engine(self, init_info);
}

static ferry_status local_start(void *self)
{
    return ferry_worker_start_weight_update(self);
}

static ferry_status local_update(void *self, const char *update_info)
{
    return ferry_worker_update_weights(self, update_info);
}

static ferry_status local_finish(void *self, const char *weight_version)
{
    return ferry_worker_finish_weight_update(self, weight_version);
}

static void local_cancel(void *self)
{
    ferry_worker_abort_weight_update(self);
}

static ferry_status local_abort(void *self)
{
    ferry_worker_abort_weight_update(self);
    return FERRY_OK;
}

static ferry_status local_start_draft(void *self)
{
    return ferry_worker_start_draft_weight_update(self);
}

static ferry_status local_status(void *self, char *buffer, size_t size_bytes)
{
    ferry_worker_status(self, buffer, size_bytes);
    return FERRY_OK;
}

static ferry_status local_prepare(void *self)
{
    return ferry_worker_prepare_weight_update(self);
}

static ferry_status local_commit(void *self, const char *weight_version)
{
    return ferry_worker_commit_weight_update(self, weight_version);
}

ferry_status ferry_client_local(struct ferry_worker *worker,
                                ferry_client *out_client)
{
    static const ferry_client_ops ops = {
        .size = sizeof(ferry_client_ops),
        .kind = "local",
        .init_weight_transfer_engine = local_init,
        .start_weight_update = local_start,
        .update_weights = local_update,
        .finish_weight_update = local_finish,
        .cancel = local_cancel,
        .abort_weight_update = local_abort,
        .start_draft_weight_update = local_start_draft,
        .status = local_status,
        .prepare_weight_update = local_prepare,
        .commit_weight_update = local_commit,
    };

    if (worker == NULL || out_client == NULL)
        return ferry_fail(FERRY_EINVAL, "%s is NULL",
                          worker == NULL ? "worker" : "out_client");
    out_client->ops = &ops;
    out_client->self = worker;
    return FERRY_OK;
}
