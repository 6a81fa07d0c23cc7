/* SPDX-License-Identifier: Apache-2.0 */
/* build: module. The worker half: reads the file that the trainer half wrote
 * and hands each parameter to the model's loader, which fuses and shards. */
#include <errno.h>
#include <ferry/backend.h>
#include <stdio.h>
#include <string.h>

typedef struct init_info {
    const char *path;
} init_info;
static const ferry_field init_fields[] = {
    {"path", FERRY_FIELD_STR, FERRY_FIELD_REQUIRED, offsetof(init_info, path),
     NULL, 0, 0}};
static const ferry_info_type init_type = {sizeof(ferry_info_type),
                                          "FileInitInfo",
                                          sizeof(init_info),
                                          init_fields,
                                          1,
                                          NULL};

/* With these three fields the host declares the parameters itself, and
 * checks them all before the first byte is written. */
typedef struct update_info {
    ferry_strs names, dtype_names;
    ferry_shapes shapes;
} update_info;
static const ferry_field update_fields[] = {
    {"names", FERRY_FIELD_STRS, FERRY_FIELD_REQUIRED,
     offsetof(update_info, names), NULL, 0, 0},
    {"dtype_names", FERRY_FIELD_STRS,
     FERRY_FIELD_REQUIRED | FERRY_FIELD_PER_NAME,
     offsetof(update_info, dtype_names), NULL, 0, 0},
    {"shapes", FERRY_FIELD_SHAPES, FERRY_FIELD_REQUIRED | FERRY_FIELD_PER_NAME,
     offsetof(update_info, shapes), NULL, 0, 0}};
static const ferry_info_type update_type = {sizeof(ferry_info_type),
                                            "FileUpdateInfo",
                                            sizeof(update_info),
                                            update_fields,
                                            3,
                                            NULL};

typedef struct engine {
    const ferry_worker_host *host;
    ferry_worker_context *ctx;
    const init_info *info; /* valid until shutdown */
} engine;

static ferry_status create(const ferry_worker_host *host,
                           ferry_worker_context *ctx, void **out_self)
{
    engine *self = host->alloc(sizeof(*self));

    if (!self)
        return FERRY_ENOMEM;
    *self = (engine){host, ctx, NULL};
    *out_self = self;
    return FERRY_OK;
}

static ferry_status init_transfer_engine(void *arg, const void *info)
{
    engine *self = arg;

    self->info = info;
    self->host->set_path(self->ctx, "file");
    return FERRY_OK;
}

static ferry_status start_weight_update(void *arg)
{
    engine *self = arg;

    return self->host->reload_begin(self->ctx);
}

static ferry_status read_param(engine *self, FILE *file, size_t index,
                               const ferry_param_meta *param)
{
    ferry_tensor tensor;
    size_t size;
    ferry_status st;

    st = ferry_tensor_init(&tensor, NULL, param->dtype, param->ndim,
                           param->shape);
    if (st != FERRY_OK)
        return st;
    size = ferry_tensor_bytes(&tensor);
    tensor.data = self->host->alloc(size);
    if (!tensor.data)
        return FERRY_ENOMEM;
    self->host->count_buffers(self->ctx, (int64_t)size);
    if (fread(tensor.data, 1, size, file) != size)
        st = self->host->fail(FERRY_EIO, "%s ends within parameter %s",
                              self->info->path, param->name);
    if (st == FERRY_OK)
        st = self->host->load(self->ctx, index, &tensor);
    if (st == FERRY_OK)
        self->host->progress(self->ctx, size);
    self->host->count_buffers(self->ctx, -(int64_t)size);
    self->host->free(tensor.data);
    return st;
}

static ferry_status receive_weights(void *arg, const void *info)
{
    engine *self = arg;
    size_t count;
    const ferry_param_meta *params = self->host->declared(self->ctx, &count);
    FILE *file = fopen(self->info->path, "rb");
    ferry_status st = FERRY_OK;

    (void)info;
    if (!file)
        return self->host->fail(FERRY_EIO, "%s: %s", self->info->path,
                                strerror(errno));
    for (size_t i = 0; i < count && st == FERRY_OK; i++) {
        st = self->host->check(self->ctx, "reading the file");
        if (st == FERRY_OK)
            st = read_param(self, file, i, &params[i]);
    }
    fclose(file);
    return st;
}

static ferry_status finish_weight_update(void *arg)
{
    engine *self = arg;

    return self->host->reload_finalise(self->ctx);
}

static void shut_down(void *arg)
{
    engine *self = arg;

    self->info = NULL;
}

static void destroy(void *arg)
{
    engine *self = arg;

    self->host->free(self);
}

const ferry_worker_engine_ops *file_worker_engine(void);
const ferry_worker_engine_ops *file_worker_engine(void)
{
    static const ferry_worker_engine_ops ops = {
        .size = sizeof(ops),
        .abi = FERRY_ENGINE_ABI,
        .backend = "file",
        .init_info = &init_type,
        .update_info = &update_type,
        .create = create,
        .init_transfer_engine = init_transfer_engine,
        .start_weight_update = start_weight_update,
        .receive_weights = receive_weights,
        .finish_weight_update = finish_weight_update,
        .shutdown = shut_down,
        .destroy = destroy};

    return &ops;
}
