/* SPDX-License-Identifier: Apache-2.0 */
/* Each rank has a source of its own with the bytes of the same seed. The
 * barrier is in the source's next, so a sender that waits for its workers
 * between two gathers holds up all, and nothing but its end lets them go. */
#include "harness/trainer_ranks.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define WATCHDOG_S 10

typedef struct rank {
    const trainer_ranks *what;
    int32_t rank;
    rig_source *s;
    ferry_source inner;
    pthread_barrier_t *barrier;
    size_t at;
    char line[512];
} rank;

static bool holds_at(const rank *k, size_t i)
{
    return !k->what->ragged || k->rank + 1 < k->what->n ||
           i >= k->what->count / 2;
}

static ferry_status gathered_next(void *self, ferry_item *out)
{
    rank *k = self;
    ferry_status status = k->inner.ops->next(k->inner.self, out);

    pthread_barrier_wait(k->barrier);
    if (k->rank == 0)
        alarm(WATCHDOG_S);
    if (status == FERRY_OK && !holds_at(k, k->at++))
        out->tensor.data = NULL;
    return status;
}

static ferry_status gathered_metadata(void *self, const ferry_param_meta **out,
                                      size_t *count)
{
    rank *k = self;

    return k->inner.ops->metadata(k->inner.self, out, count);
}

static ferry_status gathered_begin(void *self)
{
    rank *k = self;

    k->at = 0;
    return k->inner.ops->begin(k->inner.self);
}

static void gathered_end(void *self)
{
    rank *k = self;

    k->inner.ops->end(k->inner.self);
}

static bool gathered_holds(void *self, const char *name)
{
    const rank *k = self;

    for (size_t i = 0; i < k->what->count; i++) {
        if (strcmp(k->what->params[i].name, name) == 0)
            return holds_at(k, i);
    }
    return false;
}

static void *run_rank(void *arg)
{
    static const ferry_source_ops ops = {.size = sizeof(ferry_source_ops),
                                         .kind = "gathered",
                                         .metadata = gathered_metadata,
                                         .begin = gathered_begin,
                                         .next = gathered_next,
                                         .end = gathered_end,
                                         .holds = gathered_holds};
    rank *k = arg;
    ferry_nccl_trainer_init_info info = *k->what->info;
    ferry_source source = {&ops, k};
    ferry_trainer *t = NULL;
    ferry_status status;

    info.base.rank = k->rank;
    status = ferry_trainer_init(&info.base, k->what->client, &source, &t);
    for (uint64_t turn = 1; turn <= k->what->turns && status >= 0; turn++) {
        rig_source_fill(k->s, turn);
        status = ferry_trainer_send_weights(t, NULL);
    }
    if (status < 0)
        snprintf(k->line, sizeof(k->line), "rank %d: %.480s", k->rank,
                 ferry_last_error());
    ferry_trainer_shutdown(&t);
    return NULL;
}

const char *trainer_ranks_run(const trainer_ranks *what)
{
    static char line[512];
    pthread_t threads[TRAINER_RANKS_MAX];
    rank ranks[TRAINER_RANKS_MAX];
    pthread_barrier_t barrier;

    line[0] = '\0';
    pthread_barrier_init(&barrier, NULL, (unsigned)what->n);
    for (int32_t i = 0; i < what->n; i++) {
        ranks[i] = (rank){.what = what, .rank = i, .barrier = &barrier};
        ranks[i].s = rig_source_open(what->params, what->count, 0);
        ranks[i].inner = rig_source_of(ranks[i].s);
        pthread_create(&threads[i], NULL, run_rank, &ranks[i]);
    }
    for (int32_t i = 0; i < what->n; i++) {
        pthread_join(threads[i], NULL);
        rig_source_close(ranks[i].s);
        if (line[0] == '\0')
            memcpy(line, ranks[i].line, sizeof(line));
    }
    alarm(0);
    pthread_barrier_destroy(&barrier);
    return line;
}
