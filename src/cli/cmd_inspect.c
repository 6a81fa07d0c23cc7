/* SPDX-License-Identifier: Apache-2.0 */
/* `ferry inspect`: what a checkpoint holds, without reading its weights. */
#include "cli/cli.h"
#include "cli/cli_inspect.h"

#include "base/str.h"

#include <stdio.h>

static cli_inspect_options options = {
    .tp = 1, .rank = 0, .kernel_format = "bf16"};
static ferry_dtype dtype = FERRY_DTYPE_NONE;

static const cli_option rows[] = {
    {"groups", CLI_FLAG, &options.groups, NULL,
     "the gather groups that backends use", 0, 0},
    {"plan", CLI_FLAG, &options.plan, NULL,
     "where each parameter lands in one rank of a worker", 0, 0},
    {"tp", CLI_INT, &options.tp, "N", "with --plan: ranks [1]", 1, 4096},
    {"rank", CLI_INT, &options.rank, "R", "with --plan: which rank [0]", 0,
     4095},
    {"kernel-format", CLI_TEXT, &options.kernel_format, "FORMAT",
     "with --plan: f32, bf16 or q8_0 [bf16]", 0, 0},
    {"dtype", CLI_DTYPE, &dtype, "DTYPE", "as cast to f32, bf16 or f16", 0, 0},
    {"json", CLI_FLAG, &options.json, NULL, "one JSON object", 0, 0},
};

static int run(int argc, char **argv);

const cli_command cli_inspect = {
    "inspect", "PATH [OPTIONS]",
    "a checkpoint's parameters, gather groups, or load plan",
    "PATH is a safetensors file, a folder of them, or a GGUF file.\n"
    "\n"
    "Examples:\n"
    "  ferry inspect ./model\n"
    "  ferry inspect ./model --groups\n"
    "  ferry inspect ./model --plan --tp 2 --rank 1 --kernel-format q8_0\n",
    run};

static json_t *params_json(const ferry_param_meta *params, size_t count)
{
    json_t *list = json_array();

    for (size_t i = 0; i < count; i++)
        json_array_append_new(
            list, json_pack("{s:s, s:s, s:o, s:I}", "name", params[i].name,
                            "dtype", ferry_dtype_name(params[i].dtype), "shape",
                            cli_shape_json(params[i].ndim, params[i].shape),
                            "bytes", (json_int_t)cli_meta_bytes(&params[i])));
    return list;
}

static void print_params(const ferry_param_meta *params, size_t count)
{
    char shape[160], bytes[24];
    int width = 0;

    for (size_t i = 0; i < count; i++) {
        int length = (int)cli_text_print(NULL, params[i].name);

        width = length > width ? length : width;
    }
    for (size_t i = 0; i < count; i++) {
        int length = (int)cli_text_print(stdout, params[i].name);

        printf(
            "%*s  %-10s %-18s %10s\n", width - length, "",
            ferry_dtype_name(params[i].dtype),
            ferry__shape_text(shape, sizeof(shape), params[i].ndim,
                              params[i].shape),
            cli_bytes_text(bytes, sizeof(bytes), cli_meta_bytes(&params[i])));
    }
}

static int inspect_params(const char *path, const cli_source *source)
{
    const ferry_param_meta *params;
    size_t count;
    char bytes[24];
    ferry_status status =
        source->source.ops->metadata(source->source.self, &params, &count);

    if (status != FERRY_OK)
        return cli_fail("inspect", status);
    if (options.json) {
        cli_json_print(json_pack(
            "{s:s, s:s, s:I, s:I, s:o}", "path", path, "kind",
            source->source.ops->kind, "n_params", (json_int_t)count, "bytes",
            (json_int_t)source->bytes, "params", params_json(params, count)));
        return CLI_EXIT_OK;
    }
    print_params(params, count);
    printf("%zu parameters, %s\n", count,
           cli_bytes_text(bytes, sizeof(bytes), source->bytes));
    return CLI_EXIT_OK;
}

static int run(int argc, char **argv)
{
    cli_source source;
    ferry_status status;
    int first;
    int code = cli_options_parse(
        &cli_inspect, rows, sizeof(rows) / sizeof(rows[0]), argc, argv, &first);

    if (code >= 0)
        return code;
    if (argc == first)
        return cli_usage("inspect", "PATH is missing");
    if (argc > first + 1)
        return cli_usage("inspect", "unexpected argument %s", argv[first + 1]);
    if (options.groups && options.plan)
        return cli_usage("inspect", "give one of --groups and --plan");
    if (options.rank >= options.tp)
        return cli_usage("inspect",
                         "--rank takes 0 to %lld with --tp %lld, "
                         "got %lld",
                         (long long)options.tp - 1, (long long)options.tp,
                         (long long)options.rank);
    status = cli_source_open(argv[first], dtype, &source);
    if (status != FERRY_OK)
        return cli_fail("inspect", status);
    if (options.groups)
        code = cli_inspect_groups(&options, &source);
    else if (options.plan)
        code = cli_inspect_plan(&options, argv[first], &source);
    else
        code = inspect_params(argv[first], &source);
    cli_source_close(&source);
    return code;
}
