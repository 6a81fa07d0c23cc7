/* SPDX-License-Identifier: Apache-2.0 */
/* build: module. The trainer half of an engine of one's own: the bytes of a
 * round go into a file, whose path the workers learn at init. Everything but
 * moving bytes (order, coverage, deadlines, the calls) is the host's.
 * Format: the tensors in declared order, row-major, without gaps. */
#include <errno.h>
#include <ferry/backend.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct file_init_info {
    ferry_trainer_init_info base;
    const char *path;
} file_init_info;

static const ferry_field fields[] = {
    FERRY_TRAINER_INIT_FIELDS,
    {"path", FERRY_FIELD_STR, FERRY_FIELD_REQUIRED,
     offsetof(file_init_info, path), NULL, 0, 0}};
FERRY_TRAINER_INIT_TYPE(file_trainer_init_type, "file", file_init_info, fields,
                        sizeof(fields) / sizeof(fields[0]), NULL);

typedef struct engine {
    const ferry_trainer_host *host;
    ferry_trainer_context *ctx;
    const file_init_info *info;
    bool is_sender;
} engine;

static ferry_status create(const ferry_trainer_host *host,
                           ferry_trainer_context *ctx, const void *info,
                           bool is_sender, void **out_self)
{
    engine *self = host->alloc(sizeof(*self));

    if (!self)
        return FERRY_ENOMEM;
    *self = (engine){host, ctx, info, is_sender};
    *out_self = self;
    return FERRY_OK;
}

/* Tells the workers where the bytes will be. */
static ferry_status init(void *arg)
{
    engine *self = arg;
    json_t *peer;
    char *text;
    ferry_status st;

    if (!self->is_sender)
        return FERRY_OK;
    peer = json_pack("{s:s}", "path", self->info->path);
    text = json_dumps(peer, JSON_COMPACT);
    st = text ? self->host->init_peer(self->ctx, text) : FERRY_ENOMEM;
    free(text);
    json_decref(peer);
    return st;
}

/* One tensor, made contiguous on the way, since a source may be strided. */
static ferry_status write_tensor(engine *self, FILE *file,
                                 const ferry_tensor *tensor)
{
    size_t size = ferry_tensor_bytes(tensor);
    void *bytes = self->host->alloc(size);
    ferry_tensor flat;
    ferry_status st;

    if (!bytes)
        return FERRY_ENOMEM;
    st = ferry_tensor_init(&flat, bytes, tensor->dtype, tensor->ndim,
                           tensor->shape);
    if (st == FERRY_OK)
        st = ferry_tensor_copy(&flat, tensor);
    if (st == FERRY_OK && fwrite(bytes, 1, size, file) != size)
        st = self->host->fail(FERRY_EIO, "%s: %s", self->info->path,
                              strerror(errno));
    if (st == FERRY_OK)
        self->host->progress(self->ctx, size);
    self->host->free(bytes);
    return st;
}

/* The whole pass into the file. What comes must be what was declared: the
 * host checks each item before it is handed over. */
static ferry_status write_pass(engine *self, FILE *file, json_t **out_update)
{
    const ferry_param_meta *params;
    json_t *names = json_array(), *dtypes = json_array(),
           *shapes = json_array();
    ferry_item item;
    size_t count = 0;
    ferry_status st = self->host->pass_begin(self->ctx, &params, &count);

    for (size_t i = 0; st == FERRY_OK && i < count; i++) {
        json_t *shape = json_array();

        for (int32_t d = 0; d < params[i].ndim; d++)
            json_array_append_new(shape, json_integer(params[i].shape[d]));
        json_array_append_new(shapes, shape);
        json_array_append_new(names, json_string(params[i].name));
        json_array_append_new(dtypes,
                              json_string(ferry_dtype_name(params[i].dtype)));
    }
    while (st == FERRY_OK &&
           (st = self->host->pass_next(self->ctx, &item)) == FERRY_OK)
        if (self->is_sender)
            st = write_tensor(self, file, &item.tensor);
    self->host->pass_end(self->ctx);
    *out_update = json_pack("{s:o, s:o, s:o}", "names", names, "dtype_names",
                            dtypes, "shapes", shapes);
    return st == FERRY_DONE ? FERRY_OK : st;
}

static ferry_status send_weights(void *arg, const void *payload,
                                 size_t payload_count)
{
    engine *self = arg;
    json_t *update = NULL;
    char *text = NULL;
    FILE *file = fopen(self->is_sender ? self->info->path : "/dev/null", "wb");
    ferry_status st;

    (void)payload, (void)payload_count;
    if (!file)
        return self->host->fail(FERRY_EIO, "%s: %s", self->info->path,
                                strerror(errno));
    st = write_pass(self, file, &update);
    if (fclose(file) != 0 && st == FERRY_OK)
        st = self->host->fail(FERRY_EIO, "%s: %s", self->info->path,
                              strerror(errno));
    text = json_dumps(update, JSON_COMPACT);
    if (st == FERRY_OK && self->is_sender)
        st = text ? self->host->update_begin(self->ctx, text) : FERRY_ENOMEM;
    if (st == FERRY_OK && self->is_sender)
        st = self->host->update_wait(self->ctx);
    snprintf(self->host->stats(self->ctx)->path,
             sizeof(self->host->stats(self->ctx)->path), "file");
    free(text);
    json_decref(update);
    return st;
}

static void round_end(void *arg, ferry_status result)
{
    engine *self = arg;

    (void)result;
    if (self->is_sender)
        remove(self->info->path);
}

static void destroy(void *arg)
{
    engine *self = arg;

    self->host->free(self);
}

const ferry_trainer_engine_ops *file_trainer_engine(void);
const ferry_trainer_engine_ops *file_trainer_engine(void)
{
    static const ferry_trainer_engine_ops ops = {
        .size = sizeof(ops),
        .abi = FERRY_ENGINE_ABI,
        .flags = FERRY_TRAINER_FULL_RESYNC,
        .init_type = &file_trainer_init_type,
        .create = create,
        .init = init,
        .send = send_weights,
        .round_end = round_end,
        .destroy = destroy};

    return &ops;
}
