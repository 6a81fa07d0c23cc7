/* SPDX-License-Identifier: Apache-2.0 */
/* GET /ferry/weights: the stored weights of a serving replica, for a server
 * that joins (J4). Without `param` it answers what there is; with it, bytes.
 * Invariant: bytes are read while the replica's gate keeps commits out, and
 * only at the content number that the caller was told before. */
#include "base/alloc.h"
#include "serve/http.h"
#include "serve/rank_share.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A replica that may be read until let go; NULL when none serves now. */
static ferry__replica *hold(ferry__server *s, uint64_t *out_content,
                            char *reason, size_t size)
{
    ferry__replica *found = NULL;

    snprintf(reason, size, "no replica");
    for (int32_t i = 0; found == NULL && i < s->options->dp_size; i++) {
        ferry__replica *r = &s->replicas[i];

        pthread_mutex_lock(&r->lock);
        if (r->up && r->serving && r->gates == 0 && !r->stop) {
            r->readers++;
            found = r;
        } else {
            snprintf(reason, size, "%s",
                     r->gates > 0
                         ? "a weight update is writing, or it is paused"
                         : r->reason);
        }
        pthread_mutex_unlock(&r->lock);
    }
    if (found != NULL) {
        pthread_mutex_lock(&s->lock);
        *out_content = s->content;
        pthread_mutex_unlock(&s->lock);
    }
    return found;
}

static void let_go(ferry__replica *r)
{
    pthread_mutex_lock(&r->lock);
    r->readers--;
    pthread_cond_broadcast(&r->cond);
    pthread_mutex_unlock(&r->lock);
}

/* An unsigned number of the query; false when a reply was made. */
static bool number(ferry__exchange *x, const char *name, uint64_t *out)
{
    const char *text = ferry__query(x, name);
    char *end = NULL;
    char location[64];
    unsigned long long value = 0;

    errno = 0;
    if (text != NULL && text[0] >= '0' && text[0] <= '9')
        value = strtoull(text, &end, 10);
    if (end == NULL || *end != '\0' || errno != 0) {
        snprintf(location, sizeof location, "query.%s", name);
        ferry__reply_invalid(x, location,
                             text == NULL ? "missing" : "int_parsing",
                             text == NULL ? "Field required"
                                          : "Input should be a valid integer");
        return false;
    }
    *out = value;
    return true;
}

static json_t *layouts(ferry__replica *r)
{
    json_t *ranks = json_array();

    for (int32_t i = 0; i < r->server->options->tp_size; i++) {
        void *body = NULL;
        size_t size = 0;
        json_t *list = NULL;

        if (ferry__replica_ask(r, i, FERRY__RANK_LAYOUT, NULL, 0, &body,
                               &size) == FERRY_OK)
            list = json_loadb(body, size, 0, NULL);
        ferry__free(body);
        if (list == NULL) {
            json_decref(ranks);
            return NULL;
        }
        json_array_append_new(ranks, list);
    }
    return ranks;
}

static void reply_manifest(ferry__exchange *x, ferry__replica *r,
                           uint64_t content)
{
    const ferry__serve_options *o = x->server->options;
    char *version = ferry__server_version(x->server);
    json_t *ranks = layouts(r);

    if (ranks == NULL)
        ferry__reply_error(x, 500, NULL, "%s", ferry_last_error());
    else
        ferry__reply_json(
            x,
            json_pack("{s:I,s:s?,s:s,s:s,s:i,s:o}", "content",
                      (json_int_t)content, "weight_version", version,
                      "architecture", ferry__arch_name(x->server->config->arch),
                      "kernel_format", ferry__kernel_name(o->kernel),
                      "tensor_parallel_size", (int)o->tp_size, "ranks", ranks));
    ferry__free(version);
}

static void reply_bytes(ferry__exchange *x, ferry__replica *r, uint64_t rank,
                        const ferry__share_span *span)
{
    void *bytes = NULL;
    size_t size = 0;
    ferry_status st = ferry__replica_ask(r, (int32_t)rank, FERRY__RANK_READ,
                                         span, sizeof *span, &bytes, &size);

    if (st < 0) {
        ferry__reply_status(x, st);
        return;
    }
    ferry__str_append_n(&x->reply, bytes, size);
    ferry__free(bytes);
    x->content_type = "application/octet-stream";
}

static void handle_weights(ferry__exchange *x)
{
    bool manifest = ferry__query(x, "param") == NULL;
    ferry__share_span span = {0};
    uint64_t at = 0, rank = 0, content = 0;
    ferry__replica *r;
    char reason[512];

    if (!manifest && !(number(x, "at", &at) && number(x, "rank", &rank) &&
                       number(x, "param", &span.param) &&
                       number(x, "offset", &span.offset) &&
                       number(x, "size", &span.size_bytes)))
        return;
    if (rank >= (uint64_t)x->server->options->tp_size) {
        ferry__reply_error(x, 400, "query.rank", "rank %llu of %d",
                           (unsigned long long)rank,
                           (int)x->server->options->tp_size);
        return;
    }
    r = hold(x->server, &content, reason, sizeof reason);
    if (r == NULL) {
        ferry__reply_error(x, 503, NULL, "no weights to give: %s", reason);
        return;
    }
    if (manifest)
        reply_manifest(x, r, content);
    else if (at != content)
        ferry__reply_error(x, 409, "query.at",
                           "the weights changed: content %llu, asked for %llu",
                           (unsigned long long)content, (unsigned long long)at);
    else
        reply_bytes(x, r, rank, &span);
    let_go(r);
}

const ferry__route ferry__routes_share[] = {
    {"GET", "/ferry/weights", FERRY__ROUTE_WEIGHT, handle_weights},
    {NULL, NULL, 0, NULL}};
