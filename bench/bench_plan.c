/* SPDX-License-Identifier: Apache-2.0 */
/* Cost per name of baking and of replay at 272, 3,700 and 140,000 names, and
 * whether it stays the same (linear). Prints text, or with --json one JSON
 * object a line: {bench,case,value,unit,limit,peers,goal,ok}.
 * Invariant: replay moves 8 bytes a name, so that the cost is the plan's. */
#include "core/coverage.h"
#include "core/load_plan.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define RUNS    9
#define LARGEST 140000
/* Per name at 140,000 against 3,700. Not 1: the tables leave the cache, and
 * fresh memory is touched for the first time. */
#define LINEAR_GOAL 4.0

#define EXPERTS 68 /* of a layer, which is one slot: 272 names are 4 */
#define LAYERS  (LARGEST / EXPERTS + 1)

static uint16_t storage[LAYERS * EXPERTS][4];
static char names[LARGEST][64];
static ferry_param slots[LAYERS];

/* Stacked experts: each name is one row of its layer's slot. */
static ferry_status load(void *self, ferry_loader *loader, const char *name,
                         const ferry_tensor *tensor)
{
    const int64_t shape[] = {2, 2};
    ferry_tensor slot;
    long layer, expert;
    (void)self;
    if (sscanf(name, "model.layers.%ld.mlp.experts.%ld.", &layer, &expert) != 2)
        return FERRY_EUNKNOWN;
    FERRY_TRY(ferry_loader_expect(loader, tensor, 2, shape));
    FERRY_TRY(ferry_loader_slot(loader, (size_t)layer, &slot));
    FERRY_TRY(ferry_tensor_select(&slot, 0, expert, &slot));
    return ferry_load_copy(loader, &slot, tensor);
}

/* Of this process, so that a busy machine does not count. */
static int64_t cpu_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

typedef struct cost {
    double bake, replay; /* nanoseconds per name */
} cost;

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static ferry_status replay(const ferry__plan *plan, const size_t *ids, size_t n,
                           ferry__coverage *coverage)
{
    const uint16_t source[4] = {1, 2, 3, 4};
    for (size_t i = 0; i < n; i++) {
        size_t count;
        const ferry__entry *e = ferry__plan_entries(plan, ids[i], &count);
        for (size_t k = 0; k < count; k++) {
            ferry__copy_run(&e[k].op, slots[e[k].slot].data, source, NULL);
            FERRY_TRY(ferry__coverage_mark(coverage, e[k].slot, e[k].dst_start,
                                           e[k].dst_count));
        }
    }
    for (size_t i = 0; i < n / EXPERTS; i++) {
        if (ferry__coverage_of(coverage, i) != FERRY__COVERED_FULL)
            return ferry_fail(FERRY_EINTERNAL, "slot %zu is not covered", i);
    }
    return FERRY_OK;
}

static ferry_status run_once(const ferry_model *model, size_t n, size_t *ids,
                             cost *out)
{
    ferry__plan *plan = NULL;
    ferry__coverage *coverage = NULL;
    int64_t t0 = cpu_ns();
    FERRY_TRY(ferry__plan_create(model, &plan));
    for (size_t i = 0; i < n; i++) {
        ferry_param_meta meta = {names[i], FERRY_DTYPE_BF16, 2, {2, 2}};
        FERRY_TRY(ferry__plan_bake(plan, &meta, &ids[i]));
    }
    FERRY_TRY(ferry__plan_check_overlap(plan, ids, n));
    int64_t t1 = cpu_ns();
    FERRY_TRY(ferry__coverage_create(model, &coverage));
    FERRY_TRY(replay(plan, ids, n, coverage));
    int64_t t2 = cpu_ns();
    out->bake = (double)(t1 - t0) / (double)n;
    out->replay = (double)(t2 - t1) / (double)n;
    ferry__coverage_destroy(&coverage);
    ferry__plan_destroy(&plan);
    return FERRY_OK;
}

static ferry_status median_cost(const ferry_model *model, size_t n, size_t *ids,
                                cost *out)
{
    double bake[RUNS], again[RUNS];
    for (int r = 0; r < RUNS; r++) {
        cost c = {0, 0};
        FERRY_TRY(run_once(model, n, ids, &c));
        bake[r] = c.bake;
        again[r] = c.replay;
    }
    qsort(bake, RUNS, sizeof(*bake), by_value);
    qsort(again, RUNS, sizeof(*again), by_value);
    out->bake = bake[RUNS / 2];
    out->replay = again[RUNS / 2];
    return FERRY_OK;
}

/* `goal` 0: a figure without a goal of its own. */
static bool report(bool json, const char *what, double value, const char *unit,
                   double goal)
{
    bool ok = goal <= 0 || value <= goal;
    char goal_text[32] = "null";
    if (goal > 0)
        snprintf(goal_text, sizeof(goal_text), "%.3g", goal);
    if (json)
        printf("{\"bench\":\"plan\",\"case\":\"%s\",\"value\":%.4g,"
               "\"unit\":\"%s\",\"limit\":null,\"peers\":{},\"goal\":%s,"
               "\"ok\":%s}\n",
               what, value, unit, goal_text, ok ? "true" : "false");
    else
        printf("plan %-28s %10.1f %s%s\n", what, value, unit,
               ok ? "" : "  (goal missed)");
    return ok;
}

int main(int argc, char **argv)
{
    const size_t sizes[] = {272, 3700, LARGEST};
    bool json = argc > 1 && strcmp(argv[1], "--json") == 0, good = true;
    size_t *ids = calloc(LARGEST, sizeof(*ids));
    cost costs[3];
    ferry_model model = {.size = sizeof(model),
                         .name = "stack",
                         .params = slots,
                         .n_params = LAYERS,
                         .load = load};
    if (!ids)
        return 1;
    for (int i = 0; i < LAYERS; i++)
        slots[i] = (ferry_param){.name = "experts.weight",
                                 .dtype = FERRY_DTYPE_BF16,
                                 .ndim = 3,
                                 .shape = {EXPERTS, 2, 2},
                                 .data = storage[i * EXPERTS]};
    for (int i = 0; i < LARGEST; i++)
        snprintf(names[i], sizeof(names[i]),
                 "model.layers.%d.mlp.experts.%d.down_proj.weight", i / EXPERTS,
                 i % EXPERTS);
    for (int k = 0; k < 3; k++) {
        char what[64];
        if (median_cost(&model, sizes[k], ids, &costs[k]) < 0) {
            fprintf(stderr, "bench_plan: %s\n", ferry_last_error());
            free(ids);
            return 1;
        }
        snprintf(what, sizeof(what), "bake, %zu names", sizes[k]);
        good &= report(json, what, costs[k].bake, "ns/name", 0);
        snprintf(what, sizeof(what), "replay, %zu names", sizes[k]);
        good &= report(json, what, costs[k].replay, "ns/name", 0);
    }
    good &= report(json, "bake, 140000 : 3700", costs[2].bake / costs[1].bake,
                   "x", LINEAR_GOAL);
    good &= report(json, "replay, 140000 : 3700",
                   costs[2].replay / costs[1].replay, "x", LINEAR_GOAL);
    free(ids);
    return good ? 0 : 2;
}
