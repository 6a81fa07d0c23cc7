/* SPDX-License-Identifier: Apache-2.0 */
/* Counters and histograms in Prometheus' text form, named as vLLM names them
 * where vLLM has them. Invariant: any thread, never blocks for long. */
#ifndef FERRY_SERVE_METRICS_H
#define FERRY_SERVE_METRICS_H

#include "base/str.h"
#include "serve/history.h"

#include <pthread.h>

typedef enum ferry__operation {
    FERRY__OP_INIT,
    FERRY__OP_SHUTDOWN,
    FERRY__OP_START,
    FERRY__OP_START_DRAFT,
    FERRY__OP_UPDATE,
    FERRY__OP_FINISH,
    FERRY__OP_COUNT
} ferry__operation;

#define FERRY__BUCKETS 9

typedef struct ferry__metrics {
    pthread_mutex_t lock;
    struct {
        uint64_t buckets[FERRY__BUCKETS + 1];
        uint64_t count;
        double sum;
        int64_t in_flight;
    } operations[FERRY__OP_COUNT];
    uint64_t prompt_tokens, generation_tokens;
    uint64_t requests_stop, requests_length, requests_abort, requests_error;
    uint64_t rounds_finished, rounds_failed;
    ferry__round_sums rounds; /* of all rounds together */
} ferry__metrics;

void ferry__metrics_init(ferry__metrics *m);
void ferry__metrics_begin(ferry__metrics *m, ferry__operation op);
void ferry__metrics_end(ferry__metrics *m, ferry__operation op, double seconds);
/* A request that ended, by its reason. */
void ferry__metrics_request(ferry__metrics *m, const char *finish_reason,
                            int32_t prompt_tokens, int32_t output_tokens);
void ferry__metrics_round(ferry__metrics *m, bool finished,
                          const ferry__round_sums *sums);
void ferry__metrics_text(ferry__metrics *m, int32_t running, int32_t waiting,
                         ferry__str *out);

#endif
