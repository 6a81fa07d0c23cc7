/* SPDX-License-Identifier: Apache-2.0 */
/* Looks for checkpoints in folders. Invariant: more than one candidate is an
 * error that names two, never a guess. */
#include "sources/source_files.h"

#include "base/alloc.h"
#include "base/str.h"

#include <dirent.h>
#include <errno.h>
#include <string.h>
#include <sys/stat.h>

bool ferry__is_folder(const char *path)
{
    struct stat info;

    return stat(path, &info) == 0 && S_ISDIR(info.st_mode);
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

ferry_status ferry__path_beside(const char *path, const char *name,
                                char **out_path)
{
    const char *slash = strrchr(path, '/');

    return join(path, slash ? (size_t)(slash - path) + 1 : 0, name, out_path);
}

/* FERRY_OK and NULL when the file is not there. */
static ferry_status find_named(const char *folder, const char *name,
                               char **out_file)
{
    struct stat info;
    char *path;

    FERRY_TRY(join(folder, strlen(folder), name, &path));
    if (stat(path, &info) != 0) {
        ferry__free(path);
        path = NULL;
    }
    *out_file = path;
    return FERRY_OK;
}

static ferry_status keep_only(const char *folder, const char *name,
                              char **found)
{
    ferry_status st;

    if (*found) {
        st = ferry_fail(FERRY_EIO,
                        "folder %s: %s and %s: name the one that "
                        "is meant",
                        folder, *found, name);
        ferry__free(*found);
        *found = NULL;
        return st;
    }
    *found = ferry__strdup(name);
    return *found ? FERRY_OK : FERRY_ENOMEM;
}

/* The name of the only file that matches, or NULL. */
static ferry_status find_only(const char *folder, const char *pattern,
                              char **out_file)
{
    DIR *dir = opendir(folder);
    const struct dirent *item;
    ferry_status st = FERRY_OK;
    char *found = NULL;

    if (!dir)
        return ferry_fail(FERRY_EIO, "folder %s: open: %s", folder,
                          strerror(errno));
    while (st == FERRY_OK && (item = readdir(dir)) != NULL) {
        if (item->d_name[0] != '.' && ferry__match(pattern, item->d_name))
            st = keep_only(folder, item->d_name, &found);
    }
    closedir(dir);
    *out_file = NULL;
    if (st == FERRY_OK && found)
        st = join(folder, strlen(folder), found, out_file);
    ferry__free(found);
    return st;
}

static ferry_status copy_path(const char *path, char **out_file)
{
    *out_file = ferry__strdup(path);
    return *out_file ? FERRY_OK : FERRY_ENOMEM;
}

ferry_status ferry__find_safetensors(const char *path, char **out_file)
{
    char *file = NULL;

    if (!ferry__is_folder(path))
        return copy_path(path, out_file);
    FERRY_TRY(find_named(path, "model.safetensors", &file));
    if (!file)
        FERRY_TRY(find_named(path, "model.safetensors.index.json", &file));
    if (!file)
        FERRY_TRY(find_only(path, "*.safetensors.index.json", &file));
    if (!file)
        FERRY_TRY(find_only(path, "*.safetensors", &file));
    if (!file)
        return ferry_fail(FERRY_EIO,
                          "folder %s: holds neither a safetensors "
                          "file nor an index",
                          path);
    *out_file = file;
    return FERRY_OK;
}

ferry_status ferry__find_gguf(const char *path, char **out_file)
{
    if (!ferry__is_folder(path))
        return copy_path(path, out_file);
    return find_only(path, "*.gguf", out_file);
}
