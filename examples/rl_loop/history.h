/* SPDX-License-Identifier: Apache-2.0 */
/* What every round did, kept for the page and within the checkpoint.
 * One table names the columns, all of them doubles, so that a checkpoint
 * holds the history as one plain tensor. */
#ifndef RL_LOOP_HISTORY_H
#define RL_LOOP_HISTORY_H

#include <ferry/ferry.h>

#define HISTORY_COLUMNS(X)                                                     \
    X(round)      /* 0, 1, ...: trained from version "step-round" */           \
    X(reward)     /* mean of the round's answers */                            \
    X(solved)     /* share of answers that are right in every place */         \
    X(tokens)     /* sampled */                                                \
    X(round_ms)   /* the whole round */                                        \
    X(rollout_ms) /* waiting for answers */                                    \
    X(train_ms)   /* passes, oracle, step */                                   \
    X(sync_ms)    /* pause to resume, as the loop waited for it */             \
    X(start_ms)   /* the update: opening the round */                          \
    X(gather_ms)  /* reading the source */                                     \
    X(pack_ms)    /* filling buffers */                                        \
    X(wire_ms)    /* bytes under way */                                        \
    X(digest_ms)  /* hashing what is sent */                                   \
    X(finish_ms)  /* proof and commit */                                       \
    X(stop_ms)    /* generation stood still; -1 unknown */                     \
    X(bytes)      /* left the trainer, all ranks together */                   \
    X(age_0)      /* tokens by how many versions behind: current */            \
    X(age_1)      /* 1 */                                                      \
    X(age_2)      /* 2 */                                                      \
    X(age_3)      /* 3 and more */                                             \
    X(weighted)   /* off-policy tokens that were weighted */                   \
    X(dropped)    /* off-policy tokens that were left out */                   \
    X(oldest)     /* versions that made tokens: the first */                   \
    X(newest)     /* and the last */                                           \
    X(ratio)      /* mean importance weight */                                 \
    X(checked)    /* tokens that the oracle compared */                        \
    X(drift)      /* largest difference of logprobs */                         \
    X(norm)       /* of the gradient */

typedef struct history_row {
#define HISTORY_FIELD(name) double name;
    HISTORY_COLUMNS(HISTORY_FIELD)
#undef HISTORY_FIELD
} history_row;

#define HISTORY_WIDTH (sizeof(history_row) / sizeof(double))

typedef struct history {
    history_row *rows;
    size_t n, capacity;
} history;

ferry_status history_add(history *h, const history_row *row);
void history_free(history *h);
/* Mean reward of the last `n` rounds. */
double history_reward(const history *h, size_t n);
const char *history_name(size_t column);

#endif
