/* SPDX-License-Identifier: Apache-2.0 */
/* A trainer whose client and engine are bent by the tests; its host is the
 * real one. One scene at a time: the hooks and what was seen are globals. */
#ifndef FERRY_TESTS_TRAINER_RIG_H
#define FERRY_TESTS_TRAINER_RIG_H

#include "harness/toy.h"
#include <ferry/backend.h>
#include <ferry/ferry.h>

#include <stdatomic.h>

/* A client that records its calls and fails or hangs when told. */
typedef struct desk {
    char calls[256]; /* one letter each: i s d u f a, c for cancel */
    char version[32];
    _Atomic bool canceled;
    _Atomic int update_hangs_ms; /* until canceled, at most this long */
    _Atomic int start_status, update_status, init_status;
    int init_delay_ms;
} desk;

extern const ferry_client_ops desk_ops;

/* An engine, "hands", that does what the hooks say: without on_init it inits
 * its peers with {}. Its update calls carry {"x":1}. "delta" is the same for
 * payloads instead of a source. */
typedef ferry_status (*hands_hook)(const ferry_trainer_host *host,
                                   ferry_trainer_context *ctx);

typedef struct hands_init {
    ferry_trainer_init_info base;
    const char *word;
    int32_t number;
} hands_init;

extern hands_hook hands_on_init, hands_on_send;
extern int hands_ends, hands_destroyed;
extern ferry_status hands_ended_with;
extern size_t hands_payload_seen;
extern const hands_init *hands_info_seen;
extern const ferry_trainer_init_type hands_type;

/* Drives the pass. */
ferry_status hands_drive(const ferry_trainer_host *host,
                         ferry_trainer_context *ctx);

/* The same inside one update call, which is waited for. */
ferry_status hands_drive_and_update(const ferry_trainer_host *host,
                                    ferry_trainer_context *ctx);

/* Drives nothing and succeeds. */
ferry_status hands_drive_nothing(const ferry_trainer_host *host,
                                 ferry_trainer_context *ctx);

typedef struct scene {
    desk desk;
    ferry_client client;
    toy_checkpoint *checkpoint;
    ferry_source source;
    ferry_trainer *trainer;
} scene;

/* Resets the hooks; makes a trainer of "hands" unless `info` is NULL. */
void scene_open(scene *s, const char *info);
void scene_close(scene *s);

/* Registers both engines: the set-up of a group of tests. */
int scene_engines(void **state);

#endif
