/* SPDX-License-Identifier: Apache-2.0 */
/* ctest: timeout=120 */
/* Rounds under the `fault` wrapper, on either side: what is changed, cut
 * short or lost is found before the commit, by name and in time; staged, not
 * one byte changes; the next round is right. What no digest can find is
 * shown too, so that nobody counts on it. */
#include "base/clock.h"
#include "base/config.h"
#include "harness/fleet.h"

#include <ferry/registry.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

typedef struct way {
    const char *inner, *init;
} way;

static const way ways[] = {
    {"memory", NULL},
    {"memory", "\"mode\":\"range\",\"per_update\":3"},
    {"memory", "\"mode\":\"box\",\"per_update\":1"},
    {"memory", "\"mode\":\"strided\""},
    {"ipc", NULL},
    {"ipc", "\"path\":\"ring\""},
    {"ipc", "\"packed\":true,\"packed_buffer_size_bytes\":4096"},
    {"nccl", "\"provider\":\"tcp\""},
    {"nccl", "\"provider\":\"tcp\",\"packed_buffer_size_bytes\":300"},
    {"nccl", "\"provider\":\"tcp\",\"packed\":false"},
};
static const size_t n_ways = sizeof(ways) / sizeof(ways[0]);

static void set_fault(const char *fmt, ...) FERRY_PRINTF(1, 2);

static void set_fault(const char *fmt, ...)
{
    char text[160];
    va_list args;

    va_start(args, fmt);
    vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    assert_int_equal(ferry__config_set("fault", text), FERRY_OK);
}

static const char *wrapped(const char *inner)
{
    static char names[4][32];
    static int next;
    char *name = names[next++ % 4];

    snprintf(name, sizeof(names[0]), "fault:%s", inner);
    return name;
}

static fleet_options options_of(const way *w, ferry_commit commit)
{
    fleet_options o;

    memset(&o, 0, sizeof(o));
    o.backend = w->inner;
    o.init = w->init;
    o.toy.kind = TOY_A;
    o.toy.tp_size = 2;
    o.commit = commit;
    return o;
}

/* A fleet after one good round of seed 1. */
static void open_synced(fleet *f, const fleet_options *o)
{
    set_fault("%s", "");
    fleet_open(f, o);
    if (fleet_connect(f, NULL) < 0 || fleet_send(f, 1, "one") < 0)
        fail_msg("%s: %s", o->backend, ferry_last_error());
}

static uint64_t sums(fleet *f)
{
    return toy_sum(f->toys[0]) * 31 + toy_sum(f->toys[1]);
}

static uint64_t checkpoint_bytes(const fleet *f)
{
    uint64_t sum = 0;

    for (size_t i = 0; i < f->checkpoint->count; i++)
        sum += toy_bytes(&f->checkpoint->metas[i]);
    return sum;
}

static bool names_a_parameter(const fleet *f, const char *line)
{
    for (size_t i = 0; i < f->checkpoint->count; i++)
        if (strstr(line, f->checkpoint->metas[i].name) != NULL)
            return true;
    return false;
}

/* One round with a fault. Answers whether it failed; if it did, nothing of it
 * is to be seen, and if not, it was right to the byte. */
static bool round_with(fleet *f, const char *label)
{
    bool staged = f->options.commit == FERRY_COMMIT_STAGED;
    uint64_t before = sums(f);
    char line[1024];
    ferry_status st = fleet_send(f, 2, "two");

    snprintf(line, sizeof(line), "%s", ferry_last_error());
    if (st == FERRY_OK) {
        const char *why = fleet_differs(f, 2);

        if (why != NULL)
            fail_msg("%s: committed although %s", label, why);
        return false;
    }
    if (line[0] == '\0')
        fail_msg("%s: %s without a word", label, ferry_status_name(st));
    if (staged && sums(f) != before)
        fail_msg("%s: a failed staged round changed bytes: %s", label, line);
    assert_string_equal(fleet_status(f->workers[0], "weight_version"), "one");
    return true;
}

static void next_round_is_right(fleet *f, const char *label)
{
    const char *why;

    set_fault("%s", "");
    if (fleet_send(f, 1, "one") < 0)
        fail_msg("%s: the next round: %s", label, ferry_last_error());
    why = fleet_differs(f, 1);
    if (why != NULL)
        fail_msg("%s: after the next round %s", label, why);
}

/* Bytes between two faults of a way, and the first of them. A group that
 * failed is made anew, which takes time: fewer places on each of its ways,
 * and other ones on every way. */
static uint64_t step_of(const way *w, uint64_t total)
{
    return total / (strcmp(w->inner, "nccl") == 0 ? 4 : 11) + 1;
}

static uint64_t first_of(size_t i, uint64_t step)
{
    return step * i / (n_ways * 2);
}

/* Places all over a round on every way, both commits. */
static void sweep(const char *kind, bool must_name)
{
    size_t failed = 0, rounds = 0;

    for (size_t i = 0; i < n_ways * 2; i++) {
        const way *w = &ways[i / 2];
        fleet_options o = options_of(w, (ferry_commit)(i % 2));
        uint64_t total, step;
        fleet f;

        o.worker_backend = wrapped(w->inner);
        open_synced(&f, &o);
        total = checkpoint_bytes(&f);
        step = step_of(w, total);
        for (uint64_t at = first_of(i, step); at < total; at += step) {
            char label[200];

            set_fault("seed=%llu,rank=%d,%s@%llu", (unsigned long long)i,
                      (int)(at & 1), kind, (unsigned long long)at);
            snprintf(label, sizeof(label), "%s %s, %s@%llu", w->inner,
                     w->init != NULL ? w->init : "", kind,
                     (unsigned long long)at);
            rounds++;
            if (round_with(&f, label)) {
                failed++;
                if (must_name && !names_a_parameter(&f, ferry_last_error()))
                    fail_msg("%s: names nothing: %s", label,
                             ferry_last_error());
            }
            next_round_is_right(&f, label);
        }
        fleet_close(&f);
    }
    /* Bytes that this rank stores nothing of are no fault; most are. */
    print_message("%s: %zu of %zu rounds refused\n", kind, failed, rounds);
    assert_true(failed * 3 > rounds);
}

static void corrupt_bytes_are_never_committed(void **state)
{
    (void)state;
    sweep("corrupt", true);
}

static void lost_hand_overs_are_never_committed(void **state)
{
    (void)state;
    sweep("drop", true);
}

static void short_hand_overs_are_never_committed(void **state)
{
    (void)state;
    sweep("short", true);
}

static void failures_at_a_byte_end_the_round(void **state)
{
    (void)state;
    sweep("fail", true);
}

static void wrong_and_unstated_digests_are_refused(void **state)
{
    static const char *const kinds[] = {"digest", "mute"};

    (void)state;
    for (size_t i = 0; i < n_ways * 2; i++) {
        const way *w = &ways[i / 2];
        fleet_options o = options_of(w, FERRY_COMMIT_STAGED);
        fleet f;

        o.worker_backend = wrapped(w->inner);
        open_synced(&f, &o);
        for (uint64_t at = 0; at < 20; at += 3) {
            char label[160];

            set_fault("%s@%llu", kinds[i % 2], (unsigned long long)at);
            snprintf(label, sizeof(label), "%s %s, %s@%llu", w->inner,
                     w->init != NULL ? w->init : "", kinds[i % 2],
                     (unsigned long long)at);
            if (!round_with(&f, label))
                fail_msg("%s: committed", label);
            assert_true(names_a_parameter(&f, ferry_last_error()));
            next_round_is_right(&f, label);
        }
        fleet_close(&f);
    }
}

/* ---- the trainer's side ---- */

static void source_that_ends_early_or_fails_is_named(void **state)
{
    static const char *const kinds[] = {"drop", "fail"};

    (void)state;
    for (size_t i = 0; i < n_ways * 2; i++) {
        const way *w = &ways[i / 2];
        fleet_options o = options_of(w, (ferry_commit)(i % 2));
        uint64_t step, n = 0;
        fleet f;

        o.backend = wrapped(w->inner);
        o.worker_backend = w->inner;
        open_synced(&f, &o);
        step = step_of(w, checkpoint_bytes(&f));
        for (uint64_t at = first_of(i, step); at < checkpoint_bytes(&f);
             at += step, n++) {
            char label[160];

            set_fault("%s@%llu", kinds[n % 2], (unsigned long long)at);
            snprintf(label, sizeof(label), "trainer, %s %s, %s@%llu", w->inner,
                     w->init != NULL ? w->init : "", kinds[n % 2],
                     (unsigned long long)at);
            if (!round_with(&f, label))
                fail_msg("%s: committed", label);
            next_round_is_right(&f, label);
        }
        fleet_close(&f);
    }
}

/* The update info goes over another way than the announcement, so that no
 * changed text is believed. (`memory` has no such thing: its text carries
 * addresses.) */
static void changed_and_cut_update_infos_are_refused(void **state)
{
    static const char *const kinds[] = {"garble", "short"};

    (void)state;
    for (size_t i = 4; i < n_ways; i++) {
        fleet_options o = options_of(&ways[i], FERRY_COMMIT_STAGED);
        char init[200];
        fleet f;

        snprintf(init, sizeof(init), "\"no_progress_ms\":300%s%s",
                 ways[i].init != NULL ? "," : "",
                 ways[i].init != NULL ? ways[i].init : "");
        o.init = init;
        o.backend = wrapped(ways[i].inner);
        o.worker_backend = ways[i].inner;
        open_synced(&f, &o);
        for (uint64_t at = 11 * i, step = step_of(&ways[i], 671); at < 900;
             at += step) {
            char label[160];

            set_fault("seed=%llu,%s@%llu", (unsigned long long)at,
                      kinds[at % 2], (unsigned long long)at);
            snprintf(label, sizeof(label), "%s, %s@%llu",
                     ways[i].init != NULL ? ways[i].init : "ipc", kinds[at % 2],
                     (unsigned long long)at);
            if (!round_with(&f, label))
                fail_msg("%s: committed", label);
            next_round_is_right(&f, label);
        }
        fleet_close(&f);
    }
}

/* The source changes in place after it was hashed and before it was read. */
static void source_that_changes_while_it_is_sent_is_found(void **state)
{
    way w = {"ipc", NULL};
    fleet_options o = options_of(&w, FERRY_COMMIT_STAGED);
    fleet f;

    (void)state;
    o.backend = wrapped("ipc");
    o.worker_backend = wrapped("ipc");
    open_synced(&f, &o);
    set_fault("stall@0=400ms,tear@40=150ms");
    assert_true(round_with(&f, "tear"));
    assert_non_null(strstr(ferry_last_error(), "digest"));
    assert_true(names_a_parameter(&f, ferry_last_error()));
    next_round_is_right(&f, "tear");
    fleet_close(&f);
}

/* ---- phases and bounds ---- */

static void failures_at_a_phase_end_the_round(void **state)
{
    static const char *const faults[] = {"fail@start", "fail@finish",
                                         "fail@sent:0"};

    (void)state;
    for (size_t i = 0; i < 12; i++) {
        const way *w = &ways[i % 2 ? 0 : 4];
        fleet_options o = options_of(w, (ferry_commit)(i / 2 % 2));
        bool trainer = i % 3 == 2 || i > 6;
        fleet f;

        o.backend = trainer ? wrapped(w->inner) : w->inner;
        o.worker_backend = trainer ? w->inner : wrapped(w->inner);
        open_synced(&f, &o);
        set_fault("%s", faults[i % 3]);
        assert_true(round_with(&f, faults[i % 3]));
        assert_non_null(strstr(ferry_last_error(), "fault: "));
        next_round_is_right(&f, faults[i % 3]);
        fleet_close(&f);
    }
}

static void stalls_end_at_a_bound(void **state)
{
    (void)state;
    for (int side = 0; side < 2; side++) {
        way w = {"ipc", "\"no_progress_ms\":300"};
        fleet_options o = options_of(&w, FERRY_COMMIT_STAGED);
        int64_t began;
        fleet f;

        o.backend = side ? wrapped("ipc") : "ipc";
        o.worker_backend = side ? "ipc" : wrapped("ipc");
        open_synced(&f, &o);
        set_fault("stall@50=20s");
        began = ferry__now_ns();
        assert_true(round_with(&f, "stall"));
        assert_true(ferry__now_ns() - began < 3000000000);
        assert_non_null(strstr(ferry_last_error(), "no progress"));
        next_round_is_right(&f, "stall");
        fleet_close(&f);
    }
}

static void slow_rounds_are_right(void **state)
{
    way w = {"ipc", NULL};
    fleet_options o = options_of(&w, FERRY_COMMIT_INPLACE);
    fleet f;

    (void)state;
    o.backend = wrapped("ipc");
    o.worker_backend = wrapped("ipc");
    open_synced(&f, &o);
    set_fault("delay=2ms");
    assert_false(round_with(&f, "delay"));
    fleet_close(&f);
}

/* ---- what is not found ---- */

/* Without digests a changed byte is committed; what is lost is still found.
 * With them, the source's own bytes are the truth. */
static void without_digests_changed_bytes_are_committed(void **state)
{
    way w = {"ipc", "\"digest\":false"};
    fleet_options o = options_of(&w, FERRY_COMMIT_STAGED);
    fleet f;

    (void)state;
    o.worker_backend = wrapped("ipc");
    open_synced(&f, &o);
    set_fault("corrupt@3");
    assert_int_equal(fleet_send(&f, 2, "two"), FERRY_OK);
    assert_non_null(fleet_differs(&f, 2));
    next_round_is_right(&f, "corrupt");
    set_fault("drop@3");
    assert_true(round_with(&f, "drop"));
    next_round_is_right(&f, "drop");
    set_fault("short@70");
    assert_true(round_with(&f, "short"));
    fleet_close(&f);
}

static void the_source_is_the_truth(void **state)
{
    way w = {"ipc", NULL};
    fleet_options o = options_of(&w, FERRY_COMMIT_STAGED);
    fleet f;

    (void)state;
    o.backend = wrapped("ipc");
    o.worker_backend = "ipc";
    open_synced(&f, &o);
    set_fault("corrupt@3");
    assert_int_equal(fleet_send(&f, 2, "two"), FERRY_OK);
    assert_non_null(fleet_differs(&f, 2));
    next_round_is_right(&f, "corrupt");
    fleet_close(&f);
}

/* ---- finding it, and its setting ---- */

static void it_is_found_behind_its_prefix_alone(void **state)
{
    const struct ferry_worker_engine_ops *plain, *a, *b;
    ferry_backend_info info = {.size = sizeof(info)};

    (void)state;
    assert_int_equal(ferry_worker_find("ipc", &plain), FERRY_OK);
    assert_int_equal(ferry_worker_find("fault:ipc", &a), FERRY_OK);
    assert_int_equal(ferry_worker_find("fault:ipc", &b), FERRY_OK);
    assert_ptr_equal(a, b);
    assert_ptr_not_equal(a, plain);
    assert_int_equal(ferry_worker_find("fault", &a), FERRY_EUNKNOWN);
    assert_int_equal(ferry_worker_find("fault:", &a), FERRY_EUNKNOWN);
    assert_int_equal(ferry_worker_find("fault:nothing", &a), FERRY_EUNKNOWN);
    assert_non_null(strstr(ferry_last_error(), "'nothing'"));
    assert_int_equal(ferry_worker_find("fault:fault:ipc", &a), FERRY_EINVAL);
    for (size_t i = 0; i < 4; i++) {
        assert_int_equal(ferry_worker_list(i, &info), FERRY_OK);
        assert_null(strstr(info.name, "fault"));
    }
}

static void settings_that_are_no_fault_are_refused_by_name(void **state)
{
    static const char *const wrong[] = {
        "corrupt",     "corrupt@",  "corrupt@x",  "delay",     "delay@3=5ms",
        "delay=5",     "delay=x",   "stall@3",    "explode@3", "seed=",
        "rank=-1",     "die@later", "die@3=5ms",  "sent:3",    "seed=1;die@3",
        "corrupt@1.5", "stall@=3s", "delay=1e3s", "tear@12",   "round=one"};
    way w = {"ipc", NULL};
    fleet_options o = options_of(&w, FERRY_COMMIT_STAGED);
    fleet f;

    (void)state;
    o.backend = wrapped("ipc");
    open_synced(&f, &o);
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        if (strcmp(wrong[i], "delay=5") == 0)
            continue; /* milliseconds */
        set_fault("%s", wrong[i]);
        if (fleet_send(&f, 2, NULL) != FERRY_EINVAL ||
            strstr(ferry_last_error(), wrong[i]) == NULL)
            fail_msg("'%s': %s", wrong[i], ferry_last_error());
    }
    next_round_is_right(&f, "settings");
    fleet_close(&f);
}

static void a_file_and_a_round_choose_too(void **state)
{
    way w = {"memory", NULL};
    fleet_options o = options_of(&w, FERRY_COMMIT_STAGED);
    const char *folder = getenv("TMPDIR");
    char path[300];
    FILE *file;
    fleet f;

    (void)state;
    snprintf(path, sizeof(path), "%s/ferry-fault-%d",
             folder != NULL ? folder : "/tmp", rand());
    o.worker_backend = wrapped("memory");
    open_synced(&f, &o);
    set_fault("@%s", path);
    assert_false(round_with(&f, "no file"));
    assert_int_equal(fleet_send(&f, 1, "one"), FERRY_OK);
    file = fopen(path, "w");
    assert_non_null(file);
    fputs("seed=3\ncorrupt@?, round=5\n", file);
    fclose(file);
    assert_false(round_with(&f, "round 4"));
    assert_int_equal(fleet_send(&f, 1, "one"), FERRY_EDIGEST);
    remove(path);
    next_round_is_right(&f, "file");
    fleet_close(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(corrupt_bytes_are_never_committed),
        cmocka_unit_test(lost_hand_overs_are_never_committed),
        cmocka_unit_test(short_hand_overs_are_never_committed),
        cmocka_unit_test(failures_at_a_byte_end_the_round),
        cmocka_unit_test(wrong_and_unstated_digests_are_refused),
        cmocka_unit_test(source_that_ends_early_or_fails_is_named),
        cmocka_unit_test(changed_and_cut_update_infos_are_refused),
        cmocka_unit_test(source_that_changes_while_it_is_sent_is_found),
        cmocka_unit_test(failures_at_a_phase_end_the_round),
        cmocka_unit_test(stalls_end_at_a_bound),
        cmocka_unit_test(slow_rounds_are_right),
        cmocka_unit_test(without_digests_changed_bytes_are_committed),
        cmocka_unit_test(the_source_is_the_truth),
        cmocka_unit_test(it_is_found_behind_its_prefix_alone),
        cmocka_unit_test(settings_that_are_no_fault_are_refused_by_name),
        cmocka_unit_test(a_file_and_a_round_choose_too),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
