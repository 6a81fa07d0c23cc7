/* SPDX-License-Identifier: Apache-2.0 */
/* `ferry inspect --groups` and `--plan`. */
#include "cli/cli_inspect.h"

#include "base/alloc.h"
#include "cli/cli.h"
#include "cli/cli_worker.h"
#include "core/groups.h"

#include <stdio.h>

/* The source's own partition, else the layerwise one. The result is owned. */
static ferry_status make_groups(const cli_source *source,
                                const ferry_param_meta *params, size_t count,
                                size_t **out_lengths, size_t *out_groups)
{
    const ferry_source_ops *ops = source->source.ops;
    const size_t *lengths;
    size_t *copy;

    if (!ops->groups)
        return ferry__layerwise_groups(params, count, out_lengths, out_groups);
    FERRY_TRY(ops->groups(source->source.self, &lengths, out_groups));
    copy = ferry__alloc_array(*out_groups, sizeof(*copy));
    if (!copy)
        return FERRY_ENOMEM;
    for (size_t i = 0; i < *out_groups; i++)
        copy[i] = lengths[i];
    *out_lengths = copy;
    return FERRY_OK;
}

static json_t *group_json(const ferry_param_meta *params, size_t length)
{
    json_t *names = json_array();
    uint64_t bytes = 0;

    for (size_t i = 0; i < length; i++) {
        bytes += cli_meta_bytes(&params[i]);
        json_array_append_new(names, json_string(params[i].name));
    }
    return json_pack("{s:o, s:I}", "names", names, "bytes", (json_int_t)bytes);
}

static void print_group(size_t index, const ferry_param_meta *params,
                        size_t length)
{
    char text[24];
    uint64_t bytes = 0;

    for (size_t i = 0; i < length; i++)
        bytes += cli_meta_bytes(&params[i]);
    printf("group %zu: %zu parameters, %s, ", index, length,
           cli_bytes_text(text, sizeof(text), bytes));
    cli_text_print(stdout, params[0].name);
    if (length > 1) {
        printf(" to ");
        cli_text_print(stdout, params[length - 1].name);
    }
    putchar('\n');
}

int cli_inspect_groups(const cli_inspect_options *options,
                       const cli_source *source)
{
    const ferry_param_meta *params;
    size_t count, n_groups, at = 0;
    size_t *lengths = NULL;
    json_t *list;
    ferry_status status =
        source->source.ops->metadata(source->source.self, &params, &count);

    if (status == FERRY_OK)
        status = make_groups(source, params, count, &lengths, &n_groups);
    if (status != FERRY_OK)
        return cli_fail("inspect", status);
    list = json_array();
    for (size_t i = 0; i < n_groups; i++) {
        if (options->json)
            json_array_append_new(list, group_json(params + at, lengths[i]));
        else
            print_group(i, params + at, lengths[i]);
        at += lengths[i];
    }
    if (options->json)
        cli_json_print(json_pack("{s:O}", "groups", list));
    json_decref(list);
    ferry__free(lengths);
    return CLI_EXIT_OK;
}

/* The plan's JSON text for one rank. */
static ferry_status make_plan(const cli_inspect_options *options,
                              const char *path, const cli_source *source,
                              const char **out_arch, char **out_plan)
{
    const ferry_param_meta *params;
    cli_worker_api api;
    ferry__model_config config;
    cli_rank rank;
    ferry_dtype kernel;
    size_t count;
    ferry_status status;

    FERRY_TRY(cli_kernel_parse(options->kernel_format, &kernel));
    FERRY_TRY(
        source->source.ops->metadata(source->source.self, &params, &count));
    FERRY_TRY(cli_worker_open(&api));
    FERRY_TRY(api.config_open(path, &config));
    FERRY_TRY(cli_rank_create(&api, &config, kernel, (int32_t)options->rank,
                              (int32_t)options->tp, &rank));
    status = ferry_worker_plan(rank.worker, params, count, out_plan);
    cli_rank_destroy(&api, &rank);
    *out_arch = api.arch_name(config.arch);
    return status;
}

static void print_list(const char *what, const json_t *list)
{
    const json_t *item;
    size_t i;

    printf("%s[", what);
    json_array_foreach(list, i, item)
        printf("%s%lld", i ? ", " : "", (long long)json_integer_value(item));
    putchar(']');
}

static const char *text_of(const json_t *object, const char *key)
{
    const char *text = json_string_value(json_object_get(object, key));

    return text ? text : "?";
}

static void print_entry(const json_t *entry)
{
    const json_t *source = json_object_get(entry, "source");
    const json_t *from = json_object_get(source, "offset");

    printf("  %s from element %lld,", text_of(entry, "kind"),
           (long long)json_integer_value(from));
    print_list(" shape ", json_object_get(source, "shape"));
    printf(" -> %s (%s)", text_of(entry, "slot"), text_of(entry, "slot_dtype"));
    print_list(" at ", json_object_get(entry, "start"));
    print_list(" shape ", json_object_get(entry, "count"));
    if (json_object_get(entry, "step"))
        printf(", input %lld of step %s",
               (long long)json_integer_value(json_object_get(entry, "input")),
               text_of(entry, "step"));
    putchar('\n');
}

static void print_plan(const json_t *plan)
{
    const json_t *param, *entry;
    size_t i, k;

    json_array_foreach(json_object_get(plan, "params"), i, param)
    {
        const json_t *entries = json_object_get(param, "entries");

        cli_text_print(stdout, text_of(param, "name"));
        printf(" %s", text_of(param, "dtype"));
        print_list(" ", json_object_get(param, "shape"));
        printf("%s\n",
               json_array_size(entries) ? "" : ": nothing on this rank");
        json_array_foreach(entries, k, entry) print_entry(entry);
    }
}

int cli_inspect_plan(const cli_inspect_options *options, const char *path,
                     const cli_source *source)
{
    const char *arch;
    char *text = NULL;
    json_t *plan;
    ferry_status status = make_plan(options, path, source, &arch, &text);

    if (status != FERRY_OK)
        return cli_fail("inspect", status);
    plan = json_loads(text, 0, NULL);
    ferry_free(text);
    if (!options->json) {
        printf("%s, rank %lld of %lld, stored as %s\n", arch,
               (long long)options->rank, (long long)options->tp,
               options->kernel_format);
        print_plan(plan);
        json_decref(plan);
        return CLI_EXIT_OK;
    }
    cli_json_print(json_pack("{s:s, s:I, s:I, s:s, s:o}", "architecture", arch,
                             "tp_rank", (json_int_t)options->rank, "tp_size",
                             (json_int_t)options->tp, "kernel_format",
                             options->kernel_format, "plan", plan));
    return CLI_EXIT_OK;
}
