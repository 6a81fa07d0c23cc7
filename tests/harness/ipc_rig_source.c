/* SPDX-License-Identifier: Apache-2.0 */
/* The rig's source: private, shared, strided, streaming or on devices. */
#include "harness/ipc_rig.h"
#include "harness/device.h"
#include "harness/ipc_rig_private.h"

#include <assert.h>
#include <dirent.h>
#include <stdlib.h>
#include <string.h>

struct rig_source {
    const rig_param *params;
    size_t count;
    unsigned flags;
    ferry_param_meta *metas;
    char **bytes; /* per parameter; NULL when streaming */
    char *arena, *scratch;
    uint64_t seed;
    size_t at, misnamed;
};

uint64_t rig_word(uint64_t seed, size_t param, uint64_t i)
{
    uint64_t x =
        seed * 0x9e3779b97f4a7c15u + (param + 1) * 0xd6e8feb86659fd93u + i;

    x ^= x >> 32;
    x *= 0xd6e8feb86659fd93u;
    x ^= x >> 32;
    x *= 0xd6e8feb86659fd93u;
    return x;
}

unsigned char rig_byte(uint64_t seed, size_t param, uint64_t i)
{
    return (unsigned char)(rig_word(seed, param, i / 8) >> (8 * (i % 8)));
}

size_t rig_bytes(const rig_param *p)
{
    size_t n = ferry_dtype_bytes(p->dtype);

    for (int32_t d = 0; d < p->ndim; d++)
        n *= (size_t)p->shape[d];
    return n;
}

static bool is_strided(const rig_source *s, const rig_param *p)
{
    return (s->flags & RIG_STRIDED) && p->ndim == 2;
}

/* Devices take turns; what streams has one. */
static int32_t ordinal_of(const rig_source *s, size_t i)
{
    return s->flags & RIG_STREAM ? 0 : (int32_t)i % device_count();
}

static char *get_memory(const rig_source *s, size_t i, size_t size)
{
    return s->flags & RIG_DEVICE ? device_alloc(ordinal_of(s, i), size)
                                 : malloc(size);
}

static void give_memory(const rig_source *s, size_t i, char *memory)
{
    if (s->flags & RIG_DEVICE)
        device_free(ordinal_of(s, i), memory);
    else
        free(memory);
}

/* Writes the parameter's elements where its memory has them. */
static void fill_one(const rig_source *s, size_t i, char *out)
{
    const rig_param *p = &s->params[i];
    size_t elem = ferry_dtype_bytes(p->dtype), n = rig_bytes(p);
    bool strided = is_strided(s, p);
    size_t whole = strided ? 0 : n / 8 * 8;

    /* Eight bytes come of one word. */
    for (size_t b = 0; b < whole; b += 8) {
        uint64_t word = rig_word(s->seed, i, b / 8);

        memcpy(out + b, &word, 8);
    }
    for (size_t b = whole; b < n; b++) {
        size_t at = b;

        if (strided) {
            size_t e = b / elem, cols = (size_t)p->shape[1];
            size_t row = e / cols, col = e % cols;

            at = (col * (size_t)p->shape[0] + row) * elem + b % elem;
        }
        out[at] = (char)rig_byte(s->seed, i, b);
    }
}

rig_source *rig_source_open(const rig_param *params, size_t count,
                            unsigned flags)
{
    rig_source *s = calloc(1, sizeof(*s));
    size_t total = 64, largest = 1, at = 0;

    s->params = params;
    s->count = count;
    s->flags = flags;
    s->misnamed = SIZE_MAX;
    s->metas = calloc(count + 1, sizeof(*s->metas));
    s->bytes = calloc(count + 1, sizeof(*s->bytes));
    for (size_t i = 0; i < count; i++) {
        size_t n = rig_bytes(&params[i]);

        s->metas[i].name = params[i].name;
        s->metas[i].dtype = params[i].dtype;
        s->metas[i].ndim = params[i].ndim;
        for (int32_t d = 0; d < params[i].ndim; d++)
            s->metas[i].shape[d] = params[i].shape[d];
        total += (n + 63) / 64 * 64;
        largest = n > largest ? n : largest;
    }
    s->scratch = flags & RIG_STREAM ? get_memory(s, 0, largest) : NULL;
    if (flags & (RIG_SHARED | RIG_MIXED)) {
        void *memory = NULL;

        if (ferry_shared_alloc(total, &memory) != FERRY_OK)
            abort();
        s->arena = memory;
    }
    for (size_t i = 0; i < count; i++) {
        size_t n = rig_bytes(&params[i]);
        bool shared =
            (flags & RIG_SHARED) || ((flags & RIG_MIXED) && i % 2 == 0);

        if (flags & RIG_STREAM)
            continue;
        s->bytes[i] = shared ? s->arena + at : get_memory(s, i, n + 1);
        at += (n + 63) / 64 * 64;
    }
    return s;
}

void rig_source_close(rig_source *s)
{
    for (size_t i = 0; i < s->count; i++) {
        bool shared =
            (s->flags & RIG_SHARED) || ((s->flags & RIG_MIXED) && i % 2 == 0);

        if (!shared && s->bytes[i])
            give_memory(s, i, s->bytes[i]);
    }
    ferry_shared_free(s->arena);
    if (s->scratch)
        give_memory(s, 0, s->scratch);
    free(s->metas);
    free(s->bytes);
    free(s);
}

/* The same where the host cannot write. */
static void fill_memory(const rig_source *s, size_t i, char *memory)
{
    size_t n = rig_bytes(&s->params[i]);
    char *bytes;

    if (!(s->flags & RIG_DEVICE)) {
        fill_one(s, i, memory);
        return;
    }
    bytes = malloc(n + 1);
    fill_one(s, i, bytes);
    device_write(ordinal_of(s, i), memory, bytes, n);
    free(bytes);
}

void rig_source_fill(rig_source *s, uint64_t seed)
{
    s->seed = seed;
    for (size_t i = 0; i < s->count; i++) {
        if (s->bytes[i])
            fill_memory(s, i, s->bytes[i]);
    }
}

const char *rig_source_arena(const rig_source *s)
{
    return s->arena;
}

const char *rig_source_bytes(const rig_source *s, size_t i)
{
    return s->bytes[i];
}

void rig_source_misname(rig_source *s, size_t at)
{
    s->misnamed = at;
}

static ferry_status source_metadata(void *self,
                                    const ferry_param_meta **out_params,
                                    size_t *out_count)
{
    rig_source *s = self;

    *out_params = s->metas;
    *out_count = s->count;
    return FERRY_OK;
}

static ferry_status source_begin(void *self)
{
    ((rig_source *)self)->at = 0;
    return FERRY_OK;
}

static ferry_status source_next(void *self, ferry_item *out)
{
    rig_source *s = self;
    size_t i = s->at;
    const rig_param *p = &s->params[i];
    char *bytes;

    if (i == s->count)
        return FERRY_DONE;
    s->at++;
    memset(out, 0, sizeof(*out));
    bytes = s->bytes[i];
    if (!bytes) {
        fill_memory(s, i, s->scratch);
        bytes = s->scratch;
    }
    out->name = i == s->misnamed ? "stranger" : p->name;
    ferry_tensor_init(&out->tensor, bytes, p->dtype, p->ndim, p->shape);
    if (s->flags & RIG_DEVICE)
        out->tensor.device = 1 + ordinal_of(s, i);
    if (is_strided(s, p)) {
        out->tensor.stride[0] = 1;
        out->tensor.stride[1] = p->shape[0];
    }
    return FERRY_OK;
}

static void source_end(void *self)
{
    (void)self;
}

ferry_source rig_source_of(rig_source *s)
{
    static const ferry_source_ops stable = {.size = sizeof(ferry_source_ops),
                                            .kind = "rig",
                                            .flags = FERRY_SOURCE_STABLE,
                                            .metadata = source_metadata,
                                            .begin = source_begin,
                                            .next = source_next,
                                            .end = source_end};
    static const ferry_source_ops stream = {.size = sizeof(ferry_source_ops),
                                            .kind = "rig stream",
                                            .metadata = source_metadata,
                                            .begin = source_begin,
                                            .next = source_next,
                                            .end = source_end};

    return (ferry_source){s->flags & RIG_STREAM ? &stream : &stable, s};
}

int rig_count_entries(const char *path)
{
    DIR *dir = opendir(path);
    int n = -2;

    if (!dir)
        return -1;
    while (readdir(dir))
        n++;
    closedir(dir);
    return n;
}
