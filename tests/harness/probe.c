/* SPDX-License-Identifier: Apache-2.0 */
/* The bendable worker engine. Its update info has names, dtype_names and
 * shapes, so that the host declares. */
#include "harness/probe.h"

#include <ferry/registry.h>

#include <assert.h>
#include <string.h>

probe the_probe;

typedef struct probe_init {
    int64_t deadline_ms, no_progress_ms;
} probe_init;

typedef struct probe_update {
    ferry_strs names, dtype_names;
    ferry_shapes shapes;
    bool is_checkpoint_format; /* of probe_either */
} probe_update;

static const ferry_field init_fields[] = {
    {"deadline_ms", FERRY_FIELD_I64, 0, offsetof(probe_init, deadline_ms), "0",
     0, 0},
    {"no_progress_ms", FERRY_FIELD_I64, 0, offsetof(probe_init, no_progress_ms),
     "0", 0, 0},
};
static const ferry_info_type init_type = {sizeof(ferry_info_type),
                                          "ProbeInitInfo",
                                          sizeof(probe_init),
                                          init_fields,
                                          2,
                                          NULL};
static const ferry_field update_fields[] = {
    {"names", FERRY_FIELD_STRS, 0, offsetof(probe_update, names), "[]", 0, 0},
    {"dtype_names", FERRY_FIELD_STRS, FERRY_FIELD_PER_NAME,
     offsetof(probe_update, dtype_names), "[]", 0, 0},
    {"shapes", FERRY_FIELD_SHAPES, FERRY_FIELD_PER_NAME,
     offsetof(probe_update, shapes), "[]", 0, 0},
    {"is_checkpoint_format", FERRY_FIELD_BOOL, 0,
     offsetof(probe_update, is_checkpoint_format), "true", 0, 0},
};
static const ferry_info_type update_type = {sizeof(ferry_info_type),
                                            "ProbeUpdateInfo",
                                            sizeof(probe_update),
                                            update_fields,
                                            3,
                                            NULL};
static const ferry_info_type either_type = {sizeof(ferry_info_type),
                                            "EitherUpdateInfo",
                                            sizeof(probe_update),
                                            update_fields,
                                            4,
                                            NULL};

static ferry_status hook(probe_fn fn)
{
    return fn != NULL ? fn(the_probe.host, the_probe.ctx, the_probe.arg)
                      : FERRY_OK;
}

static ferry_status create(const ferry_worker_host *host,
                           ferry_worker_context *ctx, void **out_self)
{
    the_probe.host = host;
    the_probe.ctx = ctx;
    *out_self = &the_probe;
    return FERRY_OK;
}

static ferry_status init(void *self, const void *info)
{
    const probe_init *i = info;

    (void)self;
    the_probe.n_init++;
    the_probe.host->set_bounds(the_probe.ctx, i->deadline_ms,
                               i->no_progress_ms);
    return hook(the_probe.on_init);
}

static ferry_status start(void *self)
{
    (void)self;
    the_probe.n_start++;
    return hook(the_probe.on_start);
}

static ferry_status receive(void *self, const void *info)
{
    (void)self;
    (void)info;
    the_probe.n_receive++;
    return hook(the_probe.on_receive);
}

static ferry_status finish(void *self)
{
    (void)self;
    the_probe.n_finish++;
    return hook(the_probe.on_finish);
}

static void abort_round(void *self)
{
    (void)self;
    the_probe.n_abort++;
    /* Whatever an engine says here must not hide the real reason. */
    the_probe.host->fail(FERRY_EINTERNAL, "said while aborting");
}

static ferry_status drain(void *self)
{
    (void)self;
    the_probe.n_drain++;
    return hook(the_probe.on_drain);
}

static void shut_down(void *self)
{
    (void)self;
    the_probe.n_shutdown++;
}

static void destroy(void *self)
{
    (void)self;
    the_probe.n_destroy++;
}

static void fill(ferry_worker_engine_ops *ops, const char *name, uint32_t flags)
{
    ferry_status st;

    ops->size = sizeof(*ops);
    ops->abi = FERRY_ENGINE_ABI;
    ops->flags = flags;
    ops->backend = name;
    ops->init_info = &init_type;
    ops->update_info =
        strcmp(name, "probe_either") == 0 ? &either_type : &update_type;
    ops->create = create;
    ops->init_transfer_engine = init;
    ops->start_weight_update = start;
    ops->receive_weights = receive;
    ops->finish_weight_update = finish;
    ops->abort_weight_update = abort_round;
    ops->drain_pending = drain;
    ops->shutdown = shut_down;
    ops->destroy = destroy;
    st = ferry_worker_register(name, ops);
    assert(st == FERRY_OK);
    (void)st;
}

void probe_reset(void)
{
    static ferry_worker_engine_ops ops[5];
    static bool done;

    memset(&the_probe, 0, sizeof(the_probe));
    if (done)
        return;
    done = true;
    fill(&ops[0], "probe", 0);
    fill(&ops[1], "probe_deferred", FERRY_WORKER_DEFERS_PROCESSING);
    fill(&ops[2], "probe_kernel", FERRY_WORKER_KERNEL_FORMAT);
    fill(&ops[3], "probe_no_draft", FERRY_WORKER_NO_DRAFT);
    fill(&ops[4], "probe_either", 0);
}
