/* SPDX-License-Identifier: Apache-2.0 */
/* `ferry serve --join URL`: takes the weights that another server serves,
 * which goes on serving meanwhile (J4).
 * Invariant: this server is not ready before every stored parameter of every
 * rank has the digest that the other one gives for it. */
#ifndef FERRY_SERVE_JOIN_H
#define FERRY_SERVE_JOIN_H

#include "serve/server.h"

#include <ferry/client.h>
#include <stdatomic.h>

typedef struct ferry__join {
    ferry__server *server;
    ferry_client client;
    pthread_t thread;
    bool started;
    _Atomic bool stop;
    _Atomic int result; /* 1: under way; else a ferry_status */
    char line[1024];    /* why it failed; written before result */
} ferry__join;

/* Starts the copy on a thread; without --join nothing. */
ferry_status ferry__join_begin(ferry__join *j, ferry__server *s);
/* FERRY_OK while it runs and when it came out well. */
ferry_status ferry__join_check(ferry__join *j);
/* Whether there is nothing to join, or no more. */
bool ferry__join_done(ferry__join *j);
/* Ends it if it runs; waits for the thread. */
void ferry__join_end(ferry__join *j);

#endif
