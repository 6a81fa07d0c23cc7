/* SPDX-License-Identifier: Apache-2.0 */
/* Binding of nccl_table.h. */
#include "harness/nccl_table.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *nccl_host_path(void)
{
    static char path[4096];
    const char *folder = getenv("FERRY_BUILD_DIR");

    snprintf(path, sizeof(path), "%s/lib/libferry_nccl_host.so",
             folder ? folder : ".");
    return path;
}

static void *find(void *library, const char *name)
{
    void *found = dlsym(library, name);

    if (!found) {
        fprintf(stderr, "%s: %s\n", name, dlerror());
        abort();
    }
    return found;
}

void nccl_table_open(nccl_table *out, const char *path)
{
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);

    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        abort();
    }
#define NCCL_FIND(name)                                                        \
    do {                                                                       \
        void *found = find(library, #name);                                    \
                                                                               \
        memcpy(&out->name, &found, sizeof(found));                             \
    } while (0);
    NCCL_TABLE(NCCL_FIND)
#undef NCCL_FIND
}
