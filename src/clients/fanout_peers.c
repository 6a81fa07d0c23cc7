/* SPDX-License-Identifier: Apache-2.0 */
/* A fan-out's members told apart; see fanout_peers.h.
 * Invariant: the workers of one member follow those of the member before it,
 * so that ranks are unique and without gaps whatever each member holds. */
#include "clients/fanout_peers.h"

#include "base/alloc.h"
#include "base/json.h"
#include "base/str.h"
#include "clients/client_ops.h"
#include "clients/fanout_ranks.h"
#include "core/peers.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NO_FERRY_LINE 512

/* ---- status ---- */

typedef struct member_status {
    char *text; /* NULL: it is no Ferry */
    char line[NO_FERRY_LINE];
} member_status;

/* That a member is no Ferry is an answer, not a failure. */
static ferry_status one_status(const ferry_client *client, void *arg, size_t i)
{
    member_status *m = (member_status *)arg + i;
    ferry_status status;

    if (!FERRY__CLIENT_HAS(client->ops, status)) {
        snprintf(m->line, sizeof(m->line), "client %s has no status",
                 client->ops->kind ? client->ops->kind : "?");
        return FERRY_OK;
    }
    status = ferry__peers_status(client, &m->text);
    if (status != FERRY_EROUTE)
        return status;
    snprintf(m->line, sizeof(m->line), "%s", ferry_last_error());
    return FERRY_OK;
}

static void append_name(ferry__str *list, const char *name, size_t i)
{
    char number[48];

    snprintf(number, sizeof(number), "replica %zu", i);
    ferry__str_append(list, list->length > 0 ? "," : "");
    ferry__str_json(list, name ? name : number);
}

static void append_names(ferry__str *list, const json_t *names, size_t i)
{
    for (size_t k = 0; k < json_array_size(names); k++)
        append_name(list, json_string_value(json_array_get(names, k)), i);
}

static const char *name_of(const ferry_client *client, size_t k)
{
    const char *name = ferry__client_peer(client, k);

    return name ? name : "a server of unknown name";
}

/* Two names of one server would be two trainers to it, or two groups of
 * ranks. `seen` has the name of each instance; a member that is a fan-out has
 * several, in the order of its peers. */
static ferry_status check_apart(json_t *seen, const json_t *status,
                                const ferry_client *client, size_t *k)
{
    const char *id = json_string_value(json_object_get(status, "instance"));
    const json_t *all = json_object_get(status, "replicas");
    const json_t *before = id ? json_object_get(seen, id) : NULL;
    const char *name;

    if (!id) {
        *k += json_is_null(status); /* one that is no Ferry has a name too */
        for (size_t n = 0; n < json_array_size(all); n++)
            FERRY_TRY(check_apart(seen, json_array_get(all, n), client, k));
        return FERRY_OK;
    }
    name = name_of(client, (*k)++);
    if (before)
        return ferry_fail(FERRY_EINVAL,
                          "%s and %s are the same server (instance %s)",
                          json_string_value(before), name, id);
    if (json_object_set_new(seen, id, json_string(name)) != 0)
        return ferry_fail(FERRY_ENOMEM, "status: out of memory");
    return FERRY_OK;
}

/* A member may be a fan-out itself, with both kinds behind it. */
static ferry_status sort_member(const ferry_client *client,
                                const member_status *m, size_t i, json_t *seen,
                                ferry__str *ferry, ferry__str *other)
{
    size_t k = 0;
    ferry_status status;
    json_t *value = NULL;

    if (!m->text) {
        append_name(other, ferry__client_peer(client, 0), i);
        return FERRY_OK;
    }
    FERRY_TRY(ferry__json_parse("status", m->text, strlen(m->text), &value));
    if (json_is_array(json_object_get(value, "not_ferry"))) {
        append_names(ferry, json_object_get(value, "ferry"), i);
        append_names(other, json_object_get(value, "not_ferry"), i);
    } else {
        append_name(ferry, ferry__client_peer(client, 0), i);
    }
    status = check_apart(seen, value, client, &k);
    json_decref(value);
    return status;
}

static ferry_status write_status(const ferry__fanout *f,
                                 const member_status *members, ferry__str *all)
{
    ferry__str ferry = {0}, other = {0};
    ferry_status status = FERRY_OK;
    json_t *seen = json_object();

    ferry__str_append(all, "{\"replicas\":[");
    for (size_t i = 0; status == FERRY_OK && i < f->count; i++) {
        ferry__str_append(all, i ? "," : "");
        ferry__str_append(all, members[i].text ? members[i].text : "null");
        status =
            sort_member(&f->clients[i], &members[i], i, seen, &ferry, &other);
    }
    ferry__str_append(all, "]");
    if (status == FERRY_OK && ferry.length == 0)
        status = ferry_fail(FERRY_EROUTE, "replica 0: %s", members[0].line);
    if (other.length > 0)
        ferry__str_printf(all, ",\"ferry\":[%s],\"not_ferry\":[%s]",
                          ferry.data ? ferry.data : "", other.data);
    ferry__str_append(all, "}");
    if (status == FERRY_OK && (all->failed || ferry.failed || other.failed))
        status = ferry_fail(FERRY_ENOMEM, "status: out of memory");
    json_decref(seen);
    ferry__str_free(&ferry);
    ferry__str_free(&other);
    return status;
}

ferry_status ferry__fanout_status(void *self, char *buffer, size_t size_bytes)
{
    ferry__fanout *f = self;
    member_status *members = ferry__alloc_array(f->count, sizeof(*members));
    ferry__str all = {0};
    ferry_status status;

    if (!members)
        return FERRY_ENOMEM;
    ferry__fanout_hold(f);
    status = ferry__fanout_call(f, one_status, members, false, NULL);
    if (status == FERRY_OK)
        status = write_status(f, members, &all);
    if (status == FERRY_OK && size_bytes > 0)
        snprintf(buffer, size_bytes, "%s", all.data);
    for (size_t i = 0; i < f->count; i++)
        ferry__free(members[i].text);
    ferry__fanout_release(f);
    ferry__str_free(&all);
    ferry__free(members);
    return status;
}

/* ---- workers ---- */

static ferry_status one_world_size(const ferry_client *client, void *arg,
                                   size_t i)
{
    int32_t *workers = (int32_t *)arg + i;

    FERRY_TRY(client->ops->world_size(client->self, workers));
    if (*workers < 1)
        return ferry_fail(FERRY_EPEER, "world size is %d, must be at least 1",
                          (int)*workers);
    return FERRY_OK;
}

/* The workers of each member, one entry a member. */
static ferry_status ask_workers(ferry__fanout *f, int32_t **out_workers)
{
    int32_t *workers = ferry__alloc_array(f->count, sizeof(*workers));
    ferry_status status;

    if (!workers)
        return FERRY_ENOMEM;
    status = ferry__fanout_call(f, one_world_size, workers, false, NULL);
    if (status < 0) {
        ferry__free(workers);
        return status;
    }
    *out_workers = workers;
    return FERRY_OK;
}

ferry_status ferry__fanout_world_size(void *self, int32_t *out_workers)
{
    ferry__fanout *f = self;
    int32_t *workers;
    int64_t sum = 0;
    ferry_status status;

    ferry__fanout_hold(f);
    status = ask_workers(f, &workers);
    for (size_t i = 0; status == FERRY_OK && i < f->count; i++)
        sum += workers[i];
    ferry__fanout_release(f);
    FERRY_TRY(status);
    ferry__free(workers);
    if (sum > INT32_MAX)
        return ferry_fail(FERRY_EPEER, "world size of all replicas is %lld",
                          (long long)sum);
    *out_workers = (int32_t)sum;
    return FERRY_OK;
}

/* ---- init ---- */

static ferry_status one_init(const ferry_client *client, void *arg, size_t i)
{
    char **texts = arg;

    return client->ops->init_weight_transfer_engine(client->self, texts[i]);
}

static ferry_status one_init_same(const ferry_client *client, void *arg,
                                  size_t i)
{
    (void)i;
    return client->ops->init_weight_transfer_engine(client->self, arg);
}

/* The text for each member: the same dict, the rank offset raised. From then
 * on lines that name a rank are understood. */
static ferry_status write_texts(ferry__fanout *f, json_t *info,
                                const int32_t *workers, char **texts)
{
    int64_t offset = json_integer_value(json_object_get(info, "rank_offset"));

    for (size_t i = 0; i < f->count; i++) {
        if (offset > INT32_MAX)
            return ferry_fail(FERRY_EPEER,
                              "replica %zu: rank_offset would be %lld", i,
                              (long long)offset);
        if (json_object_set_new(info, "rank_offset", json_integer(offset)) != 0)
            return ferry_fail(FERRY_ENOMEM, "init info: out of memory");
        texts[i] = json_dumps(info, JSON_COMPACT);
        if (!texts[i])
            return ferry_fail(FERRY_ENOMEM, "init info: out of memory");
        ferry__fanout_ranks_set(f, i, (int32_t)offset, workers[i]);
        offset += workers[i];
    }
    return FERRY_OK;
}

static ferry_status init_each(ferry__fanout *f, json_t *info)
{
    int32_t *workers = NULL;
    char **texts = ferry__alloc_array(f->count, sizeof(*texts));
    ferry_status status;

    if (!texts)
        return FERRY_ENOMEM;
    status = ask_workers(f, &workers);
    if (status == FERRY_OK)
        status = write_texts(f, info, workers, texts);
    if (status == FERRY_OK)
        status = ferry__fanout_call(f, one_init, texts, true, NULL);
    for (size_t i = 0; i < f->count; i++)
        free(texts[i]); /* jansson's own memory */
    ferry__free(texts);
    ferry__free(workers);
    return status;
}

/* What is no dict with such a field goes to all as it is: it is theirs to
 * refuse. */
ferry_status ferry__fanout_init(void *self, const char *init_info)
{
    ferry__fanout *f = self;
    json_t *info = NULL;
    ferry_status status;

    ferry__fanout_hold(f);
    if (f->ops.world_size && init_info &&
        ferry__json_parse("init info", init_info, strlen(init_info), &info) < 0)
        info = NULL;
    if (json_is_integer(json_object_get(info, "rank_offset"))) {
        status = init_each(f, info);
    } else {
        for (size_t i = 0; i < f->count; i++)
            ferry__fanout_ranks_set(f, i, 0, 0);
        status = ferry__fanout_call(f, one_init_same,
                                    (void *)(uintptr_t)init_info, true, NULL);
    }
    json_decref(info);
    ferry__fanout_release(f);
    return status;
}
