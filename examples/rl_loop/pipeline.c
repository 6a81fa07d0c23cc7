/* SPDX-License-Identifier: Apache-2.0 */
/* The asynchronous rollouts; see pipeline.h.
 * Invariant: a group is free, filling (its answers in flight or to be sent),
 * or full; only the thread touches a group that is filling. */
#include "pipeline.h"

#include "rollout.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define TAKE_TIMEOUT_S 60

typedef struct group {
    sample *samples;
    size_t n_sent, n_done;
    uint64_t order; /* of completion */
    enum { GROUP_FREE, GROUP_FILLING, GROUP_FULL } state;
} group;

struct pipeline {
    rollout *rollouts;
    group *groups;
    size_t n_groups, size;
    rng random;
    int32_t n_slots;
    sample *memory;
    pthread_t thread;
    bool started;
    pthread_mutex_t lock; /* all below, and the groups' states */
    pthread_cond_t changed;
    bool stop;
    uint64_t n_full; /* ever completed */
    ferry_status status;
    char line[512];
};

static group *filling_group(pipeline *p)
{
    for (size_t i = 0; i < p->n_groups; i++)
        if (p->groups[i].state == GROUP_FILLING &&
            p->groups[i].n_sent < p->size)
            return &p->groups[i];
    return NULL;
}

/* A new prompt for a group that was taken. Under the lock. */
static group *fresh_group(pipeline *p)
{
    for (size_t i = 0; i < p->n_groups; i++) {
        group *g = &p->groups[i];

        if (g->state != GROUP_FREE)
            continue;
        memset(g->samples, 0, p->size * sizeof *g->samples);
        task_prompt(&p->random, g->samples[0].prompt);
        for (size_t k = 0; k < p->size; k++) {
            memcpy(g->samples[k].prompt, g->samples[0].prompt,
                   sizeof g->samples[0].prompt);
            g->samples[k].seed = rng_next(&p->random);
        }
        g->n_sent = g->n_done = 0;
        g->state = GROUP_FILLING;
        return g;
    }
    return NULL;
}

static ferry_status send_more(pipeline *p)
{
    while (rollout_in_flight(p->rollouts) < p->n_slots) {
        group *g;

        pthread_mutex_lock(&p->lock);
        g = filling_group(p);
        if (g == NULL)
            g = fresh_group(p);
        pthread_mutex_unlock(&p->lock);
        if (g == NULL)
            return FERRY_OK;
        FERRY_TRY(rollout_send(p->rollouts, &g->samples[g->n_sent++]));
    }
    return FERRY_OK;
}

static void book(pipeline *p, const sample *s)
{
    group *g = &p->groups[(size_t)(s - p->memory) / p->size];

    pthread_mutex_lock(&p->lock);
    if (++g->n_done == p->size) {
        g->state = GROUP_FULL;
        g->order = p->n_full++;
        pthread_cond_broadcast(&p->changed);
    }
    pthread_mutex_unlock(&p->lock);
}

static bool stopping(pipeline *p)
{
    bool stop;

    pthread_mutex_lock(&p->lock);
    stop = p->stop;
    pthread_mutex_unlock(&p->lock);
    return stop;
}

static void *run(void *arg)
{
    pipeline *p = arg;
    ferry_status st = FERRY_OK;

    while (st == FERRY_OK && !stopping(p)) {
        sample *done = NULL;

        st = send_more(p);
        if (st == FERRY_OK)
            st = rollout_wait(p->rollouts, 20, &done);
        if (done != NULL)
            book(p, done);
    }
    pthread_mutex_lock(&p->lock);
    p->status = st;
    if (st < 0)
        strncpy(p->line, ferry_last_error(), sizeof p->line - 1);
    pthread_cond_broadcast(&p->changed);
    pthread_mutex_unlock(&p->lock);
    return NULL;
}

ferry_status pipeline_create(const char *url, int32_t n_slots, size_t n_groups,
                             size_t size, uint64_t seed, pipeline **out)
{
    pipeline *p = calloc(1, sizeof *p);
    ferry_status st = FERRY_OK;

    if (p == NULL)
        return ferry_fail(FERRY_ENOMEM, "pipeline: out of memory");
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->changed, NULL);
    p->n_groups = n_groups;
    p->size = size;
    p->n_slots = n_slots;
    p->random.state = seed;
    p->groups = calloc(n_groups, sizeof *p->groups);
    p->memory = calloc(n_groups * size, sizeof *p->memory);
    if (p->groups == NULL || p->memory == NULL)
        st = ferry_fail(FERRY_ENOMEM, "pipeline: out of memory");
    for (size_t i = 0; st == FERRY_OK && i < n_groups; i++)
        p->groups[i].samples = p->memory + i * size;
    if (st == FERRY_OK)
        st = rollout_create(url, n_slots, &p->rollouts);
    if (st == FERRY_OK && pthread_create(&p->thread, NULL, run, p) != 0)
        st = ferry_fail(FERRY_ENOMEM, "pipeline: no thread");
    if (st < 0) {
        pipeline_destroy(&p);
        return st;
    }
    p->started = true;
    *out = p;
    return FERRY_OK;
}

void pipeline_destroy(pipeline **handle)
{
    pipeline *p = *handle;

    if (p == NULL)
        return;
    if (p->started) {
        pthread_mutex_lock(&p->lock);
        p->stop = true;
        pthread_mutex_unlock(&p->lock);
        pthread_join(p->thread, NULL);
    }
    rollout_destroy(&p->rollouts);
    pthread_cond_destroy(&p->changed);
    pthread_mutex_destroy(&p->lock);
    free(p->groups);
    free(p->memory);
    free(p);
    *handle = NULL;
}

static group *oldest_full(pipeline *p)
{
    group *best = NULL;

    for (size_t i = 0; i < p->n_groups; i++)
        if (p->groups[i].state == GROUP_FULL &&
            (best == NULL || p->groups[i].order < best->order))
            best = &p->groups[i];
    return best;
}

ferry_status pipeline_take(pipeline *p, size_t n_groups, sample *out)
{
    struct timespec until;
    ferry_status st = FERRY_OK;

    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += TAKE_TIMEOUT_S;
    pthread_mutex_lock(&p->lock);
    for (size_t n = 0; n < n_groups && st == FERRY_OK;) {
        group *g = oldest_full(p);

        if (g != NULL) {
            memcpy(out + n * p->size, g->samples, p->size * sizeof *out);
            g->state = GROUP_FREE;
            n++;
        } else if (p->status < 0) {
            st = ferry_fail(p->status, "%s", p->line);
        } else if (pthread_cond_timedwait(&p->changed, &p->lock, &until)) {
            st = ferry_fail(FERRY_ETIMEOUT, "no rollouts within %d s",
                            TAKE_TIMEOUT_S);
        }
    }
    pthread_mutex_unlock(&p->lock);
    return st;
}
