/* SPDX-License-Identifier: Apache-2.0 */
/* How results and failures are shown, in one place for all commands.
 * Invariant: a JSON result is one line; a lost byte of output is a failure,
 * unless nobody was there to read it. */
#include "cli/cli.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

int cli_fail(const char *command, ferry_status status)
{
    const char *line = ferry_last_error();

    fprintf(stderr, "ferry %s: %s (%s)\n", command,
            line[0] ? line : ferry_status_text(status),
            ferry_status_name(status));
    return status == FERRY_ECONN ? CLI_EXIT_UNREACHABLE : CLI_EXIT_FAILED;
}

/* The cause of the first write that was lost: the stream itself forgets it. */
static int lost;

void cli_flush(void)
{
    errno = 0;
    if (fflush(stdout) != 0 && lost == 0)
        lost = errno;
}

void cli_json_print(json_t *value)
{
    if (!value) {
        fprintf(stderr, "ferry: out of memory\n");
        return;
    }
    json_dumpf(value, stdout,
               JSON_COMPACT | JSON_ENCODE_ANY | JSON_REAL_PRECISION(9));
    putchar('\n');
    /* A line a round is of use at once, to whoever reads along. */
    cli_flush();
    json_decref(value);
}

const char *cli_bytes_text(char *buffer, size_t size_bytes, uint64_t bytes)
{
    static const char *const units[] = {"B", "kB", "MB", "GB", "TB"};
    double value = (double)bytes;
    size_t unit = 0;

    while (value >= 999.95 && unit < 4) {
        value /= 1000.0;
        unit++;
    }
    snprintf(buffer, size_bytes, unit ? "%.1f %s" : "%.0f %s", value,
             units[unit]);
    return buffer;
}

int cli_finish(int code)
{
    cli_flush();
    if (lost == EPIPE || lost == 0)
        return code;
    fprintf(stderr, "ferry: cannot write standard output: %s\n",
            strerror(lost));
    return code ? code : CLI_EXIT_FAILED;
}

json_t *cli_shape_json(int32_t ndim, const int64_t *shape)
{
    json_t *list = json_array();

    for (int32_t i = 0; i < ndim; i++)
        json_array_append_new(list, json_integer(shape[i]));
    return list;
}
