/* SPDX-License-Identifier: Apache-2.0 */
/* The two ways `ferry inspect` shows more than names: groups and the plan. */
#ifndef FERRY_CLI_CLI_INSPECT_H
#define FERRY_CLI_CLI_INSPECT_H

#include "cli/cli_source.h"

typedef struct cli_inspect_options {
    int groups, plan, json;
    int64_t tp, rank;
    const char *kernel_format;
} cli_inspect_options;

/* Each prints and returns the exit code. */
int cli_inspect_groups(const cli_inspect_options *options,
                       const cli_source *source);
int cli_inspect_plan(const cli_inspect_options *options, const char *path,
                     const cli_source *source);

#endif
