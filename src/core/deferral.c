/* SPDX-License-Identifier: Apache-2.0 */
/* Conversions on background threads; see deferral.h. */
#include "core/deferral.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "base/thread.h"

#include <stdbool.h>

#define SLICE_NS INT64_C(100000000)

typedef struct job {
    ferry__copy_op op;
    void *dst, *buffer;
} job;

struct ferry__deferral {
    ferry__spans *spans;
    int32_t n_threads, n_started;
    pthread_t threads[FERRY__DEFERRAL_MAX];
    size_t n_buffers;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    /* under the lock */
    void **idle; /* buffers that are free */
    size_t n_idle;
    job *queue; /* ring of n_buffers */
    size_t head, n_queued, n_running;
    bool stop;
};

ferry_status ferry__deferral_create(int32_t n_threads, ferry__spans *spans,
                                    ferry__deferral **out)
{
    ferry__deferral *d;

    if (n_threads < 1 || n_threads > FERRY__DEFERRAL_MAX)
        return ferry_fail(FERRY_EINVAL,
                          "defer_threads is %d, possible are 1 "
                          "to %d",
                          (int)n_threads, FERRY__DEFERRAL_MAX);
    d = ferry__alloc(sizeof(*d));
    if (d == NULL)
        return FERRY_ENOMEM;
    d->spans = spans;
    d->n_threads = n_threads;
    d->n_buffers = 2 * (size_t)n_threads + 2;
    pthread_mutex_init(&d->lock, NULL);
    d->idle = ferry__alloc_array(d->n_buffers, sizeof(*d->idle));
    d->queue = ferry__alloc_array(d->n_buffers, sizeof(*d->queue));
    if (d->idle == NULL || d->queue == NULL ||
        ferry__cond_init(&d->changed) < 0) {
        pthread_mutex_destroy(&d->lock);
        ferry__free(d->idle);
        ferry__free(d->queue);
        ferry__free(d);
        return FERRY_ENOMEM;
    }
    *out = d;
    return FERRY_OK;
}

size_t ferry__deferral_bytes(const ferry__deferral *d)
{
    return d->n_buffers * FERRY__DEFERRAL_PIECE;
}

/* Takes and runs one job. Called and returns with the lock held. */
static void run_one(ferry__deferral *d)
{
    job j = d->queue[d->head];
    int64_t from_ns;

    d->head = (d->head + 1) % d->n_buffers;
    d->n_queued--;
    d->n_running++;
    pthread_mutex_unlock(&d->lock);
    from_ns = ferry__now_ns();
    ferry__copy_run(&j.op, j.dst, j.buffer, NULL);
    ferry__spans_add(d->spans, FERRY__SPAN_QUANTISE, from_ns);
    pthread_mutex_lock(&d->lock);
    d->n_running--;
    d->idle[d->n_idle++] = j.buffer;
    pthread_cond_broadcast(&d->changed);
}

static void wait_changed(ferry__deferral *d)
{
    ferry__cond_wait_until(&d->changed, &d->lock, ferry__now_ns() + SLICE_NS);
}

static void *work(void *arg)
{
    ferry__deferral *d = arg;

    pthread_mutex_lock(&d->lock);
    while (!d->stop) {
        if (d->n_queued > 0)
            run_one(d);
        else
            wait_changed(d);
    }
    pthread_mutex_unlock(&d->lock);
    return NULL;
}

ferry_status ferry__deferral_lend(ferry__deferral *d, void *memory)
{
    while (d->n_started < d->n_threads) {
        FERRY_TRY(ferry__thread_start(&d->threads[d->n_started], "ferry-defer",
                                      work, d));
        d->n_started++;
    }
    pthread_mutex_lock(&d->lock);
    for (size_t i = 0; i < d->n_buffers; i++)
        d->idle[i] = (char *)memory + i * FERRY__DEFERRAL_PIECE;
    d->n_idle = d->n_buffers;
    pthread_mutex_unlock(&d->lock);
    return FERRY_OK;
}

void *ferry__deferral_acquire(ferry__deferral *d)
{
    void *buffer;

    pthread_mutex_lock(&d->lock);
    while (d->n_idle == 0)
        wait_changed(d);
    buffer = d->idle[--d->n_idle];
    pthread_mutex_unlock(&d->lock);
    return buffer;
}

void ferry__deferral_submit(ferry__deferral *d, const ferry__copy_op *op,
                            void *dst, void *buffer)
{
    job j = {*op, dst, buffer};

    pthread_mutex_lock(&d->lock);
    d->queue[(d->head + d->n_queued++) % d->n_buffers] = j;
    pthread_cond_broadcast(&d->changed);
    pthread_mutex_unlock(&d->lock);
}

void ferry__deferral_drain(ferry__deferral *d)
{
    pthread_mutex_lock(&d->lock);
    /* Who waits may as well help. */
    while (d->n_queued > 0 || d->n_running > 0) {
        if (d->n_queued > 0)
            run_one(d);
        else
            wait_changed(d);
    }
    pthread_mutex_unlock(&d->lock);
}

void ferry__deferral_discard(ferry__deferral *d)
{
    pthread_mutex_lock(&d->lock);
    d->n_queued = 0;
    while (d->n_running > 0)
        wait_changed(d);
    d->n_idle = 0;
    pthread_mutex_unlock(&d->lock);
}

void ferry__deferral_destroy(ferry__deferral **deferral)
{
    ferry__deferral *d = *deferral;

    if (d == NULL)
        return;
    ferry__deferral_discard(d);
    pthread_mutex_lock(&d->lock);
    d->stop = true;
    pthread_cond_broadcast(&d->changed);
    pthread_mutex_unlock(&d->lock);
    for (int32_t i = 0; i < d->n_started; i++)
        pthread_join(d->threads[i], NULL);
    pthread_cond_destroy(&d->changed);
    pthread_mutex_destroy(&d->lock);
    ferry__free(d->idle);
    ferry__free(d->queue);
    ferry__free(d);
    *deferral = NULL;
}
