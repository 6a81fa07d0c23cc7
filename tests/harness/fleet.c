/* SPDX-License-Identifier: Apache-2.0 */
/* Trainers and workers of one process, joined by local clients. */
#include "harness/fleet.h"

#include "base/config.h"

#include <assert.h>
#include <dirent.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *module(const char *name, char *path, size_t size)
{
    const char *folder = getenv("FERRY_TEST_MODULES");

    snprintf(path, size, "%s/%s.so", folder != NULL ? folder : "tests/modules",
             name);
    return path;
}

void fleet_register(void)
{
    static bool done;
    char path[4096];
    ferry_status st;

    if (done)
        return;
    done = true;
    st = ferry_trainer_register_lazy(
        "memory", module("memory_trainer", path, sizeof(path)), NULL);
    assert(st == FERRY_OK);
    st = ferry_worker_register_lazy(
        "memory", module("memory_worker", path, sizeof(path)), NULL);
    assert(st == FERRY_OK);
    (void)st;
}

void fleet_host_nccl(void)
{
    const char *folder = getenv("FERRY_BUILD_DIR");
    char path[4096];
    ferry_status st;

    snprintf(path, sizeof(path), "%s/lib/libferry_nccl_host.so",
             folder != NULL ? folder : ".");
    st = ferry__config_set("nccl_library", path);
    assert(st == FERRY_OK);
    (void)st;
}

const char *fleet_unavailable(const char *backend)
{
    const struct ferry_trainer_engine_ops *t;
    const struct ferry_worker_engine_ops *w;

    fleet_register();
    if (ferry_trainer_find(backend, &t) < 0 ||
        ferry_worker_find(backend, &w) < 0)
        return ferry_last_error();
    return NULL;
}

static void open_worker(fleet *f, size_t rank)
{
    const char *backend = f->options.worker_backend != NULL
                              ? f->options.worker_backend
                              : f->options.backend;
    ferry_worker_options wo = FERRY_WORKER_OPTIONS_INIT(backend);
    toy_options to = f->options.toy;
    ferry_status st;

    to.tp_rank = (int32_t)rank;
    f->toys[rank] = toy_create(&to);
    wo.commit = f->options.commit;
    wo.require_full = f->options.require_full;
    wo.has_weights = f->options.has_weights;
    wo.held_limit_bytes = f->options.held_limit_bytes;
    wo.defer_threads = f->options.defer_threads;
    wo.tp_rank = (int32_t)rank;
    wo.tp_size = (int32_t)f->n;
    st = ferry_worker_create(&wo, toy_model(f->toys[rank]), NULL,
                             &f->workers[rank]);
    if (st < 0)
        fprintf(stderr, "worker: %s\n", ferry_last_error());
    assert(st == FERRY_OK);
}

void fleet_open(fleet *f, const fleet_options *options)
{
    ferry_client clients[FLEET_MAX] = {{NULL, NULL}};
    ferry_status st = FERRY_OK;

    fleet_register();
    memset(f, 0, sizeof(*f));
    f->options = *options;
    f->n = options->toy.tp_size > 0 ? (size_t)options->toy.tp_size : 1;
    assert(f->n <= FLEET_MAX);
    f->checkpoint = toy_checkpoint_create(&options->toy);
    for (size_t i = 0; i < f->n; i++) {
        open_worker(f, i);
        st = ferry_client_local(f->workers[i], &clients[i]);
        assert(st == FERRY_OK);
    }
    if (f->n == 1)
        f->client = clients[0];
    else
        st = ferry_client_fanout(clients, f->n, &f->client);
    assert(st == FERRY_OK);
    (void)st;
}

/* A broadcast must know how many ranks there are, and clients of workers in
 * this process know of one rank each. */
static void world_size(const fleet *f, char *out, size_t size)
{
    const char *backend = f->options.backend;

    out[0] = '\0';
    if (strcmp(backend, "nccl") == 0 || strcmp(backend, "fault:nccl") == 0)
        snprintf(out, size, ",\"world_size\":%zu", f->n + 1);
}

ferry_status fleet_connect(fleet *f, const ferry_source *source)
{
    char info[512], world[32];

    if (source != NULL)
        f->source = *source;
    else
        f->source =
            toy_checkpoint_source(f->checkpoint, 0, f->checkpoint->count);
    world_size(f, world, sizeof(world));
    snprintf(info, sizeof(info), "{\"rank\":0%s%s%s}", world,
             f->options.init != NULL ? "," : "",
             f->options.init != NULL ? f->options.init : "");
    return ferry_trainer_init_dict(f->options.backend, info, &f->client,
                                   &f->source, &f->trainer);
}

ferry_status fleet_send(fleet *f, uint32_t seed, const char *version)
{
    ferry_send_options so = FERRY_SEND_OPTIONS_INIT;

    toy_checkpoint_fill(f->checkpoint, seed);
    so.weight_version = version;
    return ferry_trainer_send_weights(f->trainer, &so);
}

const char *fleet_differs(fleet *f, uint32_t seed)
{
    const char *why = NULL;

    for (size_t i = 0; i < f->n && why == NULL; i++)
        why = toy_differs(f->toys[i], seed);
    return why;
}

void fleet_close(fleet *f)
{
    ferry_trainer_shutdown(&f->trainer);
    ferry_client_close(&f->client);
    for (size_t i = 0; i < f->n; i++) {
        ferry_worker_destroy(&f->workers[i]);
        toy_free(f->toys[i]);
    }
    ferry_source_close(&f->source);
    toy_checkpoint_free(f->checkpoint);
}

const char *fleet_status(ferry_worker *w, const char *key)
{
    static char text[8192];
    char buffer[8192];
    json_t *status, *value;
    char *dumped;

    assert(ferry_worker_status(w, buffer, sizeof(buffer)) < sizeof(buffer));
    status = json_loads(buffer, 0, NULL);
    assert(status != NULL);
    value = json_object_get(status, key);
    assert(value != NULL);
    if (json_is_string(value)) {
        snprintf(text, sizeof(text), "%s", json_string_value(value));
    } else {
        dumped = json_dumps(value, JSON_COMPACT | JSON_ENCODE_ANY);
        snprintf(text, sizeof(text), "%s", dumped);
        free(dumped);
    }
    json_decref(status);
    return text;
}

int fleet_open_fds(void)
{
    DIR *folder = opendir("/proc/self/fd");
    int n = 0;

    assert(folder != NULL);
    while (readdir(folder) != NULL)
        n++;
    closedir(folder);
    return n;
}
