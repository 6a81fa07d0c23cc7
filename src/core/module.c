/* SPDX-License-Identifier: Apache-2.0 */
/* Shared objects opened on first use, each once, never closed: an engine's
 * tables and code must stay valid for the life of the process. */
#include "core/module.h"

#include "base/alloc.h"
#include "base/config.h"
#include "base/log.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define PATH_BYTES 4096

typedef struct opened {
    char *path;
    void *handle;
    struct opened *next;
} opened;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static opened *all_opened;

ferry_status ferry__module_folder(char *out, size_t size_bytes)
{
    const char *set = ferry__config_get(FERRY__CONFIG_MODULE_PATH);
    const char *slash;
    Dl_info self;
    int n;

    if (set[0] != '\0') {
        n = snprintf(out, size_bytes, "%s", set);
    } else {
        if (dladdr((void *)(uintptr_t)&ferry__module_folder, &self) == 0 ||
            self.dli_fname == NULL ||
            (slash = strrchr(self.dli_fname, '/')) == NULL)
            return ferry_fail(FERRY_EBACKEND,
                              "cannot tell where libferry lies; set "
                              "module_path");
        n = snprintf(out, size_bytes, "%.*s/ferry",
                     (int)(slash - self.dli_fname), self.dli_fname);
    }
    if (n < 0 || (size_t)n >= size_bytes)
        return ferry_fail(FERRY_EOVERFLOW, "module folder is too long");
    return FERRY_OK;
}

ferry_status ferry__module_path(const char *module, char *out,
                                size_t size_bytes)
{
    char folder[PATH_BYTES];
    int n;

    FERRY_TRY(ferry__module_folder(folder, sizeof(folder)));
    n = snprintf(out, size_bytes, "%s/%s.so", folder, module);
    if (n < 0 || (size_t)n >= size_bytes)
        return ferry_fail(FERRY_EOVERFLOW, "module path is too long");
    return FERRY_OK;
}

bool ferry__module_present(const char *module)
{
    char path[PATH_BYTES];

    return ferry__module_path(module, path, sizeof(path)) == FERRY_OK &&
           access(path, R_OK) == 0;
}

/* A bare name ("ferry_ipc_worker") is a module of ours; anything with a slash
 * or a suffix goes to the loader as it is. */
static bool is_bare(const char *library)
{
    return strchr(library, '/') == NULL && strstr(library, ".so") == NULL;
}

static opened *find_opened(const char *path)
{
    for (opened *o = all_opened; o != NULL; o = o->next)
        if (strcmp(o->path, path) == 0)
            return o;
    return NULL;
}

static ferry_status open_locked(const char *path, const char *library,
                                void **out_handle)
{
    opened *o = find_opened(path);
    const char *why;

    if (o != NULL) {
        *out_handle = o->handle;
        return FERRY_OK;
    }
    o = ferry__alloc(sizeof(*o));
    if (o == NULL)
        return FERRY_ENOMEM;
    o->path = ferry__strdup(path);
    if (o->path == NULL) {
        ferry__free(o);
        return FERRY_ENOMEM;
    }
    o->handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (o->handle == NULL) {
        why = dlerror();
        ferry_fail(FERRY_EBACKEND, "module %s cannot be opened: %s", library,
                   why != NULL ? why : "unknown reason");
        ferry__free(o->path);
        ferry__free(o);
        return FERRY_EBACKEND;
    }
    o->next = all_opened;
    all_opened = o;
    *out_handle = o->handle;
    return FERRY_OK;
}

ferry_status ferry__module_symbol(const char *library, const char *symbol,
                                  void **out_symbol)
{
    char path[PATH_BYTES];
    void *handle, *found;
    ferry_status st;

    if (is_bare(library)) {
        FERRY_TRY(ferry__module_path(library, path, sizeof(path)));
        if (access(path, R_OK) != 0)
            return ferry_fail(FERRY_EBACKEND, "module %s.so is not installed",
                              library);
    } else if ((size_t)snprintf(path, sizeof(path), "%s", library) >=
               sizeof(path)) {
        return ferry_fail(FERRY_EOVERFLOW, "module path is too long");
    }
    pthread_mutex_lock(&lock);
    st = open_locked(path, library, &handle);
    pthread_mutex_unlock(&lock);
    FERRY_TRY(st);
    found = dlsym(handle, symbol);
    if (found == NULL)
        return ferry_fail(FERRY_EBACKEND, "module %s has no symbol %s", library,
                          symbol);
    *out_symbol = found;
    return FERRY_OK;
}
