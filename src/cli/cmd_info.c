/* SPDX-License-Identifier: Apache-2.0 */
/* `ferry info`: versions, and which backends this installation has.
 * Invariant: opens no module unless it is asked to, so it runs whatever is
 * missing. */
#include "cli/cli.h"

#include "comm/provider.h"
#include "core/module.h"

#include <ferry/backend.h>
#include <stdio.h>
#include <string.h>

static int as_json, probe;
static const cli_option rows[] = {
    {"json", CLI_FLAG, &as_json, NULL, "one JSON object", 0, 0},
    {"probe", CLI_FLAG, &probe, NULL,
     "also open the providers of groups, to see whether they work here", 0, 0},
};

static int run(int argc, char **argv);

const cli_command cli_info = {
    "info", "[OPTIONS]", "versions, and the backends of both sides",
    "A backend that is not available says why. Listing loads none of them; "
    "with\n"
    "--probe the providers by which nccl forms its groups are opened.\n"
    "\n"
    "Examples:\n"
    "  ferry info\n"
    "  ferry info --json\n",
    run};

typedef ferry_status (*list_fn)(size_t index, ferry_backend_info *out);

static json_t *backends_json(list_fn list)
{
    json_t *all = json_array();
    ferry_backend_info info = {.size = sizeof(info)};

    for (size_t i = 0; list(i, &info) == FERRY_OK; i++)
        json_array_append_new(
            all, json_pack("{s:s, s:b, s:b, s:s}", "name", info.name,
                           "built_in", info.built_in, "available",
                           info.available, "reason", info.reason));
    return all;
}

static void print_backends(const char *side, list_fn list)
{
    ferry_backend_info info = {.size = sizeof(info)};

    printf("%s backends:\n", side);
    for (size_t i = 0; list(i, &info) == FERRY_OK; i++)
        printf("  %-14s %s%s%s\n", info.name,
               info.available ? "available" : "not available",
               info.reason[0] ? ": " : "", info.reason);
}

/* Whether a provider can be had, and why not. */
static bool provider_works(const char *name, char *reason, size_t size_bytes)
{
    const ferry__provider *p = NULL;
    char module[64];

    reason[0] = '\0';
    snprintf(module, sizeof(module), "ferry_comm_%s", name);
    if (strcmp(name, ferry__provider_tcp.name) == 0)
        return true; /* part of the library */
    if (!ferry__module_present(module)) {
        snprintf(reason, size_bytes, "module %s is not installed", module);
        return false;
    }
    if (!probe) {
        snprintf(reason, size_bytes, "not opened; see --probe");
        return true;
    }
    if (ferry__provider_find(name, &p) == FERRY_OK &&
        p->available() == FERRY_OK)
        return true;
    snprintf(reason, size_bytes, "%s", ferry_last_error());
    return false;
}

static json_t *providers_json(void)
{
    json_t *all = json_array();
    const char *name;
    char reason[512];

    for (size_t i = 0; (name = ferry__provider_name(i)); i++) {
        bool works = provider_works(name, reason, sizeof(reason));

        json_array_append_new(all,
                              json_pack("{s:s, s:b, s:s}", "name", name,
                                        "available", works, "reason", reason));
    }
    return all;
}

static void print_providers(void)
{
    const char *name;
    char reason[512];

    printf("providers:\n");
    for (size_t i = 0; (name = ferry__provider_name(i)); i++) {
        bool works = provider_works(name, reason, sizeof(reason));

        printf("  %-14s %s%s%s\n", name, works ? "available" : "not available",
               reason[0] ? ": " : "", reason);
    }
}

static void print_json(const char *folder, int gguf)
{
    cli_json_print(json_pack(
        "{s:s, s:I, s:o, s:o, s:o, s:{s:b}, s:s}", "version",
        ferry_version_text(), "engine_abi", (json_int_t)FERRY_ENGINE_ABI,
        "trainer", backends_json(ferry_trainer_list), "worker",
        backends_json(ferry_worker_list), "providers", providers_json(),
        "sources", "gguf", gguf, "module_folder", folder));
}

static int run(int argc, char **argv)
{
    char folder[4096] = "";
    int first, gguf;
    int code = cli_options_parse(
        &cli_info, rows, sizeof(rows) / sizeof(rows[0]), argc, argv, &first);

    if (code >= 0)
        return code;
    if (first < argc)
        return cli_usage("info", "unexpected argument %s", argv[first]);
    if (ferry__module_folder(folder, sizeof(folder)) != FERRY_OK)
        folder[0] = '\0';
    gguf = ferry__module_present("ferry_source_gguf");
    if (as_json) {
        print_json(folder, gguf);
        return CLI_EXIT_OK;
    }
    printf("ferry %s, engine ABI %u.%u\nmodules in %s\n\n",
           ferry_version_text(), FERRY_ENGINE_ABI >> 16,
           FERRY_ENGINE_ABI & 0xffffu, folder);
    print_backends("trainer", ferry_trainer_list);
    print_backends("worker", ferry_worker_list);
    print_providers();
    printf("GGUF source: %s\n", gguf ? "available" : "not available");
    return CLI_EXIT_OK;
}
