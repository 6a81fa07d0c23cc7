/* SPDX-License-Identifier: Apache-2.0 */
/* Rounds in kernel format: a parameter has the name of a stored one, and
 * comes whole, as it is stored.
 * Invariant: all of an update was held against the model before its first
 * byte is written. */
#include "core/loading_state.h"

#include "base/str.h"

ferry_status ferry__loading_set_format(ferry__loading *l, bool kernel)
{
    if (kernel != l->kernel_format && (l->first != NULL || l->kernel_any))
        return ferry_fail(FERRY_EINVAL,
                          "is_checkpoint_format differs between the updates "
                          "of one round");
    l->kernel_format = kernel;
    return FERRY_OK;
}

bool ferry__loading_in_kernel_format(const ferry__loading *l)
{
    return l->kernel_format;
}

ferry_status ferry__loading_check_slot(const ferry__loading *l, size_t param)
{
    if (param >= l->model->n_params)
        return ferry_fail(FERRY_EINVAL,
                          "stored parameter %zu of %zu does not exist", param,
                          l->model->n_params);
    if (l->model->params[param].flags & FERRY_PARAM_RUNTIME)
        return ferry_fail(FERRY_EINVAL,
                          "parameter %s is a runtime parameter, which no "
                          "transfer touches",
                          l->model->params[param].name);
    return FERRY_OK;
}

/* How a stored parameter travels: blocks as the bytes that they are. */
static void as_sent(const ferry_param *p, ferry_param_meta *out)
{
    int64_t block = ferry_dtype_block(p->dtype);

    out->name = p->name;
    out->dtype = p->dtype;
    out->ndim = p->ndim;
    for (int32_t d = 0; d < p->ndim; d++)
        out->shape[d] = p->shape[d];
    if (block == 1 || p->ndim == 0)
        return;
    out->dtype = FERRY_DTYPE_U8;
    out->shape[p->ndim - 1] =
        p->shape[p->ndim - 1] / block * (int64_t)ferry_dtype_bytes(p->dtype);
}

static ferry_status check_meta(const ferry_param *p,
                               const ferry_param_meta *got)
{
    ferry_param_meta want;
    char a[256], b[256];
    bool same;

    as_sent(p, &want);
    if (got->dtype != want.dtype)
        return ferry_fail(FERRY_EMISMATCH,
                          "parameter %s: stored as dtype %s, declared %s",
                          got->name, ferry_dtype_name(want.dtype),
                          ferry_dtype_name(got->dtype));
    same = got->ndim == want.ndim;
    for (int32_t d = 0; same && d < want.ndim; d++)
        same = got->shape[d] == want.shape[d];
    if (same)
        return FERRY_OK;
    return ferry_fail(
        FERRY_EMISMATCH, "parameter %s: stored with shape %s, declared %s",
        got->name, ferry__shape_text(a, sizeof(a), want.ndim, want.shape),
        ferry__shape_text(b, sizeof(b), got->ndim, got->shape));
}

/* The names of the stored parameters never change. */
static ferry_status find_slot(ferry__loading *l, const char *name, size_t *out)
{
    size_t old;

    for (; l->n_slot_names < l->model->n_params; l->n_slot_names++) {
        ferry_status st = ferry__table_add(
            &l->slot_names, l->model->params[l->n_slot_names].name,
            l->n_slot_names, &old);

        if (st < 0 && st != FERRY_EEXIST)
            return st;
    }
    if (ferry__table_get(&l->slot_names, name, out))
        return ferry__loading_check_slot(l, *out);
    return ferry__plan_not_stored(l->plan, name);
}

ferry_status ferry__loading_match_stored(ferry__loading *l, ferry__batch *b)
{
    for (size_t i = 0; i < b->manifest.count; i++) {
        const ferry_param_meta *meta = &b->manifest.params[i];
        size_t slot;

        FERRY_TRY(find_slot(l, meta->name, &slot));
        FERRY_TRY(check_meta(&l->model->params[slot], meta));
        b->arrivals[i].id = slot;
    }
    return FERRY_OK;
}

ferry_status ferry__loading_place(ferry__loading *l, size_t slot,
                                  const ferry_tensor *tensor)
{
    ferry_tensor dst;
    size_t size_bytes;
    void *bytes;

    FERRY_TRY(ferry__loading_kernel_storage(l, slot, &bytes, &size_bytes));
    FERRY_TRY(ferry_tensor_init(&dst, bytes, tensor->dtype, tensor->ndim,
                                tensor->shape));
    return ferry_tensor_copy(&dst, tensor);
}
