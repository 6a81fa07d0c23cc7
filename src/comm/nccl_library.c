/* SPDX-License-Identifier: Apache-2.0 */
/* Binding a library that speaks NCCL. */
#include "comm/nccl_library.h"

#include "base/alloc.h"
#include "base/config.h"
#include "core/module.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

/* 2.7 brought send and receive. */
#define OLDEST 2700

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static ferry__nccl_library *all_libraries;

static ferry_status find(const char *library, const char *name, void *out)
{
    void *symbol;

    FERRY_TRY(ferry__module_symbol(library, name, &symbol));
    memcpy(out, &symbol, sizeof(symbol));
    return FERRY_OK;
}

/* Not having it is no failure. */
static bool look_for(const char *library, const char *name, void *out)
{
    return find(library, name, out) >= 0;
}

static ferry_status read_version(ferry__nccl_library *l)
{
    __typeof__(ferry_nccl_host_version) *own;
    ncclResult_t r;
    int v = 0, major, minor;

    r = l->ncclGetVersion(&v);
    if (r != ncclSuccess)
        return ferry__nccl_library_fail(l, "ncclGetVersion", NULL, r);
    if (v < OLDEST)
        return ferry_fail(FERRY_EBACKEND,
                          "provider nccl: %s is NCCL version %d, older than "
                          "2.7",
                          l->name, v);
    /* From 2.9 on the minor version has two digits. */
    major = v >= 10000 ? v / 10000 : v / 1000;
    minor = v >= 10000 ? v / 100 % 100 : v / 100 % 10;
    l->host = look_for(l->name, "ferry_nccl_host_version", &own);
    snprintf(l->text, sizeof(l->text), "%d.%d.%d%s", major, minor, v % 100,
             l->host ? " host" : "");
    return FERRY_OK;
}

static ferry_status bind_all(ferry__nccl_library *l)
{
#define FERRY__NCCL_FIND(symbol) FERRY_TRY(find(l->name, #symbol, &l->symbol));
    FERRY__NCCL_SYMBOLS(FERRY__NCCL_FIND)
#undef FERRY__NCCL_FIND
    if (!look_for(l->name, "ncclGetLastError", &l->ncclGetLastError))
        l->ncclGetLastError = NULL;
    if (!look_for(l->name, "ferry_nccl_host_moved", &l->moved))
        l->moved = NULL;
    return read_version(l);
}

static ferry_status bind_new(const char *name, ferry__nccl_library **out)
{
    ferry__nccl_library *l = ferry__alloc(sizeof(*l));
    ferry_status status = FERRY_ENOMEM;

    if (l)
        l->name = ferry__strdup(name);
    if (l && l->name)
        status = bind_all(l);
    if (status < 0) {
        if (l)
            ferry__free(l->name);
        ferry__free(l);
        return status;
    }
    *out = l;
    return FERRY_OK;
}

ferry_status ferry__nccl_library_open(const ferry__nccl_library **out)
{
    const char *name = ferry__config_get(FERRY__CONFIG_NCCL_LIBRARY);
    ferry_status status = FERRY_OK;
    ferry__nccl_library *l;

    pthread_mutex_lock(&lock);
    for (l = all_libraries; l && strcmp(l->name, name) != 0; l = l->next)
        ;
    if (!l) {
        status = bind_new(name, &l);
        if (status >= 0) {
            l->next = all_libraries;
            all_libraries = l;
        }
    }
    pthread_mutex_unlock(&lock);
    FERRY_TRY(status);
    *out = l;
    return FERRY_OK;
}

/* What the library was given it had been given before checks of ours; so an
 * argument that it refuses is one that the ranks do not agree on. */
static ferry_status status_of(ncclResult_t result)
{
    switch (result) {
    case ncclRemoteError:
        return FERRY_EPEER;
    case ncclInvalidArgument:
        return FERRY_EMISMATCH;
    case ncclInvalidUsage:
        return FERRY_EBACKEND;
    case ncclInternalError:
        return FERRY_EINTERNAL;
    default:
        return FERRY_EIO;
    }
}

ferry_status ferry__nccl_library_fail(const ferry__nccl_library *l,
                                      const char *what, ncclComm_t comm,
                                      ncclResult_t result)
{
    ferry_status status = status_of(result);
    const char *last = l->ncclGetLastError ? l->ncclGetLastError(comm) : NULL;
    char line[512];

    snprintf(line, sizeof(line), "%s", last ? last : "");
    /* A peer's own words are the cause; NCCL's name of it says no more. */
    if (status == FERRY_EPEER)
        return ferry_fail(status, "%s: a peer failed before: %s", what,
                          *line ? line : l->ncclGetErrorString(result));
    return ferry_fail(status, "%s: %s%s%s", what, l->ncclGetErrorString(result),
                      *line ? ": " : "", line);
}
