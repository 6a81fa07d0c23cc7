/* SPDX-License-Identifier: Apache-2.0 */
/* Tensors in memory of devices, read to the host and beside themselves. The
 * expected bytes come from index arithmetic over what was put there; the
 * device's memory cannot be read as the host's. */
#include "device/fetch.h"
#include "harness/device.h"
#include "harness/layouts.h"

#include "base/clock.h"
#include "core/copy.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static void good(ferry_status status)
{
    if (status < 0)
        fail_msg("%s: %s", ferry_status_name(status), ferry_last_error());
}

static void says(ferry_status status, ferry_status want, const char *words)
{
    if (status != want || !strstr(ferry_last_error(), words))
        fail_msg("%s: %s, not %s", ferry_status_name(status),
                 ferry_last_error(), words);
}

/* ---- tensors ---- */

static ferry_tensor put(const layout *l, int32_t ordinal)
{
    size_t size = (size_t)l->elements * ferry_dtype_bytes(l->dtype);
    ferry_tensor t = {.dtype = l->dtype,
                      .ndim = l->ndim,
                      .offset = l->offset,
                      .device = 1 + ordinal};
    unsigned char *bytes;

    t.data = device_alloc(ordinal, size);
    bytes = device_bytes(t.data);
    assert_ptr_not_equal(bytes, t.data);
    for (size_t i = 0; i < size; i++)
        bytes[i] = byte_of((int64_t)i);
    for (int32_t d = 0; d < l->ndim; d++) {
        t.shape[d] = l->shape[d];
        t.stride[d] = l->stride[d];
    }
    return t;
}

static void check(const layout *l, int64_t first, int64_t count,
                  const unsigned char *got, const char *way)
{
    int64_t elem = (int64_t)ferry_dtype_bytes(l->dtype);

    for (int64_t i = 0; i < count * elem; i++) {
        if (got[i] != expected(l, first + i / elem, i % elem))
            fail_msg("%s, %s: byte %d of element %d of %d on", l->label, way,
                     (int)(i % elem), (int)(i / elem), (int)first);
    }
}

static void pack(void *arg, const ferry_tensor *view, int64_t first,
                 int64_t count, void *out)
{
    int64_t *next = arg;

    assert_int_equal(view->device, 0);
    /* In rising order, without gaps. */
    assert_int_equal(first, *next);
    *next = first + count;
    ferry__copy_range(view, first, count, out);
}

/* Reads the tensor in stretches of `step` elements, or beside itself. */
static void read_by(ferry__fetcher *f, const layout *l, int32_t ordinal,
                    int64_t step, bool beside)
{
    size_t elem = ferry_dtype_bytes(l->dtype);
    ferry_tensor t = put(l, ordinal);
    int64_t numel = ferry_tensor_numel(&t), next = 0;
    size_t size = (size_t)(step < numel ? step : numel) * elem + 1;
    unsigned char *out = malloc(size);
    void *room = device_alloc(ordinal, size);

    good(ferry__fetch_begin(f, l->label, &t));
    for (int64_t at = 0; at < numel; at += step) {
        int64_t count = numel - at < step ? numel - at : step;

        memset(out, 0xee, size);
        if (beside) {
            good(ferry__fetch_copy(f, at, count, room));
            check(l, at, count, device_bytes(room), "beside");
        } else {
            good(ferry__fetch_pack(f, at, count, out, pack, &next));
            check(l, at, count, out, "to the host");
            assert_int_equal(out[(size_t)count * elem], 0xee);
        }
    }
    ferry__fetch_rest(f);
    device_free(ordinal, room);
    device_free(ordinal, t.data);
    free(out);
}

/* ---- layouts ---- */

static void every_layout_comes_in_its_own_order(void **state)
{
    static const int64_t steps[] = {1 << 30, 96, 32, 1};
    ferry__fetcher f = {0};

    (void)state;
    for (size_t i = 0; i < N_LAYOUTS; i++) {
        for (size_t k = 0; k < 4; k++) {
            if (steps[k] == 1 && layouts[i].elements > 3000)
                continue;
            read_by(&f, &layouts[i], (int32_t)(k % 2), steps[k], false);
            read_by(&f, &layouts[i], (int32_t)(k % 2), steps[k], true);
        }
    }
    ferry__fetch_close(&f);
    assert_int_equal(device_left(), 0);
}

/* More than the windows hold, with steps that fit no window. */
static void a_large_tensor_comes_by_windows(void **state)
{
    ferry__fetcher f = {0};

    (void)state;
    read_by(&f, &large_layouts[0], 0, 777 * 32, false);
    assert_true(f.peak_bytes <= (uint64_t)8 << 20);
    read_by(&f, &large_layouts[0], 0, 1 << 30, true);
    read_by(&f, &large_layouts[1], 1, 100000, false);
    read_by(&f, &large_layouts[2], 0, 5000000, false);
    read_by(&f, &large_layouts[2], 0, 5000000, true);
    ferry__fetch_close(&f);
    assert_int_equal(device_left(), 0);
}

/* A dense one is one copy, and one whose rows lie apart brings no gaps. */
static void layouts_cost_few_copies(void **state)
{
    static const struct {
        layout l;
        long most;
        size_t held;
    } cases[] = {
        {{"transposed", BF16, 2, {400, 600}, {1, 400}, 0, 240000}, 1, 480000},
        {{"rows apart", BF16, 2, {50, 700}, {900, 1}, 0, 45000}, 1, 70000},
        {{"every second", BF16, 1, {5000}, {2}, 0, 10000}, 1, 19998},
        {{"spread", F32, 2, {4000, 300}, {0, 1}, 0, 300}, 1, 1200},
    };
    int64_t next;

    (void)state;
    for (size_t i = 0; i < 4; i++) {
        ferry__fetcher f = {0};
        ferry_tensor t = put(&cases[i].l, 0);
        size_t size = ferry_tensor_bytes(&t);
        void *out = malloc(size);
        long before = device_copies();

        next = 0;
        good(ferry__fetch_begin(&f, "w", &t));
        good(
            ferry__fetch_pack(&f, 0, ferry_tensor_numel(&t), out, pack, &next));
        assert_in_range(device_copies() - before, 1, cases[i].most);
        assert_int_equal(f.staged_bytes, cases[i].held);
        ferry__fetch_close(&f);
        device_free(0, t.data);
        free(out);
    }
}

static void host_tensors_and_empty_ones_need_no_driver(void **state)
{
    float host[12] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, out[12] = {0};
    int64_t shape[2] = {3, 4}, empty[2] = {0, 4}, next = 0;
    long before = device_copies();
    ferry__fetcher f = {0};
    ferry_tensor t;

    (void)state;
    good(ferry_tensor_init(&t, host, F32, 2, shape));
    good(ferry_tensor_transpose(&t, 0, 1, &t));
    good(ferry__fetch_begin(&f, "w", &t));
    good(ferry__fetch_pack(&f, 0, 12, out, pack, &next));
    assert_true(out[0] == 1 && out[1] == 5 && out[11] == 12);
    good(ferry_tensor_init(&t, NULL, F32, 2, empty));
    t.device = 99;
    good(ferry__fetch_begin(&f, "w", &t));
    assert_int_equal(device_copies(), before);
    ferry__fetch_close(&f);
}

static void a_device_that_is_not_there_is_named(void **state)
{
    layout l = {"w", F32, 1, {4}, {1}, 0, 4};
    ferry_tensor t = put(&l, 0);
    ferry__fetcher f = {0};

    (void)state;
    t.device = 8;
    says(ferry__fetch_begin(&f, "model.w", &t), FERRY_EBACKEND,
         "parameter model.w in memory of device 7: cuda device 7 of 2");
    /* Memory of one device is none of another's. */
    t.device = 2;
    good(ferry__fetch_begin(&f, "model.w", &t));
    says(ferry__fetch_copy(&f, 0, 4, t.data), FERRY_EIO,
         "parameter model.w in memory of device 1: cuMemcpyAsync: "
         "CUDA_ERROR_INVALID_VALUE");
    ferry__fetch_close(&f);
    device_free(0, t.data);
    assert_int_equal(device_left(), 0);
}

static void a_copy_that_fails_is_named_and_the_next_one_works(void **state)
{
    const layout *l[] = {&layouts[3], &layouts[7]};
    unsigned char out[50 * 700 * 2];
    ferry__fetcher f = {0};
    int64_t next;

    (void)state;
    for (size_t i = 0; i < 2; i++) {
        ferry_tensor t = put(l[i], 1);
        int64_t numel = ferry_tensor_numel(&t);

        next = 0;
        device_fail(t.data);
        good(ferry__fetch_begin(&f, "model.w", &t));
        says(ferry__fetch_pack(&f, 0, numel, out, pack, &next), FERRY_EIO,
             "parameter model.w in memory of device 1: cuMemcpy");
        device_fail(NULL);
        ferry__fetch_rest(&f);
        assert_non_null(strstr(ferry_last_error(), "model.w"));
        good(ferry__fetch_begin(&f, "model.w", &t));
        good(ferry__fetch_pack(&f, 0, numel, out, pack, &next));
        check(l[i], 0, numel, out, "again");
        device_free(1, t.data);
    }
    ferry__fetch_close(&f);
    assert_int_equal(device_left(), 0);
}

static int asked;

static ferry_status cancel(void *arg, const char *what)
{
    (void)arg;
    asked++;
    return asked > 3 ? ferry_fail(FERRY_ECANCELED, "canceled while %s", what)
                     : FERRY_OK;
}

/* The device finishes nothing: the owner's word ends the wait, and memory
 * that a copy is still to write is left to it. */
static void a_device_that_stops_ends_by_the_owners_word(void **state)
{
    const layout *l[] = {&layouts[3], &layouts[7]};
    static unsigned char out[50 * 700 * 2];
    int64_t began, next = 0;

    (void)state;
    for (size_t i = 0; i < 2; i++) {
        ferry__fetcher f = {.check = cancel};
        ferry_tensor t = put(l[i], 0);

        asked = 0;
        device_hold(1);
        good(ferry__fetch_begin(&f, "model.w", &t));
        says(ferry__fetch_pack(&f, 0, ferry_tensor_numel(&t), out, pack, &next),
             FERRY_ECANCELED, "canceled while copying from a device");
        assert_int_equal(next, 0);
        began = ferry__now_ns();
        ferry__fetch_close(&f);
        assert_true(ferry__now_ns() - began < INT64_C(20000000000));
        device_hold(0);
        device_free(0, t.data);
    }
}

static void device_memory_is_none_of_the_hosts(void **state)
{
    layout l = {"w", F32, 1, {4}, {1}, 0, 4};
    ferry_tensor t = put(&l, 0);
    int status = 0;
    pid_t child = fork();

    (void)state;
    assert_true(child >= 0);
    if (child == 0) {
        signal(SIGSEGV, SIG_DFL);
        _exit(*(volatile unsigned char *)t.data == 1 ? 0 : 0);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
    device_free(0, t.data);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(device_memory_is_none_of_the_hosts),
        cmocka_unit_test(every_layout_comes_in_its_own_order),
        cmocka_unit_test(a_large_tensor_comes_by_windows),
        cmocka_unit_test(layouts_cost_few_copies),
        cmocka_unit_test(host_tensors_and_empty_ones_need_no_driver),
        cmocka_unit_test(a_device_that_is_not_there_is_named),
        cmocka_unit_test(a_copy_that_fails_is_named_and_the_next_one_works),
        /* Last: it leaves memory. */
        cmocka_unit_test(a_device_that_stops_ends_by_the_owners_word),
    };

    device_use();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
