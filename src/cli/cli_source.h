/* SPDX-License-Identifier: Apache-2.0 */
/* The source a command reads: a checkpoint, cast as asked, and, if wanted,
 * copied once into memory that workers can read in place. */
#ifndef FERRY_CLI_CLI_SOURCE_H
#define FERRY_CLI_CLI_SOURCE_H

#include <ferry/ferry.h>

typedef struct cli_source {
    ferry_source source;
    uint64_t bytes; /* of all parameters, as declared */
    size_t count;
    void *memory; /* of ferry_shared_alloc, or NULL */
} cli_source;

/* `to` FERRY_DTYPE_NONE leaves dtypes alone. */
ferry_status cli_source_open(const char *path, ferry_dtype to, cli_source *out);
/* Reads the source through once into shared memory and takes its place. */
ferry_status cli_source_share(cli_source *source);
void cli_source_close(cli_source *source);

uint64_t cli_meta_bytes(const ferry_param_meta *meta);

#endif
