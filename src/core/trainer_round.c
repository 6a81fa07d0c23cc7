/* SPDX-License-Identifier: Apache-2.0 */
/* One send_weights: metadata, start, the engine, finish; and what a failure
 * leaves behind. Invariant: the first real error is the answer, at once, and
 * the workers were told that the round is over. */
#include "core/trainer_state.h"

#include "base/log.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* How long the failure path waits: for the other plane's own words, for a
 * canceled call to come back, for the abort to arrive. Together below the
 * second that send_weights may take beyond its deadline. */
#define GRACE_MS        400
#define CANCEL_WAIT_MS  250
#define CANCEL_SLICE_MS 25
#define ABORT_WAIT_MS   300

static double ms_since(int64_t from_ns)
{
    return (double)(ferry__now_ns() - from_ns) / 1e6;
}

static void arm_round(ferry_trainer *t, const ferry_send_options *o)
{
    const ferry_trainer_init_info *info = t->info;

    atomic_store(&t->canceled, false);
    ferry__spans_clear(&t->spans);
    pthread_mutex_lock(&t->lock);
    ferry__bounds_arm(&t->bounds,
                      info->deadline_ms > 0 ? info->deadline_ms
                                            : FERRY__DEADLINE_MS,
                      info->no_progress_ms > 0 ? info->no_progress_ms
                                               : FERRY__NO_PROGRESS_MS);
    t->bytes_sent = 0;
    pthread_mutex_unlock(&t->lock);
    memset(&t->stats, 0, sizeof(t->stats));
    t->stats.size = sizeof(t->stats);
    t->stats.round = ++t->rounds;
    t->progress = o->progress;
    t->progress_arg = o->progress_arg;
    t->passed = t->started = false;
    memset(&t->pass, 0, sizeof(t->pass));
}

/* ---- before ---- */

static ferry_status adopt_options(const ferry_send_options *options,
                                  ferry_send_options *out)
{
    memset(out, 0, sizeof(*out));
    if (options == NULL)
        return FERRY_OK;
    if (options->size < sizeof(options->size))
        return ferry_fail(FERRY_EINVAL, "send options of %zu bytes",
                          options->size);
    memcpy(out, options,
           options->size < sizeof(*out) ? options->size : sizeof(*out));
    if (out->reserved != 0)
        return ferry_fail(FERRY_EINVAL,
                          "send options: reserved is %d, must be 0",
                          out->reserved);
    return FERRY_OK;
}

static ferry_status check_payload(const ferry_trainer *t,
                                  const ferry_send_options *o)
{
    if ((t->ops->flags & FERRY_TRAINER_FULL_RESYNC) &&
        (o->payload != NULL || o->payload_count != 0))
        return ferry_fail(FERRY_EINVAL,
                          "%s weight transfer sends its source and takes no "
                          "payload, got one of %zu",
                          t->backend, o->payload_count);
    if (o->payload == NULL && o->payload_count != 0)
        return ferry_fail(FERRY_EINVAL, "payload of %zu is NULL",
                          o->payload_count);
    return FERRY_OK;
}

/* A call of an earlier round that could not be canceled must end first: the
 * client takes one at a time. */
static ferry_status await_call(ferry_trainer *t, ferry__control_call *c)
{
    while (!ferry__control_call_wait(c, 100))
        FERRY_TRY(ferry__trainer_check_bounds(
            t, "waiting for a call of an earlier round"));
    ferry__control_call_poll(c);
    return FERRY_OK;
}

/* The channel may have broken in the round that failed: the engine looks, and
 * opens it anew before the peers are told of a round. */
static ferry_status reopen(ferry_trainer *t)
{
    if (!t->is_sender || !t->failed || t->ops->init == NULL)
        return FERRY_OK;
    return t->ops->init(t->self);
}

/* Anew each round, on every rank (B1). */
static ferry_status read_metadata(ferry_trainer *t)
{
    const ferry_param_meta *params;
    size_t count;

    if (t->source.ops == NULL)
        return FERRY_OK;
    FERRY_TRY(t->source.ops->metadata(t->source.self, &params, &count));
    if (!ferry__manifest_is(&t->declared, params, count)) {
        ferry__manifest_clear(&t->declared);
        FERRY_TRY(ferry__manifest_copy(&t->declared, params, count));
    }
    t->stats.n_params = t->declared.count;
    t->stats.bytes_declared = t->declared.total_bytes;
    return FERRY_OK;
}

/* ---- the round ---- */

/* After a refusal the peers have no round of ours; after anything else they
 * may have one. */
static ferry_status start(ferry_trainer *t, bool draft)
{
    int64_t from_ns = ferry__now_ns();
    ferry_status st = ferry__trainer_call(
        t, draft ? FERRY__CALL_START_DRAFT : FERRY__CALL_START, NULL);

    t->started = st != FERRY_EORDER && st != FERRY_ENOTSUP;
    t->stats.start_ms = ms_since(from_ns);
    ferry__spans_add(&t->spans, FERRY__SPAN_START, from_ns);
    return st;
}

/* An engine that answers success has driven the pass to its end (B4) and
 * taken the result of its last call. */
static ferry_status check_sent(ferry_trainer *t)
{
    if (ferry__control_call_in_flight(t->call))
        FERRY_TRY(ferry__trainer_join(t));
    if ((t->ops->flags & FERRY_TRAINER_FULL_RESYNC) &&
        !(t->passed && t->pass.done))
        return ferry_fail(FERRY_ECOVERAGE,
                          "engine %s ended its round after %zu of %zu "
                          "parameters",
                          t->backend, t->pass.index, t->declared.count);
    return FERRY_OK;
}

static ferry_status finish(ferry_trainer *t, const char *version)
{
    int64_t from_ns = ferry__now_ns();
    ferry_status st = ferry__trainer_finish(t, version);

    t->stats.finish_ms = ms_since(from_ns);
    ferry__spans_add(&t->spans, FERRY__SPAN_FINISH, from_ns);
    return st;
}

static ferry_status run_round(ferry_trainer *t, const ferry_send_options *o)
{
    FERRY_TRY(await_call(t, t->call));
    FERRY_TRY(await_call(t, t->ending));
    FERRY_TRY(reopen(t));
    t->started = false;
    FERRY_TRY(read_metadata(t));
    if (t->is_sender) {
        FERRY_TRY(start(t, o->draft != 0));
        FERRY_TRY(ferry__trainer_learn_peers(t));
    }
    FERRY_TRY(t->ops->send(t->self, o->payload, o->payload_count));
    FERRY_TRY(check_sent(t));
    if (t->is_sender)
        FERRY_TRY(finish(t, o->weight_version));
    return FERRY_OK;
}

/* ---- failure ---- */

static bool is_peer_failure(ferry_status st)
{
    return st <= FERRY_EPEER && st >= FERRY_EROUTE && st != FERRY_ECANCELED;
}

/* When the data plane only saw its peer go away, the control plane knows why:
 * the server's own text is on its way (O-09). A cause found on this side
 * stands as it is. */
static ferry_status real_error(ferry_trainer *t, ferry_status st, char *line)
{
    ferry_status other;

    if (!is_peer_failure(st) || !ferry__control_call_in_flight(t->call))
        return st;
    if (st != FERRY_ETIMEOUT && st != FERRY_ENOPROGRESS)
        ferry__control_call_wait(t->call, GRACE_MS);
    other = ferry__control_call_peek(t->call);
    if (other >= 0 || other == FERRY_EBUSY)
        return st;
    line[0] = '\0';
    strncat(line, ferry_last_error(), FERRY__LINE_MAX - 1);
    return other;
}

/* A commit that a bound cut short says which of the servers took it: that is
 * what the caller must know. */
static void add_commit(ferry_trainer *t, bool commit, char *line)
{
    size_t length = strlen(line);

    if (ferry__control_call_poll(t->call) < 0 && commit &&
        strcmp(line, ferry_last_error()) != 0)
        snprintf(line + length, FERRY__LINE_MAX - length, "; %s",
                 ferry_last_error());
}

static void end_calls(ferry_trainer *t, char *line)
{
    bool commit = ferry__control_call_running(t->call) &&
                  ferry__control_call_kind_of(t->call) == FERRY__CALL_COMMIT;

    /* Again and again: a cancel that came before the helper thread entered
     * the client's call would be lost. */
    for (int ms = 0;
         ferry__control_call_running(t->call) && ms < CANCEL_WAIT_MS;
         ms += CANCEL_SLICE_MS) {
        ferry__control_call_cancel(t->call);
        ferry__control_call_wait(t->call, CANCEL_SLICE_MS);
    }
    add_commit(t, commit, line);
    if (!t->started)
        return;
    if (ferry__control_call_begin(t->ending, FERRY__CALL_ABORT, NULL) < 0 ||
        !ferry__control_call_wait(t->ending, ABORT_WAIT_MS))
        return;
    if (ferry__control_call_poll(t->ending) < 0)
        ferry__log(FERRY_LOG_INFO, "the round was not aborted: %s",
                   ferry_last_error());
}

ferry_status ferry__trainer_fail(ferry_trainer *t, ferry_status st, char *line)
{
    line[0] = '\0';
    strncat(line, ferry_last_error(), FERRY__LINE_MAX - 1);
    ferry__pass_end(&t->pass);
    if (!t->is_sender || t->ending == NULL)
        return st;
    st = real_error(t, st, line);
    /* An init that was refused beside another trainer's round must not end
     * that one. */
    if (st == FERRY_EORDER &&
        ferry__control_call_kind_of(t->call) == FERRY__CALL_INIT)
        t->started = false;
    end_calls(t, line);
    return st;
}

static void fill_stats(ferry_trainer *t, ferry_round_stats *out)
{
    size_t size;

    pthread_mutex_lock(&t->lock);
    t->stats.bytes_sent = t->bytes_sent;
    pthread_mutex_unlock(&t->lock);
    t->stats.gather_ms += t->pass.gather_ms;
    if (out == NULL || out->size < sizeof(out->size))
        return;
    size = out->size < sizeof(t->stats) ? out->size : sizeof(t->stats);
    memcpy((char *)out + sizeof(out->size),
           (const char *)&t->stats + sizeof(out->size),
           size - sizeof(out->size));
}

static ferry_status send_round(ferry_trainer *t,
                               const ferry_send_options *options)
{
    int64_t from_ns = ferry__now_ns();
    char line[FERRY__LINE_MAX];
    ferry_send_options o;
    ferry_status st;

    FERRY_TRY(adopt_options(options, &o));
    FERRY_TRY(check_payload(t, &o));
    if ((t->ops->flags & FERRY_TRAINER_DELTA) && o.payload_count == 0)
        return FERRY_OK; /* an empty list is a no-op (D6) */
    arm_round(t, &o);
    st = run_round(t, &o);
    if (st < 0)
        st = ferry__trainer_fail(t, st, line);
    t->failed = st < 0;
    ferry__pass_end(&t->pass);
    if (t->ops->round_end != NULL)
        t->ops->round_end(t->self, st);
    t->stats.total_ms = ms_since(from_ns);
    fill_stats(t, o.stats);
    return st < 0 ? ferry__fail_line(st, line) : FERRY_OK;
}

ferry_status ferry_trainer_send_weights(ferry_trainer *t,
                                        const ferry_send_options *options)
{
    ferry_status st;

    FERRY__NEED_AS(t, "trainer");
    if (t->pid != getpid())
        return ferry_fail(FERRY_ENOTSUP,
                          "a trainer cannot be used in a forked child");
    if (atomic_exchange(&t->sending, true))
        return ferry_fail(FERRY_EBUSY, "another send_weights is running");
    st = send_round(t, options);
    atomic_store(&t->sending, false);
    return st;
}
