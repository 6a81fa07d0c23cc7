/* SPDX-License-Identifier: Apache-2.0 */
/* Threads, condition variables and shared-memory waits. */
#include "base/thread.h"

#include "base/alloc.h"
#include "base/clock.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

typedef struct report {
    sigset_t mask;
    char name[16];
} report;

static void *look(void *arg)
{
    report *r = arg;

    pthread_sigmask(SIG_SETMASK, NULL, &r->mask);
    pthread_getname_np(pthread_self(), r->name, sizeof(r->name));
    return r;
}

static void threads_have_a_name_and_block_signals(void **state)
{
    report r;
    pthread_t t;
    void *result;
    sigset_t mine;

    (void)state;
    assert_int_equal(
        ferry__thread_start(&t, "a-name-that-is-too-long", look, &r), FERRY_OK);
    assert_int_equal(pthread_join(t, &result), 0);
    assert_ptr_equal(result, &r);
    assert_string_equal(r.name, "a-name-that-is-");
    assert_true(sigismember(&r.mask, SIGTERM) == 1);
    assert_true(sigismember(&r.mask, SIGALRM) == 1);
    pthread_sigmask(SIG_SETMASK, NULL, &mine);
    assert_true(sigismember(&mine, SIGTERM) == 0);
}

static void a_thread_that_cannot_start_is_an_error(void **state)
{
    pthread_t t;
    report r;

    (void)state;
    ferry__fault_arm(FERRY__FAULT_THREAD, 1);
    assert_int_equal(ferry__thread_start(&t, "ferry-x", look, &r),
                     FERRY_ENOMEM);
    assert_non_null(strstr(ferry_last_error(), "thread ferry-x"));
    ferry__fault_arm(FERRY__FAULT_ALLOC, 1);
    assert_int_equal(ferry__thread_start(&t, "ferry-x", look, &r),
                     FERRY_ENOMEM);
}

static void condition_waits_end_at_their_time(void **state)
{
    pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t cond;
    int64_t before = ferry__now_ns();
    int woken = 1;

    (void)state;
    assert_int_equal(ferry__cond_init(&cond), FERRY_OK);
    pthread_mutex_lock(&mutex);
    while (woken) /* a spurious wake-up is no time-out */
        woken = ferry__cond_wait_until(&cond, &mutex, before + 20000000);
    pthread_mutex_unlock(&mutex);
    assert_in_range(ferry__now_ns() - before, 20000000, 5000000000);
    pthread_cond_destroy(&cond);
}

static void a_mutex_is_taken_or_its_time_passes(void **state)
{
    pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    int64_t from = ferry__now_ns();

    (void)state;
    assert_true(ferry__mutex_lock_until(&mutex, from));
    assert_false(ferry__mutex_lock_until(&mutex, from + 20000000));
    assert_true(ferry__now_ns() >= from + 20000000);
    pthread_mutex_unlock(&mutex);
}

static void futex_waits_are_bounded_and_wake_between_processes(void **state)
{
    _Atomic uint32_t *word = mmap(NULL, 4096, PROT_READ | PROT_WRITE,
                                  MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int64_t before = ferry__now_ns();
    int status;
    pid_t child;

    (void)state;
    assert_true(word != MAP_FAILED);
    ferry__futex_wait(word, 0, 20);
    assert_true(ferry__now_ns() - before >= 15000000);
    before = ferry__now_ns();
    ferry__futex_wait(word, 1, 5000); /* differs already */
    ferry__futex_wait(word, 0, 0);
    ferry__futex_wait(word, 0, -1);
    assert_true(ferry__now_ns() - before < 1000000000);
    child = fork();
    if (child == 0) {
        ferry__sleep_ms(30);
        atomic_store(word, 1);
        ferry__futex_wake_all(word);
        _exit(0);
    }
    before = ferry__now_ns();
    while (atomic_load(word) == 0 &&
           ferry__now_ns() - before < INT64_C(5000000000))
        ferry__futex_wait(word, 0, 4000);
    assert_int_equal(atomic_load(word), 1);
    assert_true(ferry__now_ns() - before < 3000000000);
    assert_int_equal(waitpid(child, &status, 0), child);
    munmap((void *)word, 4096);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(threads_have_a_name_and_block_signals),
        cmocka_unit_test(a_thread_that_cannot_start_is_an_error),
        cmocka_unit_test(condition_waits_end_at_their_time),
        cmocka_unit_test(a_mutex_is_taken_or_its_time_passes),
        cmocka_unit_test(futex_waits_are_bounded_and_wake_between_processes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
