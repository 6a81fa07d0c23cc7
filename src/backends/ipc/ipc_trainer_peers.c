/* SPDX-License-Identifier: Apache-2.0 */
/* What comes back from the workers: boxes, progress, success, failure, and
 * silence. Invariant: every wait of a round goes through ipc__peers_look, so
 * a worker that dies or fails is noticed within IPC__SLICE_MS and named. */
#include "backends/ipc/ipc_trainer_state.h"

#include "base/alloc.h"
#include "base/log.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>

/* A worker's own failure comes over the socket and, with more words, through
 * the control plane: the latter is waited for this long. */
#define CONTROL_WORDS_MS 300
#define LISTS_MAX        4096
/* Frames of one worker that one look takes at most. */
#define FRAMES_AT_ONCE 16

static ferry_status check_host(void *arg)
{
    ipc__trainer *t = arg;

    return t->host->check(t->ctx, "ipc socket");
}

ferry__waiter ipc__waiter(ipc__trainer *t, const char *what)
{
    return (ferry__waiter){
        check_host, t, ferry__deadline_in(t->host->remaining_ms(t->ctx)), what};
}

ferry_status ipc__peer_send(ipc__trainer *t, ipc__peer *peer, ferry__str *s,
                            int fd, const char *what)
{
    ferry__waiter w = ipc__waiter(t, what);
    ferry_status status = ferry__ipc_link_send(&peer->link, s, fd, &w);

    if (status == FERRY_ECONN)
        return ferry_fail(FERRY_EPEER, "%s closed its socket while %s",
                          peer->label, what);
    return status;
}

/* Keeps a list even when its update is over: the worker will refer to it. */
static ferry_status take_boxes(ipc__trainer *t, ipc__peer *peer,
                               ferry__ipc_boxes *boxes)
{
    bool now = boxes->update == t->update;
    size_t i = 0;

    while (i < peer->n_lists && peer->lists[i].digest != boxes->digest)
        i++;
    if (i < peer->n_lists) {
        ferry__box_lists_free(&boxes->lists);
    } else if (!boxes->listed) {
        ferry__box_lists_free(&boxes->lists);
        return ferry_fail(FERRY_EPEER, "%s names boxes that it never listed",
                          peer->label);
    } else {
        /* A worker refers back to few lists only, so the last place of a
         * full table can be used again and again. */
        if (peer->n_lists == LISTS_MAX) {
            i = --peer->n_lists;
            ferry__box_lists_free(&peer->lists[i].lists);
        }
        if (ferry__grow(&peer->lists, &peer->lists_capacity, peer->n_lists,
                        sizeof(*peer->lists)) < 0) {
            ferry__box_lists_free(&boxes->lists);
            return FERRY_ENOMEM;
        }
        peer->lists[peer->n_lists++] = *boxes;
    }
    if (now)
        peer->boxes = &peer->lists[i];
    return FERRY_OK;
}

/* Prefers what the control plane says of the same failure: it names the
 * server too. */
static ferry_status failed_by(ipc__trainer *t, const ipc__peer *peer,
                              const ferry__ipc_failure *f)
{
    ferry__deadline until = ferry__deadline_in(CONTROL_WORDS_MS);

    while (t->in_update && !ferry__deadline_passed(&until)) {
        ferry_status status = t->host->update_poll(t->ctx);

        if (status != FERRY_EBUSY) {
            t->in_update = false;
            if (status < 0)
                return status;
            break;
        }
        ferry__sleep_ms(2);
    }
    return ferry_fail((ferry_status)f->status, "%s: %s", peer->label, f->text);
}

static ferry_status take_frame(ipc__trainer *t, ipc__peer *peer,
                               const void *bytes, size_t size)
{
    ferry__ipc_boxes boxes;
    ferry__ipc_failure f;
    ferry__ipc_done done;

    switch (ferry__ipc_frame_type(bytes, size)) {
    case FERRY__IPC_BOXES:
        FERRY_TRY(ferry__ipc_get_boxes(bytes, size, &boxes));
        return take_boxes(t, peer, &boxes);
    case FERRY__IPC_DONE:
        FERRY_TRY(ferry__ipc_get_done(bytes, size, &done));
        if (done.update == t->update) {
            peer->done = true;
            peer->done_bytes = done.bytes;
        }
        return FERRY_OK;
    case FERRY__IPC_FAILURE:
        FERRY_TRY(ferry__ipc_get_failure(bytes, size, &f));
        if (f.update == t->update && t->in_update)
            return failed_by(t, peer, &f);
        return FERRY_OK;
    default:
        return ferry_fail(FERRY_EPEER, "%s sent an unexpected frame",
                          peer->label);
    }
}

static ferry_status take_from(ipc__trainer *t, ipc__peer *peer,
                              const char *what)
{
    ferry__waiter w = ipc__waiter(t, peer->label);
    void *bytes = NULL;
    size_t size = 0;
    ferry_status status = ferry__ipc_link_recv(
        &peer->link, FERRY__IPC_FRAME_MAX, &bytes, &size, &w);

    if (status == FERRY_ECONN)
        return ferry_fail(FERRY_EPEER, "%s closed its socket while %s",
                          peer->label, what);
    FERRY_TRY(status);
    status = take_frame(t, peer, bytes, size);
    ferry__free(bytes);
    return status;
}

/* Bytes that the slowest worker has taken of the update at hand. */
static uint64_t bytes_taken(const ipc__trainer *t)
{
    uint64_t least = t->update_bytes;

    for (size_t i = 0; i < t->n_peers; i++) {
        ferry__ipc_reader *r = &t->ring->readers[i];
        uint64_t taken = 0;

        if (t->peers[i].done)
            continue;
        if (atomic_load(&r->taken_update) == t->update)
            taken = atomic_load(&r->taken_bytes);
        if (taken < least)
            least = taken;
    }
    return least;
}

static void report_progress(ipc__trainer *t)
{
    uint64_t taken = bytes_taken(t);

    if (taken > t->update_seen) {
        t->host->progress(t->ctx, taken - t->update_seen);
        t->update_seen = taken;
    }
}

/* poll() over all peers at once, in pieces of the stack's size; a frame of
 * each that has one. */
static ferry_status poll_peers(ipc__trainer *t, const char *what,
                               int64_t timeout_ms, bool *out_some)
{
    struct pollfd p[FERRY__IPC_MAX_READERS];

    for (size_t i = 0; i < t->n_peers; i++)
        p[i] = (struct pollfd){t->peers[i].link.fd, POLLIN, 0};
    *out_some = poll(p, (nfds_t)t->n_peers, (int)timeout_ms) > 0;
    for (size_t i = 0; *out_some && i < t->n_peers; i++) {
        if (p[i].revents)
            FERRY_TRY(take_from(t, &t->peers[i], what));
    }
    return FERRY_OK;
}

ferry_status ipc__peers_look(ipc__trainer *t, const char *what,
                             int64_t timeout_ms)
{
    bool some = true;

    /* What a worker said of an update before this one may lie before what it
     * says of this one. */
    for (int i = 0; some && i < FRAMES_AT_ONCE; i++)
        FERRY_TRY(poll_peers(t, what, i == 0 ? timeout_ms : 0, &some));
    report_progress(t);
    return t->host->check(t->ctx, what);
}

void ipc__peers_tell_failure(ipc__trainer *t, ferry_status status)
{
    char line[512];

    snprintf(line, sizeof(line), "%s", ferry_last_error());
    for (size_t i = 0; i < t->n_peers; i++) {
        ferry__waiter w = {NULL, NULL, ferry__deadline_in(50),
                           t->peers[i].label};
        ferry__ipc_failure f = {t->update, status, {0}};
        ferry__str s = {0};

        memcpy(f.text, line, sizeof(f.text));
        ferry__ipc_put_failure(&s, &f);
        ferry__ipc_link_send(&t->peers[i].link, &s, -1, &w);
    }
    ferry__fail_line(status, line);
}

ferry_status ipc__peers_check_call(ipc__trainer *t, bool *seen_ended)
{
    ferry_status status = t->host->update_poll(t->ctx);

    if (status == FERRY_EBUSY)
        return FERRY_OK;
    if (status < 0 || *seen_ended)
        t->in_update = false;
    FERRY_TRY(status);
    if (!*seen_ended) {
        *seen_ended = true; /* what the workers said before it is read yet */
        return FERRY_OK;
    }
    return ferry_fail(FERRY_EPEER,
                      "the server answered update %llu, but not all workers "
                      "have taken part in it; a client must report what fails",
                      (unsigned long long)t->update);
}

ferry_status ipc__peers_await_boxes(ipc__trainer *t, const ipc__chunk *chunk)
{
    bool ended = false;

    for (size_t i = 0; i < t->n_peers; i++) {
        while (!t->peers[i].boxes) {
            FERRY_TRY(ipc__peers_check_call(t, &ended));
            FERRY_TRY(ipc__peers_look(t, "waiting for the workers' boxes",
                                      IPC__SLICE_MS));
        }
        FERRY_TRY(ferry__box_lists_check(&t->peers[i].boxes->lists,
                                         chunk->params, chunk->count));
    }
    return FERRY_OK;
}

static bool all_done(const ipc__trainer *t)
{
    for (size_t i = 0; i < t->n_peers; i++) {
        if (!t->peers[i].done)
            return false;
    }
    return true;
}

ferry_status ipc__peers_await_done(ipc__trainer *t)
{
    char what[64];

    snprintf(what, sizeof(what), "loading update %llu",
             (unsigned long long)t->update);
    while (!all_done(t)) {
        ferry_status status = t->host->update_poll(t->ctx);

        if (status != FERRY_EBUSY) {
            /* The call has ended: all that the workers said is there. */
            t->in_update = false;
            FERRY_TRY(status);
            FERRY_TRY(ipc__peers_look(t, what, 0));
            if (!all_done(t))
                return ferry_fail(FERRY_EPEER,
                                  "the server answered update %llu, but not "
                                  "all workers have loaded it",
                                  (unsigned long long)t->update);
            break;
        }
        FERRY_TRY(ipc__peers_look(t, what, IPC__SLICE_MS));
    }
    report_progress(t);
    for (size_t i = 0; i < t->n_peers; i++) {
        if (t->peers[i].done_bytes != t->update_bytes)
            return ferry_fail(FERRY_EMISMATCH,
                              "%s has loaded %llu bytes of update %llu, %llu "
                              "were declared",
                              t->peers[i].label,
                              (unsigned long long)t->peers[i].done_bytes,
                              (unsigned long long)t->update,
                              (unsigned long long)t->update_bytes);
    }
    return FERRY_OK;
}

/* How many of the peers claim this rank of replicas of the same form. */
static size_t claims(const ipc__trainer *t, const ferry__ipc_hello *form,
                     int32_t dp_rank, int32_t tp_rank, size_t *out_last)
{
    size_t n = 0;

    for (size_t i = 0; i < t->n_peers; i++) {
        const ferry__ipc_hello *h = &t->peers[i].hello;

        if (h->tp_size == form->tp_size && h->dp_size == form->dp_size &&
            h->dp_rank == dp_rank && h->tp_rank == tp_rank) {
            *out_last = i;
            n++;
        }
    }
    return n;
}

/* Several servers may be reached, so a rank may come more than once; but then
 * every rank of that form must come as often: one that came twice while
 * another did not come was told a wrong rank (O-18). */
ferry_status ipc__peers_check_ranks(const ipc__trainer *t)
{
    if (t->n_peers == 0)
        return ferry_fail(FERRY_EPEER,
                          "the inference side accepted init, but no worker "
                          "connected: is it on this host?");
    for (size_t i = 0; i < t->n_peers; i++) {
        const ferry__ipc_hello *h = &t->peers[i].hello;
        size_t last = i, missing, n;

        if (h->tp_size < 1 || h->dp_size < 1 || h->tp_rank < 0 ||
            h->tp_rank >= h->tp_size || h->dp_rank < 0 ||
            h->dp_rank >= h->dp_size || h->tp_size > 1024 || h->dp_size > 1024)
            return ferry_fail(FERRY_EPEER,
                              "%s claims rank %d of %d in replica %d of %d",
                              t->peers[i].label, h->tp_rank, h->tp_size,
                              h->dp_rank, h->dp_size);
        n = claims(t, h, h->dp_rank, h->tp_rank, &last);
        for (int32_t tp = 0; tp < h->tp_size; tp++) {
            if (claims(t, h, h->dp_rank, tp, &missing) >= n)
                continue;
            if (n == 1)
                return ferry_fail(FERRY_EPEER,
                                  "rank dp%d tp%d did not connect, %s did",
                                  h->dp_rank, tp, t->peers[i].label);
            return ferry_fail(FERRY_EPEER,
                              "rank dp%d tp%d claimed twice, by pid %d and "
                              "pid %d, while tp%d did not connect",
                              h->dp_rank, h->tp_rank, t->peers[i].pid,
                              t->peers[last].pid, tp);
        }
        for (int32_t dp = 0; dp < h->dp_size; dp++) {
            if (claims(t, h, dp, h->tp_rank, &missing) >= n)
                continue;
            return ferry_fail(FERRY_EPEER,
                              "rank dp%d tp%d %s by pid %d, while dp%d did "
                              "not connect",
                              h->dp_rank, h->tp_rank,
                              n > 1 ? "claimed twice" : "came",
                              t->peers[last].pid, dp);
        }
    }
    return FERRY_OK;
}
