/* SPDX-License-Identifier: Apache-2.0 */
/* Parses the index of a sharded safetensors checkpoint. A file is named by
 * its basename alone, so an index can reach no file outside its folder. */
#include "sources/safetensors_format.h"

#include "base/alloc.h"
#include "base/json.h"
#include "base/log.h"
#include "sources/name_pattern.h"

#include <stdlib.h>
#include <string.h>

static ferry_status check_file(const char *path, const char *name,
                               const char *file)
{
    if (!file || !*file)
        return ferry_fail(FERRY_EINVAL,
                          "file %s: parameter %s: its file is "
                          "not a name",
                          path, name);
    if (strchr(file, '/') || strcmp(file, ".") == 0 || strcmp(file, "..") == 0)
        return ferry_fail(FERRY_EINVAL,
                          "file %s: parameter %s: file \"%s\" "
                          "is not in the folder of the index",
                          path, name, file);
    return FERRY_OK;
}

static int compare_strings(const void *left, const void *right)
{
    return strcmp(*(char *const *)left, *(char *const *)right);
}

/* `all` holds one borrowed file name for each parameter. */
static ferry_status keep_files(const char **all, size_t count,
                               ferry__shard_index *out)
{
    size_t n_files = 0;

    qsort(all, count, sizeof(*all), compare_strings);
    for (size_t i = 0; i < count; i++) {
        if (n_files == 0 || strcmp(all[n_files - 1], all[i]) != 0)
            all[n_files++] = all[i];
    }
    out->files = ferry__strings_copy(all, n_files);
    if (!out->files)
        return FERRY_ENOMEM;
    out->n_files = n_files;
    return FERRY_OK;
}

static size_t find_file(const ferry__shard_index *index, const char *file)
{
    char **found = bsearch(&file, index->files, index->n_files,
                           sizeof(*index->files), compare_strings);

    return (size_t)(found - index->files);
}

static ferry_status keep_names(const json_t *map, ferry__shard_index *out)
{
    const char *name;
    json_t *file;

    out->names = ferry__alloc_array(json_object_size(map), sizeof(*out->names));
    out->file_of =
        ferry__alloc_array(json_object_size(map), sizeof(*out->file_of));
    if (!out->names || !out->file_of)
        return FERRY_ENOMEM;
    json_object_foreach((json_t *)map, name, file)
    {
        char *copy = ferry__strdup(name);

        if (!copy)
            return FERRY_ENOMEM;
        out->names[out->n_names] = copy;
        out->file_of[out->n_names] = find_file(out, json_string_value(file));
        FERRY_TRY(ferry__table_add(&out->by_name, copy, out->n_names++, NULL));
    }
    return FERRY_OK;
}

static ferry_status read_map(const char *path, const json_t *map,
                             ferry__shard_index *out)
{
    const char **files, *name;
    ferry_status st = FERRY_OK;
    size_t count = 0;
    json_t *file;

    if (!json_is_object(map))
        return ferry_fail(FERRY_EINVAL,
                          "file %s: weight_map is missing or "
                          "not an object",
                          path);
    files = ferry__alloc_array(json_object_size(map), sizeof(*files));
    if (!files)
        return FERRY_ENOMEM;
    json_object_foreach((json_t *)map, name, file)
    {
        files[count] = json_string_value(file);
        if (st == FERRY_OK)
            st = check_file(path, name, files[count]);
        count++;
    }
    if (st == FERRY_OK)
        st = keep_files(files, count, out);
    if (st == FERRY_OK)
        st = keep_names(map, out);
    ferry__free(files);
    return st;
}

ferry_status ferry__shard_index_parse(const char *path, const char *text,
                                      size_t length, ferry__shard_index *out)
{
    ferry__shard_index result = {0};
    json_t *root = NULL;
    ferry_status st;

    st = ferry__json_parse("index", text, length, &root);
    if (st < 0)
        return ferry__fail_prefix(st, "file %s", path);
    st = read_map(path, json_object_get(root, "weight_map"), &result);
    json_decref(root);
    if (st < 0)
        ferry__shard_index_clear(&result);
    else
        *out = result;
    return st;
}

void ferry__shard_index_clear(ferry__shard_index *index)
{
    ferry__strings_free(index->files, index->n_files);
    ferry__strings_free(index->names, index->n_names);
    ferry__free(index->file_of);
    ferry__table_free(&index->by_name);
    *index = (ferry__shard_index){0};
}
