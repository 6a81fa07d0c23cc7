/* SPDX-License-Identifier: Apache-2.0 */
/* The flags of `ferry serve`; see serve_options.h. */
#include "serve/serve_options.h"

#include "base/alloc.h"
#include "base/config.h"
#include "base/json.h"
#include "serve/spawner.h"

#include <errno.h>
#include <getopt.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

/* X(id, flag, argument, help): argument "" for a switch. */
#define FLAGS(X)                                                               \
    X(HOST, "host", "ADDR", "address to listen on [127.0.0.1]")                \
    X(PORT, "port", "N", "port; 0 picks one [8000]")                           \
    X(PORT_FILE, "port-file", "FILE", "write the bound port here")             \
    X(API_KEY, "api-key", "TOKEN",                                             \
      "bearer token for every route but /health and the page /ferry/ "         \
      "[setting token]")                                                       \
    X(WEIGHT_KEY, "weight-api-key", "TOKEN",                                   \
      "bearer token of the weight routes, in place of that one")               \
    X(CERT, "tls-cert", "FILE", "serve https; PEM certificate chain")          \
    X(KEY, "tls-key", "FILE", "PEM private key of it")                         \
    X(TIMEOUT, "request-timeout", "S",                                         \
      "seconds in which a request must have arrived [60]")                     \
    X(ADDRESS, "max-connections-per-address", "N",                             \
      "connections of one client address [256]")                               \
    X(JOIN, "join", "URL",                                                     \
      "take the weights from this running server before being ready")          \
    X(JOIN_KEY, "join-api-key", "TOKEN",                                       \
      "that server's weight token [setting token]")                            \
    X(JOIN_CA, "join-ca", "FILE", "PEM of the CA that signed its certificate") \
    X(NAME, "served-model-name", "NAME", "name in /v1/models [MODEL]")         \
    X(TP, "tensor-parallel-size", "N", "ranks of a replica [1]")               \
    X(DP, "data-parallel-size", "N", "replicas [1]")                           \
    X(WEIGHTS, "weight-transfer-config", "JSON",                               \
      "{\"backend\":\"ipc\"}; without it there are no weight routes")          \
    X(LOAD, "load-format", "F", "auto, dummy, safetensors or gguf [auto]")     \
    X(KERNEL, "kernel-format", "F", "f32, bf16 or q8_0 [bf16]")                \
    X(COMMIT, "commit", "C", "inplace or staged [inplace]")                    \
    X(UNSYNCED, "serve-unsynced", "",                                          \
      "serve dummy weights before the first update")                           \
    X(FULL, "require-full", "", "refuse updates that leave weights out")       \
    X(DEFER, "defer", "N",                                                     \
      "quantise on N background threads of a rank [0: while loading]")         \
    X(SEQS, "max-num-seqs", "N", "requests run together [8]")                  \
    X(LEN, "max-model-len", "N", "longest context [2048 or the model's]")      \
    X(THREADS, "threads", "N", "compute threads of a rank [cores / ranks]")    \
    X(SEED, "seed", "N", "of dummy weights and unseeded requests [0]")         \
    X(DEADLINE, "update-deadline", "S", "seconds for one update [300]")        \
    X(PROGRESS, "update-no-progress", "S",                                     \
      "seconds without a byte before an update fails [60]")                    \
    X(BODY, "max-body-mib", "N", "largest request body [256]")                 \
    X(HELP, "help", "", "show this text")

enum flag_id {
#define FLAG_ID(id, flag, argument, help) FLAG_##id,
    FLAGS(FLAG_ID)
#undef FLAG_ID
        FLAG_COUNT
};

const char *ferry__serve_usage(void)
{
    return "Usage: ferry serve MODEL [OPTIONS]\n\n"
           "MODEL is a folder with config.json and safetensors, or a GGUF "
           "file.\n\n"
#define FLAG_LINE(id, flag, argument, help)                                    \
    "  --" flag " " argument "\n        " help "\n"
        FLAGS(FLAG_LINE)
#undef FLAG_LINE
            "  --log-level LEVEL\n        error, warn, info or debug [warn]\n"
            "\nExamples:\n"
            "  ferry serve ./model --tensor-parallel-size 2 \\\n"
            "      --weight-transfer-config '{\"backend\":\"ipc\"}'\n";
}

static ferry_status read_int(const char *flag, const char *text, int64_t low,
                             int64_t high, int64_t *out)
{
    char *end;
    long long value;

    errno = 0;
    value = strtoll(text, &end, 10);
    if (errno != 0 || end == text || *end != '\0' || value < low ||
        value > high)
        return ferry_fail(FERRY_EINVAL,
                          "--%s takes a number from %lld to %lld, got %s", flag,
                          (long long)low, (long long)high, text);
    *out = value;
    return FERRY_OK;
}

static ferry_status read_i32(const char *flag, const char *text, int64_t low,
                             int64_t high, int32_t *out)
{
    int64_t value = 0;

    FERRY_TRY(read_int(flag, text, low, high, &value));
    *out = (int32_t)value;
    return FERRY_OK;
}

static ferry_status read_backend(const char *text, char **out)
{
    json_t *o = NULL;
    const char *name;
    ferry_status st = FERRY_OK;

    FERRY_TRY(
        ferry__json_parse("--weight-transfer-config", text, strlen(text), &o));
    name = json_string_value(json_object_get(o, "backend"));
    if (name == NULL || json_object_size(o) != 1)
        st = ferry_fail(FERRY_EINVAL,
                        "--weight-transfer-config takes {\"backend\":NAME}, "
                        "got %s",
                        text);
    if (st == FERRY_OK) {
        ferry__free(*out);
        *out = ferry__strdup(name);
        if (*out == NULL)
            st = FERRY_ENOMEM;
    }
    json_decref(o);
    return st;
}

static ferry_status read_choice(const char *flag, const char *text,
                                const char *const *names, size_t n,
                                const char *list, int *out)
{
    for (size_t i = 0; i < n; i++) {
        if (strcmp(text, names[i]) == 0) {
            *out = (int)i;
            return FERRY_OK;
        }
    }
    return ferry_fail(FERRY_EINVAL, "--%s takes %s, got %s", flag, list, text);
}

const char *ferry__kernel_name(ferry_dtype kernel)
{
    return kernel == FERRY_DTYPE_F32    ? "f32"
           : kernel == FERRY_DTYPE_BF16 ? "bf16"
                                        : "q8_0";
}

static ferry_status read_named(int id, const char *arg, ferry__serve_options *o)
{
    static const char *const loads[] = {"auto", "dummy", "safetensors", "gguf"};
    static const char *const commits[] = {"inplace", "staged"};
    static const char *const kernels[] = {"f32", "bf16", "q8_0"};
    static const ferry_dtype kernel_types[] = {
        FERRY_DTYPE_F32, FERRY_DTYPE_BF16, FERRY_DTYPE_Q8_0};
    int choice = 0;

    switch (id) {
    case FLAG_LOAD:
        FERRY_TRY(read_choice("load-format", arg, loads, 4,
                              "auto, dummy, safetensors or gguf", &choice));
        o->load_format = (ferry__load_format)choice;
        return FERRY_OK;
    case FLAG_COMMIT:
        FERRY_TRY(read_choice("commit", arg, commits, 2, "inplace or staged",
                              &choice));
        o->commit = (ferry_commit)choice;
        return FERRY_OK;
    default:
        FERRY_TRY(read_choice("kernel-format", arg, kernels, 3,
                              "f32, bf16 or q8_0", &choice));
        o->kernel = kernel_types[choice];
        return FERRY_OK;
    }
}

/* An IPv6 address may come in the brackets that it has in a URL. */
static ferry_status read_host(const char *arg, ferry__serve_options *o)
{
    size_t n = strlen(arg);

    ferry__free(o->bare_host);
    o->bare_host = NULL;
    o->host = arg;
    if (n < 3 || arg[0] != '[' || arg[n - 1] != ']')
        return FERRY_OK;
    o->bare_host = ferry__strdup(arg + 1);
    if (o->bare_host == NULL)
        return FERRY_ENOMEM;
    o->bare_host[n - 2] = '\0';
    o->host = o->bare_host;
    return FERRY_OK;
}

static ferry_status read_flag(int id, const char *arg, ferry__serve_options *o)
{
    int64_t value = 0;

    switch (id) {
    case FLAG_HOST:
        return read_host(arg, o);
    case FLAG_PORT_FILE:
        o->port_file = arg;
        return FERRY_OK;
    case FLAG_API_KEY:
        o->api_key = arg;
        return FERRY_OK;
    case FLAG_WEIGHT_KEY:
        o->weight_key = arg;
        return FERRY_OK;
    case FLAG_CERT:
        o->tls_cert = arg;
        return FERRY_OK;
    case FLAG_KEY:
        o->tls_key = arg;
        return FERRY_OK;
    case FLAG_JOIN:
        o->join = arg;
        return FERRY_OK;
    case FLAG_JOIN_KEY:
        o->join_key = arg;
        return FERRY_OK;
    case FLAG_JOIN_CA:
        o->join_ca = arg;
        return FERRY_OK;
    case FLAG_NAME:
        o->served_name = arg;
        return FERRY_OK;
    case FLAG_UNSYNCED:
        o->serve_unsynced = true;
        return FERRY_OK;
    case FLAG_FULL:
        o->require_full = true;
        return FERRY_OK;
    case FLAG_HELP:
        o->help = true;
        return FERRY_OK;
    case FLAG_PORT:
        return read_i32("port", arg, 0, 65535, &o->port);
    case FLAG_TP:
        return read_i32("tensor-parallel-size", arg, 1, FERRY__TP_MAX,
                        &o->tp_size);
    case FLAG_DP:
        return read_i32("data-parallel-size", arg, 1, 64, &o->dp_size);
    case FLAG_DEFER:
        return read_i32("defer", arg, 0, 64, &o->defer_threads);
    case FLAG_SEQS:
        return read_i32("max-num-seqs", arg, 1, 256, &o->max_seqs);
    case FLAG_LEN:
        return read_i32("max-model-len", arg, 8, 1 << 20, &o->max_len);
    case FLAG_THREADS:
        return read_i32("threads", arg, 1, 512, &o->threads);
    case FLAG_WEIGHTS:
        return read_backend(arg, &o->backend);
    case FLAG_SEED:
        FERRY_TRY(read_int("seed", arg, 0, INT64_MAX, &value));
        o->seed = (uint64_t)value;
        return FERRY_OK;
    case FLAG_DEADLINE:
        FERRY_TRY(read_int("update-deadline", arg, 1, 86400, &value));
        o->deadline_ms = value * 1000;
        return FERRY_OK;
    case FLAG_PROGRESS:
        FERRY_TRY(read_int("update-no-progress", arg, 1, 86400, &value));
        o->no_progress_ms = value * 1000;
        return FERRY_OK;
    case FLAG_TIMEOUT:
        FERRY_TRY(read_int("request-timeout", arg, 1, 86400, &value));
        o->request_timeout_ms = value * 1000;
        return FERRY_OK;
    case FLAG_ADDRESS:
        return read_i32("max-connections-per-address", arg, 1, 512,
                        &o->per_address);
    case FLAG_BODY:
        FERRY_TRY(read_int("max-body-mib", arg, 1, 4096, &value));
        o->max_body_bytes = value << 20;
        return FERRY_OK;
    default:
        return read_named(id, arg, o);
    }
}

static ferry_status check_pairs(const ferry__serve_options *o)
{
    if ((o->tls_cert == NULL) != (o->tls_key == NULL))
        return ferry_fail(FERRY_EINVAL, "--%s needs --%s",
                          o->tls_cert != NULL ? "tls-cert" : "tls-key",
                          o->tls_cert != NULL ? "tls-key" : "tls-cert");
    if (o->join == NULL && (o->join_key != NULL || o->join_ca != NULL))
        return ferry_fail(FERRY_EINVAL, "--join-%s needs --join",
                          o->join_key != NULL ? "api-key" : "ca");
    if (o->join != NULL && o->load_format != FERRY__LOAD_AUTO)
        return ferry_fail(FERRY_EINVAL,
                          "--join and --load-format both say where the "
                          "weights come from");
    if ((o->api_key != NULL && o->api_key[0] == '\0') ||
        (o->weight_key != NULL && o->weight_key[0] == '\0'))
        return ferry_fail(FERRY_EINVAL, "--%s takes a token that is not empty",
                          o->weight_key != NULL && o->weight_key[0] == '\0'
                              ? "weight-api-key"
                              : "api-key");
    return FERRY_OK;
}

static void set_defaults(ferry__serve_options *o)
{
    memset(o, 0, sizeof *o);
    o->host = "127.0.0.1";
    o->port = 8000;
    o->kernel = FERRY_DTYPE_BF16;
    o->tp_size = o->dp_size = 1;
    o->max_seqs = 8;
    o->max_body_bytes = (int64_t)256 << 20;
    o->request_timeout_ms = 60000;
    o->per_address = 256;
}

ferry_status ferry__serve_options_read(int argc, char **argv,
                                       ferry__serve_options *out)
{
    static const struct option flags[] = {
#define FLAG_OPTION(id, flag, argument, help)                                  \
    {flag, sizeof(argument) > 1 ? required_argument : no_argument, NULL,       \
     FLAG_##id},
        FLAGS(FLAG_OPTION)
#undef FLAG_OPTION
            {NULL, 0, NULL, 0}};
    ferry_status st = FERRY_OK;
    int id;

    set_defaults(out);
    optind = 1;
    opterr = 0;
    while (st == FERRY_OK &&
           (id = getopt_long(argc, argv, ":", flags, NULL)) != -1) {
        if (id == '?')
            st = ferry_fail(FERRY_EINVAL,
                            "unknown option %s (see ferry serve "
                            "--help)",
                            argv[optind - 1]);
        else if (id == ':')
            st = ferry_fail(FERRY_EINVAL, "%s takes a value", argv[optind - 1]);
        else
            st = read_flag(id, optarg, out);
    }
    if (st == FERRY_OK && !out->help && optind != argc - 1)
        st = ferry_fail(FERRY_EINVAL, optind < argc - 1
                                          ? "more than one MODEL given"
                                          : "MODEL is missing");
    if (st == FERRY_OK && !out->help)
        st = check_pairs(out);
    if (st == FERRY_OK && !out->help) {
        out->model = argv[optind];
        if (out->served_name == NULL)
            out->served_name = out->model;
        if (out->api_key == NULL &&
            ferry__config_get(FERRY__CONFIG_TOKEN)[0] != '\0')
            out->api_key = ferry__config_get(FERRY__CONFIG_TOKEN);
    }
    if (st < 0)
        ferry__serve_options_free(out);
    return st;
}

void ferry__serve_options_free(ferry__serve_options *options)
{
    ferry__free(options->backend);
    ferry__free(options->bare_host);
    options->backend = options->bare_host = NULL;
}
