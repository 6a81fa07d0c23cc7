/* SPDX-License-Identifier: Apache-2.0 */
/* Opens checkpoints for the commands. */
#include "cli/cli_source.h"

#include "base/alloc.h"
#include "core/manifest.h"

#include <string.h>

#define ALIGN ((size_t)64)

uint64_t cli_meta_bytes(const ferry_param_meta *meta)
{
    return ferry__meta_bytes(meta);
}

static ferry_status count_up(cli_source *source)
{
    const ferry_param_meta *params;

    FERRY_TRY(source->source.ops->metadata(source->source.self, &params,
                                           &source->count));
    source->bytes = 0;
    for (size_t i = 0; i < source->count; i++)
        source->bytes += ferry__meta_bytes(&params[i]);
    return FERRY_OK;
}

ferry_status cli_source_open(const char *path, ferry_dtype to, cli_source *out)
{
    cli_source opened = {.source = {0}};
    ferry_source cast = {0};
    ferry_status status;

    FERRY_TRY(ferry_source_open(path, &opened.source));
    status = FERRY_OK;
    if (to != FERRY_DTYPE_NONE) {
        status = ferry_source_cast(&opened.source, to, NULL, &cast);
        if (status == FERRY_OK)
            opened.source = cast;
    }
    if (status == FERRY_OK)
        status = count_up(&opened);
    if (status != FERRY_OK) {
        ferry_source_close(&opened.source);
        return status;
    }
    *out = opened;
    return FERRY_OK;
}

/* Copies one pass to `memory`; names are left to the caller. */
static ferry_status read_pass(ferry_source *source,
                              const ferry_param_meta *params, size_t count,
                              char *memory, ferry_tensor *tensors)
{
    ferry_item item;
    size_t at = 0;

    for (size_t i = 0; i < count; i++) {
        ferry_status status = source->ops->next(source->self, &item);

        if (status == FERRY_DONE)
            return ferry_fail(FERRY_EMISMATCH,
                              "the source ended at %zu of %zu parameters", i,
                              count);
        FERRY_TRY(status);
        FERRY_TRY(ferry__meta_check(&params[i], i, item.name, &item.tensor));
        if (item.wait)
            FERRY_TRY(item.wait(item.wait_arg, 60000));
        FERRY_TRY(ferry_tensor_init(&tensors[i], memory + at, params[i].dtype,
                                    params[i].ndim, params[i].shape));
        FERRY_TRY(ferry_tensor_copy(&tensors[i], &item.tensor));
        at += (ferry_tensor_bytes(&tensors[i]) + ALIGN - 1) / ALIGN * ALIGN;
    }
    return FERRY_OK;
}

static ferry_status copy_to(cli_source *source, const ferry_param_meta *params,
                            void *memory, ferry_source *out)
{
    ferry_source *from = &source->source;
    size_t n = source->count ? source->count : 1;
    ferry_tensor *tensors = ferry__alloc_array(n, sizeof(*tensors));
    const char **names = ferry__alloc_array(n, sizeof(*names));
    ferry_status status = tensors && names ? FERRY_OK : FERRY_ENOMEM;

    for (size_t i = 0; status == FERRY_OK && i < source->count; i++)
        names[i] = params[i].name;
    if (status == FERRY_OK)
        status = from->ops->begin(from->self);
    if (status == FERRY_OK) {
        status = read_pass(from, params, source->count, memory, tensors);
        from->ops->end(from->self);
    }
    if (status == FERRY_OK)
        status = ferry_source_module(names, tensors, source->count, out);
    ferry__free(names);
    ferry__free(tensors);
    return status;
}

ferry_status cli_source_share(cli_source *source)
{
    const ferry_param_meta *params;
    ferry_source shared = {0};
    size_t count;
    void *memory;
    ferry_status status;

    FERRY_TRY(
        source->source.ops->metadata(source->source.self, &params, &count));
    /* Each tensor starts on a line of its own. */
    FERRY_TRY(ferry_shared_alloc((size_t)source->bytes + (count + 1) * ALIGN,
                                 &memory));
    status = copy_to(source, params, memory, &shared);
    if (status != FERRY_OK) {
        ferry_shared_free(memory);
        return status;
    }
    ferry_source_close(&source->source);
    source->source = shared;
    source->memory = memory;
    return FERRY_OK;
}

void cli_source_close(cli_source *source)
{
    ferry_source_close(&source->source);
    ferry_shared_free(source->memory);
    source->memory = NULL;
}
