/* SPDX-License-Identifier: Apache-2.0 */
/* Providers by name, and groups opened through their table. */
#include "comm/provider.h"

#include "base/config.h"
#include "base/thread.h"
#include "comm/tcp.h"
#include "comm/tcp_address.h"
#include "core/module.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#define T     5000
#define RANKS 3

static ferry__store_server *server;
static int32_t port;
static uint64_t generation;

static int begin(void **state)
{
    (void)state;
    return ferry__store_serve("127.0.0.1", 0, &port, &server);
}

static int end(void **state)
{
    (void)state;
    ferry__store_server_close(&server);
    return 0;
}

static bool ucx_is_here(void)
{
    const ferry__provider *p;

    return ferry__module_present("ferry_comm_ucx") &&
           ferry__provider_find("ucx", &p) == FERRY_OK &&
           p->available() == FERRY_OK;
}

typedef struct seat {
    ferry__group group;
    const char *provider;
    ferry_status status;
    char line[512], path[256];
} seat;

static ferry_status sum_ranks(ferry__comm *c)
{
    int32_t x = c->rank + 1;

    FERRY_TRY(
        c->ops->all_reduce(c, &x, 1, FERRY_DTYPE_I32, FERRY__REDUCE_SUM, T));
    if (x != c->world_size * (c->world_size + 1) / 2)
        return ferry_fail(FERRY_EDIGEST, "the sum is %d", x);
    return FERRY_OK;
}

static void *sit(void *arg)
{
    seat *s = arg;
    const ferry__provider *p = NULL;
    ferry__store *store = NULL;
    ferry__comm *c = NULL;

    s->status = ferry__provider_find(s->provider, &p);
    if (s->status >= 0)
        s->status = ferry__store_open("127.0.0.1", port, T, &store);
    if (s->status >= 0)
        s->status = p->open(store, &s->group, &c);
    if (s->status >= 0)
        s->status = sum_ranks(c);
    snprintf(s->line, sizeof(s->line), "%s",
             s->status < 0 ? ferry_last_error() : "");
    if (c && c->ops->describe)
        c->ops->describe(c, s->path, sizeof(s->path));
    ferry__comm_close(&c);
    ferry__store_close(&store);
    return NULL;
}

static void sit_down(seat *seats, const char *provider, const char *secret)
{
    pthread_t threads[RANKS];

    generation++;
    for (int32_t r = 0; r < RANKS; r++) {
        seats[r] = (seat){.provider = provider,
                          .group = {.rank = r,
                                    .world_size = RANKS,
                                    .generation = generation,
                                    .secret = secret,
                                    .timeout_ms = T}};
        assert_int_equal(
            ferry__thread_start(&threads[r], "seat", sit, &seats[r]), FERRY_OK);
    }
    for (int32_t r = 0; r < RANKS; r++)
        pthread_join(threads[r], NULL);
}

static void names_are_listed_and_others_refused(void **state)
{
    const ferry__provider *p = NULL;

    (void)state;
    assert_string_equal(ferry__provider_name(0), "tcp");
    assert_string_equal(ferry__provider_name(1), "ucx");
    assert_string_equal(ferry__provider_name(2), "nccl");
    assert_null(ferry__provider_name(3));
    assert_int_equal(ferry__provider_find("tcp", &p), FERRY_OK);
    assert_ptr_equal(p, &ferry__provider_tcp);
    assert_int_equal(p->available(), FERRY_OK);
    assert_int_equal(ferry__provider_find("gloo", &p), FERRY_EUNKNOWN);
    assert_non_null(strstr(ferry_last_error(), "\"gloo\" is not known"));
    assert_non_null(strstr(ferry_last_error(), "tcp, ucx and nccl"));
    assert_int_equal(ferry__provider_find(NULL, &p), FERRY_EUNKNOWN);
    assert_ptr_equal(p, &ferry__provider_tcp);
}

static void absent_module_is_named(void **state)
{
    char before[4096];
    const ferry__provider *p = NULL;

    (void)state;
    snprintf(before, sizeof(before), "%s",
             ferry__config_get(FERRY__CONFIG_MODULE_PATH));
    assert_int_equal(ferry__config_set("module_path", "/no/where"), FERRY_OK);
    assert_int_equal(ferry__provider_find("ucx", &p), FERRY_EBACKEND);
    assert_non_null(strstr(ferry_last_error(), "ferry_comm_ucx.so"));
    assert_null(p);
    assert_string_equal(ferry__provider_auto(), "tcp");
    assert_int_equal(ferry__config_set("module_path", before), FERRY_OK);
}

/* `auto` names what it would take, and that can be opened. */
static void auto_is_a_provider_of_this_machine(void **state)
{
    const char *name = ferry__provider_auto();
    const ferry__provider *p = NULL;

    (void)state;
    assert_int_equal(ferry__provider_find(name, &p), FERRY_OK);
    assert_int_equal(p->available(), FERRY_OK);
    if (strcmp(name, "ucx") == 0)
        assert_true(p->preferred());
}

/* Nothing is given but what a group must know. */
static void tcp_finds_its_own_address(void **state)
{
    seat seats[RANKS];

    (void)state;
    sit_down(seats, "tcp", "secret");
    for (int32_t r = 0; r < RANKS; r++) {
        if (seats[r].status < 0)
            fail_msg("rank %d: %s", r, seats[r].line);
        assert_memory_equal(seats[r].path, "tcp 127.0.0.1:", 14);
    }
}

static ferry_status call(const char *host, int32_t at)
{
    ferry__waiter w = {NULL, NULL, ferry__deadline_in(T), "call"};
    int fd = -1;

    FERRY_TRY(ferry__tcp_connect_now(host, at, &w, &fd));
    close(fd);
    return FERRY_OK;
}

/* J3: what a rank serves is where its way to the store begins. */
static void tcp_serves_no_other_network(void **state)
{
    ferry__group g = {.world_size = 1, .secret = "s", .timeout_ms = T};
    unsigned char key[FERRY__PULL_KEY], byte = 0;
    ferry__store *store = NULL;
    ferry__comm *c = NULL;
    size_t key_bytes;
    int32_t at;

    (void)state;
    g.generation = ++generation;
    assert_int_equal(ferry__store_open("127.0.0.1", port, T, &store), FERRY_OK);
    assert_int_equal(ferry__provider_tcp.open(store, &g, &c), FERRY_OK);
    assert_int_equal(c->ops->expose(c, &byte, 1, key, &key_bytes), FERRY_OK);
    at = key[4] | key[5] << 8;
    assert_int_equal(call("127.0.0.1", at), FERRY_OK);
    assert_int_equal(call("127.0.0.2", at), FERRY_ECONN);
    ferry__comm_close(&c);
    ferry__store_close(&store);
}

static void ucx_opens_through_its_module(void **state)
{
    seat seats[RANKS];

    (void)state;
    if (!ucx_is_here())
        skip();
    sit_down(seats, "ucx", "secret");
    for (int32_t r = 0; r < RANKS; r++) {
        if (seats[r].status < 0)
            fail_msg("rank %d: %s", r, seats[r].line);
        assert_memory_equal(seats[r].path, "ucx ", 4);
    }
}

static void odd_groups_are_refused(void **state)
{
    static const char *const providers[] = {"tcp", "ucx"};
    seat seats[RANKS];

    (void)state;
    for (int i = 0; i < (ucx_is_here() ? 2 : 1); i++) {
        sit_down(seats, providers[i], "");
        for (int32_t r = 0; r < RANKS; r++)
            assert_int_equal(seats[r].status, FERRY_EINVAL);
        assert_non_null(strstr(seats[0].line, "secret must have 1 to 64"));
    }
}

static void host_name_comes_from_group_or_setting(void **state)
{
    ferry__group g = {.host_name = ""};

    (void)state;
    assert_string_equal(ferry__group_host_name(&g), "");
    assert_int_equal(ferry__config_set("host_name", "east"), FERRY_OK);
    assert_string_equal(ferry__group_host_name(&g), "east");
    g.host_name = "west";
    assert_string_equal(ferry__group_host_name(&g), "west");
    assert_int_equal(ferry__config_set("host_name", ""), FERRY_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_are_listed_and_others_refused),
        cmocka_unit_test(absent_module_is_named),
        cmocka_unit_test(auto_is_a_provider_of_this_machine),
        cmocka_unit_test(tcp_finds_its_own_address),
        cmocka_unit_test(tcp_serves_no_other_network),
        cmocka_unit_test(ucx_opens_through_its_module),
        cmocka_unit_test(odd_groups_are_refused),
        cmocka_unit_test(host_name_comes_from_group_or_setting),
    };

    return cmocka_run_group_tests(tests, begin, end);
}
