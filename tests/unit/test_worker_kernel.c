/* SPDX-License-Identifier: Apache-2.0 */
/* The worker in kernel format: stored parameters that an update announces by
 * their own names, and which updates are in it. (E6, E8.) */
#include "harness/fleet.h"
#include "harness/solo.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "harness/expect.h"

#define IN_KERNEL_FORMAT ",\"is_checkpoint_format\":false"

static bool is_runtime(const ferry_param *p)
{
    return (p->flags & FERRY_PARAM_RUNTIME) != 0;
}

/* An update of one stored parameter, as `dtype` and without its last `less`
 * rows; `more` is put behind the lists. Static memory. */
static const char *one(const ferry_param *p, const char *dtype, int less,
                       const char *more)
{
    static char text[1024];
    size_t n = (size_t)snprintf(text, sizeof(text),
                                "{\"names\":[\"%s\"],\"dtype_names\":[\"%s\"],"
                                "\"shapes\":[[%lld",
                                p->name, dtype, (long long)p->shape[0] - less);

    for (int32_t d = 1; d < p->ndim; d++)
        n += (size_t)snprintf(text + n, sizeof(text) - n, ",%lld",
                              (long long)p->shape[d]);
    snprintf(text + n, sizeof(text) - n, "]]%s}", more);
    return text;
}

static const char *whole(const ferry_param *p, const char *more)
{
    return one(p, ferry_dtype_name(p->dtype), 0, more);
}

static const ferry_param *stored(solo *r, bool runtime)
{
    const ferry_model *m = toy_model(r->toy);
    size_t i = 0;

    while (is_runtime(&m->params[i]) != runtime)
        i++;
    return &m->params[i];
}

/* Hook: hands over what was declared, every byte of it 0x33. */
static ferry_status load_declared(const ferry_worker_host *host,
                                  ferry_worker_context *ctx, void *arg)
{
    size_t count;
    const ferry_param_meta *declared = host->declared(ctx, &count);

    (void)arg;
    for (size_t i = 0; i < count; i++) {
        ferry_tensor t;
        unsigned char bytes[4096];

        assert_true(toy_bytes(&declared[i]) <= sizeof(bytes));
        memset(bytes, 0x33, sizeof(bytes));
        refused(host->load_range(ctx, i, bytes, 0, 0), FERRY_ENOTSUP,
                "in kernel format it comes whole");
        FERRY_TRY(ferry_tensor_init(&t, bytes, declared[i].dtype,
                                    declared[i].ndim, declared[i].shape));
        t.dtype = FERRY_DTYPE_I64;
        refused(host->load(ctx, i, &t), FERRY_EMISMATCH, "got int64");
        t.dtype = declared[i].dtype;
        FERRY_TRY(host->load(ctx, i, &t));
        refused(host->load(ctx, i, &t), FERRY_EMISMATCH, "came twice");
    }
    return FERRY_OK;
}

/* Hook: the first stored parameter by its storage. */
static ferry_status write_first(const ferry_worker_host *host,
                                ferry_worker_context *ctx, void *arg)
{
    const ferry_model *m = host->model(ctx);
    size_t i = 0, size;
    void *bytes;

    (void)arg;
    while (is_runtime(&m->params[i]))
        i++;
    FERRY_TRY(host->kernel_storage(ctx, i, &bytes, &size));
    memset(bytes, 0x44, size);
    return FERRY_OK;
}

static ferry_status nothing(const ferry_worker_host *host,
                            ferry_worker_context *ctx, void *arg)
{
    (void)host;
    (void)ctx;
    (void)arg;
    return FERRY_OK;
}

/* One round of one update. */
static void round_of(solo *r, const char *info)
{
    ok(ferry_worker_start_weight_update(r->worker));
    ok(ferry_worker_update_weights(r->worker, info));
    ok(ferry_worker_finish_weight_update(r->worker, "kernel"));
}

static void round_refused(solo *r, const char *info, ferry_status want,
                          const char *words)
{
    uint64_t sum = toy_sum(r->toy);

    ok(ferry_worker_start_weight_update(r->worker));
    refused(ferry_worker_update_weights(r->worker, info), want, words);
    assert_true(toy_sum(r->toy) == sum);
    assert_string_equal(fleet_status(r->worker, "dirty"), "false");
}

static void expect_first(solo *r, int byte)
{
    const ferry_param *p = stored(r, false);

    assert_int_equal(*(unsigned char *)p->data, byte);
}

static void e6_what_is_announced_is_held_against_what_is_stored(void **state)
{
    solo r;
    const ferry_param *p;
    char text[256];

    (void)state;
    solo_open_kind(&r, "probe_kernel", TOY_A, FERRY_COMMIT_INPLACE);
    the_probe.on_receive = load_declared;
    p = stored(&r, false);
    round_of(&r, whole(p, ""));
    expect_first(&r, 0x33);
    assert_string_equal(fleet_status(r.worker, "weight_version"), "kernel");
    the_probe.n_receive = 0;
    snprintf(text, sizeof(text),
             "parameter %s: stored as dtype %s, declared "
             "float16",
             p->name, ferry_dtype_name(p->dtype));
    round_refused(&r, one(p, "float16", 0, ""), FERRY_EMISMATCH, text);
    snprintf(text, sizeof(text), "parameter %s: stored with shape [", p->name);
    round_refused(&r, one(p, ferry_dtype_name(p->dtype), 1, ""),
                  FERRY_EMISMATCH, text);
    round_refused(&r, whole(stored(&r, true), ""), FERRY_EINVAL,
                  "is a runtime parameter");
    round_refused(&r,
                  "{\"names\":[\"model.layers.0.self_attn.q_proj.weight\"],"
                  "\"dtype_names\":[\"bfloat16\"],\"shapes\":[[4,4]]}",
                  FERRY_EUNKNOWN,
                  "the model stores none of this name; the "
                  "nearest is model.layers.0.self_attn.");
    assert_int_equal(the_probe.n_receive, 0);
    solo_close(&r);
}

static void e6_what_is_announced_must_come(void **state)
{
    solo r;

    (void)state;
    for (int commit = 0; commit < 2; commit++) {
        solo_open_kind(&r, "probe_kernel", TOY_A, (ferry_commit)commit);
        the_probe.on_receive = nothing;
        round_refused(&r, whole(stored(&r, false), ""), FERRY_ECOVERAGE,
                      "declared, but it did not come");
        /* By its storage it has. */
        the_probe.on_receive = write_first;
        round_of(&r, whole(stored(&r, false), ""));
        expect_first(&r, 0x44);
        solo_close(&r);
    }
}

/* A worker that must be given all names what it stores, and no name of a
 * checkpoint, which this engine cannot bring. */
static void e6_h5_what_is_missing_is_named_as_it_is_stored(void **state)
{
    ferry_worker_options o = FERRY_WORKER_OPTIONS_INIT("probe_kernel");
    toy_options t = {.kind = TOY_A};
    solo r;

    (void)state;
    o.require_full = 1;
    o.commit = FERRY_COMMIT_STAGED;
    solo_open(&r, &o, &t);
    ok(ferry_worker_init_transfer_engine(r.worker, "{}"));
    the_probe.on_receive = load_declared;
    ok(ferry_worker_start_weight_update(r.worker));
    ok(ferry_worker_update_weights(r.worker, whole(stored(&r, false), "")));
    refused(ferry_worker_finish_weight_update(r.worker, "part"),
            FERRY_ECOVERAGE, "elements were written");
    assert_null(strstr(ferry_last_error(), "missing"));
    solo_close(&r);
}

static void e6_blocks_travel_as_bytes(void **state)
{
    solo r;
    const ferry_model *m;
    size_t i = 0;
    char text[512];

    (void)state;
    solo_open_kind(&r, "probe_kernel", TOY_B, FERRY_COMMIT_STAGED);
    the_probe.on_receive = load_declared;
    m = toy_model(r.toy);
    while (m->params[i].dtype != FERRY_DTYPE_Q8_0)
        i++;
    assert_int_equal(m->params[i].ndim, 2);
    round_refused(&r, one(&m->params[i], "float32", 0, ""), FERRY_EMISMATCH,
                  "stored as dtype uint8, declared float32");
    snprintf(text, sizeof(text),
             "{\"names\":[\"%s\"],\"dtype_names\":[\"uint8\"],"
             "\"shapes\":[[%lld,%lld]]}",
             m->params[i].name, (long long)m->params[i].shape[0],
             (long long)m->params[i].shape[1] / 32 * 34);
    round_of(&r, text);
    assert_int_equal(*(unsigned char *)m->params[i].data, 0x33);
    solo_close(&r);
}

static void e8_a_field_of_the_update_says_the_format_of_its_round(void **state)
{
    solo r;

    (void)state;
    solo_open_kind(&r, "probe_either", TOY_A, FERRY_COMMIT_INPLACE);
    ok(solo_round(&r, 1, NULL));
    assert_null(toy_differs(r.toy, 1));
    the_probe.on_receive = load_declared;
    round_of(&r, whole(stored(&r, false), IN_KERNEL_FORMAT));
    expect_first(&r, 0x33);
    /* Empty lists: the round before, in its format. */
    the_probe.on_receive = write_first;
    round_of(&r, "{\"is_checkpoint_format\":false}");
    expect_first(&r, 0x44);
    the_probe.on_receive = solo_load_all;
    round_refused(&r, "{}", FERRY_EINVAL,
                  "came in kernel format; this update is in checkpoint "
                  "format");
    ok(solo_round(&r, 2, NULL));
    assert_null(toy_differs(r.toy, 2));
    round_refused(&r, "{\"is_checkpoint_format\":false}", FERRY_EINVAL,
                  "came in checkpoint format; this update is in kernel");
    solo_close(&r);
}

static void e8_a_round_has_one_format(void **state)
{
    solo r;

    (void)state;
    solo_open_kind(&r, "probe_either", TOY_A, FERRY_COMMIT_STAGED);
    ok(solo_round(&r, 1, NULL));
    for (int kernel = 0; kernel < 2; kernel++)
        for (int update = 0; update < 2; update++) {
            bool now = kernel == update;

            if (update == 0)
                ok(ferry_worker_start_weight_update(r.worker));
            the_probe.on_receive = now ? load_declared : solo_load_all;
            if (update == 0)
                ok(ferry_worker_update_weights(
                    r.worker, now ? whole(stored(&r, false), IN_KERNEL_FORMAT)
                                  : solo_update_of(&r, "model.norm.weight")));
            else
                refused(ferry_worker_update_weights(
                            r.worker,
                            now ? whole(stored(&r, false), IN_KERNEL_FORMAT)
                                : solo_update_of(&r, "model.norm.weight")),
                        FERRY_EINVAL,
                        "is_checkpoint_format differs between the updates");
        }
    the_probe.on_receive = solo_load_all;
    assert_null(toy_differs(r.toy, 1));
    ok(solo_round(&r, 3, NULL));
    assert_null(toy_differs(r.toy, 3));
    solo_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(e6_what_is_announced_is_held_against_what_is_stored),
        cmocka_unit_test(e6_what_is_announced_must_come),
        cmocka_unit_test(e6_h5_what_is_missing_is_named_as_it_is_stored),
        cmocka_unit_test(e6_blocks_travel_as_bytes),
        cmocka_unit_test(e8_a_field_of_the_update_says_the_format_of_its_round),
        cmocka_unit_test(e8_a_round_has_one_format),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
