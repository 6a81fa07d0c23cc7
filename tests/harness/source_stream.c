/* SPDX-License-Identifier: Apache-2.0 */
/* Inner sources for the tests of adapters. */
#include "harness/source_stream.h"

#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <cmocka.h>
#include <stdlib.h>
#include <string.h>

/* Values that f32 and bf16 hold exactly, and their bf16 bits. */
const float f32_values[12] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};
const uint16_t bf16_values[12] = {0x0000, 0x3F80, 0x4000, 0x4040,
                                  0x4080, 0x40A0, 0x40C0, 0x40E0,
                                  0x4100, 0x4110, 0x4120, 0x4130};

const expected_param plain_params[4] = {
    {"model.embed.weight", FERRY_DTYPE_F32, 2, {2, 2}, f32_values},
    {"model.layers.0.a", FERRY_DTYPE_F32, 1, {3}, f32_values + 4},
    {"model.layers.1.a", FERRY_DTYPE_F32, 1, {3}, f32_values + 7},
    {"step", FERRY_DTYPE_I64, 0, {0}, f32_values + 10},
};

static size_t bytes_of(const expected_param *p)
{
    size_t n = ferry_dtype_bytes(p->dtype);

    for (int32_t d = 0; d < p->ndim; d++)
        n *= (size_t)p->shape[d];
    return n;
}

static ferry_status stream_metadata(void *self, const ferry_param_meta **out,
                                    size_t *out_count)
{
    source_stream *s = self;

    *out = s->meta;
    *out_count = s->declared;
    return FERRY_OK;
}

static ferry_status stream_begin(void *self)
{
    source_stream *s = self;

    assert_false(s->opened);
    s->opened = true;
    s->position = 0;
    return FERRY_OK;
}

static ferry_status stream_wait(void *arg, int64_t timeout_ms)
{
    source_stream *s = arg;
    const expected_param *p = &s->params[s->position - 1];

    assert_true(timeout_ms > 0);
    if (s->late && s->asked++ == 0)
        return ferry_fail(FERRY_ETIMEOUT, "not yet");
    assert_false(s->filled);
    s->filled = true;
    memcpy(s->buffer, p->bytes, bytes_of(p));
    return FERRY_OK;
}

static ferry_status stream_next(void *self, ferry_item *out)
{
    source_stream *s = self;
    const expected_param *p = &s->params[s->position];

    free(s->buffer);
    s->buffer = NULL;
    if (s->position == s->yielded)
        return FERRY_DONE;
    s->position++;
    *out = (ferry_item){.name = p->name};
    if (!p->bytes)
        return FERRY_OK;
    s->buffer = malloc(bytes_of(p) + 1);
    memset(s->buffer, 0xEE, bytes_of(p));
    s->filled = false;
    s->asked = 0;
    out->wait = stream_wait;
    out->wait_arg = s;
    return ferry_tensor_init(&out->tensor, s->buffer, p->dtype, p->ndim,
                             p->shape);
}

static void stream_end(void *self)
{
    source_stream *s = self;

    assert_true(s->opened);
    s->opened = false;
    free(s->buffer);
    s->buffer = NULL;
}

static bool stream_holds(void *self, const char *name)
{
    source_stream *s = self;

    for (size_t i = 0; i < s->declared; i++) {
        if (strcmp(s->meta[i].name, name) == 0)
            return s->params[i].bytes != NULL;
    }
    return false;
}

static ferry_status stream_groups(void *self, const size_t **out,
                                  size_t *out_count)
{
    source_stream *s = self;

    s->group_lengths[0] = 1;
    s->group_lengths[1] = s->declared - 1;
    *out = s->group_lengths;
    *out_count = 2;
    return FERRY_OK;
}

static const ferry_source_ops STREAM_OPS = {
    .size = sizeof(ferry_source_ops),
    .kind = "stream",
    .metadata = stream_metadata,
    .begin = stream_begin,
    .next = stream_next,
    .end = stream_end,
    .holds = stream_holds,
    .groups = stream_groups,
};

ferry_source stream_of(source_stream *s, const expected_param *params,
                       size_t count)
{
    *s = (source_stream){.params = params, .declared = count, .yielded = count};
    assert_true(count <= 16);
    for (size_t i = 0; i < count; i++) {
        s->meta[i].name = params[i].name;
        s->meta[i].dtype = params[i].dtype;
        s->meta[i].ndim = params[i].ndim;
        memcpy(s->meta[i].shape, params[i].shape, sizeof(params[i].shape));
    }
    return (ferry_source){&STREAM_OPS, s};
}

ferry_source module_of(const expected_param *params, size_t count)
{
    const char *names[16];
    ferry_tensor tensors[16];
    ferry_source source = {0};

    assert_true(count <= 16);
    for (size_t i = 0; i < count; i++) {
        names[i] = params[i].name;
        assert_int_equal(ferry_tensor_init(&tensors[i], (void *)params[i].bytes,
                                           params[i].dtype, params[i].ndim,
                                           params[i].shape),
                         FERRY_OK);
    }
    assert_int_equal(ferry_source_module(names, tensors, count, &source),
                     FERRY_OK);
    return source;
}

bool is_stable(const ferry_source *source)
{
    return (source->ops->flags & FERRY_SOURCE_STABLE) != 0;
}
