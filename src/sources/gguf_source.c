/* SPDX-License-Identifier: Apache-2.0 */
/* A GGUF file as a source: f32, Hugging Face names and row order.
 * Invariant: one tensor is dequantised at a time, into one buffer, so the
 * memory needed is that of the largest; tensors that are f32 already are
 * given from the mapping. */
#include "sources/gguf_names.h"

#include "base/alloc.h"
#include "base/log.h"
#include "core/manifest.h"
#include "sources/adapter.h"
#include "sources/check_gguf.h"
#include "sources/mapped_file.h"
#include "sources/source_gguf.h"

#include <gguf.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

/* One tensor of the file, as stored. */
typedef struct stored {
    const unsigned char *bytes;
    enum ggml_type type;
    int64_t n_rows, n_cols; /* one dimension is n_rows of 1 when permuted */
    int64_t n_heads;        /* 0: the rows are in order */
} stored;

typedef struct gguf_source {
    ferry_source_ops ops;
    ferry__mapped_file file;
    struct gguf_context *header;
    ferry__manifest params;
    stored *tensors;                    /* by parameter */
    int64_t n_query_heads, n_key_heads; /* 0: rows are not permuted */
    ferry__scratch scratch;
    size_t position;
    bool open;
} gguf_source;

/* ---- values ---- */

static void to_f32(const stored *t, const unsigned char *src, float *dst,
                   int64_t n)
{
    const struct ggml_type_traits *traits = ggml_get_type_traits(t->type);

    if (t->type == GGML_TYPE_F32)
        memcpy(dst, src, (size_t)n * sizeof(float));
    else
        traits->to_float(src, dst, n);
}

/* Llama files store the rows of a head as rotary pairs: row (i, j) of
 * [half, 2] is row (j, i) of [2, half] in a checkpoint. */
static int64_t checkpoint_row(const stored *t, int64_t row)
{
    int64_t head_rows = t->n_rows / t->n_heads, half = head_rows / 2;
    int64_t head = row / head_rows, within = row % head_rows;

    return head * head_rows + within % 2 * half + within / 2;
}

static void dequantise(const stored *t, float *dst)
{
    size_t row_bytes = ggml_row_size(t->type, t->n_cols);

    if (t->n_heads == 0) {
        to_f32(t, t->bytes, dst, t->n_rows * t->n_cols);
        return;
    }
    for (int64_t row = 0; row < t->n_rows; row++)
        to_f32(t, t->bytes + (size_t)row * row_bytes,
               dst + checkpoint_row(t, row) * t->n_cols, t->n_cols);
}

/* ---- the pass ---- */

static ferry_status gguf_metadata(void *self,
                                  const ferry_param_meta **out_params,
                                  size_t *out_count)
{
    gguf_source *g = self;

    *out_params = g->params.params;
    *out_count = g->params.count;
    return FERRY_OK;
}

static ferry_status gguf_begin(void *self)
{
    gguf_source *g = self;

    if (g->open)
        return ferry_fail(FERRY_EORDER, "gguf source: begin during a pass, "
                                        "end must come first");
    g->open = true;
    g->position = 0;
    return FERRY_OK;
}

static ferry_status give_bytes(gguf_source *g, const stored *t,
                               const ferry_param_meta *meta, void **out)
{
    if (t->type == GGML_TYPE_F32 && t->n_heads == 0 &&
        (uintptr_t)t->bytes % sizeof(float) == 0) {
        *out = (void *)t->bytes;
        return FERRY_OK;
    }
    FERRY_TRY(ferry__scratch_need(&g->scratch, ferry__meta_bytes(meta)));
    dequantise(t, g->scratch.data);
    *out = g->scratch.data;
    return FERRY_OK;
}

static ferry_status gguf_next(void *self, ferry_item *out_item)
{
    gguf_source *g = self;
    const ferry_param_meta *meta;
    ferry_item item = {0};
    void *data;

    if (!g->open)
        return ferry_fail(FERRY_EORDER, "gguf source: next outside a pass, "
                                        "begin must come first");
    if (g->position == g->params.count)
        return FERRY_DONE;
    meta = &g->params.params[g->position];
    FERRY_TRY(give_bytes(g, &g->tensors[g->position], meta, &data));
    FERRY_TRY(ferry__meta_tensor(meta, data, &item.tensor));
    item.name = meta->name;
    g->position++;
    *out_item = item;
    return FERRY_OK;
}

static void gguf_end(void *self)
{
    gguf_source *g = self;

    g->open = false;
    ferry__scratch_free(&g->scratch);
}

static void gguf_close(void *self)
{
    gguf_source *g = self;

    ferry__scratch_free(&g->scratch);
    if (g->header)
        gguf_free(g->header);
    ferry__mapped_close(&g->file);
    ferry__manifest_clear(&g->params);
    ferry__free(g->tensors);
    ferry__free(g);
}

/* ---- the header ---- */

/* ggml reports by its log, which is the process's: it is borrowed while a
 * header is read, and what it says becomes the error. */
static pthread_mutex_t reader_lock = PTHREAD_MUTEX_INITIALIZER;

static void keep_line(enum ggml_log_level level, const char *text, void *arg)
{
    char *line = arg;
    size_t used = strlen(line);

    if (level == GGML_LOG_LEVEL_ERROR)
        snprintf(line + used, 512 - used, "%.*s", (int)strcspn(text, "\n"),
                 text);
}

static struct gguf_context *read_header(const char *path, char *line)
{
    struct gguf_init_params params = {.no_alloc = true, .ctx = NULL};
    struct gguf_context *header;
    ggml_log_callback old_log;
    void *old_arg;

    pthread_mutex_lock(&reader_lock);
    ggml_log_get(&old_log, &old_arg);
    ggml_log_set(keep_line, line);
    header = gguf_init_from_file(path, params);
    ggml_log_set(old_log, old_arg);
    pthread_mutex_unlock(&reader_lock);
    return header;
}

static ferry_status open_header(gguf_source *g, const char *path)
{
    char line[512] = "";

    FERRY_TRY(ferry__mapped_open(path, &g->file));
    FERRY_TRY(ferry__gguf_check(path, g->file.bytes, g->file.size_bytes));
    g->header = read_header(path, line);
    if (!g->header)
        return ferry_fail(FERRY_EINVAL, "file %s: %s", path,
                          *line ? line : "not readable as GGUF");
    return FERRY_OK;
}

static ferry_status get_text(const gguf_source *g, const char *key,
                             const char **out)
{
    int64_t id = gguf_find_key(g->header, key);

    if (id < 0 || gguf_get_kv_type(g->header, id) != GGUF_TYPE_STRING)
        return ferry_fail(FERRY_EINVAL,
                          "metadata %s is missing or no "
                          "string",
                          key);
    *out = gguf_get_val_str(g->header, id);
    return FERRY_OK;
}

/* A count; `missing` when the key is absent and that is not negative. */
static ferry_status get_count(const gguf_source *g, const char *key,
                              int64_t missing, int64_t *out)
{
    int64_t id = gguf_find_key(g->header, key);
    int64_t value = missing;

    if (id >= 0)
        value = gguf_get_kv_type(g->header, id) == GGUF_TYPE_UINT32
                    ? (int64_t)gguf_get_val_u32(g->header, id)
                    : -1;
    if (value <= 0)
        return ferry_fail(FERRY_EINVAL,
                          "metadata %s is missing or no u32 of "
                          "1 or more",
                          key);
    *out = value;
    return FERRY_OK;
}

static ferry_status read_metadata(gguf_source *g)
{
    const char *architecture;

    FERRY_TRY(get_text(g, "general.architecture", &architecture));
    FERRY_TRY(ferry__gguf_check_architecture(architecture));
    if (strcmp(architecture, "llama") != 0)
        return FERRY_OK;
    FERRY_TRY(
        get_count(g, "llama.attention.head_count", -1, &g->n_query_heads));
    return get_count(g, "llama.attention.head_count_kv", g->n_query_heads,
                     &g->n_key_heads);
}

/* ---- the tensors ---- */

static ferry_status check_bytes(gguf_source *g, int64_t id, const char *tensor,
                                stored *out)
{
    size_t base = gguf_get_data_offset(g->header);
    size_t offset = gguf_get_tensor_offset(g->header, id);
    size_t size = gguf_get_tensor_size(g->header, id), begin, end;

    if (!ferry__add(base, offset, &begin) || !ferry__add(begin, size, &end))
        return ferry_fail(FERRY_EINVAL, "tensor %s: its place does not fit",
                          tensor);
    if (end > g->file.size_bytes)
        return ferry_fail(FERRY_EINVAL,
                          "tensor %s: ends at byte %zu, the "
                          "file ends at %zu",
                          tensor, end, g->file.size_bytes);
    out->type = gguf_get_tensor_type(g->header, id);
    out->bytes = g->file.bytes + begin;
    if (out->type != GGML_TYPE_F32 &&
        !ggml_get_type_traits(out->type)->to_float)
        return ferry_fail(FERRY_ENOTSUP,
                          "tensor %s: type %s cannot be "
                          "dequantised",
                          tensor, ggml_type_name(out->type));
    return FERRY_OK;
}

/* ggml lists dimensions from the innermost and always four of them. */
static ferry_status read_shape(const gguf_source *g, int64_t id,
                               const char *tensor, ferry_param_meta *meta)
{
    const int64_t *ne = gguf_get_tensor_ne(g->header, id);

    for (int32_t d = meta->ndim; d < GGML_MAX_DIMS; d++) {
        if (ne[d] != 1)
            return ferry_fail(FERRY_EINVAL,
                              "tensor %s: dimension %" PRId32
                              " has extent %" PRId64 ", want %" PRId32
                              " dimensions",
                              tensor, d, ne[d], meta->ndim);
    }
    for (int32_t d = 0; d < meta->ndim; d++)
        meta->shape[d] = ne[meta->ndim - 1 - d];
    return FERRY_OK;
}

static ferry_status set_rows(const gguf_source *g, const char *tensor,
                             const ferry_param_meta *meta,
                             ferry__gguf_heads heads, stored *t)
{
    t->n_heads = heads == FERRY__GGUF_QUERY_HEADS ? g->n_query_heads
                 : heads == FERRY__GGUF_KEY_HEADS ? g->n_key_heads
                                                  : 0;
    t->n_rows = meta->shape[0];
    t->n_cols = meta->ndim == 2 ? meta->shape[1] : 1;
    if (t->n_heads == 0)
        return FERRY_OK;
    if (t->n_rows % (2 * t->n_heads) != 0)
        return ferry_fail(FERRY_EINVAL,
                          "tensor %s: %" PRId64 " rows are not "
                          "pairs for each of %" PRId64 " heads",
                          tensor, t->n_rows, t->n_heads);
    if (t->n_cols % ggml_blck_size(t->type) != 0)
        return ferry_fail(FERRY_ENOTSUP,
                          "tensor %s: rows of %" PRId64
                          " elements are not whole blocks of type %s",
                          tensor, t->n_cols, ggml_type_name(t->type));
    return FERRY_OK;
}

static ferry_status add_weight(gguf_source *g, int64_t id, const char *tensor,
                               const ferry__gguf_name *name)
{
    ferry_param_meta meta = {
        .name = name->name, .dtype = FERRY_DTYPE_F32, .ndim = name->ndim};
    stored *t = &g->tensors[g->params.count];

    FERRY_TRY(check_bytes(g, id, tensor, t));
    FERRY_TRY(read_shape(g, id, tensor, &meta));
    FERRY_TRY(set_rows(g, tensor, &meta, name->heads, t));
    return ferry__manifest_add(&g->params, &meta);
}

static ferry_status read_tensors(gguf_source *g, const char *path)
{
    int64_t count = gguf_get_n_tensors(g->header);

    g->tensors = ferry__alloc_array((size_t)count, sizeof(*g->tensors));
    if (!g->tensors)
        return FERRY_ENOMEM;
    for (int64_t id = 0; id < count; id++) {
        const char *tensor = gguf_get_tensor_name(g->header, id);
        ferry__gguf_name name;
        ferry_status st = FERRY_OK;

        FERRY_TRY(ferry__gguf_name_of(tensor, &name));
        if (name.name)
            st = add_weight(g, id, tensor, &name);
        else
            ferry__log(FERRY_LOG_INFO,
                       "file %s: tensor %s is no weight and "
                       "is left out",
                       path, tensor);
        ferry__free(name.name);
        FERRY_TRY(st);
    }
    return FERRY_OK;
}

static ferry_status open_file(gguf_source *g, const char *path)
{
    ferry_status st;

    FERRY_TRY(open_header(g, path));
    st = read_metadata(g);
    if (st == FERRY_OK)
        st = read_tensors(g, path);
    return st < 0 ? ferry__fail_prefix(st, "file %s", path) : st;
}

ferry_status ferry_source_gguf_open(const char *path, ferry_source *out_source)
{
    gguf_source *g = ferry__alloc(sizeof(*g));
    ferry_status st;

    if (!g)
        return FERRY_ENOMEM;
    g->ops = (ferry_source_ops){
        .size = sizeof(g->ops),
        .kind = "gguf",
        .metadata = gguf_metadata,
        .begin = gguf_begin,
        .next = gguf_next,
        .end = gguf_end,
        .close = gguf_close,
    };
    st = open_file(g, path);
    if (st < 0)
        gguf_close(g);
    else
        *out_source = (ferry_source){&g->ops, g};
    return st;
}
