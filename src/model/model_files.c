/* SPDX-License-Identifier: Apache-2.0 */
/* Finds and reads the files of a checkpoint. */
#include "model/model_files.h"

#include "base/alloc.h"
#include "base/str.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static ferry_status stat_path(const char *path, struct stat *out)
{
    if (stat(path, out) == 0)
        return FERRY_OK;
    return ferry_fail(FERRY_EIO, "%s: %s", path, strerror(errno));
}

static bool has_gguf_magic(const char *path)
{
    char magic[4];
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n;

    if (fd < 0)
        return false;
    do
        n = read(fd, magic, sizeof(magic));
    while (n < 0 && errno == EINTR);
    close(fd);
    return n == (ssize_t)sizeof(magic) && memcmp(magic, "GGUF", 4) == 0;
}

static ferry_status join(const char *folder, size_t length, const char *name,
                         char **out_path)
{
    ferry__str text = {0};

    ferry__str_append_n(&text, folder, length);
    if (length > 0 && folder[length - 1] != '/')
        ferry__str_append(&text, "/");
    ferry__str_append(&text, name);
    return ferry__str_take(&text, out_path);
}

ferry_status ferry__model_file(const char *path, const char *name,
                               char **out_path, bool *out_gguf)
{
    struct stat info;
    const char *slash;

    FERRY_TRY(stat_path(path, &info));
    *out_gguf = false;
    if (S_ISDIR(info.st_mode))
        return join(path, strlen(path), name, out_path);
    if (!S_ISREG(info.st_mode))
        return ferry_fail(FERRY_EINVAL, "%s: neither a file nor a folder",
                          path);
    slash = strrchr(path, '/');
    if (has_gguf_magic(path)) {
        *out_gguf = true;
    } else if (strcmp(slash ? slash + 1 : path, name) != 0) {
        return join(path, slash ? (size_t)(slash - path) + 1 : 0, name,
                    out_path);
    }
    *out_path = ferry__strdup(path);
    return *out_path ? FERRY_OK : FERRY_ENOMEM;
}

static ferry_status read_all(int fd, char *text, size_t length)
{
    size_t done = 0;

    while (done < length) {
        ssize_t n = read(fd, text + done, length - done);

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return ferry_fail(FERRY_EIO, "%s", strerror(errno));
        if (n == 0)
            return ferry_fail(FERRY_EIO, "%zu bytes expected, got %zu", length,
                              done);
        done += (size_t)n;
    }
    return FERRY_OK;
}

static ferry_status read_open(int fd, size_t max_bytes, char **out_text,
                              size_t *out_length)
{
    struct stat info;
    char *text;
    ferry_status st;

    if (fstat(fd, &info) != 0)
        return ferry_fail(FERRY_EIO, "%s", strerror(errno));
    if (!S_ISREG(info.st_mode))
        return ferry_fail(FERRY_EINVAL, "not a regular file");
    if ((uint64_t)info.st_size > max_bytes)
        return ferry_fail(FERRY_EOVERFLOW, "%lld bytes, limit %zu",
                          (long long)info.st_size, max_bytes);
    text = ferry__alloc((size_t)info.st_size + 1);
    if (!text)
        return FERRY_ENOMEM;
    st = read_all(fd, text, (size_t)info.st_size);
    if (st < 0) {
        ferry__free(text);
        return st;
    }
    *out_text = text;
    *out_length = (size_t)info.st_size;
    return FERRY_OK;
}

ferry_status ferry__model_read(const char *path, size_t max_bytes,
                               char **out_text, size_t *out_length)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    ferry_status st;

    if (fd < 0)
        return ferry_fail(errno == ENOENT ? FERRY_EUNKNOWN : FERRY_EIO, "%s",
                          strerror(errno));
    st = read_open(fd, max_bytes, out_text, out_length);
    close(fd);
    return st;
}
