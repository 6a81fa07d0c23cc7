/* SPDX-License-Identifier: Apache-2.0 */
/* Threads, monotonic condition variables and shared-memory waits.
 * Invariant: no wait here is unbounded. */
#ifndef FERRY_BASE_THREAD_H
#define FERRY_BASE_THREAD_H

#include <ferry/status.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

/* All signals are blocked in threads of the library. `name` <= 15 bytes. */
ferry_status ferry__thread_start(pthread_t *out_thread, const char *name,
                                 void *(*run)(void *), void *arg);

ferry_status ferry__cond_init(pthread_cond_t *cond); /* CLOCK_MONOTONIC */
/* Waits at most until the monotonic time; false on time-out. */
int ferry__cond_wait_until(pthread_cond_t *cond, pthread_mutex_t *mutex,
                           int64_t at_ns);

/* Takes the mutex, at most until the monotonic time; false when it passed.
 * Looks every few milliseconds: for rare waits behind long calls, which the
 * thread sanitizer of gcc 12 must be able to follow. */
bool ferry__mutex_lock_until(pthread_mutex_t *mutex, int64_t at_ns);

/* Waits in shared memory (between processes) while *word == seen, at most
 * timeout_ms; may return early. */
void ferry__futex_wait(_Atomic uint32_t *word, uint32_t seen,
                       int64_t timeout_ms);
void ferry__futex_wake_all(_Atomic uint32_t *word);

#endif
