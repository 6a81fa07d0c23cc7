/* SPDX-License-Identifier: Apache-2.0 */
/* A worker driven call by call. */
#include "harness/solo.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

static int warnings;
static char last_warning[1024];

static void note(ferry_log_level level, const char *line, void *arg)
{
    (void)arg;
    if (level > FERRY_LOG_WARN)
        return;
    if (strncmp(line, "weight update failed", 20) == 0)
        return;
    warnings++;
    snprintf(last_warning, sizeof(last_warning), "%s", line);
}

int solo_warnings(void)
{
    int n = warnings;

    warnings = 0;
    return n;
}

const char *solo_last_warning(void)
{
    return last_warning;
}

void solo_open(solo *r, const ferry_worker_options *options,
               const toy_options *toy_opts)
{
    ferry_status st;

    ferry_log_set(note, NULL);
    probe_reset();
    warnings = 0;
    memset(r, 0, sizeof(*r));
    r->toy = toy_create(toy_opts);
    r->checkpoint = toy_checkpoint_create(toy_opts);
    the_probe.on_receive = solo_load_all;
    the_probe.arg = r->checkpoint;
    st = ferry_worker_create(options, toy_model(r->toy), NULL, &r->worker);
    if (st < 0)
        fprintf(stderr, "worker: %s\n", ferry_last_error());
    assert(st == FERRY_OK);
    (void)st;
}

void solo_open_kind(solo *r, const char *backend, toy_kind kind,
                    ferry_commit commit)
{
    ferry_worker_options o = FERRY_WORKER_OPTIONS_INIT(backend);
    toy_options t = {.kind = kind};
    ferry_status st;

    o.commit = commit;
    solo_open(r, &o, &t);
    st = ferry_worker_init_transfer_engine(r->worker, "{}");
    assert(st == FERRY_OK);
    (void)st;
}

void solo_close(solo *r)
{
    ferry_worker_destroy(&r->worker);
    toy_free(r->toy);
    toy_checkpoint_free(r->checkpoint);
}

ferry_status solo_load_one(const ferry_worker_host *host,
                           ferry_worker_context *ctx, toy_checkpoint *c,
                           size_t index)
{
    size_t count, at;
    const ferry_param_meta *declared = host->declared(ctx, &count);
    ferry_tensor t;

    at = toy_checkpoint_find(c, declared[index].name);
    FERRY_TRY(ferry_tensor_init(&t, c->bytes[at], c->metas[at].dtype,
                                c->metas[at].ndim, c->metas[at].shape));
    return host->load(ctx, index, &t);
}

ferry_status solo_load_all(const ferry_worker_host *host,
                           ferry_worker_context *ctx, void *checkpoint)
{
    size_t count;

    host->declared(ctx, &count);
    for (size_t i = 0; i < count; i++)
        FERRY_TRY(solo_load_one(host, ctx, checkpoint, i));
    return FERRY_OK;
}

const char *solo_update(const solo *r, size_t first, size_t count)
{
    static char text[65536];
    const ferry_param_meta *m = r->checkpoint->metas + first;
    size_t n = 0;

#define PUT(...) n += (size_t)snprintf(text + n, sizeof(text) - n, __VA_ARGS__)
    PUT("{\"names\":[");
    for (size_t i = 0; i < count; i++)
        PUT("%s\"%s\"", i > 0 ? "," : "", m[i].name);
    PUT("],\"dtype_names\":[");
    for (size_t i = 0; i < count; i++)
        PUT("%s\"%s\"", i > 0 ? "," : "", ferry_dtype_name(m[i].dtype));
    PUT("],\"shapes\":[");
    for (size_t i = 0; i < count; i++) {
        PUT("%s[", i > 0 ? "," : "");
        for (int32_t d = 0; d < m[i].ndim; d++)
            PUT("%s%lld", d > 0 ? "," : "", (long long)m[i].shape[d]);
        PUT("]");
    }
    PUT("]}");
#undef PUT
    assert(n < sizeof(text));
    return text;
}

const char *solo_update_of(const solo *r, const char *name)
{
    return solo_update(r, toy_checkpoint_find(r->checkpoint, name), 1);
}

ferry_status solo_round(solo *r, uint32_t seed, const char *version)
{
    toy_checkpoint_fill(r->checkpoint, seed);
    FERRY_TRY(ferry_worker_start_weight_update(r->worker));
    FERRY_TRY(ferry_worker_update_weights(
        r->worker, solo_update(r, 0, r->checkpoint->count)));
    return ferry_worker_finish_weight_update(r->worker, version);
}
