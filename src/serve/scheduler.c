/* SPDX-License-Identifier: Apache-2.0 */
/* Continuous batching: one thread a replica composes steps of what is active.
 * A step holds at most STEP_TOKENS prompt tokens, so that a long prompt does
 * not keep the others waiting. Invariant: a request is in a queue, in a slot,
 * or done; never in two of these. */
#include "base/alloc.h"
#include "base/log.h"
#include "base/socket.h"
#include "base/thread.h"
#include "serve/server.h"

#include <stdio.h>
#include <string.h>

#define STEP_TOKENS          512
#define STEP_TIMEOUT_MS      90000
#define RESTART_PAUSE_MS     200 /* doubled by each failed start, up to */
#define RESTART_PAUSE_MAX_MS 5000

/* One step: the frame, and which slots sample in it, in order. */
typedef struct step_plan {
    ferry__str frame;
    int32_t n_seqs;
    int32_t *slots;   /* of the sequences, in frame order */
    int32_t *counts;  /* tokens of each */
    uint8_t *samples; /* whether each gives a token */
} step_plan;

static void plan_free(step_plan *p)
{
    ferry__str_free(&p->frame);
    ferry__free(p->slots);
    ferry__free(p->counts);
    ferry__free(p->samples);
}

static ferry_status plan_init(step_plan *p, int32_t max_seqs)
{
    p->slots = ferry__alloc_array((size_t)max_seqs, sizeof *p->slots);
    p->counts = ferry__alloc_array((size_t)max_seqs, sizeof *p->counts);
    p->samples = ferry__alloc_array((size_t)max_seqs, sizeof *p->samples);
    return p->samples == NULL || p->counts == NULL || p->slots == NULL
               ? FERRY_ENOMEM
               : FERRY_OK;
}

/* Moves waiting requests into free slots. */
static void admit(ferry__replica *r)
{
    for (int32_t i = 0; i < r->server->options->max_seqs && r->queue != NULL;
         i++) {
        ferry__request *q = r->queue;

        if (r->active[i] != NULL)
            continue;
        r->queue = q->next;
        if (r->queue == NULL)
            r->queue_tail = &r->queue;
        q->next = NULL;
        q->slot = i;
        q->n_computed = 0;
        r->active[i] = q;
        r->n_queued--;
        r->n_active++;
    }
}

static void retire(ferry__replica *r, int32_t slot, const char *reason)
{
    ferry__request *q = r->active[slot];

    r->active[slot] = NULL;
    r->n_active--;
    ferry__request_done(q, reason);
}

static void drop_aborted(ferry__replica *r)
{
    ferry__request **link = &r->queue;

    for (int32_t i = 0; i < r->server->options->max_seqs; i++)
        if (r->active[i] != NULL && r->active[i]->abort)
            retire(r, i, "abort");
    while (*link != NULL) {
        ferry__request *q = *link;

        if (q->abort) {
            *link = q->next;
            r->n_queued--;
            ferry__request_done(q, "abort");
        } else {
            link = &q->next;
        }
    }
    r->queue_tail = link;
}

static int32_t token_at(const ferry__request *q, int32_t i)
{
    return i < q->n_prompt ? q->prompt[i] : q->tokens[i - q->n_prompt];
}

static void add_sequence(step_plan *p, const ferry__request *q, int32_t n)
{
    int32_t total = q->n_prompt + q->n_out;
    ferry__step_seq seq = {.slot = q->slot,
                           .position = q->n_computed,
                           .n_tokens = n,
                           .sample = q->n_computed + n == total,
                           .n_top = q->n_top,
                           .draw = (uint64_t)q->n_out,
                           .sampling = q->sampling};

    ferry__str_append_n(&p->frame, (const char *)&seq, sizeof seq);
    for (int32_t i = 0; i < n; i++) {
        int32_t token = token_at(q, q->n_computed + i);

        ferry__str_append_n(&p->frame, (const char *)&token, sizeof token);
    }
    p->slots[p->n_seqs] = q->slot;
    p->counts[p->n_seqs] = n;
    p->samples[p->n_seqs] = (uint8_t)(seq.sample != 0);
    p->n_seqs++;
}

static void compose(ferry__replica *r, step_plan *p)
{
    ferry__step_head head = {0, 0};
    int32_t budget = STEP_TOKENS;

    p->frame.length = 0;
    p->n_seqs = 0;
    ferry__str_append_n(&p->frame, (const char *)&head, sizeof head);
    for (int32_t i = 0; i < r->server->options->max_seqs; i++) {
        const ferry__request *q = r->active[i];
        int32_t n;

        if (q == NULL)
            continue;
        n = q->n_prompt + q->n_out - q->n_computed;
        if (n > 1) /* a prompt, or a context to compute again */
            n = n < budget ? n : budget;
        if (n < 1)
            continue; /* the budget is spent; its turn is the next step */
        if (n > 1)
            budget -= n;
        add_sequence(p, q, n);
    }
    head.n_seqs = p->n_seqs;
    if (p->frame.data != NULL)
        memcpy(p->frame.data, &head, sizeof head);
}

/* The cache of a request begins with these weights; a kept one outlives them.
 */
static void note_cache(ferry__request *q, const char *version)
{
    ferry__free(q->cache_version);
    q->cache_version = ferry__strdup(version);
    q->cache_since_ns = ferry__now_ns();
}

/* Books the tokens of a finished step. Under the replica's lock. */
static void take_tokens(ferry__replica *r, const step_plan *p,
                        const ferry__step_token *tokens, size_t n_tokens,
                        const char *version)
{
    const ferry__model_config *c = r->server->config;
    size_t k = 0;

    for (int32_t i = 0; i < p->n_seqs; i++) {
        ferry__request *q = r->active[p->slots[i]];
        ferry_status st;

        if (q == NULL)
            continue;
        if (q->n_computed == 0)
            note_cache(q, version);
        q->n_computed += p->counts[i];
        if (!p->samples[i])
            continue;
        if (k >= n_tokens)
            break;
        st =
            ferry__request_take(q, &tokens[k++], version, c->eos_ids, c->n_eos);
        if (st < 0) {
            r->active[q->slot] = NULL;
            r->n_active--;
            ferry__request_fail(q, st, ferry_last_error());
        } else if (q->finish_reason != NULL) {
            retire(r, q->slot, q->finish_reason);
        }
    }
}

/* Runs one step; called and left with the replica's lock held. */
static void run_step(ferry__replica *r, step_plan *p)
{
    void *bodies[FERRY__TP_MAX] = {0};
    size_t sizes[FERRY__TP_MAX] = {0};
    char *version;
    ferry_status st;

    r->stepping = true;
    pthread_mutex_unlock(&r->lock);
    version = ferry__server_version(r->server);
    st = version == NULL || p->frame.failed ? FERRY_ENOMEM : FERRY_OK;
    if (st == FERRY_OK)
        st = ferry__replica_exchange(r, FERRY__RANK_STEP, p->frame.data,
                                     p->frame.length, STEP_TIMEOUT_MS, bodies,
                                     sizes);
    pthread_mutex_lock(&r->lock);
    r->stepping = false;
    if (st == FERRY_OK)
        take_tokens(r, p, bodies[0], sizes[0] / sizeof(ferry__step_token),
                    version);
    else
        ferry__replica_fail_requests(r, st, ferry_last_error());
    pthread_cond_broadcast(&r->cond);
    ferry__free(version);
    for (int i = 0; i < FERRY__TP_MAX; i++)
        ferry__free(bodies[i]);
}

/* Without requests nothing is said to the ranks, so one that died is only
 * found by looking. The lock is held; only this thread replaces the sockets,
 * and looking takes nothing from them. */
static void look_for_lost(ferry__replica *r)
{
    for (int32_t i = 0; r->up && i < r->server->options->tp_size; i++) {
        char line[128];

        if (!ferry__socket_hung_up(r->ranks.step_fds[i]))
            continue;
        snprintf(line, sizeof line,
                 "replica %d rank %d (pid %d): the process is gone", r->index,
                 i, r->ranks.pids[i]);
        pthread_mutex_unlock(&r->lock);
        ferry__replica_lost(r, line);
        pthread_mutex_lock(&r->lock);
    }
}

/* The lock is held; ends early when the replica is to stop. */
static void wait_ms(ferry__replica *r, int64_t ms)
{
    ferry__deadline d = ferry__deadline_in(ms);

    while (!r->stop && !ferry__deadline_passed(&d))
        ferry__cond_wait_until(&r->cond, &r->lock, d.at_ns);
}

/* Starts the ranks again after they were lost; the lock is held. Without the
 * spawner none can be: the main thread then ends the server. */
static void restart(ferry__replica *r, int64_t *pause_ms)
{
    ferry_status st;

    wait_ms(r, *pause_ms);
    if (r->stop || ferry__socket_hung_up(r->server->spawner.fd))
        return;
    pthread_mutex_unlock(&r->lock);
    st = ferry__replica_start(r);
    if (st < 0) {
        ferry__log(FERRY_LOG_ERROR, "replica %d does not start: %s", r->index,
                   ferry_last_error());
        *pause_ms = *pause_ms * 2 < RESTART_PAUSE_MAX_MS ? *pause_ms * 2
                                                         : RESTART_PAUSE_MAX_MS;
    } else {
        ferry__log(FERRY_LOG_WARN, "replica %d is up again", r->index);
        *pause_ms = RESTART_PAUSE_MS;
    }
    pthread_mutex_lock(&r->lock);
}

void *ferry__scheduler_run(void *replica)
{
    ferry__replica *r = replica;
    step_plan p = {0};
    int64_t pause_ms = RESTART_PAUSE_MS;

    if (plan_init(&p, r->server->options->max_seqs) < 0) {
        plan_free(&p);
        return NULL;
    }
    pthread_mutex_lock(&r->lock);
    while (!r->stop) {
        if (!r->up) {
            restart(r, &pause_ms);
            continue;
        }
        drop_aborted(r);
        /* A failed update left the weights unusable: nobody waits for them,
         * since only a whole new update makes them good. */
        if (r->gates == 0 && !r->serving)
            ferry__replica_fail_requests(r, FERRY_ENOTREADY, r->reason);
        if (r->gates == 0)
            admit(r);
        if (r->gates > 0 || r->n_active == 0 || !r->serving) {
            ferry__cond_wait_until(&r->cond, &r->lock,
                                   ferry__now_ns() + 500000000);
            look_for_lost(r);
            continue;
        }
        compose(r, &p);
        run_step(r, &p);
    }
    ferry__replica_fail_requests(r, FERRY_ECANCELED, "the server is stopping");
    pthread_mutex_unlock(&r->lock);
    plan_free(&p);
    return NULL;
}

/* Requests on the replica, or -1 when it cannot take one now; the reason is
 * then in `reason`. A replica whose gate an update closed takes requests:
 * they wait and run on the new weights. */
static int32_t replica_load(ferry__replica *r, char *reason, size_t size)
{
    int32_t load = -1;

    pthread_mutex_lock(&r->lock);
    if (r->up && !r->stop && (r->serving || r->gates > 0))
        load = r->n_active + r->n_queued;
    else
        snprintf(reason, size, "%s", r->reason);
    pthread_mutex_unlock(&r->lock);
    return load;
}

ferry_status ferry__scheduler_submit(ferry__server *server,
                                     ferry__request *request)
{
    ferry__replica *best = NULL;
    int32_t least = INT32_MAX;
    char reason[512] = "no replica";

    for (int32_t i = 0; i < server->options->dp_size; i++) {
        int32_t load =
            replica_load(&server->replicas[i], reason, sizeof reason);

        if (load >= 0 && load < least) {
            least = load;
            best = &server->replicas[i];
        }
    }
    if (best == NULL)
        return ferry_fail(FERRY_ENOTREADY, "no replica is ready: %s", reason);
    pthread_mutex_lock(&best->lock);
    if (!best->up || best->stop) {
        pthread_mutex_unlock(&best->lock);
        return ferry_fail(FERRY_ENOTREADY, "replica %d just went down",
                          best->index);
    }
    *best->queue_tail = request;
    best->queue_tail = &request->next;
    best->n_queued++;
    pthread_cond_broadcast(&best->cond);
    pthread_mutex_unlock(&best->lock);
    return FERRY_OK;
}

static int32_t abort_if(ferry__request *q, const char *id)
{
    if (q == NULL || (id != NULL && strcmp(q->id, id) != 0))
        return 0;
    q->abort = true;
    return 1;
}

int32_t ferry__scheduler_abort(ferry__server *server, const char *id)
{
    int32_t n = 0;

    for (int32_t i = 0; i < server->options->dp_size; i++) {
        ferry__replica *r = &server->replicas[i];

        pthread_mutex_lock(&r->lock);
        for (int32_t k = 0; k < server->options->max_seqs; k++)
            n += abort_if(r->active[k], id);
        for (ferry__request *q = r->queue; q != NULL; q = q->next)
            n += abort_if(q, id);
        pthread_cond_broadcast(&r->cond);
        pthread_mutex_unlock(&r->lock);
    }
    return n;
}

void ferry__scheduler_load(ferry__server *server, int32_t *out_running,
                           int32_t *out_waiting)
{
    *out_running = *out_waiting = 0;
    for (int32_t i = 0; i < server->options->dp_size; i++) {
        ferry__replica *r = &server->replicas[i];

        pthread_mutex_lock(&r->lock);
        *out_running += r->n_active;
        *out_waiting += r->n_queued;
        pthread_mutex_unlock(&r->lock);
    }
}

void ferry__scheduler_forget(ferry__server *server)
{
    for (int32_t i = 0; i < server->options->dp_size; i++) {
        ferry__replica *r = &server->replicas[i];

        ferry__replica_gate_close(r);
        pthread_mutex_lock(&r->lock);
        for (int32_t k = 0; k < server->options->max_seqs; k++)
            if (r->active[k] != NULL)
                r->active[k]->n_computed = 0;
        pthread_mutex_unlock(&r->lock);
        ferry__replica_gate_open(r);
    }
}
