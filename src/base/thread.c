/* SPDX-License-Identifier: Apache-2.0 */
/* Threads, monotonic condition variables and shared-memory waits.
 * Invariant: no wait here is unbounded; no signal of the program's is ever
 * delivered to a thread of the library. */
#include "base/thread.h"

#include "base/alloc.h"
#include "base/clock.h"

#include <errno.h>
#include <linux/futex.h>
#include <signal.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define NAME_BYTES   16
#define FUTEX_MAX_MS INT64_C(60000)

typedef struct start {
    void *(*run)(void *);
    void *arg;
    char name[NAME_BYTES];
} start;

static void *enter(void *arg)
{
    start *s = arg;
    void *(*run)(void *) = s->run;
    void *run_arg = s->arg;

    pthread_setname_np(pthread_self(), s->name);
    ferry__free(s);
    return run(run_arg);
}

ferry_status ferry__thread_start(pthread_t *out_thread, const char *name,
                                 void *(*run)(void *), void *arg)
{
    sigset_t all, old;
    pthread_t thread;
    start *s = ferry__alloc(sizeof(*s));
    int rc = EAGAIN;

    if (!s)
        return FERRY_ENOMEM;
    s->run = run;
    s->arg = arg;
    memcpy(s->name, name, strnlen(name, NAME_BYTES - 1));
    /* The mask is inherited, so that no signal can slip in before the new
     * thread could block it itself. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    if (!ferry__fault_hit(FERRY__FAULT_THREAD))
        rc = pthread_create(&thread, NULL, enter, s);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (rc != 0) {
        ferry__free(s);
        return ferry_fail(FERRY_ENOMEM, "thread %s: %s", name, strerror(rc));
    }
    *out_thread = thread;
    return FERRY_OK;
}

ferry_status ferry__cond_init(pthread_cond_t *cond)
{
    pthread_condattr_t attr;
    int rc = pthread_condattr_init(&attr);

    if (rc == 0) {
        pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
        rc = pthread_cond_init(cond, &attr);
        pthread_condattr_destroy(&attr);
    }
    if (rc != 0)
        return ferry_fail(FERRY_ENOMEM, "condition variable: %s", strerror(rc));
    return FERRY_OK;
}

int ferry__cond_wait_until(pthread_cond_t *cond, pthread_mutex_t *mutex,
                           int64_t at_ns)
{
    struct timespec until = ferry__timespec_at(at_ns < 0 ? 0 : at_ns);

    return pthread_cond_timedwait(cond, mutex, &until) != ETIMEDOUT;
}

bool ferry__mutex_lock_until(pthread_mutex_t *mutex, int64_t at_ns)
{
    while (pthread_mutex_trylock(mutex) != 0) {
        if (ferry__now_ns() >= at_ns)
            return false;
        ferry__sleep_ms(2);
    }
    return true;
}

void ferry__futex_wait(_Atomic uint32_t *word, uint32_t seen,
                       int64_t timeout_ms)
{
    struct timespec t;

    if (timeout_ms <= 0)
        return;
    /* Callers loop, so a longer wait may end early. */
    if (timeout_ms > FUTEX_MAX_MS)
        timeout_ms = FUTEX_MAX_MS;
    t = ferry__timespec_at(timeout_ms * 1000000);
    syscall(SYS_futex, word, FUTEX_WAIT, seen, &t, NULL, 0);
}

void ferry__futex_wake_all(_Atomic uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}
