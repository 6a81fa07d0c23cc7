/* SPDX-License-Identifier: Apache-2.0 */
/* `ferry generate`: one completion from a running server. */
#include "cli/cli.h"
#include "cli/cli_http.h"

#include "base/str.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct {
    const char *url, *prompt, *token_ids, *token, *model, *system, *ca;
    int chat, json;
    int64_t max_tokens, top_k, seed, logprobs, timeout;
    double temperature, top_p;
} options = {.max_tokens = 64,
             .top_k = INT64_MIN,
             .seed = INT64_MIN,
             .logprobs = INT64_MIN,
             .timeout = 300,
             .temperature = NAN,
             .top_p = NAN};

static const cli_option rows[] = {
    {"url", CLI_TEXT, &options.url, "URL", "the server", 0, 0},
    {"prompt", CLI_TEXT, &options.prompt, "TEXT", "what to go on from", 0, 0},
    {"token-ids", CLI_TEXT, &options.token_ids, "1,2,3",
     "the prompt as token ids", 0, 0},
    {"chat", CLI_FLAG, &options.chat, NULL,
     "lay the prompt out as a user's turn (ChatML)", 0, 0},
    {"system", CLI_TEXT, &options.system, "TEXT",
     "with --chat: the system's turn before it", 0, 0},
    {"max-tokens", CLI_INT, &options.max_tokens, "N", "at most [64]", 1,
     INT32_MAX},
    {"temperature", CLI_NUMBER, &options.temperature, "X",
     "0 is greedy [the server's default]", 0, 0},
    {"top-p", CLI_NUMBER, &options.top_p, "X", "nucleus sampling", 0, 0},
    {"top-k", CLI_INT, &options.top_k, "N", "only the N likeliest", -1,
     INT32_MAX},
    {"seed", CLI_INT, &options.seed, "N", "of the sampling", 0, INT64_MAX},
    {"logprobs", CLI_INT, &options.logprobs, "N",
     "show each token's logprob and the N likeliest", 0, 32},
    {"model", CLI_TEXT, &options.model, "NAME", "where a server serves several",
     0, 0},
    {"token", CLI_TEXT, &options.token, "T",
     "bearer token [the variable FERRY_TOKEN]", 0, 0},
    {"ca", CLI_TEXT, &options.ca, "FILE",
     "PEM of the CA of an https server [the system's]", 0, 0},
    {"timeout", CLI_INT, &options.timeout, "S", "seconds [300]", 1, 86400},
    {"json", CLI_FLAG, &options.json, NULL, "the server's reply as it is", 0,
     0},
};

static int run(int argc, char **argv);

const cli_command cli_generate = {
    "generate", "--url URL (--prompt TEXT | --token-ids 1,2,3) [OPTIONS]",
    "ask a running server for a completion",
    "Examples:\n"
    "  ferry generate --url http://127.0.0.1:8000 --prompt 'Once upon' "
    "--temperature 0\n"
    "  ferry generate --url http://127.0.0.1:8000 --chat --prompt 'Who are "
    "you?'\n"
    "  ferry generate --url http://127.0.0.1:8000 --token-ids 1,2,3 --json\n",
    run};

/* "1,2,3" as a list; NULL after a line. */
static json_t *parse_ids(const char *text)
{
    json_t *ids = json_array();
    const char *at = text;
    char *end;
    long value;

    for (;;) {
        errno = 0;
        value = strtol(at, &end, 10);
        if (end == at || errno || value < 0 || value > INT32_MAX ||
            (*end != ',' && *end != '\0')) {
            cli_usage("generate", "--token-ids takes ids like 1,2,3, got '%s'",
                      text);
            json_decref(ids);
            return NULL;
        }
        json_array_append_new(ids, json_integer(value));
        if (*end == '\0')
            return ids;
        at = end + 1;
    }
}

static void append_turn(ferry__str *out, const char *role, const char *text)
{
    ferry__str_printf(out, "<|im_start|>%s\n", role);
    ferry__str_append(out, text);
    ferry__str_append(out, "<|im_end|>\n");
}

/* The prompt as the request takes it; NULL after a line. */
static json_t *make_prompt(void)
{
    ferry__str text = {0};
    json_t *prompt;

    if (options.token_ids)
        return parse_ids(options.token_ids);
    if (options.chat) {
        if (options.system)
            append_turn(&text, "system", options.system);
        append_turn(&text, "user", options.prompt);
        ferry__str_append(&text, "<|im_start|>assistant\n");
    } else {
        ferry__str_append(&text, options.prompt);
    }
    prompt = json_string(text.data ? text.data : "");
    if (!prompt)
        cli_usage("generate", "the prompt is no UTF-8 text");
    ferry__str_free(&text);
    return prompt;
}

static void set_int(json_t *body, const char *key, int64_t value)
{
    if (value != INT64_MIN)
        json_object_set_new(body, key, json_integer(value));
}

static json_t *make_body(void)
{
    json_t *prompt = make_prompt();
    json_t *body;

    if (!prompt)
        return NULL;
    body = json_pack("{s:o, s:I, s:b, s:b}", "prompt", prompt, "max_tokens",
                     (json_int_t)options.max_tokens, "return_token_ids", 1,
                     "return_weight_versions", 1);
    if (options.model)
        json_object_set_new(body, "model", json_string(options.model));
    if (isfinite(options.temperature))
        json_object_set_new(body, "temperature",
                            json_real(options.temperature));
    if (isfinite(options.top_p))
        json_object_set_new(body, "top_p", json_real(options.top_p));
    set_int(body, "top_k", options.top_k);
    set_int(body, "seed", options.seed);
    set_int(body, "logprobs", options.logprobs);
    return body;
}

static void print_ids(const json_t *ids)
{
    const json_t *id;
    size_t i;

    json_array_foreach(ids, i, id)
        printf("%s%lld", i ? "," : "", (long long)json_integer_value(id));
    putchar('\n');
}

/* One line a token: its text, its logprob, and the likeliest beside it. */
static void print_logprobs(const json_t *logprobs)
{
    const json_t *tokens = json_object_get(logprobs, "tokens");
    const json_t *values = json_object_get(logprobs, "token_logprobs");
    const json_t *tops = json_object_get(logprobs, "top_logprobs");

    for (size_t i = 0; i < json_array_size(tokens); i++) {
        char *token = json_dumps(json_array_get(tokens, i), JSON_ENCODE_ANY);
        json_t *top = json_array_get(tops, i);
        const char *name;
        json_t *value;

        printf("%-16s %9.4f ", token ? token : "",
               json_number_value(json_array_get(values, i)));
        json_object_foreach(top, name, value)
            printf(" %s=%.4f", name, json_number_value(value));
        putchar('\n');
        free(token);
    }
}

/* How it went, on standard error: it is not what was asked for. */
static void print_note(const json_t *choice)
{
    const json_t *spans = json_object_get(choice, "weight_versions");
    const char *reason =
        json_string_value(json_object_get(choice, "finish_reason"));
    const json_t *span;
    size_t i;

    fprintf(stderr, "%zu tokens, finish %s",
            json_array_size(json_object_get(choice, "token_ids")),
            reason ? reason : "unknown");
    json_array_foreach(spans, i, span)
    {
        const char *version =
            json_string_value(json_object_get(span, "version"));

        fprintf(stderr, "%s", i ? ", then " : ", weights ");
        cli_text_print(stderr, version ? version : "?");
    }
    fputc('\n', stderr);
}

static int print_reply(json_t *reply)
{
    const json_t *choice = json_array_get(json_object_get(reply, "choices"), 0);
    const json_t *text = json_object_get(choice, "text");
    const json_t *logprobs = json_object_get(choice, "logprobs");

    if (!choice) {
        ferry_fail(FERRY_EPEER, "the reply has no choices");
        return cli_fail("generate", FERRY_EPEER);
    }
    if (json_is_string(text) && !options.token_ids)
        printf("%s\n", json_string_value(text));
    else
        print_ids(json_object_get(choice, "token_ids"));
    if (options.logprobs >= 0)
        print_logprobs(logprobs);
    cli_flush();
    print_note(choice);
    return CLI_EXIT_OK;
}

static int run(int argc, char **argv)
{
    cli_http http = {0};
    json_t *body, *reply = NULL;
    ferry_status status;
    int first;
    int code =
        cli_options_parse(&cli_generate, rows, sizeof(rows) / sizeof(rows[0]),
                          argc, argv, &first);

    if (code >= 0)
        return code;
    if (first < argc)
        return cli_usage("generate", "unexpected argument %s", argv[first]);
    if (!options.url)
        return cli_usage("generate", "--url is missing");
    if (!options.prompt == !options.token_ids)
        return cli_usage("generate", "give one of --prompt and --token-ids");
    if (options.chat && options.token_ids)
        return cli_usage("generate", "--chat goes with --prompt only");
    if (options.system && !options.chat)
        return cli_usage("generate", "--system goes with --chat only");
    code = cli_ca_check("generate", options.ca);
    if (code >= 0)
        return code;
    body = make_body();
    if (!body)
        return CLI_EXIT_USAGE;
    http.base_url = options.url;
    http.token = options.token;
    http.ca_file = options.ca;
    http.timeout_ms = options.timeout * 1000;
    status = cli_http_json(&http, "/v1/completions", body, &reply);
    json_decref(body);
    if (status == FERRY_EINVAL)
        return cli_usage("generate", "%s", ferry_last_error());
    if (status != FERRY_OK)
        return cli_fail("generate", status);
    if (options.json) {
        cli_json_print(reply);
        return CLI_EXIT_OK;
    }
    code = print_reply(reply);
    json_decref(reply);
    return code;
}
