/* SPDX-License-Identifier: Apache-2.0 */
/* What the commands of the program share: options, output, exit codes.
 * Invariant: standard output carries what was asked for and nothing else;
 * everything about how it went is on standard error. */
#ifndef FERRY_CLI_CLI_H
#define FERRY_CLI_CLI_H

#include <ferry/ferry.h>
#include <jansson.h>
#include <stdio.h>

/* Exit codes, as `ferry --help` and docs/cli.md state them. */
typedef enum cli_exit {
    CLI_EXIT_OK = 0,
    CLI_EXIT_FAILED = 1,     /* the operation failed, or a mismatch */
    CLI_EXIT_USAGE = 2,      /* the command line was wrong */
    CLI_EXIT_UNREACHABLE = 3 /* no connection to the server */
} cli_exit;

/* ---- options (cli_options.c) ---- */

typedef enum cli_kind {
    CLI_FLAG,   /* int; set to 1 */
    CLI_TEXT,   /* const char *; borrowed from argv */
    CLI_INT,    /* int64_t within min..max */
    CLI_NUMBER, /* double, finite */
    CLI_TEXTS,  /* cli_texts; each time one more, borrowed from argv */
    CLI_DTYPE   /* ferry_dtype */
} cli_kind;

#define CLI_TEXTS_MAX 64
typedef struct cli_texts {
    const char *items[CLI_TEXTS_MAX];
    int count;
} cli_texts;

typedef struct cli_option {
    const char *name; /* without dashes */
    cli_kind kind;
    void *value;     /* of the kind's type; keeps its value when absent */
    const char *arg; /* "N" in the help; NULL for flags */
    const char *help;
    int64_t min, max; /* CLI_INT; both 0: 1 and up */
} cli_option;

typedef struct cli_command {
    const char *name;
    const char *synopsis;              /* after the name */
    const char *summary;               /* one line */
    const char *details;               /* examples and notes; whole lines */
    int (*run)(int argc, char **argv); /* argv[0] is the name */
} cli_command;

/* Reads argv. Positional arguments are moved to the end: argv[*out_first] is
 * the first. Returns -1 to go on, else the exit code: 0 after --help, 2 after
 * one clear line. --log-level and --help are known to every command. */
int cli_options_parse(const cli_command *command, const cli_option *options,
                      size_t n_options, int argc, char **argv, int *out_first);
/* Prints "ferry NAME: line; see 'ferry NAME --help'" and returns 2. */
int cli_usage(const char *command, const char *fmt, ...) FERRY_PRINTF(2, 3);
/* Sets the log level or prints why not (then 2). 0 when set. */
int cli_log_level_set(const char *command, const char *level);
/* " (did you mean X?)" into buffer, or "" when nothing is near. */
const char *cli_hint(char *buffer, size_t size_bytes, const char *prefix,
                     const char *given, const char *const *names, size_t count);

/* ---- output (cli_output.c) ---- */

/* Prints "ferry NAME: line (STATUS)" for the last error; the exit code. */
int cli_fail(const char *command, ferry_status status);
/* Prints `value` as one line on standard output and frees it. */
void cli_json_print(json_t *value);
/* Prints text that others chose, its control characters as \xNN: a name must
 * neither end the line nor steer the terminal. Returns the bytes printed;
 * `to` NULL only counts them. */
size_t cli_text_print(FILE *to, const char *text);
/* Flushes standard output and keeps the cause of a failure. */
void cli_flush(void);
/* "269.1 MB". Returns buffer. */
const char *cli_bytes_text(char *buffer, size_t size_bytes, uint64_t bytes);
/* Flushes standard output; the exit code given, or 1 with a line when what
 * was written got lost. A reader that closed its pipe is no failure. */
int cli_finish(int code);
json_t *cli_shape_json(int32_t ndim, const int64_t *shape);

/* ---- the commands ---- */

extern const cli_command cli_serve, cli_push, cli_generate, cli_info,
    cli_inspect, cli_verify;

#endif
