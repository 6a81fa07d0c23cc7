/* SPDX-License-Identifier: Apache-2.0 */
/* Passes of sources, compared byte by byte. */
#include "harness/source_pass.h"

#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static size_t elem_bytes(ferry_dtype dtype)
{
    switch (dtype) {
    case FERRY_DTYPE_F64:
    case FERRY_DTYPE_I64:
    case FERRY_DTYPE_U64:
        return 8;
    case FERRY_DTYPE_F32:
    case FERRY_DTYPE_I32:
    case FERRY_DTYPE_U32:
        return 4;
    case FERRY_DTYPE_F16:
    case FERRY_DTYPE_BF16:
    case FERRY_DTYPE_I16:
    case FERRY_DTYPE_U16:
        return 2;
    default:
        return 1;
    }
}

static unsigned char *gather_dim(const ferry_tensor *t, int32_t dim, int64_t at,
                                 unsigned char *out)
{
    size_t n = elem_bytes(t->dtype);

    if (dim == t->ndim) {
        memcpy(out, (const unsigned char *)t->data + at * (int64_t)n, n);
        return out + n;
    }
    for (int64_t i = 0; i < t->shape[dim]; i++)
        out = gather_dim(t, dim + 1, at + i * t->stride[dim], out);
    return out;
}

void tensor_gather(const ferry_tensor *t, void *out)
{
    gather_dim(t, 0, t->offset, out);
}

static size_t expected_bytes(const expected_param *p)
{
    size_t n = elem_bytes(p->dtype);

    for (int32_t d = 0; d < p->ndim; d++)
        n *= (size_t)p->shape[d];
    return n;
}

static void expect_meta(const ferry_param_meta *got, const expected_param *want)
{
    assert_string_equal(got->name, want->name);
    assert_int_equal(got->dtype, want->dtype);
    assert_int_equal(got->ndim, want->ndim);
    for (int32_t d = 0; d < want->ndim; d++)
        assert_int_equal(got->shape[d], want->shape[d]);
}

static void expect_item(const ferry_item *got, const expected_param *want)
{
    unsigned char *bytes = malloc(expected_bytes(want) + 1);

    assert_string_equal(got->name, want->name);
    assert_int_equal(got->tensor.dtype, want->dtype);
    assert_int_equal(got->tensor.ndim, want->ndim);
    for (int32_t d = 0; d < want->ndim; d++)
        assert_int_equal(got->tensor.shape[d], want->shape[d]);
    if (!want->bytes) {
        assert_null(got->tensor.data);
        free(bytes);
        return;
    }
    assert_non_null(got->tensor.data);
    if (got->wait)
        assert_int_equal(got->wait(got->wait_arg, 1000), FERRY_OK);
    tensor_gather(&got->tensor, bytes);
    if (memcmp(bytes, want->bytes, expected_bytes(want)) != 0)
        fail_msg("parameter %s: bytes differ", want->name);
    free(bytes);
}

void expect_pass(ferry_source *source, const expected_param *want, size_t count)
{
    const ferry_param_meta *params;
    ferry_item item;
    size_t got;

    assert_int_equal(source->ops->metadata(source->self, &params, &got),
                     FERRY_OK);
    assert_int_equal(got, count);
    for (size_t i = 0; i < count; i++)
        expect_meta(&params[i], &want[i]);
    assert_int_equal(source->ops->begin(source->self), FERRY_OK);
    for (size_t i = 0; i < count; i++) {
        ferry_status st = source->ops->next(source->self, &item);

        if (st != FERRY_OK)
            fail_msg("parameter %s: %s", want[i].name, ferry_last_error());
        expect_item(&item, &want[i]);
    }
    assert_int_equal(source->ops->next(source->self, &item), FERRY_DONE);
    source->ops->end(source->self);
}

ferry_status drive_pass(ferry_source *source)
{
    ferry_status st = source->ops->begin(source->self);
    ferry_item item;

    if (st < 0)
        return st;
    do {
        st = source->ops->next(source->self, &item);
        if (st == FERRY_OK && item.wait)
            st = item.wait(item.wait_arg, 1000);
    } while (st == FERRY_OK);
    source->ops->end(source->self);
    return st;
}

const char *test_path(const char *name)
{
    static char paths[4][1024];
    static unsigned turn;
    const char *folder = getenv("TMPDIR");
    char *path = paths[turn++ % 4];

    snprintf(path, sizeof(paths[0]), "%s/%s", folder ? folder : "/tmp", name);
    return path;
}

void write_test_file(const char *path, const void *bytes, size_t size_bytes)
{
    FILE *file = fopen(path, "wb");

    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, size_bytes, file), size_bytes);
    assert_int_equal(fclose(file), 0);
}

const char *write_safetensors(const char *name, const char *header,
                              const void *data, size_t data_bytes)
{
    size_t length = strlen(header);
    unsigned char *file = malloc(8 + length + data_bytes);
    const char *path = test_path(name);

    assert_non_null(file);
    for (int i = 0; i < 8; i++)
        file[i] = (unsigned char)((uint64_t)length >> (8 * i));
    memcpy(file + 8, header, length);
    if (data_bytes > 0)
        memcpy(file + 8 + length, data, data_bytes);
    write_test_file(path, file, 8 + length + data_bytes);
    free(file);
    return path;
}

void expect_error(ferry_status got, ferry_status want, const char *text)
{
    if (got != want || !strstr(ferry_last_error(), text))
        fail_msg("got %s \"%s\", want %s with \"%s\"", ferry_status_name(got),
                 ferry_last_error(), ferry_status_name(want), text);
}
