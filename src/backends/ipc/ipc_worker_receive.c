/* SPDX-License-Identifier: Apache-2.0 */
/* One update: the update info that came over HTTP is held against what the
 * trainer announced over the socket, every handle is checked, and only then
 * are parameters loaded, in declared order.
 * Invariant: nothing is written before everything that can be checked was;
 * success is reported only after the last byte and digest came. */
#include "backends/ipc/ipc_worker_state.h"

#include "base/alloc.h"
#include "core/manifest.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

#define CMA_PIECE ((size_t)1 << 20)
#define LISTS_MAX 1024

typedef struct receive {
    ipc__worker *w;
    const ferry_param_meta *params;
    size_t count;
    ferry__ipc_handle *handles;
    bool used_shared, used_ring, used_cma;
    /* the ring's reading end */
    ferry__ipc_record records[FERRY__IPC_MAX_RECORDS]; /* of the open slot */
    uint32_t n_records, next_record;
    bool slot_open;
    char *scratch; /* of CMA_PIECE bytes */
} receive;

/* ---- before the first write ---- */

static ferry_status await_announcement(receive *r)
{
    ipc__worker *w = r->w;

    while (!w->announced)
        FERRY_TRY(ipc__worker_look(w,
                                   "waiting for the trainer to announce "
                                   "the update",
                                   IPC__SLICE_MS));
    if (w->announcement.manifest_digest !=
            ferry__manifest_digest(r->params, r->count) ||
        w->announcement.handles_digest !=
            ferry__ipc_handles_digest(r->handles, r->params, r->count))
        return ferry_fail(FERRY_EMISMATCH,
                          "update %llu is not what the trainer announced",
                          (unsigned long long)w->update);
    return FERRY_OK;
}

static ferry_status check_handle(const receive *r, size_t i)
{
    const ferry__ipc_handle *h = &r->handles[i];
    const ferry_param_meta *param = &r->params[i];
    const ipc__mapped *segment;

    switch (h->kind) {
    case FERRY__IPC_EMPTY:
        if (ferry__meta_numel(param) == 0)
            return FERRY_OK;
        return ferry_fail(FERRY_EINVAL,
                          "field handles: parameter %s is empty there, but "
                          "has %lld elements",
                          param->name, (long long)ferry__meta_numel(param));
    case FERRY__IPC_SHARED:
        segment = ipc__worker_segment(r->w, h->id);
        if (!segment)
            return ferry_fail(FERRY_EINVAL,
                              "field handles: parameter %s: the trainer "
                              "published no segment %llu",
                              param->name, (unsigned long long)h->id);
        return ferry__ipc_handle_check(h, param, segment->size_bytes);
    case FERRY__IPC_CMA:
        if (h->strided || r->w->ranges.update != r->w->update ||
            h->id >= r->w->ranges.count)
            return ferry_fail(FERRY_EINVAL,
                              "field handles: parameter %s: the trainer "
                              "published no range %llu",
                              param->name, (unsigned long long)h->id);
        return ferry__ipc_handle_check(h, param,
                                       r->w->ranges.items[h->id].size_bytes);
    default:
        if (r->w->n_slots > 0)
            return FERRY_OK;
        return ferry_fail(FERRY_EINVAL,
                          "field handles: parameter %s: the session has no "
                          "ring",
                          param->name);
    }
}

static bool knows_list(const ipc__worker *w, uint64_t digest)
{
    for (size_t i = 0; i < w->n_lists; i++) {
        if (w->lists[i] == digest)
            return true;
    }
    return false;
}

/* Tells the trainer which boxes to hash. A list that it has is only named. */
static ferry_status send_boxes(receive *r)
{
    ipc__worker *w = r->w;
    ferry__ipc_boxes v = {.update = w->update};
    ferry__str s = {0};
    ferry_status status =
        ferry__box_lists_gather(w->host, w->ctx, r->count, &v.lists);

    if (status == FERRY_OK)
        status = ferry__box_lists_digest(&v.lists, &v.digest);
    if (status == FERRY_OK) {
        v.listed = !knows_list(w, v.digest);
        if (v.listed && w->n_lists < LISTS_MAX) {
            status = ferry__grow(&w->lists, &w->lists_capacity, w->n_lists,
                                 sizeof(*w->lists));
            if (status == FERRY_OK)
                w->lists[w->n_lists++] = v.digest;
        }
    }
    if (status == FERRY_OK) {
        ferry__ipc_put_boxes(&s, &v);
        status = ipc__worker_send(w, &s, "sending boxes");
    }
    ferry__box_lists_free(&v.lists);
    return status;
}

/* ---- loading ---- */

static void count_taken(receive *r, uint64_t bytes)
{
    ipc__worker *w = r->w;

    w->bytes += bytes;
    atomic_store(&w->reader->taken_bytes, w->bytes);
    w->host->progress(w->ctx, bytes);
}

static ferry_status load_shared(receive *r, size_t i)
{
    ipc__worker *w = r->w;
    ipc__mapped *segment = ipc__worker_segment(w, r->handles[i].id);
    ferry_tensor tensor;

    ferry__ipc_handle_tensor(&r->handles[i], &r->params[i], segment->memory,
                             &tensor);
    FERRY_TRY(w->host->load(w->ctx, i, &tensor));
    count_taken(r, ferry__meta_bytes(&r->params[i]));
    r->used_shared = true;
    return FERRY_OK;
}

static ferry_status load_empty(receive *r, size_t i)
{
    static char nothing;
    ferry__ipc_handle h = {.kind = FERRY__IPC_EMPTY};
    ferry_tensor tensor;

    ferry__ipc_handle_tensor(&h, &r->params[i], &nothing, &tensor);
    return r->w->host->load(r->w->ctx, i, &tensor);
}

static ferry_status cma_read(ipc__worker *w, uint64_t address, char *out,
                             size_t size_bytes, const char *name)
{
    while (size_bytes > 0) {
        struct iovec mine = {out, size_bytes};
        struct iovec theirs = {(void *)(uintptr_t)address, size_bytes};
        ssize_t n = process_vm_readv(w->trainer_pid, &mine, 1, &theirs, 1, 0);

        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return ferry_fail(FERRY_EPEER,
                              "parameter %s: reading from the trainer (pid "
                              "%d): %s",
                              name, w->trainer_pid,
                              n < 0 ? strerror(errno) : "nothing came");
        out += n;
        address += (uint64_t)n;
        size_bytes -= (size_t)n;
    }
    return FERRY_OK;
}

static ferry_status load_cma(receive *r, size_t i)
{
    ipc__worker *w = r->w;
    const ferry_param_meta *param = &r->params[i];
    size_t elem = ferry_dtype_bytes(param->dtype);
    int64_t step = (int64_t)(CMA_PIECE / elem);
    int64_t numel = ferry__meta_numel(param);
    uint64_t from =
        w->ranges.items[r->handles[i].id].address + r->handles[i].offset;

    if (!r->scratch) {
        r->scratch = ferry__alloc_raw(CMA_PIECE);
        if (!r->scratch)
            return FERRY_ENOMEM;
        w->host->count_buffers(w->ctx, (int64_t)CMA_PIECE);
    }
    for (int64_t at = 0; at < numel; at += step) {
        int64_t n = numel - at < step ? numel - at : step;
        size_t bytes = (size_t)n * elem;

        FERRY_TRY(cma_read(w, from + (uint64_t)at * elem, r->scratch, bytes,
                           param->name));
        FERRY_TRY(w->host->load_range(w->ctx, i, r->scratch, at, n));
        count_taken(r, bytes);
        FERRY_TRY(ipc__worker_look(w, "loading", 0));
    }
    r->used_cma = true;
    return FERRY_OK;
}

/* Copies the slot's records out, since the other side could change them
 * between check and use. */
static ferry_status open_slot(receive *r, const char *name)
{
    ipc__worker *w = r->w;
    const ferry__ipc_slot *head;
    char what[400];

    snprintf(what, sizeof(what), "waiting for parameter %s in the ring", name);
    while (!ferry__gate_await(&w->ring->published, w->slot + 1, IPC__SLICE_MS))
        FERRY_TRY(ipc__worker_look(w, what, 0));
    head = ferry__ipc_ring_slot(w->ring, w->n_slots, w->slot);
    r->n_records = head->n_records;
    if (head->update != w->update || r->n_records > FERRY__IPC_MAX_RECORDS)
        return ferry_fail(
            FERRY_EPEER, "the ring carries update %llu, this is update %llu",
            (unsigned long long)head->update, (unsigned long long)w->update);
    memcpy(r->records, head->records, r->n_records * sizeof(*r->records));
    r->next_record = 0;
    r->slot_open = true;
    return FERRY_OK;
}

static void close_slot(receive *r)
{
    r->w->slot++;
    ferry__gate_raise(&r->w->reader->consumed, r->w->slot);
    r->slot_open = false;
}

static ferry_status check_record(const receive *r, const ferry__ipc_record *rec,
                                 size_t i, int64_t want)
{
    size_t elem = ferry_dtype_bytes(r->params[i].dtype);
    int64_t left = ferry__meta_numel(&r->params[i]) - want;

    if (rec->param != i || rec->first != want || rec->count < 1 ||
        rec->count > left || (rec->count < left && rec->count % 32 != 0) ||
        rec->offset > r->w->slot_bytes || rec->offset % elem != 0 ||
        (uint64_t)rec->count > (r->w->slot_bytes - rec->offset) / elem)
        return ferry_fail(FERRY_EPEER,
                          "parameter %s: the ring carries elements %lld + "
                          "%lld of number %u where %lld of number %zu is due",
                          r->params[i].name, (long long)rec->first,
                          (long long)rec->count, rec->param, (long long)want,
                          i);
    return FERRY_OK;
}

static ferry_status load_ring(receive *r, size_t i)
{
    ipc__worker *w = r->w;
    size_t elem = ferry_dtype_bytes(r->params[i].dtype);
    int64_t numel = ferry__meta_numel(&r->params[i]), at = 0;

    r->used_ring = true;
    while (at < numel) {
        const ferry__ipc_record *rec;

        if (!r->slot_open)
            FERRY_TRY(open_slot(r, r->params[i].name));
        if (r->next_record == r->n_records) {
            close_slot(r);
            continue;
        }
        rec = &r->records[r->next_record++];
        FERRY_TRY(check_record(r, rec, i, at));
        FERRY_TRY(w->host->load_range(
            w->ctx, i,
            ferry__ipc_ring_data(w->ring, w->n_slots, w->slot_bytes, w->slot) +
                rec->offset,
            rec->first, rec->count));
        at += rec->count;
        count_taken(r, (uint64_t)rec->count * elem);
        if (r->next_record == r->n_records)
            close_slot(r);
    }
    return FERRY_OK;
}

static ferry_status load_one(receive *r, size_t i)
{
    switch (r->handles[i].kind) {
    case FERRY__IPC_SHARED:
        return load_shared(r, i);
    case FERRY__IPC_CMA:
        return load_cma(r, i);
    case FERRY__IPC_EMPTY:
        return load_empty(r, i);
    default:
        return load_ring(r, i);
    }
}

/* A look at the socket now and then, so that a trainer that gives up is not
 * read on from. */
#define LOOK_BYTES ((uint64_t)8 << 20)

static ferry_status load_all(receive *r)
{
    uint64_t looked = 0;

    for (size_t i = 0; i < r->count; i++) {
        FERRY_TRY(load_one(r, i));
        if (r->w->bytes - looked >= LOOK_BYTES || i % 256 == 255) {
            looked = r->w->bytes;
            FERRY_TRY(ipc__worker_look(r->w, "loading", 0));
        }
    }
    if (r->slot_open)
        close_slot(r);
    return FERRY_OK;
}

static ferry_status take_digests(receive *r)
{
    ipc__worker *w = r->w;

    while (!w->have_digests)
        FERRY_TRY(ipc__worker_look(w, "waiting for the trainer's digests",
                                   IPC__SLICE_MS));
    for (size_t k = 0; k < w->digests.count; k++) {
        const ferry__ipc_digest *d = &w->digests.items[k];

        FERRY_TRY(w->host->expect_digest(w->ctx, d->param, d->box, d->xxh3));
    }
    return FERRY_OK;
}

/* Every box must have got its digest: none left out, none twice. */
static ferry_status check_digest_count(receive *r)
{
    size_t wanted = 0, n;
    const ferry_box *boxes;

    for (size_t i = 0; i < r->count; i++) {
        FERRY_TRY(r->w->host->boxes(r->w->ctx, i, &boxes, &n));
        wanted += n;
    }
    if (r->w->digests.count != wanted)
        return ferry_fail(FERRY_EDIGEST,
                          "the trainer sent %zu digests for %zu boxes",
                          r->w->digests.count, wanted);
    return FERRY_OK;
}

static ferry_status send_done(receive *r)
{
    ferry__ipc_done v = {r->w->update, r->w->bytes};
    ferry__str s = {0};

    ferry__ipc_put_done(&s, &v);
    return ipc__worker_send(r->w, &s, "reporting the update as loaded");
}

/* ---- the whole ---- */

static void begin_ring(receive *r)
{
    ipc__worker *w = r->w;

    w->bytes = 0;
    w->slot = w->announcement.ring_first;
    atomic_store(&w->reader->taken_bytes, 0);
    atomic_store(&w->reader->taken_update, w->update);
    ferry__gate_raise(&w->reader->consumed, w->slot);
}

static void note_path(const receive *r)
{
    char path[32];
    const char *direct = r->used_shared ? "shared" : r->used_cma ? "cma" : "";

    snprintf(path, sizeof(path), "%s%s%s", direct,
             direct[0] && r->used_ring ? "+" : "", r->used_ring ? "ring" : "");
    if (path[0])
        r->w->host->set_path(r->w->ctx, path);
}

static ferry_status run(receive *r)
{
    FERRY_TRY(await_announcement(r));
    for (size_t i = 0; i < r->count; i++)
        FERRY_TRY(check_handle(r, i));
    begin_ring(r);
    if (r->w->digest)
        FERRY_TRY(send_boxes(r));
    FERRY_TRY(load_all(r));
    note_path(r);
    if (r->w->digest) {
        FERRY_TRY(take_digests(r));
        FERRY_TRY(check_digest_count(r));
    }
    return send_done(r);
}

/* The trainer hears of it on the socket before the server has answered. Of an
 * update that it never announced it hears nothing: that was not its own. */
static void tell_failure(ipc__worker *w, ferry_status status)
{
    ferry__waiter wait = {NULL, NULL, ferry__deadline_in(100), "ipc failure"};
    ferry__ipc_failure f = {w->update, status, {0}};
    ferry__str s = {0};
    char line[1024];

    snprintf(line, sizeof(line), "%s", ferry_last_error());
    snprintf(f.text, sizeof(f.text), "%.500s", line);
    ferry__ipc_put_failure(&s, &f);
    ferry__ipc_link_send(&w->link, &s, -1, &wait);
    ferry_fail(status, "%s", line);
}

static ferry_status check_call(ipc__worker *w,
                               const ferry__ipc_update_info *info)
{
    if (w->link.fd < 0)
        return ferry_fail(FERRY_EORDER,
                          "handles need a Ferry trainer: its init info, with "
                          "a socket, must come first");
    if (w->link.broken || !w->ring)
        return ferry_fail(FERRY_EPEER,
                          "ipc trainer (pid %d) is gone: "
                          "init_weight_transfer_engine must come first",
                          w->trainer_pid);
    if (info->update <= w->last_update)
        return ferry_fail(FERRY_EORDER,
                          "field update: %llu was taken already, the next is "
                          "above %llu",
                          (unsigned long long)info->update,
                          (unsigned long long)w->last_update);
    if (!info->handles)
        return ferry_fail(FERRY_EINVAL,
                          "IPCWeightTransferUpdateInfo: field handles: "
                          "missing");
    return FERRY_OK;
}

static ferry_status receive_locked(ipc__worker *w,
                                   const ferry__ipc_update_info *info)
{
    receive *r;
    ferry_status status;

    FERRY_TRY(check_call(w, info));
    r = ferry__alloc(sizeof(*r));
    if (!r)
        return FERRY_ENOMEM;
    r->w = w;
    r->params = w->host->declared(w->ctx, &r->count);
    w->update = info->update;
    w->announced = w->have_digests = false;
    status =
        ferry__ipc_get_handles(info->handles, r->params, r->count, &r->handles);
    if (status == FERRY_OK)
        status = run(r);
    if (w->announced)
        w->last_update = w->update;
    if (status < 0 && w->announced)
        tell_failure(w, status);
    /* A stream that stopped inside a frame is of no use: the trainer learns
     * it from the socket and opens a new session. */
    if (w->link.broken)
        shutdown(w->link.fd, SHUT_RDWR);
    if (r->scratch)
        w->host->count_buffers(w->ctx, -(int64_t)CMA_PIECE);
    ferry__free(r->handles);
    ferry__free(r->scratch);
    ferry__free(r);
    return status;
}

ferry_status ipc__worker_receive(void *self, const void *update_info)
{
    ipc__worker *w = self;
    ferry_status status;

    pthread_mutex_lock(&w->lock);
    status = receive_locked(w, update_info);
    pthread_mutex_unlock(&w->lock);
    return status;
}
