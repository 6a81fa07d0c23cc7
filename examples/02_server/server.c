/* SPDX-License-Identifier: Apache-2.0 */
/* The smallest complete server: a model of two stored parameters, one fused
 * of three, whose weights a trainer replaces over HTTP while it runs.
 *   server     prints its address, then some weights after each round */
#include <arpa/inet.h>
#include <ferry/ferry.h>
#include <jansson.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HIDDEN = 8, KV = 4, ROWS = HIDDEN + 2 * KV };

/* ---- the model table: what is stored, and how checkpoint names land ---- */

static float qkv[ROWS][HIDDEN], norm[HIDDEN];
static const ferry_param params[2] = {
    {"qkv", FERRY_DTYPE_F32, 2, {ROWS, HIDDEN}, qkv, 0, 0, 0},
    {"norm", FERRY_DTYPE_F32, 1, {HIDDEN}, norm, 0, 0, 0}};
static const struct {
    const char *name;
    size_t param;
    int64_t row, n_rows; /* in the stored parameter */
} lands[4] = {{"q.weight", 0, 0, HIDDEN},
              {"k.weight", 0, HIDDEN, KV},
              {"v.weight", 0, HIDDEN + KV, KV},
              {"norm.weight", 1, 0, HIDDEN}};

static ferry_status load(void *self, ferry_loader *loader, const char *name,
                         const ferry_tensor *tensor)
{
    ferry_tensor slot;

    (void)self;
    for (size_t i = 0; i < 4; i++) {
        if (strcmp(name, lands[i].name) != 0)
            continue;
        FERRY_TRY(ferry_loader_slot(loader, lands[i].param, &slot));
        FERRY_TRY(ferry_tensor_narrow(&slot, 0, lands[i].row, lands[i].n_rows,
                                      &slot));
        FERRY_TRY(ferry_loader_expect(loader, tensor, slot.ndim, slot.shape));
        return ferry_load_copy(loader, &slot, tensor);
    }
    return ferry_fail(FERRY_EUNKNOWN, "unknown parameter %s", name);
}

/* ---- the four calls: each route's dict goes to the worker as it came ---- */

static ferry_status call(ferry_worker *worker, const char *route, json_t *body)
{
    json_t *label = json_object_get(body, "weight_version");
    const char *version = json_string_value(label);
    int init = strcmp(route, "/init_weight_transfer_engine") == 0;
    json_t *info = json_object_get(body, init ? "init_info" : "update_info");
    char *dict = json_dumps(info, JSON_COMPACT); /* NULL: no such key */
    ferry_status st;

    if (init)
        st = ferry_worker_init_transfer_engine(worker, dict ? dict : "");
    else if (strcmp(route, "/start_weight_update") == 0)
        st = ferry_worker_start_weight_update(worker);
    else if (strcmp(route, "/update_weights") == 0)
        st = ferry_worker_update_weights(worker, dict ? dict : "");
    else if (strcmp(route, "/finish_weight_update") == 0)
        st = ferry_worker_finish_weight_update(worker, version);
    else
        st = ferry_fail(FERRY_EROUTE, "no route %s", route);
    if (st == FERRY_OK && strcmp(route, "/finish_weight_update") == 0)
        printf("%s: q %g, k %g, v %g, norm %g\n", version ? version : "-",
               qkv[0][0], qkv[HIDDEN][0], qkv[HIDDEN + KV][0], norm[0]);
    free(dict);
    return st;
}

/* As little HTTP as will do; a real server brings its own. */
static void answer(ferry_worker *worker, FILE *in)
{
    static char line[4096], route[128], text[1 << 20];
    size_t length = 0;

    if (!fgets(line, sizeof(line), in) || sscanf(line, "%*s %127s", route) < 1)
        return;
    while (fgets(line, sizeof(line), in) && line[0] != '\r')
        sscanf(line, "Content-Length: %zu", &length);
    length = fread(text, 1, length < sizeof(text) ? length : 0, in);
    json_t *body = json_loadb(text, length, 0, NULL);
    ferry_status st = call(worker, route, body);
    json_t *reply = json_pack("{s:s}", st ? "detail" : "message",
                              st ? ferry_last_error() : "done");
    int code = st == FERRY_OK ? 200 : (st == FERRY_EROUTE ? 404 : 500);
    dprintf(fileno(in), "HTTP/1.1 %d -\r\nConnection: close\r\n\r\n", code);
    json_dumpfd(reply, fileno(in), JSON_COMPACT);
    json_decref(reply);
    json_decref(body);
}

int main(void)
{
    const ferry_model model = {sizeof(model), "tiny", NULL, params, 2,
                               NULL,          0,      load, NULL,   NULL};
    ferry_worker_options options = FERRY_WORKER_OPTIONS_INIT("ipc");
    struct sockaddr_in at = {.sin_family = AF_INET};
    socklen_t size = sizeof(at);
    ferry_worker *worker = NULL;
    int listener = socket(AF_INET, SOCK_STREAM, 0);

    signal(SIGPIPE, SIG_IGN);
    setvbuf(stdout, NULL, _IOLBF, 0);
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (bind(listener, (struct sockaddr *)&at, size) || listen(listener, 8) ||
        getsockname(listener, (struct sockaddr *)&at, &size) ||
        ferry_worker_create(&options, &model, NULL, &worker) != FERRY_OK)
        return fprintf(stderr, "server: %s\n", ferry_last_error()), 1;
    printf("http://127.0.0.1:%d\n", ntohs(at.sin_port));
    for (FILE *in; (in = fdopen(accept(listener, NULL, NULL), "r")); fclose(in))
        answer(worker, in);
    ferry_worker_destroy(&worker);
    return 1;
}
