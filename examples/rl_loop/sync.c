/* SPDX-License-Identifier: Apache-2.0 */
/* One update: pause, send, resume; see sync.h. */
#include "sync.h"

#include "clock.h"
#include "server.h"

#include <stdio.h>
#include <stdlib.h>

#define STATUS_BYTES ((size_t)64 << 10)

struct sync {
    ferry_source source;
    ferry_client client;
    ferry_trainer *trainer;
    sync_pause pause;
    char status[STATUS_BYTES];
};

ferry_status sync_open(const policy *p, const char *url, sync_pause pause,
                       sync_channel **out)
{
    ferry_ipc_trainer_init_info info = FERRY_IPC_TRAINER_INIT_INFO(0);
    sync_channel *s = calloc(1, sizeof *s);
    ferry_status st;

    if (s == NULL)
        return ferry_fail(FERRY_ENOMEM, "sync: out of memory");
    s->pause = pause;
    info.base.deadline_ms = 60000;
    info.path = "shared";
    st = policy_source(p, &s->source);
    if (st == FERRY_OK)
        st = ferry_client_http(url, NULL, &s->client);
    if (st == FERRY_OK)
        st =
            ferry_trainer_init(&info.base, &s->client, &s->source, &s->trainer);
    if (st < 0) {
        sync_close(&s);
        return st;
    }
    *out = s;
    return FERRY_OK;
}

void sync_close(sync_channel **s)
{
    if (*s == NULL)
        return;
    ferry_trainer_shutdown(&(*s)->trainer);
    ferry_client_close(&(*s)->client);
    ferry_source_close(&(*s)->source);
    free(*s);
    *s = NULL;
}

static ferry_status pause_server(sync_channel *s)
{
    if (s->pause == SYNC_PAUSE_NONE)
        return FERRY_OK;
    return s->client.ops->pause(
        s->client.self, s->pause == SYNC_PAUSE_WAIT ? "wait" : "keep", 0);
}

static void fill_row(const ferry_round_stats *stats, history_row *row)
{
    row->start_ms = stats->start_ms;
    row->gather_ms = stats->gather_ms;
    row->pack_ms = stats->pack_ms;
    row->wire_ms = stats->wire_ms;
    row->digest_ms = stats->digest_ms;
    row->finish_ms = stats->finish_ms;
    row->bytes = (double)stats->bytes_sent;
}

ferry_status sync_send(sync_channel *s, int64_t step, history_row *row)
{
    ferry_round_stats stats = {.size = sizeof stats};
    ferry_send_options send = FERRY_SEND_OPTIONS_INIT;
    char version[32];
    double start = now_ms();

    snprintf(version, sizeof version, "step-%lld", (long long)step);
    send.weight_version = version;
    send.stats = &stats;
    FERRY_TRY(pause_server(s));
    FERRY_TRY(ferry_trainer_send_weights(s->trainer, &send));
    if (s->pause != SYNC_PAUSE_NONE)
        FERRY_TRY(s->client.ops->resume(s->client.self));
    row->sync_ms = now_ms() - start;
    fill_row(&stats, row);
    row->stop_ms = -1;
    if (s->client.ops->status(s->client.self, s->status, sizeof s->status) ==
        FERRY_OK)
        row->stop_ms = server_stop_ms(s->status);
    return FERRY_OK;
}
