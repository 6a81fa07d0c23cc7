/* SPDX-License-Identifier: Apache-2.0 */
/* Whether a set of baked parameters writes each stored element once.
 * Tied entries are exempt; a step's destination counts once, for the first
 * parameter that feeds it. Invariant: the plan is not changed. */
#include "base/alloc.h"
#include "core/boxes.h"
#include "core/plan_private.h"
#include <stdlib.h>
#include <string.h>

#define NO_STEP SIZE_MAX

typedef struct write {
    size_t slot, step, id;
    const int64_t *start, *count;
} write;

static int compare(size_t a, size_t b)
{
    return (a > b) - (a < b);
}

static int by_slot(const void *a, const void *b)
{
    const write *x = a, *y = b;
    int order = compare(x->slot, y->slot);
    if (order == 0)
        order = compare(x->step, y->step);
    return order != 0 ? order : compare(x->id, y->id);
}

static int by_id(const void *a, const void *b)
{
    return compare(*(const size_t *)a, *(const size_t *)b);
}

/* The writes of sorted ids, of which repeated ones count once. What is put
 * aside writes nothing stored. */
static size_t collect(const ferry__plan *plan, const size_t *ids, size_t count,
                      write *out)
{
    size_t n = 0;
    for (size_t i = 0; i < count; i++) {
        const ferry__baked *b = &plan->baked[ids[i]];
        if (i > 0 && ids[i] == ids[i - 1])
            continue;
        for (size_t k = b->first; k < b->first + b->count; k++) {
            const ferry__entry *e = &plan->entries[k];
            if (e->kind == FERRY__ENTRY_TIED || e->kind == FERRY__ENTRY_ASIDE)
                continue;
            out[n].slot = e->slot;
            out[n].step = e->kind == FERRY__ENTRY_STEP ? e->step : NO_STEP;
            out[n].id = ids[i];
            out[n].start = e->dst_start;
            out[n].count = e->dst_count;
            n++;
        }
    }
    return n;
}

/* Inputs of one step stand side by side once sorted; the first stays. */
static size_t drop_repeated_steps(write *writes, size_t n)
{
    size_t kept = 0;
    for (size_t i = 0; i < n; i++) {
        bool again = kept > 0 && writes[i].step != NO_STEP &&
                     writes[i].step == writes[kept - 1].step &&
                     writes[i].slot == writes[kept - 1].slot;
        if (!again)
            writes[kept++] = writes[i];
    }
    return kept;
}

static ferry_status check_slots(const ferry__plan *plan, const write *writes,
                                size_t n, ferry__cell *cells)
{
    for (size_t at = 0, end; at < n; at = end) {
        const ferry_param *p = &plan->model.params[writes[at].slot];
        const void *a = NULL, *b = NULL;
        for (end = at; end < n && writes[end].slot == writes[at].slot; end++) {
            cells[end].start = writes[end].start;
            cells[end].count = writes[end].count;
            cells[end].owner = &writes[end];
        }
        if (ferry__cells_overlap(cells + at, end - at, p->ndim, &a, &b)) {
            size_t x = ((const write *)a)->id, y = ((const write *)b)->id;
            return ferry_fail(FERRY_EMISMATCH,
                              "parameters %s and %s write the same elements "
                              "of slot %s",
                              plan->baked[x < y ? x : y].meta.name,
                              plan->baked[x < y ? y : x].meta.name, p->name);
        }
    }
    return FERRY_OK;
}

/* Costs by the parameters asked about, not by the plan's size: an update may
 * bring one parameter a call. */
ferry_status ferry__plan_check_overlap(const ferry__plan *plan,
                                       const size_t *ids, size_t count)
{
    size_t most = 0;
    if (count == 0)
        return FERRY_OK;
    for (size_t i = 0; i < count; i++)
        most += plan->baked[ids[i]].count;
    size_t *sorted = ferry__alloc_array(count, sizeof(*sorted));
    write *writes = ferry__alloc_array(most, sizeof(*writes));
    ferry__cell *cells = ferry__alloc_array(most, sizeof(*cells));
    ferry_status st = FERRY_ENOMEM;
    if (sorted && writes && cells) {
        memcpy(sorted, ids, count * sizeof(*sorted));
        qsort(sorted, count, sizeof(*sorted), by_id);
        size_t n = collect(plan, sorted, count, writes);
        qsort(writes, n, sizeof(*writes), by_slot);
        st = check_slots(plan, writes, drop_repeated_steps(writes, n), cells);
    }
    ferry__free(sorted);
    ferry__free(writes);
    ferry__free(cells);
    return st;
}
