/* SPDX-License-Identifier: Apache-2.0 */
/* One-sided gets between processes of one host: the kernel copies from the
 * other process (process_vm_readv). What is exposed is listed in the segment.
 * Key: 1. u32 magic  2. u32 index in the rank's list  3. u64 serial.
 * Invariant: only listed memory is read, and bytes that were read count only
 * if it was still listed afterwards. */
#include "comm/local_segment.h"

#include <errno.h>
#include <string.h>
#include <sys/uio.h>

#define MAGIC       UINT32_C(0x504c4c50) /* "PLLP" */
#define PIECE_BYTES ((size_t)16 << 20)

typedef struct pull_key {
    uint32_t magic, index;
    uint64_t serial;
} pull_key;

static local__exposed *exposed_of(const local__comm *c, int32_t rank)
{
    return c->ranks[rank].exposed;
}

/* ---- exposing ---- */

ferry_status ferry__local_expose(ferry__comm *comm, void *bytes,
                                 size_t size_bytes, void *out_key,
                                 size_t *out_key_bytes)
{
    local__comm *c = (local__comm *)comm;
    local__exposed *list = exposed_of(c, comm->rank);
    pull_key key = {.magic = MAGIC};

    if (!bytes || size_bytes == 0)
        return ferry_fail(FERRY_EINVAL, "expose: %zu bytes", size_bytes);
    while (key.index < LOCAL__EXPOSED &&
           atomic_load(&list[key.index].serial) != 0)
        key.index++;
    if (key.index == LOCAL__EXPOSED)
        return ferry_fail(FERRY_ENOSPC,
                          "expose: rank %d exposes %d pieces of memory, there "
                          "is room for no more",
                          comm->rank, LOCAL__EXPOSED);
    key.serial = ++c->serial;
    atomic_store(&list[key.index].address, (uintptr_t)bytes);
    atomic_store(&list[key.index].size_bytes, size_bytes);
    atomic_store(&list[key.index].serial, key.serial);
    memcpy(out_key, &key, sizeof(key));
    *out_key_bytes = sizeof(key);
    return FERRY_OK;
}

void ferry__local_unexpose(ferry__comm *comm, void *bytes)
{
    local__exposed *list = exposed_of((local__comm *)comm, comm->rank);

    for (int i = 0; i < LOCAL__EXPOSED; i++) {
        if (atomic_load(&list[i].serial) != 0 &&
            atomic_load(&list[i].address) == (uintptr_t)bytes) {
            atomic_store(&list[i].serial, 0);
            return;
        }
    }
}

void ferry__local_unexpose_all(local__comm *c)
{
    local__exposed *list = exposed_of(c, c->base.rank);

    for (int i = 0; i < LOCAL__EXPOSED; i++)
        atomic_store(&list[i].serial, 0);
}

/* ---- pulling ---- */

static ferry_status gone(int32_t from)
{
    return ferry_fail(FERRY_EMISMATCH,
                      "pull: rank %d exposes that memory no more", from);
}

static ferry_status find(const local__comm *c, int32_t from, const void *bytes,
                         size_t key_bytes, local__exposed **out,
                         uint64_t *out_serial)
{
    pull_key key;

    if (key_bytes != sizeof(key))
        return ferry_fail(FERRY_EINVAL, "pull: key of %zu bytes", key_bytes);
    memcpy(&key, bytes, sizeof(key));
    if (key.magic != MAGIC || key.index >= LOCAL__EXPOSED || key.serial == 0)
        return ferry_fail(FERRY_EINVAL,
                          "pull: the key is none of this provider");
    *out = &exposed_of(c, from)[key.index];
    *out_serial = key.serial;
    return FERRY_OK;
}

/* Reads from the other process. FERRY_DONE: its memory is not there. */
static ferry_status read_piece(const local__comm *c, int32_t from, char *bytes,
                               uint64_t address, size_t size)
{
    int32_t pid = atomic_load(&c->ranks[from].pid);
    struct iovec here = {bytes, size};
    struct iovec there = {(void *)(uintptr_t)address, size};
    ssize_t n;

    do {
        n = process_vm_readv(pid, &here, 1, &there, 1, 0);
    } while (n < 0 && errno == EINTR);
    if (n == (ssize_t)size)
        return FERRY_OK;
    if (n >= 0 || errno == EFAULT)
        return FERRY_DONE;
    if (errno == EPERM || errno == ENOSYS)
        return ferry_fail(FERRY_ENOTSUP,
                          "pull: the memory of rank %d (pid %d) may not be "
                          "read here: %s",
                          from, pid, strerror(errno));
    return ferry_fail(FERRY_EPEER, "pull: rank %d (pid %d): %s", from, pid,
                      strerror(errno));
}

static ferry_status read_all(local__comm *c, const local__call *call,
                             int32_t from, char *bytes, uint64_t address,
                             size_t size_bytes)
{
    for (size_t at = 0; at < size_bytes;) {
        size_t left = size_bytes - at;
        size_t size = left < PIECE_BYTES ? left : PIECE_BYTES;
        ferry_status status;

        FERRY_TRY(ferry__local_ask(c, call, from));
        if (ferry__deadline_passed(&call->deadline))
            return ferry_fail(FERRY_ETIMEOUT,
                              "pull: rank %d: not all was read within %lld ms",
                              from, (long long)call->deadline.bound_ms);
        status = read_piece(c, from, bytes + at, address + at, size);
        if (status != FERRY_OK)
            return status;
        at += size;
    }
    return FERRY_OK;
}

ferry_status ferry__local_pull(ferry__comm *comm, void *bytes,
                               size_t size_bytes, int32_t from, const void *key,
                               size_t key_bytes, uint64_t offset,
                               int64_t timeout_ms)
{
    local__comm *c = (local__comm *)comm;
    uint64_t serial, exposed, address;
    local__exposed *e;
    ferry_status status;
    local__call call;

    if (from < 0 || from >= comm->world_size || from == comm->rank)
        return ferry_fail(FERRY_EINVAL,
                          "pull: peer %d for rank %d in a world of %d", from,
                          comm->rank, comm->world_size);
    FERRY_TRY(find(c, from, key, key_bytes, &e, &serial));
    FERRY_TRY(ferry__local_enter(c, "pull", timeout_ms, &call));
    status = ferry__local_ask(c, &call, from);
    if (status < 0)
        return ferry__local_break(c, status);
    address = atomic_load(&e->address);
    exposed = atomic_load(&e->size_bytes);
    if (atomic_load(&e->serial) != serial)
        return gone(from);
    if (offset > exposed || size_bytes > exposed - offset)
        return ferry_fail(FERRY_EINVAL,
                          "pull: %zu bytes at %llu of rank %d, which exposes "
                          "%llu",
                          size_bytes, (unsigned long long)offset, from,
                          (unsigned long long)exposed);
    status = read_all(c, &call, from, bytes, address + offset, size_bytes);
    if (status == FERRY_DONE || (status >= 0 && e->serial != serial))
        return gone(from);
    return status < 0 ? ferry__local_break(c, status) : FERRY_OK;
}
