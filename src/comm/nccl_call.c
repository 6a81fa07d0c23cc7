/* SPDX-License-Identifier: Apache-2.0 */
/* How a caller gives the communicator's thread a job and waits for it.
 * Invariant: a caller waits no longer than its bound and a short grace, and
 * its first failure ends the group. */
#include "comm/nccl_comm.h"

#include "base/log.h"
#include "base/thread.h"

#include <stdio.h>

#define SLICE_NS INT64_C(100000000)
/* How long a call that was ended is waited for. */
#define GRACE_NS INT64_C(2000000000)
/* A call is given the time that a link of 8 MiB/s would need on top of the
 * bound on silence, where the library does not tell how far it is. */
#define BYTES_PER_MS 8192

/* Whether only the job's peer may keep a call waiting. */
static bool is_of_one(const nccl__comm *c, const nccl__job *job)
{
    return job->kind == NCCL__SEND || job->kind == NCCL__RECV ||
           (job->kind == NCCL__BROADCAST && job->peer != c->base.rank);
}

/* NCCL tells neither what a call waits for nor when: it is all of the call. */
static void tell_wait(nccl__comm *c, const nccl__job *job, int64_t from_ns)
{
    int32_t peer = is_of_one(c, job)         ? job->peer
                   : c->base.world_size == 2 ? 1 - c->base.rank
                                             : -1;

    ferry__comm_waited(&c->base, peer, "", from_ns);
}

/* Who may keep a call waiting: "0, 2". */
static const char *waited_for(const nccl__comm *c, const nccl__job *job,
                              char *out, size_t size_bytes)
{
    bool one = is_of_one(c, job);
    size_t n = 0;

    out[0] = '\0';
    for (int32_t r = 0; r < c->base.world_size && n + 16 < size_bytes; r++) {
        if (r != c->base.rank && (!one || r == job->peer))
            n += (size_t)snprintf(out + n, size_bytes - n, "%s%d",
                                  n ? ", " : "", r);
    }
    return out;
}

static ferry_status too_late(const nccl__comm *c, const nccl__job *job,
                             ferry_status status, int64_t bound_ms)
{
    char ranks[128];

    return ferry_fail(status,
                      "%s: not all ranks came within %lld ms; rank %d of %d "
                      "waited for rank %s",
                      job->name, (long long)bound_ms, c->base.rank,
                      c->base.world_size,
                      waited_for(c, job, ranks, sizeof(ranks)));
}

/* Under the lock, which it lets go. */
static ferry_status ask(nccl__comm *c, const nccl__job *job)
{
    ferry_status status = FERRY_OK;

    if (!c->base.check)
        return FERRY_OK;
    pthread_mutex_unlock(&c->lock);
    status = c->base.check(c->base.check_arg, job->name);
    pthread_mutex_lock(&c->lock);
    return status;
}

static uint64_t size_of(const nccl__job *job)
{
    return job->in_bytes > job->out_bytes ? job->in_bytes : job->out_bytes;
}

/* NCCL does not tell how far a call is: it is taken to be as far as a link of
 * 8 MiB/s would be, and no further than its end. Under the lock. */
static uint64_t moved_of(nccl__comm *c)
{
    uint64_t assumed;

    if (c->lib->moved) {
        c->moved = c->comm ? c->lib->moved(c->comm) : c->moved;
        return c->moved;
    }
    if (c->state == NCCL__IDLE)
        return c->moved;
    if (c->state == NCCL__DONE)
        return c->moved + size_of(&c->job);
    assumed =
        (uint64_t)(ferry__now_ns() - c->job_began_ns) / 1000000 * BYTES_PER_MS;
    return c->moved + (assumed < size_of(&c->job) ? assumed : size_of(&c->job));
}

uint64_t ferry__nccl_comm_moved(nccl__comm *c)
{
    uint64_t moved;

    pthread_mutex_lock(&c->lock);
    moved = moved_of(c);
    pthread_mutex_unlock(&c->lock);
    return moved;
}

/* How long a call may take, and be silent: only where the library tells. */
typedef struct patience {
    ferry__deadline until;
    ferry_status late;
    int64_t silence_ms; /* 0: the whole is bounded alone */
} patience;

/* Until the job is done or was ended by an abort. Under the lock. */
static ferry_status await(nccl__comm *c, const nccl__job *job,
                          const patience *p)
{
    ferry__deadline quiet = ferry__deadline_in(p->silence_ms);
    uint64_t seen = moved_of(c);

    while (c->state != NCCL__DONE && !c->stop) {
        int64_t at = ferry__now_ns() + SLICE_NS;

        if (ferry__deadline_passed(&p->until))
            return too_late(c, job, p->late, p->until.bound_ms);
        if (p->silence_ms > 0 && ferry__deadline_passed(&quiet))
            return too_late(c, job, FERRY_ENOPROGRESS, p->silence_ms);
        if (at > p->until.at_ns)
            at = p->until.at_ns;
        if (p->silence_ms > 0 && at > quiet.at_ns)
            at = quiet.at_ns;
        ferry__cond_wait_until(&c->changed, &c->lock, at);
        if (c->state == NCCL__DONE || ferry__now_ns() < at)
            continue;
        if (moved_of(c) != seen)
            quiet = ferry__deadline_in(p->silence_ms);
        seen = moved_of(c);
        FERRY_TRY(ask(c, job));
    }
    return FERRY_OK;
}

/* A call of NCCL that was ended comes back soon; a meeting cannot be ended.
 * Under the lock. */
static void await_end(nccl__comm *c, const nccl__job *job)
{
    int64_t until = ferry__now_ns() + GRACE_NS;

    ferry__nccl_comm_stop(c);
    while (job->kind != NCCL__INIT && c->state != NCCL__DONE &&
           ferry__now_ns() < until)
        ferry__cond_wait_until(&c->changed, &c->lock, until);
    if (c->state != NCCL__DONE)
        ferry__log(FERRY_LOG_WARN,
                   "nccl %s of rank %d: the call does not return and is left "
                   "to its thread",
                   job->name, c->base.rank);
}

static ferry_status finish(nccl__comm *c, const nccl__job *job,
                           ferry_status status)
{
    if (status < 0) {
        ferry__nccl_comm_fail(c, status, ferry_last_error());
        await_end(c, job);
    } else if (c->state != NCCL__DONE) {
        await_end(c, job); /* aborted meanwhile: `failed` says by whom */
    } else if (c->result < 0) {
        ferry__nccl_comm_fail(c, c->result, c->line);
        ferry__nccl_comm_stop(c);
    }
    if (c->state == NCCL__DONE)
        c->state = NCCL__IDLE;
    return c->failed;
}

static ferry_status give(nccl__comm *c, const nccl__job *job, const patience *p)
{
    int64_t from_ns = ferry__comm_wait_ns(&c->base);
    char line[sizeof(c->failed_line)];
    nccl__job own = *job;
    ferry_status status;

    pthread_mutex_lock(&c->lock);
    status = c->failed;
    if (status == FERRY_OK) {
        status = ferry__nccl_copy_in(c, &own);
        if (status < 0) {
            ferry__nccl_comm_fail(c, status, ferry_last_error());
            ferry__nccl_comm_stop(c);
        }
    }
    if (status == FERRY_OK) {
        c->job = own;
        c->job_began_ns = ferry__now_ns();
        c->state = NCCL__GIVEN;
        pthread_cond_broadcast(&c->changed);
        status = finish(c, &own, await(c, &own, p));
    }
    if (status == FERRY_OK) {
        ferry__nccl_copy_out(c, &own, job);
        c->moved += c->lib->moved ? 0 : size_of(job);
    }
    snprintf(line, sizeof(line), "%s", c->failed_line);
    pthread_mutex_unlock(&c->lock);
    tell_wait(c, job, from_ns);
    return status < 0 ? ferry__fail_line(status, line) : FERRY_OK;
}

ferry_status ferry__nccl_comm_call_until(nccl__comm *c, const nccl__job *job,
                                         const ferry__deadline *until)
{
    const patience p = {.until = *until, .late = FERRY_ETIMEOUT};

    return give(c, job, &p);
}

ferry_status ferry__nccl_comm_call(nccl__comm *c, const nccl__job *job,
                                   int64_t timeout_ms)
{
    int64_t more_ms = (int64_t)(size_of(job) / BYTES_PER_MS);
    bool silent = !c->lib->moved && c->no_progress_ms > 0 &&
                  c->no_progress_ms < timeout_ms - more_ms;
    const patience p = {.until = ferry__deadline_in(
                            silent ? c->no_progress_ms + more_ms : timeout_ms),
                        .late = silent ? FERRY_ENOPROGRESS : FERRY_ETIMEOUT,
                        .silence_ms = c->lib->moved ? c->no_progress_ms : 0};

    if (timeout_ms <= 0)
        return ferry_fail(FERRY_EINVAL,
                          "%s: timeout must be above 0 ms, got %lld", job->name,
                          (long long)timeout_ms);
    return give(c, job, &p);
}
