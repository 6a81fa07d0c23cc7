/* SPDX-License-Identifier: Apache-2.0 */
/* A source of random weights, for servers that wait for their first update.
 * Invariant: a value depends on seed, name and index alone. */
#include "model/model_names.h"

#include "base/alloc.h"
#include "base/hash.h"
#include "model/model.h"

#include <string.h>

#define DEVIATION 0.02

typedef struct dummy {
    ferry__model_config config;
    uint64_t seed;
    ferry_param_meta *params;
    size_t count, next;
    float *values; /* of the parameter yielded last */
    size_t capacity;
} dummy;

/* The finaliser of splitmix64: a good mix of a counter. */
static uint64_t mix(uint64_t z)
{
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

/* The sum of four uniform 16-bit numbers: mean 0, deviation 1, and four
 * times as fast as an exact normal. */
static float near_normal(uint64_t bits)
{
    int64_t sum = (int64_t)(bits & 0xFFFF) + (int64_t)(bits >> 16 & 0xFFFF) +
                  (int64_t)(bits >> 32 & 0xFFFF) + (int64_t)(bits >> 48);

    /* sqrt(3) / 65536: four uniforms have a variance of 4 / 12. */
    return (float)((double)(sum - 2 * 65535) *
                   (1.7320508075688772 / 65536.0 * DEVIATION));
}

static bool is_bias(const char *name)
{
    size_t n = strlen(name);

    return n > 5 && strcmp(name + n - 5, ".bias") == 0;
}

static void fill(const dummy *d, const ferry_param_meta *meta, size_t count)
{
    uint64_t key = mix(ferry__xxh3(meta->name, strlen(meta->name)) ^
                       mix(d->seed + 0x9E3779B97F4A7C15u));
    ferry__role role = FERRY__ROLE_NONE;
    int64_t layer;
    bool is_norm;
    size_t i;

    ferry__role_find(&d->config, meta->name, &role, &layer);
    is_norm = ferry__role_is_norm(role);
    if (is_norm || is_bias(meta->name)) {
        for (i = 0; i < count; i++)
            d->values[i] = is_norm ? 1.0f : 0.0f;
        return;
    }
    for (i = 0; i < count; i++)
        d->values[i] =
            near_normal(mix(key + (uint64_t)i * 0x9E3779B97F4A7C15u));
}

static ferry_status dummy_metadata(void *self,
                                   const ferry_param_meta **out_params,
                                   size_t *out_count)
{
    const dummy *d = self;

    *out_params = d->params;
    *out_count = d->count;
    return FERRY_OK;
}

static ferry_status dummy_begin(void *self)
{
    ((dummy *)self)->next = 0;
    return FERRY_OK;
}

static ferry_status reserve(dummy *d, size_t count)
{
    if (count <= d->capacity)
        return FERRY_OK;
    ferry__free(d->values);
    d->capacity = 0;
    d->values = ferry__alloc_array(count, sizeof(float));
    if (!d->values)
        return FERRY_ENOMEM;
    d->capacity = count;
    return FERRY_OK;
}

static ferry_status dummy_next(void *self, ferry_item *out_item)
{
    dummy *d = self;
    const ferry_param_meta *meta;
    ferry_item item = {0};
    size_t count;

    if (d->next == d->count)
        return FERRY_DONE;
    meta = &d->params[d->next];
    count =
        (size_t)meta->shape[0] * (size_t)(meta->ndim > 1 ? meta->shape[1] : 1);
    FERRY_TRY(reserve(d, count));
    fill(d, meta, count);
    item.name = meta->name;
    FERRY_TRY(ferry_tensor_init(&item.tensor, d->values, FERRY_DTYPE_F32,
                                meta->ndim, meta->shape));
    d->next++;
    *out_item = item;
    return FERRY_OK;
}

static void dummy_end(void *self)
{
    dummy *d = self;

    ferry__free(d->values);
    d->values = NULL;
    d->capacity = 0;
}

static void dummy_close(void *self)
{
    dummy *d = self;

    dummy_end(d);
    ferry__checkpoint_free(&d->params);
    ferry__free(d);
}

static const ferry_source_ops DUMMY_OPS = {
    .size = sizeof(ferry_source_ops),
    .kind = "dummy",
    .metadata = dummy_metadata,
    .begin = dummy_begin,
    .next = dummy_next,
    .end = dummy_end,
    .close = dummy_close,
};

ferry_status ferry__model_dummy_source(const ferry__model_config *config,
                                       uint64_t seed, ferry_source *out)
{
    dummy *d = ferry__alloc(sizeof(*d));
    ferry_status st;

    if (!d)
        return FERRY_ENOMEM;
    d->config = *config;
    d->seed = seed;
    st = ferry__checkpoint_list(config, FERRY_DTYPE_F32, &d->params, &d->count);
    if (st < 0) {
        dummy_close(d);
        return st;
    }
    *out = (ferry_source){&DUMMY_OPS, d};
    return FERRY_OK;
}
