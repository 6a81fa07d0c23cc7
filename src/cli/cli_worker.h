/* SPDX-License-Identifier: Apache-2.0 */
/* The worker's library, opened only by the commands that need a model.
 * Invariant: the program is not linked to it, so ggml stays out of `push`,
 * `generate` and `info`. */
#ifndef FERRY_CLI_CLI_WORKER_H
#define FERRY_CLI_CLI_WORKER_H

#include "model/model.h"
#include <ferry/ferry.h>

/* Entry points of libferry_worker, as its own headers declare them. */
typedef struct cli_worker_api {
    int (*serve_main)(int argc, char **argv);
    ferry_status (*config_open)(const char *path, ferry__model_config *out);
    ferry_status (*config_check)(const ferry__model_config *config,
                                 int32_t tp_size, ferry_dtype kernel);
    const char *(*arch_name)(ferry__arch arch);
    ferry_status (*model_create)(const ferry__model_options *options,
                                 ferry__model **out);
    void (*model_destroy)(ferry__model **model);
    const ferry_model *(*model_table)(ferry__model *model);
    ferry_status (*checksum_json)(ferry_worker *worker, char **out_json);
} cli_worker_api;

/* FERRY_EBACKEND: the library or one of its symbols is missing. */
ferry_status cli_worker_open(cli_worker_api *out);

/* One rank's model in this process: storage, loader, no forward pass. */
typedef struct cli_rank {
    ferry__model *model;
    ferry_worker *worker;
} cli_rank;

ferry_status cli_rank_create(const cli_worker_api *api,
                             const ferry__model_config *config,
                             ferry_dtype kernel, int32_t tp_rank,
                             int32_t tp_size, cli_rank *out);
void cli_rank_destroy(const cli_worker_api *api, cli_rank *rank);

/* "f32", "bf16" or "q8_0", as the worker stores; FERRY_EUNKNOWN. */
ferry_status cli_kernel_parse(const char *text, ferry_dtype *out);

#endif
