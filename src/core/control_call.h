/* SPDX-License-Identifier: Apache-2.0 */
/* The control call in flight, on a helper thread of its own.
 * The thread is started at the first call. Whoever waits looks at it in
 * slices and may walk away: the thread then ends by itself when its call
 * returns. Invariant: nothing here ever waits for a call without a bound. */
#ifndef FERRY_CORE_CONTROL_CALL_H
#define FERRY_CORE_CONTROL_CALL_H

#include <ferry/client.h>
#include <stdbool.h>

typedef enum ferry__call_kind {
    FERRY__CALL_INIT,
    FERRY__CALL_START,
    FERRY__CALL_START_DRAFT,
    FERRY__CALL_UPDATE,
    FERRY__CALL_FINISH,
    FERRY__CALL_PREPARE,
    FERRY__CALL_COMMIT,
    FERRY__CALL_STATUS,
    FERRY__CALL_ABORT,
    FERRY__CALL_WORLD_SIZE
} ferry__call_kind;
const char *ferry__call_name(ferry__call_kind kind);

typedef struct ferry__control_call ferry__control_call;

/* `client` is copied; what it points to must stay while a call runs. */
ferry_status ferry__control_call_create(const ferry_client *client,
                                        const char *thread_name,
                                        ferry__control_call **out);
/* The client, with a table of this layout; what it lacks is NULL. */
const ferry_client *ferry__control_call_client(const ferry__control_call *c);
/* Never blocks: a thread that is still in its call is left to itself. */
void ferry__control_call_destroy(ferry__control_call **call);

/* Starts a call; `text` (NULL is fine) is copied. FERRY_EBUSY: one runs. */
ferry_status ferry__control_call_begin(ferry__control_call *c,
                                       ferry__call_kind kind, const char *text);
/* Whether a call runs or its result was not taken yet. */
bool ferry__control_call_in_flight(ferry__control_call *c);
/* Whether a call runs right now. */
bool ferry__control_call_running(ferry__control_call *c);
ferry__call_kind ferry__control_call_kind_of(ferry__control_call *c);
/* FERRY_EBUSY (no line) while it runs; else its result, with its line; the
 * result stays. No call at all: FERRY_OK. */
ferry_status ferry__control_call_peek(ferry__control_call *c);
/* As peek; the result is taken. */
ferry_status ferry__control_call_poll(ferry__control_call *c);
/* What the last call of its kind answered, once its result was FERRY_OK. */
const char *ferry__control_call_status(const ferry__control_call *c);
int32_t ferry__control_call_workers(const ferry__control_call *c);
/* Waits at most this long for the running call to end; true if it did. */
bool ferry__control_call_wait(ferry__control_call *c, int64_t timeout_ms);
/* Tells the client to end the running call; returns at once. */
void ferry__control_call_cancel(ferry__control_call *c);

#endif
