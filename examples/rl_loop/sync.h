/* SPDX-License-Identifier: Apache-2.0 */
/* Carrying the weights to the server: one trainer engine, one client. */
#ifndef RL_LOOP_SYNC_H
#define RL_LOOP_SYNC_H

#include "history.h"
#include "policy.h"

typedef enum sync_pause {
    SYNC_PAUSE_WAIT, /* answers in flight end first */
    SYNC_PAUSE_KEEP, /* they freeze, and go on after the update */
    SYNC_PAUSE_NONE  /* they go on: the server stages the update */
} sync_pause;

typedef struct sync sync_channel;

/* Opens the `ipc` engine over the policy's weights. */
ferry_status sync_open(const policy *p, const char *url, sync_pause pause,
                       sync_channel **out);
void sync_close(sync_channel **s); /* NULL is fine */

/* Sends all weights as version "step-N" and fills the row's columns of the
 * update. */
ferry_status sync_send(sync_channel *s, int64_t step, history_row *row);

#endif
