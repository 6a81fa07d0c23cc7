/* SPDX-License-Identifier: Apache-2.0 */
/* Opening a group: learn what the workers are, bind the store, ship the init
 * info and meet them, all at once (O-11: the control call runs beside the
 * meeting, so the order in which the two ends wait cannot matter).
 * Invariant: a port that is taken fails before any worker is told (O-17); a
 * control call that fails ends the meeting at once, in its own words (O-09).
 */
#include "backends/nccl/nccl_trainer_state.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/socket.h"
#include "comm/unique_id.h"

#include <stdio.h>
#include <string.h>

#define NO_PROGRESS_MS INT64_C(60000)
/* The control plane's own words of a failure are waited for this long. */
#define WORDS_MS 400

static bool given(const char *text)
{
    return text && text[0] != '\0';
}

int64_t nccl__no_progress_ms(const nccl__trainer *t)
{
    return t->info->base.no_progress_ms > 0 ? t->info->base.no_progress_ms
                                            : NO_PROGRESS_MS;
}

ferry_status nccl__trainer_check(void *arg, const char *what)
{
    nccl__trainer *t = arg;

    if (ferry__nccl_moves(&t->group))
        t->host->progress(t->ctx, 0);
    return t->host->check(t->ctx, what);
}

static void note_wait(void *arg, int32_t peer, const char *address,
                      int64_t from_ns)
{
    const nccl__trainer *t = arg;

    if (FERRY_HOST_HAS(t->host, waited))
        t->host->waited(t->ctx, peer, address, from_ns);
}

/* The meeting's own bound is a little less than that on silence, so that it
 * can say which ranks did not come. */
static int64_t meeting_ms(const nccl__trainer *t)
{
    int64_t left = t->host->remaining_ms(t->ctx);
    int64_t idle = nccl__no_progress_ms(t);
    int64_t bound = left < idle ? left : idle;

    return bound > 2000 ? bound - 500 : bound * 3 / 4 + 1;
}

/* ---- before any worker is told ---- */

/* Who made the trainer may know better than the servers: a vLLM with Ferry's
 * engines has no route that tells of them. An older host cannot ask the peers;
 * then the provider says what they are, since vLLM's workers speak nccl
 * alone. */
static ferry_status learn_peers(nccl__trainer *t)
{
    const char *name = t->info->provider, *peers = t->info->peers;

    if (given(peers) && strcmp(peers, "auto") != 0) {
        t->ferry = strcmp(peers, "ferry") == 0;
        if (t->ferry || strcmp(peers, "vllm") == 0)
            return FERRY_OK;
        return ferry_fail(FERRY_EINVAL,
                          "field peers: %s is none of auto, ferry, vllm",
                          peers);
    }
    if (FERRY_HOST_HAS(t->host, peers_are_ferry))
        return t->host->peers_are_ferry(t->ctx, &t->ferry);
    t->ferry =
        given(name) && strcmp(name, "auto") != 0 && strcmp(name, "nccl") != 0;
    return FERRY_OK;
}

/* A URL that leads elsewhere makes a Ferry server look like another one, and
 * that NCCL is missing would be all that is heard of it. */
static ferry_status provider_loads(const nccl__trainer *t)
{
    ferry_status status = t->provider->available();

    if (status < 0 && !t->ferry)
        return ferry__fail_prefix(
            status, "the servers are not Ferry (ferry serve answers "
                    "/ferry/status), so they need NCCL, and");
    return status;
}

static ferry_status choose_provider(nccl__trainer *t)
{
    const char *name = t->info->provider;

    if (!given(name) || strcmp(name, "auto") == 0)
        name = !t->ferry || t->rendezvous == NCCL__RENDEZVOUS_UNIQUE_ID
                   ? "nccl"
                   : ferry__provider_auto();
    else if (!t->ferry && strcmp(name, "nccl") != 0)
        return ferry_fail(FERRY_ENOTSUP,
                          "field provider: %s needs Ferry's own workers, and "
                          "the servers are not Ferry; nccl is what vLLM's "
                          "workers speak (field peers says ferry where vLLM "
                          "has Ferry's engines)",
                          name);
    FERRY_TRY(ferry__provider_find(name, &t->provider));
    FERRY_TRY(provider_loads(t));
    if (t->rendezvous == NCCL__RENDEZVOUS_UNIQUE_ID && !t->provider->unique_id)
        return ferry_fail(FERRY_ENOTSUP,
                          "field rendezvous: provider %s has no unique ids",
                          name);
    return FERRY_OK;
}

static ferry_status learn_world(nccl__trainer *t)
{
    int32_t workers = 0;

    t->world_size = t->info->world_size;
    if (t->world_size > 0)
        return FERRY_OK;
    if (!FERRY_HOST_HAS(t->host, peer_world_size) ||
        t->host->peer_world_size(t->ctx, &workers) < 0)
        return ferry__fail_prefix(
            FERRY_EINVAL, "field world_size: 0, and how many workers there are "
                          "cannot be asked");
    if (workers < 1 || workers == INT32_MAX)
        return ferry_fail(FERRY_EPEER,
                          "the servers say that they have %d "
                          "workers",
                          workers);
    t->world_size = workers + 1;
    return FERRY_OK;
}

/* Between Ferry ranks the keys of each group have its generation, so one
 * store serves them all. vLLM's keys have none: there it is made anew. */
static ferry_status serve_store(nccl__trainer *t)
{
    int32_t port = t->port > 0 ? t->port : t->info->master_port;
    ferry_status status;

    if (!t->ferry)
        ferry__store_server_close(&t->server);
    if (t->server)
        return FERRY_OK;
    status = ferry__store_serve(t->address, port, &t->port, &t->server);
    /* No server was asked yet: it is this end's own address that is wrong. */
    if (status < 0)
        return ferry__fail_prefix(status == FERRY_ECONN ? FERRY_EINVAL : status,
                                  "fields master_address, master_port");
    return FERRY_OK;
}

static ferry_status prepare(nccl__trainer *t)
{
    FERRY_TRY(learn_peers(t));
    FERRY_TRY(choose_provider(t));
    FERRY_TRY(learn_world(t));
    t->extras = t->ferry && t->rendezvous == NCCL__RENDEZVOUS_STORE;
    t->generation++;
    FERRY_TRY(ferry__random_hex(t->secret, FERRY__NCCL_SECRET_CHARS / 2));
    if (t->rendezvous == NCCL__RENDEZVOUS_UNIQUE_ID)
        return t->provider->unique_id(t->unique_id);
    return serve_store(t);
}

/* ---- the init info ---- */

static void put_ferry(const nccl__trainer *t, ferry__str *s)
{
    const ferry_trainer_init_info *base = &t->info->base;

    ferry__str_printf(s,
                      ",\"transport\":\"%s\",\"protocol_version\":%d,"
                      "\"provider\":",
                      FERRY__NCCL_TRANSPORT, FERRY__NCCL_VERSION);
    ferry__str_json(s, t->provider->name);
    ferry__str_append(s, ",\"secret\":");
    ferry__str_json(s, t->secret);
    ferry__str_printf(
        s,
        ",\"generation\":%llu,\"digest\":%s,"
        "\"deadline_ms\":%lld,\"no_progress_ms\":%lld",
        (unsigned long long)t->generation, t->info->digest ? "true" : "false",
        (long long)base->deadline_ms, (long long)base->no_progress_ms);
}

static void init_text(const nccl__trainer *t, ferry__str *s)
{
    char id[FERRY__ID_BASE64 + 1];

    ferry__str_append(s, "{");
    if (t->rendezvous == NCCL__RENDEZVOUS_STORE) {
        ferry__str_append(s, "\"master_address\":");
        ferry__str_json(s, t->address);
        ferry__str_printf(s, ",\"master_port\":%d,", t->port);
    }
    ferry__str_printf(s, "\"rank_offset\":1,\"world_size\":%d", t->world_size);
    if (t->rendezvous == NCCL__RENDEZVOUS_UNIQUE_ID) {
        ferry__id_base64(t->unique_id, id);
        ferry__str_printf(s, ",\"nccl_unique_id_b64\":\"%s\"", id);
    }
    ferry__str_printf(s,
                      ",\"packed\":%s,\"packed_buffer_size_bytes\":%llu,"
                      "\"packed_num_buffers\":%d",
                      t->info->packed ? "true" : "false",
                      (unsigned long long)t->buffer_bytes, t->n_buffers);
    if (t->extras)
        put_ferry(t, s);
    ferry__str_append(s, "}");
}

static ferry_status tell_workers(nccl__trainer *t)
{
    ferry__str s = {0};
    ferry_status status;

    init_text(t, &s);
    status = s.failed ? ferry_fail(FERRY_ENOMEM, "nccl init info: out of "
                                                 "memory")
                      : t->host->init_peer_begin(t->ctx, s.data);
    ferry__str_free(&s);
    return status;
}

/* ---- the meeting ---- */

static ferry_status open_comm(nccl__trainer *t)
{
    ferry__group g = {.rank = 0,
                      .world_size = t->world_size,
                      .generation = t->generation,
                      .secret = t->secret,
                      .bind = t->address,
                      .advertise = t->address,
                      .host_name = "",
                      .timeout_ms = meeting_ms(t),
                      .no_progress_ms = nccl__no_progress_ms(t),
                      .check = nccl__trainer_check,
                      .check_arg = t};
    ferry__store *store = NULL;
    ferry_status status;

    if (t->rendezvous == NCCL__RENDEZVOUS_UNIQUE_ID) {
        g.meeting = FERRY__MEET_UNIQUE_ID;
        g.unique_id = t->unique_id;
        return ferry__group_open(t->provider, NULL, &g, &t->group.comm);
    }
    g.meeting = t->ferry ? FERRY__MEET_FERRY : FERRY__MEET_VLLM_STORE;
    FERRY_TRY(ferry__store_open_checked(t->address, t->port, true, g.timeout_ms,
                                        nccl__trainer_check, t, &store));
    status = ferry__group_open(t->provider, store, &g, &t->group.comm);
    ferry__store_close(&store);
    return status;
}

static ferry_status greet(nccl__trainer *t)
{
    ferry__nccl_hello v = {.magic = FERRY__NCCL_MAGIC,
                           .version = FERRY__NCCL_VERSION,
                           .generation = t->generation,
                           .buffer_bytes = t->buffer_bytes,
                           .n_buffers = (uint32_t)t->n_buffers,
                           .packed = t->info->packed != 0,
                           .digest = t->info->digest != 0,
                           .world_size = (uint32_t)t->world_size};

    snprintf(v.provider, sizeof(v.provider), "%s", t->provider->name);
    ferry__nccl_settings(t->provider, v.settings);
    return ferry__nccl_meet(t->group.comm, &v, meeting_ms(t));
}

static ferry_status meet(nccl__trainer *t)
{
    FERRY_TRY(open_comm(t));
    t->group.comm->check = nccl__trainer_check;
    t->group.comm->check_arg = t;
    t->group.comm->waited = note_wait;
    if (t->extras)
        FERRY_TRY(greet(t));
    t->digest =
        t->extras && t->info->digest && ferry__nccl_can_digest(t->group.comm);
    t->peers = ferry__alloc_array((size_t)t->world_size, sizeof(*t->peers));
    if (!t->peers)
        return FERRY_ENOMEM;
    FERRY_TRY(ferry__nccl_stage_open(&t->stage, t->group.comm));
    return t->host->update_wait(t->ctx);
}

/* What the control plane says of the same failure names the server and has
 * the worker's own words. A bound that passed on this side stands. */
static ferry_status own_words(nccl__trainer *t, ferry_status status)
{
    ferry__deadline until = ferry__deadline_in(WORDS_MS);
    char line[1024];
    ferry_status other;

    snprintf(line, sizeof(line), "%s", ferry_last_error());
    /* A worker that fails ends the group, which looks like a cancelation. */
    if (status == FERRY_ECANCELED && t->host->check(t->ctx, "init") >= 0)
        status = FERRY_EPEER;
    while (status != FERRY_ENOMEM && status != FERRY_ECANCELED) {
        other = t->host->update_poll(t->ctx);
        if (other != FERRY_EBUSY) {
            if (other < 0)
                return other;
            break;
        }
        if (ferry__deadline_passed(&until))
            break;
        ferry__sleep_ms(2);
    }
    return ferry__fail_line(status, line);
}

ferry_status nccl__session_open(nccl__trainer *t)
{
    char path[256];
    ferry_status status;

    FERRY_TRY(prepare(t));
    FERRY_TRY(tell_workers(t));
    status = meet(t);
    if (status < 0) {
        /* First, so that the workers stop waiting and say what they know. */
        nccl__session_close(t, status);
        return own_words(t, status);
    }
    t->open = true;
    t->host->log(FERRY_LOG_INFO, "nccl: %d workers joined, %s, by %s",
                 t->world_size - 1, t->ferry ? "Ferry" : "not Ferry",
                 ferry__nccl_path(&t->group, path, sizeof(path)));
    return FERRY_OK;
}

void nccl__session_close(nccl__trainer *t, ferry_status status)
{
    ferry__nccl_stage_close(&t->stage);
    ferry__nccl_close(&t->group, status);
    nccl__peers_free(t);
    t->open = false;
}
