/* SPDX-License-Identifier: Apache-2.0 */
/* ctest: timeout=240
 * The provider `nccl` over libferry_nccl_host: the cases of every provider in
 * its three ways to meet, and what only it has. */
#include "comm/nccl_abi.h"
#include "comm/provider.h"
#include "comm/stream.h"
#include "comm/unique_id.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "base/config.h"
#include "base/thread.h"
#include "core/module.h"
#include "harness/comm_cases.h"
#include "harness/nccl_table.h"

#include <malloc.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

#define T 10000

static const ferry__provider *provider;

/* ---- meeting: rank 0 says where, in memory that all ranks share ---- */

typedef struct place {
    atomic_int ready;
    int32_t port;
    unsigned char id[FERRY__UNIQUE_ID];
} place;

static place *shared;
static ferry__store_server *server;
static ferry__meeting meeting;

static ferry_status make(comm_group *g, int32_t world_size, size_t slot_bytes)
{
    void *memory = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_ANONYMOUS, -1, 0);

    (void)slot_bytes;
    assert_true(memory != MAP_FAILED);
    shared = memory;
    g->world_size = world_size;
    return FERRY_OK;
}

static void drop(comm_group *g)
{
    (void)g;
    munmap(shared, sizeof(*shared));
    ferry__store_server_close(&server);
}

static ferry_status say_where(void)
{
    if (meeting == FERRY__MEET_UNIQUE_ID)
        FERRY_TRY(provider->unique_id(shared->id));
    else
        FERRY_TRY(ferry__store_serve("127.0.0.1", 0, &shared->port, &server));
    atomic_store(&shared->ready, 1);
    return FERRY_OK;
}

static ferry_status open_rank(comm_group *g, int32_t rank, ferry__comm **out)
{
    ferry__group group = {.rank = rank,
                          .world_size = g->world_size,
                          .generation = 1,
                          .secret = "s3cret",
                          .bind = "127.0.0.1",
                          .advertise = "127.0.0.1",
                          .host_name = "",
                          .timeout_ms = T,
                          .meeting = meeting};
    ferry__store *store = NULL;
    ferry_status status;

    if (rank == 0)
        FERRY_TRY(say_where());
    while (!atomic_load(&shared->ready))
        ferry__sleep_ms(1);
    group.unique_id = shared->id;
    if (meeting != FERRY__MEET_UNIQUE_ID)
        FERRY_TRY(ferry__store_open("127.0.0.1", shared->port, T, &store));
    status = provider->open(store, &group, out);
    ferry__store_close(&store);
    return status;
}

static const comm_maker ferry_maker = {.name = "nccl",
                                       .make = make,
                                       .open = open_rank,
                                       .drop = drop,
                                       .no_pull = true};
static const comm_maker other_maker = {.name = "nccl_moves",
                                       .make = make,
                                       .open = open_rank,
                                       .drop = drop,
                                       .moves_only = true,
                                       .no_pull = true};

/* ---- alone ---- */

static const ferry__group alone = {.rank = 0,
                                   .world_size = 1,
                                   .generation = 1,
                                   .secret = "s",
                                   .timeout_ms = T,
                                   .meeting = FERRY__MEET_UNIQUE_ID};

static void describes_the_library(void **state)
{
    ferry__group group = alone;
    unsigned char id[FERRY__UNIQUE_ID];
    ferry__comm *c = NULL;
    char text[256];

    (void)state;
    assert_int_equal(provider->available(), FERRY_OK);
    assert_string_equal(provider->version(), "2.27.3 host");
    assert_int_equal(provider->unique_id(id), FERRY_OK);
    group.unique_id = id;
    assert_int_equal(provider->open(NULL, &group, &c), FERRY_OK);
    assert_null(c->memory);
    c->ops->describe(c, text, sizeof(text));
    assert_non_null(strstr(text, "nccl 2.27.3 host ("));
    assert_non_null(strstr(text, "libferry_nccl_host.so)"));
    assert_int_equal(c->ops->barrier(c, T), FERRY_OK);
    assert_int_equal(c->ops->barrier(c, 0), FERRY_EINVAL);
    ferry__comm_close(&c);
}

static void wrong_groups_are_refused(void **state)
{
    ferry__group group = alone;
    ferry__comm *c = NULL;

    (void)state;
    assert_int_equal(provider->open(NULL, &group, &c), FERRY_EINVAL);
    group.meeting = FERRY__MEET_FERRY;
    assert_int_equal(provider->open(NULL, &group, &c), FERRY_EINVAL);
    group.rank = 1;
    assert_int_equal(provider->open(NULL, &group, &c), FERRY_EINVAL);
    assert_null(c);
}

/* ---- libraries that lack something ---- */

static const char *test_module(const char *name)
{
    static char path[4096];
    const char *folder = getenv("FERRY_TEST_MODULES");

    snprintf(path, sizeof(path), "%s/%s.so", folder ? folder : "tests/modules",
             name);
    return path;
}

static void what_is_missing_is_said_in_words(void **state)
{
    unsigned char id[FERRY__UNIQUE_ID];

    (void)state;
    ferry__config_set("nccl_library", "libnothing_here.so.7");
    assert_int_equal(provider->available(), FERRY_EBACKEND);
    assert_non_null(strstr(ferry_last_error(), "libnothing_here.so.7"));
    assert_string_equal(provider->version(), "");
    assert_int_equal(provider->unique_id(id), FERRY_EBACKEND);
    ferry__config_set("nccl_library", test_module("nccl_short"));
    assert_int_equal(provider->available(), FERRY_EBACKEND);
    assert_non_null(strstr(ferry_last_error(), "no symbol ncclAllGather"));
    ferry__config_set("nccl_library", nccl_host_path());
    assert_int_equal(provider->available(), FERRY_OK);
}

/* ---- a library that does not come back ---- */

static ferry_status canceled(void *arg, const char *what)
{
    int *asked = arg;

    if (++*asked < 2)
        return FERRY_OK;
    return ferry_fail(FERRY_ECANCELED, "%s: the control call failed", what);
}

static ferry__comm *open_stuck(int64_t no_progress_ms)
{
    static const unsigned char id[FERRY__UNIQUE_ID];
    ferry__group group = alone;
    ferry__comm *c = NULL;

    group.world_size = 2;
    group.unique_id = id;
    group.no_progress_ms = no_progress_ms;
    assert_int_equal(provider->open(NULL, &group, &c), FERRY_OK);
    return c;
}

static void ends(ferry__comm *c, int32_t root, int64_t timeout_ms,
                 ferry_status want, const char *line)
{
    int64_t began = ferry__now_ns();
    char bytes[8] = {0};

    assert_int_equal(c->ops->broadcast(c, bytes, 8, root, timeout_ms), want);
    assert_non_null(strstr(ferry_last_error(), line));
    assert_int_equal(c->ops->barrier(c, T), want);
    assert_non_null(strstr(ferry_last_error(), line));
    ferry__comm_close(&c);
    assert_true(ferry__now_ns() - began < INT64_C(4000000000));
}

static void *abort_soon(void *arg)
{
    ferry__comm *c = arg;

    ferry__sleep_ms(100);
    c->ops->abort(c);
    return NULL;
}

static void calls_that_do_not_return_are_ended(void **state)
{
    pthread_t thread;
    ferry__comm *c;
    int asked = 0;

    (void)state;
    ferry__config_set("nccl_library", test_module("nccl_stuck"));
    ends(open_stuck(0), 0, 150, FERRY_ETIMEOUT,
         "broadcast: not all ranks came within 150 ms; rank 0 of 2 waited for "
         "rank 1");
    ends(open_stuck(120), 0, T, FERRY_ENOPROGRESS, "within 120 ms");
    c = open_stuck(0);
    c->check = canceled;
    c->check_arg = &asked;
    ends(c, 0, T, FERRY_ECANCELED, "broadcast: the control call failed");
    c = open_stuck(0);
    assert_int_equal(ferry__thread_start(&thread, "abort", abort_soon, c),
                     FERRY_OK);
    /* The line is of the abort, so the call is over when the thread is. */
    assert_int_equal(c->ops->broadcast(c, &asked, 4, 0, T), FERRY_ECANCELED);
    pthread_join(thread, NULL);
    ends(c, 0, T, FERRY_ECANCELED, "the group was aborted by rank 0");
    /* It ignores even its abort: it is left to its thread. */
    ends(open_stuck(0), 1, 150, FERRY_ETIMEOUT, "waited for rank 1");
    ferry__config_set("nccl_library", nccl_host_path());
}

static void *symbol_of_stuck(const char *name)
{
    char path[4096];
    void *symbol;

    snprintf(path, sizeof(path), "%s", test_module("nccl_stuck"));
    assert_int_equal(ferry__module_symbol(path, name, &symbol), FERRY_OK);
    return symbol;
}

static int ask_stuck(const char *name)
{
    void *symbol = symbol_of_stuck(name);
    int (*ask)(void);

    memcpy(&ask, &symbol, sizeof(ask));
    return ask();
}

/* Lets the calls that did not return write, all of them. */
static void let_go_until(int writes)
{
    ferry__deadline until = ferry__deadline_in(T);
    void *symbol = symbol_of_stuck("nccl_stuck_let_go");
    void (*let_go)(int);

    memcpy(&let_go, &symbol, sizeof(let_go));
    let_go(1);
    while (ask_stuck("nccl_stuck_late_writes") < writes &&
           !ferry__deadline_passed(&until))
        ferry__sleep_ms(1);
    assert_int_equal(ask_stuck("nccl_stuck_late_writes"), writes);
    ferry__sleep_ms(50); /* their threads end */
    let_go(0);
}

static char warnings[4096];

static void keep_warnings(ferry_log_level level, const char *line, void *arg)
{
    size_t n = strlen(warnings);

    (void)arg;
    if (level == FERRY_LOG_WARN)
        snprintf(warnings + n, sizeof(warnings) - n, "%s\n", line);
}

/* What a caller gave to a call is the caller's again when it is back, even
 * if the call within goes on; what a stream had is the call's own. */
static void a_call_that_is_left_writes_nothing_of_the_callers(void **state)
{
    const uint64_t sizes[] = {1 << 20};
    const ferry__stream_options o = {.root = 1,
                                     .n_buffers = 2,
                                     .buffer_bytes = 1 << 20,
                                     .timeout_ms = T,
                                     .no_progress_ms = 150};
    static char small[8], none[8];
    ferry__stream *s = NULL;
    const void *bytes;
    ferry__comm *c;
    size_t n;
    int before;

    (void)state;
    ferry__config_set("nccl_library", test_module("nccl_stuck"));
    /* A call of an earlier case is still there. */
    before = ask_stuck("nccl_stuck_late_writes");
    c = open_stuck(0);
    assert_int_equal(c->ops->broadcast(c, small, sizeof(small), 1, 150),
                     FERRY_ETIMEOUT);
    ferry__comm_close(&c);
    c = open_stuck(0);
    ferry_log_set(keep_warnings, NULL);
    assert_int_equal(ferry__stream_open(c, &o, &s), FERRY_OK);
    assert_int_equal(s->ops->begin(s, sizes, 1), FERRY_OK);
    assert_true(s->ops->peek(s, &bytes, &n) < 0);
    ferry__stream_close(&s);
    ferry__comm_close(&c);
    ferry_log_set(NULL, NULL);
    assert_non_null(strstr(warnings, "is left to its thread"));
    assert_non_null(strstr(warnings, "1048576 bytes that it may still use are "
                                     "left to it"));
    let_go_until(before + 3);
    assert_memory_equal(small, none, sizeof(small));
    ferry__config_set("nccl_library", nccl_host_path());
}

/* An abort while the words of a failure are asked for waits for them. */
static void a_communicator_is_not_asked_after_its_abort(void **state)
{
    char bytes[13] = {0};
    pthread_t thread;
    ferry__comm *c;

    (void)state;
    ferry__config_set("nccl_library", test_module("nccl_stuck"));
    c = open_stuck(0);
    assert_int_equal(ferry__thread_start(&thread, "abort", abort_soon, c),
                     FERRY_OK);
    assert_true(c->ops->broadcast(c, bytes, sizeof(bytes), 0, T) < 0);
    pthread_join(thread, NULL);
    ferry__comm_close(&c);
    ferry__sleep_ms(300);
    assert_int_equal(ask_stuck("nccl_stuck_questions_to_dead"), 0);
    ferry__config_set("nccl_library", nccl_host_path());
}

static void meetings_that_do_not_return_are_left(void **state)
{
    static const unsigned char id[FERRY__UNIQUE_ID];
    int64_t began = ferry__now_ns();
    ferry__group group = alone;
    ferry__comm *c = NULL;
    int asked = 0;

    (void)state;
    ferry__config_set("nccl_library", test_module("nccl_stuck"));
    group.world_size = 3;
    group.rank = 1;
    group.unique_id = id;
    group.timeout_ms = 150;
    assert_int_equal(provider->open(NULL, &group, &c), FERRY_ETIMEOUT);
    assert_non_null(strstr(ferry_last_error(), "meeting: not all ranks came "
                                               "within 150 ms; rank 1 of 3 "
                                               "waited for rank 0, 2"));
    group.timeout_ms = T;
    group.check = canceled;
    group.check_arg = &asked;
    assert_int_equal(provider->open(NULL, &group, &c), FERRY_ECANCELED);
    assert_null(c);
    assert_true(ferry__now_ns() - began < INT64_C(3000000000));
    ferry__config_set("nccl_library", nccl_host_path());
}

/* ---- vLLM's form of the meeting ---- */

static void the_store_holds_vllms_pickle(void **state)
{
    ferry__group group = alone;
    unsigned char id[FERRY__UNIQUE_ID];
    ferry__store *store;
    ferry__comm *c = NULL;
    size_t size;
    void *value;
    int32_t port;

    (void)state;
    group.meeting = FERRY__MEET_VLLM_STORE;
    assert_int_equal(ferry__store_serve("127.0.0.1", 0, &port, &server), 0);
    assert_int_equal(ferry__store_open("127.0.0.1", port, T, &store), 0);
    assert_int_equal(provider->open(store, &group, &c), FERRY_OK);
    assert_int_equal(
        ferry__store_get(store, "broadcast_from/0/0", T, &value, &size), 0);
    assert_int_equal(size, 247);
    assert_int_equal(ferry__id_unpickle(value, size, id), FERRY_OK);
    assert_memory_equal(id, "FERRYNID", 8);
    ferry__free(value);
    ferry__comm_close(&c);
    /* What is no id of that form is refused by its offset. */
    assert_int_equal(
        ferry__store_set(store, "broadcast_from/0/0", "\x80\x04\x95xyz", 6), 0);
    group.world_size = 2;
    group.rank = 1;
    assert_int_equal(provider->open(store, &group, &c), FERRY_EPEER);
    assert_non_null(strstr(ferry_last_error(), "byte 3 is 0x78"));
    ferry__store_close(&store);
    ferry__store_server_close(&server);
}

/* ---- Ferry's own form names who is missing and what differs ---- */

static void the_missing_rank_is_named(void **state)
{
    ferry__group group = alone;
    ferry__store *store;
    ferry__comm *c = NULL;
    int32_t port;

    (void)state;
    group.meeting = FERRY__MEET_FERRY;
    group.world_size = 3;
    group.timeout_ms = 200;
    assert_int_equal(ferry__store_serve("127.0.0.1", 0, &port, &server), 0);
    assert_int_equal(ferry__store_open("127.0.0.1", port, T, &store), 0);
    assert_int_equal(provider->open(store, &group, &c), FERRY_ETIMEOUT);
    assert_non_null(strstr(ferry_last_error(), "rank 1, 2 did not come"));
    ferry__store_close(&store);
    ferry__store_server_close(&server);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(describes_the_library),
        cmocka_unit_test(wrong_groups_are_refused),
        cmocka_unit_test(what_is_missing_is_said_in_words),
        cmocka_unit_test(the_store_holds_vllms_pickle),
        cmocka_unit_test(the_missing_rank_is_named),
        cmocka_unit_test(meetings_that_do_not_return_are_left),
        cmocka_unit_test(calls_that_do_not_return_are_ended),
        cmocka_unit_test(a_call_that_is_left_writes_nothing_of_the_callers),
        cmocka_unit_test(a_communicator_is_not_asked_after_its_abort),
    };
    int failed = 0;

    /* What is freed is then gone, and a write to it is a fault. */
    mallopt(M_MMAP_THRESHOLD, 64 << 10);
    if (ferry__config_set("nccl_library", nccl_host_path()) < 0 ||
        ferry__provider_find("nccl", &provider) < 0) {
        fprintf(stderr, "%s\n", ferry_last_error());
        return 1;
    }
    meeting = FERRY__MEET_FERRY;
    failed += comm_cases_run(&ferry_maker);
    meeting = FERRY__MEET_VLLM_STORE;
    failed += comm_cases_run(&other_maker);
    meeting = FERRY__MEET_UNIQUE_ID;
    failed += comm_cases_run(&other_maker);
    return failed + cmocka_run_group_tests(tests, NULL, NULL);
}
