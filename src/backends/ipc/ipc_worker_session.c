/* SPDX-License-Identifier: Apache-2.0 */
/* Joining a trainer's session, and leaving it: by shutdown, or because the
 * trainer went away, which a watcher notices between rounds, so that a dead
 * trainer's memory is not held until somebody asks.
 * Invariant: the secret is shown only to a peer whose user the kernel has
 * named as this one or root. */
#include "backends/ipc/ipc_worker_state.h"

#include "base/alloc.h"
#include "base/thread.h"
#include "device/shared.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/uio.h>
#include <unistd.h>

static ferry_status check_trainer(ipc__worker *w)
{
    uint32_t uid;

    FERRY_TRY(ferry__unix_peer(w->link.fd, &w->trainer_pid, &uid));
    if (uid != geteuid() && uid != 0)
        return ferry_fail(FERRY_EAUTH,
                          "ipc: the socket belongs to user %u (pid %d), this "
                          "worker is user %u",
                          uid, w->trainer_pid, (unsigned)geteuid());
    return FERRY_OK;
}

static ferry_status say_hello(ipc__worker *w, const char *secret,
                              const ferry__waiter *wait)
{
    const ferry_worker_options *o = w->host->options(w->ctx);
    ferry__ipc_hello v = {
        FERRY__IPC_MAGIC, FERRY__IPC_VERSION, o->tp_rank,        o->tp_size,
        o->dp_rank,       o->dp_size,         (int32_t)getpid(), {0}};
    ferry__str s = {0};

    memcpy(v.secret, secret, strnlen(secret, FERRY__IPC_SECRET_CHARS));
    ferry__ipc_put_hello(&s, &v);
    return ferry__ipc_link_send(&w->link, &s, -1, wait);
}

static ferry_status read_welcome(ipc__worker *w, ferry__ipc_welcome *out,
                                 const ferry__waiter *wait)
{
    ferry__ipc_failure f;
    ferry_status status;
    void *bytes = NULL;
    size_t size = 0;

    FERRY_TRY(ferry__ipc_link_recv(&w->link, 4096, &bytes, &size, wait));
    if (ferry__ipc_frame_type(bytes, size) == FERRY__IPC_FAILURE) {
        status = ferry__ipc_get_failure(bytes, size, &f);
        if (status == FERRY_OK)
            status =
                ferry_fail((ferry_status)f.status, "ipc trainer (pid %d): %s",
                           w->trainer_pid, f.text);
    } else {
        status = ferry__ipc_get_welcome(bytes, size, out);
    }
    ferry__free(bytes);
    FERRY_TRY(status);
    if (out->magic != FERRY__IPC_MAGIC || out->version != FERRY__IPC_VERSION)
        return ferry_fail(FERRY_EVERSION,
                          "ipc protocol version: trainer %u, worker %d",
                          out->version, FERRY__IPC_VERSION);
    return FERRY_OK;
}

static ferry_status map_ring(ipc__worker *w, const ferry__ipc_welcome *v,
                             const ferry__waiter *wait)
{
    ferry_status status;
    void *memory;
    int fd;

    FERRY_TRY(ferry__ipc_link_recv_fd(&w->link, &fd, wait));
    status = v->segment_bytes > SIZE_MAX / 2
                 ? ferry_fail(FERRY_EPEER, "ipc session of %llu bytes",
                              (unsigned long long)v->segment_bytes)
                 : ferry__shared_map(fd, v->segment_bytes, 1, &memory);
    close(fd);
    FERRY_TRY(status);
    w->ring = memory;
    w->ring_bytes = v->segment_bytes;
    FERRY_TRY(ferry__ipc_ring_check(w->ring, w->ring_bytes, &w->n_slots,
                                    &w->slot_bytes));
    w->reader = &w->ring->readers[v->reader];
    w->counted_bytes = w->ring_bytes;
    w->host->count_buffers(w->ctx, (int64_t)w->counted_bytes);
    return FERRY_OK;
}

/* A trial read of the trainer's memory: whether the system allows it is
 * known now and not in the middle of a round. */
static ferry__ipc_ready try_cma(const ipc__worker *w,
                                const ferry__ipc_welcome *v)
{
    unsigned char got[FERRY__IPC_PROBE_BYTES] = {0};
    struct iovec mine = {got, sizeof(got)};
    struct iovec theirs = {(void *)(uintptr_t)v->probe_address, sizeof(got)};
    ferry__ipc_ready ready = {0, 0};
    ssize_t n;

    if (!(v->flags & FERRY__IPC_TRY_CMA))
        return ready;
    n = process_vm_readv(w->trainer_pid, &mine, 1, &theirs, 1, 0);
    if (n < 0)
        ready.error = errno;
    ready.cma =
        n == (ssize_t)sizeof(got) && memcmp(got, v->probe, sizeof(got)) == 0;
    return ready;
}

static ferry_status handshake(ipc__worker *w, const ferry__ipc_init_info *info)
{
    ferry__waiter wait = ipc__worker_waiter(w, "ipc init");
    ferry__ipc_welcome v;
    ferry__ipc_ready ready;
    ferry__str s = {0};

    FERRY_TRY(ferry__unix_connect(info->socket, &wait, &w->link.fd));
    w->link.broken = false;
    FERRY_TRY(check_trainer(w));
    FERRY_TRY(say_hello(w, info->secret, &wait));
    FERRY_TRY(read_welcome(w, &v, &wait));
    w->digest = (v.flags & FERRY__IPC_WANT_DIGEST) != 0;
    w->hashing = w->hashing || w->digest;
    FERRY_TRY(map_ring(w, &v, &wait));
    ready = try_cma(w, &v);
    ferry__ipc_put_ready(&s, &ready);
    return ferry__ipc_link_send(&w->link, &s, -1, &wait);
}

/* Blocks until the socket is closed at the other end, or the stop. Frames
 * that arrive are not its business. */
static void *watch(void *arg)
{
    ipc__worker *w = arg;
    struct pollfd p[2] = {{w->link.fd, POLLRDHUP, 0}, {w->stop_fd, POLLIN, 0}};

    while (poll(p, 2, -1) < 0 && errno == EINTR)
        ;
    if (p[1].revents == 0) {
        pthread_mutex_lock(&w->lock);
        ipc__worker_unmap_all(w);
        w->link.broken = true;
        pthread_mutex_unlock(&w->lock);
    }
    return NULL;
}

static ferry_status start_watcher(ipc__worker *w)
{
    w->stop_fd = eventfd(0, EFD_CLOEXEC);
    if (w->stop_fd < 0)
        return ferry_fail(FERRY_EIO, "eventfd: %s", strerror(errno));
    FERRY_TRY(ferry__thread_start(&w->watcher, "ferry-ipc-watch", watch, w));
    w->watching = true;
    return FERRY_OK;
}

void ipc__worker_unwatch(ipc__worker *w)
{
    uint64_t one = 1;

    if (w->watching) {
        while (write(w->stop_fd, &one, sizeof(one)) < 0 && errno == EINTR)
            ;
        pthread_join(w->watcher, NULL);
        w->watching = false;
    }
    if (w->stop_fd >= 0)
        close(w->stop_fd);
    w->stop_fd = -1;
}

ferry_status ipc__worker_join(ipc__worker *w, const ferry__ipc_init_info *info)
{
    if (strcmp(info->transport, FERRY__IPC_TRANSPORT) != 0)
        return ferry_fail(FERRY_ENOTSUP,
                          "IPCWeightTransferInitInfo: field transport: %s is "
                          "not %s",
                          info->transport, FERRY__IPC_TRANSPORT);
    if (info->protocol_version != FERRY__IPC_VERSION)
        return ferry_fail(FERRY_EVERSION,
                          "ipc protocol version: trainer %d, worker %d",
                          info->protocol_version, FERRY__IPC_VERSION);
    FERRY_TRY(handshake(w, info));
    return start_watcher(w);
}

void ipc__worker_leave(ipc__worker *w)
{
    ferry__ipc_link_close(&w->link);
    ipc__worker_unmap_all(w);
    if (w->counted_bytes > 0)
        w->host->count_buffers(w->ctx, -(int64_t)w->counted_bytes);
    w->counted_bytes = 0;
    ferry__free(w->mapped);
    ferry__free(w->lists);
    w->mapped = NULL;
    w->lists = NULL;
    w->n_mapped = w->mapped_capacity = 0;
    w->n_lists = w->lists_capacity = 0;
    w->last_update = 0;
    w->digest = false;
    ferry__free(w->ranges.items);
    ferry__free(w->digests.items);
    w->ranges = (ferry__ipc_ranges){0};
    w->digests = (ferry__ipc_digests){0};
}
