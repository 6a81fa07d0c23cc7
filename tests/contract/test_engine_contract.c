/* SPDX-License-Identifier: Apache-2.0 */
/* What every engine must do, run over each backend that is here: `memory`,
 * an engine out of the tree, opened lazily (F1, F4), and the built-in ones.
 * A backend whose module is absent is skipped, and the skip names why. */
#include "harness/fleet.h"

#include <assert.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

/* One way to run a backend. */
typedef struct way {
    const char *backend, *init, *label;
} way;

static const way ways[] = {
    {"memory", NULL, "memory, whole tensors"},
    {"memory", "\"mode\":\"range\",\"per_update\":3", "memory, ranges"},
    {"memory", "\"mode\":\"box\",\"per_update\":1", "memory, boxes"},
    {"memory", "\"mode\":\"strided\",\"digest\":false", "memory, strided"},
    {"ipc", NULL, "ipc, one call"},
    {"ipc", "\"packed\":true,\"packed_buffer_size_bytes\":4096",
     "ipc, chunked"},
    {"nccl", "\"provider\":\"tcp\",\"packed_buffer_size_bytes\":100",
     "nccl, packed"},
    {"nccl", "\"provider\":\"nccl\",\"packed_buffer_size_bytes\":100",
     "nccl, by NCCL's own interface"},
    {"nccl", "\"provider\":\"tcp\",\"packed\":false", "nccl, one by one"},
    /* The wrapper that does no wrong changes nothing. */
    {"fault:memory", NULL, "memory, wrapped"},
    {"fault:ipc", NULL, "ipc, wrapped"},
    {"fault:nccl", "\"provider\":\"tcp\"", "nccl, wrapped"},
};
static const size_t n_ways = sizeof(ways) / sizeof(ways[0]);

static void check(ferry_status st, const char *label)
{
    if (st < 0)
        fail_msg("%s: %s: %s", label, ferry_status_name(st),
                 ferry_last_error());
}

static void check_stored(fleet *f, uint32_t seed, const char *label)
{
    const char *why = fleet_differs(f, seed);

    if (why != NULL)
        fail_msg("%s: %s", label, why);
}

typedef void (*way_fn)(const way *w);

/* Runs fn over every way whose backend is here. */
static void each_way(way_fn fn)
{
    size_t ran = 0;

    for (size_t i = 0; i < n_ways; i++) {
        const char *why = fleet_unavailable(ways[i].backend);

        if (why != NULL) {
            print_message("skipped: %s: %s\n", ways[i].label, why);
            continue;
        }
        fn(&ways[i]);
        ran++;
    }
    assert_true(ran > 0);
}

static fleet_options options_of(const way *w, toy_kind kind, int32_t tp)
{
    fleet_options o;

    memset(&o, 0, sizeof(o));
    o.backend = w->backend;
    o.init = w->init;
    o.toy.kind = kind;
    o.toy.tp_size = tp;
    return o;
}

/* ---- round trips ---- */

static void round_trip(const way *w, const fleet_options *o)
{
    fleet f;

    fleet_open(&f, o);
    check(fleet_connect(&f, NULL), w->label);
    for (uint32_t k = 0; k < 3; k++) {
        uint32_t seed = k == 1 ? 2 : 1;

        check(fleet_send(&f, seed, NULL), w->label);
        check_stored(&f, seed, w->label);
    }
    fleet_close(&f);
}

static void round_trips(const way *w)
{
    for (toy_kind kind = TOY_A; kind <= TOY_B; kind++)
        for (int32_t tp = 1; tp <= 2; tp++)
            for (int commit = 0; commit < 2; commit++) {
                fleet_options o = options_of(w, kind, tp);

                o.commit = (ferry_commit)commit;
                round_trip(w, &o);
            }
}

/* O-21, O-23 (0-d scales), O-32, O-35, O-36, O-42: fill(1), fill(2), fill(1),
 * every stored byte, each toy, one and two ranks, both commits. */
static void round_trip_is_byte_exact(void **state)
{
    (void)state;
    each_way(round_trips);
}

/* ---- dtypes ---- */

static void f32_into_bf16(const way *w)
{
    fleet_options o = options_of(w, TOY_A, 1);

    o.toy.wire = FERRY_DTYPE_F32;
    round_trip(w, &o);
    o.toy.store = FERRY_DTYPE_F16;
    round_trip(w, &o);
    o.toy.wire = FERRY_DTYPE_BF16;
    o.toy.store = FERRY_DTYPE_F32;
    round_trip(w, &o);
}

static void o60_wire_dtype_is_converted_to_nearest_even(void **state)
{
    (void)state;
    each_way(f32_into_bf16);
}

static void bias_stays_wide(const way *w)
{
    static const float bias[4] = {6.817f, 6.8171f, 6.8172f, 7.063f};
    fleet_options o = options_of(w, TOY_M, 2);
    fleet f;
    size_t i;
    ferry_send_options so = FERRY_SEND_OPTIONS_INIT;

    fleet_open(&f, &o);
    check(fleet_connect(&f, NULL), w->label);
    toy_checkpoint_fill(f.checkpoint, 1);
    i = toy_checkpoint_find(f.checkpoint,
                            "model.layers.1.mlp.gate.e_score_correction_bias");
    memcpy(f.checkpoint->bytes[i], bias, sizeof(bias));
    check(ferry_trainer_send_weights(f.trainer, &so), w->label);
    for (size_t r = 0; r < f.n; r++) {
        const ferry_model *m = toy_model(f.toys[r]);
        size_t gate = toy_slot(
            f.toys[r], "model.layers.1.mlp.gate.e_score_correction_bias");
        size_t experts = toy_slot(
            f.toys[r], "model.layers.1.mlp.experts.e_score_correction_bias");

        /* O-61: one tensor, seen from two modules. */
        assert_memory_equal(m->params[gate].data, bias, sizeof(bias));
        assert_memory_equal(m->params[experts].data, bias, sizeof(bias));
    }
    fleet_close(&f);
}

static void o29_o61_f32_bias_arrives_identical_at_both_places(void **state)
{
    (void)state;
    each_way(bias_stays_wide);
}

/* ---- sessions ---- */

/* A source that says one shape and yields another at one place. */
typedef struct liar {
    ferry_source inner;
    size_t at, next;
    int mode; /* 1 shape, 2 name, 3 stops early, 4 goes on, 5 no data,
                 6 dtype, 7 repeats */
    ferry_item last;
} liar;

static ferry_status liar_metadata(void *self, const ferry_param_meta **out,
                                  size_t *count)
{
    liar *l = self;

    FERRY_TRY(l->inner.ops->metadata(l->inner.self, out, count));
    if (l->mode == 4)
        *count -= 1;
    return FERRY_OK;
}

static ferry_status liar_begin(void *self)
{
    liar *l = self;

    l->next = 0;
    return l->inner.ops->begin(l->inner.self);
}

static ferry_status liar_next(void *self, ferry_item *out)
{
    liar *l = self;
    ferry_status st;

    if (l->mode == 3 && l->next == l->at)
        return FERRY_DONE;
    st = l->inner.ops->next(l->inner.self, out);
    if (st == FERRY_OK && l->next == l->at) {
        if (l->mode == 1)
            out->tensor.shape[0] -= 1;
        if (l->mode == 2)
            out->name = "model.imaginary.weight";
        if (l->mode == 5)
            out->tensor.data = NULL;
        if (l->mode == 6)
            out->tensor.dtype = FERRY_DTYPE_F16;
        if (l->mode == 7)
            *out = l->last;
    }
    if (st == FERRY_OK)
        l->last = *out;
    l->next++;
    return st;
}

static void liar_end(void *self)
{
    liar *l = self;

    l->inner.ops->end(l->inner.self);
}

static const ferry_source_ops liar_ops = {
    .size = sizeof(ferry_source_ops),
    .kind = "liar",
    .metadata = liar_metadata,
    .begin = liar_begin,
    .next = liar_next,
    .end = liar_end,
};

static void divergences(const way *w)
{
    static const char *const words[] = {
        "",
        "shape",
        "model.imaginary.weight",
        "first missing is model.layers.0.self_attn.q_proj.weight",
        "first extra is lm_head.weight",
        "yielded no data",
        "dtype",
        "got model.embed_tokens.weight"};

    for (int mode = 1; mode <= 7; mode++) {
        fleet_options o = options_of(w, TOY_A, 1);
        liar l = {{NULL, NULL}, 1, 0, 0, {0}};
        ferry_source source = {&liar_ops, &l};
        fleet f;
        ferry_status st;

        fleet_open(&f, &o);
        l.inner = toy_checkpoint_source(f.checkpoint, 0, f.checkpoint->count);
        check(fleet_connect(&f, &source), w->label);
        check(fleet_send(&f, 1, NULL), w->label);
        l.mode = mode;
        st = fleet_send(&f, 2, NULL);
        if (st != FERRY_EMISMATCH && st != FERRY_ECOVERAGE)
            fail_msg("%s: lie %d: %s: %s", w->label, mode,
                     ferry_status_name(st), ferry_last_error());
        if (strstr(ferry_last_error(), words[mode]) == NULL)
            fail_msg("%s: lie %d says: %s", w->label, mode, ferry_last_error());
        /* O-01: the next round needs no restart. */
        l.mode = 0;
        check(fleet_send(&f, 3, NULL), w->label);
        check_stored(&f, 3, w->label);
        fleet_close(&f);
        ferry_source_close(&l.inner);
    }
}

static void
b3_o01_divergence_fails_by_name_and_the_next_round_works(void **state)
{
    (void)state;
    each_way(divergences);
}

static void versions(const way *w)
{
    fleet_options o = options_of(w, TOY_A, 2);
    fleet f;

    fleet_open(&f, &o);
    check(fleet_connect(&f, NULL), w->label);
    assert_int_equal(ferry_worker_may_serve(f.workers[0]), FERRY_ENOTREADY);
    check(fleet_send(&f, 1, "v7"), w->label);
    check(ferry_worker_may_serve(f.workers[1]), w->label);
    assert_string_equal(fleet_status(f.workers[1], "weight_version"), "v7");
    check(fleet_send(&f, 2, NULL), w->label);
    assert_string_equal(fleet_status(f.workers[0], "weight_version"), "v7");
    check(fleet_send(&f, 2, "v8"), w->label);
    assert_string_equal(fleet_status(f.workers[0], "weight_version"), "v8");
    fleet_close(&f);
}

static void o56_o58_version_is_recorded_at_finish(void **state)
{
    (void)state;
    each_way(versions);
}

/* ---- order and repetition ---- */

/* The names in another order, as a source of its own. */
static ferry_source shuffled(toy_checkpoint *c, unsigned seed)
{
    size_t n = c->count;
    const char **names = calloc(n, sizeof(*names));
    ferry_tensor *tensors = calloc(n, sizeof(*tensors));
    ferry_source source;

    for (size_t i = 0; i < n; i++) {
        names[i] = c->metas[i].name;
        ferry_tensor_init(&tensors[i], c->bytes[i], c->metas[i].dtype,
                          c->metas[i].ndim, c->metas[i].shape);
    }
    for (size_t i = n - 1; i > 0; i--) {
        size_t k = (seed = seed * 1103515245u + 12345u) / 65536u % (i + 1);
        const char *name = names[i];
        ferry_tensor t = tensors[i];

        names[i] = names[k];
        tensors[i] = tensors[k];
        names[k] = name;
        tensors[k] = t;
    }
    assert_int_equal(ferry_source_module(names, tensors, n, &source), 0);
    free(names);
    free(tensors);
    return source;
}

static void any_order(const way *w)
{
    static const toy_kind kinds[] = {TOY_M, TOY_Q};

    for (unsigned seed = 0; seed < 10; seed++) {
        fleet_options o = options_of(w, kinds[seed % 2], 2);
        ferry_source source;
        fleet f;

        fleet_open(&f, &o);
        source = shuffled(f.checkpoint, seed);
        check(fleet_connect(&f, &source), w->label);
        check(fleet_send(&f, 1, NULL), w->label);
        check(fleet_send(&f, 1, NULL), w->label);
        check_stored(&f, 1, w->label);
        fleet_close(&f);
    }
}

static void o34_o35_loading_twice_in_any_order_is_loading_once(void **state)
{
    (void)state;
    each_way(any_order);
}

/* Descriptors once they are still: what a round has closed may be a moment
 * late in going. */
static int still_fds(void)
{
    int fds = fleet_open_fds();

    for (int same = 0, tries = 0; same < 10 && tries < 500; tries++) {
        int now;

        usleep(10000);
        now = fleet_open_fds();
        same = now == fds ? same + 1 : 0;
        fds = now;
    }
    return fds;
}

static void same_addresses(const way *w)
{
    fleet_options o = options_of(w, TOY_Q, 1);
    void *before[64];
    const ferry_model *m;
    int fds = 0;
    fleet f;

    o.commit = FERRY_COMMIT_STAGED;
    fleet_open(&f, &o);
    check(fleet_connect(&f, NULL), w->label);
    m = toy_model(f.toys[0]);
    assert_true(m->n_params <= 64);
    for (size_t i = 0; i < m->n_params; i++)
        before[i] = m->params[i].data;
    for (uint32_t k = 0; k < 20; k++) {
        check(fleet_send(&f, k, NULL), w->label);
        if (k == 2)
            fds = still_fds();
    }
    for (size_t i = 0; i < m->n_params; i++)
        assert_ptr_equal(m->params[i].data, before[i]);
    assert_int_equal(still_fds(), fds);
    check_stored(&f, 19, w->label);
    fleet_close(&f);
}

static void o37_o47_addresses_and_descriptors_stay_as_they_are(void **state)
{
    (void)state;
    each_way(same_addresses);
}

/* ---- H4, H5 ---- */

static void partial(const way *w)
{
    fleet_options o = options_of(w, TOY_A, 1);
    ferry_source source;
    fleet f;
    size_t norm;

    o.has_weights = 1;
    fleet_open(&f, &o);
    toy_checkpoint_fill(f.checkpoint, 1);
    source = toy_checkpoint_source(f.checkpoint, 0, f.checkpoint->count);
    check(ferry_worker_load_source(f.workers[0], &source), w->label);
    check_stored(&f, 1, w->label);
    ferry_source_close(&source);

    norm = toy_checkpoint_find(f.checkpoint, "model.norm.weight");
    source = toy_checkpoint_source(f.checkpoint, norm, 1);
    check(fleet_connect(&f, &source), w->label);
    check(fleet_send(&f, 2, "part"), w->label);
    assert_null(toy_slot_differs(f.toys[0], "model.norm.weight", 2));
    assert_null(toy_slot_differs(f.toys[0], "lm_head.weight", 1));
    assert_non_null(strstr(fleet_status(f.workers[0], "not_updated"),
                           "\"model.embed_tokens.weight\""));
    check(ferry_worker_may_serve(f.workers[0]), w->label);
    fleet_close(&f);
}

static void h5_partial_round_keeps_and_reports_the_rest(void **state)
{
    (void)state;
    each_way(partial);
}

static void half_fused(const way *w)
{
    for (int commit = 0; commit < 2; commit++) {
        fleet_options o = options_of(w, TOY_A, 1);
        ferry_source source;
        uint64_t sum;
        fleet f;
        size_t q;

        o.has_weights = 1;
        o.commit = (ferry_commit)commit;
        fleet_open(&f, &o);
        sum = toy_sum(f.toys[0]);
        q = toy_checkpoint_find(f.checkpoint,
                                "model.layers.0.self_attn.q_proj.weight");
        source = toy_checkpoint_source(f.checkpoint, q, 1);
        check(fleet_connect(&f, &source), w->label);
        assert_true(fleet_send(&f, 2, "half") < 0);
        assert_non_null(strstr(ferry_last_error(), "qkv_proj"));
        assert_non_null(strstr(ferry_last_error(),
                               "model.layers.0.self_attn.k_proj.weight"));
        if (commit == FERRY_COMMIT_STAGED) {
            assert_true(toy_sum(f.toys[0]) == sum);
            check(ferry_worker_may_serve(f.workers[0]), w->label);
        } else {
            assert_int_equal(ferry_worker_may_serve(f.workers[0]),
                             FERRY_ENOTREADY);
        }
        assert_string_equal(fleet_status(f.workers[0], "state"), "failed");
        fleet_close(&f);
    }
}

static void h4_h5_half_a_fused_slot_fails_by_name(void **state)
{
    (void)state;
    each_way(half_fused);
}

static void full_only(const way *w)
{
    fleet_options o = options_of(w, TOY_A, 1);
    ferry_source source;
    fleet f;

    o.require_full = 1;
    fleet_open(&f, &o);
    source = toy_checkpoint_source(f.checkpoint, 0, f.checkpoint->count - 1);
    check(fleet_connect(&f, &source), w->label);
    assert_true(fleet_send(&f, 1, NULL) < 0);
    assert_non_null(strstr(ferry_last_error(), "lm_head.weight"));
    fleet_close(&f);
}

static void h5_require_full_refuses_a_partial_round(void **state)
{
    (void)state;
    each_way(full_only);
}

static void empty_source(const way *w)
{
    fleet_options o = options_of(w, TOY_A, 1);
    ferry_source source;
    uint64_t sum;
    fleet f;

    o.has_weights = 1;
    fleet_open(&f, &o);
    source = toy_checkpoint_source(f.checkpoint, 0, 0);
    check(fleet_connect(&f, &source), w->label);
    sum = toy_sum(f.toys[0]);
    check(ferry_worker_set_weight_version(f.workers[0], "v1"), w->label);
    check(fleet_send(&f, 1, "v2"), w->label);
    assert_true(toy_sum(f.toys[0]) == sum);
    assert_string_equal(fleet_status(f.workers[0], "weight_version"), "v1");
    fleet_close(&f);
}

static void o21_empty_round_changes_nothing(void **state)
{
    (void)state;
    each_way(empty_source);
}

/* ---- names ---- */

static void tied_names(const way *w)
{
    fleet_options o = options_of(w, TOY_A, 2);
    ferry_source source;
    fleet f;
    size_t head, n;

    o.toy.tied = 1;
    round_trip(w, &o);
    fleet_open(&f, &o);
    n = f.checkpoint->count;
    head = toy_checkpoint_find(f.checkpoint, "lm_head.weight");
    assert_int_equal(head, n - 1);
    /* Only the head: the one storage takes it. */
    source = toy_checkpoint_source(f.checkpoint, 1, n - 1);
    check(fleet_connect(&f, &source), w->label);
    check(fleet_send(&f, 4, NULL), w->label);
    check_stored(&f, 4, w->label);
    fleet_close(&f);

    fleet_open(&f, &o);
    check(fleet_connect(&f, NULL), w->label);
    toy_checkpoint_fill(f.checkpoint, 5);
    ((char *)f.checkpoint->bytes[head])[3] ^= 1;
    assert_true(ferry_trainer_send_weights(f.trainer, NULL) < 0);
    assert_non_null(strstr(ferry_last_error(), "lm_head.weight"));
    assert_non_null(strstr(ferry_last_error(), "model.embed_tokens.weight"));
    check(fleet_send(&f, 6, NULL), w->label);
    check_stored(&f, 6, w->label);
    fleet_close(&f);
}

static void o45_tied_parameters_are_one_storage(void **state)
{
    (void)state;
    each_way(tied_names);
}

static void mapped_names(const way *w)
{
    fleet_options o = options_of(w, TOY_A, 1);
    ferry_source source;
    toy_checkpoint *plain;
    toy_options plain_options;
    fleet f;

    o.toy.prefix = 1;
    round_trip(w, &o);
    /* The loader's own spelling is nobody's checkpoint name here. */
    plain_options = o.toy;
    plain_options.prefix = 0;
    plain = toy_checkpoint_create(&plain_options);
    fleet_open(&f, &o);
    source = toy_checkpoint_source(plain, 0, plain->count);
    check(fleet_connect(&f, &source), w->label);
    assert_true(fleet_send(&f, 1, NULL) < 0);
    assert_non_null(
        strstr(ferry_last_error(), "model.language_model.embed_tokens"));
    fleet_close(&f);
    toy_checkpoint_free(plain);
}

static void o43_one_name_map_for_disk_and_transfer(void **state)
{
    (void)state;
    each_way(mapped_names);
}

/* ---- parts that lie in buffers far apart ---- */

/* Parts of one stored weight come in any order, so that most of them do not
 * share a buffer, and are quantised in the background while buffers are
 * filled anew. */
static void deferred_parts(const way *w)
{
    static const toy_kind kinds[] = {TOY_A, TOY_Q, TOY_B};

    for (unsigned seed = 0; seed < 6; seed++) {
        fleet_options o = options_of(w, kinds[seed % 3], 2);
        ferry_source source;
        fleet f;

        o.defer_threads = 2;
        fleet_open(&f, &o);
        source = shuffled(f.checkpoint, seed);
        check(fleet_connect(&f, &source), w->label);
        for (uint32_t fill = 1; fill <= 3; fill++) {
            check(fleet_send(&f, fill, NULL), w->label);
            check_stored(&f, fill, w->label);
        }
        fleet_close(&f);
    }
}

static void o32_parts_in_buffers_far_apart_stay_whole(void **state)
{
    static const way small[] = {
        {"ipc", "\"packed\":true,\"packed_buffer_size_bytes\":64",
         "ipc, 64 bytes"},
        {"nccl", "\"provider\":\"tcp\",\"packed_buffer_size_bytes\":64",
         "nccl, 64 bytes"},
        {"nccl", "\"provider\":\"nccl\",\"packed_buffer_size_bytes\":64",
         "nccl, by NCCL's own interface, 64 bytes"},
        {"nccl",
         "\"provider\":\"tcp\",\"packed_buffer_size_bytes\":1,"
         "\"packed_num_buffers\":1",
         "nccl, one buffer"},
    };

    (void)state;
    each_way(deferred_parts);
    for (size_t i = 0; i < sizeof(small) / sizeof(small[0]); i++) {
        if (fleet_unavailable(small[i].backend) == NULL)
            deferred_parts(&small[i]);
    }
}

/* ---- bytes that come after their event ---- */

#define LATE_MAX 64

typedef struct late_item {
    const char *from; /* where the right bytes are */
    char *bytes;
    size_t size;
    int64_t after_ms;
    pthread_t thread;
    bool running;
} late_item;

typedef struct late {
    toy_checkpoint *checkpoint;
    late_item items[LATE_MAX];
    size_t at;
    int passes;
} late;

static void *late_fill(void *arg)
{
    late_item *item = arg;

    usleep((useconds_t)item->after_ms * 1000);
    memcpy(item->bytes, item->from, item->size);
    return NULL;
}

static void late_join(late_item *item)
{
    if (item->running)
        pthread_join(item->thread, NULL);
    item->running = false;
}

static ferry_status late_wait(void *arg, int64_t timeout_ms)
{
    (void)timeout_ms;
    late_join(arg);
    return FERRY_OK;
}

static ferry_status late_metadata(void *self, const ferry_param_meta **out,
                                  size_t *out_count)
{
    const late *l = self;

    *out = l->checkpoint->metas;
    *out_count = l->checkpoint->count;
    return FERRY_OK;
}

static ferry_status late_begin(void *self)
{
    late *l = self;

    l->at = 0;
    l->passes++;
    return FERRY_OK;
}

/* Every seventh is filled by another thread, the first of them 50 ms later in
 * the first pass; until then it has the bytes of nobody. */
static ferry_status late_next(void *self, ferry_item *out)
{
    late *l = self;
    size_t i = l->at++;
    const ferry_param_meta *m = &l->checkpoint->metas[i];
    late_item *item = &l->items[i];

    if (i == l->checkpoint->count)
        return FERRY_DONE;
    memset(out, 0, sizeof(*out));
    out->name = m->name;
    ferry_tensor_init(&out->tensor, item->bytes, m->dtype, m->ndim, m->shape);
    memset(item->bytes, 0xee, item->size);
    item->after_ms = l->passes == 1 && i == 0 ? 50 : 1;
    if (i % 7 != 0) {
        memcpy(item->bytes, item->from, item->size);
        return FERRY_OK;
    }
    if (pthread_create(&item->thread, NULL, late_fill, item) != 0)
        return ferry_fail(FERRY_EINTERNAL, "no thread");
    item->running = true;
    out->wait = late_wait;
    out->wait_arg = item;
    return FERRY_OK;
}

static void late_end(void *self)
{
    late *l = self;

    for (size_t i = 0; i < l->checkpoint->count; i++)
        late_join(&l->items[i]);
}

/* A hundred where bytes are packed into buffers that are used again. */
static uint32_t late_rounds(const way *w, int stable)
{
    bool packs = strcmp(w->label, "nccl, packed") == 0 ||
                 strcmp(w->label, "ipc, chunked") == 0;

    return packs && !stable ? 100 : 3;
}

static void late_bytes(const way *w)
{
    static const ferry_source_ops ops[] = {{.size = sizeof(ops[0]),
                                            .kind = "late",
                                            .metadata = late_metadata,
                                            .begin = late_begin,
                                            .next = late_next,
                                            .end = late_end},
                                           {.size = sizeof(ops[0]),
                                            .kind = "late, stable",
                                            .flags = FERRY_SOURCE_STABLE,
                                            .metadata = late_metadata,
                                            .begin = late_begin,
                                            .next = late_next,
                                            .end = late_end}};
    fleet_options o = options_of(w, TOY_A, 2);

    for (int stable = 0; stable < 2; stable++) {
        late l = {NULL};
        ferry_source source = {&ops[stable], &l};
        fleet f;

        fleet_open(&f, &o);
        l.checkpoint = f.checkpoint;
        assert_true(f.checkpoint->count <= LATE_MAX);
        for (size_t i = 0; i < f.checkpoint->count; i++) {
            l.items[i].from = f.checkpoint->bytes[i];
            l.items[i].size = toy_bytes(&f.checkpoint->metas[i]);
            l.items[i].bytes = malloc(l.items[i].size + 1);
        }
        check(fleet_connect(&f, &source), w->label);
        for (uint32_t seed = 1; seed <= late_rounds(w, stable); seed++) {
            check(fleet_send(&f, seed, NULL), w->label);
            check_stored(&f, seed, w->label);
        }
        fleet_close(&f);
        for (size_t i = 0; i < LATE_MAX; i++)
            free(l.items[i].bytes);
    }
}

static void o31_bytes_are_read_after_their_event(void **state)
{
    (void)state;
    each_way(late_bytes);
}

/* ---- strides ---- */

static void turned_source(const way *w)
{
    fleet_options o = options_of(w, TOY_A, 2);
    fleet f;
    ferry_source source;
    const char *names[64];
    ferry_tensor tensors[64];
    void *copies[64];
    size_t n;

    fleet_open(&f, &o);
    n = f.checkpoint->count;
    assert_true(n <= 64);
    toy_checkpoint_fill(f.checkpoint, 9);
    for (size_t i = 0; i < n; i++) {
        const ferry_param_meta *m = &f.checkpoint->metas[i];
        int64_t turned[2] = {m->ndim == 2 ? m->shape[1] : m->shape[0],
                             m->shape[0]};
        size_t elem = ferry_dtype_bytes(m->dtype);

        names[i] = m->name;
        copies[i] = malloc(toy_bytes(m));
        ferry_tensor_init(&tensors[i], copies[i], m->dtype, m->ndim, turned);
        if (m->ndim == 2)
            ferry_tensor_transpose(&tensors[i], 0, 1, &tensors[i]);
        for (int64_t k = 0; k < (int64_t)(toy_bytes(m) / elem); k++) {
            int64_t columns = m->ndim == 2 ? m->shape[1] : 1;
            int64_t at =
                k / columns * tensors[i].stride[0] +
                (m->ndim == 2 ? k % columns * tensors[i].stride[1] : 0);

            memcpy((char *)copies[i] + (size_t)at * elem,
                   (char *)f.checkpoint->bytes[i] + (size_t)k * elem, elem);
        }
    }
    assert_int_equal(ferry_source_module(names, tensors, n, &source), 0);
    check(fleet_connect(&f, &source), w->label);
    check(ferry_trainer_send_weights(f.trainer, NULL), w->label);
    check_stored(&f, 9, w->label);
    fleet_close(&f);
    for (size_t i = 0; i < n; i++)
        free(copies[i]);
}

static void o22_o30_strided_sources_arrive_exact(void **state)
{
    (void)state;
    each_way(turned_source);
}

/* ---- D6, D1 ---- */

static void refusals(const way *w)
{
    fleet_options o = options_of(w, TOY_A, 1);
    ferry_send_options so = FERRY_SEND_OPTIONS_INIT;
    ferry_trainer *t = NULL;
    int payload = 0;
    fleet f;

    fleet_open(&f, &o);
    assert_int_equal(ferry_trainer_init_dict(w->backend, "{\"rank\":0}",
                                             &f.client, NULL, &t),
                     FERRY_EINVAL);
    assert_non_null(strstr(ferry_last_error(), "requires a WeightSource."));
    check(fleet_connect(&f, NULL), w->label);
    so.payload = &payload;
    so.payload_count = 1;
    assert_int_equal(ferry_trainer_send_weights(f.trainer, &so), FERRY_EINVAL);
    fleet_close(&f);
}

static void d6_full_resync_needs_a_source_and_takes_no_payload(void **state)
{
    (void)state;
    each_way(refusals);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(round_trip_is_byte_exact),
        cmocka_unit_test(o60_wire_dtype_is_converted_to_nearest_even),
        cmocka_unit_test(o29_o61_f32_bias_arrives_identical_at_both_places),
        cmocka_unit_test(
            b3_o01_divergence_fails_by_name_and_the_next_round_works),
        cmocka_unit_test(o56_o58_version_is_recorded_at_finish),
        cmocka_unit_test(o34_o35_loading_twice_in_any_order_is_loading_once),
        cmocka_unit_test(o37_o47_addresses_and_descriptors_stay_as_they_are),
        cmocka_unit_test(h5_partial_round_keeps_and_reports_the_rest),
        cmocka_unit_test(h4_h5_half_a_fused_slot_fails_by_name),
        cmocka_unit_test(h5_require_full_refuses_a_partial_round),
        cmocka_unit_test(o21_empty_round_changes_nothing),
        cmocka_unit_test(o45_tied_parameters_are_one_storage),
        cmocka_unit_test(o43_one_name_map_for_disk_and_transfer),
        cmocka_unit_test(o32_parts_in_buffers_far_apart_stay_whole),
        cmocka_unit_test(o31_bytes_are_read_after_their_event),
        cmocka_unit_test(o22_o30_strided_sources_arrive_exact),
        cmocka_unit_test(d6_full_resync_needs_a_source_and_takes_no_payload),
    };

    fleet_host_nccl();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
