/* SPDX-License-Identifier: Apache-2.0 */
/* The trainer's half of `ipc`, host memory: the table and the life of the
 * engine. The session is opened by init, and by init again after its sockets
 * broke. Invariant: create opens nothing; destroy leaves nothing. */
#include "backends/ipc/ipc_trainer_state.h"

#include "base/alloc.h"

#include <string.h>

#define BUFFER_BYTES ((uint64_t)1 << 30)
#define N_BUFFERS    2

static ferry_status parse_path(const char *text, ipc__path *out)
{
    static const char *const names[] = {"auto", "shared", "ring", "cma"};

    if (!text || text[0] == '\0') {
        *out = IPC__PATH_AUTO;
        return FERRY_OK;
    }
    for (int i = 0; i < 4; i++) {
        if (strcmp(text, names[i]) == 0) {
            *out = (ipc__path)i;
            return FERRY_OK;
        }
    }
    return ferry_fail(FERRY_EINVAL,
                      "field path: %s is none of auto, shared, ring, cma",
                      text);
}

static ferry_status trainer_create(const ferry_trainer_host *host,
                                   ferry_trainer_context *ctx, const void *info,
                                   bool is_sender, void **out_self)
{
    ipc__trainer *t = ferry__alloc(sizeof(*t));
    ferry_status status;

    if (!t)
        return FERRY_ENOMEM;
    t->host = host;
    t->ctx = ctx;
    t->info = info;
    t->is_sender = is_sender;
    t->ring_fd = -1;
    t->fetcher.check = ipc__fetch_check;
    t->fetcher.check_arg = t;
    t->buffer_bytes = t->info->packed_buffer_size_bytes;
    if (t->buffer_bytes == 0)
        t->buffer_bytes = BUFFER_BYTES;
    t->n_buffers = t->info->packed_num_buffers;
    if (t->n_buffers == 0)
        t->n_buffers = N_BUFFERS;
    status = parse_path(t->info->path, &t->path);
    if (status == FERRY_OK && (t->n_buffers < 1 || t->n_buffers > 64))
        status = ferry_fail(FERRY_EINVAL,
                            "field packed_num_buffers: %d is not 1 to 64",
                            t->n_buffers);
    if (status == FERRY_OK) {
        t->buffers =
            ferry__alloc_array((size_t)t->n_buffers, sizeof(*t->buffers));
        if (!t->buffers)
            status = FERRY_ENOMEM;
    }
    if (status < 0) {
        ferry__free(t);
        return status;
    }
    for (int32_t i = 0; i < t->n_buffers; i++)
        t->buffers[i].fd = -1;
    *out_self = t;
    return FERRY_OK;
}

/* Also called before a round that follows a failed one: a session whose
 * sockets all live is kept. */
static ferry_status trainer_init(void *self)
{
    ipc__trainer *t = self;

    if (!t->is_sender || (t->open && ipc__session_alive(t)))
        return FERRY_OK;
    ipc__session_close(t);
    return ipc__session_open(t);
}

static void trainer_destroy(void *self)
{
    ipc__trainer *t = self;

    if (!t)
        return;
    ipc__session_close(t);
    ferry__fetch_close(&t->fetcher);
    ferry__free(t->buffers);
    ferry__free(t);
}

static const ferry_trainer_engine_ops trainer_ops = {
    .size = sizeof(ferry_trainer_engine_ops),
    .abi = FERRY_ENGINE_ABI,
    .flags = FERRY_TRAINER_FULL_RESYNC | FERRY_TRAINER_DEVICES,
    .init_type = &ferry_ipc_trainer_init_type,
    .create = trainer_create,
    .init = trainer_init,
    .send = ipc__trainer_send,
    .round_end = ipc__trainer_round_end,
    .destroy = trainer_destroy,
};

const ferry_trainer_engine_ops *ferry_trainer_engine(void);

const ferry_trainer_engine_ops *ferry_trainer_engine(void)
{
    return &trainer_ops;
}
