/* SPDX-License-Identifier: Apache-2.0 */
/* What the trainer says over the socket while an update is taken.
 * Invariant: segments and ranges come from here and from nowhere else, so a
 * client of the HTTP port can name them but not make them. */
#include "backends/ipc/ipc_worker_state.h"

#include "base/alloc.h"
#include "device/shared.h"

#include <poll.h>
#include <unistd.h>

static ferry_status check_host(void *arg)
{
    ipc__worker *w = arg;

    return w->host->check(w->ctx, "ipc socket");
}

ferry__waiter ipc__worker_waiter(ipc__worker *w, const char *what)
{
    return (ferry__waiter){
        check_host, w, ferry__deadline_in(w->host->remaining_ms(w->ctx)), what};
}

ipc__mapped *ipc__worker_segment(ipc__worker *w, uint64_t id)
{
    for (size_t i = 0; i < w->n_mapped; i++) {
        if (w->mapped[i].id == id)
            return &w->mapped[i];
    }
    return NULL;
}

static void unmap_at(ipc__worker *w, size_t i)
{
    ferry__shared_unmap(w->mapped[i].memory, w->mapped[i].size_bytes);
    w->mapped[i] = w->mapped[--w->n_mapped];
}

void ipc__worker_unmap_all(ipc__worker *w)
{
    while (w->n_mapped > 0)
        unmap_at(w, 0);
    if (w->ring)
        ferry__shared_unmap(w->ring, w->ring_bytes);
    w->ring = NULL;
    w->reader = NULL;
}

static ferry_status take_segment(ipc__worker *w, const void *bytes, size_t size)
{
    ferry__waiter wait = ipc__worker_waiter(w, "ipc segment");
    ferry__ipc_segment v;
    ferry_status status;
    void *memory;
    int fd;

    FERRY_TRY(ferry__ipc_get_segment(bytes, size, &v));
    FERRY_TRY(ferry__ipc_link_recv_fd(&w->link, &fd, &wait));
    if (v.size_bytes == 0 || v.size_bytes > SIZE_MAX / 2)
        status = ferry_fail(FERRY_EPEER, "ipc segment of %llu bytes",
                            (unsigned long long)v.size_bytes);
    else if (ipc__worker_segment(w, v.id))
        status = ferry_fail(FERRY_EPEER, "ipc segment %llu came twice",
                            (unsigned long long)v.id);
    else
        status = ferry__grow(&w->mapped, &w->mapped_capacity, w->n_mapped,
                             sizeof(*w->mapped));
    if (status == FERRY_OK)
        status = ferry__shared_map(fd, v.size_bytes, 0, &memory);
    close(fd);
    FERRY_TRY(status);
    w->mapped[w->n_mapped++] = (ipc__mapped){v.id, memory, v.size_bytes};
    return FERRY_OK;
}

static ferry_status take_drop(ipc__worker *w, const void *bytes, size_t size)
{
    uint64_t id;

    FERRY_TRY(ferry__ipc_get_drop(bytes, size, &id));
    for (size_t i = 0; i < w->n_mapped; i++) {
        if (w->mapped[i].id == id) {
            unmap_at(w, i);
            break;
        }
    }
    return FERRY_OK;
}

static ferry_status take_failure(ipc__worker *w, const void *bytes, size_t size)
{
    ferry__ipc_failure f;

    FERRY_TRY(ferry__ipc_get_failure(bytes, size, &f));
    if (f.update != w->update)
        return FERRY_OK; /* of an update that is over already */
    return ferry_fail(FERRY_ECANCELED,
                      "ipc trainer (pid %d) gave the update up: %s",
                      w->trainer_pid, f.text);
}

static ferry_status take_digests(ipc__worker *w, const void *bytes, size_t size)
{
    ferry__ipc_digests v;

    FERRY_TRY(ferry__ipc_get_digests(bytes, size, &v));
    if (v.update != w->update) {
        ferry__free(v.items);
        return FERRY_OK;
    }
    ferry__free(w->digests.items);
    w->digests = v;
    w->have_digests = true;
    return FERRY_OK;
}

static ferry_status take_update(ipc__worker *w, const void *bytes, size_t size)
{
    ferry__ipc_update v;

    FERRY_TRY(ferry__ipc_get_update(bytes, size, &v));
    if (v.update > w->update)
        return ferry_fail(
            FERRY_EORDER, "update %llu was asked for, the trainer is at %llu",
            (unsigned long long)w->update, (unsigned long long)v.update);
    if (v.update == w->update) {
        w->announcement = v;
        w->announced = true;
    }
    return FERRY_OK;
}

static ferry_status take_frame(ipc__worker *w, const void *bytes, size_t size)
{
    uint32_t type = ferry__ipc_frame_type(bytes, size);

    switch (type) {
    case FERRY__IPC_SEGMENT:
        return take_segment(w, bytes, size);
    case FERRY__IPC_DROP:
        return take_drop(w, bytes, size);
    case FERRY__IPC_RANGES:
        ferry__free(w->ranges.items);
        w->ranges = (ferry__ipc_ranges){0};
        return ferry__ipc_get_ranges(bytes, size, &w->ranges);
    case FERRY__IPC_UPDATE:
        return take_update(w, bytes, size);
    case FERRY__IPC_DIGESTS:
        return take_digests(w, bytes, size);
    case FERRY__IPC_FAILURE:
        return take_failure(w, bytes, size);
    default:
        return ferry_fail(FERRY_EPEER, "ipc trainer sent frame type %u", type);
    }
}

static ferry_status fail_gone(const ipc__worker *w, const char *what)
{
    return ferry_fail(FERRY_EPEER,
                      "ipc trainer (pid %d) closed its socket while %s",
                      w->trainer_pid, what);
}

ferry_status ipc__worker_look(ipc__worker *w, const char *what,
                              int64_t timeout_ms)
{
    struct pollfd p = {w->link.fd, POLLIN, 0};
    ferry__waiter wait = ipc__worker_waiter(w, what);
    ferry_status status;
    void *bytes = NULL;
    size_t size = 0;

    if (w->link.broken)
        return fail_gone(w, what);
    if (poll(&p, 1, (int)timeout_ms) <= 0)
        return w->host->check(w->ctx, what);
    status = ferry__ipc_link_recv(&w->link, FERRY__IPC_FRAME_MAX, &bytes, &size,
                                  &wait);
    if (status == FERRY_ECONN)
        return fail_gone(w, what);
    FERRY_TRY(status);
    status = take_frame(w, bytes, size);
    ferry__free(bytes);
    return status;
}

ferry_status ipc__worker_send(ipc__worker *w, ferry__str *s, const char *what)
{
    ferry__waiter wait = ipc__worker_waiter(w, what);
    ferry_status status = ferry__ipc_link_send(&w->link, s, -1, &wait);

    return status == FERRY_ECONN ? fail_gone(w, what) : status;
}
