/* SPDX-License-Identifier: Apache-2.0 */
/* The trainer's half of `nccl`: the table and the life of the engine. Rank 0
 * is the sender and rank 0 of the group; other trainer ranks are in no group
 * and drive the pass alone.
 * Invariant: create opens nothing; destroy leaves nothing. */
#include "backends/nccl/nccl_trainer_state.h"

#include "base/alloc.h"

#include <string.h>

#define BUFFER_BYTES ((uint64_t)1 << 30)
#define N_BUFFERS    2
#define ADDRESS      "127.0.0.1"

static bool given(const char *text)
{
    return text && text[0] != '\0';
}

static ferry_status check_provider(const char *name)
{
    ferry__str known = {0};
    ferry_status status = FERRY_OK;

    if (!given(name) || strcmp(name, "auto") == 0)
        return FERRY_OK;
    for (size_t i = 0; ferry__provider_name(i); i++) {
        if (strcmp(name, ferry__provider_name(i)) == 0)
            goto done;
        ferry__str_printf(&known, ", %s", ferry__provider_name(i));
    }
    status = ferry_fail(FERRY_EINVAL, "field provider: %s is none of auto%s",
                        name, known.data ? known.data : "");
done:
    ferry__str_free(&known);
    return status;
}

static ferry_status parse_rendezvous(const char *text, nccl__rendezvous *out)
{
    *out = NCCL__RENDEZVOUS_STORE;
    if (!given(text) || strcmp(text, "store") == 0)
        return FERRY_OK;
    if (strcmp(text, "unique_id") != 0)
        return ferry_fail(FERRY_EINVAL,
                          "field rendezvous: %s is neither store nor "
                          "unique_id",
                          text);
    *out = NCCL__RENDEZVOUS_UNIQUE_ID;
    return FERRY_OK;
}

static ferry_status read_info(nccl__trainer *t)
{
    const ferry_nccl_trainer_init_info *info = t->info;
    const char *provider = info->provider;

    t->address = given(info->master_address) ? info->master_address : ADDRESS;
    t->buffer_bytes = info->packed_buffer_size_bytes;
    if (t->buffer_bytes == 0)
        t->buffer_bytes = BUFFER_BYTES;
    t->n_buffers = info->packed_num_buffers;
    if (t->n_buffers == 0)
        t->n_buffers = N_BUFFERS;
    if (t->n_buffers < 1 || t->n_buffers > 64)
        return ferry_fail(FERRY_EINVAL,
                          "field packed_num_buffers: %d is not 1 to 64",
                          t->n_buffers);
    if (info->world_size == 1)
        return ferry_fail(FERRY_EINVAL,
                          "field world_size: 1 is this trainer alone; it "
                          "counts the workers too");
    FERRY_TRY(check_provider(provider));
    FERRY_TRY(parse_rendezvous(info->rendezvous, &t->rendezvous));
    if (t->rendezvous == NCCL__RENDEZVOUS_UNIQUE_ID && given(provider) &&
        strcmp(provider, "auto") != 0 && strcmp(provider, "nccl") != 0)
        return ferry_fail(FERRY_EINVAL,
                          "field rendezvous: unique_id needs provider nccl, "
                          "got %s",
                          provider);
    return FERRY_OK;
}

static ferry_status trainer_create(const ferry_trainer_host *host,
                                   ferry_trainer_context *ctx, const void *info,
                                   bool is_sender, void **out_self)
{
    nccl__trainer *t = ferry__alloc(sizeof(*t));
    ferry_status status;

    if (!t)
        return FERRY_ENOMEM;
    t->host = host;
    t->ctx = ctx;
    t->info = info;
    t->is_sender = is_sender;
    t->fetcher.check = nccl__trainer_check;
    t->fetcher.check_arg = t;
    status = read_info(t);
    if (status < 0) {
        ferry__free(t);
        return status;
    }
    *out_self = t;
    return FERRY_OK;
}

/* Also called before a round that follows a failed one. Whether every worker
 * is still in the group cannot be told from here, so a new one is made; that
 * waits for nobody of the old one. */
static ferry_status trainer_init(void *self)
{
    nccl__trainer *t = self;

    if (!t->is_sender)
        return FERRY_OK;
    nccl__session_close(t, FERRY_OK);
    return nccl__session_open(t);
}

static void trainer_destroy(void *self)
{
    nccl__trainer *t = self;

    if (!t)
        return;
    nccl__session_close(t, FERRY_OK);
    ferry__fetch_close(&t->fetcher);
    ferry__store_server_close(&t->server);
    ferry__free(t);
}

static const ferry_trainer_engine_ops trainer_ops = {
    .size = sizeof(ferry_trainer_engine_ops),
    .abi = FERRY_ENGINE_ABI,
    .flags = FERRY_TRAINER_FULL_RESYNC | FERRY_TRAINER_DEVICES,
    .init_type = &ferry_nccl_trainer_init_type,
    .create = trainer_create,
    .init = trainer_init,
    .send = nccl__trainer_send,
    .destroy = trainer_destroy,
};

const ferry_trainer_engine_ops *ferry_trainer_engine(void);

const ferry_trainer_engine_ops *ferry_trainer_engine(void)
{
    return &trainer_ops;
}
