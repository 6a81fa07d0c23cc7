/* SPDX-License-Identifier: Apache-2.0 */
/* Deferred processing (E5): the same bytes as while loading, drained by
 * finish, bounded and counted memory (E7). */
#include "harness/solo.h"

#include "base/alloc.h"
#include "core/deferral.h"

#include <ferry/ferry.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define ok(expr)                                                               \
    do {                                                                       \
        if ((expr) < 0)                                                        \
            fail_msg("%s: %s", #expr, ferry_last_error());                     \
    } while (0)

/* ---- the queue by itself ---- */

static void e5_more_jobs_than_buffers_all_run(void **state)
{
    ferry__spans spans;
    ferry__deferral *d = NULL;
    ferry__copy_op op = {.ndim = 1,
                         .shape = {1024},
                         .src_stride = {1},
                         .dst_stride = {1},
                         .src_dtype = FERRY_DTYPE_F32,
                         .dst_dtype = FERRY_DTYPE_Q8_0};
    unsigned char out[50][1024 / 32 * 34], want[1024 / 32 * 34];
    float in[1024];
    void *memory;

    (void)state;
    ferry__spans_init(&spans, 32);
    ok(ferry__deferral_create(2, &spans, &d));
    assert_int_equal(ferry__deferral_bytes(d), 6 * FERRY__DEFERRAL_PIECE);
    memory = malloc(ferry__deferral_bytes(d));
    assert_non_null(memory);
    ferry__deferral_drain(d); /* nothing to do, nothing lent */
    for (int round = 0; round < 3; round++) {
        ok(ferry__deferral_lend(d, memory));
        for (int i = 0; i < 50; i++) {
            float *buffer = ferry__deferral_acquire(d);

            for (int k = 0; k < 1024; k++)
                buffer[k] = (float)(i * 7 + k + round);
            ferry__deferral_submit(d, &op, out[i], buffer);
        }
        ferry__deferral_drain(d);
        ferry__deferral_drain(d);
        for (int i = 0; i < 50; i++) {
            for (int k = 0; k < 1024; k++)
                in[k] = (float)(i * 7 + k + round);
            ferry__convert(want, FERRY_DTYPE_Q8_0, in, FERRY_DTYPE_F32, 1024);
            assert_memory_equal(out[i], want, sizeof(want));
        }
        ferry__deferral_discard(d);
    }
    ferry__deferral_destroy(&d);
    assert_null(d);
    ferry__spans_destroy(&spans);
    free(memory);
}

static void a_discard_leaves_no_job_behind(void **state)
{
    ferry__spans spans;
    ferry__deferral *d = NULL;
    ferry__copy_op op = {.ndim = 1,
                         .shape = {1 << 18},
                         .src_stride = {1},
                         .dst_stride = {1},
                         .src_dtype = FERRY_DTYPE_F32,
                         .dst_dtype = FERRY_DTYPE_Q8_0};
    size_t bytes = (size_t)(1 << 18) / 32 * 34;
    unsigned char *out = malloc(bytes);
    void *memory;

    (void)state;
    assert_non_null(out);
    ferry__spans_init(&spans, 32);
    ok(ferry__deferral_create(1, &spans, &d));
    memory = malloc(ferry__deferral_bytes(d));
    ok(ferry__deferral_lend(d, memory));
    for (int i = 0; i < 4; i++) {
        float *buffer = ferry__deferral_acquire(d);

        memset(buffer, i, FERRY__DEFERRAL_PIECE);
        ferry__deferral_submit(d, &op, out, buffer);
    }
    ferry__deferral_discard(d);
    /* The owner may free both now; a job that still ran would be seen by the
     * sanitizers. */
    free(memory);
    free(out);
    ferry__deferral_destroy(&d);
    ferry__spans_destroy(&spans);
}

static void threads_outside_the_range_are_refused(void **state)
{
    ferry_worker_options o = FERRY_WORKER_OPTIONS_INIT(NULL);
    toy_options to = {.kind = TOY_B, .store = FERRY_DTYPE_Q8_0};
    ferry_worker *w = NULL;
    toy *t = toy_create(&to);

    (void)state;
    for (int32_t n = -1; n <= 65; n += 66) {
        o.defer_threads = n;
        assert_int_equal(ferry_worker_create(&o, toy_model(t), NULL, &w),
                         FERRY_EINVAL);
        assert_non_null(strstr(ferry_last_error(), "defer_threads"));
    }
    toy_free(t);
}

/* ---- in a worker ---- */

static uint64_t status_number(ferry_worker *w, const char *key)
{
    char text[16384], find[64];
    const char *at;

    ferry_worker_status(w, text, sizeof(text));
    snprintf(find, sizeof(find), "\"%s\":", key);
    at = strstr(text, find);
    assert_non_null(at);
    return strtoull(at + strlen(find), NULL, 10);
}

static void open_toy(solo *r, int32_t threads, ferry_commit commit,
                     int32_t tp_size)
{
    ferry_worker_options o = FERRY_WORKER_OPTIONS_INIT("probe");
    toy_options to = {
        .kind = TOY_B, .store = FERRY_DTYPE_Q8_0, .tp_size = tp_size};

    o.commit = commit;
    o.tp_size = tp_size;
    o.defer_threads = threads;
    solo_open(r, &o, &to);
    ok(ferry_worker_init_transfer_engine(r->worker, "{}"));
}

static void e5_the_bytes_are_those_of_the_synchronous_path(void **state)
{
    (void)state;
    for (int32_t threads = 0; threads <= 3; threads++)
        for (int32_t commit = 0; commit < 2; commit++) {
            solo r;

            open_toy(&r, threads, (ferry_commit)commit, 1);
            assert_int_equal(ferry_worker_defers_processing(r.worker),
                             threads > 0);
            for (uint32_t seed = 1; seed <= 4; seed++) {
                const char *differs;

                ok(solo_round(&r, seed, "v"));
                differs = toy_differs(r.toy, seed);
                if (differs != NULL)
                    fail_msg("%d threads: %s", (int)threads, differs);
                /* Nothing is held between rounds. */
                assert_int_equal(status_number(r.worker, "held_bytes"), 0);
            }
            /* E7: what the queue may hold is in the peak. */
            if (threads > 0)
                assert_true(status_number(r.worker, "peak_bytes") >=
                            (2 * (uint64_t)threads + 2) *
                                FERRY__DEFERRAL_PIECE);
            solo_close(&r);
        }
}

static void e5_drain_is_idempotent_and_finish_drains(void **state)
{
    solo r;

    (void)state;
    open_toy(&r, 2, FERRY_COMMIT_INPLACE, 1);
    ok(ferry_worker_drain_pending(r.worker)); /* no round, nothing */
    toy_checkpoint_fill(r.checkpoint, 9);
    ok(ferry_worker_start_weight_update(r.worker));
    ok(ferry_worker_update_weights(r.worker,
                                   solo_update(&r, 0, r.checkpoint->count)));
    ok(ferry_worker_drain_pending(r.worker));
    /* In place: they are there before the finish. */
    assert_null(toy_differs(r.toy, 9));
    ok(ferry_worker_drain_pending(r.worker));
    ok(ferry_worker_finish_weight_update(r.worker, "v"));
    ok(ferry_worker_drain_pending(r.worker));
    assert_null(toy_differs(r.toy, 9));
    solo_close(&r);
}

/* A parameter that comes again in a later update: the later one stays. */
static void e5_a_later_update_wins(void **state)
{
    solo r;

    (void)state;
    open_toy(&r, 3, FERRY_COMMIT_STAGED, 1);
    for (uint32_t seed = 1; seed <= 20; seed++) {
        ok(ferry_worker_start_weight_update(r.worker));
        for (uint32_t again = 0; again < 5; again++) {
            toy_checkpoint_fill(r.checkpoint, 100 * seed + again);
            ok(ferry_worker_update_weights(
                r.worker, solo_update(&r, 0, r.checkpoint->count)));
        }
        ok(ferry_worker_finish_weight_update(r.worker, "v"));
        assert_null(toy_differs(r.toy, 100 * seed + 4));
    }
    solo_close(&r);
}

static void h4_an_abort_drops_what_is_queued(void **state)
{
    uint64_t before;
    solo r;

    (void)state;
    open_toy(&r, 2, FERRY_COMMIT_STAGED, 1);
    ok(solo_round(&r, 1, "v"));
    before = toy_sum(r.toy);
    for (int i = 0; i < 20; i++) {
        toy_checkpoint_fill(r.checkpoint, 2);
        ok(ferry_worker_start_weight_update(r.worker));
        ok(ferry_worker_update_weights(
            r.worker, solo_update(&r, 0, r.checkpoint->count)));
        ferry_worker_abort_weight_update(r.worker);
        assert_true(toy_sum(r.toy) == before);
        assert_int_equal(status_number(r.worker, "held_bytes"), 0);
    }
    ok(solo_round(&r, 3, "v"));
    assert_null(toy_differs(r.toy, 3));
    solo_close(&r);
}

/* Without room for the buffers nothing is deferred, and all is right. */
static void e7_a_small_limit_turns_deferring_off(void **state)
{
    ferry_worker_options o = FERRY_WORKER_OPTIONS_INIT("probe");
    toy_options to = {.kind = TOY_B, .store = FERRY_DTYPE_Q8_0};
    solo r;

    (void)state;
    o.defer_threads = 2;
    o.held_limit_bytes = 1 << 20;
    solo_open(&r, &o, &to);
    ok(ferry_worker_init_transfer_engine(r.worker, "{}"));
    ok(solo_round(&r, 5, "v"));
    assert_null(toy_differs(r.toy, 5));
    assert_non_null(strstr(solo_last_warning(), "nothing is deferred"));
    assert_true(status_number(r.worker, "peak_bytes") <= 1 << 20);
    solo_close(&r);
}

/* ---- large parameters: more than one piece each ---- */

#define ROWS 3000
#define COLS 512 /* 6 MB as f32 */

typedef struct big {
    ferry_param params[2];
    unsigned char *bytes[2];
    ferry_model model;
} big;

/* "plain" as it is; "turned" has its dimensions swapped in storage. */
static ferry_status big_load(void *self, ferry_loader *loader, const char *name,
                             const ferry_tensor *tensor)
{
    ferry_tensor slot, view = *tensor;
    size_t index = strcmp(name, "turned") == 0;

    (void)self;
    FERRY_TRY(ferry_loader_slot(loader, index, &slot));
    if (index == 1)
        FERRY_TRY(ferry_tensor_transpose(tensor, 0, 1, &view));
    return ferry_load_copy(loader, &slot, &view);
}

static void big_open(big *b)
{
    static const char *const names[] = {"plain", "turned"};

    memset(b, 0, sizeof(*b));
    for (int i = 0; i < 2; i++) {
        size_t bytes = (size_t)3072 * COLS / 32 * 34;

        b->bytes[i] = calloc(1, bytes);
        assert_non_null(b->bytes[i]);
        b->params[i] = (ferry_param){.name = names[i],
                                     .dtype = FERRY_DTYPE_Q8_0,
                                     .ndim = 2,
                                     .data = b->bytes[i]};
    }
    b->params[0].shape[0] = ROWS;
    b->params[0].shape[1] = COLS;
    b->params[1].shape[0] = COLS;
    b->params[1].shape[1] = 3072;
    b->model = (ferry_model){.size = sizeof(ferry_model),
                             .name = "big",
                             .params = b->params,
                             .n_params = 2,
                             .load = big_load};
}

static void big_close(big *b)
{
    free(b->bytes[0]);
    free(b->bytes[1]);
}

static const ferry_param_meta big_metas[] = {
    {.name = "plain",
     .dtype = FERRY_DTYPE_F32,
     .ndim = 2,
     .shape = {ROWS, COLS}},
    {.name = "turned",
     .dtype = FERRY_DTYPE_F32,
     .ndim = 2,
     .shape = {3072, COLS}},
};

static float big_value(int i, size_t k)
{
    return (float)((k * 2654435761u + (size_t)i * 97) % 20011) / 1000.0f -
           10.0f;
}

typedef struct big_source {
    float *values[2];
    int next;
} big_source;

static ferry_status big_metadata(void *self, const ferry_param_meta **out,
                                 size_t *count)
{
    (void)self;
    *out = big_metas;
    *count = 2;
    return FERRY_OK;
}

static ferry_status big_begin(void *self)
{
    ((big_source *)self)->next = 0;
    return FERRY_OK;
}

static ferry_status big_next(void *self, ferry_item *out)
{
    big_source *s = self;
    const ferry_param_meta *m = &big_metas[s->next];

    if (s->next == 2)
        return FERRY_DONE;
    memset(out, 0, sizeof(*out));
    out->name = m->name;
    FERRY_TRY(ferry_tensor_init(&out->tensor, s->values[s->next], m->dtype,
                                m->ndim, m->shape));
    s->next++;
    return FERRY_OK;
}

static void big_end(void *self)
{
    (void)self;
}

static const ferry_source_ops big_ops = {.size = sizeof(ferry_source_ops),
                                         .metadata = big_metadata,
                                         .begin = big_begin,
                                         .next = big_next,
                                         .end = big_end};

static void load_big(const ferry_source *source, int32_t threads, big *b)
{
    ferry_worker_options o = FERRY_WORKER_OPTIONS_INIT(NULL);
    ferry_worker *w = NULL;

    big_open(b);
    o.defer_threads = threads;
    ok(ferry_worker_create(&o, &b->model, NULL, &w));
    ok(ferry_worker_load_source(w, source));
    ferry_worker_destroy(&w);
}

/* Predicted by quantising rows that are put in storage order here. */
static void check_big(const big *b, const big_source *s)
{
    unsigned char want[3072 / 32 * 34];
    float row[3072];

    for (size_t r = 0; r < ROWS; r++) {
        ferry__convert(want, FERRY_DTYPE_Q8_0, s->values[0] + r * COLS,
                       FERRY_DTYPE_F32, COLS);
        assert_memory_equal(b->bytes[0] + r * (COLS / 32 * 34), want,
                            COLS / 32 * 34);
    }
    for (size_t r = 0; r < COLS; r++) {
        for (size_t k = 0; k < 3072; k++)
            row[k] = s->values[1][k * COLS + r];
        ferry__convert(want, FERRY_DTYPE_Q8_0, row, FERRY_DTYPE_F32, 3072);
        assert_memory_equal(b->bytes[1] + r * (3072 / 32 * 34), want,
                            3072 / 32 * 34);
    }
}

static void e5_large_parameters_are_cut_on_blocks(void **state)
{
    big_source s = {{NULL, NULL}, 0};
    ferry_source source = {&big_ops, &s};

    (void)state;
    for (int i = 0; i < 2; i++) {
        size_t n = (size_t)(i == 0 ? ROWS : 3072) * COLS;

        s.values[i] = malloc(n * sizeof(float));
        assert_non_null(s.values[i]);
        for (size_t k = 0; k < n; k++)
            s.values[i][k] = big_value(i, k);
    }
    for (int32_t threads = 0; threads <= 2; threads++) {
        big b;

        load_big(&source, threads, &b);
        check_big(&b, &s);
        big_close(&b);
    }
    free(s.values[0]);
    free(s.values[1]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(e5_more_jobs_than_buffers_all_run),
        cmocka_unit_test(a_discard_leaves_no_job_behind),
        cmocka_unit_test(threads_outside_the_range_are_refused),
        cmocka_unit_test(e5_the_bytes_are_those_of_the_synchronous_path),
        cmocka_unit_test(e5_drain_is_idempotent_and_finish_drains),
        cmocka_unit_test(e5_a_later_update_wins),
        cmocka_unit_test(h4_an_abort_drops_what_is_queued),
        cmocka_unit_test(e7_a_small_limit_turns_deferring_off),
        cmocka_unit_test(e5_large_parameters_are_cut_on_blocks),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
