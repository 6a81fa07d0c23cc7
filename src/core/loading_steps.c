/* SPDX-License-Identifier: Apache-2.0 */
/* Inputs held for opaque steps, and the steps themselves.
 * Invariant: held memory is counted from the moment it is there to the moment
 * it is freed, and never exceeds the limit. */
#include "core/loading_state.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/str.h"

#include <string.h>

#define NAMED_STEPS_MAX 4

/* "layers.0.attn, layers.1.attn and 3 more" */
static void open_steps(const ferry__loading *l, ferry__str *out)
{
    size_t n = 0;

    for (size_t i = 0; i < l->n_steps; i++) {
        if (l->steps[i] == NULL || l->steps[i]->have == 0)
            continue;
        if (n++ < NAMED_STEPS_MAX)
            ferry__str_printf(out, "%s%s", n > 1 ? ", " : "",
                              ferry__plan_step_at(l->plan, i)->step.name);
    }
    if (n > NAMED_STEPS_MAX)
        ferry__str_printf(out, " and %zu more", n - NAMED_STEPS_MAX);
    if (n == 0)
        ferry__str_append(out, "none");
}

static void note_peak(ferry__loading *l)
{
    uint64_t sum = atomic_load(&l->held_bytes) + atomic_load(&l->buffer_bytes);
    uint64_t peak = atomic_load(&l->peak_bytes);

    while (sum > peak &&
           !atomic_compare_exchange_weak(&l->peak_bytes, &peak, sum))
        continue;
}

void ferry__loading_count_buffers(ferry__loading *l, int64_t bytes)
{
    atomic_fetch_add(&l->buffer_bytes, (uint64_t)bytes);
    note_peak(l);
}

static ferry_status over_limit(const ferry__loading *l, uint64_t wanted)
{
    ferry__str names = {0};
    ferry_status st;

    open_steps(l, &names);
    st = ferry_fail(FERRY_ENOMEM,
                    "inputs held for unfinished steps would take %llu bytes, "
                    "the limit is %llu; open steps: %s",
                    (unsigned long long)wanted,
                    (unsigned long long)l->held_limit_bytes,
                    names.data != NULL ? names.data : "");
    ferry__str_free(&names);
    return st;
}

/* One warning a round: names that arrive out of layer order cost memory. */
static void warn_once(ferry__loading *l, uint64_t held)
{
    ferry__str names = {0};

    if (l->warned || held <= l->held_limit_bytes / 2)
        return;
    l->warned = true;
    open_steps(l, &names);
    ferry__log(FERRY_LOG_WARN,
               "%llu bytes are held for unfinished steps (limit %llu); open: "
               "%s; sending names layer by layer needs less",
               (unsigned long long)held,
               (unsigned long long)l->held_limit_bytes,
               names.data != NULL ? names.data : "");
    ferry__str_free(&names);
}

ferry_status ferry__loading_hold(ferry__loading *l, size_t size_bytes,
                                 void **out)
{
    uint64_t held = atomic_load(&l->held_bytes) + size_bytes;
    void *memory;

    if (held > l->held_limit_bytes)
        return over_limit(l, held);
    memory = ferry__alloc_raw(size_bytes);
    if (memory == NULL)
        return FERRY_ENOMEM;
    atomic_store(&l->held_bytes, held);
    note_peak(l);
    warn_once(l, held);
    *out = memory;
    return FERRY_OK;
}

void ferry__loading_drop(ferry__loading *l, void *held, size_t size_bytes)
{
    if (held == NULL)
        return;
    ferry__free(held);
    atomic_fetch_sub(&l->held_bytes, (uint64_t)size_bytes);
}

static ferry_status step_state(ferry__loading *l, size_t step,
                               ferry__step_state **out)
{
    size_t n = ferry__plan_n_steps(l->plan);
    size_t bytes;
    ferry__step_state **grown;

    if (l->n_steps < n) {
        if (!ferry__mul(n, sizeof(*grown), &bytes))
            return ferry_fail(FERRY_EOVERFLOW, "too many steps");
        grown = ferry__realloc(l->steps, bytes);
        if (grown == NULL)
            return FERRY_ENOMEM;
        memset(grown + l->n_steps, 0, (n - l->n_steps) * sizeof(*grown));
        l->steps = grown;
        l->n_steps = n;
    }
    if (l->steps[step] == NULL) {
        l->steps[step] = ferry__alloc(sizeof(**l->steps));
        if (l->steps[step] == NULL)
            return FERRY_ENOMEM;
    }
    *out = l->steps[step];
    return FERRY_OK;
}

static ferry_status run(ferry__loading *l, size_t step,
                        const ferry_tensor *inputs)
{
    const ferry__plan_step *p = ferry__plan_step_at(l->plan, step);
    ferry_tensor dst = p->dst;
    int64_t from_ns = ferry__now_ns();
    int failed;

    dst.data = ferry__loading_base(l, p->slot);
    dst.name = NULL;
    ferry__loading_before_write(l);
    failed = p->step.fn(p->step.arg, &dst, inputs, p->step.n_inputs);
    ferry__spans_add(&l->spans, FERRY__SPAN_STEP, from_ns);
    if (failed < 0)
        return ferry__fail_prefix(FERRY_EINTERNAL, "step %s", p->step.name);
    return ferry__coverage_mark(l->coverage, p->slot, p->dst_start,
                                p->dst_count);
}

static ferry_status input_tensor(const ferry__entry *e, void *bytes,
                                 ferry_tensor *out)
{
    return ferry_tensor_init(out, bytes, e->op.src_dtype, e->input_ndim,
                             e->input_shape);
}

ferry_status ferry__step_run_now(ferry__loading *l, const ferry__entry *e,
                                 const void *packed)
{
    ferry_tensor input;

    FERRY_TRY(input_tensor(e, (void *)(uintptr_t)packed, &input));
    return run(l, e->step, &input);
}

static void free_inputs(ferry__loading *l, ferry__step_state *s)
{
    for (int32_t i = 0; i < FERRY__STEP_INPUTS_MAX; i++)
        if (s->have & (UINT32_C(1) << i))
            ferry__loading_drop(l, s->inputs[i].data, s->bytes[i]);
    s->have = 0;
}

/* Runs a step whose inputs are all there. What it ran with is remembered as
 * digests, so that one input that comes again unchanged is no open step. */
static ferry_status run_complete(ferry__loading *l, size_t step,
                                 ferry__step_state *s, int32_t n_inputs)
{
    FERRY_TRY(run(l, step, s->inputs));
    for (int32_t i = 0; i < n_inputs; i++)
        s->ran_with[i] = ferry__xxh3(s->inputs[i].data, s->bytes[i]);
    s->ran = true;
    free_inputs(l, s);
    return FERRY_OK;
}

ferry_status ferry__step_take(ferry__loading *l, const ferry__entry *e,
                              void *held, size_t size_bytes)
{
    int32_t n = ferry__plan_step_at(l->plan, e->step)->step.n_inputs;
    uint32_t bit = UINT32_C(1) << e->input;
    ferry__step_state *s;
    ferry_status st;

    if (n == 1) {
        st = ferry__step_run_now(l, e, held);
        ferry__loading_drop(l, held, size_bytes);
        return st;
    }
    st = step_state(l, e->step, &s);
    if (st < 0 || (s->ran && s->have == 0 &&
                   s->ran_with[e->input] == ferry__xxh3(held, size_bytes))) {
        ferry__loading_drop(l, held, size_bytes);
        return st;
    }
    if (s->have & bit)
        ferry__loading_drop(l, s->inputs[e->input].data, s->bytes[e->input]);
    s->have &= ~bit;
    st = input_tensor(e, held, &s->inputs[e->input]);
    if (st < 0) {
        ferry__loading_drop(l, held, size_bytes);
        return st;
    }
    s->bytes[e->input] = size_bytes;
    s->have |= bit;
    if (s->have == (UINT32_C(1) << n) - 1)
        return run_complete(l, e->step, s, n);
    return FERRY_OK;
}

/* The checkpoint name that feeds input `input` of `step`, if the model can
 * say. */
static bool input_name(ferry__loading *l, size_t step, int32_t input,
                       char *name, size_t size_bytes)
{
    ferry_param_meta meta;
    size_t id, count;

    for (size_t i = 0; ferry__loading_known(l, i, name, size_bytes, &meta);
         i++) {
        const ferry__entry *e;

        if (ferry__plan_bake(l->plan, &meta, &id) < 0)
            continue;
        e = ferry__plan_entries(l->plan, id, &count);
        for (size_t k = 0; k < count; k++)
            if (e[k].kind == FERRY__ENTRY_STEP && e[k].step == step &&
                e[k].input == input)
                return true;
    }
    return false;
}

ferry_status ferry__step_check(ferry__loading *l)
{
    for (size_t i = 0; i < l->n_steps; i++) {
        char name[512];
        const ferry__plan_step *p;
        int32_t input = 0;

        if (l->steps[i] == NULL || l->steps[i]->have == 0)
            continue;
        while (l->steps[i]->have & (UINT32_C(1) << input))
            input++;
        if (input_name(l, i, input, name, sizeof(name))) {
            p = ferry__plan_step_at(l->plan, i);
            return ferry_fail(FERRY_ECOVERAGE,
                              "step %s: its input %s did not arrive",
                              p->step.name, name);
        }
        p = ferry__plan_step_at(l->plan, i);
        return ferry_fail(FERRY_ECOVERAGE,
                          "step %s: its input %d of %d did not arrive",
                          p->step.name, input, p->step.n_inputs);
    }
    return FERRY_OK;
}

void ferry__step_reset(ferry__loading *l)
{
    for (size_t i = 0; i < l->n_steps; i++) {
        if (l->steps[i] == NULL)
            continue;
        free_inputs(l, l->steps[i]);
        ferry__free(l->steps[i]);
        l->steps[i] = NULL;
    }
}
