/* SPDX-License-Identifier: Apache-2.0 */
/* The report of a round, and what an interrupt does to it. */
#include "cli/cli_push.h"

#include "cli/cli.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static double gigabytes_per_s(const ferry_round_stats *stats)
{
    if (stats->total_ms <= 0)
        return 0.0;
    return (double)stats->bytes_declared / 1e6 / stats->total_ms;
}

void cli_push_print(const cli_push_options *options, int64_t round,
                    const ferry_round_stats *stats)
{
    char bytes[24], sent[24];

    printf("round %lld: %llu parameters, %s in %.3f s, %.2f GB/s, path %s",
           (long long)round, (unsigned long long)stats->n_params,
           cli_bytes_text(bytes, sizeof(bytes), stats->bytes_declared),
           stats->total_ms / 1e3, gigabytes_per_s(stats),
           stats->path[0] ? stats->path : "-");
    if (stats->bytes_sent != stats->bytes_declared)
        printf(", %s sent in all",
               cli_bytes_text(sent, sizeof(sent), stats->bytes_sent));
    if (options->version) {
        printf(", version ");
        cli_text_print(stdout, options->version);
    }
    printf("\n  start %.1f ms, gather %.1f ms, pack %.1f ms, wire %.1f ms, "
           "digest %.1f ms, finish %.1f ms\n",
           stats->start_ms, stats->gather_ms, stats->pack_ms, stats->wire_ms,
           stats->digest_ms, stats->finish_ms);
    cli_flush();
}

void cli_push_print_json(const cli_push_options *options, int64_t round,
                         size_t n_params, ferry_status status,
                         const ferry_round_stats *stats)
{
    json_t *line = json_pack(
        "{s:I, s:s, s:s, s:s?, s:I, s:I, s:I, s:I, s:I, s:s}", "round",
        (json_int_t)round, "status", ferry_status_name(status), "backend",
        options->backend, "weight_version", options->version, "n_params",
        (json_int_t)(stats->n_params ? stats->n_params : n_params),
        "bytes_declared", (json_int_t)stats->bytes_declared, "bytes_sent",
        (json_int_t)stats->bytes_sent, "n_updates",
        (json_int_t)stats->n_updates, "peak_bytes",
        (json_int_t)stats->peak_bytes, "path", stats->path);
    const struct {
        const char *name;
        double value;
    } numbers[] = {
        {"total_ms", stats->total_ms},
        {"start_ms", stats->start_ms},
        {"gather_ms", stats->gather_ms},
        {"pack_ms", stats->pack_ms},
        {"wire_ms", stats->wire_ms},
        {"digest_ms", stats->digest_ms},
        {"finish_ms", stats->finish_ms},
        {"gigabytes_per_s", gigabytes_per_s(stats)},
    };

    for (size_t i = 0; i < sizeof(numbers) / sizeof(numbers[0]); i++)
        json_object_set_new(line, numbers[i].name, json_real(numbers[i].value));
    if (status != FERRY_OK)
        json_object_set_new(line, "error", json_string(ferry_last_error()));
    cli_json_print(line);
}

/* ---- interrupts ---- */

static pthread_mutex_t watch_lock = PTHREAD_MUTEX_INITIALIZER;
static ferry_trainer *watched;
static atomic_bool interrupted;

bool cli_push_interrupted(void)
{
    return atomic_load(&interrupted);
}

void cli_push_watch(ferry_trainer *trainer)
{
    pthread_mutex_lock(&watch_lock);
    watched = trainer;
    pthread_mutex_unlock(&watch_lock);
}

static void *wait_for_signals(void *arg)
{
    sigset_t *set = arg;
    int number;

    for (;;) {
        if (sigwait(set, &number) != 0)
            continue;
        pthread_mutex_lock(&watch_lock);
        /* The second signal finds nobody watched and ends the program as the
         * signal would have. */
        if (!watched)
            _exit(128 + number);
        fprintf(stderr, "\nferry push: ending the round; once more to leave "
                        "at once\n");
        atomic_store(&interrupted, true);
        ferry_trainer_cancel(watched);
        watched = NULL;
        pthread_mutex_unlock(&watch_lock);
    }
    return NULL;
}

void cli_push_catch_signals(void)
{
    static sigset_t set;
    pthread_t thread;

    sigemptyset(&set);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGTERM);
    if (pthread_sigmask(SIG_BLOCK, &set, NULL) != 0)
        return;
    if (pthread_create(&thread, NULL, wait_for_signals, &set) != 0) {
        pthread_sigmask(SIG_UNBLOCK, &set, NULL);
        return;
    }
    pthread_detach(thread);
}
