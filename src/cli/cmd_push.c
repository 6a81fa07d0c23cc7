/* SPDX-License-Identifier: Apache-2.0 */
/* `ferry push`: carries a checkpoint into running servers.
 * Invariant: an interrupt ends the round cleanly, with the servers told; only
 * the second one ends the program at once. */
#include "cli/cli.h"
#include "cli/cli_http.h"
#include "cli/cli_progress.h"
#include "cli/cli_push.h"
#include "cli/cli_source.h"
#include "cli/cli_trace.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define URLS_MAX          CLI_TEXTS_MAX
#define VERSION_BYTES_MAX 256

static cli_push_options options = {.backend = "ipc",
                                   .dtype = FERRY_DTYPE_NONE,
                                   .rounds = 1,
                                   .timeout = 300,
                                   .master_port = -1};

static const cli_option rows[] = {
    {"backend", CLI_TEXT, &options.backend, "NAME",
     "how the bytes travel; see 'ferry info' [ipc]", 0, 0},
    {"init-info", CLI_TEXT, &options.init_info, "JSON",
     "more fields of the backend's init info", 0, 0},
    {"dtype", CLI_DTYPE, &options.dtype, "DTYPE",
     "cast to f32, bf16 or f16 before sending", 0, 0},
    {"shared", CLI_FLAG, &options.shared, NULL,
     "copy the source once to memory that workers read", 0, 0},
    {"packed", CLI_FLAG, &options.packed, NULL,
     "send several parameters in one buffer [nccl: yes]", 0, 0},
    {"no-packed", CLI_FLAG, &options.no_packed, NULL,
     "send each parameter by itself [ipc: yes]", 0, 0},
    {"to", CLI_TEXTS, &options.to, "URL", "a server, as a URL after SOURCE is",
     0, 0},
    {"master-address", CLI_TEXT, &options.master_address, "ADDR",
     "nccl: this host, as the servers reach it [found out]", 0, 0},
    {"master-port", CLI_INT, &options.master_port, "N",
     "nccl: port of the meeting; 0 picks one [0]", 0, 65535},
    {"provider", CLI_TEXT, &options.provider, "NAME",
     "nccl: auto, tcp, ucx or nccl [auto]", 0, 0},
    {"weight-version", CLI_TEXT, &options.version, "V",
     "label that the servers carry afterwards", 0, 0},
    {"token", CLI_TEXT, &options.token, "T",
     "bearer token [the variable FERRY_TOKEN]", 0, 0},
    {"ca", CLI_TEXT, &options.ca, "FILE",
     "PEM of the CA of an https server [the system's]", 0, 0},
    {"pause", CLI_FLAG, &options.pause, NULL,
     "pause generation around each round", 0, 0},
    {"rounds", CLI_INT, &options.rounds, "N", "send N times [1]", 0, 0},
    {"timeout", CLI_INT, &options.timeout, "S",
     "seconds that one round may take [300]", 1, 86400},
    {"trace", CLI_TEXT, &options.trace, "FILE",
     "write what trainer and ranks did when, for Perfetto", 0, 0},
    {"json", CLI_FLAG, &options.json, NULL, "one JSON object a round", 0, 0},
};

static cli_trace *trace; /* NULL: none is written */

static int run(int argc, char **argv);

const cli_command cli_push = {
    "push", "SOURCE URL... [OPTIONS]",
    "carry a checkpoint into one or several running servers",
    "SOURCE is a safetensors file, a folder of them, or a GGUF file (which is\n"
    "dequantised, with Hugging Face names and layout restored).\n"
    "\n"
    "With --backend nccl all servers join one group with this process, and "
    "the\n"
    "bytes leave it once, however many hosts there are.\n"
    "\n"
    "Examples:\n"
    "  ferry push ./model http://127.0.0.1:8000 --weight-version step-12\n"
    "  ferry push model.gguf http://127.0.0.1:8000 --dtype bf16 --shared\n"
    "  ferry push ./model http://127.0.0.1:8000 http://127.0.0.1:8001 "
    "--json\n"
    "  ferry push ./model --backend nccl --to http://a:8000 --to "
    "http://b:8000\n",
    run};

/* One client for all URLs. -1, or the exit code. */
static int make_client(const char *const *urls, int count, ferry_client *out)
{
    ferry_http_options http = FERRY_HTTP_OPTIONS_INIT;
    ferry_client clients[URLS_MAX] = {{0}};
    ferry_status status = FERRY_OK;
    int made = 0;

    http.token = options.token;
    http.ca_file = options.ca;
    http.timeout_ms = options.timeout * 1000;
    http.pause = options.pause;
    while (made < count && status == FERRY_OK) {
        status = ferry_client_http(urls[made], &http, &clients[made]);
        if (status == FERRY_OK)
            made++;
    }
    if (status == FERRY_OK && count == 1) {
        *out = clients[0];
        return -1;
    }
    if (status == FERRY_OK)
        status = ferry_client_fanout(clients, (size_t)count, out);
    if (status == FERRY_OK)
        return -1;
    for (int i = 0; i < made; i++)
        ferry_client_close(&clients[i]);
    if (status == FERRY_EINVAL)
        return cli_usage("push", "%s", ferry_last_error());
    return cli_fail("push", status);
}

static int send_rounds(ferry_trainer *trainer, const cli_source *source)
{
    for (int64_t round = 1; round <= options.rounds; round++) {
        ferry_round_stats stats = {.size = sizeof(stats)};
        ferry_send_options send = FERRY_SEND_OPTIONS_INIT;
        cli_progress progress;
        ferry_status status;
        char label[32];

        if (cli_push_interrupted()) {
            ferry_fail(FERRY_ECANCELED,
                       "interrupted before round %lld of "
                       "%lld",
                       (long long)round, (long long)options.rounds);
            return cli_fail("push", FERRY_ECANCELED);
        }
        snprintf(label, sizeof(label), "round %lld", (long long)round);
        cli_progress_begin(&progress, label, options.json);
        send.weight_version = options.version;
        send.progress = cli_progress_update;
        send.progress_arg = &progress;
        send.stats = &stats;
        if (trace)
            cli_trace_begin(trace);
        status = ferry_trainer_send_weights(trainer, &send);
        cli_progress_end(&progress);
        if (trace)
            cli_trace_round(trace, trainer, &stats, status);
        if (options.json)
            cli_push_print_json(&options, round, source->count, status, &stats);
        if (status != FERRY_OK)
            return cli_fail("push", status);
        if (!options.json)
            cli_push_print(&options, round, &stats);
    }
    return CLI_EXIT_OK;
}

static int push(const cli_source *source, const json_t *init_info,
                ferry_client *client)
{
    ferry_trainer *trainer = NULL;
    char *text = json_dumps(init_info, JSON_COMPACT);
    ferry_status status = FERRY_ENOMEM;
    int code;

    if (text)
        status = ferry_trainer_init_dict(options.backend, text, client,
                                         &source->source, &trainer);
    free(text);
    if (status != FERRY_OK)
        return cli_fail("push", status);
    cli_push_watch(trainer);
    code = send_rounds(trainer, source);
    cli_push_watch(NULL);
    ferry_trainer_shutdown(&trainer);
    return code;
}

static ferry_status open_source(const char *path, cli_source *out)
{
    ferry_status status;

    FERRY_TRY(cli_source_open(path, options.dtype, out));
    if (!options.shared)
        return FERRY_OK;
    status = cli_source_share(out);
    if (status != FERRY_OK)
        cli_source_close(out);
    return status;
}

static int run_with(const char *path, const char *const *urls, int count,
                    const json_t *init_info)
{
    cli_source source = {.source = {0}};
    ferry_client client = {0};
    char bytes[24];
    ferry_status status;
    int code = make_client(urls, count, &client);

    if (code >= 0)
        return code;
    status = open_source(path, &source);
    if (status != FERRY_OK) {
        code = cli_fail("push", status);
    } else if (source.count == 0) {
        code = cli_fail("push",
                        ferry_fail(FERRY_EINVAL, "%s has no parameters", path));
        cli_source_close(&source);
    } else {
        if (!options.json)
            printf("%s: %zu parameters, %s, by %s\n", path, source.count,
                   cli_bytes_text(bytes, sizeof(bytes), source.bytes),
                   options.backend);
        cli_flush();
        code = push(&source, init_info, &client);
        cli_source_close(&source);
    }
    ferry_client_close(&client);
    return code;
}

/* Names that differ by slashes at the end are one server. */
static bool is_same_url(const char *a, const char *b)
{
    size_t length_a = strlen(a), length_b = strlen(b);

    while (length_a > 0 && a[length_a - 1] == '/')
        length_a--;
    while (length_b > 0 && b[length_b - 1] == '/')
        length_b--;
    return length_a == length_b && strncmp(a, b, length_a) == 0;
}

/* A server given twice would be told twice to begin the same round. -1, or
 * the exit code. */
static int check_urls(const char *const *urls, int count)
{
    for (int i = 1; i < count; i++)
        for (int k = 0; k < i; k++)
            if (is_same_url(urls[i], urls[k]))
                return cli_usage("push", "URL %s is given twice", urls[i]);
    return -1;
}

/* URLs after SOURCE come before those of --to. -1, or the exit code. */
static int take_urls(char **urls, int count)
{
    cli_texts *to = &options.to;

    if (count + to->count > URLS_MAX)
        return cli_usage("push", "at most %d URLs, got %d", URLS_MAX,
                         count + to->count);
    if (count + to->count == 0)
        return cli_usage("push", "URL is missing");
    memmove(to->items + count, to->items,
            (size_t)to->count * sizeof(to->items[0]));
    for (int i = 0; i < count; i++)
        to->items[i] = urls[i];
    to->count += count;
    return -1;
}

/* The label goes into JSON and into logs. -1, or the exit code. */
static int check_version(const char *version)
{
    json_t *text;

    if (!version)
        return -1;
    if (!version[0] || strlen(version) > VERSION_BYTES_MAX)
        return cli_usage("push",
                         "--weight-version takes 1 to %d bytes, got %zu",
                         VERSION_BYTES_MAX, strlen(version));
    text = json_string(version);
    if (!text)
        return cli_usage("push", "--weight-version takes UTF-8");
    json_decref(text);
    return -1;
}

static int open_trace(const char *const *urls, int count)
{
    cli_http servers[URLS_MAX];
    ferry_status status;

    if (!options.trace)
        return -1;
    for (int i = 0; i < count; i++)
        servers[i] = (cli_http){urls[i], options.token, options.ca, 10000};
    status = cli_trace_open(options.trace, servers, (size_t)count, &trace);
    return status == FERRY_OK ? -1 : cli_fail("push", status);
}

static int run(int argc, char **argv)
{
    json_t *init_info;
    ferry_status status;
    int first;
    int code = cli_options_parse(
        &cli_push, rows, sizeof(rows) / sizeof(rows[0]), argc, argv, &first);

    if (code >= 0)
        return code;
    if (argc == first)
        return cli_usage("push", "SOURCE is missing");
    code = take_urls(argv + first + 1, argc - first - 1);
    if (code < 0)
        code = check_urls(options.to.items, options.to.count);
    if (code < 0)
        code = check_version(options.version);
    if (code < 0)
        code = cli_ca_check("push", options.ca);
    if (code >= 0)
        return code;
    init_info =
        cli_push_init_info(&options, options.to.items, options.to.count);
    if (!init_info)
        return CLI_EXIT_USAGE;
    cli_push_catch_signals();
    code = open_trace(options.to.items, options.to.count);
    if (code < 0)
        code = run_with(argv[first], options.to.items, options.to.count,
                        init_info);
    status = cli_trace_close(&trace);
    if (status != FERRY_OK && code == CLI_EXIT_OK)
        code = cli_fail("push", status);
    json_decref(init_info);
    return code;
}
