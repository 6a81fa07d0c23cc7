/* SPDX-License-Identifier: Apache-2.0 */
/* Progress of one round on standard error: a bar on a terminal, four plain
 * lines elsewhere. */
#ifndef FERRY_CLI_CLI_PROGRESS_H
#define FERRY_CLI_CLI_PROGRESS_H

#include <stdbool.h>
#include <stdint.h>

typedef struct cli_progress {
    bool terminal, quiet, drawn, full;
    char label[48];
    int64_t started_ns, shown_ns;
    int shown_quarter;
} cli_progress;

/* quiet: nothing where standard error is no terminal. */
void cli_progress_begin(cli_progress *progress, const char *label, bool quiet);
/* A ferry_progress_fn; `arg` is the progress. */
void cli_progress_update(void *arg, uint64_t done, uint64_t total);
/* Wipes the bar. */
void cli_progress_end(cli_progress *progress);

#endif
