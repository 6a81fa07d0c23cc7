/* SPDX-License-Identifier: Apache-2.0 */
/* Maps files. The descriptor is closed at once: the mapping keeps the file. */
#include "sources/mapped_file.h"

#include "base/alloc.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static ferry_status io_error(const char *path, const char *what, int error)
{
    return ferry_fail(FERRY_EIO, "file %s: %s: %s", path, what,
                      strerror(error));
}

static ferry_status map_descriptor(const char *path, int fd,
                                   ferry__mapped_file *out)
{
    struct stat info;
    void *bytes;

    if (fstat(fd, &info) != 0)
        return io_error(path, "stat", errno);
    if (!S_ISREG(info.st_mode))
        return ferry_fail(FERRY_EIO, "file %s: not a regular file", path);
    if (info.st_size == 0) {
        *out = (ferry__mapped_file){0};
        return FERRY_OK;
    }
    if (ferry__fault_hit(FERRY__FAULT_MMAP))
        return io_error(path, "map", ENOMEM);
    bytes = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (bytes == MAP_FAILED)
        return io_error(path, "map", errno);
    out->bytes = bytes;
    out->size_bytes = (size_t)info.st_size;
    return FERRY_OK;
}

ferry_status ferry__mapped_open(const char *path, ferry__mapped_file *out)
{
    ferry_status st;
    int fd;

    /* Not blocking, so that a named pipe is refused rather than awaited. */
    do {
        fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    } while (fd < 0 && errno == EINTR);
    if (fd < 0)
        return io_error(path, "open", errno);
    st = map_descriptor(path, fd, out);
    close(fd);
    return st;
}

void ferry__mapped_close(ferry__mapped_file *file)
{
    if (file->bytes)
        munmap((void *)file->bytes, file->size_bytes);
    *file = (ferry__mapped_file){0};
}
