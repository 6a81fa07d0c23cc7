/* SPDX-License-Identifier: Apache-2.0 */
/* `ferry verify`: does a server store what a checkpoint should give?
 * Each rank is built here, loaded by the same plan as any push, and compared
 * parameter by parameter with what the server's ranks say they hold. */
#include "cli/cli.h"
#include "cli/cli_http.h"
#include "cli/cli_source.h"
#include "cli/cli_worker.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static struct {
    const char *token, *kernel_format, *ca;
    ferry_dtype dtype;
    int64_t timeout;
    int json;
} options = {.dtype = FERRY_DTYPE_NONE, .timeout = 300};

static const cli_option rows[] = {
    {"dtype", CLI_DTYPE, &options.dtype, "DTYPE",
     "as it was pushed: f32, bf16 or f16 [as the source has it]", 0, 0},
    {"kernel-format", CLI_TEXT, &options.kernel_format, "FORMAT",
     "f32, bf16 or q8_0 [what the server says]", 0, 0},
    {"token", CLI_TEXT, &options.token, "T",
     "bearer token [the variable FERRY_TOKEN]", 0, 0},
    {"ca", CLI_TEXT, &options.ca, "FILE",
     "PEM of the CA of an https server [the system's]", 0, 0},
    {"timeout", CLI_INT, &options.timeout, "S", "seconds for one request [300]",
     1, 86400},
    {"json", CLI_FLAG, &options.json, NULL, "one JSON object", 0, 0},
};

static int run(int argc, char **argv);

const cli_command cli_verify = {
    "verify", "SOURCE URL [OPTIONS]",
    "compare a running server's weights with a checkpoint",
    "Exits with 1 when one parameter of one rank differs, is missing or is\n"
    "there without reason. Give the --dtype that the weights were pushed "
    "with.\n"
    "\n"
    "Examples:\n"
    "  ferry verify ./model http://127.0.0.1:8000\n"
    "  ferry verify model.gguf http://127.0.0.1:8000 --dtype bf16 --json\n",
    run};

/* What the server is and what it says it stores. */
typedef struct peer {
    json_t *checksums; /* "dp0:pp0:pcp0:tp0:NAME" -> SHA-256; compared keys
                          are taken out */
    int32_t tp, dp;
    char kernel_format[16];
} peer;

/* One rank's outcome. */
typedef struct tally {
    size_t matched, total;
} tally;

/* The first difference found, in the order of ranks and parameters. */
typedef struct difference {
    char key[512], expected[80], got[80];
} difference;

typedef struct comparison {
    json_t *ranks;
    size_t n_matched, n_different;
    difference first;
} comparison;

static ferry_status read_status(const cli_http *http, peer *out)
{
    json_t *reply = NULL;
    const char *format = NULL;
    int tp = 0, dp = 0;
    ferry_status status = FERRY_OK;

    FERRY_TRY(cli_http_json(http, "/ferry/status", NULL, &reply));
    if (json_unpack(reply, "{s:{s:i, s:i}, s?:s}", "parallel", "tp", &tp, "dp",
                    &dp, "kernel_format", &format) != 0 ||
        tp < 1 || dp < 1 || tp > 4096 || dp > 4096)
        status = ferry_fail(FERRY_EPEER,
                            "the server's status has no parallel.tp and "
                            "parallel.dp");
    out->tp = tp;
    out->dp = dp;
    snprintf(out->kernel_format, sizeof(out->kernel_format), "%s",
             format ? format : "");
    json_decref(reply);
    return status;
}

static ferry_status read_checksums(const cli_http *http, peer *out)
{
    json_t *body = json_pack("{s:s}", "action", "checksum");
    json_t *reply = NULL, *checksums;
    ferry_status status = cli_http_json(http, "/weight_checker", body, &reply);

    json_decref(body);
    FERRY_TRY(status);
    checksums = json_object_get(reply, "checksums");
    if (json_is_object(checksums))
        out->checksums = json_incref(checksums);
    else
        status = ferry_fail(FERRY_EPEER, "the server's reply has no checksums");
    json_decref(reply);
    return status;
}

static void note_difference(comparison *all, const char *key,
                            const char *expected, const char *got)
{
    if (all->n_different++ > 0)
        return;
    snprintf(all->first.key, sizeof(all->first.key), "%s", key);
    snprintf(all->first.expected, sizeof(all->first.expected), "%s", expected);
    snprintf(all->first.got, sizeof(all->first.got), "%s", got);
}

/* Takes what was compared out of the server's list. */
static tally compare_rank(peer *server, const json_t *expected, int32_t dp,
                          int32_t tp, comparison *all)
{
    tally rank = {0, 0};
    const char *name;
    json_t *value;
    char key[512];

    json_object_foreach((json_t *)expected, name, value)
    {
        const char *want = json_string_value(value);
        const char *got;

        snprintf(key, sizeof(key), "dp%d:pp0:pcp0:tp%d:%s", dp, tp, name);
        got = json_string_value(json_object_get(server->checksums, key));
        rank.total++;
        if (got && want && strcmp(got, want) == 0)
            rank.matched++;
        else
            note_difference(all, key, want ? want : "?", got ? got : "missing");
        json_object_del(server->checksums, key);
    }
    all->n_matched += rank.matched;
    return rank;
}

/* What rank `tp` of a replica should store, as name -> SHA-256. */
static ferry_status expect_rank(const cli_worker_api *api,
                                const ferry__model_config *config,
                                ferry_dtype kernel, int32_t tp_rank,
                                int32_t tp_size, const ferry_source *source,
                                json_t **out_expected)
{
    cli_rank rank = {0};
    char *text = NULL;
    json_t *expected = NULL;
    ferry_status status;

    FERRY_TRY(cli_rank_create(api, config, kernel, tp_rank, tp_size, &rank));
    status = ferry_worker_load_source(rank.worker, source);
    if (status == FERRY_OK)
        status = api->checksum_json(rank.worker, &text);
    cli_rank_destroy(api, &rank);
    if (status == FERRY_OK) {
        expected = json_loads(text, 0, NULL);
        if (!expected)
            status = ferry_fail(FERRY_EINTERNAL, "checksums are no JSON");
    }
    ferry_free(text);
    FERRY_TRY(status);
    *out_expected = expected;
    return FERRY_OK;
}

static ferry_status compare_all(const char *path, peer *server,
                                const char *format, comparison *all)
{
    cli_worker_api api;
    cli_source source;
    ferry__model_config config;
    ferry_dtype kernel;
    ferry_status status = FERRY_OK;

    FERRY_TRY(cli_kernel_parse(format, &kernel));
    FERRY_TRY(cli_worker_open(&api));
    FERRY_TRY(api.config_open(path, &config));
    FERRY_TRY(cli_source_open(path, options.dtype, &source));
    for (int32_t tp = 0; tp < server->tp && status == FERRY_OK; tp++) {
        json_t *expected = NULL;

        status = expect_rank(&api, &config, kernel, tp, server->tp,
                             &source.source, &expected);
        for (int32_t dp = 0; dp < server->dp && status == FERRY_OK; dp++) {
            tally rank = compare_rank(server, expected, dp, tp, all);

            json_array_append_new(
                all->ranks, json_pack("{s:i, s:i, s:I, s:I}", "dp", dp, "tp",
                                      tp, "matched", (json_int_t)rank.matched,
                                      "total", (json_int_t)rank.total));
        }
        json_decref(expected);
    }
    cli_source_close(&source);
    return status;
}

/* Whatever the server stores beside that is a difference too. */
static void note_extra(const peer *server, comparison *all)
{
    const char *key;
    json_t *value;

    json_object_foreach(server->checksums, key, value)
        note_difference(all, key, "not stored", json_string_value(value));
}

static void print_table(const comparison *all)
{
    const json_t *rank;
    size_t i;

    json_array_foreach(all->ranks, i, rank)
    {
        int dp, tp;
        json_int_t matched, total;

        if (json_unpack((json_t *)rank, "{s:i, s:i, s:I, s:I}", "dp", &dp, "tp",
                        &tp, "matched", &matched, "total", &total) == 0)
            printf("replica %d rank %d: %lld of %lld parameters match\n", dp,
                   tp, (long long)matched, (long long)total);
    }
    if (all->n_different == 0) {
        printf("verify: ok, %zu parameters\n", all->n_matched);
        return;
    }
    printf("verify: %zu parameters differ, first ", all->n_different);
    cli_text_print(stdout, all->first.key);
    printf("\n  checkpoint %s\n  server     ", all->first.expected);
    cli_text_print(stdout, all->first.got);
    putchar('\n');
}

static int report(comparison *all, const peer *server, const char *format)
{
    json_t *line;

    if (!options.json) {
        print_table(all);
    } else {
        line = json_pack("{s:b, s:i, s:i, s:s, s:I, s:I, s:O}", "match",
                         all->n_different == 0, "tp", server->tp, "dp",
                         server->dp, "kernel_format", format, "matched",
                         (json_int_t)all->n_matched, "different",
                         (json_int_t)all->n_different, "ranks", all->ranks);
        if (all->n_different)
            json_object_set_new(line, "first",
                                json_pack("{s:s, s:s, s:s}", "key",
                                          all->first.key, "checkpoint",
                                          all->first.expected, "server",
                                          all->first.got));
        cli_json_print(line);
    }
    return all->n_different ? CLI_EXIT_FAILED : CLI_EXIT_OK;
}

static int verify(const char *path, const cli_http *http)
{
    peer server = {0};
    comparison all = {.ranks = json_array()};
    const char *format;
    int code;
    ferry_status status = read_status(http, &server);

    if (status == FERRY_OK)
        status = read_checksums(http, &server);
    format =
        options.kernel_format ? options.kernel_format : server.kernel_format;
    if (status == FERRY_OK)
        status = compare_all(path, &server, format, &all);
    if (status == FERRY_OK) {
        note_extra(&server, &all);
        code = report(&all, &server, format);
    } else if (status == FERRY_EINVAL && !server.checksums) {
        code = cli_usage("verify", "%s", ferry_last_error());
    } else {
        code = cli_fail("verify", status);
    }
    json_decref(server.checksums);
    json_decref(all.ranks);
    return code;
}

/* Says of a lone safetensors file that its shapes alone do not make a model.
 * -1, or the exit code. */
static int check_config(const char *path)
{
    const char *end = strrchr(path, '/');
    size_t length = strlen(path);
    int folder = end ? (int)(end - path) + 1 : 0;
    char config[4096];
    ferry_status status;

    if (length < 12 || strcmp(path + length - 12, ".safetensors") != 0 ||
        access(path, F_OK) != 0)
        return -1;
    snprintf(config, sizeof(config), "%.*sconfig.json", folder, path);
    if (access(config, F_OK) == 0)
        return -1;
    status = ferry_fail(FERRY_EIO,
                        "file %s: verify needs config.json beside it", path);
    return cli_fail("verify", status);
}

static int run(int argc, char **argv)
{
    cli_http http = {0};
    int first;
    int code = cli_options_parse(
        &cli_verify, rows, sizeof(rows) / sizeof(rows[0]), argc, argv, &first);

    if (code >= 0)
        return code;
    if (argc - first != 2)
        return argc - first < 2 ? cli_usage("verify", "%s is missing",
                                            argc == first ? "SOURCE" : "URL")
                                : cli_usage("verify", "unexpected argument %s",
                                            argv[first + 2]);
    code = cli_ca_check("verify", options.ca);
    if (code >= 0)
        return code;
    code = check_config(argv[first]);
    if (code >= 0)
        return code;
    http.base_url = argv[first + 1];
    http.token = options.token;
    http.ca_file = options.ca;
    http.timeout_ms = options.timeout * 1000;
    return verify(argv[first], &http);
}
