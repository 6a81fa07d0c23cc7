/* SPDX-License-Identifier: Apache-2.0 */
/* The provider `nccl` on a device that is played by host memory: what goes
 * through staging, how the queue is polled, and how a call ends that the
 * device does not finish. */
#include "comm/provider.h"
#include "device/memory.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "base/config.h"
#include "base/thread.h"
#include "core/module.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define T     10000
#define WORLD 3
#define BYTES 100000

static const ferry__provider *provider;
static unsigned char id[FERRY__UNIQUE_ID];

static const char *test_module(const char *name)
{
    static char path[4096];

    snprintf(path, sizeof(path), "%s/%s.so", getenv("FERRY_TEST_MODULES"),
             name);
    return path;
}

/* Of the module that plays the driver; ranks are threads, so both are looked
 * up before there are any. */
static void (*hold)(int on);
static int (*left)(void);
static void *(*reach)(const void *memory);

static void look_up(void)
{
    char driver[4096];
    void *symbol;

    snprintf(driver, sizeof(driver), "%s", test_module("cuda_host"));
    assert_int_equal(ferry__module_symbol(driver, "cuda_host_hold", &symbol),
                     0);
    memcpy(&hold, &symbol, sizeof(symbol));
    assert_int_equal(ferry__module_symbol(driver, "cuda_host_left", &symbol),
                     0);
    memcpy(&left, &symbol, sizeof(symbol));
    assert_int_equal(ferry__module_symbol(driver, "cuda_host_reach", &symbol),
                     0);
    memcpy(&reach, &symbol, sizeof(symbol));
}

/* ---- ranks as threads ---- */

#define CHECK(expr)                                                            \
    do {                                                                       \
        if (!(expr)) {                                                         \
            fprintf(stderr, "rank %d: %s: %s\n", c->rank, #expr,               \
                    ferry_last_error());                                       \
            return __LINE__;                                                   \
        }                                                                      \
    } while (0)
#define GOOD(expr) CHECK((expr) == FERRY_OK)

typedef struct seat {
    int32_t rank;
    int (*body)(ferry__comm *c);
    int rc;
} seat;

static void *sit(void *arg)
{
    seat *s = arg;
    ferry__group group = {.rank = s->rank,
                          .world_size = WORLD,
                          .generation = 1,
                          .timeout_ms = T,
                          .meeting = FERRY__MEET_UNIQUE_ID,
                          .unique_id = id};
    ferry__comm *c = NULL;

    s->rc = 1;
    if (provider->open(NULL, &group, &c) == FERRY_OK)
        s->rc = s->body(c);
    else
        fprintf(stderr, "rank %d: %s\n", s->rank, ferry_last_error());
    ferry__comm_close(&c);
    return NULL;
}

static void run(int (*body)(ferry__comm *c))
{
    pthread_t threads[WORLD];
    seat seats[WORLD];

    assert_int_equal(provider->unique_id(id), FERRY_OK);
    for (int32_t r = 0; r < WORLD; r++) {
        seats[r] = (seat){r, body, 1};
        assert_int_equal(
            ferry__thread_start(&threads[r], "rank", sit, &seats[r]), FERRY_OK);
    }
    for (int32_t r = 0; r < WORLD; r++) {
        pthread_join(threads[r], NULL);
        assert_int_equal(seats[r].rc, 0);
    }
}

static int moves_body(ferry__comm *c)
{
    const ferry__memory *m = c->memory;
    char text[128];
    unsigned char *at, host[64] = {0}, all[64 * WORLD];
    double sum = c->rank;
    void *memory;

    CHECK(m && strcmp(m->name, "cuda") == 0);
    c->ops->describe(c, text, sizeof(text));
    CHECK(strstr(text, "nccl 2.27.3 (") == text);
    /* The device's own memory goes as it is. */
    GOOD(m->alloc(BYTES, &memory));
    at = reach(memory);
    memset(at, c->rank == 1 ? 7 : 0, BYTES);
    GOOD(c->ops->broadcast(c, memory, BYTES, 1, T));
    for (size_t i = 0; i < BYTES; i++)
        CHECK(at[i] == 7);
    m->free(memory);
    /* Host memory goes through staging. */
    memset(host, c->rank == 2 ? 9 : 0, sizeof(host));
    GOOD(c->ops->broadcast(c, host, sizeof(host), 2, T));
    CHECK(host[0] == 9 && host[63] == 9);
    GOOD(c->ops->all_reduce(c, &sum, 1, FERRY_DTYPE_F64, FERRY__REDUCE_SUM, T));
    CHECK(sum == 3);
    memset(host, c->rank + 1, sizeof(host));
    GOOD(c->ops->all_gather(c, host, sizeof(host), c->rank == 0 ? all : NULL,
                            T));
    for (int r = 0; c->rank == 0 && r < WORLD; r++)
        CHECK(all[r * 64] == r + 1 && all[r * 64 + 63] == r + 1);
    GOOD(c->ops->barrier(c, T));
    if (c->rank == 0)
        GOOD(c->ops->send(c, host, 5, 2, T));
    if (c->rank == 2)
        GOOD(c->ops->recv(c, host, 5, 0, T));
    CHECK(host[0] == (c->rank == 2 ? 1 : c->rank + 1));
    return 0;
}

static void both_kinds_of_memory_are_carried(void **state)
{
    (void)state;
    run(moves_body);
    assert_int_equal(left(), 0);
}

static int held_body(ferry__comm *c)
{
    int64_t began = ferry__now_ns();
    char bytes[16] = {1};

    CHECK(c->ops->broadcast(c, bytes, 16, 0, 200) < 0);
    CHECK(strstr(ferry_last_error(), "within 200 ms") ||
          strstr(ferry_last_error(), "failed before"));
    CHECK(ferry__now_ns() - began < INT64_C(4000000000));
    CHECK(c->ops->barrier(c, T) < 0);
    return 0;
}

static pthread_barrier_t together;

/* The device finishes nothing from some time on. */
static int late_body(ferry__comm *c)
{
    GOOD(c->ops->barrier(c, T));
    pthread_barrier_wait(&together);
    hold(1);
    return held_body(c);
}

static void a_device_that_stops_ends_the_call(void **state)
{
    (void)state;
    pthread_barrier_init(&together, NULL, WORLD);
    run(late_body);
    pthread_barrier_destroy(&together);
    hold(0);
    /* Later groups are whole again. */
    run(moves_body);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(both_kinds_of_memory_are_carried),
        cmocka_unit_test(a_device_that_stops_ends_the_call),
    };

    look_up();
    ferry__config_set("cuda_library", test_module("cuda_host"));
    ferry__config_set("nccl_library", test_module("nccl_device"));
    if (ferry__provider_find("nccl", &provider) < 0 ||
        provider->available() < 0) {
        fprintf(stderr, "%s\n", ferry_last_error());
        return 1;
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
