/* SPDX-License-Identifier: Apache-2.0 */
/* Joining a group: the trainer's own, or one that a vLLM trainer opens in
 * either of its ways; and leaving it.
 * Invariant: the provider is the one that the init info names, or NCCL for a
 * trainer that names none; nothing falls back. */
#include "backends/nccl/nccl_worker_state.h"

#include "base/alloc.h"
#include "comm/rendezvous.h"
#include "comm/unique_id.h"

#include <stdio.h>
#include <string.h>

#define NO_PROGRESS_MS INT64_C(60000)
#define STORE_MS       INT64_C(10000)

static bool given(const char *text)
{
    return text && text[0] != '\0';
}

ferry_status nccl__worker_check(void *arg, const char *what)
{
    nccl__worker *w = arg;

    if (ferry__nccl_moves(&w->group))
        w->host->progress(w->ctx, 0);
    return w->host->check(w->ctx, what);
}

static void note_wait(void *arg, int32_t peer, const char *address,
                      int64_t from_ns)
{
    const nccl__worker *w = arg;

    if (FERRY_WORKER_HOST_HAS(w->host, waited))
        w->host->waited(w->ctx, peer, address, from_ns);
}

/* A little less than the bound on silence, so that the meeting can say which
 * ranks did not come. */
static int64_t meeting_ms(const nccl__worker *w)
{
    int64_t left = w->host->remaining_ms(w->ctx);
    int64_t bound = left < w->no_progress_ms ? left : w->no_progress_ms;

    return bound > 2000 ? bound - 300 : bound * 3 / 4 + 1;
}

static ferry_status check_ferry(const ferry__nccl_init_info *info)
{
    if (strcmp(info->transport, FERRY__NCCL_TRANSPORT) != 0)
        return ferry_fail(FERRY_ENOTSUP,
                          "NCCLWeightTransferInitInfo: field transport: %s is "
                          "not %s",
                          info->transport, FERRY__NCCL_TRANSPORT);
    if (info->protocol_version != FERRY__NCCL_VERSION)
        return ferry_fail(FERRY_EVERSION,
                          "nccl protocol version: trainer %d, worker %d",
                          info->protocol_version, FERRY__NCCL_VERSION);
    return FERRY_OK;
}

static ferry_status read_rank(const nccl__worker *w,
                              const ferry__nccl_init_info *info, int32_t *out)
{
    const ferry_worker_options *o = w->host->options(w->ctx);
    int32_t tp_size = o->tp_size > 0 ? o->tp_size : 1;

    if (info->rank_offset < 1)
        return ferry_fail(FERRY_EINVAL,
                          "NCCLWeightTransferInitInfo: field rank_offset: 0 "
                          "is the trainer's own rank");
    return ferry__rendezvous_rank(o->dp_rank, tp_size, o->tp_rank,
                                  info->rank_offset, info->world_size, out);
}

static ferry_status open_comm(nccl__worker *w,
                              const ferry__nccl_init_info *info,
                              const ferry__provider *provider, int32_t rank)
{
    unsigned char id[FERRY__UNIQUE_ID];
    ferry__group g = {.rank = rank,
                      .world_size = info->world_size,
                      .generation = w->extras ? info->generation : 1,
                      .secret = w->extras ? info->secret : "none",
                      .bind = "",
                      .advertise = "",
                      .host_name = "",
                      .timeout_ms = meeting_ms(w),
                      .no_progress_ms = w->no_progress_ms,
                      .check = nccl__worker_check,
                      .check_arg = w};
    ferry__store *store = NULL;
    ferry_status status;

    if (given(info->nccl_unique_id_b64) && !w->extras) {
        FERRY_TRY(ferry__id_from_base64(info->nccl_unique_id_b64, id));
        g.meeting = FERRY__MEET_UNIQUE_ID;
        g.unique_id = id;
        return ferry__group_open(provider, NULL, &g, &w->group.comm);
    }
    g.meeting = w->extras ? FERRY__MEET_FERRY : FERRY__MEET_VLLM_STORE;
    /* A Ferry trainer serves the store before it tells anybody of it; one
     * that does not answer is gone. vLLM's may be about to serve. */
    FERRY_TRY(ferry__store_open_checked(
        info->master_address, info->master_port, w->extras,
        w->extras && g.timeout_ms > STORE_MS ? STORE_MS : g.timeout_ms,
        nccl__worker_check, w, &store));
    status = ferry__group_open(provider, store, &g, &w->group.comm);
    ferry__store_close(&store);
    return status;
}

static ferry_status greet(nccl__worker *w, const ferry__nccl_init_info *info,
                          const ferry__provider *provider)
{
    ferry__nccl_hello v = {.magic = FERRY__NCCL_MAGIC,
                           .version = FERRY__NCCL_VERSION,
                           .generation = info->generation,
                           .buffer_bytes = w->buffer_bytes,
                           .n_buffers = (uint32_t)w->n_buffers,
                           .packed = w->packed,
                           .digest = info->digest != 0,
                           .world_size = (uint32_t)info->world_size};

    snprintf(v.provider, sizeof(v.provider), "%s", provider->name);
    ferry__nccl_settings(provider, v.settings);
    return ferry__nccl_meet(w->group.comm, &v, meeting_ms(w));
}

static void keep_geometry(nccl__worker *w, const ferry__nccl_init_info *info)
{
    w->packed = info->packed != 0;
    w->buffer_bytes = info->packed_buffer_size_bytes;
    w->n_buffers = info->packed_num_buffers;
    w->no_progress_ms =
        info->no_progress_ms > 0 ? info->no_progress_ms : NO_PROGRESS_MS;
    w->extras = given(info->transport);
    w->round = 0;
}

ferry_status nccl__worker_join(nccl__worker *w,
                               const ferry__nccl_init_info *info)
{
    const ferry__provider *provider;
    char path[256];
    int32_t rank;

    keep_geometry(w, info);
    if (w->extras)
        FERRY_TRY(check_ferry(info));
    FERRY_TRY(read_rank(w, info, &rank));
    FERRY_TRY(
        ferry__provider_find(w->extras ? info->provider : "nccl", &provider));
    FERRY_TRY(provider->available());
    FERRY_TRY(open_comm(w, info, provider, rank));
    w->group.comm->check = nccl__worker_check;
    w->group.comm->check_arg = w;
    w->group.comm->waited = note_wait;
    if (w->extras)
        FERRY_TRY(greet(w, info, provider));
    w->digest =
        w->extras && info->digest != 0 && ferry__nccl_can_digest(w->group.comm);
    FERRY_TRY(ferry__nccl_stage_open(&w->stage, w->group.comm));
    w->inited = true;
    w->host->set_path(w->ctx, ferry__nccl_path(&w->group, path, sizeof(path)));
    w->host->log(FERRY_LOG_INFO, "nccl: rank %d of %d, by %s", rank,
                 info->world_size, path);
    return nccl__worker_watch(w);
}

void nccl__worker_uncount(nccl__worker *w)
{
    if (w->counted_bytes > 0)
        w->host->count_buffers(w->ctx, -(int64_t)w->counted_bytes);
    w->counted_bytes = 0;
}

void nccl__worker_leave(nccl__worker *w, ferry_status status)
{
    nccl__worker_unwatch(w);
    ferry__nccl_stage_close(&w->stage);
    ferry__nccl_close(&w->group, status);
    nccl__worker_uncount(w);
    ferry__free(w->lists);
    w->lists = NULL;
    w->n_lists = w->lists_capacity = w->list_bytes = 0;
    w->digest = false;
}
