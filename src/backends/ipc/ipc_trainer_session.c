/* SPDX-License-Identifier: Apache-2.0 */
/* Opening a session: listen, ship the init info, take the workers that the
 * control plane tells to connect, and close the door when it says that all
 * have been told. Invariant: a peer counts only after the kernel named its
 * user, it spoke this protocol version and it gave the secret. */
#include "backends/ipc/ipc_trainer_state.h"

#include "base/alloc.h"
#include "device/shared.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

/* One stray that connects and says nothing may hold the door this long. */
#define HELLO_MS       2000
#define NAME_MAX_BYTES 64

static ferry_status make_ring(ipc__trainer *t)
{
    void *memory;
    uint64_t bytes;

    t->n_slots = FERRY__IPC_N_SLOTS;
    bytes = ferry__ipc_ring_bytes(t->n_slots, FERRY__IPC_SLOT_BYTES);
    FERRY_TRY(ferry__shared_create("ferry-ipc", bytes, &t->ring_fd, &memory));
    t->ring = memory;
    t->ring_bytes = bytes;
    ferry__ipc_ring_init(t->ring, t->n_slots, FERRY__IPC_SLOT_BYTES);
    return FERRY_OK;
}

static void init_text(const ipc__trainer *t, const char *name, ferry__str *s)
{
    const ferry_trainer_init_info *base = &t->info->base;

    ferry__str_printf(s,
                      "{\"packed\":%s,\"packed_buffer_size_bytes\":%llu,"
                      "\"packed_num_buffers\":%d,\"transport\":\"%s\","
                      "\"protocol_version\":%d,\"socket\":",
                      t->info->packed ? "true" : "false",
                      (unsigned long long)t->buffer_bytes, t->n_buffers,
                      FERRY__IPC_TRANSPORT, FERRY__IPC_VERSION);
    ferry__str_json(s, name);
    ferry__str_append(s, ",\"secret\":");
    ferry__str_json(s, t->secret);
    ferry__str_printf(s,
                      ",\"deadline_ms\":%lld,\"no_progress_ms\":%lld,"
                      "\"digest\":%s}",
                      (long long)base->deadline_ms,
                      (long long)base->no_progress_ms,
                      t->info->digest ? "true" : "false");
}

static void refuse(ipc__peer *peer, ferry_status status, const ferry__waiter *w)
{
    ferry__ipc_failure f = {0, status, {0}};
    ferry__str s = {0};

    snprintf(f.text, sizeof(f.text), "%s", ferry_last_error());
    ferry__ipc_put_failure(&s, &f);
    ferry__ipc_link_send(&peer->link, &s, -1, w);
    ferry_fail(status, "%s", f.text);
}

static ferry_status read_hello(ipc__trainer *t, ipc__peer *peer,
                               const ferry__waiter *w)
{
    void *bytes = NULL;
    size_t size = 0;
    uint32_t uid;
    ferry_status status;

    FERRY_TRY(ferry__unix_peer(peer->link.fd, &peer->pid, &uid));
    if (uid != geteuid() && uid != 0)
        return ferry_fail(FERRY_EAUTH,
                          "pid %d connected as user %u, this trainer is user "
                          "%u",
                          peer->pid, uid, (unsigned)geteuid());
    FERRY_TRY(ferry__ipc_link_recv(&peer->link, FERRY__IPC_HELLO_MAX, &bytes,
                                   &size, w));
    status = ferry__ipc_get_hello(bytes, size, &peer->hello);
    ferry__free(bytes);
    FERRY_TRY(status);
    if (peer->hello.magic != FERRY__IPC_MAGIC)
        return ferry_fail(FERRY_EPEER, "pid %d speaks another protocol",
                          peer->pid);
    if (peer->hello.version != FERRY__IPC_VERSION)
        return ferry_fail(FERRY_EVERSION,
                          "ipc protocol version: trainer %d, worker (pid %d) "
                          "%u",
                          FERRY__IPC_VERSION, peer->pid, peer->hello.version);
    if (!ferry__equal_secret(peer->hello.secret, t->secret))
        return ferry_fail(FERRY_EAUTH,
                          "pid %d does not have this session's secret",
                          peer->pid);
    if (t->n_peers >= FERRY__IPC_MAX_READERS)
        return ferry_fail(FERRY_ENOTSUP, "more than %d workers",
                          FERRY__IPC_MAX_READERS);
    return FERRY_OK;
}

static ferry_status welcome(ipc__trainer *t, ipc__peer *peer,
                            const ferry__waiter *w)
{
    ferry__ipc_welcome v = {FERRY__IPC_MAGIC,
                            FERRY__IPC_VERSION,
                            0,
                            (uint32_t)t->n_peers,
                            t->ring_bytes,
                            (uint64_t)(uintptr_t)t->probe,
                            {0}};
    ferry__ipc_ready ready;
    ferry__str s = {0};
    void *bytes = NULL;
    size_t size = 0;
    ferry_status status;

    if (t->info->digest)
        v.flags |= FERRY__IPC_WANT_DIGEST;
    if (t->path == IPC__PATH_CMA)
        v.flags |= FERRY__IPC_TRY_CMA;
    memcpy(v.probe, t->probe, sizeof(v.probe));
    ferry__ipc_put_welcome(&s, &v);
    FERRY_TRY(ferry__ipc_link_send(&peer->link, &s, t->ring_fd, w));
    FERRY_TRY(ferry__ipc_link_recv(&peer->link, FERRY__IPC_HELLO_MAX, &bytes,
                                   &size, w));
    status = ferry__ipc_get_ready(bytes, size, &ready);
    ferry__free(bytes);
    FERRY_TRY(status);
    peer->cma = ready.cma != 0;
    peer->cma_error = ready.error;
    return FERRY_OK;
}

static ferry_status keep(ipc__trainer *t, const ipc__peer *peer)
{
    FERRY_TRY(ferry__grow(&t->peers, &t->peers_capacity, t->n_peers,
                          sizeof(*t->peers)));
    t->peers[t->n_peers++] = *peer;
    return FERRY_OK;
}

/* One connection, from hello to ready. Whoever fails here is turned away and
 * logged; init fails through the control plane if it was a real worker. */
static void take_peer(ipc__trainer *t, int fd)
{
    ferry__waiter w = {NULL, NULL, ferry__deadline_in(HELLO_MS), "ipc hello"};
    ipc__peer peer = {.link = {fd, false}};
    ferry_status status = read_hello(t, &peer, &w);

    if (status == FERRY_OK)
        snprintf(peer.label, sizeof(peer.label),
                 "ipc worker dp%d tp%d (pid %d)", peer.hello.dp_rank,
                 peer.hello.tp_rank, peer.pid);
    if (status < 0 && status != FERRY_ECONN)
        refuse(&peer, status, &w);
    if (status == FERRY_OK)
        status = welcome(t, &peer, &w);
    if (status == FERRY_OK)
        status = keep(t, &peer);
    if (status < 0) {
        t->host->log(FERRY_LOG_WARN, "ipc: connection refused: %s",
                     ferry_last_error());
        ferry__ipc_link_close(&peer.link);
    }
}

static ferry_status take_waiting(ipc__trainer *t, int listener, int wait_ms)
{
    struct pollfd p = {listener, POLLIN, 0};

    while (poll(&p, 1, wait_ms) > 0) {
        ferry__waiter w = {NULL, NULL, ferry__deadline_in(HELLO_MS),
                           "ipc accept"};
        int fd;

        FERRY_TRY(ferry__unix_accept(listener, &w, &fd));
        take_peer(t, fd);
        wait_ms = 0;
    }
    return FERRY_OK;
}

/* Takes connections until the init call has come back (O-11: the call runs
 * beside this, so the order in which the two ends wait cannot matter). */
static ferry_status gather_peers(ipc__trainer *t, int listener)
{
    ferry_status status = FERRY_EBUSY;

    while (status == FERRY_EBUSY) {
        FERRY_TRY(take_waiting(t, listener, 5));
        status = t->host->update_poll(t->ctx);
        if (status == FERRY_EBUSY)
            FERRY_TRY(t->host->check(t->ctx, "waiting for workers to join"));
    }
    FERRY_TRY(status);
    /* Whoever was told to connect has connected by now. */
    FERRY_TRY(take_waiting(t, listener, 0));
    return ipc__peers_check_ranks(t);
}

static void settle_cma(ipc__trainer *t)
{
    t->cma = t->path == IPC__PATH_CMA;
    for (size_t i = 0; t->cma && i < t->n_peers; i++) {
        if (!t->peers[i].cma) {
            t->host->log(FERRY_LOG_WARN,
                         "ipc: %s may not read this process's memory (%s); "
                         "the ring is used instead of cma",
                         t->peers[i].label,
                         t->peers[i].cma_error ? strerror(t->peers[i].cma_error)
                                               : "other bytes came");
            t->cma = false;
        }
    }
}

static ferry_status open_inner(ipc__trainer *t, int *listener)
{
    char name[NAME_MAX_BYTES] = "ferry-ipc-";
    ferry__str s = {0};
    ferry_status status;

    FERRY_TRY(ferry__random_hex(name + strlen(name), 12));
    FERRY_TRY(ferry__random_hex(t->secret, FERRY__IPC_SECRET_CHARS / 2));
    if (getrandom(t->probe, sizeof(t->probe), 0) < 0)
        return ferry_fail(FERRY_EIO, "random bytes: %s", strerror(errno));
    FERRY_TRY(make_ring(t));
    FERRY_TRY(ferry__unix_listen(name, listener));
    init_text(t, name, &s);
    if (s.failed) {
        ferry__str_free(&s);
        return ferry_fail(FERRY_ENOMEM, "ipc init info: out of memory");
    }
    status = t->host->init_peer_begin(t->ctx, s.data);
    ferry__str_free(&s);
    FERRY_TRY(status);
    FERRY_TRY(gather_peers(t, *listener));
    settle_cma(t);
    return FERRY_OK;
}

ferry_status ipc__session_open(ipc__trainer *t)
{
    int listener = -1;
    ferry_status status = open_inner(t, &listener);

    if (listener >= 0)
        close(listener);
    if (status < 0) {
        char line[1024];

        snprintf(line, sizeof(line), "%s", ferry_last_error());
        ipc__session_close(t);
        return ferry_fail(status, "%s", line);
    }
    t->open = true;
    t->host->log(FERRY_LOG_INFO, "ipc: %zu workers joined", t->n_peers);
    return FERRY_OK;
}

static void free_buffers(ipc__trainer *t)
{
    for (int32_t i = 0; i < t->n_buffers; i++) {
        ipc__buffer *b = &t->buffers[i];

        ferry__shared_unmap(b->memory, b->size_bytes);
        if (b->fd >= 0)
            close(b->fd);
        *b = (ipc__buffer){.fd = -1};
    }
}

void ipc__session_close(ipc__trainer *t)
{
    for (size_t i = 0; i < t->n_peers; i++) {
        ipc__peer *peer = &t->peers[i];

        ferry__ipc_link_close(&peer->link);
        for (size_t k = 0; k < peer->n_lists; k++)
            ferry__box_lists_free(&peer->lists[k].lists);
        ferry__free(peer->lists);
    }
    ferry__free(t->peers);
    ferry__free(t->segments);
    t->peers = NULL;
    t->segments = NULL;
    t->n_peers = t->peers_capacity = 0;
    t->n_segments = t->segments_capacity = 0;
    free_buffers(t);
    ferry__shared_unmap(t->ring, t->ring_bytes);
    t->ring = NULL;
    if (t->ring_fd >= 0)
        close(t->ring_fd);
    t->ring_fd = -1;
    t->update = 0;
    t->ring_next = 0;
    t->open = false;
}

bool ipc__session_alive(const ipc__trainer *t)
{
    for (size_t i = 0; i < t->n_peers; i++) {
        const ferry__ipc_link *link = &t->peers[i].link;

        if (link->fd < 0 || link->broken)
            return false;
        if (ferry__socket_hung_up(link->fd))
            return false;
    }
    return t->n_peers > 0;
}
