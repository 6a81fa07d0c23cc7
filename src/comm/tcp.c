/* SPDX-License-Identifier: Apache-2.0 */
/* The collectives of a `tcp` group, each as flows that run at once.
 * Broadcasts relay along a tree whose every rank sends on what it has so far
 * received. Invariant: all ranks number the collectives alike, and sums are
 * made in rank order. */
#include "comm/tcp_private.h"

#include "base/alloc.h"
#include "base/hash.h"
#include "comm/reduce.h"
#include "comm/tcp_address.h"
#include "comm/tcp_pull.h"
#include "comm/tcp_stream.h"
#include "comm/tcp_tree.h"

#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

/* Below this the number of steps matters, above it the bytes on each link. */
#define CHAIN_BYTES ((size_t)64 << 10)
/* Below this all ranks get all of a sum's operands; above, each sums its
 * share and the shares are exchanged. */
#define ONE_STEP_BYTES ((size_t)32 << 10)
#define REDUCE_BYTES   ((size_t)4 << 20)

enum { OP_BROADCAST = 1, OP_REDUCE, OP_SHARE, OP_GATHER, OP_BARRIER, OP_SEND };

static tcp__comm *tcp_of(ferry__comm *c)
{
    return (tcp__comm *)c;
}

/* ---- broadcast ---- */

static ferry_status relay(tcp__comm *c, const tcp__call *call, void *bytes,
                          size_t size_bytes, int32_t root)
{
    tcp__flow flows[FERRY__TREE_CHILDREN + 1];
    size_t n = 0;
    ferry__tree tree;

    ferry__tree_make(c->base.rank, c->base.world_size, root, c->host_ids,
                     size_bytes > CHAIN_BYTES, &tree);
    c->sequence++;
    if (tree.parent >= 0)
        ferry__tcp_flow_init(&flows[n++], false, tree.parent, TCP__GROUP,
                             OP_BROADCAST, (uint32_t)root, c->sequence, bytes,
                             size_bytes);
    for (int32_t i = 0; i < tree.n_children; i++) {
        tcp__flow *f = &flows[n++];

        ferry__tcp_flow_init(f, true, tree.children[i], TCP__GROUP,
                             OP_BROADCAST, (uint32_t)root, c->sequence, bytes,
                             size_bytes);
        f->after = tree.parent >= 0 ? &flows[0] : NULL;
    }
    return ferry__tcp_run(c, call, flows, n);
}

static ferry_status tcp_broadcast(ferry__comm *comm, void *bytes,
                                  size_t size_bytes, int32_t root,
                                  int64_t timeout_ms)
{
    tcp__call call;

    if (root < 0 || root >= comm->world_size)
        return ferry_fail(FERRY_EINVAL, "broadcast: root %d of a world of %d",
                          root, comm->world_size);
    FERRY_TRY(ferry__tcp_enter(tcp_of(comm), "broadcast", timeout_ms, &call));
    return relay(tcp_of(comm), &call, bytes, size_bytes, root);
}

/* ---- exchange with all ---- */

typedef struct share {
    char *bytes;
    size_t size;
} share;

/* Gives rank q `give[q]` and takes `take[q]` from it, for all others. */
static ferry_status exchange(tcp__comm *c, const tcp__call *call, uint32_t what,
                             uint32_t detail, const share *give,
                             const share *take)
{
    tcp__flow flows[2 * FERRY__COMM_TCP_WORLD];
    int32_t world = c->base.world_size;
    size_t n = 0;

    c->sequence++;
    /* Each begins with another neighbour, so that not all feed one rank. */
    for (int32_t k = 1; k < world; k++) {
        int32_t q = (c->base.rank + k) % world;

        ferry__tcp_flow_init(&flows[n++], true, q, TCP__GROUP, what, detail,
                             c->sequence, give[q].bytes, give[q].size);
    }
    for (int32_t k = 1; k < world; k++) {
        int32_t q = (c->base.rank + world - k) % world;

        ferry__tcp_flow_init(&flows[n++], false, q, TCP__GROUP, what, detail,
                             c->sequence, take[q].bytes, take[q].size);
    }
    return ferry__tcp_run(c, call, flows, n);
}

static ferry_status tcp_barrier(ferry__comm *comm, int64_t timeout_ms)
{
    static const share none[FERRY__COMM_TCP_WORLD];
    tcp__call call;

    FERRY_TRY(ferry__tcp_enter(tcp_of(comm), "barrier", timeout_ms, &call));
    return exchange(tcp_of(comm), &call, OP_BARRIER, 0, none, none);
}

static void copy_bytes(void *dst, const void *src, size_t size_bytes)
{
    if (size_bytes > 0)
        memcpy(dst, src, size_bytes);
}

static ferry_status gather(tcp__comm *c, const tcp__call *call,
                           const void *bytes, size_t size_bytes, char *out)
{
    share give[FERRY__COMM_TCP_WORLD], take[FERRY__COMM_TCP_WORLD];

    for (int32_t q = 0; q < c->base.world_size; q++) {
        give[q] = (share){(void *)(uintptr_t)bytes, size_bytes};
        take[q] = (share){out + (size_t)q * size_bytes, size_bytes};
    }
    copy_bytes(take[c->base.rank].bytes, bytes, size_bytes);
    return exchange(c, call, OP_GATHER, 0, give, take);
}

static ferry_status tcp_all_gather(ferry__comm *comm, const void *bytes,
                                   size_t size_bytes, void *out,
                                   int64_t timeout_ms)
{
    size_t all_bytes;
    ferry_status status;
    void *unwanted = NULL;
    tcp__call call;

    if (!ferry__mul(size_bytes, (size_t)comm->world_size, &all_bytes))
        return ferry_fail(FERRY_EOVERFLOW, "all-gather: %zu bytes × %d ranks",
                          size_bytes, comm->world_size);
    FERRY_TRY(ferry__tcp_enter(tcp_of(comm), "all-gather", timeout_ms, &call));
    /* The others send to it as well: what is not wanted is still taken. */
    if (!out) {
        out = unwanted = ferry__alloc_raw(all_bytes);
        if (!out)
            return ferry__tcp_break(tcp_of(comm), FERRY_ENOMEM);
    }
    status = gather(tcp_of(comm), &call, bytes, size_bytes, out);
    ferry__free(unwanted);
    return status;
}

/* ---- all-reduce ---- */

typedef struct reduction {
    ferry_dtype dtype;
    ferry__reduce_op op;
    size_t elem_bytes;
    uint32_t detail;
} reduction;

/* Sums `size` bytes of every rank, in rank order, this rank's from `mine`
 * and the others' from the scratch, one after the other. */
static void sum_up(const tcp__comm *c, const reduction *r, char *mine,
                   char *scratch, size_t size)
{
    char *own = scratch + (size_t)c->base.rank * size;

    copy_bytes(own, mine, size);
    copy_bytes(mine, scratch, size);
    for (int32_t q = 1; q < c->base.world_size; q++)
        ferry__reduce_into(mine, scratch + (size_t)q * size,
                           size / r->elem_bytes, r->dtype, r->op);
}

static ferry_status reduce_whole(tcp__comm *c, const tcp__call *call,
                                 const reduction *r, char *data, size_t size,
                                 char *scratch)
{
    share give[FERRY__COMM_TCP_WORLD], take[FERRY__COMM_TCP_WORLD];

    for (int32_t q = 0; q < c->base.world_size; q++) {
        give[q] = (share){data, size};
        take[q] = (share){scratch + (size_t)q * size, size};
    }
    FERRY_TRY(exchange(c, call, OP_REDUCE, r->detail, give, take));
    sum_up(c, r, data, scratch, size);
    return FERRY_OK;
}

static share share_of(const tcp__comm *c, const reduction *r, int32_t q,
                      char *data, size_t size)
{
    size_t count = size / r->elem_bytes, world = (size_t)c->base.world_size;
    size_t each = (count + world - 1) / world;
    size_t first = each * (size_t)q < count ? each * (size_t)q : count;
    size_t last = first + each < count ? first + each : count;

    return (share){data + first * r->elem_bytes,
                   (last - first) * r->elem_bytes};
}

static ferry_status reduce_shares(tcp__comm *c, const tcp__call *call,
                                  const reduction *r, char *data, size_t size,
                                  char *scratch)
{
    share shares[FERRY__COMM_TCP_WORLD], all[FERRY__COMM_TCP_WORLD];
    share mine = share_of(c, r, c->base.rank, data, size);

    for (int32_t q = 0; q < c->base.world_size; q++) {
        shares[q] = share_of(c, r, q, data, size);
        all[q] = (share){scratch + (size_t)q * mine.size, mine.size};
    }
    FERRY_TRY(exchange(c, call, OP_REDUCE, r->detail, shares, all));
    sum_up(c, r, mine.bytes, scratch, mine.size);
    for (int32_t q = 0; q < c->base.world_size; q++)
        all[q] = mine;
    return exchange(c, call, OP_SHARE, r->detail, all, shares);
}

static bool in_one_step(const tcp__comm *c, size_t size)
{
    return size <= ONE_STEP_BYTES || c->base.world_size <= 2;
}

static ferry_status reduce_all(tcp__comm *c, const tcp__call *call,
                               const reduction *r, char *data,
                               size_t size_bytes)
{
    size_t most = size_bytes < REDUCE_BYTES ? size_bytes : REDUCE_BYTES;
    size_t world = (size_t)c->base.world_size, at = 0;
    size_t need =
        in_one_step(c, most) ? most * world : most + world * r->elem_bytes;
    ferry_status status = FERRY_OK;
    char *scratch;

    /* The last piece of many may be one for a single step. */
    if (need < ONE_STEP_BYTES * world && most == REDUCE_BYTES)
        need = ONE_STEP_BYTES * world;
    scratch = ferry__alloc_raw(need);
    if (!scratch)
        return ferry__tcp_break(c, FERRY_ENOMEM);
    do {
        size_t left = size_bytes - at;
        size_t piece = left < REDUCE_BYTES ? left : REDUCE_BYTES;
        char *from = data ? data + at : NULL;

        status = in_one_step(c, piece)
                     ? reduce_whole(c, call, r, from, piece, scratch)
                     : reduce_shares(c, call, r, from, piece, scratch);
        at += piece;
    } while (status >= 0 && at < size_bytes);
    ferry__free(scratch);
    return status;
}

static ferry_status tcp_all_reduce(ferry__comm *comm, void *data, int64_t count,
                                   ferry_dtype dtype, ferry__reduce_op op,
                                   int64_t timeout_ms)
{
    reduction r = {dtype, op, ferry_dtype_bytes(dtype),
                   (uint32_t)dtype << 8 | (uint32_t)op};
    size_t size_bytes;
    tcp__call call;

    if (!ferry__reduce_takes(dtype))
        return ferry_fail(FERRY_ENOTSUP,
                          "all-reduce: dtype %s, wants float32, float64, "
                          "int32 or int64",
                          ferry_dtype_name(dtype));
    if (count < 0 || !ferry__mul((size_t)count, r.elem_bytes, &size_bytes))
        return ferry_fail(FERRY_EINVAL, "all-reduce: %lld elements",
                          (long long)count);
    FERRY_TRY(ferry__tcp_enter(tcp_of(comm), "all-reduce", timeout_ms, &call));
    return reduce_all(tcp_of(comm), &call, &r, data, size_bytes);
}

/* ---- between two ---- */

static ferry_status between(ferry__comm *comm, const char *name, bool out,
                            void *bytes, size_t size_bytes, int32_t peer,
                            int64_t timeout_ms)
{
    tcp__call call;
    tcp__flow flow;

    if (peer < 0 || peer >= comm->world_size || peer == comm->rank)
        return ferry_fail(FERRY_EINVAL,
                          "%s: peer %d for rank %d in a world of %d", name,
                          peer, comm->rank, comm->world_size);
    FERRY_TRY(ferry__tcp_enter(tcp_of(comm), name, timeout_ms, &call));
    ferry__tcp_flow_init(&flow, out, peer, TCP__PAIR, OP_SEND, 0, 0, bytes,
                         size_bytes);
    return ferry__tcp_run(tcp_of(comm), &call, &flow, 1);
}

/* The flow before, of the same peer and direction. */
static const tcp__flow *before(const tcp__flow *flows, size_t n,
                               const ferry__comm_tcp_item *item)
{
    while (n-- > 0) {
        if (flows[n].peer == item->peer && flows[n].out == item->out)
            return &flows[n];
    }
    return NULL;
}

ferry_status ferry__comm_tcp_exchange(ferry__comm *comm,
                                      const ferry__comm_tcp_item *items,
                                      size_t n, int64_t timeout_ms)
{
    ferry_status status;
    tcp__flow *flows;
    tcp__call call;

    for (size_t i = 0; i < n; i++) {
        if (items[i].peer < 0 || items[i].peer >= comm->world_size ||
            items[i].peer == comm->rank)
            return ferry_fail(FERRY_EINVAL,
                              "exchange: peer %d for rank %d in a world of %d",
                              items[i].peer, comm->rank, comm->world_size);
    }
    FERRY_TRY(ferry__tcp_enter(tcp_of(comm), "exchange", timeout_ms, &call));
    flows = ferry__alloc_array(n, sizeof(*flows));
    if (!flows)
        return ferry__tcp_break(tcp_of(comm), FERRY_ENOMEM);
    for (size_t i = 0; i < n; i++) {
        ferry__tcp_flow_init(&flows[i], items[i].out, items[i].peer, TCP__PAIR,
                             OP_SEND, 0, 0, items[i].bytes,
                             items[i].size_bytes);
        flows[i].behind = before(flows, i, &items[i]);
    }
    status = ferry__tcp_run(tcp_of(comm), &call, flows, n);
    ferry__free(flows);
    return status;
}

static ferry_status tcp_send(ferry__comm *comm, const void *bytes,
                             size_t size_bytes, int32_t to, int64_t timeout_ms)
{
    return between(comm, "send", true, (void *)(uintptr_t)bytes, size_bytes, to,
                   timeout_ms);
}

static ferry_status tcp_recv(ferry__comm *comm, void *bytes, size_t size_bytes,
                             int32_t from, int64_t timeout_ms)
{
    return between(comm, "receive", false, bytes, size_bytes, from, timeout_ms);
}

/* ---- life ---- */

static void tcp_abort(ferry__comm *comm)
{
    tcp__comm *c = tcp_of(comm);

    atomic_store(&c->aborted, true);
    eventfd_write(c->wake, 1);
    ferry__tcp_tell(c, TCP__ABORTED, FERRY_ECANCELED, "aborted");
}

static void tcp_fail(ferry__comm *comm, ferry_status status, const char *line)
{
    tcp__comm *c = tcp_of(comm);

    ferry__tcp_tell(c, TCP__FAILED, status, line);
    atomic_store(&c->aborted, true);
    eventfd_write(c->wake, 1);
}

void ferry__tcp_close(ferry__comm *comm)
{
    tcp__comm *c = tcp_of(comm);

    ferry__tcp_tell(c, TCP__LEFT, FERRY_OK, "");
    ferry__tcp_pulls_close(c);
    for (int32_t r = 0; r < FERRY__COMM_TCP_WORLD; r++) {
        for (int ch = 0; ch < TCP__CHANNELS; ch++) {
            if (c->peers[r].fds[ch] >= 0)
                close(c->peers[r].fds[ch]);
        }
    }
    if (c->wake >= 0)
        close(c->wake);
    pthread_mutex_destroy(&c->lock);
    explicit_bzero(&c->identity, sizeof(c->identity));
    ferry__free(c);
}

static void tcp_describe(ferry__comm *comm, char *out, size_t size_bytes)
{
    snprintf(out, size_bytes, "tcp %s", tcp_of(comm)->where);
}

const ferry__comm_ops ferry__tcp_ops = {
    .size = sizeof(ferry__comm_ops),
    .provider = "tcp",
    .broadcast = tcp_broadcast,
    .all_reduce = tcp_all_reduce,
    .all_gather = tcp_all_gather,
    .barrier = tcp_barrier,
    .send = tcp_send,
    .recv = tcp_recv,
    .abort = tcp_abort,
    .close = ferry__tcp_close,
    .expose = ferry__tcp_expose,
    .unexpose = ferry__tcp_unexpose,
    .pull = ferry__tcp_pull,
    .stream_open = ferry__tcp_stream_open,
    .describe = tcp_describe,
    .fail = tcp_fail,
    .watch = ferry__tcp_watch,
    .why_ended = ferry__tcp_why_ended,
    .moved = ferry__tcp_moved,
};

static ferry_status check_options(const ferry__comm_tcp_options *o)
{
    size_t n = o->secret ? strlen(o->secret) : 0;

    if (o->world_size < 1 || o->world_size > FERRY__COMM_TCP_WORLD)
        return ferry_fail(FERRY_EINVAL,
                          "tcp group: world size must be 1 to %d, got %d",
                          FERRY__COMM_TCP_WORLD, o->world_size);
    if (o->rank < 0 || o->rank >= o->world_size)
        return ferry_fail(FERRY_EINVAL, "tcp group: rank %d of a world of %d",
                          o->rank, o->world_size);
    if (n < 1 || n > FERRY__COMM_TCP_SECRET)
        return ferry_fail(FERRY_EINVAL,
                          "tcp group: the secret must have 1 to %d characters, "
                          "got %zu",
                          FERRY__COMM_TCP_SECRET, n);
    return FERRY_OK;
}

static tcp__comm *create(const ferry__comm_tcp_options *o)
{
    tcp__comm *c = ferry__alloc(sizeof(*c));

    if (!c)
        return NULL;
    c->base = (ferry__comm){.ops = &ferry__tcp_ops,
                            .rank = o->rank,
                            .world_size = o->world_size,
                            .bounds_silence = o->no_progress_ms > 0};
    c->identity = (tcp__identity){.rank = o->rank,
                                  .world_size = o->world_size,
                                  .generation = o->generation};
    snprintf(c->identity.secret, sizeof(c->identity.secret), "%s", o->secret);
    c->no_progress_ms = o->no_progress_ms;
    pthread_mutex_init(&c->lock, NULL);
    c->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    for (int32_t r = 0; r < FERRY__COMM_TCP_WORLD; r++) {
        for (int ch = 0; ch < TCP__CHANNELS; ch++)
            c->peers[r].fds[ch] = -1;
    }
    for (int32_t r = 0; r < o->world_size; r++) {
        c->host_ids[r] = o->members[r].host_id;
        snprintf(c->peers[r].host, sizeof(c->peers[r].host), "%s",
                 o->members[r].host);
    }
    snprintf(c->host, sizeof(c->host), "%s", o->members[o->rank].host);
    ferry__tcp_text(c->where, o->members[o->rank].host,
                    o->members[o->rank].port);
    return c;
}

ferry_status ferry__comm_tcp_open(const ferry__comm_tcp_options *options,
                                  int listener, int64_t timeout_ms,
                                  ferry__comm **out)
{
    ferry_status status;
    tcp__comm *c;

    FERRY_TRY(check_options(options));
    if (timeout_ms <= 0)
        return ferry_fail(FERRY_EINVAL, "tcp group: timeout must be above 0");
    c = create(options);
    if (!c)
        return FERRY_ENOMEM;
    if (ferry__tcp_local_host(listener, c->bind, sizeof(c->bind)) < 0 ||
        strcmp(c->bind, "0.0.0.0") == 0 || strcmp(c->bind, "::") == 0)
        c->bind[0] = '\0';
    status = c->wake < 0
                 ? ferry_fail(FERRY_EIO, "tcp group: no event descriptor")
                 : ferry__tcp_meet(c, options, listener, timeout_ms);
    if (status < 0) {
        ferry__tcp_close(&c->base);
        return status;
    }
    *out = &c->base;
    return FERRY_OK;
}

void ferry__comm_tcp_egress(const ferry__comm *comm, uint64_t *out_remote,
                            uint64_t *out_local)
{
    const tcp__comm *c = (const tcp__comm *)comm;

    *out_remote = c->sent_remote;
    *out_local = c->sent_local;
}

uint64_t ferry__comm_tcp_host_id(const char *name)
{
    char text[128] = "";
    struct stat net = {0};
    size_t n = 0;
    FILE *file;

    if (name && *name)
        return ferry__xxh3(name, strlen(name));
    file = fopen("/proc/sys/kernel/random/boot_id", "re");
    if (file) {
        n = fread(text, 1, 64, file);
        fclose(file);
    }
    if (n == 0)
        gethostname(text, 64);
    stat("/proc/self/ns/net", &net);
    n = strnlen(text, 64);
    snprintf(text + n, sizeof(text) - n, " %llu",
             (unsigned long long)net.st_ino);
    return ferry__xxh3(text, strlen(text));
}
