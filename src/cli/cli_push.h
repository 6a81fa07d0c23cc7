/* SPDX-License-Identifier: Apache-2.0 */
/* What `ferry push` was told, its report of a round, and its interrupts. */
#ifndef FERRY_CLI_CLI_PUSH_H
#define FERRY_CLI_CLI_PUSH_H

#include "cli/cli.h"

typedef struct cli_push_options {
    const char *trace; /* file; NULL: none */
    const char *backend, *init_info, *version, *token, *ca;
    const char *provider, *master_address; /* NULL: not said */
    int64_t master_port;                   /* -1: not said */
    cli_texts to;                          /* URLs beside the others */
    ferry_dtype dtype; /* FERRY_DTYPE_NONE: as the source has it */
    int shared, packed, no_packed, pause, json;
    int64_t rounds, timeout;
} cli_push_options;

/* The backend's init info: what was given, and what the flags say. NULL after
 * a line that says what is wrong. */
json_t *cli_push_init_info(const cli_push_options *options,
                           const char *const *urls, int count);

void cli_push_print(const cli_push_options *options, int64_t round,
                    const ferry_round_stats *stats);
void cli_push_print_json(const cli_push_options *options, int64_t round,
                         size_t n_params, ferry_status status,
                         const ferry_round_stats *stats);

/* From here on SIGINT and SIGTERM are taken by a thread of the program: they
 * cancel the round of the watched trainer; with none watched, or the second
 * time, they end the program. Call it before any other thread is started. */
void cli_push_catch_signals(void);
void cli_push_watch(ferry_trainer *trainer); /* NULL: none */
/* Whether a signal came: the round may have been over just then. */
bool cli_push_interrupted(void);

#endif
