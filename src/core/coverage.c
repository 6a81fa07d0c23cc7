/* SPDX-License-Identifier: Apache-2.0 */
/* Which boxes of each stored parameter a round has written.
 * A mark is one hash look-up; how much the boxes cover together is worked
 * out when asked, and only where their sizes could add up to the whole.
 * Invariant: a slot holds no box twice, so loading twice counts once. */
#include "core/coverage.h"
#include "base/alloc.h"
#include "base/hash.h"
#include "core/boxes.h"
#include "core/load_plan.h"
#include <string.h>

#define HASH_ABOVE 8 /* boxes of a slot; fewer are compared one by one */

typedef struct mark {
    int64_t start[FERRY_MAX_DIMS];
    int64_t count[FERRY_MAX_DIMS];
} mark;

typedef struct slot_marks {
    mark *marks;
    size_t n, capacity;
    size_t *hash; /* index + 1 into marks; 0: empty */
    size_t hash_capacity;
    int64_t sum;     /* of the boxes' sizes */
    int64_t covered; /* of their union, when `known` */
    bool known;
    bool touched; /* is in the list of touched slots */
} slot_marks;

struct ferry__coverage {
    const ferry_param *params;
    size_t n_params;
    slot_marks *slots;
    size_t *touched; /* slots marked since the last reset */
    size_t n_touched;
};

ferry_status ferry__coverage_create(const ferry_model *model,
                                    ferry__coverage **out)
{
    ferry__coverage *c = ferry__alloc(sizeof(*c));
    if (!c)
        return FERRY_ENOMEM;
    c->params = model->params;
    c->n_params = model->n_params;
    c->slots = ferry__alloc_array(model->n_params, sizeof(*c->slots));
    c->touched = ferry__alloc_array(model->n_params, sizeof(*c->touched));
    if (!c->slots || !c->touched) {
        ferry__coverage_destroy(&c);
        return FERRY_ENOMEM;
    }
    *out = c;
    return FERRY_OK;
}

void ferry__coverage_destroy(ferry__coverage **coverage)
{
    ferry__coverage *c = coverage ? *coverage : NULL;
    if (!c)
        return;
    for (size_t i = 0; c->slots && i < c->n_params; i++) {
        ferry__free(c->slots[i].marks);
        ferry__free(c->slots[i].hash);
    }
    ferry__free(c->slots);
    ferry__free(c->touched);
    ferry__free(c);
    *coverage = NULL;
}

void ferry__coverage_reset(ferry__coverage *c)
{
    for (size_t i = 0; i < c->n_touched; i++) {
        slot_marks *s = &c->slots[c->touched[i]];
        if (s->hash)
            memset(s->hash, 0, s->hash_capacity * sizeof(*s->hash));
        s->n = 0;
        s->sum = 0;
        s->covered = 0;
        s->known = false;
        s->touched = false;
    }
    c->n_touched = 0;
}

static bool same_mark(const mark *a, const mark *b)
{
    return memcmp(a, b, sizeof(*a)) == 0;
}

/* Index of the place of `m`, or of the empty place where it belongs. */
static size_t hash_place(const slot_marks *s, const mark *m)
{
    size_t mask = s->hash_capacity - 1;
    size_t i = (size_t)ferry__xxh3(m, sizeof(*m)) & mask;
    while (s->hash[i] != 0 && !same_mark(&s->marks[s->hash[i] - 1], m))
        i = (i + 1) & mask;
    return i;
}

static bool has_mark(const slot_marks *s, const mark *m)
{
    if (s->hash && s->n > HASH_ABOVE)
        return s->hash[hash_place(s, m)] != 0;
    for (size_t i = 0; i < s->n; i++) {
        if (same_mark(&s->marks[i], m))
            return true;
    }
    return false;
}

/* Makes room for one more and enters all marks anew. At most half full. */
static ferry_status grow_hash(slot_marks *s)
{
    size_t capacity = s->hash_capacity ? s->hash_capacity : 16;
    while (capacity < 2 * (s->n + 1))
        capacity *= 2;
    if (capacity != s->hash_capacity) {
        size_t *hash = ferry__alloc_array(capacity, sizeof(*hash));
        if (!hash)
            return FERRY_ENOMEM;
        ferry__free(s->hash);
        s->hash = hash;
        s->hash_capacity = capacity;
        for (size_t i = 0; i < s->n; i++)
            s->hash[hash_place(s, &s->marks[i])] = i + 1;
    }
    return FERRY_OK;
}

static int64_t mark_size(const ferry_param *p, const mark *m)
{
    int64_t n = 1;
    for (int32_t i = 0; i < p->ndim; i++)
        n *= m->count[i];
    return n;
}

/* Cuts off padding rows; an empty box stays empty. */
static void set_mark(const ferry_param *p, const int64_t *start,
                     const int64_t *count, mark *out)
{
    memset(out, 0, sizeof(*out));
    for (int32_t i = 0; i < p->ndim; i++) {
        out->start[i] = start[i];
        out->count[i] = count[i];
    }
    if (p->ndim > 0 && p->valid_rows > 0 && start[0] + count[0] > p->valid_rows)
        out->count[0] = start[0] < p->valid_rows ? p->valid_rows - start[0] : 0;
}

ferry_status ferry__coverage_mark(ferry__coverage *c, size_t slot,
                                  const int64_t *start, const int64_t *count)
{
    const ferry_param *p = &c->params[slot];
    slot_marks *s = &c->slots[slot];
    mark m;
    set_mark(p, start, count, &m);
    if (mark_size(p, &m) == 0 || has_mark(s, &m))
        return FERRY_OK;
    FERRY_TRY(ferry__grow(&s->marks, &s->capacity, s->n, sizeof(*s->marks)));
    if (s->n >= HASH_ABOVE)
        FERRY_TRY(grow_hash(s));
    s->marks[s->n] = m;
    if (s->hash)
        s->hash[hash_place(s, &m)] = s->n + 1;
    s->n++;
    s->sum += mark_size(p, &m);
    s->known = false;
    if (!s->touched) {
        s->touched = true;
        c->touched[c->n_touched++] = slot;
    }
    return FERRY_OK;
}

/* The union's size. When memory runs out the answer is too small, so that a
 * slot is never called whole without proof. */
static int64_t covered_of(const ferry__coverage *c, size_t slot)
{
    slot_marks *s = &c->slots[slot];
    if (s->known)
        return s->covered;
    s->covered = 0;
    ferry__cell *cells = ferry__alloc_array(s->n, sizeof(*cells));
    if (!cells)
        return 0;
    for (size_t i = 0; i < s->n; i++) {
        cells[i].start = s->marks[i].start;
        cells[i].count = s->marks[i].count;
    }
    s->known = ferry__cells_union(cells, s->n, c->params[slot].ndim,
                                  &s->covered) == FERRY_OK;
    ferry__free(cells);
    return s->covered;
}

void ferry__coverage_count(const ferry__coverage *c, size_t slot,
                           int64_t *out_covered, int64_t *out_wanted)
{
    *out_covered = covered_of(c, slot);
    *out_wanted = ferry__slot_numel(&c->params[slot]);
}

ferry__covered ferry__coverage_of(const ferry__coverage *c, size_t slot)
{
    const slot_marks *s = &c->slots[slot];
    int64_t wanted = ferry__slot_numel(&c->params[slot]);
    if (wanted == 0)
        return FERRY__COVERED_FULL;
    if (s->n == 0)
        return FERRY__COVERED_NONE;
    if (s->sum < wanted || covered_of(c, slot) < wanted)
        return FERRY__COVERED_PART;
    return FERRY__COVERED_FULL;
}
