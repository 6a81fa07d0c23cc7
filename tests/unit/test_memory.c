/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of the host and of devices behind one table; the driver's names are
 * played by tests/harness/modules/cuda_host.c. */
#include "device/memory.h"

#include "base/config.h"
#include "core/module.h"
#include "device/cuda_driver.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const char *test_module(const char *name)
{
    static char path[4096];
    const char *folder = getenv("FERRY_TEST_MODULES");

    snprintf(path, sizeof(path), "%s/%s.so", folder ? folder : "tests/modules",
             name);
    return path;
}

static int asked(const char *name)
{
    int (*question)(void);
    void *symbol;

    assert_int_equal(
        ferry__module_symbol(test_module("cuda_host"), name, &symbol), 0);
    memcpy(&question, &symbol, sizeof(symbol));
    return question();
}

static void await(const ferry__memory *m, ferry__queue *q, ferry__event *e)
{
    ferry_status status = FERRY_EBUSY;

    assert_int_equal(m->event_record(e, q), FERRY_OK);
    for (int i = 0; i < 100 && status == FERRY_EBUSY; i++)
        status = m->event_query(e);
    assert_int_equal(status, FERRY_OK);
}

/* Bytes 30 r to 30 r + 6 of the memory, which holds 13 i + 1, packed into
 * pinned memory of the host, and from there on to other rows. */
static void rows_and_pinned(const ferry__memory *m, ferry__queue *q,
                            ferry__event *e, char *memory)
{
    ferry__rows rows = {.src = memory,
                        .dst_pitch = 7,
                        .src_pitch = 30,
                        .width = 7,
                        .rows = 20,
                        .dst_is_host = true};
    unsigned char *packed, take[20 * 7];
    void *pinned = NULL;

    assert_int_equal(m->pinned_alloc(20 * 7, &pinned), FERRY_OK);
    packed = rows.dst = pinned;
    assert_int_equal(m->copy_rows(q, &rows), FERRY_OK);
    await(m, q, e);
    for (int i = 0; i < 20 * 7; i++)
        assert_int_equal(packed[i],
                         (unsigned char)((i / 7 * 30 + i % 7) * 13 + 1));
    rows.dst = memory + 700;
    rows.dst_pitch = 9;
    rows.dst_is_host = m->device == 0;
    assert_int_equal(m->copy_rows(q, &rows), FERRY_OK);
    for (int r = 0; r < 20; r++)
        assert_int_equal(m->copy(q, take + r * 7, memory + 700 + r * 9, 7),
                         FERRY_OK);
    await(m, q, e);
    assert_memory_equal(take, packed, sizeof(take));
    m->pinned_free(pinned);
    m->pinned_free(NULL);
}

/* There and back, with an event between. */
static void round_trip(const ferry__memory *m)
{
    unsigned char give[1000], take[1000] = {0};
    ferry__queue *q;
    ferry__event *e;
    void *memory;

    for (size_t i = 0; i < sizeof(give); i++)
        give[i] = (unsigned char)(i * 13 + 1);
    assert_int_equal(m->alloc(sizeof(give), &memory), FERRY_OK);
    assert_int_equal(m->queue_create(&q), FERRY_OK);
    assert_int_equal(m->event_create(&e), FERRY_OK);
    assert_int_equal(m->copy(q, memory, give, sizeof(give)), FERRY_OK);
    assert_int_equal(m->copy(q, take, memory, sizeof(take)), FERRY_OK);
    assert_int_equal(m->copy(q, NULL, NULL, 0), FERRY_OK);
    await(m, q, e);
    assert_memory_equal(give, take, sizeof(give));
    rows_and_pinned(m, q, e, memory);
    m->event_destroy(e);
    m->queue_destroy(q);
    m->free(memory);
}

static void host_memory_is_done_at_once(void **state)
{
    const ferry__memory *m = ferry__memory_host();
    ferry__queue *q;
    ferry__event *e;
    void *memory;

    (void)state;
    assert_string_equal(m->name, "host");
    assert_int_equal(m->device, 0);
    round_trip(m);
    assert_int_equal(m->queue_create(&q), FERRY_OK);
    assert_null(m->queue_handle(q));
    assert_int_equal(m->event_create(&e), FERRY_OK);
    assert_int_equal(m->event_query(e), FERRY_OK);
    assert_int_equal(m->alloc(0, &memory), FERRY_OK);
    m->free(memory);
    m->free(NULL);
    m->event_destroy(NULL);
    m->queue_destroy(NULL);
}

static void absence_says_why(const char *library, const char *why)
{
    const ferry__memory *m = NULL;
    const ferry__cuda *cuda;

    ferry__config_set("cuda_library", library);
    assert_int_equal(ferry__cuda_bind(&cuda), FERRY_EBACKEND);
    assert_non_null(strstr(ferry_last_error(), why));
    assert_int_equal(ferry__memory_cuda(0, &m), FERRY_EBACKEND);
    assert_non_null(strstr(ferry_last_error(), why));
    assert_null(m);
}

static void a_driver_that_is_not_whole_is_refused_in_words(void **state)
{
    (void)state;
    absence_says_why("libnothing_here.so.1", "libnothing_here.so.1");
    absence_says_why(test_module("nccl_short"), "no symbol cuInit");
    setenv("CUDA_HOST_DEVICES", "0", 1);
    absence_says_why(test_module("cuda_host"), "no device");
    unsetenv("CUDA_HOST_DEVICES");
}

static void device_memory_is_reached_by_its_queue(void **state)
{
    const ferry__memory *m, *again;
    const ferry__cuda *cuda;
    void *memory = NULL;
    int host = 0;

    (void)state;
    ferry__config_set("cuda_library", test_module("cuda_host"));
    assert_int_equal(ferry__memory_cuda(2, &m), FERRY_EBACKEND);
    assert_non_null(strstr(ferry_last_error(), "cuda device 2 of 2"));
    assert_int_equal(ferry__memory_cuda(-1, &m), FERRY_EBACKEND);
    for (int32_t ordinal = 0; ordinal < 2; ordinal++) {
        assert_int_equal(ferry__memory_cuda(ordinal, &m), FERRY_OK);
        assert_int_equal(ferry__memory_cuda(ordinal, &again), FERRY_OK);
        assert_ptr_equal(m, again);
        assert_string_equal(m->name, "cuda");
        assert_int_equal(m->device, 1 + ordinal);
        round_trip(m);
        assert_int_equal(m->alloc(0, &memory), FERRY_OK);
        assert_int_equal(ferry__cuda_bind(&cuda), FERRY_OK);
        assert_true(ferry__cuda_owns(cuda, memory));
        m->free(memory);
    }
    assert_false(ferry__cuda_owns(cuda, &host));
    assert_int_equal(m->alloc((size_t)1 << 41, &memory), FERRY_ENOMEM);
    assert_non_null(
        strstr(ferry_last_error(), "cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY"));
    m->free(NULL);
    m->event_destroy(NULL);
    m->queue_destroy(NULL);
    /* Nothing is left, and the thread's context is as it was. */
    assert_int_equal(asked("cuda_host_left"), 0);
    assert_int_equal(asked("cuda_host_depth"), 0);
    assert_int_equal(ferry__cuda_current(cuda), 0);
    assert_int_equal(ferry__cuda_use(1), FERRY_OK);
    assert_int_equal(ferry__cuda_current(cuda), 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(host_memory_is_done_at_once),
        cmocka_unit_test(a_driver_that_is_not_whole_is_refused_in_words),
        cmocka_unit_test(device_memory_is_reached_by_its_queue),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
