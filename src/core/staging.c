/* SPDX-License-Identifier: Apache-2.0 */
/* The staged copy: one mapping, each slot on a cache line of its own. */
#include "core/staging.h"

#include "base/alloc.h"
#include "core/copy.h"
#include "core/load_plan.h"

#include <string.h>

#define SLOT_ALIGN ((size_t)64)

static ferry_status lay_out(const ferry_model *model, size_t *offsets,
                            size_t *out_total)
{
    size_t total = 0;

    for (size_t i = 0; i < model->n_params; i++) {
        size_t bytes = ferry__slot_bytes(&model->params[i]);

        offsets[i] = total;
        if (model->params[i].flags & FERRY_PARAM_RUNTIME)
            continue;
        if (!ferry__add(bytes, SLOT_ALIGN - 1, &bytes) ||
            !ferry__add(total, bytes & ~(SLOT_ALIGN - 1), &total))
            return ferry_fail(FERRY_EOVERFLOW,
                              "the staged copy of %s does not fit a size",
                              model->name);
    }
    *out_total = total > 0 ? total : 1;
    return FERRY_OK;
}

ferry_status ferry__staging_open(ferry__staging *s, const ferry_model *model)
{
    size_t *offsets;
    size_t total;
    ferry_status st;

    if (s->memory != NULL)
        return FERRY_OK;
    offsets = ferry__alloc_array(model->n_params, sizeof(*offsets));
    if (offsets == NULL)
        return FERRY_ENOMEM;
    st = lay_out(model, offsets, &total);
    if (st == FERRY_OK) {
        s->memory = ferry__map_anonymous(total);
        if (s->memory == NULL)
            st = FERRY_ENOMEM;
    }
    if (st < 0) {
        ferry__free(offsets);
        return st;
    }
    s->model = model;
    s->offsets = offsets;
    s->size_bytes = total;
    return FERRY_OK;
}

void *ferry__staging_slot(const ferry__staging *s, size_t slot)
{
    return s->memory + s->offsets[slot];
}

/* Past the cache where that pays: what is copied is read much later. */
static void copy_slot(const ferry_param *p, void *dst, const void *src)
{
    ferry__copy_op op = {.ndim = 1,
                         .shape = {(int64_t)ferry__slot_bytes(p)},
                         .src_stride = {1},
                         .dst_stride = {1},
                         .src_dtype = FERRY_DTYPE_U8,
                         .dst_dtype = FERRY_DTYPE_U8};

    ferry__copy_run(&op, dst, src, NULL);
}

void ferry__staging_fill(const ferry__staging *s, size_t slot)
{
    const ferry_param *p = &s->model->params[slot];

    copy_slot(p, ferry__staging_slot(s, slot), p->data);
}

void ferry__staging_commit(const ferry__staging *s, size_t slot)
{
    const ferry_param *p = &s->model->params[slot];

    copy_slot(p, p->data, ferry__staging_slot(s, slot));
}

void ferry__staging_close(ferry__staging *s)
{
    if (s->memory != NULL)
        ferry__unmap(s->memory, s->size_bytes);
    ferry__free(s->offsets);
    memset(s, 0, sizeof(*s));
}
