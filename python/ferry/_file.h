/* SPDX-License-Identifier: Apache-2.0 */
/* A checkpoint's path as a source: each round opens what lies there when the
 * round begins, and no byte of it passes through Python.
 * Invariant: the file of a pass is not let go of before the pass ends. */
#ifndef FERRY_PY_FILE_H
#define FERRY_PY_FILE_H

#include <sys/mman.h>
#include <unistd.h>

typedef struct ferry_py_file {
    const char *path;
    ferry_dtype to; /* of floating-point parameters; NONE: as they are */
    ferry_source_ops ops;
    ferry_source opened; /* ops NULL: none yet */
    bool passing;
} ferry_py_file;

static ferry_status ferry_py_file_open(const char *path, ferry_dtype to,
                                       ferry_source *out_source)
{
    ferry_source opened = {0};
    ferry_status status = ferry_source_open(path, &opened);

    if (status == FERRY_OK && to != FERRY_DTYPE_NONE)
        status = ferry_source_cast(&opened, to, NULL, &opened);
    if (status == FERRY_OK)
        *out_source = opened;
    else
        ferry_source_close(&opened);
    return status;
}

/* The flags hold for the life of a trainer, which has asked for them once. */
static ferry_status ferry_py_file_reopen(ferry_py_file *file)
{
    ferry_source opened = {0};
    ferry_status status = ferry_py_file_open(file->path, file->to, &opened);

    if (status != FERRY_OK)
        return status;
    if (file->ops.flags & ~opened.ops->flags) {
        ferry_source_close(&opened);
        return ferry_fail(FERRY_EMISMATCH,
                          "%s: its tensors lay in the file when the trainer "
                          "was made, and now must be copied; make another",
                          file->path);
    }
    ferry_source_close(&file->opened);
    file->opened = opened;
    return FERRY_OK;
}

static ferry_status ferry_py_file_metadata(void *self,
                                           const ferry_param_meta **out_params,
                                           size_t *out_count)
{
    ferry_py_file *file = self;

    if (!file->passing) {
        ferry_status status = ferry_py_file_reopen(file);

        if (status != FERRY_OK)
            return status;
    }
    return file->opened.ops->metadata(file->opened.self, out_params, out_count);
}

static ferry_status ferry_py_file_begin(void *self)
{
    ferry_py_file *file = self;
    ferry_status status = file->opened.ops->begin(file->opened.self);

    if (status == FERRY_OK)
        file->passing = true;
    return status;
}

static ferry_status ferry_py_file_next(void *self, ferry_item *out_item)
{
    ferry_py_file *file = self;

    return file->opened.ops->next(file->opened.self, out_item);
}

static void ferry_py_file_end(void *self)
{
    ferry_py_file *file = self;

    file->passing = false;
    file->opened.ops->end(file->opened.self);
}

/* Fills in the table; the rest of `file` is the caller's. */
static ferry_status ferry_py_file_init(ferry_py_file *file)
{
    ferry_status status;

    file->ops.flags = 0;
    status = ferry_py_file_reopen(file);
    if (status != FERRY_OK)
        return status;
    file->ops = (ferry_source_ops){
        .size = sizeof(file->ops),
        .kind = file->opened.ops->kind,
        .flags = file->opened.ops->flags,
        .metadata = ferry_py_file_metadata,
        .begin = ferry_py_file_begin,
        .next = ferry_py_file_next,
        .end = ferry_py_file_end,
    };
    return FERRY_OK;
}

static void ferry_py_file_close(ferry_py_file *file)
{
    ferry_source_close(&file->opened);
}

/* Opens a path for one pass, whose tensors stay valid until it is let go of. */
static ferry_status ferry_py_pass_begin(const char *path, ferry_dtype to,
                                        ferry_source *out_source)
{
    ferry_source opened = {0};
    ferry_status status = ferry_py_file_open(path, to, &opened);

    if (status == FERRY_OK)
        status = opened.ops->begin(opened.self);
    if (status == FERRY_OK)
        *out_source = opened;
    else
        ferry_source_close(&opened);
    return status;
}

static void ferry_py_pass_end(ferry_source *source)
{
    if (source->ops != NULL)
        source->ops->end(source->self);
    ferry_source_close(source);
}

/* Lets a tensor that lies in a mapped file be written to: the pages become
 * the process's own, and the file stays as it is. False where the system has
 * no memory to promise for that. */
static bool ferry_py_pass_own(const ferry_tensor *tensor)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t begin = (uintptr_t)tensor->data;
    uintptr_t end = begin + ferry_tensor_bytes(tensor);

    begin = begin / page * page;
    return mprotect((void *)begin, end - begin, PROT_READ | PROT_WRITE) == 0;
}

#endif
