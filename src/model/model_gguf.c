/* SPDX-License-Identifier: Apache-2.0 */
/* Metadata of a GGUF file, through ggml's own reader with types checked. */
#include "model/model_files.h"

#include "base/alloc.h"
#include "base/log.h"
#include "sources/check_gguf.h"
#include "sources/mapped_file.h"

#include <ggml.h>
#include <gguf.h>
#include <pthread.h>
#include <string.h>

struct ferry__gguf_meta {
    struct gguf_context *gguf;
    struct ggml_context *tensors; /* headers only, no data */
    ferry__mapped_file file;
};

static void forward_log(enum ggml_log_level level, const char *text, void *arg)
{
    size_t n = strcspn(text, "\n");

    (void)arg;
    if (n == 0)
        return;
    ferry__log(level == GGML_LOG_LEVEL_ERROR  ? FERRY_LOG_ERROR
               : level == GGML_LOG_LEVEL_WARN ? FERRY_LOG_WARN
                                              : FERRY_LOG_DEBUG,
               "ggml: %.*s", (int)n, text);
}

static void set_log(void)
{
    ggml_log_set(forward_log, NULL);
}

void ferry__ggml_log_init(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;

    pthread_once(&once, set_log);
}

/* ggml ends the process on some broken files, so they are looked over first.
 */
static ferry_status read_header(const char *path, ferry__gguf_meta *meta)
{
    struct gguf_init_params params = {.no_alloc = true, .ctx = &meta->tensors};

    FERRY_TRY(ferry__mapped_open(path, &meta->file));
    FERRY_TRY(ferry__gguf_check(path, meta->file.bytes, meta->file.size_bytes));
    meta->gguf = gguf_init_from_file(path, params);
    if (!meta->gguf)
        return ferry_fail(FERRY_EINVAL, "file %s: ggml cannot read it as gguf",
                          path);
    return FERRY_OK;
}

ferry_status ferry__gguf_meta_open(const char *path, ferry__gguf_meta **out)
{
    ferry__gguf_meta *meta = ferry__alloc(sizeof(*meta));
    ferry_status st;

    if (!meta)
        return FERRY_ENOMEM;
    ferry__ggml_log_init();
    st = read_header(path, meta);
    if (st < 0) {
        ferry__gguf_meta_close(&meta);
        return st;
    }
    *out = meta;
    return FERRY_OK;
}

void ferry__gguf_meta_close(ferry__gguf_meta **meta)
{
    if (!*meta)
        return;
    gguf_free((*meta)->gguf);
    ggml_free((*meta)->tensors);
    ferry__mapped_close(&(*meta)->file);
    ferry__free(*meta);
    *meta = NULL;
}

bool ferry__gguf_meta_has(const ferry__gguf_meta *meta, const char *key)
{
    return gguf_find_key(meta->gguf, key) >= 0;
}

static ferry_status find(const ferry__gguf_meta *meta, const char *key,
                         int64_t *out_id)
{
    *out_id = gguf_find_key(meta->gguf, key);
    if (*out_id >= 0)
        return FERRY_OK;
    return ferry_fail(FERRY_EUNKNOWN, "no key %s", key);
}

static ferry_status wrong_type(const char *key, const char *wanted,
                               enum gguf_type got)
{
    return ferry_fail(FERRY_EINVAL, "%s must be %s, got %s", key, wanted,
                      gguf_type_name(got));
}

ferry_status ferry__gguf_meta_int(const ferry__gguf_meta *meta, const char *key,
                                  int64_t *out)
{
    const struct gguf_context *g = meta->gguf;
    uint64_t big;
    int64_t id;

    FERRY_TRY(find(meta, key, &id));
    switch (gguf_get_kv_type(g, id)) {
    case GGUF_TYPE_UINT8:
        *out = gguf_get_val_u8(g, id);
        return FERRY_OK;
    case GGUF_TYPE_INT8:
        *out = gguf_get_val_i8(g, id);
        return FERRY_OK;
    case GGUF_TYPE_UINT16:
        *out = gguf_get_val_u16(g, id);
        return FERRY_OK;
    case GGUF_TYPE_INT16:
        *out = gguf_get_val_i16(g, id);
        return FERRY_OK;
    case GGUF_TYPE_UINT32:
        *out = gguf_get_val_u32(g, id);
        return FERRY_OK;
    case GGUF_TYPE_INT32:
        *out = gguf_get_val_i32(g, id);
        return FERRY_OK;
    case GGUF_TYPE_INT64:
        *out = gguf_get_val_i64(g, id);
        return FERRY_OK;
    case GGUF_TYPE_UINT64:
        big = gguf_get_val_u64(g, id);
        *out = big > INT64_MAX ? INT64_MAX : (int64_t)big;
        return FERRY_OK;
    default:
        return wrong_type(key, "an integer", gguf_get_kv_type(g, id));
    }
}

ferry_status ferry__gguf_meta_float(const ferry__gguf_meta *meta,
                                    const char *key, double *out)
{
    const struct gguf_context *g = meta->gguf;
    int64_t id;

    FERRY_TRY(find(meta, key, &id));
    if (gguf_get_kv_type(g, id) == GGUF_TYPE_FLOAT32)
        *out = (double)gguf_get_val_f32(g, id);
    else if (gguf_get_kv_type(g, id) == GGUF_TYPE_FLOAT64)
        *out = gguf_get_val_f64(g, id);
    else
        return wrong_type(key, "a float", gguf_get_kv_type(g, id));
    return FERRY_OK;
}

ferry_status ferry__gguf_meta_bool(const ferry__gguf_meta *meta,
                                   const char *key, bool *out)
{
    int64_t id;

    FERRY_TRY(find(meta, key, &id));
    if (gguf_get_kv_type(meta->gguf, id) != GGUF_TYPE_BOOL)
        return wrong_type(key, "a bool", gguf_get_kv_type(meta->gguf, id));
    *out = gguf_get_val_bool(meta->gguf, id);
    return FERRY_OK;
}

ferry_status ferry__gguf_meta_text(const ferry__gguf_meta *meta,
                                   const char *key, const char **out)
{
    int64_t id;

    FERRY_TRY(find(meta, key, &id));
    if (gguf_get_kv_type(meta->gguf, id) != GGUF_TYPE_STRING)
        return wrong_type(key, "a string", gguf_get_kv_type(meta->gguf, id));
    *out = gguf_get_val_str(meta->gguf, id);
    return FERRY_OK;
}

static ferry_status find_array(const ferry__gguf_meta *meta, const char *key,
                               enum gguf_type type, int64_t *out_id)
{
    FERRY_TRY(find(meta, key, out_id));
    if (gguf_get_kv_type(meta->gguf, *out_id) != GGUF_TYPE_ARRAY)
        return wrong_type(key, "an array",
                          gguf_get_kv_type(meta->gguf, *out_id));
    if (gguf_get_arr_type(meta->gguf, *out_id) != type)
        return ferry_fail(
            FERRY_EINVAL, "%s must be an array of %s, got of %s", key,
            gguf_type_name(type),
            gguf_type_name(gguf_get_arr_type(meta->gguf, *out_id)));
    return FERRY_OK;
}

ferry_status ferry__gguf_meta_texts(const ferry__gguf_meta *meta,
                                    const char *key, size_t *out_count)
{
    int64_t id;

    FERRY_TRY(find_array(meta, key, GGUF_TYPE_STRING, &id));
    *out_count = gguf_get_arr_n(meta->gguf, id);
    return FERRY_OK;
}

const char *ferry__gguf_meta_text_at(const ferry__gguf_meta *meta,
                                     const char *key, size_t index)
{
    return gguf_get_arr_str(meta->gguf, gguf_find_key(meta->gguf, key), index);
}

ferry_status ferry__gguf_meta_i32s(const ferry__gguf_meta *meta,
                                   const char *key, const int32_t **out,
                                   size_t *out_count)
{
    int64_t id;

    FERRY_TRY(find_array(meta, key, GGUF_TYPE_INT32, &id));
    *out = gguf_get_arr_data(meta->gguf, id);
    *out_count = gguf_get_arr_n(meta->gguf, id);
    return FERRY_OK;
}

bool ferry__gguf_meta_shape(const ferry__gguf_meta *meta, const char *tensor,
                            int64_t out_shape[4], int32_t *out_ndim)
{
    const struct ggml_tensor *t = ggml_get_tensor(meta->tensors, tensor);
    int32_t i;

    if (!t)
        return false;
    *out_ndim = ggml_n_dims(t);
    for (i = 0; i < *out_ndim; i++)
        out_shape[i] = t->ne[*out_ndim - 1 - i];
    return true;
}

ferry_status ferry__gguf_meta_f32(const ferry__gguf_meta *meta,
                                  const char *tensor, int64_t count, float *out)
{
    const struct ggml_tensor *t = ggml_get_tensor(meta->tensors, tensor);
    int64_t id = gguf_find_tensor(meta->gguf, tensor);
    size_t offset = 0, size_bytes;

    if (!t || id < 0)
        return ferry_fail(FERRY_EUNKNOWN, "no tensor %s", tensor);
    if (t->type != GGML_TYPE_F32 || ggml_nelements(t) != count)
        return ferry_fail(FERRY_EINVAL,
                          "tensor %s: %lld elements of f32 expected, "
                          "got %lld of %s",
                          tensor, (long long)count,
                          (long long)ggml_nelements(t),
                          ggml_type_name(t->type));
    size_bytes = (size_t)count * sizeof(float);
    if (!ferry__add(gguf_get_data_offset(meta->gguf),
                    gguf_get_tensor_offset(meta->gguf, id), &offset) ||
        offset > meta->file.size_bytes ||
        size_bytes > meta->file.size_bytes - offset)
        return ferry_fail(FERRY_EINVAL,
                          "tensor %s: %zu bytes at %zu, the file has %zu",
                          tensor, size_bytes, offset, meta->file.size_bytes);
    memcpy(out, meta->file.bytes + offset, size_bytes);
    return FERRY_OK;
}
