/* SPDX-License-Identifier: Apache-2.0 */
/* Pause and resume. The flag that refuses or queues new requests is set
 * before anything is drained, so nothing slips in between. */
#include "base/alloc.h"
#include "base/thread.h"
#include "serve/server.h"

#define DRAIN_TIMEOUT_MS 3600000

static void gates(ferry__server *s, bool close)
{
    for (int32_t i = 0; i < s->options->dp_size; i++) {
        if (close)
            ferry__replica_gate_close(&s->replicas[i]);
        else
            ferry__replica_gate_open(&s->replicas[i]);
    }
}

static ferry_status wait_idle(ferry__server *s, int64_t timeout_ms)
{
    ferry__deadline d = ferry__deadline_in(timeout_ms);
    int32_t running, waiting;

    for (;;) {
        bool stopping;

        ferry__scheduler_load(s, &running, &waiting);
        if (running + waiting == 0)
            return FERRY_OK;
        pthread_mutex_lock(&s->lock);
        stopping = s->stopping;
        pthread_mutex_unlock(&s->lock);
        if (stopping || ferry__deadline_passed(&d))
            return ferry_fail(FERRY_ETIMEOUT,
                              "pause: running=%d waiting=%d after %lld ms",
                              running, waiting, (long long)timeout_ms);
        ferry__sleep_ms(5);
    }
}

ferry_status ferry__pause_set(ferry__server *s, ferry__pause mode,
                              bool clear_cache)
{
    ferry__pause old;
    ferry_status st = FERRY_OK;

    pthread_mutex_lock(&s->lock);
    old = s->paused;
    s->paused = mode;
    pthread_mutex_unlock(&s->lock);
    /* A kept pause keeps the gates closed; leaving it must open them or the
     * requests that it froze could never end. */
    if (old == FERRY__PAUSE_KEEP && mode != FERRY__PAUSE_KEEP)
        gates(s, false);
    if (mode == FERRY__PAUSE_KEEP && old != FERRY__PAUSE_KEEP)
        gates(s, true);
    if (mode == FERRY__PAUSE_ABORT) {
        ferry__scheduler_abort(s, NULL);
        st = wait_idle(s, 120000);
    } else if (mode == FERRY__PAUSE_WAIT) {
        st = wait_idle(s, DRAIN_TIMEOUT_MS);
    }
    if (clear_cache)
        ferry__scheduler_forget(s);
    return st;
}

void ferry__pause_resume(ferry__server *s)
{
    ferry__pause old;

    pthread_mutex_lock(&s->lock);
    old = s->paused;
    s->paused = FERRY__PAUSE_NONE;
    pthread_mutex_unlock(&s->lock);
    if (old == FERRY__PAUSE_KEEP)
        gates(s, false);
}
