/* SPDX-License-Identifier: Apache-2.0 */
/* The checked pass: B3 in its one place, and completion events (O-31). */
#include "core/pass.h"
#include "harness/toy.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <string.h>

#include <cmocka.h>

#include "base/clock.h"

#define N 3

/* A source of three f32 [2] tensors, spoilt on demand. */
typedef struct scripted {
    ferry_param_meta metas[N];
    float bytes[N][2];
    const char *names[8];
    size_t yields, at;
    int begun, ended;
    ferry_status begin_status, next_status, event_status;
    int64_t event_at_ns;
    bool events;
} scripted;

static ferry_status metadata(void *self, const ferry_param_meta **out,
                             size_t *count)
{
    *out = ((scripted *)self)->metas;
    *count = N;
    return FERRY_OK;
}

static ferry_status begin(void *self)
{
    scripted *s = self;

    s->begun++;
    s->at = 0;
    if (s->begin_status < 0)
        return ferry_fail(s->begin_status, "no pass today");
    return FERRY_OK;
}

static ferry_status wait_event(void *arg, int64_t timeout_ms)
{
    scripted *s = arg;

    if (s->event_status < 0)
        return ferry_fail(s->event_status, "the gather failed");
    if (ferry__now_ns() < s->event_at_ns) {
        ferry__sleep_ms(timeout_ms < 5 ? timeout_ms : 5);
        if (ferry__now_ns() < s->event_at_ns)
            return FERRY_ETIMEOUT;
    }
    s->bytes[s->at - 1][0] = 42.0f; /* there only now */
    return FERRY_OK;
}

static ferry_status next(void *self, ferry_item *out)
{
    scripted *s = self;
    int64_t shape[1] = {2};

    if (s->next_status < 0)
        return ferry_fail(s->next_status, "the disk broke");
    if (s->at == s->yields)
        return FERRY_DONE;
    out->name = s->names[s->at];
    ferry_tensor_init(&out->tensor, s->bytes[s->at % N], FERRY_DTYPE_F32, 1,
                      shape);
    if (s->events) {
        out->wait = wait_event;
        out->wait_arg = s;
    }
    s->at++;
    return FERRY_OK;
}

static void end(void *self)
{
    ((scripted *)self)->ended++;
}

static const ferry_source_ops ops = {
    .size = sizeof(ferry_source_ops),
    .kind = "scripted",
    .metadata = metadata,
    .begin = begin,
    .next = next,
    .end = end,
};

static void open_pass(scripted *s, ferry_source *source, ferry__pass *p)
{
    static const char *const names[N] = {"a", "b", "c"};

    memset(s, 0, sizeof(*s));
    memset(p, 0, sizeof(*p));
    for (size_t i = 0; i < N; i++) {
        s->metas[i].name = s->names[i] = names[i];
        s->metas[i].dtype = FERRY_DTYPE_F32;
        s->metas[i].ndim = 1;
        s->metas[i].shape[0] = 2;
    }
    s->yields = N;
    source->ops = &ops;
    source->self = s;
    p->source = source;
    p->declared = s->metas;
    p->count = N;
    p->need_data = true;
}

/* Drives to the end; the answer is that of the last next. */
static ferry_status drive(ferry__pass *p)
{
    ferry_item item;
    ferry_status st = ferry__pass_begin(p);

    while (st == FERRY_OK)
        st = ferry__pass_next(p, &item);
    return st;
}

static void a_true_pass_ends_once_and_can_be_repeated(void **state)
{
    ferry_source source;
    ferry_item item;
    ferry__pass p;
    scripted s;

    (void)state;
    open_pass(&s, &source, &p);
    assert_int_equal(ferry__pass_next(&p, &item), FERRY_EORDER);
    for (int k = 1; k <= 3; k++) {
        assert_int_equal(drive(&p), FERRY_DONE);
        assert_true(p.done);
        assert_int_equal(ferry__pass_next(&p, &item), FERRY_DONE);
        assert_int_equal(ferry__pass_begin(&p), FERRY_EORDER);
        ferry__pass_end(&p);
        ferry__pass_end(&p);
        assert_int_equal(s.begun, k);
        assert_int_equal(s.ended, k);
    }
}

static void diverges(scripted *s, ferry__pass *p, ferry_status want,
                     const char *words)
{
    int before = s->ended;

    assert_int_equal(drive(p), want);
    if (strstr(ferry_last_error(), words) == NULL)
        fail_msg("says: %s", ferry_last_error());
    assert_int_equal(s->ended, before + 1); /* paired on every path */
    assert_false(p->done);
}

static void b3_first_divergence_names_declared_and_got(void **state)
{
    ferry_source source;
    ferry__pass p;
    scripted s;

    (void)state;
    open_pass(&s, &source, &p);
    s.names[1] = "x";
    diverges(&s, &p, FERRY_EMISMATCH, "parameter 1: declared b, got x");
    s.names[1] = "a"; /* repeated */
    diverges(&s, &p, FERRY_EMISMATCH, "declared b, got a");
    s.names[1] = NULL;
    diverges(&s, &p, FERRY_EMISMATCH, "declared b, got");
    s.names[1] = "b";
    s.metas[2].shape[0] = 3;
    diverges(&s, &p, FERRY_EMISMATCH,
             "parameter c (2): declared shape [3], got [2]");
    s.metas[2].shape[0] = 2;
    s.metas[0].dtype = FERRY_DTYPE_BF16;
    diverges(&s, &p, FERRY_EMISMATCH,
             "parameter a (0): declared dtype bfloat16, got float32");
    s.metas[0].dtype = FERRY_DTYPE_F32;
    s.yields = 2;
    diverges(&s, &p, FERRY_ECOVERAGE,
             "source yielded 2 parameters but its metadata declared 3; first "
             "missing is c");
    s.yields = 4;
    s.names[3] = "d";
    diverges(&s, &p, FERRY_EMISMATCH,
             "source yielded more parameters than its metadata declared (3); "
             "first extra is d");
    s.yields = 3;
    s.next_status = FERRY_EIO;
    diverges(&s, &p, FERRY_EIO, "the disk broke");
    s.next_status = FERRY_OK;
    assert_int_equal(drive(&p), FERRY_DONE);
    ferry__pass_end(&p);
}

static void a_begin_that_fails_is_not_ended(void **state)
{
    ferry_source source;
    ferry__pass p;
    scripted s;

    (void)state;
    open_pass(&s, &source, &p);
    s.begin_status = FERRY_EPEER;
    assert_int_equal(ferry__pass_begin(&p), FERRY_EPEER);
    assert_int_equal(s.ended, 0);
}

/* ---- events ---- */

static int checks;

static ferry_status give_up_later(void *arg, const char *what)
{
    (void)arg;
    if (strstr(what, "event") && ++checks > 3)
        return ferry_fail(FERRY_ECANCELED, "enough");
    return FERRY_OK;
}

static void o31_bytes_are_read_after_their_event(void **state)
{
    ferry_source source;
    ferry_item item;
    ferry__pass p;
    scripted s;

    (void)state;
    open_pass(&s, &source, &p);
    s.events = true;
    assert_int_equal(ferry__pass_begin(&p), FERRY_OK);
    for (int i = 0; i < N; i++) {
        s.event_at_ns = ferry__now_ns() + 20000000;
        assert_int_equal(ferry__pass_next(&p, &item), FERRY_OK);
        assert_true(((float *)item.tensor.data)[0] == 42.0f);
        assert_null(item.wait); /* it is over: nobody waits twice */
    }
    assert_true(p.gather_ms >= 60.0);
    ferry__pass_end(&p);
}

static void an_event_is_bounded_and_its_failure_comes_through(void **state)
{
    ferry_source source;
    ferry__pass p;
    scripted s;

    (void)state;
    open_pass(&s, &source, &p);
    s.events = true;
    s.event_at_ns = INT64_MAX;
    p.check = give_up_later;
    checks = 0;
    diverges(&s, &p, FERRY_ECANCELED, "enough");
    s.event_status = FERRY_EPEER;
    checks = 0;
    diverges(&s, &p, FERRY_EPEER, "the gather failed");
}

static ferry_status refuse(void *arg, const char *what)
{
    (void)arg;
    return ferry_fail(FERRY_EPEER, "replica 1 is gone while %s", what);
}

/* The other plane's failure is seen between two parameters (J1). */
static void j1_the_owner_ends_a_pass_between_items(void **state)
{
    ferry_source source;
    ferry__pass p;
    ferry_item item;
    scripted s;

    (void)state;
    open_pass(&s, &source, &p);
    assert_int_equal(ferry__pass_begin(&p), FERRY_OK);
    assert_int_equal(ferry__pass_next(&p, &item), FERRY_OK);
    p.check = refuse;
    assert_int_equal(ferry__pass_next(&p, &item), FERRY_EPEER);
    assert_string_equal(ferry_last_error(),
                        "replica 1 is gone while gathering");
    assert_int_equal(s.at, 1);
    assert_int_equal(s.ended, 1);
}

/* B4: whose next is a collective is driven to its end whatever failed. */
static void b4_a_collective_pass_is_driven_to_its_end(void **state)
{
    ferry_source_ops collective = ops;
    ferry_source source;
    ferry__pass p;
    ferry_item item;
    scripted s;

    (void)state;
    collective.flags = FERRY_SOURCE_COLLECTIVE;
    open_pass(&s, &source, &p);
    source.ops = &collective;
    assert_int_equal(ferry__pass_begin(&p), FERRY_OK);
    assert_int_equal(ferry__pass_next(&p, &item), FERRY_OK);
    p.check = refuse;
    assert_int_equal(ferry__pass_next(&p, &item), FERRY_EPEER);
    assert_int_equal(s.at, N);
    assert_int_equal(s.ended, 1);
    assert_non_null(strstr(ferry_last_error(), "replica 1 is gone"));
    /* One that breaks off by itself is not asked again. */
    open_pass(&s, &source, &p);
    source.ops = &collective;
    s.next_status = FERRY_EIO;
    assert_int_equal(ferry__pass_begin(&p), FERRY_OK);
    assert_int_equal(ferry__pass_next(&p, &item), FERRY_EIO);
    assert_int_equal(s.ended, 1);
}

/* ---- tables ---- */

static void source_tables_are_checked_and_extended(void **state)
{
    ferry_source source, out;
    ferry_source_ops odd, copy;
    ferry__pass p;
    scripted s;

    (void)state;
    open_pass(&s, &source, &p);
    odd = ops;
    source.ops = &odd;
    odd.size = offsetof(ferry_source_ops, close); /* older: no close */
    odd.close = (void (*)(void *))(uintptr_t)1;
    assert_int_equal(ferry__source_adopt(&source, &copy, &out), FERRY_OK);
    assert_null(copy.close);
    ferry_source_close(&source); /* does not call what is beyond the end */
    assert_null(source.ops);
    source.ops = &odd;
    odd.size = 8;
    assert_int_equal(ferry__source_adopt(&source, &copy, &out), FERRY_EINVAL);
    odd = ops;
    odd.next = NULL;
    assert_int_equal(ferry__source_adopt(&source, &copy, &out), FERRY_EINVAL);
    assert_non_null(
        strstr(ferry_last_error(), "source scripted has no method next"));
    source.ops = NULL;
    assert_int_equal(ferry__source_adopt(&source, &copy, &out), FERRY_EINVAL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_true_pass_ends_once_and_can_be_repeated),
        cmocka_unit_test(b3_first_divergence_names_declared_and_got),
        cmocka_unit_test(a_begin_that_fails_is_not_ended),
        cmocka_unit_test(o31_bytes_are_read_after_their_event),
        cmocka_unit_test(an_event_is_bounded_and_its_failure_comes_through),
        cmocka_unit_test(j1_the_owner_ends_a_pass_between_items),
        cmocka_unit_test(b4_a_collective_pass_is_driven_to_its_end),
        cmocka_unit_test(source_tables_are_checked_and_extended),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
