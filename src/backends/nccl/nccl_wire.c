/* SPDX-License-Identifier: Apache-2.0 */
/* Messages of the group as bytes: the fields in order, little-endian, no
 * padding but in texts, which are filled up with zeros.
 * Invariant: every message has one size, so that ranks of different opinion
 * can still tell each other. */
#include "backends/nccl/nccl_wire.h"

#include "base/alloc.h"
#include "base/config.h"

#include <stdio.h>
#include <string.h>

static ferry_status finish(const ferry__reader *r, const char *what)
{
    if (r->bad || r->left > 0)
        return ferry_fail(FERRY_EPEER, "nccl %s: %s", what,
                          r->bad ? "too short" : "too long");
    return FERRY_OK;
}

/* ---- hello ---- */

void ferry__nccl_put_hello(ferry__str *s, const ferry__nccl_hello *v)
{
    ferry__put_u32(s, v->magic);
    ferry__put_u32(s, v->version);
    ferry__put_u64(s, v->generation);
    ferry__put_u64(s, v->buffer_bytes);
    ferry__put_u32(s, v->n_buffers);
    ferry__put_u32(s, v->packed);
    ferry__put_u32(s, v->digest);
    ferry__put_u32(s, v->world_size);
    ferry__put_text(s, v->provider, FERRY__NCCL_PROVIDER_CHARS);
    ferry__put_text(s, v->settings, FERRY__NCCL_SETTINGS_CHARS);
}

ferry_status ferry__nccl_get_hello(const void *bytes, size_t size_bytes,
                                   ferry__nccl_hello *out)
{
    ferry__reader r = {bytes, size_bytes, false};

    memset(out, 0, sizeof(*out));
    out->magic = ferry__get_u32(&r);
    out->version = ferry__get_u32(&r);
    /* Another version may have another form behind these two. */
    if (!r.bad && (out->magic != FERRY__NCCL_MAGIC ||
                   out->version != FERRY__NCCL_VERSION))
        return FERRY_OK;
    out->generation = ferry__get_u64(&r);
    out->buffer_bytes = ferry__get_u64(&r);
    out->n_buffers = ferry__get_u32(&r);
    out->packed = ferry__get_u32(&r);
    out->digest = ferry__get_u32(&r);
    out->world_size = ferry__get_u32(&r);
    ferry__get_bytes(&r, out->provider, FERRY__NCCL_PROVIDER_CHARS);
    ferry__get_bytes(&r, out->settings, FERRY__NCCL_SETTINGS_CHARS);
    return finish(&r, "hello");
}

static ferry_status differ(const char *field, uint64_t trainer, int32_t rank,
                           uint64_t worker)
{
    return ferry_fail(
        FERRY_EMISMATCH, "%s: the trainer has %llu, the worker of rank %d %llu",
        field, (unsigned long long)trainer, rank, (unsigned long long)worker);
}

ferry_status ferry__nccl_check_hello(const ferry__nccl_hello *t,
                                     const ferry__nccl_hello *w, int32_t rank)
{
    if (t->magic != FERRY__NCCL_MAGIC || w->magic != FERRY__NCCL_MAGIC)
        return ferry_fail(FERRY_EPEER,
                          "nccl: rank %d does not speak this protocol",
                          w->magic != FERRY__NCCL_MAGIC ? rank : 0);
    if (t->version != w->version)
        return ferry_fail(FERRY_EVERSION,
                          "nccl protocol version: trainer %u, worker of rank "
                          "%d %u",
                          t->version, rank, w->version);
    if (t->generation != w->generation)
        return differ("generation", t->generation, rank, w->generation);
    if (t->world_size != w->world_size)
        return differ("world_size", t->world_size, rank, w->world_size);
    if (t->packed != w->packed)
        return differ("packed", t->packed, rank, w->packed);
    if (t->buffer_bytes != w->buffer_bytes)
        return differ("packed_buffer_size_bytes", t->buffer_bytes, rank,
                      w->buffer_bytes);
    if (t->n_buffers != w->n_buffers)
        return differ("packed_num_buffers", t->n_buffers, rank, w->n_buffers);
    if (t->digest != w->digest)
        return differ("digest", t->digest, rank, w->digest);
    if (strcmp(t->provider, w->provider) != 0)
        return ferry_fail(FERRY_EMISMATCH,
                          "provider: the trainer has %s, the worker of rank "
                          "%d %s",
                          t->provider, rank, w->provider);
    if (strcmp(t->settings, w->settings) != 0)
        return ferry_fail(FERRY_EMISMATCH,
                          "settings that change the wire: the trainer has "
                          "\"%s\", the worker of rank %d \"%s\"",
                          t->settings, rank, w->settings);
    return FERRY_OK;
}

static ferry_status compare(const ferry__comm *c, const ferry__nccl_hello *mine,
                            const char *all)
{
    int32_t last = c->rank == 0 ? c->world_size - 1 : 0;

    for (int32_t r = c->rank == 0 ? 1 : 0; r <= last; r++) {
        ferry__nccl_hello other;

        FERRY_TRY(
            ferry__nccl_get_hello(all + (size_t)r * FERRY__NCCL_HELLO_BYTES,
                                  FERRY__NCCL_HELLO_BYTES, &other));
        if (c->rank == 0)
            FERRY_TRY(ferry__nccl_check_hello(mine, &other, r));
        else
            FERRY_TRY(ferry__nccl_check_hello(&other, mine, c->rank));
    }
    return FERRY_OK;
}

ferry_status ferry__nccl_meet(ferry__comm *c, const ferry__nccl_hello *mine,
                              int64_t timeout_ms)
{
    char *all =
        ferry__alloc_array((size_t)c->world_size, FERRY__NCCL_HELLO_BYTES);
    ferry_status status = FERRY_ENOMEM;
    ferry__str s = {0};

    ferry__nccl_put_hello(&s, mine);
    if (all && !s.failed)
        status = c->ops->all_gather(c, s.data, s.length, all, timeout_ms);
    if (status >= 0)
        status = compare(c, mine, all);
    ferry__str_free(&s);
    ferry__free(all);
    return status;
}

void ferry__nccl_settings(const ferry__provider *provider,
                          char out[FERRY__NCCL_SETTINGS_CHARS + 1])
{
    static const char *const names[] = {"NCCL_CUMEM_ENABLE",
                                        "NCCL_CUMEM_HOST_ENABLE"};
    size_t n = 0;

    memset(out, 0, FERRY__NCCL_SETTINGS_CHARS + 1);
    if (strcmp(provider->name, "nccl") != 0)
        return;
    if (provider->version && provider->version())
        n = (size_t)snprintf(out, FERRY__NCCL_SETTINGS_CHARS, "nccl=%.40s",
                             provider->version());
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        const char *value = ferry__config_foreign(names[i]);

        if (value)
            n += (size_t)snprintf(out + n, FERRY__NCCL_SETTINGS_CHARS - n,
                                  "%s%s=%.24s", n ? " " : "", names[i], value);
    }
}

/* ---- header ---- */

void ferry__nccl_put_header(ferry__str *s, const ferry__nccl_header *v)
{
    ferry__put_u32(s, v->magic);
    ferry__put_u32(s, v->digest);
    ferry__put_u64(s, v->round);
    ferry__put_u64(s, v->manifest_digest);
    ferry__put_u64(s, v->cuts_digest);
    ferry__put_u64(s, v->n_buffers);
    ferry__put_u64(s, v->bytes);
    ferry__put_u64(s, v->reserved);
}

ferry_status ferry__nccl_get_header(const void *bytes, size_t size_bytes,
                                    ferry__nccl_header *out)
{
    ferry__reader r = {bytes, size_bytes, false};

    out->magic = ferry__get_u32(&r);
    out->digest = ferry__get_u32(&r);
    out->round = ferry__get_u64(&r);
    out->manifest_digest = ferry__get_u64(&r);
    out->cuts_digest = ferry__get_u64(&r);
    out->n_buffers = ferry__get_u64(&r);
    out->bytes = ferry__get_u64(&r);
    out->reserved = ferry__get_u64(&r);
    FERRY_TRY(finish(&r, "header"));
    if (out->magic != FERRY__NCCL_MAGIC || out->digest > 1)
        return ferry_fail(FERRY_EPEER,
                          "nccl header: rank 0 does not speak this protocol");
    return FERRY_OK;
}

/* ---- heads ---- */

void ferry__nccl_put_head(ferry__str *s, const ferry__nccl_head *v)
{
    ferry__put_u64(s, v->digest);
    ferry__put_u64(s, v->list_bytes);
}

ferry_status ferry__nccl_get_head(const void *bytes, size_t size_bytes,
                                  ferry__nccl_head *out)
{
    ferry__reader r = {bytes, size_bytes, false};

    out->digest = ferry__get_u64(&r);
    out->list_bytes = ferry__get_u64(&r);
    FERRY_TRY(finish(&r, "head"));
    if (out->list_bytes > FERRY__NCCL_LIST_MAX)
        return ferry_fail(FERRY_EPEER,
                          "nccl head: a list of %llu bytes, at most %zu are "
                          "taken",
                          (unsigned long long)out->list_bytes,
                          FERRY__NCCL_LIST_MAX);
    return FERRY_OK;
}

bool ferry__nccl_list_fits(size_t n, size_t kept_bytes, size_t size_bytes)
{
    return n < FERRY__NCCL_LISTS_MAX && size_bytes <= FERRY__NCCL_LIST_MAX &&
           kept_bytes <= FERRY__NCCL_LIST_MAX - size_bytes;
}
