/* SPDX-License-Identifier: Apache-2.0 */
/* A trainer's own tensors as a source. Invariant: only names and views are
 * copied; the bytes stay the caller's and are read where they lie. */
#include "base/log.h"
#include "base/alloc.h"
#include "core/manifest.h"

#include <inttypes.h>
#include <string.h>

typedef struct module_source {
    ferry__manifest params;
    ferry_tensor *tensors;
    size_t position;
    bool open;
} module_source;

static ferry_status module_metadata(void *self,
                                    const ferry_param_meta **out_params,
                                    size_t *out_count)
{
    module_source *m = self;

    *out_params = m->params.params;
    *out_count = m->params.count;
    return FERRY_OK;
}

static ferry_status module_begin(void *self)
{
    module_source *m = self;

    if (m->open)
        return ferry_fail(FERRY_EORDER, "module source: begin during a pass, "
                                        "end must come first");
    m->open = true;
    m->position = 0;
    return FERRY_OK;
}

static ferry_status module_next(void *self, ferry_item *out_item)
{
    module_source *m = self;

    if (!m->open)
        return ferry_fail(FERRY_EORDER, "module source: next outside a pass, "
                                        "begin must come first");
    if (m->position == m->params.count)
        return FERRY_DONE;
    *out_item = (ferry_item){
        .name = m->params.params[m->position].name,
        .tensor = m->tensors[m->position],
    };
    m->position++;
    return FERRY_OK;
}

static void module_end(void *self)
{
    ((module_source *)self)->open = false;
}

static void module_close(void *self)
{
    module_source *m = self;

    ferry__manifest_clear(&m->params);
    ferry__free(m->tensors);
    ferry__free(m);
}

static const ferry_source_ops MODULE_OPS = {
    .size = sizeof(ferry_source_ops),
    .kind = "module",
    .flags = FERRY_SOURCE_STABLE,
    .metadata = module_metadata,
    .begin = module_begin,
    .next = module_next,
    .end = module_end,
    .close = module_close,
};

static ferry_status check_tensor(const char *name, const ferry_tensor *t)
{
    if (!t->data)
        return ferry_fail(FERRY_EINVAL, "parameter %s: data is NULL", name);
    if (t->ndim < 0 || t->ndim > FERRY_MAX_DIMS)
        return ferry_fail(FERRY_EINVAL,
                          "parameter %s: %" PRId32 " dimensions, want 0 to %d",
                          name, t->ndim, FERRY_MAX_DIMS);
    if (t->device < 0)
        return ferry_fail(FERRY_EINVAL,
                          "parameter %s: device %" PRId32
                          " is neither the host (0) nor 1 + a CUDA device",
                          name, t->device);
    return FERRY_OK;
}

static ferry_status add_entry(module_source *m, const char *name,
                              const ferry_tensor *t, size_t index)
{
    ferry_param_meta meta = {.name = name, .dtype = t->dtype, .ndim = t->ndim};

    if (!name || !*name)
        return ferry_fail(FERRY_EINVAL,
                          "parameter at position %zu: its name "
                          "is %s",
                          index, name ? "empty" : "NULL");
    FERRY_TRY(check_tensor(name, t));
    memcpy(meta.shape, t->shape, (size_t)t->ndim * sizeof(meta.shape[0]));
    FERRY_TRY(ferry__manifest_add(&m->params, &meta));
    m->tensors[index] = *t;
    m->tensors[index].name = m->params.params[index].name;
    return FERRY_OK;
}

static ferry_status add_entries(module_source *m, const char *const *names,
                                const ferry_tensor *tensors, size_t count)
{
    m->tensors = ferry__alloc_array(count, sizeof(*m->tensors));
    if (!m->tensors)
        return FERRY_ENOMEM;
    for (size_t i = 0; i < count; i++)
        FERRY_TRY(add_entry(m, names[i], &tensors[i], i));
    return FERRY_OK;
}

ferry_status ferry_source_module(const char *const *names,
                                 const ferry_tensor *tensors, size_t count,
                                 ferry_source *out_source)
{
    FERRY__NEED(out_source);
    module_source *m;
    ferry_status st;

    if (count > 0 && (!names || !tensors))
        return ferry_fail(FERRY_EINVAL,
                          "module source: got NULL for %zu "
                          "parameters",
                          count);
    m = ferry__alloc(sizeof(*m));
    if (!m)
        return FERRY_ENOMEM;
    st = add_entries(m, names, tensors, count);
    if (st < 0)
        module_close(m);
    else
        *out_source = (ferry_source){&MODULE_OPS, m};
    return st;
}
