/* SPDX-License-Identifier: Apache-2.0 */
/* Whether a set of baked parameters writes each stored element once.
 * Tied entries are exempt; a step's destination counts once, for the first
 * parameter that feeds it. Invariant: the plan is not changed. */
#include "base/alloc.h"
#include "core/boxes.h"
#include "core/plan_private.h"
#include <stdlib.h>
#include <string.h>

typedef struct write {
    size_t slot, id;
    const int64_t *start, *count;
} write;

static int by_slot(const void *a, const void *b)
{
    const write *x = a, *y = b;
    return (x->slot > y->slot) - (x->slot < y->slot);
}

/* Parameters named twice in `ids` count once. */
static size_t collect(const ferry__plan *plan, const size_t *ids, size_t count,
                      bool *seen_id, bool *seen_step, write *out)
{
    size_t n = 0;
    for (size_t i = 0; i < count; i++) {
        const ferry__baked *b = &plan->baked[ids[i]];
        if (seen_id[ids[i]])
            continue;
        seen_id[ids[i]] = true;
        for (size_t k = b->first; k < b->first + b->count; k++) {
            const ferry__entry *e = &plan->entries[k];
            if (e->kind == FERRY__ENTRY_TIED)
                continue;
            if (e->kind == FERRY__ENTRY_STEP) {
                if (seen_step[e->step])
                    continue;
                seen_step[e->step] = true;
            }
            out[n].slot = e->slot;
            out[n].id = ids[i];
            out[n].start = e->dst_start;
            out[n].count = e->dst_count;
            n++;
        }
    }
    return n;
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

ferry_status ferry__plan_check_overlap(const ferry__plan *plan,
                                       const size_t *ids, size_t count)
{
    size_t most = plan->n_entries - plan->n_dead;
    bool *seen_id = ferry__alloc_array(plan->n_baked, sizeof(*seen_id));
    bool *seen_step = ferry__alloc_array(plan->n_steps, sizeof(*seen_step));
    write *writes = ferry__alloc_array(most, sizeof(*writes));
    ferry__cell *cells = ferry__alloc_array(most, sizeof(*cells));
    ferry_status st = FERRY_ENOMEM;
    if (seen_id && seen_step && writes && cells) {
        size_t n = collect(plan, ids, count, seen_id, seen_step, writes);
        qsort(writes, n, sizeof(*writes), by_slot);
        st = check_slots(plan, writes, n, cells);
    }
    ferry__free(seen_id);
    ferry__free(seen_step);
    ferry__free(writes);
    ferry__free(cells);
    return st;
}
