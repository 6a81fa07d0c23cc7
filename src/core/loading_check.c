/* SPDX-License-Identifier: Apache-2.0 */
/* What must hold before a round is committed, and the commit itself.
 * Invariant: nothing here writes but commit, and commit only copies slots
 * that the checks found whole. */
#include "core/loading_state.h"

#include "base/alloc.h"
#include "base/str.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool is_stored(const ferry__loading *l, size_t slot)
{
    return (l->model->params[slot].flags & FERRY_PARAM_RUNTIME) == 0;
}

static ferry__covered covered(const ferry__loading *l, size_t slot)
{
    int64_t have, want;

    ferry__coverage_count(l->coverage, slot, &have, &want);
    if (want == 0)
        return FERRY__COVERED_FULL;
    if (l->kernel[slot] && l->kernel_format)
        return FERRY__COVERED_FULL;
    return ferry__coverage_of(l->coverage, slot);
}

ferry_status ferry__loading_check_whole(const ferry__loading *l)
{
    for (const ferry__batch *b = l->first; b != NULL; b = b->next)
        for (size_t i = 0; i < b->manifest.count; i++) {
            const ferry__arrival *a = &b->arrivals[i];
            const ferry_param_meta *meta = &b->manifest.params[i];

            if (a->whole || ferry__meta_numel(meta) == 0)
                continue;
            if (l->kernel_format && !l->kernel[a->id])
                return ferry_fail(FERRY_ECOVERAGE,
                                  "parameter %s: declared, but it did not come",
                                  meta->name);
            /* Of what this shard does not store, nothing need come. */
            if (a->count == 0)
                continue;
            if (a->position > 0)
                return ferry_fail(FERRY_ECOVERAGE,
                                  "parameter %s: declared %lld elements, "
                                  "only %lld came",
                                  meta->name,
                                  (long long)ferry__meta_numel(meta),
                                  (long long)a->position);
            return ferry_fail(FERRY_ECOVERAGE,
                              "parameter %s: declared, but %zu of its %zu "
                              "boxes came",
                              meta->name, a->n_done, a->count);
        }
    return FERRY_OK;
}

/* ---- coverage ---- */

static bool declared_in_round(const ferry__loading *l, const char *name)
{
    size_t index;

    for (const ferry__batch *b = l->first; b != NULL; b = b->next)
        if (ferry__manifest_find(&b->manifest, name, &index))
            return true;
    return false;
}

bool ferry__loading_known(const ferry__loading *l, size_t i, char *buffer,
                          size_t size_bytes, ferry_param_meta *out)
{
    const ferry_model *m = l->model;
    const char *name;

    if (m->checkpoint_name == NULL || m->checkpoint_meta == NULL)
        return false;
    name = m->checkpoint_name(m->self, i);
    if (name == NULL || m->checkpoint_meta(m->self, i, out) < 0)
        return false;
    snprintf(buffer, size_bytes, "%s", name);
    for (size_t k = 0; m->maps != NULL && k < m->n_maps; k++)
        if (ferry__starts_with(name, m->maps[k].to)) {
            snprintf(buffer, size_bytes, "%s%s", m->maps[k].from,
                     name + strlen(m->maps[k].to));
            break;
        }
    out->name = buffer;
    return true;
}

/* The first checkpoint name that would write into `slot` and was not part of
 * this round, if the model can say. */
static bool missing_name(ferry__loading *l, size_t slot, char *name,
                         size_t size_bytes)
{
    ferry_param_meta meta;
    size_t id, count;

    for (size_t i = 0; ferry__loading_known(l, i, name, size_bytes, &meta);
         i++) {
        const ferry__entry *e;

        if (declared_in_round(l, name) ||
            ferry__plan_bake(l->plan, &meta, &id) < 0)
            continue;
        e = ferry__plan_entries(l->plan, id, &count);
        for (size_t k = 0; k < count; k++)
            if (e[k].slot == slot)
                return true;
    }
    return false;
}

static ferry_status not_covered(ferry__loading *l, size_t slot)
{
    char name[512];
    /* In kernel format what is missing is the slot itself. */
    bool known = !l->kernel_format && missing_name(l, slot, name, sizeof(name));
    int64_t have, want;

    ferry__coverage_count(l->coverage, slot, &have, &want);
    return ferry_fail(FERRY_ECOVERAGE,
                      "parameter %s: %lld of its %lld elements were "
                      "written%s%s",
                      l->model->params[slot].name, (long long)have,
                      (long long)want, known ? "; missing " : "",
                      known ? name : "");
}

ferry_status ferry__loading_check_coverage(ferry__loading *l, bool full)
{
    FERRY_TRY(ferry__step_check(l));
    for (size_t i = 0; i < l->model->n_params; i++) {
        ferry__covered c;

        if (!is_stored(l, i))
            continue;
        c = covered(l, i);
        if (c == FERRY__COVERED_PART || (full && c == FERRY__COVERED_NONE))
            return not_covered(l, i);
    }
    return FERRY_OK;
}

bool ferry__loading_is_full(const ferry__loading *l)
{
    for (size_t i = 0; i < l->model->n_params; i++)
        if (is_stored(l, i) && covered(l, i) != FERRY__COVERED_FULL)
            return false;
    return true;
}

bool ferry__loading_is_empty(const ferry__loading *l)
{
    return atomic_load(&l->n_params) == 0 && !l->kernel_any;
}

size_t ferry__loading_untouched(const ferry__loading *l, size_t *out_slots,
                                size_t max)
{
    size_t n = 0;

    for (size_t i = 0; i < l->model->n_params; i++) {
        if (!is_stored(l, i) || l->kernel[i] ||
            covered(l, i) != FERRY__COVERED_NONE)
            continue;
        if (n < max)
            out_slots[n] = i;
        n++;
    }
    return n;
}

/* ---- overlap over the updates of a round ---- */

static int compare_ids(const void *a, const void *b)
{
    size_t x = *(const size_t *)a, y = *(const size_t *)b;

    return (x > y) - (x < y);
}

/* Two names that write one element are refused within an update before it
 * writes; those of different updates are found here. The same name in two
 * updates is one name. */
static ferry_status check_overlap(const ferry__loading *l)
{
    size_t total = 0, n = 0, unique = 0;
    size_t *ids;
    ferry_status st;

    if (l->kernel_format || l->first == NULL || l->first == l->last)
        return FERRY_OK;
    for (const ferry__batch *b = l->first; b != NULL; b = b->next)
        total += b->manifest.count;
    ids = ferry__alloc_array(total, sizeof(*ids));
    if (ids == NULL)
        return FERRY_ENOMEM;
    for (const ferry__batch *b = l->first; b != NULL; b = b->next)
        for (size_t i = 0; i < b->manifest.count; i++)
            ids[n++] = b->arrivals[i].id;
    qsort(ids, n, sizeof(*ids), compare_ids);
    for (size_t i = 0; i < n; i++)
        if (unique == 0 || ids[unique - 1] != ids[i])
            ids[unique++] = ids[i];
    st = ferry__plan_check_overlap(l->plan, ids, unique);
    ferry__free(ids);
    return st;
}

/* ---- digests ---- */

static ferry_status check_landing(const ferry_param_meta *meta, size_t box,
                                  const ferry__landing *landing)
{
    if (!landing->has_expected)
        return ferry_fail(FERRY_EDIGEST,
                          "parameter %s: the sender stated no digest for box "
                          "%zu",
                          meta->name, box);
    if (!landing->has_digest)
        return ferry_fail(FERRY_EDIGEST, "parameter %s: box %zu was not hashed",
                          meta->name, box);
    if (landing->digest != landing->expected)
        return ferry_fail(FERRY_EDIGEST,
                          "parameter %s: box %zu has digest %016llx, the "
                          "sender stated %016llx",
                          meta->name, box, (unsigned long long)landing->digest,
                          (unsigned long long)landing->expected);
    return FERRY_OK;
}

/* Once the sender stated one digest, it must have stated all. */
static ferry_status check_digests(const ferry__loading *l)
{
    if (!l->promised)
        return FERRY_OK;
    for (const ferry__batch *b = l->first; b != NULL; b = b->next)
        for (size_t i = 0; i < b->manifest.count; i++) {
            const ferry__arrival *a = &b->arrivals[i];

            if (ferry__meta_numel(&b->manifest.params[i]) == 0)
                continue;
            for (size_t k = 0; k < a->count; k++)
                FERRY_TRY(check_landing(&b->manifest.params[i], k,
                                        &b->landings[a->first + k]));
        }
    return FERRY_OK;
}

ferry_status ferry__loading_check(ferry__loading *l, bool full)
{
    FERRY_TRY(ferry__loading_check_whole(l));
    FERRY_TRY(check_overlap(l));
    FERRY_TRY(check_digests(l));
    FERRY_TRY(ferry__land_deferred(l));
    return ferry__loading_check_coverage(l, full);
}

/* ---- what a committed round leaves ---- */

void ferry__loading_commit(ferry__loading *l)
{
    if (l->staging == NULL)
        return;
    for (size_t i = 0; i < l->model->n_params; i++)
        if (is_stored(l, i) &&
            (l->kernel[i] ||
             ferry__coverage_of(l->coverage, i) == FERRY__COVERED_FULL) &&
            l->wrote)
            ferry__staging_commit(l->staging, i);
}

ferry_status ferry__loading_names(const ferry__loading *l, ferry__manifest *out)
{
    size_t index;

    for (const ferry__batch *b = l->first; b != NULL; b = b->next)
        for (size_t i = 0; i < b->manifest.count; i++)
            if (!ferry__manifest_find(out, b->manifest.params[i].name, &index))
                FERRY_TRY(ferry__manifest_add(out, &b->manifest.params[i]));
    return FERRY_OK;
}
