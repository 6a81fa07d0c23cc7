/* SPDX-License-Identifier: Apache-2.0 */
/* Feeds any body to the handler of any POST route, on a server without
 * replicas: everything up to the ranks runs. The input is the path, a newline
 * and the body. Each answer is JSON with a status that blames the caller or
 * says that nobody serves, never the server itself (H2, O-63).
 * ctest: link=worker */
#include "base/alloc.h"
#include "serve/http.h"
#include "serve/serve_options.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static ferry__serve_options options = {
    .model = "m",
    .served_name = "m",
    .backend = (char *)"ipc",
    .tp_size = 1,
    .dp_size = 0,
    .max_seqs = 1,
    .max_len = 64,
    .max_body_bytes = 1 << 20,
};
static ferry__model_config config = {.vocab_size = 320};
static ferry__server server = {.options = &options, .config = &config};

static void must(int condition)
{
    if (!condition)
        abort();
}

/* Once: what a server has before its replicas. */
static void prepare(void)
{
    static bool done;

    if (done)
        return;
    done = true;
    ferry__metrics_init(&server.metrics);
    must(pthread_mutex_init(&server.calls, NULL) == 0);
    must(pthread_mutex_init(&server.control, NULL) == 0);
    must(pthread_mutex_init(&server.lock, NULL) == 0);
    must(ferry__history_init(&server.history, 1, 1) == FERRY_OK);
    server.version = ferry__strdup("default");
    must(server.version != NULL);
}

static const ferry__route *route_of(const char *path, size_t n)
{
    const ferry__route *tables[] = {ferry__routes_generate,
                                    ferry__routes_weights};

    for (size_t t = 0; t < sizeof(tables) / sizeof(tables[0]); t++)
        for (const ferry__route *r = tables[t]; r->method != NULL; r++)
            if (strcmp(r->method, "POST") == 0 && strlen(r->path) == n &&
                memcmp(r->path, path, n) == 0)
                return r;
    return NULL;
}

static void check_answer(const ferry__exchange *x)
{
    unsigned int code = x->status == 0 ? 200 : x->status;
    json_t *value =
        json_loadb(x->reply.data, x->reply.length, JSON_ALLOW_NUL, NULL);

    must(value != NULL);
    json_decref(value);
    must(code == 200 || (code >= 400 && code < 500) || code == 501 ||
         code == 503);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const uint8_t *end = size > 0 ? memchr(data, '\n', size) : NULL;
    ferry__exchange x = {.server = &server, .status = 200};
    const ferry__route *route;
    char *body;

    if (end == NULL)
        return 0;
    route = route_of((const char *)data, (size_t)(end - data));
    if (route == NULL)
        return 0;
    prepare();
    x.body_size = size - (size_t)(end - data) - 1;
    body = malloc(x.body_size + 1); /* exactly, so that an overrun shows */
    must(body != NULL);
    memcpy(body, end + 1, x.body_size);
    body[x.body_size] = '\0';
    x.body = body;
    route->handler(&x);
    check_answer(&x);
    ferry__str_free(&x.reply);
    free(body);
    /* As it was before: no round, no pause. */
    (void)ferry__control_abort(&server);
    (void)ferry__pause_set(&server, FERRY__PAUSE_NONE, false);
    return 0;
}
