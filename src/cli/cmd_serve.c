/* SPDX-License-Identifier: Apache-2.0 */
/* `ferry serve`: Ferry's worker, which reads its own flags. */
#include "cli/cli.h"
#include "cli/cli_worker.h"

#include <string.h>

static int run(int argc, char **argv);

const cli_command cli_serve = {
    "serve", "MODEL [OPTIONS]",
    "serve a model whose weights can be replaced while it runs", "", run};

/* Takes --log-level out of argv, since the worker's flags are its own.
 * Returns the new argc, or -1 after a line. */
static int take_log_level(int argc, char **argv)
{
    static const char flag[] = "--log-level";
    const size_t length = sizeof(flag) - 1;
    int kept = 0;

    for (int i = 0; i < argc; i++) {
        const char *level = NULL;

        if (strcmp(argv[i], flag) == 0 && i + 1 < argc)
            level = argv[++i];
        else if (strncmp(argv[i], flag, length) == 0 && argv[i][length] == '=')
            level = argv[i] + length + 1;
        if (!level)
            argv[kept++] = argv[i];
        else if (cli_log_level_set("serve", level) != 0)
            return -1;
    }
    argv[kept] = NULL;
    return kept;
}

static int run(int argc, char **argv)
{
    cli_worker_api api;
    ferry_status status;

    argc = take_log_level(argc, argv);
    if (argc < 0)
        return CLI_EXIT_USAGE;
    status = cli_worker_open(&api);
    if (status != FERRY_OK)
        return cli_fail("serve", status);
    return api.serve_main(argc, argv);
}
