/* SPDX-License-Identifier: Apache-2.0 */
/* Parameters that a model puts aside: whole, by ranges and by boxes, of names
 * that no table has, with digests, beside stored ones (B9, E1, H4, O-34). */
#include "harness/fleet.h"
#include "harness/solo.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/hash.h"
#include "harness/expect.h"
#include <ferry/ferry.h>

#define KEPT_MAX 64

/* A model that stores nothing but, at most, one parameter. */
typedef struct shelf {
    ferry_model model;
    struct {
        char name[128];
        ferry_dtype dtype;
        int32_t ndim;
        int64_t shape[FERRY_MAX_DIMS];
        void *bytes;
        size_t size_bytes;
    } kept[KEPT_MAX];
    size_t n_kept;
    const char *refuses; /* has no room for this one */
    const char *answers_null;
    bool halves; /* each in two views along its first dimension */
    ferry_param stored;
    uint16_t storage[TOY_HIDDEN];
} shelf;

static ferry_status room(void *arg, const ferry_tensor *t, void **out_bytes)
{
    shelf *s = arg;

    assert_null(t->data);
    if (s->answers_null != NULL && strcmp(t->name, s->answers_null) == 0)
        return FERRY_OK;
    if (s->refuses != NULL && strcmp(t->name, s->refuses) == 0)
        return ferry_fail(FERRY_ENOMEM, "no room for %s", t->name);
    assert_true(s->n_kept < KEPT_MAX);
    snprintf(s->kept[s->n_kept].name, sizeof(s->kept[0].name), "%s", t->name);
    s->kept[s->n_kept].dtype = t->dtype;
    s->kept[s->n_kept].ndim = t->ndim;
    memcpy(s->kept[s->n_kept].shape, t->shape, sizeof(t->shape));
    s->kept[s->n_kept].size_bytes = ferry_tensor_bytes(t);
    s->kept[s->n_kept].bytes = test_malloc(ferry_tensor_bytes(t));
    *out_bytes = s->kept[s->n_kept++].bytes;
    return FERRY_OK;
}

static ferry_status load(void *self, ferry_loader *l, const char *name,
                         const ferry_tensor *t)
{
    shelf *s = self;
    ferry_tensor part;

    if (s->model.n_params > 0 && strcmp(name, s->stored.name) == 0) {
        FERRY_TRY(ferry_loader_slot(l, 0, &part));
        return ferry_load_copy(l, &part, t);
    }
    if (!s->halves || t->ndim < 1 || t->shape[0] % 2 != 0)
        return ferry_load_aside(l, room, s, t);
    for (int64_t half = 0; half < 2; half++) {
        FERRY_TRY(ferry_tensor_narrow(t, 0, half * t->shape[0] / 2,
                                      t->shape[0] / 2, &part));
        FERRY_TRY(ferry_load_aside(l, room, s, &part));
    }
    return FERRY_OK;
}

static void empty_shelf(shelf *s)
{
    while (s->n_kept > 0)
        test_free(s->kept[--s->n_kept].bytes);
}

static void open_shelf(solo *r, shelf *s, ferry_commit commit)
{
    static const toy_options dense = {.kind = TOY_A};
    ferry_worker_options o = FERRY_WORKER_OPTIONS_INIT("probe");

    o.commit = commit;
    probe_reset();
    memset(r, 0, sizeof(*r));
    r->checkpoint = toy_checkpoint_create(&dense);
    the_probe.on_receive = solo_load_all;
    the_probe.arg = r->checkpoint;
    s->model.size = sizeof(s->model);
    s->model.name = "shelf";
    s->model.self = s;
    s->model.load = load;
    ok(ferry_worker_create(&o, &s->model, NULL, &r->worker));
    ok(ferry_worker_init_transfer_engine(r->worker, "{}"));
}

static void close_shelf(solo *r, shelf *s)
{
    ferry_worker_destroy(&r->worker);
    toy_checkpoint_free(r->checkpoint);
    empty_shelf(s);
}

/* Whatever was kept from `first` on is what the checkpoint has, in order. */
static void holds_checkpoint(const solo *r, const shelf *s, size_t first)
{
    const toy_checkpoint *c = r->checkpoint;

    assert_int_equal(s->n_kept - first, c->count);
    for (size_t i = 0; i < c->count; i++) {
        const ferry_param_meta *m = &c->metas[i];

        assert_string_equal(s->kept[first + i].name, m->name);
        assert_int_equal(s->kept[first + i].dtype, m->dtype);
        assert_int_equal(s->kept[first + i].ndim, m->ndim);
        for (int32_t d = 0; d < m->ndim; d++)
            assert_int_equal(s->kept[first + i].shape[d], m->shape[d]);
        assert_int_equal(s->kept[first + i].size_bytes, toy_bytes(m));
        assert_memory_equal(s->kept[first + i].bytes, c->bytes[i],
                            toy_bytes(m));
    }
}

static void names_that_no_table_has_are_put_aside(void **state)
{
    static const ferry_commit commits[] = {FERRY_COMMIT_INPLACE,
                                           FERRY_COMMIT_STAGED};

    (void)state;
    for (size_t i = 0; i < 2; i++) {
        shelf s = {0};
        solo r;

        open_shelf(&r, &s, commits[i]);
        for (uint32_t seed = 1; seed <= 2; seed++) {
            ok(solo_round(&r, seed, NULL));
            holds_checkpoint(&r, &s, 0);
            empty_shelf(&s);
        }
        assert_string_equal(fleet_status(r.worker, "state"), "idle");
        close_shelf(&r, &s);
    }
}

/* ---- the other ways in which a parameter is handed over ---- */

static ferry_status load_ranges(const ferry_worker_host *host,
                                ferry_worker_context *ctx, void *checkpoint)
{
    const toy_checkpoint *c = checkpoint;

    for (size_t i = 0; i < c->count; i++) {
        int64_t numel = 1, n;
        size_t elem = ferry_dtype_bytes(c->metas[i].dtype);

        for (int32_t d = 0; d < c->metas[i].ndim; d++)
            numel *= c->metas[i].shape[d];
        for (int64_t at = 0; at < numel; at += n) {
            n = numel - at < 32 ? numel - at : 32;
            FERRY_TRY(host->load_range(
                ctx, i, (const char *)c->bytes[i] + (size_t)at * elem, at, n));
        }
    }
    return FERRY_OK;
}

static ferry_status load_boxes(const ferry_worker_host *host,
                               ferry_worker_context *ctx, void *checkpoint)
{
    const toy_checkpoint *c = checkpoint;

    for (size_t i = 0; i < c->count; i++) {
        const ferry_box *boxes;
        size_t n;

        FERRY_TRY(host->boxes(ctx, i, &boxes, &n));
        assert_int_equal(n, 1);
        assert_int_equal(boxes[0].offset, 0);
        FERRY_TRY(host->load_box(ctx, i, 0, c->bytes[i]));
    }
    return FERRY_OK;
}

static void it_may_come_by_ranges_and_by_boxes(void **state)
{
    static const probe_fn ways[] = {load_ranges, load_boxes};

    (void)state;
    for (size_t i = 0; i < 2; i++) {
        shelf s = {0};
        solo r;

        open_shelf(&r, &s, FERRY_COMMIT_INPLACE);
        the_probe.on_receive = ways[i];
        ok(solo_round(&r, 3, NULL));
        holds_checkpoint(&r, &s, 0);
        close_shelf(&r, &s);
    }
}

static ferry_status load_transposed(const ferry_worker_host *host,
                                    ferry_worker_context *ctx, void *checkpoint)
{
    const toy_checkpoint *c = checkpoint;

    for (size_t i = 0; i < c->count; i++) {
        const ferry_param_meta *m = &c->metas[i];
        size_t elem = ferry_dtype_bytes(m->dtype);
        static char turned[1 << 16];
        ferry_tensor t;

        if (m->ndim != 2) {
            FERRY_TRY(solo_load_one(host, ctx, checkpoint, i));
            continue;
        }
        for (int64_t x = 0; x < m->shape[0]; x++)
            for (int64_t y = 0; y < m->shape[1]; y++)
                memcpy(turned + (size_t)(y * m->shape[0] + x) * elem,
                       (const char *)c->bytes[i] +
                           (size_t)(x * m->shape[1] + y) * elem,
                       elem);
        FERRY_TRY(ferry_tensor_init(&t, turned, m->dtype, 2,
                                    (int64_t[]){m->shape[1], m->shape[0]}));
        FERRY_TRY(ferry_tensor_transpose(&t, 0, 1, &t));
        FERRY_TRY(host->load(ctx, i, &t));
    }
    return FERRY_OK;
}

static void strided_tensors_arrive_contiguous(void **state)
{
    shelf s = {0};
    solo r;

    (void)state;
    open_shelf(&r, &s, FERRY_COMMIT_INPLACE);
    the_probe.on_receive = load_transposed;
    ok(solo_round(&r, 4, NULL));
    holds_checkpoint(&r, &s, 0);
    close_shelf(&r, &s);
}

static void views_are_put_aside_each_by_itself(void **state)
{
    shelf s = {.halves = true};
    size_t index;
    solo r;

    (void)state;
    open_shelf(&r, &s, FERRY_COMMIT_INPLACE);
    toy_checkpoint_fill(r.checkpoint, 5);
    index = toy_checkpoint_find(r.checkpoint, "model.norm.weight");
    ok(ferry_worker_start_weight_update(r.worker));
    ok(ferry_worker_update_weights(r.worker,
                                   solo_update_of(&r, "model.norm.weight")));
    assert_int_equal(s.n_kept, 2);
    for (size_t i = 0; i < 2; i++) {
        assert_int_equal(s.kept[i].shape[0], TOY_HIDDEN / 2);
        assert_memory_equal(s.kept[i].bytes,
                            (const char *)r.checkpoint->bytes[index] +
                                i * s.kept[i].size_bytes,
                            s.kept[i].size_bytes);
    }
    ok(ferry_worker_finish_weight_update(r.worker, NULL));
    close_shelf(&r, &s);
}

/* ---- digests ---- */

static bool wrong_digest;

static ferry_status load_with_digests(const ferry_worker_host *host,
                                      ferry_worker_context *ctx,
                                      void *checkpoint)
{
    const toy_checkpoint *c = checkpoint;

    host->want_digests(ctx, true);
    for (size_t i = 0; i < c->count; i++)
        FERRY_TRY(host->expect_digest(
            ctx, i, 0,
            ferry__xxh3(c->bytes[i], toy_bytes(&c->metas[i])) +
                (wrong_digest && i == 2)));
    return load_ranges(host, ctx, checkpoint);
}

static void digests_are_checked_before_a_round_ends(void **state)
{
    shelf s = {0};
    solo r;

    (void)state;
    open_shelf(&r, &s, FERRY_COMMIT_INPLACE);
    the_probe.on_receive = load_with_digests;
    wrong_digest = true;
    assert_int_equal(solo_round(&r, 6, NULL), FERRY_EDIGEST);
    assert_non_null(strstr(ferry_last_error(), r.checkpoint->metas[2].name));
    empty_shelf(&s);
    wrong_digest = false;
    ok(solo_round(&r, 7, NULL));
    holds_checkpoint(&r, &s, 0);
    close_shelf(&r, &s);
}

/* ---- refusals ---- */

static void no_room_ends_the_round_in_its_own_words(void **state)
{
    shelf s = {.refuses = "model.norm.weight"};
    solo r;

    (void)state;
    open_shelf(&r, &s, FERRY_COMMIT_INPLACE);
    assert_int_equal(solo_round(&r, 8, NULL), FERRY_ENOMEM);
    assert_non_null(
        strstr(ferry_last_error(), "no room for model.norm.weight"));
    s.refuses = NULL;
    s.answers_null = "model.norm.weight";
    assert_int_equal(solo_round(&r, 8, NULL), FERRY_EINVAL);
    assert_non_null(
        strstr(ferry_last_error(), "parameter model.norm.weight: got no room"));
    empty_shelf(&s);
    s.answers_null = NULL;
    ok(solo_round(&r, 9, NULL));
    holds_checkpoint(&r, &s, 0);
    close_shelf(&r, &s);
}

static ferry_status load_all_but_one(const ferry_worker_host *host,
                                     ferry_worker_context *ctx,
                                     void *checkpoint)
{
    const toy_checkpoint *c = checkpoint;

    for (size_t i = 1; i < c->count; i++)
        FERRY_TRY(solo_load_one(host, ctx, checkpoint, i));
    return FERRY_OK;
}

static void what_was_declared_must_come(void **state)
{
    shelf s = {0};
    solo r;

    (void)state;
    open_shelf(&r, &s, FERRY_COMMIT_INPLACE);
    the_probe.on_receive = load_all_but_one;
    assert_int_equal(solo_round(&r, 10, NULL), FERRY_ECOVERAGE);
    assert_non_null(strstr(ferry_last_error(), r.checkpoint->metas[0].name));
    close_shelf(&r, &s);
}

static void stored_parameters_beside_it_are_covered_as_ever(void **state)
{
    shelf s = {.stored = {"model.norm.weight",
                          FERRY_DTYPE_BF16,
                          1,
                          {TOY_HIDDEN},
                          NULL,
                          0,
                          0,
                          0}};
    size_t index;
    char *plan;
    solo r;

    (void)state;
    s.stored.data = s.storage;
    s.model.params = &s.stored;
    s.model.n_params = 1;
    open_shelf(&r, &s, FERRY_COMMIT_INPLACE);
    ok(solo_round(&r, 11, NULL));
    assert_int_equal(s.n_kept, r.checkpoint->count - 1);
    index = toy_checkpoint_find(r.checkpoint, "model.norm.weight");
    assert_memory_equal(s.storage, r.checkpoint->bytes[index],
                        sizeof(s.storage));
    ok(ferry_worker_plan(r.worker, r.checkpoint->metas, r.checkpoint->count,
                         &plan));
    assert_non_null(
        strstr(plan, "{\"kind\":\"aside\",\"source\":{\"offset\":0,"));
    assert_non_null(strstr(plan, "\"slot\":\"model.norm.weight\""));
    ferry_free(plan);
    close_shelf(&r, &s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_that_no_table_has_are_put_aside),
        cmocka_unit_test(it_may_come_by_ranges_and_by_boxes),
        cmocka_unit_test(strided_tensors_arrive_contiguous),
        cmocka_unit_test(views_are_put_aside_each_by_itself),
        cmocka_unit_test(digests_are_checked_before_a_round_ends),
        cmocka_unit_test(no_room_ends_the_round_in_its_own_words),
        cmocka_unit_test(what_was_declared_must_come),
        cmocka_unit_test(stored_parameters_beside_it_are_covered_as_ever),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
