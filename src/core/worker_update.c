/* SPDX-License-Identifier: Apache-2.0 */
/* One update_weights: from the dict to bytes that are all there.
 * Invariant: everything that can be refused is refused before the engine is
 * asked to receive, so a malformed update writes nothing. */
#include "core/worker_state.h"

#include "base/json.h"
#include "base/log.h"

#include <string.h>

/* Keys of an older API that moved to the init info (O-08). */
static const char *const moved_keys[] = {"packed", "packed_buffer_size_bytes",
                                         "packed_num_buffers"};

static const char format_key[] = "is_checkpoint_format";

static const char *format_name(bool kernel)
{
    return kernel ? "kernel" : "checkpoint";
}

static const ferry_field *find_field(const ferry_info_type *type,
                                     const char *name)
{
    for (size_t i = 0; i < type->n_fields; i++)
        if (strcmp(type->fields[i].name, name) == 0)
            return &type->fields[i];
    return NULL;
}

/* ---- the dict ---- */

/* The element of a list that is this worker's. Borrowed from `value`. */
static ferry_status pick(const ferry_worker *w, json_t *value,
                         json_t **out_object)
{
    const ferry_worker_options *o = &w->options;
    size_t index = (size_t)o->dp_rank * (size_t)o->tp_size + (size_t)o->tp_rank;

    if (json_is_array(value)) {
        if (index >= json_array_size(value))
            return ferry_fail(FERRY_EINVAL,
                              "update info is a list of %zu elements; this "
                              "worker's is number %zu (dp_rank * tp_size + "
                              "tp_rank)",
                              json_array_size(value), index);
        value = json_array_get(value, index);
    }
    if (!json_is_object(value))
        return ferry_fail(FERRY_EINVAL, "update info is not an object");
    *out_object = value;
    return FERRY_OK;
}

/* The flag of the older API, for an engine whose update info has no field for
 * it: accepted and without effect where it says what the engine does anyway,
 * refused where it asks for something else. */
static ferry_status take_format_flag(ferry_worker *w, json_t *object)
{
    json_t *flag = json_object_get(object, format_key);
    bool kernel = ferry__worker_engine_is_kernel(w);

    if (flag == NULL || find_field(w->ops->update_info, format_key) != NULL)
        return FERRY_OK;
    if (!json_is_boolean(flag))
        return ferry_fail(FERRY_EINVAL,
                          "%s: field is_checkpoint_format is not a bool",
                          w->ops->update_info->name);
    if (json_is_true(flag) == kernel)
        return ferry_fail(FERRY_ENOTSUP,
                          "is_checkpoint_format is %s, but engine %s takes "
                          "%s format only",
                          kernel ? "true" : "false", w->backend,
                          format_name(kernel));
    if (!w->told_format)
        ferry__log(FERRY_LOG_INFO,
                   "is_checkpoint_format in an update is ignored: the engine "
                   "decides");
    w->told_format = true;
    json_object_del(object, format_key);
    return FERRY_OK;
}

static ferry_status refuse_moved(const ferry_worker *w, const json_t *object)
{
    for (size_t i = 0; i < sizeof(moved_keys) / sizeof(moved_keys[0]); i++)
        if (json_object_get(object, moved_keys[i]) != NULL &&
            find_field(w->ops->update_info, moved_keys[i]) == NULL)
            return ferry_fail(FERRY_EINVAL,
                              "%s: field %s is a wire parameter, which is "
                              "fixed by the init info and never part of an "
                              "update",
                              w->ops->update_info->name, moved_keys[i]);
    return FERRY_OK;
}

static ferry_status parse(ferry_worker *w, const char *text, void **out_info)
{
    json_t *value, *object;
    ferry_status st;

    if (text == NULL)
        return ferry_fail(FERRY_EINVAL, "update info is NULL");
    FERRY_TRY(ferry__json_parse("update info", text, strlen(text), &value));
    st = pick(w, value, &object);
    if (st == FERRY_OK)
        st = take_format_flag(w, object);
    if (st == FERRY_OK)
        st = refuse_moved(w, object);
    if (st == FERRY_OK)
        st = ferry__info_from_json(w->ops->update_info, object, out_info);
    json_decref(value);
    return st;
}

/* ---- the declared parameters ---- */

/* The lists that the host declares by itself; NULL when the engine's type
 * has not all three, and it then declares for itself. */
typedef struct lists {
    const ferry_strs *names, *dtype_names;
    const ferry_shapes *shapes;
} lists;

static const void *field_of(const ferry_info_type *type, const void *info,
                            const char *name, ferry_field_kind kind)
{
    const ferry_field *f = find_field(type, name);

    if (f == NULL || f->kind != kind)
        return NULL;
    return (const char *)info + f->offset;
}

static bool find_lists(const ferry_info_type *type, const void *info,
                       lists *out)
{
    out->names = field_of(type, info, "names", FERRY_FIELD_STRS);
    out->dtype_names = field_of(type, info, "dtype_names", FERRY_FIELD_STRS);
    out->shapes = field_of(type, info, "shapes", FERRY_FIELD_SHAPES);
    return out->names != NULL && out->dtype_names != NULL &&
           out->shapes != NULL;
}

/* Empty lists: what the round before declared, in its format. */
static ferry_status declare_last(const ferry__target *t)
{
    bool kernel = ferry__loading_in_kernel_format(t->loading);

    if (t->last_kernel != kernel)
        return ferry_fail(FERRY_EINVAL,
                          "empty lists mean the parameters of the round "
                          "before, which came in %s format; this update is "
                          "in %s format",
                          format_name(t->last_kernel), format_name(kernel));
    return ferry__loading_declare(t->loading, t->last.params, t->last.count);
}

static ferry_status declare_lists(ferry_worker *w, const lists *in,
                                  bool *out_nothing)
{
    ferry__target *t = w->target;
    ferry__manifest m = {0};
    ferry_status st;

    *out_nothing = false;
    if (in->names->count == 0 && in->dtype_names->count == 0 &&
        in->shapes->count == 0) {
        *out_nothing = !t->has_last;
        if (!t->has_last)
            return FERRY_OK;
        return declare_last(t);
    }
    st = ferry__manifest_from_lists(&m, in->names, in->dtype_names, in->shapes);
    if (st == FERRY_OK)
        st = ferry__loading_declare(t->loading, m.params, m.count);
    ferry__manifest_clear(&m);
    return st;
}

/* The indices of loads are those of the update that was declared last, so
 * what an engine has queued of the one before is handed over first. */
static ferry_status drain_former(ferry_worker *w)
{
    size_t count;

    ferry__loading_declared(w->target->loading, &count);
    if (count == 0 || !w->engine_started || !ferry__worker_engine_defers(w) ||
        w->ops->drain_pending == NULL)
        return FERRY_OK;
    return w->ops->drain_pending(w->self);
}

/* A field of the engine's says it for each round, else its kind does. */
static ferry_status set_format(ferry_worker *w, const void *info)
{
    const bool *checkpoint =
        field_of(w->ops->update_info, info, format_key, FERRY_FIELD_BOOL);

    return ferry__loading_set_format(
        w->target->loading,
        checkpoint != NULL ? !*checkpoint : ferry__worker_engine_is_kernel(w));
}

static ferry_status receive(ferry_worker *w, const void *info)
{
    lists in;
    bool nothing;

    FERRY_TRY(drain_former(w));
    FERRY_TRY(set_format(w, info));
    if (find_lists(w->ops->update_info, info, &in)) {
        FERRY_TRY(declare_lists(w, &in, &nothing));
        if (nothing)
            return FERRY_OK;
    }
    FERRY_TRY(ferry__worker_engine_start(w));
    FERRY_TRY(w->ops->receive_weights(w->self, info));
    if (ferry__worker_engine_defers(w))
        return FERRY_OK;
    return ferry__loading_check_whole(w->target->loading);
}

ferry_status ferry__worker_receive(ferry_worker *w, const char *update_info)
{
    void *info;
    ferry_status st;

    if (!w->inited)
        return ferry_fail(FERRY_EORDER,
                          "init_weight_transfer_engine must be called before "
                          "update_weights.");
    FERRY_TRY(ferry__round_check(&w->round, "updating", NULL));
    FERRY_TRY(parse(w, update_info, &info));
    st = receive(w, info);
    ferry_info_free(info);
    return st;
}
