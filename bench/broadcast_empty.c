/* SPDX-License-Identifier: Apache-2.0 */
/* A round of `nccl` without parameters, over HTTP to servers that run, beside
 * a call that goes to every rank and changes nothing.
 * Invariant: both go through one client. */
#include "bench/broadcast.h"

#include <ferry/ferry.h>

#define URLS_MAX 16

static ferry_status no_metadata(void *self, const ferry_param_meta **out,
                                size_t *out_count)
{
    static const ferry_param_meta none[1];

    (void)self;
    *out = none;
    *out_count = 0;
    return FERRY_OK;
}

static ferry_status no_begin(void *self)
{
    (void)self;
    return FERRY_OK;
}

static ferry_status no_next(void *self, ferry_item *out)
{
    (void)self, (void)out;
    return FERRY_DONE;
}

static void no_end(void *self)
{
    (void)self;
}

static const ferry_source_ops no_ops = {.size = sizeof(ferry_source_ops),
                                        .kind = "empty",
                                        .flags = FERRY_SOURCE_STABLE,
                                        .metadata = no_metadata,
                                        .begin = no_begin,
                                        .next = no_next,
                                        .end = no_end};

static void must(ferry_status status, const char *what)
{
    if (status < 0)
        party_die("%s: %s", what, ferry_last_error());
}

static void open_client(const char *const *urls, int n_urls, ferry_client *out)
{
    ferry_client clients[URLS_MAX];

    if (n_urls < 1 || n_urls > URLS_MAX)
        party_die("1 to %d servers", URLS_MAX);
    for (int i = 0; i < n_urls; i++)
        must(ferry_client_http(urls[i], NULL, &clients[i]), urls[i]);
    if (n_urls == 1)
        *out = clients[0];
    else
        must(ferry_client_fanout(clients, (size_t)n_urls, out), "fan-out");
}

int bench_broadcast_empty(const char *const *urls, int n_urls)
{
    ferry_nccl_trainer_init_info info = FERRY_NCCL_TRAINER_INIT_INFO(0);
    ferry_source source = {&no_ops, NULL};
    ferry_client client;
    ferry_trainer *trainer;
    char line[64];

    open_client(urls, n_urls, &client);
    must(ferry_trainer_init(&info.base, &client, &source, &trainer), "init");
    must(ferry_trainer_send_weights(trainer, NULL), "send");
    printf("ready\n");
    fflush(stdout);
    while (fgets(line, sizeof(line), stdin)) {
        double began = party_now_ms();

        if (strncmp(line, "round", 5) == 0)
            must(ferry_trainer_send_weights(trainer, NULL), "send");
        else
            must(client.ops->abort_weight_update(client.self), "no-op");
        printf("ms %.4f\n", party_now_ms() - began);
        fflush(stdout);
    }
    ferry_trainer_shutdown(&trainer);
    ferry_client_close(&client);
    return 0;
}
