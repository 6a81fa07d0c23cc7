/* SPDX-License-Identifier: Apache-2.0 */
/* Saving and loading; see checkpoint.h. Tensors are read through libferry's
 * own safetensors source; the metadata is read here. */
#include "checkpoint.h"

#include <jansson.h>

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define FORMAT           "rl_loop-1"
#define HEADER_BYTES_MAX ((uint64_t)1 << 24)

/* One tensor of the file and where its bytes are. */
typedef struct entry {
    const char *name;
    const char *dtype;
    int32_t ndim;
    int64_t shape[2];
    const void *bytes;
    size_t size_bytes;
} entry;

static size_t list_entries(const checkpoint *c, entry *out)
{
    size_t n = 0;

    /* The eight-byte elements come first, so that all stay aligned. */
    if (c->h->n > 0)
        out[n++] =
            (entry){"history",  "F64",
                    2,          {(int64_t)c->h->n, (int64_t)HISTORY_WIDTH},
                    c->h->rows, c->h->n * sizeof(history_row)};
    for (size_t i = 0; i < c->p->n_params; i++) {
        const policy_param *param = &c->p->params[i];

        out[n++] = (entry){param->name,
                           "F32",
                           param->ndim,
                           {param->shape[0], param->shape[1]},
                           c->p->weights + param->at,
                           param->count * sizeof(float)};
    }
    out[n++] =
        (entry){"adam.mean",           "F32",      1,
                {(int64_t)c->a->n, 0}, c->a->mean, c->a->n * sizeof(float)};
    out[n++] =
        (entry){"adam.square",         "F32",        1,
                {(int64_t)c->a->n, 0}, c->a->square, c->a->n * sizeof(float)};
    return n;
}

static void set_number(json_t *o, const char *key, uint64_t value)
{
    char text[32];

    snprintf(text, sizeof text, "%" PRIu64, value);
    json_object_set_new(o, key, json_string(text));
}

static json_t *make_metadata(const checkpoint *c)
{
    json_t *o = json_pack("{s:s}", "format", FORMAT);

    set_number(o, "seed", c->seed);
    set_number(o, "round", (uint64_t)c->round);
    set_number(o, "adam_steps", (uint64_t)c->a->steps);
    set_number(o, "rng", c->random->state);
    return o;
}

/* The header, padded so that the data starts at a multiple of eight. */
static char *make_header(const checkpoint *c, const entry *entries, size_t n)
{
    json_t *o = json_object();
    size_t at = 0, length;
    char *text, *padded;

    json_object_set_new(o, "__metadata__", make_metadata(c));
    for (size_t i = 0; i < n; i++) {
        json_t *shape = json_array();

        for (int32_t d = 0; d < entries[i].ndim; d++)
            json_array_append_new(shape, json_integer(entries[i].shape[d]));
        json_object_set_new(
            o, entries[i].name,
            json_pack("{s:s,s:o,s:[I,I]}", "dtype", entries[i].dtype, "shape",
                      shape, "data_offsets", (json_int_t)at,
                      (json_int_t)(at + entries[i].size_bytes)));
        at += entries[i].size_bytes;
    }
    text = json_dumps(o, JSON_COMPACT);
    json_decref(o);
    if (text == NULL)
        return NULL;
    length = (strlen(text) + 7) / 8 * 8;
    padded = malloc(length + 1);
    if (padded != NULL)
        snprintf(padded, length + 1, "%-*s", (int)length, text);
    free(text);
    return padded;
}

static int write_all(FILE *f, const char *header, const entry *entries,
                     size_t n)
{
    uint64_t length = strlen(header);
    uint8_t prefix[8];

    for (int i = 0; i < 8; i++)
        prefix[i] = (uint8_t)(length >> (8 * i));
    if (fwrite(prefix, 1, 8, f) != 8 || fwrite(header, 1, length, f) != length)
        return -1;
    for (size_t i = 0; i < n; i++)
        if (fwrite(entries[i].bytes, 1, entries[i].size_bytes, f) !=
            entries[i].size_bytes)
            return -1;
    return fflush(f) != 0 || fsync(fileno(f)) != 0 ? -1 : 0;
}

ferry_status checkpoint_save(const checkpoint *c, const char *path)
{
    entry entries[POLICY_PARAMS_MAX + 3];
    size_t n = list_entries(c, entries);
    char *header = make_header(c, entries, n);
    char temporary[4096];
    FILE *f;
    int failed;

    if (header == NULL)
        return ferry_fail(FERRY_ENOMEM, "checkpoint: out of memory");
    snprintf(temporary, sizeof temporary, "%s.part", path);
    f = fopen(temporary, "wb");
    failed = f == NULL || write_all(f, header, entries, n) != 0;
    if (f != NULL && fclose(f) != 0)
        failed = 1;
    free(header);
    if (failed || rename(temporary, path) != 0) {
        int cause = errno;

        unlink(temporary);
        return ferry_fail(FERRY_EIO, "cannot write %s: %s", path,
                          strerror(cause));
    }
    return FERRY_OK;
}

static ferry_status read_header(const char *path, json_t **out)
{
    FILE *f = fopen(path, "rb");
    uint8_t prefix[8];
    uint64_t length = 0;
    char *text = NULL;

    if (f == NULL)
        return ferry_fail(errno == ENOENT ? FERRY_EUNKNOWN : FERRY_EIO,
                          "cannot open %s: %s", path, strerror(errno));
    *out = NULL;
    if (fread(prefix, 1, 8, f) == 8)
        for (int i = 0; i < 8; i++)
            length |= (uint64_t)prefix[i] << (8 * i);
    if (length > 0 && length <= HEADER_BYTES_MAX)
        text = malloc(length);
    if (text != NULL && fread(text, 1, length, f) == length)
        *out = json_loadb(text, length, 0, NULL);
    free(text);
    fclose(f);
    return *out != NULL ? FERRY_OK
                        : ferry_fail(FERRY_EIO, "%s: malformed header", path);
}

static uint64_t number(json_t *o, const char *key)
{
    const char *text = json_string_value(json_object_get(o, key));

    return text == NULL ? 0 : strtoull(text, NULL, 10);
}

static ferry_status read_metadata(checkpoint *c, const char *path)
{
    json_t *header = NULL, *o;
    const char *format;
    ferry_status st = FERRY_OK;

    FERRY_TRY(read_header(path, &header));
    o = json_object_get(header, "__metadata__");
    format = json_string_value(json_object_get(o, "format"));
    if (format == NULL || strcmp(format, FORMAT) != 0) {
        st = ferry_fail(FERRY_EMISMATCH, "%s: format is %s, not %s", path,
                        format == NULL ? "absent" : format, FORMAT);
    } else if (number(o, "seed") != c->seed) {
        st = ferry_fail(FERRY_EMISMATCH,
                        "%s: made with seed %" PRIu64 ", not %" PRIu64, path,
                        number(o, "seed"), c->seed);
    } else {
        c->round = (int64_t)number(o, "round");
        c->a->steps = (int64_t)number(o, "adam_steps");
        c->random->state = number(o, "rng");
    }
    json_decref(header);
    return st;
}

static ferry_status take_history(checkpoint *c, const ferry_tensor *t)
{
    const history_row *rows = ferry_tensor_data(t);

    if (t->dtype != FERRY_DTYPE_F64 || t->ndim != 2 ||
        t->shape[1] != (int64_t)HISTORY_WIDTH)
        return ferry_fail(FERRY_EMISMATCH, "history: other columns");
    for (int64_t i = 0; i < t->shape[0]; i++)
        FERRY_TRY(history_add(c->h, &rows[i]));
    return FERRY_OK;
}

static ferry_status take_item(checkpoint *c, const ferry_item *item,
                              size_t *n_taken)
{
    entry entries[POLICY_PARAMS_MAX + 3];
    size_t n = list_entries(c, entries);

    if (strcmp(item->name, "history") == 0)
        return take_history(c, &item->tensor);
    for (size_t i = 0; i < n; i++) {
        if (strcmp(item->name, entries[i].name) != 0)
            continue;
        if (item->tensor.dtype != FERRY_DTYPE_F32 ||
            ferry_tensor_bytes(&item->tensor) != entries[i].size_bytes)
            return ferry_fail(FERRY_EMISMATCH, "%s: %zu bytes, expected %zu",
                              item->name, ferry_tensor_bytes(&item->tensor),
                              entries[i].size_bytes);
        /* All but the history is memory of c's own. */
        memcpy((void *)(uintptr_t)entries[i].bytes,
               ferry_tensor_data(&item->tensor), entries[i].size_bytes);
        (*n_taken)++;
        return FERRY_OK;
    }
    return ferry_fail(FERRY_EMISMATCH, "%s is no parameter of this policy",
                      item->name);
}

static ferry_status read_tensors(checkpoint *c, ferry_source *source)
{
    ferry_item item;
    size_t n_taken = 0;
    ferry_status st = source->ops->begin(source->self);

    while (st == FERRY_OK) {
        st = source->ops->next(source->self, &item);
        if (st == FERRY_DONE)
            break;
        if (st == FERRY_OK)
            st = take_item(c, &item, &n_taken);
    }
    source->ops->end(source->self);
    FERRY_TRY(st);
    if (n_taken != c->p->n_params + 2)
        return ferry_fail(FERRY_EMISMATCH, "%zu tensors, expected %zu", n_taken,
                          c->p->n_params + 2);
    return FERRY_OK;
}

ferry_status checkpoint_load(checkpoint *c, const char *path)
{
    ferry_source source = {0};
    ferry_status st;

    FERRY_TRY(read_metadata(c, path));
    FERRY_TRY(ferry_source_safetensors(path, &source));
    st = read_tensors(c, &source);
    ferry_source_close(&source);
    return st;
}
