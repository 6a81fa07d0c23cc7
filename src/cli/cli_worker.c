/* SPDX-License-Identifier: Apache-2.0 */
/* Opens libferry_worker beside libferry, and builds single ranks with it. */
#include "cli/cli_worker.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#define WORKER_LIBRARY "libferry_worker.so.0"

/* The folder that libferry itself was loaded from, with its slash. */
static void library_folder(char *out, size_t size_bytes)
{
    Dl_info info;
    const char *slash;
    uint32_t (*anchor)(void) = ferry_version;
    void *address;

    out[0] = '\0';
    memcpy(&address, &anchor, sizeof(address));
    if (dladdr(address, &info) == 0 || !info.dli_fname)
        return;
    slash = strrchr(info.dli_fname, '/');
    if (slash)
        snprintf(out, size_bytes, "%.*s", (int)(slash - info.dli_fname + 1),
                 info.dli_fname);
}

static void *open_library(void)
{
    char path[4096], folder[4000];
    void *library;

    library_folder(folder, sizeof(folder));
    snprintf(path, sizeof(path), "%s" WORKER_LIBRARY, folder);
    library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library)
        ferry_fail(FERRY_EBACKEND, "the worker cannot be loaded: %s",
                   dlerror());
    return library;
}

ferry_status cli_worker_open(cli_worker_api *out)
{
    cli_worker_api api;
    const struct {
        const char *name;
        void *slot;
    } symbols[] = {
        {"ferry__serve_main", &api.serve_main},
        {"ferry__model_config_open", &api.config_open},
        {"ferry__model_config_check", &api.config_check},
        {"ferry__arch_name", &api.arch_name},
        {"ferry__model_create", &api.model_create},
        {"ferry__model_destroy", &api.model_destroy},
        {"ferry__model_table", &api.model_table},
        {"ferry__checksum_json", &api.checksum_json},
    };
    void *library = open_library();

    if (!library)
        return FERRY_EBACKEND;
    for (size_t i = 0; i < sizeof(symbols) / sizeof(symbols[0]); i++) {
        void *symbol = dlsym(library, symbols[i].name);

        if (!symbol)
            return ferry_fail(FERRY_EBACKEND, "%s has no symbol %s",
                              WORKER_LIBRARY, symbols[i].name);
        memcpy(symbols[i].slot, &symbol, sizeof(symbol));
    }
    *out = api; /* the library stays open for the life of the program */
    return FERRY_OK;
}

ferry_status cli_rank_create(const cli_worker_api *api,
                             const ferry__model_config *config,
                             ferry_dtype kernel, int32_t tp_rank,
                             int32_t tp_size, cli_rank *out)
{
    ferry__model_options model = {
        .config = config,
        .kernel = kernel,
        .tp_rank = tp_rank,
        .tp_size = tp_size,
        .n_threads = 1,
        .storage_only = true,
    };
    /* No backend: nothing is received, weights come from a source. */
    ferry_worker_options options = FERRY_WORKER_OPTIONS_INIT(NULL);
    cli_rank rank = {0};
    ferry_status status;

    FERRY_TRY(api->config_check(config, tp_size, kernel));
    FERRY_TRY(api->model_create(&model, &rank.model));
    options.tp_rank = tp_rank;
    options.tp_size = tp_size;
    status = ferry_worker_create(&options, api->model_table(rank.model), NULL,
                                 &rank.worker);
    if (status != FERRY_OK) {
        cli_rank_destroy(api, &rank);
        return status;
    }
    *out = rank;
    return FERRY_OK;
}

void cli_rank_destroy(const cli_worker_api *api, cli_rank *rank)
{
    if (rank->worker)
        ferry_worker_destroy(&rank->worker);
    if (rank->model)
        api->model_destroy(&rank->model);
}

ferry_status cli_kernel_parse(const char *text, ferry_dtype *out)
{
    if (strcmp(text, "f32") == 0)
        *out = FERRY_DTYPE_F32;
    else if (strcmp(text, "bf16") == 0)
        *out = FERRY_DTYPE_BF16;
    else if (strcmp(text, "q8_0") == 0)
        *out = FERRY_DTYPE_Q8_0;
    else
        return ferry_fail(FERRY_EUNKNOWN,
                          "kernel format %s is none of f32, bf16, q8_0", text);
    return FERRY_OK;
}
