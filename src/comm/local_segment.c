/* SPDX-License-Identifier: Apache-2.0 */
/* Making and joining a local group, and its waits: who is waited for is
 * looked at every 100 ms, so a dead rank is named and not waited out.
 * Invariant: no wait outlives its call's bound. */
#include "comm/local_segment.h"

#include "base/alloc.h"
#include "base/log.h"
#include "device/shared.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAGIC        0x4d4d4f43u /* "COMM" */
#define VERSION      2u
#define PAGE         4096u
#define WORLD_MAX    256
#define SLOT_DEFAULT ((size_t)1 << 20)
#define SLOT_MIN     ((size_t)64)
#define PAIR_MAX     ((size_t)64 << 10)
#define SLICE_MS     100

typedef struct layout {
    size_t ranks, pairs, slots, pieces, total;
} layout;

static bool align_up(size_t value, size_t unit, size_t *out)
{
    size_t sum;

    if (!ferry__add(value, unit - 1, &sum))
        return false;
    *out = sum / unit * unit;
    return true;
}

static bool append(size_t *at, size_t count, size_t bytes)
{
    size_t product, end;

    if (!ferry__mul(count, bytes, &product) || !ferry__add(*at, product, &end))
        return false;
    return align_up(end, PAGE, at);
}

static bool lay_out(int32_t world_size, size_t slot_bytes, size_t pair_bytes,
                    layout *out)
{
    size_t world = (size_t)world_size, at = PAGE;

    out->ranks = at;
    if (!append(&at, world, sizeof(local__rank)))
        return false;
    out->pairs = at;
    if (!append(&at, world * world, sizeof(local__pair)))
        return false;
    out->slots = at;
    if (!append(&at, 2 * world, slot_bytes))
        return false;
    out->pieces = at;
    if (!append(&at, 2 * world * world, pair_bytes))
        return false;
    out->total = at;
    return true;
}

ferry_status ferry__comm_local_create(int32_t world_size, size_t slot_bytes,
                                      int *out_fd)
{
    local__header *header;
    size_t pair_bytes;
    void *memory;
    layout where;

    if (world_size < 1 || world_size > WORLD_MAX)
        return ferry_fail(FERRY_EINVAL,
                          "local group: world size must be 1 to %d, got %d",
                          WORLD_MAX, world_size);
    if (slot_bytes == 0)
        slot_bytes = SLOT_DEFAULT;
    if (slot_bytes < SLOT_MIN || !align_up(slot_bytes, 64, &slot_bytes))
        return ferry_fail(FERRY_EINVAL,
                          "local group: slot of %zu bytes, at least %zu",
                          slot_bytes, SLOT_MIN);
    pair_bytes = slot_bytes < PAIR_MAX ? slot_bytes : PAIR_MAX;
    if (!lay_out(world_size, slot_bytes, pair_bytes, &where))
        return ferry_fail(FERRY_EOVERFLOW,
                          "local group: %d ranks with slots of %zu bytes do "
                          "not fit",
                          world_size, slot_bytes);
    FERRY_TRY(ferry__shared_create("ferry-comm", where.total, out_fd, &memory));
    header = memory;
    header->version = VERSION;
    header->world_size = world_size;
    header->slot_bytes = slot_bytes;
    header->pair_bytes = pair_bytes;
    header->total_bytes = where.total;
    if (getrandom(&header->generation, sizeof(header->generation), 0) < 0)
        header->generation = (uint64_t)ferry__now_ns();
    header->magic = MAGIC;
    ferry__shared_unmap(memory, where.total);
    return FERRY_OK;
}

/* State letter and start time of a process; false when there is none. */
static bool process_look(int32_t pid, char *out_state, uint64_t *out_started)
{
    unsigned long long started;
    char path[64], text[1024];
    const char *after;
    size_t n;
    FILE *file;

    snprintf(path, sizeof(path), "/proc/%d/stat", pid);
    file = fopen(path, "re");
    if (!file)
        return false;
    n = fread(text, 1, sizeof(text) - 1, file);
    fclose(file);
    text[n] = '\0';
    /* The name in parentheses may hold anything, so look for its end. */
    after = strrchr(text, ')');
    if (!after || sscanf(after + 1,
                         " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u "
                         "%*u %*d %*d %*d %*d %*d %*d %llu",
                         out_state, &started) != 2)
        return false;
    *out_started = started;
    return true;
}

static bool process_alive(int32_t pid, uint64_t started)
{
    uint64_t now_started;
    char state;

    if (kill(pid, 0) != 0 && errno == ESRCH)
        return false;
    if (!process_look(pid, &state, &now_started))
        return access("/proc/self/stat", R_OK) != 0; /* no /proc: unknown */
    if (state == 'Z' || state == 'X')
        return false;
    return started == 0 || started == now_started;
}

char *ferry__local_slot(const local__comm *c, int32_t rank, uint32_t step)
{
    return c->slots + (2 * (size_t)rank + (step & 1)) * c->slot_bytes;
}

char *ferry__local_piece(const local__comm *c, int32_t from, int32_t to,
                         uint32_t count)
{
    size_t pair = (size_t)from * (size_t)c->base.world_size + (size_t)to;

    return c->pieces + (2 * pair + (count & 1)) * c->pair_bytes;
}

static ferry_status attach(local__comm *c, int fd)
{
    const local__header *header;
    struct stat info;
    layout where;
    void *memory;

    if (fstat(fd, &info) != 0 || info.st_size < (off_t)PAGE)
        return ferry_fail(FERRY_EINVAL,
                          "local group: the descriptor is no segment of one");
    FERRY_TRY(ferry__shared_map(fd, (size_t)info.st_size, 1, &memory));
    header = c->header = memory;
    c->total_bytes = (size_t)info.st_size;
    if (header->magic != MAGIC)
        return ferry_fail(FERRY_EINVAL,
                          "local group: the descriptor is no segment of one");
    if (header->version != VERSION)
        return ferry_fail(FERRY_EVERSION,
                          "local group: segment version %u, this library has "
                          "%u",
                          header->version, VERSION);
    if (header->world_size < 1 || header->world_size > WORLD_MAX ||
        !lay_out(header->world_size, header->slot_bytes, header->pair_bytes,
                 &where) ||
        where.total > c->total_bytes)
        return ferry_fail(FERRY_EINVAL, "local group: damaged segment");
    c->base.world_size = header->world_size;
    c->slot_bytes = header->slot_bytes;
    c->pair_bytes = header->pair_bytes;
    c->ranks = (local__rank *)((char *)memory + where.ranks);
    c->pairs = (local__pair *)((char *)memory + where.pairs);
    c->slots = (char *)memory + where.slots;
    c->pieces = (char *)memory + where.pieces;
    return FERRY_OK;
}

static bool group_has_begun(const local__comm *c)
{
    for (int32_t i = 0; i < c->base.world_size; i++) {
        if (ferry__gate_value(&c->ranks[i].posted) != 0 ||
            ferry__gate_value(&c->ranks[i].done) != 0)
            return true;
    }
    return false;
}

/* Takes the rank, unless a living process has it or the group has moved on
 * without it: its steps could not be made up for. */
static ferry_status claim(local__comm *c)
{
    local__rank *mine = &c->ranks[c->base.rank];
    uint32_t owner = atomic_load(&mine->owner);
    uint32_t state = atomic_load(&mine->state);
    int32_t pid = atomic_load(&mine->pid);
    uint64_t started = 0;
    char letter;

    if (state == LOCAL__JOINED || state == LOCAL__FAILED) {
        if (process_alive(pid, atomic_load(&mine->started)))
            return ferry_fail(FERRY_EEXIST,
                              "local group: rank %d is taken by pid %d, pid "
                              "%d wants it too",
                              c->base.rank, pid, (int)getpid());
    }
    if (state != LOCAL__FREE && group_has_begun(c))
        return ferry_fail(FERRY_EPEER,
                          "local group: rank %d (pid %d) is gone and the "
                          "group has begun without it",
                          c->base.rank, pid);
    if (!atomic_compare_exchange_strong(&mine->owner, &owner, owner + 1))
        return ferry_fail(FERRY_EEXIST,
                          "local group: rank %d is being taken by another "
                          "process",
                          c->base.rank);
    c->owner = owner + 1;
    process_look((int32_t)getpid(), &letter, &started);
    atomic_store(&mine->pid, (int32_t)getpid());
    atomic_store(&mine->started, started);
    atomic_store(&mine->state, LOCAL__JOINED);
    return FERRY_OK;
}

static void release(local__comm *c)
{
    if (c->header)
        ferry__shared_unmap(c->header, c->total_bytes);
    if (c->fd >= 0)
        close(c->fd);
    ferry__free(c);
}

static ferry_status join(local__comm *c, int fd, int32_t rank)
{
    c->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (c->fd < 0)
        return ferry_fail(FERRY_EIO, "local group: descriptor %d: %s", fd,
                          strerror(errno));
    FERRY_TRY(attach(c, c->fd));
    if (rank < 0 || rank >= c->base.world_size)
        return ferry_fail(FERRY_EINVAL, "local group: rank %d of a world of %d",
                          rank, c->base.world_size);
    c->base.rank = rank;
    return claim(c);
}

ferry_status ferry__comm_local_open(int fd, int32_t rank, ferry__comm **out)
{
    local__comm *c = ferry__alloc(sizeof(*c));
    ferry_status status;

    if (!c)
        return FERRY_ENOMEM;
    c->base.ops = &ferry__local_ops;
    c->fd = -1;
    status = join(c, fd, rank);
    if (status < 0) {
        release(c);
        return status;
    }
    *out = &c->base;
    return FERRY_OK;
}

void ferry__local_wake_all(local__comm *c)
{
    size_t world = (size_t)c->base.world_size;

    for (size_t i = 0; i < world; i++) {
        ferry__gate_wake(&c->ranks[i].posted);
        ferry__gate_wake(&c->ranks[i].done);
    }
    for (size_t i = 0; i < world * world; i++) {
        ferry__gate_wake(&c->pairs[i].sent);
        ferry__gate_wake(&c->pairs[i].taken);
    }
}

static bool still_owner(const local__comm *c)
{
    return atomic_load(&c->ranks[c->base.rank].owner) == c->owner;
}

ferry_status ferry__local_break(local__comm *c, ferry_status status)
{
    c->failed = status;
    snprintf(c->line, sizeof(c->line), "%s", ferry_last_error());
    if (still_owner(c))
        atomic_store(&c->ranks[c->base.rank].state, LOCAL__FAILED);
    ferry__local_wake_all(c);
    return status;
}

static ferry_status fail_aborted(const local__comm *c, const char *name)
{
    return ferry_fail(FERRY_ECANCELED, "%s: the group was aborted by rank %u",
                      name, atomic_load(&c->header->aborted) - 1);
}

/* Why a rank that is waited for will not come, or FERRY_OK. */
static ferry_status look_at(const local__comm *c, const char *name,
                            int32_t peer)
{
    const local__rank *other = &c->ranks[peer];
    uint32_t state = atomic_load(&other->state);
    int32_t pid = atomic_load(&other->pid);

    if (state == LOCAL__FREE)
        return FERRY_OK; /* not joined yet */
    if (state == LOCAL__FAILED)
        return ferry_fail(FERRY_EPEER, "%s: rank %d (pid %d) failed before",
                          name, peer, pid);
    if (state == LOCAL__LEFT)
        return ferry_fail(FERRY_EPEER, "%s: rank %d (pid %d) left the group",
                          name, peer, pid);
    if (!process_alive(pid, atomic_load(&other->started)))
        return ferry_fail(FERRY_EPEER, "%s: rank %d (pid %d) died", name, peer,
                          pid);
    return FERRY_OK;
}

/* A group in which one rank has failed is broken: a late rank is told, even
 * when the bytes it wants had been posted before. */
static ferry_status none_failed(const local__comm *c, const char *name)
{
    for (int32_t r = 0; r < c->base.world_size; r++) {
        if (atomic_load(&c->ranks[r].state) == LOCAL__FAILED)
            return look_at(c, name, r);
    }
    return FERRY_OK;
}

ferry_status ferry__local_enter(local__comm *c, const char *name,
                                int64_t timeout_ms, local__call *out_call)
{
    if (timeout_ms <= 0)
        return ferry_fail(FERRY_EINVAL,
                          "%s: timeout must be above 0 ms, got "
                          "%lld",
                          name, (long long)timeout_ms);
    if (c->failed < 0)
        return ferry__fail_line(c->failed, c->line);
    if (atomic_load(&c->header->aborted) != 0)
        return ferry__local_break(c, fail_aborted(c, name));
    if (!still_owner(c)) {
        ferry_fail(FERRY_EORDER, "%s: rank %d was taken over by pid %d", name,
                   c->base.rank, atomic_load(&c->ranks[c->base.rank].pid));
        return ferry__local_break(c, FERRY_EORDER);
    }
    if (none_failed(c, name) < 0)
        return ferry__local_break(c, FERRY_EPEER);
    out_call->name = name;
    out_call->deadline = ferry__deadline_in(timeout_ms);
    return FERRY_OK;
}

ferry_status ferry__local_ask(local__comm *c, const local__call *call,
                              int32_t peer)
{
    if (atomic_load(&c->header->aborted) != 0)
        return fail_aborted(c, call->name);
    if (c->base.check)
        FERRY_TRY(c->base.check(c->base.check_arg, call->name));
    return look_at(c, call->name, peer);
}

ferry_status ferry__local_await(local__comm *c, const local__call *call,
                                ferry__gate *gate, uint32_t want, int32_t peer)
{
    while (!ferry__gate_reached(gate, want)) {
        int64_t left = ferry__deadline_left_ms(&call->deadline);
        int64_t from_ns = ferry__comm_wait_ns(&c->base);
        ferry_status status;
        bool came =
            ferry__gate_await(gate, want, left < SLICE_MS ? left : SLICE_MS);

        ferry__comm_waited(&c->base, peer, "", from_ns);
        if (came)
            break;
        status = ferry__local_ask(c, call, peer);
        /* It may have come just before it went. */
        if (status == FERRY_EPEER && ferry__gate_reached(gate, want))
            break;
        FERRY_TRY(status);
        if (ferry__deadline_passed(&call->deadline))
            return ferry_fail(
                FERRY_ETIMEOUT, "%s: rank %d did not come within %lld ms",
                call->name, peer, (long long)call->deadline.bound_ms);
    }
    return FERRY_OK;
}
