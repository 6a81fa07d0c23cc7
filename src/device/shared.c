/* SPDX-License-Identifier: Apache-2.0 */
/* Sealed memfds and their mappings. The pages are reserved when the memory
 * is made, so that a full machine is an error there and no signal later.
 * Invariant: a mapping is never longer than a descriptor that cannot
 * shrink. */
#include "device/shared.h"

#include "base/alloc.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static bool round_to_pages(size_t size_bytes, size_t *out)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t sum;

    if (!ferry__add(size_bytes ? size_bytes : 1, page - 1, &sum))
        return false;
    *out = sum / page * page;
    return *out <= PTRDIFF_MAX;
}

/* Bytes that the machine could still hand out, swap included; SIZE_MAX when
 * the kernel does not say. A memfd has no limit of its own: without this
 * question a request that is too large would end in the hands of the
 * out-of-memory killer. */
static uint64_t bytes_available(void)
{
    FILE *file = fopen("/proc/meminfo", "re");
    unsigned long long kib, sum = 0;
    char line[128];
    int found = 0;

    if (!file)
        return UINT64_MAX;
    while (fgets(line, sizeof(line), file)) {
        if (sscanf(line, "MemAvailable: %llu", &kib) == 1 ||
            sscanf(line, "SwapFree: %llu", &kib) == 1) {
            sum += kib;
            found++;
        }
    }
    fclose(file);
    return found == 2 ? (uint64_t)sum * 1024 : UINT64_MAX;
}

typedef struct extent {
    size_t offset, size_bytes;
    bool set_size, take_pages;
} extent;

/* Sets the size, reserves the pages or both; 0 or an errno. A limit on file
 * sizes raises SIGXFSZ beside its error: it is held back from the caller. */
static int reserve(int fd, extent e)
{
    sigset_t limit, old;
    struct timespec now = {0, 0};
    int error = 0;

    sigemptyset(&limit);
    sigaddset(&limit, SIGXFSZ);
    pthread_sigmask(SIG_BLOCK, &limit, &old);
    if (e.set_size && ftruncate(fd, (off_t)e.size_bytes) != 0) {
        error = errno;
    } else if (e.take_pages) {
        do {
            error = fallocate(fd, 0, (off_t)e.offset, (off_t)e.size_bytes)
                        ? errno
                        : 0;
        } while (error == EINTR);
    }
    if (error == EFBIG && !sigismember(&old, SIGXFSZ)) {
        while (sigtimedwait(&limit, NULL, &now) < 0 && errno == EINTR)
            ;
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return error;
}

static ferry_status fail_reserve(const char *label, size_t size_bytes,
                                 int error)
{
    ferry_status status = FERRY_EIO;

    if (error == ENOSPC || error == EFBIG || error == EDQUOT || error == ENOMEM)
        status = FERRY_ENOSPC;
    return ferry_fail(status, "shared memory %s: cannot reserve %zu bytes: %s",
                      label, size_bytes, strerror(error));
}

static ferry_status map_fd(int fd, size_t size_bytes, int writable,
                           void **out_memory)
{
    int prot = PROT_READ | (writable ? PROT_WRITE : 0);
    void *memory;

    if (ferry__fault_hit(FERRY__FAULT_MMAP)) {
        memory = MAP_FAILED;
        errno = ENOMEM;
    } else {
        memory = mmap(NULL, size_bytes, prot, MAP_SHARED, fd, 0);
    }
    if (memory == MAP_FAILED)
        return ferry_fail(FERRY_ENOMEM, "cannot map %zu shared bytes: %s",
                          size_bytes, strerror(errno));
    *out_memory = memory;
    return FERRY_OK;
}

static ferry_status fill_fd(const char *label, int fd, size_t size_bytes,
                            bool take_pages, void **out_memory)
{
    int error = reserve(fd, (extent){0, size_bytes, true, take_pages});

    if (error)
        return fail_reserve(label, size_bytes, error);
    if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0)
        return ferry_fail(FERRY_EIO, "shared memory %s: cannot seal: %s", label,
                          strerror(errno));
    return map_fd(fd, size_bytes, 1, out_memory);
}

static ferry_status check_available(const char *label, size_t size_bytes)
{
    uint64_t available = bytes_available();

    if (size_bytes > available)
        return ferry_fail(FERRY_ENOSPC,
                          "shared memory %s: %zu bytes asked for, %llu "
                          "available on this machine",
                          label, size_bytes, (unsigned long long)available);
    return FERRY_OK;
}

static ferry_status create(const char *label, size_t size_bytes,
                           bool take_pages, int *out_fd, void **out_memory)
{
    ferry_status status;
    size_t rounded;
    int fd;

    if (!round_to_pages(size_bytes, &rounded))
        return ferry_fail(FERRY_EOVERFLOW,
                          "shared memory %s: %zu bytes do not fit", label,
                          size_bytes);
    if (take_pages)
        FERRY_TRY(check_available(label, rounded));
    fd = memfd_create(label, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0)
        return ferry_fail(FERRY_EIO, "shared memory %s: cannot create: %s",
                          label, strerror(errno));
    status = fill_fd(label, fd, rounded, take_pages, out_memory);
    if (status < 0) {
        close(fd);
        return status;
    }
    *out_fd = fd;
    return FERRY_OK;
}

ferry_status ferry__shared_create(const char *label, size_t size_bytes,
                                  int *out_fd, void **out_memory)
{
    return create(label, size_bytes, true, out_fd, out_memory);
}

ferry_status ferry__shared_create_sparse(const char *label, size_t size_bytes,
                                         int *out_fd, void **out_memory)
{
    return create(label, size_bytes, false, out_fd, out_memory);
}

ferry_status ferry__shared_reserve(int fd, size_t offset, size_t size_bytes)
{
    int error;

    FERRY_TRY(check_available("range", size_bytes));
    error = ferry__fault_hit(FERRY__FAULT_RESERVE)
                ? ENOSPC
                : reserve(fd, (extent){offset, size_bytes, false, true});
    return error ? fail_reserve("range", size_bytes, error) : FERRY_OK;
}

ferry_status ferry__shared_map(int fd, size_t size_bytes, int writable,
                               void **out_memory)
{
    struct stat info;
    size_t rounded;
    int seals;

    if (!round_to_pages(size_bytes, &rounded))
        return ferry_fail(FERRY_EOVERFLOW, "%zu shared bytes do not fit",
                          size_bytes);
    if (fstat(fd, &info) != 0)
        return ferry_fail(FERRY_EPEER, "received descriptor: %s",
                          strerror(errno));
    seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0)
        return ferry_fail(FERRY_EPEER, "received descriptor is no memfd");
    if (!(seals & F_SEAL_SHRINK))
        return ferry_fail(FERRY_EPEER, "received shared memory is not sealed "
                                       "against shrinking");
    if (info.st_size < 0 || (uint64_t)info.st_size < size_bytes)
        return ferry_fail(FERRY_EPEER,
                          "received shared memory has %lld bytes, %zu were "
                          "announced",
                          (long long)info.st_size, size_bytes);
    return map_fd(fd, rounded, writable, out_memory);
}

void ferry__shared_unmap(void *memory, size_t size_bytes)
{
    size_t rounded;

    if (memory && round_to_pages(size_bytes, &rounded))
        munmap(memory, rounded);
}
