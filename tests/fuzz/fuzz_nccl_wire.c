/* SPDX-License-Identifier: Apache-2.0 */
/* What ranks of the nccl backend say to each other: the first byte chooses
 * between hello, header, head, lists of boxes and the JSON of an init info.
 * What is accepted must be what is written for the same value, and accepted
 * boxes must be hashed within their parameter and in bounded time. */
#include "backends/nccl/nccl_wire.h"

#include "base/alloc.h"
#include "core/digester.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const ferry_param_meta params[3] = {
    {"w", FERRY_DTYPE_BF16, 2, {4, 3}},
    {"s", FERRY_DTYPE_F64, 0, {0}},
    {"v", FERRY_DTYPE_U8, 1, {1000}},
};

static void must_be(bool condition)
{
    if (!condition)
        abort();
}

/* The message is in `s`, which is freed. */
static void must_equal(ferry__str *s, const void *bytes, size_t size)
{
    must_be(s->length == size && memcmp(s->data, bytes, size) == 0);
    ferry__str_free(s);
}

static void try_hello(const void *bytes, size_t size)
{
    ferry__nccl_hello mine = {.magic = FERRY__NCCL_MAGIC,
                              .version = FERRY__NCCL_VERSION,
                              .provider = "tcp"},
                      v;

    if (ferry__nccl_get_hello(bytes, size, &v) < 0)
        return;
    must_be(strlen(v.provider) <= FERRY__NCCL_PROVIDER_CHARS &&
            strlen(v.settings) <= FERRY__NCCL_SETTINGS_CHARS);
    ferry__nccl_check_hello(&mine, &v, 1);
    ferry__nccl_check_hello(&v, &mine, 1);
    must_be(v.magic != FERRY__NCCL_MAGIC || v.version != FERRY__NCCL_VERSION ||
            ferry__nccl_check_hello(&v, &v, 1) == FERRY_OK);
}

static void try_header(const void *bytes, size_t size)
{
    ferry__nccl_header v;
    ferry__str s = {0};

    if (ferry__nccl_get_header(bytes, size, &v) < 0)
        return;
    ferry__nccl_put_header(&s, &v);
    must_equal(&s, bytes, size);
}

static void try_head(const void *bytes, size_t size)
{
    ferry__nccl_head v;
    ferry__str s = {0};

    if (ferry__nccl_get_head(bytes, size, &v) < 0)
        return;
    must_be(v.list_bytes <= FERRY__NCCL_LIST_MAX);
    ferry__nccl_put_head(&s, &v);
    must_equal(&s, bytes, size);
}

/* Memory of the exact size, so that a sanitizer sees a read beside it. */
static void hash_all(const ferry__box_lists *lists)
{
    ferry__digester *d;

    if (ferry__digester_create(params, 3, &lists, 1, &d) < 0)
        return;
    for (size_t i = 0; i < 3; i++) {
        int64_t numel = i == 0 ? 12 : i == 1 ? 1 : 1000;
        size_t size = (size_t)numel * ferry_dtype_bytes(params[i].dtype);
        void *bytes = calloc(1, size);

        must_be(bytes != NULL);
        ferry__digester_feed(d, i, bytes, 0, numel);
        free(bytes);
    }
    for (size_t b = 0; b < lists->first[3]; b++)
        (void)ferry__digester_value(d, 0, b);
    ferry__digester_destroy(&d);
}

static void try_boxes(const void *bytes, size_t size)
{
    ferry__reader r = {bytes, size, false};
    ferry__box_lists lists;
    ferry__str s = {0};

    if (ferry__box_lists_get(&r, &lists) < 0 || r.bad)
        return;
    if (r.left == 0 && lists.n_params > 0) {
        ferry__box_lists_put(&s, &lists);
        must_equal(&s, bytes, size);
    }
    if (ferry__box_lists_check(&lists, params, 3) >= 0)
        hash_all(&lists);
    ferry__box_lists_free(&lists);
}

static void try_init(const void *bytes, size_t size)
{
    char *text = malloc(size + 1), *again = NULL;
    void *info = NULL;

    must_be(text != NULL);
    memcpy(text, bytes, size);
    text[size] = '\0';
    if (ferry_info_parse(&ferry__nccl_init_type, text, &info) >= 0) {
        const ferry__nccl_init_info *v = info;

        must_be(v->world_size >= 1 && v->packed_num_buffers >= 1 &&
                v->packed_buffer_size_bytes >= 1);
        must_be(ferry_info_format(&ferry__nccl_init_type, info, &again) ==
                FERRY_OK);
        ferry_free(again);
        ferry_info_free(info);
    }
    free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size == 0)
        return 0;
    switch (data[0]) {
    case 'H':
        try_hello(data + 1, size - 1);
        break;
    case 'R':
        try_header(data + 1, size - 1);
        break;
    case 'D':
        try_head(data + 1, size - 1);
        break;
    case 'B':
        try_boxes(data + 1, size - 1);
        break;
    default:
        try_init(data, size);
        break;
    }
    return 0;
}
