/* SPDX-License-Identifier: Apache-2.0 */
/* The command line. */
#ifndef RL_LOOP_OPTIONS_H
#define RL_LOOP_OPTIONS_H

#include <ferry/ferry.h>

#include <stdbool.h>

typedef struct options {
    const char *folder;  /* checkpoint, page, logs */
    const char *url;     /* NULL: a server of our own */
    const char *program; /* path of ferry; NULL: found */
    uint64_t seed;
    int32_t rounds;
    int32_t prompts, group; /* a round's prompts; answers to each */
    int32_t tp, dp;
    int32_t threads;
    int32_t save_every; /* rounds between checkpoints; 0: never */
    int32_t spoil;      /* round after which a weight is changed; -1 */
    double target;      /* reward to end at; 0: all rounds */
    double rate, entropy, discount;
    bool asynchronous, staged, no_sync, resume, quiet, self_test, help;
} options;

/* FERRY_EINVAL names the option and what it takes. */
ferry_status options_read(int argc, char **argv, options *out);
const char *options_usage(void);

#endif
