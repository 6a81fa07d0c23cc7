/* SPDX-License-Identifier: Apache-2.0 */
/* The trace of a push: what the trainer and every rank did, and when, as
 * chrome://tracing and Perfetto read it. */
#ifndef FERRY_CLI_CLI_TRACE_H
#define FERRY_CLI_CLI_TRACE_H

#include "cli/cli_http.h"
#include <ferry/ferry.h>

typedef struct cli_trace cli_trace;

/* Creates the file at once, so that a path that cannot be written is found
 * before any weight is sent. `servers` is copied, what it points to is
 * borrowed until close. */
ferry_status cli_trace_open(const char *path, const cli_http *servers,
                            size_t count, cli_trace **out);
/* Marks the begin of a round. */
void cli_trace_begin(cli_trace *t);
/* Adds the round that has just ended, as the trainer saw it and as each
 * server tells it. A server that cannot tell is named on standard error. */
void cli_trace_round(cli_trace *t, ferry_trainer *trainer,
                     const ferry_round_stats *stats, ferry_status status);
/* Ends the file and clears *trace. FERRY_EIO names the file. NULL is fine. */
ferry_status cli_trace_close(cli_trace **trace);

#endif
