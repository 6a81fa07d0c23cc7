/* SPDX-License-Identifier: Apache-2.0 */
/* A safetensors checkpoint as a source: one file, or the files of an index,
 * mapped. Invariant: tensors point into the mappings and stay valid until
 * close; only a file whose data is not aligned for its dtypes is copied, one
 * tensor at a time, and the source is then not stable. */
#include "sources/safetensors_format.h"

#include "base/alloc.h"
#include "base/log.h"
#include "base/str.h"
#include "sources/adapter.h"
#include "sources/mapped_file.h"
#include "sources/source_files.h"

#include <string.h>

typedef struct safetensors_source {
    ferry_source_ops ops;
    ferry__mapped_file *files;
    size_t n_files;
    ferry__manifest params;
    const unsigned char **data; /* by parameter */
    size_t data_capacity;
    ferry__scratch scratch;
    size_t position;
    bool open;
} safetensors_source;

/* ---- the pass ---- */

static ferry_status safetensors_metadata(void *self,
                                         const ferry_param_meta **out_params,
                                         size_t *out_count)
{
    safetensors_source *s = self;

    *out_params = s->params.params;
    *out_count = s->params.count;
    return FERRY_OK;
}

static ferry_status safetensors_begin(void *self)
{
    safetensors_source *s = self;

    if (s->open)
        return ferry_fail(FERRY_EORDER, "safetensors source: begin during a "
                                        "pass, end must come first");
    s->open = true;
    s->position = 0;
    return FERRY_OK;
}

static bool is_aligned(const void *data, ferry_dtype dtype)
{
    return (uintptr_t)data % ferry_dtype_bytes(dtype) == 0;
}

static ferry_status safetensors_next(void *self, ferry_item *out_item)
{
    safetensors_source *s = self;
    const ferry_param_meta *meta;
    ferry_item item = {0};
    void *data;

    if (!s->open)
        return ferry_fail(FERRY_EORDER, "safetensors source: next outside a "
                                        "pass, begin must come first");
    if (s->position == s->params.count)
        return FERRY_DONE;
    meta = &s->params.params[s->position];
    data = (void *)s->data[s->position];
    if (!is_aligned(data, meta->dtype)) {
        size_t bytes = ferry__meta_bytes(meta);

        FERRY_TRY(ferry__scratch_need(&s->scratch, bytes));
        memcpy(s->scratch.data, data, bytes);
        data = s->scratch.data;
    }
    FERRY_TRY(ferry__meta_tensor(meta, data, &item.tensor));
    item.name = meta->name;
    s->position++;
    *out_item = item;
    return FERRY_OK;
}

static void safetensors_end(void *self)
{
    safetensors_source *s = self;

    s->open = false;
    ferry__scratch_free(&s->scratch);
}

static void safetensors_close(void *self)
{
    safetensors_source *s = self;

    ferry__scratch_free(&s->scratch);
    for (size_t i = 0; i < s->n_files; i++)
        ferry__mapped_close(&s->files[i]);
    ferry__free(s->files);
    ferry__manifest_clear(&s->params);
    ferry__free(s->data);
    ferry__free(s);
}

/* ---- opening ---- */

static ferry_status add_param(safetensors_source *s, const char *path,
                              const ferry_param_meta *meta,
                              const unsigned char *data)
{
    ferry_status st;

    FERRY_TRY(ferry__grow(&s->data, &s->data_capacity, s->params.count,
                          sizeof(*s->data)));
    s->data[s->params.count] = data;
    st = ferry__manifest_add(&s->params, meta);
    if (st < 0)
        return ferry__fail_prefix(st, "file %s", path);
    if (!is_aligned(data, meta->dtype) && s->ops.flags) {
        s->ops.flags = 0;
        ferry__log(FERRY_LOG_INFO,
                   "file %s: parameter %s is not aligned; "
                   "tensors are copied one at a time",
                   path, meta->name);
    }
    return FERRY_OK;
}

/* Which names of a file count: those that the index puts there. */
typedef struct selection {
    const ferry__shard_index *index; /* NULL: all */
    size_t file;
    bool *found; /* by name of the index */
    size_t left_out;
} selection;

static bool is_selected(selection *sel, const char *name)
{
    size_t i;

    if (!sel->index)
        return true;
    if (!ferry__table_get(&sel->index->by_name, name, &i) ||
        sel->index->file_of[i] != sel->file) {
        sel->left_out++;
        return false;
    }
    sel->found[i] = true;
    return true;
}

static ferry_status load_file(safetensors_source *s, const char *path,
                              selection *sel)
{
    ferry__mapped_file *file = &s->files[s->n_files];
    ferry__safetensors header = {0};
    ferry_status st;

    FERRY_TRY(ferry__mapped_open(path, file));
    s->n_files++;
    if (file->size_bytes >= 4 && memcmp(file->bytes, "GGUF", 4) == 0)
        return ferry_fail(FERRY_EINVAL,
                          "file %s: is a GGUF file, not a safetensors file",
                          path);
    FERRY_TRY(
        ferry__safetensors_parse(path, file->bytes, file->size_bytes, &header));
    st = FERRY_OK;
    for (size_t i = 0; st == FERRY_OK && i < header.params.count; i++) {
        if (is_selected(sel, header.params.params[i].name))
            st = add_param(s, path, &header.params.params[i],
                           file->bytes + header.begins[i]);
    }
    ferry__safetensors_clear(&header);
    return st;
}

static ferry_status check_found(const char *path,
                                const ferry__shard_index *index,
                                const bool *found)
{
    for (size_t i = 0; i < index->n_names; i++) {
        if (!found[i])
            return ferry_fail(FERRY_EINVAL,
                              "file %s: parameter %s: not in "
                              "%s, where the index puts it",
                              path, index->names[i],
                              index->files[index->file_of[i]]);
    }
    return FERRY_OK;
}

static ferry_status load_shards(safetensors_source *s, const char *path,
                                const ferry__shard_index *index)
{
    selection sel = {.index = index};
    ferry_status st = FERRY_OK;

    sel.found = ferry__alloc_array(index->n_names, sizeof(*sel.found));
    s->files = ferry__alloc_array(index->n_files, sizeof(*s->files));
    if (!sel.found || !s->files)
        st = FERRY_ENOMEM;
    for (size_t i = 0; st == FERRY_OK && i < index->n_files; i++) {
        char *file;

        sel.file = i;
        st = ferry__path_beside(path, index->files[i], &file);
        if (st == FERRY_OK) {
            st = load_file(s, file, &sel);
            ferry__free(file);
        }
    }
    if (st == FERRY_OK)
        st = check_found(path, index, sel.found);
    if (st == FERRY_OK && sel.left_out)
        ferry__log(FERRY_LOG_WARN,
                   "file %s: %zu tensors of its files are "
                   "not where the index says and are left out",
                   path, sel.left_out);
    ferry__free(sel.found);
    return st;
}

static ferry_status load_index(safetensors_source *s, const char *path)
{
    ferry__shard_index index = {0};
    ferry__mapped_file file = {0};
    ferry_status st;

    FERRY_TRY(ferry__mapped_open(path, &file));
    st = ferry__shard_index_parse(path,
                                  file.bytes ? (const char *)file.bytes : "",
                                  file.size_bytes, &index);
    ferry__mapped_close(&file);
    if (st == FERRY_OK)
        st = load_shards(s, path, &index);
    ferry__shard_index_clear(&index);
    return st;
}

static ferry_status load_single(safetensors_source *s, const char *path)
{
    selection all = {0};

    s->files = ferry__alloc_array(1, sizeof(*s->files));
    if (!s->files)
        return FERRY_ENOMEM;
    return load_file(s, path, &all);
}

static bool is_index(const char *path)
{
    return ferry__match("*.json", path);
}

static ferry_status open_file(const char *path, ferry_source *out_source)
{
    safetensors_source *s = ferry__alloc(sizeof(*s));
    ferry_status st;

    if (!s)
        return FERRY_ENOMEM;
    s->ops = (ferry_source_ops){
        .size = sizeof(s->ops),
        .kind = "safetensors",
        .flags = FERRY_SOURCE_STABLE,
        .metadata = safetensors_metadata,
        .begin = safetensors_begin,
        .next = safetensors_next,
        .end = safetensors_end,
        .close = safetensors_close,
    };
    st = is_index(path) ? load_index(s, path) : load_single(s, path);
    if (st < 0)
        safetensors_close(s);
    else
        *out_source = (ferry_source){&s->ops, s};
    return st;
}

ferry_status ferry_source_safetensors(const char *path,
                                      ferry_source *out_source)
{
    FERRY__NEED(out_source);
    ferry_status st;
    char *file;

    if (!path)
        return ferry_fail(FERRY_EINVAL, "safetensors source: path is NULL");
    FERRY_TRY(ferry__find_safetensors(path, &file));
    st = open_file(file, out_source);
    ferry__free(file);
    return st;
}
