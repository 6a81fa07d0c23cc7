/* SPDX-License-Identifier: Apache-2.0 */
/* The program `ferry`: finds the command and runs it.
 * Invariant: a command loads only what it uses, so `ferry info` runs where
 * neither ggml nor a transport can be loaded. */
#include "cli/cli.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>

static const cli_command *const commands[] = {
    &cli_serve, &cli_push, &cli_generate, &cli_info, &cli_inspect, &cli_verify,
};
#define N_COMMANDS (sizeof(commands) / sizeof(commands[0]))

static void print_help(void)
{
    printf("Usage: ferry [--log-level LEVEL] COMMAND ...\n"
           "Carries model weights from a trainer into running inference "
           "workers.\n\nCommands:\n");
    for (size_t i = 0; i < N_COMMANDS; i++)
        printf("  %-10s %s\n", commands[i]->name, commands[i]->summary);
    printf(
        "\nOptions:\n"
        "  --log-level LEVEL  error, warn, info or debug [warn]\n"
        "  --version          the version\n"
        "  --help             this text; 'ferry COMMAND --help' for more\n"
        "\nExamples:\n"
        "  ferry serve MODEL --weight-transfer-config '{\"backend\":\"ipc\"}'\n"
        "  ferry push MODEL http://127.0.0.1:8000 --weight-version step-1\n"
        "  ferry verify MODEL http://127.0.0.1:8000\n"
        "\nExit codes:\n"
        "  0  all went well\n"
        "  1  the operation failed, or what was compared differs\n"
        "  2  the command line was wrong\n"
        "  3  the server could not be reached\n");
}

static int unknown_command(const char *given)
{
    const char *names[N_COMMANDS];
    char hint[96];

    for (size_t i = 0; i < N_COMMANDS; i++)
        names[i] = commands[i]->name;
    cli_hint(hint, sizeof(hint), "", given, names, N_COMMANDS);
    return cli_usage(NULL, "unknown %s %s%s",
                     given[0] == '-' ? "option" : "command", given, hint);
}

static int run(int argc, char **argv)
{
    int i = 1;

    while (i < argc && strncmp(argv[i], "--log-level", 11) == 0) {
        const char *level = argv[i] + 11;

        if (*level == '=')
            level++;
        else if (*level == '\0' && ++i < argc)
            level = argv[i];
        else
            return *level ? unknown_command(argv[i])
                          : cli_usage(NULL, "option --log-level takes a value");
        if (cli_log_level_set(NULL, level) != 0)
            return CLI_EXIT_USAGE;
        i++;
    }
    if (i == argc)
        return cli_usage(NULL, "a command is missing");
    if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0 ||
        (strcmp(argv[i], "help") == 0 && i + 1 == argc)) {
        print_help();
        return CLI_EXIT_OK;
    }
    if (strcmp(argv[i], "--version") == 0) {
        printf("ferry %s\n", ferry_version_text());
        return CLI_EXIT_OK;
    }
    for (size_t k = 0; k < N_COMMANDS; k++)
        if (strcmp(argv[i], commands[k]->name) == 0)
            return commands[k]->run(argc - i, argv + i);
    return unknown_command(argv[i]);
}

/* A descriptor that the caller closed would be given to the first socket or
 * file opened here, and what is printed would go there. Standard output is
 * taken by what cannot be written, so that a lost result is still an error;
 * what goes to standard error is dropped. */
static void fill_descriptors(void)
{
    for (int fd = 0; fd <= 2; fd++)
        if (fcntl(fd, F_GETFD) < 0 && errno == EBADF &&
            open("/dev/null", fd == 2 ? O_WRONLY : O_RDONLY) < 0)
            return;
}

int main(int argc, char **argv)
{
    fill_descriptors();
    /* A closed pipe or socket is an error of the write, not the end of the
     * program. The library leaves this choice to its user; this is it. */
    signal(SIGPIPE, SIG_IGN);
    return cli_finish(run(argc, argv));
}
