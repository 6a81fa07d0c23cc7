/* SPDX-License-Identifier: Apache-2.0 */
/* Command lines of all commands, by tables of options.
 * Invariant: whatever is wrong is said in one line that names the argument
 * and where to read more; nothing was done yet. */
#include "cli/cli.h"

#include "base/config.h"
#include "base/str.h"

#include <errno.h>
#include <getopt.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define OPTIONS_MAX 32
/* getopt_long answers ROW_FIRST + i for row i of the table. */
#define ROW_FIRST 1000

static const char *log_level;
static int help;
static const cli_option common[] = {
    {"log-level", CLI_TEXT, &log_level, "LEVEL",
     "error, warn, info or debug [warn]", 0, 0},
    {"help", CLI_FLAG, &help, NULL, "this text", 0, 0},
};
#define N_COMMON (sizeof(common) / sizeof(common[0]))

int cli_usage(const char *command, const char *fmt, ...)
{
    va_list args;

    fprintf(stderr, "ferry%s%s: ", command ? " " : "", command ? command : "");
    va_start(args, fmt);
    vfprintf(stderr, fmt, args);
    va_end(args);
    fprintf(stderr, "; see 'ferry %s%s--help'\n", command ? command : "",
            command ? " " : "");
    return CLI_EXIT_USAGE;
}

const char *cli_hint(char *buffer, size_t size_bytes, const char *prefix,
                     const char *given, const char *const *names, size_t count)
{
    size_t best = 4, distance;
    const char *nearest = NULL;

    for (size_t i = 0; i < count; i++) {
        distance = ferry__edit_distance(given, names[i], best);
        if (distance < best && distance < strlen(given)) {
            best = distance;
            nearest = names[i];
        }
    }
    buffer[0] = '\0';
    if (nearest)
        snprintf(buffer, size_bytes, " (did you mean %s%s?)", prefix, nearest);
    return buffer;
}

int cli_log_level_set(const char *command, const char *level)
{
    static const char *const levels[] = {"error", "warn", "info", "debug"};

    for (size_t i = 0; i < 4; i++)
        if (strcmp(level, levels[i]) == 0 &&
            ferry__config_set("log_level", level) == FERRY_OK)
            return 0;
    return cli_usage(
        command, "--log-level takes error, warn, info or debug, got %s", level);
}

static void print_option(const cli_option *option)
{
    char left[48];

    snprintf(left, sizeof(left), "--%s%s%s", option->name,
             option->arg ? " " : "", option->arg ? option->arg : "");
    printf("  %-26s %s\n", left, option->help);
}

static void print_help(const cli_command *command, const cli_option *options,
                       size_t n_options)
{
    printf("Usage: ferry %s %s\n%s\n\nOptions:\n", command->name,
           command->synopsis, command->summary);
    for (size_t i = 0; i < n_options; i++)
        print_option(&options[i]);
    for (size_t i = 0; i < N_COMMON; i++)
        print_option(&common[i]);
    printf("\n%s", command->details);
}

static int take_int(const char *command, const cli_option *option,
                    const char *text)
{
    int64_t min = option->min, max = option->max;
    char *end;
    long long value;

    if (min == 0 && max == 0) {
        min = 1;
        max = INT64_MAX;
    }
    errno = 0;
    value = strtoll(text, &end, 10);
    if (errno || end == text || *end)
        return cli_usage(command, "--%s takes a whole number, got '%s'",
                         option->name, text);
    if (value < min || value > max)
        return cli_usage(command, "--%s takes %lld to %lld, got %lld",
                         option->name, (long long)min, (long long)max, value);
    *(int64_t *)option->value = value;
    return -1;
}

static int take_number(const char *command, const cli_option *option,
                       const char *text)
{
    char *end;
    double value = strtod(text, &end);

    if (end == text || *end || !isfinite(value))
        return cli_usage(command, "--%s takes a number, got '%s'", option->name,
                         text);
    *(double *)option->value = value;
    return -1;
}

/* The floating-point types that weights are pushed as. */
static int take_dtype(const char *command, const cli_option *option,
                      const char *text)
{
    ferry_dtype dtype = FERRY_DTYPE_NONE;

    if (ferry_dtype_parse(text, &dtype) != FERRY_OK ||
        (dtype != FERRY_DTYPE_F32 && dtype != FERRY_DTYPE_BF16 &&
         dtype != FERRY_DTYPE_F16))
        return cli_usage(command, "--%s takes f32, bf16 or f16, got '%s'",
                         option->name, text);
    *(ferry_dtype *)option->value = dtype;
    return -1;
}

static int take_one_more(const char *command, const cli_option *option,
                         const char *text)
{
    cli_texts *texts = option->value;

    if (texts->count == CLI_TEXTS_MAX)
        return cli_usage(command, "--%s is given more than %d times",
                         option->name, CLI_TEXTS_MAX);
    texts->items[texts->count++] = text;
    return -1;
}

/* Stores one option's value; -1, or the exit code. */
static int take(const char *command, const cli_option *option, const char *text)
{
    switch (option->kind) {
    case CLI_FLAG:
        *(int *)option->value = 1;
        return -1;
    case CLI_TEXT:
        *(const char **)option->value = text;
        return -1;
    case CLI_INT:
        return take_int(command, option, text);
    case CLI_NUMBER:
        return take_number(command, option, text);
    case CLI_TEXTS:
        return take_one_more(command, option, text);
    case CLI_DTYPE:
        return take_dtype(command, option, text);
    }
    return -1;
}

static int unknown_option(const cli_command *command, const char *given,
                          const struct option *rows, size_t count)
{
    const char *names[OPTIONS_MAX];
    char hint[96], name[64];

    for (size_t i = 0; i < count; i++)
        names[i] = rows[i].name;
    snprintf(name, sizeof(name), "%s",
             ferry__starts_with(given, "--") ? given + 2 : given);
    name[strcspn(name, "=")] = '\0';
    cli_hint(hint, sizeof(hint), "--", name, names, count);
    return cli_usage(command->name, "unknown option %s%s", given, hint);
}

int cli_options_parse(const cli_command *command, const cli_option *options,
                      size_t n_options, int argc, char **argv, int *out_first)
{
    struct option rows[OPTIONS_MAX + 1] = {{0}};
    const cli_option *table[OPTIONS_MAX];
    size_t count = 0;
    int got, code;

    for (size_t i = 0; i < n_options + N_COMMON && count < OPTIONS_MAX; i++) {
        table[count] = i < n_options ? &options[i] : &common[i - n_options];
        rows[count].name = table[count]->name;
        rows[count].has_arg =
            table[count]->kind == CLI_FLAG ? no_argument : required_argument;
        rows[count].val = ROW_FIRST + (int)count;
        count++;
    }
    opterr = 0;
    optind = 0; /* starts afresh, whatever main read */
    while ((got = getopt_long(argc, argv, ":h", rows, NULL)) != -1) {
        if (got == 'h') {
            help = 1;
        } else if (got == ':') {
            return cli_usage(command->name, "option %s takes a value",
                             argv[optind - 1]);
        } else if (got == '?' && optopt >= ROW_FIRST) {
            return cli_usage(command->name, "option --%s takes no value",
                             rows[optopt - ROW_FIRST].name);
        } else if (got == '?') {
            return unknown_option(command, argv[optind - 1], rows, count);
        } else {
            code = take(command->name, table[got - ROW_FIRST], optarg);
            if (code >= 0)
                return code;
        }
    }
    if (help) {
        print_help(command, options, n_options);
        return CLI_EXIT_OK;
    }
    if (log_level && cli_log_level_set(command->name, log_level) != 0)
        return CLI_EXIT_USAGE;
    *out_first = optind;
    return -1;
}
