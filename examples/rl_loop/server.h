/* SPDX-License-Identifier: Apache-2.0 */
/* The inference side: a `ferry serve` of our own, or just its address. */
#ifndef RL_LOOP_SERVER_H
#define RL_LOOP_SERVER_H

#include <ferry/ferry.h>

#include <stdbool.h>
#include <sys/types.h>

typedef struct server_options {
    const char *program; /* path of ferry; NULL: beside this program */
    const char *folder;  /* holds model/config.json; logs go here */
    int32_t tp, dp;
    bool staged; /* a second copy of the weights, swapped in */
} server_options;

typedef struct server {
    pid_t pid; /* 0: not ours */
    char url[512];
} server;

/* Starts `ferry serve` with random weights, which it does not serve until a
 * round has succeeded, and waits until it listens, at most a minute. The
 * server ends with this process, however that ends. FERRY_EIO, FERRY_ETIMEOUT
 * and FERRY_EPEER name its log. */
ferry_status server_start(const server_options *options, server *out);
/* Ends it and waits for that. FERRY_EPEER: it ended badly. A server that is
 * not ours is left alone. */
ferry_status server_stop(server *s);

/* How long the last commit kept generation waiting, in ms; -1 when the server
 * does not say. */
double server_stop_ms(const char *status_json);

#endif
