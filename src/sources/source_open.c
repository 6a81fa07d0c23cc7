/* SPDX-License-Identifier: Apache-2.0 */
/* Opens a checkpoint by what it is. */
#include "base/log.h"
#include "base/alloc.h"
#include "base/str.h"
#include "core/module.h"
#include "sources/mapped_file.h"
#include "sources/source_files.h"
#include "sources/source_gguf.h"

#include <string.h>

static ferry_status starts_as_gguf(const char *path, bool *out_yes)
{
    ferry__mapped_file file = {0};

    FERRY_TRY(ferry__mapped_open(path, &file));
    *out_yes = file.size_bytes >= 4 && memcmp(file.bytes, "GGUF", 4) == 0;
    ferry__mapped_close(&file);
    return FERRY_OK;
}

ferry_status ferry_source_gguf(const char *path, ferry_source *out_source)
{
    FERRY__NEED(out_source);
    ferry__gguf_open_fn open_gguf;
    void *symbol;
    bool gguf;

    if (!path)
        return ferry_fail(FERRY_EINVAL, "gguf source: path is NULL");
    FERRY_TRY(
        ferry__module_symbol(FERRY__GGUF_MODULE, FERRY__GGUF_SYMBOL, &symbol));
    FERRY_TRY(starts_as_gguf(path, &gguf));
    if (!gguf)
        return ferry_fail(FERRY_EINVAL,
                          "file %s: is not a GGUF file: it does not begin "
                          "with GGUF",
                          path);
    /* C has no cast from an object pointer to a function pointer. */
    memcpy(&open_gguf, &symbol, sizeof(open_gguf));
    return open_gguf(path, out_source);
}

/* A folder counts as GGUF when it has one and no safetensors. */
static ferry_status open_folder(const char *path, ferry_source *out_source)
{
    char *file = NULL;
    ferry_status st = ferry__find_safetensors(path, &file);

    if (st == FERRY_OK) {
        st = ferry_source_safetensors(file, out_source);
    } else if (st == FERRY_EIO) {
        FERRY_TRY(ferry__find_gguf(path, &file));
        if (!file)
            return ferry_fail(FERRY_EIO,
                              "folder %s: holds no safetensors "
                              "file, no index and no GGUF file",
                              path);
        st = ferry_source_gguf(file, out_source);
    }
    ferry__free(file);
    return st;
}

ferry_status ferry_source_open(const char *path, ferry_source *out_source)
{
    FERRY__NEED(out_source);
    bool gguf;

    if (!path)
        return ferry_fail(FERRY_EINVAL, "source: path is NULL");
    if (ferry__is_folder(path))
        return open_folder(path, out_source);
    FERRY_TRY(starts_as_gguf(path, &gguf));
    /* A name that ends so is meant so, and what is wrong is said of that. */
    return gguf || ferry__match("*.gguf", path)
               ? ferry_source_gguf(path, out_source)
               : ferry_source_safetensors(path, out_source);
}
