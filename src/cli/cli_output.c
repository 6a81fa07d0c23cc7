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

    fprintf(stderr, "ferry %s: ", command);
    cli_text_print(stderr, line[0] ? line : ferry_status_text(status));
    fprintf(stderr, " (%s)\n", ferry_status_name(status));
    return status == FERRY_ECONN ? CLI_EXIT_UNREACHABLE : CLI_EXIT_FAILED;
}

/* The bytes of the control character at `text`, 0 for any other: ASCII's and
 * those that UTF-8 writes as C2 80 to C2 9F. */
static size_t control_bytes(const unsigned char *text)
{
    if (text[0] < 0x20 || text[0] == 0x7f)
        return 1;
    return text[0] == 0xc2 && text[1] >= 0x80 && text[1] <= 0x9f ? 2 : 0;
}

size_t cli_text_print(FILE *to, const char *text)
{
    const unsigned char *at = (const unsigned char *)text;
    size_t printed = 0;

    while (*at) {
        size_t n = control_bytes(at);

        if (n == 0 && to)
            fputc(*at, to);
        for (size_t i = 0; i < n && to; i++)
            fprintf(to, "\\x%02x", at[i]);
        printed += n ? 4 * n : 1;
        at += n ? n : 1;
    }
    return printed;
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
