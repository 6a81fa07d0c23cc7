/* SPDX-License-Identifier: Apache-2.0 */
/* Exposing and pulling in a tcp group. Key, little-endian: 1. u32 magic
 * 2. u32 port  3. u64 id  4. u64 bytes  5. address, to the end.
 * Invariant: a connection carries no question before both ends have proved
 * themselves, and one whose answer was cut is not used again. */
#include "comm/tcp_pull.h"

#include "base/alloc.h"
#include "base/bytes.h"
#include "base/log.h"
#include "base/socket.h"
#include "comm/tcp_address.h"
#include "comm/tcp_store_wire.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define KEY_HEAD    24
#define PIECE_BYTES ((size_t)1 << 20)
#define BLAME_MS    INT64_C(250)

struct tcp__pulls {
    tcp__pull_server *server; /* NULL: this rank exposes nothing */
    int fds[FERRY__COMM_TCP_WORLD];
};

static ferry_status need_pulls(tcp__comm *c)
{
    if (c->pulls)
        return FERRY_OK;
    c->pulls = ferry__alloc(sizeof(*c->pulls));
    if (!c->pulls)
        return FERRY_ENOMEM;
    for (int32_t r = 0; r < FERRY__COMM_TCP_WORLD; r++)
        c->pulls->fds[r] = -1;
    return FERRY_OK;
}

void ferry__tcp_pulls_close(tcp__comm *c)
{
    if (!c->pulls)
        return;
    ferry__tcp_pull_server_close(&c->pulls->server);
    for (int32_t r = 0; r < FERRY__COMM_TCP_WORLD; r++) {
        if (c->pulls->fds[r] >= 0)
            close(c->pulls->fds[r]);
    }
    ferry__free(c->pulls);
    c->pulls = NULL;
}

/* ---- exposing ---- */

ferry_status ferry__tcp_expose(ferry__comm *comm, void *bytes,
                               size_t size_bytes, void *out_key,
                               size_t *out_key_bytes)
{
    tcp__comm *c = (tcp__comm *)comm;
    unsigned char *key = out_key;
    size_t host = strlen(c->host);
    tcp__pull_server *s;
    uint64_t id;

    if (!bytes || size_bytes == 0)
        return ferry_fail(FERRY_EINVAL, "expose: %zu bytes", size_bytes);
    FERRY_TRY(need_pulls(c));
    if (!c->pulls->server)
        FERRY_TRY(
            ferry__tcp_pull_serve(c->bind, &c->identity, &c->pulls->server));
    s = c->pulls->server;
    FERRY_TRY(ferry__tcp_pull_add(s, bytes, size_bytes, &id));
    ferry__store_put_u32(key, TCP__PULL_MAGIC);
    ferry__store_put_u32(key + 4, (uint32_t)ferry__tcp_pull_port(s));
    ferry__store_put_u64(key + 8, id);
    ferry__store_put_u64(key + 16, size_bytes);
    memcpy(key + KEY_HEAD, c->host, host);
    *out_key_bytes = KEY_HEAD + host;
    return FERRY_OK;
}

void ferry__tcp_unexpose(ferry__comm *comm, void *bytes)
{
    tcp__comm *c = (tcp__comm *)comm;

    if (c->pulls && c->pulls->server)
        ferry__tcp_pull_remove(c->pulls->server, bytes);
}

/* ---- pulling ---- */

typedef struct pulling {
    tcp__comm *c;
    const tcp__call *call;
    int32_t from;
    char what[32];
} pulling;

static ferry_status ask_owner(void *arg)
{
    const pulling *p = arg;
    ferry__comm *comm = &p->c->base;

    if (comm->check)
        FERRY_TRY(comm->check(comm->check_arg, p->call->name));
    FERRY_TRY(ferry__tcp_listen_all(p->c, p->call->name));
    if (p->c->peers[p->from].gone || p->c->peers[p->from].left)
        return ferry__tcp_lost(p->c, p->call, p->from, 0);
    return FERRY_OK;
}

/* Waits at most for the call's deadline, and for progress. */
static ferry__waiter waiter_of(pulling *p)
{
    ferry__waiter w = {ask_owner, p, p->call->deadline, p->what};
    int64_t quiet = p->c->no_progress_ms;

    if (quiet > 0 && quiet < ferry__deadline_left_ms(&w.deadline))
        w.deadline = ferry__deadline_in(quiet);
    return w;
}

/* A connection that ends has its cause in the control connections. */
static ferry_status explain(pulling *p, ferry_status status)
{
    ferry__deadline until = ferry__deadline_in(BLAME_MS);
    tcp__comm *c = p->c;
    int64_t left;

    if (status == FERRY_ETIMEOUT &&
        ferry__deadline_left_ms(&p->call->deadline) > 0)
        return ferry_fail(FERRY_ENOPROGRESS,
                          "pull: rank %d gave nothing more within %lld ms",
                          p->from, (long long)c->no_progress_ms);
    if (status != FERRY_ECONN)
        return status;
    while ((left = ferry__deadline_left_ms(&until)) > 0) {
        FERRY_TRY(ferry__tcp_listen_all(c, p->call->name));
        if (c->peers[p->from].gone || c->peers[p->from].left)
            break;
        if (poll(c->polls, ferry__tcp_control_polls(c), (int)left) < 0 &&
            errno != EINTR)
            break;
    }
    return ferry__tcp_lost(c, p->call, p->from, 0);
}

static ferry_status shake(const pulling *p, int fd, const ferry__waiter *w)
{
    const tcp__identity *id = &p->c->identity;
    tcp__proof proof;

    FERRY_TRY(ferry__tcp_proof_call(&proof, p->from, TCP__PULLS));
    FERRY_TRY(ferry__tcp_proof_say(&proof, id, TCP__HELLO, fd, w));
    FERRY_TRY(ferry__tcp_proof_hear(&proof, id, TCP__CHALLENGE, fd, w));
    FERRY_TRY(ferry__tcp_proof_say(&proof, id, TCP__PROOF, fd, w));
    return ferry__tcp_proof_hear(&proof, id, TCP__WELCOME, fd, w);
}

static ferry_status connect_to(pulling *p, const unsigned char *key,
                               size_t key_bytes)
{
    char host[FERRY__COMM_TCP_HOST];
    int *fd = &p->c->pulls->fds[p->from], made;
    ferry__waiter w = waiter_of(p);
    ferry_status status;

    if (*fd >= 0)
        return FERRY_OK;
    snprintf(host, sizeof(host), "%.*s", (int)(key_bytes - KEY_HEAD),
             (const char *)key + KEY_HEAD);
    FERRY_TRY(
        ferry__tcp_connect(host, (int32_t)ferry__read_u32(key + 4), &w, &made));
    status = shake(p, made, &w);
    if (status < 0) {
        close(made);
        return status;
    }
    *fd = made;
    return FERRY_OK;
}

static ferry_status read_answer(pulling *p, int fd, uint64_t want)
{
    unsigned char head[TCP__PULL_ANSWER_BYTES];
    ferry__waiter w = waiter_of(p);
    ferry_status status;

    FERRY_TRY(ferry__recv_all(fd, head, sizeof(head), &w));
    status = (ferry_status)(int32_t)ferry__read_u32(head + 4);
    if (ferry__read_u32(head) != TCP__PULL_MAGIC || status > 0 ||
        (status == FERRY_OK && ferry__store_u64(head + 8) != want))
        return ferry_fail(FERRY_EPEER,
                          "pull: what answers for rank %d is not it", p->from);
    return status < 0 ? FERRY_DONE : FERRY_OK;
}

/* FERRY_DONE: the other end refuses. */
static ferry_status get(pulling *p, const unsigned char *key, size_t key_bytes,
                        uint64_t offset, char *bytes, size_t size_bytes)
{
    unsigned char ask[TCP__PULL_ASK_BYTES];
    ferry_status status;
    ferry__waiter w;
    int fd;

    FERRY_TRY(connect_to(p, key, key_bytes));
    fd = p->c->pulls->fds[p->from];
    ferry__store_put_u32(ask, TCP__PULL_MAGIC);
    ferry__store_put_u32(ask + 4, 0);
    memcpy(ask + 8, key + 8, 8); /* the id */
    ferry__store_put_u64(ask + 16, offset);
    ferry__store_put_u64(ask + 24, size_bytes);
    w = waiter_of(p);
    FERRY_TRY(ferry__send_all(fd, ask, sizeof(ask), &w));
    status = read_answer(p, fd, size_bytes);
    if (status != FERRY_OK)
        return status;
    for (size_t at = 0; at < size_bytes; at += PIECE_BYTES) {
        size_t left = size_bytes - at;

        w = waiter_of(p);
        FERRY_TRY(ferry__recv_all(fd, bytes + at,
                                  left < PIECE_BYTES ? left : PIECE_BYTES, &w));
    }
    return FERRY_OK;
}

static ferry_status check_pull(const ferry__comm *comm, int32_t from,
                               const unsigned char *key, size_t key_bytes,
                               uint64_t offset, size_t size_bytes)
{
    uint64_t exposed;

    if (from < 0 || from >= comm->world_size || from == comm->rank)
        return ferry_fail(FERRY_EINVAL,
                          "pull: peer %d for rank %d in a world of %d", from,
                          comm->rank, comm->world_size);
    if (key_bytes <= KEY_HEAD || key_bytes >= KEY_HEAD + FERRY__COMM_TCP_HOST)
        return ferry_fail(FERRY_EINVAL, "pull: key of %zu bytes", key_bytes);
    if (ferry__read_u32(key) != TCP__PULL_MAGIC ||
        ferry__read_u32(key + 4) > 65535)
        return ferry_fail(FERRY_EINVAL,
                          "pull: the key is none of this provider");
    exposed = ferry__store_u64(key + 16);
    if (offset > exposed || size_bytes > exposed - offset)
        return ferry_fail(FERRY_EINVAL,
                          "pull: %zu bytes at %llu of rank %d, which exposes "
                          "%llu",
                          size_bytes, (unsigned long long)offset, from,
                          (unsigned long long)exposed);
    return FERRY_OK;
}

ferry_status ferry__tcp_pull(ferry__comm *comm, void *bytes, size_t size_bytes,
                             int32_t from, const void *key, size_t key_bytes,
                             uint64_t offset, int64_t timeout_ms)
{
    tcp__comm *c = (tcp__comm *)comm;
    tcp__call call;
    pulling p = {.c = c, .call = &call, .from = from};
    ferry_status status;
    int64_t from_ns;

    FERRY_TRY(check_pull(comm, from, key, key_bytes, offset, size_bytes));
    FERRY_TRY(ferry__tcp_enter(c, "pull", timeout_ms, &call));
    if (size_bytes == 0)
        return FERRY_OK;
    FERRY_TRY(need_pulls(c));
    snprintf(p.what, sizeof(p.what), "pull: rank %d", from);
    from_ns = ferry__comm_wait_ns(comm);
    status = get(&p, key, key_bytes, offset, bytes, size_bytes);
    ferry__tcp_waited(c, from, from_ns);
    if (status == FERRY_DONE)
        return ferry_fail(FERRY_EMISMATCH,
                          "pull: rank %d exposes that memory no more", from);
    return status < 0 ? ferry__tcp_fail(c, explain(&p, status)) : FERRY_OK;
}
