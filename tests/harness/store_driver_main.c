/* SPDX-License-Identifier: Apache-2.0 */
/* Drives one end of the rendezvous store for tests against another's.
 *   store_driver_main serve [HOST]      prints the port, ends with its input
 *   store_driver_main client HOST PORT  one command a line, one answer each
 * A failure answers "error STATUS line". */
#include "base/alloc.h"
#include "comm/tcp_store.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define WORDS 16
#define T     10000

static void told(ferry_status status)
{
    if (status < 0)
        printf("error %s %s\n", ferry_status_name(status), ferry_last_error());
    else
        printf("%s\n", status == FERRY_OK ? "ok" : "no");
}

/* Pointers, as the call that fills them is an argument beside them. */
static void told_value(ferry_status status, void **value, const size_t *size)
{
    if (status < 0) {
        told(status);
        return;
    }
    printf("value %.*s\n", (int)*size, *value ? (char *)*value : "");
    ferry__free(*value);
}

static void told_number(ferry_status status, const int64_t *n)
{
    if (status < 0)
        told(status);
    else
        printf("%lld\n", (long long)*n);
}

static void told_there(ferry_status status, const bool *there)
{
    if (status < 0)
        told(status);
    else
        printf("%d\n", *there);
}

static void multi_get(ferry__store *s, char **w, size_t n)
{
    void *values[WORDS];
    size_t sizes[WORDS];
    ferry_status status =
        ferry__store_multi_get(s, (const char *const *)w, n, values, sizes);

    if (status < 0) {
        told(status);
        return;
    }
    printf("values");
    for (size_t i = 0; i < n; i++) {
        printf(" %.*s", (int)sizes[i], (char *)values[i]);
        ferry__free(values[i]);
    }
    printf("\n");
}

static ferry_status multi_set(ferry__store *s, char **w, size_t n)
{
    const char *keys[WORDS];
    const void *values[WORDS];
    size_t sizes[WORDS];

    for (size_t i = 0; i < n / 2; i++) {
        keys[i] = w[2 * i];
        values[i] = w[2 * i + 1];
        sizes[i] = strlen(w[2 * i + 1]);
    }
    return ferry__store_multi_set(s, keys, values, sizes, n / 2);
}

static void obey(ferry__store *s, char **w, size_t n)
{
    const char *const *keys = (const char *const *)w + 1;
    void *value = NULL;
    size_t size = 0;
    int64_t number = 0;
    bool there = false;

    if (strcmp(w[0], "set") == 0)
        told(ferry__store_set(s, w[1], w[2], strlen(w[2])));
    else if (strcmp(w[0], "append") == 0)
        told(ferry__store_append(s, w[1], w[2], strlen(w[2])));
    else if (strcmp(w[0], "get") == 0)
        told_value(ferry__store_get(s, w[1], T, &value, &size), &value, &size);
    else if (strcmp(w[0], "add") == 0)
        told_number(ferry__store_add(s, w[1], atoll(w[2]), &number), &number);
    else if (strcmp(w[0], "check") == 0)
        told(ferry__store_check(s, keys, n - 1));
    else if (strcmp(w[0], "wait") == 0) /* wait MS KEY… */
        told(ferry__store_wait(s, keys + 1, n - 2, atoll(w[1])));
    else if (strcmp(w[0], "delete") == 0)
        told_there(ferry__store_delete(s, w[1], &there), &there);
    else if (strcmp(w[0], "cas") == 0)
        told_value(ferry__store_compare_set(s, w[1],
                                            strcmp(w[2], "-") ? w[2] : "", w[3],
                                            &value, &size),
                   &value, &size);
    else if (strcmp(w[0], "mget") == 0)
        multi_get(s, w + 1, n - 1);
    else if (strcmp(w[0], "mset") == 0)
        told(multi_set(s, w + 1, n - 1));
    else if (strcmp(w[0], "num") == 0)
        told_number(ferry__store_num_keys(s, &number), &number);
    else if (strcmp(w[0], "join") == 0)
        told_number(ferry__store_join(s, &number), &number);
    else if (strcmp(w[0], "joined") == 0)
        told(ferry__store_await_joined(s, atoi(w[1]), T));
    else
        printf("unknown %s\n", w[0]);
}

static int client(const char *host, int32_t port)
{
    ferry__store *s = NULL;
    char line[4096];

    if (ferry__store_open(host, port, T, &s) < 0) {
        printf("error %s\n", ferry_last_error());
        return 1;
    }
    printf("open\n");
    fflush(stdout);
    while (fgets(line, sizeof(line), stdin)) {
        char none[] = "", *words[WORDS] = {none, none, none, none};
        char *at = line;
        size_t n = 0;

        for (char *word; n < WORDS && (word = strtok_r(at, " \n", &at));)
            words[n++] = word;
        if (n > 0)
            obey(s, words, n);
        fflush(stdout);
    }
    ferry__store_close(&s);
    return 0;
}

static int serve(const char *host)
{
    ferry__store_server *server = NULL;
    char byte;
    int32_t port;

    if (ferry__store_serve(host, 0, &port, &server) < 0) {
        printf("error %s\n", ferry_last_error());
        return 1;
    }
    printf("%d\n", port);
    fflush(stdout);
    while (read(0, &byte, 1) > 0)
        continue;
    ferry__store_server_close(&server);
    return 0;
}

int main(int argc, char **argv)
{
    if (argc >= 2 && strcmp(argv[1], "serve") == 0)
        return serve(argc > 2 ? argv[2] : "127.0.0.1");
    if (argc == 4 && strcmp(argv[1], "client") == 0)
        return client(argv[2], atoi(argv[3]));
    fprintf(stderr, "usage: store_driver_main serve|client …\n");
    return 2;
}
